//! The first page of a device's memory: what the device is, and who asks for a slot.
//!
//! Every word is a little-endian `u64`, written by one side only. What the guest writes is hostile to the host; it is
//! a number that is compared, never followed.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::shm::layout::{self, LayoutError};
use crate::shm::memory::Memory;

/// The first word of a device: `VGPUPCI` and a newline, in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"VGPUPCI\n");

/// The version of the directory.
pub const VERSION: u64 = 1;

/// Bytes of the directory.
pub const PAGE: usize = 4096;

/// Parts that a device is cut into. The first is the directory's.
pub const PARTS: usize = 8;

/// Sessions at once.
pub const SLOTS: usize = PARTS - 1;

/// The smallest device: each slot has to hold a window.
pub const MIN_SIZE: usize = PARTS * layout::MIN_SIZE;

/// The largest device.
pub const MAX_SIZE: usize = layout::MAX_SIZE;

/// The size of a device unless something else is asked for.
pub const DEFAULT_SIZE: usize = 256 << 20;

/// Where each word lies.
pub mod word {
    /// [`MAGIC`](super::MAGIC). Written last, so that a device with a magic is one.
    pub const MAGIC: usize = 0x00;
    /// [`VERSION`](super::VERSION).
    pub const VERSION: usize = 0x08;
    /// Bytes of the device.
    pub const SIZE: usize = 0x10;
    /// Number of slots.
    pub const SLOTS: usize = 0x18;
    /// Bytes of a slot. The first begins at as many bytes.
    pub const SLOT_SIZE: usize = 0x20;
    /// A number that differs for every run of the executor.
    pub const EPOCH: usize = 0x28;
    /// Host: 1 while it serves, 0 when it has ended.
    pub const HOST_STATE: usize = 0x40;
    /// Host: changes every second.
    pub const HEARTBEAT: usize = 0x48;

    /// Guest: the number of the session it asks for in slot `k`.
    pub const fn request(k: usize) -> usize {
        0x100 + k * 0x80
    }

    /// Host: the number it has answered last in slot `k`.
    pub const fn answered(k: usize) -> usize {
        0x140 + k * 0x80
    }

    /// Host: its answer, written before the number.
    pub const fn verdict(k: usize) -> usize {
        0x148 + k * 0x80
    }
}

const _: () = assert!(word::verdict(SLOTS - 1) + 8 <= PAGE);

/// A session begins in the slot.
pub const VERDICT_COME_IN: u64 = 0;
/// The session before still runs something.
pub const VERDICT_BUSY: u64 = 1;
/// The host could not make a session; its log says why.
pub const VERDICT_FAILED: u64 = 2;

/// A checked, private copy of the facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory {
    /// Bytes of the device.
    pub size: usize,
    /// Number of slots.
    pub slots: usize,
    /// Bytes of each.
    pub slot_size: usize,
    /// The run of the executor.
    pub epoch: u64,
}

/// Why something is no device of ours. Says what was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum DirectoryError {
    #[error(
        "a device of {size} bytes: the size must be a power of two from {MIN_SIZE} to {MAX_SIZE}"
    )]
    Size { size: usize },
    #[error("its memory begins with {found:#018x}, not with {MAGIC:#018x}")]
    Magic { found: u64 },
    #[error("it speaks directory {found}; this side speaks {VERSION}")]
    Version { found: u64 },
    #[error("it says it has {said} bytes in {slots} slots of {slot_size}; its region has {mapped}")]
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

    /// Writes the facts: the host's part. What a run before has left is replaced; its guests see another epoch.
    pub fn write(&self, memory: &impl Memory) {
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

    /// Reads and checks the facts of a device whose region has `mapped` bytes: the guest's part.
    pub fn read(memory: &impl Memory, mapped: usize) -> Result<Directory, DirectoryError> {
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
    fn what_a_host_writes_a_guest_reads() {
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
    fn a_guest_believes_no_nonsense() {
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
