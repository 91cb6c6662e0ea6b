//! The estimated work of every operator, beside loops that count what the operator's definition
//! does.

#[path = "../../../transport/tests/common/ops.rs"]
mod ops;
#[path = "../../../transport/tests/common/samples.rs"]
mod samples;

use std::time::Duration;

use ops::{Sliding, slide};
use samples::{Sample, f32, sample, typed, usual_op};
use vgpu_engine::work::{self, PartKind, Speed, TooMuchWork, Work};
use vgpu_transport::ir::{
    BufferId, Graph, Node, Op, OpKind, Shape, SortOrder, Sources, Tensor, Type, check,
};

/// How much the estimate may differ from the count, either way. Estimates count the padding of
/// convolutions, and a step as one whatever it computes.
const FACTOR: u64 = 4;

/// A graph of this node.
fn graph(op: Op, dst: Shape, src: &[Shape]) -> Graph {
    let all = src.iter().copied().chain([dst]).enumerate();
    Graph {
        buffers: (0..=src.len() as u64).map(BufferId).collect(),
        tensors: all
            .map(|(i, shape)| Tensor {
                shape,
                buffer: i as u32,
                offset: 0,
            })
            .collect(),
        nodes: vec![Node {
            op,
            dst: src.len() as u32,
            src: Sources::new((0..src.len() as u32).map(Some)),
        }],
    }
}

fn estimate(op: Op, dst: Shape, src: &[Shape]) -> Work {
    let graph = graph(op, dst, src);
    work::of(&graph, &graph.nodes[0])
}

impl Sample {
    fn estimate(&self) -> Work {
        estimate(self.op, self.dst, &self.src)
    }
}

#[test]
fn every_operator_has_an_estimate_near_what_its_definition_does() {
    for &kind in OpKind::ALL {
        for s in 1..=3 {
            let sample = sample(kind, s);
            assert_eq!(sample.op.kind(), kind);
            let shapes: Vec<Option<&Shape>> = sample.src.iter().map(Some).collect();
            if kind != OpKind::FlashAttnBack {
                check(&sample.op, &sample.dst, &shapes)
                    .unwrap_or_else(|error| panic!("the sample is wrong: {error}"));
            }
            let Work {
                products,
                steps,
                bytes,
                part,
                ..
            } = sample.estimate();
            let (work, count) = (products + steps, sample.count);
            assert!(
                count <= FACTOR * work && work <= FACTOR * count,
                "{kind:?} of size {s}: estimate {work}, count {count}"
            );
            assert!(
                bytes > 0 && (1..=64 * work).contains(&part),
                "{kind:?}: {bytes}, {part}"
            );
        }
    }
}

#[test]
fn a_larger_operation_is_more_work() {
    for &kind in OpKind::ALL {
        let works: Vec<Work> = (1..=4).map(|s| sample(kind, s).estimate()).collect();
        for pair in works.windows(2) {
            assert!(
                pair[0].products + pair[0].steps < pair[1].products + pair[1].steps,
                "{kind:?}"
            );
            assert!(
                pair[0].bytes < pair[1].bytes && pair[0].part <= pair[1].part,
                "{kind:?}"
            );
            let speed = Speed::default();
            assert!(pair[0].time(&speed) < pair[1].time(&speed), "{kind:?}");
        }
    }
}

#[test]
fn estimates_saturate() {
    let huge = Shape {
        ty: Type::F32,
        ne: [1 << 40, 1 << 20, 1, 1],
        nb: [4, 0, 0, 0],
    };
    let dst = Shape {
        ne: [1 << 20, 1 << 20, 1, 1],
        ..huge
    };
    let work = estimate(usual_op(OpKind::MulMat), dst, &[huge, huge]);
    assert_eq!(work.products, u64::MAX);
    assert!(work.time(&Speed::default()) > Duration::from_secs(3600));
}

fn checked(op: Op, dst: Shape, src: &[Shape]) -> Result<(), TooMuchWork> {
    let limit = Duration::from_secs(3600);
    work::check(&graph(op, dst, src), |_| Speed::default(), limit).map(drop)
}

/// Pooling of an image of 4096 by 4096: windows with sides of `side`, `pooled` results a side.
fn pooling(side: i32, padding: i32, pooled: u64) -> TooMuchWork {
    let mut sliding = Sliding {
        window: [side; 2],
        ..Sliding::default()
    };
    sliding.geometry.padding = [padding; 3];
    let op = slide(OpKind::Pool2d, &sliding).expect("pooling");
    let image = f32([4096, 4096, 1, 1]);
    checked(op, f32([pooled, pooled, 1, 1]), &[image]).expect_err("hours of work")
}

