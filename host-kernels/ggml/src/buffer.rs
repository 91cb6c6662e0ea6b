//! Buffers of a backend (`ggml_backend_buffer`).

use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};

use vgpu_engine::EngineError;
use vgpu_ggml_abi as abi;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::lock;

use crate::allocator::{Allocator, Reservation, allocation_size};
use crate::tensors;

/// The bytes that are filled at a time where the backend has no function for it.
const CHUNK: usize = 1 << 20;

/// The whole words of 4 bytes in a range: ggml's Vulkan backend fills no others
/// (`vkCmdFillBuffer`). Empty, and within the range, if there is none.
fn whole_words(range: Range<u64>) -> Range<u64> {
    let begin = range.start.next_multiple_of(4).min(range.end);
    let end = range.end / 4 * 4;
    begin..end.max(begin)
}

/// A buffer of a device.
pub(crate) struct DeviceBuffer {
    allocator: Arc<Allocator>,
    buffer: NonNull<abi::ggml_backend_buffer>,
    /// A tensor with all bytes, which every other tensor in this buffer is a view of.
    whole: Box<abi::ggml_tensor>,
    size: u64,
    /// Given back after the buffer, as fields are dropped.
    reserved: Mutex<Reservation>,
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
        let reserved = allocator.reserve(allocation_size(size));
        let reserved = reserved.ok_or_else(|| allocator.refusal(size))?;
        DeviceBuffer::with_reserved(allocator, size, reserved)
    }

    /// A zeroed buffer of `size` bytes, for which `reserved` are reserved.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    pub(crate) fn with_reserved(
        allocator: &Arc<Allocator>,
        size: u64,
        reserved: Reservation,
    ) -> Result<DeviceBuffer, EngineError> {
        let wanted = allocation_size(size);
        let buffer = match wanted > allocator.max_buffer() {
            true => None,
            false => allocator.alloc_buffer(wanted),
        };
        let buffer = buffer.ok_or_else(|| allocator.refusal(size))?;
        // SAFETY: the buffer is new, and its table is that of the backend. `get_base` and `clear`
        // are not optional; a missing one is answered below.
        let base = unsafe {
            let iface = &buffer.as_ref().iface;
            match (iface.get_base, iface.clear) {
                (Some(get_base), Some(clear)) => {
                    clear(buffer.as_ptr(), 0);
                    get_base(buffer.as_ptr())
                }
                _ => ptr::null_mut(),
            }
        };
        let memory = DeviceBuffer {
            whole: Box::new(tensors::whole(buffer, base, wanted)),
            allocator: Arc::clone(allocator),
            buffer,
            size,
            reserved: Mutex::new(reserved),
        };
        match base.is_null() {
            true => Err(EngineError::Device {
                message: "a buffer of the backend has no address".to_owned(),
            }),
            false => Ok(memory),
        }
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
        lock(&self.reserved).split(u64::MAX)
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
    fn check(&self, offset: u64, len: u64) -> Result<(), EngineError> {
        vgpu_engine::check_range(offset, len, self.size)
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`], and [`EngineError::Device`] for a backend without the
    /// function.
    pub(crate) fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        self.check(offset, data.len() as u64)?;
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
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the buffer exists, and the range lies inside `whole` (checked above).
        let memset = unsafe { self.buffer.as_ref() }.iface.memset_tensor;
        let end = offset + len;
        // A slot that some backends leave empty.
        let words = memset.map_or(offset..offset, |_| whole_words(offset..end));
        for part in [offset..words.start, words.end..end] {
            let bytes = vec![value; CHUNK.min((part.end - part.start) as usize)];
            for at in part.clone().step_by(CHUNK) {
                let bytes = &bytes[..CHUNK.min((part.end - at) as usize)];
                self.write(at, Bytes::from(bytes))?;
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
