//! Runs the phases of a graph on the thread team. Threads enter a graph once and meet at a spinning
//! barrier after each phase.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memmap2::{MmapMut, UncheckedAdvice};
use rustix::thread::CpuSet;
use vgpu_engine::{EngineError, RunError, Turn};

use crate::barrier_schedule::Phase;
use crate::batch::{BatchGroup, BatchKeys, MAX_BATCH};
use crate::gemm::ThreadMemory;
use crate::kernel::{
    EarlyExit, Fault, JointMember, KernelMemory, KernelPosition, ThreadProgress, ThreadTurn, Worker,
};
use crate::thread_team::{Barrier, ThreadTeam, lock};

/// Scratch memories that are kept for later runs: as many as a batch has.
const MAX_FREE_SCRATCH: usize = MAX_BATCH;

/// The most bytes of all scratch memories that are kept for later runs.
const MAX_FREE_BYTES: usize = 4 * MAX_KEPT_BYTES;

/// The largest scratch memory that is kept for later runs, in bytes.
const MAX_KEPT_BYTES: usize = 32 << 20;

/// Bytes of working memory that are freed between two looks at the end of the turn: some
/// milliseconds, for pages of 4 KiB.
const FREED_AT_ONCE: usize = 64 << 20;

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
    /// The keys of the plans that can run as a batch.
    keys: BatchKeys,
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
    /// How the run has ended, if only memory is left to be freed.
    ended: Option<Result<(), RunError>>,
}

impl RunState {
    /// How far the run has got. Runs of plans with one key that have got equally far can go on
    /// together.
    pub(crate) fn position(&self, phases: &[Phase]) -> (usize, usize) {
        match phases.get(self.phase).is_some_and(|p| p.joint().is_some()) {
            true => (self.phase, self.dealt),
            false => (self.phase, 0),
        }
    }
}

/// Working memory of a run.
#[derive(Default)]
struct Scratch {
    lines: Lines,
    /// How far each thread has got in the phase that a turn begins with. When a turn is over, how
    /// far it has got in the phase that the next turn begins with.
    progress: Vec<Mutex<ThreadProgress>>,
    /// Bytes at the end of `lines` whose pages are freed. The run has ended if there are any.
    freed: usize,
}

impl Scratch {
    /// Bytes of the memory of kernels.
    fn bytes(&self) -> usize {
        self.lines.len() * size_of::<CacheLine>()
    }

    /// Frees pages of large memory until the end of the turn, of [`FREED_AT_ONCE`] bytes at least.
    /// Returns whether no more than that is left.
    fn free_until_end_of(&mut self, turn: &Turn) -> bool {
        while self.bytes() - self.freed > FREED_AT_ONCE {
            self.freed += FREED_AT_ONCE;
            let at = self.bytes() - self.freed;
            self.lines.discard(at, FREED_AT_ONCE);
            if turn.is_over() {
                return false;
            }
        }
        true
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

    /// Frees the pages of `len` bytes from byte `at` on, which begin with a page. They are zero
    /// afterwards.
    fn discard(&mut self, at: usize, len: usize) {
        if let Lines::Mapped(pages) = self {
            // SAFETY: a private anonymous mapping that this value owns and borrows exclusively:
            // there is no other reference to its bytes, which may have any value.
            let outcome =
                unsafe { pages.unchecked_advise_range(UncheckedAdvice::DontNeed, at, len) };
            debug_assert!(outcome.is_ok(), "discarding pages: {outcome:?}");
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
            keys: BatchKeys::default(),
        })
    }

