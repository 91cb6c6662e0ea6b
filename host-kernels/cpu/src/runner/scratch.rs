//! The working memory of runs.

use std::sync::Mutex;

use memmap2::{MmapMut, UncheckedAdvice};
use vgpu_engine::Turn;

use crate::kernel::ThreadProgress;

/// Bytes of working memory that are freed between two looks at the end of the turn: some
/// milliseconds, for pages of 4 KiB.
pub(super) const FREED_AT_ONCE: usize = 64 << 20;

/// The fewest bytes that are mapped.
const MIN_MAPPED: usize = 1 << 20;

/// Working memory of a run.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) lines: Lines,
    /// How far each thread has got in the phase that a turn begins with. When a turn is over, how
    /// far it has got in the phase that the next turn begins with.
    pub(super) progress: Vec<Mutex<ThreadProgress>>,
    /// Bytes at the end of `lines` whose pages are freed. The run has ended if there are any.
    freed: usize,
}

impl Scratch {
    /// Bytes of the memory of kernels.
    pub(super) fn bytes(&self) -> usize {
        self.lines.len() * size_of::<CacheLine>()
    }

    /// Frees pages of large memory until the end of the turn, of [`FREED_AT_ONCE`] bytes at least.
    /// Returns whether no more than that is left.
    pub(super) fn free_until_end_of(&mut self, turn: &Turn) -> bool {
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
pub(super) enum Lines {
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

impl Lines {
    /// `count` lines; `None` if there is no memory.
    pub(super) fn zeroed(count: usize) -> Option<Lines> {
        let bytes = count.checked_mul(size_of::<CacheLine>())?;
        if bytes >= MIN_MAPPED {
            return MmapMut::map_anon(bytes).ok().map(Lines::Mapped);
        }
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).ok()?;
        lines.resize(count, CacheLine([0; 64]));
        Some(Lines::Allocated(lines))
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Lines::Allocated(lines) => lines.len(),
            Lines::Mapped(pages) => pages.len() / size_of::<CacheLine>(),
        }
    }

    /// The first line, aligned to a cache line: pages are.
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Lines::Allocated(lines) => lines.as_mut_ptr().cast(),
            Lines::Mapped(pages) => pages.as_mut_ptr(),
        }
    }

    /// Frees the pages of `len` bytes from byte `at` on, and the whole page that byte `at` is in.
    /// They are zero afterwards.
    fn discard(&mut self, at: usize, len: usize) {
        if let Lines::Mapped(pages) = self {
            // SAFETY: a private anonymous mapping that this value owns and borrows exclusively:
            // there is no other reference to its bytes, which may have any value.
            let outcome =
                unsafe { pages.unchecked_advise_range(UncheckedAdvice::DontNeed, at, len) };
            debug_assert!(outcome.is_ok(), "discarding pages: {outcome:?}");
        }
    }

    pub(super) fn fill(&mut self, filler: u8) {
        match self {
            Lines::Allocated(lines) => lines.fill(CacheLine([filler; 64])),
            Lines::Mapped(pages) => pages.fill(filler),
        }
    }
}

/// One cache line, so that scratch memory is aligned for every vector.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct CacheLine(#[allow(dead_code)] [u8; 64]);
