//! A node as several nodes that compute parts of its results, for engines that cannot end a turn in
//! the middle of a kernel.

use vgpu_transport::ir::{Graph, Node, Op, Sources, Tensor};

/// A part is a multiple of so many rows if it has more: tiles of kernels stay full.
const ROWS: u64 = 64;

/// What a part of the results reads of a source.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    /// All of it.
    All,
    /// The same range of this dimension.
    Range(usize),
}

/// A part of a node.
pub(super) struct Part {
    pub(super) op: Op,
    pub(super) dst: Slice,
    pub(super) src: Vec<Option<Slice>>,
}

/// A tensor of the graph, or a range of one of its dimensions.
#[derive(Clone, Copy)]
pub(super) struct Slice {
    /// The index of the tensor in the graph.
    pub(super) of: u32,
    pub(super) tensor: Tensor,
    pub(super) is_whole: bool,
}

impl Slice {
    /// Elements `start..start + len` of dimension `dim`.
    fn range(self, dim: usize, start: u64, len: u64) -> Option<Slice> {
        let mut tensor = self.tensor;
        let offset = start.checked_mul(tensor.shape.nb[dim])?;
        tensor.offset = tensor.offset.checked_add(offset)?;
        tensor.shape.ne[dim] = len;
        Some(Slice {
            tensor,
            is_whole: false,
            ..self
        })
    }
}

/// Divides a node of a validated graph into about `count` parts, in the order of their results. One
/// part if the operator, or its operands, cannot be divided.
pub(super) fn parts(graph: &Graph, node: &Node, count: u64) -> Vec<Part> {
    let slice = |of: u32| Slice {
        of,
        tensor: graph.tensors[of as usize],
        is_whole: true,
    };
    let whole = Part {
        op: node.op,
        dst: slice(node.dst),
        src: { node.src.as_slice().iter() }
            .map(|src| src.map(slice))
            .collect(),
    };
    let mut parts = vec![whole];
    let mut left = count;
    while left > 1 {
        let divided: Option<Vec<Vec<Part>>> = parts.iter().map(|part| divide(part, left)).collect();
        let Some(divided) = divided else { break };
        let each = divided.first().map_or(1, Vec::len) as u64;
        parts = divided.into_iter().flatten().collect();
        left = left.div_ceil(each.max(1));
    }
    parts
}

/// Divides a part along the longest dimension that allows it.
fn divide(part: &Part, count: u64) -> Option<Vec<Part>> {
    let ne = part.dst.tensor.shape.ne;
    let mut dims: Vec<usize> = (1..4).filter(|&dim| ne[dim] > 1).collect();
    // The last of the longest ones: its ranges lie farthest apart.
    dims.sort_by_key(|&dim| (std::cmp::Reverse(ne[dim]), std::cmp::Reverse(dim)));
    dims.into_iter()
        .find_map(|dim| divide_along(part, dim, count))
}

fn divide_along(part: &Part, dim: usize, count: u64) -> Option<Vec<Part>> {
    let rows = part.dst.tensor.shape.ne[dim];
    let reads: Vec<Read> = { part.src.iter().enumerate() }
        .map(|(i, src)| match src {
            Some(src) => read(part, dim, i, &src.tensor),
            None => Some(Read::All),
        })
        .collect::<Option<_>>()?;
    let len = match rows.div_ceil(count.min(rows)) {
        len if len > ROWS => len.next_multiple_of(ROWS),
        len => len,
    };
    let starts = (0..rows).step_by(usize::try_from(len).ok()?);
    starts
        .map(|start| {
            let len = len.min(rows - start);
            let src = part.src.iter().zip(&reads);
            let src = src.map(|(src, read)| match (src, read) {
                (_, Read::All) => Some(*src),
                // An engine may hold weights in another layout, whose ranges are not those of ggml.
                (Some(src), _) if src.tensor.shape.ty.is_quantized() => None,
                (Some(src), &Read::Range(dim)) => src.range(dim, start, len).map(Some),
                (None, _) => Some(None),
            });
            Some(Part {
                op: part.op,
                dst: part.dst.range(dim, start, len)?,
                src: src.collect::<Option<_>>()?,
            })
        })
        .collect()
}

