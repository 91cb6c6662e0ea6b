//! The memory of a buffer on a device.

use std::ops::Range;
use std::sync::Arc;

use vgpu_transport::bytes::{Bytes, BytesMut};
use zerocopy::IntoBytes;

use crate::allocator::Allocator;
use crate::device::{Address, KernelId, Launch};
use crate::params::VgRepackParams;
use crate::repack::format::RepackFormat;
use crate::repack::state::RepackState;
use vgpu_engine::{EngineError, Memory, check_range};

/// An allocation on a device, some tensors of which may be repacked.
pub(crate) struct CudaMemory {
    pub(crate) allocator: Arc<Allocator>,
    /// An address that is not mapped if the size is 0.
    address: Address,
    size: u64,
    repack_state: RepackState,
}

/// Bytes of weights that one launch repacks.
const CHUNK: u64 = 16 << 20;

/// The grid and block limits of `vg_repack`.
const THREADS: u64 = 256;
const MAX_BLOCKS: u64 = 4096;

/// Device memory to repack weights through.
pub(crate) struct RepackBuffer {
    memory: CudaMemory,
    kernel: KernelId,
}

impl RepackBuffer {
    /// The bytes that repacking a tensor needs: one chunk, and the scales of a matrix that is
    /// larger than a chunk.
    pub(crate) fn bytes_for(format: &RepackFormat) -> u64 {
        match format.of_matrix() {
            bytes if bytes <= CHUNK => bytes,
            _ => CHUNK + format.scales(),
        }
    }

    /// A buffer of `bytes` bytes for `kernel`, which repacks.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the device has not that much left.
    pub(crate) fn new(
        allocator: &Arc<Allocator>,
        kernel: KernelId,
        bytes: u64,
    ) -> Result<RepackBuffer, EngineError> {
        Ok(RepackBuffer {
            kernel,
            memory: CudaMemory::new(allocator, bytes)?,
        })
    }
}

/// What has become of repacked tensors that a plan needs in ggml's format.
#[must_use]
pub(crate) enum Restored {
    /// They are in ggml's format.
    Plain,
    /// Nothing was done: there are some, and several buffers hold the memory.
    Withheld,
}

impl CudaMemory {
    /// `size` zero bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the device has not that much left.
    pub(crate) fn new(allocator: &Arc<Allocator>, size: u64) -> Result<CudaMemory, EngineError> {
        CudaMemory::from_reserved(allocator, size, 0)
    }

    /// The same, from `reserved` bytes of a reservation as far as they go, which are given up.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the device has not that much left. Nothing is given up then.
    pub(crate) fn from_reserved(
        allocator: &Arc<Allocator>,
        size: u64,
        reserved: u64,
    ) -> Result<CudaMemory, EngineError> {
        let address = if size == 0 {
            256
        } else {
            allocator.alloc(size, reserved)?
        };
        Ok(CudaMemory {
            allocator: Arc::clone(allocator),
            address,
            size,
            repack_state: RepackState::default(),
        })
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> Address {
        self.address
    }

    /// The size in bytes.
    pub(crate) fn byte_size(&self) -> u64 {
        self.size
    }

    /// Whether the memory is from `allocator`.
    pub(crate) fn is_of(&self, allocator: &Arc<Allocator>) -> bool {
        Arc::ptr_eq(&self.allocator, allocator)
    }

    /// Checks that the device of the memory is not lost.
    ///
    /// # Errors
    /// [`EngineError::DeviceLost`] if the device is lost.
    pub(crate) fn check_there(&self) -> Result<(), EngineError> {
        match self.allocator.device().lost() {
            None => Ok(()),
            Some(reason) => Err(EngineError::DeviceLost { reason }),
        }
    }

    /// Which tensors of the memory are repacked.
    pub(crate) fn repack_state(&self) -> &RepackState {
        &self.repack_state
    }

    /// Whether several buffers for weights hold the memory.
    pub(crate) fn is_shared(&self) -> bool {
        self.repack_state.state().holders > 1
    }

    /// Repacks the plain tensor at `start`, which lies inside the memory. Returns `false` and does
    /// nothing if several buffers hold the memory by now.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    pub(crate) fn repack(
        &self,
        start: u64,
        format: RepackFormat,
        buffer: &RepackBuffer,
    ) -> Result<bool, EngineError> {
        // Other buffers that come to hold the memory, and reads, wait until the format is noted.
        let mut state = self.repack_state.state();
        if state.holders > 1 {
            return Ok(false);
        }
        let device = self.allocator.device();
        let (at, from) = (self.address + start, buffer.memory.address);
        for parts in format.parts(CHUNK) {
            let begin = parts[0].scales.start;
            let end = parts[parts.len() - 1].scales.end;
            // The final place of a matrix's scales still holds its last plain blocks, so the scales
            // of a matrix of several chunks are collected in the buffer.
            let staged = (parts.len() > 1).then_some(from + CHUNK);
            for part in &parts {
                let bytes = part.whole.end - part.whole.start;
                let params = VgRepackParams {
                    from,
                    quants: at + part.quants.start,
                    scales: staged.unwrap_or(at + begin) + (part.scales.start - begin),
                    blocks: part.blocks,
                    type_: u32::from(format.ty as u8),
                    reserved: 0,
                };
                let blocks = part.quants_of_16().div_ceil(THREADS).min(MAX_BLOCKS);
                let launch = Launch {
                    kernel: buffer.kernel,
                    grid: [blocks as u32, 1, 1],
                    threads: [THREADS as u32, 1, 1],
                    shared: 0,
                    params: params.as_bytes().to_vec(),
                    cooperative: false,
                };
                // SAFETY: the part lies inside this memory. The buffer is another allocation with
                // room for a chunk. The kernel writes quants only where this and earlier parts
                // lay, which were copied to the buffer, and scales to the end of the buffer or of a
                // matrix of one part.
                unsafe {
                    device.copy(from, at + part.whole.start, bytes)?;
                    device.launch(&launch)?;
                }
            }
            if let Some(staged) = staged {
                // SAFETY: the scales lie behind the quants, inside this memory; the buffer has
                // room for a chunk and the scales of a matrix.
                unsafe { device.copy(at + begin, staged, end - begin)? };
            }
        }
        state.insert(start, format);
        self.repack_state.has_changed();
        Ok(true)
    }

