//! From a node of the IR to a tensor of ggml, and which nodes a device computes.

use std::collections::HashMap;

use vgpu_engine::fuse::is_same;
use vgpu_ggml_abi as abi;
use vgpu_ggml_abi::versions::{Since, Version};
use vgpu_transport::ir::{
    Graph as IrGraph, Node, Op, OpKind, Precision, Shape, Tensor, Type, ValidGraph,
};

use crate::device::BackendDevice;
use crate::located::Located;
use crate::memory::GgmlMemory;
use crate::params;
use crate::tensors::{Arena, compute};

/// A graph of a guest and what its tensors are on the device.
pub(crate) struct Source<'a> {
    pub(crate) graph: &'a IrGraph,
    /// The memory of each buffer in the graph's table.
    memory: &'a [&'a GgmlMemory],
    /// The places of its tensors.
    located: &'a Located,
    /// Whether the guest leaves zero bytes behind quantised rows.
    pads_rows: bool,
    /// Whether a node writes to the buffer, for each of the table.
    is_written: Vec<bool>,
}

/// The tensors of ggml with the present values of a graph's tensors.
pub(crate) struct Present {
    /// For each tensor of the graph, a view of its buffer.
    views: Vec<*mut abi::ggml_tensor>,
    /// By the place of their first byte, the last result there: its index in the graph, and the
    /// node. One that another result has overwritten in part may be left: no tensor with its
    /// elements is read before they are computed again, or the reader wants the bytes as they are
    /// then, which the node names as well as a view does.
    results: HashMap<(u32, u64), (u32, *mut abi::ggml_tensor)>,
}

impl Present {
    pub(crate) fn with_capacity(tensors: usize) -> Present {
        Present {
            views: Vec::with_capacity(tensors),
            results: HashMap::new(),
        }
    }

    /// Adds the next tensor of the graph.
    pub(crate) fn add(&mut self, view: *mut abi::ggml_tensor) {
        self.views.push(view);
    }

    /// `node` is the result of the graph's node with the tensor `index` as its result.
    pub(crate) fn set(&mut self, graph: &IrGraph, index: u32, node: *mut abi::ggml_tensor) {
        let Tensor { buffer, offset, .. } = graph.tensors[index as usize];
        self.results.insert((buffer, offset), (index, node));
    }

    /// Another engine computes this result.
    pub(crate) fn forget(&mut self, result: &Tensor) {
        self.results.remove(&(result.buffer, result.offset));
    }

    /// The tensor with this index: the node with the same elements as its result, if there is one.
    /// Backends compute a node together with those whose sources are its result.
    fn get(&self, graph: &IrGraph, index: u32) -> *mut abi::ggml_tensor {
        let tensor = &graph.tensors[index as usize];
        let result = self.results.get(&(tensor.buffer, tensor.offset));
        match result {
            Some(&(of, node)) if is_same(&graph.tensors[of as usize], tensor) => node,
            _ => self.views[index as usize],
        }
    }
}

/// A node as a device computes it.
pub(crate) enum Encoded {
    /// The result is in its place.
    InPlace(*mut abi::ggml_tensor),
    /// The backend wants more bytes for the result than its elements have: a tensor without a
    /// place, for which it wants so many bytes, and a node that copies it to its place.
    Copied {
        node: *mut abi::ggml_tensor,
        bytes: u64,
        copy: *mut abi::ggml_tensor,
    },
}