/// What the results in a range of dimension `dim` read of source `i`. `None`: they cannot be
/// computed alone, or not by the same operator with the same parameters. The operators are those of
/// ggml.h.
fn read(part: &Part, dim: usize, i: usize, src: &Tensor) -> Option<Read> {
    let (dst, ne) = (part.dst.tensor.shape.ne, src.shape.ne);
    // Of rows of the same number, or of one that all share.
    let same = |of: usize| match ne[of] {
        1 => Some(Read::All),
        n if n == dst[dim] => Some(Read::Range(of)),
        _ => None,
    };
    let equal = |of: usize| (ne[of] == dst[dim]).then_some(Read::Range(of));
    match part.op {
        Op::Copy {} => {
            let first = part.src.first()?.as_ref()?;
            let is_like = first.tensor.shape.ne == dst;
            is_like.then_some(())?;
            equal(dim)
        }
        Op::Add {}
        | Op::Sub {}
        | Op::Mul {}
        | Op::Div {}
        | Op::Scale { .. }
        | Op::Clamp { .. }
        | Op::Sqr {}
        | Op::Sqrt {}
        | Op::Log {}
        | Op::Sin {}
        | Op::Cos {}
        | Op::LeakyRelu { .. }
        | Op::Unary { .. }
        | Op::Xielu { .. }
        | Op::Glu { .. }
        | Op::SiluBack {}
        | Op::SumRows {}
        | Op::Mean {}
        | Op::Cumsum {}
        | Op::Argsort { .. }
        | Op::TopK {}
        | Op::Norm { .. }
        | Op::RmsNorm { .. }
        | Op::RmsNormBack { .. }
        | Op::L2Norm { .. }
        | Op::SoftMaxBack { .. } => match i {
            0 => equal(dim),
            _ => same(dim),
        },
        // The slope of a head, its sink and its mask depend on the number of the head.
        Op::SoftMax { .. } => match (i, dim) {
            (0, 1 | 3) => equal(dim),
            (1, 1) => (ne[1] >= dst[1]).then_some(Read::Range(1)),
            (1, 3) => same(3),
            (2, 1 | 3) => Some(Read::All),
            _ => None,
        },
        // Positions belong to tokens, in dimension 2.
        Op::Rope { .. } => match (i, dim) {
            (0, 1 | 3) => equal(dim),
            (_, 1 | 3) => Some(Read::All),
            _ => None,
        },
        Op::MulMat { .. } => match (i, dim) {
            (0, 1) => Some(Read::All),
            (0, _) => same(dim),
            _ => equal(dim),
        },
        Op::MulMatId { .. } => match (i, dim) {
            (0, 2) => Some(Read::All),
            (1, 2) => equal(2),
            (2, 2) => equal(1),
            _ => None,
        },
        Op::OutProd {} => match (i, dim) {
            (0, 1) => Some(Read::All),
            (1, 1) => equal(0),
            (0, _) => same(dim),
            _ => equal(dim),
        },
        Op::GetRows {} => match (i, dim) {
            (0, 1) => Some(Read::All),
            (1, 1) => equal(0),
            _ => None,
        },
        // The results have tokens in dimension 2 and heads in dimension 1.
        Op::FlashAttnExt { .. } => match (i, dim) {
            (0, 2) => equal(1),
            (0, 3) => equal(3),
            (1 | 2, 2) | (4, 2 | 3) => Some(Read::All),
            (1 | 2, 3) => same(3),
            (3, 2) => (ne[1] >= dst[2]).then_some(Read::Range(1)),
            (3, 3) => same(3),
            _ => None,
        },
        Op::Conv2d { .. } => match (i, dim) {
            (0, 2) => equal(3),
            (1, 2) | (0, 3) => Some(Read::All),
            (1, 3) => equal(3),
            _ => None,
        },
        Op::Conv2dDw { .. } => match (i, dim) {
            (0, 2) => equal(3),
            (1, 2 | 3) => equal(dim),
            (0, 3) => Some(Read::All),
            _ => None,
        },
        Op::ConvTranspose2d { .. } => match (i, dim) {
            (0, 2) => equal(2),
            (1, 2) | (0, 3) => Some(Read::All),
            (1, 3) => equal(3),
            _ => None,
        },
        Op::Pool1d { .. } => equal(dim),
        Op::Pool2d { .. } | Op::Upscale { .. } if dim >= 2 => equal(dim),
        _ => None,
    }
}

/// The tensors of a part in the graph: those that are ranges are added to it. Returns the node, and
/// adds to `parents` the tensor that each added one is a part of.
pub(super) fn add(graph: &mut Graph, parents: &mut Vec<usize>, part: &Part) -> Node {
    let mut place = |slice: &Slice| {
        if slice.is_whole {
            return slice.of;
        }
        graph.tensors.push(slice.tensor);
        parents.push(slice.of as usize);
        (graph.tensors.len() - 1) as u32
    };
    let src: Vec<Option<u32>> = { part.src.iter() }
        .map(|src| src.as_ref().map(&mut place))
        .collect();
    Node {
        op: part.op,
        dst: place(&part.dst),
        src: Sources::new(src),
    }
}
