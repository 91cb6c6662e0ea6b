//! What lies where in a window, and who may write it.
//!
//! ```text
//!        0 +--------------------------------------------------------------+
//!          | page 0 (4 KiB)                                               |
//!          |   0x000  facts    magic version size epoch, where things lie | host, before the guest looks
//!          |   0x100  guest    submission tail                            | guest
//!          |   0x140           completion head                            | guest
//!          |   0x180           sleeping, wake-on                          | guest
//!          |   0x1c0           state, heartbeat                           | guest
//!          |   0x200  host     completion tail                            | host
//!          |   0x240           submission head, retired                   | host
//!          |   0x280           sleeping, wake-on                          | host
//!          |   0x2c0           state, heartbeat                           | host
//!   0x1000 +--------------------------------------------------------------+
//!          | submission ring   records guest -> host                      | guest
//!          +--------------------------------------------------------------+
//!          | completion ring   records host -> guest                      | host
//!          +--------------------------------------------------------------+
//!          | bulk area         large payloads guest -> host, given out    | guest
//!          |                   and taken back by the guest alone          |
//!     size +--------------------------------------------------------------+
//! ```
//!
//! Every word is a little-endian `u64`. The last column is who writes; nobody writes where the peer does, and
//! no two words that different sides write share a cache line. What the guest writes is hostile to the host:
//! it is copied once, checked, then used. The guest checks the host's words too: a broken host must not crash it.
//!
//! # The words
//!
//! | word | invariant | pairs with |
//! |---|---|---|
//! | submission tail | bytes ever put into the submission ring; grows; `head <= tail <= head + size`; a multiple of [`RECORD_ALIGN`] | stored (release, after the write buffers are drained) by the guest when a record is complete; loaded (acquire) by the host before it reads the record |
//! | submission head | bytes ever taken out; grows; `head <= tail` | stored (release) by the host when it has finished with a record and its payload; loaded (acquire) by the guest before it overwrites them |
//! | completion tail, completion head | the same with guest and host exchanged | the same |
//! | retired | the number of the last request the host has finished with; grows; at most the last number sent | stored (release) after the effects of the request; loaded (acquire) by the guest before it reuses the request's bulk range |
//! | sleeping | 0 while its owner is awake; otherwise a number not used for an earlier sleep | see [`sleep`](super::sleep) |
//! | wake-on | what its owner sleeps for; written before sleeping | see [`sleep`](super::sleep) |
//! | state | [`STATE_NEW`], then [`STATE_OPEN`], then [`STATE_CLOSED`] | closing is stored (release) after the last record; loaded (acquire) before the ring is looked at for the last time |
//! | heartbeat | changes about every second while the host process runs (the guest's: on links into virtual machines) | relaxed in meaning: only change matters |
//!
//! A word of all ones is what a PCI device that has gone away reads as: no state, so the peer is taken for closed.

use std::mem::offset_of;
use std::ops::Range;

use super::memory::Memory;
use super::ring::RECORD_ALIGN;
use crate::wire::{MAX_MESSAGE, MAX_PAYLOAD};

/// The first word of a window: `VGPUWIN` and a newline, in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"VGPUWIN\n");

/// The version of the layout.
pub const VERSION: u64 = 1;

/// The size of a window unless something else is asked for.
pub const DEFAULT_SIZE: usize = 64 << 20;

/// The smallest window: the rings take 4.25 MiB, and the bulk area must hold a few payloads.
pub const MIN_SIZE: usize = 8 << 20;

/// The largest window.
pub const MAX_SIZE: usize = 1 << 33;

/// The guest has not come yet.
pub const STATE_NEW: u64 = 0;
/// The side is there.
pub const STATE_OPEN: u64 = 1;
/// The side has closed the link; final.
pub const STATE_CLOSED: u64 = 2;

/// Bytes of the submission ring. It holds messages and small payloads: some thousand of them.
const SUBMISSION_SIZE: usize = 256 << 10;

