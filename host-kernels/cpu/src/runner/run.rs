//! A turn of one graph, or of several as a batch: what the threads of a team do.

use std::cell::{Cell, OnceCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vgpu_engine::{RunError, Turn};
use vgpu_transport::lock::{into_inner, lock};

use super::scratch::Scratch;
use crate::barrier_schedule::Phase;
use crate::batch::MAX_BATCH;
use crate::gemm::KeptThreadMemory;
use crate::kernel::{
    EarlyExit, Fault, JointMember, KernelMemory, KernelPosition, ThreadProgress, ThreadTurn, Worker,
};
use crate::thread_team::Barrier;

/// A run between two turns.
pub(crate) struct RunState {
    /// The next phase.
    pub(super) phase: usize,
    /// The chunks of that phase that threads have already taken.
    pub(super) taken_chunks: usize,
    /// Whether these chunks are tiles of a joint kernel in a batch.
    pub(super) is_joint: bool,
    /// A number that no other run of the runner has.
    pub(super) number: usize,
    /// Carries data from one kernel of an operator to the next, so the run owns it until its end.
    pub(super) scratch: Scratch,
    /// Offset of the activation memory in `scratch`, in bytes.
    pub(super) activations: usize,
    /// The most bytes that a product may prepare in each buffer of a thread.
    pub(super) prepared: usize,
    /// How the run has ended, if only memory is left to be freed.
    pub(super) ended: Option<Result<(), RunError>>,
}

impl RunState {
    /// How far the run has got. Runs of plans with one key that have got equally far can go on
    /// together.
    pub(crate) fn position(&self, phases: &[Phase]) -> (usize, usize) {
        let Some(joint) = phases.get(self.phase).and_then(Phase::joint) else {
            return (self.phase, 0);
        };
        let counts_tiles = self.is_joint || joint.has_tiles_alone();
        match self.taken_chunks == 0 || counts_tiles {
            true => (self.phase, self.taken_chunks),
            // In chunks of its own. Of the phases, none has this number.
            false => (usize::MAX - 1, self.number),
        }
    }
}

struct ScratchPtr(*mut u8);

// SAFETY: the pointer is shared, not the access. The run owns the memory exclusively; kernels
// divide it among the threads of a phase.
unsafe impl Sync for ScratchPtr {}

/// One turn of one graph, or of several graphs that run as a batch.
pub(super) struct Run<'a> {
    /// At least one, all with joint kernels in the same phases.
    pub(super) members: &'a [Member<'a>],
    /// Whether the first phase goes on with tiles of its joint kernel, also for a single member.
    pub(super) is_joint: bool,
    /// The first phase of this turn.
    pub(super) first: usize,
    /// The number of phases of each graph.
    pub(super) last: usize,
    pub(super) barrier: Barrier,
    pub(super) turn: &'a Turn,
    pub(super) clock: Option<&'a Clock>,
    pub(super) exit: EarlyExit,
    /// The members that have failed.
    pub(super) failures: AtomicUsize,
    /// The most bytes that a product of any member may prepare in each buffer of a thread.
    pub(super) prepared: usize,
    /// The memory of the runner in which each thread prepares the operands of products.
    pub(super) thread_memory: &'a [KeptThreadMemory],
}

/// One graph of a run.
pub(super) struct Member<'a> {
    pub(super) phases: &'a [Phase],
    /// Chunk counters of this phase and the next, alternating. The counter that is not in use is
    /// reset during the phase between its uses, when no thread can still count with it.
    counters: [AtomicUsize; 2],
    /// [`Scratch::progress`]
    progress: &'a [Mutex<ThreadProgress>],
    failure: Mutex<Option<RunError>>,
    /// Whether `failure` has an error. Threads read it after the next barrier.
    has_failed: AtomicBool,
    scratch: ScratchPtr,
    activations: usize,
}

