//! Room for payloads that are too large for a ring. The guest gives it out and takes it back; the host only
//! checks that a range lies in the bulk area.
//!
//! The area is cut in two:
//!
//! - a [`StagingRing`]: payloads on their way, given back in the order they were sent as the host retires
//!   requests. Small enough that it stays in the processors' caches however much goes through it.
//! - a [`StagingHeap`]: memory given out for longer, for buffers whose bytes the host can take from where they lie.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Ranges begin at multiples of this: a page.
pub const BULK_ALIGN: usize = 4096;

/// Memory for payloads on their way: a ring whose parts are freed by the retiring of their requests.
///
/// `head` and `tail` count bytes since the link began, as those of a ring do; `tail - head <= size`.
#[derive(Debug)]
pub struct StagingRing {
    area: Range<usize>,
    head: u64,
    tail: u64,
    /// The request of each part in use, and the tail behind it. Both ascend.
    live: VecDeque<(u64, u64)>,
}

impl StagingRing {
    /// A stream through `area`, a whole number of pages.
    pub fn new(area: Range<usize>) -> StagingRing {
        assert!(
            area.len().is_multiple_of(BULK_ALIGN),
            "stream through {area:?}"
        );
        StagingRing {
            area,
            head: 0,
            tail: 0,
            live: VecDeque::new(),
        }
    }

    /// The largest payload that can ever pass.
    pub fn capacity(&self) -> usize {
        self.area.len()
    }

    /// Room for the payload of `request`, the next to be sent. `None` while there is none.
    pub fn reserve(&mut self, len: usize, request: u64) -> Option<Range<usize>> {
        let size = self.area.len() as u64;
        let len = len as u64;
        if self.live.is_empty() {
            // Begin again where the caches are warm.
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

    /// Takes back what the requests up to `retired` held.
    pub fn retire(&mut self, retired: u64) {
        while let Some(&(request, end)) = self.live.front() {
            if request > retired {
                break;
            }
            self.head = end;
            self.live.pop_front();
        }
    }

    /// The request that has to retire before more room can be found.
    pub fn oldest(&self) -> Option<u64> {
        self.live.front().map(|&(request, _)| request)
    }
}

/// Memory given out for longer, in ranges of any size.
#[derive(Debug)]
pub struct StagingHeap {
    /// Free ranges by their beginning: length. No two touch.
    free: BTreeMap<usize, usize>,
}

impl StagingHeap {
    /// A pool of the memory in `area`.
    pub fn new(area: Range<usize>) -> StagingHeap {
        let free = (!area.is_empty()).then(|| (area.start, area.len()));
        StagingHeap {
            free: free.into_iter().collect(),
        }
    }

    /// Takes `len` bytes, from the first place they fit.
    pub fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let len = len.max(1).checked_next_multiple_of(BULK_ALIGN)?;
        let (&start, &room) = self.free.iter().find(|&(_, &room)| room >= len)?;
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        Some(start..start + len)
    }

    /// Takes back a range that [`take`](StagingHeap::take) gave out.
    pub fn give_back(&mut self, range: Range<usize>) {
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
        /// Payloads on their way never overlap; what is retired can be used again, to the last page.
        #[test]
        fn a_stream_gives_out_what_is_free(
            steps in prop::collection::vec((1..=AREA.len(), 0..3u64), 1..100)
        ) {
            let mut stream = StagingRing::new(AREA);
            let mut live: VecDeque<(u64, Range<usize>)> = VecDeque::new();
            let (mut sent, mut retired) = (0, 0);
            for (len, retire) in steps {
                if let Some(range) = stream.reserve(len, sent + 1) {
                    sent += 1;
                    prop_assert_eq!(range.len(), len);
                    prop_assert!(range.start >= AREA.start && range.end <= AREA.end);
                    prop_assert!(range.start.is_multiple_of(BULK_ALIGN));
                    prop_assert!(!live.iter().any(|(_, other)| overlap(&range, other)));
                    live.push_back((sent, range));
                } else {
                    prop_assert_eq!(stream.oldest(), live.front().map(|(request, _)| *request));
                    prop_assert!(!live.is_empty(), "an empty stream refused {} bytes", len);
                }
                retired = sent.min(retired + retire);
                stream.retire(retired);
                live.retain(|(request, _)| *request > retired);
            }
            stream.retire(sent);
            prop_assert_eq!(stream.reserve(AREA.len(), sent + 1), Some(AREA));
        }

        /// Memory given out for longer never overlaps, and is one piece again when all of it is back.
        #[test]
        fn a_pool_becomes_whole_again(
            steps in prop::collection::vec((0..6 * BULK_ALIGN, any::<prop::sample::Index>()), 1..60)
        ) {
            let mut pool = StagingHeap::new(AREA);
            let mut out: Vec<Range<usize>> = Vec::new();
            for (len, which) in steps {
                match pool.take(len) {
                    Some(range) => {
                        prop_assert!(range.len() >= len && range.start.is_multiple_of(BULK_ALIGN));
                        prop_assert!(range.start >= AREA.start && range.end <= AREA.end);
                        prop_assert!(!out.iter().any(|other| overlap(&range, other)));
                        out.push(range);
                    }
                    None => {
                        prop_assert!(!out.is_empty());
                        pool.give_back(out.swap_remove(which.index(out.len())));
                    }
                }
            }
            for range in out {
                pool.give_back(range);
            }
            prop_assert_eq!(pool.take(AREA.len()), Some(AREA));
            prop_assert_eq!(pool.take(0), None);
        }
    }

    #[test]
    fn a_pool_of_nothing_gives_nothing() {
        assert_eq!(StagingHeap::new(0..0).take(1), None);
        assert_eq!(StagingHeap::new(AREA).take(usize::MAX), None);
    }
}
