//! Runs the phases of a graph on the thread team. Threads enter a graph once and meet at a spinning
//! barrier after each phase.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use rustix::thread::CpuSet;
use vgpu_engine::{EngineError, RunError, Turn};

use crate::barrier_schedule::Phase;
use crate::gemm::ThreadMemory;
use crate::kernel::{EarlyExit, Fault, ThreadProgress, Worker};
use crate::thread_team::{Barrier, ThreadTeam, lock};

/// Scratch memories that are kept for later runs: as many as there are likely to be runs in
/// progress.
const MAX_FREE_SCRATCH: usize = 4;

/// The largest scratch memory that is kept for later runs, in bytes.
const MAX_KEPT_BYTES: usize = 32 << 20;

/// The largest scratch memory that is kept when a plan ends, in bytes.
const MAX_IDLE_BYTES: usize = 1 << 20;

/// A fixed set of threads and the scratch memory that they share. Runs one graph at a time.
pub(crate) struct Runner {
    team: ThreadTeam,
    running: Mutex<()>,
    /// Scratch memories that no run owns, the most recently used last.
    scratch: Mutex<Vec<Scratch>>,
    /// For each thread of a run, the memory in which it prepares the operands of products.
    thread_memory: Vec<Mutex<ThreadMemory>>,
    /// Whether each run begins with other contents of working memory, for tests.
    pub(crate) fills_scratch: bool,
    /// The runs so far that have filled their working memory.
    filled: AtomicUsize,
}

/// What working memory is filled with, in turn: numbers that are not finite, zeros, large numbers,
/// small ones, and ones (half floats).
const FILLERS: [u8; 5] = [0xff, 0x00, 0x7f, 0x01, 0x3c];

/// A run between two turns.
pub(crate) struct RunState {
    /// The next phase.
    phase: usize,
    /// The chunks of that phase that threads have already taken.
    dealt: usize,
    /// Carries data from one kernel of an operator to the next, so the run owns it until its end.
    scratch: Scratch,
    /// Offset of the activation memory in `scratch`, in bytes.
    activations: usize,
    /// The most bytes that a product may prepare in each buffer of a thread.
    prepared: usize,
}

/// Working memory of a run.
#[derive(Default)]
struct Scratch {
    lines: Lines,
    /// How far each thread has got in the phase that a turn begins with. When a turn is over, how
    /// far it has got in the phase that the next turn begins with.
    progress: Vec<Mutex<ThreadProgress>>,
}

impl Scratch {
    /// Bytes of the memory of kernels.
    fn bytes(&self) -> usize {
        self.lines.len() * size_of::<CacheLine>()
    }
}

/// Initialised cache lines.
enum Lines {
    Allocated(Vec<CacheLine>),
    /// Pages that the kernel clears when they are first accessed. To clear gigabytes at once would
    /// be work that no turn can end in.
    Mapped(MmapMut),
}

impl Default for Lines {
    fn default() -> Lines {
        Lines::Allocated(Vec::new())
    }
}

/// The fewest bytes that are mapped.
const MIN_MAPPED: usize = 1 << 20;

impl Lines {
    /// `count` lines; `None` if there is no memory.
    fn zeroed(count: usize) -> Option<Lines> {
        let bytes = count.checked_mul(size_of::<CacheLine>())?;
        if bytes >= MIN_MAPPED {
            return MmapMut::map_anon(bytes).ok().map(Lines::Mapped);
        }
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).ok()?;
        lines.resize(count, CacheLine([0; 64]));
        Some(Lines::Allocated(lines))
    }

    fn len(&self) -> usize {
        match self {
            Lines::Allocated(lines) => lines.len(),
            Lines::Mapped(pages) => pages.len() / size_of::<CacheLine>(),
        }
    }

    /// The first line, aligned to a cache line: pages are.
    fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Lines::Allocated(lines) => lines.as_mut_ptr().cast(),
            Lines::Mapped(pages) => pages.as_mut_ptr(),
        }
    }

    fn fill(&mut self, filler: u8) {
        match self {
            Lines::Allocated(lines) => lines.fill(CacheLine([filler; 64])),
            Lines::Mapped(pages) => pages.fill(filler),
        }
    }
}

