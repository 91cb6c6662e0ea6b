//! The graphs of a session: assembled from parts, validated, compiled, stored.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vgpu_engine::work::{self, LongestNode};
use vgpu_engine::{Engine, EngineError, Memory, Plan};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::{
    BufferId, DecodeError, ENTRIES_PER_QUESTION, Graph, GraphCounts, Invalid, Node, Op, ValidGraph,
    patch, validate_until,
};
use vgpu_transport::wire::{GraphId, MAX_GRAPH, ProtocolVersion};

use super::buffers::Buffers;
use super::error::Violation;
use crate::activity::GraphInfo;
use crate::heap;
use crate::limits::Limits;
use crate::lock::expect_unlocked;
use crate::tenant::{Charge, Tenant};

/// Bytes of the assembly buffer that are kept between graphs.
const MAX_IDLE_ASSEMBLY: usize = 64 << 10;

/// Charged bytes of graphs that are freed before the heap is given back to the kernel.
const TRIM_BYTES: u64 = 64 << 20;

/// How often a graph is compiled again before a run, at most. A compilation can move weights of its
/// own graph, and then the next one finds them in their places.
const MAX_COMPILATIONS: usize = 3;

/// Bytes of a stored graph besides its image and its plan: the entry in the table, at most.
const ENTRY_BYTES: u64 = 512;

/// Bytes for each buffer of a graph that is read: its size and its id for validation, and its
/// memory for the engine.
const READ_BUFFER_BYTES: u64 =
    (size_of::<u64>() + size_of::<BufferId>() + size_of::<Arc<dyn Memory>>()) as u64;

/// The graphs of a session.
#[derive(Default)]
pub(super) struct Graphs {
    stored: HashMap<GraphId, StoredGraph>,
    /// Sums over `stored`: bytes of the images, nodes.
    bytes: u64,
    nodes: usize,
    /// The working memory of the graph that needs the most. A session runs one graph at a time.
    working: WorkingMemory,
    /// The same of the memory of a device that has its own.
    device_working: WorkingMemory,
    /// Charged bytes that were freed since the heap was given back.
    freed: u64,
    assembly: Option<Assembly>,
    /// The part of the image that has been received, unless the image is refused.
    assembled: Vec<u8>,
}

/// The working memory of runs, which is charged to the tenant of the session.
#[derive(Default)]
struct WorkingMemory {
    bytes: u64,
    /// Charges that sum up to `bytes`.
    charges: Vec<Charge>,
}

impl WorkingMemory {
    /// Charges what is missing to `bytes`, with `charge`.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] with the tenant's own figures.
    fn reserve(
        &mut self,
        bytes: u64,
        charge: impl FnOnce(u64) -> Result<Charge, EngineError>,
    ) -> Result<(), EngineError> {
        let Some(more) = bytes.checked_sub(self.bytes).filter(|&more| more > 0) else {
            return Ok(());
        };
        self.charges.push(charge(more)?);
        self.bytes = bytes;
        Ok(())
    }

    /// Gives back what is charged beyond `needed`, as far as the charges allow.
    fn give_back(&mut self, needed: u64) {
        while let Some(last) = self.charges.last() {
            let less = self.bytes - last.size();
            if less < needed {
                return;
            }
            self.charges.pop();
            self.bytes = less;
        }
    }
}

/// A graph that is being received.
struct Assembly {
    graph: GraphId,
    total: u64,
    received: u64,
    /// The charge for the assembly buffer and the image, or why the tenant gets neither. The parts
    /// of a refused image are dropped, and the graph fails when it is complete.
    charge: Result<Charge, EngineError>,
}

/// A graph that has been received completely.
pub(super) struct StoredGraph {
    /// The compiled graph. With an error, every SUBMIT of the graph fails, unless it can be
    /// compiled again.
    pub(super) plan: Result<Box<dyn Plan>, EngineError>,
    /// Whether the graph had a plan and there was no memory to compile it again. Each SUBMIT
    /// tries.
    lacks_memory: bool,
    /// The charges for the plan, in the memory of the host and of the device, while there is one.
    /// Declared after `plan`, so that the memory is freed before the charges are released.
    charges: Vec<Charge>,
    /// The encoded graph, the base of later patches, or why the tenant has no memory for it.
    image: Result<Image, EngineError>,
    /// Bytes that were charged for its compilation and that the plan does not keep.
    transient: u64,
    pub(super) nodes: usize,
    /// See [`tokens`].
    tokens: u64,
    /// The node that takes longest by estimate.
    longest: Option<LongestNode>,
    /// The buffers that the graph uses, sorted.
    buffers: Vec<BufferId>,
}

