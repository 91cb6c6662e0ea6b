//! The end of the program: the function `exit` of the C library, or the end of `main`.
//!
//! The kernel shows a host the end of a process by its sockets. Over PCI there is none: a session
//! would keep its memory until its heartbeat has been missing for a minute. So the plugin closes
//! such links itself when the program ends. It does nothing when a signal or `_exit` ends the
//! program, which runs no code; programs in Go end so, too.

use std::sync::atomic::{AtomicBool, Ordering};

use vgpu_transport::shm::liveness;

use crate::ffi;

/// The dynamic linker calls this function of the plugin when the program ends, after the functions
/// of `atexit` and the destructors of C++, which may have used the plugin: `exit` calls the linker
/// last. Destructors in `.fini_array` sections of other libraries may come later, and find the
/// links closed. The plugin is never unloaded before (`-z nodelete`).
#[used]
// SAFETY: the entries of the section are addresses of functions without parameters, which the
// dynamic linker calls once. `at_exit` is one, and does not unwind.
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

static HAS_BEGUN: AtomicBool = AtomicBool::new(false);

/// Whether the program ends. Its other threads run on for a moment, and may find their sessions
/// closed: they must not call what the exit handlers have destroyed, such as a receiver of log
/// lines, and must open no session that nobody would close.
pub(crate) fn has_begun() -> bool {
    HAS_BEGUN.load(Ordering::Acquire)
}

/// Runs no code of the program, and takes no lock of a session: other threads may hold them.
extern "C" fn at_exit() {
    HAS_BEGUN.store(true, Ordering::Release);
    ffi::guard("the end of the program", (), liveness::close_guests);
}
