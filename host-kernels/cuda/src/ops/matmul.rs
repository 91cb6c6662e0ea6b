//! MUL_MAT, MUL_MAT_ID, OUT_PROD.

use vgpu_transport::ir::{Op, OpKind, Rule, Type};

use super::fused::MOST_EXPERTS;
use super::hopper::Hopper;
use super::vector::{self, FEW_COLUMNS, Product, Products};
use super::{READABLE, div_ceil};
use crate::device::Address;
use crate::params::*;
use crate::plan::{Builder, MOST_BLOCKS, threads_for};
use vgpu_engine::EngineError;
use vgpu_engine::types::{F32, FLOATS};

/// The tile of results that a block of `vg_mul_mat` and `vg_out_prod` computes.
const TILE: [i64; 2] = [64, 32];

/// Rows of weights that a block of `vg_mul_vec` and `vg_mul_mat_id` multiplies.
const VECTOR_ROWS: i64 = 4;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::MulMat, F32, &[READABLE, READABLE]),
        Rule::new(OpKind::MulMatId, F32, &[READABLE, READABLE]),
        Rule::new(OpKind::OutProd, F32, &[READABLE, FLOATS]),
    ]
}

pub(super) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    match op {
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::OutProd {} => {}
        _ => return None,
    }
    Some(b.staged(|b, dst| {
        let params = VgMulMatParams {
            dst,
            w: b.src(0),
            x: b.src(1),
            ids: b.optional(2),
            codebooks: b.codebooks(),
            place: b.place(),
        };
        multiply(b, op, &params)
    }))
}

/// Adds the launches of a product.
pub(super) fn multiply(
    b: &mut Builder<'_>,
    op: &Op,
    params: &VgMulMatParams,
) -> Result<(), EngineError> {
    let dst = params.dst;
    let [m, n, ..] = dst.ne;
    let batches = dst.ne[2] * dst.ne[3];
    let has_ids = matches!(op, Op::MulMatId { .. });
    let is_outer = matches!(op, Op::OutProd {});
    let is_few = has_ids || n <= FEW_COLUMNS;
    if let (true, Some(gemm)) = (has_ids && dst.ne[2] > FEW_COLUMNS, Gemm::of(params))
        && takes_groups(params)
    {
        return match gemm.hopper(b, params) {
            Some(hopper) => hopper.multiply_groups(b, params),
            None => gemm.multiply_groups(b, params),
        };
    }
    if is_few && !is_outer {
        let VgMulMatParams { dst, w, x, ids, .. } = *params;
        let product = Product {
            dst,
            w,
            add: VgView::default(),
        };
        let products = Products {
            x,
            rounded: None,
            ids: if has_ids { ids } else { VgView::default() },
            products: &[product],
            unit: None,
        };
        if let Some(added) = vector::products(b, &products) {
            return added;
        }
    }
    if let (false, Some(gemm)) = (is_few || is_outer, Gemm::of(params)) {
        return match gemm.hopper(b, params) {
            Some(hopper) => hopper.multiply(b, params),
            None => gemm.multiply_tiles(b, params),
        };
    }
    // What is left reads weights element by element, as ggml has them.
    if params.w.is_in_planes() {
        b.refuse(&params.w);
        return Ok(());
    }
    match op {
        Op::MulMatId { .. } => {
            let grid = [div_ceil(m, VECTOR_ROWS), n, dst.ne[2]];
            b.launch_over("vg_mul_mat_id", grid, 128, 0, params)
        }
        Op::MulMat { .. } if n <= FEW_COLUMNS => {
            let grid = [div_ceil(m, VECTOR_ROWS), 1, batches];
            b.launch_over("vg_mul_vec", grid, 128, 0, params)
        }
        _ => {
            let kernel = match op {
                Op::MulMat { .. } => "vg_mul_mat",
                _ => "vg_out_prod",
            };
            let grid = [div_ceil(m, TILE[0]), div_ceil(n, TILE[1]), batches];
            b.launch_over(kernel, grid, 256, 0, params)
        }
    }
}

/// Kernels of one type of weights.
pub(super) struct Tuned {
    /// For one column, and for up to eight.
    pub(super) vector: &'static str,
    pub(super) vectors: &'static str,
    /// For many, on tensor cores.
    gemm: &'static str,
    /// What the weights' places must be multiples of.
    alignment: i64,
}

/// The tile of results of a block of the kernels for many columns, and the elements of a step along the sum.
const GEMM_TILE: [i64; 2] = [128, 128];
const GEMM_STEP: i64 = 64;

