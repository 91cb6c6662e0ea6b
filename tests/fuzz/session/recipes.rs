//! Valid operands for each operator.
//!
//! A recipe is the inverse of the rules of `vgpu_transport::ir::check`: it generates lengths that
//! those rules accept. The fuzzer runs no operator without a recipe. A test in `graphs` ensures
//! that every operator of the engine has one.

use vgpu_transport::ir::{
    ConvGeometry, GluKind, Op, OpKind, PoolKind, Precision, RopeMode, ScaleMode, Shape, SortOrder,
    TriKind, Type, UnaryKind,
};

use super::input::Input;
use super::ops::{Sliding, slide};

/// An operator, and the types and lengths of its operands.
pub(crate) struct Recipe {
    pub(crate) op: Op,
    pub(crate) dst: [u64; 4],
    /// Some optional ones may be absent.
    pub(crate) src: Vec<Option<Operand>>,
    /// Whether the operator requires contiguous tensors.
    pub(crate) is_dense: bool,
}

/// The type (`None`: from the engine's rule) and the lengths.
pub(crate) type Operand = (Option<Type>, [u64; 4]);

impl Recipe {
    fn new<const N: usize>(op: Op, dst: [u64; 4], src: [[u64; 4]; N]) -> Recipe {
        Recipe {
            op,
            dst,
            src: src.into_iter().map(|ne| Some((None, ne))).collect(),
            is_dense: false,
        }
    }

    /// With one more source, of a type that the operator's definition fixes.
    fn with(mut self, ty: Type, ne: [u64; 4]) -> Recipe {
        self.src.push(Some((Some(ty), ne)));
        self
    }

    /// With one more source, or without.
    fn with_if(mut self, is_there: bool, ty: Type, ne: [u64; 4]) -> Recipe {
        self.src.push(is_there.then_some((Some(ty), ne)));
        self
    }

    fn dense(mut self) -> Recipe {
        self.is_dense = true;
        self
    }
}

