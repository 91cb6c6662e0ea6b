//! What threads execute: kernels, and the worker that a kernel is called with.

use std::any::Any;
use std::cell::{Cell, OnceCell};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vgpu_engine::work::Work;
use vgpu_engine::{Turn, panic_message};

use crate::isa::Level;

/// What every thread executes between two barriers.
pub(crate) type Kernel = Box<dyn Fn(&Worker<'_>) -> Result<(), Fault> + Send + Sync>;

/// A compiled node: kernels that run one after the other.
pub(crate) struct Compiled {
    /// The kernels, with a barrier after each.
    pub(crate) kernels: Vec<Kernel>,
    /// Shared scratch memory that they need, in bytes.
    pub(crate) scratch_bytes: usize,
}

impl Compiled {
    /// A single kernel that needs no scratch memory.
    pub(crate) fn one(
        kernel: impl Fn(&Worker<'_>) -> Result<(), Fault> + Send + Sync + 'static,
    ) -> Compiled {
        Compiled {
            kernels: vec![Box::new(kernel)],
            scratch_bytes: 0,
        }
    }
}

/// A kernel that multiplies with weights. The plans of several guests run such kernels with equal
/// [keys](JointKernel::key) together, so that each weight is read once.
///
/// The kernel is alone in its phase, and takes its [tiles](JointKernel::tiles) in
/// [runs](Worker::runs) of up to [`longest_run`](JointKernel::longest_run).
pub(crate) trait JointKernel: Any + Send + Sync {
    /// Kernels with equal keys have the same tiles of the same weights.
    fn key(&self) -> Vec<u64>;

    /// The number of tiles. Threads take the tiles of all members in runs.
    fn tiles(&self) -> usize;

    /// Whether the chunks of the kernel alone are its tiles.
    fn has_tiles_alone(&self) -> bool;

    /// The most tiles that a thread takes at once. Part of the key, since a kernel may begin in a
    /// batch and end alone.
    fn longest_run(&self) -> usize {
        1
    }

    /// Prefetches the weights that thread `index` of `count` probably multiplies first.
    fn prefetch(&self, _index: usize, _count: usize) {}

    /// Computes tiles of each member, with the bits that the member's kernel computes alone. If a
    /// member cannot be computed, its [fault](JointMember::fault) is set, and the others are
    /// computed.
    ///
    /// # Safety
    /// All kernels have the key of this one. The activations of each member have been converted,
    /// and all kernels of its earlier phases have succeeded, before the last barrier. No other
    /// thread computes these tiles.
    unsafe fn run(&self, members: &[JointMember<'_>], tiles: &mut dyn Iterator<Item = usize>);
}

/// One of the kernels that threads run together.
pub(crate) struct JointMember<'a> {
    pub(crate) kernel: &'a dyn JointKernel,
    pub(crate) worker: &'a Worker<'a>,
    /// Why the member cannot be computed.
    pub(crate) fault: OnceCell<Fault>,
}

impl JointMember<'_> {
    /// The kernel as its type.
    ///
    /// # Panics
    /// If the kernel has another type than one with the same key.
    pub(crate) fn kernel<K: JointKernel>(&self) -> &K {
        let kernel: &dyn Any = self.kernel;
        kernel
            .downcast_ref()
            .expect("a kernel with an equal key has the same type")
    }
}

/// Why a kernel stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An index read from tensor data is not below `count`.
    Index {
        /// The index.
        index: i64,
        /// The number of valid indices.
        count: u64,
    },
    /// The machine, or what the plan has announced, has not the memory that the kernel needs.
    OutOfMemory {
        /// The bytes that the kernel wanted.
        bytes: usize,
    },
    /// The kernel panicked, which is a bug of the engine.
    Panic {
        /// The panic message.
        message: String,
    },
}

/// What a kernel unwinds with if it gets no memory where it cannot return a [`Fault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfMemory {
    /// The bytes that the kernel wanted.
    pub(crate) bytes: usize,
}

