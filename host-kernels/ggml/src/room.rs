//! Memory for results that want more bytes than their elements have.

use std::sync::Arc;

use vgpu_engine::EngineError;
use vgpu_ggml_abi as abi;

use crate::allocator::{Allocator, allocation_size};
use crate::buffer::DeviceBuffer;

/// Bytes for the alignment of parts behind a result (128 in `ggml-cuda`), which a backend counts
/// for the address that it was asked about.
const ALIGNMENT: u64 = 256;

/// The memory of such results of a plan. A node copies each one to its place before the next one is
/// computed, so all of them have the same memory.
#[derive(Default)]
pub(crate) struct Room {
    /// The results, tensors of the plan's arena.
    results: Vec<*mut abi::ggml_tensor>,
    /// The most bytes that a result wants; 0 if there is none.
    bytes: u64,
    memory: Option<DeviceBuffer>,
}

impl Room {
    /// Adds a result for which the backend wants so many bytes.
    pub(crate) fn add(&mut self, result: *mut abi::ggml_tensor, bytes: u64) {
        self.results.push(result);
        self.bytes = self.bytes.max(bytes.saturating_add(ALIGNMENT));
    }

    /// The bytes of the device that [`allocate`](Room::allocate) takes, or has taken.
    pub(crate) fn bytes(&self) -> u64 {
        match self.bytes {
            0 => 0,
            bytes => allocation_size(bytes),
        }
    }

    /// Bytes of host memory.
    pub(crate) fn host_bytes(&self) -> usize {
        self.results.capacity() * size_of::<usize>()
    }

    /// Allocates the memory and places the results there, unless that has happened.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`], and [`EngineError::Device`] if the backend wants more for a
    /// result now than when it was compiled.
    ///
    /// # Safety
    /// The results must be valid tensors that no backend accesses during the call.
    pub(crate) unsafe fn allocate(
        &mut self,
        allocator: &Arc<Allocator>,
    ) -> Result<(), EngineError> {
        if self.bytes == 0 || self.memory.is_some() {
            return Ok(());
        }
        let memory = DeviceBuffer::alloc(allocator, self.bytes)?;
        memory.mark_used();
        for &result in &self.results {
            // SAFETY: the tensor of all bytes lives as long as the memory, and the results are
            // valid and not accessed: this function's contract.
            unsafe {
                let whole = &*memory.whole();
                (*result).buffer = whole.buffer;
                (*result).data = whole.data;
                (*result).view_src = std::ptr::null_mut();
                (*result).view_offs = 0;
            }
            // SAFETY: the tensor is valid, and its sources are those that the backend was asked
            // about before.
            let wanted = unsafe { allocator.tensor_bytes(result) };
            if wanted > self.bytes {
                return Err(EngineError::Device {
                    message: format!(
                        "the backend wants {wanted} bytes for a result for which it wanted at most \
                         {} before",
                        self.bytes
                    ),
                });
            }
        }
        self.memory = Some(memory);
        Ok(())
    }
}
