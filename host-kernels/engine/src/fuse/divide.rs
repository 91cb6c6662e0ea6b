//! A node as several nodes that compute parts of its results, for engines that cannot end a turn in
//! the middle of a kernel.

use std::ops::Range;

use vgpu_transport::ir::{Graph, Node, Op, Sources, Tensor};

/// A part is a multiple of so many rows if it has more: tiles of kernels stay full.
const ROWS: u64 = 64;

/// What a part of the results uses of a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// All of it.
    All,
    /// The same range of this dimension.
    Range(usize),
    /// The same range of this dimension, which has so many elements for each result.
    Times(usize, u64),
    /// The same range of this dimension, and so many elements behind it.
    Window(usize, u64),
}

/// A part of a node.
pub(super) struct Part {
    pub(super) op: Op,
    pub(super) dst: Slice,
    pub(super) src: Vec<Option<Slice>>,
    pub(super) share: Share,
}

/// A share of a node that the kernels of an engine divide: along the tokens of a recurrence, for
/// example, whose results and states lie in one tensor. The node stands once for each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Its number. Earlier ones run before it.
    pub at: u64,
    /// The number of shares.
    pub of: u64,
}

impl Share {
    /// All of the node.
    pub const WHOLE: Share = Share { at: 0, of: 1 };

    /// The share of `0..n`. Some ranges are empty if there are more shares.
    pub fn range(self, n: u64) -> Range<u64> {
        // Not above `n`.
        let until = |at: u64| (u128::from(n) * u128::from(at) / u128::from(self.of.max(1))) as u64;
        until(self.at)..until(self.at + 1)
    }

