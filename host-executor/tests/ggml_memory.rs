//! The memory of the engine over a backend of ggml: `--memory` is for the buffers of guests.

#[path = "../../tests/common/mod.rs"]
mod cache;
#[path = "../../tests/common/changed_backend.rs"]
mod changed_backend;
mod common;

use std::sync::Arc;

use changed_backend::{Changes, changed_backend};
use common::log::{keep, lines_with};
use common::{Build, Guest, Host};
use vgpu_engine::{EngineError, MemoryInfo, Turn};
use vgpu_executor::engine::{EngineKind, GgmlBackend, start};
use vgpu_executor::{GuestRule, Policy, Rules};
use vgpu_transport::ir::{BufferId, Limits, Op, Precision, Shape, Type, validate};
use vgpu_transport::wire::{GraphId, Offer, ProtocolVersion, Reply, Request};

const PRODUCT: Op = Op::MulMat {
    accumulator: Precision::Default,
    activation: Precision::Default,
    hadamard: false,
};

#[test]
fn the_limit_of_a_gpu_is_not_the_limit_of_copies_on_the_host() {
    const MEMORY: u64 = 256 << 10;
    const NODES: u64 = 8;
    let folder = tempfile::tempdir().unwrap();
    // A GPU that leaves sums to the CPU engine.
    let changes = Changes {
        lacks: "GGML_OP_CUMSUM",
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    };
    let backend = GgmlBackend {
        path: changed_backend(&cache::cached(""), folder.path(), &changes),
        device: None,
    };
    let engine = start(&EngineKind::Ggml(backend), 1.into(), Some(MEMORY)).unwrap();
    assert_eq!(engine.memory().total, MEMORY);
    let size = 64 << 10;
    let mut build = Build::default();
    let buffers = [BufferId(1), BufferId(2)];
    let [from, to] = buffers.map(|buffer| build.tensor(Type::F32, [size / 4, 1, 1, 1], buffer));
    (0..NODES).for_each(|_| build.node(Op::Cumsum {}, to, &[from]));
    let limits = Limits::default();
    let valid = validate(build.0, engine.capabilities(), &limits, |_| Some(size)).unwrap();
    let memory = buffers.map(|_| engine.alloc(size).unwrap());
    // Two tensors of each node: 1 MiB.
    let mut plan = engine.compile(&valid, &memory, &|| false).unwrap();
    assert!(plan.plan_bytes() >= 2 * NODES * size && 2 * NODES * size > MEMORY);
    plan.allocate().unwrap();
    plan.launch(&Turn::new()).unwrap();
    // The limit of the buffers holds.
    let refused = engine.alloc(MEMORY - 2 * size).err();
    assert!(
        matches!(refused, Some(EngineError::OutOfMemory { .. })),
        "{refused:?}"
    );
}

/// A desktop and other programs of the host use the GPU, too. A guest that asks for the free
/// memory, as Ollama does, gets what is left.
#[test]
fn memory_that_other_programs_of_the_host_use_is_not_free() {
    const USED: u64 = 256 << 20;
    const MEMORY: u64 = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let engine = |used, later_memory, memory| {
        let folder = folder.path().join(format!("{used}-{later_memory}"));
        std::fs::create_dir_all(&folder).unwrap();
        let changes = Changes {
            kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
            used,
            later_memory,
            ..Changes::default()
        };
        let backend = GgmlBackend {
            path: changed_backend(&cache::cached(""), &folder, &changes),
            device: None,
        };
        start(&EngineKind::Ggml(backend), 1.into(), memory).unwrap()
    };
    let MemoryInfo { total, free } = engine(USED, "", None).memory();
    assert_eq!(total - free, USED);
    // The limit is less than what is left.
    let limited = engine(USED, "", Some(MEMORY));
    let all = MemoryInfo {
        total: MEMORY,
        free: MEMORY,
    };
    assert_eq!(limited.memory(), all);
    let taken = limited.alloc(64 << 10).unwrap();
    assert!(limited.memory().free < MEMORY - taken.size());
    // Nothing is left.
    assert_eq!(engine(u64::MAX >> 1, "", None).memory().free, 0);
    // More than all is free: a subtraction has wrapped. And a driver that has known does not any
    // more.
    for nonsense in ["*free = -USED;", "*free = *total = 0;"] {
        let lost = engine(USED, nonsense, None);
        assert_eq!(lost.memory(), MemoryInfo { total, free: 0 }, "{nonsense}");
    }
}

