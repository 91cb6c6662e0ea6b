//! Runs the phases of a graph on the thread team. Threads enter a graph once and meet at a spinning
//! barrier after each phase.

mod run;
mod scratch;
#[cfg(test)]
mod tests;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use vgpu_engine::{EngineError, RunError, Turn};
use vgpu_transport::lock::{get_mut, into_inner, lock, lock_at};

use crate::barrier_schedule::Phase;
use crate::batch::{BatchKeys, MAX_BATCH, Membership};
use crate::gemm::KeptThreadMemory;
use crate::kernel::{EarlyExit, ThreadProgress};
use crate::lock::Rank;
use crate::thread_team::{Barrier, ThreadTeam};

pub(crate) use run::RunState;
use run::{Clock, Left, Member, Run, TurnEnd};
#[cfg(test)]
use scratch::FREED_AT_ONCE;
use scratch::{Lines, Scratch};

/// Scratch memories that are kept for later runs: as many as a batch has.
const MAX_FREE_SCRATCH: usize = MAX_BATCH;

/// The most bytes of all scratch memories that are kept for later runs.
const MAX_FREE_BYTES: usize = 4 * MAX_KEPT_BYTES;

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
    /// Bytes of `scratch`, for those who may not wait.
    free_bytes: AtomicUsize,
    /// For each thread of a run, the memory in which it prepares the operands of products.
    thread_memory: Vec<KeptThreadMemory>,
    /// Whether each run begins with other contents of working memory, for tests.
    pub(crate) fills_scratch: bool,
    /// The runs so far that have filled their working memory.
    filled: AtomicUsize,
    /// The keys of the plans that can run as a batch.
    keys: BatchKeys,
    /// The runs so far.
    started: AtomicUsize,
}

/// What working memory is filled with, in turn: numbers that are not finite, zeros, large numbers,
/// small ones, and ones (half floats).
const FILLERS: [u8; 5] = [0xff, 0x00, 0x7f, 0x01, 0x3c];

impl Runner {
    /// A runner with `threads` threads. With `cpu_sets`, thread `i` is pinned to set `i` modulo
    /// their number.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if a thread cannot be created or pinned.
    pub(crate) fn new(threads: usize, cpu_sets: &[CpuSet]) -> Result<Runner, EngineError> {
        let team = ThreadTeam::new(threads, cpu_sets)?;
        let thread_memory = (0..team.size()).map(|_| KeptThreadMemory::default());
        Ok(Runner {
            team,
            running: Mutex::default(),
            scratch: Mutex::default(),
            free_bytes: AtomicUsize::new(0),
            thread_memory: thread_memory.collect(),
            fills_scratch: false,
            filled: AtomicUsize::new(0),
            keys: BatchKeys::default(),
            started: AtomicUsize::new(0),
        })
    }

    /// The plans that can run as a batch with one of these phases.
    pub(crate) fn membership(&self, phases: &[Phase]) -> Option<Membership> {
        Membership::of(&self.keys, phases)
    }

    /// The number of threads that run a phase.
    pub(crate) fn workers(&self) -> usize {
        self.team.size()
    }

    /// Bytes of working memory that are kept for later runs: those that no run owns, and those of
    /// the threads at the end of the last run. Takes no lock.
    pub(crate) fn kept_bytes(&self) -> usize {
        let threads = self.thread_memory.iter().map(KeptThreadMemory::bytes);
        threads.sum::<usize>() + self.free_bytes.load(Ordering::Relaxed)
    }