/// A recipe for `kind`, with a destination of type `dst_type` and rows of whole blocks of `block`
/// elements. `None` when there is none, or none for these numbers.
pub(crate) fn recipe(
    input: &mut Input<'_>,
    kind: OpKind,
    dst_type: Type,
    block: u64,
) -> Option<Recipe> {
    let ne = [
        row(input, block),
        length(input),
        length(input),
        length(input),
    ];
    let [n0, n1, n2, n3] = ne;
    let same = |op: Op| Recipe::new(op, ne, [ne]);
    let same2 = |op: Op| Recipe::new(op, ne, [ne, ne]);
    Some(match kind {
        OpKind::Copy => {
            let source = match input.below(3) {
                0 => [n0, n1 * n2, n3, 1],
                1 => [n0 * n1, n2, 1, n3],
                _ => ne,
            };
            Recipe::new(Op::Copy {}, ne, [source])
        }
        OpKind::Repeat => Recipe::new(Op::Repeat {}, ne, [part(input, ne)]),
        OpKind::RepeatBack => Recipe::new(Op::RepeatBack {}, part(input, ne), [ne]),
        OpKind::Concat => {
            let dim = input.below(4);
            let (mut other, mut whole) = (ne, ne);
            other[dim] = if dim == 0 {
                row(input, block)
            } else {
                length(input)
            };
            whole[dim] += other[dim];
            Recipe::new(Op::Concat { dim: dim as u32 }, whole, [ne, other])
        }
        OpKind::GetRows => {
            let count = length(input);
            Recipe::new(Op::GetRows {}, [n0, count, n2, n3], [ne])
                .with(Type::I32, [count, n2, n3, 1])
        }
        OpKind::GetRowsBack => {
            let rows = length(input);
            let ids = n1.saturating_sub(u64::from(input.chance(4)));
            Recipe::new(Op::GetRowsBack {}, [n0, rows, 1, 1], [[n0, n1, 1, 1]])
                .with(Type::I32, [ids, 1, 1, 1])
        }
        OpKind::SetRows => {
            let rows = [n0, length(input), n2, n3];
            let [_, _, p2, p3] = part(input, ne);
            let ty = input.pick(&[Type::I32, Type::I64]);
            Recipe::new(Op::SetRows {}, ne, [rows]).with(ty, [rows[1], p2, p3, 1])
        }
        OpKind::Set | OpKind::Acc => {
            let [_, nb1, nb2, nb3] = Shape::contiguous(dst_type, ne)?.nb;
            let view = ne.map(|n| n.min(u64::from(input.byte() % 8) + 1));
            // A view from the end, as long as the buffer permits.
            let offset = match input.chance(2) {
                true => (n0 - view[0]) * dst_type.block_bytes(),
                false => 0,
            };
            let op = match kind {
                OpKind::Set => Op::Set {
                    nb1,
                    nb2,
                    nb3,
                    offset,
                },
                _ => Op::Acc {
                    nb1,
                    nb2,
                    nb3,
                    offset,
                },
            };
            Recipe::new(op, ne, [ne, view]).dense()
        }
        OpKind::Diag => Recipe::new(Op::Diag {}, [n0, n0, n2, n3], [[n0, 1, n2, n3]]),
        OpKind::DiagMaskInf => same(Op::DiagMaskInf {
            n_past: input.integer().max(0),
        }),
        OpKind::DiagMaskZero => same(Op::DiagMaskZero {
            n_past: input.integer().max(0),
        }),
        OpKind::Pad => {
            let left = [0; 4].map(|_| small(input, 0..4));
            let right = [0; 4].map(|_| small(input, 0..4));
            let circular = input.chance(2);
            let whole = std::array::from_fn(|d| ne[d] + (left[d] + right[d]) as u64);
            Recipe::new(
                Op::Pad {
                    left,
                    right,
                    circular,
                },
                whole,
                [ne],
            )
        }
        OpKind::PadReflect1d => {
            let [p0, p1] = [0; 2].map(|_| small(input, 0..4).min(n0.saturating_sub(1) as i32));
            let whole = [n0 + (p0 + p1) as u64, n1, n2, n3];
            Recipe::new(Op::PadReflect1d { p0, p1 }, whole, [ne])
        }
        OpKind::Roll => same(Op::Roll {
            shift: [0; 4].map(|_| input.integer()),
        }),
        OpKind::Tri => same(Op::Tri {
            kind: input.pick(TriKind::ALL),
        }),
        OpKind::Fill => Recipe::new(
            Op::Fill {
                value: input.float(),
            },
            ne,
            [],
        ),
        OpKind::Arange => {
            let start = f32::from(input.byte());
            let stop = start + f32::from(input.byte());
            let step = input.pick(&[1.0, 0.5, 3.0]);
            let count = ((stop - start) / step).ceil() as u64;
            Recipe::new(Op::Arange { start, stop, step }, [count, 1, 1, 1], [])
        }

        OpKind::Add => Recipe::new(Op::Add {}, ne, [ne, part(input, ne)]),
        OpKind::Sub => Recipe::new(Op::Sub {}, ne, [ne, part(input, ne)]),
        OpKind::Mul => Recipe::new(Op::Mul {}, ne, [ne, part(input, ne)]),
        OpKind::Div => Recipe::new(Op::Div {}, ne, [ne, part(input, ne)]),
        OpKind::AddId => {
            let ne = [n0, n1, n2, 1];
            Recipe::new(Op::AddId {}, ne, [ne, [n0, length(input), 1, 1]])
                .with(Type::I32, [n1, n2, 1, 1])
        }
        OpKind::Add1 => Recipe::new(Op::Add1 {}, ne, [ne, [1; 4]]),
        OpKind::Scale => same(Op::Scale {
            scale: input.float(),
            bias: input.float(),
        }),
        OpKind::Clamp => same(Op::Clamp {
            min: input.float(),
            max: input.float(),
        }),
        OpKind::Sqr => same(Op::Sqr {}),
        OpKind::Sqrt => same(Op::Sqrt {}),
        OpKind::Log => same(Op::Log {}),
        OpKind::Sin => same(Op::Sin {}),
        OpKind::Cos => same(Op::Cos {}),
        OpKind::LeakyRelu => same(Op::LeakyRelu {
            negative_slope: input.float(),
        }),
        OpKind::Unary => same(Op::Unary {
            kind: input.pick(UnaryKind::ALL),
        }),
        OpKind::Xielu => same(Op::Xielu {
            alpha_n: input.float(),
            alpha_p: input.float(),
            beta: input.float(),
            eps: input.float(),
        }),
        OpKind::Glu => {
            let op = Op::Glu {
                kind: input.pick(GluKind::ALL),
                swapped: input.chance(2),
                alpha: input.float(),
                limit: input.float(),
            };
            match input.chance(2) {
                true => same2(op),
                false => Recipe::new(op, ne, [[2 * n0, n1, n2, n3]]),
            }
        }
        OpKind::SiluBack => same2(Op::SiluBack {}),

        OpKind::Sum => Recipe::new(Op::Sum {}, [1; 4], [ne]),
        OpKind::SumRows => Recipe::new(Op::SumRows {}, [1, n1, n2, n3], [ne]),
        OpKind::Mean => Recipe::new(Op::Mean {}, [1, n1, n2, n3], [ne]),
        OpKind::Cumsum => same(Op::Cumsum {}),
        OpKind::Argmax => Recipe::new(Op::Argmax {}, [n1, 1, 1, 1], [[n0, n1, 1, 1]]),
        OpKind::CountEqual => Recipe::new(Op::CountEqual {}, [1; 4], [ne, ne]),
        OpKind::Argsort => same(Op::Argsort {
            order: input.pick(SortOrder::ALL),
        }),
        OpKind::TopK => {
            let wanted = n0.min(u64::from(input.byte()));
            Recipe::new(Op::TopK {}, [wanted, n1, n2, n3], [ne])
        }

        OpKind::Norm => same(Op::Norm { eps: input.float() }),
        OpKind::RmsNorm => same(Op::RmsNorm { eps: input.float() }),
        OpKind::RmsNormBack => same2(Op::RmsNormBack { eps: input.float() }),
        OpKind::GroupNorm => same(Op::GroupNorm {
            n_groups: input.integer().max(1),
            eps: input.float(),
        }),
        OpKind::L2Norm => same(Op::L2Norm { eps: input.float() }),
        OpKind::SoftMax => {
            let (has_mask, has_sinks) = (input.chance(2), input.chance(3));
            let mask_type = input.pick(&[Type::F32, Type::F16]);
            let [_, _, p2, p3] = part(input, ne);
            let op = Op::SoftMax {
                scale: input.float(),
                max_bias: max_bias(input, has_mask),
            };
            let mask = [n0, n1 + length(input) / 2, p2, p3];
            same(op)
                .with_if(has_mask, mask_type, mask)
                .with_if(has_sinks, Type::F32, [n2, 1, 1, 1])
        }
        OpKind::SoftMaxBack => same2(Op::SoftMaxBack {
            scale: input.float(),
            max_bias: 0.0,
        }),

        OpKind::MulMat => {
            let is_hadamard = n0.is_power_of_two() && input.chance(8);
            let op = Op::MulMat {
                accumulator: input.pick(Precision::ALL),
                activation: input.pick(Precision::ALL),
                hadamard: is_hadamard,
            };
            let [_, _, p2, p3] = part(input, ne);
            let n1 = if is_hadamard { n0 } else { n1 };
            let columns = length(input);
            let sources = [[n0, n1, p2, p3], [n0, columns, n2, n3]];
            Recipe::new(op, [n1, columns, n2, n3], sources)
        }
        OpKind::MulMatId => {
            let op = Op::MulMatId {
                accumulator: input.pick(Precision::ALL),
                activation: input.pick(Precision::ALL),
            };
            let (used, tokens) = (length(input), length(input));
            let repeated = if input.chance(2) { 1 } else { used };
            let sources = [[n0, n1, n2, 1], [n0, repeated, tokens, 1]];
            Recipe::new(op, [n1, used, tokens, 1], sources).with(Type::I32, [used, tokens, 1, 1])
        }
        OpKind::OutProd => {
            let [_, _, p2, p3] = part(input, ne);
            let columns = length(input);
            let sources = [[n0, n1, p2, p3], [columns, n1, n2, n3]];
            Recipe::new(Op::OutProd {}, [n0, columns, n2, n3], sources)
        }
        OpKind::SolveTri => {
            let (square, right) = ([n1, n1, n2, n3], [n0, n1, n2, n3]);
            Recipe::new(Op::SolveTri {}, right, [square, right])
        }

        OpKind::Rope => rope(input, ne),
        OpKind::FlashAttnExt => {
            let (keys, width) = (length(input), row(input, block));
            let q = [n0, n1, n2.max(1), n3.max(1)];
            let [_, _, kv2, kv3] = part(input, q);
            let [_, _, m2, m3] = part(input, q);
            let (has_mask, has_sinks) = (input.chance(2), input.chance(3));
            let op = Op::FlashAttnExt {
                scale: input.float(),
                max_bias: max_bias(input, has_mask),
                logit_softcap: input.pick(&[0.0, 0.0, 30.0, f32::NAN]),
                accumulator: input.pick(Precision::ALL),
                n_kv_max: u32::from(input.byte()),
            };
            let mask = [keys, n1 + length(input) / 2, m2, m3];
            let sources = [q, [n0, keys, kv2, kv3], [width, keys, kv2, kv3]];
            Recipe::new(op, [width, q[2], n1, q[3]], sources)
                .with_if(has_mask, Type::F16, mask)
                .with_if(has_sinks, Type::F32, [q[2], 1, 1, 1])
        }
        OpKind::LightningIndexer => {
            let (heads, tokens, keys, streams) = (n1, n2, length(input), n3);
            let [_, _, _, masks] = part(input, ne);
            let sources = [
                [n0, heads, tokens, streams],
                [n0, 1, keys, streams],
                [heads, tokens, 1, streams],
            ];
            Recipe::new(Op::LightningIndexer {}, [keys, tokens, 1, streams], sources)
                .with(Type::F16, [keys, tokens, 1, masks])
        }

        OpKind::SsmConv
        | OpKind::SsmScan
        | OpKind::RwkvWkv6
        | OpKind::RwkvWkv7
        | OpKind::GatedLinearAttn
        | OpKind::GatedDeltaNet
        | OpKind::Dsv4HcComb
        | OpKind::Dsv4HcPre
        | OpKind::Dsv4HcPost => return recurrent(input, kind, ne),

        OpKind::Im2col
        | OpKind::Im2colBack
        | OpKind::Im2col3d
        | OpKind::Col2im1d
        | OpKind::Conv2d
        | OpKind::Conv2dDw
        | OpKind::Conv3d
        | OpKind::ConvTranspose1d
        | OpKind::ConvTranspose2d
        | OpKind::Pool1d
        | OpKind::Pool2d
        | OpKind::Pool2dBack => return convolution(input, kind),

        OpKind::Upscale => {
            let op = Op::Upscale {
                mode: input.pick(ScaleMode::ALL),
                align_corners: input.chance(2),
                antialias: input.chance(2),
            };
            let whole = [
                row(input, block),
                length(input),
                length(input),
                length(input),
            ];
            Recipe::new(op, whole, [ne])
        }
        OpKind::TimestepEmbedding => {
            let (dim, max_period) = (small(input, 0..40), small(input, 1..100));
            let op = Op::TimestepEmbedding { dim, max_period };
            Recipe::new(op, [dim as u64, n1, 1, 1], [[n1, 1, 1, 1]])
        }
        OpKind::WinPart | OpKind::WinUnpart => {
            let w = small(input, 1..4);
            let [npx, npy] = [n1, n2].map(|n| n.div_ceil(w as u64));
            let (whole, parts) = ([n0, n1, n2, 1], [n0, w as u64, w as u64, npx * npy]);
            let [npx, npy] = [npx as i32, npy as i32];
            match kind {
                OpKind::WinPart => Recipe::new(Op::WinPart { npx, npy, w }, parts, [whole]),
                _ => Recipe::new(Op::WinUnpart { w }, whole, [parts]),
            }
        }
        OpKind::GetRelPos => {
            let rows = (2 * n1).saturating_sub(1);
            Recipe::new(Op::GetRelPos {}, [n0, n1, n1, 1], [[n0, rows, 1, 1]])
        }
        OpKind::AddRelPos => {
            let [width, w, h, images] = [n0 % 8 + 1, n1, n2, n3];
            let whole = [width * width, w * h, images, 1];
            let positions = [width, w, h, images];
            Recipe::new(Op::AddRelPos {}, whole, [whole])
                .with(Type::F32, positions)
                .with(Type::F32, positions)
                .dense()
        }

        OpKind::CrossEntropyLoss => Recipe::new(Op::CrossEntropyLoss {}, [1; 4], [ne, ne]),
        OpKind::CrossEntropyLossBack => {
            Recipe::new(Op::CrossEntropyLossBack {}, ne, [[1; 4], ne, ne])
        }
        OpKind::OptStepAdamw => {
            Recipe::new(Op::OptStepAdamw {}, ne, [ne, ne, ne, ne]).with(Type::F32, [7, 1, 1, 1])
        }
        OpKind::OptStepSgd => {
            Recipe::new(Op::OptStepSgd {}, ne, [ne, ne]).with(Type::F32, [2, 1, 1, 1])
        }

        // ggml no longer creates such a node, and validation accepts none.
        OpKind::FlashAttnBack => return None,
    })
}

