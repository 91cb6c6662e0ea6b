//! Long nodes are divided into launches between which a turn can end.

use std::sync::Arc;
use std::time::Duration;

use vgpu_check::model::{Model, StepShape, TINY, TINY_EXPERTS};
use vgpu_cuda::LaunchPolicy;
use vgpu_engine::work::{self, TooMuchWork};
use vgpu_engine::{Engine, EngineError, RunStatus, Turn};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Shape, Sources, Tensor, Type, validate,
};

use crate::engine_with;
use crate::spy::{Spy, launched};

/// One launch after the other, and nodes in parts of at most this time by estimate.
fn policy(longest: Duration) -> LaunchPolicy {
    LaunchPolicy {
        time_slice: Duration::ZERO,
        longest_launch: longest,
        min_graph_launches: usize::MAX,
        ..LaunchPolicy::default()
    }
}

/// What a step of a model computes, the number of its launches, and of the turns that it takes if
/// each is over at once.
fn step(model: Model, longest: Duration) -> (Vec<f32>, usize, usize) {
    let built = model.graph(StepShape {
        tokens: 48,
        seen: 64,
    });
    let device = Arc::new(Spy::running());
    let engine = engine_with(&device, policy(longest));
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    built.write_inputs(&loaded, 0);
    device.take_log();
    let turn = Turn::new();
    turn.set_end(Some(Duration::ZERO));
    let mut turns = 1;
    while plan.launch(&turn).expect("it runs") == RunStatus::Yielded {
        turns += 1;
    }
    plan.wait().expect("it ends");
    let launches = launched(&device.take_log()).len();
    (built.read_result(&loaded), launches, turns)
}

#[test]
fn turns_end_between_the_parts_of_long_nodes() {
    for model in [TINY, TINY_EXPERTS] {
        let (whole, launches, turns) = step(model, Duration::MAX);
        // Products of this model take up to some hundred nanoseconds by estimate.
        let (parts, more_launches, more_turns) = step(model, Duration::from_nanos(200));
        println!("{launches} launches, {turns} turns; {more_launches}, {more_turns}");
        assert!(more_launches >= launches + 20 && more_turns >= turns + 10);
        let square = |x: f32| f64::from(x) * f64::from(x);
        let difference: f64 = { parts.iter().zip(&whole) }
            .map(|(a, b)| square(a - b))
            .sum();
        let all: f64 = whole.iter().map(|&x| square(x)).sum();
        assert!(all > 0.0 && difference / all < 1e-3, "{}", difference / all);
    }
}

/// The turns of the second run of a plan, of which the first one has shown that it is short. Each
/// turn is over at once.
fn turns_after_a_short_run(longest: Duration) -> usize {
    let built = TINY.graph(StepShape {
        tokens: 48,
        seen: 64,
    });
    let device = Arc::new(Spy::running());
    let policy = LaunchPolicy {
        time_slice: Duration::from_secs(3600),
        ..policy(longest)
    };
    let engine = engine_with(&device, policy);
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    built.write_inputs(&loaded, 0);
    while plan.launch(&Turn::new()).expect("it runs") == RunStatus::Yielded {}
    plan.wait().expect("it ends");
    let over = Turn::new();
    over.set_end(Some(Duration::ZERO));
    let mut turns = 1;
    while plan.launch(&over).expect("it runs") == RunStatus::Yielded {
        turns += 1;
    }
    plan.wait().expect("it ends");
    turns
}

#[test]
fn a_turn_ends_after_a_part_of_a_long_node_whatever_earlier_runs_took() {
    assert_eq!(turns_after_a_short_run(Duration::MAX), 1);
    let turns = turns_after_a_short_run(Duration::from_nanos(200));
    assert!(turns >= 20, "{turns} turns");
}

#[test]
fn a_graph_of_too_many_parts_is_refused() {
    let built = TINY.graph(StepShape {
        tokens: 48,
        seen: 64,
    });
    let device = Arc::new(Spy::running());
    let engine = engine_with(&device, policy(Duration::from_nanos(1)));
    let loaded = built.load(&engine);
    let size = |buffer: vgpu_transport::ir::BufferId| {
        let at = built
            .graph
            .buffers
            .iter()
            .position(|&other| other == buffer)?;
        Some(loaded.buffers[at].size())
    };
    let graph = built.graph.clone();
    let valid = validate(graph, engine.capabilities(), &Limits::default(), size).expect("valid");
    let refused = engine.compile(&valid, &loaded.buffers, &|| false);
    let Err(EngineError::Unsupported { why, .. }) = refused.map(|_| ()) else {
        panic!("it was compiled");
    };
    let limit = 2 * built.graph.nodes.len() + 128;
    assert!(why.contains(&format!("more than {limit} in all")), "{why}");
}

/// A graph of one node, whose operands lie in buffers of their own.
fn single(op: Op, dst: [u64; 4], src: &[[u64; 4]]) -> Graph {
    let all = src.iter().copied().chain([dst]).enumerate();
    Graph {
        buffers: (0..=src.len() as u64).map(BufferId).collect(),
        tensors: all
            .map(|(i, ne)| Tensor {
                shape: Shape::contiguous(Type::F32, ne).expect("a small shape"),
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

/// Nodes of thousands of parts, which the limits of a configuration may admit.
#[test]
fn a_node_of_too_few_rows_for_its_parts_is_refused_with_its_numbers() {
    let device = Arc::new(Spy::running());
    let policy = LaunchPolicy {
        longest_whole: Duration::from_nanos(2),
        ..policy(Duration::from_nanos(1))
    };
    let engine = engine_with(&device, policy);
    let check = |graph: &Graph| {
        let speed = |node: &Node| engine.speed_of(graph, node);
        let launches = |node: &Node, estimate| engine.launches_of(graph, node, estimate);
        work::check_nodes(graph, 0..1, speed, launches, Duration::MAX)
    };
    let softmax = |rows| {
        let op = Op::SoftMax {
            scale: 1.0,
            max_bias: 0.0,
        };
        single(op, [1 << 12, rows, 1, 1], &[[1 << 12, rows, 1, 1]])
    };
    // A row takes more than 2 ns by estimate, and parts of several rows cannot be shorter.
    let refused = |graph: &Graph, rows| match check(graph) {
        Err(TooMuchWork::Launch {
            launches, estimate, ..
        }) => {
            assert_eq!(launches, rows);
            assert!(estimate > Duration::from_nanos(2 * rows));
        }
        other => panic!("{rows} rows: {other:?}"),
    };
    for rows in [3, 2047, 2048, 3000, 4096, 5000] {
        refused(&softmax(rows), rows);
    }
    // A share of a triangle has at least the terms of the longest row: half as many as rows.
    let triangle = |n| {
        single(
            Op::SolveTri {},
            [512, n, 1, 1],
            &[[n, n, 1, 1], [512, n, 1, 1]],
        )
    };
    refused(&triangle(9000), 4500);
    // An element takes a fraction of a nanosecond: as many parts as are wanted.
    let scale = Op::Scale {
        scale: 1.0,
        bias: 0.0,
    };
    let many = single(scale, [1, 1 << 20, 1, 1], &[[1, 1 << 20, 1, 1]]);
    let found = check(&many).expect("short launches").expect("a node");
    assert!(found.estimate > Duration::from_nanos(2 * 4096));
}
