//! The graphs that the host has: each is sent once.

use std::hash::{BuildHasher, BuildHasherDefault};
use std::sync::Arc;

use rustc_hash::FxHasher;
use vgpu_transport::ir::{BufferId, Graph};
use vgpu_transport::wire::GraphId;

/// Graphs kept on the host. llama.cpp alternates between a few for each context: prefill, decode, and
/// either with other cache sizes.
const CAPACITY: usize = 64;

/// What the host has of this session.
#[derive(Default)]
pub(crate) struct Graphs {
    entries: Vec<Entry>,
    /// Where the image of a graph in question is made.
    blank: Vec<u32>,
    last_id: u64,
    clock: u64,
}

struct Entry {
    graph: GraphId,
    /// The number by which the program in front of us knows it, if any.
    key: Option<u64>,
    hash: u64,
    image: Vec<u32>,
    buffers: Arc<[BufferId]>,
    nodes: usize,
    used: u64,
}

/// A graph that is ready to be submitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    /// Its name on the host.
    pub(crate) graph: GraphId,
    /// The buffers it reads and writes.
    pub(crate) buffers: Arc<[BufferId]>,
    /// Nodes it computes.
    pub(crate) nodes: usize,
    /// Whether the host does not have it yet.
    pub(crate) is_new: bool,
    /// A graph that the host must forget for it.
    pub(crate) evicted: Option<GraphId>,
}

impl Graphs {
    /// The graph last seen with this key.
    pub(crate) fn by_key(&mut self, key: u64) -> Option<Known> {
        let at = self
            .entries
            .iter()
            .position(|entry| entry.key == Some(key))?;
        Some(self.touch(at))
    }

    /// The graph, which is new to the host unless one with the same image was sent before.
    pub(crate) fn by_content(&mut self, key: Option<u64>, graph: &Graph) -> Known {
        graph.encode_into(&mut self.blank);
        let hash = BuildHasherDefault::<FxHasher>::default().hash_one(&self.blank);
        let same = |entry: &Entry| entry.hash == hash && entry.image == self.blank;
        if let Some(at) = self.entries.iter().position(same) {
            self.entries[at].key = key;
            return self.touch(at);
        }
        let evicted = self.make_room();
        self.last_id += 1;
        self.entries.push(Entry {
            graph: GraphId(self.last_id),
            key,
            hash,
            image: std::mem::take(&mut self.blank),
            buffers: graph.buffers.as_slice().into(),
            nodes: graph.nodes.len(),
            used: 0,
        });
        Known {
            is_new: true,
            evicted,
            ..self.touch(self.entries.len() - 1)
        }
    }

    /// The image of a graph.
    pub(crate) fn image(&self, graph: GraphId) -> &[u32] {
        self.entries
            .iter()
            .find(|entry| entry.graph == graph)
            .map_or(&[], |entry| &entry.image)
    }

    /// Drops the graphs that use a buffer; the host must forget them.
    pub(crate) fn remove_users(&mut self, buffer: BufferId) -> Vec<GraphId> {
        let mut removed = Vec::new();
        self.entries.retain(|entry| {
            let uses = entry.buffers.contains(&buffer);
            if uses {
                removed.push(entry.graph);
            }
            !uses
        });
        removed
    }

    fn touch(&mut self, at: usize) -> Known {
        self.clock += 1;
        let entry = &mut self.entries[at];
        entry.used = self.clock;
        Known {
            graph: entry.graph,
            buffers: Arc::clone(&entry.buffers),
            nodes: entry.nodes,
            is_new: false,
            evicted: None,
        }
    }

    fn make_room(&mut self) -> Option<GraphId> {
        if self.entries.len() < CAPACITY {
            return None;
        }
        let (at, _) = self
            .entries
            .iter()
            .enumerate()
            .min_by_key(|(_, entry)| entry.used)?;
        Some(self.entries.swap_remove(at).graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(graphs: &mut Graphs, buffer: u64) -> Known {
        let graph = Graph {
            buffers: vec![BufferId(buffer)],
            ..Graph::default()
        };
        graphs.by_content(None, &graph)
    }

    #[test]
    fn an_image_is_new_once() {
        let mut graphs = Graphs::default();
        let first = image(&mut graphs, 1);
        assert!(first.is_new);
        assert!(image(&mut graphs, 2).is_new);
        let again = image(&mut graphs, 1);
        let graph = first.graph;
        assert_eq!(
            again,
            Known {
                is_new: false,
                ..first
            }
        );
        assert_eq!(
            Graph::decode(graphs.image(graph)).unwrap().buffers,
            [BufferId(1)]
        );
    }

    #[test]
    fn a_key_finds_the_graph_it_was_last_seen_with() {
        let mut graphs = Graphs::default();
        assert_eq!(graphs.by_key(9), None);
        let known = graphs.by_content(Some(9), &Graph::default());
        assert_eq!(
            graphs.by_key(9),
            Some(Known {
                is_new: false,
                ..known
            })
        );
    }

    #[test]
    fn the_least_recently_used_makes_room_and_freed_buffers_take_their_graphs() {
        let mut graphs = Graphs::default();
        let all: Vec<Known> = (0..CAPACITY as u64)
            .map(|i| image(&mut graphs, i))
            .collect();
        image(&mut graphs, 0);
        let over = image(&mut graphs, CAPACITY as u64);
        assert_eq!(over.evicted, Some(all[1].graph));
        assert_eq!(graphs.remove_users(BufferId(0)), [all[0].graph]);
        assert!(image(&mut graphs, 0).is_new);
    }
}
