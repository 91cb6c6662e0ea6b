//! The memory of the engine over a backend of ggml: `--memory` is for the buffers of guests.

#[path = "../../tests/common/mod.rs"]
mod cache;
#[path = "../../tests/common/changed_backend.rs"]
mod changed_backend;
mod common;

use changed_backend::{Changes, changed_backend};
use common::Build;
use vgpu_engine::{EngineError, Turn};
use vgpu_executor::engine::{EngineKind, GgmlBackend, start};
use vgpu_transport::ir::{BufferId, Limits, Op, Type, validate};

#[test]
fn the_limit_of_a_gpu_is_not_the_limit_of_copies_on_the_host() {
    const MEMORY: u64 = 256 << 10;
    const NODES: u64 = 8;
    let folder = tempfile::tempdir().unwrap();
    // A GPU that leaves sums to the CPU engine.
    let changes = Changes {
        greedy: "GGML_OP_CUMSUM",
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
