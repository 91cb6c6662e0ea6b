//! Memory for weights that the buffers of several guests share.
//!
//! A buffer for weights is a list of *pieces*, each an allocation of its own. A byte that was never
//! written has no piece and reads as zero. An extent is a whole piece, so a buffer that attaches an
//! extent holds the piece of another buffer, and plans read the tensor there. The last holder frees
//! it. Each byte of a buffer is in one piece, and each piece is held by a buffer or by a
//! reservation: all pieces together take what their guests are charged for, but for the rounding of
//! each allocation.
//!
//! A piece that several buffers hold does not change: neither its bytes nor its
//! [format](crate::repack). A buffer that writes to it, or whose plan needs it in ggml's format
//! while it is repacked, gets a copy in its place.
//!
//! Until the buffer is frozen, the memory for bytes without a piece is reserved in the
//! [`Allocator`].

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::lock;

use crate::allocator::Allocator;
use crate::memory::CudaMemory;
use vgpu_engine::{EngineError, Extent, Memory, check_range};

/// The alignment of the address of a piece. A piece begins at a multiple of it in its buffer, or is
/// moved before a plan uses it, so that tensors are aligned as in one allocation.
const ALIGN: u64 = 256;

/// The most bytes of a piece that are copied because an extent begins or ends inside it.
const MAX_CUT: u64 = 1 << 20;

/// The number of pieces from which on those without an extent have at least the size of the buffer
/// divided by it.
const MANY_PIECES: usize = 1 << 14;

/// The number of pieces from which on a new one takes in all others.
const MAX_PIECES: usize = 1 << 16;

/// Zeros to read at a time.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The memory of a buffer for weights.
pub(crate) struct WeightMemory {
    allocator: Arc<Allocator>,
    size: u64,
    /// How often plans that were compiled before became stale.
    changes: AtomicU64,
    state: Mutex<Pieces>,
}

/// The pieces of a buffer by their first byte, disjoint.
#[derive(Default)]
struct Pieces {
    pieces: BTreeMap<u64, HeldPiece>,
    /// Bytes of the allocator's memory that are reserved for this buffer.
    reserved: u64,
    is_frozen: bool,
    /// Whether the bytes were written after the memory was frozen.
    is_modified: bool,
}

/// A piece, which other buffers can hold as an extent.
pub(crate) struct CudaExtent {
    memory: CudaMemory,
    filled: AtomicU64,
}

/// A buffer's hold of a piece.
struct HeldPiece(Option<Arc<CudaExtent>>);

impl HeldPiece {
    fn new(piece: Arc<CudaExtent>) -> HeldPiece {
        piece.memory.repack_state().state().holders += 1;
        HeldPiece(Some(piece))
    }

    /// A new piece that is complete.
    fn whole(memory: CudaMemory) -> HeldPiece {
        HeldPiece::new(Arc::new(CudaExtent {
            filled: AtomicU64::new(memory.size()),
            memory,
        }))
    }

    fn piece(&self) -> &Arc<CudaExtent> {
        { self.0.as_ref() }.expect("only `into_memory` takes the piece, and `self` with it")
    }

    /// The memory of the piece, which is no extent any more, if no one else has the piece.
    fn into_memory(mut self) -> Result<CudaMemory, HeldPiece> {
        let piece = self.0.take();
        match Arc::try_unwrap(piece.expect("as for `piece`")) {
            Ok(piece) => {
                piece.memory.repack_state().state().holders = 0;
                Ok(piece.memory)
            }
            Err(piece) => Err(HeldPiece(Some(piece))),
        }
    }
}

impl Drop for HeldPiece {
    fn drop(&mut self) {
        if let Some(piece) = &self.0 {
            piece.memory.repack_state().state().holders -= 1;
        }
    }
}

impl CudaExtent {
    /// The allocation.
    pub(crate) fn memory(&self) -> &CudaMemory {
        &self.memory
    }
}

impl Extent for CudaExtent {
    fn size(&self) -> u64 {
        self.memory.size()
    }

