//! Weights in a layout for which a backend has faster kernels.
//!
//! ggml's CPU backend has further buffer types for weights (`ggml_backend_dev_get_extra_bufts`:
//! `CPU_REPACK`, `AMX`, `KLEIDIAI`). What is written to a tensor of such a buffer is stored in
//! another layout, and cannot be read back. llama.cpp places weights there when it loads a model.
//!
//! The guest's bytes stay where they are. A product with weights reads a copy, which is made when a
//! graph with the product is compiled. The guest is charged for the copy. A write to the weights
//! ends it: plans then read the guest's bytes.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use vgpu_engine::{CopyAccount, EngineError};
use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{Graph, Node, Op, Shape, Tensor, Type};

use crate::device::BackendDevice;
use crate::library::{Functions, Library};
use crate::memory::{Allocator, GgmlMemory, Reservation, allocation_size};
use crate::tensors;

/// The most copies of one memory at a time. Models have fewer weights.
const MAX_COPIES: usize = 4096;

/// What copies of one memory may take in all, also those that writes have ended, as a multiple of
/// its size: a guest that writes its weights again and again gets no further copies.
const MAX_COPIED: u64 = 2;

/// Bytes of the host's memory for a copy besides its elements: the objects, and the remainder of a
/// page.
const OVERHEAD: u64 = 1024;

/// A buffer type of a device for weights.
struct Layout {
    buft: abi::ggml_backend_buffer_type_t,
    /// A buffer of the type without memory: the device is asked about a product with weights there.
    probe: NonNull<abi::ggml_backend_buffer>,
}

/// The buffer types of a device for weights.
pub(crate) struct Layouts {
    functions: &'static Functions,
    layouts: Vec<Layout>,
    /// The bytes of all copies that exist.
    bytes: Arc<AtomicU64>,
}

// SAFETY: buffer types are constant objects of the backend, and a buffer without memory is not
// changed before it is freed.
unsafe impl Send for Layouts {}
// SAFETY: as above. Nothing is changed through `&self` but the counter, which is atomic.
unsafe impl Sync for Layouts {}

impl Layouts {
    /// Those of `device`, in the order in which llama.cpp tries them.
    ///
    /// # Safety
    /// `device` must be a device of `library`.
    pub(crate) unsafe fn of(
        library: &'static Library,
        device: NonNull<abi::ggml_backend_device>,
    ) -> Layouts {
        type GetExtra = unsafe extern "C" fn(
            *mut abi::ggml_backend_device,
        ) -> *const abi::ggml_backend_buffer_type_t;
        let functions = library.functions();
        let mut layouts = Vec::new();
        // SAFETY: `ggml-backend.h` declares the function with this name and type
        // (`ggml_backend_dev_get_extra_bufts_t`). It returns a list that ends with a null pointer,
        // which is never freed, or null. The buffer types are constant objects.
        unsafe {
            let get = library.proc_address::<GetExtra>(c"ggml_backend_dev_get_extra_bufts");
            let mut next = get.map_or(ptr::null(), |get| get(device.as_ptr()));
            while !next.is_null() && !(*next).is_null() {
                let buft = *next;
                let probe = (functions.buft_alloc_buffer)(buft, 0);
                layouts.extend(NonNull::new(probe).map(|probe| Layout { buft, probe }));
                next = next.add(1);
            }
        }
        Layouts {
            functions,
            layouts,
            bytes: Arc::default(),
        }
    }

