//! The CUDA engine: plans of launches, on any [`Device`] that runs the kernels in `host-kernels/cuda/kernels/`.
//!
//! - [`device`]: what the engine needs of a device.
//! - `source`, `nvrtc`, `code`: the kernels' texts, their compiler, and machine code.
//! - `ops`: one file for each family of operators, from a node to launches.
//! - `host`: the few nodes that run on the CPU engine instead.
//! - `params`: the structures that kernels take.
//! - [`tuning`]: which of several kernels was the fastest.
//! - `builder`: what operators' files see of a plan that is compiled.
//! - `emit`: what becomes one launch together (`vgpu_engine::fuse`); `kept`: activations rounded for several products.
//! - `plan`, `sequence`: a graph as launches, and running them: one by one, then as recordings (CUDA graphs).
//! - `step`: runs of launches as one, whose blocks wait for each other.
//! - `layout`, `arranged`, `planes`: weights that lie as kernels like to read them.
//! - `context`, `scratch`: what plans share. `allocator`, `memory`: memory of the device; `gather`: small writes to it.

mod activation_cache;
mod allocator;
pub mod autotune;
mod context;
mod cpu_fallback;
mod cubin;
pub mod device;
mod engine;
mod fused_launch;
pub mod gpu;
mod graph_exec;
mod launch;
mod megakernel;
mod memory;
pub mod nvrtc;
mod ops;
mod params;
mod plan;
mod repack;
mod scratch;
pub mod source;
mod types;
mod upload_batch;

pub use engine::CudaEngine;
pub use launch::policy::LaunchPolicy;

// The shim's device, which the unit tests include, names this crate by its name.
#[cfg(test)]
extern crate self as vgpu_cuda;
