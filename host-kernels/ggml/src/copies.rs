//! Copies of weights in another layout, and which of them a memory has.
//!
//! A [`WeightCopy`] takes memory of the engine, once. Memories that share the bytes of the weights
//! share the copy. Each of them has a [`HeldCopy`], for which its guest is charged as if nothing
//! were shared.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use vgpu_engine::{CopyAccount, EngineError};
use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{Shape, Tensor};
use vgpu_transport::lock::lock;

use crate::allocator::{Allocator, Reservation, allocation_size};
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

    /// The same weights where their first byte has this offset.
    pub(crate) fn at(self, offset: u64) -> Key {
        Key { offset, ..self }
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

/// A buffer type for weights, and the counter of the bytes of copies.
#[derive(Clone, Copy)]
pub(crate) struct CopyType<'a> {
    pub(crate) functions: &'static Functions,
    pub(crate) buft: abi::ggml_backend_buffer_type_t,
    pub(crate) bytes: &'a Arc<AtomicU64>,
}

impl CopyType<'_> {
    /// The bytes of a buffer for a copy.
    fn buffer_size(&self, key: &Key) -> usize {
        let tensor = key.tensor();
        // SAFETY: the buffer type is a constant object of the backend, and the tensor is valid.
        unsafe { (self.functions.buft_get_alloc_size)(self.buft, &raw const tensor) }
    }

    /// The bytes that a copy takes.
    pub(crate) fn cost(&self, key: &Key) -> u64 {
        allocation_size(self.buffer_size(key) as u64).saturating_add(OVERHEAD)
    }
}

/// Weights in another layout.
pub(crate) struct WeightCopy {
    /// The tensor in the buffer, with what the backend attaches to it. Its address is that of a
    /// source of nodes.
    tensor: Box<abi::ggml_tensor>,
    buffer: NonNull<abi::ggml_backend_buffer>,
    functions: &'static Functions,
    /// The counter of all copies.
    bytes: Arc<AtomicU64>,
    /// The bytes that the copy takes. Given back after the buffer, as fields are dropped.
    reserved: Reservation,
}

// SAFETY: the object owns its buffer and its tensor, which point to each other. Backends read both
// while they compute, on any thread.
unsafe impl Send for WeightCopy {}
// SAFETY: after the copy was made nothing changes it through `&self`.
unsafe impl Sync for WeightCopy {}

