//! The work of a node: how often the inner loops of its operator run. One table has every operator.
//! The executor estimates from it how long a node of a guest takes, the CPU engine how long a unit
//! of a kernel takes, and the [roofline model](crate::roofline) the arithmetic of a graph.
//!
//! The numbers come from the operator's parameters and from shapes, never from tensor data. The
//! numbers count what a kernel does at most: attention counts the keys that the mask hides, and
//! convolutions count the taps in the padding.

use std::ops::Range;
use std::time::Duration;

use vgpu_transport::ir::{Graph, Node, Op, PoolWindow, ScaleMode, Shape, Tensor, Type};

/// The work of a node, in iterations of inner loops and in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Multiply-adds of matrix products, convolutions, attention and recurrences.
    pub products: u64,
    /// Elements that other operators compute, compare or move.
    pub steps: u64,
    /// Bytes of the operands, each as often as the shape of its tensor visits it.
    pub bytes: u64,
    /// Steps that follow each other, however many threads there are: for a token of a recurrence,
    /// those over its row of a state, many elements at once.
    pub in_order: u64,
    /// The products or steps of the largest part that some engine does not divide.
    pub part: u64,
    /// What that part is.
    pub part_kind: PartKind,
}

/// What the largest part of a node is that some engine does not divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PartKind {
    /// Steps over neighbouring elements, many at once: a row of a norm.
    #[default]
    Row,
    /// Steps for one result, one after the other: a window of pooling.
    Window,
    /// Multiply-adds: the smallest tile of a matrix product.
    Tile,
}

impl PartKind {
    /// The most steps or multiply-adds of such a part. Measured as the processor time of one launch
    /// in a turn that is over, on a thread of an Intel processor with AVX-512, beside other work: a
    /// window 1.4 ms (POOL_1D), a row 6 to 8 ms (CUMSUM, RMS_NORM, SOFT_MAX), a tile 11 ms (MUL_MAT
    /// of F32).
    pub const fn limit(self) -> u64 {
        match self {
            PartKind::Row => 1 << 22,
            PartKind::Window => 1 << 18,
            PartKind::Tile => 1 << 26,
        }
    }

    /// What a part of this kind consists of.
    const fn unit(self) -> &'static str {
        match self {
            PartKind::Row => "steps of a row",
            PartKind::Window => "steps of a window",
            PartKind::Tile => "multiply-adds",
        }
    }
}

/// How much work an engine does in a second. The rates are those that the engine reaches without
/// tuned kernels, on any supported device: an estimate with these rates is rather too long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// [`Work::products`] per second.
    pub products: f64,
    /// [`Work::steps`] per second.
    pub steps: f64,
    /// [`Work::bytes`] per second.
    pub bytes: f64,
    /// [`Work::in_order`] per second. A device that waits for no step has infinitely many.
    pub in_order: f64,
}

impl Default for Speed {
    /// One thread of a slow processor, without vector instructions.
    fn default() -> Speed {
        Speed {
            products: 5e8,
            steps: 2.5e8,
            bytes: 4e9,
            in_order: f64::INFINITY,
        }
    }
}

impl Speed {
    /// The speed of `count` such devices, which share their memory.
    #[must_use]
    pub fn times(self, count: usize) -> Speed {
        Speed {
            products: self.products * count as f64,
            steps: self.steps * count as f64,
            ..self
        }
    }

    /// The speed of the device that is slower at each kind of work.
    #[must_use]
    pub fn slower(self, other: Speed) -> Speed {
        Speed {
            products: self.products.min(other.products),
            steps: self.steps.min(other.steps),
            bytes: self.bytes.min(other.bytes),
            in_order: self.in_order.min(other.in_order),
        }
    }
}

