//! The graphs of a session: assembled from parts, validated, compiled, stored.

use std::collections::HashMap;
use std::sync::Arc;

use vgpu_engine::{Engine, EngineError, Memory, Plan};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::{BufferId, Graph, patch, validate};
use vgpu_transport::wire::{GraphId, MAX_GRAPH};

use super::buffers::Buffers;
use super::error::Violation;
use crate::limits::Limits;
use crate::tenant::{Charge, Tenant};

/// Bytes of the assembly buffer that are kept between graphs.
const MAX_IDLE_ASSEMBLY: usize = 4 << 20;

/// The graphs of a session.
#[derive(Default)]
pub(super) struct Graphs {
    stored: HashMap<GraphId, StoredGraph>,
    /// Sums over `stored`: bytes of the images, nodes.
    bytes: u64,
    nodes: usize,
    /// The working memory of the graph that needs the most. A session runs one graph at a time.
    working: WorkingMemory,
    assembly: Option<Assembly>,
    /// The part of the image that has been received.
    image: Vec<u8>,
}

/// The working memory of runs, which is charged to the tenant of the session.
#[derive(Default)]
struct WorkingMemory {
    bytes: u64,
    /// Charges that sum up to `bytes`.
    charges: Vec<Charge>,
}

impl WorkingMemory {
    /// Charges what is missing to `bytes`.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] with the tenant's own figures.
    fn reserve(&mut self, bytes: u64, context: &CompileContext<'_>) -> Result<(), EngineError> {
        let Some(more) = bytes.checked_sub(self.bytes).filter(|&more| more > 0) else {
            return Ok(());
        };
        let charge = context.tenant.charge(more, context.engine)?;
        self.charges.push(charge);
        self.bytes = bytes;
        Ok(())
    }
}

/// A graph that is being received.
#[derive(Debug, Clone, Copy)]
struct Assembly {
    graph: GraphId,
    total: u64,
}

/// A graph that has been received completely.
pub(super) struct StoredGraph {
    /// The encoded graph, the base of later patches.
    image: Box<[u32]>,
    /// The compiled graph. With an error, every SUBMIT of the graph fails.
    pub(super) plan: Result<Box<dyn Plan>, EngineError>,
    pub(super) nodes: usize,
    /// The buffers that the graph uses, sorted.
    buffers: Vec<BufferId>,
}

/// What a received part of a graph led to.
#[derive(Debug)]
pub(super) enum GraphStatus {
    /// Further parts are missing.
    Incomplete,
    /// The graph can be submitted.
    Compiled {
        /// Bytes of its image.
        bytes: u64,
        /// Its nodes.
        nodes: usize,
    },
    /// The graph is valid, but the engine cannot compile it.
    Failed(EngineError),
}

impl Graphs {
    /// Receives a part of a graph. Compiles the graph when the part is the last.
    pub(super) fn part(
        &mut self,
        graph: GraphId,
        offset: u64,
        total: u64,
        part: Bytes<'_>,
        context: &CompileContext<'_>,
    ) -> Result<GraphStatus, Violation> {
        if total == 0 || total > MAX_GRAPH || !total.is_multiple_of(4) {
            return Err(Violation::ImageSize {
                graph,
                total,
                limit: MAX_GRAPH,
            });
        }
        let Assembly {
            graph: expected_graph,
            total: expected_total,
        } = *self.assembly.get_or_insert(Assembly { graph, total });
        let have = self.image.len();
        let in_order = (graph, total, offset) == (expected_graph, expected_total, have as u64);
        // `total` is at most MAX_GRAPH and `have` at most `total`, so nothing here can wrap.
        if !in_order || part.is_empty() || part.len() as u64 > total - have as u64 {
            return Err(Violation::Part {
                graph,
                offset,
                len: part.len(),
                total,
                expected_graph,
                expected_offset: have as u64,
                expected_total,
            });
        }
        self.image.resize(have + part.len(), 0);
        part.copy_to(&mut self.image[have..]);
        if (self.image.len() as u64) < total {
            return Ok(GraphStatus::Incomplete);
        }

        self.assembly = None;
        let words = words(&self.image);
        self.image.clear();
        self.image.shrink_to(MAX_IDLE_ASSEMBLY);
        let stored = compile(graph, words, context)?;
        self.keep(graph, stored, context)
    }

    /// Receives a graph as the difference `patch` to the stored graph `base`, and compiles it.
    pub(super) fn patch(
        &mut self,
        graph: GraphId,
        base: GraphId,
        patch: Bytes<'_>,
        context: &CompileContext<'_>,
    ) -> Result<GraphStatus, Violation> {
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
        let mut bytes = vec![0; patch.len()];
        patch.copy_to(&mut bytes);
        let words = patch::apply(&stored.image, &words(&bytes))
            .map_err(|error| Violation::Image { graph, error })?;
        let stored = compile(graph, words, context)?;
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
        let outcome = match &stored.plan {
            Ok(plan) => self.working.reserve(plan.working_bytes(), context),
            Err(_) => return,
        };
        if let Err(error) = outcome {
            stored.plan = Err(error);
        }
    }

