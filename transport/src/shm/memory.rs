//! The mapping of a window, and all accesses to it.
//!
//! The peer can change any byte of a window at any time. The crate therefore never forms a
//! reference to the bytes of a window:
//!
//! - Words and messages are read and written as whole atomic words. The value that was checked is
//!   the value that is used, because the compiler cannot read an atomic word a second time.
//! - Payloads are copied by pointer through [`Bytes`] and [`BytesMut`]. The code that copies a
//!   payload does not interpret it.
//!
//! All accesses are plain loads, plain stores and fences. There is no locked instruction: a window
//! may be device memory, where a locked instruction faults or is not atomic across the PCI bus.
//!
//! # Device memory
//!
//! In a virtual machine a window is a PCI BAR. The kernel maps it write-combined where the device
//! permits: the processor gathers stores and writes them to memory in any order, and does not cache
//! loads. The accesses above are correct in such memory too:
//!
//! - [`drain_writes`](SharedWords::drain_writes), which empties the processor's write buffers,
//!   precedes every publication.
//! - A store may stay in a write buffer until the next fence. The full fence of
//!   [`notify`](super::notify) follows every store that a peer may be waiting for, because a
//!   producer checks for a sleeping peer after each publication.
//! - A payload is read once, from front to back, with streaming loads (see
//!   [`bytes`](crate::bytes)).
//!
//! # Unsafe code
//!
//! This module and [`bytes`](crate::bytes) contain the crate's unsafe memory accesses. The
//! remaining unsafe blocks are three system calls that `rustix` lacks, the mapping of a PCI BAR
//! ([`Window::map_device`]), and what a forked child must not share ([`fork`](crate::fork)).

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::SealFlags;
use rustix::io::Errno;

use crate::bytes::{Bytes, BytesMut, Mapped};
use crate::fork::Inherited;
use crate::memfd::{self, MemfdError};

/// Shared memory as the rings access it. Offsets are in bytes from the start of the window.
///
/// The trait exists so that a model checker can run the rings over a memory model.
pub trait SharedWords {
    /// Loads a word (acquire). `offset` is a multiple of 8.
    fn load(&self, offset: usize) -> u64;

    /// Stores a word (release). `offset` is a multiple of 8.
    fn store(&self, offset: usize, value: u64);

    /// Copies bytes out and reads each byte once. `offset` is a multiple of 8.
    fn read(&self, offset: usize, out: &mut [u8]);

    /// Copies bytes in and pads with zeroes to a multiple of 8 bytes. `offset` is a multiple of 8.
    fn write(&self, offset: usize, data: &[u8]);

    /// Makes every earlier write, by any kind of store, visible before any later
    /// [`store`](SharedWords::store).
    fn drain_writes(&self);

    /// A sequentially consistent fence: orders every earlier access before every later one.
    fn full_fence(&self);
}

/// Why a file cannot be mapped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum MapError {
    /// A system call of this process failed.
    #[error("{what}: {error}")]
    System { what: &'static str, error: Errno },
    /// The sender of the file has not sealed it.
    #[error("the window's file is not sealed against shrinking (seals {seals:#x})")]
    NotSealed { seals: u32 },
    /// The sender of the file has announced another size.
    #[error("the window's file has {found} bytes, not the announced {said}")]
    OtherSize { found: u64, said: u64 },
    /// The part does not lie in the file.
    #[error("{len} bytes at {offset} lie outside the window's file of {size} bytes")]
    OutOfFile { offset: u64, len: usize, size: u64 },
}

impl MapError {
    fn system(what: &'static str) -> impl FnOnce(Errno) -> MapError {
        move |error| MapError::System { what, error }
    }
}

/// Mapped shared memory. Dropping the window unmaps the memory. A forked child finds zeros of its
/// own there.
#[derive(Debug)]
pub struct Window {
    // Fields are dropped in this order: the memory must be registered as long as it is mapped.
    _inherited: Inherited,
    map: MmapRaw,
    /// Whether the memory may be device memory, which is not cached.
    is_device: bool,
}

impl Window {
    /// Zeroed memory of this process, for both ends of a link inside the process.
    ///
    /// # Errors
    ///
    /// [`MapError::System`] when the kernel has no memory or no file descriptor left.
    pub fn anonymous(size: usize) -> Result<Window, MapError> {
        Window::map(sealed_file(size)?.as_fd(), size)
    }

    /// Maps a whole file of `size` bytes, such as one that [`sealed_file`] has made.
    ///
    /// The function checks the seal and the size of the file, so that the mapping stays accessible
    /// whatever the holders of other descriptors of the file do.
    ///
    /// # Errors
    ///
    /// [`MapError::NotSealed`] and [`MapError::OtherSize`] are the fault of the file's creator;
    /// [`MapError::System`] when a system call fails.
    pub fn map(file: BorrowedFd<'_>, size: usize) -> Result<Window, MapError> {
        Window::map_foreign(file, size as u64)
    }

