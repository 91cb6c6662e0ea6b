//! A compiled graph: nodes for the device, and between them single nodes for another engine.

use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vgpu_engine::{
    ALLOCATION_BYTES, Cancellation, DeviceMemory, Engine, EngineError, Memory, Plan, PlannedNode,
    RunError, RunStatus, SingleNode, Turn, fuse, work,
};
use vgpu_ggml_abi as abi;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{GraphCounts, Node, Tensor, ValidGraph};
use vgpu_transport::lock::lock;

use crate::buffer::DeviceBuffer;
use crate::device::BackendDevice;
use crate::flight::{Flight, Landing};
use crate::located::{BYTES_OF_BUFFER, BYTES_OF_TENSOR, Located, Place, is_current};
use crate::memory::GgmlMemory;
use crate::nodes::{Encoded, Present, Source};
use crate::pace::{Growth, Known, Pace, Piece};
use crate::repack::{Product, RepackedSource};
use crate::room::Room;
use crate::tensors::{Arena, Graph, numbers};
use crate::work_buffer;

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
    /// The changes of each of them as long as the tensors of `arena` are right.
    changes: Box<[u64]>,
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
    /// The end of a run that the device has been given, and nobody has waited for.
    in_flight: Option<Flight>,
    /// The pieces of the present run that were measured, each alone.
    measured: Vec<Piece>,
    growth: Growth,
    /// The memory of results that want more than their places have.
    room: Room,
    /// The nodes that read copies of weights.
    repacked: Vec<RepackedSource>,
    /// What the backend allocates for itself, at most.
    work_buffer: u64,
    /// The tensors that the graph refers to.
    arena: Arena,
}

// SAFETY: the tensors of the arena point to each other and to buffers of the memories that the plan
// keeps alive. No other object has these pointers, so that they move with the plan.
unsafe impl Send for GgmlPlan {}

/// The bytes that `compile` allocates for so many tensors and nodes, at most, besides `to_move` for
/// weights that are moved. [`GgmlPlan::allocate`] allocates the copies of nodes that the device
/// lacks.
pub(crate) fn compile_bytes(counts: &GraphCounts, to_move: usize) -> u64 {
    let tensor = size_of::<abi::ggml_tensor>() + 64;
    // A node of the device has a tensor of its own and, if it is a copy, another, and may be
    // followed by a copy. Each of both has up to one graph; a place, an estimate and a measurement;
    // and what ggml knows of its uses. A node of another engine has a graph of its own.
    let uses = 128;
    let of_device =
        2 * (2 * tensor + size_of::<abi::ggml_cgraph>() + size_of::<Piece>() + 32 + uses);
    let planned = size_of::<PlannedNode>()
        + MAX_TENSORS * (size_of::<Tensor>() + 128)
        + 2 * size_of::<Node>()
        + 8 * ALLOCATION_BYTES;
    let node = 2 * (size_of::<Split>() + size_of::<RepackedSource>()) + of_device.max(planned);
    let tensors = counts.tensors * (tensor + 16 + BYTES_OF_TENSOR);
    let all = tensors + counts.nodes * node + counts.buffers * (128 + BYTES_OF_BUFFER);
    (all + to_move + size_of::<GgmlPlan>() + 256) as u64
}

/// The work buffer of the backend that stays when the plans that need it are gone.
const KEPT_WORK_BUFFER: u64 = 16 << 20;