/// An encoded graph.
pub(super) struct Image {
    words: Box<[u32]>,
    /// Declared after `words`, as in [`StoredGraph`].
    _charge: Charge,
}

/// A graph that has been received completely: its image, or why the tenant has no memory for it.
pub(super) type ImageResult = Result<Image, EngineError>;

/// What the compilation of a graph led to.
#[derive(Debug)]
pub(super) enum GraphStatus {
    /// The graph can be submitted.
    Compiled {
        /// Bytes of its image.
        bytes: u64,
        /// The number of nodes of the graph.
        nodes: usize,
    },
    /// The graph is valid, but the engine cannot compile it.
    Failed(EngineError),
}

impl Graphs {
    /// Receives a part of a graph, for which the tenant is charged. Returns the graph when the part
    /// is the last.
    pub(super) fn part(
        &mut self,
        (graph, offset, total): (GraphId, u64, u64),
        part: Bytes<'_>,
        tenant: &Arc<Tenant>,
        engine: &dyn Engine,
    ) -> Result<Option<ImageResult>, Violation> {
        if total == 0 || total > MAX_GRAPH || !total.is_multiple_of(4) {
            return Err(Violation::ImageSize {
                graph,
                total,
                limit: MAX_GRAPH,
            });
        }
        let assembly = self.assembly.get_or_insert_with(|| Assembly {
            graph,
            total,
            received: 0,
            // The assembly buffer, and the image that is made of it. Then the table of the image's
            // buffers, in place of the first.
            charge: tenant.charge_host(2 * total + ENTRY_BYTES, engine),
        });
        let (expected_graph, expected_total) = (assembly.graph, assembly.total);
        let have = assembly.received;
        let in_order = (graph, total, offset) == (expected_graph, expected_total, have);
        // `total` is at most MAX_GRAPH and `have` at most `total`, so nothing here can wrap.
        if !in_order || part.is_empty() || part.len() as u64 > total - have {
            return Err(Violation::Part {
                graph,
                offset,
                len: part.len(),
                total,
                expected_graph,
                expected_offset: have,
                expected_total,
            });
        }
        assembly.received += part.len() as u64;
        if assembly.charge.is_ok() {
            let have = self.assembled.len();
            match self.assembled.try_reserve_exact(total as usize - have) {
                Ok(()) => {
                    self.assembled.resize(have + part.len(), 0);
                    part.copy_to(&mut self.assembled[have..]);
                }
                Err(_) => assembly.charge = Err(no_memory(total)),
            }
        }
        if assembly.received < total {
            return Ok(None);
        }

        let assembly = self.assembly.take();
        let image =
            assembly.map(|assembly| Ok(Image::new(words(&self.assembled)?, assembly.charge?)));
        self.assembled.clear();
        self.assembled.shrink_to(MAX_IDLE_ASSEMBLY);
        Ok(image)
    }

    /// Receives a graph as the difference `patch` to the stored graph `base`. The tenant is charged
    /// for the graph.
    pub(super) fn patch(
        &self,
        (graph, base): (GraphId, GraphId),
        patch: Bytes<'_>,
        tenant: &Arc<Tenant>,
        engine: &dyn Engine,
    ) -> Result<ImageResult, Violation> {
        let Some(stored) = self.stored.get(&base) else {
            let bytes = patch.len();
            return Err(Violation::UnknownBase { base, bytes });
        };
        if !patch.len().is_multiple_of(4) {
            return Err(Violation::ImageSize {
                graph,
                total: patch.len() as u64,
                limit: MAX_GRAPH,
            });
        }
        let patched = stored.image.as_ref().map_err(EngineError::clone);
        let patched = patched.and_then(|image| {
            // The image and the table of its buffers, and the bytes and the words of the patch.
            let size = 2 * image.bytes() + ENTRY_BYTES + 2 * patch.len() as u64;
            let charge = tenant.charge_host(size, engine)?;
            Ok((patch::apply(&image.words, &words_of(patch)?), charge))
        });
        Ok(match patched {
            Ok((Ok(words), charge)) => Ok(Image::new(words, charge)),
            Ok((Err(DecodeError::NoMemory { bytes }), _)) => Err(no_memory(bytes as u64)),
            Ok((Err(error), _)) => return Err(Violation::Image { graph, error }),
            Err(error) => Err(error),
        })
    }