#[test]
fn pooling_that_takes_hours_is_refused_with_its_numbers() {
    let error = pooling(512, 0, 3585);
    let steps = 3585u64.pow(2) * 512u64.pow(2);
    let text = error.to_string();
    assert!(
        matches!(&error, TooMuchWork::Time { node: 0, op: "POOL_2D", work, .. }
            if work.steps == steps),
        "{error:?}"
    );
    assert!(
        text.contains(&steps.to_string()) && text.contains("3600s"),
        "{text}"
    );
    // A window that covers the whole image: months of work, and no part of it can be divided.
    assert_eq!(
        pooling(32768, 16383, 4095).to_string(),
        "node 0 (POOL_2D) has a part of 16777216 steps of a window that cannot be divided, the \
         limit is 262144"
    );
}

#[test]
fn a_part_that_cannot_be_divided_has_a_limit() {
    let row = |n: u64| {
        checked(
            Op::RmsNorm { eps: 0.1 },
            f32([n, 1, 1, 1]),
            &[f32([n, 1, 1, 1])],
        )
    };
    let most = PartKind::Row.limit();
    assert_eq!(row(most), Ok(()));
    let error = row(most + 1).expect_err("too long");
    assert!(
        error
            .to_string()
            .contains("a part of 4194305 steps of a row"),
        "{error}"
    );
    let product = |k: u64| {
        let matrix = f32([k, 16, 1, 1]);
        checked(
            usual_op(OpKind::MulMat),
            f32([16, 16, 1, 1]),
            &[matrix, matrix],
        )
    };
    let most = PartKind::Tile.limit() / 256;
    assert_eq!(product(most), Ok(()));
    let error = product(most + 1).expect_err("too long");
    assert!(
        error
            .to_string()
            .contains("a part of 67109120 multiply-adds"),
        "{error}"
    );
    // A product of fewer rows reads as many activations.
    let row = |k: u64| {
        let src = [f32([k, 1, 1, 1]), f32([k, 16, 1, 1])];
        checked(usual_op(OpKind::MulMat), f32([1, 16, 1, 1]), &src)
    };
    assert_eq!(row(most), Ok(()));
    assert!(row(most + 1).is_err());
    // Elements in different cache lines and pages are waited for.
    let strided = |n: u64, gap: u64| {
        let mut row = f32([n, 1, 1, 1]);
        row.nb = [gap, gap * n, gap * n, gap * n];
        checked(Op::RmsNorm { eps: 0.1 }, f32([n, 1, 1, 1]), &[row])
    };
    let most = PartKind::Row.limit();
    let gaps = [
        (4, 1),
        (8, 1),
        (64, 16),
        (1024, 160),
        (4096, 640),
        (65536, 2560),
        (112 << 10, 4096),
        (1 << 22, 4096),
    ];
    for (gap, steps) in gaps {
        assert_eq!(strided(most / steps, gap), Ok(()), "{gap}");
        let error = strided(most / steps + 1, gap).expect_err("too long");
        let part = (most / steps + 1) * steps;
        let part = format!("a part of {part} steps of a row");
        assert!(error.to_string().contains(&part), "{error}");
    }
    // Sums of tensors of any length are divided.
    assert_eq!(
        checked(Op::Sum {}, f32([1; 4]), &[f32([1 << 30, 1, 1, 1])]),
        Ok(())
    );
}

#[test]
fn parts_count_all_that_a_kernel_does_at_once() {
    let part = |op: Op, dst: Shape, src: &[Shape]| estimate(op, dst, src).part;
    // 256 elements of all streams, each of which may be in a page of its own.
    let pre = |n: u64, streams: u64| {
        let src = [f32([n, streams, 8, 1]), f32([streams, 8, 1, 1])];
        part(usual_op(OpKind::Dsv4HcPre), f32([n, 8, 1, 1]), &src)
    };
    assert_eq!(pre(4096, 4), 4 * 256);
    assert_eq!(pre(4096, 1 << 14), 1 << 22);
    assert_eq!(pre(1, 1 << 14), 1 << 22);
    let post = |n: u64, streams: u64| {
        let rows = f32([n, streams, 8, 1]);
        let src = [f32([n, 8, 1, 1]), rows, f32([streams, 8, 1, 1])];
        part(Op::Dsv4HcPost {}, rows, &src)
    };
    assert_eq!(post(4096, 4), 5 * 256);
    assert_eq!(post(1, 1 << 14), 256 * ((1 << 14) + 1));
    // 128 keys are converted, and multiplied with each head.
    let indexer = |heads: u64| {
        let src = [
            f32([4096, heads, 2, 1]),
            typed(Type::Q3K, [4096, 1, 512, 1]),
            f32([heads, 2, 1, 1]),
            typed(Type::F16, [512, 2, 1, 1]),
        ];
        part(Op::LightningIndexer {}, f32([512, 2, 1, 1]), &src)
    };
    assert_eq!(indexer(1), 128 * 4096 * 9);
    assert_eq!(indexer(64), 128 * 4096 * 72);
    // A row is sorted at once, up to a length.
    let sort = |n: u64, gap: u64| {
        let mut from = f32([n, 4, 1, 1]);
        from.nb = [gap, gap * n, gap * n * 4, gap * n * 4];
        let to = typed(Type::I32, [n, 4, 1, 1]);
        let order = SortOrder::Ascending;
        part(Op::Argsort { order }, to, &[from])
    };
    assert_eq!(sort(1000, 4), 1000);
    assert_eq!(sort(1000, 4096), 640_000);
    assert_eq!(sort(1 << 20, 4), 1 << 18);
    // A permuted image of any size can be converted.
    let converted = |ty: Type, gap: u64| {
        let mut from = f32([4, 4096, 4096, 1]);
        from.nb = [gap, 4, 4 * 4096, 4 * gap];
        part(Op::Copy {}, typed(ty, [4, 4096, 4096, 1]), &[from])
    };
    assert_eq!(converted(Type::F16, 4096), 1024 * 640);
    assert_eq!(converted(Type::F16, 4096 * 4096 * 4), PartKind::Row.limit());
    // Each row of a window may be in a page of its own.
    let pool = |window: [i32; 2]| {
        let sliding = Sliding {
            window,
            ..Sliding::default()
        };
        let op = slide(OpKind::Pool2d, &sliding).expect("pooling");
        part(op, f32([512, 512, 1, 1]), &[f32([1024, 1024, 1, 1])])
    };
    assert_eq!(pool([7, 7]), 7 * 16);
    assert_eq!(pool([1, 512]), 512 * 16);
    assert_eq!(pool([512, 512]), 512 * 512);
}