    /// The plans that can run as a batch with one of these phases.
    pub(crate) fn batch_group(&self, phases: &[Phase]) -> Option<Arc<BatchGroup>> {
        self.keys.group_of(phases)
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
            ended: None,
        })
    }

    /// Runs the phases in order, each on all threads, until the end, the first failure, or the end
    /// of the turn. Returns the state to continue from, or `None` at the end of the graph.
    ///
    /// # Errors
    /// The first failure of a kernel.
    ///
    /// # Safety
    ///
    /// The phases are those of a [schedule](crate::barrier_schedule) for this runner's number of
    /// threads. `state` comes from [`start`](Runner::start) of this runner, with the bytes of
    /// memory that the kernels of the phases need, or from an earlier turn of these phases that
    /// began so.
    pub(crate) unsafe fn run(
        &self,
        phases: &[Phase],
        state: RunState,
        turn: &Turn,
    ) -> Result<Option<RunState>, RunError> {
        // SAFETY: this function's contract.
        unsafe { self.run_with_clock(phases, state, turn, None) }
    }

    /// As [`run`](Runner::run) for each of several runs: at most [`MAX_BATCH`], of plans with one
    /// key, at one [position](RunState::position). Returns their outcomes, in order.
    ///
    /// # Safety
    ///
    /// As for [`run`](Runner::run), for each of the runs. The joint kernels of each phase have one
    /// key.
    pub(crate) unsafe fn run_batch(
        &self,
        mut members: Vec<(&[Phase], RunState)>,
        turn: &Turn,
    ) -> Vec<Result<Option<RunState>, RunError>> {
        let first = members.first().map_or(0, |(_, state)| state.phase);
        if first == usize::MAX {
            // Runs at one position have all ended.
            let ended = members.into_iter().map(|(_, state)| self.free(state, turn));
            return ended.collect();
        }
        let prepared = members.iter().map(|(_, state)| state.prepared).max();
        let each = members.iter_mut();
        let each: Vec<Member<'_>> = each
            .map(|(phases, state)| Member::new(phases, state))
            .collect();
        // SAFETY: this function's contract.
        let end = unsafe { self.execute(&each, first, prepared.unwrap_or(0), turn, None) };
        // In a joint phase, the tiles are counted for all members at once, by the first.
        let is_joint = |member: &Member<'_>, phase| {
            let phase: &Phase = &member.phases[phase];
            phase.joint().is_some()
        };
        let joint = match (each.first(), end.next) {
            (Some(first), Some(phase)) if each.len() > 1 && is_joint(first, phase) => {
                Some(first.dealt(end))
            }
            _ => None,
        };
        let left: Vec<_> = each.into_iter().map(|member| member.left(end)).collect();
        let members = members.into_iter().zip(left);
        members
            .map(|((_, state), left)| {
                let left =
                    left.map(|left| left.map(|(phase, dealt)| (phase, joint.unwrap_or(dealt))));
                self.finish(state, left, turn)
            })
            .collect()
    }

    /// Runs the phases to the end. Returns when each phase ended, as a time since the first began.
    ///
    /// # Errors
    /// As [`run`](Runner::run).
    ///
    /// # Safety
    ///
    /// As for [`run`](Runner::run).
    pub(crate) unsafe fn run_timed(
        &self,
        phases: &[Phase],
        state: RunState,
    ) -> Result<Vec<Duration>, RunError> {
        let clock = Clock {
            begin: Instant::now(),
            ends: Mutex::new(Vec::with_capacity(phases.len())),
        };
        // A turn without an end.
        // SAFETY: this function's contract.
        unsafe { self.run_with_clock(phases, state, &Turn::new(), Some(&clock)) }?;
        Ok(clock
            .ends
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs one graph. Allocates no memory.
    ///
    /// # Safety
    ///
    /// As for [`run`](Runner::run).
    unsafe fn run_with_clock(
        &self,
        phases: &[Phase],
        mut state: RunState,
        turn: &Turn,
        clock: Option<&Clock>,
    ) -> Result<Option<RunState>, RunError> {
        if state.ended.is_some() {
            return self.free(state, turn);
        }
        let (first, prepared) = (state.phase, state.prepared);
        let [member] = {
            let members = [Member::new(phases, &mut state)];
            // SAFETY: this function's contract, for the only member.
            let end = unsafe { self.execute(&members, first, prepared, turn, clock) };
            members.map(|member| member.left(end))
        };
        self.finish(state, member, turn)
    }

    /// Runs the graphs of the members. Returns where the turn has ended.
    ///
    /// # Safety
    ///
    /// As for [`run_batch`](Runner::run_batch). The members begin with phase `first`, and their
    /// products prepare `prepared` bytes at most.
    unsafe fn execute(
        &self,
        members: &[Member<'_>],
        first: usize,
        prepared: usize,
        turn: &Turn,
        clock: Option<&Clock>,
    ) -> TurnEnd {
        assert!(members.len() <= MAX_BATCH, "{} plans", members.len());
        let _guard = lock(&self.running);
        let last = members.first().map_or(0, |member| member.phases.len());
        let run = Run {
            members,
            first,
            last,
            barrier: Barrier::new(self.workers()),
            turn,
            clock,
            exit: EarlyExit::default(),
            failures: AtomicUsize::new(0),
            prepared,
            thread_memory: &self.thread_memory,
        };
        let count = self.workers();
        let work = |index| {
            // SAFETY: the team calls this once for each index below its size, which is `count`.
            // The members have the memory of their states, which has the bytes that the phases
            // need: this function's contract. The counters of the first phase are what the turn
            // before has left, or 0, and the others are 0.
            unsafe { run.work(index, count) }
        };
        // SAFETY: this function holds the lock on `running`, so no other call of `run` is in
        // progress.
        unsafe { self.team.run(&work) };
        TurnEnd {
            next: run.exit.next(last),
            in_phase: run.exit.in_phase(),
        }
    }

    /// Goes on with a run that has ended, and has memory left to be freed.
    fn free(&self, mut state: RunState, turn: &Turn) -> Result<Option<RunState>, RunError> {
        let ended = state.ended.take().unwrap_or(Ok(()));
        self.finish(state, ended.map(|()| None), turn)
    }

    /// The state to continue from, if the run has yielded: in the phase and with the dealt chunks
    /// that `left` has. Otherwise the memory of the run is kept for others, or freed. To free
    /// gigabytes takes turns, too: a run that has ended yields until little is left.
    fn finish(
        &self,
        mut state: RunState,
        left: Result<Option<(usize, usize)>, RunError>,
        turn: &Turn,
    ) -> Result<Option<RunState>, RunError> {
        if let Ok(Some((phase, dealt))) = left {
            return Ok(Some(RunState {
                phase,
                dealt,
                ..state
            }));
        }
        if !state.scratch.free_until_end_of(turn) {
            return Ok(Some(RunState {
                phase: usize::MAX,
                dealt: 0,
                ended: Some(left.map(drop)),
                ..state
            }));
        }
        self.give_back(state.scratch);
        left.map(|_| None)
    }

    /// Frees the scratch memory of a plan that ends. Small memory is kept.
    pub(crate) fn trim(&self) {
        lock(&self.scratch).retain(|scratch| scratch.bytes() <= MAX_IDLE_BYTES);
    }

    /// Keeps scratch memory for later runs, or frees it.
    fn give_back(&self, scratch: Scratch) {
        let mut free = lock(&self.scratch);
        let bytes: usize = free.iter().map(Scratch::bytes).sum();
        let fits = bytes.saturating_add(scratch.bytes()) <= MAX_FREE_BYTES;
        if free.len() < MAX_FREE_SCRATCH && scratch.bytes() <= MAX_KEPT_BYTES && fits {
            free.push(scratch);
        }
    }
}

struct ScratchPtr(*mut u8);

// SAFETY: the pointer is shared, not the access. The run owns the memory exclusively; kernels
// divide it among the threads of a phase.
unsafe impl Sync for ScratchPtr {}

/// One turn of one graph, or of several graphs that run as a batch.
struct Run<'a> {
    /// At least one, all with joint kernels in the same phases.
    members: &'a [Member<'a>],
    /// The first phase of this turn.
    first: usize,
    /// The number of phases of each graph.
    last: usize,
    barrier: Barrier,
    turn: &'a Turn,
    clock: Option<&'a Clock>,
    exit: EarlyExit,
    /// The members that have failed.
    failures: AtomicUsize,
    /// The most bytes that a product of any member may prepare in each buffer of a thread.
    prepared: usize,
    /// [`Runner::thread_memory`]
    thread_memory: &'a [Mutex<ThreadMemory>],
}

