//! The mapping of a window, and the only way to touch it.
//!
//! The peer can change any byte at any time, so there is never a reference into a window:
//!
//! - words and messages are read and written as whole atomic words, so a value that was checked is the value
//!   that is used: the compiler cannot read it a second time;
//! - payloads are copied by pointer through [`Bytes`] and [`BytesMut`] and mean nothing to the code that
//!   copies them.
//!
//! Only plain loads, plain stores and fences are used, nothing that locks the bus: the window may be
//! device memory, where a locked instruction is an error or does not work across the PCI bus.
//!
//! # Device memory
//!
//! In a virtual machine a window is a PCI memory region, mapped write-combined where that is on offer: stores gather in the
//! processor and reach memory in any order, loads are not cached. Everything above holds there as it stands, because
//!
//! - nothing is published without [`drain_writes`](Memory::drain_writes) before it, which empties the processor's write
//!   buffers;
//! - a word that has been stored may linger in such a buffer until the next fence, and every store that a peer may be
//!   waiting for is followed by the full fence of [`sleep`](super::sleep) (a doorbell is looked at after each
//!   publication);
//! - payloads are read once, from front to back, with loads made for such memory (see [`bytes`](crate::bytes)).
//!
//! With [`bytes`](crate::bytes), this is the only module of the crate with unsafe code (and a few calls to the kernel
//! that `rustix` does not have).

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::bytes::{Bytes, BytesMut};

/// Shared memory, as the rings see it. Offsets are in bytes from the window's beginning.
///
/// A trait, so that the rings can be run against memory that checks every interleaving.
pub trait Memory {
    /// Loads a word (acquire).
    fn load(&self, offset: usize) -> u64;

    /// Stores a word (release).
    fn store(&self, offset: usize, value: u64);

    /// Copies bytes out, each read once. `offset` is a multiple of 8.
    fn read(&self, offset: usize, out: &mut [u8]);

    /// Copies bytes in, filling up with zeroes to a multiple of 8. `offset` is a multiple of 8.
    fn write(&self, offset: usize, data: &[u8]);

    /// Makes everything written so far, by whatever kind of store, visible before any later
    /// [`store`](Memory::store).
    fn drain_writes(&self);

    /// Orders every earlier access before every later one, for all who do the same (sequentially consistent).
    fn full_fence(&self);
}

/// The seals of a window's memfd: nobody can shrink it under a mapping, which would kill the reader.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Why there is no mapping.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum MapError {
    #[error("{what}: {error}")]
    System { what: &'static str, error: Errno },
    #[error("the window's file is not sealed against resizing (seals {seals:#x})")]
    NotSealed { seals: u32 },
    #[error("the window's file has {found} bytes, not the {said} that were announced")]
    OtherSize { found: u64, said: u64 },
}

impl MapError {
    fn system(what: &'static str) -> impl FnOnce(Errno) -> MapError {
        move |error| MapError::System { what, error }
    }
}

/// Mapped shared memory. Unmapped when dropped.
#[derive(Debug)]
pub struct Window {
    base: NonNull<u8>,
    size: usize,
    /// Whether the memory may be a device's: not cached.
    is_device: bool,
}

// SAFETY: a Window owns a mapping, which belongs to the process and not to a thread.
unsafe impl Send for Window {}
// SAFETY: the mapping is only accessed by atomic words and by raw copies, both of which other
// processes do concurrently anyway; no method hands out a reference into it.
unsafe impl Sync for Window {}