impl Fault {
    /// The fault for a caught panic.
    pub(crate) fn panic(payload: &(dyn Any + Send)) -> Fault {
        if let Some(&OutOfMemory { bytes }) = payload.downcast_ref() {
            return Fault::OutOfMemory { bytes };
        }
        Fault::Panic {
            message: panic_message(payload),
        }
    }
}

/// Checks an index read from tensor data.
///
/// # Errors
/// [`Fault::Index`] unless `0 <= index < count`.
pub(crate) fn check_index(index: i64, count: usize) -> Result<usize, Fault> {
    usize::try_from(index)
        .ok()
        .filter(|&i| i < count)
        .ok_or(Fault::Index {
            index,
            count: count as u64,
        })
}

/// Where the threads leave a graph before its end, all after the same barrier.
///
/// A thread may read this after the barrier of phase `i` while a faster thread is already in phase
/// `i + 1` and requests an exit after that phase. So the request is the number of a phase, and only
/// threads behind that phase's barrier leave. With a flag alone, the slow thread would leave, and
/// the fast thread would wait for it forever.
pub(crate) struct EarlyExit {
    after: AtomicUsize,
    /// Chunks of that phase are left.
    in_phase: AtomicBool,
}

impl Default for EarlyExit {
    fn default() -> EarlyExit {
        EarlyExit {
            after: AtomicUsize::new(usize::MAX),
            in_phase: AtomicBool::new(false),
        }
    }
}

impl EarlyExit {
    /// Requests that all threads leave after `phase`, which the caller executes. `in_phase`: chunks
    /// of it are left.
    pub(crate) fn request(&self, phase: usize, in_phase: bool) {
        // Relaxed: the barrier after the phase orders both stores before every load.
        if in_phase {
            self.in_phase.store(true, Ordering::Relaxed);
        }
        self.after.store(phase, Ordering::Relaxed);
    }

    /// The phase after which threads leave; `usize::MAX` if no thread has requested an exit.
    pub(crate) fn after(&self) -> usize {
        self.after.load(Ordering::Relaxed)
    }

    /// Whether chunks or units of the phase after which threads leave are left. Read after the
    /// barrier of that phase.
    pub(crate) fn in_phase(&self) -> bool {
        self.in_phase.load(Ordering::Relaxed)
    }

    /// The phase to continue with, if any of `phases` is left.
    pub(crate) fn next(&self, phases: usize) -> Option<usize> {
        let after = self.after();
        match self.in_phase() {
            true => Some(after),
            false => after.checked_add(1).filter(|&next| next < phases),
        }
    }
}

/// How far a thread has got in a phase. A run that has yielded continues from here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ThreadProgress {
    /// The kernels of the phase that the thread has finished.
    pub(crate) parts: usize,
    /// The units of its range of the next kernel that the thread has finished.
    pub(crate) units: usize,
}

/// What the threads of one kernel have in common.
pub(crate) struct KernelMemory<'a> {
    /// The chunks that threads have taken so far.
    pub(crate) counter: &'a AtomicUsize,
    /// See [`Worker::scratch`].
    pub(crate) scratch: *mut u8,
    /// See [`Worker::activations`].
    pub(crate) activations: *mut u8,
}

/// Where in a plan a kernel is, and how far a thread has got in it.
pub(crate) struct KernelPosition {
    pub(crate) phase: usize,
    /// Whether the phase has no other kernel.
    pub(crate) is_alone: bool,
    /// The units of the thread's range that earlier turns have finished.
    pub(crate) finished: usize,
    /// The estimated work of the kernel on all threads.
    pub(crate) work: Estimate,
}

/// The turn that a thread works in.
#[derive(Clone, Copy)]
pub(crate) struct ThreadTurn<'a> {
    pub(crate) turn: &'a Turn,
    pub(crate) exit: &'a EarlyExit,
    /// Whether the thread has finished a unit or a chunk in this turn.
    pub(crate) has_worked: &'a Cell<bool>,
}