fn length(input: &mut Input<'_>) -> u64 {
    match input.byte() {
        0..=99 => 1,
        byte @ 100..=230 => u64::from(byte) % 9 + 1,
        231..=250 => 33,
        _ => 0,
    }
}

/// A row of whole blocks of `block` elements.
fn row(input: &mut Input<'_>, block: u64) -> u64 {
    match (block, input.byte()) {
        (_, 255) => 0,
        (1, byte) => u64::from(byte) % 70 + 1,
        (_, byte) => block * (u64::from(byte) % 3 + 1),
    }
}

/// Lengths that repeat into `ne`.
fn part(input: &mut Input<'_>, ne: [u64; 4]) -> [u64; 4] {
    ne.map(|n| match input.below(3) {
        0 => 1,
        1 if n % 2 == 0 => n / 2,
        _ => n,
    })
}

fn small(input: &mut Input<'_>, range: std::ops::Range<i32>) -> i32 {
    range.start + input.below(range.len()) as i32
}

/// ALiBi if the operator has a mask.
fn max_bias(input: &mut Input<'_>, has_mask: bool) -> f32 {
    match has_mask {
        true => input.pick(&[0.0, 8.0, f32::NAN]),
        false => 0.0,
    }
}

fn rope(input: &mut Input<'_>, [n0, n1, n2, n3]: [u64; 4]) -> Recipe {
    let ne = [2 * n0, n1, n2, n3];
    let mode = input.pick(RopeMode::ALL);
    let (n_dims, n_offs) = match mode {
        RopeMode::Vision => (n0, 0),
        _ => {
            let pairs = u64::from(input.byte()) % (n0 + 1);
            (2 * pairs, 2 * (u64::from(input.byte()) % (n0 - pairs + 1)))
        }
    };
    // In whole rows: the sections of a vision model, too, are part of one.
    let sections = [0; 4].map(|_| small(input, 0..4).min(n0 as i32 / 2));
    let ids = match mode {
        RopeMode::Normal | RopeMode::Neox => n2,
        RopeMode::Mrope | RopeMode::Imrope | RopeMode::Vision => 4 * n2,
    };
    let op = Op::Rope {
        mode,
        backward: input.chance(2),
        n_dims: n_dims as u32,
        n_offs: n_offs as u32,
        n_ctx_orig: input.integer(),
        freq_base: input.pick(&[10_000.0, 1.0, 0.0, f32::NAN]),
        freq_scale: input.float(),
        ext_factor: input.pick(&[0.0, 1.0, f32::INFINITY]),
        attn_factor: input.float(),
        beta_fast: input.float(),
        beta_slow: input.float(),
        sections,
    };
    Recipe::new(op, ne, [ne])
        .with(Type::I32, [ids, 1, 1, 1])
        .with_if(input.chance(3), Type::F32, [n0.max(1), 1, 1, 1])
}