impl Window {
    /// Zeroed memory of this process, for both ends of a link inside it.
    pub fn anonymous(size: usize) -> Result<Window, MapError> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: no address is given, so the kernel picks one where nothing is mapped.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        };
        Window::from_mapping(base, size)
    }

    /// Maps a file that [`sealed_file`] made: the host's side.
    pub fn map(file: BorrowedFd<'_>, size: usize) -> Result<Window, MapError> {
        // SAFETY: no address is given, so the kernel picks one where nothing is mapped. The file is sealed
        // (by us, or checked in `map_foreign`), so it stays as long as the mapping and no access faults.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        Window::from_mapping(base, size)
    }

    /// Maps a part of a file that [`sealed_file`] made, as a window of its own. `offset` is a multiple of the page size.
    pub fn map_part(file: BorrowedFd<'_>, offset: u64, size: usize) -> Result<Window, MapError> {
        // SAFETY: as in `map`; the file is one of ours, sealed, and the caller names a part inside it. (Beyond its end
        // an access would fault, but no memory of ours would be touched.)
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )
        };
        Window::from_mapping(base, size)
    }

    /// Maps a part of a PCI device's memory, by its file in sysfs: the side of a guest in a virtual machine. The kernel
    /// refuses what does not lie in the region. (If the device is unplugged under the mapping, an access ends the
    /// process; nobody unplugs a device that is in use.)
    pub fn map_device(
        resource: BorrowedFd<'_>,
        offset: u64,
        size: usize,
    ) -> Result<Window, MapError> {
        let mut window = Window::map_part(resource, offset, size)?;
        window.is_device = true;
        Ok(window)
    }

    /// Maps a file that the peer sent and says has `said` bytes: the guest's side. Trusts neither.
    pub fn map_foreign(file: BorrowedFd<'_>, said: u64) -> Result<Window, MapError> {
        let seals = rustix::fs::fcntl_get_seals(file)
            .map_err(MapError::system("asking for the window's seals"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(MapError::NotSealed {
                seals: seals.bits(),
            });
        }
        // Looked at after the seals: from there on it cannot shrink.
        let found = rustix::fs::fstat(file)
            .map_err(MapError::system("asking for the window's size"))?
            .st_size as u64;
        match usize::try_from(said) {
            Ok(size) if found == said && size > 0 => Window::map(file, size),
            _ => Err(MapError::OtherSize { found, said }),
        }
    }

    fn from_mapping(
        base: Result<*mut std::ffi::c_void, Errno>,
        size: usize,
    ) -> Result<Window, MapError> {
        let base = base.map_err(MapError::system("mapping the window"))?;
        let base = NonNull::new(base.cast()).ok_or(MapError::System {
            what: "mapping the window",
            error: Errno::FAULT,
        })?;
        Ok(Window {
            base,
            size,
            is_device: false,
        })
    }

    /// Where it is mapped, for those who are lent a part of it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether the memory may be a device's: not cached, slow to read.
    pub fn is_device(&self) -> bool {
        self.is_device
    }

    /// A part of the window, to copy a payload from.
    ///
    /// # Panics
    ///
    /// If the range does not lie in the window. Ranges named by a peer are checked before they come here.
    pub fn bytes(&self, range: Range<usize>) -> Bytes<'_> {
        let ptr = self.at(range.start, range.len());
        // SAFETY: `at` has checked that the range lies in the mapping, which lives as long as `self`.
        let bytes = unsafe { Bytes::from_raw(ptr, range.len()) };
        if self.is_device {
            bytes.from_device()
        } else {
            bytes
        }
    }

    /// A part of the window, to copy a payload to.
    ///
    /// # Panics
    ///
    /// If the range does not lie in the window.
    pub fn bytes_mut(&self, range: Range<usize>) -> BytesMut<'_> {
        let ptr = self.at(range.start, range.len());
        // SAFETY: `at` has checked that the range lies in the mapping, which lives as long as `self`. There
        // is no Rust reference to any of it.
        unsafe { BytesMut::from_raw(ptr, range.len()) }
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.size && len <= self.size - offset,
            "{len} bytes at {offset} are outside a window of {} bytes",
            self.size
        );
        // SAFETY: the offset has just been checked to lie in the mapping (or at its end).
        unsafe { self.base.as_ptr().add(offset) }
    }

    fn words(&self, offset: usize, count: usize) -> impl Iterator<Item = &AtomicU64> {
        assert!(offset.is_multiple_of(8), "word at {offset}");
        let first = self.at(offset, count * 8).cast::<AtomicU64>();
        // SAFETY: `at` has checked that `count` words lie in the mapping, which is page-aligned, so each word is
        // aligned. An AtomicU64 may be changed by others at any time, and whoever accesses words of the
        // window, here or in another process, does so by such atomics.
        (0..count).map(move |i| unsafe { &*first.add(i) })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "word at {offset}");
        let word = self.at(offset, 8).cast::<AtomicU64>();
        // SAFETY: as in `words`.
        unsafe { &*word }
    }
}

/// The registers of a PCI device, mapped: 32-bit words that mean something to who implements the device. Only ever
/// accessed whole, in program order.
#[derive(Debug)]
pub struct Registers(Window);

impl Registers {
    /// Maps the first page of a PCI device's registers, by their file in sysfs.
    pub fn map(resource: BorrowedFd<'_>) -> Result<Registers, MapError> {
        Window::map_device(resource, 0, 4096).map(Registers)
    }

    /// Reads a register.
    ///
    /// # Panics
    ///
    /// If there is none at `offset`.
    pub fn read(&self, offset: usize) -> u32 {
        u32::from_le(self.register(offset).load(Ordering::Acquire))
    }

    /// Writes a register.
    ///
    /// # Panics
    ///
    /// If there is none at `offset`.
    pub fn write(&self, offset: usize, value: u32) {
        self.register(offset)
            .store(value.to_le(), Ordering::Release);
    }

