//! Matrix products of many columns on sm_90a: the launches of `kernels/gemm_sm90.cuh`.

use vgpu_transport::ir::Type;
use zerocopy::IntoBytes;

use crate::autotune::GemmVariant;
use crate::launch::builder::Builder;
use crate::launch::grid::{div_ceil, threads_for};
use crate::params::*;
use vgpu_engine::EngineError;

/// Bytes of dynamic shared memory of a block: the opt-in limit of compute capability 9.0.
const SHARED: u32 = 227 << 10;

/// Threads of a block: three warpgroups.
const THREADS: u32 = 384;

/// Weight rows of a tile.
const ROWS: i64 = 128;

/// Bytes of a row of activations in one step along K.
const STEP_BYTES: i64 = 128;

/// Elements of two steps along K, which alternate.
const STEPS: i64 = 128;

/// Rows of activations in a swizzle unit.
const UNIT: i64 = 8;

/// The fewest columns, of experts or where no kernel for few columns may be used.
const MIN_COLUMNS: i64 = 33;

/// The most elements of a weight row: kernels index its bytes with 32 bits.
const MAX_ELEMENTS: i64 = 1 << 28;

/// The kernels of a weight type, by the columns of a tile.
struct Kernels {
    wide: &'static str,
    narrow: &'static str,
    /// Those of [`gemm_sm90_few`](super::gemm_sm90_few), by [`FEW_COLUMNS`].
    few: [&'static str; 3],
}

/// The columns of the kernels for few columns.
const FEW_COLUMNS: [i64; 3] = [16, 32, 64];

/// The kernels for a product of many columns.
pub(crate) struct GemmSm90 {
    wide: &'static str,
    narrow: &'static str,
    /// Whether the wide and the narrow one may be used.
    usable: [bool; 2],
    /// The variant from the tuning table, if it has one.
    measured: Option<GemmVariant>,
}

/// Columns of a tile.
const WIDE: i64 = 256;
const NARROW: i64 = 128;

/// The cost of a wide tile relative to two narrow ones: weights are unpacked once.
const WIDE_SHARE: f64 = 0.9;

/// The type of the weights and its kernels, if they read weights with this layout.
fn kernels_of(w: &VgView) -> Option<(Type, Kernels)> {
    macro_rules! kernels {
        ($type:literal) => {
            Kernels {
                wide: concat!("vg_gemm_sm90_", $type, "_256"),
                narrow: concat!("vg_gemm_sm90_", $type, "_128"),
                few: [
                    concat!("vg_gemm_sm90_", $type, "_16"),
                    concat!("vg_gemm_sm90_", $type, "_32"),
                    concat!("vg_gemm_sm90_", $type, "_64"),
                ],
            }
        };
    }
    // Rows of these types are copied as they are; rows of other types are copied in whole units of
    // 16 bytes.
    let is_aligned = [w.data as i64, w.nb[1], w.nb[2], w.nb[3]]
        .iter()
        .all(|offset| offset % 16 == 0);
    let (ty, repacked) = w.weights()?;
    let kernels = match ty {
        Type::Q4_0 if repacked => kernels!("q4_0_repacked"),
        Type::Q8_0 if repacked => kernels!("q8_0_repacked"),
        Type::Mxfp4 if repacked => kernels!("mxfp4_repacked"),
        Type::Iq4Nl if repacked => kernels!("iq4_nl_repacked"),
        Type::Q6K if repacked => kernels!("q6_k_repacked"),
        _ if repacked => return None,
        Type::F16 if is_aligned => kernels!("f16"),
        Type::Bf16 if is_aligned => kernels!("bf16"),
        Type::Q4K if is_aligned => kernels!("q4_k"),
        Type::Q5K if is_aligned => kernels!("q5_k"),
        Type::Q2K => kernels!("q2_k"),
        Type::Q3K => kernels!("q3_k"),
        Type::Q4_0 => kernels!("q4_0"),
        Type::Q4_1 => kernels!("q4_1"),
        Type::Q5_0 => kernels!("q5_0"),
        Type::Q5_1 => kernels!("q5_1"),
        Type::Q6K => kernels!("q6_k"),
        Type::Q8_0 => kernels!("q8_0"),
        Type::Iq4Nl => kernels!("iq4_nl"),
        Type::Iq4Xs => kernels!("iq4_xs"),
        Type::Mxfp4 => kernels!("mxfp4"),
        _ => return None,
    };
    Some((ty, kernels))
}

/// Whether kernels for sm_90a can index the operands of a product of this many columns.
fn fits(b: &Builder<'_>, params: &VgMulMatParams, columns: i64) -> bool {
    let VgMulMatParams { dst, w, x, ids, .. } = params;
    let Some(tiles) = div_ceil(dst.ne[0], ROWS).checked_mul(columns) else {
        return false;
    };
    // The results of experts are written as columns of one matrix.
    let is_plain = dst.nb[0] == 4 && (ids.data == 0 || dst.nb[2] == dst.ne[1] * dst.nb[1]);
    b.is_sm90()
        && is_plain
        && b.has("vg_convert_f16_sm90")
        && w.ne[0] <= MAX_ELEMENTS
        && tiles <= i64::from(i32::MAX)
        && columns + x.rows() + UNIT * (w.rows() + dst.ne[2] * dst.ne[3]) <= i64::from(i32::MAX)
}

/// The kernel for a product of few columns without experts, and the columns of its tile, if there
/// is one.
pub(crate) fn few_kernel(b: &Builder<'_>, params: &VgMulMatParams) -> Option<(&'static str, i64)> {
    let VgMulMatParams { dst, w, ids, .. } = params;
    let (_, kernels) = kernels_of(w)?;
    let (kernel, columns) = { kernels.few.into_iter().zip(FEW_COLUMNS) }
        .find(|(kernel, columns)| dst.ne[1] <= *columns && b.has(kernel))?;
    (ids.data == 0 && fits(b, params, dst.rows())).then_some((kernel, columns))
}

impl GemmSm90 {
    /// The kernels for a product on this device, if there are any. The operands must be valid for
    /// the kernels for any GPU.
    pub(crate) fn of(b: &Builder<'_>, params: &VgMulMatParams) -> Option<GemmSm90> {
        let VgMulMatParams { dst, w, ids, .. } = params;
        let (ty, kernels) = kernels_of(w)?;
        let columns = dst.rows();
        let Kernels { wide, narrow, .. } = kernels;
        let usable = [wide, narrow].map(|kernel| b.max_dynamic_shared(kernel) >= SHARED);
        let fits = usable != [false; 2] && columns >= MIN_COLUMNS && fits(b, params, columns);
        // Only products without experts were measured.
        let measured = match ids.data {
            0 => b.tuned_variant(ty, dst.ne[0], columns),
            _ => None,
        };
        (fits && measured != Some(GemmVariant::General)).then_some(GemmSm90 {
            wide,
            narrow,
            usable,
            measured,
        })
    }

