//! Memory of the host that the device copies from and to by itself (pinned memory: the device's
//! host buffer type). Small writes of guests wait there until the next graph, in front of which the
//! backend gets them, and results that are read behind a graph pass through it.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use vgpu_ggml_abi as abi;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::lock;

use crate::library::Functions;

/// The unit in which writes take memory.
const SLOT_BYTES: usize = 4 << 10;

/// The units that there are for writes: 1 MiB.
const SLOTS: usize = 256;

/// The largest write that waits.
pub(crate) const MAX_WRITE: usize = 64 << 10;

/// The units that the writes of one buffer may have at a time while they wait.
pub(crate) const MAX_SLOTS_OF_BUFFER: usize = SLOTS / 4;

/// The most bytes that are read behind a graph in one copy.
pub(crate) const MAX_READ: usize = 1 << 20;

/// The bytes of the buffer.
const BYTES: usize = SLOTS * SLOT_BYTES + MAX_READ;

/// The memory of one device for copies. The part for writes is divided into slots. The part for
/// reads belongs to whoever has the lock of the device's backend.
pub(crate) struct Staging {
    functions: &'static Functions,
    buffer: NonNull<abi::ggml_backend_buffer>,
    base: NonNull<u8>,
    /// The slots that a write has.
    taken: Mutex<[bool; SLOTS]>,
}

// SAFETY: the object owns its buffer, whose memory is the host's and belongs to no thread.
unsafe impl Send for Staging {}
// SAFETY: a slot has one `StagedBytes` at a time, which alone accesses its bytes, and the part for
// reads is accessed by unsafe functions only. The lock is around the rest.
unsafe impl Sync for Staging {}

impl Staging {
    /// Memory of a device whose host buffer type this is. `None` if there is none that the device
    /// copies from by itself: backends then give memory of another type.
    ///
    /// # Safety
    /// `buft` must be a buffer type of the library of `functions`, of memory that the host can
    /// access.
    pub(crate) unsafe fn new(
        functions: &'static Functions,
        buft: abi::ggml_backend_buffer_type_t,
    ) -> Option<Staging> {
        // SAFETY: the buffer type is a constant object of the backend.
        let buffer = NonNull::new(unsafe { (functions.buft_alloc_buffer)(buft, BYTES) })?;
        // SAFETY: the buffer is new, and its functions take the buffer itself. It is freed where
        // nothing else has got it.
        unsafe {
            let raw = buffer.as_ptr();
            let is_of_type = (*raw).buft == buft && (*raw).size >= BYTES;
            let base = { (*raw).iface.get_base.filter(|_| is_of_type) }.map(|get| get(raw));
            let Some(base) = base.and_then(|base| NonNull::new(base.cast())) else {
                (functions.buffer_free)(raw);
                return None;
            };
            Some(Staging {
                functions,
                buffer,
                base,
                taken: Mutex::new([false; SLOTS]),
            })
        }
    }

    /// Copies `data`, at most [`MAX_WRITE`] bytes, into slots that follow each other. `None` if
    /// that takes more than `most`, or if fewer are free.
    pub(crate) fn stage(self: &Arc<Self>, data: Bytes<'_>, most: usize) -> Option<StagedBytes> {
        let count = data.len().div_ceil(SLOT_BYTES);
        if count > most {
            return None;
        }
        let first = {
            let mut taken = lock(&self.taken);
            let is_free = |slots: &[bool]| slots.iter().all(|&taken| !taken);
            let first = taken.windows(count.max(1)).position(is_free)?;
            taken[first..first + count].fill(true);
            first
        };
        let staged = StagedBytes {
            staging: Arc::clone(self),
            first,
            count,
            len: data.len(),
        };
        // SAFETY: the slots lie in the buffer and have at least `len` bytes. They belong to
        // `staged` alone, which nobody else has yet.
        let mut slots = unsafe { BytesMut::from_raw(staged.as_ptr().cast_mut(), staged.len) };
        slots.copy_from(data);
        Some(staged)
    }

    /// The part for reads: [`MAX_READ`] bytes. Only who has the lock of the device's backend may
    /// use it, and until the device has copied what the backend was told to copy.
    pub(crate) fn for_reads(&self) -> *mut c_void {
        let at = SLOTS * SLOT_BYTES;
        self.base.as_ptr().wrapping_add(at).cast()
    }

    /// Copies the first bytes of the part for reads to `out`.
    ///
    /// # Safety
    /// `out` has at most [`MAX_READ`] bytes, to which the device has copied. The caller has the
    /// lock of the device's backend, and the device copies nothing there now.
    pub(crate) unsafe fn take_read(&self, mut out: BytesMut<'_>) {
        // SAFETY: the part for reads has so many bytes, and nobody else accesses them now: the
        // contract of this function.
        let bytes = unsafe { Bytes::from_raw(self.for_reads().cast(), out.len()) };
        out.copy_from(bytes);
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: the object owns the buffer. No slot is taken, since each keeps this object, and
        // whoever has read behind a graph has waited for the copy.
        unsafe { (self.functions.buffer_free)(self.buffer.as_ptr()) };
    }
}

/// Bytes that were copied into slots. While the device may read them, nobody drops this.
pub(crate) struct StagedBytes {
    staging: Arc<Staging>,
    /// The first slot, and how many there are.
    first: usize,
    count: usize,
    len: usize,
}

impl StagedBytes {
    /// The address of the first byte.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        let at = self.first * SLOT_BYTES;
        self.staging.base.as_ptr().wrapping_add(at).cast_const()
    }

    /// How many bytes there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// How many slots they take.
    pub(crate) fn slots(&self) -> usize {
        self.count
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> Bytes<'_> {
        // SAFETY: the slots lie in the buffer, which `staging` keeps, and have at least `len`
        // bytes. They were written when this object was made, and nobody writes to them as long as
        // it exists.
        unsafe { Bytes::from_raw(self.as_ptr(), self.len) }
    }
}

impl Drop for StagedBytes {
    fn drop(&mut self) {
        lock(&self.staging.taken)[self.first..self.first + self.count].fill(false);
    }
}
