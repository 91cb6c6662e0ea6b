//! Memory of the CUDA engine.

use std::any::Any;
use std::sync::Arc;

use vgpu_transport::bytes::{Bytes, BytesMut};

use super::device::Address;
use super::pool::Pool;
use crate::engine::{EngineError, Memory, check_range};

/// An allocation on a device.
pub(super) struct CudaMemory {
    pool: Arc<Pool>,
    /// Something unmapped when the size is 0.
    address: Address,
    size: u64,
}

impl CudaMemory {
    /// `size` bytes, all zero.
    pub(super) fn new(pool: &Arc<Pool>, size: u64) -> Result<CudaMemory, EngineError> {
        let address = if size == 0 { 256 } else { pool.alloc(size)? };
        Ok(CudaMemory {
            pool: Arc::clone(pool),
            address,
            size,
        })
    }

    /// Where it is.
    pub(super) fn address(&self) -> Address {
        self.address
    }

    /// Whether it is memory of `pool`.
    pub(super) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Fails if the memory went with its device.
    pub(super) fn check_there(&self) -> Result<(), EngineError> {
        match self.pool.device().lost() {
            None => Ok(()),
            Some(reason) => Err(EngineError::Lost { reason }),
        }
    }

    /// The address of `len` bytes at `offset`.
    fn range(&self, offset: u64, len: u64) -> Result<Address, EngineError> {
        check_range(offset, len, self.size)?;
        self.check_there()?;
        Ok(self.address + offset)
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.size != 0 {
            // SAFETY: allocated in `new` with this size; plans that use it hold on to it.
            unsafe { self.pool.free(self.address, self.size) };
        }
    }
}

impl Memory for CudaMemory {
    fn size(&self) -> u64 {
        self.size
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        let to = self.range(offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is inside.
        unsafe { self.pool.device().upload(to, data) }
    }

    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        let from = self.range(offset, out.len() as u64)?;
        if out.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is inside.
        unsafe { self.pool.device().download(from, out) }
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        let to = self.range(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the range is inside.
        unsafe { self.pool.device().fill(to, len, value) }
    }

    fn copy_from(
        &self,
        offset: u64,
        source: &dyn Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), EngineError> {
        let source: &CudaMemory = source
            .as_any()
            .downcast_ref()
            .filter(|source: &&CudaMemory| source.is_of(&self.pool))
            .ok_or(EngineError::ForeignMemory)?;
        let (to, from) = (self.range(offset, len)?, source.range(source_offset, len)?);
        if len == 0 || to == from {
            return Ok(());
        }
        if to.abs_diff(from) >= len {
            // SAFETY: both ranges are inside, and apart.
            return unsafe { self.pool.device().copy(to, from, len) };
        }
        let through = CudaMemory::new(&self.pool, len)?;
        // SAFETY: both ranges are inside; the memory in between is apart from either, and is freed after the
        // copies.
        unsafe {
            self.pool.device().copy(through.address, from, len)?;
            self.pool.device().copy(to, through.address, len)
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