    /// None: the device reads weights as guests store them.
    pub(crate) fn none(library: &'static Library) -> Layouts {
        Layouts {
            functions: library.functions(),
            layouts: Vec::new(),
            bytes: Arc::default(),
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.layouts.len()
    }

    /// The bytes of all copies that exist.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Makes a product read a copy of its weights. No copy takes more than half of what the
    /// engine or the host (`host_free`) has left. `None` if the product goes on with the guest's
    /// bytes. `is_cancelled` is asked before bytes are copied.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`].
    ///
    /// # Safety
    /// The product's tensors must be valid, with their memory, and no backend accesses them during
    /// the call.
    pub(crate) unsafe fn place(
        &self,
        device: &BackendDevice,
        product: &Product<'_>,
        host_free: &dyn Fn() -> u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<RepackedSource>, EngineError> {
        let Product {
            graph,
            node,
            made,
            memory,
        } = *product;
        let weights = graph.src(node, 0);
        let weights = weights.filter(|_| is_plain_product(graph, node));
        let (Some(weights), false) = (weights, self.layouts.is_empty()) else {
            return Ok(None);
        };
        let key = Key::of(weights);
        // SAFETY: the node is valid, and this call has it alone (this function's contract).
        let plain = unsafe { (*made).src[0] };
        let source = move |copy: Arc<WeightCopy>| RepackedSource {
            node: made,
            plain,
            copy,
        };
        // Whether the device computes the node with these weights, which stay its source if so.
        let computes = |weights: *const abi::ggml_tensor| {
            // SAFETY: as above. The weights are a valid tensor as long as they are the source.
            unsafe {
                (*made).src[0] = weights.cast_mut();
                let computes = device.supports(made);
                if !computes {
                    (*made).src[0] = plain;
                }
                computes
            }
        };
        if let Some(copy) = memory.copies().find(&key) {
            return Ok(computes(&raw const *copy.tensor).then(|| source(copy)));
        }
        if !memory.copies().may_add(key.bytes(), memory.allocated()) {
            return Ok(None);
        }
        let mut probe = tensors::unplaced(&key.shape);
        let layout = self.layouts.iter().find(|layout| {
            probe.buffer = layout.probe.as_ptr();
            computes(&raw const probe)
        });
        let Some(layout) = layout else {
            return Ok(None);
        };
        // SAFETY: `made` is valid. `probe` ends with this call.
        unsafe { (*made).src[0] = plain };
        if is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        // SAFETY: `plain` is a view of the memory, which is the host's: only backends for the
        // processor have such buffer types, and the sources of their nodes are plain addresses.
        let copy = unsafe { self.copy(layout, &key, (*plain).data, memory, host_free) };
        let Some(copy) = copy.map(Arc::new) else {
            return Ok(None);
        };
        memory.copies().add(key, &copy);
        // SAFETY: as above. The copy lives as long as the returned value, which the plan keeps.
        unsafe { (*made).src[0] = ptr::from_ref(&*copy.tensor).cast_mut() };
        Ok(Some(source(copy)))
    }

    /// A copy of the bytes at `data` in this layout. `None` if there is no memory for it.
    ///
    /// # Safety
    /// The tensor of `key` lies at `data`, readable, and the device computes with such a tensor in
    /// this layout.
    unsafe fn copy(
        &self,
        layout: &Layout,
        key: &Key,
        data: *const c_void,
        memory: &GgmlMemory,
        host_free: &dyn Fn() -> u64,
    ) -> Option<WeightCopy> {
        let tensor = Box::new(tensors::unplaced(&key.shape));
        // SAFETY: the buffer type is a constant object of the backend, and the tensor is valid.
        let bytes = unsafe { (self.functions.buft_get_alloc_size)(layout.buft, &*tensor) } as u64;
        let cost = allocation_size(bytes).saturating_add(OVERHEAD);
        if host_free() / 2 < cost {
            return None;
        }
        let (reserved, charge) = memory.charge_copy(cost)?;
        // SAFETY: the buffer type is a constant object of the backend.
        let buffer = unsafe { (self.functions.buft_alloc_buffer)(layout.buft, bytes as usize) };
        self.bytes.fetch_add(cost, Ordering::Relaxed);
        let mut copy = WeightCopy {
            buffer: NonNull::new(buffer),
            functions: self.functions,
            range: key.range(),
            is_valid: AtomicBool::new(true),
            cost,
            bytes: Arc::clone(&self.bytes),
            _reserved: reserved,
            _charge: charge,
            tensor,
        };
        let buffer = copy.buffer?.as_ptr();
        let tensor = &raw mut *copy.tensor;
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
}

impl Drop for Layouts {
    fn drop(&mut self) {
        for layout in &self.layouts {
            // SAFETY: the object owns the buffer, which has no memory and which nothing refers to.
            unsafe { (self.functions.buffer_free)(layout.probe.as_ptr()) };
        }
    }
}

/// A node of a graph that multiplies with weights.
pub(crate) struct Product<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) node: &'a Node,
    /// The node as the device computes it.
    pub(crate) made: *mut abi::ggml_tensor,
    /// Where the weights are.
    pub(crate) memory: &'a GgmlMemory,
}

/// Whether kernels for other layouts may compute a node: products of F32 rows, one batch of them,
/// or with experts, which they assert, and no demand that they do not read.
fn is_plain_product(graph: &Graph, node: &Node) -> bool {
    let is_flat = |tensor: &Tensor, dims: usize| tensor.shape.ne[dims..].iter().all(|&n| n == 1);
    let (dims, batches) = match node.op {
        Op::MulMat {
            hadamard: false, ..
        } => (2, 2),
        Op::MulMatId { .. } => (3, 3),
        _ => return false,
    };
    let (Some(weights), Some(rows)) = (graph.src(node, 0), graph.src(node, 1)) else {
        return false;
    };
    let result = graph.dst(node);
    weights.shape.ty.is_quantized()
        && weights.shape.is_contiguous()
        && is_flat(weights, dims)
        && rows.shape.ty == Type::F32
        && rows.shape.is_contiguous()
        && is_flat(rows, batches)
        && result.shape.is_contiguous()
}

/// Where weights lie in their memory, and what they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    offset: u64,
    /// With plain strides.
    shape: Shape,
}