    /// Calls `change` with the scratch memories that no run owns.
    fn with_free<T>(&self, change: impl FnOnce(&mut Vec<Scratch>) -> T) -> T {
        let mut free = lock(&self.scratch);
        let result = change(&mut free);
        let bytes = free.iter().map(Scratch::bytes).sum();
        self.free_bytes.store(bytes, Ordering::Relaxed);
        result
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
        let mut scratch = self.with_free(Vec::pop).unwrap_or_default();
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
                memory.fill(filler);
            }
        }
        scratch.progress.resize_with(self.workers(), Mutex::default);
        for progress in &mut scratch.progress {
            *get_mut(progress) = ThreadProgress::default();
        }
        Ok(RunState {
            phase: 0,
            taken_chunks: 0,
            is_joint: false,
            number: self.started.fetch_add(1, Ordering::Relaxed),
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
        // SAFETY: the caller guarantees a schedule for this runner, and a state with the memory
        // that its phases need.
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
        let is_joint = members.iter().any(|(_, state)| state.is_joint);
        let each = members.iter_mut();
        let each: Vec<Member<'_>> = each
            .map(|(phases, state)| Member::new(phases, state))
            .collect();
        // SAFETY: the caller guarantees for each run what `run` asks, and one key and position for
        // all: the first phase is that of each. No run prepares more than the largest `prepared`.
        let end =
            unsafe { self.execute(&each, (first, is_joint), prepared.unwrap_or(0), turn, None) };
        let left: Vec<_> = each.into_iter().map(|member| member.left(end)).collect();
        let members = members.into_iter().zip(left);
        members
            .map(|((_, state), left)| self.finish(state, left, turn))
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
        // SAFETY: the caller guarantees a schedule for this runner, and a state with the memory
        // that its phases need.
        unsafe { self.run_with_clock(phases, state, &Turn::new(), Some(&clock)) }?;
        Ok(into_inner(clock.ends))
    }

    /// Runs one graph. Allocates no memory, unless the graph goes on in the middle of products that
    /// it has begun in a batch.
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
        let (first, prepared) = ((state.phase, state.is_joint), state.prepared);
        let [member] = {
            let members = [Member::new(phases, &mut state)];
            // SAFETY: the caller guarantees what `run` asks for the only member, whose state has
            // `first` and `prepared`.
            let end = unsafe { self.execute(&members, first, prepared, turn, clock) };
            members.map(|member| member.left(end))
        };
        self.finish(state, member, turn)
    }

    /// Runs the graphs of the members. Returns where the turn has ended.
    ///
    /// # Safety
    ///
    /// As for [`run_batch`](Runner::run_batch). The members begin with phase `first`, in tiles of
    /// its joint kernel if `is_joint`, and their products prepare `prepared` bytes at most.
    unsafe fn execute(
        &self,
        members: &[Member<'_>],
        (first, is_joint): (usize, bool),
        prepared: usize,
        turn: &Turn,
        clock: Option<&Clock>,
    ) -> TurnEnd {
        assert!(members.len() <= MAX_BATCH, "{} plans", members.len());
        let _guard = lock_at(Rank::Running, &self.running);
        let last = members.first().map_or(0, |member| member.phases.len());
        let run = Run {
            members,
            is_joint,
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
            // The members have the memory of their states, and the caller guarantees that it has
            // the bytes that the phases need. The counters of the first phase are what the turn
            // before has left, or 0, and the others are 0.
            unsafe { run.work(index, count) }
        };
        // SAFETY: this function holds the lock on `running`, so no other call of `run` is in
        // progress.
        unsafe { self.team.run(&work) };
        run.end()
    }

    /// Goes on with a run that has ended, and has memory left to be freed.
    fn free(&self, mut state: RunState, turn: &Turn) -> Result<Option<RunState>, RunError> {
        let ended = state.ended.take().unwrap_or(Ok(()));
        self.finish(state, ended.map(|()| None), turn)
    }

    /// The state to continue from, if the run has yielded: where `left` says. Otherwise the memory
    /// of the run is kept for others, or freed. To free gigabytes takes turns, too: a run that has
    /// ended yields until little is left.
    fn finish(
        &self,
        mut state: RunState,
        left: Result<Option<Left>, RunError>,
        turn: &Turn,
    ) -> Result<Option<RunState>, RunError> {
        if let Ok(Some(left)) = left {
            return Ok(Some(RunState {
                phase: left.phase,
                taken_chunks: left.taken_chunks,
                is_joint: left.is_joint,
                ..state
            }));
        }
        if !state.scratch.free_until_end_of(turn) {
            return Ok(Some(RunState {
                phase: usize::MAX,
                taken_chunks: 0,
                is_joint: false,
                ended: Some(left.map(drop)),
                ..state
            }));
        }
        self.give_back(state.scratch);
        left.map(|_| None)
    }

    /// Frees the scratch memory of a plan that ends. Small memory is kept.
    pub(crate) fn trim(&self) {
        let is_large = |scratch: &mut Scratch| scratch.bytes() > MAX_IDLE_BYTES;
        let large: Vec<Scratch> = self.with_free(|free| free.extract_if(.., is_large).collect());
        // Without the lock.
        drop(large);
    }

    /// Keeps scratch memory for later runs, or frees it.
    fn give_back(&self, scratch: Scratch) {
        let too_much = self.with_free(|free| {
            let bytes: usize = free.iter().map(Scratch::bytes).sum();
            let fits = bytes.saturating_add(scratch.bytes()) <= MAX_FREE_BYTES;
            if free.len() < MAX_FREE_SCRATCH && scratch.bytes() <= MAX_KEPT_BYTES && fits {
                free.push(scratch);
                return None;
            }
            Some(scratch)
        });
        // Without the lock.
        drop(too_much);
    }
}
