//! Tensors, nodes, graphs, and the image of a graph in 32-bit words.

use super::codec::{DecodeError, Reader, Word, Writer, room};
use super::ops::{MAX_SOURCES, Op, OpKind};
use super::types::Type;

/// The first word of every graph image: `VGIR`.
const MAGIC: u32 = u32::from_le_bytes(*b"VGIR");

/// The version of the image. A host rejects every other version.
pub const IR_VERSION: u32 = 1;

/// The number of words before the table of buffers.
const HEAD_WORDS: usize = 5;

/// The number of words of one tensor in the image.
const TENSOR_WORDS: usize = 20;

/// The minimum number of words of a node in the image: one for id and source count, one for the
/// destination.
const NODE_WORDS_MIN: usize = 2;

/// Tensors or nodes of a graph that are decoded or validated between two questions whether that is
/// cancelled. One takes less than a microsecond.
pub const ENTRIES_PER_QUESTION: usize = 1024;

/// The id of a buffer of a session. The guest chooses it, never reuses it within a session, and
/// never uses 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u64);

/// Type, lengths and strides of a tensor.
///
/// As in ggml, `ne[0]` is the fastest dimension. `nb[0]` is the stride from one *block* to the next
/// for quantised types, from one element to the next for all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Element type.
    pub ty: Type,
    /// Elements in each dimension.
    pub ne: [u64; 4],
    /// Strides in bytes.
    pub nb: [u64; 4],
}

impl Shape {
    /// The shape of a dense tensor. `None` when rows do not fill whole blocks or the size does not
    /// fit 64 bits.
    pub fn contiguous(ty: Type, ne: [u64; 4]) -> Option<Shape> {
        let mut nb = [ty.block_bytes(); 4];
        nb[1] = ty.row_bytes(ne[0])?;
        nb[2] = nb[1].checked_mul(ne[1])?;
        nb[3] = nb[2].checked_mul(ne[2])?;
        nb[3].checked_mul(ne[3])?;
        Some(Shape { ty, ne, nb })
    }

    /// The number of elements. `None` when it does not fit 64 bits.
    pub fn elements(&self) -> Option<u64> {
        self.ne.iter().try_fold(1u64, |n, &e| n.checked_mul(e))
    }

    /// Whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.ne.contains(&0)
    }

    /// The number of rows, `ne[1] * ne[2] * ne[3]`. The product saturates; it is exact for
    /// validated tensors.
    pub fn rows(&self) -> u64 {
        self.ne[1]
            .saturating_mul(self.ne[2])
            .saturating_mul(self.ne[3])
    }

    /// The distance from the first byte of the tensor to the end of its last, in bytes
    /// (`ggml_nbytes`). 0 for an empty tensor. `None` when the distance does not fit 64 bits or a
    /// row does not fill whole blocks.
    pub fn byte_len(&self) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        if !self.ne[0].is_multiple_of(self.ty.block_elements()) {
            return None;
        }
        let steps = [
            self.ne[0] / self.ty.block_elements(),
            self.ne[1],
            self.ne[2],
            self.ne[3],
        ];
        let mut last = self.ty.block_bytes();
        for (step, nb) in steps.into_iter().zip(self.nb) {
            last = last.checked_add((step - 1).checked_mul(nb)?)?;
        }
        Some(last)
    }

    /// The size of one row with adjacent blocks, in bytes. The product saturates; it is exact for
    /// validated tensors with elements.
    pub fn row_bytes(&self) -> u64 {
        (self.ne[0] / self.ty.block_elements()).saturating_mul(self.ty.block_bytes())
    }

    /// Whether the blocks of each row are adjacent (`ggml_is_contiguous_rows` without the trivial
    /// case of one element).
    pub fn has_dense_rows(&self) -> bool {
        self.nb[0] == self.ty.block_bytes() || self.ne[0] <= self.ty.block_elements()
    }

    /// Whether all elements are adjacent in memory and in order (`ggml_is_contiguous`). The strides
    /// of dimensions with length 1 do not matter.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = self.ty.block_bytes();
        if self.ne[0] != self.ty.block_elements() && self.nb[0] != expected {
            return false;
        }
        expected = match self.ty.row_bytes(self.ne[0]) {
            Some(bytes) => bytes,
            None => return false,
        };
        for i in 1..4 {
            if self.ne[i] != 1 {
                if self.nb[i] != expected {
                    return false;
                }
                expected = expected.saturating_mul(self.ne[i]);
            }
        }
        true
    }

    /// The same shape, with dense strides in the dimensions with fewer than two elements. Such a
    /// stride has no meaning and may have any value. The same is true of all strides of a tensor
    /// without elements: they become the length of a block. After the call, an index of a validated
    /// tensor times its stride is less than the size of the buffer, so engines may compute with
    /// them.
    pub fn with_plain_strides(&self) -> Shape {
        let Shape { ty, ne, mut nb } = *self;
        if self.is_empty() {
            let nb = [ty.block_bytes(); 4];
            return Shape { ty, ne, nb };
        }
        let mut dense = ty.block_bytes();
        for d in 0..4 {
            if ne[d] < 2 {
                nb[d] = dense;
            }
            let units = if d == 0 {
                ne[0] / ty.block_elements()
            } else {
                ne[d]
            };
            dense = nb[d].saturating_mul(units); // exact for a validated tensor
        }
        Shape { ty, ne, nb }
    }

    /// Whether both shapes have the same lengths.
    pub fn same_lengths(&self, other: &Shape) -> bool {
        self.ne == other.ne
    }

    /// Whether `self`, repeated whole times in each dimension, gives the lengths of `whole`
    /// (`ggml_can_repeat`).
    pub fn repeats_into(&self, whole: &Shape) -> bool {
        if self.is_empty() {
            return whole.is_empty();
        }
        self.ne
            .iter()
            .zip(whole.ne)
            .all(|(&part, whole)| whole.is_multiple_of(part))
    }
}

