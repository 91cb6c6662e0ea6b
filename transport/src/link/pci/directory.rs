//! The directory, the first page of a device's memory: the device's parameters and the requests for
//! slots.
//!
//! Every word is a little-endian `u64` with one writer. The guest is hostile to the host: the host
//! compares the guest's words and never uses them as an index or an offset.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::shm::layout::{self, LayoutError};
use crate::shm::memory::SharedWords;

/// The first word of a device: `VGPUPCI` and a newline, in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"VGPUPCI\n");

/// The version of the directory.
pub const VERSION: u64 = 1;

/// The size of the directory, in bytes.
pub const PAGE: usize = 4096;

/// The number of equal parts of a device's memory. The first part holds the directory.
pub const PARTS: usize = 8;

/// The maximum number of concurrent sessions.
pub const SLOTS: usize = PARTS - 1;

/// The minimum size of a device, in bytes: each slot holds a window.
pub const MIN_SIZE: usize = PARTS * layout::MIN_SIZE;

/// The maximum size of a device, in bytes.
pub const MAX_SIZE: usize = layout::MAX_SIZE;

/// The default size of a device, in bytes.
pub const DEFAULT_SIZE: usize = 256 << 20;

/// The offset of each word, in bytes.
pub mod word {
    /// [`MAGIC`](super::MAGIC). The host stores the magic last: a directory with a magic is
    /// complete.
    pub const MAGIC: usize = 0x00;
    /// [`VERSION`](super::VERSION).
    pub const VERSION: usize = 0x08;
    /// The size of the device, in bytes.
    pub const SIZE: usize = 0x10;
    /// The number of slots.
    pub const SLOTS: usize = 0x18;
    /// The size of a slot, in bytes. The first slot begins at this offset.
    pub const SLOT_SIZE: usize = 0x20;
    /// A number that is unique for every run of the executor.
    pub const EPOCH: usize = 0x28;
    /// Host: 1 while the executor serves, 0 after its end.
    pub const HOST_STATE: usize = 0x40;
    /// Host: the heartbeat.
    pub const HEARTBEAT: usize = 0x48;

    /// Guest: the number of its request for a session in slot `k`.
    pub const fn request(k: usize) -> usize {
        0x100 + k * 0x80
    }

    /// Host: the number of the last answered request for slot `k`.
    pub const fn answered(k: usize) -> usize {
        0x140 + k * 0x80
    }

    /// Host: the verdict on the request. The host stores the verdict before the number.
    pub const fn verdict(k: usize) -> usize {
        0x148 + k * 0x80
    }

    /// Host: the number of the request whose guest owns slot `k`. The host stores the owner before
    /// the verdict. A request has a random number, so that no other process, boot or virtual
    /// machine has the same. The host alone decides which of several requests gets the slot: the
    /// region may be device memory, where a compare-and-swap of the guests is not atomic.
    pub const fn owner(k: usize) -> usize {
        0x150 + k * 0x80
    }
}

const _: () = assert!(word::owner(SLOTS - 1) + 8 <= PAGE);

/// A session begins in the slot.
pub const VERDICT_ACCEPTED: u64 = 0;
/// The guest of the session in the slot lives, or the session has not ended yet.
pub const VERDICT_BUSY: u64 = 1;
/// The host could not create a session. The log of the host says why.
pub const VERDICT_FAILED: u64 = 2;

/// A checked, private copy of the parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory {
    /// The size of the device, in bytes.
    pub size: usize,
    /// The number of slots.
    pub slots: usize,
    /// The size of each slot, in bytes.
    pub slot_size: usize,
    /// The unique number of the executor's run.
    pub epoch: u64,
}

/// Why a device's memory has no valid directory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum DirectoryError {
    #[error(
        "a device of {size} bytes: the size must be a power of two from {MIN_SIZE} to {MAX_SIZE}"
    )]
    Size { size: usize },
    #[error("the device's memory begins with {found:#018x}, not with {MAGIC:#018x}")]
    Magic { found: u64 },
    #[error(
        "the device has directory version {found}; this guest supports version {VERSION}: update \
         ggml-vgpu {}",
        layout::outdated(VERSION, *.found)
    )]
    Version { found: u64 },
    #[error(
        "the directory says {said} bytes in {slots} slots of {slot_size} bytes; the device's \
         region has {mapped} bytes"
    )]
    Shape {
        said: u64,
        slots: u64,
        slot_size: u64,
        mapped: usize,
    },
    #[error("{0}")]
    Slot(#[from] LayoutError),
}

