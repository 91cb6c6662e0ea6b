//! The memory of a buffer, as the guest sees it.

use std::sync::atomic::{AtomicBool, Ordering};

use vgpu_transport::bytes::BytesMut;
use vgpu_transport::ir::BufferId;
use vgpu_transport::shm::memory::Window;

use super::error::SessionError;

/// The memory of a buffer of a session.
#[derive(Debug)]
pub(crate) struct Allocation {
    id: BufferId,
    size: u64,
    /// The memory itself, if the executor shares it. At least `size` bytes.
    mapping: Option<Window>,
    /// Whether `mapping` is still the memory of the buffer.
    is_mapped: AtomicBool,
}

impl Allocation {
    /// The buffer `id` of `size` bytes. `mapping`, if any, has at least as many.
    pub(super) fn new(id: BufferId, size: u64, mapping: Option<Window>) -> Allocation {
        Allocation {
            id,
            size,
            is_mapped: AtomicBool::new(mapping.is_some()),
            mapping,
        }
    }

    /// The name of the buffer on the wire.
    pub(crate) fn id(&self) -> BufferId {
        self.id
    }

    /// Bytes of the buffer.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// From now on the buffer is accessed by messages only: the executor has replaced its memory.
    pub(super) fn unmap(&self) {
        self.is_mapped.store(false, Ordering::Release);
    }

    /// `len` bytes at `offset` of the mapping, or `None` if the buffer is accessed by messages.
    ///
    /// # Errors
    ///
    /// [`SessionError::OutOfRange`] if the buffer is mapped and does not have these bytes.
    pub(super) fn mapped(
        &self,
        offset: u64,
        len: usize,
    ) -> Result<Option<BytesMut<'_>>, SessionError> {
        let is_mapped = self.is_mapped.load(Ordering::Acquire);
        let Some(mapping) = self.mapping.as_ref().filter(|_| is_mapped) else {
            return Ok(None);
        };
        match offset.checked_add(len as u64) {
            // The mapping is no smaller than the buffer: the contract of `new`.
            Some(end) if end <= self.size => {
                Ok(Some(mapping.bytes_mut(offset as usize..end as usize)))
            }
            _ => Err(SessionError::OutOfRange {
                buffer: self.id,
                offset,
                len,
                size: self.size,
            }),
        }
    }
}
