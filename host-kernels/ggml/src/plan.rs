//! A compiled graph: nodes for the device, and between them single nodes for another engine.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vgpu_engine::{
    ALLOCATION_BYTES, Cancellation, DeviceMemory, Engine, EngineError, Memory, Plan, PlannedNode,
    RunError, RunStatus, SingleNode, Turn, work,
};
use vgpu_ggml_abi as abi;
use vgpu_ggml_abi::versions::{Since, Version};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{
    Graph as IrGraph, GraphCounts, Node, Op, OpKind, Precision, Shape, Tensor, Type,
};
use vgpu_transport::lock::lock;

use crate::device::BackendDevice;
use crate::flight::{Flight, Landing};
use crate::memory::GgmlMemory;
use crate::pace::{Growth, Known, Pace, Piece};
use crate::params;
use crate::tensors::{Arena, Graph, compute, numbers, view};

/// The most tensors of a node: its result and its sources.
const MAX_TENSORS: usize = abi::GGML_MAX_SRC as usize + 1;

/// Consecutive nodes that the device or another engine runs.
enum Split {
    /// The nodes of the device before this one, from where the last split ended.
    Device(usize),
    /// A node of another engine, before its memory is allocated.
    Planned(Box<PlannedNode>),
    Other(Box<SingleNode>),
}

/// A compiled graph.
pub(crate) struct GgmlPlan {
    device: Arc<BackendDevice>,
    fallback: Arc<dyn Engine>,
    buffers: Vec<Arc<dyn Memory>>,
    splits: Vec<Split>,
    /// The nodes of the device, and their indices in the guest's graph.
    graph: Graph,
    places: Box<[u32]>,
    /// The seconds that they take by estimate.
    estimates: Box<[f32]>,
    pace: Arc<Mutex<Pace>>,
    /// The pieces of the last run, and the number of the first one's graph.
    numbered: Option<(Arc<[Piece]>, u64)>,
    /// The split that the next launch begins with, and the node of the device.
    next: (usize, usize),
    /// The pieces of the present run that were measured, each alone.
    measured: Vec<Piece>,
    growth: Growth,
    /// The tensors that the graph refers to.
    arena: Arena,
}

// SAFETY: the tensors of the arena point to each other and to buffers, which the plan keeps alive.
// No other object has these pointers, so that they move with the plan.
unsafe impl Send for GgmlPlan {}

/// The bytes that `compile` allocates for so many tensors and nodes, at most.
/// [`GgmlPlan::allocate`] allocates the copies of nodes that the device lacks.
pub(crate) fn compile_bytes(counts: &GraphCounts) -> u64 {
    let tensor = size_of::<abi::ggml_tensor>() + 64;
    // A node of the device has a tensor of its own and, if it is a copy, another; up to one graph;
    // a place, an estimate and a measurement. A node of another engine has a graph of its own.
    let of_device = 2 * tensor + size_of::<abi::ggml_cgraph>() + size_of::<Piece>() + 32;
    let planned = size_of::<PlannedNode>()
        + MAX_TENSORS * (size_of::<Tensor>() + 128)
        + 2 * size_of::<Node>()
        + 8 * ALLOCATION_BYTES;
    let node = 2 * size_of::<Split>() + of_device.max(planned);
    let all = counts.tensors * (tensor + 16) + counts.nodes * node + counts.buffers * 32;
    (all + size_of::<GgmlPlan>() + 256) as u64
}

