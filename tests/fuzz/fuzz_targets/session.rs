//! The target `session` under libFuzzer. Here the process has no other tests, so that what a
//! session leaves behind is seen: mappings, threads, descriptors, resident memory.
#![no_main]

#[path = "../targets/mod.rs"]
#[allow(dead_code)]
mod targets;

use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sessions between two looks at the process: a look takes as long as a session.
const INTERVAL: u64 = 1 << 12;

/// What the process has.
#[derive(Debug, Clone, Copy)]
struct Process {
    mappings: usize,
    threads: usize,
    descriptors: usize,
    /// KiB of memory that is not of a file.
    resident: u64,
}

impl Process {
    fn now() -> Process {
        let count = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count);
        let text = |file: &str| fs::read_to_string(file).unwrap_or_default();
        let status = text("/proc/self/status");
        let kib = |key| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
            kib.and_then(|kib| kib.trim().parse::<u64>().ok())
                .unwrap_or(0)
        };
        Process {
            mappings: text("/proc/self/maps").lines().count(),
            threads: count("/proc/self/task"),
            descriptors: count("/proc/self/fd"),
            resident: kib("RssAnon:") + kib("RssShmem:"),
        }
    }

    /// What a process may have that had `self` after its first sessions. The allocator maps arenas,
    /// and the fuzzer keeps its corpus in memory.
    fn most(self) -> Process {
        Process {
            mappings: self.mappings + 64,
            resident: self.resident + (256 << 10),
            ..self
        }
    }

    fn is_within(self, most: Process) -> bool {
        self.mappings <= most.mappings
            && self.threads <= most.threads
            && self.descriptors <= most.descriptors
            && self.resident <= most.resident
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static SESSIONS: AtomicU64 = AtomicU64::new(0);
    static FIRST: OnceLock<Process> = OnceLock::new();
    targets::session::run(data);
    if SESSIONS.fetch_add(1, Ordering::Relaxed) % INTERVAL == INTERVAL - 1 {
        let now = Process::now();
        let most = FIRST.get_or_init(|| now).most();
        assert!(now.is_within(most), "{now:?}, at most {most:?}");
    }
});
