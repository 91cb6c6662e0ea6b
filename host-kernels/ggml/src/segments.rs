//! The bytes of a buffer for weights, which other buffers can hold too.
//!
//! A *segment* is a part of a buffer with a buffer of the backend to itself. A byte that was never
//! written has no segment and reads as zero. An extent is a whole segment, so memory that attaches
//! an extent holds the segment of another one, and plans read the tensor there. The last holder
//! frees it. Segments of one memory are disjoint.
//!
//! A segment that several memories hold does not change. Memory that writes to it gets a copy in
//! its place.
//!
//! Until the memory is frozen, the [`Allocator`]'s bytes for what has no segment are reserved.

use std::any::Any;
use std::collections::BTreeMap;
use std::iter::once;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_engine::{EngineError, Extent, check_range};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{self, Guard, LockRank, lock_at};

use crate::allocator::{Allocator, Reservation, allocation_size};
use crate::buffer::DeviceBuffer;
use crate::copies::SharedCopies;

/// The alignment of tensors. A segment begins at a multiple of it in its memory, or is moved before
/// a plan uses it, so that tensors are aligned as in one buffer.
const ALIGN: u64 = 256;

/// The segments of a memory from which on a write fills whole gaps, and no extent begins.
const MAX_SEGMENTS: usize = 4096;

/// Bytes that are copied at a time.
const CHUNK: usize = 1 << 20;

/// Chunks that are copied between two questions whether the copy is cancelled: 4 MiB.
const CHUNKS_AT_ONCE: usize = 4;

/// Zeros to read at a time.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The bytes that are reserved for what the buffers of segments take besides their segments.
fn spare(size: u64) -> u64 {
    size / 256 + (64 << 10)
}

/// What the buffers of segments take besides their segments from which on a write fills whole gaps,
/// and no extent begins. As many extents as fit, of at least 64 KiB, take less.
fn max_overhead(size: u64) -> u64 {
    size / 8 + (64 << 10)
}

/// The rank of the segments of a memory. Copies are made under this lock, and the executor is asked
/// whether they are still wanted.
#[derive(Debug, Clone, Copy)]
struct SegmentsRank;

impl LockRank for SegmentsRank {
    fn level(self) -> usize {
        lock::CHARGING
    }
}

/// A segment, which several memories can hold.
pub(crate) struct GgmlExtent {
    buffer: Arc<DeviceBuffer>,
    /// The first byte in the memory that has made it.
    made_at: u64,
    filled: AtomicU64,
    copies: SharedCopies,
}

impl GgmlExtent {
    /// A segment of which so many bytes are there.
    fn new(buffer: Arc<DeviceBuffer>, made_at: u64, filled: u64) -> Arc<GgmlExtent> {
        Arc::new(GgmlExtent {
            buffer,
            made_at,
            filled: AtomicU64::new(filled),
            copies: SharedCopies::default(),
        })
    }

    /// Where the bytes are.
    pub(crate) fn buffer(&self) -> &Arc<DeviceBuffer> {
        &self.buffer
    }

    /// The copies of its weights in other layouts.
    pub(crate) fn copies(&self) -> &SharedCopies {
        &self.copies
    }
}

impl Extent for GgmlExtent {
    fn size(&self) -> u64 {
        self.buffer.size()
    }