impl<'a> Source<'a> {
    pub(crate) fn new(
        valid: &'a ValidGraph,
        memory: &'a [&'a GgmlMemory],
        located: &'a Located,
    ) -> Source<'a> {
        let graph = valid.graph();
        let mut is_written = vec![false; memory.len()];
        let written = graph.nodes.iter().flat_map(Node::written_tensors);
        for tensor in written {
            is_written[graph.tensors[tensor].buffer as usize] = true;
        }
        for (memory, _) in memory.iter().zip(&is_written).filter(|(_, is)| **is) {
            memory.copies().forbid();
        }
        Source {
            graph,
            memory,
            located,
            pads_rows: valid.pads_rows(),
            is_written,
        }
    }

    /// The node as tensors of ggml. `None` if the device does not compute it. `uses` is the number
    /// of uses of a result that the backend may leave out when it computes these uses together with
    /// the node ([`uses`](vgpu_engine::fuse::uses)); `None` if the result has to be in memory.
    ///
    /// # Safety
    /// `present` has a valid tensor for each tensor of the graph, the places of the tensors are
    /// right, and the graph's memory is allocated.
    pub(crate) unsafe fn encode(
        &self,
        device: &BackendDevice,
        node: &Node,
        uses: Option<u32>,
        present: &Present,
        arena: &mut Arena,
    ) -> Option<Encoded> {
        let graph = self.graph;
        let to = graph.dst(node);
        let in_place = graph
            .src(node, 0)
            .is_some_and(|from| (from.buffer, from.offset) == (to.buffer, to.offset));
        // The kernels of ggml write to the first source and ignore the place of the result.
        if node.op.updates_sources() && !in_place {
            return None;
        }
        let (ids, release) = (device.ggml.ids(), device.ggml.version());
        let encoded = params::encode(&node.op, in_place, ids, release)?;
        if !params::takes_sources(&node.op, |i| graph.src(node, i).is_none(), release) {
            return None;
        }
        // SAFETY: the contract of this function.
        if !device.is_cpu && !unsafe { self.has_room_for_rows(device, node, present) } {
            return None;
        }
        let computes = match device.is_cpu {
            true => cpu_backend_computes(graph, node, release),
            false => gpu_backend_computes(graph, node, release),
        };
        if !computes {
            return None;
        }
        // SAFETY: the contract of this function.
        let mut dst = unsafe { self.located.view(node.dst, to) }?;
        let mut sources: Vec<*mut abi::ggml_tensor> = { node.src.as_slice().iter() }
            .map(|source| source.map_or(std::ptr::null_mut(), |index| present.get(graph, index)))
            .collect();
        // ggml's node has the place of the result as a further source.
        let place = match node.op.kind() {
            OpKind::Copy => Some(1),
            OpKind::SetRows => Some(2),
            _ => None,
        };
        if let Some(place) = place {
            let same = arena.keep(dst);
            sources.resize(place + 1, std::ptr::null_mut());
            sources[place] = same;
        }
        let place = dst;
        compute(&mut dst, &node.op, &encoded, &sources);
        // Before the backend is asked about the nodes that read the result: some answers depend on
        // what a source is a view of.
        match uses {
            // No backend leaves out a view, since others may read the bytes.
            Some(_) => (dst.view_src, dst.view_offs) = (std::ptr::null_mut(), 0),
            None => dst.flags |= abi::GGML_TENSOR_FLAG_OUTPUT as i32,
        }
        let dst = arena.keep(dst);
        // SAFETY: the node is a tensor of the arena, its sources are such by the contract of this
        // function, and the memory of all of them is allocated.
        if !unsafe { device.supports(dst) } {
            return None;
        }
        // Kernels write rows of a quantised result to their end only, and the question of its size
        // may end the process.
        if to.shape.ty.is_quantized() {
            return Some(Encoded::InPlace(dst));
        }
        // SAFETY: as for the question before.
        let bytes = unsafe { device.allocator.tensor_bytes(dst) };
        if bytes <= byte_len(to) {
            return Some(Encoded::InPlace(dst));
        }
        let is_plain = !node.op.updates_sources() && to.shape.is_contiguous();
        let copying = params::encode(&Op::Copy {}, false, ids, release).filter(|_| is_plain)?;
        let (mut copy, same) = (place, arena.keep(place));
        compute(&mut copy, &Op::Copy {}, &copying, &[dst, same]);
        copy.flags |= abi::GGML_TENSOR_FLAG_OUTPUT as i32;
        let copy = arena.keep(copy);
        // SAFETY: as for the node.
        let is_copied = unsafe { device.supports(copy) };
        is_copied.then_some(Encoded::Copied {
            node: dst,
            bytes,
            copy,
        })
    }

    /// The memory of the first operand if it holds nothing but weights, and the index of the
    /// operand.
    pub(crate) fn weights(&self, node: &Node) -> Option<(&'a GgmlMemory, u32)> {
        let index = (*node.src.as_slice().first()?)?;
        let buffer = self.graph.tensors[index as usize].buffer as usize;
        let memory = self.memory[buffer];
        (memory.copies().is_weights() && !self.is_written[buffer]).then_some((memory, index))
    }

    /// Whether the product, if the node is one, may read its rows of quantised weights in units of
    /// [`ROW_UNIT`](vgpu_transport::ir::ROW_UNIT) elements, as kernels of some backends for GPUs
    /// do. The bytes behind the last row have to be there, and finite: activations of 0 are
    /// multiplied with them.
    ///
    /// # Safety
    /// As for [`Source::encode`].
    unsafe fn has_room_for_rows(
        &self,
        device: &BackendDevice,
        node: &Node,
        present: &Present,
    ) -> bool {
        let is_product = matches!(node.op, Op::MulMat { .. } | Op::MulMatId { .. });
        let Some(&Some(index)) = node.src.as_slice().first().filter(|_| is_product) else {
            return true;
        };
        let tensor = &self.graph.tensors[index as usize];
        let Shape { ty, ne, nb } = tensor.shape;
        if !ty.is_quantized() {
            return true;
        }
        // The question ends the process if the stride of blocks is another one, also in rows of
        // one block.
        if nb[0] != ty.block_bytes() {
            return false;
        }
        // SAFETY: the tensor is valid: this function's contract.
        let wanted = unsafe {
            device
                .allocator
                .tensor_bytes(present.get(self.graph, index))
        };
        // Behind a row that is not the last of its tensor are further rows. Behind a tensor that is
        // computed may be what was there before.
        let is_weights = self.weights(node).is_some();
        let is_padded = self.pads_rows && is_weights && tensor.shape.is_contiguous();
        let padding = if is_padded { ty.row_padding(ne[0]) } else { 0 };
        wanted <= byte_len(tensor) + padding
    }
}

