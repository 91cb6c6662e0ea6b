//! What graphs cost at least.

use vgpu_check::model::{Model, StepShape, TINY, TINY_EXPERTS};
use vgpu_engine::roofline::*;
use vgpu_transport::ir::Type;

fn total(model: Model, step: StepShape) -> Cost {
    of(&model.graph(step).graph).into_iter().sum()
}

#[test]
fn dense_step_reads_each_weight_once() {
    let step = StepShape {
        tokens: 1,
        seen: 32,
    };
    let built = TINY.graph(step);
    let cost: Cost = of(&built.graph).into_iter().sum();
    // By hand: all matrices but the table, of which one row is read; norms; the cache as far as it
    // is seen and the new rows; inputs; the logits.
    let (width, inner, vocabulary, kv) = (64, 96, 40, 32);
    let q8_0 = |elements: u64| elements / 32 * 34;
    let layer = 2 * width * width + 2 * width * kv + 3 * width * inner;
    let weights = q8_0(2 * layer + width * vocabulary + width);
    let norms = 4 * width * 5;
    let cache = 2 * 2 * 2 * kv * (32 + 1);
    let inputs = 4 + 4 + 8 + 2 * 32;
    assert_eq!(
        cost.memory,
        weights + norms + cache + inputs + 4 * vocabulary
    );
    let products = 2 * (2 * layer + width * vocabulary);
    let attention = 2 * 2 * 2 * 32 * (32 + 32);
    assert!(cost.operations > products + attention);
    assert!(
        cost.operations < products + attention + 100 * width,
        "the rest is little"
    );
}

#[test]
fn more_tokens_add_operations_but_no_weight_reads() {
    let one = total(
        TINY,
        StepShape {
            tokens: 1,
            seen: 32,
        },
    );
    let many = total(
        TINY,
        StepShape {
            tokens: 16,
            seen: 32,
        },
    );
    let weights = one.memory;
    assert!(many.memory < weights + 16 * 4 * 64 * 4, "{many:?}");
    assert!(many.operations > 15 * one.operations);
}

#[test]
fn expert_reads_are_bounded_by_the_selections_of_the_tokens() {
    // Three matrices of an expert, two of four experts for a token.
    let expert = 3 * 64 * 96 / 32 * 34;
    let one = total(
        TINY_EXPERTS,
        StepShape {
            tokens: 1,
            seen: 32,
        },
    );
    let two = total(
        TINY_EXPERTS,
        StepShape {
            tokens: 2,
            seen: 32,
        },
    );
    let four = total(
        TINY_EXPERTS,
        StepShape {
            tokens: 4,
            seen: 32,
        },
    );
    let rest = 4000;
    let layers = 2;
    assert!((two.memory - one.memory).abs_diff(layers * 2 * expert) < rest);
    assert!(
        (four.memory - two.memory) < rest,
        "there are no more than four"
    );
}

#[test]
fn roofline_time_is_the_maximum_of_memory_and_compute_time() {
    let cost = Cost {
        memory: 1000,
        cached: 1 << 40,
        operations: 10_000,
    };
    let slow_memory = Rates {
        memory: 1e3,
        operations: 1e9,
    };
    assert_eq!(cost.floor(&slow_memory), 1.0);
    assert!(cost.is_bound_by_memory(&slow_memory));
    let slow_units = Rates {
        memory: 1e9,
        operations: 1e3,
    };
    assert_eq!(cost.floor(&slow_units), 10.0);
    assert!(!cost.is_bound_by_memory(&slow_units));
}

#[test]
fn labels_name_operator_and_type() {
    let built = TINY.graph(StepShape {
        tokens: 1,
        seen: 32,
    });
    let labels: Vec<String> = { built.graph.nodes.iter() }
        .map(|node| label(&built.graph, node))
        .collect();
    for wanted in [
        "MUL_MAT q8_0",
        "FLASH_ATTN_EXT f16",
        "GET_ROWS q8_0",
        "RMS_NORM",
    ] {
        assert!(
            labels.iter().any(|label| label == wanted),
            "{wanted} of {labels:?}"
        );
    }
    assert_eq!(TINY.weights, Type::Q8_0);
}
