//! The layout of a window: the offset of every part, and the side that writes it.
//!
//! ```text
//!      0 +----------------------------------------------------------+
//!        | page 0 (4 KiB)                                           |
//!        |   0x000  header   magic version size epoch, part offsets | host, before the guest reads
//!        |   0x100  guest    submission tail                        | guest
//!        |   0x140           completion head                        | guest
//!        |   0x180           sleeping, wake-on                      | guest
//!        |   0x1c0           state, heartbeat                       | guest
//!        |   0x200  host     completion tail                        | host
//!        |   0x240           submission head, retired               | host
//!        |   0x280           sleeping, wake-on                      | host
//!        |   0x2c0           state, heartbeat                       | host
//! 0x1000 +----------------------------------------------------------+
//!        | submission ring   records guest -> host                  | guest
//!        +----------------------------------------------------------+
//!        | completion ring   records host -> guest                  | host
//!        +----------------------------------------------------------+
//!        | bulk area         large payloads guest -> host;          | guest
//!        |                   the guest alone allocates and frees    |
//!   size +----------------------------------------------------------+
//! ```
//!
//! Every word is a little-endian `u64`. The last column names the side that writes. No part has two
//! writers, and no cache line holds words of two writers. The guest is hostile to the host: the
//! host copies each word once, checks the copy, then uses the copy. The guest checks the host's
//! words in the same way, so that a defective host cannot crash the guest.
//!
//! # The words
//!
//! For each word: its invariant, and what the store to the word pairs with.
//!
//! - **submission tail**: total bytes put into the submission ring; never decreases;
//!   `head <= tail <= head + size`; a multiple of [`RECORD_ALIGN`]. The guest's release store,
//!   after the guest has drained its write buffers and the record is complete, pairs with the
//!   host's acquire load before the host reads the record.
//! - **submission head**: total bytes taken out; never decreases; `head <= tail`. The host's
//!   release store, after the host's last read of a record and its payload, pairs with the guest's
//!   acquire load before the guest overwrites them.
//! - **completion tail**, **completion head**: the same with guest and host exchanged.
//! - **retired**: the number of the last request that the host has finished; never decreases; at
//!   most the last number sent. The host's release store, after the effects of the request, pairs
//!   with the guest's acquire load before the guest reuses the request's bulk range.
//! - **sleeping**: 0 while the writer is awake; otherwise a number that no earlier sleep has used.
//!   [`notify`](super::notify) says what the store pairs with.
//! - **wake-on**: the condition that the writer sleeps for; stored before `sleeping`.
//!   [`notify`](super::notify) says what the store pairs with.
//! - **state**: [`STATE_NEW`], then [`STATE_OPEN`], then [`STATE_CLOSED`]. The release store of
//!   `STATE_CLOSED`, after the last record, pairs with the peer's acquire load before the peer's
//!   last check of the ring.
//! - **heartbeat**: changes about once a second while the host process runs; the guest's word only
//!   on links into virtual machines. The store pairs with nothing: only the change matters.
//!
//! The memory of a removed PCI device reads as all ones, or as zeros under emulation. Neither is
//! [`STATE_OPEN`], so a guest treats its host as closed.

use std::mem::offset_of;
use std::ops::Range;

use super::memory::SharedWords;
use super::ring::RECORD_ALIGN;
use crate::limits::{MAX_MESSAGE, MAX_PAYLOAD};

/// The first word of a window: `VGPUWIN` and a newline, in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"VGPUWIN\n");

/// The version of the layout.
pub const VERSION: u64 = 1;

/// The default size of a window, in bytes.
pub const DEFAULT_SIZE: usize = 64 << 20;

/// The minimum size of a window, in bytes. The rings occupy 4.25 MiB, and the bulk area must hold
/// several payloads.
pub const MIN_SIZE: usize = 8 << 20;

/// The maximum size of a window, in bytes.
pub const MAX_SIZE: usize = 1 << 33;

/// The guest has not opened the link yet.
pub const STATE_NEW: u64 = 0;
/// The side has opened the link.
pub const STATE_OPEN: u64 = 1;
/// The side has closed the link. The state is final.
pub const STATE_CLOSED: u64 = 2;

/// The size of the submission ring, in bytes. The ring holds some thousand messages with small
/// payloads.
const SUBMISSION_SIZE: usize = 256 << 10;