/// Bytes of the completion ring. It holds the payloads of replies too, several of the largest at once.
const COMPLETION_SIZE: usize = 4 << 20;

/// Where the bulk area begins in a window we make: past the rings, on a boundary that suits large pages of 64 KiB.
const BULK_OFFSET: usize = (PAGE + SUBMISSION_SIZE + COMPLETION_SIZE).next_multiple_of(64 << 10);

/// Bytes of page 0, and the alignment of what follows it.
pub const PAGE: usize = 4096;

/// Page 0. Never referenced: it only gives the offsets below.
#[repr(C)]
struct Page0 {
    facts: Facts,
    guest: GuestWords,
    host: HostWords,
    reserved: [u64; 416],
}

#[repr(C, align(256))]
struct Facts {
    magic: u64,
    version: u64,
    features: u64,
    size: u64,
    epoch: u64,
    submission_offset: u64,
    submission_size: u64,
    completion_offset: u64,
    completion_size: u64,
    bulk_offset: u64,
    bulk_size: u64,
}

#[repr(C, align(64))]
struct CacheLine<T>(T);

#[repr(C)]
struct GuestWords {
    submission_tail: CacheLine<u64>,
    completion_head: CacheLine<u64>,
    sleep: CacheLine<[u64; 2]>,
    alive: CacheLine<[u64; 2]>,
}

#[repr(C)]
struct HostWords {
    completion_tail: CacheLine<u64>,
    done: CacheLine<[u64; 2]>,
    sleep: CacheLine<[u64; 2]>,
    alive: CacheLine<[u64; 2]>,
}

/// Where each word lies.
pub mod word {
    use super::{Facts, GuestWords, HostWords, Page0, offset_of};

    const FACTS: usize = offset_of!(Page0, facts);
    const GUEST: usize = offset_of!(Page0, guest);
    const HOST: usize = offset_of!(Page0, host);

    /// [`MAGIC`](super::MAGIC). Written last, so that a window with a magic is a window.
    pub const MAGIC: usize = FACTS + offset_of!(Facts, magic);
    /// [`VERSION`](super::VERSION).
    pub const VERSION: usize = FACTS + offset_of!(Facts, version);
    /// Bits for additions that an older guest can ignore. None yet.
    pub const FEATURES: usize = FACTS + offset_of!(Facts, features);
    /// Bytes of the window.
    pub const SIZE: usize = FACTS + offset_of!(Facts, size);
    /// A number that differs for every session in this memory.
    pub const EPOCH: usize = FACTS + offset_of!(Facts, epoch);
    /// Where the submission ring begins.
    pub const SUBMISSION_OFFSET: usize = FACTS + offset_of!(Facts, submission_offset);
    /// Bytes of the submission ring.
    pub const SUBMISSION_SIZE: usize = FACTS + offset_of!(Facts, submission_size);
    /// Where the completion ring begins.
    pub const COMPLETION_OFFSET: usize = FACTS + offset_of!(Facts, completion_offset);
    /// Bytes of the completion ring.
    pub const COMPLETION_SIZE: usize = FACTS + offset_of!(Facts, completion_size);
    /// Where the bulk area begins.
    pub const BULK_OFFSET: usize = FACTS + offset_of!(Facts, bulk_offset);
    /// Bytes of the bulk area.
    pub const BULK_SIZE: usize = FACTS + offset_of!(Facts, bulk_size);

    /// Guest: bytes ever put into the submission ring.
    pub const SUBMISSION_TAIL: usize = GUEST + offset_of!(GuestWords, submission_tail);
    /// Guest: bytes ever taken out of the completion ring.
    pub const COMPLETION_HEAD: usize = GUEST + offset_of!(GuestWords, completion_head);
    /// Guest: 0, or the number of its sleep.
    pub const GUEST_SLEEPING: usize = GUEST + offset_of!(GuestWords, sleep);
    /// Guest: what it sleeps for.
    pub const GUEST_WAKE_ON: usize = GUEST_SLEEPING + 8;
    /// Guest: its state.
    pub const GUEST_STATE: usize = GUEST + offset_of!(GuestWords, alive);
    /// Guest: changes every second, on links where the host cannot see the guest die.
    pub const GUEST_HEARTBEAT: usize = GUEST_STATE + 8;

