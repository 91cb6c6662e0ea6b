//! MUL_MAT, MUL_MAT_ID, OUT_PROD.

use vgpu_transport::ir::{Op, OpKind, Rule, Type};

use super::{READABLE, div_ceil};
use crate::cuda::params::*;
use crate::cuda::plan::{Builder, MOST_BLOCKS, threads_for};
use crate::engine::EngineError;
use crate::types::{F32, FLOATS};

/// Up to this many columns a row of weights is multiplied with each as it is read.
const FEW_COLUMNS: i64 = 8;

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
        let [m, n, ..] = dst.ne;
        let batches = dst.ne[2] * dst.ne[3];
        let has_ids = matches!(op, Op::MulMatId { .. });
        let is_outer = matches!(op, Op::OutProd {});
        let is_few = has_ids || n <= FEW_COLUMNS;
        if let (true, Some(kernels)) = (is_few && !is_outer, Tuned::vector(&params)) {
            return kernels.multiply_vectors(b, &params, has_ids);
        }
        if let (false, Some(kernels)) = (is_few || is_outer, Tuned::gemm(&params)) {
            return kernels.multiply_tiles(b, &params);
        }
        match op {
            Op::MulMatId { .. } => {
                let grid = [div_ceil(m, VECTOR_ROWS), n, dst.ne[2]];
                b.launch_over("vg_mul_mat_id", grid, 128, 0, &params)
            }
            Op::MulMat { .. } if n <= FEW_COLUMNS => {
                let grid = [div_ceil(m, VECTOR_ROWS), 1, batches];
                b.launch_over("vg_mul_vec", grid, 128, 0, &params)
            }
            _ => {
                let kernel = match op {
                    Op::MulMat { .. } => "vg_mul_mat",
                    _ => "vg_out_prod",
                };
                let grid = [div_ceil(m, TILE[0]), div_ceil(n, TILE[1]), batches];
                b.launch_over(kernel, grid, 256, 0, &params)
            }
        }
    }))
}

/// Kernels of one type of weights.
struct Tuned {
    /// For one column, and for up to eight.
    vector: &'static str,
    vectors: &'static str,
    /// For many, on tensor cores.
    gemm: &'static str,
    /// What the weights' places must be multiples of.
    alignment: i64,
}

/// Rows of weights that a block of the former works on at a time.
const VECTOR_BLOCK_ROWS: i64 = 8;

/// Blocks of them on a multiprocessor at a time.
const VECTOR_BLOCKS: i64 = 8;

/// The tile of results of a block of the latter, the elements of a step along the sum, and the bytes of shared memory.
const GEMM_TILE: [i64; 2] = [128, 128];
const GEMM_STEP: i64 = 64;
const GEMM_SHARED: i64 = 2 * (GEMM_TILE[0] + 2 * GEMM_TILE[1]) * (GEMM_STEP + 8);

impl Tuned {
    fn of(ty: Type) -> Option<Tuned> {
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
        match ty {
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
            Type::Q4K => tuned!("q4_k", 4),
            Type::Q5K => tuned!("q5_k", 4),
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

    /// The kernels for a product, if its operands lie as they want them.
    fn fitting(params: &VgMulMatParams) -> Option<(Type, Tuned)> {
        let (w, x, dst) = (&params.w, &params.x, &params.dst);
        let ty = Type::from_id(w.type_ as u8)?;
        let kernels = Tuned::of(ty)?;
        let places = [w.data as i64, w.nb[1], w.nb[2], w.nb[3]];
        let fits = w.ne[0] > 0
            && w.ne[0] % 32 == 0
            && w.nb[0] == ty.block_bytes() as i64
            && places.iter().all(|place| place % kernels.alignment == 0)
            && FLOATS.contains(Type::from_id(x.type_ as u8)?)
            && dst.ne[1] <= MOST_BLOCKS
            && dst.ne[2] * dst.ne[3] <= MOST_BLOCKS;
        fits.then_some((ty, kernels))
    }

    /// Kernels for few columns of activations of 8 bits.
    fn vector(params: &VgMulMatParams) -> Option<Tuned> {
        let (ty, kernels) = Tuned::fitting(params)?;
        ty.is_quantized().then_some(kernels)
    }

    /// Kernels for many columns.
    fn gemm(params: &VgMulMatParams) -> Option<Tuned> {
        Tuned::fitting(params).map(|(_, kernels)| kernels)
    }

    /// Adds the launches: activations to halves, then the product.
    fn multiply_tiles(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, w, x, .. } = *params;
        let length = div_ceil(x.ne[0], GEMM_STEP) * GEMM_STEP;
        let halves = VgHalvesParams {
            src: x,
            halves: b.scratch((x.rows() * length * 2) as u64),
            factors: b.scratch(x.rows() as u64 * 4),
            brain: u32::from(w.type_ == VG_BF16),
            reserved: 0,
        };
        b.for_each_row("vg_halves", x.rows(), threads_for(length), 0, &halves)?;
        let product = VgGemmParams {
            dst,
            w,
            halves: halves.halves,
            factors: halves.factors,
            codebooks: params.codebooks,
        };
        let grid = [
            div_ceil(dst.ne[0], GEMM_TILE[0]),
            div_ceil(dst.ne[1], GEMM_TILE[1]),
            dst.ne[2] * dst.ne[3],
        ];
        b.launch_over(self.gemm, grid, 256, GEMM_SHARED as u32, &product)
    }

    /// Adds the launches: activations to 8 bits, then the product.
    fn multiply_vectors(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
        has_ids: bool,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, w, x, .. } = *params;
        let blocks = x.rows() * (x.ne[0] / 32);
        let rounded = VgQuantizeParams {
            src: x,
            quants: b.scratch(blocks as u64 * 32),
            scales: b.scratch(blocks as u64 * 16),
        };
        b.for_each_row("vg_quantize", div_ceil(blocks, 4), 128, 0, &rounded)?;
        let product = VgVectorParams {
            dst,
            w,
            ids: if has_ids {
                params.ids
            } else {
                VgView::default()
            },
            quants: rounded.quants,
            scales: rounded.scales,
            codebooks: params.codebooks,
            place: params.place,
            slots: x.ne[1],
        };
        let kernel = match dst.ne[1] {
            _ if has_ids => self.vector,
            1 => self.vector,
            _ => self.vectors,
        };
        let (slots, batches) = match has_ids {
            true => (dst.ne[1], dst.ne[2]),
            false => (1, dst.ne[2] * dst.ne[3]),
        };
        // As many blocks as there is room for, each with its share of the rows.
        let most = (i64::from(b.multiprocessors()) * VECTOR_BLOCKS).div_euclid(slots * batches);
        let across = div_ceil(dst.ne[0], VECTOR_BLOCK_ROWS).min(most.max(1));
        b.launch_over(kernel, [across, slots, batches], 128, 0, &product)
    }
}
