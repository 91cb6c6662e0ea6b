//! Memory of a guest: one buffer of a device, or segments that other guests can hold too.

use std::any::Any;
use std::sync::{Arc, Mutex};

use vgpu_engine::{CopyAccount, EngineError, Extent, Memory, check_range};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::lock;

use crate::allocator::Allocator;
use crate::buffer::DeviceBuffer;
use crate::copies::WeightCopies;
use crate::flight::Underway;
use crate::segments::SegmentedMemory;

/// The bytes that are copied at a time between memories, or between parts of one that overlap.
const CHUNK: usize = 1 << 20;

/// Where the bytes are.
pub(crate) enum Storage {
    /// In one buffer.
    Whole(DeviceBuffer),
    /// In segments, for weights.
    Segments(SegmentedMemory),
}

/// Memory of a guest.
pub(crate) struct GgmlMemory {
    storage: Storage,
    /// Copies of the weights in other layouts.
    copies: WeightCopies,
    /// Whether reading is a copy within the host, so that uploads are compared with extents.
    is_host: bool,
    /// What a plan that uses this memory has left to the device.
    underway: Mutex<Option<Arc<Underway>>>,
}

impl GgmlMemory {
    /// Zeroed memory of `size` bytes, of the host if `is_host`.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    pub(crate) fn alloc(
        allocator: &Arc<Allocator>,
        size: u64,
        is_host: bool,
    ) -> Result<GgmlMemory, EngineError> {
        Ok(GgmlMemory {
            storage: Storage::Whole(DeviceBuffer::alloc(allocator, size)?),
            copies: WeightCopies::new(allocator, size),
            is_host,
            underway: Mutex::default(),
        })
    }

    /// Zeroed memory for weights, which takes over the bytes of `instead` in `allocator`. Who pays
    /// for the copies of `instead` pays for what the memory takes besides. `None` if `instead` is
    /// such memory, or too small for weights that are shared.
    ///
    /// # Errors
    /// [`EngineError::ForeignMemory`] if `instead` is memory of another engine, and
    /// [`EngineError::OutOfMemory`]. `instead` is as before.
    pub(crate) fn for_weights(
        allocator: &Arc<Allocator>,
        instead: &dyn Memory,
    ) -> Result<Option<GgmlMemory>, EngineError> {
        let instead = GgmlMemory::of(instead, allocator)?;
        let Storage::Whole(buffer) = &instead.storage else {
            return Ok(None);
        };
        let segments = SegmentedMemory::new(buffer, instead.copies.account())?;
        Ok(segments.map(|segments| GgmlMemory {
            storage: Storage::Segments(segments),
            copies: WeightCopies::new(allocator, buffer.size()),
            is_host: instead.is_host,
            underway: Mutex::default(),
        }))
    }

    /// The memory as this engine's type.
    ///
    /// # Errors
    /// [`EngineError::ForeignMemory`] if it is not of this allocator.
    pub(crate) fn of<'m>(
        memory: &'m dyn Memory,
        allocator: &Arc<Allocator>,
    ) -> Result<&'m GgmlMemory, EngineError> {
        { memory.as_any().downcast_ref::<GgmlMemory>() }
            .filter(|memory| Arc::ptr_eq(memory.allocator(), allocator))
            .ok_or(EngineError::ForeignMemory)
    }

    /// What the memory belongs to.
    fn allocator(&self) -> &Arc<Allocator> {
        match &self.storage {
            Storage::Whole(buffer) => buffer.allocator(),
            Storage::Segments(segments) => segments.allocator(),
        }
    }

    /// Where the bytes are.
    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The buffer, if the memory is one.
    pub(crate) fn buffer(&self) -> Option<&DeviceBuffer> {
        match &self.storage {
            Storage::Whole(buffer) => Some(buffer),
            Storage::Segments(_) => None,
        }
    }

    /// A plan that uses this memory has left work to the device: reads come behind it.
    pub(crate) fn begin_underway(&self, work: &Arc<Underway>) {
        *lock(&self.underway) = Some(Arc::clone(work));
    }

    /// The device has done this work.
    pub(crate) fn end_underway(&self, work: &Arc<Underway>) {
        lock(&self.underway).take_if(|underway| Arc::ptr_eq(underway, work));
    }

    /// What a plan that uses this memory has left to the device.
    pub(crate) fn underway(&self) -> Option<Arc<Underway>> {
        lock(&self.underway).clone()
    }

    /// The copies of the weights in other layouts.
    pub(crate) fn copies(&self) -> &WeightCopies {
        &self.copies
    }

    /// A number that changes whenever the place of bytes changes.
    pub(crate) fn changes(&self) -> u64 {
        match &self.storage {
            Storage::Whole(_) => 0,
            Storage::Segments(segments) => segments.changes(),
        }
    }

    /// The segments.
    ///
    /// # Errors
    /// [`EngineError::ForeignMemory`] if this memory has none.
    fn segments(&self) -> Result<&SegmentedMemory, EngineError> {
        match &self.storage {
            Storage::Whole(_) => Err(EngineError::ForeignMemory),
            Storage::Segments(segments) => Ok(segments),
        }
    }
}