    /// Compiles and keeps a graph that has been received.
    pub(super) fn compile(
        &mut self,
        graph: GraphId,
        received: ImageResult,
        context: &CompileContext<'_>,
    ) -> Result<GraphStatus, Violation> {
        let stored = match received {
            Ok(image) => compile(graph, image, context)?,
            Err(error) => StoredGraph::without_image(error),
        };
        self.keep(graph, stored, context)
    }

    fn keep(
        &mut self,
        graph: GraphId,
        mut stored: StoredGraph,
        context: &CompileContext<'_>,
    ) -> Result<GraphStatus, Violation> {
        let limits = context.limits;
        self.forget(graph);
        self.charge(&mut stored, context);
        self.trim(stored.transient);
        let (bytes, nodes) = (stored.bytes(), stored.nodes);
        let status = match &stored.plan {
            Ok(_) => GraphStatus::Compiled { bytes, nodes },
            Err(error) => GraphStatus::Failed(error.clone()),
        };
        self.bytes += bytes;
        self.nodes += nodes;
        self.stored.insert(graph, stored);
        for (what, count, limit) in [
            ("graphs", self.stored.len() as u64, limits.graphs as u64),
            ("bytes of graphs", self.bytes, limits.graph_bytes),
            ("nodes", self.nodes as u64, limits.graph_nodes as u64),
        ] {
            if count > limit {
                return Err(Violation::TooManyGraphs {
                    graph,
                    what,
                    count,
                    limit,
                });
            }
        }
        Ok(status)
    }

    /// Charges the working memory of a graph. The graph fails if the tenant has not that much.
    fn charge(&mut self, stored: &mut StoredGraph, context: &CompileContext<'_>) {
        let Ok(plan) = &mut stored.plan else {
            return;
        };
        let (tenant, engine) = (context.tenant, context.engine);
        let outcome = { &mut self.working }
            .reserve(plan.working_bytes(), |more| {
                tenant.charge_host(more, engine)
            })
            .and_then(|()| {
                let device = &mut self.device_working;
                device.reserve(plan.device_working_bytes(), |more| {
                    tenant.charge_allocated(more, engine)
                })
            })
            .and_then(|()| plan.reserve());
        if let Err(error) = outcome {
            stored.plan = Err(error);
            stored.charges.clear();
            self.give_back();
        }
    }

    /// A graph to run. Compiles it again if its memory has moved, or if there was no memory for
    /// that at the last run.
    pub(super) fn get(
        &mut self,
        graph: GraphId,
        context: &CompileContext<'_>,
    ) -> Result<&mut StoredGraph, Violation> {
        for _ in 0..MAX_COMPILATIONS {
            let stored = self.stored.get(&graph);
            if !stored.is_some_and(StoredGraph::is_stale) {
                break;
            }
            let Some(old) = self.stored.remove(&graph) else {
                break;
            };
            self.nodes -= old.nodes;
            // The old plan is freed before the new one is made.
            let image = old
                .into_image()
                .map_err(|_| Violation::UnknownGraph(graph))?;
            let mut again = compile(graph, image, context)?;
            self.charge(&mut again, context);
            again.lacks_memory = matches!(
                again.plan,
                Err(EngineError::OutOfMemory { .. }
                    | EngineError::OutOfHostMemory { .. }
                    | EngineError::OutOfSharedHostMemory { .. })
            );
            let has_failed = again.plan.is_err();
            self.nodes += again.nodes;
            self.stored.insert(graph, again);
            if has_failed {
                break;
            }
        }
        let stored = self.stored.get_mut(&graph);
        stored.ok_or(Violation::UnknownGraph(graph))
    }