/// One cache line, so that scratch memory is aligned for every vector.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine(#[allow(dead_code)] [u8; 64]);

impl Runner {
    /// A runner with `threads` threads. With `cpu_sets`, thread `i` is pinned to set `i` modulo
    /// their number.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if a thread cannot be created or pinned.
    pub(crate) fn new(threads: usize, cpu_sets: &[CpuSet]) -> Result<Runner, EngineError> {
        let team = ThreadTeam::new(threads, cpu_sets)?;
        let thread_memory = (0..team.size()).map(|_| Mutex::default()).collect();
        Ok(Runner {
            team,
            running: Mutex::default(),
            scratch: Mutex::default(),
            thread_memory,
            fills_scratch: false,
            filled: AtomicUsize::new(0),
        })
    }

    /// The number of threads that run a phase.
    pub(crate) fn workers(&self) -> usize {
        self.team.size()
    }

    /// A run that begins with the first phase.
    ///
    /// # Errors
    /// [`RunError::OutOfMemory`] if there is no memory of this size.
    pub(crate) fn start(
        &self,
        scratch_bytes: usize,
        activation_bytes: usize,
        prepared: usize,
    ) -> Result<RunState, RunError> {
        let mut scratch = lock(&self.scratch).pop().unwrap_or_default();
        let scratch_lines = scratch_bytes.div_ceil(64);
        let lines = scratch_lines.saturating_add(activation_bytes.div_ceil(64));
        if lines > scratch.lines.len() {
            // Not both at once: a run has the memory that its tenant is charged for.
            scratch.lines = Lines::default();
            let Some(zeroed) = Lines::zeroed(lines) else {
                let wanted = (lines as u64).saturating_mul(64);
                return Err(RunError::OutOfMemory { wanted });
            };
            scratch.lines = zeroed;
        }
        if self.fills_scratch {
            let run = self.filled.fetch_add(1, Ordering::Relaxed);
            let filler = FILLERS[run % FILLERS.len()];
            scratch.lines.fill(filler);
            for memory in &self.thread_memory {
                lock(memory).fill(filler);
            }
        }
        scratch.progress.resize_with(self.workers(), Mutex::default);
        for progress in &mut scratch.progress {
            *progress.get_mut().unwrap_or_else(PoisonError::into_inner) = ThreadProgress::default();
        }
        Ok(RunState {
            phase: 0,
            dealt: 0,
            scratch,
            activations: scratch_lines * 64,
            prepared,
        })
    }

    /// Runs the phases in order, each on all threads, until the end, the first failure, or the end
    /// of the turn. Returns the state to continue from, or `None` at the end of the graph.
    ///
    /// # Errors
    /// The first failure of a kernel.
    pub(crate) fn run(
        &self,
        phases: &[Phase],
        state: RunState,
        turn: &Turn,
    ) -> Result<Option<RunState>, RunError> {
        self.run_with_clock(phases, state, turn, None)
    }