/// The size of the completion ring, in bytes. The ring holds several replies with payloads of
/// maximum size.
const COMPLETION_SIZE: usize = 4 << 20;

/// The offset of the bulk area in a window of this version: behind the rings, aligned to the 64 KiB
/// pages of some processors.
const BULK_OFFSET: usize = (PAGE + SUBMISSION_SIZE + COMPLETION_SIZE).next_multiple_of(64 << 10);

/// The size of page 0 and the alignment of the parts behind it, in bytes.
pub const PAGE: usize = 4096;

/// Page 0. The type only provides the offsets below. No reference of this type exists.
#[repr(C)]
struct Page0 {
    header: Header,
    guest: GuestWords,
    host: HostWords,
    reserved: [u64; 416],
}

#[repr(C, align(256))]
struct Header {
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

/// The offset of each word, in bytes.
pub mod word {
    use super::{GuestWords, Header, HostWords, Page0, offset_of};

    const HEADER: usize = offset_of!(Page0, header);
    const GUEST: usize = offset_of!(Page0, guest);
    const HOST: usize = offset_of!(Page0, host);

    /// [`MAGIC`](super::MAGIC). The host stores the magic last: a window with a magic is complete.
    pub const MAGIC: usize = HEADER + offset_of!(Header, magic);
    /// [`VERSION`](super::VERSION).
    pub const VERSION: usize = HEADER + offset_of!(Header, version);
    /// Feature bits that an older guest can ignore. No bit is defined yet.
    pub const FEATURES: usize = HEADER + offset_of!(Header, features);
    /// The size of the window, in bytes.
    pub const SIZE: usize = HEADER + offset_of!(Header, size);
    /// A number that is unique for every session in this memory.
    pub const EPOCH: usize = HEADER + offset_of!(Header, epoch);
    /// The offset of the submission ring.
    pub const SUBMISSION_OFFSET: usize = HEADER + offset_of!(Header, submission_offset);
    /// The size of the submission ring, in bytes.
    pub const SUBMISSION_SIZE: usize = HEADER + offset_of!(Header, submission_size);
    /// The offset of the completion ring.
    pub const COMPLETION_OFFSET: usize = HEADER + offset_of!(Header, completion_offset);
    /// The size of the completion ring, in bytes.
    pub const COMPLETION_SIZE: usize = HEADER + offset_of!(Header, completion_size);
    /// The offset of the bulk area.
    pub const BULK_OFFSET: usize = HEADER + offset_of!(Header, bulk_offset);
    /// The size of the bulk area, in bytes.
    pub const BULK_SIZE: usize = HEADER + offset_of!(Header, bulk_size);

    /// Guest: total bytes put into the submission ring.
    pub const SUBMISSION_TAIL: usize = GUEST + offset_of!(GuestWords, submission_tail);
    /// Guest: total bytes taken out of the completion ring.
    pub const COMPLETION_HEAD: usize = GUEST + offset_of!(GuestWords, completion_head);
    /// Guest: 0 while awake, or the sleep number.
    pub const GUEST_SLEEPING: usize = GUEST + offset_of!(GuestWords, sleep);
    /// Guest: the condition that the guest sleeps for.
    pub const GUEST_WAKE_ON: usize = GUEST_SLEEPING + 8;
    /// Guest: the state of the guest's end.
    pub const GUEST_STATE: usize = GUEST + offset_of!(GuestWords, alive);
    /// Guest: the heartbeat, on links where the host cannot observe the death of the guest.
    pub const GUEST_HEARTBEAT: usize = GUEST_STATE + 8;

    /// Host: total bytes put into the completion ring.
    pub const COMPLETION_TAIL: usize = HOST + offset_of!(HostWords, completion_tail);
    /// Host: total bytes taken out of the submission ring.
    pub const SUBMISSION_HEAD: usize = HOST + offset_of!(HostWords, done);
    /// Host: the number of the last finished request.
    pub const RETIRED: usize = SUBMISSION_HEAD + 8;
    /// Host: 0 while awake, or the sleep number.
    pub const HOST_SLEEPING: usize = HOST + offset_of!(HostWords, sleep);
    /// Host: the condition that the host sleeps for.
    pub const HOST_WAKE_ON: usize = HOST_SLEEPING + 8;
    /// Host: the state of the host's end.
    pub const HOST_STATE: usize = HOST + offset_of!(HostWords, alive);
    /// Host: the heartbeat.
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
    // A record is contiguous, and a pad shorter than the record may precede it.
    assert!(SUBMISSION_SIZE >= 2 * (MAX_MESSAGE + (32 << 10)));
    assert!(COMPLETION_SIZE >= 2 * (MAX_MESSAGE + MAX_PAYLOAD + RECORD_ALIGN));
};

/// The side that has to be updated, where a guest and a host of these versions of a layout have
/// none in common.
pub(crate) fn outdated(guest: u64, host: u64) -> &'static str {
    match guest < host {
        true => "in the guest",
        false => "on the host",
    }
}

