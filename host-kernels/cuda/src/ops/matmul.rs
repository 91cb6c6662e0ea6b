//! MUL_MAT, MUL_MAT_ID, OUT_PROD.

use vgpu_transport::ir::{Op, OpKind, Precision, Rule, Type};

use super::fused::MAX_EXPERTS;
use super::gemm_sm90::GemmSm90;
use super::gemm_sm90_few::GemmSm90Few;
use super::mmv::{self, Product, Products};
use crate::device::Address;
use crate::launch::builder::Builder;
use crate::launch::grid::{MAX_GRID_YZ, div_ceil, threads_for};
use crate::launch::kernel_table::MatmulKernels;
use crate::launch::q8::{MAX_MMV_COLUMNS, MMV_COLUMNS};
use crate::params::*;
use crate::types::READABLE;
use vgpu_engine::EngineError;
use vgpu_engine::types::{F32, FLOATS};

/// The result tile of a block of `vg_mul_mat` and `vg_out_prod`: rows and columns.
const TILE: [i64; 2] = [64, 32];

/// Weight rows of a block of `vg_mul_vec` and `vg_mul_mat_id`.
const VECTOR_ROWS: i64 = 4;

pub(crate) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::MulMat, F32, &[READABLE, READABLE]),
        Rule::new(OpKind::MulMatId, F32, &[READABLE, READABLE]),
        Rule::new(OpKind::OutProd, F32, &[READABLE, FLOATS]),
    ]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
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
            site: b.fault_site(),
        };
        multiply(b, op, &params)
    }))
}