    /// The plan of a graph that the device is executing.
    pub(super) fn submitted(&mut self, graph: GraphId) -> Option<&mut dyn Plan> {
        let stored = self.stored.get_mut(&graph)?;
        Some(stored.plan.as_mut().ok()?.as_mut())
    }

    /// The numbers of nodes and of [`tokens`] of a graph.
    pub(super) fn size(&self, graph: GraphId) -> (usize, u64) {
        let stored = self.stored.get(&graph);
        stored.map_or((0, 0), |stored| (stored.nodes, stored.tokens))
    }

    /// Drops a graph, if it exists. Freeing a buffer drops graphs, too, so a guest may name one
    /// that is gone.
    pub(super) fn forget(&mut self, graph: GraphId) {
        if let Some(stored) = self.stored.remove(&graph) {
            self.bytes -= stored.bytes();
            self.nodes -= stored.nodes;
            let freed = stored.charged();
            drop(stored);
            self.give_back();
            self.trim(freed);
        }
    }

    /// Gives the charge for working memory back when no graph needs as much.
    fn give_back(&mut self) {
        let plans = self
            .stored
            .values()
            .filter_map(|stored| stored.plan.as_ref().ok());
        let needed = plans.map(|plan| [plan.working_bytes(), plan.device_working_bytes()]);
        let [host, device] = needed
            .reduce(|[a, b], [c, d]| [a.max(c), b.max(d)])
            .unwrap_or_default();
        self.working.give_back(host);
        self.device_working.give_back(device);
    }

    /// Drops every graph that uses `buffer`.
    pub(super) fn forget_users(&mut self, buffer: BufferId) {
        let (bytes, nodes, mut freed) = (&mut self.bytes, &mut self.nodes, 0);
        self.stored.retain(|_, stored| {
            let uses = stored.buffers.binary_search(&buffer).is_ok();
            if uses {
                *bytes -= stored.bytes();
                *nodes -= stored.nodes;
                freed += stored.charged();
            }
            !uses
        });
        self.give_back();
        self.trim(freed);
    }

    /// Counts freed bytes, and gives the heap back to the kernel when they are many.
    fn trim(&mut self, freed: u64) {
        self.freed += freed;
        if self.freed >= TRIM_BYTES {
            self.freed = 0;
            heap::trim();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.stored.len()
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        let freed = self.stored.drain().map(|(_, stored)| stored.charged());
        let freed = freed.sum::<u64>();
        self.assembled = Vec::new();
        self.trim(freed);
    }
}

/// What graphs are compiled against.
pub(super) struct CompileContext<'a> {
    pub(super) engine: &'a dyn Engine,
    pub(super) buffers: &'a Buffers,
    pub(super) limits: &'a Limits,
    pub(super) tenant: &'a Arc<Tenant>,
    /// The version of the messages that the guest sends.
    pub(super) protocol: ProtocolVersion,
    /// Whether the guest is gone, or the executor stops.
    pub(super) is_cancelled: &'a dyn Fn() -> bool,
}

impl StoredGraph {
    /// The graph, for people.
    pub(super) fn info(&self, graph: GraphId) -> GraphInfo {
        GraphInfo {
            graph: graph.0,
            nodes: self.nodes,
            longest: self.longest.map(|longest| (longest.node, longest.op)),
        }
    }

    /// A graph whose tenant has not enough memory for the image.
    fn without_image(error: EngineError) -> StoredGraph {
        StoredGraph {
            plan: Err(error.clone()),
            charges: Vec::new(),
            image: Err(error),
            lacks_memory: false,
            transient: 0,
            nodes: 0,
            tokens: 0,
            longest: None,
            buffers: Vec::new(),
        }
    }

    /// A graph of these buffers whose tenant has not enough memory for the plan.
    fn without_plan(error: EngineError, image: Image, buffers: Vec<BufferId>) -> StoredGraph {
        StoredGraph {
            plan: Err(error),
            charges: Vec::new(),
            image: Ok(image),
            lacks_memory: false,
            transient: 0,
            nodes: 0,
            tokens: 0,
            longest: None,
            buffers,
        }
    }