/// Why memory is not a window.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum LayoutError {
    #[error(
        "a window of {size} bytes: the size must be a power of two from {MIN_SIZE} to {MAX_SIZE}"
    )]
    Size { size: usize },
    #[error("not a window: the memory begins with {found:#018x}, not with {MAGIC:#018x}")]
    Magic { found: u64 },
    #[error(
        "a window of layout version {found}; this guest supports version {VERSION}: update \
         ggml-vgpu {}",
        outdated(VERSION, *.found)
    )]
    Version { found: u64 },
    #[error("the window's header says {said} bytes; {mapped} bytes are mapped")]
    OtherSize { said: u64, mapped: usize },
    #[error(
        "the window's {what} of {size:#x} bytes at {offset:#x} is misaligned, too small or out of \
         bounds"
    )]
    Part {
        what: &'static str,
        offset: u64,
        size: u64,
    },
}

/// The offsets of a window's parts: a private, checked copy of the window's header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    size: usize,
    epoch: u64,
    submission: Range<usize>,
    completion: Range<usize>,
    bulk: Range<usize>,
}

impl Layout {
    /// The layout of a new window of `size` bytes.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Size`] when `size` is not a power of two within the limits.
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

    /// Writes the header into zeroed memory. The host calls this.
    pub fn write(&self, memory: &impl SharedWords) {
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

    /// Reads and checks the header of a window of `mapped` bytes. The guest calls this.
    ///
    /// # Errors
    ///
    /// A [`LayoutError`] that names the first wrong word. The host is at fault.
    pub fn read(memory: &impl SharedWords, mapped: usize) -> Result<Layout, LayoutError> {
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
        // Each part begins at or behind the end of the part before it, so no parts overlap.
        let mut free_from = PAGE as u64;
        let mut part = |what, offset, size, ring, min: usize| {
            let (offset, size) = (memory.load(offset), memory.load(size));
            let wrong = LayoutError::Part { what, offset, size };
            let end = offset.checked_add(size).ok_or(wrong.clone())?;
            let aligned = offset.is_multiple_of(PAGE as u64) && size.is_multiple_of(PAGE as u64);
            if !aligned
                || offset < free_from
                || end > mapped as u64
                || size < min as u64
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

    /// The size of the window, in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The unique number of the session.
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
    fn the_guest_reads_the_layout_that_the_host_wrote() {
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
    fn a_guest_rejects_every_wrong_header() {
        let part = |what, offset: usize, size: usize| LayoutError::Part {
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
            // Overlaps page 0.
            (
                word::SUBMISSION_OFFSET,
                0,
                part("submission ring", 0, SUBMISSION_SIZE),
            ),
            // Not a power of two.
            (
                word::COMPLETION_SIZE,
                (COMPLETION_SIZE + PAGE) as u64,
                part("completion ring", completion, COMPLETION_SIZE + PAGE),
            ),
            // Overlaps the submission ring.
            (
                word::COMPLETION_OFFSET,
                submission as u64,
                part("completion ring", submission, COMPLETION_SIZE),
            ),
            // Ends behind the window.
            (
                word::BULK_SIZE,
                MIN_SIZE as u64,
                part("bulk area", BULK_OFFSET, MIN_SIZE),
            ),
            // Overflows.
            (
                word::BULK_OFFSET,
                !0xfff,
                part("bulk area", !0xfff, MIN_SIZE - BULK_OFFSET),
            ),
        ];
        for (offset, value, error) in cases {
            let window = window();
            window.store(offset, value);
            assert_eq!(Layout::read(&window, MIN_SIZE), Err(error));
        }
    }

    proptest! {
        /// The parts of every accepted header lie in the window and do not overlap.
        #[test]
        fn parts_of_an_accepted_header_lie_in_the_window(changes in prop::collection::vec(
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