    /// Runs the phases to the end. Returns when each phase ended, as a time since the first began.
    ///
    /// # Errors
    /// As [`run`](Runner::run).
    pub(crate) fn run_timed(
        &self,
        phases: &[Phase],
        state: RunState,
    ) -> Result<Vec<Duration>, RunError> {
        let clock = Clock {
            begin: Instant::now(),
            ends: Mutex::new(Vec::with_capacity(phases.len())),
        };
        // A turn without an end.
        self.run_with_clock(phases, state, &Turn::new(), Some(&clock))?;
        Ok(clock
            .ends
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner))
    }

    fn run_with_clock(
        &self,
        phases: &[Phase],
        mut state: RunState,
        turn: &Turn,
        clock: Option<&Clock>,
    ) -> Result<Option<RunState>, RunError> {
        let _guard = lock(&self.running);
        let mut dealt = [0, 0];
        dealt[state.phase % 2] = state.dealt;
        let Scratch { lines, progress } = &mut state.scratch;
        let run = Run {
            phases,
            first: state.phase,
            barrier: Barrier::new(self.workers()),
            counters: dealt.map(AtomicUsize::new),
            progress,
            turn,
            clock,
            exit: EarlyExit::default(),
            failure: Mutex::new(None),
            scratch: ScratchPtr(lines.as_mut_ptr()),
            activations: state.activations,
            prepared: state.prepared,
            thread_memory: &self.thread_memory,
        };
        let count = self.workers();
        // SAFETY: this function holds the lock on `running`, so no other call of `run` is in
        // progress.
        unsafe { self.team.run(&|index| run.work(index, count)) };
        let failure = run.failure.into_inner();
        let failure = failure.unwrap_or_else(PoisonError::into_inner);
        let (exit, counters) = (run.exit, run.counters);
        match (failure, exit.next(phases.len())) {
            (None, Some(phase)) => Ok(Some(RunState {
                phase,
                dealt: match exit.in_phase() {
                    true => counters[phase % 2].load(Ordering::Relaxed),
                    false => 0,
                },
                scratch: state.scratch,
                activations: state.activations,
                prepared: state.prepared,
            })),
            (failure, _) => {
                self.give_back(state.scratch);
                failure.map_or(Ok(None), Err)
            }
        }
    }

    /// Frees the scratch memory of a plan that ends. Small memory is kept.
    pub(crate) fn trim(&self) {
        lock(&self.scratch).retain(|scratch| scratch.bytes() <= MAX_IDLE_BYTES);
    }

    /// Keeps scratch memory for later runs, or frees it.
    fn give_back(&self, scratch: Scratch) {
        let mut free = lock(&self.scratch);
        if free.len() < MAX_FREE_SCRATCH && scratch.bytes() <= MAX_KEPT_BYTES {
            free.push(scratch);
        }
    }
}

struct ScratchPtr(*mut u8);

// SAFETY: the pointer is shared, not the access. The run owns the memory exclusively; kernels
// divide it among the threads of a phase.
unsafe impl Sync for ScratchPtr {}

/// One turn of one graph.
struct Run<'a> {
    phases: &'a [Phase],
    first: usize,
    barrier: Barrier,
    /// Chunk counters of this phase and the next, alternating. The counter that is not in use is
    /// reset during the phase between its uses, when no thread can still count with it.
    counters: [AtomicUsize; 2],
    /// [`Scratch::progress`]
    progress: &'a [Mutex<ThreadProgress>],
    turn: &'a Turn,
    clock: Option<&'a Clock>,
    exit: EarlyExit,
    failure: Mutex<Option<RunError>>,
    scratch: ScratchPtr,
    activations: usize,
    /// [`RunState::prepared`]
    prepared: usize,
    /// [`Runner::thread_memory`]
    thread_memory: &'a [Mutex<ThreadMemory>],
}

/// When the phases of a timed run ended.
struct Clock {
    begin: Instant,
    ends: Mutex<Vec<Duration>>,
}

