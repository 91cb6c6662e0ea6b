//! What a session may use: the processor time of a request, and mappings, threads, descriptors and
//! resident memory of the process.

use std::fs;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The most processor time of a request that runs no graph. The longest one of the corpus and of
/// 500 random sessions took 0.24 s by the clock, with debug assertions and on a busy machine.
pub(crate) const REQUEST_TIME: Duration = Duration::from_secs(2);

/// How many times as long as its estimate a run of a graph may take in addition. Estimates are for
/// a slow processor; the fuzzer's build is slower still, by its coverage and its assertions. The
/// host refuses, charges and divides work by these estimates: one that is far too low is an attack.
const SLOWER: u32 = 8;

/// Mappings that a process may have beyond those at the start: the allocator maps arenas.
const MAPPINGS: usize = 64;

/// Mappings of an open buffer: the first region and 15 copies of shared parts (`MAX_COPIES`), each
/// between two guard pages.
const MAPPINGS_OF_A_BUFFER: usize = 3 * 16;

/// KiB of resident memory that a process may have beyond those at the start: the fuzzer keeps its
/// corpus in memory.
const RESIDENT: u64 = 256 << 10;

/// KiB that a session may need at once besides its buffers and what the model of the session knows
/// of them: messages, decoded graphs and plans of its limits, and the page size of huge pages.
const PEAK: u64 = 24 << 10;

/// The most resident memory of the process in a time, if it does nothing else meanwhile.
#[derive(Debug)]
pub(crate) struct Peak {
    /// KiB at the start.
    start: u64,
}

impl Peak {
    /// Begins to measure: the kernel forgets the peak so far.
    ///
    /// # Panics
    /// If the kernel does not count the peak of a process.
    pub(crate) fn begin() -> Peak {
        fs::write("/proc/self/clear_refs", "5").expect("the kernel measures peaks");
        Peak {
            start: kib("VmHWM:"),
        }
    }

    /// Checks that a session with `memory` bytes has never needed more than twice that, for its
    /// buffers and the model's copy of them, and a constant.
    ///
    /// # Panics
    /// If it has.
    pub(crate) fn check(&self, memory: u64) {
        let (now, most) = (kib("VmHWM:"), self.start + 2 * (memory >> 10) + PEAK);
        assert!(
            now <= most,
            "the process had {now} KiB at once, at most {most} are allowed from {} on",
            self.start
        );
    }
}

/// A figure of this process in KiB. 0 if the kernel does not tell.
fn kib(key: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok())
        .unwrap_or(0)
}

/// What the process has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process {
    mappings: usize,
    threads: usize,
    descriptors: usize,
    /// KiB of memory that is not of a file.
    resident: u64,
}

impl Process {
    pub(crate) fn now() -> Process {
        let count = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count);
        let text = |file: &str| fs::read_to_string(file).unwrap_or_default();
        Process {
            mappings: text("/proc/self/maps").lines().count(),
            threads: count("/proc/self/task"),
            descriptors: count("/proc/self/fd"),
            resident: kib("RssAnon:") + kib("RssShmem:"),
        }
    }

    /// Checks that a process that had `self` after its first sessions has no more now, while a
    /// session of at most `memory` bytes has so many buffers open: their bytes, and the model's
    /// copy of them.
    ///
    /// # Panics
    /// If it has.
    pub(crate) fn check_growth(self, buffers: usize, memory: u64) {
        let now = Process::now();
        let most = Process {
            mappings: self.mappings + MAPPINGS + MAPPINGS_OF_A_BUFFER * buffers,
            resident: self.resident + RESIDENT + 2 * (memory >> 10),
            ..self
        };
        let is_within = now.mappings <= most.mappings
            && now.threads <= most.threads
            && now.descriptors <= most.descriptors
            && now.resident <= most.resident;
        assert!(
            is_within,
            "{now:?}, at most {most:?} with {buffers} buffers"
        );
    }
}

/// Measures the requests of a session.
pub(crate) struct RequestClock {
    /// The processor time of the thread at the start of the request.
    start: Duration,
    /// When the request began.
    began: Instant,
    /// The most processor time of the request.
    limit: Duration,
    longest: Duration,
}

impl RequestClock {
    /// A clock for a session that this thread serves.
    pub(crate) fn new() -> RequestClock {
        RequestClock {
            start: processor_time(),
            began: Instant::now(),
            limit: REQUEST_TIME,
            longest: Duration::ZERO,
        }
    }

    /// A request begins. `estimate`: the time of the graph that it runs.
    pub(crate) fn begin(&mut self, estimate: Duration) {
        self.limit = REQUEST_TIME.saturating_add(estimate.saturating_mul(SLOWER));
        self.start = processor_time();
        self.began = Instant::now();
    }

    /// Checks that the request, which has ended, has not taken more processor time than its limit.
    ///
    /// # Panics
    /// If it has, with `request` in the message.
    pub(crate) fn end(&mut self, request: impl FnOnce() -> String) {
        let took = self.began.elapsed();
        self.longest = self.longest.max(took);
        if took > self.limit {
            // Other processes may have had the processor.
            let worked = processor_time().saturating_sub(self.start);
            assert!(
                worked <= self.limit,
                "a request has taken {took:?}, {worked:?} of the processor, of at most {:?}: {}",
                self.limit,
                request()
            );
        }
    }

    /// The longest request so far.
    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }
}

/// The processor time of this thread.
pub(crate) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