    /// Whether the graph has to be compiled again before it runs.
    fn is_stale(&self) -> bool {
        match &self.plan {
            Ok(plan) => !plan.is_current(),
            Err(_) => self.lacks_memory,
        }
    }

    /// The charged bytes, most of which are in the heap.
    fn charged(&self) -> u64 {
        let image = self.image.as_ref().map_or(0, Image::bytes);
        image + self.charges.iter().map(Charge::size).sum::<u64>()
    }

    /// The image, without the plan.
    fn into_image(self) -> Result<Image, EngineError> {
        self.image
    }

    /// Bytes of its image.
    fn bytes(&self) -> u64 {
        self.image.as_ref().map_or(0, Image::bytes)
    }
}

impl Image {
    /// An image of `words`, for which at least twice their bytes and [`ENTRY_BYTES`] are charged.
    /// The charge is also for the table of the buffers, which is kept beside the image. It takes no
    /// more than the image.
    fn new(words: Vec<u32>, mut charge: Charge) -> Image {
        let bytes = 4 * words.len() as u64;
        let buffers = GraphCounts::of_image(&words).map_or(0, |counts| counts.buffers);
        let table = size_of::<BufferId>() as u64 * buffers as u64;
        charge.shrink(bytes + table.min(bytes) + ENTRY_BYTES);
        Image {
            words: words.into(),
            _charge: charge,
        }
    }

    fn bytes(&self) -> u64 {
        4 * self.words.len() as u64
    }
}

/// The words of whole bytes.
///
/// # Errors
/// [`EngineError::OutOfHostMemory`].
fn words(bytes: &[u8]) -> Result<Vec<u32>, EngineError> {
    let mut words = Vec::new();
    let reserved = words.try_reserve_exact(bytes.len() / 4);
    reserved.map_err(|_| no_memory(bytes.len() as u64))?;
    let (all, _) = bytes.as_chunks();
    words.extend(all.iter().map(|&word| u32::from_le_bytes(word)));
    Ok(words)
}

/// The words of a part of a message.
///
/// # Errors
/// [`EngineError::OutOfHostMemory`].
fn words_of(part: Bytes<'_>) -> Result<Vec<u32>, EngineError> {
    let mut bytes = Vec::new();
    let reserved = bytes.try_reserve_exact(part.len());
    reserved.map_err(|_| no_memory(part.len() as u64))?;
    bytes.resize(part.len(), 0);
    part.copy_to(&mut bytes);
    words(&bytes)
}

/// Bytes that the compilations of this process that are under way may allocate.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// Memory that a compilation may allocate, as long as this exists.
#[derive(Debug)]
struct Reservation(u64);

