//! The graphs that the executor has. Each graph is sent once: as a patch of an earlier graph if
//! that is shorter.

use std::hash::{BuildHasher, BuildHasherDefault};
use std::sync::Arc;

use rustc_hash::FxHasher;
use vgpu_transport::ir::{BufferId, Graph, patch};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD};

use crate::lock::{Rank, expect_unlocked};

/// Graphs that the executor keeps for a session. llama.cpp alternates between a few for each
/// context: prefill and decode, each with several sizes of the KV cache.
const CAPACITY: usize = 64;

/// The graphs of one session that the executor has.
#[derive(Default)]
pub(crate) struct GraphCache {
    entries: Vec<Entry>,
    last_id: u64,
    /// Counts the uses of graphs.
    clock: u64,
}

struct Entry {
    graph: GraphId,
    /// The `uid` of the `ggml_cgraph`, if ggml has set one.
    key: Option<u64>,
    hash: u64,
    words: Vec<u32>,
    buffers: Arc<[BufferId]>,
    nodes: usize,
    /// The clock at the last use.
    used: u64,
}

/// A graph in the form that is sent: an array of 32-bit words.
#[derive(Default)]
pub(crate) struct GraphImage {
    words: Vec<u32>,
    hash: u64,
    buffers: Vec<BufferId>,
    nodes: usize,
}

/// A graph of the cache, ready to be submitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    /// The name of the graph on the wire.
    pub(crate) graph: GraphId,
    /// The buffers that the graph reads and writes.
    pub(crate) buffers: Arc<[BufferId]>,
    /// The number of nodes that the executor computes.
    pub(crate) nodes: usize,
    /// What must be sent before the executor can run the graph.
    pub(crate) upload: GraphUpload,
    /// A graph that the executor must forget first.
    pub(crate) evicted: Option<GraphId>,
}

/// How a graph is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GraphUpload {
    /// Not at all: the executor has the graph.
    Nothing,
    /// As the words that differ from another graph that the executor has.
    Patch {
        /// The other graph.
        base: GraphId,
        /// The difference, in the format of [`vgpu_transport::ir::patch`], as it is sent.
        bytes: Vec<u8>,
    },
    /// As a whole.
    Full {
        /// The image of the graph, as it is sent.
        bytes: Vec<u8>,
    },
}

impl GraphImage {
    /// Replaces the image with that of `graph`.
    pub(crate) fn encode(&mut self, graph: &Graph) {
        graph.encode_into(&mut self.words);
        self.hash = BuildHasherDefault::<FxHasher>::default().hash_one(&self.words);
        self.buffers.clone_from(&graph.buffers);
        self.nodes = graph.nodes.len();
    }
}

impl GraphCache {
    /// The graph that was last used with this key. Costs no work per node.
    pub(crate) fn by_key(&mut self, key: u64) -> Option<Known> {
        let at = self
            .entries
            .iter()
            .position(|entry| entry.key == Some(key))?;
        Some(self.touch(at))
    }

    /// The graph with this image. The graph is new to the executor unless the cache has the same
    /// image. A new image is moved into the cache, and `image` is then empty. `None` if all ids are
    /// used.
    pub(crate) fn by_image(&mut self, key: Option<u64>, image: &mut GraphImage) -> Option<Known> {
        expect_unlocked(Rank::Connection, "the comparison of a graph");
        let is_same = |entry: &Entry| entry.hash == image.hash && entry.words == image.words;
        if let Some(at) = self.entries.iter().position(is_same) {
            self.entries[at].key = key;
            return Some(self.touch(at));
        }
        self.last_id = self.last_id.checked_add(1)?;
        let evicted = self.make_room();
        let upload = self.upload(&image.words);
        self.entries.push(Entry {
            graph: GraphId(self.last_id),
            key,
            hash: image.hash,
            words: std::mem::take(&mut image.words),
            buffers: image.buffers.as_slice().into(),
            nodes: image.nodes,
            used: 0,
        });
        Some(Known {
            upload,
            evicted,
            ..self.touch(self.entries.len() - 1)
        })
    }

    /// The next graph gets the id after `last`.
    pub(crate) fn set_last_id(&mut self, last: u64) {
        self.last_id = last;
    }

    /// The words of a graph; none if the cache does not have the graph.
    #[cfg(test)]
    fn words(&self, graph: GraphId) -> &[u32] {
        self.entries
            .iter()
            .find(|entry| entry.graph == graph)
            .map_or(&[], |entry| &entry.words)
    }

