//! The tensors and graphs that a backend gets. The structures are ggml's own, in memory of the
//! engine: a backend reads them until it has computed them, and keeps no pointer to them.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{Op, Shape, Type};

use crate::params::Encoded;

/// `GGML_OP_NONE`: the first operator of every release.
const NONE: c_int = 0;

/// A tensor without a place.
fn empty() -> abi::ggml_tensor {
    // SAFETY: every field is a number or a pointer that may be null.
    unsafe { std::mem::zeroed() }
}

/// A tensor of `size` bytes that is all of a buffer.
pub(crate) fn whole(
    buffer: NonNull<abi::ggml_backend_buffer>,
    base: *mut c_void,
    size: u64,
) -> abi::ggml_tensor {
    let bytes = size as usize;
    abi::ggml_tensor {
        type_: Type::I8 as c_int,
        buffer: buffer.as_ptr(),
        ne: [size as i64, 1, 1, 1],
        nb: [1, bytes, bytes, bytes],
        op: NONE,
        data: base,
        ..empty()
    }
}

/// A shape with the strides that a backend gets. That of a dimension with one element has no
/// meaning, but backends assert on it, as for the kernel of CONV_2D_DW with adjacent channels: it
/// is the guest's, as without vgpu, unless it is beyond the tensor.
fn strides(shape: &Shape) -> Shape {
    let mut plain = shape.with_plain_strides();
    let bytes = plain.byte_len().unwrap_or(0);
    for d in 0..4 {
        if shape.ne[d] == 1 && shape.nb[d] <= bytes {
            plain.nb[d] = shape.nb[d];
        }
    }
    plain
}

/// A tensor that has no place yet.
pub(crate) fn unplaced(shape: &Shape) -> abi::ggml_tensor {
    let Shape { ty, ne, nb } = strides(shape);
    abi::ggml_tensor {
        type_: ty as c_int,
        ne: ne.map(|n| n as i64),
        nb: nb.map(|n| n as usize),
        op: NONE,
        ..empty()
    }
}

/// A tensor whose first byte has this offset, as a view of the tensor `whole` of its buffer.
///
/// # Safety
/// `whole` must point to a tensor that [`whole`] has made.
pub(crate) unsafe fn view(
    shape: &Shape,
    whole: *mut abi::ggml_tensor,
    offset: u64,
) -> abi::ggml_tensor {
    // SAFETY: the caller guarantees that `whole` points to a tensor.
    let (buffer, base) = unsafe { ((*whole).buffer, (*whole).data) };
    abi::ggml_tensor {
        buffer,
        view_src: whole,
        view_offs: offset as usize,
        data: base.wrapping_byte_add(offset as usize),
        ..unplaced(shape)
    }
}

/// The tensors and the node lists of graphs. The addresses of tensors and lists do not change.
#[derive(Default)]
pub(crate) struct Arena {
    #[allow(clippy::vec_box)] // other tensors have the address of a tensor when the list grows
    tensors: Vec<Box<abi::ggml_tensor>>,
}

impl Arena {
    /// Bytes of host memory.
    pub(crate) fn bytes(&self) -> usize {
        self.tensors.len() * (size_of::<abi::ggml_tensor>() + 16)
            + self.tensors.capacity() * size_of::<usize>()
    }

    /// Keeps a tensor and returns its address.
    pub(crate) fn keep(&mut self, tensor: abi::ggml_tensor) -> *mut abi::ggml_tensor {
        let mut tensor = Box::new(tensor);
        let address = ptr::from_mut(&mut *tensor);
        self.tensors.push(tensor);
        address
    }

    /// Forgets tensors kept since there were `count`.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.tensors.truncate(count);
    }

    /// How many tensors there are.
    pub(crate) fn len(&self) -> usize {
        self.tensors.len()
    }
}

/// Makes `dst` the result of an operator.
pub(crate) fn compute(
    dst: &mut abi::ggml_tensor,
    op: &Op,
    encoded: &Encoded,
    sources: &[*mut abi::ggml_tensor],
) {
    dst.op = encoded.op;
    dst.op_params = encoded.words;
    dst.flags = abi::GGML_TENSOR_FLAG_COMPUTE as i32;
    dst.src[..sources.len()].copy_from_slice(sources);
    // The engine gives tensors no names. A tensor of a graph has one in some backends' messages.
    let name = op.kind().ggml_name().bytes().take(dst.name.len() - 1);
    for (to, byte) in dst.name.iter_mut().zip(name) {
        *to = byte.cast_signed();
    }
}

/// The most graphs of a [`Graph`] that a backend has at a time.
pub(crate) const MAX_PARTS: usize = 32;

