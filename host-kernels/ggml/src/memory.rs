//! Buffers of a device.

use std::any::Any;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use vgpu_engine::{CopyAccount, EngineError, Memory, check_range};
use vgpu_ggml_abi as abi;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{Guard, lock};

use crate::allocator::{Allocator, Reservation, allocation_size};
use crate::copies::{Copies, PaidBytes};
use crate::tensors;

/// The bytes that are copied at a time between buffers, or between parts of one that overlap.
const CHUNK: usize = 1 << 20;

/// The whole words of 4 bytes in a range: ggml's Vulkan backend fills no others
/// (`vkCmdFillBuffer`). Empty, and within the range, if there is none.
fn whole_words(range: Range<u64>) -> Range<u64> {
    let begin = range.start.next_multiple_of(4).min(range.end);
    let end = range.end / 4 * 4;
    begin..end.max(begin)
}

/// A buffer of a device.
pub(crate) struct GgmlMemory {
    allocator: Arc<Allocator>,
    buffer: NonNull<abi::ggml_backend_buffer>,
    /// A tensor with all bytes, which every other tensor in this buffer is a view of.
    whole: Box<abi::ggml_tensor>,
    size: u64,
    is_weights: AtomicBool,
    /// Copies of the weights in other layouts.
    copies: Mutex<Copies>,
    /// Who pays for them.
    account: OnceLock<Arc<dyn CopyAccount>>,
    /// Given back after the buffer, as fields are dropped.
    reserved: Reservation,
}

// SAFETY: the object owns its buffer. The functions in the buffer's table may be called by any
// thread; callers order them with computations, as the contract of `Memory` says.
unsafe impl Send for GgmlMemory {}
// SAFETY: the contract of `Memory` orders calls that access the same bytes, unless all of them
// read, and the functions of the table change nothing else of the buffer.
unsafe impl Sync for GgmlMemory {}

impl GgmlMemory {
    /// A zeroed buffer of `size` bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    pub(crate) fn alloc(allocator: &Arc<Allocator>, size: u64) -> Result<GgmlMemory, EngineError> {
        let wanted = allocation_size(size);
        let max = allocator.max_buffer();
        let refused = || {
            let (total, free) = allocator.free();
            EngineError::OutOfMemory {
                wanted: size,
                free: free.min(max),
                total,
            }
        };
        if wanted > max {
            return Err(refused());
        }
        let reserved = allocator.reserve(wanted).ok_or_else(refused)?;
        let buffer = allocator.alloc_buffer(wanted).ok_or_else(refused)?;
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
        let memory = GgmlMemory {
            whole: Box::new(tensors::whole(buffer, base, wanted)),
            allocator: Arc::clone(allocator),
            buffer,
            size,
            is_weights: AtomicBool::new(false),
            copies: Mutex::default(),
            account: OnceLock::new(),
            reserved,
        };
        match base.is_null() {
            true => Err(EngineError::Device {
                message: "a buffer of the backend has no address".to_owned(),
            }),
            false => Ok(memory),
        }
    }

    /// The tensor with all bytes of the buffer, valid as long as the memory.
    pub(crate) fn whole(&self) -> *mut abi::ggml_tensor {
        ptr::from_ref(&*self.whole).cast_mut()
    }

    /// Whether the memory holds weights.
    pub(crate) fn is_weights(&self) -> bool {
        self.is_weights.load(Ordering::Relaxed)
    }

    /// The copies of the weights in other layouts.
    pub(crate) fn copies(&self) -> Guard<'_, Copies> {
        lock(&self.copies)
    }

    /// Reserves `cost` bytes of the engine for a copy of weights, and charges the guest. `None`
    /// unless as many bytes as this memory has stay free: of the engine, of the host (`host_free`),
    /// and of what the guest may have.
    pub(crate) fn pay_for(&self, cost: u64, host_free: &dyn Fn() -> u64) -> Option<PaidBytes> {
        let size = self.reserved.bytes();
        let with_rest = cost.saturating_add(size);
        let (total, free) = self.allocator.free();
        if !self.copies().may_add(cost, size) || free.min(host_free()) < with_rest {
            return None;
        }
        let mut reserved = None;
        let mut reserve = || {
            reserved = self.allocator.reserve(cost);
            { reserved.is_some() }
                .then_some(())
                .ok_or(EngineError::OutOfMemory {
                    wanted: cost,
                    free,
                    total,
                })
        };
        let charge = match self.account.get() {
            Some(account) => {
                drop(account.charge(with_rest, &mut || Ok(())).ok()?);
                Some(account.charge(cost, &mut reserve).ok()?)
            }
            None => reserve().map(|()| None).ok()?,
        };
        Some(PaidBytes::new(reserved?, charge))
    }

    /// The guest writes to these bytes.
    fn written(&self, offset: u64, len: u64) {
        if self.is_weights() {
            // Dropped without the lock: memory is freed and given back to the guest.
            let ended = self.copies().forget(&(offset..offset + len));
            drop(ended);
        }
    }

    fn has(&self, other: &GgmlMemory) -> bool {
        Arc::ptr_eq(&self.allocator, &other.allocator)
    }

    fn lacks(name: &str) -> EngineError {
        EngineError::Device {
            message: format!("a buffer of the backend has no function {name}"),
        }
    }
}