    /// Removes the graphs that use a buffer and returns them: the executor must forget them.
    pub(crate) fn remove_users(&mut self, buffer: BufferId) -> Vec<GraphId> {
        let mut removed = Vec::new();
        self.entries.retain(|entry| {
            let is_user = entry.buffers.contains(&buffer);
            if is_user {
                removed.push(entry.graph);
            }
            !is_user
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
            upload: GraphUpload::Nothing,
            evicted: None,
        }
    }

    /// How to send a new image: as a patch of the most recently used graph of the same length,
    /// unless more than half of the words differ.
    fn upload(&self, words: &[u32]) -> GraphUpload {
        let has_same_length = |entry: &&Entry| entry.words.len() == words.len();
        let candidates = self.entries.iter().filter(has_same_length);
        let base = candidates.max_by_key(|entry| entry.used);
        let limit = (words.len() / 2).min(MAX_PAYLOAD / 4);
        base.and_then(|base| {
            let patch = patch::diff(&base.words, words, limit)?;
            Some(GraphUpload::Patch {
                base: base.graph,
                bytes: to_bytes(&patch),
            })
        })
        .unwrap_or_else(|| GraphUpload::Full {
            bytes: to_bytes(words),
        })
    }

    /// Removes the least recently used graph if the cache is full.
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

/// Words in the byte order of the wire.
fn to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_full(known: &Known) -> bool {
        matches!(known.upload, GraphUpload::Full { .. })
    }

    fn to_words(bytes: &[u8]) -> Vec<u32> {
        let (words, rest) = bytes.as_chunks();
        assert!(rest.is_empty(), "{rest:?}");
        words.iter().map(|&word| u32::from_le_bytes(word)).collect()
    }

    fn add(cache: &mut GraphCache, key: Option<u64>, graph: &Graph) -> Known {
        let mut image = GraphImage::default();
        image.encode(graph);
        cache.by_image(key, &mut image).expect("an id")
    }

    /// Adds a graph without nodes that names one buffer.
    fn add_user(cache: &mut GraphCache, buffer: u64) -> Known {
        let graph = Graph {
            buffers: vec![BufferId(buffer)],
            ..Graph::default()
        };
        add(cache, None, &graph)
    }

    #[test]
    fn an_image_is_sent_once() {
        let mut cache = GraphCache::default();
        let first = add_user(&mut cache, 1);
        let GraphUpload::Full { bytes } = &first.upload else {
            panic!("{first:?}");
        };
        assert_eq!(to_words(bytes), cache.words(first.graph));
        assert_ne!(add_user(&mut cache, 2).upload, GraphUpload::Nothing);
        let again = add_user(&mut cache, 1);
        let graph = first.graph;
        assert_eq!(
            again,
            Known {
                upload: GraphUpload::Nothing,
                ..first
            }
        );
        assert_eq!(
            Graph::decode(cache.words(graph)).unwrap().buffers,
            [BufferId(1)]
        );
    }

    #[test]
    fn lookup_returns_the_latest_graph_of_a_key() {
        let mut cache = GraphCache::default();
        assert_eq!(cache.by_key(9), None);
        let known = add(&mut cache, Some(9), &Graph::default());
        assert_eq!(
            cache.by_key(9),
            Some(Known {
                upload: GraphUpload::Nothing,
                ..known
            })
        );
    }

    #[test]
    fn the_least_recently_used_graph_is_evicted_and_a_freed_buffer_removes_its_graphs() {
        let mut cache = GraphCache::default();
        let all: Vec<Known> = (0..CAPACITY as u64)
            .map(|i| add_user(&mut cache, i))
            .collect();
        add_user(&mut cache, 0);
        let over = add_user(&mut cache, CAPACITY as u64);
        assert_eq!(over.evicted, Some(all[1].graph));
        assert_eq!(cache.remove_users(BufferId(0)), [all[0].graph]);
        assert_ne!(add_user(&mut cache, 0).upload, GraphUpload::Nothing);
    }

    #[test]
    fn similar_graphs_are_patches_of_the_most_recently_used_graph() {
        let mut cache = GraphCache::default();
        add_user(&mut cache, 1);
        let second = add_user(&mut cache, 2);
        let third = add_user(&mut cache, 3);
        let GraphUpload::Patch { base, bytes } = third.upload else {
            panic!("{third:?}");
        };
        let patch = to_words(&bytes);
        assert_eq!(base, second.graph);
        let patched = patch::apply(cache.words(base), &patch).unwrap();
        assert_eq!(patched, cache.words(third.graph));
        assert_eq!(patch.len(), 3, "position, count, the id of the buffer");
        // One more buffer gives another length.
        let other = Graph {
            buffers: vec![BufferId(1), BufferId(2)],
            ..Graph::default()
        };
        assert!(is_full(&add(&mut cache, None, &other)));
    }
}
