//! A model of a session: the expected content of its memory, and the requests that must end it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use vgpu_engine::{Engine, work};
use vgpu_transport::ir::{BufferId, Graph, IR_VERSION, Node, Op, Shape, Tensor, patch};
use vgpu_transport::wire::{
    ContentHash, GraphId, MAX_PAYLOAD, MAX_QUERIED, MIN_EXTENT, ProtocolVersion, Request,
};

/// The expected result of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Expect {
    Welcome,
    Done,
    Refused,
    Nothing,
    /// The bytes of this range of a buffer.
    Data {
        buffer: u64,
        offset: u64,
        len: u64,
    },
    Memory,
    /// The session ends.
    End,
    /// A part of a graph, with the graph if this is the last part. The session ends if the graph is
    /// invalid.
    Part(Option<(GraphId, Vec<u8>)>),
    /// A graph runs, or fails because of an index in its data.
    Run(GraphId),
    /// The buffer is marked as weights.
    Held,
    /// The session replies which of these hashes it keeps for the buffer.
    Have {
        buffer: u64,
        wanted: Vec<(ContentHash, u64)>,
    },
    /// The host has the content and the buffer contains it now, or the host does not have the
    /// content. `None`: no session has it.
    LookedUp {
        buffer: u64,
        offset: u64,
        len: u64,
        content: Option<Vec<u8>>,
    },
    /// A graph fails each time, since the engine does not have the memory to run it.
    Fail,
}

/// The expected state of a session.
#[derive(Default)]
pub(crate) struct Model {
    is_open: bool,
    /// The version of the messages.
    pub(crate) protocol: ProtocolVersion,
    /// The content of each buffer.
    pub(crate) buffers: BTreeMap<u64, Vec<u8>>,
    /// The state of the buffers for weights.
    weights: BTreeMap<u64, WeightState>,
    /// The hashes that the session keeps for each of them.
    kept: BTreeMap<u64, BTreeSet<[u8; 32]>>,
    /// The content of each hash that the guest has looked up.
    contents: BTreeMap<[u8; 32], Vec<u8>>,
    /// The largest id of a buffer so far.
    last_buffer: u64,
    graphs: BTreeMap<u64, Graph>,
    /// The encoded words of each graph. Graphs that are forgotten may remain.
    images: BTreeMap<u64, Vec<u32>>,
    /// The graphs that the engine does not have the memory to run.
    failing: BTreeSet<u64>,
    image: Vec<u8>,
    last_run: Option<GraphId>,
    /// Bytes that the session is charged for besides its buffers.
    working: u64,
    /// Those that are for copies of buffers, as far as no graph can have been the reason.
    copied: u64,
    /// Buffers for weights of which parts may be shared.
    shared: BTreeSet<u64>,
    /// The most extents that each of them can have named and reserved.
    named: BTreeMap<u64, u64>,
}

/// Extents that the session charges at once, and the bytes of each.
const CHARGED_EXTENTS: u64 = 64;
const EXTENT_BYTES: u64 = 1024;

/// The state of a buffer for weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum WeightState {
    #[default]
    Open,
    Sealed,
    /// Sealed and written to: it takes up to twice its memory.
    Written,
}

/// The limits of the session.
pub(crate) struct Setup {
    pub(crate) memory: u64,
    pub(crate) buffers: usize,
    /// The limits of graphs are the default ones.
    pub(crate) has_default_limits: bool,
    /// How many times the usual size some buffers have.
    pub(crate) scale: u64,
}

/// The bytes of the pages that a buffer of `size` bytes takes: at least one.
fn pages(size: u64) -> u64 {
    size.max(1)
        .checked_next_multiple_of(4096)
        .unwrap_or(u64::MAX)
}

impl Model {
    /// Takes over the bytes that the session is charged for besides its buffers: its graphs, whole
    /// or incomplete, with their plans and working memory, copies of sealed buffers that it has
    /// written to, and extents. Only a graph that arrives or is compiled, such a write, or an
    /// extent can increase them. They end with the graphs and the buffers.
    pub(crate) fn observe_working(&mut self, bytes: u64, has_compiled: bool) {
        let copies = self.most_copies() + self.most_of_extents();
        let grown = bytes.saturating_sub(self.working);
        assert!(
            has_compiled || grown <= copies.saturating_sub(self.copied),
            "the memory of graphs grew from {} to {bytes} bytes without a graph, with {} of {copies} \
             bytes for copies and extents",
            self.working,
            self.copied
        );
        if !has_compiled {
            self.copied += grown;
        }
        self.copied = self.copied.min(copies);
        let has_graph = !self.graphs.is_empty() || !self.image.is_empty();
        assert!(
            has_graph || bytes <= copies,
            "{bytes} bytes without a graph, for copies and extents of at most {copies} bytes"
        );
        self.working = bytes;
    }