    fn filled(&self) -> u64 {
        // Pairs with the release in `append`: the bytes are there.
        self.filled.load(Ordering::Acquire)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), EngineError> {
        check_range(offset, out.len() as u64, self.filled())?;
        self.buffer.read(offset, out.into())
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// The segments of a memory by their first byte, disjoint.
struct Segments {
    table: BTreeMap<u64, Arc<GgmlExtent>>,
    /// The bytes of all segments.
    bytes: u64,
    /// What their buffers take besides.
    overhead: u64,
    reserved: Reservation,
    is_frozen: bool,
    /// Whether the bytes were written after the memory was frozen.
    is_modified: bool,
}

/// What the buffer of a segment of so many bytes takes besides.
fn overhead(len: u64) -> u64 {
    allocation_size(len) - len
}

impl Segments {
    fn insert(&mut self, start: u64, extent: Arc<GgmlExtent>) {
        self.bytes += extent.size();
        self.overhead += overhead(extent.size());
        self.table.insert(start, extent);
    }

    fn remove(&mut self, start: u64) -> Option<Arc<GgmlExtent>> {
        let extent = self.table.remove(&start)?;
        self.bytes -= extent.size();
        self.overhead -= overhead(extent.size());
        Some(extent)
    }

    /// The spans of the segments with bytes in `range`, in order.
    fn meeting(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.table.range(..range.start).next_back();
        { before.into_iter() }
            .chain(self.table.range(range.clone()))
            .map(|(&start, extent)| start..start + extent.size())
            .filter(|span| span.end > range.start)
            .collect()
    }

    /// Whether another memory, or its guest, has the segment that begins here.
    fn is_shared(&self, start: u64) -> bool {
        let extent = self.table.get(&start);
        extent.is_some_and(|extent| Arc::strong_count(extent) > 1)
    }

    /// Whether so many segments are there that their buffers take too much besides.
    fn is_crowded(&self, size: u64) -> bool {
        self.table.len() >= MAX_SEGMENTS || self.overhead > max_overhead(size)
    }

    /// The parts of `range` that no segment has, each with the whole gap that it lies in, in a
    /// memory of `size` bytes.
    fn gaps(&self, range: &Range<u64>, size: u64) -> Vec<(Range<u64>, Range<u64>)> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        let ends = self.meeting(range).into_iter();
        for span in ends.chain(once(range.end..range.end)) {
            if at < span.start {
                let before = self.table.range(..=at).next_back();
                let from = before.map_or(0, |(from, extent)| from + extent.size());
                let behind = self.table.range(at..).next();
                let until = behind.map_or(size, |(until, _)| *until);
                gaps.push((at..span.start, from..until));
            }
            at = at.max(span.end);
        }
        gaps
    }

    /// The bytes from an aligned first one to a last one that contain `bytes` and no segment in
    /// part.
    fn whole(&self, bytes: &Range<u64>) -> Range<u64> {
        let met = self.meeting(bytes);
        let end = met.last().map_or(bytes.end, |last| bytes.end.max(last.end));
        let mut start = bytes.start;
        loop {
            let aligned = start / ALIGN * ALIGN;
            let met = self.meeting(&(aligned..aligned + 1));
            let first = met.first().map_or(aligned, |span| span.start.min(aligned));
            if first == start {
                return start..end;
            }
            start = first;
        }
    }
}

/// The bytes of a memory that a graph uses.
#[derive(Debug, Clone, PartialEq, Eq)]
struct UsedRange {
    bytes: Range<u64>,
    is_written: bool,
}

/// The bytes of a memory that a graph uses, disjoint and in order: what overlaps is one range.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct UsedRanges(Vec<UsedRange>);

impl UsedRanges {
    /// Adds bytes. [`join`](UsedRanges::join) has to follow.
    pub(crate) fn add(&mut self, bytes: Range<u64>, is_written: bool) {
        self.0.push(UsedRange { bytes, is_written });
    }

    /// Makes one range of those that overlap.
    pub(crate) fn join(&mut self) {
        self.0.sort_unstable_by_key(|it| it.bytes.start);
        self.0.dedup_by(|next, last| {
            let overlaps = next.bytes.start < last.bytes.end;
            if overlaps {
                last.bytes.end = last.bytes.end.max(next.bytes.end);
                last.is_written |= next.is_written;
            }
            overlaps
        });
    }

