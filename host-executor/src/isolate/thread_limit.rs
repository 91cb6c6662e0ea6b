//! How many threads a worker may have.
//!
//! A worker that a guest has taken over can start threads. The kernel counts them for the user and
//! for the unit of the service, of which all workers are: without a limit for each worker, one
//! could take all tasks that the unit may have, and nobody would get a further process.
#![forbid(unsafe_code)]

use std::thread;

use tracing::error;

use super::process::ProcFiles;
use super::state::{SupervisorState, Worker};

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

/// The most threads of a worker. Programs count from when it was given them until it has reported
/// their end: a worker cannot claim any.
fn limit(own_threads: usize, worker: &Worker) -> usize {
    own_threads + THREADS_OF_A_PROGRAM * worker.sessions.len()
}

/// Marks the workers with too many threads. The thread that watches such a worker kills it.
pub(super) fn end_workers(shared: &SupervisorState) {
    let Some(&own_threads) = shared.thread_limit.get() else {
        return;
    };
    for (id, worker) in &mut shared.processes().workers {
        let threads = worker.files.as_ref().map_or(0, ProcFiles::thread_count);
        let limit = limit(own_threads, worker);
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
