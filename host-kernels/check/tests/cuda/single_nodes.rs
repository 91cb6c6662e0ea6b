//! Single nodes as CUDA graphs and as megakernels, which checks of operators ask for.

use std::sync::Arc;

use vgpu_cuda::LaunchPolicy;
use vgpu_engine::{Engine, Memory, Plan};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Shape, Sources, Tensor, Type, validate,
};

use crate::engine_with;
use crate::spy::{Call, Spy};

const COUNT: u64 = 64;

/// The sum of two vectors, as a plan, and its memory.
fn sum(engine: &dyn Engine) -> (Box<dyn Plan>, Arc<dyn Memory>) {
    let vector = |at: u64| Tensor {
        shape: Shape::contiguous(Type::F32, [COUNT, 1, 1, 1]).expect("a small shape"),
        buffer: 0,
        offset: at * 4 * COUNT,
    };
    let graph = Graph {
        buffers: vec![BufferId(1)],
        tensors: vec![vector(0), vector(1), vector(2)],
        nodes: vec![Node {
            op: Op::Add {},
            dst: 2,
            src: Sources::new([Some(0), Some(1)]),
        }],
    };
    let size = 3 * 4 * COUNT;
    let memory = engine.alloc(size).expect("some memory");
    let bytes: Vec<u8> = (0..2 * COUNT)
        .flat_map(|i| (i as f32).to_le_bytes())
        .collect();
    memory
        .write(0, bytes.as_slice().into())
        .expect("two vectors");
    let valid = validate(graph, engine.capabilities(), &Limits::default(), |_| {
        Some(size)
    });
    let valid = valid.expect("a valid graph");
    let plan = engine.compile(&valid, std::slice::from_ref(&memory), &|| false);
    (plan.expect("a plan"), memory)
}

/// The calls of the third run of a sum, and whether its result is right.
fn third_run(policy: LaunchPolicy) -> Vec<Call> {
    let device = Arc::new(Spy::running());
    let engine = engine_with(&device, policy);
    let (mut plan, memory) = sum(&engine);
    for _ in 0..2 {
        plan.run().expect("it runs");
    }
    memory
        .fill(2 * 4 * COUNT, 4 * COUNT, 0)
        .expect("the result");
    device.take_log();
    plan.run().expect("it runs");
    let log = device.take_log();
    let mut bytes = vec![0; 4 * COUNT as usize];
    memory
        .read(2 * 4 * COUNT, bytes.as_mut_slice().into())
        .expect("the result");
    let right = (0..COUNT).flat_map(|i| ((i + COUNT + i) as f32).to_le_bytes());
    assert!(right.eq(bytes), "{policy:?}");
    log
}

#[test]
fn a_single_node_is_a_cuda_graph_only_if_the_policy_asks_for_it() {
    let policy = LaunchPolicy::default();
    assert_eq!(third_run(policy), [Call::Launch("vg_elementwise")]);
    assert_eq!(third_run(policy.for_single_nodes()), [Call::LaunchGraph]);
}

#[test]
fn a_single_node_is_a_megakernel_only_if_the_policy_asks_for_it() {
    let policy = LaunchPolicy {
        megakernel: true,
        ..LaunchPolicy::default()
    };
    assert_eq!(third_run(policy), [Call::Launch("vg_elementwise")]);
    let without_graphs = LaunchPolicy {
        min_graph_launches: usize::MAX,
        ..policy.for_single_nodes()
    };
    assert_eq!(third_run(without_graphs), [Call::Launch("vg_megakernel")]);
    assert_eq!(third_run(policy.for_single_nodes()), [Call::LaunchGraph]);
}