impl Work {
    /// The estimated time.
    pub fn time(&self, speed: &Speed) -> Duration {
        let seconds = self.products as f64 / speed.products
            + self.steps as f64 / speed.steps
            + self.bytes as f64 / speed.bytes;
        let seconds = seconds.max(self.in_order as f64 / speed.in_order);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// The work of both.
    #[must_use]
    pub fn and(self, other: Work) -> Work {
        Work {
            products: self.products.saturating_add(other.products),
            steps: self.steps.saturating_add(other.steps),
            bytes: self.bytes.saturating_add(other.bytes),
            in_order: self.in_order.saturating_add(other.in_order),
            ..if self.part < other.part { other } else { self }
        }
    }
}

/// Why a node is too much work. The guest is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum TooMuchWork {
    #[error(
        "node {node} ({op}) would take {estimate:.1?} by estimate, the limit is {limit:?}: {} \
         multiply-adds, {} steps, {} bytes, {} steps one after the other", work.products,
         work.steps, work.bytes, work.in_order
    )]
    Time {
        node: usize,
        op: &'static str,
        work: Box<Work>,
        estimate: Duration,
        limit: Duration,
    },
    #[error(
        "node {node} ({op}) would take {estimate:.1?} by estimate. Nothing ends its launches \
         ({launches}) once they run, the limit of each is {limit:?}"
    )]
    Launch {
        node: usize,
        op: &'static str,
        estimate: Duration,
        launches: u64,
        limit: Duration,
    },
    #[error(
        "node {node} ({op}) has a part of {part} {unit} that cannot be divided, the limit is \
         {limit}"
    )]
    Part {
        node: usize,
        op: &'static str,
        part: u64,
        unit: &'static str,
        limit: u64,
    },
}

/// The launches of a node, each of which runs to its end, whoever has left meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launches {
    /// How many there are, all of about the same length.
    pub count: u64,
    /// The longest time of one by estimate, on average.
    pub limit: Duration,
}

/// The node of a graph that takes longest by estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LongestNode {
    /// The index of the node.
    pub node: usize,
    /// The name of its operator in ggml.
    pub op: &'static str,
    /// The estimated time.
    pub estimate: Duration,
}

/// Checks the work of each node of a validated graph: its time, of at most `limit` by estimate, and
/// its largest part. `speed` is that of what runs the node
/// ([`Engine::speed_of`](crate::Engine::speed_of)). Returns the node that takes longest; `None` for
/// a graph without nodes.
///
/// # Errors
/// [`TooMuchWork`] for the first node that exceeds a limit.
pub fn check(
    graph: &Graph,
    speed: impl Fn(&Node) -> Speed,
    limit: Duration,
) -> Result<Option<LongestNode>, TooMuchWork> {
    check_nodes(graph, 0..graph.nodes.len(), speed, |_, _| None, limit)
}

/// As [`check`], for those of the nodes that the graph has. `launches` are those of a node that
/// takes so long by estimate ([`Engine::launches_of`](crate::Engine::launches_of)).
///
/// # Errors
/// [`TooMuchWork`] for the first of the nodes that exceeds a limit.
pub fn check_nodes(
    graph: &Graph,
    nodes: Range<usize>,
    speed: impl Fn(&Node) -> Speed,
    launches: impl Fn(&Node, Duration) -> Option<Launches>,
    limit: Duration,
) -> Result<Option<LongestNode>, TooMuchWork> {
    let mut longest: Option<LongestNode> = None;
    let all = graph.nodes.iter().enumerate();
    for (at, node) in all.skip(nodes.start).take(nodes.len()) {
        let (work, op) = (of(graph, node), node.op.kind().ggml_name());
        if work.part > work.part_kind.limit() {
            return Err(TooMuchWork::Part {
                node: at,
                op,
                part: work.part,
                unit: work.part_kind.unit(),
                limit: work.part_kind.limit(),
            });
        }
        let estimate = work.time(&speed(node));
        if estimate > limit {
            return Err(TooMuchWork::Time {
                node: at,
                op,
                work: Box::new(work),
                estimate,
                limit,
            });
        }
        if let Some(Launches { count, limit }) = launches(node, estimate)
            && estimate > limit.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
        {
            return Err(TooMuchWork::Launch {
                node: at,
                op,
                estimate,
                launches: count,
                limit,
            });
        }
        if longest.is_none_or(|longest| estimate > longest.estimate) {
            let node = at;
            longest = Some(LongestNode { node, op, estimate });
        }
    }
    Ok(longest)
}

