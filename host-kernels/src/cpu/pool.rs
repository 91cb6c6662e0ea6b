//! The threads: they enter a graph once and meet at a spinning barrier after each step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::plan::{Fault, Step};
use crate::engine::{EngineError, RunError};

/// Turns of the barrier's loop before a waiting thread lets others run.
const SPINS: u32 = 4096;

/// A fixed set of threads and the scratch memory they share. Runs one graph at a time.
pub(super) struct Pool {
    threads: rayon::ThreadPool,
    scratch: Mutex<Scratch>,
}

/// Working memory for the steps of a graph. Grows to the largest that was ever asked for.
#[derive(Default)]
struct Scratch {
    lines: Vec<Line>,
}

/// One cache line, so that scratch memory is aligned for any vector.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u8; 64]);

impl Pool {
    pub(super) fn new(threads: usize) -> Result<Pool, EngineError> {
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("vgpu-cpu-{i}"))
            .build()
            .map_err(|e| EngineError::Unsupported {
                op: "a thread pool",
                why: e.to_string(),
            })?;
        Ok(Pool {
            threads,
            scratch: Mutex::default(),
        })
    }

    /// How many threads run a step.
    pub(super) fn workers(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// Runs the steps in order, each on all threads. Stops after the first that fails.
    pub(super) fn run(&self, steps: &[Step], scratch_bytes: usize) -> Result<(), RunError> {
        let mut scratch = self
            .scratch
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let lines = scratch_bytes.div_ceil(64);
        if scratch.lines.len() < lines {
            scratch.lines.resize(lines, Line([0; 64]));
        }
        let run = Run {
            steps,
            barrier: Barrier::new(self.workers()),
            counters: [AtomicUsize::new(0), AtomicUsize::new(0)],
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            scratch: ScratchPtr(scratch.lines.as_mut_ptr().cast()),
        };
        self.threads
            .broadcast(|context| run.work(context.index(), context.num_threads()));
        run.failure
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .map_or(Ok(()), Err)
    }
}

struct ScratchPtr(*mut u8);

// SAFETY: the memory is locked for the whole run; which worker touches which part is a matter between
// the steps of one operator.
unsafe impl Sync for ScratchPtr {}

/// One run of one graph.
struct Run<'a> {
    steps: &'a [Step],
    barrier: Barrier,
    /// Chunk counters of this step and the next, in turns: the one not in use is reset by the step
    /// between, so that no thread can still be counting on it.
    counters: [AtomicUsize; 2],
    failed: AtomicBool,
    failure: Mutex<Option<RunError>>,
    scratch: ScratchPtr,
}

impl Run<'_> {
    fn work(&self, index: usize, count: usize) {
        for (i, step) in self.steps.iter().enumerate() {
            let worker = Worker {
                index,
                count,
                counter: &self.counters[i % 2],
                scratch: self.scratch.0,
            };
            if index == 0 {
                // Used by step i - 1 and again by step i + 1; the barrier before this step and the one
                // after it keep both away from this store.
                self.counters[(i + 1) % 2].store(0, Ordering::Relaxed);
            }
            // A panic must not leave the others waiting at the barrier for ever.
            let outcome = catch_unwind(AssertUnwindSafe(|| (step.kernel)(&worker)));
            if let Err(error) = outcome.unwrap_or_else(|panic| Err(Fault::panic(panic.as_ref()))) {
                let mut failure = self
                    .failure
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                failure.get_or_insert_with(|| step.error(error));
                self.failed.store(true, Ordering::Relaxed);
            }
            self.barrier.wait();
            // The barrier orders the store above before this load: all threads leave together.
            if self.failed.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

/// One thread at work on one step.
pub(crate) struct Worker<'a> {
    index: usize,
    count: usize,
    counter: &'a AtomicUsize,
    scratch: *mut u8,
}

impl Worker<'_> {
    /// The number of this thread.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// This thread's part of `units` of equal work: one run of neighbours.
    pub(crate) fn share(&self, units: usize) -> std::ops::Range<usize> {
        let part = units / self.count;
        let rest = units % self.count;
        let start = self.index * part + self.index.min(rest);
        start..start + part + usize::from(self.index < rest)
    }

    /// Chunks of up to `grain` out of `units`, dealt to whichever thread comes first. A step uses this
    /// at most once, with the same arguments on every thread.
    pub(crate) fn chunks(
        &self,
        units: usize,
        grain: usize,
    ) -> impl Iterator<Item = std::ops::Range<usize>> {
        let grain = grain.max(1);
        let counter = self.counter;
        std::iter::from_fn(move || {
            let start = counter.fetch_add(1, Ordering::Relaxed).checked_mul(grain)?;
            (start < units).then(|| start..units.min(start + grain))
        })
    }

    /// The scratch memory that the step's operator asked for, shared by all threads, 64-byte aligned.
    /// It keeps its contents from one step of the operator to the next and holds anything before the first.
    pub(crate) fn scratch(&self) -> *mut u8 {
        self.scratch
    }
}

