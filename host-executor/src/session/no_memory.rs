//! The memory of a buffer that has lost its memory.

use std::any::Any;

use vgpu_engine::{EngineError, Memory};
use vgpu_transport::bytes::{Bytes, BytesMut};

/// Memory without bytes: every access fails with the error that explains why. An engine rejects it
/// as memory of another engine.
pub(super) struct NoMemory {
    size: u64,
    error: EngineError,
}

impl NoMemory {
    /// Stands for `size` bytes that could not be allocated because of `error`.
    pub(super) fn new(size: u64, error: EngineError) -> NoMemory {
        NoMemory { size, error }
    }
}

impl Memory for NoMemory {
    fn size(&self) -> u64 {
        self.size
    }

    fn write(&self, _: u64, _: Bytes<'_>) -> Result<(), EngineError> {
        Err(self.error.clone())
    }

    fn read(&self, _: u64, _: BytesMut<'_>) -> Result<(), EngineError> {
        Err(self.error.clone())
    }

    fn fill(&self, _: u64, _: u64, _: u8) -> Result<(), EngineError> {
        Err(self.error.clone())
    }

    fn copy_from(&self, _: u64, _: &dyn Memory, _: u64, _: u64) -> Result<(), EngineError> {
        Err(self.error.clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
