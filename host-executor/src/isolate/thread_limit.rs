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

use vgpu_transport::link::pci::directory::SLOTS;

use super::process::ProcFiles;

/// Threads of a process besides those of its engines and programs: for reports, the log,
/// heartbeats, the watchdog, dumps and commands. There are about ten.
const OWN_THREADS: usize = 32;

/// The same with a driver, which starts threads of its own.
const OWN_THREADS_WITH_DRIVER: usize = 256;

/// Threads for each engine besides those that compute: they ask it whether it works, hash weights,
/// and read the figures of its GPU.
const THREADS_OF_AN_ENGINE: usize = 3;

/// Sessions that have threads, for each program: its own, and the one before it, which frees
/// memory.
const SESSIONS_OF_A_PROGRAM: usize = 2;

/// Programs of a virtual machine, one in each slot of its device, and those of the machine before,
/// whose sessions end.
const MACHINE_PROGRAMS: usize = 2 * SLOTS;

/// Further threads of the process of a virtual machine: the answers of its control socket, of which
/// there are 16 at once, and the two threads of a vfio-user device and of the one before it.
const MACHINE_THREADS: usize = 16 + 2 * 2;

/// What the threads of a process depend on: its engines.
#[derive(Debug, Clone, Copy)]
pub struct EngineThreads {
    /// The number of engines.
    pub engines: usize,
    /// The threads with which each of them computes on processors. 0: as many as there are.
    pub threads: usize,
    /// Whether one of them loads a driver.
    pub has_driver: bool,
    /// Whether one of them is a backend of ggml. On ggml's CPU backend each session computes with
    /// threads of its own: the OpenMP library keeps a team for each thread that has computed.
    pub has_ggml: bool,
}

impl EngineThreads {
    /// The threads of one engine, or as many as there are processors, if these are more.
    fn of_an_engine(self) -> usize {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        self.threads.max(processors)
    }

    /// The threads of a process without programs.
    fn without_programs(self) -> usize {
        let own = match self.has_driver {
            true => OWN_THREADS_WITH_DRIVER,
            false => OWN_THREADS,
        };
        // The thread that starts an engine of ggml may compute with a team of its own.
        let teams = 1 + usize::from(self.has_ggml);
        self.engines * (teams * self.of_an_engine() + THREADS_OF_AN_ENGINE) + own
    }

    /// The threads of each program.
    fn of_a_program(self) -> usize {
        // The thread of a session is one of its team.
        let of_a_session = match self.has_ggml {
            true => self.of_an_engine(),
            false => 1,
        };
        SESSIONS_OF_A_PROGRAM * of_a_session
    }

    /// The most threads of a worker with so many programs. Programs count from when it was given
    /// them until it has reported their end: a worker cannot claim any.
    pub(super) fn of_worker(self, programs: usize) -> usize {
        self.without_programs() + self.of_a_program() * programs
    }

    /// The most threads of the process of a virtual machine.
    pub fn of_machine(self) -> usize {
        self.of_worker(MACHINE_PROGRAMS) + MACHINE_THREADS
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: EngineThreads = EngineThreads {
        engines: 1,
        threads: 64,
        has_driver: false,
        has_ggml: false,
    };

    /// A session has a thread, and the one before it may still free memory.
    #[test]
    fn limits_grow_with_engines_drivers_and_programs() {
        let own = CPU.of_worker(0);
        // The engine, and what a process has without programs.
        assert!((64 + 20..64 + 64).contains(&own), "{own}");
        let two = EngineThreads { engines: 2, ..CPU };
        assert!(two.of_worker(0) >= own + 64);
        let has_driver = true;
        let driver = EngineThreads { has_driver, ..CPU };
        assert!(driver.of_worker(0) >= own + 128);
        assert!(EngineThreads { threads: 0, ..CPU }.of_worker(0) > 20);
        assert_eq!(CPU.of_worker(64), own + 2 * 64);
        // A virtual machine has 7 programs.
        let machine = CPU.of_machine() - own;
        assert!((2 * 7 + 16..64).contains(&machine), "{machine}");
    }

    /// On ggml's CPU backend each session has a team of threads.
    #[test]
    fn limits_grow_with_the_teams_of_a_backend_of_ggml() {
        let ggml = EngineThreads {
            has_driver: true,
            has_ggml: true,
            ..CPU
        };
        assert_eq!(ggml.of_worker(5) - ggml.of_worker(0), 5 * 2 * 64);
        let machine = ggml.of_machine() - ggml.of_worker(0);
        assert!(machine >= 7 * 2 * 64, "{machine}");
    }
}
