//! The buffers of a session.

use std::collections::HashMap;
use std::sync::Arc;

use vgpu_engine::Memory;
use vgpu_transport::ir::BufferId;

use super::error::Violation;
use crate::lock::expect_unlocked;
use crate::pool::Lease;
use crate::tenant::Charge;

/// The buffers of a session.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    live: HashMap<BufferId, Buffer>,
    /// Sum of the sizes of `live`.
    bytes: u64,
    /// The largest id of a buffer so far. Ids of refused requests do not count.
    last: u64,
}

#[derive(Debug)]
struct Buffer {
    memory: Arc<dyn Memory>,
    /// Declared after `memory`, so that the memory is freed before the charge is released.
    _charge: Charge,
    /// The mapping of the memory, by the same rule.
    _mapping: Lease,
    /// Further mappings that the memory can take.
    copies: Option<Lease>,
}

impl Buffers {
    /// Checks that `buffer` may identify a new buffer.
    pub(super) fn check_new(&self, buffer: BufferId) -> Result<(), Violation> {
        if buffer.0 == 0 {
            Err(Violation::BufferZero)
        } else if buffer.0 <= self.last {
            let last = self.last;
            Err(Violation::BufferOrder { buffer, last })
        } else {
            Ok(())
        }
    }

    /// Adds a buffer whose id has been checked.
    pub(super) fn insert(
        &mut self,
        buffer: BufferId,
        memory: Arc<dyn Memory>,
        charge: Charge,
        mapping: Lease,
    ) {
        self.last = buffer.0;
        self.bytes += memory.size();
        let entry = Buffer {
            memory,
            _charge: charge,
            _mapping: mapping,
            copies: None,
        };
        self.live.insert(buffer, entry);
    }

    pub(super) fn get(
        &self,
        kind: &'static str,
        buffer: BufferId,
    ) -> Result<&Arc<dyn Memory>, Violation> {
        self.live
            .get(&buffer)
            .map(|buffer| &buffer.memory)
            .ok_or(Violation::UnknownBuffer { kind, buffer })
    }

    /// A buffer that has the bytes `offset..offset + len`.
    pub(super) fn range(
        &self,
        kind: &'static str,
        buffer: BufferId,
        offset: u64,
        len: u64,
    ) -> Result<&Arc<dyn Memory>, Violation> {
        let memory = self.get(kind, buffer)?;
        let size = memory.size();
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(memory),
            _ => Err(Violation::OutOfBounds {
                kind,
                buffer,
                offset,
                len,
                size,
            }),
        }
    }

    /// The memory of a buffer, for the validation of graphs.
    pub(super) fn find(&self, buffer: BufferId) -> Option<&Arc<dyn Memory>> {
        self.live.get(&buffer).map(|buffer| &buffer.memory)
    }

    /// Replaces the memory of a buffer by `new` memory of the same size, for which the engine has
    /// charged nothing. The charge of the tenant stays the same.
    pub(super) fn exchange(&mut self, buffer: BufferId, new: Arc<dyn Memory>) {
        if let Some(Buffer { memory, .. }) = self.live.get_mut(&buffer) {
            debug_assert_eq!(memory.size(), new.size());
            expect_unlocked("the end of a buffer's memory");
            *memory = new;
        }
    }

    /// Sets the further mappings that the memory of a buffer can take.
    pub(super) fn set_copies(&mut self, buffer: BufferId, lease: Lease) {
        if let Some(buffer) = self.live.get_mut(&buffer) {
            buffer.copies = Some(lease);
        }
    }

    /// Gives back all but `count` of the further mappings of a buffer.
    pub(super) fn keep_copies(&mut self, buffer: BufferId, count: usize) {
        let copies = self.live.get_mut(&buffer);
        if let Some(copies) = copies.and_then(|buffer| buffer.copies.as_mut()) {
            copies.keep(count);
        }
    }

    pub(super) fn remove(&mut self, buffer: BufferId) -> Result<(), Violation> {
        match self.live.remove(&buffer) {
            Some(Buffer { memory, .. }) => {
                expect_unlocked("the end of a buffer");
                self.bytes -= memory.size();
                Ok(())
            }
            None => Err(Violation::UnknownBuffer {
                kind: "FREE",
                buffer,
            }),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}