    /// Whether the wide kernel is used, if it is wanted or not, and may be.
    fn is_wide(&self, is_wanted: bool) -> bool {
        match self.usable {
            [true, true] => is_wanted,
            [has_wide, _] => has_wide,
        }
    }

    /// Adds the launches of a product: the conversion of activations, then the product.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks a kernel.
    pub(crate) fn multiply(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, .. } = params;
        let batches = dst.ne[2] * dst.ne[3];
        let tiles_of = |columns| div_ceil(dst.ne[0], ROWS) * div_ceil(dst.ne[1], columns) * batches;
        let units = i64::from(b.sm_count());
        let rounds = |columns| div_ceil(tiles_of(columns), units) as f64;
        let is_wide = self.is_wide(match self.measured {
            Some(variant) => variant == GemmVariant::Wide,
            None => rounds(WIDE) * 2.0 * WIDE_SHARE <= rounds(NARROW),
        });
        let tiles = tiles_of(if is_wide { WIDE } else { NARROW });
        let activations = convert_columns(b, params)?;
        self.launch(b, params, &activations, is_wide, tiles)
    }

    /// The same for products with experts: the slots of tokens are sorted by expert.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks a kernel.
    pub(crate) fn multiply_groups(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, w, .. } = params;
        let (vectors, experts) = (dst.ne[1] * dst.ne[2], w.ne[2]);
        let is_wide = self.is_wide(vectors / experts >= WIDE);
        let columns = if is_wide { WIDE } else { NARROW };
        // The columns of each expert begin at a swizzle unit.
        let activations = VgConvertF16Sm90Params {
            rows: div_ceil(vectors + (UNIT - 1) * experts, UNIT) * UNIT,
            experts: experts as u32,
            slots: dst.ne[1] as u32,
            ..VgConvertF16Sm90Params::default()
        };
        let activations = convert_activations(b, params, activations, columns)?;
        let tiles = div_ceil(dst.ne[0], ROWS) * (vectors / columns + experts).min(vectors);
        self.launch(b, params, &activations, is_wide, tiles)
    }

    /// Adds the launch of a product of at most `tiles` tiles.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks a kernel.
    fn launch(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
        activations: &VgConvertF16Sm90Params,
        is_wide: bool,
        tiles: i64,
    ) -> Result<(), EngineError> {
        let product = VgGemmSm90Params {
            dst: params.dst,
            w: params.w,
            values: activations.values,
            row_scales: activations.row_scales,
            moe_order: activations.moe_order,
            rows: activations.rows,
            padded: activations.padded,
        };
        let kernel = if is_wide { self.wide } else { self.narrow };
        let blocks = tiles.min(b.sm_count().into());
        b.launch_over(kernel, [blocks, 1, 1], THREADS, SHARED, &product)
    }
}