    /// Restores all repacked tensors with bytes in `range`, unless several buffers hold the memory.
    /// The tensors stay plain from then on.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    pub(crate) fn try_restore(&self, range: &Range<u64>) -> Result<Restored, EngineError> {
        match self.drop_or_restore(range, |_| false) {
            Ok(()) => Ok(Restored::Plain),
            Err(EngineError::Shared { .. }) => Ok(Restored::Withheld),
            Err(error) => Err(error),
        }
    }

    /// As [`try_restore`](CudaMemory::try_restore), for memory that no other buffer may hold.
    ///
    /// # Errors
    /// [`EngineError::Shared`] if another buffer holds it; [`EngineError`] of the device.
    pub(crate) fn restore(&self, range: &Range<u64>) -> Result<(), EngineError> {
        self.drop_or_restore(range, |_| false)
    }

    /// The same before all bytes of `range` are overwritten: tensors inside `range` are dropped,
    /// and not restored.
    ///
    /// # Errors
    /// As for [`restore`](CudaMemory::restore).
    pub(crate) fn before_write(&self, range: &Range<u64>) -> Result<(), EngineError> {
        self.drop_or_restore(range, |tensor| {
            range.start <= tensor.start && tensor.end <= range.end
        })
    }

    /// Leaves no tensor with bytes in `range` repacked: drops those that `is_forgotten` names, and
    /// restores the others.
    ///
    /// # Errors
    /// As for [`restore`](CudaMemory::restore).
    fn drop_or_restore(
        &self,
        range: &Range<u64>,
        is_forgotten: impl Fn(&Range<u64>) -> bool,
    ) -> Result<(), EngineError> {
        if !self.repack_state.is_allowed() {
            return Ok(());
        }
        let mut state = self.repack_state.state();
        for (start, format) in state.changeable(range)? {
            if is_forgotten(&(start..start + format.bytes())) {
                state.forget(start);
            } else {
                let put = |at, bytes: &[u8]| {
                    // SAFETY: the bytes are a part of the tensor, which lies inside this memory.
                    unsafe {
                        self.allocator
                            .device()
                            .upload(self.address + start + at, bytes.into())
                    }
                };
                format.restore(|bytes| self.fetch(start, bytes), put)?;
                state.restore(start);
            }
            self.repack_state.has_changed();
        }
        Ok(())
    }

    /// Copies the bytes of `range` in ggml's format to `to` of `dst`, another allocation. `dst` is
    /// plain there, and stays so. Bytes that are repacked go through the host, and `is_cancelled`
    /// is asked before each 16 MiB of them.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`] once `is_cancelled` has returned `true`, and [`EngineError`] of
    /// the device.
    pub(crate) fn copy_plain(
        &self,
        range: Range<u64>,
        dst: &CudaMemory,
        to: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        let len = range.end - range.start;
        let (from, to_address) = (self.range(range.start, len)?, dst.range(to, len)?);
        let state = self.repack_state.state();
        if len == 0 {
            return Ok(());
        }
        if state.meeting(&range).is_empty() {
            // SAFETY: `range` has checked that the `len` bytes are inside their memories, which are
            // two allocations. The lock keeps the bytes plain until the copy was asked for.
            return unsafe { self.allocator.device().copy(to_address, from, len) };
        }
        drop(state);
        let mut bytes = vec![0; len.min(CHUNK) as usize];
        let mut done = 0;
        while done < len {
            if is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let part = &mut bytes[..(len - done).min(CHUNK) as usize];
            self.read(range.start + done, BytesMut::from(&mut *part))?;
            dst.write(to + done, Bytes::from(&*part))?;
            done += part.len() as u64;
        }
        Ok(())
    }

    /// The bytes in `range` of the tensor at `start`, as they are in memory.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    pub(crate) fn fetch(&self, start: u64, range: Range<u64>) -> Result<Vec<u8>, EngineError> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.download(start + range.start, bytes.as_mut_slice().into())?;
        Ok(bytes)
    }

    /// Reads the bytes at `offset` as they are in memory.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    pub(crate) fn download(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        if out.is_empty() {
            return Ok(());
        }
        // SAFETY: `read` has checked its range, and `fetch` reads a tensor that `repack_state`
        // lists, which lies inside this memory. The memory is freed only when this object is
        // dropped.
        unsafe { self.allocator.device().download(self.address + offset, out) }
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`EngineError`] if the range is not inside the memory, or the device is lost.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<Address, EngineError> {
        check_range(offset, len, self.size)?;
        self.check_there()?;
        Ok(self.address + offset)
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.size != 0 {
            // SAFETY: `new` has allocated this address with this size. Plans that use the memory
            // hold it alive.
            unsafe { self.allocator.free(self.address, self.size) };
        }
    }
}