#[test]
fn steps_that_follow_each_other_take_time_on_a_fast_device() {
    // A GPU, which needs 2 µs for a step.
    let gpu = Speed {
        products: 1e12,
        steps: 1e12,
        bytes: 1e12,
        in_order: 5e5,
    };
    let scan = |tokens: u64, heads: u64, state: u64| {
        let (x, b) = ([1, heads, tokens, 1], f32([state, 1, tokens, 1]));
        let src = [
            f32([state, 1, heads, 1]),
            f32(x),
            f32([heads, tokens, 1, 1]),
            f32([1, heads, 1, 1]),
            b,
            b,
            typed(Type::I32, [1; 4]),
        ];
        let results = heads * (tokens + state);
        let dst = f32([results, 1, 1, 1]);
        estimate(Op::SsmScan { snapshots: 1 }, dst, &src).time(&gpu)
    };
    // The rows of a state are computed at once, its tokens one after the other.
    let time = scan(1000, 4, 32);
    assert_eq!(time, Duration::from_millis(2));
    assert_eq!(scan(1000, 64, 32), time);
    assert_eq!(scan(4000, 4, 32), 4 * time);
    assert_eq!(scan(1000, 4, 128), 4 * time);
    let solve = |n: u64, columns: u64| {
        let [a, b] = [[n, n, 1, 1], [columns, n, 1, 1]].map(f32);
        estimate(Op::SolveTri {}, b, &[a, b]).time(&gpu)
    };
    assert_eq!(solve(64, 64), solve(64, 1));
    assert_eq!(solve(1000, 1), Duration::from_millis(125));
    // Other operators have no such steps, and the CPU engine does not wait for them.
    let rows = f32([1000, 1000, 1, 1]);
    let work = estimate(usual_op(OpKind::MulMat), rows, &[rows, rows]);
    assert_eq!(work.in_order, 0);
    assert_eq!(Speed::default().in_order, f64::INFINITY);
}

#[test]
fn the_largest_products_of_models_are_within_the_default_limit() {
    let dense = |k: u64, rows: u64, columns: u64| {
        let weights = typed(Type::Q4_0, [k, rows, 1, 1]);
        checked(
            usual_op(OpKind::MulMat),
            f32([rows, columns, 1, 1]),
            &[weights, f32([k, columns, 1, 1])],
        )
    };
    // On one thread without vector instructions, 4096 tokens of Llama 70B need 32 minutes for the
    // feed-forward matrix. A batch of llama.cpp has 512 tokens, and asks for one row of logits.
    let slowest = Speed::default();
    assert_eq!(dense(8192, 28672, 4096), Ok(()), "{slowest:?}");
    assert_eq!(dense(8192, 128_256, 512), Ok(()));
    assert_eq!(dense(53248, 16384, 512), Ok(()), "Llama 405B");
    let attention = usual_op(OpKind::FlashAttnExt);
    let (q, kv) = (
        f32([128, 512, 64, 1]),
        typed(Type::F16, [128, 131_072, 8, 1]),
    );
    let outcome = checked(attention, f32([128, 64, 512, 1]), &[q, kv, kv]);
    assert_eq!(outcome, Ok(()), "131,072 tokens of context");
}
