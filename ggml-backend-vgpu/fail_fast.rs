//! `VGPU_REQUIRED=1`: the process ends when it has no executor.
//!
//! By default a program without an executor computes on its CPU, and a program that loses its
//! executor gets errors until it loads its model again. Neither suits a worker process that a
//! parent restarts, such as Ollama's runner: the worker would compute on the CPU without telling
//! anybody, or keep a model whose memory is gone. With `VGPU_REQUIRED=1` the process writes one
//! line that names the reason and ends with status 1. The parent starts the next process, which
//! connects to the executor. `vgpu install` sets the variable for Ollama.

use std::io::Write as _;
use std::sync::OnceLock;
use std::time::Duration;

use crate::program_exit;

/// How often [`watch`] checks whether the executors are there.
const PERIOD: Duration = Duration::from_millis(200);

/// Whether `VGPU_REQUIRED` is `1`. The variable is read once.
fn is_enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| std::env::var_os("VGPU_REQUIRED").is_some_and(|value| value == "1"))
}

/// Ends the process if `VGPU_REQUIRED=1`, and returns otherwise. Called when there is no executor,
/// or when one was lost.
pub(crate) fn end_process_if_enabled(reason: &str) {
    // A program that ends closes its sessions itself.
    if !is_enabled() || program_exit::has_begun() {
        return;
    }
    // One write to standard error: the threads that write the program's log end with the process.
    // Ollama copies a line that begins with "error:" into its answer.
    let line = format!("error: ggml-vgpu: {reason}; the process ends because VGPU_REQUIRED=1\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    // SAFETY: `_exit` takes no pointer and does not return. `_exit` runs no exit handler and no
    // destructor, so that no code of the program runs while other threads still use what that code
    // would destroy.
    unsafe { libc::_exit(1) }
}

/// Starts a thread that calls `is_any_lost` until it returns `true`, if `VGPU_REQUIRED=1`. The
/// thread detects the loss of an executor while the program is idle: a session that finds its
/// executor gone calls [`end_process_if_enabled`].
pub(crate) fn watch(is_any_lost: impl Fn() -> bool + Send + 'static) {
    if !is_enabled() {
        return;
    }
    let watch = move || {
        while !is_any_lost() {
            std::thread::sleep(PERIOD);
        }
    };
    let spawned = std::thread::Builder::new()
        .name("vgpu-watch".to_owned())
        .spawn(watch);
    if let Err(error) = spawned {
        tracing::warn!(
            "cannot start the thread that watches the executor ({error}); a lost executor is \
             detected at its next use"
        );
    }
}