    /// Nothing, if the device is lost, and the bytes with it.
    fn filled(&self) -> u64 {
        match self.memory.check_there() {
            Ok(()) => self.filled.load(Ordering::Acquire),
            Err(_) => 0,
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), EngineError> {
        self.memory.check_there()?;
        check_range(offset, out.len() as u64, self.filled())?;
        self.memory.read(offset, out.into())
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Pieces {
    /// The pieces with bytes in `range`, in order.
    fn meeting(&self, range: &Range<u64>) -> Vec<(u64, Arc<CudaExtent>)> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.pieces.range(..range.start).next_back();
        let before = before.filter(|(start, held)| *start + held.piece().size() > range.start);
        { before.into_iter() }
            .chain(self.pieces.range(range.clone()))
            .map(|(&start, held)| (start, Arc::clone(held.piece())))
            .collect()
    }

    /// The parts of `range` that no piece has, each with the whole gap that it lies in, in a buffer
    /// of `size` bytes.
    fn gaps(&self, range: &Range<u64>, size: u64) -> Vec<(Range<u64>, Range<u64>)> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        let met = self.meeting(range);
        let ends = { met.iter() }.map(|(start, piece)| (*start, *start + piece.size()));
        for (start, end) in ends.chain([(range.end, range.end)]) {
            if at < start {
                let before = self.pieces.range(..=at).next_back();
                let from = before.map_or(0, |(from, held)| from + held.piece().size());
                let behind = self.pieces.range(at..).next();
                let until = behind.map_or(size, |(until, _)| *until);
                gaps.push((at..start, from..until));
            }
            at = at.max(end);
        }
        gaps
    }
}

impl WeightMemory {
    /// Zero bytes, as many as `instead` has, whose memory is reserved.
    pub(crate) fn new(allocator: &Arc<Allocator>, size: u64) -> WeightMemory {
        let reserved = allocator.allocation_size(size);
        allocator.reserve(reserved);
        WeightMemory {
            allocator: Arc::clone(allocator),
            size,
            changes: AtomicU64::new(0),
            state: Mutex::new(Pieces {
                reserved,
                ..Pieces::default()
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, Pieces> {
        lock(&self.state)
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

    /// A number that changes whenever the place or the format of bytes changes. As for
    /// [`RepackState::changes`](crate::repack::state::RepackState::changes).
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Makes plans compiled before stale.
    pub(crate) fn has_changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// There can be no extent of this range.
    fn no_extent(&self, range: &Range<u64>) -> EngineError {
        EngineError::OutOfBounds {
            offset: range.start,
            len: range.end - range.start,
            size: self.size,
        }
    }

    /// New memory for `len` bytes of the buffer, from its reservation as far as that goes.
    fn alloc(&self, state: &mut Pieces, len: u64) -> Result<CudaMemory, EngineError> {
        let from = state.reserved.min(self.allocator.allocation_size(len));
        self.allocator.give_up(from);
        match CudaMemory::new(&self.allocator, len) {
            Ok(memory) => {
                state.reserved -= from;
                memory.mark_weights();
                Ok(memory)
            }
            Err(error) => {
                self.allocator.reserve(from);
                Err(error)
            }
        }
    }

    /// A copy in ggml's format of `range` of the buffer, as one allocation.
    fn gathered(&self, state: &mut Pieces, range: &Range<u64>) -> Result<CudaMemory, EngineError> {
        let new = self.alloc(state, range.end - range.start)?;
        for (start, piece) in state.meeting(range) {
            let from = start.max(range.start);
            let until = (start + piece.size()).min(range.end);
            let to = from - range.start;
            (piece.memory).copy_plain((from - start)..(until - start), &new, to)?;
        }
        Ok(new)
    }

    /// Removes the pieces with bytes in `range`. What they have beside the range is copied to new
    /// pieces. If that fails, nothing has changed.
    fn remove(&self, state: &mut Pieces, range: &Range<u64>) -> Result<(), EngineError> {
        let met = state.meeting(range);
        let mut beside = Vec::new();
        for (start, piece) in &met {
            let end = start + piece.size();
            for part in [*start..range.start, range.end..end] {
                if part.start < part.end {
                    beside.push((part.start, self.gathered(state, &part)?));
                }
            }
        }
        for (start, _) in &met {
            state.pieces.remove(start);
        }
        for (start, memory) in beside {
            state.pieces.insert(start, HeldPiece::whole(memory));
        }
        if !met.is_empty() {
            self.has_changed();
        }
        Ok(())
    }

    /// Moves all bytes of `range`, which begins and ends with pieces or beside them, to one piece.
    fn merge(&self, state: &mut Pieces, range: &Range<u64>) -> Result<(), EngineError> {
        let memory = self.gathered(state, range)?;
        for (start, _) in state.meeting(range) {
            state.pieces.remove(&start);
        }
        state.pieces.insert(range.start, HeldPiece::whole(memory));
        self.has_changed();
        Ok(())
    }

    /// Gives this buffer pieces of its own for all bytes of `range` that others may read.
    fn own(
        &self,
        state: &mut Pieces,
        range: &Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        let starts: Vec<u64> = { state.meeting(range).into_iter() }
            .map(|(start, _)| start)
            .collect();
        for start in starts {
            if is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let Some(held) = state.pieces.remove(&start) else {
                continue;
            };
            let held = match held.into_memory() {
                // A piece that is written ends as an extent.
                Ok(memory) => HeldPiece::whole(memory),
                Err(held) => {
                    let size = held.piece().size();
                    state.pieces.insert(start, held);
                    let range = start..start + size;
                    self.merge(state, &range)?;
                    continue;
                }
            };
            state.pieces.insert(start, held);
        }
        Ok(())
    }

    /// Gives all bytes of `range` pieces. New ones are zero.
    fn fill_gaps(&self, state: &mut Pieces, range: &Range<u64>) -> Result<(), EngineError> {
        for (part, gap) in state.gaps(range, self.size) {
            if state.pieces.len() >= MAX_PIECES {
                return self.merge(state, &(0..self.size));
            }
            let unit = match state.pieces.len() < MANY_PIECES {
                true => ALIGN,
                false => (self.size / MANY_PIECES as u64)
                    .next_multiple_of(ALIGN)
                    .max(ALIGN),
            };
            let start = gap.start.max(part.start / unit * unit);
            let end = part.end.checked_next_multiple_of(unit);
            let end = end.map_or(gap.end, |end| end.min(gap.end));
            let memory = self.alloc(state, end - start)?;
            state.pieces.insert(start, HeldPiece::whole(memory));
        }
        Ok(())
    }

    /// Gives this buffer pieces of its own for all bytes of `range`, which are written next.
    fn prepare_write(
        &self,
        state: &mut Pieces,
        range: &Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        self.own(state, range, is_cancelled)?;
        self.fill_gaps(state, range)?;
        state.is_modified |= state.is_frozen;
        Ok(())
    }

    /// Writes to each part of `range`: calls `write` with a piece, the offset in it, and the part.
    fn each_written(
        &self,
        range: Range<u64>,
        mut write: impl FnMut(&CudaMemory, u64, Range<u64>) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let mut state = self.state();
        self.prepare_write(&mut state, &range, &|| false)?;
        for (start, piece) in state.meeting(&range) {
            let memory = &piece.memory;
            let part = start.max(range.start)..(start + memory.size()).min(range.end);
            let before = memory.repack_state().changes();
            let outcome = write(memory, part.start - start, part);
            if memory.repack_state().changes() != before {
                self.has_changed();
            }
            outcome?;
        }
        Ok(())
    }

    /// The piece that has all of `len > 0` bytes at `offset`, and where in it they begin. Bytes in
    /// several pieces move to one. For bytes that a plan writes, the piece belongs to this buffer
    /// alone. The place is valid until [`changes`](WeightMemory::changes) changes.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the range does not lie inside; [`EngineError::OutOfMemory`];
    /// [`EngineError::Cancelled`] once `is_cancelled` has returned `true`; [`EngineError`] of the
    /// device.
    pub(crate) fn locate(
        &self,
        offset: u64,
        len: u64,
        is_written: bool,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(Arc<CudaExtent>, u64), EngineError> {
        check_range(offset, len, self.size)?;
        let range = offset..offset + len;
        let mut state = self.state();
        match is_written {
            true => self.prepare_write(&mut state, &range, is_cancelled)?,
            false => self.fill_gaps(&mut state, &range)?,
        }
        let mut met = state.meeting(&range);
        let mut first = met[0].0;
        while !first.is_multiple_of(ALIGN) {
            let before = first / ALIGN * ALIGN;
            let met = state.meeting(&(before..first));
            first = met.first().map_or(before, |(start, _)| before.min(*start));
        }
        if met.len() > 1 || first < met[0].0 {
            if is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let (last, piece) = &met[met.len() - 1];
            let all = first..last + piece.size();
            drop(met);
            self.merge(&mut state, &all)?;
            met = state.meeting(&range);
        }
        let (start, piece) = met.remove(0);
        Ok((piece, offset - start))
    }

    /// Gives this buffer a copy of the piece at `start`, in ggml's format.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`], or what the device reports.
    pub(crate) fn copy_piece(&self, start: u64) -> Result<(), EngineError> {
        let mut state = self.state();
        let Some(held) = state.pieces.get(&start) else {
            return Ok(());
        };
        let range = start..start + held.piece().size();
        self.merge(&mut state, &range)
    }

    /// Copies the bytes of `range` in ggml's format to `to` of `dst`, which is plain there.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    pub(crate) fn copy_out(
        &self,
        range: Range<u64>,
        dst: &CudaMemory,
        to: u64,
    ) -> Result<(), EngineError> {
        let state = self.state();
        for (part, _) in state.gaps(&range, self.size) {
            dst.fill(to + part.start - range.start, part.end - part.start, 0)?;
        }
        for (start, piece) in state.meeting(&range) {
            let part = start.max(range.start)..(start + piece.size()).min(range.end);
            let at = to + part.start - range.start;
            (piece.memory).copy_plain(part.start - start..part.end - start, dst, at)?;
        }
        Ok(())
    }
}

impl Drop for WeightMemory {
    fn drop(&mut self) {
        let reserved = self.state().reserved;
        self.allocator.give_up(reserved);
    }
}

impl Memory for WeightMemory {
    fn size(&self) -> u64 {
        self.size
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        let len = data.len() as u64;
        check_range(offset, len, self.size)?;
        let mut rest = data;
        self.each_written(offset..offset + len, |memory, at, part| {
            let (here, behind) = rest.split_at((part.end - part.start) as usize);
            rest = behind;
            memory.write(at, here)
        })
    }

    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        check_range(offset, out.len() as u64, self.size)?;
        let end = offset + out.len() as u64;
        let state = self.state();
        let (mut at, mut rest) = (offset, out);
        let met = state.meeting(&(offset..end));
        let ends = { met.iter() }.map(|(start, piece)| (*start, Some(piece)));
        for (start, piece) in ends.chain([(end, None)]) {
            while at < start {
                let len = (start - at).min(ZEROS.len() as u64) as usize;
                let (mut zeros, behind) = rest.split_at(len);
                zeros.copy_from(Bytes::from(&ZEROS[..len]));
                (at, rest) = (at + len as u64, behind);
            }
            let Some(piece) = piece else { break };
            let until = (start + piece.size()).min(end);
            let (here, behind) = rest.split_at((until - at) as usize);
            piece.memory.read(at - start, here)?;
            (at, rest) = (until, behind);
        }
        Ok(())
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        self.each_written(offset..offset + len, |memory, at, part| {
            memory.fill(at, part.end - part.start, value)
        })
    }

    fn copy_from(
        &self,
        offset: u64,
        source: &dyn Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        if len == 0 {
            return check_range(source_offset, len, source.size());
        }
        // Source and destination may overlap, and may be in many pieces.
        let through = CudaMemory::new(&self.allocator, len)?;
        through.copy_from(0, source, source_offset, len)?;
        self.each_written(offset..offset + len, |memory, at, part| {
            memory.copy_from(at, &through, part.start - offset, part.end - part.start)
        })
    }

    fn freeze(&self) -> bool {
        let mut state = self.state();
        state.is_frozen = true;
        // What is not complete now never will be.
        for held in state.pieces.values() {
            let piece = held.piece();
            piece.filled.store(piece.size(), Ordering::Release);
        }
        self.allocator.give_up(std::mem::take(&mut state.reserved));
        true
    }

    fn extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size)?;
        let range = offset..offset + len;
        let mut state = self.state();
        let met = state.meeting(&range);
        let is_there = |(start, piece): &(u64, Arc<CudaExtent>)| {
            *start == offset && piece.size() == len && piece.filled() == len
        };
        if let [found] = &met[..]
            && is_there(found)
        {
            return Ok(Arc::clone(&found.1) as Arc<dyn Extent>);
        }
        let is_shared = |(_, piece): &(u64, Arc<CudaExtent>)| piece.memory.is_shared();
        let is_here = len > 0 && offset.is_multiple_of(ALIGN);
        let has_gaps = !state.gaps(&range, self.size).is_empty();
        if !is_here || has_gaps || met.iter().any(is_shared) {
            return Err(self.no_extent(&range));
        }
        drop(met);
        let memory = self.gathered(&mut state, &range)?;
        self.remove(&mut state, &range)?;
        let held = HeldPiece::whole(memory);
        let extent = Arc::clone(held.piece());
        state.pieces.insert(offset, held);
        Ok(extent)
    }

    fn begin_extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size)?;
        let range = offset..offset + len;
        let mut state = self.state();
        let is_shared = |(_, piece): &(u64, Arc<CudaExtent>)| piece.memory.is_shared();
        let is_cut = |(start, piece): &(u64, Arc<CudaExtent>)| {
            let is_inside = range.start <= *start && start + piece.size() <= range.end;
            !is_inside && piece.size() > MAX_CUT
        };
        let met = state.meeting(&range);
        let is_here = len > 0 && offset.is_multiple_of(ALIGN) && !state.is_frozen;
        if !is_here || met.iter().any(|it| is_shared(it) || is_cut(it)) {
            return Err(self.no_extent(&range));
        }
        drop(met);
        let memory = self.alloc(&mut state, len)?;
        self.remove(&mut state, &range)?;
        let extent = Arc::new(CudaExtent {
            memory,
            filled: AtomicU64::new(0),
        });
        state
            .pieces
            .insert(offset, HeldPiece::new(Arc::clone(&extent)));
        self.has_changed();
        Ok(extent)
    }