/// The work of a node of a validated graph. Only a node without results has none.
pub fn of(graph: &Graph, node: &Node) -> Work {
    let dst = graph.dst(node);
    let sources = node.src.as_slice().iter().enumerate();
    let read = sources
        .filter_map(|(i, src)| Some((i, &graph.tensors[(*src)? as usize])))
        .map(|(i, tensor)| reads(graph, node, i, tensor).unwrap_or_else(|| bytes(&tensor.shape)));
    let written = written_part(graph, node).unwrap_or_else(|| bytes(&dst.shape));
    let bytes = read.fold(written, u64::saturating_add);
    let loops = loops(graph, node);
    let (products, steps) = match loops.kind {
        LoopKind::Product => (loops.count, 0),
        LoopKind::Arithmetic | LoopKind::Move => (0, loops.count),
    };
    let part = match loops.part_kind {
        // A tile of fewer rows reads as many activations.
        PartKind::Tile if matches!(node.op, Op::MulMat { .. } | Op::MulMatId { .. }) => loops.part,
        PartKind::Tile => loops.part.min(loops.count.saturating_mul(SCATTERED)),
        kind @ (PartKind::Row | PartKind::Window) => {
            let operands = node.src.as_slice().iter().flatten();
            let operands = operands.map(|&src| &graph.tensors[src as usize]);
            let shapes = operands.chain([dst]).map(|operand| &operand.shape);
            let steps = shapes.map(|shape| steps_between(shape, kind)).max();
            let part = loops.part.min(loops.count.saturating_mul(TRIGONOMETRIC));
            // An element of a conversion has `searched` steps already.
            let searched = search_steps(dst.shape.ty);
            let each = searched - 1 + steps.unwrap_or(1);
            part.div_ceil(searched).saturating_mul(each)
        }
    };
    Work {
        products,
        steps,
        bytes,
        in_order: in_order(graph, node),
        part,
        part_kind: loops.part_kind,
    }
}

/// Elements of a row of a state, or of a solved row, that a step of [`Work::in_order`] has.
const ROW_STEP: u64 = 32;
const SOLVED_STEP: u64 = 8;

/// Rows of the result of GET_ROWS_BACK that a step of [`Work::in_order`] clears.
const CLEARED_ROWS: u64 = 64;

/// [`Work::in_order`]: 0 where the results do not depend on each other.
fn in_order(graph: &Graph, node: &Node) -> u64 {
    let ne = |i: usize| graph.src(node, i).map_or([0; 4], |src| src.shape.ne);
    // The tokens of a sequence, and the elements of a row of its state.
    let (tokens, row) = match node.op {
        Op::SsmScan { .. } => (ne(1)[2], ne(0)[0]),
        Op::RwkvWkv6 {} => (ne(0)[2] / ne(5)[1].max(1), ne(0)[0]),
        Op::RwkvWkv7 {} => (ne(0)[2] / ne(6)[1].max(1), ne(0)[0]),
        Op::GatedLinearAttn { .. } => (ne(0)[2] / ne(4)[1].max(1), ne(0)[0]),
        Op::GatedDeltaNet { .. } => (ne(2)[2], ne(2)[0]),
        // A row is a sum over the rows before it: on average half of all.
        Op::SolveTri {} => return times(&[ne(0)[0], ne(0)[1]]).div_ceil(2 * SOLVED_STEP),
        // Rows with the same id are added in order, and the result is cleared row by row before.
        Op::GetRowsBack {} => {
            let cleared = graph.dst(node).shape.ne[1].div_ceil(CLEARED_ROWS);
            return ne(1)[0].saturating_add(cleared);
        }
        _ => return 0,
    };
    times(&[tokens, row.div_ceil(ROW_STEP)])
}