    /// Host: bytes ever put into the completion ring.
    pub const COMPLETION_TAIL: usize = HOST + offset_of!(HostWords, completion_tail);
    /// Host: bytes ever taken out of the submission ring.
    pub const SUBMISSION_HEAD: usize = HOST + offset_of!(HostWords, done);
    /// Host: number of the last request finished with.
    pub const RETIRED: usize = SUBMISSION_HEAD + 8;
    /// Host: 0, or the number of its sleep.
    pub const HOST_SLEEPING: usize = HOST + offset_of!(HostWords, sleep);
    /// Host: what it sleeps for.
    pub const HOST_WAKE_ON: usize = HOST_SLEEPING + 8;
    /// Host: its state.
    pub const HOST_STATE: usize = HOST + offset_of!(HostWords, alive);
    /// Host: changes every second.
    pub const HEARTBEAT: usize = HOST_STATE + 8;
}

const _: () = {
    assert!(size_of::<Page0>() == PAGE);
    assert!(word::MAGIC == 0x00 && word::VERSION == 0x08 && word::FEATURES == 0x10);
    assert!(word::SIZE == 0x18 && word::EPOCH == 0x20);
    assert!(word::SUBMISSION_OFFSET == 0x28 && word::SUBMISSION_SIZE == 0x30);
    assert!(word::COMPLETION_OFFSET == 0x38 && word::COMPLETION_SIZE == 0x40);
    assert!(word::BULK_OFFSET == 0x48 && word::BULK_SIZE == 0x50);
    assert!(word::SUBMISSION_TAIL == 0x100 && word::COMPLETION_HEAD == 0x140);
    assert!(word::GUEST_SLEEPING == 0x180 && word::GUEST_WAKE_ON == 0x188);
    assert!(word::GUEST_STATE == 0x1c0 && word::GUEST_HEARTBEAT == 0x1c8);
    assert!(word::COMPLETION_TAIL == 0x200);
    assert!(word::SUBMISSION_HEAD == 0x240 && word::RETIRED == 0x248);
    assert!(word::HOST_SLEEPING == 0x280 && word::HOST_WAKE_ON == 0x288);
    assert!(word::HOST_STATE == 0x2c0 && word::HEARTBEAT == 0x2c8);
    assert!(BULK_OFFSET + 3 * MAX_PAYLOAD <= MIN_SIZE);
    // A record goes into a ring in one piece, behind a pad of less than its own size.
    assert!(SUBMISSION_SIZE >= 2 * (MAX_MESSAGE + (32 << 10)));
    assert!(COMPLETION_SIZE >= 2 * (MAX_MESSAGE + MAX_PAYLOAD + RECORD_ALIGN));
};

/// Why something is no window. Says what was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum LayoutError {
    #[error(
        "window of {size} bytes: the size must be a power of two from {MIN_SIZE} to {MAX_SIZE}"
    )]
    Size { size: usize },
    #[error("no window here: it begins with {found:#018x}, not with {MAGIC:#018x}")]
    Magic { found: u64 },
    #[error("window of layout {found}; this side speaks layout {VERSION}")]
    Version { found: u64 },
    #[error("window says it has {said} bytes; {mapped} are mapped")]
    OtherSize { said: u64, mapped: usize },
    #[error("the window's {what} cannot lie at {offset:#x} with {size:#x} bytes")]
    Place {
        what: &'static str,
        offset: u64,
        size: u64,
    },
}

/// Where the parts of a window lie: a private, checked copy of its facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    size: usize,
    epoch: u64,
    submission: Range<usize>,
    completion: Range<usize>,
    bulk: Range<usize>,
}