impl GgmlPlan {
    /// Compiles a valid graph. `buffers` are memory of the device.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`], [`EngineError::ForeignMemory`], or what `fallback` says of a
    /// node that the device lacks.
    pub(crate) fn compile(
        device: Arc<BackendDevice>,
        fallback: Arc<dyn Engine>,
        graph: &IrGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<GgmlPlan, EngineError> {
        let memory = buffers.iter().map(|buffer| buffer.as_any().downcast_ref());
        let memory: Option<Vec<&GgmlMemory>> = memory.collect();
        let memory = memory.ok_or(EngineError::ForeignMemory)?;
        let mut arena = Arena::default();
        let mut cancellation = Cancellation::new(is_cancelled);
        // The ggml tensor with the present value of each tensor of the graph.
        let mut present = Vec::with_capacity(graph.tensors.len());
        for tensor in &graph.tensors {
            let memory = memory[tensor.buffer as usize];
            // SAFETY: `whole` is the tensor of a buffer that the plan keeps alive.
            present.push(arena.keep(unsafe { view(tensor, memory.whole()) }));
        }
        let (mut splits, mut nodes) = (Vec::new(), Vec::new());
        let (mut places, mut estimates) = (Vec::new(), Vec::new());
        let mut key = device.paces.key();
        let mut end = 0;
        for (at, node) in graph.nodes.iter().enumerate() {
            cancellation.check(at)?;
            if graph.dst(node).shape.is_empty() {
                continue;
            }
            let kept = arena.len();
            // SAFETY: `present` has tensors of this arena, whose memory the plan keeps alive.
            let dst = unsafe { encode(&device, graph, node, &memory, &present, &mut arena) };
            { &device.placement }.note(&node.op, &device.name, dst.is_some());
            let Some(dst) = dst else {
                arena.truncate(kept);
                if nodes.len() > end {
                    end = nodes.len();
                    splits.push(Split::Device(end));
                }
                key.other();
                let other = PlannedNode::new(&*fallback, graph, at)?;
                splits.push(Split::Planned(Box::new(other)));
                continue;
            };
            present[node.dst as usize] = dst;
            nodes.push(dst);
            places.push(at as u32);
            let estimate = work::of(graph, node).time(&device.speed).as_secs_f32();
            let operands = (0..node.src.as_slice().len()).filter_map(|i| graph.src(node, i));
            let tensors = std::iter::once(graph.dst(node)).chain(operands);
            let shapes = tensors.map(|tensor| &tensor.shape);
            key.node(node.op.kind().ggml_name(), estimate, shapes);
            estimates.push(estimate);
        }
        if nodes.len() > end {
            splits.push(Split::Device(nodes.len()));
        }
        let pace = device.paces.of(&key, nodes.len());
        let is_measured = !matches!(lock(&pace).known(), Known::Pieces(..));
        Ok(GgmlPlan {
            device,
            fallback,
            buffers: buffers.to_vec(),
            splits,
            measured: Vec::with_capacity(if is_measured { nodes.len() } else { 0 }),
            graph: Graph::new(nodes),
            places: places.into(),
            estimates: estimates.into(),
            pace,
            numbered: None,
            next: (0, 0),
            growth: Growth::new(),
            arena,
        })
    }

    /// Makes the next launch begin a new run.
    fn rewind(&mut self) {
        self.next = (0, 0);
        self.measured.clear();
        self.growth = Growth::new();
    }

    /// The next piece of a split that ends with node `end`, as far as `known` says: how many nodes,
    /// and how long they take. Its graph has this number.
    fn piece(&mut self, end: usize, known: &Known) -> (Piece, u64) {
        let begin = self.next.1;
        let of = |pieces: &[Piece]| {
            let at = pieces.partition_point(|piece| piece.end <= begin);
            let starts = at.checked_sub(1).map_or(0, |before| pieces[before].end);
            let piece = pieces.get(at).filter(|piece| piece.end <= end).copied();
            (at, starts == begin, piece)
        };
        let found = match known {
            Known::Nothing => None,
            Known::Ends(pieces) | Known::Pieces(pieces, _) => Some((of(pieces), pieces)),
        };
        let Some(((at, is_whole, Some(piece)), pieces)) = found else {
            let nodes = self.growth.nodes(&self.estimates[begin..end]);
            let piece = Piece {
                end: begin + nodes,
                time: Duration::ZERO,
                is_last: begin + nodes == end,
            };
            return (piece, numbers(1));
        };
        let first = match &self.numbered {
            Some((numbered, first)) if Arc::ptr_eq(numbered, pieces) => *first,
            _ => {
                let first = numbers(pieces.len());
                self.numbered = Some((Arc::clone(pieces), first));
                first
            }
        };
        // The pieces were made anew since this run has yielded.
        let number = if is_whole {
            first + at as u64
        } else {
            numbers(1)
        };
        (piece, number)
    }

    /// Runs nodes of the device up to `end`, until `turn` is over.
    ///
    /// # Errors
    /// [`RunError::Kernel`] with what the backend says.
    fn run_device(
        &mut self,
        end: usize,
        known: &Known,
        turn: &Turn,
        flight: &mut Flight<'_>,
    ) -> Result<RunStatus, RunError> {
        let is_end = self.next.0 + 1 == self.splits.len();
        while self.next.1 < end {
            let begin = self.next.1;
            let (piece, number) = self.piece(end, known);
            if let Known::Pieces(_, correction) = known {
                flight.keep_back(*correction, turn);
                if flight.pieces() > 0 && turn.is_over() {
                    return Ok(RunStatus::Yielded);
                }
                if flight.is_long(*correction) {
                    self.observe(flight.land());
                }
            }
            let graph = self.graph.part(begin..piece.end, number, flight.pieces());
            // SAFETY: the plan keeps the tensors and the buffers, and the graph does not change
            // before it has landed: each piece of a flight has another one. The caller lets nothing
            // access the buffers during a run: the contract of `Memory`. `launch` lands before it
            // returns.
            let submitted = unsafe { flight.submit(graph, piece.time) };
            submitted.map_err(|status| RunError::Kernel {
                node: self.places[begin] as usize,
                op: "",
                message: format!("the backend of ggml returned status {status}"),
            })?;
            self.device.used.device_got(piece.end - begin);
            self.next.1 = piece.end;
            if !matches!(known, Known::Pieces(..)) {
                // The time of a piece is measured alone.
                let took = flight.land().map_or(Duration::ZERO, |it| it.took);
                self.growth.learn(piece.end - begin, took);
                self.measured.push(Piece {
                    time: took,
                    ..piece
                });
            }
            if (piece.end < end || !is_end) && turn.is_over() {
                return Ok(RunStatus::Yielded);
            }
        }
        Ok(RunStatus::Done)
    }

    /// Learns from pieces that have landed.
    fn observe(&self, landing: Option<Landing>) {
        if let Some(Landing {
            took,
            predicted,
            is_late,
        }) = landing
        {
            lock(&self.pace).observe(predicted, took, is_late);
        }
    }

    /// Runs the splits from where the last launch has ended, until `turn` is over.
    ///
    /// # Errors
    /// As for [`Plan::launch`].
    fn go_on(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        let device = Arc::clone(&self.device);
        let known = lock(&self.pace).known();
        let mut flight = Flight::new(&device);
        while let Some(split) = self.splits.get_mut(self.next.0) {
            let status = match split {
                Split::Device(end) => {
                    let end = *end;
                    self.run_device(end, &known, turn, &mut flight)?
                }
                Split::Planned(_) => unreachable!("`launch` has allocated all"),
                Split::Other(node) => {
                    let landing = flight.land();
                    let begin = Instant::now();
                    let outcome = node.run(&mut Buffers(&self.buffers), turn);
                    let has_ended = outcome == Ok(RunStatus::Done);
                    device.used.other_ran(begin.elapsed(), has_ended);
                    self.observe(landing);
                    outcome?
                }
            };
            if status == RunStatus::Yielded {
                self.observe(flight.land());
                return Ok(RunStatus::Yielded);
            }
            self.next.0 += 1;
            if self.next.0 < self.splits.len() && turn.is_over() {
                self.observe(flight.land());
                return Ok(RunStatus::Yielded);
            }
        }
        self.observe(flight.land());
        let measured = self.measured.last().map_or(0, |piece| piece.end);
        if measured > 0 && measured == self.graph.len() {
            lock(&self.pace).learn(&self.measured);
        }
        Ok(RunStatus::Done)
    }
}

/// The node as a tensor of ggml. `None` if the device does not compute it.
///
/// # Safety
/// `present` has a valid tensor for each tensor of the graph, and the memory that they and
/// `memory` name is allocated.
unsafe fn encode(
    device: &BackendDevice,
    graph: &IrGraph,
    node: &Node,
    memory: &[&GgmlMemory],
    present: &[*mut abi::ggml_tensor],
    arena: &mut Arena,
) -> Option<*mut abi::ggml_tensor> {
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
    let fits = |tensor: &Tensor, raw: *const abi::ggml_tensor| {
        let bytes = tensor.shape.with_plain_strides().byte_len().unwrap_or(0);
        // SAFETY: `raw` is a tensor of the arena, whose sources are such.
        unsafe { device.keeps_within(raw, bytes) }
    };
    // Some backends for GPUs read rows of quantised weights up to the next 512 elements. The
    // question ends the process if the stride of blocks is another one, also in rows of one block.
    let is_padded = |index: &u32| {
        let tensor = &graph.tensors[*index as usize];
        let Shape { ty, nb, .. } = tensor.shape;
        let is_dense = nb[0] == ty.block_bytes();
        ty.is_quantized() && (!is_dense || !fits(tensor, present[*index as usize]))
    };
    if !device.is_cpu && node.src.as_slice().iter().flatten().any(is_padded) {
        return None;
    }
    let computes = match device.is_cpu {
        true => cpu_backend_computes(graph, node, release),
        false => gpu_backend_computes(graph, node, release),
    };
    if !computes {
        return None;
    }
    let memory = memory[to.buffer as usize];
    // SAFETY: `whole` is the tensor of a buffer that the plan keeps alive.
    let mut dst = unsafe { view(to, memory.whole()) };
    let mut sources: Vec<*mut abi::ggml_tensor> = { node.src.as_slice().iter() }
        .map(|source| source.map_or(std::ptr::null_mut(), |index| present[index as usize]))
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
    compute(&mut dst, &node.op, &encoded, &sources);
    let dst = arena.keep(dst);
    // SAFETY: the node is a tensor of the arena, its sources are such by the contract of this
    // function, and the memory of all of them is allocated.
    let supported = unsafe { device.supports(dst) };
    // Kernels write rows of a quantised result to their end only, and the question of its size may
    // end the process, as above.
    (supported && (to.shape.ty.is_quantized() || fits(to, dst))).then_some(dst)
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

/// The buffers of a plan.
struct Buffers<'a>(&'a [Arc<dyn Memory>]);

impl DeviceMemory for Buffers<'_> {
    fn read(&mut self, buffer: usize, offset: u64, out: &mut [u8]) -> Result<(), EngineError> {
        self.0[buffer].read(offset, BytesMut::from(out))
    }