    /// Maps a whole file that the peer has sent. The peer says that the file has `said` bytes.
    ///
    /// # Errors
    ///
    /// [`MapError::NotSealed`] and [`MapError::OtherSize`] are the peer's fault;
    /// [`MapError::System`] when a system call fails or the descriptor is no memfd.
    pub fn map_foreign(file: BorrowedFd<'_>, said: u64) -> Result<Window, MapError> {
        let found = sealed_size(file)?;
        match usize::try_from(said) {
            // SAFETY: the file has `found` bytes, which are `size`, and the seal that `sealed_size`
            // has checked keeps anybody from shrinking it.
            Ok(size) if found == said && size > 0 => unsafe { Window::map_bytes(file, 0, size) },
            _ => Err(MapError::OtherSize { found, said }),
        }
    }

    /// Maps `len` bytes at `offset` of a sealed file as a window of their own. `offset` is a
    /// multiple of the page size.
    ///
    /// # Errors
    ///
    /// [`MapError::OutOfFile`] and [`MapError::NotSealed`] are the caller's fault;
    /// [`MapError::System`] when a system call fails.
    pub fn map_part(file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Window, MapError> {
        let size = sealed_size(file)?;
        match offset.checked_add(len as u64) {
            // SAFETY: the bytes lie in the file's `size` bytes, and the seal that `sealed_size` has
            // checked keeps anybody from shrinking it.
            Some(end) if end <= size => unsafe { Window::map_bytes(file, offset, len) },
            _ => Err(MapError::OutOfFile { offset, len, size }),
        }
    }

    /// Maps `len` bytes at `offset` of a PCI device's memory region by its file in sysfs: the side
    /// of a guest in a virtual machine. `offset` is a multiple of the page size.
    ///
    /// # Errors
    ///
    /// [`MapError::System`] when the kernel refuses the mapping. The kernel refuses a range outside
    /// the region, and every range while the kernel is in lockdown mode.
    ///
    /// # Safety
    ///
    /// The bytes must stay accessible while the window exists: `resource` is the `resourceN` file
    /// of a device that is not removed, or a file of at least `offset + len` bytes that nobody
    /// truncates. An access to a byte that has gone raises SIGBUS.
    pub unsafe fn map_device(
        resource: BorrowedFd<'_>,
        offset: u64,
        len: usize,
    ) -> Result<Window, MapError> {
        // SAFETY: the caller guarantees that the `len` bytes at `offset` of `resource` stay
        // accessible while the window exists.
        let mut window = unsafe { Window::map_bytes(resource, offset, len) }?;
        window.is_device = true;
        Ok(window)
    }

    /// Maps `len` bytes at `offset` of a file. `offset` is a multiple of the page size.
    ///
    /// # Errors
    ///
    /// [`MapError::System`] when the kernel refuses the mapping.
    ///
    /// # Safety
    ///
    /// The bytes must stay accessible while the window exists: nobody truncates the file below
    /// `offset + len`, and the device of a file in sysfs is not removed.
    unsafe fn map_bytes(file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Window, MapError> {
        let map = MmapOptions::new()
            .offset(offset)
            .len(len)
            .map_raw(file.as_raw_fd())
            .map_err(|error| MapError::System {
                what: "mapping the window",
                error: Errno::from_io_error(&error).unwrap_or(Errno::INVAL),
            })?;
        // SAFETY: `map` are `len` bytes of one mapping, which begins on a page and which `map`
        // unmaps after `_inherited` is dropped. References to the bytes are to atomic words only.
        let inherited = unsafe { Inherited::memory(map.as_mut_ptr(), map.len()) };
        Ok(Window {
            _inherited: inherited,
            map,
            is_device: false,
        })
    }

    /// The address of the mapping, for the user of a staging region.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// The size of the mapping, in bytes.
    pub fn size(&self) -> usize {
        self.map.len()
    }

    /// Whether the memory may be device memory: not cached, slow to read.
    pub fn is_device(&self) -> bool {
        self.is_device
    }

    /// The bytes of `range`, to copy a payload from.
    ///
    /// # Panics
    ///
    /// If the range does not lie in the window. The caller checks ranges that a peer names.
    pub fn bytes(&self, range: Range<usize>) -> Bytes<'_> {
        let ptr = self.at(range.start, range.len());
        // SAFETY: `at` has checked that the range lies in the mapping, which lives as long as
        // `self`.
        let bytes = unsafe { Bytes::from_raw(ptr, range.len()) };
        if self.is_device {
            bytes.from_device()
        } else {
            bytes
        }
    }

    /// The bytes of `range`, to copy a payload to.
    ///
    /// # Panics
    ///
    /// If the range does not lie in the window.
    pub fn bytes_mut(&self, range: Range<usize>) -> BytesMut<'_> {
        let ptr = self.at(range.start, range.len());
        // SAFETY: `at` has checked that the range lies in the mapping, which lives as long as
        // `self`. No Rust reference to these bytes exists: this type forms references to atomic
        // words only, and an atomic word may change at any time.
        unsafe { BytesMut::from_raw(ptr, range.len()) }
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let size = self.size();
        assert!(
            offset <= size && len <= size - offset,
            "{len} bytes at {offset} are outside a window of {size} bytes"
        );
        // SAFETY: the assertion has checked that `offset` lies in the mapping or at its end.
        unsafe { self.as_ptr().add(offset) }
    }

