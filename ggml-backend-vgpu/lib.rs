//! The guest plugin: a ggml backend whose device is an executor on the other side of a link.
//!
//! ggml loads the library and calls [`ggml_backend_score`] and [`ggml_backend_init`]. The modules,
//! from bottom to top; each uses only modules above it in this list:
//!
//! - [`abi`]: ggml's C interface. `ffi`: the mechanism of every function that ggml calls.
//! - [`ggml`]: the ggml of this process. [`stamp`]: the version stamp in the library file.
//! - `program_exit`: what happens when the program ends.
//! - `lock`: locks whose order is checked. `logging`, `load_progress`, `stats`: what people get to
//!   read. `waits`: `VGPU_DUMP`. `fail_fast`: `VGPU_REQUIRED`.
//! - `translate`: from ggml's ids and parameters to the graph IR.
//! - `graph_cache`: the graphs that the executor has. `weights`: what is known about the content of
//!   weights.
//! - `session`: the guest's side of the wire, with the lock order of the crate.
//! - `connect`, `discovery`: finding executors.
//! - `device_context`: a device and its session.
//! - `buffer`, `host_buffer`, `event`: memory and events of a device.
//! - `encode`: from a `ggml_cgraph` to the graph IR. `backend`: a queue of graphs and copies.
//! - `iface`: the objects that ggml sees, with their tables of callbacks.
//!
//! The plugin lives in the process of another program. A panic never leaves the plugin. The plugin
//! never writes to standard output, never waits for an executor that is gone, and ends the process
//! only if `VGPU_REQUIRED=1`.

mod backend;
mod buffer;
mod connect;
mod device_context;
mod discovery;
mod encode;
mod event;
mod fail_fast;
mod ffi;
pub mod ggml;
mod graph_cache;
mod host_buffer;
mod iface;
mod load_progress;
mod lock;
mod logging;
mod program_exit;
mod session;
pub mod stamp;
mod stats;
mod translate;
mod waits;
mod weights;

pub use vgpu_ggml_abi as abi;

/// How well the backend suits this machine: 100 with an executor. 0, with one log line that says
/// why, without one: ggml then goes on without the plugin. Any thread may call.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> i32 {
    ffi::guard("ggml_backend_score", 0, iface::registry::score)
}

/// The backend. Null without an executor. The plugin owns the object, which is valid until the
/// process ends. Any thread may call.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> abi::ggml_backend_reg_t {
    ffi::guard(
        "ggml_backend_init",
        std::ptr::null_mut(),
        iface::registry::init,
    )
}