impl<'a> Member<'a> {
    pub(super) fn new(phases: &'a [Phase], state: &'a mut RunState) -> Member<'a> {
        let mut taken_chunks = [0, 0];
        taken_chunks[state.phase % 2] = state.taken_chunks;
        let Scratch {
            lines, progress, ..
        } = &mut state.scratch;
        Member {
            phases,
            counters: taken_chunks.map(AtomicUsize::new),
            progress,
            failure: Mutex::new(None),
            has_failed: AtomicBool::new(false),
            scratch: ScratchPtr(lines.as_mut_ptr()),
            activations: state.activations,
        }
    }

    /// The chunks of the phase to continue with that threads have taken.
    fn taken_chunks(&self, end: TurnEnd) -> usize {
        match end {
            TurnEnd {
                next: Some(phase),
                in_phase: true,
                ..
            } => self.counters[phase % 2].load(Ordering::Relaxed),
            _ => 0,
        }
    }

    /// Where to continue, or the failure. `None` at the end of the graph.
    pub(super) fn left(self, end: TurnEnd) -> Result<Option<Left>, RunError> {
        let taken_chunks = self.taken_chunks(end);
        match into_inner(self.failure) {
            Some(error) => Err(error),
            None => Ok(end.next.map(|phase| Left {
                phase,
                taken_chunks: end.tiles.unwrap_or(taken_chunks),
                is_joint: end.tiles.is_some(),
            })),
        }
    }
}

/// Where a member continues.
pub(super) struct Left {
    pub(super) phase: usize,
    pub(super) taken_chunks: usize,
    /// [`RunState::is_joint`]
    pub(super) is_joint: bool,
}

/// Where a turn has ended.
#[derive(Clone, Copy)]
pub(super) struct TurnEnd {
    /// The phase to continue with, if any is left.
    pub(super) next: Option<usize>,
    /// Whether chunks or units of that phase are done.
    pub(super) in_phase: bool,
    /// The tiles of that phase that threads have taken, if members have computed them together.
    pub(super) tiles: Option<usize>,
}

/// When the phases of a timed run ended.
pub(super) struct Clock {
    pub(super) begin: Instant,
    pub(super) ends: Mutex<Vec<Duration>>,
}

/// A thread of a run.
struct Thread<'a> {
    index: usize,
    count: usize,
    turn: ThreadTurn<'a>,
}