/// One thread in one kernel of a phase.
pub(crate) struct Worker<'a> {
    index: usize,
    count: usize,
    memory: KernelMemory<'a>,
    position: KernelPosition,
    turn: ThreadTurn<'a>,
    /// The finished units of this thread's range, if the end of the turn has cut the kernel short.
    cut: Cell<Option<usize>>,
    /// Whether the kernel has asked for its units or chunks.
    has_asked: Cell<bool>,
}

impl<'a> Worker<'a> {
    /// Thread `index` of `count` in a kernel.
    ///
    /// # Safety
    ///
    /// Kernels write to memory without locks. Kernels rely on what a worker says about which part
    /// is theirs:
    ///
    /// - The threads that execute a kernel at the same time have different indices below one
    ///   `count`, and the same [`KernelMemory`].
    /// - Until all threads have left the phase, only [`chunks`](Worker::chunks) and
    ///   [`runs`](Worker::runs) change the counter. The counter is 0 before the first turn of the
    ///   phase. In a later turn of the phase the counter is what the turn before has left.
    /// - `scratch` and `activations` are aligned to 64 bytes and have the bytes that the kernel's
    ///   operator has asked for, initialised. As long as the worker exists, only the kernels of the
    ///   phase access these bytes, as the [schedule](crate::barrier_schedule) permits kernels to
    ///   have a phase in common.
    pub(crate) unsafe fn new(
        (index, count): (usize, usize),
        memory: KernelMemory<'a>,
        position: KernelPosition,
        turn: ThreadTurn<'a>,
    ) -> Worker<'a> {
        Worker {
            index,
            count,
            memory,
            position,
            turn,
            cut: Cell::new(None),
            has_asked: Cell::new(false),
        }
    }

    /// The units of this thread's range that are finished, if the end of the turn has cut the
    /// kernel short.
    pub(crate) fn cut(&self) -> Option<usize> {
        self.cut.get()
    }

    /// The number of this thread.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The range of `units` of equal work that this thread computes, in order. The ranges of all
    /// threads are contiguous and do not overlap. A kernel uses this at most once, with the same
    /// argument in every turn.
    ///
    /// When the turn of the graph is over, no more units are returned, and the next turn calls the
    /// kernel again for the rest. So work of a kernel before its units is repeated in each turn,
    /// and a kernel must have no work after its units. A unit takes about a millisecond or less,
    /// unless a single row or result is more work: `docs/performance.md` has the longest.
    pub(crate) fn range_of(&self, units: usize) -> UnitRange<'_> {
        self.range_of_groups(units, 1)
    }

    /// As [`range_of`](Worker::range_of), of `groups` of `steps` units each. One thread has all
    /// units of a group, in order. Unit `step` of group `group` has the number
    /// `group * steps + step`.
    pub(crate) fn range_of_groups(&self, groups: usize, steps: usize) -> UnitRange<'_> {
        let part = groups / self.count;
        let rest = groups % self.count;
        let start = self.index * part + self.index.min(rest);
        let end = start + part + usize::from(self.index < rest);
        // A node with so many units is never completed.
        let all = groups.saturating_mul(steps);
        self.units(start.saturating_mul(steps)..end.saturating_mul(steps), all)
    }

    /// All of `units` on the first thread, and none on the others. As
    /// [`range_of`](Worker::range_of) otherwise.
    pub(crate) fn alone(&self, units: usize) -> UnitRange<'_> {
        self.units(0..if self.index == 0 { units } else { 0 }, units)
    }

    fn units(&self, range: Range<usize>, all: usize) -> UnitRange<'_> {
        debug_assert!(!self.has_asked.replace(true), "two ranges in one kernel");
        UnitRange {
            worker: self,
            next: range
                .start
                .saturating_add(self.position.finished)
                .min(range.end),
            range,
            each: self.position.work.part_of(all),
            // Before the first unit: kernels before this one may have taken all of the turn.
            unread: READ_INTERVAL,
        }
    }

    /// Chunks of up to `grain` out of `units`, each taken by the first free thread. A phase
    /// uses this, or [`runs`](Worker::runs), at most once, with the same arguments on every thread.
    ///
    /// When the turn of the graph is over, no more chunks are returned, and the next turn calls
    /// the kernel again for the rest. So work of a kernel before its chunks is repeated in each
    /// turn, and a kernel must have no work after its chunks.
    pub(crate) fn chunks(&self, units: usize, grain: usize) -> impl Iterator<Item = Range<usize>> {
        let grain = grain.max(1);
        self.claims(move |claim| {
            let start = claim.checked_mul(grain)?;
            (start < units).then(|| start..units.min(start + grain))
        })
    }

    /// As [`chunks`](Worker::chunks), for units that read memory one after the other: long runs of
    /// up to `longest` units first, as many for each thread, then one unit at a time.
    pub(crate) fn runs(&self, units: usize, longest: usize) -> impl Iterator<Item = Range<usize>> {
        let runs = Runs::new(units, longest, self.count);
        self.claims(move |claim| runs.range(claim))
    }

    /// The ranges of the claims of this thread. `range` has a range for each claim of any thread,
    /// from claim 0 on, and then none.
    fn claims(
        &self,
        range: impl Fn(usize) -> Option<Range<usize>>,
    ) -> impl Iterator<Item = Range<usize>> {
        debug_assert!(
            self.position.is_alone,
            "other kernels of the phase would run again"
        );
        debug_assert!(!self.has_asked.replace(true), "two ranges in one kernel");
        std::iter::from_fn(move || {
            // Not before the first chunk: every turn makes progress.
            if self.turn.has_worked.get() && self.turn.turn.is_over() {
                self.stop(0);
                return None;
            }
            self.turn.has_worked.set(true);
            range(self.memory.counter.fetch_add(1, Ordering::Relaxed))
        })
    }

    /// Ends the kernel on this thread, which has finished `units` of its range.
    fn stop(&self, units: usize) {
        self.cut.set(Some(units));
        self.turn.exit.request(self.position.phase, true);
    }

    /// The scratch memory that the operator asked for, shared by all threads, 64-byte aligned. The
    /// contents survive from one kernel of the operator to the next and are arbitrary before the
    /// first.
    pub(crate) fn scratch(&self) -> *mut u8 {
        self.memory.scratch
    }

    /// The converted activations that operators leave for later operators, shared by all threads,
    /// 64-byte aligned
    /// ([`Operands::cache_activations`](crate::operands::Operands::cache_activations)).
    pub(crate) fn activations(&self) -> *mut u8 {
        self.memory.activations
    }
}