    /// The index of the range that has the byte at `offset`.
    pub(crate) fn find(&self, offset: u64) -> usize {
        let behind = self.0.partition_point(|it| it.bytes.start <= offset);
        behind.saturating_sub(1)
    }
}

/// A segment of a memory.
pub(crate) struct LocatedSegment {
    /// Its first byte in the memory.
    pub(crate) start: u64,
    pub(crate) extent: Arc<GgmlExtent>,
}

/// Bytes that no segment has in part.
struct UsedSegments {
    bytes: Range<u64>,
    is_written: bool,
    /// Whether they have to move to one segment.
    moves: bool,
}

/// The memory of a buffer for weights.
pub(crate) struct SegmentedMemory {
    allocator: Arc<Allocator>,
    size: u64,
    /// How often plans that were compiled before became stale.
    changes: AtomicU64,
    state: Mutex<Segments>,
}

impl SegmentedMemory {
    /// Zero bytes, as many as `instead` has, whose reservation is taken over.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if there is not enough for what segments take besides their
    /// bytes. `instead` is as before.
    pub(crate) fn new(instead: &DeviceBuffer) -> Result<SegmentedMemory, EngineError> {
        let (allocator, size) = (instead.allocator(), instead.size());
        let more = allocator.reserve(spare(size));
        let mut reserved = more.ok_or_else(|| allocator.refusal(spare(size)))?;
        reserved.join(instead.take_reservation());
        Ok(SegmentedMemory {
            allocator: Arc::clone(allocator),
            size,
            changes: AtomicU64::new(0),
            state: Mutex::new(Segments {
                table: BTreeMap::new(),
                bytes: 0,
                overhead: 0,
                reserved,
                is_frozen: false,
                is_modified: false,
            }),
        })
    }

    fn state(&self) -> Guard<'_, Segments> {
        lock_at(SegmentsRank, &self.state)
    }

    /// Size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// What the memory belongs to.
    pub(crate) fn allocator(&self) -> &Arc<Allocator> {
        &self.allocator
    }

    /// A number that changes whenever the place of bytes changes.
    pub(crate) fn changes(&self) -> u64 {
        // Relaxed: the caller orders compilations, runs and changes.
        self.changes.load(Ordering::Relaxed)
    }

    /// Makes plans that were compiled before stale.
    fn has_changed(&self) {
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

    /// A zeroed buffer for `len` bytes, of which `own` have no segment, or one that this memory
    /// gives up: these come from the reservation as far as that goes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    fn alloc(&self, state: &mut Segments, len: u64, own: u64) -> Result<DeviceBuffer, EngineError> {
        let wanted = allocation_size(len);
        let mut reserved = state.reserved.split(match own == len {
            true => wanted,
            false => own,
        });
        match self.allocator.reserve(wanted - reserved.bytes()) {
            Some(more) => reserved.join(more),
            None => {
                state.reserved.join(reserved);
                return Err(self.allocator.refusal(len));
            }
        }
        DeviceBuffer::with_reserved(&self.allocator, len, reserved)
    }

    /// Frees a buffer, unless others have it. Its reservation is this memory's then.
    fn free(state: &mut Segments, buffer: Arc<DeviceBuffer>) {
        if let Ok(buffer) = Arc::try_unwrap(buffer) {
            let reserved = buffer.take_reservation();
            drop(buffer);
            state.reserved.join(reserved);
        }
    }

    /// Removes the segment that begins here.
    fn remove(state: &mut Segments, start: u64) {
        let extent = state.remove(start).map(Arc::try_unwrap);
        if let Some(Ok(extent)) = extent {
            SegmentedMemory::free(state, extent.buffer);
        }
    }

    /// Reserves what the bytes without a segment take, and gives up the rest.
    fn settle(&self, state: &mut Segments) {
        let needed = match state.is_frozen {
            true => 0,
            false => self.size - state.bytes + spare(self.size).saturating_sub(state.overhead),
        };
        let reserved = state.reserved.bytes();
        if reserved > needed {
            drop(state.reserved.split(reserved - needed));
        } else if let Some(more) = self.allocator.reserve(needed - reserved) {
            state.reserved.join(more);
        }
    }

