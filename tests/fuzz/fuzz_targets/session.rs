//! The target `session` under libFuzzer. Here the process has no other tests, so that what a
//! session leaves behind is seen: mappings, threads, descriptors, resident memory. The most
//! resident memory is looked at after each session.
#![no_main]

#[path = "../targets/mod.rs"]
#[allow(dead_code)]
mod targets;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use targets::session::usage::Process;

/// Sessions between two looks at the process: a look takes as long as a session.
const INTERVAL: u64 = 1 << 12;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static SESSIONS: AtomicU64 = AtomicU64::new(0);
    static FIRST: OnceLock<Process> = OnceLock::new();
    targets::session::run_with_peak(data);
    if SESSIONS.fetch_add(1, Ordering::Relaxed) % INTERVAL == INTERVAL - 1 {
        FIRST.get_or_init(Process::now).check_growth(0, 0);
    }
});