/// Nodes, made of tensors of an [`Arena`], of which a backend gets some at a time.
pub(crate) struct Graph {
    /// What the backend gets. It may read one until it has computed it.
    parts: Box<[abi::ggml_cgraph]>,
    nodes: Box<[*mut abi::ggml_tensor]>,
    /// How often tensors are used, which `parts` point to.
    uses: UseTable,
}

/// ggml's hash table of tensors (`ggml_hash_set`) and how often each is used: open addressing, with
/// the next slot where one is taken.
struct UseTable {
    /// One bit for each slot that is taken.
    used: Box<[u32]>,
    keys: Box<[*mut abi::ggml_tensor]>,
    counts: Box<[i32]>,
}

impl UseTable {
    fn new(uses: &[(*mut abi::ggml_tensor, u32)]) -> UseTable {
        let size = 2 * uses.len() + 1;
        let mut table = UseTable {
            used: vec![0; size.div_ceil(32)].into(),
            keys: vec![ptr::null_mut(); size].into(),
            counts: vec![0; size].into(),
        };
        for &(tensor, count) in uses {
            let mut slot = (tensor.addr() >> 4) % size; // `ggml_hash`
            while !table.keys[slot].is_null() {
                slot = (slot + 1) % size;
            }
            table.used[slot / 32] |= 1 << (slot % 32);
            table.keys[slot] = tensor;
            table.counts[slot] = count.cast_signed();
        }
        table
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.used) + size_of_val(&*self.keys) + size_of_val(&*self.counts)
    }
}

// SAFETY: the pointers are to tensors of the arena that is kept with the graph, and to the graph's
// own memory. Both move between threads with the plan.
unsafe impl Send for Graph {}

/// `count` numbers for graphs, of which this is the first: a backend may take graphs with the same
/// number for the same. ggml's own graphs, which count from 1, do not reach them.
pub(crate) fn numbers(count: usize) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 48);
    NEXT.fetch_add(count as u64, Ordering::Relaxed)
}

impl Graph {
    /// A graph of these nodes, in this order, each with the number of uses of its result if a
    /// backend may leave the result out ([`Source::encode`](crate::nodes::Source::encode)).
    pub(crate) fn new(nodes: Vec<*mut abi::ggml_tensor>, uses: &[Option<u32>]) -> Graph {
        let known = nodes.iter().zip(uses);
        let known: Vec<_> = known
            .filter_map(|(&node, uses)| Some((node, (*uses)?)))
            .collect();
        let mut uses = UseTable::new(&known);
        let mut part = || abi::ggml_cgraph {
            size: 0,
            n_nodes: 0,
            n_leafs: 0,
            nodes: ptr::null_mut(),
            grads: ptr::null_mut(),
            grad_accs: ptr::null_mut(),
            leafs: ptr::null_mut(),
            use_counts: uses.counts.as_mut_ptr(),
            visited_hash_set: abi::ggml_hash_set {
                size: uses.keys.len(),
                used: uses.used.as_mut_ptr(),
                keys: uses.keys.as_mut_ptr(),
            },
            order: 0,
            uid: 0,
        };
        Graph {
            parts: (0..nodes.len().min(MAX_PARTS)).map(|_| part()).collect(),
            nodes: nodes.into_boxed_slice(),
            uses,
        }
    }

    /// How many nodes there are.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// These nodes as a graph with this number, for a call of a backend, which has `before` graphs
    /// of this object: fewer than [`MAX_PARTS`].
    pub(crate) fn part(
        &mut self,
        nodes: Range<usize>,
        number: u64,
        before: usize,
    ) -> *mut abi::ggml_cgraph {
        let nodes = &mut self.nodes[nodes];
        let part = &mut self.parts[before];
        part.size = nodes.len() as c_int;
        part.n_nodes = nodes.len() as c_int;
        part.nodes = nodes.as_mut_ptr();
        part.uid = number;
        ptr::from_mut(part)
    }

    /// Bytes of host memory.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.parts) + size_of_val(&*self.nodes) + self.uses.bytes() + 5 * 16 + 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_get_the_strides_of_the_guest_unless_they_are_beyond_the_tensor() {
        let of = |ne, nb| {
            strides(&Shape {
                ty: Type::F32,
                ne,
                nb,
            })
            .nb
        };
        // The kernel of CONV_2D_DW with channels first: ggml asserts that its third stride is not
        // larger than the first.
        assert_eq!(of([3, 3, 1, 9], [36, 108, 36, 4]), [36, 108, 36, 4]);
        assert_eq!(of([3, 3, 1, 9], [36, 108, 1 << 60, 4]), [36, 108, 324, 4]);
        assert_eq!(of([8, 2, 1, 1], [4, 32, 64, 64]), [4, 32, 64, 64]);
        // The rows of an empty tensor.
        assert_eq!(of([0, 1, 1, 1], [4, 1 << 40, 7, 0]), [4, 4, 4, 0]);
    }
}
