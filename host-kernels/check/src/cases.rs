//! Cases of each family of operators, compared on two engines.

use std::collections::BTreeSet;

use vgpu_transport::ir::{
    GluKind, Op, PoolKind, Precision, RopeMode, ScaleMode, SortOrder, TriKind, Type, UnaryKind,
};

use super::CheckError;
use super::graph::{Builder, Fill, LoadedGraph, Operand, numbers};
use super::random::Random;
use super::steps::{Selection, Step};
use vgpu_cpu::formats::Format;
use vgpu_cpu::gemm::MatmulKernel;
use vgpu_engine::Engine;

/// Limit of the normalised mean square error if activations are quantised to 8 bits, or K and V to
/// 16: that of `test-backend-ops` for MUL_MAT.
const ROUNDED: f64 = 5e-4;

/// The limit of all other operators.
const EXACT: f64 = 1e-7;

/// The outcome of a case.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The normalised mean square error and its limit.
    Compared {
        /// Mean square of the differences over that of the reference.
        error: f64,
        /// Upper bound of `error`.
        limit: f64,
    },
    /// Why the case did not run.
    Failed(CheckError),
}

/// A case that ran on both engines.
#[derive(Debug, Clone)]
pub struct Case {
    /// Operator and types of the sources.
    pub name: String,
    /// The outcome.
    pub outcome: Outcome,
    /// The kernels of the engine's plan, if they have names.
    pub kernels: Vec<&'static str>,
}

impl Case {
    /// Whether the engines agree.
    pub fn is_right(&self) -> bool {
        // Not `error > limit`: NaN is an error.
        matches!(self.outcome, Outcome::Compared { error, limit } if error <= limit)
    }
}

/// The content of an operation's tensors.
#[derive(Clone, Copy)]
enum Content {
    Random,
    /// For a graph that is only compiled: random numbers take longer.
    Zeros,
}

/// An operation to compare.
pub(super) struct Operation {
    pub(super) name: String,
    op: Op,
    dst: Operand,
    src: Vec<Option<Operand>>,
    pub(super) limit: f64,
    /// The source whose memory the result gets, as ggml places some results.
    over: Option<usize>,
}

impl Operation {
    /// The graph of the operation, with its content, and its destination.
    fn builder(&self) -> Result<(Builder, u32), CheckError> {
        self.filled(Content::Random)
    }

    fn filled(&self, content: Content) -> Result<(Builder, u32), CheckError> {
        let mut random = Random::new(1);
        let mut builder = Builder::default();
        let mut add = |operand: &Operand| match content {
            Content::Random => builder.tensor(*operand, &mut random),
            Content::Zeros => builder.zeros(*operand),
        };
        let mut dst = match self.over {
            None => add(&self.dst)?,
            Some(_) => 0, // a source
        };
        let mut src = Vec::new();
        for source in &self.src {
            src.push(source.as_ref().map(&mut add).transpose()?);
        }
        if let Some(tensor) = self.over.and_then(|at| src[at]) {
            dst = builder.again(tensor);
        }
        builder.node(self.op, dst, &src);
        Ok((builder, dst))
    }

    /// Whether the operation reads weights in the layout of a served model, and writes its result
    /// only.
    fn is_product(&self) -> bool {
        matches!(self.op, Op::MulMat { .. } | Op::MulMatId { .. })
    }