/// Adds the launches of a product.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
pub(crate) fn multiply(
    b: &mut Builder<'_>,
    op: &Op,
    params: &VgMulMatParams,
) -> Result<(), EngineError> {
    let dst = params.dst;
    let [m, n, ..] = dst.ne;
    let batches = dst.ne[2] * dst.ne[3];
    let has_ids = matches!(op, Op::MulMatId { .. });
    let is_outer = matches!(op, Op::OutProd {});
    let is_few = has_ids || n <= MAX_MMV_COLUMNS;
    let takes_gemm = !has_ids && !is_outer && n > MMV_COLUMNS;
    let demand = op.activation_precision();
    // From the fastest kernel to the simplest, each if it takes the operands and may be used.
    if has_ids && dst.ne[2] > MMV_COLUMNS && takes_groups(params) && b.has("vg_moe_sort") {
        if let Some(sm90) = sm90(b, params, demand) {
            return sm90.multiply_groups(b, params);
        }
        if let Some(gemm) = Gemm::of(b, params, demand) {
            return gemm.multiply_groups(b, params);
        }
    }
    if takes_gemm && let Some(few) = few(b, params, demand) {
        return few.multiply(b, params);
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
            q8: None,
            ids: if has_ids { ids } else { VgView::default() },
            products: &[product],
            unit: None,
        };
        if let Some(added) = mmv::products(b, &products) {
            return added;
        }
    }
    if takes_gemm {
        if let Some(sm90) = sm90(b, params, demand) {
            return sm90.multiply(b, params);
        }
        if let Some(gemm) = Gemm::of(b, params, demand) {
            return gemm.multiply_tiles(b, params);
        }
    }
    // The remaining kernels read plain weights element by element.
    if params.w.is_repacked() {
        b.refuse(&params.w);
        return Ok(());
    }
    match op {
        Op::MulMatId { .. } => {
            let grid = [div_ceil(m, VECTOR_ROWS), n, dst.ne[2]];
            b.launch_over("vg_mul_mat_id", grid, 128, 0, params)
        }
        Op::MulMat { .. } if n <= MMV_COLUMNS => {
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

/// The result tile of a block of the tensor-core kernels, and the elements of a step along K.
const GEMM_TILE: [i64; 2] = [128, 128];
const GEMM_STEP: i64 = 64;

/// The number format of weights and activations on tensor cores.
#[derive(Clone, Copy, PartialEq)]
enum Operand {
    /// F16, with a scale for each row of activations.
    F16,
    /// BF16.
    Bf16,
    /// f32 split into two BF16 numbers.
    SplitF32,
}

impl Operand {
    /// 16-bit numbers for each element.
    fn words(self) -> i64 {
        match self {
            Operand::SplitF32 => 2,
            _ => 1,
        }
    }

    /// The kernel that converts activations.
    fn conversion(self) -> &'static str {
        match self {
            Operand::SplitF32 => "vg_split_bf16",
            _ => "vg_convert_f16",
        }
    }
}

/// The sm_90a kernels for a product, if the device has them.
fn sm90(b: &Builder<'_>, params: &VgMulMatParams, demand: Precision) -> Option<GemmSm90> {
    typed_gemm(params, demand)?;
    GemmSm90::of(b, params)
}

/// The sm_90a kernel for a product of few columns, if the device has it.
fn few(b: &Builder<'_>, params: &VgMulMatParams, demand: Precision) -> Option<GemmSm90Few> {
    typed_gemm(params, demand)?;
    GemmSm90Few::of(b, params)
}

/// Whether the kernels on tensor cores can index the operands of a product.
fn fits_gemm(params: &VgMulMatParams) -> bool {
    let VgMulMatParams { dst, w, x, .. } = params;
    w.ne[0] > 0
        && x.rows() <= i64::from(i32::MAX)
        && dst.ne[1] <= MAX_GRID_YZ
        && dst.ne[2] * dst.ne[3] <= MAX_GRID_YZ
}

/// The kernel of the weight type for a product of many columns, if the weights are aligned for it.
/// `demand`: the smallest type that the node allows for activations. Where it is F32 or BF16, there
/// is none for weights of F16, and where it is F32, none for those of BF16. Quantised weights keep
/// theirs, whose activations are F16 with a scale for each row.
fn typed_gemm(params: &VgMulMatParams, demand: Precision) -> Option<Gemm> {
    let VgMulMatParams { w, x, .. } = params;
    let (ty, kernels) = MatmulKernels::of_vectors(w)?;
    let fits = fits_gemm(params)
        && ty != Type::F32
        && (ty.is_quantized()
            || !demand.needs_f32_range()
            || (ty, demand) == (Type::Bf16, Precision::Bf16))
        && kernels.takes_weights(w, ty)
        && FLOATS.contains(Type::from_id(x.type_ as u8)?);
    fits.then_some(Gemm {
        kernel: kernels.gemm,
        operand: match ty {
            Type::Bf16 => Operand::Bf16,
            _ => Operand::F16,
        },
    })
}

/// A tensor-core kernel for many columns.
struct Gemm {
    kernel: &'static str,
    operand: Operand,
}

impl Gemm {
    /// The kernel for a product on any GPU: that of the weight type, else one with split f32.
    fn of(b: &Builder<'_>, params: &VgMulMatParams, demand: Precision) -> Option<Gemm> {
        let is_usable = |gemm: &Gemm| b.has(gemm.kernel) && b.has(gemm.operand.conversion());
        let VgMulMatParams { w, .. } = params;
        if let Some(gemm) = typed_gemm(params, demand).filter(is_usable) {
            return Some(gemm);
        }
        if w.is_repacked() || !fits_gemm(params) {
            return None;
        }
        // Rows are read to their end in units of 16 bytes.
        let address_and_strides = [w.data as i64, w.nb[1], w.nb[2], w.nb[3], 4 * w.ne[0]];
        let is_dense = w.type_ == VG_F32
            && w.nb[0] == 4
            && address_and_strides.iter().all(|bytes| bytes % 16 == 0);
        let kernels = is_dense.then_some("vg_gemm_f32").into_iter();
        let operand = Operand::SplitF32;
        { kernels.chain(["vg_gemm_any"]) }
            .map(|kernel| Gemm { kernel, operand })
            .find(is_usable)
    }

    /// Adds the launches: the conversion of activations, then the product.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks a kernel.
    fn multiply_tiles(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, w, x, .. } = *params;
        let converted = convert_activations(b, x, params.codebooks, self.operand)?;
        let product = VgGemmParams {
            dst,
            w,
            values: converted.values,
            row_scales: converted.row_scales,
            codebooks: params.codebooks,
            moe_order: 0,
            slots: x.ne[1],
        };
        let grid = [
            div_ceil(dst.ne[0], GEMM_TILE[0]),
            div_ceil(dst.ne[1], GEMM_TILE[1]),
            dst.ne[2] * dst.ne[3],
        ];
        b.launch_over(self.kernel, grid, 256, self.shared(), &product)
    }

    /// Bytes of dynamic shared memory of a block: weights of one step, activations of two.
    fn shared(&self) -> u32 {
        let words = self.operand.words();
        let row = 2 * (GEMM_STEP / words + 8);
        (words * (GEMM_TILE[0] + 2 * GEMM_TILE[1]) * row) as u32
    }

    /// Adds the launches: the conversion of activations, the sort of slots by expert, then the
    /// product of each expert's weights with its columns.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks a kernel.
    fn multiply_groups(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, w, x, ids, .. } = *params;
        let converted = convert_activations(b, x, params.codebooks, self.operand)?;
        let (vectors, experts) = (dst.ne[1] * dst.ne[2], w.ne[2]);
        let moe_order = VgMoeSortParams {
            ids: VgView {
                ne: [dst.ne[1], dst.ne[2], 1, 1],
                ..ids
            },
            moe_order: b.scratch((2 * (experts + 1) + vectors) as u64 * 4),
            site: params.site,
            experts: experts as u32,
            columns: GEMM_TILE[1] as u32,
            align: 1,
            reserved: 0,
        };
        b.launch("vg_moe_sort", [1, 1, 1], 512, 0, &moe_order)?;
        let product = VgGemmParams {
            dst,
            w,
            values: converted.values,
            row_scales: converted.row_scales,
            codebooks: params.codebooks,
            moe_order: moe_order.moe_order,
            slots: x.ne[1],
        };
        let grid = [
            div_ceil(dst.ne[0], GEMM_TILE[0]),
            max_tiles(vectors, experts),
            1,
        ];
        b.launch_over(self.kernel, grid, 256, self.shared(), &product)
    }
}