    /// The share of rows `0..n` of which each is a sum over those before it: about the same number
    /// of terms in each share, and so fewer rows in a later one. Some ranges are empty if there are
    /// more shares than half of the rows. The terms are even for up to 2^40 rows in up to 2^48
    /// shares; with more, shares still cover all rows once.
    pub fn range_of_sums(self, n: u64) -> Range<u64> {
        let of = self.of.max(1);
        let until = |at: u64| {
            if at >= of {
                return n;
            }
            let (n, at) = (u128::from(n), u128::from(at));
            let rows = (n * n).saturating_mul(at) / u128::from(of);
            // Not above `n`.
            rows.isqrt().min(n) as u64
        };
        until(self.at)..until(self.at + 1)
    }
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
    /// What results `start..start + len` use of it.
    fn used(self, used: Use, start: u64, len: u64) -> Option<Slice> {
        match used {
            Use::All => Some(self),
            Use::Range(dim) => self.range(dim, start, len),
            Use::Times(dim, n) => self.range(dim, start.checked_mul(n)?, len.checked_mul(n)?),
            Use::Window(dim, more) => self.range(dim, start, len.checked_add(more)?),
        }
    }

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

/// The node as one part.
fn whole(graph: &Graph, node: &Node) -> Part {
    let slice = |of: u32| Slice {
        of,
        tensor: graph.tensors[of as usize],
        is_whole: true,
    };
    Part {
        op: node.op,
        dst: slice(node.dst),
        src: { node.src.as_slice().iter() }
            .map(|src| src.map(slice))
            .collect(),
        share: Share::WHOLE,
    }
}

/// Divides a node of a validated graph into about `count` parts, in the order of their results. One
/// part if the operator, or its operands, cannot be divided.
pub(super) fn parts(graph: &Graph, node: &Node, count: u64) -> Vec<Part> {
    let mut parts = vec![whole(graph, node)];
    let mut left = count;
    while left > 1 {
        let divided: Option<Vec<Vec<Part>>> = parts.iter().map(|part| divide(part, left)).collect();
        let Some(divided) = divided else { break };
        let each = divided.first().map_or(1, Vec::len) as u64;
        parts = divided.into_iter().flatten().collect();
        left = left.div_ceil(each.max(1));
    }
    if left > 1 {
        let shares = |part: Part| {
            let of = left.min(most_shares(&part));
            (0..of).map(move |at| Part {
                share: Share { at, of },
                src: part.src.clone(),
                ..part
            })
        };
        parts = parts.into_iter().flat_map(shares).collect();
    }
    parts
}

/// Into how many parts [`Arrangement::divide`](super::Arrangement::divide) divides a node of a
/// validated graph at most: 1 if it stays whole. A division that wants more parts has so many. One
/// that wants fewer has at least half as many as it wants.
pub fn most_parts(graph: &Graph, node: &Node) -> u64 {
    let mut part = whole(graph, node);
    let mut all: u64 = 1;
    while let Some((cut, first)) = cut(&part, u64::MAX) {
        all = all.saturating_mul(cut.rows);
        part = first;
    }
    all.saturating_mul(most_shares(&part))
}

/// The most shares of a part of which none is empty, where the kernels divide what ranges of its
/// tensors cannot: 1 if they do not.
fn most_shares(part: &Part) -> u64 {
    let dst = part.dst.tensor.shape.ne;
    let ne = |i: usize| match part.src.get(i) {
        Some(Some(src)) => src.tensor.shape.ne,
        _ => [1; 4],
    };
    let longest = |dims: Range<usize>| dst[dims].iter().copied().max().unwrap_or(1);
    let shares = match part.op {
        // Results and states lie in one tensor. A part goes on from the state of the one before,
        // and has some of the tokens.
        Op::SsmScan { .. } => ne(1)[2],
        Op::RwkvWkv6 {} => ne(0)[2] / ne(5)[1].max(1),
        Op::RwkvWkv7 {} => ne(0)[2] / ne(6)[1].max(1),
        Op::GatedLinearAttn { .. } => ne(0)[2] / ne(4)[1].max(1),
        Op::GatedDeltaNet { .. } => ne(2)[2],
        // A row needs the rows before it: `Share::range_of_sums`.
        Op::SolveTri {} => dst[1] / 2,
        // The padding lies at the ends of an image only.
        Op::Pool1d { .. } => dst[0],
        Op::Conv2d { .. } | Op::Conv2dDw { .. } | Op::Pool2d { .. } => longest(0..2),
        Op::Conv3d { .. } => longest(0..3),
        // The first dimension has the patches. Images lie behind the positions, in the last one.
        Op::Im2col { is_2d: false, .. } => dst[1],
        Op::Im2col { is_2d: true, .. } => longest(1..3),
        Op::Im2col3d { ic, .. } if ne(1)[3] == u64::try_from(ic).unwrap_or(0) => longest(1..4),
        Op::Im2col3d { .. } => longest(1..3),
        // An element of the image is the sum over several windows of it.
        Op::Pool2dBack { .. } => ne(0)[0].saturating_mul(ne(0)[1]),
        // What a result reads depends on its number.
        Op::Upscale { .. } => dst.iter().fold(1, |all: u64, &n| all.saturating_mul(n)),
        // The number of rows is a factor.
        Op::CrossEntropyLossBack {} => longest(1..4),
        _ => 1,
    };
    shares.max(1)
}

/// The lengths along which a part is divided: of the results, or of what is scattered to them.
fn lengths(part: &Part) -> [u64; 4] {
    match (part.op, part.src.first()) {
        (Op::SetRows {}, Some(Some(rows))) => rows.tensor.shape.ne,
        _ => part.dst.tensor.shape.ne,
    }
}

/// How a part is divided along a dimension.
struct Cut {
    dim: usize,
    /// Neighbouring results that stay together.
    together: u64,
    /// How often the part has them.
    rows: u64,
    /// How many of these a part has, but for the last one.
    len: u64,
    /// What a part uses of each source.
    reads: Vec<Use>,
}

/// Divides a part along the longest dimension that allows it.
fn divide(part: &Part, count: u64) -> Option<Vec<Part>> {
    let (cut, _) = cut(part, count)?;
    let starts = (0..cut.rows).step_by(usize::try_from(cut.len).ok()?);
    starts.map(|start| cut.part(part, start)).collect()
}

/// How a part is divided into about `count` along the longest dimension that allows it, and the
/// first of these parts.
fn cut(part: &Part, count: u64) -> Option<(Cut, Part)> {
    let ne = lengths(part);
    let mut dims: Vec<usize> = match part.op {
        // One result for each row.
        Op::Argmax {} => vec![0],
        _ => (1..4).collect(),
    };
    dims.retain(|&dim| ne[dim] > 1);
    // The last of the longest ones: its ranges lie farthest apart.
    dims.sort_by_key(|&dim| (std::cmp::Reverse(ne[dim]), std::cmp::Reverse(dim)));
    dims.into_iter().find_map(|dim| {
        let cut = Cut::along(part, dim, count)?;
        let first = cut.part(part, 0)?;
        Some((cut, first))
    })
}

impl Cut {
    fn along(part: &Part, dim: usize, count: u64) -> Option<Cut> {
        let together = together(part, dim)?;
        let rows = lengths(part)[dim] / together;
        let reads = { part.src.iter().enumerate() }
            .map(|(i, src)| match src {
                Some(src) => read(part, dim, i, &src.tensor),
                None => Some(Use::All),
            })
            .collect::<Option<_>>()?;
        let len = match rows.div_ceil(count.min(rows)) {
            len if len > ROWS => len.next_multiple_of(ROWS),
            len => len,
        };
        Some(Cut {
            dim,
            together,
            rows,
            len,
            reads,
        })
    }