    fn append(&self, extent: &Arc<dyn Extent>, data: Bytes<'_>) -> Result<(), EngineError> {
        let extent = of_this_engine(extent)?;
        let state = self.state();
        let is_ours = |held: &HeldPiece| Arc::ptr_eq(held.piece(), &extent);
        self.check_there()?;
        let (filled, size) = (extent.filled(), extent.size());
        if state.is_frozen || !state.pieces.values().any(is_ours) {
            return Err(EngineError::OutOfBounds {
                offset: filled,
                len: data.len() as u64,
                size: filled,
            });
        }
        check_range(filled, data.len() as u64, size)?;
        extent.memory.write(filled, data)?;
        let filled = filled + data.len() as u64;
        extent.filled.store(filled, Ordering::Release);
        Ok(())
    }

    // `is_untouched` stays false: an upload is then not compared with the memory of others, which
    // would have to come back from the GPU, behind all work of others.

    fn bytes_in_use(&self) -> u64 {
        let state = self.state();
        { state.pieces.values() }
            .map(|held| held.piece().size())
            .sum()
    }

    fn unshare(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        self.own(&mut self.state(), &(offset..offset + len), is_cancelled)
    }

    fn attach(
        &self,
        offset: u64,
        extent: &Arc<dyn Extent>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, EngineError> {
        let extent = of_this_engine(extent)?;
        if !extent.memory.is_of(&self.allocator) {
            return Err(EngineError::ForeignMemory);
        }
        let len = extent.size();
        check_range(offset, len, self.size)?;
        check_range(0, len, extent.filled())?;
        if is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        let mut state = self.state();
        self.remove(&mut state, &(offset..offset + len))?;
        state.pieces.insert(offset, HeldPiece::new(extent));
        self.has_changed();
        Ok(len)
    }

    fn is_unmodified(&self) -> bool {
        let state = self.state();
        state.is_frozen && !state.is_modified
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The extent as this engine's type.
///
/// # Errors
/// [`EngineError::ForeignMemory`] if it belongs to another engine.
fn of_this_engine(extent: &Arc<dyn Extent>) -> Result<Arc<CudaExtent>, EngineError> {
    let extent = Arc::clone(extent).into_any().downcast::<CudaExtent>();
    extent.map_err(|_| EngineError::ForeignMemory)
}
