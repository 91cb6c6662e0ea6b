//! What all engines of the host share.
//!
//! - [`Engine`], [`Memory`], [`Plan`]: the contract between the executor and an engine.
//! - [`SingleNode`]: one node of a graph on another engine. [`FallbackUse`]: how much such nodes
//!   are of all.
//! - [`fuse`]: operator fusion, which finds nodes that one kernel can compute.
//! - [`log_limit`]: a limit on log lines that guests can cause.
//! - [`roofline`]: a lower bound of a graph's memory traffic and arithmetic.
//! - [`rope`]: the parameters of ROPE, as kernels take them.
//! - [`types`]: sets of tensor types.
//! - [`work`]: how much work a node is, and how long it takes by estimate.

mod batch_keys;
mod byte_range;
mod cancellation;
mod engine;
mod error;
pub mod fuse;
pub mod log_limit;
mod memory;
mod panic;
mod plan;
pub mod roofline;
pub mod rope;
mod single_node;
pub mod types;
pub mod work;

pub use batch_keys::{BatchGroup, BatchKeys};
pub use cancellation::Cancellation;
pub use engine::{Engine, FallbackUse, Placed};
pub use error::{EngineError, RunError, check_range};
pub use memory::{CopyAccount, Extent, MAX_COPIES, Memory, MemoryInfo, SharedMemory};
pub use panic::panic_message;
pub use plan::{ALLOCATION_BYTES, BatchKey, NodeTiming, Plan, RunStatus, Turn};
pub use single_node::{DeviceMemory, PlannedNode, SingleNode};