    /// A graph to run. Compiles it again if its memory has moved.
    pub(super) fn get(
        &mut self,
        graph: GraphId,
        context: &CompileContext<'_>,
    ) -> Result<&mut StoredGraph, Violation> {
        let stored = self.stored.get(&graph);
        let stored = stored.ok_or(Violation::UnknownGraph(graph))?;
        if stored.plan.as_ref().is_ok_and(|plan| !plan.is_current()) {
            let mut again = compile(graph, stored.image.to_vec(), context)?;
            self.charge(&mut again, context);
            self.stored.insert(graph, again);
        }
        let stored = self.stored.get_mut(&graph);
        stored.ok_or(Violation::UnknownGraph(graph))
    }

    /// The plan of a graph that the device is executing.
    pub(super) fn submitted(&mut self, graph: GraphId) -> Option<&mut dyn Plan> {
        let stored = self.stored.get_mut(&graph)?;
        Some(stored.plan.as_mut().ok()?.as_mut())
    }

    /// The number of nodes of a graph.
    pub(super) fn nodes(&self, graph: GraphId) -> usize {
        self.stored.get(&graph).map_or(0, |stored| stored.nodes)
    }

    /// Drops a graph, if it exists. Freeing a buffer drops graphs, too, so a guest may name one
    /// that is gone.
    pub(super) fn forget(&mut self, graph: GraphId) {
        if let Some(stored) = self.stored.remove(&graph) {
            self.bytes -= stored.bytes();
            self.nodes -= stored.nodes;
            self.give_back();
        }
    }

    /// Gives the charge for working memory back when no graph needs as much.
    fn give_back(&mut self) {
        let plans = self
            .stored
            .values()
            .filter_map(|stored| stored.plan.as_ref().ok());
        let needed = plans.map(|plan| plan.working_bytes()).max().unwrap_or(0);
        while let Some(last) = self.working.charges.last() {
            let less = self.working.bytes - last.size();
            if less < needed {
                return;
            }
            self.working.charges.pop();
            self.working.bytes = less;
        }
    }

    /// Drops every graph that uses `buffer`.
    pub(super) fn forget_users(&mut self, buffer: BufferId) {
        let (bytes, nodes) = (&mut self.bytes, &mut self.nodes);
        self.stored.retain(|_, stored| {
            let uses = stored.buffers.binary_search(&buffer).is_ok();
            if uses {
                *bytes -= stored.bytes();
                *nodes -= stored.nodes;
            }
            !uses
        });
        self.give_back();
    }

    pub(super) fn len(&self) -> usize {
        self.stored.len()
    }
}

/// What graphs are compiled against.
pub(super) struct CompileContext<'a> {
    pub(super) engine: &'a dyn Engine,
    pub(super) buffers: &'a Buffers,
    pub(super) limits: &'a Limits,
    pub(super) tenant: &'a Arc<Tenant>,
}

impl StoredGraph {
    /// Bytes of its image.
    fn bytes(&self) -> u64 {
        4 * self.image.len() as u64
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

fn compile(
    id: GraphId,
    words: Vec<u32>,
    context: &CompileContext<'_>,
) -> Result<StoredGraph, Violation> {
    let graph = Graph::decode(&words).map_err(|error| Violation::Image { graph: id, error })?;
    // A table longer than the number of buffers repeats entries. Engines allocate memory per entry,
    // so the length has to be limited.
    if graph.buffers.len() > context.buffers.len() {
        return Err(Violation::BufferTable {
            graph: id,
            names: graph.buffers.len(),
            buffers: context.buffers.len(),
        });
    }
    let size_of = |buffer| context.buffers.find(buffer).map(|memory| memory.size());
    let graph = validate(
        graph,
        context.engine.capabilities(),
        &context.limits.graph,
        size_of,
    )
    .map_err(|invalid| Violation::Graph { graph: id, invalid })?;
    let memory: Vec<Arc<dyn Memory>> = graph
        .graph()
        .buffers
        .iter()
        .filter_map(|&buffer| context.buffers.find(buffer).cloned())
        .collect();
    let mut buffers = graph.graph().buffers.clone();
    buffers.sort_unstable();
    buffers.dedup();
    let mut plan = context.engine.compile(&graph, &memory);
    if let Ok(plan) = &mut plan {
        plan.set_label(&format!("graph {}", id.0));
    }
    Ok(StoredGraph {
        plan,
        buffers,
        nodes: graph.graph().nodes.len(),
        image: words.into(),
    })
}