/// One graph of a run.
struct Member<'a> {
    phases: &'a [Phase],
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
    fn new(phases: &'a [Phase], state: &'a mut RunState) -> Member<'a> {
        let mut dealt = [0, 0];
        dealt[state.phase % 2] = state.dealt;
        let Scratch {
            lines, progress, ..
        } = &mut state.scratch;
        Member {
            phases,
            counters: dealt.map(AtomicUsize::new),
            progress,
            failure: Mutex::new(None),
            has_failed: AtomicBool::new(false),
            scratch: ScratchPtr(lines.as_mut_ptr()),
            activations: state.activations,
        }
    }

    /// The chunks of the phase to continue with that threads have taken.
    fn dealt(&self, end: TurnEnd) -> usize {
        match end {
            TurnEnd {
                next: Some(phase),
                in_phase: true,
            } => self.counters[phase % 2].load(Ordering::Relaxed),
            _ => 0,
        }
    }

    /// The phase and the dealt chunks to continue with, or the failure. `None` at the end of the
    /// graph.
    fn left(self, end: TurnEnd) -> Result<Option<(usize, usize)>, RunError> {
        let dealt = self.dealt(end);
        let failure = self.failure.into_inner();
        match failure.unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(end.next.map(|phase| (phase, dealt))),
        }
    }
}

/// Where a turn has ended.
#[derive(Clone, Copy)]
struct TurnEnd {
    /// The phase to continue with, if any is left.
    next: Option<usize>,
    /// Whether chunks or units of that phase are done.
    in_phase: bool,
}

/// When the phases of a timed run ended.
struct Clock {
    begin: Instant,
    ends: Mutex<Vec<Duration>>,
}