/// State-space and recurrent operators. Lengths are those of one token's row, tokens, heads,
/// sequences.
fn recurrent(input: &mut Input<'_>, kind: OpKind, ne: [u64; 4]) -> Option<Recipe> {
    let [size, tokens, heads, seqs] = [ne[0] % 12 + 1, ne[1] % 6, ne[2] % 4 + 1, ne[3] % 3 + 1];
    let snapshots = small(input, 1..4) as u32;
    let snapshot = u64::from(snapshots);
    let f32s = |recipe: Recipe, all: &[[u64; 4]]| {
        all.iter()
            .fold(recipe, |recipe, &ne| recipe.with(Type::F32, ne))
    };
    Some(match kind {
        OpKind::SsmConv => {
            let kernel = u64::from(input.byte() % 4) + 1;
            let sources = [[tokens + kernel - 1, size, seqs, 1], [kernel, size, 1, 1]];
            Recipe::new(Op::SsmConv {}, [size, tokens, seqs, 1], sources)
        }
        OpKind::SsmScan => {
            let (state, dim) = (size, u64::from(input.byte() % 5) + 1);
            let groups = if input.chance(2) { 1 } else { heads };
            let decays = if snapshots == 1 && input.chance(2) {
                state
            } else {
                1
            };
            let results = dim * heads * tokens * seqs + snapshot * state * dim * heads * seqs;
            let sources = [
                [state, dim, heads, length(input)],
                [dim, heads, tokens, seqs],
                [heads, tokens, seqs, 1],
                [decays, heads, 1, 1],
                [state, groups, tokens, seqs],
                [state, groups, tokens, seqs],
            ];
            f32s(
                Recipe::new(Op::SsmScan { snapshots }, [results, 1, 1, 1], []),
                &sources,
            )
            .with(Type::I32, [seqs, 1, 1, 1])
            .dense()
        }
        OpKind::RwkvWkv6 | OpKind::RwkvWkv7 | OpKind::GatedLinearAttn => {
            let tokens = tokens * seqs;
            let (each, state) = ([size, heads, tokens, 1], [size * size * heads, seqs, 1, 1]);
            let dst = [size * heads, tokens + size * seqs, 1, 1];
            let (op, sources) = match kind {
                OpKind::RwkvWkv6 => {
                    let bonus = [size, heads, 1, 1];
                    (Op::RwkvWkv6 {}, vec![each, each, each, bonus, each, state])
                }
                OpKind::RwkvWkv7 => (Op::RwkvWkv7 {}, [vec![each; 6], vec![state]].concat()),
                _ => {
                    let scale = input.float();
                    (
                        Op::GatedLinearAttn { scale },
                        [vec![each; 4], vec![state]].concat(),
                    )
                }
            };
            f32s(Recipe::new(op, dst, []), &sources).dense()
        }
        OpKind::GatedDeltaNet => {
            let values = [size, heads, tokens, seqs];
            let [_, k1, _, k3] = part(input, [1, heads, 1, seqs]);
            let keys = [size, k1.max(1), tokens, k3.max(1)];
            let gates = if input.chance(2) { size } else { 1 };
            let dst = [size * heads, tokens * seqs + snapshot * size * seqs, 1, 1];
            let sources = [
                keys,
                keys,
                values,
                [gates, heads, tokens, seqs],
                [1, heads, tokens, seqs],
                [size, size, heads, seqs],
            ];
            f32s(
                Recipe::new(Op::GatedDeltaNet { snapshots }, dst, []),
                &sources,
            )
            .dense()
        }
        OpKind::Dsv4HcComb => {
            let op = Op::Dsv4HcComb {
                eps: input.float(),
                n_iter: small(input, 1..20) as u32,
            };
            let sources = [
                [24, tokens, 1, 1],
                [small(input, 3..6) as u64, 1, 1, 1],
                [24, 1, 1, 1],
            ];
            Recipe::new(op, [4, 4, tokens, 1], sources)
        }
        OpKind::Dsv4HcPre => {
            let (n, streams, gated) = (ne[0], heads, input.chance(2));
            let op = Op::Dsv4HcPre {
                scale: input.float(),
                gated,
            };
            let weights = match gated {
                true => [n, streams, tokens, 1],
                false => [streams, tokens, 1, 1],
            };
            Recipe::new(op, [n, tokens, 1, 1], [[n, streams, tokens, 1], weights])
        }
        OpKind::Dsv4HcPost => {
            let (n, streams) = (ne[0], heads);
            let all = [n, streams, tokens, 1];
            let sources = [[n, tokens, 1, 1], all, [streams, tokens, 1, 1]];
            Recipe::new(Op::Dsv4HcPost {}, all, sources).with_if(
                input.chance(2),
                Type::F32,
                [streams, streams, tokens, 1],
            )
        }
        _ => return None,
    })
}