impl Run<'_> {
    fn work(&self, index: usize, count: usize) {
        let mut memory = lock(&self.thread_memory[index]);
        memory.swap(self.prepared);
        self.run_phases(index, count);
        memory.swap(usize::MAX);
    }

    fn run_phases(&self, index: usize, count: usize) {
        let mut progress = *lock(&self.progress[index]);
        let has_worked = Cell::new(false);
        for (i, phase) in self.phases.iter().enumerate().skip(self.first) {
            if index == 0 {
                // Used by phase i - 1 and again by phase i + 1. The barriers before and after this
                // phase keep both away from this store.
                self.counters[(i + 1) % 2].store(0, Ordering::Relaxed);
            }
            while let Some(part) = phase.parts.get(progress.parts) {
                if part.is_solo && index != 0 {
                    progress.parts += 1;
                    continue;
                }
                let worker = Worker {
                    index,
                    count: if part.is_solo { 1 } else { count },
                    counter: &self.counters[i % 2],
                    scratch: self.scratch.0.wrapping_add(part.scratch),
                    activations: self.scratch.0.wrapping_add(self.activations),
                    phase: i,
                    is_alone: phase.parts.len() == 1,
                    turn: self.turn,
                    exit: &self.exit,
                    finished: progress.units,
                    has_worked: &has_worked,
                    cut: Cell::new(None),
                    has_asked: Cell::new(false),
                    work: part.work,
                };
                // A panic must not leave the other threads waiting at the barrier forever.
                let outcome = catch_unwind(AssertUnwindSafe(|| (part.kernel)(&worker)));
                let outcome = outcome.unwrap_or_else(|panic| Err(Fault::panic(panic.as_ref())));
                if let Err(fault) = outcome {
                    lock(&self.failure).get_or_insert_with(|| part.error(fault));
                    self.exit.request(i, false);
                    break;
                }
                if let Some(units) = worker.cut.get() {
                    progress.units = units;
                    break;
                }
                progress = ThreadProgress {
                    parts: progress.parts + 1,
                    units: 0,
                };
            }
            if index == 0 && self.turn.is_over() {
                self.exit.request(i, false);
            }
            self.barrier.wait();
            if let (0, Some(clock)) = (index, self.clock) {
                lock(&clock.ends).push(clock.begin.elapsed());
            }
            // The barrier orders the requests of this phase before this load: all threads leave
            // here.
            if self.exit.after() == i {
                *lock(&self.progress[index]) = match self.exit.in_phase() {
                    true => progress,
                    false => ThreadProgress::default(),
                };
                return;
            }
            progress = ThreadProgress::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::barrier_schedule::PlannedKernel;
    use crate::kernel::Estimate;

    fn phase(kernel: impl Fn(&Worker<'_>) -> Result<(), Fault> + Send + Sync + 'static) -> Phase {
        Phase {
            parts: vec![PlannedKernel::new(
                Box::new(kernel),
                vec![3],
                (3, "TEST"),
                Estimate::default(),
            )],
        }
    }

    /// Runs to the end without ever yielding.
    fn run(runner: &Runner, phases: &[Phase]) -> Result<(), RunError> {
        let left = runner.run(phases, runner.start(4096, 0, usize::MAX)?, &Turn::new())?;
        assert!(left.is_none(), "the turn has no end");
        Ok(())
    }

    #[test]
    fn every_unit_is_done_once_and_phases_do_not_overlap() {
        let runner = Runner::new(3, &[]).unwrap();
        let done: &'static [AtomicUsize] = Box::leak(
            (0..1000)
                .map(|_| AtomicUsize::new(0))
                .collect::<Vec<_>>()
                .into_boxed_slice(),
        );
        let phases: Vec<Phase> = (0..50)
            .map(|round| {
                phase(move |w| {
                    let add = |range: std::ops::Range<usize>| {
                        for i in range {
                            assert_eq!(done[i].fetch_add(1, Ordering::Relaxed), round);
                        }
                    };
                    if round % 2 == 0 {
                        w.chunks(1000, 7).for_each(add);
                    } else {
                        w.share(1000).for_each(|i| add(i..i + 1));
                    }
                    Ok(())
                })
            })
            .collect();
        run(&runner, &phases).unwrap();
        assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 50));
    }

    #[test]
    fn a_kernel_that_reads_what_it_has_not_written_differs_in_each_run() {
        let mut runner = Runner::new(1, &[]).unwrap();
        runner.fills_scratch = true;
        let read: &'static AtomicUsize = Box::leak(Box::default());
        let faulty = || {
            phase(move |w| {
                // SAFETY: the run has 4096 bytes of initialised working memory.
                read.store(unsafe { *w.scratch().add(4000) }.into(), Ordering::Relaxed);
                Ok(())
            })
        };
        let results = [0; 3].map(|_| {
            run(&runner, &[faulty()]).unwrap();
            read.load(Ordering::Relaxed)
        });
        assert!(
            results[0] != results[1] && results[1] != results[2],
            "{results:?}"
        );
        runner.fills_scratch = false;
        run(&runner, &[faulty()]).unwrap();
        assert_eq!(read.load(Ordering::Relaxed), results[2]);
    }

    #[test]
    fn a_fault_or_a_panic_ends_the_run_and_leaves_the_runner_usable() {
        let runner = Runner::new(2, &[]).unwrap();
        let after = phase(|_| unreachable!("a phase after the failure"));
        let fault = phase(|w| {
            if w.index() == 1 {
                Err(Fault::Index {
                    index: -1,
                    count: 4,
                })
            } else {
                Ok(())
            }
        });
        let error = run(&runner, &[fault, after]).unwrap_err();
        assert_eq!(
            error,
            RunError::Index {
                node: 3,
                op: "TEST",
                index: -1,
                count: 4
            }
        );
        let panic = phase(|w| {
            if w.index() == 0 {
                panic!("boom {}", 7)
            } else {
                Ok(())
            }
        });
        let error = run(&runner, &[panic]).unwrap_err();
        assert_eq!(
            error,
            RunError::Kernel {
                node: 3,
                op: "TEST",
                message: "boom 7".into()
            }
        );
        run(&runner, &[phase(|_| Ok(()))]).unwrap();
    }

    #[test]
    fn units_of_several_graphs_interleave_and_run_once() {
        const UNITS: usize = 40;
        const PHASES: usize = 12;
        let runner = Runner::new(3, &[]).unwrap();
        let turn: &'static Turn = Box::leak(Box::new(Turn::new()));
        turn.set_end(Some(std::time::Duration::ZERO));
        // Each phase of a graph counts the units of the phase before in scratch, which the other
        // graphs must not touch.
        let graph = |name: usize| -> Vec<Phase> {
            (0..PHASES)
                .map(|round| {
                    phase(move |w| {
                        // SAFETY: each run has `8 * UNITS` bytes of scratch memory, aligned to 64
                        // bytes. The bytes are accessed as atomics only.
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
                            0 => w.share(UNITS).for_each(|i| visit(i..i + 1)),
                            _ => w.chunks(UNITS, 3).for_each(visit),
                        }
                        Ok(())
                    })
                })
                .collect()
        };
        let graphs = [graph(1), graph(2), graph(3)];
        let mut states: Vec<_> = graphs
            .iter()
            .map(|_| Some(runner.start(8 * UNITS, 0, 0).unwrap()))
            .collect();
        let mut turns = 0;
        while states.iter().any(Option::is_some) {
            for (graph, slot) in graphs.iter().zip(&mut states) {
                if let Some(state) = slot.take() {
                    *slot = runner.run(graph, state, turn).unwrap();
                    turns += 1;
                }
            }
        }
        assert!(
            turns > graphs.len() * PHASES,
            "no phase was cut: {turns} turns"
        );
        assert!(
            lock(&runner.scratch).len() == graphs.len(),
            "scratch memory is lost"
        );
    }

    #[test]
    fn scratch_memory_that_does_not_exist_is_an_error_and_large_memory_is_not_kept() {
        let runner = Runner::new(1, &[]).unwrap();
        let error = runner.start(usize::MAX, 64, 0).err();
        assert!(
            matches!(error, Some(RunError::OutOfMemory { .. })),
            "{error:?}"
        );
        for (bytes, kept) in [(2 * MAX_KEPT_BYTES, 0), (MAX_KEPT_BYTES, 1)] {
            lock(&runner.scratch).clear();
            let state = runner.start(bytes, 0, 0).unwrap();
            let left = runner.run(&[phase(|_| Ok(()))], state, &Turn::new());
            assert!(left.unwrap().is_none());
            assert_eq!(lock(&runner.scratch).len(), kept, "{bytes}");
            runner.trim();
            assert!(
                lock(&runner.scratch).is_empty(),
                "{bytes}: the plan is gone"
            );
        }
    }

    #[test]
    fn several_sessions_do_not_make_more_threads_run() {
        const THREADS: usize = 2;
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        static MAX_RUNNING: AtomicUsize = AtomicUsize::new(0);
        let runner = Runner::new(THREADS, &[]).unwrap();
        let work = |_: &Worker<'_>| {
            MAX_RUNNING.fetch_max(RUNNING.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_micros(200));
            RUNNING.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let phases: Vec<Phase> = (0..20).map(|_| phase(work)).collect();
                    run(&runner, &phases).unwrap();
                });
            }
        });
        assert_eq!(MAX_RUNNING.load(Ordering::SeqCst), THREADS);
    }

    #[test]
    fn failure_during_barrier_exit_does_not_block_other_threads() {
        let runner = Runner::new(4, &[]).unwrap();
        let fault = |w: &Worker<'_>| match w.index() {
            0 => Ok(()),
            _ => Err(Fault::Index { index: 9, count: 1 }),
        };
        for _ in 0..2000 {
            let phases = [phase(|_| Ok(())), phase(fault), phase(|_| unreachable!())];
            run(&runner, &phases).unwrap_err();
        }
    }
}