impl Tuned {
    fn of(ty: Type, in_planes: bool) -> Option<Tuned> {
        macro_rules! tuned {
            ($type:literal, $alignment:literal) => {
                Some(Tuned {
                    vector: concat!("vg_vector_", $type),
                    vectors: concat!("vg_vectors_", $type),
                    gemm: concat!("vg_gemm_", $type),
                    alignment: $alignment,
                })
            };
        }
        if in_planes {
            return match ty {
                Type::Q4_0 => tuned!("q4_0_planes", 16),
                Type::Q8_0 => tuned!("q8_0_planes", 16),
                Type::Mxfp4 => tuned!("mxfp4_planes", 16),
                Type::Iq4Nl => tuned!("iq4_nl_planes", 16),
                Type::Q6K => tuned!("q6_k_planes", 16),
                _ => None,
            };
        }
        match ty {
            Type::F32 => tuned!("f32", 16),
            Type::F16 => tuned!("f16", 16),
            Type::Bf16 => tuned!("bf16", 16),
            Type::Q4_0 => tuned!("q4_0", 2),
            Type::Q4_1 => tuned!("q4_1", 4),
            Type::Q5_0 => tuned!("q5_0", 2),
            Type::Q5_1 => tuned!("q5_1", 4),
            Type::Q8_0 => tuned!("q8_0", 2),
            Type::Q1_0 => tuned!("q1_0", 2),
            Type::Q2_0 => tuned!("q2_0", 2),
            Type::Mxfp4 => tuned!("mxfp4", 1),
            Type::Nvfp4 => tuned!("nvfp4", 4),
            Type::Iq4Nl => tuned!("iq4_nl", 2),
            Type::Q2K => tuned!("q2_k", 4),
            Type::Q3K => tuned!("q3_k", 2),
            Type::Q4K => tuned!("q4_k", 16),
            Type::Q5K => tuned!("q5_k", 16),
            Type::Q6K => tuned!("q6_k", 2),
            Type::Iq4Xs => tuned!("iq4_xs", 2),
            Type::Tq1_0 => tuned!("tq1_0", 2),
            Type::Tq2_0 => tuned!("tq2_0", 2),
            Type::Iq2Xxs => tuned!("iq2_xxs", 2),
            Type::Iq2Xs => tuned!("iq2_xs", 2),
            Type::Iq2S => tuned!("iq2_s", 2),
            Type::Iq3Xxs => tuned!("iq3_xxs", 2),
            Type::Iq3S => tuned!("iq3_s", 2),
            Type::Iq1S => tuned!("iq1_s", 2),
            Type::Iq1M => tuned!("iq1_m", 2),
            _ => None,
        }
    }

    /// Whether they can read weights of their type that lie so.
    pub(super) fn takes_weights(&self, w: &VgView, ty: Type) -> bool {
        // In planes rows are one after the other, and matrices begin at multiples.
        let in_planes = w.is_in_planes();
        let row = w.ne[0] / ty.block_elements() as i64 * w.nb[0];
        let places = [w.data as i64, w.nb[1], w.nb[2], w.nb[3]];
        let counts = |d: usize| !in_planes || d == 0 || d > 1 && w.ne[d] > 1;
        // Bytes of a row, and rows, are counted in 32 bits.
        (1..=1 << 28).contains(&w.ne[0])
            && w.ne[1] <= 1 << 28
            && w.ne[0] % 32 == 0
            && w.nb[0] == ty.block_bytes() as i64
            && (!in_planes || w.nb[1] == row)
            && (0..4).all(|d| !counts(d) || places[d] % self.alignment == 0)
    }

    /// The kernels for few columns and weights of this type.
    pub(super) fn of_vectors(w: &VgView) -> Option<(Type, Tuned)> {
        let (ty, in_planes) = w.weights()?;
        Some((ty, Tuned::of(ty, in_planes)?))
    }
}

/// What weights and activations become for products of many columns.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// Halves, each row of activations with a factor.
    Halves,
    /// Bfloat16.
    Brain,
    /// Pairs of bfloat16.
    Pairs,
}

impl Form {
    /// Numbers of 16 bits for each element.
    fn planes(self) -> i64 {
        match self {
            Form::Pairs => 2,
            _ => 1,
        }
    }
}

/// A kernel for many columns, on tensor cores.
struct Gemm {
    kernel: &'static str,
    form: Form,
}

impl Gemm {
    /// The kernel for a product: that for weights of a type if they lie as it wants them, or one that takes pairs.
    fn of(params: &VgMulMatParams) -> Option<Gemm> {
        let VgMulMatParams { dst, w, x, .. } = params;
        let fits = w.ne[0] > 0
            && x.rows() <= i64::from(i32::MAX)
            && dst.ne[1] <= MOST_BLOCKS
            && dst.ne[2] * dst.ne[3] <= MOST_BLOCKS;
        if !fits {
            return None;
        }
        if let Some((ty, kernels)) = Tuned::of_vectors(w)
            && ty != Type::F32
            && kernels.takes_weights(w, ty)
            && FLOATS.contains(Type::from_id(x.type_ as u8)?)
        {
            return Some(Gemm {
                kernel: kernels.gemm,
                form: match ty {
                    Type::Bf16 => Form::Brain,
                    _ => Form::Halves,
                },
            });
        }
        if w.is_in_planes() {
            return None;
        }
        // Whole 16 bytes are read up to the end of a row.
        let places = [w.data as i64, w.nb[1], w.nb[2], w.nb[3], 4 * w.ne[0]];
        let is_dense = w.type_ == VG_F32 && w.nb[0] == 4 && places.iter().all(|p| p % 16 == 0);
        Some(Gemm {
            kernel: match is_dense {
                true => "vg_gemm_f32",
                false => "vg_gemm_any",
            },
            form: Form::Pairs,
        })
    }

