//! Matrix-vector products: up to 64 columns, eight for each block, up to three products of the same
//! activations in one launch, and a gated unit behind two (`kernels/mmv.cuh`).

use vgpu_transport::ir::Type;

use crate::launch::builder::Builder;
use crate::launch::grid::{MAX_GRID_YZ, MMV_BLOCK_PAIRS, MMV_THREADS, div_ceil, mmv_blocks_across};
use crate::launch::kernel_table::MatmulKernels;
use crate::launch::q8::{MAX_MMV_COLUMNS, MMV_COLUMNS, Q8Activations, q8_elements};
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::types::FLOATS;

/// The fewest tiles of a row that the warps of a block share.
const SPLIT_TILES: i64 = 4;

/// Elements of a tile: a KiB of floats, or the tile of q8 activations (`kernels/mmv.cuh`).
fn tile_elements(ty: Type) -> i64 {
    match ty.is_quantized() {
        true => 1024,
        false => 1024 / ty.block_bytes() as i64,
    }
}

/// The most products of a launch.
pub(crate) const MAX_PRODUCTS: usize = 3;

/// A product with `w` in `dst`, plus `add` if there is one. `add` has the lengths of `dst`, or one
/// row for all columns, or with expert ids one row for each expert. All but the weights are f32.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    /// The result. With a gated unit: the result of the unit, in the first product only.
    pub(crate) dst: VgView,
    /// The weights.
    pub(crate) w: VgView,
    /// The bias.
    pub(crate) add: VgView,
}

/// One to three products of the same activations.
pub(crate) struct Products<'a> {
    /// The activations.
    pub(crate) x: VgView,
    /// The q8 activations, if they exist already.
    pub(crate) q8: Option<Q8Activations>,
    /// The expert of each slot of a token, if the weights are experts.
    pub(crate) ids: VgView,
    /// The products, whose weights have the same type and row length.
    pub(crate) products: &'a [Product],
    /// A unit of the first of two products, gated by the second: REGLU, GEGLU, SWIGLU, or
    /// SWIGLU_OAI with alpha and limit.
    pub(crate) unit: Option<(VgElementwiseOp, [f32; 2])>,
}

/// Quantises activations to q8, unless the cache has them.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
pub(crate) fn quantize(b: &mut Builder<'_>, x: VgView) -> Result<Q8Activations, EngineError> {
    if let Some(q8) = b.cached_q8(&x) {
        return Ok(q8);
    }
    let blocks = x.rows() * (x.ne[0] / 32);
    let elements = q8_elements(&x) as u64;
    let activations = b.reserve_q8(&x, false).unwrap_or_else(|| Q8Activations {
        quants: b.scratch(elements),
        scales: b.scratch(elements / 2),
    });
    let params = VgQuantizeQ8Params {
        src: x,
        quants: activations.quants,
        scales: activations.scales,
    };
    b.for_each_row("vg_quantize_q8", div_ceil(blocks, 4), 128, 0, &params)?;
    Ok(Q8Activations {
        quants: params.quants,
        scales: params.scales,
    })
}

/// Adds the launch, and before it the quantisation of the activations if needed. `None` if the
/// kernels do not take these products or may not be used; then nothing was added.
pub(crate) fn products(b: &mut Builder<'_>, all: &Products<'_>) -> Option<Result<(), EngineError>> {
    let (ty, kernels) = fitting(all)?;
    let quantizes = ty.is_quantized() && all.q8.is_none();
    let kernel = kernel_for(all, &kernels);
    let is_usable = b.has(kernel) && (!quantizes || b.has("vg_quantize_q8"));
    is_usable.then(|| launch(b, all, ty, kernel))
}

