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
//! Until the memory is frozen, the [`Allocator`]'s bytes for what has no segment are reserved, and
//! so is what a segment for each gap takes besides: a write to memory that is not shared needs
//! nothing that others could take. A segment for a part of a gap takes more. If the engine, the
//! driver or the guest's quota has no room for that, a write gets a segment for the whole gap, and
//! no extent begins in the gap. The guest is charged for what all segments take besides, and one
//! for each gap.
//!
//! Bytes of a segment that were never written are not cleared before somebody needs them: they may
//! be those of another guest, and nobody reads them.

use std::any::Any;
use std::collections::BTreeMap;
use std::iter::once;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_engine::{CopyAccount, EngineError, Extent, check_range};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{self, Guard, LockRank, lock_at};

use crate::allocator::{Allocator, Reservation, allocation_size};
use crate::buffer::{DeviceBuffer, Refused};
use crate::copies::SharedCopies;

/// The alignment of tensors. The places of a segment in its buffer and in its memory are equal
/// modulo this, or the segment is moved before a plan uses it: tensors are aligned as they are in
/// one buffer.
const ALIGN: u64 = 256;

/// The most segments and gaps of a memory of the host: segments are memory mappings of the process.
const MAX_SLOTS_ON_HOST: u64 = 2048;

/// The same on a GPU, whose driver may limit the number of allocations (Vulkan: 4,096 or more).
const MAX_SLOTS_ON_GPU: u64 = 1024;

/// Further segments and gaps of a memory once it is frozen.
const SLOTS_OF_FROZEN: u64 = 16;

/// Bytes that are copied at a time.
const CHUNK: u64 = 1 << 20;

/// Bytes that are copied or cleared between two questions whether that is cancelled.
const QUESTION: u64 = 4 << 20;

/// Ranges of a graph between two such questions.
const RANGES_AT_ONCE: usize = 4096;

/// Zeros to read at a time.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Bytes of segments that are copied at a time within the host.
const COPIED_ON_HOST: u64 = 64 << 10;

/// Bytes that a compilation copies at a time between segments of a GPU, through host memory that
/// its guest is charged for. Each call of the backend waits for the device.
const COMPILED_ON_GPU: u64 = QUESTION;

/// The same for all others, whose host memory is charged to nobody.
const COPIED_ON_GPU: u64 = CHUNK;

/// The bytes of host memory for the objects of a segment at most.
const OBJECTS: usize = 1024;

/// The bytes of host memory that a compilation for so many tensors takes for moving weights: what
/// is copied at a time, the new segments, and where the others are.
pub(crate) fn bytes_to_move(tensors: usize, is_host: bool) -> usize {
    let most = MAX_SLOTS_ON_HOST as usize;
    let copied = match is_host {
        true => COPIED_ON_HOST,
        false => COMPILED_ON_GPU,
    };
    copied as usize + 4 * most * size_of::<Range<u64>>() + tensors.min(most) * OBJECTS
}

/// How many segments a memory of `size` bytes has at most, together with the gaps between them. As
/// many as models of this size have tensors; on a GPU as many as models of some GiB have.
fn max_slots(allocator: &Allocator, size: u64) -> u64 {
    match allocator.is_host() {
        true => (32 + size / (256 << 10)).min(MAX_SLOTS_ON_HOST),
        false => (4 + size / (12 << 20)).min(MAX_SLOTS_ON_GPU),
    }
}

/// The memory mappings of the process that the segments of a memory of the host with `size` bytes
/// take at most.
pub(crate) fn max_mappings(allocator: &Allocator, size: u64) -> usize {
    max_slots(allocator, size) as usize
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

/// Asks whether work is cancelled, after each [`QUESTION`] bytes.
struct Progress<'a> {
    is_cancelled: &'a dyn Fn() -> bool,
    bytes: u64,
    /// The bytes that are copied between segments of a GPU at a time.
    on_gpu: u64,
}

impl Progress<'_> {
    fn new(is_cancelled: &dyn Fn() -> bool) -> Progress<'_> {
        Progress {
            is_cancelled,
            bytes: 0,
            on_gpu: COPIED_ON_GPU,
        }
    }

    /// Of a compilation.
    fn of_compilation(is_cancelled: &dyn Fn() -> bool) -> Progress<'_> {
        Progress {
            on_gpu: COMPILED_ON_GPU,
            ..Progress::new(is_cancelled)
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

    /// So many bytes are done.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`].
    fn done(&mut self, bytes: u64) -> Result<(), EngineError> {
        self.bytes += bytes;
        if self.bytes < QUESTION {
            return Ok(());
        }
        self.bytes = 0;
        self.check()
    }
}

/// The parts of a range of at most `len` bytes.
fn parts(range: &Range<u64>, len: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = range.end;
    { range.clone().step_by(len as usize) }.map(move |at| at..end.min(at + len))
}

/// The parts of a range of at most [`CHUNK`] bytes.
fn chunks(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    parts(range, CHUNK)
}

/// The buffer of a segment, which several memories can hold.
pub(crate) struct GgmlExtent {
    buffer: DeviceBuffer,
    /// The first byte in the memory that has made it.
    made_at: u64,
    /// The bytes of the buffer from this one on were never written. They are undefined unless they
    /// are cleared, and stand for zeros.
    filled: AtomicU64,
    is_cleared: AtomicBool,
    copies: SharedCopies,
}

impl GgmlExtent {
    /// A new buffer, in which the bytes before `filled` are there.
    fn new(buffer: DeviceBuffer, made_at: u64, filled: u64) -> GgmlExtent {
        GgmlExtent {
            buffer,
            made_at,
            filled: AtomicU64::new(filled),
            is_cleared: AtomicBool::new(false),
            copies: SharedCopies::default(),
        }
    }