/// Whether the slots of tokens can be sorted by expert.
fn takes_groups(params: &VgMulMatParams) -> bool {
    let VgMulMatParams { dst, w, ids, .. } = params;
    let vectors = dst.ne[1] * dst.ne[2];
    ids.type_ == VG_I32
        && w.ne[2] <= MAX_EXPERTS
        && w.ne[3] == 1
        && dst.ne[3] == 1
        && vectors <= i64::from(i32::MAX)
        && max_tiles(vectors, w.ne[2]) <= MAX_GRID_YZ
}

/// The most column tiles that `vectors` columns fill, distributed among experts in any way.
fn max_tiles(vectors: i64, experts: i64) -> i64 {
    (vectors / GEMM_TILE[1] + experts).min(vectors)
}

/// Adds the launch that converts activations.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn convert_activations(
    b: &mut Builder<'_>,
    x: VgView,
    codebooks: Address,
    operand: Operand,
) -> Result<VgConvertF16Params, EngineError> {
    let length = div_ceil(x.ne[0], GEMM_STEP) * GEMM_STEP;
    let is_split = operand == Operand::SplitF32;
    let row_scales = if is_split { 0 } else { x.rows() as u64 * 4 };
    let params = VgConvertF16Params {
        src: x,
        values: b.scratch((x.rows() * length * 2 * operand.words()) as u64),
        row_scales: b.scratch(row_scales),
        codebooks,
        is_bf16: u32::from(operand == Operand::Bf16),
        reserved: 0,
    };
    b.for_each_row(
        operand.conversion(),
        x.rows(),
        threads_for(length),
        0,
        &params,
    )?;
    Ok(params)
}
