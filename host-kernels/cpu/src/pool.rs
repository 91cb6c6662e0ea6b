//! The threads: they enter a graph once and meet at a spinning barrier after each step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;

use super::crew::{Barrier, Crew};
use super::plan::Fault;
use super::stages::Step;
use vgpu_engine::{EngineError, RunError, Turn};

/// Scratch memories that are kept for the next graphs: as many as are likely to be under way at once.
const KEPT_SCRATCH: usize = 4;

/// A fixed set of threads and the scratch memory they share. Runs one graph at a time.
pub(super) struct Pool {
    crew: Crew,
    running: Mutex<()>,
    /// Scratch memories that no run has, the one used last at the end.
    scratch: Mutex<Vec<Scratch>>,
}

/// A run between two turns.
pub(super) struct Started {
    /// The step that comes next.
    step: usize,
    /// How many of its chunks were dealt already.
    dealt: usize,
    /// Holds what one step of an operator has left for the next, so it is the run's own until its end.
    scratch: Scratch,
    /// Where in it lies what one operator keeps for the next.
    kept: usize,
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
    /// A pool of `threads`, each at one of `places` if there are any.
    pub(super) fn new(threads: usize, places: &[CpuSet]) -> Result<Pool, EngineError> {
        Ok(Pool {
            crew: Crew::new(threads, places)?,
            running: Mutex::default(),
            scratch: Mutex::default(),
        })
    }

    /// How many threads run a step.
    pub(super) fn workers(&self) -> usize {
        self.crew.size()
    }

    /// A run that begins with the first step.
    pub(super) fn start(&self, scratch_bytes: usize, kept_bytes: usize) -> Started {
        let mut scratch = lock(&self.scratch).pop().unwrap_or_default();
        let first_kept = scratch_bytes.div_ceil(64);
        let lines = first_kept + kept_bytes.div_ceil(64);
        if scratch.lines.len() < lines {
            scratch.lines.resize(lines, Line([0; 64]));
        }
        Started {
            step: 0,
            dealt: 0,
            scratch,
            kept: first_kept * 64,
        }
    }

    /// Runs the steps in order, each on all threads, until the end, the first failure, or the end of the turn; then
    /// returns what to go on with.
    pub(super) fn run(
        &self,
        steps: &[Step],
        started: Started,
        turn: &Turn,
    ) -> Result<Option<Started>, RunError> {
        self.run_on(steps, started, turn, None)
    }

