//! `VGPU_REQUIRED=1`: a program that shall end rather than go on without its vGPU.
//!
//! By default a program without an executor computes on its CPU, and one that loses its executor gets
//! errors until it loads its model again. Both are wrong for a worker process that somebody else starts
//! anew when it ends: Ollama would keep a model that silently runs on the CPU, or one whose memory is
//! gone, for as long as it is asked for it. With the variable set, such a process says why in one line
//! and ends, and the next one finds the executor that is back. `vgpu install` sets it for Ollama.

use std::io::Write as _;
use std::sync::OnceLock;
use std::time::Duration;

use crate::device::Device;

/// How often an idle program looks whether its executors are still there.
const PERIOD: Duration = Duration::from_millis(200);

/// Whether the user asked for it.
pub(crate) fn is_set() -> bool {
    static SET: OnceLock<bool> = OnceLock::new();
    *SET.get_or_init(|| std::env::var_os("VGPU_REQUIRED").is_some_and(|value| value == "1"))
}

/// Called when there is no vGPU (any more): returns, unless the user asked for an end.
pub(crate) fn missing(reason: &str) {
    if !is_set() {
        return;
    }
    // Straight to standard error, in one piece: programs write their logs on threads of their own, which
    // end now. With "error:" in front, Ollama repeats the line in its answer.
    let line =
        format!("error: ggml-vgpu: {reason}; this program ends, as VGPU_REQUIRED=1 demands\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    // SAFETY: `_exit` ends the process at once and runs none of its code: no destructor of the program's
    // meets a half-destroyed world, whichever thread this is.
    unsafe { libc::_exit(1) }
}

/// Notices an executor that goes away while nobody talks to it, if the user asked for an end.
pub(crate) fn watch(devices: Vec<&'static Device>) {
    if !is_set() {
        return;
    }
    let watch = move || {
        // Looking is enough: a session that finds its executor gone calls `missing`.
        while !devices.iter().any(|device| device.is_lost()) {
            std::thread::sleep(PERIOD);
        }
    };
    let spawned = std::thread::Builder::new()
        .name("vgpu-watch".to_owned())
        .spawn(watch);
    if let Err(error) = spawned {
        tracing::warn!(
            "no thread to watch the executor, its end is noticed at the next use: {error}"
        );
    }
}
