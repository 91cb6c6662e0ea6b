//! Products with weights that ggml's CPU backend repacks, and their memory.
#![allow(dead_code)] // each test binary uses a part of this module

use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vgpu_cpu::CpuEngine;
use vgpu_engine::{CopyAccount, Engine, EngineError, Memory, Plan, RunStatus, Turn};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::Type;

use crate::common;
use crate::graphs::{PRODUCT, Place, floats, graph, put};

/// ggml's CPU backend of the release that most tests run on.
const BACKEND: &str = "build-llama-0.3.36/bin/libggml-cpu.so";

/// 256 rows of 256 elements, and the same number of rows behind them.
pub(crate) const COLUMNS: u64 = 256;
pub(crate) const ROWS: u64 = 256;
pub(crate) const BLOCK: u64 = 18;
pub(crate) const WEIGHTS: u64 = ROWS * COLUMNS / 32 * BLOCK;

/// Weights, a vector, and their product.
pub(crate) const TENSORS: [Place; 3] = [
    (Type::Q4_0, [COLUMNS, ROWS, 1, 1], 0, 0),
    (Type::F32, [COLUMNS, 1, 1, 1], 1, 0),
    (Type::F32, [ROWS, 1, 1, 1], 1, 4096),
];

pub(crate) fn start(memory: Option<u64>, repacks: bool) -> GgmlEngine {
    start_at(&common::cached(BACKEND), memory, repacks)
}

/// The engine over the backend at `path`.
pub(crate) fn start_at(path: &Path, memory: Option<u64>, repacks: bool) -> GgmlEngine {
    let options = BackendOptions {
        threads: 1,
        memory,
        repacks,
        shares_weights: Some(true),
        ..BackendOptions::default()
    };
    let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
    GgmlEngine::start(path, &options, cpu).unwrap()
}

/// Blocks of 32 elements with the scale 1: row `n` has elements of `value(n)`, from -8 to 7.
pub(crate) fn content(value: impl Fn(u64) -> i8) -> Vec<u8> {
    let mut bytes = Vec::new();
    for row in 0..ROWS {
        let nibble = (value(row) + 8).cast_unsigned();
        for _ in 0..COLUMNS / 32 {
            bytes.extend(0x3c00u16.to_le_bytes());
            bytes.extend([nibble * 0x11; 16]);
        }
    }
    bytes
}

pub(crate) fn write_weights(memory: &dyn Memory, value: impl Fn(u64) -> i8) {
    memory.write(0, Bytes::from(&*content(value))).unwrap();
}

pub(crate) fn compile(engine: &dyn Engine, memory: &[Arc<dyn Memory>; 2]) -> Box<dyn Plan> {
    let graph = graph(engine, &TENSORS, &[(PRODUCT, 2, &[0, 1])]);
    engine.compile(&graph, memory, &|| false).unwrap()
}

/// Runs the plan with a vector of ones, and compares each product with `value` times the columns.
pub(crate) fn check(plan: &mut dyn Plan, memory: &[Arc<dyn Memory>; 2], value: impl Fn(u64) -> i8) {
    put(&*memory[1], 0, &[1.0; COLUMNS as usize]);
    put(&*memory[1], 4096, &[f32::NAN; ROWS as usize]);
    assert_eq!(plan.launch(&Turn::new()), Ok(RunStatus::Done));
    let products = floats(&*memory[1], 4096, ROWS as usize);
    for (row, product) in (0..).zip(products) {
        let wanted = f32::from(value(row)) * COLUMNS as f32;
        assert!(
            (product - wanted).abs() < 2.0,
            "row {row}: {product}, not {wanted}"
        );
    }
}

pub(crate) fn odd(row: u64) -> i8 {
    (row * 7 % 16) as i8 - 8
}

pub(crate) fn even(row: u64) -> i8 {
    (row * 5 % 16) as i8 - 8
}

/// The bytes of the engine that are taken.
pub(crate) fn taken(engine: &dyn Engine) -> u64 {
    engine.memory().total - engine.memory().free
}

/// A guest that may have so many bytes of copies.
pub(crate) struct Quota(pub(crate) Arc<AtomicU64>);

/// Bytes of a [`Quota`], given back when this is dropped.
struct Charged(Arc<AtomicU64>, u64);

impl CopyAccount for Quota {
    fn charge(
        &self,
        bytes: u64,
        allocate: &mut dyn FnMut() -> Result<(), EngineError>,
    ) -> Result<Box<dyn Any + Send + Sync>, EngineError> {
        let free = self.0.load(Ordering::Relaxed);
        let left = free.checked_sub(bytes).ok_or(EngineError::OutOfMemory {
            wanted: bytes,
            free,
            total: 0,
        })?;
        self.0.store(left, Ordering::Relaxed);
        let charged = Charged(Arc::clone(&self.0), bytes);
        allocate()?;
        Ok(Box::new(charged))
    }
}

impl Drop for Charged {
    fn drop(&mut self) {
        self.0.fetch_add(self.1, Ordering::Relaxed);
    }
}

/// All memory that the engine has left.
pub(crate) fn fill_up(engine: &dyn Engine) -> Vec<Arc<dyn Memory>> {
    let (mut all, mut size) = (Vec::new(), engine.memory().free);
    while size > 0 {
        match engine.alloc(size) {
            Ok(memory) => all.push(memory),
            Err(_) => size /= 2,
        }
    }
    all
}