    fn register(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "register at {offset}");
        let register = self.0.at(offset, 4).cast::<AtomicU32>();
        // SAFETY: `at` has checked that it lies in the mapping, which is page-aligned, so it is aligned; whoever
        // accesses it does so by such atomics.
        unsafe { &*register }
    }
}

impl Memory for Window {
    fn load(&self, offset: usize) -> u64 {
        u64::from_le(self.word(offset).load(Ordering::Acquire))
    }

    fn store(&self, offset: usize, value: u64) {
        self.word(offset).store(value.to_le(), Ordering::Release);
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        let words = self.words(offset, out.len().div_ceil(8));
        for (word, out) in words.zip(out.chunks_mut(8)) {
            let value = word.load(Ordering::Relaxed).to_ne_bytes();
            out.copy_from_slice(&value[..out.len()]);
        }
    }

    fn write(&self, offset: usize, data: &[u8]) {
        let words = self.words(offset, data.len().div_ceil(8));
        for (word, data) in words.zip(data.chunks(8)) {
            let mut value = [0; 8];
            value[..data.len()].copy_from_slice(data);
            word.store(u64::from_ne_bytes(value), Ordering::Relaxed);
        }
    }

    fn drain_writes(&self) {
        // On x86 a release store does not wait for write-combined or non-temporal stores; this does.
        #[cfg(target_arch = "x86_64")]
        // SAFETY: sfence belongs to SSE, which every x86-64 processor has.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        fence(Ordering::Release);
    }

    fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: `base` and `size` are what mmap gave and took; nothing borrowed from the window outlives
        // it, by the lifetimes of what it hands out.
        // A failure would leave the memory mapped, which harms nobody.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.size) };
    }
}

/// Makes the file behind a window: all zero, of `size` bytes for ever.
pub fn sealed_file(size: usize) -> Result<OwnedFd, MapError> {
    sealed_file_named("vgpu-window", size)
}

/// The same under another name, which is what `/proc/*/maps` shows.
pub fn sealed_file_named(name: &str, size: usize) -> Result<OwnedFd, MapError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)
        .map_err(MapError::system("making the window's file"))?;
    rustix::fs::ftruncate(&file, size as u64)
        .map_err(MapError::system("sizing the window's file"))?;
    rustix::fs::fcntl_add_seals(file.as_fd(), SEALS)
        .map_err(MapError::system("sealing the window's file"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn words_and_bytes_come_back() {
        let window = Window::anonymous(8192).unwrap();
        window.store(16, 0x0102_0304_0506_0708);
        assert_eq!(window.load(16), 0x0102_0304_0506_0708);
        window.write(64, b"eleven byte");
        let mut out = [0xff; 11];
        window.read(64, &mut out);
        assert_eq!(&out, b"eleven byte");
        window.read(16, &mut out[..3]);
        assert_eq!(out[..3], [8, 7, 6]);
        let mut payload = [0; 4];
        window.bytes(64..68).copy_to(&mut payload);
        assert_eq!(&payload, b"elev");
        window
            .bytes_mut(8188..8192)
            .copy_from(Bytes::from(&payload[..]));
        window.bytes(8188..8192).copy_to(&mut payload);
        assert_eq!(&payload, b"elev");
        assert!(window.bytes(8192..8192).is_empty());
    }

    #[test]
    fn nothing_outside_is_touched() {
        let window = Window::anonymous(4096).unwrap();
        let outside: [&(dyn Fn() + std::panic::RefUnwindSafe); 6] = [
            &|| assert_eq!(window.load(4096), 0),
            &|| window.store(4092, 1),
            &|| window.read(4088, &mut [0; 9]),
            &|| window.write(usize::MAX & !7, &[0; 8]),
            &|| assert_eq!(window.bytes(4000..4097).len(), 97),
            &|| assert!(window.bytes_mut(5000..5000).is_empty()),
        ];
        for access in outside {
            std::panic::catch_unwind(access).unwrap_err();
        }
    }

    #[test]
    fn a_foreign_file_is_not_trusted() {
        let file = sealed_file(8192).unwrap();
        assert_eq!(
            Window::map_foreign(file.as_fd(), 8192).unwrap().size(),
            8192
        );
        for said in [0, 4096, 16384, u64::MAX] {
            assert_eq!(
                Window::map_foreign(file.as_fd(), said).unwrap_err(),
                MapError::OtherSize { found: 8192, said }
            );
        }
        assert!(rustix::fs::ftruncate(&file, 4096).is_err(), "sealed");

        let unsealed = rustix::fs::memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, 8192).unwrap();
        assert_eq!(
            Window::map_foreign(unsealed.as_fd(), 8192).unwrap_err(),
            MapError::NotSealed { seals: 0 }
        );
        let other = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(
            Window::map_foreign(other.as_fd(), 8192),
            Err(MapError::System { .. })
        ));
    }
}
