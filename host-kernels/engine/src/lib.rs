//! What every engine of the host shares.
//!
//! - [`Engine`], [`Memory`], [`Plan`]: the contract between the executor and an engine.
//! - [`fuse`]: which nodes of a graph an engine can run as one kernel.
//! - [`roofline`]: the least memory traffic and arithmetic of a graph.
//! - [`rope`]: the parameters of a rotation, as kernels take them.
//! - [`types`]: sets of tensor types.

mod engine;
pub mod fuse;
pub mod roofline;
pub mod rope;
pub mod types;

pub use engine::{
    Engine, EngineError, Extent, Memory, MemoryInfo, Plan, Progress, RunError, SharedMemory, Span,
    Turn, check_range,
};
