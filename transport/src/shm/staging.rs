//! Allocation of payload memory for payloads that are too large for a ring. The guest allocates and
//! frees. The host only checks that a range lies in the bulk area.
//!
//! The bulk area has two parts:
//!
//! - a [`StagingRing`] for payloads in transit. Requests retire in the order in which they were
//!   sent, and so does their memory. The ring is small, so that it stays in the processors' caches.
//! - a [`StagingHeap`] for long-lived allocations: host buffers of the guest whose bytes the host
//!   reads in place.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// The alignment of every allocation, in bytes: one page.
pub const BULK_ALIGN: usize = 4096;

/// A ring of staging memory. The retirement of a request frees the memory of its payload.
///
/// `head` and `tail` count bytes since the link was opened, as the cursors of a
/// [`ring`](super::ring) do. Invariant: `tail - head <= size`.
#[derive(Debug)]
pub struct StagingRing {
    area: Range<usize>,
    head: u64,
    tail: u64,
    /// For each allocation in use: its request, and the tail behind it. Both ascend.
    live: VecDeque<(u64, u64)>,
}

impl StagingRing {
    /// An empty ring over the window's bytes `area`.
    ///
    /// # Panics
    ///
    /// If `area` is not a whole number of pages.
    pub fn new(area: Range<usize>) -> StagingRing {
        assert!(
            area.len().is_multiple_of(BULK_ALIGN),
            "staging ring over {area:?}"
        );
        StagingRing {
            area,
            head: 0,
            tail: 0,
            live: VecDeque::new(),
        }
    }

    /// The size of the largest payload that fits an empty ring, in bytes.
    pub fn capacity(&self) -> usize {
        self.area.len()
    }

    /// Allocates `len` bytes for the payload of `request`, the next request. `None` while the ring
    /// is too full.
    pub fn reserve(&mut self, len: usize, request: u64) -> Option<Range<usize>> {
        let size = self.area.len() as u64;
        let len = len as u64;
        if self.live.is_empty() {
            // The beginning of the ring is the part that is most likely in the caches.
            (self.head, self.tail) = (0, 0);
        }
        let position = self.tail % size;
        let start = if position + len <= size {
            self.tail
        } else {
            self.tail + (size - position)
        };
        let end = start + len.next_multiple_of(BULK_ALIGN as u64);
        if end - self.head > size {
            return None;
        }
        self.tail = end;
        self.live.push_back((request, end));
        let offset = self.area.start + (start % size) as usize;
        Some(offset..offset + len as usize)
    }

    /// Frees the memory of all requests up to `retired`.
    pub fn retire(&mut self, retired: u64) {
        while let Some(&(request, end)) = self.live.front() {
            if request > retired {
                break;
            }
            self.head = end;
            self.live.pop_front();
        }
    }

    /// The oldest request that holds memory. The retirement of this request frees the next part of
    /// the ring.
    pub fn oldest(&self) -> Option<u64> {
        self.live.front().map(|&(request, _)| request)
    }
}

/// A first-fit heap of staging memory.
#[derive(Debug)]
pub struct StagingHeap {
    /// Free ranges, by start offset: length. No two free ranges are adjacent.
    free: BTreeMap<usize, usize>,
}

impl StagingHeap {
    /// A heap over the window's bytes `area`.
    pub fn new(area: Range<usize>) -> StagingHeap {
        let free = (!area.is_empty()).then(|| (area.start, area.len()));
        StagingHeap {
            free: free.into_iter().collect(),
        }
    }

    /// Allocates `len` bytes, rounded up to whole pages, in the first free range that is long
    /// enough.
    pub fn alloc(&mut self, len: usize) -> Option<Range<usize>> {
        let len = len.max(1).checked_next_multiple_of(BULK_ALIGN)?;
        let (&start, &room) = self.free.iter().find(|&(_, &room)| room >= len)?;
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        Some(start..start + len)
    }

    /// Frees a range that [`alloc`](StagingHeap::alloc) has returned.
    pub fn free(&mut self, range: Range<usize>) {
        let Range { mut start, mut end } = range;
        if let Some(len) = self.free.remove(&end) {
            end += len;
        }
        if let Some((&before, &len)) = self.free.range(..start).next_back()
            && before + len == start
        {
            start = before;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AREA: Range<usize> = 3 * BULK_ALIGN..19 * BULK_ALIGN;

    fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
        a.start < b.end && b.start < a.end
    }

    proptest! {
        /// Live allocations never overlap, and retirement makes every page available again.
        #[test]
        fn a_staging_ring_allocates_only_free_memory(
            steps in prop::collection::vec((1..=AREA.len(), 0..3u64), 1..100)
        ) {
            let mut ring = StagingRing::new(AREA);
            let mut live: VecDeque<(u64, Range<usize>)> = VecDeque::new();
            let (mut sent, mut retired) = (0, 0);
            for (len, retire) in steps {
                if let Some(range) = ring.reserve(len, sent + 1) {
                    sent += 1;
                    prop_assert_eq!(range.len(), len);
                    prop_assert!(range.start >= AREA.start && range.end <= AREA.end);
                    prop_assert!(range.start.is_multiple_of(BULK_ALIGN));
                    prop_assert!(!live.iter().any(|(_, other)| overlap(&range, other)));
                    live.push_back((sent, range));
                } else {
                    prop_assert_eq!(ring.oldest(), live.front().map(|(request, _)| *request));
                    prop_assert!(!live.is_empty(), "an empty ring refused {} bytes", len);
                }
                retired = sent.min(retired + retire);
                ring.retire(retired);
                live.retain(|(request, _)| *request > retired);
            }
            ring.retire(sent);
            prop_assert_eq!(ring.reserve(AREA.len(), sent + 1), Some(AREA));
        }

        /// Live allocations never overlap, and the heap is one free range after all are freed.
        #[test]
        fn a_staging_heap_coalesces(
            steps in prop::collection::vec((0..6 * BULK_ALIGN, any::<prop::sample::Index>()), 1..60)
        ) {
            let mut heap = StagingHeap::new(AREA);
            let mut out: Vec<Range<usize>> = Vec::new();
            for (len, which) in steps {
                match heap.alloc(len) {
                    Some(range) => {
                        prop_assert!(range.len() >= len && range.start.is_multiple_of(BULK_ALIGN));
                        prop_assert!(range.start >= AREA.start && range.end <= AREA.end);
                        prop_assert!(!out.iter().any(|other| overlap(&range, other)));
                        out.push(range);
                    }
                    None => {
                        prop_assert!(!out.is_empty());
                        heap.free(out.swap_remove(which.index(out.len())));
                    }
                }
            }
            for range in out {
                heap.free(range);
            }
            prop_assert_eq!(heap.alloc(AREA.len()), Some(AREA));
            prop_assert_eq!(heap.alloc(0), None);
        }
    }

    #[test]
    fn an_empty_heap_allocates_nothing() {
        assert_eq!(StagingHeap::new(0..0).alloc(1), None);
        assert_eq!(StagingHeap::new(AREA).alloc(usize::MAX), None);
    }
}
