//! Copies of weights in another layout, and which of them a memory has.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{Shape, Tensor};

use crate::allocator::{Reservation, allocation_size};
use crate::library::Functions;
use crate::tensors;

/// The most copies of one memory at a time. Models have fewer weights.
const MAX_COPIES: usize = 4096;

/// What copies of one memory may take in all, also those that writes have ended, as a multiple of
/// its size: a guest that writes its weights again and again gets no further copies.
const MAX_COPIED: u64 = 3;

/// Bytes of the host's memory for a copy besides its elements: the objects, and the remainder of a
/// page.
const OVERHEAD: u64 = 1024;

/// Where weights lie in their memory, and what they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    offset: u64,
    /// With plain strides.
    shape: Shape,
}

impl Key {
    pub(crate) fn of(tensor: &Tensor) -> Key {
        Key {
            offset: tensor.offset,
            shape: tensor.shape.with_plain_strides(),
        }
    }

    /// The bytes of the weights.
    pub(crate) fn bytes(&self) -> u64 {
        self.shape.byte_len().unwrap_or(0)
    }

    /// The tensor, without a place.
    pub(crate) fn tensor(&self) -> abi::ggml_tensor {
        tensors::unplaced(&self.shape)
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes()
    }
}

/// Bytes for a copy. The guest's charge is given back after the engine's bytes.
pub(crate) struct PaidBytes {
    _reserved: Reservation,
    _charge: Option<Box<dyn Any + Send + Sync>>,
}

impl PaidBytes {
    pub(crate) fn new(
        reserved: Reservation,
        charge: Option<Box<dyn Any + Send + Sync>>,
    ) -> PaidBytes {
        PaidBytes {
            _reserved: reserved,
            _charge: charge,
        }
    }
}

/// A buffer type for weights, and the counter of the bytes of copies.
#[derive(Clone, Copy)]
pub(crate) struct CopyType<'a> {
    pub(crate) functions: &'static Functions,
    pub(crate) buft: abi::ggml_backend_buffer_type_t,
    pub(crate) bytes: &'a Arc<AtomicU64>,
}

/// Weights in another layout.
pub(crate) struct WeightCopy {
    /// The tensor in the buffer, with what the backend attaches to it. Its address is that of a
    /// source of nodes.
    tensor: Box<abi::ggml_tensor>,
    buffer: NonNull<abi::ggml_backend_buffer>,
    functions: &'static Functions,
    /// The guest's bytes.
    range: Range<u64>,
    /// Whether the guest's bytes are those that were copied.
    is_valid: AtomicBool,
    cost: u64,
    /// The counter of all copies.
    bytes: Arc<AtomicU64>,
    /// Given back after the buffer, as fields are dropped.
    _paid: PaidBytes,
}

// SAFETY: the object owns its buffer and its tensor, which point to each other. Backends read both
// while they compute, on any thread.
unsafe impl Send for WeightCopy {}
// SAFETY: after the copy was made nothing changes it through `&self` but the atomic flag.
unsafe impl Sync for WeightCopy {}

impl WeightCopy {
    /// A copy of the bytes at `data` in this layout. `pay` is asked for so many bytes. `None` if
    /// there is no memory for the copy.
    ///
    /// # Safety
    /// The tensor of `key` lies at `data`, readable, and the device computes with such a tensor in
    /// this layout.
    pub(crate) unsafe fn new(
        of: CopyType<'_>,
        key: &Key,
        data: *const c_void,
        pay: impl FnOnce(u64) -> Option<PaidBytes>,
    ) -> Option<WeightCopy> {
        let CopyType {
            functions,
            buft,
            bytes,
        } = of;
        let tensor = Box::new(key.tensor());
        // SAFETY: the buffer type is a constant object of the backend, and the tensor is valid.
        let size = unsafe { (functions.buft_get_alloc_size)(buft, &*tensor) };
        let cost = allocation_size(size as u64).saturating_add(OVERHEAD);
        let paid = pay(cost)?;
        // SAFETY: the buffer type is a constant object of the backend.
        let buffer = NonNull::new(unsafe { (functions.buft_alloc_buffer)(buft, size) })?;
        bytes.fetch_add(cost, Ordering::Relaxed);
        let mut copy = WeightCopy {
            tensor,
            buffer,
            functions,
            range: key.range(),
            is_valid: AtomicBool::new(true),
            cost,
            bytes: Arc::clone(bytes),
            _paid: paid,
        };
        let (tensor, buffer) = (&raw mut *copy.tensor, buffer.as_ptr());
        // SAFETY: the buffer is new and of this type, and large enough for the tensor, which is its
        // first and only one. `set_tensor` reads the bytes of the whole tensor at `data`.
        unsafe {
            (*buffer).usage = abi::GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
            let iface = &(*buffer).iface;
            let (get_base, set_tensor) = (iface.get_base?, iface.set_tensor?);
            (*tensor).buffer = buffer;
            (*tensor).data = get_base(buffer);
            if let Some(init) = iface.init_tensor {
                init(buffer, tensor);
            }
            set_tensor(buffer, tensor, data, 0, key.bytes() as usize);
        }
        Some(copy)
    }

    /// The tensor that products read, valid as long as the copy.
    pub(crate) fn tensor(&self) -> *const abi::ggml_tensor {
        &raw const *self.tensor
    }

    /// Whether the guest's bytes are those that were copied.
    pub(crate) fn is_valid(&self) -> bool {
        self.is_valid.load(Ordering::Acquire)
    }
}

impl Drop for WeightCopy {
    fn drop(&mut self) {
        // SAFETY: the object owns the buffer. Plans keep the copies that their nodes read.
        unsafe { (self.functions.buffer_free)(self.buffer.as_ptr()) };
        self.bytes.fetch_sub(self.cost, Ordering::Relaxed);
    }
}

/// The copies of the weights in a memory.
#[derive(Default)]
pub(crate) struct Copies {
    present: HashMap<Key, Arc<WeightCopy>>,
    /// The cost of all that were made, in bytes.
    made: u64,
    /// Whether a graph writes to the memory, so that it holds more than weights.
    is_written: bool,
}

impl Copies {
    pub(crate) fn find(&self, key: &Key) -> Option<Arc<WeightCopy>> {
        self.present.get(key).cloned()
    }

    /// Whether a memory of `size` bytes may have a further copy, which costs so many bytes.
    pub(crate) fn may_add(&self, cost: u64, size: u64) -> bool {
        let room = size.saturating_mul(MAX_COPIED).saturating_sub(self.made);
        !self.is_written && self.present.len() < MAX_COPIES && cost <= room
    }

    pub(crate) fn add(&mut self, key: Key, copy: &Arc<WeightCopy>) {
        self.made += copy.cost;
        self.present.insert(key, Arc::clone(copy));
    }

    /// The guest writes to this range. Returns the copies that this ends.
    #[must_use]
    pub(crate) fn forget(&mut self, range: &Range<u64>) -> Vec<Arc<WeightCopy>> {
        let is_touched = |_: &Key, copy: &mut Arc<WeightCopy>| {
            copy.range.start < range.end && range.start < copy.range.end
        };
        let ended: Vec<_> = { self.present.extract_if(is_touched) }
            .map(|(_, copy)| copy)
            .collect();
        for copy in &ended {
            copy.is_valid.store(false, Ordering::Release);
        }
        ended
    }

    /// A graph writes to the memory: it has no copies from now on. Returns those that it had.
    #[must_use]
    pub(crate) fn forbid(&mut self) -> Vec<Arc<WeightCopy>> {
        self.is_written = true;
        self.forget(&(0..u64::MAX))
    }
}
