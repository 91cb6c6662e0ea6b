//! The graphs that the host has: each is sent once, as a patch of another one where that is less.

use std::hash::{BuildHasher, BuildHasherDefault};
use std::sync::Arc;

use rustc_hash::FxHasher;
use vgpu_transport::ir::{BufferId, Graph, patch};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD};

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
    /// What the host needs before it can run it.
    pub(crate) news: News,
    /// A graph that the host must forget for it.
    pub(crate) evicted: Option<GraphId>,
}

/// How the host gets to know a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    /// It has it.
    Nothing,
    /// By the words that differ from those of another graph that it has.
    Patch {
        /// The other graph.
        base: GraphId,
        /// The words, in the form of [`vgpu_transport::ir::patch`].
        patch: Vec<u32>,
    },
    /// By its whole image.
    Whole,
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
        let news = self.news();
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
            news,
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
            news: News::Nothing,
            evicted: None,
        }
    }

    /// How to tell the host of the image in `blank`: as a patch of the graph of the same length that was used
    /// last, unless most of it differs.
    fn news(&self) -> News {
        let alike = |entry: &&Entry| entry.image.len() == self.blank.len();
        let base = self.entries.iter().filter(alike).max_by_key(|e| e.used);
        let limit = (self.blank.len() / 2).min(MAX_PAYLOAD / 4);
        base.and_then(|base| {
            let patch = patch::diff(&base.image, &self.blank, limit)?;
            let base = base.graph;
            Some(News::Patch { base, patch })
        })
        .unwrap_or(News::Whole)
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
        assert_eq!(first.news, News::Whole);
        assert_ne!(image(&mut graphs, 2).news, News::Nothing);
        let again = image(&mut graphs, 1);
        let graph = first.graph;
        assert_eq!(
            again,
            Known {
                news: News::Nothing,
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
                news: News::Nothing,
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
        assert_ne!(image(&mut graphs, 0).news, News::Nothing);
    }

    #[test]
    fn a_graph_like_another_is_a_patch_of_the_one_used_last() {
        let mut graphs = Graphs::default();
        image(&mut graphs, 1);
        let second = image(&mut graphs, 2);
        let third = image(&mut graphs, 3);
        let News::Patch { base, patch } = third.news else {
            panic!("{third:?}");
        };
        assert_eq!(base, second.graph);
        let patched = patch::apply(graphs.image(base), &patch).unwrap();
        assert_eq!(patched, graphs.image(third.graph));
        assert_eq!(patch.len(), 3, "position, count, the buffer's name");
        // One more buffer: another length.
        let other = Graph {
            buffers: vec![BufferId(1), BufferId(2)],
            ..Graph::default()
        };
        assert_eq!(graphs.by_content(None, &other).news, News::Whole);
    }
}
