//! The memory that ggml's CPU backend allocates for itself while it computes: a plan announces at
//! least as much. A process of its own, since the address space of the process is measured.

#[path = "../../../tests/common/mod.rs"]
mod common;
mod graphs;
mod products;

use std::fs;

use graphs::PRODUCT;
use products::start;
use vgpu_engine::{Engine, RunStatus, Turn};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Precision, Shape, Sources, Tensor, Type, ValidGraph,
    validate,
};

/// Bytes of each buffer.
const SIZE: u64 = 32 << 20;

/// The address space of this process.
fn address_space() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    pages * 4096
}

/// A node over these shapes, each in a buffer of its own, the last one the result.
fn graph(engine: &dyn Engine, op: Op, shapes: &[Shape]) -> ValidGraph {
    let count = shapes.len() as u32;
    let graph = Graph {
        buffers: (1..=u64::from(count)).map(BufferId).collect(),
        tensors: (0..)
            .zip(shapes)
            .map(|(buffer, &shape)| Tensor {
                shape,
                buffer,
                offset: 0,
            })
            .collect(),
        nodes: vec![Node {
            op,
            dst: count - 1,
            src: Sources::new((0..count - 1).map(Some)),
        }],
    };
    validate(graph, engine.capabilities(), &Limits::default(), |_| {
        Some(SIZE)
    })
    .unwrap()
}

/// What the plan of a node announces, and by how much the address space grows when it runs.
fn announced_and_taken(engine: &dyn Engine, op: Op, shapes: &[Shape]) -> (u64, u64) {
    let memory: Vec<_> = { shapes.iter() }
        .map(|_| engine.alloc(SIZE).unwrap())
        .collect();
    let graph = graph(engine, op, shapes);
    let mut plan = engine.compile(&graph, &memory, &|| false).unwrap();
    plan.allocate().unwrap();
    let announced = plan.working_bytes();
    let before = address_space();
    assert_eq!(plan.launch(&Turn::new()), Ok(RunStatus::Done));
    let taken = address_space().saturating_sub(before);
    println!("{}: {taken} bytes of {announced}", op.kind().ggml_name());
    (announced, taken)
}

#[test]
fn what_the_backend_allocates_for_itself_is_announced() {
    let engine = start(None, true);
    let before = address_space();
    let dense = |ty, ne| Shape::contiguous(ty, ne).unwrap();
    let weights = |experts| dense(Type::Q4_0, [32, 1, experts, 1]);

    // Columns that overlap: 32 times as many elements as the buffer has.
    let columns = SIZE / 4 - 32;
    let mut overlapping = dense(Type::F32, [32, columns, 1, 1]);
    overlapping.nb = [4, 4, 4 * columns, 4 * columns];
    let results = dense(Type::F32, [1, columns, 1, 1]);
    let shapes = [weights(1), overlapping, results];
    let (announced, taken) = announced_and_taken(&engine, PRODUCT, &shapes);
    assert!((announced / 4..=announced).contains(&taken));

    // Tables of the tokens of each expert.
    let op = Op::MulMatId {
        accumulator: Precision::Default,
        activation: Precision::Default,
    };
    let of_experts = |experts, tokens| {
        [
            weights(experts),
            dense(Type::F32, [32, 1, tokens, 1]),
            dense(Type::I32, [1, tokens, 1, 1]),
            dense(Type::F32, [1, 1, tokens, 1]),
        ]
    };
    let (announced, taken) = announced_and_taken(&engine, op, &of_experts(4096, 1 << 16));
    assert!((announced / 4..=announced).contains(&taken));

    // The backend gives it back when the graphs are gone.
    let kept = address_space().saturating_sub(before);
    assert!(kept < 32 << 20, "{kept} bytes are kept");

    // What no machine has is announced, and not allocated to be compiled.
    let shapes = of_experts(1 << 20, 1 << 17);
    let memory = shapes.map(|_| engine.alloc(SIZE).unwrap());
    let graph = graph(&engine, op, &shapes);
    let plan = engine.compile(&graph, &memory, &|| false).unwrap();
    assert!(plan.working_bytes() >= 1 << 40);
}