impl Layout {
    /// The layout of a new window.
    pub fn new(size: usize, epoch: u64) -> Result<Layout, LayoutError> {
        if !size.is_power_of_two() || !(MIN_SIZE..=MAX_SIZE).contains(&size) {
            return Err(LayoutError::Size { size });
        }
        let submission = PAGE..PAGE + SUBMISSION_SIZE;
        let completion = submission.end..submission.end + COMPLETION_SIZE;
        Ok(Layout {
            size,
            epoch,
            submission,
            completion,
            bulk: BULK_OFFSET..size,
        })
    }

    /// Writes the facts into memory that is all zero. The host's part.
    pub fn write(&self, memory: &impl Memory) {
        for (offset, value) in [
            (word::VERSION, VERSION),
            (word::FEATURES, 0),
            (word::SIZE, self.size as u64),
            (word::EPOCH, self.epoch),
            (word::SUBMISSION_OFFSET, self.submission.start as u64),
            (word::SUBMISSION_SIZE, self.submission.len() as u64),
            (word::COMPLETION_OFFSET, self.completion.start as u64),
            (word::COMPLETION_SIZE, self.completion.len() as u64),
            (word::BULK_OFFSET, self.bulk.start as u64),
            (word::BULK_SIZE, self.bulk.len() as u64),
            (word::HOST_STATE, STATE_OPEN),
        ] {
            memory.store(offset, value);
        }
        memory.drain_writes();
        memory.store(word::MAGIC, MAGIC);
    }

    /// Reads and checks the facts of a window of which `mapped` bytes are mapped. The guest's part.
    pub fn read(memory: &impl Memory, mapped: usize) -> Result<Layout, LayoutError> {
        let found = memory.load(word::MAGIC);
        if found != MAGIC {
            return Err(LayoutError::Magic { found });
        }
        let found = memory.load(word::VERSION);
        if found != VERSION {
            return Err(LayoutError::Version { found });
        }
        let said = memory.load(word::SIZE);
        if said != mapped as u64 {
            return Err(LayoutError::OtherSize { said, mapped });
        }
        // Each part begins where the one before it ended or later, so none overlap.
        let mut free_from = PAGE as u64;
        let mut part = |what, offset, size, ring, least: usize| {
            let (offset, size) = (memory.load(offset), memory.load(size));
            let wrong = LayoutError::Place { what, offset, size };
            let end = offset.checked_add(size).ok_or(wrong.clone())?;
            let aligned = offset.is_multiple_of(PAGE as u64) && size.is_multiple_of(PAGE as u64);
            if !aligned
                || offset < free_from
                || end > mapped as u64
                || size < least as u64
                || (ring && !size.is_power_of_two())
            {
                return Err(wrong);
            }
            free_from = end;
            Ok(offset as usize..end as usize)
        };
        let submission = part(
            "submission ring",
            word::SUBMISSION_OFFSET,
            word::SUBMISSION_SIZE,
            true,
            SUBMISSION_SIZE,
        )?;
        let completion = part(
            "completion ring",
            word::COMPLETION_OFFSET,
            word::COMPLETION_SIZE,
            true,
            COMPLETION_SIZE,
        )?;
        let bulk = part(
            "bulk area",
            word::BULK_OFFSET,
            word::BULK_SIZE,
            false,
            MAX_PAYLOAD,
        )?;
        Ok(Layout {
            size: mapped,
            epoch: memory.load(word::EPOCH),
            submission,
            completion,
            bulk,
        })
    }

    /// Bytes of the window.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The session's number.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The bytes of the submission ring.
    pub fn submission(&self) -> Range<usize> {
        self.submission.clone()
    }

    /// The bytes of the completion ring.
    pub fn completion(&self) -> Range<usize> {
        self.completion.clone()
    }

