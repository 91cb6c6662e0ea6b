//! Buffers of a backend (`ggml_backend_buffer`).

use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_engine::EngineError;
use vgpu_ggml_abi as abi;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{self, LockRank, lock, lock_at};

use crate::allocator::{Allocator, Reservation, allocation_size};
use crate::staging::{MAX_SLOTS_OF_BUFFER, MAX_WRITE, StagedBytes};
use crate::tensors;

/// The bytes that are filled at a time where the backend has no function for it.
const CHUNK: usize = 64 << 10;

/// The whole words of 4 bytes in a range: ggml's Vulkan backend fills no others
/// (`vkCmdFillBuffer`). Empty, and within the range, if there is none.
fn whole_words(range: Range<u64>) -> Range<u64> {
    let begin = range.start.next_multiple_of(4).min(range.end);
    let end = range.end / 4 * 4;
    begin..end.max(begin)
}

/// The rank of the writes of a buffer that wait, under which slots are taken and the backend may
/// log. Whoever has the backend of the device asks for them.
#[derive(Debug, Clone, Copy)]
struct StagedRank;

impl LockRank for StagedRank {
    fn level(self) -> usize {
        lock::DEVICES + 1
    }
}

const _: () = assert!(lock::DEVICES + 1 < lock::LEVELS);

/// A write that waits.
pub(crate) struct StagedWrite {
    /// The first byte in the buffer.
    pub(crate) offset: u64,
    pub(crate) bytes: StagedBytes,
}

/// A buffer of a device.
pub(crate) struct DeviceBuffer {
    allocator: Arc<Allocator>,
    buffer: NonNull<abi::ggml_backend_buffer>,
    /// A tensor with all bytes, which every other tensor in this buffer is a view of.
    whole: Box<abi::ggml_tensor>,
    size: u64,
    /// Whether a graph of the backend has tensors here.
    is_used: AtomicBool,
    /// Writes that are not in the buffer yet, in their order.
    staged: Mutex<Vec<StagedWrite>>,
    /// Whether there are any.
    has_staged: AtomicBool,
    /// Given back after the buffer, as fields are dropped.
    reserved: Mutex<Reservation>,
}

/// A buffer that cannot be allocated.
pub(crate) struct Refused {
    pub(crate) error: EngineError,
    /// What was reserved for it.
    pub(crate) reserved: Reservation,
}

