//! Weights that several buffers share where memory, or the number of buffers, is short.

#[path = "../../../tests/common/backend_counters.rs"]
mod backend_counters;
#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod counted_backend;
mod graphs;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use changed_backend::{Changes, changed_backend};
use counted_backend::{copied_by, counted_backend};
use graphs::{Place, graph_over};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, EngineError, Memory};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{Op, Type};

const MIB: u64 = 1 << 20;

/// The bytes of a tensor of the model, and of all of them.
const TENSOR: u64 = 24 * MIB;
const TENSORS: u64 = 4;
const MODEL: u64 = TENSORS * TENSOR;

/// A stand-in for a GPU, which counts its buffers and what is copied.
fn gpu(folder: &Path) -> PathBuf {
    let changes = Changes {
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    };
    let cache = common::cached("");
    counted_backend(&cache, folder, &changed_backend(&cache, folder, &changes))
}

fn start(path: &Path, memory: u64, shares_weights: bool) -> GgmlEngine {
    let options = BackendOptions {
        threads: 1,
        memory: Some(memory),
        shares_weights: Some(shares_weights),
        ..BackendOptions::default()
    };
    let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
    GgmlEngine::start(path, &options, cpu).unwrap()
}

/// Bytes of which no two tensors are equal.
fn content(seed: u64) -> Vec<u8> {
    (0..MODEL / 8)
        .flat_map(|at| (at ^ (seed << 32)).to_le_bytes())
        .collect()
}

fn read_all(memory: &dyn Memory) -> Vec<u8> {
    let mut bytes = vec![1; MODEL as usize];
    memory.read(0, BytesMut::from(&mut bytes[..])).unwrap();
    bytes
}

/// A buffer for the model, which is shared if the engine has room for that, as the executor has it.
fn for_model(engine: &dyn Engine) -> Arc<dyn Memory> {
    let buffer = engine.alloc(MODEL).unwrap();
    match engine.alloc_weights(&buffer) {
        Ok(Some(weights)) => weights,
        Ok(None) | Err(_) => buffer,
    }
}

/// Each call of a GPU's backend waits for the device.
#[test]
fn segments_of_a_gpu_are_copied_in_few_calls() {
    const LEN: u64 = 32 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let path = gpu(folder.path());
    let engine = start(&path, 1 << 30, true);
    let memory = for_model(&engine);
    let bytes = content(4);
    let half = LEN as usize / 2;
    for (at, part) in [(0, &bytes[..half]), (LEN / 2, &bytes[half..LEN as usize])] {
        memory.write(at, Bytes::from(part)).unwrap();
    }
    let row = [LEN / 4, 1, 1, 1];
    let tensors: [Place; 2] = [(Type::I32, row, 0, 0), (Type::I32, row, 1, 0)];
    let graph = graph_over(&engine, MODEL, &tensors, &[(Op::Copy {}, 1, &[0])]);
    let buffers = [Arc::clone(&memory), engine.alloc(MODEL).unwrap()];
    // Before each 4 MiB, it is asked whether the compilation is cancelled.
    let asked = AtomicU64::new(0);
    let compile = |is_cancelled: &dyn Fn() -> bool| {
        let compile = || engine.compile(&graph, &buffers, is_cancelled).map(|_| ());
        copied_by(&path, compile)
    };
    let (outcome, _) = compile(&|| asked.fetch_add(1, Ordering::Relaxed) >= 5);
    assert_eq!(outcome, Err(EngineError::Cancelled));
    asked.store(0, Ordering::Relaxed);
    let (outcome, copied) = compile(&|| asked.fetch_add(1, Ordering::Relaxed) == u64::MAX);
    outcome.unwrap();
    assert_eq!((copied.read, copied.written), (LEN, LEN));
    // For each of the segments, the last one has less.
    let most = LEN / (4 * MIB) + 2;
    assert!(copied.reads.max(copied.writes) <= most, "{copied:?}");
    assert!(
        asked.into_inner() >= LEN / (4 * MIB),
        "it is asked too rarely"
    );
    assert!(read_all(&*memory)[..LEN as usize] == bytes[..LEN as usize]);
}
