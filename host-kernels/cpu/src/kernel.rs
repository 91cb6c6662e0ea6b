//! What threads execute: kernels, and the worker that a kernel is called with.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vgpu_engine::{Turn, panic_message};

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
    /// The kernel panicked, which is a bug of the engine.
    Panic {
        /// The panic message.
        message: String,
    },
}

impl Fault {
    /// The fault for a caught panic.
    pub(crate) fn panic(payload: &(dyn Any + Send)) -> Fault {
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

    /// The phase to continue with, if any of `phases` is left.
    pub(crate) fn next(&self, phases: usize) -> Option<usize> {
        let after = self.after();
        match self.in_phase.load(Ordering::Relaxed) {
            true => Some(after),
            false => after.checked_add(1).filter(|&next| next < phases),
        }
    }
}

/// One thread in one phase.
pub(crate) struct Worker<'a> {
    pub(crate) index: usize,
    pub(crate) count: usize,
    /// The chunks that threads have taken so far.
    pub(crate) counter: &'a AtomicUsize,
    pub(crate) scratch: *mut u8,
    pub(crate) activations: *mut u8,
    pub(crate) phase: usize,
    /// Whether the phase has no other kernel.
    pub(crate) is_alone: bool,
    pub(crate) turn: &'a Turn,
    pub(crate) exit: &'a EarlyExit,
}

impl Worker<'_> {
    /// The number of this thread.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// This thread's part of `units` of equal work: one contiguous range.
    pub(crate) fn share(&self, units: usize) -> Range<usize> {
        let part = units / self.count;
        let rest = units % self.count;
        let start = self.index * part + self.index.min(rest);
        start..start + part + usize::from(self.index < rest)
    }

    /// Chunks of up to `grain` out of `units`, each taken by the first free thread. A phase
    /// uses this at most once, with the same arguments on every thread.
    ///
    /// When the turn of the graph is over, no more chunks are returned, and the next turn calls
    /// the kernel again for the rest. So work of a kernel before its chunks is repeated in each
    /// turn, and a kernel must have no work after its chunks.
    pub(crate) fn chunks(&self, units: usize, grain: usize) -> impl Iterator<Item = Range<usize>> {
        debug_assert!(self.is_alone, "other kernels of the phase would run again");
        let grain = grain.max(1);
        let mut dealt_any = false;
        std::iter::from_fn(move || {
            // Not before the first chunk: every turn makes progress.
            if dealt_any && self.turn.is_over() {
                self.exit.request(self.phase, true);
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

    /// The scratch memory that the operator asked for, shared by all threads, 64-byte aligned. Its
    /// contents survive from one kernel of the operator to the next and are arbitrary before the
    /// first.
    pub(crate) fn scratch(&self) -> *mut u8 {
        self.scratch
    }

    /// The converted activations that operators leave for later operators, shared by all threads,
    /// 64-byte aligned
    /// ([`Operands::cache_activations`](crate::operands::Operands::cache_activations)).
    pub(crate) fn activations(&self) -> *mut u8 {
        self.activations
    }
}