/// The bytes of a tensor, as ggml counts them.
fn byte_len(tensor: &Tensor) -> u64 {
    tensor.shape.with_plain_strides().byte_len().unwrap_or(0)
}

/// Whether ggml's CPU backend computes a node. The backend's `supports_op` answers yes for types
/// that end the process in the backend's kernels.
fn cpu_backend_computes(graph: &IrGraph, node: &Node, release: Version) -> bool {
    let dst = &graph.dst(node).shape;
    let src = |i| graph.src(node, i).map(|tensor| &tensor.shape);
    let is = |shape: Option<&Shape>, types: &[Type]| shape.is_none_or(|s| types.contains(&s.ty));
    let has_rows = |shape: Option<&Shape>| shape.is_none_or(Shape::has_dense_rows);
    let floats = [Type::F32, Type::F16, Type::Bf16];
    let is_weight = |ty: Type| {
        floats.contains(&ty) || ty.is_quantized() && !matches!(ty, Type::Q8_1 | Type::Q8K)
    };
    match node.op {
        // Before, sums of F16 are in F16 on processors with AVX512-FP16.
        Op::MulMat { accumulator, .. } | Op::MulMatId { accumulator, .. }
            if accumulator.needs_f32_range()
                && !params::has(release, Since::SUMS_IN_F32)
                && is(src(0), &[Type::F16]) =>
        {
            false
        }
        Op::MulMat { .. } | Op::MulMatId { .. } => {
            // The backend ignores a demand for F32 or BF16, and has activations and their sums in
            // F16, or BF16, for these weights.
            let rounds = |ty| matches!(ty, Type::F16 | Type::Bf16 | Type::Q4_1 | Type::Q5_1);
            let may_round = !node.op.activation_precision().needs_f32_range();
            src(0)
                .is_some_and(|weights| is_weight(weights.ty) && (may_round || !rounds(weights.ty)))
                && is(src(1), &[Type::F32])
                && dst.ty == Type::F32
        }
        Op::GetRows {} => src(0).is_some_and(|rows| is_weight(rows.ty)) && is(src(1), &[Type::I32]),
        Op::SetRows {} => is(src(0), &[Type::F32]) && is_weight(dst.ty),
        Op::Copy {} => {
            let from = src(0).map(|from| from.ty);
            let same = from == Some(dst.ty);
            has_rows(src(0))
                && dst.has_dense_rows()
                && (is(src(0), &floats) && (floats.contains(&dst.ty) || is_weight(dst.ty))
                    || same && matches!(dst.ty, Type::I32))
        }
        // Releases before 0.26 give weight to keys that they add without a mask.
        Op::FlashAttnExt { logit_softcap, .. } if logit_softcap != 0.0 && src(3).is_none() => false,
        Op::FlashAttnExt { .. } => {
            let kv = |i| {
                is(
                    src(i),
                    &[Type::F32, Type::F16, Type::Bf16, Type::Q8_0, Type::Q4_0],
                )
            };
            is(src(0), &[Type::F32]) && kv(1) && kv(2) && is(src(3), &[Type::F16])
        }
        Op::SoftMax { .. } => {
            is(src(0), &[Type::F32])
                && is(src(1), &[Type::F32, Type::F16])
                && is(src(2), &[Type::F32])
        }
        // In releases before 0.23 only the first batch is computed.
        Op::ConvTranspose2d { .. } => false,
        // Releases before 0.26 are wrong where the result has the place of the second source, as
        // ggml may place it.
        Op::SoftMaxBack { .. } => {
            let places = |tensor: &Tensor| (tensor.buffer, tensor.offset);
            let has_place = |i| graph.src(node, i).map(places) == Some(places(graph.dst(node)));
            !has_place(1) && floats_and_integers_only(graph, node)
        }
        _ => floats_and_integers_only(graph, node),
    }
}

