//! Buffers of a device.

use std::any::Any;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use vgpu_engine::{CopyAccount, EngineError, Memory, check_range};
use vgpu_ggml_abi as abi;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{ROW_UNIT, Type};
use vgpu_transport::lock::lock;

use crate::library::Functions;
use crate::repack::{self, Account, Copies};
use crate::tensors;

/// Bytes behind the end of a buffer. Kernels of ggml read the last row of quantised weights up to
/// the next [`ROW_UNIT`] elements, also if the guest has not left them behind the row.
const SLACK: u64 = 4096;

const _: () = {
    let mut at = 0;
    while at < Type::ALL.len() {
        let ty = Type::ALL[at];
        assert!(ty.block_bytes() * (ROW_UNIT / ty.block_elements()) <= SLACK);
        at += 1;
    }
};

/// The bytes that are copied at a time between buffers, or between parts of one that overlap.
const CHUNK: usize = 1 << 20;

/// What the buffers of one device share.
pub(crate) struct Allocator {
    /// The library's functions, which outlive every buffer.
    functions: &'static Functions,
    buft: abi::ggml_backend_buffer_type_t,
    /// The most bytes that buffers may have together.
    total: u64,
    used: AtomicU64,
    /// Whether a buffer was freed since [`has_freed`](Allocator::has_freed) was called.
    has_freed: AtomicBool,
}

// SAFETY: the buffer type is a constant object of the backend, and its functions may be called by
// any thread.
unsafe impl Send for Allocator {}
// SAFETY: the buffer type is constant, and the flag is atomic.
unsafe impl Sync for Allocator {}

/// The bytes that an allocation of `size` bytes takes.
pub(crate) fn allocation_size(size: u64) -> u64 {
    size.saturating_add(SLACK).next_multiple_of(4096)
}

/// The whole words of 4 bytes in a range: ggml's Vulkan backend fills no others
/// (`vkCmdFillBuffer`). Empty, and within the range, if there is none.
fn whole_words(range: Range<u64>) -> Range<u64> {
    let begin = range.start.next_multiple_of(4).min(range.end);
    let end = range.end / 4 * 4;
    begin..end.max(begin)
}

impl Allocator {
    pub(crate) fn new(
        functions: &'static Functions,
        buft: abi::ggml_backend_buffer_type_t,
        total: u64,
    ) -> Allocator {
        Allocator {
            functions,
            buft,
            total,
            used: AtomicU64::new(0),
            has_freed: AtomicBool::new(false),
        }
    }

    /// Whether a buffer was freed since the last call.
    pub(crate) fn has_freed(&self) -> bool {
        self.has_freed.swap(false, Ordering::Relaxed)
    }

    /// The bytes that the backend wants for a tensor (`ggml_backend_buft_get_alloc_size`).
    ///
    /// # Safety
    /// The tensor and those that it points to must be valid.
    pub(crate) unsafe fn tensor_bytes(&self, tensor: *const abi::ggml_tensor) -> u64 {
        // SAFETY: the buffer type is a constant object of the backend, and the tensor is valid: the
        // contract of this function.
        unsafe { (self.functions.buft_get_alloc_size)(self.buft, tensor) as u64 }
    }

    /// The capacity, and what is not allocated.
    pub(crate) fn free(&self) -> (u64, u64) {
        let used = self.used.load(Ordering::Relaxed);
        (self.total, self.total.saturating_sub(used))
    }

    /// Reserves `bytes`. `None` if there are fewer left.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let more = |used: u64| { used.checked_add(bytes) }.filter(|&used| used <= self.total);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()?;
        Some(Reservation {
            allocator: Arc::clone(self),
            bytes,
        })
    }

    /// A zeroed buffer of `size` bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    pub(crate) fn alloc(self: &Arc<Self>, size: u64) -> Result<GgmlMemory, EngineError> {
        let wanted = allocation_size(size);
        let (total, free) = self.free();
        let refused = EngineError::OutOfMemory {
            wanted: size,
            free,
            total,
        };
        // SAFETY: the buffer type is a constant object of the backend.
        let max = unsafe { (self.functions.buft_get_max_size)(self.buft) } as u64;
        if wanted > max {
            return Err(EngineError::OutOfMemory {
                wanted: size,
                free: free.min(max),
                total,
            });
        }
        let Some(reserved) = self.reserve(wanted) else {
            return Err(refused);
        };
        // SAFETY: the buffer type is a constant object of the backend.
        let buffer = unsafe { (self.functions.buft_alloc_buffer)(self.buft, wanted as usize) };
        let Some(buffer) = NonNull::new(buffer) else {
            return Err(refused);
        };
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
            allocator: Arc::clone(self),
            buffer,
            size,
            is_weights: AtomicBool::new(false),
            copies: Mutex::default(),
            account: Account::new(),
            reserved,
        };
        match base.is_null() {
            true => Err(EngineError::Device {
                message: "a buffer of the backend has no address".to_owned(),
            }),
            false => Ok(memory),
        }
    }
}

/// Bytes of the device that are given back when this is dropped.
pub(crate) struct Reservation {
    allocator: Arc<Allocator>,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.allocator.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
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
    account: Account,
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
    /// The tensor with all bytes of the buffer, valid as long as the memory.
    pub(crate) fn whole(&self) -> *mut abi::ggml_tensor {
        ptr::from_ref(&*self.whole).cast_mut()
    }

    /// Whether the memory holds weights.
    pub(crate) fn is_weights(&self) -> bool {
        self.is_weights.load(Ordering::Relaxed)
    }

    /// The copies of the weights in other layouts.
    pub(crate) fn copies(&self) -> MutexGuard<'_, Copies> {
        lock(&self.copies)
    }

    /// The bytes that the memory takes.
    pub(crate) fn allocated(&self) -> u64 {
        self.reserved.bytes
    }

    /// Reserves and charges `cost` bytes for a copy of weights.
    pub(crate) fn charge_copy(
        &self,
        cost: u64,
    ) -> Option<(Reservation, Option<Box<dyn Any + Send + Sync>>)> {
        repack::charge(&self.allocator, &self.account, cost)
    }

    /// The guest writes to these bytes.
    fn written(&self, offset: u64, len: u64) {
        if self.is_weights() {
            self.copies().forget(&(offset..offset + len));
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
        unsafe { (self.allocator.functions.buffer_free)(self.buffer.as_ptr()) };
        self.allocator.has_freed.store(true, Ordering::Relaxed);
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