    /// Moves `bytes`, which contain no segment in part, to one segment of this memory alone. If
    /// that fails, nothing has changed.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`], [`EngineError::Cancelled`], and [`EngineError`] of the device.
    fn gather(
        &self,
        state: &mut Segments,
        bytes: &Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        if is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        let met = state.meeting(bytes);
        let shared = met.iter().filter(|span| state.is_shared(span.start));
        let shared: u64 = shared.map(|span| span.end - span.start).sum();
        let len = bytes.end - bytes.start;
        let new = self.alloc(state, len, len - shared);
        let outcome = new.and_then(|new| {
            let mut copied = Ok(());
            for span in &met {
                if let Some(extent) = state.table.get(&span.start) {
                    let to = span.start - bytes.start;
                    copied = copied.and_then(|()| copy(&extent.buffer, &new, to, is_cancelled));
                }
            }
            match copied {
                Ok(()) => Ok(new),
                Err(error) => {
                    SegmentedMemory::free(state, Arc::new(new));
                    Err(error)
                }
            }
        });
        let outcome = outcome.map(|new| {
            for span in &met {
                SegmentedMemory::remove(state, span.start);
            }
            state.insert(
                bytes.start,
                GgmlExtent::new(Arc::new(new), bytes.start, len),
            );
            self.has_changed();
        });
        self.settle(state);
        outcome
    }

    /// Gives this memory segments of its own for all bytes of `range` that others may read.
    ///
    /// # Errors
    /// As [`gather`](SegmentedMemory::gather).
    fn own(
        &self,
        state: &mut Segments,
        range: &Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        for span in state.meeting(range) {
            let Some(extent) = state.remove(span.start) else {
                continue;
            };
            match Arc::try_unwrap(extent) {
                // A segment that is written ends as an extent, and its copies with it.
                Ok(GgmlExtent { buffer, .. }) => {
                    let len = span.end - span.start;
                    state.insert(span.start, GgmlExtent::new(buffer, span.start, len));
                }
                Err(extent) => {
                    state.insert(span.start, extent);
                    self.gather(state, &span, is_cancelled)?;
                }
            }
        }
        Ok(())
    }