    /// The kernels for Hopper GPUs, if they do such products on this device.
    fn hopper(&self, b: &Builder<'_>, params: &VgMulMatParams) -> Option<Hopper> {
        match self.form {
            Form::Pairs => None,
            _ => Hopper::of(b, params),
        }
    }

    /// Adds the launches: activations to halves, then the product.
    fn multiply_tiles(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, w, x, .. } = *params;
        let halves = halves(b, x, params.codebooks, self.form)?;
        let product = VgGemmParams {
            dst,
            w,
            halves: halves.halves,
            factors: halves.factors,
            codebooks: params.codebooks,
            groups: 0,
            slots: x.ne[1],
        };
        let grid = [
            div_ceil(dst.ne[0], GEMM_TILE[0]),
            div_ceil(dst.ne[1], GEMM_TILE[1]),
            dst.ne[2] * dst.ne[3],
        ];
        b.launch_over(self.kernel, grid, 256, self.shared(), &product)
    }

    /// Bytes of shared memory of a block: weights of a step, and activations of two.
    fn shared(&self) -> u32 {
        let planes = self.form.planes();
        let row = 2 * (GEMM_STEP / planes + 8);
        (planes * (GEMM_TILE[0] + 2 * GEMM_TILE[1]) * row) as u32
    }

    /// Adds the launches: activations to halves, slots of tokens in the order of their experts, then the products, each
    /// expert's weights with all its vectors.
    fn multiply_groups(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, w, x, ids, .. } = *params;
        let halves = halves(b, x, params.codebooks, self.form)?;
        let (vectors, experts) = (dst.ne[1] * dst.ne[2], w.ne[2]);
        let groups = VgGroupParams {
            ids: VgView {
                ne: [dst.ne[1], dst.ne[2], 1, 1],
                ..ids
            },
            groups: b.scratch((2 * (experts + 1) + vectors) as u64 * 4),
            place: params.place,
            experts: experts as u32,
            columns: GEMM_TILE[1] as u32,
            align: 1,
            reserved: 0,
        };
        b.launch("vg_group", [1, 1, 1], 512, 0, &groups)?;
        let product = VgGemmParams {
            dst,
            w,
            halves: halves.halves,
            factors: halves.factors,
            codebooks: params.codebooks,
            groups: groups.groups,
            slots: x.ne[1],
        };
        let grid = [
            div_ceil(dst.ne[0], GEMM_TILE[0]),
            most_tiles(vectors, experts),
            1,
        ];
        b.launch_over(self.kernel, grid, 256, self.shared(), &product)
    }
}

/// Whether there can be groups of tokens for each expert.
fn takes_groups(params: &VgMulMatParams) -> bool {
    let VgMulMatParams { dst, w, ids, .. } = params;
    let vectors = dst.ne[1] * dst.ne[2];
    ids.type_ == VG_I32
        && w.ne[2] <= MOST_EXPERTS
        && w.ne[3] == 1
        && dst.ne[3] == 1
        && vectors <= i64::from(i32::MAX)
        && most_tiles(vectors, w.ne[2]) <= MOST_BLOCKS
}

/// Tiles of columns that so many vectors fill, shared out among experts in any way.
fn most_tiles(vectors: i64, experts: i64) -> i64 {
    (vectors / GEMM_TILE[1] + experts).min(vectors)
}

/// Makes activations halves, or pairs.
fn halves(
    b: &mut Builder<'_>,
    x: VgView,
    codebooks: Address,
    form: Form,
) -> Result<VgHalvesParams, EngineError> {
    let length = div_ceil(x.ne[0], GEMM_STEP) * GEMM_STEP;
    let is_pairs = form == Form::Pairs;
    let factors = if is_pairs { 0 } else { x.rows() as u64 * 4 };
    let halves = VgHalvesParams {
        src: x,
        halves: b.scratch((x.rows() * length * 2 * form.planes()) as u64),
        factors: b.scratch(factors),
        codebooks,
        brain: u32::from(form == Form::Brain),
        reserved: 0,
    };
    let kernel = if is_pairs { "vg_pairs" } else { "vg_halves" };
    b.for_each_row(kernel, x.rows(), threads_for(length), 0, &halves)?;
    Ok(halves)
}