impl Directory {
    /// The directory of a device of `size` bytes.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Size`] when `size` is not a power of two within the limits.
    pub fn new(size: usize, epoch: u64) -> Result<Directory, DirectoryError> {
        if !size.is_power_of_two() || !(MIN_SIZE..=MAX_SIZE).contains(&size) {
            return Err(DirectoryError::Size { size });
        }
        Ok(Directory {
            size,
            slots: SLOTS,
            slot_size: size / PARTS,
            epoch,
        })
    }

    /// Writes the parameters. The host calls this. The call replaces the directory of an earlier
    /// run, whose guests then see another epoch.
    pub fn write(&self, memory: &impl SharedWords) {
        for (offset, value) in [
            (word::MAGIC, 0),
            (word::EPOCH, self.epoch),
            (word::VERSION, VERSION),
            (word::SIZE, self.size as u64),
            (word::SLOTS, self.slots as u64),
            (word::SLOT_SIZE, self.slot_size as u64),
            (word::HOST_STATE, 1),
        ] {
            memory.store(offset, value);
        }
        memory.drain_writes();
        memory.store(word::MAGIC, MAGIC);
    }

    /// Reads and checks the parameters of a device whose region has `mapped` bytes. The guest calls
    /// this.
    ///
    /// # Errors
    ///
    /// A [`DirectoryError`] that names the wrong word. The host is at fault, or the device is not a
    /// vGPU.
    pub fn read(memory: &impl SharedWords, mapped: usize) -> Result<Directory, DirectoryError> {
        let found = memory.load(word::MAGIC);
        if found != MAGIC {
            return Err(DirectoryError::Magic { found });
        }
        let found = memory.load(word::VERSION);
        if found != VERSION {
            return Err(DirectoryError::Version { found });
        }
        let (said, slots, slot_size) = (
            memory.load(word::SIZE),
            memory.load(word::SLOTS),
            memory.load(word::SLOT_SIZE),
        );
        let end = slots
            .checked_add(1)
            .and_then(|parts| parts.checked_mul(slot_size));
        let fits = said == mapped as u64
            && (1..=SLOTS as u64).contains(&slots)
            && slot_size.is_multiple_of(PAGE as u64)
            && slot_size >= layout::MIN_SIZE as u64
            && end.is_some_and(|end| end <= said);
        if !fits {
            return Err(DirectoryError::Shape {
                said,
                slots,
                slot_size,
                mapped,
            });
        }
        Ok(Directory {
            size: mapped,
            slots: slots as usize,
            slot_size: slot_size as usize,
            epoch: memory.load(word::EPOCH),
        })
    }

    /// The bytes of slot `k`.
    pub fn slot(&self, k: usize) -> Range<usize> {
        let begin = (k + 1) * self.slot_size;
        begin..begin + self.slot_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::memory::Window;

    #[test]
    fn the_guest_reads_the_directory_that_the_host_wrote() {
        let page = Window::anonymous(PAGE).unwrap();
        let directory = Directory::new(MIN_SIZE, 5).unwrap();
        directory.write(&page);
        assert_eq!(Directory::read(&page, MIN_SIZE), Ok(directory.clone()));
        assert_eq!(directory.slot(SLOTS - 1).end, MIN_SIZE);
        for size in [0, MIN_SIZE / 2, MIN_SIZE + 4096, MAX_SIZE * 2] {
            assert_eq!(Directory::new(size, 5), Err(DirectoryError::Size { size }));
        }
    }

    #[test]
    fn a_guest_rejects_every_wrong_directory() {
        for (offset, value) in [
            (word::MAGIC, !0),
            (word::VERSION, 9),
            (word::SIZE, 2 * MIN_SIZE as u64),
            (word::SLOTS, 0),
            (word::SLOTS, !0),
            (word::SLOTS, SLOTS as u64 + 1),
            (word::SLOT_SIZE, 0),
            (word::SLOT_SIZE, 4095),
            (word::SLOT_SIZE, !0xfff),
            (word::SLOT_SIZE, MIN_SIZE as u64),
        ] {
            let page = Window::anonymous(PAGE).unwrap();
            Directory::new(MIN_SIZE, 5).unwrap().write(&page);
            page.store(offset, value);
            Directory::read(&page, MIN_SIZE).unwrap_err();
        }
    }
}