impl Memory for GgmlMemory {
    fn size(&self) -> u64 {
        self.size
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        check_range(offset, data.len() as u64, self.size)?;
        if data.is_empty() {
            return Ok(());
        }
        self.written(offset, data.len() as u64);
        // SAFETY: the buffer exists. The range lies inside `whole` (checked above), and `data` is
        // readable. The function copies bytes, and does not interpret them.
        unsafe {
            let set = { self.buffer.as_ref() }.iface.set_tensor;
            let set = set.ok_or_else(|| GgmlMemory::lacks("set_tensor"))?;
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

    fn read(&self, offset: u64, mut out: BytesMut<'_>) -> Result<(), EngineError> {
        check_range(offset, out.len() as u64, self.size)?;
        if out.is_empty() {
            return Ok(());
        }
        // SAFETY: the buffer exists. The range lies inside `whole` (checked above), and `out` is
        // writable for its length.
        unsafe {
            let get = { self.buffer.as_ref() }.iface.get_tensor;
            let get = get.ok_or_else(|| GgmlMemory::lacks("get_tensor"))?;
            let (to, len) = (out.as_mut_ptr().cast(), out.len());
            get(self.buffer.as_ptr(), self.whole(), to, offset as usize, len);
        }
        Ok(())
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        if len == 0 {
            return Ok(());
        }
        self.written(offset, len);
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

    fn copy_from(
        &self,
        offset: u64,
        source: &dyn Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), EngineError> {
        let source = { source.as_any().downcast_ref::<GgmlMemory>() }
            .filter(|source| self.has(source))
            .ok_or(EngineError::ForeignMemory)?;
        check_range(offset, len, self.size)?;
        check_range(source_offset, len, source.size)?;
        let mut bytes = vec![0; CHUNK.min(len as usize)];
        let mut copy = |at: u64| {
            let part = &mut bytes[..CHUNK.min((len - at) as usize)];
            source.read(source_offset + at, BytesMut::from(&mut *part))?;
            self.write(offset + at, Bytes::from(&*part))
        };
        let mut chunks = (0..len.div_ceil(CHUNK as u64)).map(|chunk| chunk * CHUNK as u64);
        // Where the ranges overlap, a chunk is read before it is overwritten.
        let is_forward = self.buffer != source.buffer || offset <= source_offset;
        match is_forward {
            true => chunks.try_for_each(&mut copy),
            false => chunks.rev().try_for_each(&mut copy),
        }
    }

    fn mark_weights(&self) {
        self.is_weights.store(true, Ordering::Relaxed);
    }

    fn charge_copies(&self, account: Arc<dyn CopyAccount>) {
        // A second account is dropped.
        let _ = self.account.set(account);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for GgmlMemory {
    fn drop(&mut self) {
        // SAFETY: the object owns the buffer. Plans keep their memory alive, so nothing uses it.
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
