//! The engine that runs graphs on a backend of ggml: `libggml-cuda.so`, `libggml-vulkan.so`,
//! `libggml-hip.so` or any other that is loaded at run time.
//!
//! - `loader`: loading a library. `ids`: the ids of ggml's enums. [`library`]: the loaded backend.
//!   `log`: what the backend logs.
//! - `allocator`: how much of a device's memory is taken. `buffer`: buffers of a device. `memory`:
//!   memory of guests. `segments`: that of weights, which several guests can hold.
//! - `params`: from an operator of the IR to ggml's `op_params`. `tensors`: the tensors and the
//!   graph that the backend gets. `device`: a device of the backend.
//! - `located`: where the tensors of a graph are.
//! - `plan`: a compiled graph: parts for the device, and single nodes for another engine.
//!   `placement`: how many nodes went where, and how long they took.
//! - `repack`: weights in a layout for which a backend has faster kernels. `copies`: what a memory
//!   has of them.
//! - `room`: memory for results that want more bytes than their elements have.
//! - `staging`: memory through which small copies go in the order of the backend's queue.
//! - `pace`: into which pieces a run is divided. `flight`: pieces that nobody has waited for,
//!   and reads that come behind them.
//! - [`GgmlEngine`]: the engine.
//!
//! A backend of ggml trusts the content of tensors. A row index out of range ends the process, or
//! reads or writes memory of other guests. Only trusted guests, or a process for each guest, may
//! use this engine.

mod allocator;
mod buffer;
mod copies;
mod device;
mod engine;
mod flight;
mod ids;
pub mod library;
mod loader;
mod located;
mod log;
mod memory;
mod nodes;
mod pace;
mod params;
mod placement;
mod plan;
mod repack;
mod room;
mod segments;
mod staging;
mod tensors;
mod work_buffer;

pub use engine::{BackendOptions, GgmlEngine};
pub use library::{DeviceInfo, DeviceKind, Library};
pub use loader::LibraryError;