    /// The same bytes, which are no extent any more: weak references and copies end.
    fn withdrawn(self, made_at: u64) -> GgmlExtent {
        GgmlExtent {
            made_at,
            copies: SharedCopies::default(),
            ..self
        }
    }

    /// Where the bytes are.
    pub(crate) fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// The copies of its weights in other layouts.
    pub(crate) fn copies(&self) -> &SharedCopies {
        &self.copies
    }

    /// The bytes before this one are there. Pairs with the acquire in `filled`.
    fn fill_up_to(&self, end: u64) {
        self.filled.fetch_max(end, Ordering::Release);
    }

    /// Clears the bytes before `end` that were never written, in a segment that no one else has.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`], and [`EngineError`] of the device. The bytes that are cleared
    /// then need not be cleared again.
    fn clear_up_to(&self, end: u64, progress: &mut Progress<'_>) -> Result<(), EngineError> {
        // Relaxed: changed under the lock of the only memory that has the segment.
        if !self.is_cleared.load(Ordering::Relaxed) {
            for part in chunks(&(self.filled()..end)) {
                self.buffer.fill(part.start, part.end - part.start, 0)?;
                self.fill_up_to(part.end);
                progress.done(part.end - part.start)?;
            }
        }
        self.fill_up_to(end);
        Ok(())
    }