    /// The bytes of the bulk area.
    pub fn bulk(&self) -> Range<usize> {
        self.bulk.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::memory::Window;
    use proptest::prelude::*;

    fn window() -> Window {
        let window = Window::anonymous(MIN_SIZE).unwrap();
        Layout::new(MIN_SIZE, 77).unwrap().write(&window);
        window
    }

    #[test]
    fn what_a_host_writes_a_guest_reads() {
        for size in [MIN_SIZE, DEFAULT_SIZE] {
            let window = Window::anonymous(size).unwrap();
            let layout = Layout::new(size, 77).unwrap();
            layout.write(&window);
            assert_eq!(Layout::read(&window, size), Ok(layout.clone()));
            assert_eq!(layout.bulk().end, size);
            assert!(layout.bulk().len() >= 3 * MAX_PAYLOAD);
        }
        assert_eq!(Layout::new(MAX_SIZE, 77).unwrap().size(), MAX_SIZE);
        for size in [0, MIN_SIZE / 2, MIN_SIZE + 4096, MAX_SIZE * 2] {
            assert_eq!(Layout::new(size, 77), Err(LayoutError::Size { size }));
        }
    }

    #[test]
    fn a_guest_believes_no_nonsense() {
        let place = |what, offset: usize, size: usize| LayoutError::Place {
            what,
            offset: offset as u64,
            size: size as u64,
        };
        let (submission, completion) = (PAGE, PAGE + SUBMISSION_SIZE);
        let cases = [
            (word::MAGIC, 0, LayoutError::Magic { found: 0 }),
            (word::MAGIC, !0, LayoutError::Magic { found: !0 }),
            (word::VERSION, 2, LayoutError::Version { found: 2 }),
            (
                word::SIZE,
                2 * MIN_SIZE as u64,
                LayoutError::OtherSize {
                    said: 2 * MIN_SIZE as u64,
                    mapped: MIN_SIZE,
                },
            ),
            // Over page 0.
            (
                word::SUBMISSION_OFFSET,
                0,
                place("submission ring", 0, SUBMISSION_SIZE),
            ),
            // No power of two.
            (
                word::COMPLETION_SIZE,
                (COMPLETION_SIZE + PAGE) as u64,
                place("completion ring", completion, COMPLETION_SIZE + PAGE),
            ),
            // Over the ring before.
            (
                word::COMPLETION_OFFSET,
                submission as u64,
                place("completion ring", submission, COMPLETION_SIZE),
            ),
            // Beyond the window.
            (
                word::BULK_SIZE,
                MIN_SIZE as u64,
                place("bulk area", BULK_OFFSET, MIN_SIZE),
            ),
            // Beyond all numbers.
            (
                word::BULK_OFFSET,
                !0xfff,
                place("bulk area", !0xfff, MIN_SIZE - BULK_OFFSET),
            ),
        ];
        for (offset, value, error) in cases {
            let window = window();
            window.store(offset, value);
            assert_eq!(Layout::read(&window, MIN_SIZE), Err(error));
        }
    }

    proptest! {
        /// Whatever the facts say: if they are taken, the parts lie in the window and apart.
        #[test]
        fn parts_lie_in_the_window(changes in prop::collection::vec(
            (0..11usize, prop_oneof![(0..5000u64).prop_map(|page| page << 12), any::<u64>()]),
            1..4,
        )) {
            let window = window();
            for (which, value) in changes {
                window.store(which * 8, value);
            }
            if let Ok(layout) = Layout::read(&window, MIN_SIZE) {
                prop_assert!(PAGE <= layout.submission().start);
                prop_assert!(layout.submission().end <= layout.completion().start);
                prop_assert!(layout.completion().end <= layout.bulk().start);
                prop_assert!(layout.bulk().end <= MIN_SIZE);
                prop_assert!(layout.submission().len().is_power_of_two());
                prop_assert!(layout.completion().len().is_power_of_two());
                prop_assert!(layout.bulk().len() >= MAX_PAYLOAD);
            }
        }
    }
}