/// What an access to the next element of a row takes, in steps. Elements in different cache lines
/// or pages are waited for. Measured on a thread of an AMD EPYC (model 17), with five operands:
/// 38 ns for an element of OPT_STEP_ADAMW with 64 bytes between elements, 140 ns with 4096 bytes,
/// and 2.5 ns without gaps.
///
/// The first access to a page takes longer, since the kernel clears the page. Measured in a virtual
/// machine on an Intel processor: 1.7 to 2.6 µs for 4 KiB, 360 µs and more for 2 MiB. A guest can
/// give the pages of its buffers back and write to them again. Windows have other operands in each
/// row ([`WINDOW_ROW`]). Farther than 112 KiB does not count more, so that 1024 elements at any
/// distance can be converted.
const fn steps_between(shape: &Shape, kind: PartKind) -> u64 {
    let gap = shape.nb[0] / shape.ty.block_elements();
    match gap {
        _ if shape.ne[0] <= 1 => 1,
        0..=8 => 1,
        9..=1023 => 16,
        _ if matches!(kind, PartKind::Window) => 64,
        _ if gap <= PAGE => gap / 8 + gap / 32,
        _ if gap <= FARTHEST => PAGE / 8 + gap / 32,
        _ => PAGE / 8 + FARTHEST / 32,
    }
}

/// Bytes that the kernel clears at once.
const PAGE: u64 = 1 << 12;

/// The greatest distance between elements that counts.
const FARTHEST: u64 = 112 << 10;

/// Steps of a window for each of its rows, which may all be in different pages that have to be
/// cleared: a part has at most 16,384 of these.
const WINDOW_ROW: u64 = 16;

/// Bytes of a tensor's elements.
pub(crate) fn bytes(shape: &Shape) -> u64 {
    shape.rows().saturating_mul(shape.row_bytes())
}

/// The bytes that a node reads of its source `i`, if another tensor holds indices into the source.
pub(crate) fn reads(graph: &Graph, node: &Node, i: usize, tensor: &Tensor) -> Option<u64> {
    let shape = &tensor.shape;
    match (&node.op, i) {
        // At most one expert for each slot of each token, and each expert once.
        (Op::MulMatId { .. }, 0) => {
            let slots = graph
                .src(node, 2)
                .map_or(0, |ids| ids.shape.ne[0].saturating_mul(ids.shape.ne[1]));
            let experts = shape.ne[2].max(1);
            Some(bytes(shape) / experts * slots.min(experts))
        }
        (Op::GetRows {}, 0) => {
            let read = { graph.dst(node).shape.rows() }.saturating_mul(shape.row_bytes());
            Some(bytes(shape).min(read))
        }
        // The destination, which SET_ROWS also has as a source.
        (Op::SetRows {}, 2) => Some(0),
        _ => None,
    }
}

/// The bytes that a node writes, if it writes only part of its destination.
pub(crate) fn written_part(graph: &Graph, node: &Node) -> Option<u64> {
    match node.op {
        Op::SetRows {} => {
            let rows = graph.src(node, 0)?.shape.rows();
            Some(rows.saturating_mul(graph.dst(node).shape.row_bytes()))
        }
        _ => None,
    }
}

/// What an inner loop does in an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoopKind {
    /// A multiply-add: two floating-point operations.
    Product,
    /// One element.
    Arithmetic,
    /// One element, without arithmetic.
    Move,
}

/// The inner loops of an operator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loops {
    pub(crate) kind: LoopKind,
    /// Iterations.
    pub(crate) count: u64,
    /// Iterations of the largest part that is not divided.
    part: u64,
    part_kind: PartKind,
}

/// Rows and columns of the smallest tile of results that engines compute at once.
const TILE: u64 = 16;

/// Queries, or keys, that attention computes at once.
const BLOCK: u64 = 128;

/// Elements of a row that are converted at once.
const STRIP: u64 = 1024;