/// How threads divide units: long runs first, then one unit at a time, so that all threads end at
/// about the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Runs {
    units: usize,
    /// The units of a long run.
    length: usize,
    /// The number of long runs: a multiple of the threads.
    long: usize,
}

impl Runs {
    /// At most three quarters of the units are in long runs of up to `longest`.
    pub(crate) fn new(units: usize, longest: usize, threads: usize) -> Runs {
        let most = units / 4 * 3;
        let length = (most / threads).min(longest).max(1);
        Runs {
            units,
            length,
            long: most / length / threads * threads,
        }
    }

    /// The units of a claim.
    pub(crate) fn range(self, claim: usize) -> Option<Range<usize>> {
        if claim < self.long {
            let start = claim * self.length;
            return Some(start..start + self.length);
        }
        let unit = (self.long * self.length).checked_add(claim - self.long)?;
        (unit < self.units).then(|| unit..unit + 1)
    }
}

/// Estimated work of one thread, in nanoseconds of a thread with AVX2.
///
/// The unit is the same at every level, so that plans divide their work in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Estimate(pub(crate) u64);

impl Estimate {
    /// The estimate for this work.
    pub(crate) fn of(work: &Work) -> Estimate {
        let time = work.time(&Level::Avx2.speed()).as_nanos();
        Estimate(u64::try_from(time).unwrap_or(u64::MAX))
    }

