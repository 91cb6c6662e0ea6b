//! The guest plugin: a ggml backend whose device is an executor on the other side of a link.
//!
//! From the outside in:
//!
//! - `ggml_backend_score` and `ggml_backend_init`, the two symbols that ggml looks for.
//! - [`abi`]: ggml's C interface. [`host`]: the ggml that has loaded us.
//! - `registry`, `device`, `buffer`, `host_buffer`, `stream`, `event`: the objects that ggml sees, one module each.
//! - `ffi`: the mechanism of every function that ggml calls.
//! - `translate`, `encode`: from ggml's tensors and graphs to the IR.
//! - `connect`, `session`, `graphs`: the guest's side of the wire. `weights`: what need not be sent.
//! - `logging`, `progress`, `stats`: what people get to read. `required`: what happens to programs that must
//!   not go on without a vGPU.
//!
//! The plugin lives in somebody else's process: unless told to (`VGPU_REQUIRED`), it never ends it; it never
//! lets a panic out, never prints to standard output, and never waits for an executor that is gone.

pub mod abi;
mod buffer;
mod connect;
mod device;
mod encode;
mod event;
mod ffi;
mod graphs;
pub mod host;
mod host_buffer;
mod logging;
mod progress;
mod registry;
mod required;
mod session;
mod stats;
mod stream;
mod translate;
mod weights;

/// How good this backend is on this machine. 0, after one log line that says why, when no executor can be
/// reached; ggml then goes on without us.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> i32 {
    ffi::guard("ggml_backend_score", 0, registry::score)
}

/// The backend. Null when no executor can be reached. The result lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> abi::ggml_backend_reg_t {
    ffi::guard("ggml_backend_init", std::ptr::null_mut(), registry::init)
}