    /// The kernels of the operation on an engine.
    pub(super) fn kernels(&self, engine: &dyn Engine) -> Result<Vec<&'static str>, CheckError> {
        let (builder, _) = self.filled(Content::Zeros)?;
        Ok(self.on(&builder, engine)?.plan.kernels())
    }

    /// Bytes of the tensors.
    pub(super) fn bytes(&self) -> u64 {
        let operands = self.src.iter().flatten().chain([&self.dst]);
        operands.map(Operand::bytes).sum()
    }

    /// The results of a few runs of the operation. Calls `compiled` with the kernels of the plan
    /// before the first run.
    ///
    /// # Errors
    ///
    /// If the engine refuses the operation, or a run fails.
    pub(super) fn results(
        &self,
        engine: &dyn Engine,
        runs: usize,
        compiled: impl FnOnce(&[&'static str]),
    ) -> Result<Vec<Vec<f32>>, CheckError> {
        let (builder, dst) = self.builder()?;
        let mut loaded = self.on(&builder, engine)?;
        compiled(&loaded.plan.kernels());
        let is_product = self.is_product();
        let run = |number| {
            match is_product {
                // A run that writes nothing must not leave the results of the run before.
                true => builder.spoil(&loaded, dst)?,
                false => builder.fill(&loaded)?,
            }
            let outcome = loaded.plan.run().map_err(CheckError::from);
            outcome
                .and_then(|()| numbers(&*loaded.memory, &builder.tensor_at(dst)))
                .map_err(|error| CheckError::Repeat {
                    number,
                    error: Box::new(error),
                })
        };
        (1..=runs).map(run).collect()
    }

    /// The compiled graph of the operation.
    fn on(&self, builder: &Builder, engine: &dyn Engine) -> Result<LoadedGraph, CheckError> {
        match self.is_product() {
            true => builder.on_weights(engine, 0, |_| Ok(())),
            false => builder.on(engine),
        }
    }
}

/// Compiles the cases for a GPU, and returns the kernels of all plans.
pub(super) fn planned_kernels(engine: &dyn Engine) -> Result<BTreeSet<&'static str>, CheckError> {
    let plans = { operations(true).into_iter() }.map(|operation| operation.kernels(engine));
    let plans = plans.collect::<Result<Vec<_>, _>>()?;
    Ok(plans.into_iter().flatten().collect())
}

/// Compiles the cases for any engine, and returns the name and the kernels of each.
pub(super) fn planned_cases(
    engine: &dyn Engine,
) -> Result<Vec<(String, Vec<&'static str>)>, CheckError> {
    let plan = |operation: Operation| Ok((operation.name.clone(), operation.kernels(engine)?));
    operations(false).into_iter().map(plan).collect()
}