    /// The estimate for `n` products ([`Work::products`]).
    pub(crate) fn products(n: usize) -> Estimate {
        Estimate::of(&Work {
            products: n as u64,
            ..Work::default()
        })
    }

    /// The estimate for `n` steps ([`Work::steps`]).
    pub(crate) fn steps(n: usize) -> Estimate {
        Estimate::of(&Work {
            steps: n as u64,
            ..Work::default()
        })
    }

    /// One of `parts` equal parts, which is at least a call of a function.
    fn part_of(self, parts: usize) -> Estimate {
        Estimate(self.0.div_ceil(parts.max(1) as u64).max(10))
    }
}

/// The estimated work between two readings of the clock. A reading takes some 30 ns.
const READ_INTERVAL: Estimate = Estimate(100_000);

/// The range of units of a thread: those that are left, until the turn is over.
///
/// The clock is read by estimated work, not by the measured time of the units before: units of a
/// kernel can differ, and after a million units that had nothing to do, one measured time says
/// nothing about the next million.
pub(crate) struct UnitRange<'a> {
    worker: &'a Worker<'a>,
    /// The units of this thread in all turns.
    range: Range<usize>,
    next: usize,
    /// The work of a unit at most.
    each: Estimate,
    /// The work since the clock was read.
    unread: Estimate,
}

impl UnitRange<'_> {
    /// The same units, of which each is at most this much work. Without, all units of a kernel are
    /// the same part of its node's work.
    #[must_use]
    pub(crate) fn each(mut self, most: Estimate) -> Self {
        self.each = most.part_of(1);
        self
    }

    /// The units that are left.
    pub(crate) fn rest(&self) -> Range<usize> {
        self.next..self.range.end
    }

    /// Whether the turn is over. Reads the clock once in [`READ_INTERVAL`].
    fn is_over(&mut self) -> bool {
        let turn = self.worker.turn.turn;
        let next = Estimate(self.unread.0.saturating_add(self.each.0));
        if next <= READ_INTERVAL {
            return turn.is_empty();
        }
        self.unread = Estimate::default();
        turn.is_over()
    }
}

impl Iterator for UnitRange<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.next == self.range.end {
            return None;
        }
        // Not before the first unit: every turn makes progress.
        if self.worker.turn.has_worked.get() {
            if self.is_over() {
                self.worker.stop(self.next - self.range.start);
                return None;
            }
        } else {
            self.unread = Estimate::default();
        }
        self.worker.turn.has_worked.set(true);
        self.unread.0 = self.unread.0.saturating_add(self.each.0);
        self.next += 1;
        Some(self.next - 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_have_each_unit_once_and_the_last_quarter_one_by_one(
            units in 0usize..3000,
            longest in 0usize..200,
            threads in 1usize..65,
        ) {
            let runs = Runs::new(units, longest, threads);
            let ranges: Vec<_> = (0..).map_while(|claim| runs.range(claim)).collect();
            let mut next = 0;
            for range in &ranges {
                prop_assert_eq!(range.start, next);
                prop_assert!(range.len() <= longest.max(1));
                next = range.end;
            }
            prop_assert_eq!(next, units);
            let long = ranges.iter().filter(|range| range.len() > 1);
            let (count, in_long) = long.fold((0, 0), |(n, all), range| (n + 1, all + range.len()));
            prop_assert_eq!(count % threads, 0);
            prop_assert!(in_long <= units / 4 * 3);
            if units >= 8 * threads && longest >= units {
                prop_assert!(in_long > units / 2, "{} of {}", in_long, units);
            }
            prop_assert_eq!(runs.range(usize::MAX), None);
        }
    }
}