/// A tensor: a shape at an offset of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// Type, lengths and strides.
    pub shape: Shape,
    /// The index of the buffer in [`Graph::buffers`].
    pub buffer: u32,
    /// The offset of the first element in the buffer, in bytes.
    pub offset: u64,
}

/// One operation, which reads its sources and writes its destination.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The operator with its parameters.
    pub op: Op,
    /// The index of the destination in [`Graph::tensors`].
    pub dst: u32,
    /// The indices of the sources in [`Graph::tensors`]. `None` for an absent optional source.
    pub src: Sources,
}

impl Node {
    /// The indices in [`Graph::tensors`] of the tensors that the node writes: its destination, and
    /// the sources that its operator updates ([`Op::updates_sources`]).
    pub fn written_tensors(&self) -> impl Iterator<Item = usize> + '_ {
        let sources = self.src.as_slice().iter().flatten();
        { sources.filter(|_| self.op.updates_sources()) }
            .chain([&self.dst])
            .map(|&tensor| tensor as usize)
    }
}

/// The sources of a node, at most [`MAX_SOURCES`]. The type has no heap allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sources {
    len: u8,
    items: [Option<u32>; MAX_SOURCES],
}

impl Sources {
    /// The sources of the iterator without trailing absent ones. The function ignores sources
    /// behind [`MAX_SOURCES`], the size of ggml's own array.
    pub fn new(sources: impl IntoIterator<Item = Option<u32>>) -> Sources {
        let mut all = Sources::default();
        for (i, source) in sources.into_iter().take(MAX_SOURCES).enumerate() {
            all.items[i] = source;
            if source.is_some() {
                all.len = i as u8 + 1;
            }
        }
        all
    }

    /// The sources as a slice.
    pub fn as_slice(&self) -> &[Option<u32>] {
        &self.items[..usize::from(self.len)]
    }
}

/// The numbers of entries that the head of an image announces, which bound the memory of the
/// decoded graph before the graph is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GraphCounts {
    /// Entries of [`Graph::buffers`].
    pub buffers: usize,
    /// Entries of [`Graph::tensors`].
    pub tensors: usize,
    /// Entries of [`Graph::nodes`].
    pub nodes: usize,
}

impl GraphCounts {
    /// Reads the head of an image. The rest of the image has room for all announced entries.
    ///
    /// # Errors
    ///
    /// A [`DecodeError`] that names the malformed part. The guest is at fault.
    pub fn of_image(words: &[u32]) -> Result<GraphCounts, DecodeError> {
        GraphCounts::read(&mut Reader::new(words))
    }