    fn words(&self, offset: usize, count: usize) -> impl Iterator<Item = &AtomicU64> {
        assert!(offset.is_multiple_of(8), "word at {offset}");
        let first = self.at(offset, count * 8).cast::<AtomicU64>();
        // SAFETY: `at` has checked that `count` words lie in the mapping. The mapping begins on a
        // page and `offset` is a multiple of 8, so each word is aligned. Other threads and
        // processes may change the word at any time, which an AtomicU64 permits.
        (0..count).map(move |i| unsafe { &*first.add(i) })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "word at {offset}");
        let word = self.at(offset, 8).cast::<AtomicU64>();
        // SAFETY: `at` has checked that the word lies in the mapping. The mapping begins on a page
        // and `offset` is a multiple of 8, so the word is aligned; an AtomicU64 may change at any
        // time.
        unsafe { &*word }
    }
}

/// The mapped registers of a PCI device: 32-bit words whose meaning the device defines. Every
/// access is a whole register, in program order.
#[derive(Debug)]
pub struct Registers(Window);

impl Registers {
    /// Maps the first page of a PCI device's registers by their file in sysfs.
    ///
    /// # Errors
    ///
    /// As [`Window::map_device`].
    ///
    /// # Safety
    ///
    /// As [`Window::map_device`], for the first 4096 bytes of `resource`.
    pub unsafe fn map(resource: BorrowedFd<'_>) -> Result<Registers, MapError> {
        // SAFETY: the caller's promise is the one that `map_device` asks for.
        unsafe { Window::map_device(resource, 0, 4096) }.map(Registers)
    }

    /// Reads the register at `offset`, in bytes.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of 4 below 4096.
    pub fn read(&self, offset: usize) -> u32 {
        u32::from_le(self.register(offset).load(Ordering::Acquire))
    }

    /// Writes the register at `offset`, in bytes.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of 4 below 4096.
    pub fn write(&self, offset: usize, value: u32) {
        self.register(offset)
            .store(value.to_le(), Ordering::Release);
    }

    fn register(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "register at {offset}");
        let register = self.0.at(offset, 4).cast::<AtomicU32>();
        // SAFETY: `at` has checked that the register lies in the mapping. The mapping begins on a
        // page and `offset` is a multiple of 4, so the register is aligned; an AtomicU32 may change
        // at any time.
        unsafe { &*register }
    }
}

impl SharedWords for Window {
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
        // On x86 a release store does not wait for write-combined or non-temporal stores. `sfence`
        // does.
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `sfence` is part of SSE, which every x86-64 processor has.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        fence(Ordering::Release);
    }

    fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }
}

// SAFETY: `map` stays mapped at one address until the window is dropped.
unsafe impl Mapped for Window {
    fn as_ptr(&self) -> *mut u8 {
        Window::as_ptr(self)
    }

    fn size(&self) -> usize {
        Window::size(self)
    }
}

/// Makes the file of a window: a memfd of `size` zero bytes, sealed against resizing.
///
/// # Errors
///
/// [`MapError::System`] when a system call fails.
pub fn sealed_file(size: usize) -> Result<OwnedFd, MapError> {
    let file = memfd::sealed("vgpu-window", size);
    file.map_err(|MemfdError { what, error }| MapError::System { what, error })
}

/// The size of a file that nobody can shrink, in bytes.
fn sealed_size(file: BorrowedFd<'_>) -> Result<u64, MapError> {
    let seals = rustix::fs::fcntl_get_seals(file)
        .map_err(MapError::system("reading the seals of the window's file"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(MapError::NotSealed {
            seals: seals.bits(),
        });
    }
    // The order matters: after the check of the seal the file cannot shrink below this size.
    let stat = rustix::fs::fstat(file)
        .map_err(MapError::system("reading the size of the window's file"))?;
    Ok(stat.st_size as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::os::fd::AsFd;

    #[test]
    fn words_and_bytes_are_read_back() {
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
    fn nothing_outside_the_range_is_accessed() {
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
    fn foreign_file_is_validated_before_mapping() {
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
        assert_eq!(
            Window::map_part(unsealed.as_fd(), 0, 4096).unwrap_err(),
            MapError::NotSealed { seals: 0 }
        );
        let other = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(
            Window::map_foreign(other.as_fd(), 8192),
            Err(MapError::System { .. })
        ));
    }

    #[test]
    fn a_part_lies_in_its_file() {
        let file = sealed_file(8192).unwrap();
        let whole = Window::map(file.as_fd(), 8192).unwrap();
        let part = Window::map_part(file.as_fd(), 4096, 4096).unwrap();
        part.store(8, 5);
        assert_eq!(whole.load(4104), 5);
        for (offset, len) in [(4096, 4097), (8192, 1), (!4095, 4096)] {
            let size = 8192;
            assert_eq!(
                Window::map_part(file.as_fd(), offset, len).unwrap_err(),
                MapError::OutOfFile { offset, len, size }
            );
        }
    }
}