impl Key {
    fn of(tensor: &Tensor) -> Key {
        Key {
            offset: tensor.offset,
            shape: tensor.shape.with_plain_strides(),
        }
    }

    fn bytes(&self) -> u64 {
        self.shape.byte_len().unwrap_or(0)
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes()
    }
}

/// A product that reads a copy.
pub(crate) struct RepackedSource {
    node: *mut abi::ggml_tensor,
    /// Its weights as the guest stores them.
    plain: *mut abi::ggml_tensor,
    copy: Arc<WeightCopy>,
}

impl RepackedSource {
    /// Whether the copy has the bytes of the guest. Otherwise the product reads these from now on.
    ///
    /// # Safety
    /// The node and its sources must be valid tensors that no backend accesses during the call.
    pub(crate) unsafe fn is_present(&self) -> bool {
        let is_valid = self.copy.is_valid.load(Ordering::Acquire);
        if !is_valid {
            // SAFETY: the contract of this function.
            unsafe { (*self.node).src[0] = self.plain };
        }
        is_valid
    }
}

/// Weights in another layout.
struct WeightCopy {
    /// The tensor in the buffer, with what the backend attaches to it. Its address is that of a
    /// source of nodes.
    tensor: Box<abi::ggml_tensor>,
    buffer: Option<NonNull<abi::ggml_backend_buffer>>,
    functions: &'static Functions,
    /// The guest's bytes.
    range: Range<u64>,
    /// Whether the guest's bytes are those that were copied.
    is_valid: AtomicBool,
    cost: u64,
    /// The counter of all copies.
    bytes: Arc<AtomicU64>,
    /// Given back after the buffer, as fields are dropped.
    _reserved: Reservation,
    _charge: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: the object owns its buffer and its tensor, which point to each other. Backends read both
// while they compute, on any thread.
unsafe impl Send for WeightCopy {}
// SAFETY: after the copy was made nothing changes it through `&self` but the atomic flag.
unsafe impl Sync for WeightCopy {}

impl Drop for WeightCopy {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer {
            // SAFETY: the object owns the buffer. Plans keep the copies that their nodes read.
            unsafe { (self.functions.buffer_free)(buffer.as_ptr()) };
        }
        self.bytes.fetch_sub(self.cost, Ordering::Relaxed);
    }
}

/// The copies of the weights in a memory.
#[derive(Default)]
pub(crate) struct Copies {
    present: HashMap<Key, Arc<WeightCopy>>,
    /// The bytes of all that were made.
    made: u64,
    /// Whether graphs write to the memory, so that it holds more than weights.
    is_written: bool,
}

impl Copies {
    fn find(&self, key: &Key) -> Option<Arc<WeightCopy>> {
        self.present.get(key).cloned()
    }

    /// Whether a memory of `size` bytes may have a further copy, of so many bytes.
    fn may_add(&self, bytes: u64, size: u64) -> bool {
        let room = size.saturating_mul(MAX_COPIED).saturating_sub(self.made);
        !self.is_written && self.present.len() < MAX_COPIES && (1..=room).contains(&bytes)
    }

    fn add(&mut self, key: Key, copy: &Arc<WeightCopy>) {
        self.made += key.bytes();
        self.present.insert(key, Arc::clone(copy));
    }

    /// The guest writes to this range.
    pub(crate) fn forget(&mut self, range: &Range<u64>) {
        self.present.retain(|_, copy| {
            let is_apart = copy.range.end <= range.start || range.end <= copy.range.start;
            if !is_apart {
                copy.is_valid.store(false, Ordering::Release);
            }
            is_apart
        });
    }

    /// A graph writes to the memory.
    pub(crate) fn forget_all(&mut self) {
        self.is_written = true;
        self.forget(&(0..u64::MAX));
    }
}

/// Who pays for the copies of a memory.
pub(crate) type Account = OnceLock<Arc<dyn CopyAccount>>;

/// Reserves `cost` bytes of the engine for a copy, and charges the guest. `None` if the engine has
/// less than twice as much left, or the guest's quota less than that.
pub(crate) fn charge(
    allocator: &Arc<Allocator>,
    account: &Account,
    cost: u64,
) -> Option<(Reservation, Option<Box<dyn Any + Send + Sync>>)> {
    let mut reserved = None;
    let mut reserve = || {
        let (total, free) = allocator.free();
        reserved = (free / 2 >= cost)
            .then(|| allocator.reserve(cost))
            .flatten();
        match reserved {
            Some(_) => Ok(()),
            None => Err(EngineError::OutOfMemory {
                wanted: cost,
                free,
                total,
            }),
        }
    };
    let charge = match account.get() {
        Some(account) => Some(account.charge(cost, &mut reserve).ok()?),
        None => reserve().map(|()| None).ok()?,
    };
    Some((reserved?, charge))
}