/// Only a guest that leaves zeros behind its rows may have them read there.
#[test]
fn quantised_rows_of_an_old_guest_are_multiplied_by_the_cpu_engine() {
    keep();
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        reads_rows: true,
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    };
    let backend = GgmlBackend {
        path: changed_backend(&cache::cached(""), folder.path(), &changes),
        device: None,
    };
    let engine = start(&EngineKind::Ggml(backend), 1.into(), None).unwrap();
    let host = Host::new(Arc::clone(&engine));
    for (version, on_device) in [(ProtocolVersion::V3, 0), (ProtocolVersion::V4, 1)] {
        let before = engine.fallback_use().expect("a device");
        let mut guest = host.connect();
        let _ = guest.hello_with(Offer::only(version));
        let weights = guest.alloc(4096);
        let _ = guest.ask(&Request::Weights { buffer: weights });
        let others = guest.alloc(4096);
        let mut build = Build::default();
        let rows = build.tensor(Type::Q8_0, [96, 2, 1, 1], weights);
        let vector = Shape::contiguous(Type::F32, [96, 1, 1, 1]).unwrap();
        let vector = build.place(vector, others, 0);
        let result = Shape::contiguous(Type::F32, [2, 1, 1, 1]).unwrap();
        let result = build.place(result, others, 1024);
        build.node(PRODUCT, result, &[rows, vector]);
        guest.graph(GraphId(1), &build.0);
        guest.submit(GraphId(1));
        guest.fence();
        let used = engine.fallback_use().expect("a device");
        let nodes = (
            used.device_nodes - before.device_nodes,
            used.other_nodes - before.other_nodes,
        );
        assert_eq!(nodes, (on_device, 1 - on_device), "{version}");
        // The end of the session says so, for all sessions so far.
        drop(guest);
        host.wait_until_empty();
        let all = 1 + on_device;
        let line = format!("engine ggml:CPU: the CPU engine has computed 1 of {all} nodes (");
        assert_eq!(lines_with(&line).len(), 1, "{version}");
    }
}

/// ggml's CPU backend multiplies faster with weights in another layout.
#[test]
fn copies_of_weights_in_another_layout_are_charged_to_the_guest() {
    const WEIGHTS: u64 = 256 * 256 / 32 * 18;
    const QUOTA: u64 = 1 << 20;
    let backend = GgmlBackend {
        path: cache::cached("build-llama-0.3.36/bin/libggml-cpu.so"),
        device: None,
    };
    let host = Host::new(start(&EngineKind::Ggml(backend), 1.into(), None).unwrap());
    let alice = GuestRule {
        name: "alice".into(),
        uids: vec![1],
        cids: vec![],
        certificates: vec![],
        policy: Policy {
            memory: Some(QUOTA),
            ..Policy::default()
        },
    };
    let rules = Rules {
        guests: vec![alice],
        ..Rules::default()
    };
    host.server.apply(rules).expect("it fits");
    let mut guest = host.guest_of(1);
    let free = |guest: &mut Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    };
    let weights = guest.alloc(WEIGHTS);
    let _ = guest.ask(&Request::Weights { buffer: weights });
    let others = guest.alloc(4096);
    let before = free(&mut guest);
    let mut build = Build::default();
    let rows = build.tensor(Type::Q4_0, [256, 256, 1, 1], weights);
    let vector = Shape::contiguous(Type::F32, [256, 1, 1, 1]).unwrap();
    let [vector, result] = [0, 1024].map(|offset| build.place(vector, others, offset));
    build.node(PRODUCT, result, &[rows, vector]);
    guest.graph(GraphId(1), &build.0);
    guest.submit(GraphId(1));
    guest.fence();
    let copied = before - free(&mut guest);
    assert!(copied > WEIGHTS, "{copied} bytes");
    // A write ends the copy. The memory of the plan stays.
    guest.write(weights, 0, &[0; 18]);
    guest.submit(GraphId(1));
    guest.fence();
    let left = before - free(&mut guest);
    assert!(left < copied - WEIGHTS, "{left} of {copied} bytes");
    // Nor does a copy that no graph reads outlive a write.
    guest.graph(GraphId(2), &build.0);
    guest.submit(GraphId(2));
    guest.fence();
    assert!(before - free(&mut guest) > left + WEIGHTS);
    for graph in [GraphId(1), GraphId(2)] {
        guest.send(&Request::Forget { graph });
    }
    guest.write(weights, 0, &[0; 18]);
    assert_eq!(free(&mut guest), before);
    drop(guest);
    host.wait_until_empty();
    let MemoryInfo { total, free } = host.engine.memory();
    assert_eq!(free, total);
}