    /// The part that begins at `start`.
    fn part(&self, part: &Part, start: u64) -> Option<Part> {
        let dim = self.dim;
        let len = self.len.min(self.rows - start);
        let written = match (part.op, dim) {
            (Op::SetRows {}, 1) => Use::All,
            _ => Use::Times(dim, self.together),
        };
        let src = part.src.iter().zip(&self.reads);
        let src = src.map(|(src, read)| match (src, read) {
            (_, Use::All) | (None, _) => Some(*src),
            // An engine may hold weights in another layout, whose ranges are not those of ggml.
            (Some(src), _) if src.tensor.shape.ty.is_quantized() => None,
            (Some(src), read) => src.used(*read, start, len).map(Some),
        });
        Some(Part {
            op: with_length(part, dim, len)?,
            dst: part.dst.used(written, start, len)?,
            src: src.collect::<Option<_>>()?,
            share: part.share,
        })
    }
}

/// How many neighbouring results in dimension `dim` belong together: those of an image, which
/// shares the dimension with others.
fn together(part: &Part, dim: usize) -> Option<u64> {
    let source = |i: usize| Some(part.src.get(i)?.as_ref()?.tensor.shape.ne);
    let images = match (part.op, dim) {
        (Op::Conv3d { n, .. }, 3) if n > 1 => u64::try_from(n).ok()?,
        (Op::Im2col3d { ic, .. }, 3) => source(1)?[3].checked_div(u64::try_from(ic).ok()?)?,
        _ => return Some(1),
    };
    (images > 1).then_some(())?;
    lengths(part)[dim].checked_div(images).filter(|&n| n > 0)
}

/// The operator of a part that has `len` of what is divided along dimension `dim`: some have
/// lengths among their parameters.
fn with_length(part: &Part, dim: usize, len: u64) -> Option<Op> {
    let mut op = part.op;
    match (&mut op, dim) {
        (Op::Conv3d { n, .. }, 3) if *n > 1 => *n = i32::try_from(len).ok()?,
        (Op::Conv3d { oc, .. }, 3) | (Op::Col2im1d { oc, .. }, 1) => {
            *oc = i32::try_from(len).ok()?
        }
        _ => {}
    }
    Some(op)
}

/// What the results in a range of dimension `dim` read of source `i`. `None`: they cannot be
/// computed alone, or not by the same operator with the same parameters. The operators are those of
/// ggml.h.
fn read(part: &Part, dim: usize, i: usize, src: &Tensor) -> Option<Use> {
    let (dst, ne) = (lengths(part), src.shape.ne);
    // Of rows of the same number, or of one that all share.
    let same = |of: usize| match ne[of] {
        1 => Some(Use::All),
        n if n == dst[dim] => Some(Use::Range(of)),
        _ => None,
    };
    let equal = |of: usize| (ne[of] == dst[dim]).then_some(Use::Range(of));
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
            (1, 1) => (ne[1] >= dst[1]).then_some(Use::Range(1)),
            (1, 3) => same(3),
            (2, 1 | 3) => Some(Use::All),
            _ => None,
        },
        // Positions belong to tokens, in dimension 2.
        Op::Rope { .. } => match (i, dim) {
            (0, 1 | 3) => equal(dim),
            (_, 1 | 3) => Some(Use::All),
            _ => None,
        },
        Op::MulMat { .. } => match (i, dim) {
            (0, 1) => Some(Use::All),
            (0, _) => same(dim),
            _ => equal(dim),
        },
        Op::MulMatId { .. } => match (i, dim) {
            (0, 2) => Some(Use::All),
            (1, 2) => equal(2),
            (2, 2) => equal(1),
            _ => None,
        },
        Op::OutProd {} => match (i, dim) {
            (0, 1) => Some(Use::All),
            (1, 1) => equal(0),
            (0, _) => same(dim),
            _ => equal(dim),
        },
        Op::GetRows {} => match (i, dim) {
            (0, 1) => Some(Use::All),
            (1, 1) => equal(0),
            _ => None,
        },
        // The results have tokens in dimension 2 and heads in dimension 1.
        Op::FlashAttnExt { .. } => match (i, dim) {
            (0, 2) => equal(1),
            (0, 3) => equal(3),
            (1 | 2, 2) | (4, 2 | 3) => Some(Use::All),
            (1 | 2, 3) => same(3),
            (3, 2) => (ne[1] >= dst[2]).then_some(Use::Range(1)),
            (3, 3) => same(3),
            _ => None,
        },
        Op::Conv2d { .. } => match (i, dim) {
            (0, 2) => equal(3),
            (1, 2) | (0, 3) => Some(Use::All),
            (1, 3) => equal(3),
            _ => None,
        },
        Op::Conv2dDw { .. } => match (i, dim) {
            (0, 2) => equal(3),
            (1, 2 | 3) => equal(dim),
            (0, 3) => Some(Use::All),
            _ => None,
        },
        Op::ConvTranspose2d { .. } => match (i, dim) {
            (0, 2) => equal(2),
            (1, 2) | (0, 3) => Some(Use::All),
            (1, 3) => equal(3),
            _ => None,
        },
        Op::Pool1d { .. } => equal(dim),
        Op::Pool2d { .. } | Op::Pool2dBack { .. } | Op::Upscale { .. } if dim >= 2 => equal(dim),
        // Channels and images share dimension 3.
        Op::Conv3d { c, n, .. } => match (i, dim) {
            (0, 3) if n > 1 => Some(Use::All),
            (1, 3) if n > 1 => Some(Use::Times(3, u64::try_from(c).ok()?)),
            (0, 3) => Some(Use::Times(3, u64::try_from(c).ok()?)),
            (1, 3) => Some(Use::All),
            _ => None,
        },
        Op::ConvTranspose1d { .. } => match (i, dim) {
            (0, 1) => equal(1),
            (1, 1) => Some(Use::All),
            _ => None,
        },
        // Images are in dimension 3 of planes, and in dimension 2 of lines.
        Op::Im2col { is_2d, .. } => match (i, dim, is_2d) {
            (0, 3, true) | (0, 2, false) => Some(Use::All),
            (1, 3, true) | (1, 2, false) => equal(dim),
            _ => None,
        },
        Op::Im2colBack { is_2d, .. } => match (i, dim, is_2d) {
            (0, 3, true) | (0, 2, false) => equal(dim),
            (1, 3, true) | (1, 2, false) => Some(Use::All),
            _ => None,
        },
        Op::Im2col3d { ic, .. } => match (i, dim) {
            (0, 3) => Some(Use::All),
            (1, 3) => Some(Use::Times(3, u64::try_from(ic).ok()?)),
            _ => None,
        },
        Op::Col2im1d { oc, .. } if dim == 1 => {
            let taps = ne[0].checked_div(u64::try_from(oc).ok()?)?;
            Some(Use::Times(0, taps))
        }
        // The results have channels in dimension 0 and tokens in dimension 1.
        Op::SsmConv {} => match (i, dim) {
            (0, 1) => Some(Use::Window(0, ne[0].checked_sub(dst[1])?)),
            (0, 2) => equal(2),
            (1, 1 | 2) => Some(Use::All),
            _ => None,
        },
        // The results have tokens in dimension 1.
        Op::LightningIndexer {} => match (i, dim) {
            (0, 1) => equal(2),
            (1, 1) => Some(Use::All),
            (2 | 3, 1) => equal(1),
            (0..=2, 3) => equal(3),
            (3, 3) => same(3),
            _ => None,
        },
        Op::Dsv4HcComb { .. } => match (i, dim) {
            (0, 2) => equal(1),
            (1 | 2, 2) => Some(Use::All),
            _ => None,
        },
        Op::Dsv4HcPre { gated, .. } => match (i, dim) {
            (0, 1) => equal(2),
            (1, 1) => equal(if gated { 2 } else { 1 }),
            _ => None,
        },
        Op::Dsv4HcPost {} => match (i, dim) {
            (0 | 2, 2) => equal(1),
            (1 | 3, 2) => equal(2),
            _ => None,
        },
        // The last source has the parameters.
        Op::OptStepAdamw {} | Op::OptStepSgd {} => match i + 1 == part.src.len() {
            true => Some(Use::All),
            false => equal(dim),
        },
        // Ids have the rows in dimension 0 and may repeat in the others. The last source is the
        // destination.
        Op::SetRows {} => match (i, dim) {
            (0, _) => equal(dim),
            (1, 1) => equal(0),
            (1, _) => same(dim - 1),
            (_, 1) => Some(Use::All),
            _ => equal(dim),
        },
        Op::AddId {} => match (i, dim) {
            (0, 1 | 2) => equal(dim),
            (1, 1 | 2) => Some(Use::All),
            (2, 1 | 2) => equal(dim - 1),
            _ => None,
        },
        Op::Add1 {} => match i {
            0 => equal(dim),
            _ => Some(Use::All),
        },
        Op::Argmax {} => equal(1),
        Op::Repeat {} => same(dim),
        Op::RepeatBack {} | Op::PadReflect1d { .. } => equal(dim),
        Op::Concat { dim: along } if along as usize != dim => equal(dim),
        Op::Pad { left, right, .. } if left[dim] == 0 && right[dim] == 0 => equal(dim),
        Op::Roll { shift } if shift[dim] == 0 => equal(dim),
        // Which elements remain depends on the number of the row.
        Op::Diag {} | Op::DiagMaskInf { .. } | Op::DiagMaskZero { .. } | Op::Tri { .. }
            if dim >= 2 =>
        {
            equal(dim)
        }
        // Groups have several channels.
        Op::GroupNorm { .. } if dim == 3 => equal(3),
        Op::TimestepEmbedding { .. } => match dim {
            1 => equal(0),
            _ => None,
        },
        Op::AddRelPos {} => match (i, dim) {
            (0, 2) => equal(2),
            (1 | 2, 2) => equal(3),
            _ => None,
        },
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
