//! How many threads a worker, and the executor of a virtual machine, may have.
//!
//! A worker that a guest has taken over can start threads. The kernel counts them for the user and
//! for the unit of the service, of which all workers are: without a limit for each worker, one
//! could take all tasks that the unit may have, and nobody would get a further process. The
//! supervisor looks at its workers, and the `vgpu fd-store` of a virtual machine at its executor.
#![forbid(unsafe_code)]

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use tracing::error;

use super::process::ProcFiles;
use super::state::SupervisorState;

/// Threads of a worker besides those of its engines and programs: for reports, the log, heartbeats,
/// the watchdog, dumps and weights. There are about ten.
const OWN_THREADS: usize = 32;

/// The same with a driver, which starts threads of its own.
const OWN_THREADS_WITH_DRIVER: usize = 256;

/// Threads for each program: that of its session, and that of the session before it, which frees
/// memory.
const THREADS_OF_A_PROGRAM: usize = 2;

/// Threads of a worker whose engines have `engine_threads` threads each (0: as many as there are
/// processors), without those for its programs.
pub(super) fn own_threads(engines: usize, engine_threads: usize, has_driver: bool) -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let own = match has_driver {
        true => OWN_THREADS_WITH_DRIVER,
        false => OWN_THREADS,
    };
    engines * engine_threads.max(processors) + own
}

/// The most threads of the executor of a virtual machine whose engines have `engine_threads`
/// threads each (0: as many as there are processors), with so many programs, and connections before
/// their first message. A connection that has been closed may have a thread beside the next one.
pub fn machine_threads(
    (engines, engine_threads, has_driver): (usize, usize, bool),
    programs: usize,
    handshakes: usize,
) -> usize {
    limit(own_threads(engines, engine_threads, has_driver), programs) + 2 * handshakes
}

/// How often a process is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Looks how many threads a process has.
#[derive(Debug)]
pub struct ThreadWatch {
    files: ProcFiles,
    max: usize,
    /// When the process was looked at last.
    last: Instant,
}

impl ThreadWatch {
    /// Watches a process that the caller has started, nobody has waited for, and that has not
    /// hidden: it may have `max` threads.
    ///
    /// # Errors
    /// The process has hidden, or has ended.
    pub fn begin(pid: u32, max: usize) -> io::Result<ThreadWatch> {
        Ok(ThreadWatch {
            files: ProcFiles::open(pid)?,
            max,
            last: Instant::now(),
        })
    }

    /// Looks at the process, if that is due. Returns how many threads it has and may have, if it
    /// has more.
    pub fn look(&mut self) -> Option<(usize, usize)> {
        if self.last.elapsed() < LOOK_INTERVAL {
            return None;
        }
        self.last = Instant::now();
        let count = self.files.thread_count();
        (count > self.max).then_some((count, self.max))
    }
}

/// The most threads of a worker with so many programs. Programs count from when it was given them
/// until it has reported their end: a worker cannot claim any.
fn limit(own_threads: usize, programs: usize) -> usize {
    own_threads + THREADS_OF_A_PROGRAM * programs
}

/// Marks the workers with too many threads. The thread that watches such a worker kills it.
pub(super) fn end_workers(shared: &SupervisorState) {
    let Some(&own_threads) = shared.thread_limit.get() else {
        return;
    };
    for (id, worker) in &mut shared.processes().workers {
        let threads = worker.files.as_ref().map_or(0, ProcFiles::thread_count);
        let limit = limit(own_threads, worker.sessions.len());
        if threads <= limit || worker.must_be_killed {
            continue;
        }
        error!(
            worker = id,
            pid = worker.pid,
            guest = worker.guest_or_source(),
            "the worker has {threads} threads, its limit is {limit}, and is killed: its guest \
             loses its sessions"
        );
        worker.must_be_killed = true;
        worker.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A session has a thread, and the one before it may still free memory.
    #[test]
    fn limits_grow_with_engines_drivers_and_programs() {
        let own = own_threads(1, 64, false);
        // The engine, and what a process has without programs.
        assert!((64 + 20..64 + 64).contains(&own), "{own}");
        assert!(own_threads(2, 64, false) >= own + 64);
        assert!(own_threads(1, 64, true) >= own + 128);
        assert!(own_threads(1, 0, false) > 20);
        assert!(limit(own, 64) >= own + 2 * 64);
        assert!(
            limit(own, 64) <= own + 4 * 64,
            "a worker cannot have any number"
        );
        let of_machine =
            |programs, handshakes| machine_threads((1, 64, false), programs, handshakes);
        assert_eq!(of_machine(0, 0), own);
        assert!(of_machine(64, 0) >= own + 2 * 64);
        assert!(of_machine(0, 64) >= own + 64);
    }
}