    /// Gives all bytes of `range` segments. New ones are zero. If that fails, there is no new one.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    fn fill_gaps(&self, state: &mut Segments, range: &Range<u64>) -> Result<(), EngineError> {
        let mut new = Vec::new();
        let mut outcome = Ok(());
        for (part, gap) in state.gaps(range, self.size) {
            let bytes = match state.is_crowded(self.size) {
                true => gap,
                false => {
                    let end = part.end.next_multiple_of(ALIGN).min(gap.end);
                    gap.start.max(part.start / ALIGN * ALIGN)..end
                }
            };
            let len = bytes.end - bytes.start;
            match self.alloc(state, len, len) {
                Ok(buffer) => new.push((bytes, Arc::new(buffer))),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        for (bytes, buffer) in new {
            match outcome {
                Ok(()) => {
                    let len = bytes.end - bytes.start;
                    state.insert(bytes.start, GgmlExtent::new(buffer, bytes.start, len));
                }
                Err(_) => SegmentedMemory::free(state, buffer),
            }
        }
        self.settle(state);
        outcome
    }

    /// Gives this memory segments of its own for all bytes of `range`, which are written next.
    ///
    /// # Errors
    /// As [`gather`](SegmentedMemory::gather).
    fn prepare_write(
        &self,
        state: &mut Segments,
        range: &Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        self.own(state, range, is_cancelled)?;
        self.fill_gaps(state, range)?;
        state.is_modified |= state.is_frozen && !range.is_empty();
        Ok(())
    }

    /// Writes to each part of `range`: calls `write` with a buffer, the offset in it, and the part.
    ///
    /// # Errors
    /// As [`gather`](SegmentedMemory::gather), and those of `write`.
    fn each_written(
        &self,
        range: &Range<u64>,
        mut write: impl FnMut(&DeviceBuffer, u64, Range<u64>) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let mut state = self.state();
        self.prepare_write(&mut state, range, &|| false)?;
        for span in state.meeting(range) {
            let part = span.start.max(range.start)..span.end.min(range.end);
            if let Some(extent) = state.table.get(&span.start) {
                write(&extent.buffer, part.start - span.start, part)?;
            }
        }
        Ok(())
    }

    /// For each range the segment that has all of its bytes, and its first byte in this memory; and
    /// the [`changes`](SegmentedMemory::changes) as long as that is so. Bytes in several segments
    /// move to one, and nothing moves twice. For bytes that a plan writes, the segment belongs to
    /// this memory alone.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`]; [`EngineError::Cancelled`] once `is_cancelled` has returned
    /// `true`; [`EngineError`] of the device.
    pub(crate) fn locate(
        &self,
        used: &UsedRanges,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(Vec<LocatedSegment>, u64), EngineError> {
        let mut state = self.state();
        let mut all: Vec<UsedSegments> = Vec::new();
        for UsedRange { bytes, is_written } in &used.0 {
            check_range(bytes.start, bytes.end - bytes.start, self.size)?;
            let mut whole = state.whole(bytes);
            let moves = state.meeting(&whole) != [whole.clone()];
            if moves {
                // What comes behind begins at a multiple as well.
                let behind = state.table.range(whole.end..).next();
                let limit = behind.map_or(self.size, |(&start, _)| start);
                whole.end = whole.end.next_multiple_of(ALIGN).min(limit);
            }
            match all.last_mut() {
                Some(last) if whole.start < last.bytes.end => {
                    last.bytes.end = last.bytes.end.max(whole.end);
                    last.is_written |= is_written;
                    last.moves |= moves;
                }
                _ => all.push(UsedSegments {
                    bytes: whole,
                    is_written: *is_written,
                    moves,
                }),
            }
        }
        for it in &all {
            match (it.moves, it.is_written) {
                (true, _) => self.gather(&mut state, &it.bytes, is_cancelled)?,
                (false, true) => self.own(&mut state, &it.bytes, is_cancelled)?,
                (false, false) => {}
            }
            state.is_modified |= it.is_written && state.is_frozen;
        }
        let one = |it: &UsedRange| {
            let found = state.table.range(..=it.bytes.start).next_back();
            let found = found.filter(|(start, extent)| *start + extent.size() >= it.bytes.end);
            let (&start, extent) = found.ok_or_else(|| self.no_extent(&it.bytes))?;
            let extent = Arc::clone(extent);
            Ok(LocatedSegment { start, extent })
        };
        let found = used.0.iter().map(one).collect::<Result<_, EngineError>>()?;
        Ok((found, self.changes()))
    }

    /// As [`Memory::write`](vgpu_engine::Memory::write).
    ///
    /// # Errors
    /// As there.
    pub(crate) fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        let len = data.len() as u64;
        check_range(offset, len, self.size)?;
        let mut rest = data;
        self.each_written(&(offset..offset + len), |buffer, at, part| {
            let (here, behind) = rest.split_at((part.end - part.start) as usize);
            rest = behind;
            buffer.write(at, here)
        })
    }

    /// As [`Memory::read`](vgpu_engine::Memory::read).
    ///
    /// # Errors
    /// As there.
    pub(crate) fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        check_range(offset, out.len() as u64, self.size)?;
        let end = offset + out.len() as u64;
        let state = self.state();
        let (mut at, mut rest) = (offset, out);
        let met = state.meeting(&(offset..end)).into_iter();
        for span in met.chain(once(end..end)) {
            while at < span.start {
                let len = (span.start - at).min(ZEROS.len() as u64) as usize;
                let (mut zeros, behind) = rest.split_at(len);
                zeros.copy_from(Bytes::from(&ZEROS[..len]));
                (at, rest) = (at + len as u64, behind);
            }
            let Some(extent) = state.table.get(&span.start) else {
                break;
            };
            let until = span.end.min(end);
            let (here, behind) = rest.split_at((until - at) as usize);
            extent.buffer.read(at - span.start, here)?;
            (at, rest) = (until, behind);
        }
        Ok(())
    }