    fn read(words: &mut Reader<'_>) -> Result<GraphCounts, DecodeError> {
        let len = words.remaining();
        let magic = words.u32()?;
        if magic != MAGIC {
            return Err(DecodeError::Magic {
                magic,
                expected: MAGIC,
            });
        }
        let version = words.u32()?;
        if version != IR_VERSION {
            return Err(DecodeError::Version {
                version,
                expected: IR_VERSION,
            });
        }
        let [buffers, tensors, nodes] = <[u32; 3]>::get(words)?;
        let mut left = words.remaining();
        for (what, count, each) in [
            ("buffers", buffers, 2),
            ("tensors", tensors, TENSOR_WORDS),
            ("nodes", nodes, NODE_WORDS_MIN),
        ] {
            match left.checked_sub((count as usize).saturating_mul(each)) {
                Some(behind) => left = behind,
                None => return Err(DecodeError::Count { what, count, len }),
            }
        }
        let [buffers, tensors, nodes] = [buffers, tensors, nodes].map(|n| n as usize);
        Ok(GraphCounts {
            buffers,
            tensors,
            nodes,
        })
    }

    /// The table of buffers of an image with these counts.
    pub fn buffers_of(&self, image: &[u32]) -> Vec<BufferId> {
        let table = image.get(HEAD_WORDS..).unwrap_or_default();
        let ids = table.chunks_exact(2).take(self.buffers);
        ids.map(|id| BufferId(u64::from(id[1]) << 32 | u64::from(id[0])))
            .collect()
    }

    /// The bytes of the decoded graph: 1 for a byte of the image that lists buffers, 1.2 for one
    /// that lists tensors, up to 18 for one that lists nodes.
    pub fn decoded_bytes(&self) -> u64 {
        let bytes = |count: usize, each: usize| (count as u64).saturating_mul(each as u64);
        bytes(self.buffers, size_of::<BufferId>())
            .saturating_add(bytes(self.tensors, size_of::<Tensor>()))
            .saturating_add(bytes(self.nodes, size_of::<Node>()))
    }
}

// The factors in the documentation of `decoded_bytes`.
const _: () =
    assert!(size_of::<BufferId>() == 8 && size_of::<Tensor>() * 5 <= TENSOR_WORDS * 4 * 6);
const _: () = assert!(size_of::<Node>() <= NODE_WORDS_MIN * 4 * 18);

/// A graph: nodes in execution order, a table of tensors and a table of buffers.
///
/// A node sees the writes of all earlier nodes. An engine may use any other order with the same
/// result.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Graph {
    /// The buffers of the tensors.
    pub buffers: Vec<BufferId>,
    /// The tensors of the nodes.
    pub tensors: Vec<Tensor>,
    /// The operations, in execution order.
    pub nodes: Vec<Node>,
}

impl Graph {
    /// The destination of a node of this graph.
    pub fn dst(&self, node: &Node) -> &Tensor {
        &self.tensors[node.dst as usize]
    }

    /// Source `i` of a node of this graph, if present.
    pub fn src(&self, node: &Node, i: usize) -> Option<&Tensor> {
        node.src
            .as_slice()
            .get(i)
            .copied()
            .flatten()
            .map(|t| &self.tensors[t as usize])
    }

    /// Encodes the graph as an image.
    pub fn encode(&self) -> Vec<u32> {
        let mut words = Vec::new();
        self.encode_into(&mut words);
        words
    }

    /// Encodes the graph as an image and replaces the contents of `words`.
    pub fn encode_into(&self, words: &mut Vec<u32>) {
        words.clear();
        let mut out = Writer {
            words: std::mem::take(words),
        };
        out.words.reserve(
            HEAD_WORDS
                + 2 * self.buffers.len()
                + TENSOR_WORDS * self.tensors.len()
                + 6 * self.nodes.len(),
        );
        out.u32(MAGIC);
        out.u32(IR_VERSION);
        out.u32(self.buffers.len() as u32);
        out.u32(self.tensors.len() as u32);
        out.u32(self.nodes.len() as u32);
        for buffer in &self.buffers {
            buffer.0.put(&mut out);
        }
        for tensor in &self.tensors {
            out.u32(tensor.shape.ty as u32);
            out.u32(tensor.buffer);
            tensor.offset.put(&mut out);
            tensor.shape.ne.put(&mut out);
            tensor.shape.nb.put(&mut out);
        }
        for node in &self.nodes {
            let sources = node.src.as_slice();
            out.u32(node.op.kind() as u32 | (sources.len() as u32) << 16);
            out.u32(node.dst);
            for source in sources {
                // 0 stands for an absent source, and i + 1 for index i.
                out.u32(source.map_or(0, |i| i + 1));
            }
            node.op.put_params(&mut out);
        }
        *words = out.words;
    }