impl Memory for GgmlMemory {
    fn size(&self) -> u64 {
        match &self.storage {
            Storage::Whole(buffer) => buffer.size(),
            Storage::Segments(segments) => segments.size(),
        }
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        self.copies.written(offset, data.len() as u64);
        match &self.storage {
            Storage::Whole(buffer) => buffer.write_later(offset, data),
            Storage::Segments(segments) => segments.write(offset, data),
        }
    }

    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        let underway = self.underway();
        match &self.storage {
            Storage::Whole(buffer) => match underway {
                Some(underway) => underway.read(buffer, offset, out),
                None => buffer.read(offset, out),
            },
            Storage::Segments(segments) => {
                if let Some(underway) = underway {
                    underway.land();
                }
                segments.read(offset, out)
            }
        }
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        self.copies.written(offset, len);
        match &self.storage {
            Storage::Whole(buffer) => buffer.fill(offset, len, value),
            Storage::Segments(segments) => segments.fill(offset, len, value),
        }
    }

    fn copy_from(
        &self,
        offset: u64,
        source: &dyn Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), EngineError> {
        let source = GgmlMemory::of(source, self.allocator())?;
        check_range(offset, len, self.size())?;
        check_range(source_offset, len, source.size())?;
        let mut bytes = vec![0; CHUNK.min(len as usize)];
        let mut copy = |at: u64| {
            let part = &mut bytes[..CHUNK.min((len - at) as usize)];
            source.read(source_offset + at, BytesMut::from(&mut *part))?;
            self.write(offset + at, Bytes::from(&*part))
        };
        let mut chunks = (0..len.div_ceil(CHUNK as u64)).map(|chunk| chunk * CHUNK as u64);
        // Where the ranges overlap, a chunk is read before it is overwritten.
        let is_forward = !std::ptr::eq(self, source) || offset <= source_offset;
        match is_forward {
            true => chunks.try_for_each(&mut copy),
            false => chunks.rev().try_for_each(&mut copy),
        }
    }

    fn mark_weights(&self) {
        self.copies.mark_weights();
    }

    fn freeze(&self) -> bool {
        self.segments().map(SegmentedMemory::freeze).is_ok()
    }

    fn extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        self.extent_unless(offset, len, &|| false)
    }

    fn extent_unless(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Arc<dyn Extent>, EngineError> {
        self.segments()?.extent(offset, len, is_cancelled)
    }

    fn begin_extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        let extent = self.segments()?.begin_extent(offset, len)?;
        self.copies.written(offset, len);
        Ok(extent)
    }

    fn append(&self, extent: &Arc<dyn Extent>, data: Bytes<'_>) -> Result<(), EngineError> {
        let written = self.segments()?.append(extent, data)?;
        self.copies
            .written(written.start, written.end - written.start);
        Ok(())
    }

    fn is_untouched(&self, offset: u64, len: u64) -> bool {
        // To compare an upload with bytes of a GPU would read them back, behind all work of others.
        let segments = self.segments().ok().filter(|_| self.is_host);
        segments.is_some_and(|segments| segments.is_untouched(offset, len))
    }

    fn bytes_in_use(&self) -> u64 {
        match &self.storage {
            Storage::Whole(buffer) => buffer.size(),
            Storage::Segments(segments) => segments.bytes_in_use(),
        }
    }

    fn unshare(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        match &self.storage {
            Storage::Whole(_) => Ok(()),
            Storage::Segments(segments) => segments.unshare(offset, len, is_cancelled),
        }
    }

    fn attach(
        &self,
        offset: u64,
        extent: &Arc<dyn Extent>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, EngineError> {
        let attached = self.segments()?.attach(offset, extent, is_cancelled);
        // Also of the same bytes: others may have copies of what is attached. An attachment that
        // has failed may have written some.
        if { attached.as_ref() }.map_or(true, |attached| attached.has_changed) {
            self.copies.written(offset, extent.size());
        }
        Ok(attached?.shared)
    }

    fn is_unmodified(&self) -> bool {
        self.segments().is_ok_and(SegmentedMemory::is_unmodified)
    }

    fn max_mappings(&self) -> usize {
        match &self.storage {
            Storage::Segments(segments) if self.is_host => segments.max_mappings(),
            Storage::Segments(_) | Storage::Whole(_) => 0,
        }
    }

    fn charge_copies(&self, account: Arc<dyn CopyAccount>) {
        self.copies.charge(account);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
