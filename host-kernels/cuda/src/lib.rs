//! The CUDA engine: compiles graphs to kernel launches on a [`device::Device`], which runs the
//! kernels of `host-kernels/cuda/kernels/`.
//!
//! - [`device`], [`gpu`]: the device trait, and the GPU through NVIDIA's driver.
//! - [`nvml`]: how busy, full and hot a GPU is, for operators.
//! - [`source`], [`nvrtc`], `cubin`: kernel sources, their compiler, and machine code.
//! - `params`, `types`: parameter structures of kernels, and sets of tensor types.
//! - [`kernel_set`], [`verdict`]: which kernels may be used, and what the self-check has found.
//! - `allocator`, `memory`, `memory_access`, `scratch`, `upload_batch`: device memory, and small
//!   uploads in one launch.
//! - `launch`: what operators build launches with; `ops`: one file for each family of operators.
//! - [`autotune`]: which variant of a matrix kernel is the fastest.
//! - `fused_launch`, `activation_cache`: one launch for several nodes, and activations that several
//!   launches read.
//! - `graph_exec`: launches as CUDA graphs, reused from plan to plan; `batch`: launches of several
//!   plans as one sequence.
//! - `megakernel`: runs of launches as one cooperative launch.
//! - `repack`: weights as structures of arrays; `weights`: buffers that share them.
//! - `cpu_fallback`: the nodes that the CPU engine runs.
//! - `context`, `plan`, `engine`: what plans share, plans, and the engine.

mod activation_cache;
mod allocator;
pub mod autotune;
mod batch;
mod context;
mod cpu_fallback;
mod cubin;
pub mod device;
mod engine;
mod fused_launch;
pub mod gpu;
mod graph_exec;
pub mod kernel_set;
mod launch;
mod lock;
mod megakernel;
mod memory;
mod memory_access;
mod merge;
pub mod nvml;
pub mod nvrtc;
mod ops;
mod params;
mod plan;
mod repack;
mod scratch;
pub mod source;
mod types;
mod upload_batch;
pub mod verdict;
mod weights;
mod written;

pub use cubin::has_machine_code;
pub use engine::CudaEngine;
pub use launch::policy::LaunchPolicy;

// Unit tests include the shim's device by path (`ops/bench.rs`), and the device names this crate.
#[cfg(test)]
extern crate self as vgpu_cuda;