// SAFETY: the object owns its buffer. The functions in the buffer's table may be called by any
// thread; callers order them with computations, as the contract of `Memory` says.
unsafe impl Send for DeviceBuffer {}
// SAFETY: the contract of `Memory` orders calls that access the same bytes, unless all of them
// read, and the functions of the table change nothing else of the buffer. A lock is around the
// reservation.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    /// A zeroed buffer of `size` bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    pub(crate) fn alloc(
        allocator: &Arc<Allocator>,
        size: u64,
    ) -> Result<DeviceBuffer, EngineError> {
        let reserved = allocator.reserve(allocation_size(size), 1);
        let reserved = reserved.ok_or_else(|| allocator.refusal(size))?;
        let buffer = DeviceBuffer::with_reserved(allocator, size, reserved);
        let buffer = buffer.map_err(|refused| refused.error)?;
        buffer.clear()?;
        Ok(buffer)
    }

    /// A buffer of `size` bytes, for which `reserved` has bytes and an allocation. The caller
    /// clears or writes its bytes before anybody reads them: they may be those of another guest.
    /// Behind them are zeros.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`], with the reservation.
    pub(crate) fn with_reserved(
        allocator: &Arc<Allocator>,
        size: u64,
        reserved: Reservation,
    ) -> Result<DeviceBuffer, Refused> {
        let wanted = allocation_size(size);
        let buffer = match wanted > allocator.max_buffer() {
            true => None,
            false => allocator.alloc_buffer(wanted),
        };
        let Some(buffer) = buffer else {
            let error = allocator.refusal(size);
            return Err(Refused { error, reserved });
        };
        // SAFETY: the buffer is new, and its table is that of the backend. `get_base` is not
        // optional; a missing one is answered below.
        let base = unsafe {
            let get_base = { buffer.as_ref() }.iface.get_base;
            get_base.map_or(ptr::null_mut(), |get_base| get_base(buffer.as_ptr()))
        };
        let memory = DeviceBuffer {
            whole: Box::new(tensors::whole(buffer, base, wanted)),
            allocator: Arc::clone(allocator),
            buffer,
            size,
            is_used: AtomicBool::new(false),
            staged: Mutex::default(),
            has_staged: AtomicBool::new(false),
            reserved: Mutex::new(reserved),
        };
        let outcome = match base.is_null() {
            true => Err(DeviceBuffer::lacks("get_base")),
            false => memory.fill_inside(size..wanted, 0),
        };
        match outcome {
            Ok(()) => Ok(memory),
            Err(error) => {
                let reserved = memory.take_reservation();
                Err(Refused { error, reserved })
            }
        }
    }

    /// Sets all bytes to zero.
    ///
    /// # Errors
    /// [`EngineError::Device`] for a backend without the function.
    fn clear(&self) -> Result<(), EngineError> {
        // SAFETY: the buffer exists, and `clear` is the function of its own table.
        unsafe {
            let clear = { self.buffer.as_ref() }.iface.clear;
            let clear = clear.ok_or_else(|| DeviceBuffer::lacks("clear"))?;
            clear(self.buffer.as_ptr(), 0);
        }
        Ok(())
    }

    /// A graph of the backend has tensors in this buffer.
    pub(crate) fn mark_used(&self) {
        // Relaxed: whoever drops the buffer has seen the end of the graph's plan.
        self.is_used.store(true, Ordering::Relaxed);
    }

    /// The tensor with all bytes of the buffer, valid as long as the buffer.
    pub(crate) fn whole(&self) -> *mut abi::ggml_tensor {
        ptr::from_ref(&*self.whole).cast_mut()
    }

    /// Size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// What the buffer belongs to.
    pub(crate) fn allocator(&self) -> &Arc<Allocator> {
        &self.allocator
    }

    /// Takes the reservation of the buffer: the caller gives it back, or frees this buffer before
    /// it uses the reservation for another one.
    pub(crate) fn take_reservation(&self) -> Reservation {
        lock(&self.reserved).split(u64::MAX, u64::MAX)
    }

    fn lacks(name: &str) -> EngineError {
        EngineError::Device {
            message: format!("a buffer of the backend has no function {name}"),
        }
    }

    /// Checks that a range lies inside.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`].
    pub(crate) fn check(&self, offset: u64, len: u64) -> Result<(), EngineError> {
        vgpu_engine::check_range(offset, len, self.size)
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`], and [`EngineError::Device`] for a backend without the
    /// function.
    pub(crate) fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        self.check(offset, data.len() as u64)?;
        self.write_staged()?;
        self.write_inside(offset, data)
    }

    /// Writes `data` at `offset`, or keeps a copy of a small `data` that is written later: before
    /// anything else that this object does with the bytes of the buffer, or by a plan, which
    /// [takes](DeviceBuffer::take_staged) the writes. Does not wait for the device then.
    ///
    /// # Errors
    /// As [`write`](DeviceBuffer::write).
    pub(crate) fn write_later(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        self.check(offset, data.len() as u64)?;
        let staging = self.allocator.staging();
        if let Some(staging) = staging.filter(|_| (1..=MAX_WRITE).contains(&data.len())) {
            let mut staged = lock_at(StagedRank, &self.staged);
            let slots: usize = staged.iter().map(|write| write.bytes.slots()).sum();
            if let Some(bytes) = staging.stage(data, MAX_SLOTS_OF_BUFFER.saturating_sub(slots)) {
                staged.push(StagedWrite { offset, bytes });
                self.has_staged.store(true, Ordering::Release);
                return Ok(());
            }
        }
        self.write(offset, data)
    }

    /// Whether writes wait.
    pub(crate) fn has_staged(&self) -> bool {
        self.has_staged.load(Ordering::Acquire)
    }

    /// Writes what waits.
    ///
    /// # Errors
    /// As [`write`](DeviceBuffer::write).
    fn write_staged(&self) -> Result<(), EngineError> {
        if !self.has_staged() {
            return Ok(());
        }
        // Another thread that reads the same bytes waits for the lock.
        let mut staged = lock_at(StagedRank, &self.staged);
        for StagedWrite { offset, bytes } in &*staged {
            self.write_inside(*offset, bytes.bytes())?;
        }
        *staged = Vec::new();
        self.has_staged.store(false, Ordering::Release);
        Ok(())
    }

    /// Takes the writes that wait, in their order: the caller writes them before anything else
    /// accesses the bytes of the buffer.
    pub(crate) fn take_staged(&self) -> Vec<StagedWrite> {
        if !self.has_staged() {
            return Vec::new();
        }
        let mut staged = lock_at(StagedRank, &self.staged);
        self.has_staged.store(false, Ordering::Release);
        std::mem::take(&mut *staged)
    }

    /// Writes `data` at `offset`, inside of the allocation.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`], and [`EngineError::Device`] for a backend without the
    /// function.
    fn write_inside(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        vgpu_engine::check_range(offset, data.len() as u64, allocation_size(self.size))?;
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the buffer exists. The range lies inside `whole` (checked above), and `data` is
        // readable. The function copies bytes, and does not interpret them.
        unsafe {
            let set = { self.buffer.as_ref() }.iface.set_tensor;
            let set = set.ok_or_else(|| DeviceBuffer::lacks("set_tensor"))?;
            let from = data.as_ptr().cast();
            set(
                self.buffer.as_ptr(),
                self.whole(),
                from,
                offset as usize,
                data.len(),
            );
        }
        Ok(())
    }

    /// Reads `out.len()` bytes at `offset`.
    ///
    /// # Errors
    /// As [`write`](DeviceBuffer::write).
    pub(crate) fn read(&self, offset: u64, mut out: BytesMut<'_>) -> Result<(), EngineError> {
        self.check(offset, out.len() as u64)?;
        if out.is_empty() {
            return Ok(());
        }
        self.write_staged()?;
        // SAFETY: the buffer exists. The range lies inside `whole` (checked above), and `out` is
        // writable for its length.
        unsafe {
            let get = { self.buffer.as_ref() }.iface.get_tensor;
            let get = get.ok_or_else(|| DeviceBuffer::lacks("get_tensor"))?;
            let (to, len) = (out.as_mut_ptr().cast(), out.len());
            get(self.buffer.as_ptr(), self.whole(), to, offset as usize, len);
        }
        Ok(())
    }

    /// Sets `len` bytes at `offset` to `value`.
    ///
    /// # Errors
    /// As [`write`](DeviceBuffer::write).
    pub(crate) fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        self.check(offset, len)?;
        self.write_staged()?;
        self.fill_inside(offset..offset + len, value)
    }

    /// Sets the bytes of `range`, inside of the allocation, to `value`.
    ///
    /// # Errors
    /// As [`write_inside`](DeviceBuffer::write_inside).
    fn fill_inside(&self, range: Range<u64>, value: u8) -> Result<(), EngineError> {
        let Range { start: offset, end } = range;
        let len = end.saturating_sub(offset);
        vgpu_engine::check_range(offset, len, allocation_size(self.size))?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the buffer exists, and the range lies inside `whole` (checked above).
        let memset = unsafe { self.buffer.as_ref() }.iface.memset_tensor;
        // A slot that some backends leave empty.
        let words = memset.map_or(offset..offset, |_| whole_words(offset..end));
        for part in [offset..words.start, words.end..end] {
            let bytes = vec![value; CHUNK.min((part.end - part.start) as usize)];
            for at in part.clone().step_by(CHUNK) {
                let bytes = &bytes[..CHUNK.min((part.end - at) as usize)];
                self.write_inside(at, Bytes::from(bytes))?;
            }
        }
        if let (Some(memset), false) = (memset, words.is_empty()) {
            // SAFETY: `memset` is the function of this buffer's own table. The tensor of `whole`
            // covers the buffer, and the words lie inside (checked above).
            unsafe {
                memset(
                    self.buffer.as_ptr(),
                    self.whole(),
                    value,
                    words.start as usize,
                    (words.end - words.start) as usize,
                )
            };
        }
        Ok(())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the object owns the buffer. Plans keep their buffers alive, so nothing uses it.
        unsafe { self.allocator.free_buffer(self.buffer) };
        if *self.is_used.get_mut() {
            self.allocator.freed_used();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_words_are_whole_and_all_that_a_range_has() {
        for start in 0..9 {
            for end in start..20 {
                let words = whole_words(start..end);
                assert!(start <= words.start && words.start <= words.end && words.end <= end);
                let all = (0..5).filter(|word| start <= 4 * word && 4 * word + 4 <= end);
                assert_eq!(
                    (words.end - words.start) / 4,
                    all.count() as u64,
                    "{start}..{end}"
                );
                if !words.is_empty() {
                    assert_eq!((words.start % 4, words.end % 4), (0, 0), "{start}..{end}");
                }
            }
        }
    }
}