    fn write(&mut self, buffer: usize, offset: u64, data: &[u8]) -> Result<(), EngineError> {
        self.0[buffer].write(offset, Bytes::from(data))
    }
}

impl Plan for GgmlPlan {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        self.allocate().map_err(|error| match error {
            EngineError::OutOfMemory { wanted, .. } => RunError::OutOfMemory { wanted },
            error => RunError::Kernel {
                node: 0,
                op: "",
                message: error.to_string(),
            },
        })?;
        let outcome = self.go_on(turn);
        if outcome != Ok(RunStatus::Yielded) {
            self.rewind();
        }
        outcome
    }

    fn plan_bytes(&self) -> u64 {
        let splits = self.splits.iter().map(|split| match split {
            Split::Device(_) => 0,
            Split::Planned(node) => {
                let allocated = node.allocated_bytes(&*self.fallback) + size_of::<SingleNode>();
                allocated.max(size_of::<PlannedNode>() + node.own_bytes())
            }
            Split::Other(node) => size_of::<SingleNode>() + node.bytes(),
        });
        let own = self.splits.capacity() * size_of::<Split>()
            + self.buffers.capacity() * size_of::<Arc<dyn Memory>>()
            + self.measured.capacity() * size_of::<Piece>()
            + size_of_val(&*self.places)
            + size_of_val(&*self.estimates);
        let graph = self.graph.bytes() + self.arena.bytes();
        (splits.sum::<usize>() + own + graph + size_of::<GgmlPlan>()) as u64
    }

    fn allocate(&mut self) -> Result<(), EngineError> {
        for split in &mut self.splits {
            if let Split::Planned(node) = split {
                *split = Split::Other(Box::new(node.allocate(&*self.fallback)?));
            }
        }
        Ok(())
    }

    fn working_bytes(&self) -> u64 {
        let others = self.splits.iter().filter_map(|split| match split {
            Split::Device(_) | Split::Planned(_) => None,
            Split::Other(node) => Some(node.working_bytes()),
        });
        others.max().unwrap_or(0)
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