    /// The same to the end, and when each step was done, from the moment that the first began.
    pub(super) fn run_timed(
        &self,
        steps: &[Step],
        started: Started,
    ) -> Result<Vec<Duration>, RunError> {
        let clock = Clock {
            begin: Instant::now(),
            ends: Mutex::new(Vec::with_capacity(steps.len())),
        };
        // A turn without an end.
        self.run_on(steps, started, &Turn::new(), Some(&clock))?;
        Ok(clock
            .ends
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner))
    }

    fn run_on(
        &self,
        steps: &[Step],
        mut started: Started,
        turn: &Turn,
        clock: Option<&Clock>,
    ) -> Result<Option<Started>, RunError> {
        let _alone = lock(&self.running);
        let mut dealt = [0, 0];
        dealt[started.step % 2] = started.dealt;
        let run = Run {
            steps,
            first: started.step,
            barrier: Barrier::new(self.workers()),
            counters: dealt.map(AtomicUsize::new),
            turn,
            clock,
            leave: Leave::default(),
            failure: Mutex::new(None),
            scratch: ScratchPtr(started.scratch.lines.as_mut_ptr().cast()),
            kept: started.kept,
        };
        let count = self.workers();
        // SAFETY: `running` is locked.
        unsafe { self.crew.run(&|index| run.work(index, count)) };
        let failure = run.failure.into_inner();
        let failure = failure.unwrap_or_else(PoisonError::into_inner);
        let next = run.leave.next(steps.len());
        match (failure, next) {
            (None, Some(step)) => Ok(Some(Started {
                step,
                dealt: match step == run.leave.after() {
                    true => run.counters[step % 2].load(Ordering::Relaxed),
                    false => 0,
                },
                scratch: started.scratch,
                kept: started.kept,
            })),
            (failure, _) => {
                self.give_back(started.scratch);
                failure.map_or(Ok(None), Err)
            }
        }
    }

    fn give_back(&self, scratch: Scratch) {
        let mut kept = lock(&self.scratch);
        if kept.len() < KEPT_SCRATCH {
            kept.push(scratch);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct ScratchPtr(*mut u8);

// SAFETY: the memory is locked for the whole run; which worker touches which part is a matter between
// the steps of one operator.
unsafe impl Sync for ScratchPtr {}

/// One turn of one graph.
struct Run<'a> {
    steps: &'a [Step],
    first: usize,
    barrier: Barrier,
    /// Chunk counters of this step and the next, in turns: the one not in use is reset by the step
    /// between, so that no thread can still be counting on it.
    counters: [AtomicUsize; 2],
    turn: &'a Turn,
    clock: Option<&'a Clock>,
    leave: Leave,
    failure: Mutex<Option<RunError>>,
    scratch: ScratchPtr,
    kept: usize,
}

/// When steps were done, for who wants to know.
struct Clock {
    begin: Instant,
    ends: Mutex<Vec<Duration>>,
}

/// Where the threads leave a graph before its end, all behind the same barrier.
///
/// A thread may read this behind the barrier of step `i` while a faster one is in step `i + 1` already and asks to
/// leave after that. So it is the number of a step, and only who is behind that step's barrier leaves: a mere flag
/// would send the slow thread away and have the fast one wait for it for ever.
struct Leave {
    after: AtomicUsize,
    /// Chunks of that step are left.
    in_step: AtomicBool,
}

impl Default for Leave {
    fn default() -> Leave {
        Leave {
            after: AtomicUsize::new(usize::MAX),
            in_step: AtomicBool::new(false),
        }
    }
}

impl Leave {
    /// Has all threads leave when they are done with `step`, in which the caller is.
    fn ask(&self, step: usize, in_step: bool) {
        if in_step {
            self.in_step.store(true, Ordering::Relaxed);
        }
        self.after.store(step, Ordering::Relaxed);
    }

    /// The step that they left after; `usize::MAX` if they did not leave.
    fn after(&self) -> usize {
        self.after.load(Ordering::Relaxed)
    }

    /// The step to go on with, if any of `steps` is left.
    fn next(&self, steps: usize) -> Option<usize> {
        let after = self.after();
        match self.in_step.load(Ordering::Relaxed) {
            true => Some(after),
            false => after.checked_add(1).filter(|&next| next < steps),
        }
    }
}

impl Run<'_> {
    fn work(&self, index: usize, count: usize) {
        for (i, step) in self.steps.iter().enumerate().skip(self.first) {
            if index == 0 {
                // Used by step i - 1 and again by step i + 1; the barrier before this step and the one
                // after it keep both away from this store.
                self.counters[(i + 1) % 2].store(0, Ordering::Relaxed);
            }
            for part in &step.parts {
                if part.is_solo && index != 0 {
                    continue;
                }
                let worker = Worker {
                    index,
                    count: if part.is_solo { 1 } else { count },
                    counter: &self.counters[i % 2],
                    scratch: self.scratch.0.wrapping_add(part.scratch),
                    kept: self.scratch.0.wrapping_add(self.kept),
                    step: i,
                    is_alone: step.parts.len() == 1,
                    turn: self.turn,
                    leave: &self.leave,
                };
                // A panic must not leave the others waiting at the barrier for ever.
                let outcome = catch_unwind(AssertUnwindSafe(|| (part.kernel)(&worker)));
                let outcome = outcome.unwrap_or_else(|panic| Err(Fault::panic(panic.as_ref())));
                if let Err(fault) = outcome {
                    lock(&self.failure).get_or_insert_with(|| part.error(fault));
                    self.leave.ask(i, false);
                    break;
                }
            }
            if index == 0 && self.turn.is_over() {
                self.leave.ask(i, false);
            }
            self.barrier.wait();
            if let (0, Some(clock)) = (index, self.clock) {
                lock(&clock.ends).push(clock.begin.elapsed());
            }
            // The barrier orders the stores of this step before this load: all threads leave together.
            if self.leave.after() == i {
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
    kept: *mut u8,
    step: usize,
    /// Whether the step has no other kernel.
    is_alone: bool,
    turn: &'a Turn,
    leave: &'a Leave,
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
    ///
    /// When the turn of the graph is over, no more are dealt, and the next turn calls the kernel again for the rest. So
    /// what a kernel does before its chunks it does in each turn, and it has nothing to do behind them.
    pub(crate) fn chunks(
        &self,
        units: usize,
        grain: usize,
    ) -> impl Iterator<Item = std::ops::Range<usize>> {
        debug_assert!(self.is_alone, "other parts of a step would be done again");
        let grain = grain.max(1);
        let mut dealt_any = false;
        std::iter::from_fn(move || {
            // Not before the first chunk: every turn gets ahead.
            if dealt_any && self.turn.is_over() {
                self.leave.ask(self.step, true);
                return None;
            }
            dealt_any = true;
            let start = self
                .counter
                .fetch_add(1, Ordering::Relaxed)
                .checked_mul(grain)?;
            (start < units).then(|| start..units.min(start + grain))
        })
    }

    /// The scratch memory that the step's operator asked for, shared by all threads, 64-byte aligned.
    /// It keeps its contents from one step of the operator to the next and holds anything before the first.
    pub(crate) fn scratch(&self) -> *mut u8 {
        self.scratch
    }

    /// The memory that operators keep for those that follow ([`super::plan::Operands::keep`]), shared by all threads,
    /// 64-byte aligned.
    pub(crate) fn kept(&self) -> *mut u8 {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::super::stages::Part;
    use super::*;

    fn step(kernel: impl Fn(&Worker<'_>) -> Result<(), Fault> + Send + Sync + 'static) -> Step {
        Step {
            parts: vec![Part::new(Box::new(kernel), vec![3], 3, "TEST")],
        }
    }

    /// Runs to the end without ever yielding.
    fn run(pool: &Pool, steps: &[Step]) -> Result<(), RunError> {
        let left = pool.run(steps, pool.start(4096, 0), &Turn::new())?;
        assert!(left.is_none(), "nobody has ended the turn");
        Ok(())
    }

    #[test]
    fn every_unit_is_done_once_and_steps_do_not_overlap() {
        let pool = Pool::new(3, &[]).unwrap();
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
        run(&pool, &steps).unwrap();
        assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 50));
    }

    #[test]
    fn a_fault_or_a_panic_ends_the_run_and_leaves_the_pool_usable() {
        let pool = Pool::new(2, &[]).unwrap();
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
        let error = run(&pool, &[fault, after]).unwrap_err();
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
        let error = run(&pool, &[panic]).unwrap_err();
        assert_eq!(
            error,
            RunError::Kernel {
                node: 3,
                op: "TEST",
                message: "boom 7".into()
            }
        );
        run(&pool, &[step(|_| Ok(()))]).unwrap();
    }

    #[test]
    fn turns_of_several_graphs_mix_and_each_unit_is_done_once() {
        const UNITS: usize = 40;
        const STEPS: usize = 12;
        let pool = Pool::new(3, &[]).unwrap();
        let turn: &'static Turn = Box::leak(Box::new(Turn::new()));
        turn.set_end(Some(std::time::Duration::ZERO));
        // Each step of a graph counts the units of the step before in scratch, which the other graphs must not touch.
        let graph = |name: usize| -> Vec<Step> {
            (0..STEPS)
                .map(|round| {
                    step(move |w| {
                        // SAFETY: asked for below; units are dealt once each, and read behind a barrier.
                        let cells = unsafe {
                            std::slice::from_raw_parts(w.scratch().cast::<AtomicUsize>(), UNITS)
                        };
                        let visit = |range: std::ops::Range<usize>| {
                            for cell in &cells[range] {
                                let found = cell.swap(name * 1000 + round, Ordering::Relaxed);
                                assert!(round == 0 || found == name * 1000 + round - 1);
                            }
                        };
                        match round % 3 {
                            0 => visit(w.share(UNITS)),
                            _ => w.chunks(UNITS, 3).for_each(visit),
                        }
                        Ok(())
                    })
                })
                .collect()
        };
        let graphs = [graph(1), graph(2), graph(3)];
        let mut started: Vec<_> = graphs
            .iter()
            .map(|_| Some(pool.start(8 * UNITS, 0)))
            .collect();
        let mut turns = 0;
        while started.iter().any(Option::is_some) {
            for (graph, started) in graphs.iter().zip(&mut started) {
                if let Some(state) = started.take() {
                    *started = pool.run(graph, state, turn).unwrap();
                    turns += 1;
                }
            }
        }
        assert!(
            turns > graphs.len() * STEPS,
            "no step was cut: {turns} turns"
        );
        assert!(
            lock(&pool.scratch).len() == graphs.len(),
            "scratch memory is lost"
        );
    }

    #[test]
    fn several_sessions_do_not_make_more_threads_run() {
        const THREADS: usize = 2;
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let pool = Pool::new(THREADS, &[]).unwrap();
        let work = |_: &Worker<'_>| {
            MOST.fetch_max(RUNNING.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_micros(200));
            RUNNING.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let steps: Vec<Step> = (0..20).map(|_| step(work)).collect();
                    run(&pool, &steps).unwrap();
                });
            }
        });
        assert_eq!(MOST.load(Ordering::SeqCst), THREADS);
    }

    #[test]
    fn a_failure_behind_a_barrier_that_a_slow_thread_has_not_left_yet_keeps_nobody_waiting() {
        let pool = Pool::new(4, &[]).unwrap();
        let fault = |w: &Worker<'_>| match w.index() {
            0 => Ok(()),
            _ => Err(Fault::Index { index: 9, count: 1 }),
        };
        for _ in 0..2000 {
            let steps = [step(|_| Ok(())), step(fault), step(|_| unreachable!())];
            run(&pool, &steps).unwrap_err();
        }
    }
}