/// The kernel for the columns of these products.
fn kernel_for(all: &Products<'_>, kernels: &MatmulKernels) -> &'static str {
    match all.products[0].dst.ne[1] {
        _ if all.ids.data != 0 => kernels.vector,
        1 => kernels.vector,
        _ => kernels.vectors,
    }
}

/// The most columns of products with weights of this type. Floats are multiplied as f32, many times
/// slower than on tensor cores.
fn max_columns(ty: Type) -> i64 {
    match ty.is_quantized() {
        true => MAX_MMV_COLUMNS,
        false => 2 * MMV_COLUMNS,
    }
}

/// The weight type and its kernels, if they take these products.
fn fitting(all: &Products<'_>) -> Option<(Type, MatmulKernels)> {
    let Products { x, ids, .. } = all;
    let (first, more) = all.products.split_first()?;
    let (ty, kernels) = MatmulKernels::of_vectors(&first.w)?;
    let has_ids = ids.data != 0;
    let f32s = |v: &VgView| v.type_ == VG_F32;
    let alike = |it: &Product| {
        let batches = [it.dst.ne[2], it.dst.ne[3]];
        it.w.type_ == first.w.type_
            && it.w.ne[0] == first.w.ne[0]
            && it.w.ne[1] == it.dst.ne[0]
            && it.dst.ne[1..] == first.dst.ne[1..]
            && it.w.ne[2..] == first.w.ne[2..]
            && batches
                .iter()
                .zip(&it.w.ne[2..])
                .all(|(n, of)| has_ids || n % of == 0)
            && f32s(&it.dst)
            && (it.add.data == 0 || f32s(&it.add) && fits_on(&it.add, &it.dst, has_ids, &it.w))
            && kernels.takes_weights(&it.w, ty)
    };
    let unit_fits = match all.unit {
        Some((unit, _)) => {
            more.len() == 1
                && more[0].w.ne == first.w.ne
                && [VG_OP_REGLU, VG_OP_GEGLU, VG_OP_SWIGLU, VG_OP_SWIGLU_OAI].contains(&unit)
        }
        None => more.len() < MAX_PRODUCTS,
    };
    let is_few = match has_ids {
        true => ids.type_ == VG_I32 && first.dst.ne[3] == 1 && x.ne[2] == first.dst.ne[2],
        false => first.dst.ne[1] <= max_columns(ty) && x.ne[1..] == first.dst.ne[1..],
    };
    let x_fits = match ty.is_quantized() {
        true => FLOATS.contains(Type::from_id(x.type_ as u8)?),
        false => {
            let address_and_strides = [x.data as i64, x.nb[1], x.nb[2], x.nb[3]];
            f32s(x) && x.nb[0] == 4 && address_and_strides.iter().all(|bytes| bytes % 16 == 0)
        }
    };
    let fits = unit_fits
        && is_few
        && x_fits
        && x.ne[0] == first.w.ne[0]
        && all.products.iter().all(alike)
        && first.dst.ne[1] <= MAX_GRID_YZ
        && first.dst.ne[2] * first.dst.ne[3] <= MAX_GRID_YZ;
    fits.then_some((ty, kernels))
}

/// Whether `add` has an element for each element of `dst`.
fn fits_on(add: &VgView, dst: &VgView, has_ids: bool, w: &VgView) -> bool {
    let wanted = match has_ids {
        true => add.ne[1] == w.ne[2] && add.ne[2..] == [1, 1],
        false => (1..4).all(|d| add.ne[d] == 1 || add.ne[d] == dst.ne[d]),
    };
    wanted && add.ne[0] == dst.ne[0]
}

/// Adds the launch of matrix-vector products.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn launch(
    b: &mut Builder<'_>,
    all: &Products<'_>,
    ty: Type,
    kernel: &'static str,
) -> Result<(), EngineError> {
    let q8 = match all.q8 {
        Some(q8) => q8,
        None if ty.is_quantized() => quantize(b, all.x)?,
        None => Q8Activations {
            quants: 0,
            scales: 0,
        },
    };
    let mut params = VgMmvParams {
        x: all.x,
        ids: all.ids,
        quants: q8.quants,
        scales: q8.scales,
        codebooks: b.codebooks(),
        site: b.fault_site(),
        slots: all.x.ne[1],
        count: all.products.len() as u32,
        unit: VG_OP_ADD,
        has_constant_weights: u32::from(all.products.iter().all(|it| b.is_constant(&it.w))),
        ..VgMmvParams::default()
    };
    for (to, &Product { dst, w, add }) in params.products.iter_mut().zip(all.products) {
        *to = VgProduct { dst, w, add };
    }
    let mut pairs: i64 = { all.products.iter() }
        .map(|it| div_ceil(it.dst.ne[0], 2))
        .sum();
    let dst = &all.products[0].dst;
    if let Some((unit, c)) = all.unit {
        (params.unit, params.c) = (unit, c);
        pairs = dst.ne[0];
    }
    let (slots, batches) = match all.ids.data != 0 {
        true => (dst.ne[1], dst.ne[2]),
        false => (div_ceil(dst.ne[1], MMV_COLUMNS), dst.ne[2] * dst.ne[3]),
    };
    // As many blocks as are resident at a time; each loops over its share of the rows.
    let resident = b.resident_blocks(kernel, MMV_THREADS, 0)?;
    let most = resident.div_euclid(slots * batches);
    // With few pairs of rows, the warps of a block share one. The stages of a megakernel do not,
    // and the order of sums is the same in both.
    let has_tiles = all.x.ne[0] > (SPLIT_TILES - 1) * tile_elements(ty);
    let splits_rows =
        has_tiles && 2 * div_ceil(pairs, MMV_BLOCK_PAIRS) <= most && !b.uses_megakernel();
    params.splits_rows = u32::from(splits_rows);
    let across = mmv_blocks_across(pairs, most, splits_rows);
    b.launch_over(kernel, [across, slots, batches], MMV_THREADS, 0, &params)
}