/// The parameters of a convolution kernel in one dimension.
#[derive(Clone, Copy)]
struct Line {
    input: u64,
    kernel: u64,
    stride: i32,
    padding: i32,
    dilation: i32,
}

impl Line {
    fn any(input: &mut Input<'_>) -> Line {
        Line {
            input: u64::from(input.byte() % 12),
            kernel: u64::from(input.byte() % 4) + u64::from(!input.chance(32)),
            stride: small(input, 1..4),
            padding: small(input, 0..4),
            dilation: small(input, 1..4),
        }
    }

    /// The number of positions of the kernel.
    fn places(&self) -> Option<u64> {
        let room = self.input as i64 + 2 * i64::from(self.padding)
            - i64::from(self.dilation) * (self.kernel as i64 - 1)
            - 1;
        u64::try_from(room / i64::from(self.stride) + 1).ok()
    }

    /// The length of a transposed convolution, which places a kernel per element at the distance of
    /// a stride.
    fn spread(&self) -> Option<u64> {
        Some(self.input.checked_sub(1)? * self.stride as u64 + self.kernel)
    }
}

/// Operators that move a kernel over an image.
fn convolution(input: &mut Input<'_>, kind: OpKind) -> Option<Recipe> {
    let lines = [0; 3].map(|_| Line::any(input));
    let [x, y, z] = lines;
    let channels = u64::from(input.byte() % 4) + u64::from(!input.chance(32));
    let [results, images] =
        [0; 2].map(|_| u64::from(input.byte() % 4) + u64::from(!input.chance(32)));
    let image = [x.input, y.input, channels, images];
    let sliding = Sliding {
        window: [x.kernel as i32, y.kernel as i32],
        geometry: ConvGeometry {
            stride: lines.map(|line| line.stride),
            padding: lines.map(|line| line.padding),
            dilation: lines.map(|line| line.dilation),
        },
        // The parameters that 0 is not valid for.
        channels: channels.max(1) as i32,
        results: results as i32,
        images: images as i32,
        ..Sliding::default()
    };
    // The lengths of the destination and of the sources.
    let (sliding, dst, src) = match kind {
        OpKind::Im2col | OpKind::Im2colBack => {
            let is_2d = input.chance(2);
            let sliding = Sliding { is_2d, ..sliding };
            let (kernel, image, columns) = if is_2d {
                let columns = [
                    x.kernel * y.kernel * channels,
                    x.places()?,
                    y.places()?,
                    images,
                ];
                ([x.kernel, y.kernel, channels, results], image, columns)
            } else {
                let columns = [x.kernel * channels, x.places()?, images, 1];
                (
                    [x.kernel, channels, results, 1],
                    [x.input, channels, images, 1],
                    columns,
                )
            };
            match kind {
                OpKind::Im2col => (sliding, columns, vec![kernel, image]),
                _ => (sliding, image, vec![columns, kernel]),
            }
        }
        OpKind::Im2col3d => {
            let ic = channels.max(1);
            let kernel = [x.kernel, y.kernel, z.kernel, ic * results];
            let image = [x.input, y.input, z.input, ic * images];
            let patch = x.kernel * y.kernel * z.kernel * ic;
            let columns = [patch, x.places()?, y.places()?, z.places()? * images];
            (sliding, columns, vec![kernel, image])
        }
        OpKind::Col2im1d => {
            let oc = channels.max(1);
            let sliding = Sliding {
                results: oc as i32,
                ..sliding
            };
            let length = x.spread()?.checked_sub(2 * x.padding as u64)?;
            let columns = [oc * x.kernel, x.input, 1, 1];
            (sliding, [length, oc, 1, 1], vec![columns])
        }
        OpKind::Conv2d => {
            let kernel = [x.kernel, y.kernel, channels, results];
            let dst = [x.places()?, y.places()?, results, images];
            (sliding, dst, vec![kernel, image])
        }
        OpKind::Conv2dDw => {
            let kernel = [x.kernel, y.kernel, 1, channels];
            let dst = [x.places()?, y.places()?, channels, images];
            (sliding, dst, vec![kernel, image])
        }
        OpKind::Conv3d => {
            let c = channels.max(1);
            let dst = [x.places()?, y.places()?, z.places()?, results * images];
            let kernel = [x.kernel, y.kernel, z.kernel, c * results];
            let image = [x.input, y.input, z.input, c * images];
            (sliding, dst, vec![kernel, image])
        }
        OpKind::ConvTranspose1d => {
            let mut sliding = sliding;
            (sliding.geometry.padding, sliding.geometry.dilation) = ([0; 3], [1; 3]);
            let kernel = [x.kernel, results, channels, 1];
            let a = [x.input, channels, 1, 1];
            (sliding, [x.spread()?, results, 1, 1], vec![kernel, a])
        }
        OpKind::ConvTranspose2d => {
            let stride = x.stride;
            let y = Line { stride, ..y };
            let kernel = [x.kernel, y.kernel, results, channels];
            let dst = [x.spread()?, y.spread()?, results, images];
            (sliding, dst, vec![kernel, image])
        }
        OpKind::Pool1d | OpKind::Pool2d | OpKind::Pool2dBack => {
            let pool = input.pick(PoolKind::ALL);
            let sliding = Sliding { pool, ..sliding };
            let [x, y] = [x, y].map(|line| Line {
                dilation: 1,
                ..line
            });
            let small = [x.places()?, y.places()?, channels, images];
            match kind {
                OpKind::Pool1d => (sliding, [small[0], y.input, channels, images], vec![image]),
                OpKind::Pool2d => (sliding, small, vec![image]),
                _ => (sliding, image, vec![small, image]),
            }
        }
        _ => return None,
    };
    let src = src.into_iter().map(|ne| Some((None, ne)));
    Some(Recipe {
        op: slide(kind, &sliding)?,
        dst,
        src: src.collect(),
        is_dense: false,
    })
}