/// Elements of each stream that hyper-connections sum at once.
const STREAM_STRIP: u64 = 256;

/// Elements that a row of a stream counts as at least, so that the limit of a part by the number of
/// iterations ([`of`]) is no less than [`STREAM_STRIP`] for each row: it may have its own page.
const SHORT_STREAM: u64 = STREAM_STRIP / TRIGONOMETRIC;

/// The longest row that is sorted at once. Of longer rows, a part has fewer elements.
const SORTED: u64 = 1 << 18;

/// Multiply-adds of a part for one that a kernel does not do in tiles, measured on a thread of an
/// AMD EPYC (model 17): 0.8 ns in a recurrence and in SSM_CONV, 5 ns in CONV_TRANSPOSE_1D, 13 ns in
/// CONV_TRANSPOSE_2D, beside 0.2 ns in a tile.
const UNTILED: u64 = 8;
const SCATTERED: u64 = 64;

/// Steps of a part for an element that needs a sine or a cosine: 9 ns, as [`search_steps`] says.
const TRIGONOMETRIC: u64 = 8;

/// Steps for an element that is converted to this type. Quantising tries several scales for each
/// block, and looks for the nearest entries of a codebook. Measured on a thread of an Intel
/// processor with AVX-512, in nanoseconds for an element: 0.1 to 9 for the types with one step;
/// Q3_K 22; Q6_K, Q5_K and Q4_K 55 to 94; IQ4_NL, MXFP4 and NVFP4 42 to 64; Q2_K 234; IQ4_XS to
/// IQ2_XS 406 to 562; IQ3_XXS, IQ3_S and IQ1_M 649 to 822. A step is 4 ns ([`Speed::default`]).
const fn search_steps(ty: Type) -> u64 {
    match ty {
        Type::Q3K => 8,
        Type::Iq4Nl | Type::Mxfp4 | Type::Nvfp4 => 16,
        Type::Q4K | Type::Q5K | Type::Q6K => 24,
        Type::Q2K => 64,
        Type::Iq4Xs | Type::Iq1S | Type::Iq2Xxs | Type::Iq2Xs | Type::Iq2S => 144,
        Type::Iq3Xxs | Type::Iq3S | Type::Iq1M => 208,
        _ => 1,
    }
}

/// Whether a node converts its source to another type.
fn is_converted(graph: &Graph, node: &Node) -> bool {
    let source = graph.src(node, 0);
    source.is_some_and(|source| source.shape.ty != graph.dst(node).shape.ty)
}

/// A product that saturates.
fn times(factors: &[u64]) -> u64 {
    // A factor of 0 wins over those that saturate.
    match factors.contains(&0) {
        true => 0,
        false => factors.iter().fold(1, |all, &n| all.saturating_mul(n)),
    }
}