/// Adds the launch that converts the activations of a product without experts.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
pub(crate) fn convert_columns(
    b: &mut Builder<'_>,
    params: &VgMulMatParams,
) -> Result<VgConvertF16Sm90Params, EngineError> {
    let VgMulMatParams { dst, .. } = params;
    let padded = div_ceil(dst.ne[1], UNIT) * UNIT;
    let layout = VgConvertF16Sm90Params {
        rows: padded * dst.ne[2] * dst.ne[3],
        padded,
        ..VgConvertF16Sm90Params::default()
    };
    convert_activations(b, params, layout, 0)
}

/// Adds the launches that convert the activations of a product, sorted by expert if `columns`, the
/// columns of an expert's tile, is not 0. Returns cached activations if there are any. `layout` has
/// the number of rows.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn convert_activations(
    b: &mut Builder<'_>,
    params: &VgMulMatParams,
    layout: VgConvertF16Sm90Params,
    columns: i64,
) -> Result<VgConvertF16Sm90Params, EngineError> {
    let VgMulMatParams { w, x, ids, .. } = params;
    let is_grouped = columns != 0;
    let ids = if is_grouped { *ids } else { VgView::default() };
    let steps = 2 * div_ceil(w.ne[0], STEPS);
    let mut made = VgConvertF16Sm90Params {
        src: *x,
        is_bf16: u32::from(w.type_ == VG_BF16),
        steps: steps as u32,
        ..layout
    };
    let mut key = made.as_bytes().to_vec();
    key.extend(ids.as_bytes());
    key.extend(columns.to_le_bytes());
    if let Some(found) = b.cached_f16(&key) {
        return Ok(found);
    }
    let experts = i64::from(layout.experts);
    let sizes = [
        layout.rows * steps * STEP_BYTES,
        layout.rows * 4,
        if is_grouped {
            (2 * (experts + 1) + layout.rows) * 4
        } else {
            0
        },
    ];
    // Each part is aligned for any type.
    let [values, row_scales, moe_order] = sizes.map(|bytes| (bytes as u64).next_multiple_of(256));
    let reserved = b.reserve_f16(values + row_scales + moe_order);
    let at = |offset| b.f16_address(&reserved.0, offset);
    (made.values, made.row_scales) = (at(0), at(values));
    if is_grouped {
        made.moe_order = at(values + row_scales);
        let moe_order = VgMoeSortParams {
            ids: VgView {
                ne: [params.dst.ne[1], params.dst.ne[2], 1, 1],
                ..ids
            },
            moe_order: made.moe_order,
            site: params.site,
            experts: layout.experts,
            columns: columns as u32,
            align: UNIT as u32,
            reserved: 0,
        };
        b.launch("vg_moe_sort", [1, 1, 1], 512, 0, &moe_order)?;
    }
    b.for_each_row(
        "vg_convert_f16_sm90",
        made.rows,
        threads_for(w.ne[0]),
        0,
        &made,
    )?;
    b.cache_f16(key, &[x, &ids], reserved, made);
    Ok(made)
}
