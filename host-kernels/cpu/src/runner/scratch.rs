//! The working memory of runs.

use std::sync::Mutex;

use memmap2::MmapMut;

use crate::kernel::ThreadProgress;

/// The fewest bytes that are mapped.
const MIN_MAPPED: usize = 1 << 20;

/// Working memory of a run.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) lines: Lines,
    /// How far each thread has got in the phase that a turn begins with. When a turn is over, how
    /// far it has got in the phase that the next turn begins with.
    pub(super) progress: Vec<Mutex<ThreadProgress>>,
}

impl Scratch {
    /// Bytes of the memory of kernels.
    pub(super) fn bytes(&self) -> usize {
        self.lines.len() * size_of::<CacheLine>()
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
