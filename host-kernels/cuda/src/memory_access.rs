//! What the executor does with the memory of a buffer: reads, writes and copies.

use std::any::Any;

use vgpu_transport::bytes::{Bytes, BytesMut};

use crate::memory::CudaMemory;
use crate::weights::WeightMemory;
use vgpu_engine::{EngineError, Memory, check_range};

impl Memory for CudaMemory {
    fn size(&self) -> u64 {
        self.byte_size()
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        let to = self.range(offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(());
        }
        self.before_write(&(offset..offset + data.len() as u64))?;
        // SAFETY: `range` has checked that the `data.len()` bytes at `to` are inside this memory.
        unsafe { self.allocator.device().upload(to, data) }
    }

    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        let len = out.len() as u64;
        self.range(offset, len)?;
        if !self.repack_state().is_allowed() {
            return self.download(offset, out);
        }
        let state = self.repack_state().state();
        let (mut at, end) = (offset, offset + len);
        let mut rest = out;
        for (start, format) in state.meeting(&(offset..end)) {
            let wanted = start.max(at)..(start + format.bytes()).min(end);
            let (before, from_here) = rest.split_at((wanted.start - at) as usize);
            self.download(at, before)?;
            let (here, behind) = from_here.split_at((wanted.end - wanted.start) as usize);
            let mut here = Some(here);
            let give = |bytes: &[u8]| {
                let buffer = here
                    .take()
                    .expect("chunks are given until there is no buffer left");
                let (mut first, left) = buffer.split_at(bytes.len());
                first.copy_from(bytes.into());
                here = Some(left);
                Ok(())
            };
            format.read(
                wanted.start - start..wanted.end - start,
                |bytes| self.fetch(start, bytes),
                give,
            )?;
            (at, rest) = (wanted.end, behind);
        }
        self.download(at, rest)
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        let to = self.range(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        self.before_write(&(offset..offset + len))?;
        // SAFETY: `range` has checked that the `len` bytes at `to` are inside this memory.
        unsafe { self.allocator.device().fill(to, len, value) }
    }

    fn copy_from(
        &self,
        offset: u64,
        source: &dyn Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), EngineError> {
        if let Some(source) = source.as_any().downcast_ref::<WeightMemory>() {
            if !source.is_of(&self.allocator) {
                return Err(EngineError::ForeignMemory);
            }
            self.range(offset, len)?;
            check_range(source_offset, len, source.size())?;
            self.before_write(&(offset..offset + len))?;
            return source.copy_out(source_offset..source_offset + len, self, offset);
        }
        let source: &CudaMemory = source
            .as_any()
            .downcast_ref()
            .filter(|source: &&CudaMemory| source.is_of(&self.allocator))
            .ok_or(EngineError::ForeignMemory)?;
        let (to, from) = (self.range(offset, len)?, source.range(source_offset, len)?);
        if len == 0 || to == from {
            return Ok(());
        }
        source.restore(&(source_offset..source_offset + len))?;
        self.before_write(&(offset..offset + len))?;
        if to.abs_diff(from) >= len {
            // SAFETY: `range` has checked that the `len` bytes at `to` and at `from` are inside
            // their memories. The two ranges do not overlap, since their distance is at least
            // `len`.
            return unsafe { self.allocator.device().copy(to, from, len) };
        }
        let through = CudaMemory::new(&self.allocator, len)?;
        // SAFETY: `range` has checked both ranges. `through` is another allocation of `len` bytes,
        // and the allocator reuses it only for work behind these copies.
        unsafe {
            self.allocator.device().copy(through.address(), from, len)?;
            self.allocator.device().copy(to, through.address(), len)
        }
    }

    fn mark_weights(&self) {
        self.repack_state().allow();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
