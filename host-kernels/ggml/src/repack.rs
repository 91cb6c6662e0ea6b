//! Weights in a layout for which a backend has faster kernels.
//!
//! ggml's CPU backend has further buffer types for weights (`ggml_backend_dev_get_extra_bufts`:
//! `CPU_REPACK`, `AMX`, `KLEIDIAI`). What is written to a tensor of such a buffer is stored in
//! another layout, and cannot be read back. llama.cpp places weights there when it loads a model.
//!
//! The guest's bytes stay where they are. A product with weights reads a copy, which is made when a
//! graph with the product is compiled. The guest is charged for the copy. A write to the weights
//! ends it: plans then read the guest's bytes. Guests that share the bytes share the copy.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use vgpu_engine::EngineError;
use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{Graph, Node, Op, Tensor, Type};

use crate::copies::{CopyType, HeldCopy, Key, SharedCopies, WeightCopies, WeightCopy};
use crate::library::{Functions, Library};

/// The largest weight that is copied, in bytes: nothing ends a copy before its last byte.
const MAX_WEIGHT: u64 = 512 << 20;

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

    /// Makes a product read a copy of its weights. `supports` says whether the device computes a
    /// node, and `host_free` how many bytes the host has left. `None` if the product goes on with
    /// the guest's bytes. `is_cancelled` is asked before bytes are copied.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`].
    ///
    /// # Safety
    /// The product's tensors must be valid, with their memory, and no backend accesses them during
    /// the call.
    pub(crate) unsafe fn place(
        &self,
        product: &Product<'_>,
        supports: &dyn Fn(*const abi::ggml_tensor) -> bool,
        host_free: &dyn Fn() -> u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<RepackedSource>, EngineError> {
        let Product {
            graph,
            node,
            made,
            copies,
            shared,
        } = *product;
        let weights = graph.src(node, 0);
        let weights = weights.filter(|_| is_plain_product(graph, node));
        let (Some(weights), false) = (weights, self.layouts.is_empty()) else {
            return Ok(None);
        };
        let key = Key::of(weights);
        // SAFETY: the node is valid, and this call has it alone (this function's contract).
        let plain = unsafe { (*made).src[0] };
        let source = move |copy: &Arc<HeldCopy>| RepackedSource {
            node: made,
            plain,
            copy: Arc::downgrade(copy),
        };
        // Whether the device computes the node with these weights, which stay its source if so.
        let computes = |weights: *const abi::ggml_tensor| {
            // SAFETY: as above. The weights are a valid tensor as long as they are the source.
            unsafe {
                (*made).src[0] = weights.cast_mut();
                let computes = supports(made);
                if !computes {
                    (*made).src[0] = plain;
                }
                computes
            }
        };
        if let Some(held) = copies.find(&key) {
            return Ok(computes(held.tensor()).then(|| source(&held)));
        }
        let in_shared = shared.map(|(shared, offset)| (shared, key.at(offset)));
        if let Some(copy) = in_shared.and_then(|(shared, key)| shared.find(&key)) {
            let held = computes(copy.tensor()).then(|| copies.hold(key, copy));
            let held = held.flatten();
            if held.is_none() {
                // SAFETY: as above.
                unsafe { (*made).src[0] = plain };
            }
            return Ok(held.map(|held| source(&held)));
        }
        if key.bytes() > MAX_WEIGHT {
            return Ok(None);
        }
        let mut probe = key.tensor();
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
        let of = CopyType {
            functions: self.functions,
            buft: layout.buft,
            bytes: &self.bytes,
        };
        let held = copies.make(key, of.cost(&key), host_free, |reserved| {
            // SAFETY: `plain` is a view of the memory, which is the host's: only backends for the
            // processor have such buffer types, and the sources of their nodes are plain addresses.
            let copy = unsafe { WeightCopy::new(of, &key, (*plain).data, reserved) }?;
            Some(match in_shared {
                Some((shared, key)) => shared.add(key, copy),
                None => Arc::new(copy),
            })
        });
        let Some(held) = held else {
            return Ok(None);
        };
        // SAFETY: as above. The memory has the copy as long as nobody writes to the weights, and
        // the plan asks for it before each run.
        unsafe { (*made).src[0] = held.tensor().cast_mut() };
        Ok(Some(source(&held)))
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
    /// The copies of the memory with the weights.
    pub(crate) copies: &'a WeightCopies,
    /// The copies of all memories that hold these bytes, and the first byte of the weights in them,
    /// if others can hold them.
    pub(crate) shared: Option<(&'a SharedCopies, u64)>,
}

/// Whether kernels for other layouts may compute a node: one matrix, and rows of F32, which they
/// assert, and no demand that they do not read.
///
/// Not products with experts (`MUL_MAT_ID`): `CPU_REPACK` has room for one row of each token and
/// expert, and writes behind its memory if a token names an expert twice (`forward_mul_mat_id` of
/// ggml 0.20 to 0.26). The kernel for ggml's layout has room for all.
fn is_plain_product(graph: &Graph, node: &Node) -> bool {
    let is_matrix = |tensor: &Tensor| tensor.shape.ne[2..] == [1, 1];
    let Op::MulMat {
        hadamard: false, ..
    } = node.op
    else {
        return false;
    };
    let (Some(weights), Some(rows)) = (graph.src(node, 0), graph.src(node, 1)) else {
        return false;
    };
    let result = graph.dst(node);
    weights.shape.ty.is_quantized()
        && weights.shape.is_contiguous()
        && is_matrix(weights)
        && rows.shape.ty == Type::F32
        && rows.shape.is_contiguous()
        && is_matrix(rows)
        && result.shape.is_contiguous()
}

/// A product that reads a copy.
pub(crate) struct RepackedSource {
    node: *mut abi::ggml_tensor,
    /// Its weights as the guest stores them.
    plain: *mut abi::ggml_tensor,
    /// Exists as long as the guest's bytes are those that were copied.
    copy: Weak<HeldCopy>,
}

impl RepackedSource {
    /// Makes the product read the guest's bytes if the copy has ended. Returns whether it still
    /// reads the copy, which exists until somebody writes to the weights.
    ///
    /// # Safety
    /// The node and its sources must be valid tensors that no backend accesses during the call.
    pub(crate) unsafe fn refresh(&self) -> bool {
        let is_valid = self.copy.strong_count() > 0;
        if !is_valid {
            // SAFETY: the contract of this function.
            unsafe { (*self.node).src[0] = self.plain };
        }
        is_valid
    }
}
