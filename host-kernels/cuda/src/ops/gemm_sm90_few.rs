//! Matrix products of few columns on sm_90a: the launches of `kernels/gemm_sm90_few.cuh`.

use vgpu_transport::ir::Type;

use super::gemm_sm90::{convert_columns, few_kernel};
use crate::context::COUNTERS;
use crate::launch::builder::Builder;
use crate::launch::grid::{MAX_GRID_YZ, div_ceil};
use crate::params::*;
use vgpu_engine::EngineError;

/// Weight rows of a tile, and threads of a block.
const ROWS: i64 = 64;
const THREADS: u32 = 128;

/// Bytes of a row of activations in a step of 64 elements along K.
const STEP_BYTES: i64 = 128;

/// The most blocks that share K (split-K). The last one reads the partial results of all.
const MAX_SPLITS: i64 = 16;

/// A kernel for a product of few columns.
pub(crate) struct GemmSm90Few {
    kernel: &'static str,
    /// Columns of a tile.
    columns: i64,
    /// Elements of a row that a block loads at a time.
    chunk: i64,
    /// Bytes of dynamic shared memory.
    shared: u32,
}

impl GemmSm90Few {
    /// The kernel for a product on this device, if there is one. The operands must be valid for
    /// the kernels for any GPU.
    pub(crate) fn of(b: &Builder<'_>, params: &VgMulMatParams) -> Option<GemmSm90Few> {
        let VgMulMatParams { dst, w, .. } = params;
        let (kernel, columns) = few_kernel(b, params)?;
        let (ty, repacked) = w.weights()?;
        let (chunk, stride) = chunk_of(ty, repacked);
        // As `FewShared` in the kernel's file.
        let stage = chunk / 64 * columns * STEP_BYTES + ROWS * stride + 16;
        let stages = if columns > 32 { 2 } else { 3 };
        let shared = (stages * stage) as u32;
        let fits = b.max_dynamic_shared(kernel) >= shared && dst.ne[2] * dst.ne[3] <= MAX_GRID_YZ;
        fits.then_some(GemmSm90Few {
            kernel,
            columns,
            chunk,
            shared,
        })
    }

    /// Adds the launches: the conversion of activations, then the product.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks a kernel.
    pub(crate) fn multiply(
        &self,
        b: &mut Builder<'_>,
        params: &VgMulMatParams,
    ) -> Result<(), EngineError> {
        let VgMulMatParams { dst, w, .. } = *params;
        let activations = convert_columns(b, params)?;
        let batches = dst.ne[2] * dst.ne[3];
        let row_tiles = div_ceil(dst.ne[0], ROWS);
        let tiles = row_tiles * batches;
        // As many blocks as are resident at a time, each with whole chunks of K.
        let resident = b.resident_blocks(self.kernel, THREADS, self.shared)?;
        let chunks = div_ceil(w.ne[0], self.chunk);
        let splits = match tiles <= COUNTERS {
            true => resident.div_euclid(tiles).min(chunks).clamp(1, MAX_SPLITS),
            false => 1,
        };
        // No block is without a chunk.
        let splits = div_ceil(chunks, div_ceil(chunks, splits));
        let partials = match splits {
            1 => 0,
            _ => b.scratch((tiles * splits * ROWS * self.columns * 4) as u64),
        };
        let product = VgGemmSm90FewParams {
            dst,
            w,
            values: activations.values,
            row_scales: activations.row_scales,
            partials,
            counters: b.counters(),
            rows: activations.rows,
            padded: activations.padded,
            splits: splits as u32,
            has_constant_weights: u32::from(b.is_constant(&w)),
        };
        let grid = [row_tiles, splits, batches];
        b.launch_over(self.kernel, grid, THREADS, self.shared, &product)
    }
}

/// The elements of a row that are loaded at a time, and the bytes between rows in shared memory:
/// `chunk_of` and `chunk_stride` in `kernels/gemm_sm90.cuh`.
fn chunk_of(ty: Type, repacked: bool) -> (i64, i64) {
    let bytes = 256 / ty.block_elements() as i64 * ty.block_bytes() as i64;
    match ty {
        Type::F16 | Type::Bf16 => (128, 320),
        Type::Q8_0 if repacked => (256, 288),
        Type::Q6K if repacked => (256, 224),
        _ if repacked => (256, 176),
        Type::Q4K => (256, 160),
        Type::Q5K => (256, 224),
        _ => (256, (bytes + 30) / 16 * 16),
    }
}