    /// The bytes that the session is charged for.
    pub(crate) fn used(&self) -> u64 {
        self.buffer_bytes() + self.working
    }

    /// The bytes of all buffers, without copies.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        let sizes = self.buffers.values().map(|bytes| pages(bytes.len() as u64));
        sizes.sum()
    }

    /// The most bytes of the copies that writes to sealed buffers make: of the parts that other
    /// buffers may share.
    fn most_copies(&self) -> u64 {
        let is_written = |buffer: &&u64| self.weights[*buffer] == WeightState::Written;
        let written = self.weights.keys().filter(is_written);
        let sizes = written.map(|buffer| pages(self.buffers[buffer].len() as u64));
        sizes.sum()
    }

    /// The most bytes that are charged for extents.
    fn most_of_extents(&self) -> u64 {
        let steps = self
            .named
            .values()
            .map(|named| named.div_ceil(CHARGED_EXTENTS));
        steps.sum::<u64>() * CHARGED_EXTENTS * EXTENT_BYTES
    }

    /// Prepares a write to a buffer. `false` if a copy of a sealed buffer does not fit the memory.
    fn prepare_write(&mut self, buffer: u64, setup: &Setup) -> bool {
        let is_sealed = self.weights.get(&buffer) == Some(&WeightState::Sealed);
        if !is_sealed || !self.shared.contains(&buffer) {
            return true;
        }
        let size = pages(self.buffers[&buffer].len() as u64);
        let fits = size <= setup.memory - self.used();
        if fits {
            self.weights.insert(buffer, WeightState::Written);
        }
        fits
    }

    /// The hash of a range of a buffer. Records the content for later lookups.
    pub(crate) fn hash_of(&mut self, buffer: u64, offset: u64, len: u64) -> ContentHash {
        let Some(bytes) = self.range(buffer, offset, len).map(|bytes| bytes.to_vec()) else {
            return ContentHash([7; 32]);
        };
        let hash = *blake3::hash(&bytes).as_bytes();
        self.contents.insert(hash, bytes);
        ContentHash(hash)
    }

    fn forget_users(&mut self, buffer: BufferId) {
        self.graphs
            .retain(|_, graph| !graph.buffers.contains(&buffer));
    }

    /// The smallest id that a new buffer may have.
    pub(crate) fn next_buffer(&self) -> u64 {
        self.last_buffer.saturating_add(1)
    }

    /// Graphs that can be submitted.
    pub(crate) fn graphs(&self) -> Vec<GraphId> {
        self.graphs.keys().copied().map(GraphId).collect()
    }

    /// Applies a request to the model. Returns the expected result.
    pub(crate) fn request(&mut self, message: &[u8], payload: &[u8], setup: &Setup) -> Expect {
        let Ok(request) = Request::decode(self.protocol, message) else {
            return Expect::End;
        };
        let takes_payload = matches!(
            request,
            Request::Write { .. } | Request::Graph { .. } | Request::Patch { .. }
        );
        let is_hello = matches!(request, Request::Hello { .. });
        if is_hello == self.is_open || !takes_payload && !payload.is_empty() {
            return Expect::End;
        }
        match request {
            Request::Hello { offer, .. } => {
                self.is_open = true;
                match offer.choose() {
                    Err(_) => Expect::End,
                    Ok(chosen) => {
                        let newest = offer.versions.newest();
                        let is_newest = newest == chosen.number();
                        if is_newest && u32::from(offer.ir) != IR_VERSION {
                            return Expect::End;
                        }
                        self.protocol = chosen;
                        Expect::Welcome
                    }
                }
            }
            Request::Alloc { buffer, size } => self.alloc(buffer.0, size, setup),
            Request::Free { buffer } => match self.buffers.remove(&buffer.0) {
                Some(_) => {
                    self.weights.remove(&buffer.0);
                    self.shared.remove(&buffer.0);
                    self.kept.remove(&buffer.0);
                    self.named.remove(&buffer.0);
                    self.forget_users(buffer);
                    Expect::Nothing
                }
                None => Expect::End,
            },
            Request::Write { buffer, offset } => {
                self.write(buffer.0, offset, payload.len() as u64, setup, |bytes| {
                    bytes.copy_from_slice(payload);
                })
            }
            Request::Read {
                buffer,
                offset,
                len,
            } => match self.range(buffer.0, offset, len) {
                Some(_) if len <= MAX_PAYLOAD as u64 => Expect::Data {
                    buffer: buffer.0,
                    offset,
                    len,
                },
                _ => Expect::End,
            },
            Request::Fill {
                buffer,
                offset,
                len,
                value,
            } => self.write(buffer.0, offset, len, setup, |bytes| bytes.fill(value)),
            Request::Copy {
                dst,
                dst_offset,
                src,
                src_offset,
                len,
            } => {
                let from = self
                    .range(src.0, src_offset, len)
                    .map(|bytes| bytes.to_vec());
                match from {
                    Some(from) => self.write(dst.0, dst_offset, len, setup, |to| {
                        to.copy_from_slice(&from);
                    }),
                    None => Expect::End,
                }
            }
            Request::Graph {
                graph,
                offset,
                total,
            } => {
                // Parts out of order end the session, so this part is in order.
                if offset == 0 {
                    self.image.clear();
                }
                self.image.extend_from_slice(payload);
                let is_whole = self.image.len() as u64 == total;
                Expect::Part(is_whole.then(|| (graph, std::mem::take(&mut self.image))))
            }
            Request::Patch { graph, base } => {
                if !self.graphs.contains_key(&base.0) || !payload.len().is_multiple_of(4) {
                    return Expect::End;
                }
                match patch::apply(&self.images[&base.0], &words(payload)) {
                    Ok(image) => {
                        let image = image.iter().flat_map(|word| word.to_le_bytes()).collect();
                        Expect::Part(Some((graph, image)))
                    }
                    Err(_) => Expect::End,
                }
            }
            Request::Submit { graph } if !self.graphs.contains_key(&graph.0) => Expect::End,
            Request::Submit { graph } if self.failing.contains(&graph.0) => Expect::Fail,
            // The weights that it writes to may have been sealed after it was compiled.
            Request::Submit { graph } if !self.prepare_writes(graph, setup) => Expect::Fail,
            Request::Submit { graph } => {
                self.last_run = Some(graph);
                Expect::Run(graph)
            }
            Request::Forget { graph } => {
                self.graphs.remove(&graph.0);
                Expect::Nothing
            }
            Request::Memory {} => Expect::Memory,
            Request::Fence {} => Expect::Done,
            Request::Weights { buffer } => match self.buffers.get_mut(&buffer.0) {
                None => Expect::End,
                Some(bytes) if (bytes.len() as u64) < MIN_EXTENT => Expect::Refused,
                Some(bytes) => {
                    bytes.fill(0);
                    self.weights.insert(buffer.0, WeightState::Open);
                    self.shared.remove(&buffer.0);
                    self.kept.remove(&buffer.0);
                    self.named.remove(&buffer.0);
                    self.forget_users(buffer);
                    Expect::Held
                }
            },
            Request::Lookup {
                buffer,
                offset,
                len,
                hash,
            } => match self.extent(buffer.0, offset, len) {
                None => Expect::End,
                Some(state) => {
                    let content = self.contents.get(&hash.0).cloned();
                    let can_be = state == WeightState::Open
                        && content
                            .as_ref()
                            .is_some_and(|bytes| bytes.len() as u64 == len);
                    Expect::LookedUp {
                        buffer: buffer.0,
                        offset,
                        len,
                        content: content.filter(|_| can_be),
                    }
                }
            },
            Request::Query { buffer, wanted } => match self.weights.contains_key(&buffer.0) {
                true if wanted.0.len() <= MAX_QUERIED => {
                    *self.named.entry(buffer.0).or_default() += wanted.0.len() as u64;
                    Expect::Have {
                        buffer: buffer.0,
                        wanted: wanted.0,
                    }
                }
                _ => Expect::End,
            },
            Request::Attach {
                buffer,
                offset,
                len,
                hash,
            } => {
                if self.extent(buffer.0, offset, len).is_none() {
                    return Expect::End;
                }
                let kept = self.kept.get(&buffer.0);
                let is_kept = kept.is_some_and(|kept| kept.contains(&hash.0));
                let content = self.contents.get(&hash.0).filter(|_| is_kept).cloned();
                match (content, self.range(buffer.0, offset, len)) {
                    (Some(content), Some(bytes)) if content.len() as u64 == len => {
                        bytes.copy_from_slice(&content);
                        Expect::Nothing
                    }
                    _ => Expect::End,
                }
            }
            // No proof is required, since all content is the guest's own.
            Request::Proof { .. } => Expect::End,
            Request::Extent {
                buffer,
                offset,
                len,
            } => match self.extent(buffer.0, offset, len) {
                None => Expect::End,
                Some(_) => Expect::Nothing,
            },
            Request::Seal { buffer } => match self.weights.get_mut(&buffer.0) {
                None => Expect::End,
                Some(state) => {
                    if *state == WeightState::Open {
                        *state = WeightState::Sealed;
                        self.kept.remove(&buffer.0);
                    }
                    Expect::Nothing
                }
            },
        }
    }

    fn write(
        &mut self,
        buffer: u64,
        offset: u64,
        len: u64,
        setup: &Setup,
        change: impl FnOnce(&mut [u8]),
    ) -> Expect {
        if self.range(buffer, offset, len).is_none() {
            return Expect::End;
        }
        if !self.prepare_write(buffer, setup) {
            return Expect::Fail;
        }
        self.range(buffer, offset, len).map(change);
        Expect::Nothing
    }

    /// The state of a buffer for weights, if the range is a valid extent of it.
    fn extent(&mut self, buffer: u64, offset: u64, len: u64) -> Option<WeightState> {
        self.range(buffer, offset, len)?;
        let state = self.weights.get(&buffer).copied();
        let state = state.filter(|_| len >= MIN_EXTENT)?;
        self.shared.insert(buffer);
        *self.named.entry(buffer).or_default() += 1;
        Some(state)
    }

    fn alloc(&mut self, buffer: u64, size: u64, setup: &Setup) -> Expect {
        if buffer <= self.last_buffer {
            return Expect::End;
        }
        if self.buffers.len() >= setup.buffers || pages(size) > setup.memory - self.used() {
            return Expect::Refused;
        }
        self.buffers.insert(buffer, vec![0; size as usize]);
        self.last_buffer = buffer;
        Expect::Done
    }

    fn range(&mut self, buffer: u64, offset: u64, len: u64) -> Option<&mut [u8]> {
        let bytes = self.buffers.get_mut(&buffer)?;
        let end = offset.checked_add(len)?;
        bytes.get_mut(usize::try_from(offset).ok()?..usize::try_from(end).ok()?)
    }

    /// Whether the session keeps this for a buffer.
    pub(crate) fn is_kept(&self, buffer: u64, hash: ContentHash) -> bool {
        let kept = self.kept.get(&buffer);
        kept.is_some_and(|kept| kept.contains(&hash.0))
    }

    /// Records the hashes that the session keeps for a buffer.
    pub(crate) fn keeps(&mut self, buffer: u64, wanted: &[(ContentHash, u64)], places: &[u64]) {
        for &place in places {
            let (hash, len) = wanted[place as usize];
            let content = self
                .contents
                .get(&hash.0)
                .expect("content that the guest has hashed");
            assert_eq!(content.len() as u64, len);
            assert_eq!(self.weights[&buffer], WeightState::Open);
            self.kept.entry(buffer).or_default().insert(hash.0);
        }
    }

    /// How long a run of a graph takes by the estimates for `engine`.
    pub(crate) fn estimate(&self, graph: GraphId, engine: &dyn Engine) -> Duration {
        let graph = &self.graphs[&graph.0];
        let times = graph
            .nodes
            .iter()
            .map(|node| work::of(graph, node).time(&engine.speed_of(graph, node)));
        times.fold(Duration::ZERO, Duration::saturating_add)
    }

    /// The graph of the last run, one node per line.
    pub(crate) fn describe_last_run(&self) -> String {
        let Some(graph) = self.last_run.and_then(|id| self.graphs.get(&id.0)) else {
            return "no graph".into();
        };
        let describe = |node: &Node| {
            let sources = (0..node.src.as_slice().len()).map(|i| graph.src(node, i));
            let operands = std::iter::once(Some(graph.dst(node))).chain(sources);
            operands.fold(format!("{:?}", node.op), |text, operand| match operand {
                Some(Tensor {
                    shape,
                    buffer,
                    offset,
                }) => {
                    let buffer = graph.buffers[*buffer as usize].0;
                    let Shape { ty, ne, nb } = shape;
                    format!("{text} | {ty:?} {ne:?} by {nb:?} at {buffer}+{offset}")
                }
                None => text + " | none",
            })
        };
        let lines: Vec<String> = graph.nodes.iter().map(describe).collect();
        lines.join("\n")
    }

    /// Records a graph that the session has accepted. `can_run`: the engine has the memory to run
    /// it.
    pub(crate) fn took_graph(&mut self, id: GraphId, image: &[u8], can_run: bool, setup: &Setup) {
        match can_run {
            true => self.failing.remove(&id.0),
            false => self.failing.insert(id.0),
        };
        let words = words(image);
        // Without memory for it, the session does not read the graph.
        let graph = match Graph::decode(&words) {
            Err(_) if !can_run => Graph::default(),
            graph => graph.expect("the session has read it"),
        };
        self.graphs.insert(id.0, graph);
        self.images.insert(id.0, words);
        let fits = self.prepare_writes(id, setup);
        assert!(
            fits || !can_run,
            "the graph writes to weights whose copy does not fit"
        );
    }

    /// Prepares the writes of a graph. `false` if copies of sealed buffers do not fit the memory.
    fn prepare_writes(&mut self, graph: GraphId, setup: &Setup) -> bool {
        let graph = &self.graphs[&graph.0];
        let nodes = graph.nodes.iter().flat_map(|node| written(graph, node));
        let buffers = nodes.map(|tensor| graph.buffers[tensor.buffer as usize].0);
        let buffers: Vec<u64> = buffers.collect();
        { buffers.into_iter() }.all(|buffer| self.prepare_write(buffer, setup))
    }

    /// The bytes of each buffer that a run of a graph may change: exactly the elements of the
    /// destinations. In order, disjoint.
    pub(crate) fn may_change(&self, id: GraphId) -> BTreeMap<u64, Vec<Range<usize>>> {
        let mut changes: BTreeMap<u64, Vec<Range<usize>>> = self
            .buffers
            .keys()
            .map(|&buffer| (buffer, Vec::new()))
            .collect();
        let graph = &self.graphs[&id.0];
        for tensor in graph.nodes.iter().flat_map(|node| written(graph, node)) {
            let buffer = graph.buffers[tensor.buffer as usize].0;
            let ranges = changes
                .get_mut(&buffer)
                .expect("a graph on buffers of the session");
            for_each_run(tensor, |range| ranges.push(range));
        }
        changes.values_mut().for_each(sort_and_merge);
        changes
    }
}

