//! Nodes that the CPU engine runs: a turn ends in the middle of them, and their time is estimated
//! by the speed of the CPU.

use std::sync::Arc;
use std::time::Duration;

use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, Memory, Plan, RunStatus, Turn, work};
use vgpu_gguf::Rng;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Shape, Sources, Tensor, Type, validate,
};

use crate::engine_on;
use crate::spy::{Call, Spy};

/// Elements that are quantised: more than are copied at once.
const COUNT: u64 = (4 << 20) / 4 + 1024;

/// A graph that converts `count` floats of the first buffer, in the second one.
fn quantise(count: u64, ty: Type) -> Graph {
    let shape = |ty| Shape::contiguous(ty, [count, 1, 1, 1]).expect("whole blocks");
    let tensor = |ty, buffer| Tensor {
        shape: shape(ty),
        buffer,
        offset: 0,
    };
    Graph {
        buffers: vec![BufferId(1), BufferId(2)],
        tensors: vec![tensor(Type::F32, 0), tensor(ty, 1)],
        nodes: vec![Node {
            op: Op::Copy {},
            dst: 1,
            src: Sources::new([Some(0)]),
        }],
    }
}

/// The graph on an engine, and its buffers: `values`, and as many bytes for the result.
fn load(engine: &dyn Engine, graph: Graph, values: &[u8]) -> (Box<dyn Plan>, [Arc<dyn Memory>; 2]) {
    let memory = [(); 2].map(|()| engine.alloc(values.len() as u64).expect("some memory"));
    memory[0].write(0, Bytes::from(values)).expect("its bytes");
    let size = |_| Some(values.len() as u64);
    let valid = validate(graph, engine.capabilities(), &Limits::default(), size);
    let valid = valid.expect("a valid graph");
    let plan = engine.compile(&valid, &memory, &|| false);
    (plan.expect("a plan"), memory)
}

fn content(memory: &dyn Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.size() as usize];
    memory
        .read(0, BytesMut::from(&mut bytes[..]))
        .expect("it can be read");
    bytes
}

#[test]
fn a_turn_ends_in_the_middle_of_a_node_on_the_cpu() {
    let ty = Type::Q2K;
    let mut random = Rng::new(1, 0);
    let values: Vec<u8> = (0..COUNT)
        .flat_map(|_| ((random.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0).to_le_bytes())
        .collect();
    let cpu = CpuEngine::new(1, None).expect("an engine");
    let (mut plan, [_, result]) = load(&cpu, quantise(COUNT, ty), &values);
    plan.run().expect("it runs");
    let want = content(&*result);

    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let (mut plan, [_, result]) = load(&engine, quantise(COUNT, ty), &values);
    // Another guest's graph, which runs in each pause.
    let (mut other, [_, _]) = load(&engine, quantise(256, Type::F16), &values);
    let over = Turn::new();
    over.set_end(Some(Duration::ZERO));
    // Twice: the second run begins where the first one has begun.
    for _ in 0..2 {
        result.fill(0, result.size(), 0).expect("it can be written");
        device.take_whole_log();
        let mut pauses = 0;
        while plan.launch(&over).expect("it runs") == RunStatus::Yielded {
            pauses += 1;
            if pauses % 100 == 1 {
                other.run().expect("it runs");
            }
        }
        plan.wait().expect("it ends");
        // Each thread computes a strip of 1024 elements in a turn.
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        assert!(pauses > COUNT / 1024 / threads, "{pauses} pauses");
        let log = device.take_whole_log();
        let largest = log.iter().filter_map(|call| match call {
            Call::Download(len) | Call::Upload(len) => Some(*len),
            _ => None,
        });
        assert_eq!(largest.max(), Some(4 << 20), "{log:?}");
        assert!(content(&*result) == want, "other bytes than without pauses");
    }
    let least = plan.working_bytes();
    assert!(least <= (4 << 20) + (1 << 20), "{least} bytes for copies");
}

#[test]
fn the_estimate_of_a_node_on_the_cpu_has_the_speed_of_the_cpu() {
    let device = Arc::new(Spy::logging());
    let engine = engine_on(&device);
    let cpu = CpuEngine::new(0, None).expect("an engine").speed();
    for (ty, speed) in [(Type::Iq2Xxs, cpu), (Type::Q8_0, engine.speed())] {
        let graph = quantise(4096, ty);
        assert_eq!(engine.speed_of(&graph, &graph.nodes[0]), speed, "{ty:?}");
    }
    // The search for codes counts.
    let time = |ty| {
        let graph = quantise(1 << 30, ty);
        work::of(&graph, &graph.nodes[0]).time(&cpu)
    };
    assert!(time(Type::Iq2Xxs) > 20 * time(Type::F16));
}