impl WeightCopy {
    /// A copy of the bytes at `data` in this layout, for which its [cost](CopyType::cost) is
    /// reserved. `None` if there is no memory for the copy.
    ///
    /// # Safety
    /// The tensor of `key` lies at `data`, readable, and the device computes with such a tensor in
    /// this layout.
    pub(crate) unsafe fn new(
        of: CopyType<'_>,
        key: &Key,
        data: *const c_void,
        reserved: Reservation,
    ) -> Option<WeightCopy> {
        let CopyType {
            functions,
            buft,
            bytes,
        } = of;
        let size = of.buffer_size(key);
        // SAFETY: the buffer type is a constant object of the backend.
        let buffer = NonNull::new(unsafe { (functions.buft_alloc_buffer)(buft, size) })?;
        bytes.fetch_add(reserved.bytes(), Ordering::Relaxed);
        let mut copy = WeightCopy {
            tensor: Box::new(key.tensor()),
            buffer,
            functions,
            bytes: Arc::clone(bytes),
            reserved,
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

    /// The bytes that the copy takes.
    fn cost(&self) -> u64 {
        self.reserved.bytes()
    }
}

impl Drop for WeightCopy {
    fn drop(&mut self) {
        // SAFETY: the object owns the buffer. Nothing uses it: plans read a copy while a memory has
        // it, and no memory drops a copy during a run (the contract of `Memory`).
        unsafe { (self.functions.buffer_free)(self.buffer.as_ptr()) };
        self.bytes.fetch_sub(self.cost(), Ordering::Relaxed);
    }
}

/// A memory's hold of a copy, for which its guest pays. The memory drops it when the guest's bytes
/// are no longer those that were copied.
pub(crate) struct HeldCopy {
    copy: Arc<WeightCopy>,
    /// The guest's bytes.
    range: Range<u64>,
    /// Given back after the copy, as fields are dropped.
    _charge: Option<Box<dyn Any + Send + Sync>>,
}

impl HeldCopy {
    /// The tensor that products read, valid as long as this.
    pub(crate) fn tensor(&self) -> *const abi::ggml_tensor {
        self.copy.tensor()
    }
}

/// The copies of weights whose bytes several memories share. Offsets are those in the shared bytes.
#[derive(Default)]
pub(crate) struct SharedCopies(Mutex<HashMap<Key, Weak<WeightCopy>>>);

impl SharedCopies {
    pub(crate) fn find(&self, key: &Key) -> Option<Arc<WeightCopy>> {
        lock(&self.0).get(key).and_then(Weak::upgrade)
    }

    /// Adds a copy. Returns the one that was there before, if there is one.
    pub(crate) fn add(&self, key: Key, copy: WeightCopy) -> Arc<WeightCopy> {
        let copy = Arc::new(copy);
        let mut copies = lock(&self.0);
        if let Some(found) = copies.get(&key).and_then(Weak::upgrade) {
            return found;
        }
        copies.retain(|_, copy| copy.strong_count() > 0);
        copies.insert(key, Arc::downgrade(&copy));
        copy
    }
}

/// What a memory has of copies of its weights, and who pays for them.
pub(crate) struct WeightCopies {
    allocator: Arc<Allocator>,
    /// The bytes that the memory takes.
    size: u64,
    is_weights: AtomicBool,
    copies: Mutex<Copies>,
    account: OnceLock<Arc<dyn CopyAccount>>,
}

impl WeightCopies {
    /// Of a memory of `size` bytes.
    pub(crate) fn new(allocator: &Arc<Allocator>, size: u64) -> WeightCopies {
        WeightCopies {
            allocator: Arc::clone(allocator),
            size: allocation_size(size),
            is_weights: AtomicBool::new(false),
            copies: Mutex::default(),
            account: OnceLock::new(),
        }
    }

    /// The memory holds weights.
    pub(crate) fn mark_weights(&self) {
        self.is_weights.store(true, Ordering::Relaxed);
    }

    /// Whether the memory holds weights.
    pub(crate) fn is_weights(&self) -> bool {
        self.is_weights.load(Ordering::Relaxed)
    }

    /// Charges this account for copies, if none is charged yet.
    pub(crate) fn charge(&self, account: Arc<dyn CopyAccount>) {
        // A second account is dropped.
        let _ = self.account.set(account);
    }

    /// Who is charged for copies.
    pub(crate) fn account(&self) -> Option<Arc<dyn CopyAccount>> {
        self.account.get().cloned()
    }

    /// The copy of these weights, if there is one.
    pub(crate) fn find(&self, key: &Key) -> Option<Arc<HeldCopy>> {
        lock(&self.copies).present.get(key).cloned()
    }

    /// Holds a copy that another memory with the same bytes has, and charges the guest. `None`
    /// unless as many bytes as this memory has stay free of what the guest may have.
    pub(crate) fn hold(&self, key: Key, copy: Arc<WeightCopy>) -> Option<Arc<HeldCopy>> {
        if !lock(&self.copies).may_hold() {
            return None;
        }
        let charge = self.pay(copy.cost(), &mut || Ok(()))?;
        Some(self.add(key, copy, charge, 0))
    }

    /// Makes a copy: reserves `cost` bytes of the engine for it, and charges the guest. `make`
    /// returns `None` if there is no memory for it. So does this function unless as many bytes as
    /// this memory has stay free: of the engine, of the host (`host_free`), and of what the guest
    /// may have.
    pub(crate) fn make(
        &self,
        key: Key,
        cost: u64,
        host_free: &dyn Fn() -> u64,
        make: impl FnOnce(Reservation) -> Option<Arc<WeightCopy>>,
    ) -> Option<Arc<HeldCopy>> {
        let (total, free) = self.allocator.free();
        if !lock(&self.copies).may_make(cost, self.size)
            || free.min(host_free()) < cost.saturating_add(self.size)
        {
            return None;
        }
        let mut reserved = None;
        let charge = self.pay(cost, &mut || {
            // Backends that compute on the host have such copies, and no limit of allocations.
            reserved = self.allocator.reserve(cost, 0);
            { reserved.is_some() }
                .then_some(())
                .ok_or(EngineError::OutOfMemory {
                    wanted: cost,
                    free,
                    total,
                })
        })?;
        Some(self.add(key, make(reserved?)?, charge, cost))
    }

    /// Charges the guest for `cost` bytes, and calls `reserve`. `None` if that fails, or leaves the
    /// guest less than the memory takes.
    #[allow(clippy::option_option)] // there may be nobody to charge
    fn pay(
        &self,
        cost: u64,
        reserve: &mut dyn FnMut() -> Result<(), EngineError>,
    ) -> Option<Option<Box<dyn Any + Send + Sync>>> {
        let Some(account) = self.account.get() else {
            return reserve().ok().map(|()| None);
        };
        let with_rest = cost.saturating_add(self.size);
        drop(account.charge(with_rest, &mut || Ok(())).ok()?);
        account.charge(cost, reserve).ok().map(Some)
    }

    fn add(
        &self,
        key: Key,
        copy: Arc<WeightCopy>,
        charge: Option<Box<dyn Any + Send + Sync>>,
        made: u64,
    ) -> Arc<HeldCopy> {
        let held = Arc::new(HeldCopy {
            copy,
            range: key.range(),
            _charge: charge,
        });
        let mut copies = lock(&self.copies);
        copies.made += made;
        let before = copies.present.insert(key, Arc::clone(&held));
        drop(copies);
        // Dropped without the lock: memory is freed and given back to the guest.
        drop(before);
        held
    }

    /// The guest writes to these bytes: ends the copies of them.
    pub(crate) fn written(&self, offset: u64, len: u64) {
        if self.is_weights() {
            // Dropped without the lock: memory is freed and given back to the guest.
            let ended = lock(&self.copies).forget(&(offset..offset.saturating_add(len)));
            drop(ended);
        }
    }

    /// A graph writes to the memory: it has no copies from now on, also if it is marked as weights
    /// later.
    pub(crate) fn forbid(&self) {
        let ended = lock(&self.copies).forbid();
        drop(ended);
    }
}

/// The copies of the weights in a memory.
#[derive(Default)]
struct Copies {
    present: HashMap<Key, Arc<HeldCopy>>,
    /// The cost of all that were made, in bytes.
    made: u64,
    /// Whether a graph writes to the memory, so that it holds more than weights.
    is_written: bool,
}

impl Copies {
    /// Whether the memory may have a further copy.
    fn may_hold(&self) -> bool {
        !self.is_written && self.present.len() < MAX_COPIES
    }

    /// Whether a memory of `size` bytes may have a further copy, which costs so many bytes.
    fn may_make(&self, cost: u64, size: u64) -> bool {
        let room = size.saturating_mul(MAX_COPIED).saturating_sub(self.made);
        self.may_hold() && cost <= room
    }

    /// The guest writes to this range. Returns the copies that this ends.
    #[must_use]
    fn forget(&mut self, range: &Range<u64>) -> Vec<Arc<HeldCopy>> {
        let is_touched = |_: &Key, held: &mut Arc<HeldCopy>| {
            held.range.start < range.end && range.start < held.range.end
        };
        { self.present.extract_if(is_touched) }
            .map(|(_, held)| held)
            .collect()
    }

    /// A graph writes to the memory: it has no copies from now on. Returns those that it had.
    #[must_use]
    fn forbid(&mut self) -> Vec<Arc<HeldCopy>> {
        self.is_written = true;
        self.forget(&(0..u64::MAX))
    }
}
