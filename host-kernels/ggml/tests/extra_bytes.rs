//! Backends that access more than the elements of a tensor, as those for GPUs do: behind a result,
//! and behind quantised rows.

#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod graphs;

use std::path::Path;
use std::sync::Arc;

use changed_backend::{Changes, changed_backend};
use graphs::{PRODUCT, Place, SIZE, floats, graph, memory, put};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, EngineError, Memory, Placed, RunError, RunStatus, Turn};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::{Op, Type, ValidGraph};

fn start(folder: &Path, changes: &Changes<'_>, memory: Option<u64>) -> GgmlEngine {
    let path = changed_backend(&common::cached(""), folder, changes);
    let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
    GgmlEngine::start(
        &path,
        &BackendOptions {
            threads: 1,
            memory,
            ..BackendOptions::default()
        },
        cpu,
    )
    .unwrap()
}

fn run(
    engine: &dyn Engine,
    graph: &ValidGraph,
    memory: &[Arc<dyn Memory>],
) -> Result<(), RunError> {
    let plan = engine.compile(graph, memory, &|| false);
    let status = plan.unwrap().launch(&Turn::new())?;
    assert_eq!(status, RunStatus::Done);
    Ok(())
}

/// Sums up the elements of tensor 0 twice. Behind the results are other tensors of the guest.
const SUMS: [(Op, u32, &[u32]); 2] = [(Op::Cumsum {}, 1, &[0]), (Op::Cumsum {}, 2, &[1])];
const VECTORS: [Place; 4] = [
    (Type::F32, [64, 1, 1, 1], 0, 0),
    (Type::F32, [64, 1, 1, 1], 0, 256),
    (Type::F32, [64, 1, 1, 1], 0, 512),
    (Type::F32, [64, 1, 1, 1], 0, 768),
];

#[test]
fn results_that_want_more_memory_than_their_elements_leave_the_next_tensor_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        greedy: "GGML_OP_CUMSUM",
        ..Changes::default()
    };
    let engine = start(folder.path(), &changes, None);
    let buffers = memory(&engine);
    let memory = &*buffers[0];
    put(memory, 0, &[1.0; 64]);
    put(memory, 768, &[7.0; 64]);
    run(&engine, &graph(&engine, &VECTORS, &SUMS), &buffers).unwrap();
    let sums: Vec<f32> = (1..=64).map(|n| n as f32).collect();
    let sums_of_sums: Vec<f32> = (1..=64).map(|n| (n * (n + 1) / 2) as f32).collect();
    assert_eq!(floats(memory, 256, 64), sums);
    assert_eq!(floats(memory, 512, 64), sums_of_sums);
    assert_eq!(floats(memory, 768, 64), [7.0; 64]);
    let nodes = Placed {
        device: 2,
        fallback: 0,
    };
    assert_eq!(engine.placement()["CUMSUM"], nodes);
}

#[test]
fn memory_for_such_results_is_announced_and_refused_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        greedy: "GGML_OP_CUMSUM",
        ..Changes::default()
    };
    let taken = |engine: &dyn Engine| engine.memory().total - engine.memory().free;
    let engine = start(folder.path(), &changes, Some(3 * SIZE));
    let buffers = memory(&engine);
    let before = taken(&engine);
    let graph = graph(&engine, &VECTORS, &SUMS);
    let compile = || engine.compile(&graph, &buffers, &|| false);
    let mut plan = compile().unwrap();
    assert_eq!(taken(&engine), before, "compilation takes nothing");
    let announced = plan.device_bytes();
    plan.allocate().unwrap();
    assert_eq!(taken(&engine) - before, announced);
    assert!(announced > 0);
    // Each plan has memory of its own: a turn may end between a result and its copy.
    let mut other = compile().unwrap();
    other.allocate().unwrap();
    assert_eq!(taken(&engine) - before, 2 * announced);
    drop((plan, other));
    assert_eq!(taken(&engine), before);
    // All memory is taken: an error, and the plan works once there is some.
    let mut plan = compile().unwrap();
    let rest = engine.alloc(engine.memory().free - (8 << 10)).unwrap();
    let refused = plan.allocate();
    assert!(
        matches!(refused, Err(EngineError::OutOfMemory { .. })),
        "{refused:?}"
    );
    let failed = plan.launch(&Turn::new());
    assert!(
        matches!(failed, Err(RunError::OutOfMemory { .. })),
        "{failed:?}"
    );
    drop(rest);
    assert_eq!(plan.launch(&Turn::new()), Ok(RunStatus::Done));
}

/// Two rows of 96 elements, which are no multiple of 512, a vector and a result.
const ROWS: [Place; 3] = [
    (Type::Q8_0, [96, 2, 1, 1], 0, 0),
    (Type::F32, [96, 1, 1, 1], 1, 1024),
    (Type::F32, [2, 1, 1, 1], 1, 2048),
];

#[test]
fn padded_rows_are_multiplied_by_the_device_and_others_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        reads_rows: true,
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    };
    let engine = start(folder.path(), &changes, None);
    let unpadded = graph(&engine, &ROWS, &[(PRODUCT, 2, &[0, 1])]);
    let padded = unpadded.clone().with_padded_rows(true);
    // The same weights in a buffer that a node writes to.
    let mut computed = ROWS;
    computed[2].2 = 0;
    let computed = graph(&engine, &computed, &[(PRODUCT, 2, &[0, 1])]).with_padded_rows(true);
    let buffers = memory(&engine);
    let [weights, others] = &buffers;
    // Blocks of 32 with the scale 1.0 in F16: elements of 1 in the first row, of 2 in the second.
    for block in 0..6 {
        let mut data = [1 + block / 3; 34];
        data[..2].copy_from_slice(&0x3c00u16.to_le_bytes());
        let at = 34 * u64::from(block);
        weights.write(at, Bytes::from(&data[..])).unwrap();
    }
    put(&**others, 1024, &[1.0; 96]);
    let placed = || {
        let Placed { device, fallback } = engine.placement()["MUL_MAT"];
        (device, fallback)
    };
    let check = |graph: &ValidGraph, result: &Arc<dyn Memory>| {
        put(&**result, 2048, &[0.0; 2]);
        run(&engine, graph, &buffers).unwrap();
        let result = floats(&**result, 2048, 2);
        assert!((result[0] - 96.0).abs() < 0.5 && (result[1] - 192.0).abs() < 1.0);
    };
    check(&padded, others);
    assert_eq!(
        placed(),
        (0, 1),
        "the buffer may have been used for something else"
    );
    weights.mark_weights();
    check(&padded, others);
    assert_eq!(placed(), (1, 1));
    check(&unpadded, others);
    assert_eq!(placed(), (1, 2));
    check(&computed, weights);
    assert_eq!(placed(), (1, 3));
    // The device does look there.
    weights.fill(6 * 34, 1, 0xff).unwrap();
    let failed = run(&engine, &padded, &buffers);
    assert!(matches!(failed, Err(RunError::Kernel { .. })), "{failed:?}");
}
