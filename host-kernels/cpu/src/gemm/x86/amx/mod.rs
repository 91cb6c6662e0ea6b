//! Products of many columns with AMX: tiles of bfloat16, summed in single precision.
//!
//! Weights of any type are unpacked to bfloat16, once for all columns of a call, and multiplied
//! with activations in bfloat16 ([`MatmulKernel::rounded`](crate::gemm::MatmulKernel::rounded) says
//! how exact that is). No scale is left to be applied to partial sums, so a sum stays in its tile
//! for [`DEPTH`] elements. Tiles of bytes would multiply twice as many elements at once, but blocks
//! of 32 weights have a scale each: their sums would leave the tiles after half an operation.
//!
//! The order of a sum depends on `k` alone: the instruction sums even and odd elements of a step
//! apart, and steps follow one another. So a result does not depend on the columns and rows beside
//! it.

mod pairs;
mod tile;

use std::arch::x86_64::_MM_HINT_T0;
use std::ops::Range;

use pairs::PairWeights;
use tile::{Block, MAX_SIDE, Shape, TileConfig};

use super::int_simd::prefetch_line;
use crate::gemm::kernel::GemmArgs;
use crate::gemm::limits::CHUNK_BYTES;
use crate::gemm::thread_memory::PREPARED;

pub(super) use pairs::{BytePanel, Bytes, PAIR_ROWS};

/// From this many columns on, a product with F16 or BF16 is faster with AMX than with AVX-512: 1.9
/// times with 32 columns (`cargo bench -p vgpu-cpu --bench gemm -- --level amx --beside avx512`).
pub(super) const FLOAT_COLUMNS: usize = 32;
/// The same for formats with blocks, which cost more to unpack: 0.8 to 0.9 times with 32 columns,
/// 1.1 to 1.2 times with 64.
pub(super) const BLOCK_FORMAT_COLUMNS: usize = 64;
/// `k` is a multiple of this: the elements that a tile multiplies at once.
pub(super) const STEP: usize = 32;
/// The elements of `k` that are multiplied at once: the unpacked weights of [`PAIR_ROWS`] rows stay
/// in the L1 cache, beside the activations of the columns of a tile.
const DEPTH: usize = 256;
/// Rows of a block.
const BLOCK_ROWS: usize = 256;
/// Columns of a block.
pub(super) const BLOCK_COLUMNS: usize = 512;

// What a call takes of the thread's memory is announced for any number of columns.
const _: () =
    assert!(size_of::<Unpacked>() + BLOCK_ROWS * BLOCK_COLUMNS * size_of::<f32>() <= CHUNK_BYTES);

/// Bytes of a column of `k` activations: an odd number of cache lines.
pub(in crate::gemm) const fn column_bytes(k: usize) -> usize {
    const LINE: usize = 64;
    ((size_of::<u16>() * k).div_ceil(LINE) | 1) * LINE
}

/// The unpacked weights of [`PAIR_ROWS`] rows: for each two elements of `k`, those of each row.
type Unpacked = [[u32; PAIR_ROWS]; DEPTH / 2];