/// The table of all operators.
pub(crate) fn loops(graph: &Graph, node: &Node) -> Loops {
    let dst = &graph.dst(node).shape;
    let shape = |i: usize| graph.src(node, i).map(|tensor| &tensor.shape);
    // Lengths and elements of source `i`; those of an absent source are 0.
    let ne = |i: usize| shape(i).map_or([0; 4], |shape| shape.ne);
    let all = |shape: &Shape| times(&shape.ne);
    let elements = |i: usize| shape(i).map_or(0, all);
    let results = all(dst);
    let row = dst.ne[0];
    let of = |kind: LoopKind, count: u64, part: u64| Loops {
        kind,
        count,
        part,
        part_kind: match kind {
            LoopKind::Product => PartKind::Tile,
            LoopKind::Arithmetic | LoopKind::Move => PartKind::Row,
        },
    };
    let windows = |count: u64, part: u64| Loops {
        part_kind: PartKind::Window,
        ..of(LoopKind::Arithmetic, count, part)
    };
    // Elements that are converted to the type of the destination, some at once.
    let converted = |count: u64| match search_steps(dst.ty) {
        1 => of(LoopKind::Move, count, STRIP.min(count)),
        each => of(
            LoopKind::Arithmetic,
            times(&[count, each]),
            times(&[STRIP, each]),
        ),
    };
    use LoopKind::{Arithmetic, Move, Product};
    match node.op {
        Op::Copy {} if is_converted(graph, node) => converted(results),
        Op::Copy {} | Op::Repeat {} | Op::Concat { .. } | Op::Fill { .. } => of(Move, results, 1),
        Op::RepeatBack {} => of(Arithmetic, elements(0).saturating_add(results), 1),
        Op::GetRows {} => of(Move, results, row),
        Op::GetRowsBack {} => of(Arithmetic, elements(0).saturating_add(results), row),
        Op::SetRows {} => converted(elements(0)),
        Op::Set { .. } => of(Move, results.saturating_add(elements(1)), 1),
        Op::Acc { .. } => of(Arithmetic, results.saturating_add(elements(1)), 1),
        Op::Diag {}
        | Op::DiagMaskInf { .. }
        | Op::DiagMaskZero { .. }
        | Op::Pad { .. }
        | Op::PadReflect1d { .. }
        | Op::Roll { .. }
        | Op::Tri { .. } => of(Move, results, row),
        Op::Arange { .. } => of(Arithmetic, results, 1),

        Op::Add {} | Op::Add1 {} if dst.ty.is_quantized() => converted(results),
        Op::Add {}
        | Op::Sub {}
        | Op::Mul {}
        | Op::Div {}
        | Op::Add1 {}
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
        | Op::SiluBack {} => of(Arithmetic, results, 1),
        Op::AddId {} => of(Arithmetic, results, row),

        Op::Sum {} | Op::CountEqual {} => of(Arithmetic, elements(0), 1),
        Op::SumRows {} | Op::Mean {} | Op::Argmax {} => of(Arithmetic, elements(0), ne(0)[0]),
        Op::Cumsum {} => of(Arithmetic, results, row),
        // Comparisons of a sort.
        Op::Argsort { .. } | Op::TopK {} => {
            let levels = u64::from(ne(0)[0].max(2).ilog2()) + 1;
            let count = elements(0).saturating_mul(levels);
            of(Arithmetic, count, ne(0)[0].min(SORTED))
        }

        Op::Norm { .. }
        | Op::RmsNorm { .. }
        | Op::RmsNormBack { .. }
        | Op::L2Norm { .. }
        | Op::SoftMax { .. }
        | Op::SoftMaxBack { .. } => of(Arithmetic, results, row),
        // A group is divided into rows.
        Op::GroupNorm { .. } => of(Arithmetic, results, row),

        Op::MulMat { hadamard, .. } => {
            let [k, rows, ..] = ne(0);
            match hadamard && k == rows {
                // The fast transform of each column.
                true => {
                    let levels = u64::from(k.max(2).ilog2()) + 1;
                    of(
                        Arithmetic,
                        results.saturating_mul(levels),
                        k.saturating_mul(levels),
                    )
                }
                false => {
                    let columns = times(&dst.ne[1..]).min(TILE);
                    of(Product, times(&[results, k]), times(&[TILE, columns, k]))
                }
            }
        }
        Op::MulMatId { .. } => {
            // One thread counts the tokens of all experts.
            let [k, _, experts, _] = ne(0);
            let columns = times(&dst.ne[1..]).min(TILE);
            let part = times(&[columns, k]).max(experts);
            of(Product, times(&[results, k]), times(&[TILE, part]))
        }
        Op::OutProd {} => of(Product, times(&[results, ne(0)[1]]), 1),
        // Row i is a sum over i solved rows: on average half of all.
        Op::SolveTri {} => {
            let n = ne(0)[0];
            of(
                Product,
                times(&[results, n]).div_ceil(2),
                times(&[2 * TILE, n]),
            )
        }

        // A sine and a cosine of each pair.
        Op::Rope { .. } => of(Arithmetic, results, row.saturating_mul(TRIGONOMETRIC)),
        // Queries times keys, and probabilities times values.
        Op::FlashAttnExt { .. } => {
            let [width, queries, heads, sequences] = ne(0);
            let widths = width.saturating_add(ne(2)[0]);
            of(
                Product,
                times(&[queries, heads, sequences, ne(1)[1], widths]),
                times(&[BLOCK, BLOCK, widths]),
            )
        }
        // Validation refuses the operator. The scores are computed twice, and three gradients.
        Op::FlashAttnBack { .. } => {
            let [width, queries, heads, sequences] = ne(0);
            of(
                Product,
                times(&[queries, heads, sequences, ne(1)[1], width, 5]),
                width,
            )
        }
        // The keys are converted before the first query.
        Op::LightningIndexer {} => {
            let [width, heads, ..] = ne(0);
            of(
                Product,
                times(&[results, heads, width]),
                times(&[BLOCK, heads.saturating_add(UNTILED), width]),
            )
        }

        Op::SsmConv {} => of(
            Product,
            times(&[results, ne(1)[0]]),
            times(&[UNTILED, TILE, ne(1)[0]]),
        ),
        // Each token updates a state and multiplies it, and the states are stored.
        Op::SsmScan { .. } => {
            let (state, rows) = (ne(0)[0], ne(1)[0]);
            let tokens = times(&[2, elements(1), state]);
            of(
                Product,
                tokens.saturating_add(results),
                times(&[UNTILED, 2, state, rows]),
            )
        }
        Op::RwkvWkv6 {} | Op::RwkvWkv7 {} | Op::GatedLinearAttn { .. } => {
            let size = ne(0)[0];
            let tokens = times(&[2, elements(0), size]);
            of(
                Product,
                tokens.saturating_add(results),
                times(&[UNTILED, 2, size, size]),
            )
        }
        Op::GatedDeltaNet { .. } => {
            let size = ne(2)[0];
            let tokens = times(&[3, elements(2), size]);
            of(
                Product,
                tokens.saturating_add(results),
                times(&[UNTILED, 3, size, size]),
            )
        }
        Op::Dsv4HcComb { n_iter, .. } => {
            let rounds = 2 * u64::from(n_iter) + 2;
            let each = times(&[rounds, dst.ne[0], dst.ne[1]]);
            windows(times(&[each, dst.ne[2]]), each)
        }
        // Each stream has its own row, however short.
        Op::Dsv4HcPre { .. } => {
            let [n, streams, tokens, _] = ne(0);
            let count = times(&[n.max(SHORT_STREAM), streams, tokens]);
            of(Arithmetic, count, times(&[STREAM_STRIP, streams]))
        }
        Op::Dsv4HcPost {} => {
            let [n, to, tokens, _] = dst.ne;
            let streams = to.saturating_add(1);
            let count = times(&[n.max(SHORT_STREAM), to, tokens, streams]);
            of(Arithmetic, count, times(&[STREAM_STRIP, streams]))
        }

        Op::Im2col { .. } | Op::Im2col3d { .. } => of(Move, results, row),
        // Each element looks for itself under every tap.
        Op::Im2colBack { is_2d, .. } => {
            let [kw, kh, ..] = ne(1);
            let taps = times(&[kw, if is_2d { kh } else { 1 }]);
            windows(times(&[results, taps]), times(&[WINDOW_ROW, taps]))
        }
        Op::Col2im1d { .. } => {
            let part = times(&[WINDOW_ROW, ne(0)[1].min(ne(0)[0])]);
            windows(elements(0).saturating_add(results), part)
        }
        // A kernel for each output channel.
        Op::Conv2d { .. } => {
            let [kw, kh, channels, outputs] = ne(0);
            let taps = times(&[kw, kh, channels]);
            of(Product, times(&[results, taps]), times(&[taps, outputs]))
        }
        // A tap of a few outputs takes as long as a step.
        Op::Conv2dDw { .. } => {
            let taps = times(&[ne(0)[0], ne(0)[1]]);
            Loops {
                part_kind: PartKind::Window,
                ..of(Product, times(&[results, taps]), times(&[TILE, taps]))
            }
        }
        Op::Conv3d { c, oc, .. } => {
            let [kw, kh, kd, _] = ne(0);
            let [c, oc] = [c, oc].map(|n| u64::try_from(n).unwrap_or(0));
            let taps = times(&[kw, kh, kd, c]);
            of(Product, times(&[results, taps]), times(&[taps, oc]))
        }
        // The kernel is added to the results for each element of the image, and the results are
        // written.
        Op::ConvTranspose1d { .. } => {
            let [k, outputs, channels, _] = ne(0);
            let count = times(&[k, outputs, channels, ne(1)[0]]);
            of(
                Product,
                count.saturating_add(results),
                times(&[SCATTERED, k, channels]),
            )
        }
        Op::ConvTranspose2d { .. } => {
            let [kw, kh, outputs, channels] = ne(0);
            let [w, h, _, images] = ne(1);
            let count = times(&[kw, kh, outputs, channels, w, h, images]);
            of(
                Product,
                count.saturating_add(results),
                times(&[SCATTERED, kw, kh, channels]),
            )
        }
        // A window has no more elements than the source.
        Op::Pool1d { .. } => {
            let window = PoolWindow::<1>::of(&node.op).map_or([0], |w| w.size);
            let covered = covered(window, ne(0));
            windows(times(&[results, covered]), covered)
        }
        Op::Pool2d { .. } => {
            let window = PoolWindow::<2>::of(&node.op).map_or([0; 2], |w| w.size);
            let (taps, rows) = (covered(window, ne(0)), covered([window[1]], [ne(0)[1]; 4]));
            let part = taps.max(times(&[WINDOW_ROW, rows]));
            windows(times(&[results, taps]), part)
        }
        Op::Pool2dBack { .. } => {
            let window = PoolWindow::<2>::of(&node.op).map_or([0; 2], |w| w.size);
            let (taps, rows) = (
                covered(window, dst.ne),
                covered([window[1]], [dst.ne[1]; 4]),
            );
            let part = taps.max(row).max(times(&[WINDOW_ROW, rows]));
            let count = times(&[elements(0), taps]);
            windows(count.saturating_add(results), part)
        }
        Op::Upscale {
            mode, antialias, ..
        } => {
            let [columns, rows] = match mode {
                ScaleMode::Nearest => [1, 1],
                ScaleMode::Bilinear if antialias => {
                    // A triangle of the width of two elements of the smaller image.
                    let width = |d: usize| 2 * ne(0)[d].div_ceil(dst.ne[d].max(1)) + 1;
                    [width(0), width(1)]
                }
                ScaleMode::Bilinear => [2, 2],
                ScaleMode::Bicubic => [4, 4],
            };
            let part = times(&[columns.max(WINDOW_ROW), rows]);
            windows(times(&[results, columns, rows]), part)
        }
        Op::TimestepEmbedding { .. } => of(Arithmetic, results, row.saturating_mul(TRIGONOMETRIC)),
        Op::AddRelPos {} => of(Arithmetic, results, row),
        Op::WinPart { .. } | Op::WinUnpart { .. } | Op::GetRelPos {} => of(Move, results, row),

        Op::CrossEntropyLoss {} => of(Arithmetic, elements(0), ne(0)[0]),
        Op::CrossEntropyLossBack {} => of(Arithmetic, results, row),
        // Five rows are read, and three written.
        Op::OptStepAdamw {} => of(Arithmetic, results, row.saturating_mul(4)),
        Op::OptStepSgd {} => of(Arithmetic, results, row),
    }
}

/// The most elements of an image of lengths `ne` that a window covers.
fn covered<const N: usize>(window: [i32; N], ne: [u64; 4]) -> u64 {
    let sides = window.iter().zip(ne);
    sides
        .map(|(&size, n)| u64::try_from(size).unwrap_or(0).min(n))
        .fold(1, u64::saturating_mul)
}
