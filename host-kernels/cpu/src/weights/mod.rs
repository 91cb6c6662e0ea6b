//! Memory for weights that buffers of several guests share.
//!
//! A buffer for weights begins with a region of its own, its *base*, like any other buffer. Once it
//! is frozen, parts of it can be offered to other buffers as *extents*. A buffer that attaches an
//! extent records that these bytes are elsewhere, and the pages of its own base for them are never
//! touched, or are freed. This needs no further mappings and no page faults, and weights keep
//! their huge pages.
//!
//! Plans ask for the [address](WeightRegion::locate) of a tensor when they are compiled. Before a
//! write to bytes that other buffers may read, the bytes are copied: copy-on-write, by extents. When the
//! address of any byte changes, [`moves`](WeightRegion::moves) changes, and plans that were
//! compiled before do not run again.
//!
//! An extent may outlive the buffer that it was offered from. Pages of a base are freed when
//! neither its buffer nor an extent needs them, and the base itself with the last of these.

mod extent;
mod pieces;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vgpu_transport::bytes::BytesMut;

use crate::region::{Budget, Region};
use extent::BaseRegion;
pub(crate) use extent::CpuExtent;
use pieces::{Backing, Piece, State};
use vgpu_engine::EngineError;

/// The memory of a buffer for weights.
pub(super) struct WeightRegion {
    base: Arc<BaseRegion>,
    budget: Arc<Budget>,
    state: Mutex<State>,
}

impl WeightRegion {
    /// `size > 0` zero bytes; `None` if the mapping fails.
    pub(super) fn create(size: usize, budget: &Arc<Budget>) -> Option<WeightRegion> {
        Some(WeightRegion {
            base: Arc::new(BaseRegion::new(Region::private(size)?)),
            budget: Arc::clone(budget),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn size(&self) -> u64 {
        self.base.region.len() as u64
    }

    /// A number that changes whenever an address that was returned before may have become invalid.
    pub(super) fn moves(&self) -> u64 {
        self.state().moves
    }

    pub(super) fn is_unmodified(&self) -> bool {
        let state = self.state();
        state.is_frozen && !state.is_written
    }

    /// Makes the present contents available as extents.
    pub(super) fn freeze(&self) {
        let mut state = self.state();
        if !state.is_frozen {
            state.is_frozen = true;
            // Plans that write were compiled without copy-on-write.
            state.moves += 1;
        }
    }

    /// The address of the bytes of `range`, contiguous, for reading. The range lies inside.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the bytes are in several pieces and cannot be merged.
    pub(super) fn locate(&self, range: Range<u64>) -> Result<*mut u8, EngineError> {
        let mut state = self.state();
        if let Some(address) = state.find(&self.base, &range) {
            return Ok(address);
        }
        state.gather(&self.base, &self.budget, range)
    }

    /// As [`locate`](WeightRegion::locate), for writing: no other buffer shares the bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if shared bytes cannot be copied.
    pub(super) fn own(&self, range: Range<u64>) -> Result<*mut u8, EngineError> {
        let mut state = self.state();
        let address = state.gather(&self.base, &self.budget, range)?;
        state.is_written |= state.is_frozen;
        Ok(address)
    }

    /// The addresses and lengths of the contiguous parts of `range`, in order. The range lies
    /// inside.
    pub(super) fn parts(&self, range: Range<u64>) -> Vec<(*mut u8, usize)> {
        let state = self.state();
        let mut parts = Vec::new();
        let mut at = range.start;
        let mut part = |address: *mut u8, len: u64| {
            if len > 0 {
                parts.push((address, len as usize));
            }
        };
        for (&start, piece) in state.touched(&range) {
            let (from, to) = (start.max(range.start), (start + piece.len).min(range.end));
            part(self.base.at(at), from - at);
            part(piece.at(from - start), to - from);
            at = to;
        }
        part(self.base.at(at), range.end - at);
        parts
    }

    /// Part of the frozen contents as an extent. The range lies inside.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the memory is not frozen, was written since, or if the range is
    /// empty or overlaps another extent.
    pub(super) fn extent(&self, offset: u64, len: u64) -> Result<Arc<CpuExtent>, EngineError> {
        let mut state = self.state();
        let range = offset..offset + len;
        let mut uses = self.base.uses();
        let fits = state.is_frozen
            && !state.is_written
            && len > 0
            && state.touched(&range).next().is_none()
            && uses.touched(&range).next().is_none();
        if !fits {
            let size = self.size();
            return Err(EngineError::OutOfBounds { offset, len, size });
        }
        uses.insert(range);
        let extent = Arc::new(CpuExtent {
            base: Arc::clone(&self.base),
            offset,
            len,
        });
        state.offered.push(Arc::clone(&extent));
        Ok(extent)
    }

    /// Replaces the bytes at `offset` by those of `extent`; they lie inside. Returns the number of
    /// bytes that are now shared. Frozen memory must already have the same bytes there.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if overlapping pieces cannot be merged.
    pub(super) fn attach(&self, offset: u64, extent: &Arc<CpuExtent>) -> Result<u64, EngineError> {
        let range = offset..offset + extent.len;
        let mut state = self.state();
        if state.is_written || Arc::ptr_eq(&extent.base, &self.base) {
            return Ok(0);
        }
        let is_inside = |(&start, piece): (&u64, &Piece)| {
            range.start <= start && start + piece.len <= range.end
        };
        if !state.touched(&range).all(is_inside) {
            // Bytes that were merged for a plan stay contiguous.
            let is_frozen = state.is_frozen;
            let to = state.gather(&self.base, &self.budget, range)?;
            if !is_frozen {
                // SAFETY: `gather` has returned the address of `extent.len` mapped bytes, which stay
                // mapped while the lock of the state is held. No Rust reference points to them.
                unsafe { BytesMut::from_raw(to, extent.len as usize) }.copy_from(extent.bytes());
            }
            return Ok(0);
        }
        state.forget_offers(&range);
        state.pieces.retain(|&start, _| !range.contains(&start));
        let piece = Piece {
            len: extent.len,
            backing: Backing::Shared(Arc::clone(extent)),
        };
        state.pieces.insert(offset, piece);
        state.moves += 1;
        let unneeded = state.pages_under(&self.base, &range);
        self.base.release(unneeded);
        Ok(extent.len)
    }
}

impl Drop for WeightRegion {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.offered.clear();
        self.base.uses().has_owner = false;
        self.base.release(0..self.base.region.len() as u64);
    }
}
