//! The graphs of a session: assembled from parts, validated, compiled, kept.

use std::collections::HashMap;
use std::sync::Arc;

use vgpu_engine::{Engine, EngineError, Memory, Plan};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::{BufferId, Graph, patch, validate};
use vgpu_transport::wire::{GraphId, MAX_GRAPH};

use super::buffers::Buffers;
use super::ending::Violation;
use crate::limits::Limits;

/// Assembly memory above which it is given back after a graph.
const KEEP_ASSEMBLY: usize = 4 << 20;

/// The graphs that a guest has sent.
#[derive(Default)]
pub(super) struct Graphs {
    kept: HashMap<GraphId, Kept>,
    /// Sums over `kept`.
    bytes: u64,
    nodes: usize,
    assembly: Option<Assembly>,
    /// The image under assembly.
    image: Vec<u8>,
}

/// A graph of which the first `image.len()` bytes are here.
#[derive(Debug, Clone, Copy)]
struct Assembly {
    graph: GraphId,
    total: u64,
}

/// A graph that can be submitted.
pub(super) struct Kept {
    /// The words it came in, for later graphs that differ from it in a few.
    image: Box<[u32]>,
    /// An engine that cannot compile a graph fails each run of it.
    pub(super) plan: Result<Box<dyn Plan>, EngineError>,
    pub(super) nodes: usize,
    /// Sorted.
    buffers: Vec<BufferId>,
}

/// What a part of a graph led to.
#[derive(Debug)]
pub(super) enum Progress {
    /// More parts are to come.
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
    /// Takes a part of an image; with the last one, the graph.
    pub(super) fn part(
        &mut self,
        graph: GraphId,
        offset: u64,
        total: u64,
        part: Bytes<'_>,
        host: &Host<'_>,
    ) -> Result<Progress, Violation> {
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
            return Ok(Progress::Incomplete);
        }

        self.assembly = None;
        let words = words(&self.image);
        self.image.clear();
        self.image.shrink_to(KEEP_ASSEMBLY);
        let kept = compile(graph, words, host)?;
        self.keep(graph, kept, host.limits)
    }

    /// Takes a graph that differs from another by `patch`.
    pub(super) fn patch(
        &mut self,
        graph: GraphId,
        base: GraphId,
        patch: Bytes<'_>,
        host: &Host<'_>,
    ) -> Result<Progress, Violation> {
        let Some(kept) = self.kept.get(&base) else {
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
        let words = patch::apply(&kept.image, &words(&bytes))
            .map_err(|error| Violation::Image { graph, error })?;
        let kept = compile(graph, words, host)?;
        self.keep(graph, kept, host.limits)
    }

    fn keep(&mut self, graph: GraphId, kept: Kept, limits: &Limits) -> Result<Progress, Violation> {
        let (bytes, nodes) = (kept.bytes(), kept.nodes);
        let progress = match &kept.plan {
            Ok(_) => Progress::Compiled { bytes, nodes },
            Err(error) => Progress::Failed(error.clone()),
        };
        self.forget(graph);
        self.bytes += bytes;
        self.nodes += nodes;
        self.kept.insert(graph, kept);
        for (what, count, limit) in [
            ("graphs", self.kept.len() as u64, limits.graphs as u64),
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
        Ok(progress)
    }

    /// A graph to run, compiled for where memory lies now.
    pub(super) fn get(&mut self, graph: GraphId, host: &Host<'_>) -> Result<&mut Kept, Violation> {
        let kept = self.kept.get_mut(&graph);
        let kept = kept.ok_or(Violation::UnknownGraph(graph))?;
        if kept.plan.as_ref().is_ok_and(|plan| !plan.is_current()) {
            *kept = compile(graph, kept.image.to_vec(), host)?;
        }
        Ok(kept)
    }

    /// The plan of a graph that was submitted.
    pub(super) fn under_way(&mut self, graph: GraphId) -> Option<&mut dyn Plan> {
        let kept = self.kept.get_mut(&graph)?;
        Some(kept.plan.as_mut().ok()?.as_mut())
    }

    /// The nodes of a graph.
    pub(super) fn nodes(&self, graph: GraphId) -> usize {
        self.kept.get(&graph).map_or(0, |kept| kept.nodes)
    }

    /// Drops a graph. Unknown ones are fine: a guest may not know that freeing a buffer has taken them.
    pub(super) fn forget(&mut self, graph: GraphId) {
        if let Some(kept) = self.kept.remove(&graph) {
            self.bytes -= kept.bytes();
            self.nodes -= kept.nodes;
        }
    }

    /// Drops every graph that uses `buffer`.
    pub(super) fn forget_users(&mut self, buffer: BufferId) {
        let (bytes, nodes) = (&mut self.bytes, &mut self.nodes);
        self.kept.retain(|_, kept| {
            let uses = kept.buffers.binary_search(&buffer).is_ok();
            if uses {
                *bytes -= kept.bytes();
                *nodes -= kept.nodes;
            }
            !uses
        });
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }
}

/// What a graph is compiled against.
pub(super) struct Host<'a> {
    pub(super) engine: &'a dyn Engine,
    pub(super) buffers: &'a Buffers,
    pub(super) limits: &'a Limits,
}

impl Kept {
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

fn compile(id: GraphId, words: Vec<u32>, host: &Host<'_>) -> Result<Kept, Violation> {
    let graph = Graph::decode(&words).map_err(|error| Violation::Image { graph: id, error })?;
    // More names than buffers means repeated names; there is no use for them, and the tables that
    // engines make of them would be larger than the image.
    if graph.buffers.len() > host.buffers.len() {
        return Err(Violation::BufferTable {
            graph: id,
            names: graph.buffers.len(),
            buffers: host.buffers.len(),
        });
    }
    let size_of = |buffer| host.buffers.find(buffer).map(|memory| memory.size());
    let graph = validate(
        graph,
        host.engine.capabilities(),
        &host.limits.graph,
        size_of,
    )
    .map_err(|invalid| Violation::Graph { graph: id, invalid })?;
    let memory: Vec<Arc<dyn Memory>> = graph
        .graph()
        .buffers
        .iter()
        .filter_map(|&buffer| host.buffers.find(buffer).cloned())
        .collect();
    let mut buffers = graph.graph().buffers.clone();
    buffers.sort_unstable();
    buffers.dedup();
    let mut plan = host.engine.compile(&graph, &memory);
    if let Ok(plan) = &mut plan {
        plan.set_label(&format!("graph {}", id.0));
    }
    Ok(Kept {
        plan,
        buffers,
        nodes: graph.graph().nodes.len(),
        image: words.into(),
    })
}