/// A thread of a run.
struct Thread<'a> {
    index: usize,
    count: usize,
    turn: ThreadTurn<'a>,
}

impl Run<'_> {
    /// Executes the phases as thread `index` of `count`.
    ///
    /// # Safety
    ///
    /// `count` threads call this, each once and with another index below `count`. The scratch
    /// memory of each member has the bytes that the kernels of its phases need, initialised, and
    /// the bytes at its `activations` in it. Only this run accesses them. The counters are as
    /// before phase `first`. The joint kernels of each phase have one key.
    unsafe fn work(&self, index: usize, count: usize) {
        let mut memory = lock(&self.thread_memory[index]);
        memory.swap(self.prepared);
        // SAFETY: this function's contract.
        unsafe { self.run_phases(index, count) };
        memory.swap(usize::MAX);
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
            if self.members.len() > 1 && self.members[0].phases[phase].joint().is_some() {
                // SAFETY: this function's contract.
                unsafe { self.run_joint(phase, &thread) };
            } else {
                // Threads begin with different members, so that they rarely share a kernel.
                let members = self.members.len();
                let first = index * members / count;
                for m in (first..members).chain(0..first) {
                    // SAFETY: this function's contract.
                    unsafe { self.run_phase_of(m, phase, &thread, &mut progress[m]) };
                }
            }
            if index == 0 && self.turn.is_over() {
                self.exit.request(phase, false);
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
            // SAFETY: this function's contract. Only the thread with index 0 executes a solo
            // kernel, and all threads execute another.
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

    /// Runs the kernels of a phase of all members together. Members that have failed are computed,
    /// too: their memory exists, and their results are not used.
    ///
    /// # Safety
    ///
    /// As for [`work`](Run::work). All threads call this in the same phase, which has a joint
    /// kernel.
    unsafe fn run_joint(&self, phase: usize, thread: &Thread<'_>) {
        let start = ThreadProgress::default();
        let workers: Vec<Worker<'_>> = (0..self.members.len())
            // SAFETY: this function's contract. All threads execute the kernels, which are the only
            // ones of the phase.
            .map(|m| unsafe { self.worker(m, phase, thread, &start) })
            .collect();
        let kernels = { self.members.iter() }.filter_map(|member| member.phases[phase].joint());
        let members: Vec<JointMember<'_>> = { kernels.zip(&workers) }
            .map(|(kernel, worker)| JointMember { kernel, worker })
            .collect();
        let kernel = members[0].kernel;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            for tile in workers[0].chunks(kernel.tiles(), 1).flatten() {
                // SAFETY: the joint kernels of a phase have one key: this function's contract.
                // `chunks` returns each tile to one worker. The activations are converted in an
                // earlier phase.
                unsafe { kernel.tile(tile, &members) };
            }
        }));
        if let Err(panic) = outcome {
            let fault = Fault::panic(panic.as_ref());
            for (m, member) in self.members.iter().enumerate() {
                let part = &member.phases[phase].parts[0];
                self.fail(m, phase, part.error(fault.clone()));
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
        let state = runner.start(4096, 0, usize::MAX)?;
        // SAFETY: the kernels of these tests need at most 4096 bytes.
        let left = unsafe { runner.run(phases, state, &Turn::new()) }?;
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
                        w.range_of(1000).for_each(|i| add(i..i + 1));
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
                            0 => w.range_of(UNITS).for_each(|i| visit(i..i + 1)),
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
                    // SAFETY: the kernels need the bytes that the state was made with.
                    *slot = unsafe { runner.run(graph, state, turn) }.unwrap();
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
            // SAFETY: the kernel needs no memory.
            let left = unsafe { runner.run(&[phase(|_| Ok(()))], state, &Turn::new()) };
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
    fn large_memory_is_freed_in_turns_also_after_a_failure() {
        let runner = Runner::new(1, &[]).unwrap();
        let over = Turn::new();
        over.set_end(Some(Duration::ZERO));
        let fault = phase(|_| Err(Fault::Index { index: 9, count: 1 }));
        for (phases, is_ok) in [([phase(|_| Ok(()))], true), ([fault], false)] {
            let state = runner.start(4 * FREED_AT_ONCE, 0, 0).unwrap();
            let mut left = Some(state);
            let mut turns = 0;
            let outcome = loop {
                let state = left.take().unwrap();
                // SAFETY: the kernel needs no memory.
                match unsafe { runner.run(&phases, state, &over) } {
                    Ok(Some(state)) => left = Some(state),
                    ended => break ended,
                }
                turns += 1;
            };
            // The last part is unmapped at once.
            assert_eq!((turns, outcome.is_ok()), (3, is_ok));
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