    /// Clears the bytes that were never written, for a graph that reads them. Others may read those
    /// that are there meanwhile.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`], and [`EngineError`] of the device.
    fn clear(&self, progress: &mut Progress<'_>) -> Result<(), EngineError> {
        let rest = self.filled()..self.size();
        if rest.is_empty() || self.is_cleared.load(Ordering::Relaxed) {
            return Ok(());
        }
        for part in chunks(&rest) {
            self.buffer.fill(part.start, part.end - part.start, 0)?;
            progress.done(part.end - part.start)?;
        }
        self.is_cleared.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Extent for GgmlExtent {
    fn size(&self) -> u64 {
        self.buffer.size()
    }

    fn filled(&self) -> u64 {
        // Pairs with the release in `fill_up_to`: the bytes are there.
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

/// A segment of a memory.
#[derive(Clone)]
struct HeldSegment {
    extent: Arc<GgmlExtent>,
    /// Its first byte in the buffer: 0 if others can hold the segment.
    lead: u64,
    /// Its bytes. Behind them, the buffer can have more that belong to nobody.
    len: u64,
}

impl HeldSegment {
    /// An extent.
    fn whole(extent: Arc<GgmlExtent>) -> HeldSegment {
        HeldSegment {
            lead: 0,
            len: extent.size(),
            extent,
        }
    }

    /// The segment at `start` of its memory in a buffer that has [`lead`] before it.
    fn new(buffer: DeviceBuffer, start: u64) -> HeldSegment {
        let lead = lead(start);
        HeldSegment {
            lead,
            len: buffer.size() - lead,
            extent: Arc::new(GgmlExtent::new(buffer, start, lead)),
        }
    }

    /// Whether another memory, or its guest, has it.
    fn is_shared(&self) -> bool {
        Arc::strong_count(&self.extent) > 1
    }

    /// Whether it begins at `start` such that tensors in it are aligned.
    fn is_aligned(&self, start: u64) -> bool {
        lead(start) == self.lead
    }

    /// What its buffer takes of the device.
    fn taken(&self, allocator: &Allocator) -> u64 {
        allocator.segment_bytes(self.extent.size())
    }
}

/// The place in its buffer of a segment that begins at `start` of its memory.
fn lead(start: u64) -> u64 {
    start % ALIGN
}

/// The segments of a memory by their first byte, disjoint.
struct Segments {
    table: BTreeMap<u64, HeldSegment>,
    /// The bytes of the memory.
    size: u64,
    /// The bytes of all segments.
    bytes: u64,
    /// How often segments touch each other, the first byte of the memory, and its end.
    touching: u64,
    /// How many segments and gaps there are at most.
    max_slots: u64,
    reserved: Reservation,
    is_frozen: bool,
    /// Whether the bytes were written after the memory was frozen.
    is_modified: bool,
    /// The segments and gaps for which the guest is charged, and its charges, each with how many it
    /// is for. Given back after the segments, as fields are dropped.
    charged: u64,
    charges: Vec<(u64, Charge)>,
}

/// What a guest is charged, until it is dropped.
type Charge = Box<dyn Any + Send + Sync>;

/// What a memory has to have.
#[derive(Debug, Clone, Copy)]
struct Needs {
    /// Bytes of the device that are reserved.
    bytes: u64,
    /// Allocations that are reserved.
    allocations: u64,
    /// Segments and gaps that the guest is charged for.
    slots: u64,
}

impl Segments {
    /// How often a segment in this place touches others or an end.
    fn touches(&self, span: &Range<u64>) -> u64 {
        let before = self.table.range(..span.start).next_back();
        let before = before.map_or(0, |(start, held)| start + held.len);
        let behind = self.table.range(span.end..).next();
        let behind = behind.map_or(self.size, |(&start, _)| start);
        u64::from(before == span.start) + u64::from(behind == span.end)
    }

    fn insert(&mut self, start: u64, held: HeldSegment) {
        self.bytes += held.len;
        self.touching += self.touches(&(start..start + held.len));
        self.table.insert(start, held);
    }

    fn remove(&mut self, start: u64) -> Option<HeldSegment> {
        let held = self.table.remove(&start)?;
        self.bytes -= held.len;
        self.touching -= self.touches(&(start..start + held.len));
        Some(held)
    }

    /// How many segments and gaps there are.
    fn slots(&self) -> u64 {
        2 * self.table.len() as u64 + 1 - self.touching
    }

    /// What such a memory needs with so many segments, and with gaps of so many bytes: each gap can
    /// get one segment, and one segment more can exist while it takes the place of others.
    fn needs(&self, allocator: &Allocator, segments: u64, gaps: u64, in_gaps: u64) -> Needs {
        let (bytes, allocations) = match self.is_frozen {
            true => (0, 0),
            false => (in_gaps + gaps * max_besides(allocator), gaps + 1),
        };
        Needs {
            bytes,
            allocations,
            slots: segments + gaps,
        }
    }

    /// What the memory needs as it is.
    fn needs_now(&self, allocator: &Allocator) -> Needs {
        let segments = self.table.len() as u64;
        let gaps = self.slots() - segments;
        self.needs(allocator, segments, gaps, self.size - self.bytes)
    }

    /// What the memory needs when one segment has all of `range`: those that begin there are gone,
    /// and one that begins before the range ends where the range begins.
    fn needs_with(&self, allocator: &Allocator, range: &Range<u64>) -> Needs {
        let before = self.table.range(..range.start).next_back();
        let from = before.map_or(0, |(start, held)| (start + held.len).min(range.start));
        let behind = self.table.range(range.end..).next();
        let until = behind.map_or(self.size, |(&start, _)| start);
        let gaps_before = self.gaps(&(from..until));
        let in_gaps_before: u64 = gaps_before.iter().map(|gap| gap.end - gap.start).sum();
        let gone = self.table.range(range.clone()).count() as u64;
        let segments = self.table.len() as u64;
        let gaps = self.slots() - segments - gaps_before.len() as u64;
        let in_gaps = self.size - self.bytes - in_gaps_before;
        // What is cut off is in the range.
        let sides = [range.start - from, until - range.end];
        let gaps = gaps + sides.iter().filter(|side| **side > 0).count() as u64;
        let in_gaps = in_gaps + sides.iter().sum::<u64>();
        self.needs(allocator, segments - gone + 1, gaps, in_gaps)
    }

    /// Gives back charges for more than so many segments and gaps.
    fn charge_at_most(&mut self, slots: u64) {
        while let Some(&(last, _)) = self.charges.last()
            && self.charged - last >= slots
        {
            self.charged -= last;
            self.charges.pop();
        }
    }

    /// The spans of the segments with bytes in `range`, in order.
    fn meeting(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.table.range(..range.start).next_back();
        { before.into_iter() }
            .chain(self.table.range(range.clone()))
            .map(|(&start, held)| start..start + held.len)
            .filter(|span| span.end > range.start)
            .collect()
    }

    /// All bytes of the segments in `range`, and those of `range`.
    fn whole(&self, range: &Range<u64>) -> Range<u64> {
        let met = self.meeting(range);
        let start = met.first().map_or(range.start, |span| span.start);
        let end = met.last().map_or(range.end, |span| span.end);
        range.start.min(start)..range.end.max(end)
    }

    /// The gap that has the byte at `at`.
    fn gap(&self, at: u64) -> Range<u64> {
        let before = self.table.range(..=at).next_back();
        let behind = self.table.range(at..).next();
        before.map_or(0, |(from, held)| from + held.len)
            ..behind.map_or(self.size, |(&until, _)| until)
    }

    /// The parts of `range` that no segment has.
    fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        let ends = self.meeting(range).into_iter();
        for span in ends.chain(once(range.end..range.end)) {
            if at < span.start {
                gaps.push(at..span.start);
            }
            at = at.max(span.end);
        }
        gaps
    }

    /// The segment that has all bytes of `range`, with its first byte.
    fn around(&self, range: &Range<u64>) -> Option<(u64, &HeldSegment)> {
        let (&start, held) = self.table.range(..=range.start).next_back()?;
        (start + held.len >= range.end).then_some((start, held))
    }

    /// The segments that a graph uses: for each of the used ranges, all bytes of the segments there
    /// and its own, as one if they overlap.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`], and [`EngineError::Cancelled`].
    fn used(
        &self,
        ranges: &UsedRanges,
        progress: &Progress<'_>,
    ) -> Result<Vec<UsedSegments>, EngineError> {
        let mut all: Vec<UsedSegments> = Vec::with_capacity(ranges.0.len());
        let mut behind = self.table.iter().peekable();
        // The last segment that begins before the end of the range.
        let mut last: Option<(u64, &HeldSegment)> = None;
        for (number, UsedRange { bytes, is_written }) in ranges.0.iter().enumerate() {
            if number.is_multiple_of(RANGES_AT_ONCE) {
                progress.check()?;
            }
            check_range(bytes.start, bytes.end - bytes.start, self.size)?;
            let (mut whole, mut met, mut is_fit) = (bytes.clone(), 0, false);
            let mut meet = |(start, held): (u64, &HeldSegment)| {
                let end = start + held.len;
                if end > bytes.start {
                    met += 1;
                    whole = whole.start.min(start)..whole.end.max(end);
                    is_fit = met == 1 && held.is_aligned(start) && whole == (start..end);
                }
            };
            last.into_iter().for_each(&mut meet);
            while let Some((&start, held)) = behind.next_if(|(start, _)| **start < bytes.end) {
                last = Some((start, held));
                meet((start, held));
            }
            match all.last_mut() {
                Some(last) if whole.start < last.bytes.end => {
                    last.bytes.end = last.bytes.end.max(whole.end);
                    last.is_written |= is_written;
                    last.moves |= !is_fit;
                }
                _ => all.push(UsedSegments {
                    bytes: whole,
                    is_written: *is_written,
                    moves: !is_fit,
                }),
            }
        }
        Ok(all)
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

/// A segment of a memory that a plan uses.
pub(crate) struct LocatedSegment {
    /// The place in the memory of the first byte of its buffer.
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

/// The bytes of host memory that [`SegmentedMemory::locate`] takes for each tensor of a graph: the
/// ranges, which grow and are sorted in place, with their segments, and the results.
pub(crate) const BYTES_TO_LOCATE: usize =
    3 * size_of::<UsedRange>() + size_of::<UsedSegments>() + size_of::<LocatedSegment>();

/// Bytes that were attached.
pub(crate) struct Attached {
    /// How many of them are shared with the extent.
    pub(crate) shared: u64,
    /// Whether the bytes have another place now, or were copied.
    pub(crate) has_changed: bool,
}

/// The memory of a buffer for weights.
pub(crate) struct SegmentedMemory {
    allocator: Arc<Allocator>,
    size: u64,
    /// How often plans that were compiled before became stale.
    changes: AtomicU64,
    state: Mutex<Segments>,
    /// Who pays for what the buffers of segments take besides.
    account: Option<Arc<dyn CopyAccount>>,
}

impl SegmentedMemory {
    /// Zero bytes, as many as `instead` has, whose reservation is taken over. `account` pays for
    /// what the buffers of segments take besides. `None` if the memory is too small for an extent.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if there is not enough for what a segment takes besides its
    /// bytes, and [`EngineError::Device`] if the device has too many buffers. `instead` is as
    /// before.
    pub(crate) fn new(
        instead: &DeviceBuffer,
        account: Option<Arc<dyn CopyAccount>>,
    ) -> Result<Option<SegmentedMemory>, EngineError> {
        let (allocator, size) = (instead.allocator(), instead.size());
        if size < allocator.min_extent() {
            return Ok(None);
        }
        // One gap, and as many bytes as there are.
        let besides = max_besides(allocator);
        let less = allocation_size(size);
        let mut reserved = None;
        let mut reserve = || {
            let more = (size + besides).saturating_sub(less);
            reserved = Some(allocator.reserve_segments(more, 1)?);
            Ok(())
        };
        let charges = match &account {
            Some(account) => vec![(1, account.charge(besides, &mut reserve)?)],
            None => {
                reserve()?;
                Vec::new()
            }
        };
        let mut reserved = reserved.ok_or_else(|| allocator.refusal(besides))?;
        reserved.join(instead.take_reservation());
        let surplus = reserved.bytes().saturating_sub(size + besides);
        drop(reserved.split(surplus, 0));
        Ok(Some(SegmentedMemory {
            allocator: Arc::clone(allocator),
            size,
            changes: AtomicU64::new(0),
            state: Mutex::new(Segments {
                table: BTreeMap::new(),
                size,
                bytes: 0,
                touching: 0,
                max_slots: max_slots(allocator, size),
                reserved,
                is_frozen: false,
                is_modified: false,
                charged: 1,
                charges,
            }),
            account,
        }))
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

    /// A buffer of `size` bytes. It comes from the reservation as far as that goes, but for
    /// `of_others` bytes, which stay where they are as well.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`]. The reservation is as before.
    fn alloc(
        &self,
        state: &mut Segments,
        size: u64,
        of_others: u64,
    ) -> Result<DeviceBuffer, EngineError> {
        let wanted = self.allocator.segment_bytes(size);
        let mut reserved = { &mut state.reserved }.split(wanted.saturating_sub(of_others), 1);
        let (bytes, allocations) = (reserved.bytes(), reserved.allocations());
        match { &self.allocator }.reserve(wanted - bytes, 1 - allocations) {
            Some(more) => reserved.join(more),
            None => {
                state.reserved.join(reserved);
                return Err(self.allocator.refusal(size));
            }
        }
        let buffer = DeviceBuffer::with_reserved(&self.allocator, size, reserved);
        buffer.map_err(|Refused { error, reserved }| {
            let mut reserved = reserved;
            state.reserved.join(reserved.split(bytes, allocations));
            error
        })
    }

    /// A segment for a gap at `bytes`, which nobody has written.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    fn alloc_segment(
        &self,
        state: &mut Segments,
        bytes: &Range<u64>,
        of_others: u64,
    ) -> Result<HeldSegment, EngineError> {
        let size = lead(bytes.start) + bytes.end - bytes.start;
        let buffer = self.alloc(state, size, of_others)?;
        Ok(HeldSegment::new(buffer, bytes.start))
    }

    /// Frees a segment, unless others have it. Its reservation is this memory's then.
    fn free(state: &mut Segments, held: HeldSegment) {
        if let Some(extent) = Arc::into_inner(held.extent) {
            let reserved = extent.buffer.take_reservation();
            drop(extent);
            state.reserved.join(reserved);
        }
    }

    /// Removes the segment that begins here.
    fn remove(state: &mut Segments, start: u64) {
        if let Some(held) = state.remove(start) {
            SegmentedMemory::free(state, held);
        }
    }

    /// Reserves what the bytes without a segment take, and gives up the rest.
    fn settle(&self, state: &mut Segments) {
        let needs = state.needs_now(&self.allocator);
        let reserved = &mut state.reserved;
        drop(reserved.split(
            reserved.bytes().saturating_sub(needs.bytes),
            reserved.allocations().saturating_sub(needs.allocations),
        ));
        let bytes = needs.bytes - reserved.bytes();
        let allocations = needs.allocations - reserved.allocations();
        for (bytes, allocations) in [(bytes, 0), (0, allocations)] {
            if let Ok(more) = self.allocator.reserve_segments(bytes, allocations) {
                reserved.join(more);
            }
        }
    }

    /// Reserves what is needed, and charges the guest for it. Returns whether the guest, the engine
    /// and the driver allow that; if not, all is as it was.
    fn ensure(&self, state: &mut Segments, needs: Needs) -> bool {
        if needs.slots > state.max_slots {
            return false;
        }
        let bytes = needs.bytes.saturating_sub(state.reserved.bytes());
        let allocations = { needs.allocations }.saturating_sub(state.reserved.allocations());
        let slots = needs.slots.saturating_sub(state.charged);
        let mut more = None;
        let mut reserve = || {
            more = Some(self.allocator.reserve_segments(bytes, allocations)?);
            Ok(())
        };
        let charge = match { &self.account }.as_ref().filter(|_| slots > 0) {
            Some(account) => {
                let bytes = slots * max_besides(&self.allocator);
                account.charge(bytes, &mut reserve).map(Some)
            }
            None => reserve().map(|()| None),
        };
        let (Ok(charge), Some(more)) = (charge, more) else {
            return false;
        };
        state.reserved.join(more);
        state.charged += slots;
        state.charges.extend(charge.map(|charge| (slots, charge)));
        true
    }

    /// Makes room for a segment with all of `range`, whose buffer takes so many bytes, and for a
    /// segment in each gap that there is then. Returns whether there is room.
    fn make_room(&self, state: &mut Segments, range: &Range<u64>, taken: u64) -> bool {
        let mut needs = state.needs_with(&self.allocator, range);
        if taken > 0 {
            needs.allocations += 1;
            if !state.is_frozen {
                needs.bytes += taken;
            }
        }
        self.ensure(state, needs)
    }

    /// Takes the segment that begins here out of the table, if no one else has it. It is no extent
    /// any more.
    fn take_own(state: &mut Segments, start: u64) -> Option<HeldSegment> {
        let held = state.remove(start)?;
        let HeldSegment { extent, lead, len } = held;
        match Arc::try_unwrap(extent) {
            Ok(extent) => Some(HeldSegment {
                extent: Arc::new(extent.withdrawn(start)),
                lead,
                len,
            }),
            Err(extent) => {
                state.insert(start, HeldSegment { extent, lead, len });
                None
            }
        }
    }

    /// Moves `bytes`, which contain no segment in part, to one segment of this memory alone. If
    /// that fails, all bytes are where they were.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`], [`EngineError::Cancelled`], and [`EngineError`] of the device,
    /// also if it would have too many buffers.
    fn gather(
        &self,
        state: &mut Segments,
        bytes: &Range<u64>,
        progress: &mut Progress<'_>,
    ) -> Result<(), EngineError> {
        progress.check()?;
        let met = state.meeting(bytes);
        let (mut of_others, mut has_own) = (0, false);
        for span in &met {
            // From here on, nobody else gets a segment that only this memory has: what it has
            // reserved is this memory's when it is freed.
            if let Some(own) = SegmentedMemory::take_own(state, span.start) {
                state.insert(span.start, own);
                has_own = true;
            } else if let Some(held) = state.table.get(&span.start) {
                of_others += held.taken(&self.allocator);
            }
        }
        if !has_own {
            // There will be one buffer more.
            let needs = state.needs_now(&self.allocator).allocations + 1;
            let more = needs.saturating_sub(state.reserved.allocations());
            let more = self.allocator.reserve_segments(0, more)?;
            state.reserved.join(more);
        }
        let new = self.alloc_segment(state, bytes, of_others);
        let outcome = new.and_then(|new| {
            let copied = met.iter().try_for_each(|span| {
                let Some(held) = state.table.get(&span.start) else {
                    return Ok(());
                };
                copy(held, &new, span.start - bytes.start, progress)
            });
            match copied {
                Ok(()) => Ok(new),
                Err(error) => {
                    SegmentedMemory::free(state, new);
                    Err(error)
                }
            }
        });
        let outcome = outcome.map(|new| {
            for span in &met {
                SegmentedMemory::remove(state, span.start);
            }
            state.insert(bytes.start, new);
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
        progress: &mut Progress<'_>,
    ) -> Result<(), EngineError> {
        for span in state.meeting(range) {
            // A segment that is written ends as an extent, and its copies with it.
            match SegmentedMemory::take_own(state, span.start) {
                Some(held) => state.insert(span.start, held),
                None => self.gather(state, &span, progress)?,
            }
        }
        Ok(())
    }

    /// Makes room for a write to parts of so many gaps. Without room, the write gets segments for
    /// whole gaps, and clears what comes before it. Returns whether there is room.
    fn make_room_for_parts(&self, state: &mut Segments, gaps: u64) -> bool {
        let mut needs = state.needs_now(&self.allocator);
        // In place of a gap, there are a segment and two gaps.
        needs.slots += 2 * gaps;
        needs.allocations += 2 * gaps;
        if !state.is_frozen {
            needs.bytes += 2 * gaps * max_besides(&self.allocator);
        }
        self.ensure(state, needs)
    }

    /// The bytes for a new segment that has `part` of a gap: the whole gap if there are as many
    /// segments as there may be, or no room for what a further one takes besides. On a GPU also
    /// bytes behind the part that cost nothing: writes follow each other.
    fn bytes_of_new(&self, state: &mut Segments, part: &Range<u64>) -> Range<u64> {
        let gap = state.gap(part.start);
        let lead = lead(part.start);
        let size = lead + part.end - part.start;
        let end = match self.allocator.is_host() {
            true => part.end,
            false => part.start + self.allocator.largest_alike(size) - lead,
        };
        let bytes = part.start..end.min(gap.end);
        let size = lead + bytes.end - bytes.start;
        // There is room for a segment that has the whole gap.
        match bytes == gap || self.make_room(state, &bytes, self.allocator.segment_bytes(size)) {
            true => bytes,
            false => gap,
        }
    }

    /// Gives all bytes of `range` segments. New ones are zero. If that fails, there is no new one.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    fn fill_gaps(&self, state: &mut Segments, range: &Range<u64>) -> Result<(), EngineError> {
        let mut new = Vec::new();
        let mut outcome = Ok(());
        for part in state.gaps(range) {
            let bytes = self.bytes_of_new(state, &part);
            match self.alloc_segment(state, &bytes, 0) {
                Ok(held) => {
                    state.insert(bytes.start, held);
                    new.push(bytes.start);
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        if outcome.is_err() {
            new.into_iter()
                .for_each(|start| SegmentedMemory::remove(state, start));
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
        progress: &mut Progress<'_>,
    ) -> Result<(), EngineError> {
        self.own(state, range, progress)?;
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
        progress: &mut Progress<'_>,
        mut write: impl FnMut(
            &DeviceBuffer,
            u64,
            Range<u64>,
            &mut Progress<'_>,
        ) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let mut state = self.state();
        self.prepare_write(&mut state, range, progress)?;
        for span in state.meeting(range) {
            let part = span.start.max(range.start)..span.end.min(range.end);
            if let Some(HeldSegment { extent, lead, .. }) = state.table.get(&span.start) {
                let at = part.start - span.start + lead;
                let end = at + part.end - part.start;
                extent.clear_up_to(at, progress)?;
                write(&extent.buffer, at, part, progress)?;
                extent.fill_up_to(end);
            }
        }
        Ok(())
    }

    /// Makes the bytes that a graph uses those of one segment.
    ///
    /// # Errors
    /// As [`locate`](SegmentedMemory::locate).
    fn make_one(
        &self,
        state: &mut Segments,
        used: &UsedSegments,
        progress: &mut Progress<'_>,
    ) -> Result<(), EngineError> {
        let UsedSegments {
            bytes,
            is_written,
            moves,
        } = used;
        // A segment for a whole gap, made for other bytes of the graph, may have these by now, or
        // some of them.
        let bytes = &state.whole(bytes);
        let is_one = |state: &Segments| {
            let around = state.around(bytes);
            around.is_some_and(|(start, held)| held.is_aligned(start))
        };
        if *moves && !is_one(state) {
            match state.meeting(bytes).is_empty() {
                true => {
                    let all = self.bytes_of_new(state, bytes);
                    let held = self.alloc_segment(state, &all, 0);
                    if let Ok(held) = &held {
                        state.insert(all.start, held.clone());
                    }
                    self.settle(state);
                    held?;
                }
                false => self.gather(state, bytes, progress)?,
            }
        }
        if *is_written {
            self.own(state, bytes, progress)?;
            state.is_modified |= state.is_frozen;
        }
        let found = state.around(bytes).ok_or_else(|| self.no_extent(bytes))?;
        let extent = &found.1.extent;
        match is_written {
            true => extent.clear_up_to(extent.size(), progress),
            false => extent.clear(progress),
        }
    }

    /// For each range the segment that has all of its bytes, and where its buffer begins in this
    /// memory; and the [`changes`](SegmentedMemory::changes) as long as that is so. Bytes in
    /// several segments move to one, and what was written moves at most once. For bytes that a plan
    /// writes, the segment belongs to this memory alone.
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
        let mut progress = Progress::of_compilation(is_cancelled);
        for (number, it) in state.used(used, &progress)?.iter().enumerate() {
            if number > 0 && number.is_multiple_of(RANGES_AT_ONCE) {
                progress.check()?;
            }
            self.make_one(&mut state, it, &mut progress)?;
        }
        let mut found = Vec::with_capacity(used.0.len());
        for it in &used.0 {
            let around = state.around(&it.bytes);
            let (start, held) = around.ok_or_else(|| self.no_extent(&it.bytes))?;
            found.push(LocatedSegment {
                start: start - held.lead,
                extent: Arc::clone(&held.extent),
            });
        }
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
        let mut progress = Progress::new(&|| false);
        self.each_written(
            &(offset..offset + len),
            &mut progress,
            |buffer, at, part, _| {
                let (here, behind) = rest.split_at((part.end - part.start) as usize);
                rest = behind;
                buffer.write(at, here)
            },
        )
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
        for span in state.meeting(&(offset..end)) {
            let Some(HeldSegment { extent, lead, len }) = state.table.get(&span.start) else {
                continue;
            };
            // Bytes behind these were never written.
            let there = extent.filled().saturating_sub(*lead).min(*len);
            let until = end.min(span.start + there);
            rest = read_zeros(rest, span.start.saturating_sub(at));
            at = at.max(span.start);
            if at < until {
                let (here, behind) = rest.split_at((until - at) as usize);
                extent.buffer.read(at - span.start + lead, here)?;
                (at, rest) = (until, behind);
            }
        }
        read_zeros(rest, end - at);
        Ok(())
    }

    /// As [`Memory::fill`](vgpu_engine::Memory::fill).
    ///
    /// # Errors
    /// As there.
    pub(crate) fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        let mut progress = Progress::new(&|| false);
        let range = offset..offset + len;
        self.each_written(&range, &mut progress, |buffer, at, part, _| {
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
        self.settle(&mut state);
        // The guest pays for the segments that there are. If it has no room for further ones, there
        // are none.
        let slots = state.slots();
        let most = state.max_slots.min(slots + SLOTS_OF_FROZEN);
        let needs = Needs {
            bytes: 0,
            allocations: 0,
            slots: most,
        };
        state.max_slots = match self.ensure(&mut state, needs) {
            true => most,
            false => state.charged.max(slots),
        };
        let most = state.max_slots;
        state.charge_at_most(most);
    }

    /// The most memory mappings of the process that the segments take from now on.
    pub(crate) fn max_mappings(&self) -> usize {
        self.state().max_slots as usize
    }

    /// Whether a segment can take the place of all that this memory has in `range`: no segment is
    /// cut but the first, which may lose its last bytes. Only bytes that were never written may be
    /// lost if `keeps_bytes`.
    fn can_replace(&self, state: &Segments, range: &Range<u64>, keeps_bytes: bool) -> bool {
        let may_give_way = |span: &Range<u64>| {
            let Some(held) = state.table.get(&span.start) else {
                return false;
            };
            let stays = range.start.saturating_sub(span.start);
            let is_own = !held.is_shared();
            // What is cut off is no memory of anybody.
            let besides = held.taken(&self.allocator).saturating_sub(stays);
            let is_cut = stays > 0;
            let may_be_cut = is_own && besides <= max_besides(&self.allocator);
            let is_unwritten = is_own && held.extent.filled() <= held.lead + stays;
            span.end <= range.end && (!is_cut || may_be_cut) && (!keeps_bytes || is_unwritten)
        };
        state.meeting(range).iter().all(may_give_way)
    }

    /// Puts a segment in the place of all that this memory has in `range`, for which
    /// [`can_replace`](SegmentedMemory::can_replace) has held, and for which there is room. Returns
    /// whether that was possible: somebody may have got the segment that would be cut since, as the
    /// executor has weak references to extents. Otherwise `new` is freed, and nothing else has
    /// changed.
    fn replace(&self, state: &mut Segments, range: &Range<u64>, new: HeldSegment) -> bool {
        let met = state.meeting(range);
        let (cut, replaced): (Vec<_>, Vec<_>) =
            met.into_iter().partition(|span| span.start < range.start);
        for span in cut {
            // No extent any more, or still the segment of others.
            let Some(held) = SegmentedMemory::take_own(state, span.start) else {
                SegmentedMemory::free(state, new);
                self.settle(state);
                return false;
            };
            let len = range.start - span.start;
            state.insert(span.start, HeldSegment { len, ..held });
        }
        for span in replaced {
            SegmentedMemory::remove(state, span.start);
        }
        state.insert(range.start, new);
        self.has_changed();
        self.settle(state);
        true
    }

    /// As [`Memory::extent`](vgpu_engine::Memory::extent). Where the bytes have to be copied,
    /// `is_cancelled` is asked after each 4 MiB.
    ///
    /// # Errors
    /// As there, and [`EngineError::Cancelled`].
    pub(crate) fn extent(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size)?;
        let range = offset..offset + len;
        let mut state = self.state();
        let is_possible = len >= self.allocator.min_extent() && lead(offset) == 0;
        if !state.is_frozen || state.is_modified || !is_possible {
            return Err(self.no_extent(&range));
        }
        let is_whole = |held: &HeldSegment| held.len == len && held.extent.size() == len;
        if !state.table.get(&offset).is_some_and(is_whole) {
            let is_free = |span: &Range<u64>| {
                let is_inside = range.start <= span.start && span.end <= range.end;
                let held = state.table.get(&span.start);
                let is_there = |held: &HeldSegment| {
                    let end = held.lead + held.len;
                    !held.is_shared() && held.extent.filled() >= end
                };
                is_inside && held.is_some_and(is_there)
            };
            let has_gaps = !state.gaps(&range).is_empty();
            if has_gaps || !state.meeting(&range).iter().all(is_free) {
                return Err(self.no_extent(&range));
            }
            let mut progress = Progress::new(is_cancelled);
            self.gather(&mut state, &range, &mut progress)?;
        }
        // A plan that writes to the segment was compiled when no one else held it.
        self.has_changed();
        let held = state.table.get(&offset);
        let held = held.filter(|held| held.extent.filled() == len);
        let held = held.ok_or_else(|| self.no_extent(&range))?;
        Ok(Arc::clone(&held.extent) as Arc<dyn Extent>)
    }

    /// As [`Memory::begin_extent`](vgpu_engine::Memory::begin_extent). Also refuses a range in
    /// which bytes were written, which the guest may not write again, an extent of less than
    /// [`Allocator::min_extent`], and one more than the memory may have segments.
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
        let is_possible = len >= self.allocator.min_extent() && lead(offset) == 0;
        let taken = self.allocator.segment_bytes(len);
        if state.is_frozen
            || !is_possible
            || !self.can_replace(&state, &range, true)
            || !self.make_room(&mut state, &range, taken)
        {
            return Err(self.no_extent(&range));
        }
        let buffer = self.alloc(&mut state, len, 0);
        if let Err(error) = &buffer {
            self.settle(&mut state);
            return Err(error.clone());
        }
        let new = HeldSegment::whole(Arc::new(GgmlExtent::new(buffer?, offset, 0)));
        if !self.replace(&mut state, &range, new) {
            return Err(self.no_extent(&range));
        }
        let held = state.table.get(&offset);
        let held = held.ok_or_else(|| self.no_extent(&range))?;
        Ok(Arc::clone(&held.extent) as Arc<dyn Extent>)
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
        let ours = ours.filter(|ours| ours.len == extent.size());
        let (filled, len) = (extent.filled(), data.len() as u64);
        if state.is_frozen || !ours.is_some_and(|ours| Arc::ptr_eq(&ours.extent, &extent)) {
            return Err(EngineError::OutOfBounds {
                offset: filled,
                len,
                size: filled,
            });
        }
        check_range(filled, len, extent.size())?;
        extent.buffer.write(filled, data)?;
        extent.fill_up_to(filled + len);
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

    /// As [`Memory::unshare`](vgpu_engine::Memory::unshare). Also clears what a write would clear,
    /// and all of a range that several writes fill, which may begin with its last bytes.
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
        let range = offset..offset + len;
        let mut progress = Progress::new(is_cancelled);
        let mut state = self.state();
        self.own(&mut state, &range, &mut progress)?;
        // More than a message has: writes that follow each other. They get one segment.
        let is_long = len > CHUNK;
        let gaps = state.gaps(&range).len() as u64;
        if gaps > 0 && (is_long || !self.make_room_for_parts(&mut state, gaps)) {
            self.fill_gaps(&mut state, &range)?;
        }
        for span in state.meeting(&range) {
            if let Some(HeldSegment { extent, lead, .. }) = state.table.get(&span.start) {
                let until = match is_long {
                    true => span.end.min(range.end),
                    false => span.start.max(range.start),
                };
                extent.clear_up_to(until - span.start + lead, &mut progress)?;
            }
        }
        Ok(())
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
    ) -> Result<Attached, EngineError> {
        let extent = of_this_engine(extent)?;
        if !Arc::ptr_eq(extent.buffer.allocator(), &self.allocator) {
            return Err(EngineError::ForeignMemory);
        }
        let len = extent.size();
        check_range(offset, len, self.size)?;
        check_range(0, len, extent.filled())?;
        let range = offset..offset + len;
        let mut state = self.state();
        let has_it = { state.table.get(&offset) }
            .is_some_and(|held| held.lead == 0 && Arc::ptr_eq(&held.extent, &extent));
        if has_it || len == 0 {
            return Ok(Attached {
                shared: len,
                has_changed: false,
            });
        }
        if self.can_replace(&state, &range, false)
            && self.make_room(&mut state, &range, 0)
            && self.replace(&mut state, &range, HeldSegment::whole(Arc::clone(&extent)))
        {
            return Ok(Attached {
                shared: len,
                has_changed: true,
            });
        }
        // Memory that is frozen has the bytes already.
        let has_changed = !state.is_frozen;
        drop(state);
        if has_changed {
            let mut chunk = vec![0; CHUNK.min(len) as usize];
            let mut progress = Progress::new(is_cancelled);
            progress.check()?;
            self.each_written(&range, &mut progress, |to, at, part, progress| {
                for bytes in chunks(&part) {
                    let chunk = &mut chunk[..(bytes.end - bytes.start) as usize];
                    let from = bytes.start - offset;
                    extent.buffer.read(from, BytesMut::from(&mut *chunk))?;
                    to.write(at + bytes.start - part.start, Bytes::from(&*chunk))?;
                    progress.done(bytes.end - bytes.start)?;
                }
                Ok(())
            })?;
        }
        Ok(Attached {
            shared: 0,
            has_changed,
        })
    }

    /// As [`Memory::is_unmodified`](vgpu_engine::Memory::is_unmodified).
    pub(crate) fn is_unmodified(&self) -> bool {
        let state = self.state();
        state.is_frozen && !state.is_modified
    }
}

/// What the buffer of a segment takes besides the bytes of the segment, at most.
fn max_besides(allocator: &Allocator) -> u64 {
    allocator.max_besides() + ALIGN
}

/// Sets the first `len` bytes to zero. Returns the others.
fn read_zeros(out: BytesMut<'_>, len: u64) -> BytesMut<'_> {
    let (mut rest, mut left) = (out, len);
    while left > 0 {
        let len = left.min(ZEROS.len() as u64) as usize;
        let (mut zeros, behind) = rest.split_at(len);
        zeros.copy_from(Bytes::from(&ZEROS[..len]));
        (rest, left) = (behind, left - len as u64);
    }
    rest
}

/// Copies the bytes of a segment to `to`, which has `before` bytes of its memory before them, and
/// was not written from there on.
///
/// # Errors
/// [`EngineError::Cancelled`], and [`EngineError`] of the device.
fn copy(
    from: &HeldSegment,
    to: &HeldSegment,
    before: u64,
    progress: &mut Progress<'_>,
) -> Result<(), EngineError> {
    let first = to.lead + before;
    to.extent.clear_up_to(first, progress)?;
    let there = from.extent.filled().min(from.lead + from.len);
    let copied = match from.extent.buffer.allocator().is_host() {
        true => COPIED_ON_HOST,
        false => progress.on_gpu,
    };
    let mut bytes = vec![0; copied.min(from.len) as usize];
    for part in parts(&(from.lead..there), copied) {
        let chunk = &mut bytes[..(part.end - part.start) as usize];
        let at = first + part.start - from.lead;
        from.extent
            .buffer
            .read(part.start, BytesMut::from(&mut *chunk))?;
        to.extent.buffer.write(at, Bytes::from(&*chunk))?;
        to.extent.fill_up_to(at + part.end - part.start);
        progress.done(part.end - part.start)?;
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