impl Run<'_> {
    /// Where the turn has ended, after all threads have left.
    pub(super) fn end(&self) -> TurnEnd {
        let end = TurnEnd {
            next: self.exit.next(self.last),
            in_phase: self.exit.in_phase(),
            tiles: None,
        };
        // Tiles are counted for all members at once, by the first.
        let tiles = { end.next.zip(self.members.first()) }
            .filter(|&(phase, _)| end.in_phase && self.is_joint_phase(phase))
            .map(|(_, first)| first.taken_chunks(end));
        TurnEnd { tiles, ..end }
    }

    /// Whether the members compute a phase together.
    fn is_joint_phase(&self, phase: usize) -> bool {
        let goes_on = phase == self.first && self.is_joint;
        (self.members.len() > 1 || goes_on) && self.members[0].phases[phase].joint().is_some()
    }

    /// Executes the phases as thread `index` of `count`.
    ///
    /// # Safety
    ///
    /// `count` threads call this, each once and with another index below `count`. The scratch
    /// memory of each member has the bytes that the kernels of its phases need, initialised, and
    /// the bytes at its `activations` in it. Only this run accesses them. The counters are as
    /// before phase `first`. The joint kernels of each phase have one key.
    pub(super) unsafe fn work(&self, index: usize, count: usize) {
        self.thread_memory[index].lend(self.prepared, || {
            // SAFETY: the caller guarantees an index of its own below `count` to each thread, and
            // that only this run accesses the members' memory.
            unsafe { self.run_phases(index, count) };
        });
    }

    /// # Safety
    ///
    /// As for [`work`](Run::work).
    unsafe fn run_phases(&self, index: usize, count: usize) {
        let has_worked = Cell::new(false);
        let thread = Thread {
            index,
            count,
            turn: ThreadTurn {
                turn: self.turn,
                exit: &self.exit,
                has_worked: &has_worked,
            },
        };
        let mut progress = [ThreadProgress::default(); MAX_BATCH];
        for (m, progress) in progress.iter_mut().enumerate().take(self.members.len()) {
            *progress = *lock(&self.members[m].progress[thread.index_in(m)]);
        }
        for phase in self.first..self.last {
            if index == 0 {
                // Used by phase i - 1 and again by phase i + 1. The barriers before and after this
                // phase keep both away from this store.
                for member in self.members {
                    member.counters[(phase + 1) % 2].store(0, Ordering::Relaxed);
                }
            }
            if self.is_joint_phase(phase) {
                // SAFETY: all threads come here in this phase, as the joint kernel is the same for
                // all. The caller guarantees the members' memory and one key of their kernels.
                unsafe { self.run_joint(phase, &thread) };
            } else {
                // Threads begin with different members, so that they rarely share a kernel.
                let members = self.members.len();
                let first = index * members / count;
                for m in (first..members).chain(0..first) {
                    // SAFETY: all threads come here for each member in this phase. The caller
                    // guarantees the memory of the member, with which only this run works.
                    unsafe { self.run_phase_of(m, phase, &thread, &mut progress[m]) };
                }
            }
            if index == 0 && self.turn.is_over() {
                self.exit.request(phase, false);
            }
            // Memory is read while other threads finish this phase.
            if let Some(next) = self.members[0].phases.get(phase + 1).and_then(Phase::joint) {
                next.prefetch(index, count);
            }
            self.barrier.wait();
            if let (0, Some(clock)) = (index, self.clock) {
                lock(&clock.ends).push(clock.begin.elapsed());
            }
            // The barrier orders the requests of this phase before this load: all threads leave
            // here.
            if self.exit.after() == phase {
                for (m, progress) in progress.iter().enumerate().take(self.members.len()) {
                    *lock(&self.members[m].progress[thread.index_in(m)]) =
                        match self.exit.in_phase() {
                            true => *progress,
                            false => ThreadProgress::default(),
                        };
                }
                return;
            }
            progress = [ThreadProgress::default(); MAX_BATCH];
        }
    }

    /// Runs the kernels of a phase of member `m`, unless the member has failed.
    ///
    /// # Safety
    ///
    /// As for [`work`](Run::work). All threads call this in the same phase.
    unsafe fn run_phase_of(
        &self,
        m: usize,
        phase: usize,
        thread: &Thread<'_>,
        progress: &mut ThreadProgress,
    ) {
        let member = &self.members[m];
        if member.has_failed.load(Ordering::Relaxed) {
            return;
        }
        let index = thread.index_in(m);
        let parts = &member.phases[phase].parts;
        while let Some(part) = parts.get(progress.parts) {
            if part.is_solo && index != 0 {
                progress.parts += 1;
                continue;
            }
            // SAFETY: the caller guarantees the memory of the member, and that all threads are in
            // this phase. Only the thread with index 0 executes a solo kernel, and all threads
            // execute another.
            let worker = unsafe { self.worker(m, phase, thread, progress) };
            // A panic must not leave the other threads waiting at the barrier forever.
            let outcome = catch_unwind(AssertUnwindSafe(|| (part.kernel)(&worker)));
            let outcome = outcome.unwrap_or_else(|panic| Err(Fault::panic(panic.as_ref())));
            if let Err(fault) = outcome {
                self.fail(m, phase, part.error(fault));
                return;
            }
            if let Some(units) = worker.cut() {
                progress.units = units;
                return;
            }
            *progress = ThreadProgress {
                parts: progress.parts + 1,
                units: 0,
            };
        }
    }

    /// Runs the kernels of a phase of all members together, but for those that have failed.
    ///
    /// # Safety
    ///
    /// As for [`work`](Run::work). All threads call this in the same phase, which has a joint
    /// kernel.
    unsafe fn run_joint(&self, phase: usize, thread: &Thread<'_>) {
        let start = ThreadProgress::default();
        let workers: Vec<Worker<'_>> = (0..self.members.len())
            // SAFETY: the caller guarantees the memory of the members, and that all threads are in
            // this phase. All of them execute the kernels, which are the only ones of the phase.
            .map(|m| unsafe { self.worker(m, phase, thread, &start) })
            .collect();
        let mut numbers = Vec::with_capacity(workers.len());
        let mut members = Vec::with_capacity(workers.len());
        for ((m, member), worker) in self.members.iter().enumerate().zip(&workers) {
            let kernel = member.phases[phase].joint();
            // A member that fails in this phase may be missing on some threads only. Nobody uses
            // its results.
            let Some(kernel) = kernel.filter(|_| !member.has_failed.load(Ordering::Relaxed)) else {
                continue;
            };
            numbers.push(m);
            members.push(JointMember {
                kernel,
                worker,
                fault: OnceCell::new(),
            });
        }
        let Some(JointMember { kernel, .. }) = members.first() else {
            return;
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            // One counter for all threads, also if the first member has failed.
            let runs = workers[0].runs(kernel.tiles(), kernel.longest_run());
            let mut tiles = runs.flatten();
            // SAFETY: the caller guarantees that the joint kernels of the phase have one key.
            // `runs` returns each tile to one worker. The activations are converted in an
            // earlier phase, and a member that has failed before this phase is left out.
            unsafe { kernel.run(&members, &mut tiles) };
        }));
        let panicked = outcome.err().map(|panic| Fault::panic(panic.as_ref()));
        for (m, member) in numbers.into_iter().zip(members) {
            let part = &self.members[m].phases[phase].parts[0];
            if let Some(fault) = panicked.clone().or(member.fault.into_inner()) {
                self.fail(m, phase, part.error(fault));
            }
        }
    }

    /// Keeps the first failure of member `m`. The run ends if no member is left.
    fn fail(&self, m: usize, phase: usize, error: RunError) {
        let member = &self.members[m];
        lock(&member.failure).get_or_insert(error);
        if !member.has_failed.swap(true, Ordering::Relaxed) {
            let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
            if failures == self.members.len() {
                self.exit.request(phase, false);
            }
        }
    }

    /// A thread in the next kernel of a phase of member `m`.
    ///
    /// # Safety
    ///
    /// As for [`work`](Run::work). If the kernel is solo, only the thread with index 0 among those
    /// of the member calls this; otherwise all threads do.
    unsafe fn worker<'a>(
        &'a self,
        m: usize,
        phase: usize,
        thread: &'a Thread<'_>,
        progress: &ThreadProgress,
    ) -> Worker<'a> {
        let member = &self.members[m];
        let parts = &member.phases[phase].parts;
        let part = &parts[progress.parts];
        let count = if part.is_solo { 1 } else { thread.count };
        let memory = KernelMemory {
            counter: &member.counters[phase % 2],
            scratch: member.scratch.0.wrapping_add(part.scratch),
            activations: member.scratch.0.wrapping_add(member.activations),
        };
        let position = KernelPosition {
            phase,
            is_alone: parts.len() == 1,
            finished: progress.units,
            work: part.work,
        };
        // SAFETY: the indices of all threads in a member are different and below `count`
        // (`index_in`), and a solo kernel has one thread. All have the same memory, with the bytes
        // that the kernel needs: this function's contract. The barriers keep other phases away from
        // the memory and from the counter of this phase, which is 0 at the first turn of the phase:
        // thread 0 has reset it in the phase before. Members share no memory.
        unsafe { Worker::new((thread.index_in(m), count), memory, position, thread.turn) }
    }
}

impl Thread<'_> {
    /// The number of this thread among the threads of member `m`. Work of one thread only is done
    /// by different threads for different members.
    fn index_in(&self, m: usize) -> usize {
        (self.index + m) % self.count
    }
}