/// Sorts ranges and merges those that touch.
fn sort_and_merge(ranges: &mut Vec<Range<usize>>) {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let touches = next.start <= range.end;
        if touches {
            range.end = range.end.max(next.end);
        }
        touches
    });
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

/// The tensors that a node writes: its destination, and the state that optimisers keep in sources.
fn written<'g>(graph: &'g Graph, node: &'g Node) -> impl Iterator<Item = &'g Tensor> {
    let sources: &[usize] = match node.op {
        Op::OptStepAdamw {} => &[0, 2, 3],
        Op::OptStepSgd {} => &[0],
        _ => &[],
    };
    let sources = sources.iter().filter_map(|&i| graph.src(node, i));
    sources.chain([graph.dst(node)])
}

/// Calls `each` with the bytes of each contiguous run of blocks of a row.
fn for_each_run(tensor: &Tensor, mut each: impl FnMut(Range<usize>)) {
    let shape = &tensor.shape;
    // The other extents of an empty tensor may be anything.
    if shape.is_empty() {
        return;
    }
    let bytes = shape.ty.block_bytes();
    let blocks = shape.ne[0] / shape.ty.block_elements();
    let [nb0, nb1, nb2, nb3] = shape.nb;
    let (runs, run) = match nb0 == bytes {
        true => (1, blocks * bytes),
        false => (blocks, bytes),
    };
    for i3 in 0..shape.ne[3] {
        for i2 in 0..shape.ne[2] {
            for i1 in 0..shape.ne[1] {
                for i0 in 0..runs {
                    let at = tensor.offset + i0 * nb0 + i1 * nb1 + i2 * nb2 + i3 * nb3;
                    each(at as usize..(at + run) as usize);
                }
            }
        }
    }
}
