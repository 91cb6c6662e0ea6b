//! Host buffers: memory of the program's own process that the executor can read from without a copy
//! by the guest.
//!
//! ggml programs use host buffers for what goes to the device again and again: inputs, results, the
//! parts of a model file. The memory is part of the link's memory as long as the link has some
//! left. Otherwise it is ordinary memory, and every transfer costs one more copy.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use vgpu_transport::link::StagingRegion;

use crate::abi::ggml_tensor;
use crate::device_context::DeviceContext;
use crate::session::Session;

/// Every tensor starts at a multiple of so many bytes: a cache line, which suits ggml's vector
/// code.
pub(crate) const ALIGNMENT: usize = 64;

/// A buffer in the program's memory.
pub(crate) struct HostBuffer {
    base: NonNull<u8>,
    /// Bytes.
    size: usize,
    /// The session that may read from and write to the memory. `None` if the executor could not be
    /// reached.
    session: Option<Arc<Session>>,
    memory: Memory,
}

/// Where the memory comes from.
enum Memory {
    /// The link.
    Link(StagingRegion),
    /// The allocator of this process.
    Heap(Layout),
}

impl HostBuffer {
    /// A buffer of `size` bytes. `None` if there is no memory.
    pub(crate) fn new(device: &DeviceContext, size: usize) -> Option<HostBuffer> {
        // Without an executor the memory is of use all the same.
        let session = device.session().ok();
        let staging = session
            .as_ref()
            .and_then(|session| session.alloc_staging(size));
        let (base, memory) = match staging {
            Some(staging) => {
                let base = staging.window.as_ptr().wrapping_add(staging.range.start);
                (NonNull::new(base)?, Memory::Link(staging))
            }
            None => {
                let layout = Layout::from_size_align(size.max(1), ALIGNMENT).ok()?;
                // SAFETY: the layout has at least one byte.
                let base = unsafe { alloc_zeroed(layout) };
                (NonNull::new(base)?, Memory::Heap(layout))
            }
        };
        let buffer = HostBuffer {
            base,
            size,
            session,
            memory,
        };
        if let Some(session) = &buffer.session {
            session.add_host_buffer(buffer.base().addr(), size, buffer.staging());
        }
        Some(buffer)
    }

    /// The memory.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes of the memory.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The address of `size` bytes from byte `offset` of a tensor. `None`, with a log line, if the
    /// buffer does not have these bytes.
    pub(crate) fn at(&self, tensor: &ggml_tensor, offset: usize, size: usize) -> Option<*mut u8> {
        let start = tensor.data.addr().checked_sub(self.base().addr());
        let start = start.and_then(|start| start.checked_add(offset));
        let range = start.and_then(|start| Some((start, start.checked_add(size)?)));
        match range {
            Some((start, end)) if end <= self.size => Some(self.base().wrapping_add(start)),
            _ => {
                tracing::error!(
                    "bytes {offset}..+{size} of a tensor are outside its host buffer of {} bytes",
                    self.size
                );
                None
            }
        }
    }

    fn staging(&self) -> Option<&StagingRegion> {
        match &self.memory {
            Memory::Link(staging) => Some(staging),
            Memory::Heap(_) => None,
        }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Some(session) = &self.session {
            session.remove_host_buffer(self.base().addr(), self.staging().cloned());
        }
        if let Memory::Heap(layout) = self.memory {
            // SAFETY: `new` has allocated the memory with this layout. The session has waited for
            // everything under way to the memory and has forgotten it, and ggml does not use a
            // buffer that it frees.
            unsafe { dealloc(self.base(), layout) };
        }
    }
}