pub(super) fn run(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    selection: &Selection<'_>,
    mut seen: impl FnMut(Step<'_, Case>),
) -> Vec<Case> {
    // The shim, which runs kernels as fibers, would need minutes for products that fill a GPU.
    let is_gpu = engine.name().starts_with("cuda:");
    let selected = { operations(is_gpu).into_iter().enumerate() }
        .filter(|(index, operation)| selection.has(*index, &operation.name));
    let outcomes = selected.map(|(index, operation)| {
        let mut kernels = Vec::new();
        seen(Step::Begins {
            index,
            name: &operation.name,
        });
        let compiled = |planned: &[&'static str]| {
            kernels = planned.to_vec();
            seen(Step::Runs { kernels: planned });
        };
        let case = Case {
            outcome: match difference(engine, oracle, &operation, compiled) {
                Ok(error) => Outcome::Compared {
                    error,
                    limit: operation.limit,
                },
                Err(reason) => Outcome::Failed(reason),
            },
            name: operation.name,
            kernels,
        };
        seen(Step::Ends(&case));
        case
    });
    outcomes.collect()
}

/// Runs of each graph: an engine may capture the second run and replay the third.
pub(super) const RUNS: usize = 3;

/// The largest normalised mean square error of all runs. Calls `compiled` with the kernels of the
/// engine's plan before the first run.
fn difference(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    operation: &Operation,
    compiled: impl FnOnce(&[&'static str]),
) -> Result<f64, CheckError> {
    let expected = operation.results(oracle, 1, |_| ());
    let expected = expected.map_err(|error| CheckError::Reference(Box::new(error)))?;
    let got = operation.results(engine, RUNS, compiled)?;
    Ok(worst_error(&got, &expected[0]))
}

/// The largest error of some results. NaN is the largest of all.
pub(super) fn worst_error(results: &[Vec<f32>], expected: &[f32]) -> f64 {
    let errors = { results.iter() }.map(|got| normalized_mean_square_error(got, expected));
    errors.fold(0.0, |worst: f64, error| {
        match error > worst || error.is_nan() {
            true if !worst.is_nan() => error,
            _ => worst,
        }
    })
}

/// Mean square of the differences over that of the expected values.
fn normalized_mean_square_error(got: &[f32], expected: &[f32]) -> f64 {
    let (mut off, mut size) = (0.0, 0.0);
    for (&got, &expected) in got.iter().zip(expected) {
        if got == expected || got.is_nan() && expected.is_nan() {
            size += if expected.is_finite() {
                f64::from(expected).powi(2)
            } else {
                0.0
            };
            continue;
        }
        off += (f64::from(got) - f64::from(expected)).powi(2);
        size += f64::from(expected).powi(2);
    }
    if off == 0.0 { 0.0 } else { off / size }
}

fn numbers_of(ty: Type, ne: [u64; 4]) -> Operand {
    Operand {
        ty,
        ne,
        fill: Fill::Numbers(-1.0, 1.0),
    }
}

fn f32s(ne: [u64; 4]) -> Operand {
    numbers_of(Type::F32, ne)
}

fn between(low: f32, high: f32, ne: [u64; 4]) -> Operand {
    Operand {
        fill: Fill::Numbers(low, high),
        ..f32s(ne)
    }
}

fn indices(ty: Type, fill: Fill, ne: [u64; 4]) -> Operand {
    Operand { ty, ne, fill }
}

/// The list of operations.
#[derive(Default)]
struct List(Vec<Operation>);

impl List {
    fn add(&mut self, op: Op, limit: f64, dst: Operand, src: &[Operand]) {
        let src: Vec<Option<Operand>> = src.iter().copied().map(Some).collect();
        self.with(op, limit, dst, &src);
    }

    fn with(&mut self, op: Op, limit: f64, dst: Operand, src: &[Option<Operand>]) {
        let types: Vec<_> = src.iter().flatten().map(|s| s.ty.ggml_name()).collect();
        self.0.push(Operation {
            name: format!(
                "{} {} -> [{}]",
                op.kind().ggml_name(),
                types.join(" "),
                dst.ne.map(|n| n.to_string()).join(",")
            ),
            op,
            dst,
            src: src.to_vec(),
            limit,
            over: None,
        });
    }

    /// The last operation once more, with the result in the memory of this source.
    fn again_over(&mut self, source: usize) {
        let Some(last) = self.0.last() else { return };
        let again = Operation {
            name: format!("{} over source {source}", last.name),
            src: last.src.clone(),
            over: Some(source),
            ..*last
        };
        self.0.push(again);
    }
}

fn operations(is_gpu: bool) -> Vec<Operation> {
    let mut list = List::default();
    products(&mut list);
    if is_gpu {
        large_products(&mut list);
        large_attention(&mut list);
    }
    attention(&mut list);
    elements(&mut list);
    rows(&mut list);
    movement(&mut list);
    images(&mut list);
    recurrent(&mut list);
    training(&mut list);
    list.0
}

fn products(list: &mut List) {
    let weights = Type::ALL.iter().copied();
    for ty in weights.filter(|&ty| MatmulKernel::of(ty).is_some()) {
        for n in [1, 3, 8, 13, 30, 50, 70] {
            let op = Op::MulMat {
                accumulator: Precision::Default,
                activation: Precision::Default,
                hadamard: false,
            };
            let w = numbers_of(ty, [1280, 96, 1, 1]);
            list.add(
                op,
                ROUNDED,
                f32s([96, n, 1, 1]),
                &[w, f32s([1280, n, 1, 1])],
            );
        }
        for tokens in [1, 40] {
            let op = Op::MulMatId {
                accumulator: Precision::Default,
                activation: Precision::Default,
            };
            let ids = indices(Type::I32, Fill::Below(5), [2, tokens, 1, 1]);
            list.add(
                op,
                ROUNDED,
                f32s([48, 2, tokens, 1]),
                &[
                    numbers_of(ty, [512, 48, 5, 1]),
                    f32s([512, 1, tokens, 1]),
                    ids,
                ],
            );
        }
    }
    // Activations beyond F16, which must stay F32 or BF16.
    for ty in [Type::F16, Type::Bf16, Type::Q4_1, Type::Q8_0] {
        for (n, activation) in [
            (1, Precision::F32),
            (70, Precision::F32),
            (1, Precision::Bf16),
            (70, Precision::Bf16),
        ] {
            let op = Op::MulMat {
                accumulator: Precision::Default,
                activation,
                hadamard: false,
            };
            let sources = [
                numbers_of(ty, [512, 96, 1, 1]),
                between(-1e6, 1e6, [512, n, 1, 1]),
            ];
            list.add(op, ROUNDED, f32s([96, n, 1, 1]), &sources);
        }
    }
    // Lengths that are no multiple of a k step, as attention without FLASH_ATTN_EXT has.
    for ty in [Type::F16, Type::F32] {
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: false,
        };
        let sources = [numbers_of(ty, [1500, 72, 2, 1]), f32s([1500, 40, 4, 1])];
        list.add(op, ROUNDED, f32s([72, 40, 4, 1]), &sources);
    }
    let op = Op::OutProd {};
    list.add(
        op,
        EXACT,
        f32s([50, 33, 2, 1]),
        &[f32s([50, 70, 2, 1]), f32s([33, 70, 2, 1])],
    );
}

/// The operations of the self-check: some use each kernel with another one behind it, except those
/// for several nodes.
pub(super) fn self_check() -> Vec<Operation> {
    let mut list = List::default();
    products(&mut list);
    attention(&mut list);
    attention_of_every_size(&mut list);
    large_attention(&mut list);
    elements(&mut list);
    rows(&mut list);
    list.0
}

/// Products large enough for the kernels that GPUs use if all SMs have work.
fn large_products(list: &mut List) {
    let weights = Type::ALL.iter().copied();
    for ty in weights.filter(|&ty| MatmulKernel::of(ty).is_some()) {
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: false,
        };
        // Nearly whole waves of wide tiles on current GPUs.
        let (rows, columns) = (33_000, 512);
        let sources = [
            numbers_of(ty, [256, rows, 1, 1]),
            f32s([256, columns, 1, 1]),
        ];
        list.add(op, ROUNDED, f32s([rows, columns, 1, 1]), &sources);
    }
}

/// Attention large enough for the kernels that GPUs use if all SMs have work.
fn large_attention(list: &mut List) {
    for [size, cap] in [[64, 0], [128, 0], [256, 10]] {
        let op = Op::FlashAttnExt {
            scale: 1.0 / (size as f32).sqrt(),
            max_bias: 0.0,
            logit_softcap: cap as f32,
            accumulator: Precision::Default,
            n_kv_max: 0,
        };
        let (tokens, keys, heads) = (200, 330, 64);
        let mask = Operand {
            ty: Type::F16,
            ne: [keys, tokens, 1, 1],
            fill: Fill::Mask(keys as i64 - tokens as i64),
        };
        let cache = Some(numbers_of(Type::F16, [size, keys, heads / 2, 1]));
        let sources = [
            Some(f32s([size, tokens, heads, 1])),
            cache,
            cache,
            Some(mask),
            Some(f32s([heads, 1, 1, 1])),
        ];
        list.with(op, ROUNDED, f32s([size, heads, tokens, 1]), &sources);
    }
}

/// Attention for each kernel on tensor cores: by the type and size of heads, for few tokens and for
/// many.
fn attention_of_every_size(list: &mut List) {
    for ty in [Type::F16, Type::Bf16, Type::Q8_0, Type::F32] {
        for [size, values] in [[64, 64], [128, 128], [256, 256], [576, 512]] {
            for tokens in [1, 40] {
                let op = Op::FlashAttnExt {
                    scale: 1.0 / (size as f32).sqrt(),
                    max_bias: 0.0,
                    logit_softcap: 0.0,
                    accumulator: Precision::Default,
                    n_kv_max: 0,
                };
                let (keys, heads) = (96, 2);
                let mask = Operand {
                    ty: Type::F16,
                    ne: [keys, tokens, 1, 1],
                    fill: Fill::Mask(keys as i64 - tokens as i64),
                };
                let sources = [
                    f32s([size, tokens, heads, 1]),
                    numbers_of(ty, [size, keys, 1, 1]),
                    numbers_of(ty, [values, keys, 1, 1]),
                    mask,
                ];
                list.add(op, ROUNDED, f32s([values, heads, tokens, 1]), &sources);
            }
        }
    }
}

fn attention(list: &mut List) {
    let alike = [Type::F32, Type::F16, Type::Bf16, Type::Q8_0, Type::Q4_0].map(|ty| [ty; 2]);
    let mixed = [
        [Type::Bf16, Type::Q8_0],
        [Type::Q8_0, Type::Q5_1],
        [Type::F32, Type::F16],
    ];
    // Each is allowed to be F32, which the engines use.
    let mut accumulators = [
        Precision::Default,
        Precision::F32,
        Precision::Bf16,
        Precision::F16,
        Precision::Q8,
    ]
    .into_iter()
    .cycle();
    for [k, v] in alike.into_iter().chain(mixed) {
        for [size, tokens, keys, heads, kv] in [
            [128, 1, 1000, 8, 2],
            [64, 70, 130, 4, 4],
            [80, 3, 257, 6, 2],
            [256, 1, 512, 4, 1],
        ] {
            if (k.is_quantized() || v.is_quantized()) && size % 32 != 0 {
                continue;
            }
            let op = Op::FlashAttnExt {
                scale: 1.0 / (size as f32).sqrt(),
                max_bias: 0.0,
                logit_softcap: if tokens == 3 { 10.0 } else { 0.0 },
                accumulator: accumulators.next().unwrap_or(Precision::Default),
                n_kv_max: 0,
            };
            let mask = Operand {
                ty: Type::F16,
                ne: [keys, tokens, 1, 1],
                fill: Fill::Mask(keys as i64 - tokens as i64),
            };
            let sinks = (tokens == 3).then(|| f32s([heads, 1, 1, 1]));
            let [k, v] = [k, v].map(|ty| Some(numbers_of(ty, [size, keys, kv, 1])));
            let q = f32s([size, tokens, heads, 1]);
            list.with(
                op,
                ROUNDED,
                f32s([size, heads, tokens, 1]),
                &[Some(q), k, v, Some(mask), sinks],
            );
        }
    }
    // A softcap without a mask, for a number of keys that is no multiple of 64.
    let (size, tokens, keys, heads) = (64, 70, 130, 4);
    let cache = numbers_of(Type::F16, [size, keys, heads, 1]);
    list.add(
        Op::FlashAttnExt {
            scale: 0.125,
            max_bias: 0.0,
            logit_softcap: 10.0,
            accumulator: Precision::Default,
            n_kv_max: 0,
        },
        ROUNDED,
        f32s([size, heads, tokens, 1]),
        &[f32s([size, tokens, heads, 1]), cache, cache],
    );
}

fn elements(list: &mut List) {
    let ne = [130, 7, 3, 2];
    for op in [Op::Add {}, Op::Sub {}, Op::Mul {}, Op::Div {}] {
        list.add(
            op,
            EXACT,
            f32s(ne),
            &[f32s(ne), between(0.5, 2.0, [130, 7, 1, 1])],
        );
    }
    for kind in [
        UnaryKind::Silu,
        UnaryKind::Gelu,
        UnaryKind::Exp,
        UnaryKind::Softplus,
    ] {
        list.add(Op::Unary { kind }, EXACT, f32s(ne), &[f32s(ne)]);
    }
    let scale = Op::Scale {
        scale: 2.0,
        bias: 0.5,
    };
    list.add(scale, EXACT, f32s(ne), &[f32s(ne)]);
    for kind in [GluKind::Swiglu, GluKind::Geglu, GluKind::SwigluOai] {
        let op = Op::Glu {
            kind,
            swapped: false,
            alpha: 1.702,
            limit: 7.0,
        };
        list.add(op, EXACT, f32s(ne), &[f32s(ne), f32s(ne)]);
    }
    let ids = indices(Type::I32, Fill::Below(9), [7, 3, 1, 1]);
    list.add(
        Op::AddId {},
        EXACT,
        f32s([130, 7, 3, 1]),
        &[f32s([130, 7, 3, 1]), f32s([130, 9, 1, 1]), ids],
    );
}

fn rows(list: &mut List) {
    let ne = [1000, 5, 2, 1];
    for op in [
        Op::Norm { eps: 1e-5 },
        Op::RmsNorm { eps: 1e-5 },
        Op::L2Norm { eps: 1e-5 },
        Op::Cumsum {},
    ] {
        list.add(op, EXACT, f32s(ne), &[f32s(ne)]);
    }
    let group = Op::GroupNorm {
        n_groups: 3,
        eps: 1e-5,
    };
    list.add(group, EXACT, f32s([10, 9, 6, 2]), &[f32s([10, 9, 6, 2])]);
    let soft_max = Op::SoftMax {
        scale: 0.5,
        max_bias: 8.0,
    };
    let mask = Operand {
        ty: Type::F16,
        ne: [1000, 5, 1, 1],
        fill: Fill::Mask(500),
    };
    list.add(soft_max, EXACT, f32s(ne), &[f32s(ne), mask]);
    for mode in [RopeMode::Normal, RopeMode::Neox, RopeMode::Mrope] {
        let op = Op::Rope {
            mode,
            backward: false,
            n_dims: 64,
            n_offs: 0,
            n_ctx_orig: 4096,
            freq_base: 10000.0,
            freq_scale: 0.5,
            ext_factor: 0.5,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            sections: [8, 12, 12, 0],
        };
        let count = if mode == RopeMode::Mrope { 4 } else { 1 };
        let positions = indices(Type::I32, Fill::Count, [6 * count, 1, 1, 1]);
        let ne = [80, 4, 6, 1];
        list.add(op, EXACT, f32s(ne), &[f32s(ne), positions]);
    }
    list.add(Op::Sum {}, EXACT, f32s([1; 4]), &[between(0.0, 1.0, ne)]);
    list.add(
        Op::SumRows {},
        EXACT,
        f32s([1, 5, 2, 1]),
        &[between(0.0, 1.0, ne)],
    );
    let i32s = |ne| indices(Type::I32, Fill::Count, ne);
    list.add(
        Op::Argmax {},
        0.0,
        i32s([5, 1, 1, 1]),
        &[f32s([1000, 5, 1, 1])],
    );
    for columns in [1000, 6000] {
        let op = Op::Argsort {
            order: SortOrder::Descending,
        };
        list.add(
            op,
            0.0,
            i32s([columns, 5, 1, 1]),
            &[f32s([columns, 5, 1, 1])],
        );
    }
}

fn movement(list: &mut List) {
    let reals = Type::ALL.iter().copied();
    for ty in reals.filter(|&ty| Format::of(ty).is_some()) {
        let src = numbers_of(ty, [256, 9, 2, 1]);
        list.add(Op::Copy {}, EXACT, f32s([256, 9, 2, 1]), &[src]);
        list.add(Op::Copy {}, ROUNDED, src, &[f32s([256, 9, 2, 1])]);
        let ids = indices(Type::I32, Fill::Below(9), [4, 1, 1, 1]);
        list.add(
            Op::GetRows {},
            EXACT,
            f32s([256, 4, 1, 1]),
            &[numbers_of(ty, [256, 9, 1, 1]), ids],
        );
        let ids = indices(Type::I64, Fill::Count, [4, 1, 1, 1]);
        let dst = numbers_of(ty, [256, 9, 1, 1]);
        list.add(Op::SetRows {}, ROUNDED, dst, &[f32s([256, 4, 1, 1]), ids]);
    }
    let ne = [30, 5, 3, 2];
    list.add(Op::Repeat {}, 0.0, f32s([60, 5, 9, 2]), &[f32s(ne)]);
    list.add(
        Op::Concat { dim: 1 },
        0.0,
        f32s([30, 10, 3, 2]),
        &[f32s(ne), f32s(ne)],
    );
    let tri = Op::Tri {
        kind: TriKind::Lower,
    };
    list.add(tri, 0.0, f32s([30, 30, 2, 1]), &[f32s([30, 30, 2, 1])]);
    let pad = Op::Pad {
        left: [1, 0, 2, 0],
        right: [3, 1, 0, 0],
        circular: false,
    };
    list.add(pad, 0.0, f32s([34, 6, 5, 2]), &[f32s(ne)]);
}

fn images(list: &mut List) {
    let kernel = numbers_of(Type::F16, [3, 3, 8, 12]);
    let image = f32s([20, 17, 8, 2]);
    let conv = Op::Conv2d {
        s0: 1,
        s1: 2,
        p0: 1,
        p1: 1,
        d0: 1,
        d1: 1,
    };
    list.add(conv, ROUNDED, f32s([20, 9, 12, 2]), &[kernel, image]);
    let im2col = Op::Im2col {
        s0: 1,
        s1: 2,
        p0: 1,
        p1: 1,
        d0: 1,
        d1: 1,
        is_2d: true,
    };
    list.add(
        im2col,
        EXACT,
        numbers_of(Type::F16, [72, 20, 9, 2]),
        &[kernel, image],
    );
    let pool = Op::Pool2d {
        kind: PoolKind::Max,
        k0: 2,
        k1: 2,
        s0: 2,
        s1: 2,
        p0: 0,
        p1: 0,
    };
    list.add(pool, 0.0, f32s([10, 8, 8, 2]), &[image]);
    for mode in [ScaleMode::Nearest, ScaleMode::Bilinear, ScaleMode::Bicubic] {
        let op = Op::Upscale {
            mode,
            align_corners: false,
            antialias: false,
        };
        list.add(op, EXACT, f32s([40, 34, 8, 2]), &[image]);
    }
    let transposed = Op::ConvTranspose2d { stride: 2 };
    list.add(
        transposed,
        ROUNDED,
        f32s([41, 35, 12, 2]),
        &[numbers_of(Type::F16, [3, 3, 12, 8]), image],
    );
}

fn recurrent(list: &mut List) {
    let (size, heads, tokens, seqs) = (64, 3, 5, 2);
    let per_token = f32s([size, heads, tokens * seqs, 1]);
    let state = f32s([size * size * heads, seqs, 1, 1]);
    let dst = f32s([size * heads, tokens * seqs + size * seqs, 1, 1]);
    let decay = between(0.1, 0.9, per_token.ne);
    let bonus = f32s([size, heads, 1, 1]);
    list.add(
        Op::RwkvWkv6 {},
        EXACT,
        dst,
        &[per_token, per_token, per_token, bonus, decay, state],
    );
    let small = between(-0.1, 0.1, per_token.ne);
    list.add(
        Op::RwkvWkv7 {},
        EXACT,
        dst,
        &[per_token, decay, small, per_token, small, small, state],
    );
    let x = f32s([16, heads, tokens, seqs]);
    let ids = indices(Type::I32, Fill::Count, [seqs, 1, 1, 1]);
    let b = f32s([128, 1, tokens, seqs]);
    let total = 16 * heads * seqs * (tokens + 128);
    list.add(
        Op::SsmScan { snapshots: 1 },
        EXACT,
        f32s([total, 1, 1, 1]),
        &[
            f32s([128, 16, heads, seqs]),
            x,
            f32s([heads, tokens, seqs, 1]),
            between(-1.0, 0.0, [1, heads, 1, 1]),
            b,
            b,
            ids,
        ],
    );
    let v = f32s([size, heads, tokens, seqs]);
    let k = between(-0.1, 0.1, v.ne);
    list.add(
        Op::GatedDeltaNet { snapshots: 1 },
        EXACT,
        f32s([size * heads, tokens * seqs + size * seqs, 1, 1]),
        &[
            k,
            k,
            v,
            between(-1.0, 0.0, [1, heads, tokens, seqs]),
            between(0.0, 1.0, [1, heads, tokens, seqs]),
            f32s([size, size, heads, seqs]),
        ],
    );
    // The streams of DeepSeek-V4, with factors of their own and without.
    let streams = f32s([300, 4, tokens, 1]);
    let (input, post) = (f32s([300, tokens, 1, 1]), f32s([4, tokens, 1, 1]));
    for comb in [Some(f32s([4, 4, tokens, 1])), None] {
        let sources = [Some(input), Some(streams), Some(post), comb];
        list.with(Op::Dsv4HcPost {}, EXACT, streams, &sources);
    }
}

fn training(list: &mut List) {
    let ne = [300, 20, 1, 1];
    list.add(
        Op::SoftMaxBack {
            scale: 0.7,
            max_bias: 0.0,
        },
        EXACT,
        f32s(ne),
        &[f32s(ne), between(0.0, 1.0, ne)],
    );
    list.again_over(0);
    list.again_over(1);
    let labels = between(0.0, 1.0, ne);
    list.add(
        Op::CrossEntropyLoss {},
        EXACT,
        f32s([1; 4]),
        &[f32s(ne), labels],
    );
    list.add(
        Op::CrossEntropyLossBack {},
        EXACT,
        f32s(ne),
        &[f32s([1; 4]), f32s(ne), labels],
    );
    let settings = between(0.1, 0.2, [2, 1, 1, 1]);
    list.add(
        Op::OptStepSgd {},
        EXACT,
        f32s(ne),
        &[f32s(ne), f32s(ne), settings],
    );
}