impl Drop for GgmlPlan {
    fn drop(&mut self) {
        self.land();
        if self.work_buffer > KEPT_WORK_BUFFER {
            self.device.give_work_buffer_back();
        }
    }
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
        valid: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<GgmlPlan, EngineError> {
        let graph = valid.graph();
        let memory = { buffers.iter() }
            .map(|buffer| GgmlMemory::of(&**buffer, &device.allocator))
            .collect::<Result<Vec<&GgmlMemory>, _>>()?;
        let located = Located::of(graph, &memory, is_cancelled)?;
        let source = Source::new(valid, &memory, &located);
        let mut arena = Arena::default();
        let mut cancellation = Cancellation::new(is_cancelled);
        let mut present = Present::with_capacity(graph.tensors.len());
        for (index, tensor) in (0..).zip(&graph.tensors) {
            // SAFETY: nobody changes the memory of the graph meanwhile (the contract of `Memory`),
            // so the places are right, and `buffers` keeps it alive.
            let view = unsafe { located.view(index, tensor) };
            present.add(view.map_or(ptr::null_mut(), |view| arena.keep(view)));
        }
        let (mut splits, mut nodes, mut uses) = (Vec::new(), Vec::new(), Vec::new());
        let (mut places, mut estimates) = (Vec::new(), Vec::new());
        let (mut room, mut repacked) = (Room::default(), Vec::new());
        let mut work_buffer = 0;
        let of_results = fuse::uses(graph, is_cancelled);
        let mut key = device.paces.key();
        let mut end = 0;
        for (at, node) in graph.nodes.iter().enumerate() {
            cancellation.check(at)?;
            if graph.dst(node).shape.is_empty() {
                continue;
            }
            let kept = arena.len();
            let used = of_results[at];
            // SAFETY: `present` has tensors of this arena. For the places and the memory as above.
            let encoded = unsafe { source.encode(&device, node, used, &present, &mut arena) };
            { &device.placement }.note(&node.op, &device.name, encoded.is_some());
            let Some(encoded) = encoded else {
                arena.truncate(kept);
                if nodes.len() > end {
                    end = nodes.len();
                    splits.push(Split::Device(end));
                }
                key.other();
                present.forget(graph.dst(node));
                let other = PlannedNode::new(&*fallback, graph, at)?;
                splits.push(Split::Planned(Box::new(other)));
                continue;
            };
            if device.is_cpu {
                work_buffer = work_buffer.max(work_buffer::bytes(graph, node, device.threads));
            }
            let estimate = work::of(graph, node).time(&device.speed).as_secs_f32();
            let mut push = |tensor, used, estimate| {
                nodes.push(tensor);
                uses.push(used);
                places.push(at as u32);
                estimates.push(estimate);
            };
            let result = match encoded {
                Encoded::InPlace(result) => {
                    if let Some((memory, index)) = source.weights(node) {
                        let free = || fallback.memory().free;
                        // SAFETY: as below.
                        let supports = |node| unsafe { device.supports(node) };
                        let product = Product {
                            graph,
                            node,
                            made: result,
                            copies: memory.copies(),
                            shared: { located.place(index).and_then(Place::segment) }
                                .map(|(extent, offset)| (extent.copies(), offset)),
                        };
                        // SAFETY: the node and its sources are tensors of the arena, which no
                        // backend has yet, and the plan keeps their memory alive.
                        let source = unsafe {
                            device
                                .layouts
                                .place(&product, &supports, &free, is_cancelled)
                        };
                        if let Some(source) = source? {
                            repacked.push(source);
                            key.repacked();
                        }
                    }
                    push(result, used, estimate);
                    result
                }
                Encoded::Copied {
                    node: result,
                    bytes,
                    copy,
                } => {
                    room.add(result, bytes);
                    push(result, None, estimate);
                    push(copy, None, 0.0);
                    key.copy();
                    copy
                }
            };
            present.set(graph, node.dst, result);
            let operands = (0..node.src.as_slice().len()).filter_map(|i| graph.src(node, i));
            let tensors = std::iter::once(graph.dst(node)).chain(operands);
            let shapes = tensors.map(|tensor| &tensor.shape);
            key.node(node.op.kind().ggml_name(), estimate, shapes);
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
            changes: located.into_changes(),
            splits,
            measured: Vec::with_capacity(if is_measured { nodes.len() } else { 0 }),
            graph: Graph::new(nodes, &uses),
            places: places.into(),
            estimates: estimates.into(),
            pace,
            numbered: None,
            next: (0, 0),
            in_flight: None,
            growth: Growth::new(),
            room,
            repacked,
            work_buffer,
            arena,
        })
    }

    /// Products whose weights the guest has written since read the guest's bytes.
    fn forget_old_copies(&mut self) {
        let before = self.repacked.len();
        // SAFETY: the nodes are tensors of the arena, which no backend has: each launch begins with
        // a wait for what the one before has submitted.
        { &mut self.repacked }.retain(|source| unsafe { source.refresh() });
        if self.repacked.len() < before {
            // The graphs are no longer those with these numbers.
            self.numbered = None;
        }
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
        flight: &mut Flight,
    ) -> Result<RunStatus, RunError> {
        let is_end = self.next.0 + 1 == self.splits.len();
        if !self.is_current() {
            return Err(RunError::Stale);
        }
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
            // SAFETY: the plan keeps the tensors and the memories, whose bytes are where they were
            // at the compilation (checked above). The graph does not change before it has landed:
            // each piece of a flight has another one. The caller lets nothing access the memories
            // during a run, except for reads that come behind it: the contract of `Memory`.
            // `launch` lands before it returns, or leaves the flight to `in_flight`, which lands
            // before the plan is launched again or ends.
            let submitted =
                unsafe { flight.submit(device_buffers(&self.buffers), graph, piece.time) };
            submitted.map_err(|status| RunError::Kernel {
                node: self.places[begin] as usize,
                op: "",
                message: format!("the backend of ggml returned status {status}"),
            })?;
            self.device
                .used
                .device_got(self.nodes_of_graph(begin..piece.end));
            self.next.1 = piece.end;
            if !matches!(known, Known::Pieces(..)) {
                // The time of a piece is measured alone.
                let took = flight
                    .land()
                    .map_or(Duration::ZERO, |it| it.took.duration());
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

    /// How many nodes of the guest's graph end with these nodes of the device: a node and the copy
    /// of its result are one.
    fn nodes_of_graph(&self, nodes: Range<usize>) -> usize {
        let next = |at: usize| self.places.get(at + 1);
        { nodes.into_iter() }
            .filter(|&at| next(at) != Some(&self.places[at]))
            .count()
    }

    /// Learns from pieces that have landed.
    fn observe(&self, landing: Option<Landing>) {
        if let Some(Landing { took, predicted }) = landing {
            lock(&self.pace).observe(predicted, took);
        }
    }

    /// Waits for what the last launch has left to the device.
    fn land(&mut self) {
        let Some(mut flight) = self.in_flight.take() else {
            return;
        };
        let work = Arc::clone(flight.underway());
        let landing = flight.land();
        for memory in memories(&self.buffers) {
            memory.end_underway(&work);
        }
        self.observe(landing);
    }

    /// Ends a run whose last pieces the device has, of which `known` was known. Leaves them to the
    /// device if reads can come behind them: their time is known, so that the turn ends soon.
    fn leave(&mut self, mut flight: Flight, known: &Known) -> RunStatus {
        let can_leave = self.device.allocator.staging().is_some();
        if !can_leave || flight.pieces() == 0 || !matches!(known, Known::Pieces(..)) {
            self.observe(flight.land());
            return RunStatus::Done;
        }
        let work = Arc::clone(flight.underway());
        for memory in memories(&self.buffers) {
            memory.begin_underway(&work);
        }
        self.in_flight = Some(flight);
        RunStatus::InFlight
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
        let status = self.leave(flight, &known);
        let measured = self.measured.last().map_or(0, |piece| piece.end);
        if measured > 0 && measured == self.graph.len() {
            lock(&self.pace).learn(&self.measured);
        }
        Ok(status)
    }
}

/// The memories of a plan, which are this engine's.
fn memories(buffers: &[Arc<dyn Memory>]) -> impl Iterator<Item = &GgmlMemory> {
    let memories = buffers.iter().map(|buffer| buffer.as_any());
    memories.filter_map(|memory| memory.downcast_ref())
}

/// The buffers of the device that are one memory each. Writes wait in no others.
fn device_buffers(buffers: &[Arc<dyn Memory>]) -> impl Iterator<Item = &DeviceBuffer> {
    memories(buffers).filter_map(GgmlMemory::buffer)
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
        self.land();
        // What another plan over the same memory has left to the device ends first: some backends
        // copy beside their graphs, and order a copy with the graphs behind it only.
        for memory in memories(&self.buffers) {
            if let Some(work) = memory.underway() {
                work.land();
            }
        }
        // Tensors of the plan are in the buffers of the segments that it was compiled for.
        if !self.is_current() {
            self.rewind();
            return Err(RunError::Stale);
        }
        self.allocate().map_err(|error| match error {
            EngineError::OutOfMemory { wanted, .. } => RunError::OutOfMemory { wanted },
            error => RunError::Kernel {
                node: 0,
                op: "",
                message: error.to_string(),
            },
        })?;
        if self.next == (0, 0) {
            self.forget_old_copies();
        }
        let outcome = self.go_on(turn);
        if outcome != Ok(RunStatus::Yielded) {
            self.rewind();
        }
        outcome
    }

    fn wait(&mut self) -> Result<(), RunError> {
        self.land();
        Ok(())
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
            + self.repacked.capacity() * size_of::<RepackedSource>()
            + size_of_val(&*self.changes)
            + size_of_val(&*self.places)
            + size_of_val(&*self.estimates);
        let graph = self.graph.bytes() + self.arena.bytes() + self.room.host_bytes();
        (splits.sum::<usize>() + own + graph + size_of::<GgmlPlan>()) as u64
    }

    fn allocate(&mut self) -> Result<(), EngineError> {
        self.land();
        for split in &mut self.splits {
            if let Split::Planned(node) = split {
                *split = Split::Other(Box::new(node.allocate(&*self.fallback)?));
            }
        }
        // SAFETY: the results are tensors of the arena, which no backend has now: what the last
        // launch has submitted was waited for above, and this call has the plan alone.
        unsafe { self.room.allocate(&self.device.allocator) }
    }

    fn working_bytes(&self) -> u64 {
        let others = self.splits.iter().filter_map(|split| match split {
            Split::Device(_) | Split::Planned(_) => None,
            Split::Other(node) => Some(node.working_bytes()),
        });
        others.max().unwrap_or(0).saturating_add(self.work_buffer)
    }

    fn device_bytes(&self) -> u64 {
        self.room.bytes()
    }

    fn is_current(&self) -> bool {
        is_current(&self.buffers, &self.changes)
    }
}