    /// Decodes an image. The decoder checks that all indices exist.
    /// [`validate()`](super::validate()) checks shapes and bounds.
    ///
    /// # Errors
    ///
    /// As [`decode_until`](Graph::decode_until).
    pub fn decode(words: &[u32]) -> Result<Graph, DecodeError> {
        // Nobody cancels.
        Ok(Graph::decode_until(words, &|| false)?.unwrap_or_default())
    }

    /// As [`decode`](Graph::decode). Asks `is_cancelled` once in [`ENTRIES_PER_QUESTION`] tensors
    /// and nodes. `None` once the answer was `true`.
    ///
    /// # Errors
    ///
    /// A [`DecodeError`] that names the malformed part. The guest is at fault, but for
    /// [`DecodeError::NoMemory`].
    pub fn decode_until(
        words: &[u32],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Graph>, DecodeError> {
        let is_over = |entry: usize| entry.is_multiple_of(ENTRIES_PER_QUESTION) && is_cancelled();
        let mut words = Reader::new(words);
        // The check of the counts against the remaining words precedes any allocation.
        let counts = GraphCounts::read(&mut words)?;
        let index = |what, index: u32, count: usize| {
            if (index as usize) < count {
                Ok(index)
            } else {
                Err(DecodeError::Index { what, index, count })
            }
        };

        let mut graph = Graph {
            buffers: room(counts.buffers)?,
            tensors: room(counts.tensors)?,
            nodes: room(counts.nodes)?,
        };
        for _ in 0..counts.buffers {
            graph.buffers.push(BufferId(u64::get(&mut words)?));
        }
        for tensor in 0..counts.tensors {
            if is_over(tensor) {
                return Ok(None);
            }
            let id = words.u32()?;
            let ty = u8::try_from(id).ok().and_then(Type::from_id);
            graph.tensors.push(Tensor {
                buffer: index("buffer", words.u32()?, graph.buffers.len())?,
                offset: u64::get(&mut words)?,
                shape: Shape {
                    ty: ty.ok_or(DecodeError::UnknownKind {
                        of: "tensor type",
                        id,
                    })?,
                    ne: <[u64; 4]>::get(&mut words)?,
                    nb: <[u64; 4]>::get(&mut words)?,
                },
            });
        }
        for node in 0..counts.nodes {
            if is_over(node) {
                return Ok(None);
            }
            let head = words.u32()?;
            let kind = OpKind::from_id(head as u16).ok_or(DecodeError::UnknownKind {
                of: "operator",
                id: head & 0xffff,
            })?;
            let sources = (head >> 16) as usize;
            let (min, max) = kind.sources();
            let wrong = |sources| DecodeError::Sources {
                node,
                op: kind.ggml_name(),
                sources,
                min,
                max,
            };
            if sources < min || sources > max {
                return Err(wrong(sources));
            }
            let dst = index("tensor", words.u32()?, graph.tensors.len())?;
            let mut src = [None; MAX_SOURCES];
            for source in src.iter_mut().take(sources) {
                *source = match words.u32()? {
                    0 => None,
                    i => Some(index("tensor", i - 1, graph.tensors.len())?),
                };
            }
            let src = Sources::new(src);
            // Trailing absent sources do not count.
            if src.as_slice().len() < min {
                return Err(wrong(src.as_slice().len()));
            }
            let op = Op::get_params(kind, &mut words)?;
            graph.nodes.push(Node { op, dst, src });
        }
        match words.remaining() {
            0 => Ok(Some(graph)),
            extra => Err(DecodeError::Trailing { extra }),
        }
    }
}