/// Multiplies columns of BF16 with weights that are unpacked to BF16.
///
/// The order of loops: blocks of columns and rows whose sums and activations fit the L2 cache,
/// chunks of `k`, rows that are unpacked together, columns. The sums are kept apart from `dst`
/// until the last chunk, because columns of `dst` are often a power of two apart.
///
/// # Safety
/// As [`crate::gemm::Gemm`], without a table. `k` is a multiple of [`STEP`], and not 0. The columns
/// are those of [`Activation::Tiles`](crate::gemm::Activation::Tiles). The processor has AVX-512
/// with BF16, and the instructions of [`Level::Amx`](crate::isa::Level::Amx).
#[inline(always)]
pub(super) unsafe fn gemm<W: PairWeights>(call: &GemmArgs) {
    const { assert!(DEPTH.is_multiple_of(W::CHUNK) && W::CHUNK.is_multiple_of(STEP)) }
    debug_assert!(call.table.is_none() && call.k.is_multiple_of(STEP) && call.k > 0);
    let panels = call.rows.min(BLOCK_ROWS).div_ceil(PAIR_ROWS);
    let panel_sums = call.cols.min(BLOCK_COLUMNS) * PAIR_ROWS;
    let sum_bytes = panels * panel_sums * size_of::<f32>();
    let mut memory = PREPARED.take(size_of::<Unpacked>() + sum_bytes);
    let unpacked = memory.as_mut_ptr().cast::<[u32; PAIR_ROWS]>();
    let mut weights = W::new();
    let mut config = TileConfig::new();
    for first_column in (0..call.cols).step_by(BLOCK_COLUMNS) {
        let columns = BLOCK_COLUMNS.min(call.cols - first_column);
        for first_row in (0..call.rows).step_by(BLOCK_ROWS) {
            let end_row = call.rows.min(first_row + BLOCK_ROWS);
            for start in (0..call.k).step_by(DEPTH) {
                let depth = DEPTH.min(call.k - start);
                for row in (first_row..end_row).step_by(PAIR_ROWS) {
                    // SAFETY: the chunks end at or before `start + depth <= k`, and `row <
                    // call.rows`. Each writes `len / 2` pairs from pair `chunk / 2` on, inside the
                    // memory of `DEPTH / 2` pairs. The caller guarantees the contract of `Gemm` and
                    // the instructions.
                    unsafe {
                        for chunk in (0..depth).step_by(W::CHUNK) {
                            let len = W::CHUNK.min(depth - chunk);
                            let to = unpacked.add(chunk / 2);
                            weights.unpack(call, row, start + chunk, len, to);
                        }
                    }
                    prefetch_next::<W>(call, first_row..end_row, row, start);
                    let panel = (row - first_row) / PAIR_ROWS;
                    // SAFETY: the memory has `panels` times `panel_sums` sums behind the unpacked
                    // weights, and `panel < panels`.
                    let sums = unsafe {
                        unpacked
                            .add(DEPTH / 2)
                            .cast::<f32>()
                            .add(panel * panel_sums)
                    };
                    let part = Part {
                        row,
                        first_column,
                        columns,
                        start,
                        depth,
                    };
                    // SAFETY: `unpacked` has the pairs of `depth` elements of the rows from `row`
                    // on. `sums` has `PAIR_ROWS` sums for each of `columns` columns, written for
                    // the chunk before. `part` is inside the product: `depth` is a multiple of
                    // `STEP`, as `k` and `DEPTH` are. The caller guarantees the rest.
                    unsafe { multiply_part(call, part, unpacked, sums, &mut config) }
                }
            }
        }
    }
    drop(config);
    PREPARED.give_back(memory);
}

/// The rows that are unpacked, the columns of a block, and a chunk of `k`.
#[derive(Clone, Copy)]
struct Part {
    row: usize,
    first_column: usize,
    columns: usize,
    start: usize,
    depth: usize,
}

/// Multiplies unpacked weights with the columns of a block.
///
/// # Safety
/// As [`gemm`]. The part is inside the product, and its depth is a multiple of [`STEP`]. `unpacked`
/// is readable for the pairs of its depth. `sums` is readable and writable for [`PAIR_ROWS`] floats
/// for each column, and is accessed by no one else. `config` is the only configuration of this
/// thread.
#[inline(always)]
unsafe fn multiply_part(
    call: &GemmArgs,
    part: Part,
    unpacked: *const [u32; PAIR_ROWS],
    sums: *mut f32,
    config: &mut TileConfig,
) {
    let rows = PAIR_ROWS.min(call.rows - part.row);
    let is_last = part.start + part.depth == call.k;
    for at in (0..part.columns).step_by(MAX_SIDE) {
        let columns = MAX_SIDE.min(part.columns - at);
        let column = part.first_column + at;
        // SAFETY: the columns from `column` on are readable for `k` elements of two bytes, `depth`
        // of them from `start` on, and writable for `rows` floats from `row` on. `sums` has those
        // of the same columns. `unpacked` has `depth / 2` pairs of `PAIR_ROWS >= rows` rows.
        unsafe {
            let sums = sums.add(at * PAIR_ROWS);
            let (to, to_stride) = match is_last {
                true => {
                    let to = call.dst.add(column * call.dst_stride + part.row);
                    (to, call.dst_stride)
                }
                false => (sums, PAIR_ROWS),
            };
            config.set(Shape { columns, rows });
            config.multiply(&Block {
                columns: call.x.add(column * call.x_stride + 2 * part.start),
                column_bytes: call.x_stride,
                pairs: unpacked.cast(),
                steps: part.depth / STEP,
                sums,
                is_first: part.start == 0,
                to,
                to_stride,
            });
        }
    }
}

/// Prefetches the weights that are unpacked after those of `row` from `start` on: the hardware
/// prefetcher does not find them, since the rows are far apart.
#[inline(always)]
fn prefetch_next<W: PairWeights>(call: &GemmArgs, block: Range<usize>, row: usize, start: usize) {
    let (row, start) = match row + PAIR_ROWS < block.end {
        true => (row + PAIR_ROWS, start),
        false => (block.start, start + DEPTH),
    };
    let bytes = DEPTH.min(call.k.saturating_sub(start)) / W::CHUNK.min(call.k) * W::BYTES;
    for r in row..block.end.min(row + PAIR_ROWS) {
        let from = call
            .w
            .wrapping_add(r * call.w_stride + start / W::CHUNK * W::BYTES);
        for line in (0..bytes).step_by(64) {
            prefetch_line::<_MM_HINT_T0>(from.wrapping_add(line));
        }
    }
}
