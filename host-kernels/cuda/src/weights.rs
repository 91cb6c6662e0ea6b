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
use std::slice::from_ref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{Guard, lock_at};

use crate::allocator::Allocator;
use crate::lock::Rank;
use crate::memory::CudaMemory;
use vgpu_engine::{EngineError, Extent, Memory, check_range};

/// The alignment of the address of a piece. A piece begins at a multiple of it in its buffer, or is
/// moved before a plan uses it, so that tensors are aligned as in one allocation.
const ALIGN: u64 = 256;

/// The size of the largest piece that an extent can begin or end in. The rest of the piece is
/// copied then.
const MAX_CUT: u64 = 1 << 20;

/// Bytes that are copied within the device at a time. The copy is complete before the next one is
/// asked for, so that work of others can come in between.
const PART: u64 = 64 << 20;

/// The number of pieces from which on those without an extent have at least the size of the buffer
/// divided by it.
const MANY_PIECES: usize = 1 << 14;

/// The number of pieces from which on a write fills whole gaps, and a graph moves all bytes of the
/// buffer to one piece.
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
    /// The bytes of all pieces.
    bytes: u64,
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
    /// Nobody has written the bytes before this one: the piece begins at a multiple of [`ALIGN`],
    /// and the write for which it was made does not.
    written_from: u64,
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
        HeldPiece::written(memory, 0)
    }

    /// The same, in which nobody has written the bytes before `from`.
    fn written(memory: CudaMemory, from: u64) -> HeldPiece {
        HeldPiece::new(Arc::new(CudaExtent {
            filled: AtomicU64::new(memory.size()),
            memory,
            written_from: from,
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
    fn insert(&mut self, start: u64, held: HeldPiece) {
        self.bytes += held.piece().size();
        self.pieces.insert(start, held);
    }

    fn remove(&mut self, start: u64) -> Option<HeldPiece> {
        let held = self.pieces.remove(&start)?;
        self.bytes -= held.piece().size();
        Some(held)
    }

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

/// The bytes of a buffer that a graph uses.
#[derive(Debug, Clone, PartialEq, Eq)]
struct UsedRange {
    bytes: Range<u64>,
    is_written: bool,
}

/// The bytes of a buffer that a graph uses, disjoint and in order: what overlaps is one range. Each
/// begins at a multiple of [`ALIGN`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct UsedRanges(Vec<UsedRange>);

impl UsedRanges {
    /// Adds bytes. [`join`](UsedRanges::join) has to follow.
    pub(crate) fn add(&mut self, bytes: &Range<u64>, is_written: bool) {
        self.0.push(UsedRange {
            bytes: bytes.start / ALIGN * ALIGN..bytes.end,
            is_written,
        });
    }

    /// Makes one range of those that overlap.
    pub(crate) fn join(&mut self) {
        let mut ranges = std::mem::take(&mut self.0);
        ranges.sort_unstable_by_key(|it| it.bytes.start);
        for it in ranges {
            match self.0.last_mut() {
                Some(last) if it.bytes.start < last.bytes.end => {
                    last.bytes.end = last.bytes.end.max(it.bytes.end);
                    last.is_written |= it.is_written;
                }
                _ => self.0.push(it),
            }
        }
    }

    /// The index of the range that has the byte at `offset`.
    pub(crate) fn find(&self, offset: u64) -> usize {
        let behind = self.0.partition_point(|it| it.bytes.start <= offset);
        behind.saturating_sub(1)
    }
}

/// Copies within the device that can be cancelled.
struct Copies<'a> {
    is_cancelled: &'a dyn Fn() -> bool,
    /// Bytes that were asked for since the device was last waited for.
    under_way: u64,
}

impl Copies<'_> {
    fn new(is_cancelled: &dyn Fn() -> bool) -> Copies<'_> {
        Copies {
            is_cancelled,
            under_way: 0,
        }
    }

    /// # Errors
    /// [`EngineError::Cancelled`].
    fn check(&self) -> Result<(), EngineError> {
        match (self.is_cancelled)() {
            true => Err(EngineError::Cancelled),
            false => Ok(()),
        }
    }

    /// Copies bytes of `from` in ggml's format to `at` of `to`, which is plain there. Asks for at
    /// most [`PART`] bytes before it waits for the device.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`] between two parts, or what the device reports.
    fn copy(
        &mut self,
        from: &CudaMemory,
        range: Range<u64>,
        to: &CudaMemory,
        at: u64,
    ) -> Result<(), EngineError> {
        let mut done = range.start;
        while done < range.end {
            let end = range.end.min(done + PART - self.under_way);
            let to_offset = at + done - range.start;
            from.copy_plain(done..end, to, to_offset, self.is_cancelled)?;
            self.under_way += end - done;
            done = end;
            if self.under_way == PART {
                // The device works in order: a read comes after the copies.
                to.fetch(to_offset, 0..1)?;
                self.under_way = 0;
                self.check()?;
            }
        }
        Ok(())
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

    /// The locks of repacked tensors and of the allocator are taken under this one, and never the
    /// other way round.
    fn state(&self) -> Guard<'_, Pieces> {
        lock_at(Rank::Weights, &self.state)
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

    /// New memory for `len` bytes of the buffer, of which `reserved` are taken from its reservation
    /// as far as that goes.
    fn alloc(
        &self,
        state: &mut Pieces,
        len: u64,
        reserved: u64,
    ) -> Result<CudaMemory, EngineError> {
        let from = match reserved {
            0 => 0,
            reserved => state.reserved.min(self.allocator.allocation_size(reserved)),
        };
        let memory = CudaMemory::from_reserved(&self.allocator, len, from)?;
        state.reserved -= from;
        memory.mark_weights();
        Ok(memory)
    }

    /// Reserves memory again that a copy has taken from the reservation, and that is free since the
    /// copied bytes are.
    fn reserve_again(&self, state: &mut Pieces) {
        if !state.is_frozen {
            let all = self.allocator.allocation_size(self.size);
            self.reserve_up_to(state, all.saturating_sub(state.bytes));
        }
    }

    /// Gives up what is reserved for bytes that have pieces now: those that were attached.
    fn give_up_attached(&self, state: &mut Pieces) {
        let all = self.allocator.allocation_size(self.size);
        let needed = all.saturating_sub(state.bytes);
        let surplus = state.reserved.saturating_sub(needed);
        self.allocator.give_up(surplus);
        state.reserved -= surplus;
    }

    /// Makes the reservation at least this large.
    fn reserve_up_to(&self, state: &mut Pieces, bytes: u64) {
        let more = bytes.saturating_sub(state.reserved);
        self.allocator.reserve(more);
        state.reserved += more;
    }

    /// A copy in ggml's format of `range` of the buffer, as one allocation. What no piece has is
    /// zero.
    fn gathered(
        &self,
        state: &mut Pieces,
        range: &Range<u64>,
        copies: &mut Copies<'_>,
    ) -> Result<CudaMemory, EngineError> {
        copies.check()?;
        let met = state.meeting(range);
        let inside = |start: u64, piece: &CudaExtent| {
            (
                start.max(range.start),
                (start + piece.size()).min(range.end),
            )
        };
        // What other buffers hold does not become free, so nothing is reserved for a copy of it.
        let of_others = { met.iter() }
            .filter(|(_, piece)| piece.memory.is_shared())
            .map(|(start, piece)| inside(*start, piece))
            .map(|(from, until)| until - from);
        let len = range.end - range.start;
        let new = self.alloc(state, len, len - of_others.sum::<u64>())?;
        for (start, piece) in met {
            let (from, until) = inside(start, &piece);
            let part = (from - start)..(until - start);
            copies.copy(&piece.memory, part, &new, from - range.start)?;
        }
        Ok(new)
    }

    /// Removes the pieces with bytes in `range`. What they have beside the range is copied to new
    /// pieces. If that fails, nothing has changed.
    fn remove(
        &self,
        state: &mut Pieces,
        range: &Range<u64>,
        copies: &mut Copies<'_>,
    ) -> Result<(), EngineError> {
        let met = state.meeting(range);
        let mut beside = Vec::new();
        for (start, piece) in &met {
            let end = start + piece.size();
            for part in [*start..range.start, range.end..end] {
                if part.start < part.end {
                    beside.push((part.start, self.gathered(state, &part, copies)?));
                }
            }
        }
        for (start, _) in &met {
            state.remove(*start);
        }
        for (start, memory) in beside {
            state.insert(start, HeldPiece::whole(memory));
        }
        if !met.is_empty() {
            self.has_changed();
        }
        Ok(())
    }

    /// Moves the bytes of `range` to one piece of this buffer alone. What the pieces there have
    /// beside the range gets pieces of its own. If that fails, nothing has changed.
    fn gather(
        &self,
        state: &mut Pieces,
        range: &Range<u64>,
        copies: &mut Copies<'_>,
    ) -> Result<(), EngineError> {
        let reserved = state.reserved;
        let gathered = self.gathered(state, range, copies);
        let gathered = gathered.and_then(|memory| {
            self.remove(state, range, copies)?;
            state.insert(range.start, HeldPiece::whole(memory));
            self.has_changed();
            Ok(())
        });
        match gathered {
            Ok(()) => self.reserve_again(state),
            Err(_) => self.reserve_up_to(state, reserved),
        }
        gathered
    }

    /// Gives this buffer pieces of its own for all bytes of `range` that others may read.
    fn own(
        &self,
        state: &mut Pieces,
        range: &Range<u64>,
        copies: &mut Copies<'_>,
    ) -> Result<(), EngineError> {
        let starts: Vec<u64> = { state.meeting(range).into_iter() }
            .map(|(start, _)| start)
            .collect();
        for start in starts {
            copies.check()?;
            let Some(held) = state.remove(start) else {
                continue;
            };
            let from = held.piece().written_from;
            match held.into_memory() {
                // A piece that is written ends as an extent.
                Ok(memory) => {
                    let from = from.min(range.start.saturating_sub(start));
                    state.insert(start, HeldPiece::written(memory, from));
                }
                Err(held) => {
                    let range = start..start + held.piece().size();
                    state.insert(start, held);
                    self.gather(state, &range, copies)?;
                }
            }
        }
        Ok(())
    }

    /// Gives all bytes of `range` pieces. New ones are zero.
    fn fill_gaps(&self, state: &mut Pieces, range: &Range<u64>) -> Result<(), EngineError> {
        for (part, gap) in state.gaps(range, self.size) {
            let unit = match state.pieces.len() {
                0..MANY_PIECES => ALIGN,
                MANY_PIECES..MAX_PIECES => (self.size / MANY_PIECES as u64)
                    .next_multiple_of(ALIGN)
                    .max(ALIGN),
                // The end of the gap is nearer.
                _ => 1 << 63,
            };
            // A tensor at a multiple of `ALIGN` without a piece gets one that begins at a multiple.
            let first = gap.start.next_multiple_of(ALIGN).min(part.start);
            let start = first.max(part.start / unit * unit);
            let end = part.end.checked_next_multiple_of(unit);
            let end = end.map_or(gap.end, |end| end.min(gap.end));
            let memory = self.alloc(state, end - start, end - start)?;
            state.insert(start, HeldPiece::written(memory, part.start - start));
        }
        Ok(())
    }

    /// Gives this buffer pieces of its own for all bytes of `range`, which are written next.
    fn prepare_write(
        &self,
        state: &mut Pieces,
        range: &Range<u64>,
        copies: &mut Copies<'_>,
    ) -> Result<(), EngineError> {
        self.own(state, range, copies)?;
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
        self.prepare_write(&mut state, &range, &mut Copies::new(&|| false))?;
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

    /// For each range the piece that has all of its bytes, and the first byte of the piece in the
    /// buffer. Bytes in several pieces move to one, and nothing moves twice. For bytes that a plan
    /// writes, the piece belongs to this buffer alone. The places are valid until
    /// [`changes`](WeightMemory::changes) changes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`]; [`EngineError::Cancelled`] once `is_cancelled` has returned
    /// `true`; [`EngineError`] of the device.
    pub(crate) fn locate(
        &self,
        ranges: &UsedRanges,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<(u64, Arc<CudaExtent>)>, EngineError> {
        let mut state = self.state();
        let mut copies = Copies::new(is_cancelled);
        // Each range adds three pieces at most.
        let is_many = state.pieces.len() + 3 * ranges.0.len() > MAX_PIECES;
        let whole = UsedRange {
            bytes: 0..self.size,
            is_written: ranges.0.iter().any(|it| it.is_written),
        };
        for it in if is_many { from_ref(&whole) } else { &ranges.0 } {
            let bytes = it.bytes.clone();
            check_range(bytes.start, bytes.end - bytes.start, self.size)?;
            let met = state.meeting(&bytes);
            let has_all = match &met[..] {
                [] => true,
                [(start, piece)] => {
                    let is_inside = *start <= bytes.start && bytes.end <= start + piece.size();
                    is_inside && start.is_multiple_of(ALIGN)
                }
                _ => false,
            };
            drop(met);
            match (has_all, it.is_written) {
                (true, true) => self.prepare_write(&mut state, &bytes, &mut copies)?,
                (true, false) => self.fill_gaps(&mut state, &bytes)?,
                (false, is_written) => {
                    // What comes behind begins at a multiple as well.
                    let end = bytes.end.next_multiple_of(ALIGN).min(self.size);
                    self.gather(&mut state, &(bytes.start..end), &mut copies)?;
                    state.is_modified |= is_written && state.is_frozen;
                }
            }
        }
        let one = |it: &UsedRange| {
            let met = state.meeting(&it.bytes).pop();
            met.ok_or_else(|| self.no_extent(&it.bytes))
        };
        ranges.0.iter().map(one).collect()
    }

    /// Gives this buffer a copy of the piece at `start`, in ggml's format.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`]; [`EngineError::Cancelled`] once `is_cancelled` has returned
    /// `true`; or what the device reports.
    pub(crate) fn copy_piece(
        &self,
        start: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        let mut state = self.state();
        let Some(held) = state.pieces.get(&start) else {
            return Ok(());
        };
        let range = start..start + held.piece().size();
        self.gather(&mut state, &range, &mut Copies::new(is_cancelled))
    }

    /// Whether pieces larger than [`MAX_CUT`] lie only partly in `range`.
    fn cuts_large(met: &[(u64, Arc<CudaExtent>)], range: &Range<u64>) -> bool {
        let is_cut = |(start, piece): &(u64, Arc<CudaExtent>)| {
            let is_inside = range.start <= *start && start + piece.size() <= range.end;
            !is_inside && piece.size() > MAX_CUT
        };
        met.iter().any(is_cut)
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
            let part = part.start - start..part.end - start;
            piece.memory.copy_plain(part, dst, at, &|| false)?;
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
        if std::mem::replace(&mut state.is_frozen, true) {
            return true;
        }
        // Plans that write were compiled when no other buffer could hold the pieces.
        self.has_changed();
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
        if !state.is_frozen || state.is_modified {
            return Err(self.no_extent(&range));
        }
        // A plan that writes to the piece was compiled when no one else held it.
        self.has_changed();
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
        let is_fixed = met.iter().any(is_shared) || Self::cuts_large(&met, &range);
        // Repacked bytes would be copied through the host.
        let is_repacked = |(start, piece): &(u64, Arc<CudaExtent>)| {
            let part = range.start.saturating_sub(*start)..range.end - start;
            !piece
                .memory
                .repack_state()
                .state()
                .meeting(&part)
                .is_empty()
        };
        if !is_here || has_gaps || is_fixed || met.iter().any(is_repacked) {
            return Err(self.no_extent(&range));
        }
        drop(met);
        self.gather(&mut state, &range, &mut Copies::new(&|| false))?;
        let held = state.pieces.get(&offset);
        let held = held.ok_or_else(|| self.no_extent(&range))?;
        Ok(Arc::clone(held.piece()) as Arc<dyn Extent>)
    }

    fn begin_extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size)?;
        let range = offset..offset + len;
        let mut state = self.state();
        let is_shared = |(_, piece): &(u64, Arc<CudaExtent>)| piece.memory.is_shared();
        let met = state.meeting(&range);
        let is_here = len > 0 && offset.is_multiple_of(ALIGN) && !state.is_frozen;
        let is_fixed = met.iter().any(is_shared) || Self::cuts_large(&met, &range);
        // The guest may not write these bytes again.
        let is_written = |(start, piece): &(u64, Arc<CudaExtent>)| {
            let written = start + piece.written_from..start + piece.filled();
            written.start < written.end.min(range.end) && written.end > range.start
        };
        let is_possible = is_here && !is_fixed && !met.iter().any(is_written);
        if !is_possible || state.pieces.len() >= MAX_PIECES {
            return Err(self.no_extent(&range));
        }
        drop(met);
        let reserved = state.reserved;
        let memory = self.alloc(&mut state, len, len);
        let begun = memory.and_then(|memory| {
            self.remove(&mut state, &range, &mut Copies::new(&|| false))?;
            let extent = Arc::new(CudaExtent {
                memory,
                filled: AtomicU64::new(0),
                written_from: 0,
            });
            state.insert(offset, HeldPiece::new(Arc::clone(&extent)));
            self.has_changed();
            Ok(extent as Arc<dyn Extent>)
        });
        match begun {
            Ok(_) => self.reserve_again(&mut state),
            Err(_) => self.reserve_up_to(&mut state, reserved),
        }
        begun
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
        self.state().bytes
    }

    fn unshare(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        let mut copies = Copies::new(is_cancelled);
        self.own(&mut self.state(), &(offset..offset + len), &mut copies)
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
        let mut copies = Copies::new(is_cancelled);
        copies.check()?;
        let range = offset..offset + len;
        let mut state = self.state();
        let met = state.meeting(&range);
        if !Self::cuts_large(&met, &range) && state.pieces.len() < MAX_PIECES {
            drop(met);
            let reserved = state.reserved;
            // Copies of cut ends take from the reservation, and what they replace becomes free.
            if let Err(error) = self.remove(&mut state, &range, &mut copies) {
                self.reserve_up_to(&mut state, reserved);
                return Err(error);
            }
            state.insert(offset, HeldPiece::new(extent));
            self.reserve_again(&mut state);
            self.give_up_attached(&mut state);
            self.has_changed();
            return Ok(len);
        }
        drop(met);
        // The bytes are copied instead, which are fewer than what lies beside them. Memory that is
        // frozen has them already.
        if !state.is_frozen {
            self.prepare_write(&mut state, &range, &mut copies)?;
            for (start, piece) in state.meeting(&range) {
                let part = start.max(offset)..(start + piece.size()).min(range.end);
                let to = part.start - start;
                piece.memory.before_write(&(to..part.end - start))?;
                let from = part.start - offset..part.end - offset;
                copies.copy(&extent.memory, from, &piece.memory, to)?;
            }
            self.has_changed();
        }
        Ok(0)
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