/// A barrier that spins, for threads that meet every few microseconds.
struct Barrier {
    members: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
}

impl Barrier {
    fn new(members: usize) -> Barrier {
        Barrier {
            members,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
        }
    }

    /// Returns when all members have called it. What any did before, all see after.
    fn wait(&self) {
        let generation = self.generation.load(Ordering::Relaxed);
        // AcqRel: a release of our work to the last to arrive, which acquires everybody's.
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            // Nobody can arrive again before the generation changes, so this store races with nothing.
            self.arrived.store(0, Ordering::Relaxed);
            // Pairs with the acquire below: passes on all that the last one has acquired.
            self.generation
                .store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut spins = 0;
        while self.generation.load(Ordering::Acquire) == generation {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                // More threads than free cores: the one we wait for may need this core.
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(kernel: impl Fn(&Worker<'_>) -> Result<(), Fault> + Send + Sync + 'static) -> Step {
        Step {
            kernel: Box::new(kernel),
            node: 3,
            op: "TEST",
        }
    }

    #[test]
    fn every_unit_is_done_once_and_steps_do_not_overlap() {
        let pool = Pool::new(3).unwrap();
        let done: &'static [AtomicUsize] = Box::leak(
            (0..1000)
                .map(|_| AtomicUsize::new(0))
                .collect::<Vec<_>>()
                .into_boxed_slice(),
        );
        let steps: Vec<Step> = (0..50)
            .map(|round| {
                step(move |w| {
                    let add = |range: std::ops::Range<usize>| {
                        for i in range {
                            assert_eq!(done[i].fetch_add(1, Ordering::Relaxed), round);
                        }
                    };
                    if round % 2 == 0 {
                        w.chunks(1000, 7).for_each(add);
                    } else {
                        add(w.share(1000));
                    }
                    Ok(())
                })
            })
            .collect();
        pool.run(&steps, 0).unwrap();
        assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 50));
    }

    #[test]
    fn a_fault_or_a_panic_ends_the_run_and_leaves_the_pool_usable() {
        let pool = Pool::new(2).unwrap();
        let after = step(|_| unreachable!("a step after the failure"));
        let fault = step(|w| {
            if w.index() == 1 {
                Err(Fault::Index {
                    index: -1,
                    count: 4,
                })
            } else {
                Ok(())
            }
        });
        let error = pool.run(&[fault, after], 0).unwrap_err();
        assert_eq!(
            error,
            RunError::Index {
                node: 3,
                op: "TEST",
                index: -1,
                count: 4
            }
        );
        let panic = step(|w| {
            if w.index() == 0 {
                panic!("boom {}", 7)
            } else {
                Ok(())
            }
        });
        let error = pool.run(&[panic], 0).unwrap_err();
        assert_eq!(
            error,
            RunError::Kernel {
                node: 3,
                op: "TEST",
                message: "boom 7".into()
            }
        );
        pool.run(&[step(|_| Ok(()))], 4096).unwrap();
    }
}