/// Whether all tensors of a node are F32 or integers.
fn floats_and_integers_only(graph: &IrGraph, node: &Node) -> bool {
    let sources = (0..node.src.as_slice().len()).filter_map(|i| graph.src(node, i));
    let mut types = sources.map(|tensor| tensor.shape.ty);
    types.all(|ty| matches!(ty, Type::F32 | Type::I32 | Type::I64))
        && matches!(graph.dst(node).shape.ty, Type::F32 | Type::I32)
}

/// Whether a backend for GPUs computes a node as the node demands. ggml's CUDA backend ends the
/// process for quantised weights with a demand on activations above 8 bits (`mmq.cu`), and reads no
/// demand for weights of F16. The Vulkan backend of ggml 0.25.1 ends the process for activations of
/// BF16 with weights of another type (`ggml_vk_get_dequantize_mul_mat_vec`), for which its
/// `supports_op` says yes.
fn gpu_backend_computes(graph: &IrGraph, node: &Node, release: Version) -> bool {
    let weights = graph.src(node, 0).map(|weights| weights.shape.ty);
    let demand = node.op.activation_precision();
    let is_product = matches!(node.op, Op::MulMat { .. } | Op::MulMatId { .. });
    let activations = graph.src(node, 1).map(|activations| activations.shape.ty);
    if is_product && !gpu_backend_multiplies(weights, activations) {
        return false;
    }
    weights.is_none_or(|weights| gpu_backend_obeys(demand, weights, release))
}

/// Whether a backend for GPUs has a kernel for a product of these types, and not only says so.
fn gpu_backend_multiplies(weights: Option<Type>, activations: Option<Type>) -> bool {
    activations != Some(Type::Bf16) || weights == Some(Type::Bf16)
}

/// Whether a backend for GPUs multiplies these weights as the demand on the activations says.
fn gpu_backend_obeys(demand: Precision, weights: Type, release: Version) -> bool {
    match weights {
        Type::F16 | Type::Bf16 => !demand.needs_f32_range(),
        // Before, activations have 4 bits on Blackwell, whatever a node says.
        Type::Mxfp4 | Type::Nvfp4 if demand == Precision::Q8 => {
            params::has(release, Since::EIGHT_BITS_FOR_FP4)
        }
        _ if weights.is_quantized() => !demand.needs_f32_range() && demand != Precision::F16,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_of_bf16_are_left_to_the_cpu_engine_unless_the_weights_are_bf16() {
        let multiplies = |weights, activations| gpu_backend_multiplies(Some(weights), activations);
        assert!(!multiplies(Type::F16, Some(Type::Bf16)));
        assert!(!multiplies(Type::F32, Some(Type::Bf16)));
        assert!(multiplies(Type::Bf16, Some(Type::Bf16)));
        assert!(multiplies(Type::Bf16, Some(Type::F32)));
        assert!(multiplies(Type::Q4K, Some(Type::F32)));
    }

    #[test]
    fn demands_that_backends_for_gpus_do_not_obey_are_left_to_the_cpu_engine() {
        use Precision::{Bf16, Default, F16, F32, Q4, Q8};
        let newest = Version::new(0, 26);
        for (weights, obeyed) in [
            (Type::F32, &[Default, F32, Bf16, F16, Q8, Q4][..]),
            (Type::F16, &[Default, F16, Q8, Q4]),
            (Type::Bf16, &[Default, F16, Q8, Q4]),
            (Type::Q4_0, &[Default, Q8, Q4]),
            (Type::Mxfp4, &[Default, Q8, Q4]),
        ] {
            for demand in [Default, F32, Bf16, F16, Q8, Q4] {
                let expected = obeyed.contains(&demand);
                let obeys = gpu_backend_obeys(demand, weights, newest);
                assert_eq!(obeys, expected, "{weights:?}, {demand:?}");
            }
        }
        let older = Version::new(0, 25);
        assert!(!gpu_backend_obeys(Q8, Type::Nvfp4, older));
        assert!(gpu_backend_obeys(Q4, Type::Nvfp4, older));
        assert!(gpu_backend_obeys(Q8, Type::Q4_0, older));
    }
}