impl Drop for Reservation {
    fn drop(&mut self) {
        RESERVED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Asks for the memory of a compilation and of all others that are under way, and gives it back:
/// most of a compilation allocates memory in ways that end the process if there is none. What the
/// others have allocated already counts twice. A buffer that is allocated meanwhile can take it.
///
/// # Errors
/// [`EngineError::OutOfHostMemory`].
fn reserve_memory(bytes: u64) -> Result<Reservation, EngineError> {
    let before = RESERVED.fetch_add(bytes, Ordering::Relaxed);
    // Given back on an error, too.
    let reservation = Reservation(bytes);
    let mut memory = Vec::<u8>::new();
    let wanted = usize::try_from(before.saturating_add(bytes)).unwrap_or(usize::MAX);
    let reserved = memory.try_reserve_exact(wanted);
    // Otherwise the compiler removes the allocation.
    std::hint::black_box(&memory);
    match reserved {
        Ok(()) => Ok(reservation),
        Err(_) => Err(no_memory(bytes)),
    }
}

/// The process has no memory for `wanted` bytes that the guest has been charged for.
fn no_memory(wanted: u64) -> EngineError {
    EngineError::OutOfHostMemory {
        wanted,
        free: 0,
        total: 0,
    }
}

/// The tokens that a run of the graph computes: the most columns of activations of a product. The
/// last layer of a model has fewer columns than the others, if the program needs few results. A
/// graph without a product has none.
fn tokens(graph: &Graph) -> u64 {
    let columns = graph.nodes.iter().map(|node| {
        let [_, columns, of_experts, _] = graph.dst(node).shape.ne;
        match node.op {
            Op::MulMat { .. } => columns,
            // The second extent is the number of experts for each token.
            Op::MulMatId { .. } => of_experts,
            _ => 0,
        }
    });
    columns.max().unwrap_or(0)
}

/// Decodes and validates an image. An [`EngineError`] if that is cancelled, or if the process has
/// no memory.
fn read(
    image: &[u32],
    context: &CompileContext<'_>,
    broken: impl Fn(DecodeError) -> Violation,
    invalid: impl Fn(Invalid) -> Violation,
) -> Result<Result<ValidGraph, EngineError>, Violation> {
    let is_cancelled = context.is_cancelled;
    let graph = match Graph::decode_until(image, is_cancelled) {
        Ok(Some(graph)) => graph,
        Ok(None) => return Ok(Err(EngineError::Cancelled)),
        Err(DecodeError::NoMemory { bytes }) => return Ok(Err(no_memory(bytes as u64))),
        Err(error) => return Err(broken(error)),
    };
    let size_of = |buffer| context.buffers.find(buffer).map(|memory| memory.size());
    let (capabilities, limits) = (context.engine.capabilities(), &context.limits.graph);
    let graph = validate_until(graph, capabilities, limits, size_of, is_cancelled);
    let graph = graph.map_err(invalid)?.ok_or(EngineError::Cancelled);
    Ok(graph.map(|graph| graph.with_padded_rows(context.protocol.pads_rows())))
}

/// Checks the work of each node of a validated graph, and returns the node that takes longest.
///
/// # Errors
/// [`EngineError::TooMuchWork`] for the first node that exceeds a limit, and
/// [`EngineError::Cancelled`].
fn longest_node(
    graph: &Graph,
    context: &CompileContext<'_>,
) -> Result<Option<LongestNode>, EngineError> {
    let engine = context.engine;
    let limit = { context.limits.node_time }.unwrap_or(engine.max_node_time());
    let speed = |node: &Node| engine.speed_of(graph, node);
    let launches = |node: &Node, estimate| engine.launches_of(graph, node, estimate);
    let count = graph.nodes.len();
    let mut longest: Option<LongestNode> = None;
    for first in (0..count).step_by(ENTRIES_PER_QUESTION) {
        if (context.is_cancelled)() {
            return Err(EngineError::Cancelled);
        }
        let nodes = first..count.min(first + ENTRIES_PER_QUESTION);
        let found = work::check_nodes(graph, nodes, speed, launches, limit)?;
        let is_longer =
            |found: &LongestNode| longest.is_none_or(|longest| found.estimate > longest.estimate);
        longest = found.filter(is_longer).or(longest);
    }
    Ok(longest)
}

/// Decodes, validates and compiles a graph. The tenant of the session is charged first for the most
/// memory that the compilation can need, which follows from the head of the image, and then for
/// what the plan keeps.
fn compile(
    id: GraphId,
    image: Image,
    context: &CompileContext<'_>,
) -> Result<StoredGraph, Violation> {
    let broken = |error| Violation::Image { graph: id, error };
    let invalid = |invalid| Violation::Graph { graph: id, invalid };
    let counts = GraphCounts::of_image(&image.words).map_err(broken)?;
    let limit = context.limits.graph.nodes;
    if counts.nodes > limit {
        let nodes = counts.nodes;
        return Err(invalid(Invalid::TooManyNodes { nodes, limit }));
    }
    // A table longer than the number of buffers repeats entries. Engines allocate memory per entry,
    // so the length has to be limited.
    if counts.buffers > context.buffers.len() {
        return Err(Violation::BufferTable {
            graph: id,
            names: counts.buffers,
            buffers: context.buffers.len(),
        });
    }
    let mut buffers = counts.buffers_of(&image.words);
    buffers.sort_unstable();
    buffers.dedup();
    let most = counts.decoded_bytes()
        + READ_BUFFER_BYTES * counts.buffers as u64
        + context.engine.compile_bytes(&counts);
    // Declared before the plan, so that on an error the plan is freed before they are released.
    let mut charges = match context.tenant.charge_host(most, context.engine) {
        Ok(charge) => vec![charge],
        Err(error) => return Ok(StoredGraph::without_plan(error, image, buffers)),
    };
    let _reservation = match reserve_memory(most) {
        Ok(reservation) => reservation,
        Err(error) => return Ok(StoredGraph::without_plan(error, image, buffers)),
    };
    let graph = match read(&image.words, context, broken, invalid)? {
        Ok(graph) => graph,
        Err(error) => return Ok(StoredGraph::without_plan(error, image, buffers)),
    };
    let memory: Vec<Arc<dyn Memory>> = graph
        .graph()
        .buffers
        .iter()
        .filter_map(|&buffer| context.buffers.find(buffer).cloned())
        .collect();
    let (nodes, tokens) = (graph.graph().nodes.len(), tokens(graph.graph()));
    let work = longest_node(graph.graph(), context);
    let longest = work.as_ref().map_or(None, |longest| *longest);
    expect_unlocked("Engine::compile");
    let mut plan = match work {
        _ if (context.is_cancelled)() => Err(EngineError::Cancelled),
        Ok(_) => { context.engine }.compile(&graph, &memory, context.is_cancelled),
        Err(error) => Err(error),
    };
    drop(graph);
    if let Ok(plan) = &mut plan {
        plan.set_label(&format!("graph {}", id.0));
    }
    let needed = plan.as_ref().map_or(0, |plan| plan.plan_bytes());
    if needed > most {
        // Added: no other session takes the memory that the plan has.
        let more = needed - most;
        match context.tenant.charge_host(more, context.engine) {
            Ok(more) => charges.push(more),
            Err(error) => return Ok(StoredGraph::without_plan(error, image, buffers)),
        }
    }
    let of_device = match plan.as_ref().map_or(0, |plan| plan.device_bytes()) {
        0 => None,
        bytes => match context.tenant.charge_allocated(bytes, context.engine) {
            Ok(of_device) => Some(of_device),
            Err(error) => return Ok(StoredGraph::without_plan(error, image, buffers)),
        },
    };
    // Copies of tensors are allocated when they are charged.
    if let Ok(of_graph) = &mut plan
        && let Err(error) = of_graph.allocate()
    {
        plan = Err(error);
    }
    let kept = plan.as_ref().map_or(0, |plan| plan.plan_bytes());
    let mut left = needed.min(kept);
    for charge in &mut charges {
        charge.shrink(left);
        left = left.saturating_sub(charge.size());
    }
    charges.extend(of_device);
    Ok(StoredGraph {
        plan,
        lacks_memory: false,
        charges,
        image: Ok(image),
        transient: most.saturating_sub(needed),
        nodes,
        tokens,
        longest,
        buffers,
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Resource, Rlimit, setrlimit};

    use super::*;

    /// Set in the process of the test below, whose address space is limited.
    const LIMITED: &str = "VGPU_TEST_RESERVATIONS";

    /// Two compilations at once, of which each alone has the memory that it needs.
    #[test]
    fn compilations_at_once_get_no_memory_twice() {
        const EACH: u64 = 64 << 20;
        if std::env::var_os(LIMITED).is_none() {
            let name = "session::graphs::tests::compilations_at_once_get_no_memory_twice";
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name])
                .env(LIMITED, "1")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{output:?}"
            );
            return;
        }
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages = pages.split(' ').next().unwrap().parse::<u64>().unwrap();
        let has = pages * rustix::param::page_size() as u64;
        let limit = Rlimit {
            current: Some(has + EACH / 2 * 3),
            maximum: None,
        };
        setrlimit(Resource::As, limit).unwrap();
        let first = reserve_memory(EACH).unwrap();
        let error = reserve_memory(EACH).unwrap_err();
        assert!(error.to_string().contains("64.0 MiB wanted"), "{error}");
        drop(first);
        drop(reserve_memory(EACH).unwrap());
        assert!(reserve_memory(2 * EACH).is_err());
        assert_eq!(RESERVED.load(Ordering::Relaxed), 0);
    }
}