    /// As [`Memory::fill`](vgpu_engine::Memory::fill).
    ///
    /// # Errors
    /// As there.
    pub(crate) fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        self.each_written(&(offset..offset + len), |buffer, at, part| {
            buffer.fill(at, part.end - part.start, value)
        })
    }

    /// As [`Memory::freeze`](vgpu_engine::Memory::freeze).
    pub(crate) fn freeze(&self) {
        let mut state = self.state();
        if std::mem::replace(&mut state.is_frozen, true) {
            return;
        }
        // Plans that write were compiled when no other memory could hold the segments.
        self.has_changed();
        // What is not complete now never will be.
        for extent in state.table.values() {
            extent.filled.store(extent.size(), Ordering::Release);
        }
        self.settle(&mut state);
    }

    /// As [`Memory::extent`](vgpu_engine::Memory::extent).
    ///
    /// # Errors
    /// As there.
    pub(crate) fn extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size)?;
        let range = offset..offset + len;
        let mut state = self.state();
        if !state.is_frozen || state.is_modified || len == 0 {
            return Err(self.no_extent(&range));
        }
        let met = state.meeting(&range);
        if met != [range.clone()] {
            let is_inside = |span: &Range<u64>| range.start <= span.start && span.end <= range.end;
            let is_free = |span: &Range<u64>| is_inside(span) && !state.is_shared(span.start);
            let has_gaps = !state.gaps(&range, self.size).is_empty();
            if !offset.is_multiple_of(ALIGN) || has_gaps || !met.iter().all(is_free) {
                return Err(self.no_extent(&range));
            }
            self.gather(&mut state, &range, &|| false)?;
        }
        // A plan that writes to the segment was compiled when no one else held it.
        self.has_changed();
        let extent = state.table.get(&offset);
        let extent = extent.filter(|extent| extent.filled() == len);
        let extent = extent.ok_or_else(|| self.no_extent(&range))?;
        Ok(Arc::clone(extent) as Arc<dyn Extent>)
    }

    /// As [`Memory::begin_extent`](vgpu_engine::Memory::begin_extent). Also refuses a range that
    /// cuts a segment.
    ///
    /// # Errors
    /// As there, and [`EngineError::OutOfMemory`].
    pub(crate) fn begin_extent(
        &self,
        offset: u64,
        len: u64,
    ) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size)?;
        let range = offset..offset + len;
        let mut state = self.state();
        let met = state.meeting(&range);
        let is_inside = |span: &Range<u64>| range.start <= span.start && span.end <= range.end;
        let is_free = |span: &Range<u64>| is_inside(span) && !state.is_shared(span.start);
        let is_here = len > 0 && offset.is_multiple_of(ALIGN) && !state.is_frozen;
        if !is_here || state.is_crowded(self.size) || !met.iter().all(is_free) {
            return Err(self.no_extent(&range));
        }
        let begun = self.alloc(&mut state, len, len).map(|buffer| {
            for span in &met {
                SegmentedMemory::remove(&mut state, span.start);
            }
            let extent = GgmlExtent::new(Arc::new(buffer), offset, 0);
            state.insert(offset, Arc::clone(&extent));
            self.has_changed();
            extent as Arc<dyn Extent>
        });
        self.settle(&mut state);
        begun
    }

    /// As [`Memory::append`](vgpu_engine::Memory::append). Returns where the bytes are in this
    /// memory.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn append(
        &self,
        extent: &Arc<dyn Extent>,
        data: Bytes<'_>,
    ) -> Result<Range<u64>, EngineError> {
        let extent = of_this_engine(extent)?;
        let state = self.state();
        let ours = state.table.get(&extent.made_at);
        let (filled, len) = (extent.filled(), data.len() as u64);
        if state.is_frozen || !ours.is_some_and(|ours| Arc::ptr_eq(ours, &extent)) {
            return Err(EngineError::OutOfBounds {
                offset: filled,
                len,
                size: filled,
            });
        }
        check_range(filled, len, extent.size())?;
        extent.buffer.write(filled, data)?;
        // Pairs with the acquire in `filled`.
        extent.filled.store(filled + len, Ordering::Release);
        let start = extent.made_at + filled;
        Ok(start..start + len)
    }

    /// As [`Memory::is_untouched`](vgpu_engine::Memory::is_untouched).
    pub(crate) fn is_untouched(&self, offset: u64, len: u64) -> bool {
        let range = offset..offset.saturating_add(len);
        self.state().meeting(&range).is_empty()
    }

    /// As [`Memory::bytes_in_use`](vgpu_engine::Memory::bytes_in_use).
    pub(crate) fn bytes_in_use(&self) -> u64 {
        self.state().bytes
    }

    /// As [`Memory::unshare`](vgpu_engine::Memory::unshare).
    ///
    /// # Errors
    /// As there.
    pub(crate) fn unshare(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        self.own(&mut self.state(), &(offset..offset + len), is_cancelled)
    }

    /// As [`Memory::attach`](vgpu_engine::Memory::attach). A range that cuts a segment is copied.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn attach(
        &self,
        offset: u64,
        extent: &Arc<dyn Extent>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, EngineError> {
        let extent = of_this_engine(extent)?;
        if !Arc::ptr_eq(extent.buffer.allocator(), &self.allocator) {
            return Err(EngineError::ForeignMemory);
        }
        let len = extent.size();
        check_range(offset, len, self.size)?;
        check_range(0, len, extent.filled())?;
        let range = offset..offset + len;
        let mut state = self.state();
        let met = state.meeting(&range);
        let is_inside = |span: &Range<u64>| range.start <= span.start && span.end <= range.end;
        if met.iter().all(is_inside) && !state.is_crowded(self.size) && len > 0 {
            for span in &met {
                SegmentedMemory::remove(&mut state, span.start);
            }
            state.insert(offset, extent);
            self.has_changed();
            self.settle(&mut state);
            return Ok(len);
        }
        // Memory that is frozen has the bytes already.
        if !state.is_frozen {
            self.prepare_write(&mut state, &range, is_cancelled)?;
            let mut chunk = vec![0; CHUNK.min(len as usize)];
            for span in state.meeting(&range) {
                let part = span.start.max(offset)..span.end.min(range.end);
                let Some(to) = state.table.get(&span.start) else {
                    continue;
                };
                for at in part.clone().step_by(CHUNK) {
                    let chunk = &mut chunk[..CHUNK.min((part.end - at) as usize)];
                    extent
                        .buffer
                        .read(at - offset, BytesMut::from(&mut *chunk))?;
                    to.buffer.write(at - span.start, Bytes::from(&*chunk))?;
                }
                if is_cancelled() {
                    return Err(EngineError::Cancelled);
                }
            }
        }
        Ok(0)
    }

    /// As [`Memory::is_unmodified`](vgpu_engine::Memory::is_unmodified).
    pub(crate) fn is_unmodified(&self) -> bool {
        let state = self.state();
        state.is_frozen && !state.is_modified
    }
}

/// Copies all bytes of `from` to `at` of `to`.
///
/// # Errors
/// [`EngineError::Cancelled`] once `is_cancelled` has returned `true`, and [`EngineError`] of the
/// device.
fn copy(
    from: &DeviceBuffer,
    to: &DeviceBuffer,
    at: u64,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<(), EngineError> {
    let mut bytes = vec![0; CHUNK.min(from.size() as usize)];
    for (number, done) in (0..from.size()).step_by(CHUNK).enumerate() {
        if number > 0 && number.is_multiple_of(CHUNKS_AT_ONCE) && is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        let chunk = &mut bytes[..CHUNK.min((from.size() - done) as usize)];
        from.read(done, BytesMut::from(&mut *chunk))?;
        to.write(at + done, Bytes::from(&*chunk))?;
    }
    Ok(())
}

/// The extent as this engine's type.
///
/// # Errors
/// [`EngineError::ForeignMemory`] if it belongs to another engine.
fn of_this_engine(extent: &Arc<dyn Extent>) -> Result<Arc<GgmlExtent>, EngineError> {
    let extent = Arc::clone(extent).into_any().downcast::<GgmlExtent>();
    extent.map_err(|_| EngineError::ForeignMemory)
}
