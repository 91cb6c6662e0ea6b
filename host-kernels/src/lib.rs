//! The arithmetic of the host: one contract ([`Engine`]) and the engines that fulfil it.
//!
//! - [`cpu`]: every op it claims, on the processors of the host. Always there.
//! - [`cuda`]: the same on an NVIDIA GPU.
//! - [`check`]: whether an engine is right, and how fast.
//! - [`cost`]: what a graph takes at least.

pub mod check;
pub mod cost;
pub mod cpu;
pub mod cuda;
mod engine;
mod fuse;
mod rope;
mod types;

pub use engine::{
    Engine, EngineError, Extent, Memory, MemoryInfo, Plan, Progress, RunError, SharedMemory, Span,
    Turn,
};

// The devices of the tests name this crate by its name.
#[cfg(test)]
extern crate self as vgpu_kernels;
