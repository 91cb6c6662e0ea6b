//! Products with the super-block formats (K-quants, IQ and TQ formats): within 256 elements all
//! arithmetic is in integers (quants times activations times scales), then `d_w * d_x` once.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, offset_of};

use super::amx::BytePanel;
use super::block_simd::BlockSimd;
use super::block32_decode::depth;
use super::blocks::SuperBlockKernel;
use super::by_columns::by_columns;
use super::eight_rows::{self, EightRows, EightRowsKernel, ROWS};
use super::panel::{self, Panel, Prefetch, Tile};
use crate::formats::BlockQ8K;
use crate::gemm::kernel::GemmArgs;
use crate::gemm::thread_memory::PREPARED;
use crate::simd::{Avx2, Avx512, register_fns};

/// The elements of a block.
const CHUNK: usize = 256;

/// Bytes of a block of activations, which begins with the scale.
const X_BYTES: usize = size_of::<BlockQ8K>();
/// The offset of the quants in a block of activations.
const X_QUANTS: usize = offset_of!(BlockQ8K, qs);
/// The offset of the sums of each 16 quants in a block of activations.
const X_SUMS: usize = offset_of!(BlockQ8K, bsums);

/// From this many columns on, a panel is faster than products of rows.
pub(super) const PANEL_COLS: usize = 6;

/// Whether each result is the same for any number of columns.
pub(super) const fn has_one_order<S: BlockSimd, B: SuperBlockKernel>() -> bool {
    S::ONE_ORDER && S::LANES >= B::ONE_ORDER_LANES
}

/// Multiplies rows or panels.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: BlockSimd, B: SuperBlockKernel>(call: &GemmArgs) {
    let one_order = has_one_order::<S, B>();
    // SAFETY: `panel::gemm`, `eight_rows::gemm` and `rows` have the contract of this function:
    // the `rows` rows of blocks of `B`, the `cols` columns of Q8_K, the results of `call`, and the
    // features of `S`, which include AVX2. `call` is passed on as it is.
    unsafe {
        if call.cols >= PANEL_COLS && (one_order || call.table.is_none()) {
            panel::gemm::<S, KQuantPanel<S, B>>(call);
        } else if one_order {
            eight_rows::gemm::<SuperBlockRows<S, B>>(call);
        } else {
            rows::<S, B>(call);
        }
    }
}

/// A block of a column, prepared for products row by row.
#[repr(C, align(64))]
struct Column {
    /// The quants in the order of the vectors of weights.
    quants: [u8; 256],
    /// The sums of the sub-blocks.
    sums: [i16; 16],
    d: f32,
}

/// Multiplies row by row. The blocks of a row are unpacked into registers and multiplied with up to
/// four columns.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
unsafe fn rows<S: BlockSimd, B: SuperBlockKernel>(call: &GemmArgs) {
    let blocks = call.k / 256;
    let mut memory = PREPARED.take(call.cols * blocks * size_of::<Column>());
    let columns = memory.as_mut_ptr().cast::<Column>();
    // SAFETY: `columns` has `blocks` blocks for each column, aligned to a cache line, and all are
    // prepared before a row is multiplied. `c < call.cols` and `b < blocks`, so the block of Q8_K
    // is readable; `r < call.rows`, so the row has `blocks` blocks and each column a float of
    // `dst`. Each arm multiplies at most the columns that are left. The caller guarantees the
    // contract of `Gemm` and the features of `S`.
    unsafe {
        for c in 0..call.cols {
            for b in 0..blocks {
                let x = call.column(c).add(b * X_BYTES);
                prepare::<S, B>(x, columns.add(c * blocks + b));
            }
        }
        for r in 0..call.rows {
            let row = call.w.add(r * call.w_stride);
            by_columns!(call.cols, c, COLUMNS, {
                let x = columns.add(c * blocks);
                let results = row_times::<S, B, COLUMNS>(row, blocks, x);
                for (i, result) in results.into_iter().enumerate() {
                    *call.result(c + i).add(r) = result;
                }
            });
        }
    }
    PREPARED.give_back(memory);
}

/// Prepares one block of a column.
///
/// # Safety
/// `x` is readable for a block of Q8_K, `column` is a valid column that no one else accesses, and
/// the processor has the instructions of `S`.
#[inline(always)]
unsafe fn prepare<S: BlockSimd, B: SuperBlockKernel>(x: *const u8, column: *mut Column) {
    // SAFETY: `x` is readable for a block of Q8_K: its scale, eight sub-blocks of 32 quants from
    // `X_QUANTS` on, as `S::order` is below 8, and 16 sums from `X_SUMS` on. `i < 8`, so each
    // sub-block is written inside the 256 quants of `column`, which is valid and accessed by no one
    // else.
    unsafe {
        let column = &mut *column;
        column.d = x.cast::<f32>().read_unaligned();
        for i in 0..8 {
            let sub_block = x.add(X_QUANTS + 32 * S::order::<B>(i)).cast::<__m256i>();
            let to = column.quants.as_mut_ptr().add(32 * i).cast::<__m256i>();
            to.write_unaligned(sub_block.read_unaligned());
        }
        let sums = x.add(X_SUMS).cast::<[i16; 16]>().read_unaligned();
        column.sums = sums;
        if B::SUB == 32 {
            column.sums = [0; 16];
            for (to, pair) in column.sums.iter_mut().zip(sums.chunks_exact(2)) {
                // Saturating as in a panel: the sums may be any bits that a guest wrote.
                *to = pair[0].saturating_add(pair[1]);
            }
        }
    }
}

/// One row times `C` columns.
///
/// # Safety
/// `row` is readable for `blocks` blocks, `x` has `C` prepared columns of `blocks` blocks, and the
/// processor has the instructions of `S`.
#[inline(always)]
unsafe fn row_times<S: BlockSimd, B: SuperBlockKernel, const C: usize>(
    row: *const u8,
    blocks: usize,
    x: *const Column,
) -> [f32; C] {
    // SAFETY: `b < blocks`, so the block is readable in `row`, and `c * blocks + b` is one of the
    // prepared blocks of the `C` columns at `x`. Of such a block, `S::SUPER` vectors are the 256
    // quants, and one of 32 bytes the 16 sums. The caller guarantees the instructions of `S`.
    unsafe {
        let mut acc = [S::v_splat(0.0); C];
        let mut acc_mins = [_mm256_setzero_ps(); C];
        for b in 0..blocks {
            let block = row.add(b * size_of::<B>());
            S::prefetch(block, size_of::<B>());
            let q = S::quants::<B>(block);
            let (scales, mins) = B::scales(block);
            let (d, dmin) = B::d(block);
            let mut sums = [S::zero_int(); C];
            if B::OFFSET != 0 && !B::WIDE {
                for c in 0..C {
                    let bsums = _mm256_loadu_si256((*x.add(c * blocks + b)).sums.as_ptr().cast());
                    let excess = S::widen(excess::<B>(scales, bsums));
                    sums[c] = S::sub_int(S::zero_int(), excess);
                }
            }
            for v in 0..S::SUPER {
                let scale = S::spread_superblock::<B>(scales, v);
                for c in 0..C {
                    let x = (*x.add(c * blocks + b)).quants.as_ptr();
                    let x = S::load_int(x.add(v * 4 * S::LANES));
                    sums[c] = if B::WIDE {
                        S::dot_scaled_wide(sums[c], q[v], x, scale)
                    } else {
                        S::dot_scaled(sums[c], q[v], x, scale)
                    };
                }
            }
            for c in 0..C {
                let x = &*x.add(c * blocks + b);
                acc[c] = S::v_mul_add(S::to_floats(sums[c]), S::v_splat(d * x.d), acc[c]);
                if B::HAS_MIN {
                    let bsums = _mm256_loadu_si256(x.sums.as_ptr().cast());
                    let sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(mins, bsums));
                    let dmin = _mm256_set1_ps(dmin * x.d);
                    acc_mins[c] = _mm256_fnmadd_ps(sums, dmin, acc_mins[c]);
                }
            }
        }
        let mut results = [0.0; C];
        for c in 0..C {
            results[c] = if B::HAS_MIN {
                S::sum_both(acc[c], acc_mins[c])
            } else {
                S::v_sum(acc[c])
            };
        }
        results
    }
}

/// The products of eight rows of super-blocks of `B`.
struct SuperBlockRows<S, B>(PhantomData<(S, B)>);

impl<S: BlockSimd, B: SuperBlockKernel> EightRowsKernel for SuperBlockRows<S, B> {
    const CHUNK: usize = CHUNK;
    const PREFETCHED: usize = ROWS;
    type Column = Column;

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, _: usize, column: *mut Column) {
        // SAFETY: `x` is readable for the block of Q8_K from `start` on: `k` is a multiple of its
        // 256 elements, and so is `start`. The caller guarantees the column and the instructions.
        unsafe { prepare::<S, B>(x.add(start / CHUNK * X_BYTES), column) }
    }

    #[inline(always)]
    unsafe fn multiply<const C: usize>(
        rows: &EightRows,
        k: usize,
        x: *const Column,
    ) -> [__m256; C] {
        // SAFETY: `eight_rows_times` has the contract of this function: `k / 256` blocks.
        unsafe { eight_rows_times::<S, B, C>(rows, k / CHUNK, x) }
    }
}

/// The most blocks of a row that is multiplied before the next row, divided by the columns: rows of
/// 3072 elements, which are 1.7 KB (Q4_K) to 2.5 KB (Q6_K).
const IN_ORDER: usize = 12;

/// What a block of eight rows adds to the results of `C` columns: for each row, a vector of partial
/// sums, one of its minimums, and the two factors of these.
struct RowBlocks<I, const C: usize> {
    dots: [[I; ROWS]; C],
    mins: [[__m256i; ROWS]; C],
    d: [f32; ROWS],
    dmin: [f32; ROWS],
}

/// Eight rows times `C` columns: a vector of results for each column.
///
/// Long rows are multiplied block by block, each of all rows. With short rows, reads that go from
/// row to row are two thirds as fast as reads in the order of memory, because the processor does
/// not prefetch across rows. Short rows are therefore multiplied one after the other.
///
/// # Safety
/// Each row is readable for `blocks` blocks, and `x` has `C` prepared columns of `blocks` blocks.
/// The processor has the instructions of `S`.
#[inline(always)]
unsafe fn eight_rows_times<S: BlockSimd, B: SuperBlockKernel, const C: usize>(
    rows: &EightRows,
    blocks: usize,
    x: *const Column,
) -> [__m256; C] {
    // SAFETY: `b < blocks`, so the block is readable in each row, and `c * blocks + b` is one of
    // the prepared blocks of the `C` columns at `x`. `in_order` has a place for each of the
    // `blocks <= IN_ORDER` blocks, and what is read of it was written for all eight rows. The
    // caller guarantees the instructions of `S`.
    unsafe {
        let mut acc = [_mm256_setzero_ps(); C];
        if blocks <= IN_ORDER / C {
            let mut in_order = MaybeUninit::<[RowBlocks<S::I, C>; IN_ORDER]>::uninit();
            let in_order = in_order.as_mut_ptr().cast::<RowBlocks<S::I, C>>();
            for r in 0..ROWS {
                for b in 0..blocks {
                    let block = rows.rows[r].add(b * size_of::<B>());
                    S::prefetch(block, size_of::<B>());
                    multiply_block::<S, B, C>(block, x.add(b), blocks, in_order.add(b), r);
                }
            }
            for b in 0..blocks {
                add_block::<S, B, C>(in_order.add(b), x.add(b), blocks, &mut acc);
            }
        } else {
            let mut of_rows = MaybeUninit::<RowBlocks<S::I, C>>::uninit();
            for b in 0..blocks {
                for r in 0..ROWS {
                    let read = (ROWS * b + r) * size_of::<B>();
                    rows.prefetch(read, read + size_of::<B>());
                    let block = rows.rows[r].add(b * size_of::<B>());
                    let to = of_rows.as_mut_ptr();
                    multiply_block::<S, B, C>(block, x.add(b), blocks, to, r);
                }
                add_block::<S, B, C>(of_rows.as_ptr(), x.add(b), blocks, &mut acc);
            }
        }
        acc
    }
}

/// Multiplies a block of row `r` with `C` columns, whose blocks are `blocks` apart.
///
/// # Safety
/// `block` is readable for a block of `B`, and `x` for a prepared block of each column. `to` is
/// valid for writes, and `r < ROWS`. The processor has the instructions of `S`.
#[inline(always)]
unsafe fn multiply_block<S: BlockSimd, B: SuperBlockKernel, const C: usize>(
    block: *const u8,
    x: *const Column,
    blocks: usize,
    to: *mut RowBlocks<S::I, C>,
    r: usize,
) {
    const { assert!(S::LANES < B::ONE_ORDER_LANES || !B::WIDE) }
    // SAFETY: the caller guarantees the block, and a prepared block at `c * blocks` for each of the
    // `C` columns: `S::SUPER` vectors of it are the 256 quants, and one of 32 bytes the 16 sums.
    // Each field of `to` has an element for row `r`. The caller guarantees the instructions of `S`.
    unsafe {
        let q = S::quants::<B>(block);
        let (scales, row_mins) = B::scales(block);
        ((*to).d[r], (*to).dmin[r]) = B::d(block);
        let mut sums = [S::zero_int(); C];
        for c in 0..C {
            let bsums = (*x.add(c * blocks)).sums.as_ptr().cast();
            let bsums = _mm256_loadu_si256(bsums);
            if B::OFFSET != 0 {
                let excess = S::widen(excess::<B>(scales, bsums));
                sums[c] = S::sub_int(sums[c], excess);
            }
            if B::HAS_MIN {
                (*to).mins[c][r] = _mm256_madd_epi16(row_mins, bsums);
            }
        }
        for v in 0..S::SUPER {
            let scale = S::spread_superblock::<B>(scales, v);
            for c in 0..C {
                let x = (*x.add(c * blocks)).quants.as_ptr();
                let x = S::load_int(x.add(v * 4 * S::LANES));
                sums[c] = S::dot_scaled(sums[c], q[v], x, scale);
            }
        }
        for c in 0..C {
            (*to).dots[c][r] = sums[c];
        }
    }
}

/// Adds the products of a block of eight rows with `C` columns, whose blocks are `blocks` apart.
///
/// # Safety
/// [`multiply_block`] has written `of_rows` for all rows, with the same `x`.
#[inline(always)]
unsafe fn add_block<S: BlockSimd, B: SuperBlockKernel, const C: usize>(
    of_rows: *const RowBlocks<S::I, C>,
    x: *const Column,
    blocks: usize,
    acc: &mut [__m256; C],
) {
    // SAFETY: the caller guarantees that the vectors and the factors of all rows were written, but
    // for `mins` without minimums, which is then not read; a prepared block of each column at
    // `c * blocks`; and the instructions of `S`.
    unsafe {
        let d = _mm256_loadu_ps((&raw const (*of_rows).d).cast());
        let dmin = _mm256_loadu_ps((&raw const (*of_rows).dmin).cast());
        for c in 0..C {
            let d_x = _mm256_set1_ps((*x.add(c * blocks)).d);
            let dots = _mm256_cvtepi32_ps(eight_rows::sums::<S>((*of_rows).dots[c]));
            acc[c] = _mm256_fmadd_ps(dots, _mm256_mul_ps(d, d_x), acc[c]);
            if B::HAS_MIN {
                let mins = _mm256_cvtepi32_ps(eight_rows::sums::<Avx2>((*of_rows).mins[c]));
                acc[c] = _mm256_fnmadd_ps(mins, _mm256_mul_ps(dmin, d_x), acc[c]);
            }
        }
    }
}

register_fns! {
    avx2;
    /// What the offset of the quants of a block adds to its product, in eight partial sums: the
    /// offset times the scales times the sums of the activations.
    ///
    /// # Safety
    /// The processor has AVX2.
    unsafe fn excess<B: SuperBlockKernel>(scales: __m256i, sums: __m256i) -> __m256i {
        let excess = _mm256_madd_epi16(scales, sums);
        _mm256_mullo_epi32(excess, _mm256_set1_epi32(B::OFFSET))
    }
}

/// A super-block of a column, prepared for a panel.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct SuperColumn {
    /// The quants, by fours.
    quants: [u32; CHUNK / 4],
    /// Pairs of 16-bit sums of the sub-blocks.
    sums: [u32; 8],
    d: f32,
}

/// Up to 32 rows of a super-block, interleaved.
#[repr(C, align(64))]
pub(super) struct KQuantPanel<S, B> {
    /// For each four elements, four quants of each row.
    quants: [[u8; 128]; CHUNK / 4],
    /// For each sub-block, the scale of each row, as [`Self::SCALES`] says.
    scales: [[u32; 32]; 16],
    /// For each two sub-blocks, two minimums of each row.
    mins: [[[i16; 2]; 32]; 16],
    d: [f32; 32],
    dmin: [f32; 32],
    rows: [[u8; CHUNK]; 32],
    row_scales: [[u32; 16]; 32],
    row_mins: [[[i16; 2]; 16]; 32],
    format: PhantomData<(S, B)>,
}

/// How the sums of sub-blocks are multiplied with their scales. Both integers give the sums of
/// products row by row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scales {
    /// As pairs of 16 bits: the scale twice.
    Pairs,
    /// As integers of 32 bits.
    Integers,
    /// As floats, which are exact below 2^24.
    Floats,
}

impl<S: BlockSimd, B: SuperBlockKernel> KQuantPanel<S, B> {
    /// How this panel multiplies with scales.
    const SCALES: Scales = match (S::SUMS_I16, has_one_order::<S, B>()) {
        (true, _) => Scales::Pairs,
        (false, true) => Scales::Integers,
        (false, false) => Scales::Floats,
    };

    /// Whether a multiple of the sums of the activations is subtracted: for the minimums, or for
    /// the offset of the quants, which is then handled as a minimum.
    const MINS: bool = B::HAS_MIN || (B::OFFSET != 0 && !(B::WIDE && S::WIDE_IS_SIGNED));
}

impl<S: BlockSimd, B: SuperBlockKernel> Panel<S> for KQuantPanel<S, B> {
    const CHUNK: usize = CHUNK;
    const BYTES: usize = size_of::<B>();
    const VECTORS: usize = S::PANEL;
    const COLS: usize = S::COLS;
    type Column = SuperColumn;
    const UNITS: usize = CHUNK / B::SUB;

    #[inline(always)]
    fn new() -> Self {
        KQuantPanel {
            quants: [[0; 128]; CHUNK / 4],
            scales: [[0; 32]; 16],
            mins: [[[0; 2]; 32]; 16],
            d: [0.0; 32],
            dmin: [0.0; 32],
            rows: [[0; CHUNK]; 32],
            row_scales: [[0; 16]; 32],
            row_mins: [[[0; 2]; 16]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, _: usize, column: *mut SuperColumn) {
        // SAFETY: `x` is readable for `start + len` activations, so block `start / 256` is: the
        // scale is at 0, the 256 quants are at `X_QUANTS`, the 16 sums, 32 bytes, at `X_SUMS`.
        // `column` is valid and accessed by no one else, and its `sums` have 32 bytes. The contract
        // of `Panel` includes the instructions of `S`.
        unsafe {
            let x = x.add(start / 256 * X_BYTES);
            (*column).d = x.cast::<f32>().read_unaligned();
            (*column).quants = x.add(X_QUANTS).cast::<[u32; 64]>().read_unaligned();
            if Self::MINS {
                let mut sums = _mm256_loadu_si256(x.add(X_SUMS).cast());
                if B::SUB == 32 {
                    // The sum of 32 quants is at most 32 * 127, which fits 16 bits.
                    let pairs = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
                    let (low, high) = (
                        _mm256_castsi256_si128(pairs),
                        _mm256_extracti128_si256(pairs, 1),
                    );
                    sums = _mm256_zextsi128_si256(_mm_packs_epi32(low, high));
                }
                _mm256_storeu_si256((*column).sums.as_mut_ptr().cast(), sums);
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, _: usize) {
        let height = S::PANEL * S::LANES;
        // SAFETY: `call.row` returns a row of the call, readable for `call.k > start` weights, so
        // block `start / 256` is. `r < height <= 32`, the rows of each array. A sub-block is below
        // 8, so its 32 bytes are inside the 256 of a row; two vectors of scales, or one of
        // minimums, are inside the 64 bytes of theirs. `interleave` reads `height` such rows and
        // writes 64 words of quants, at most 16 of scales and of minimums, each of `height` rows.
        // The contract of `Panel` includes the instructions of `S`.
        unsafe {
            for r in 0..height {
                let from = call.row(row + r);
                let block = from.add(start / 256 * size_of::<B>());
                let q = S::quants::<B>(block);
                // The halves are stored in element order.
                let to = self.rows[r].as_mut_ptr();
                for v in 0..S::SUPER {
                    let halves = S::halves(q[v]);
                    for (h, half) in halves.into_iter().enumerate().take(S::GROUPS) {
                        let sub_block = S::order::<B>(v * S::GROUPS + h);
                        to.add(32 * sub_block)
                            .cast::<__m256i>()
                            .write_unaligned(half);
                    }
                }
                let (scales, mins) = B::scales(block);
                let (low, high) = (
                    _mm256_castsi256_si128(scales),
                    _mm256_extracti128_si256(scales, 1),
                );
                let row_scales = self.row_scales[r].as_mut_ptr().cast::<__m256i>();
                for (i, scales) in [low, high].into_iter().enumerate() {
                    let integers = _mm256_cvtepi16_epi32(scales);
                    let scales = match Self::SCALES {
                        Scales::Pairs => {
                            let scales = _mm256_cvtepu16_epi32(scales);
                            _mm256_or_si256(scales, _mm256_slli_epi32(scales, 16))
                        }
                        Scales::Integers => integers,
                        Scales::Floats => _mm256_castps_si256(_mm256_cvtepi32_ps(integers)),
                    };
                    row_scales.add(i).write_unaligned(scales);
                }
                let (d, dmin) = B::d(block);
                self.d[r] = d;
                if Self::MINS {
                    let (mins, dmin) = if B::HAS_MIN {
                        (mins, dmin)
                    } else {
                        (
                            _mm256_mullo_epi16(scales, _mm256_set1_epi16(B::OFFSET as i16)),
                            d,
                        )
                    };
                    self.dmin[r] = dmin;
                    _mm256_storeu_si256(self.row_mins[r].as_mut_ptr().cast(), mins);
                }
            }
            let rows = self.rows.as_ptr().cast();
            let quants = self.quants.as_mut_ptr().cast();
            panel::interleave::<S>(rows, CHUNK, CHUNK / 4, S::PANEL, quants);
            let rows = self.row_scales.as_ptr().cast();
            let scales = self.scales.as_mut_ptr().cast();
            panel::interleave::<S>(rows, 64, CHUNK / B::SUB, S::PANEL, scales);
            if Self::MINS {
                let rows = self.row_mins.as_ptr().cast();
                let mins = self.mins.as_mut_ptr().cast();
                panel::interleave::<S>(rows, 64, CHUNK / B::SUB / 2, S::PANEL, mins);
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<SuperColumn>,
        _: usize,
        prefetch: &mut Prefetch,
    ) {
        let Tile { columns, sums } = tile;
        // SAFETY: `unpack` has written 64 words of quants, `CHUNK / B::SUB` scales, and half as
        // many pairs of minimums for `P * S::LANES` rows, with `P == VECTORS`. `columns` has `C`
        // columns of 64 words, so word `i` of sub-block `j` is readable. The contract of `Panel`
        // includes these, their sums, and the instructions of `S`.
        unsafe {
            // The sums of the sub-blocks times their scales: integers, or floats.
            let mut integers = [[S::zero_int(); C]; P];
            let mut floats = [[S::v_splat(0.0); C]; P];
            let mut panel = self.quants.as_ptr().cast::<u8>();
            let mut scales = self.scales.as_ptr().cast::<u32>();
            let height = P * S::LANES;
            for j in 0..CHUNK / B::SUB {
                prefetch.step();
                let mut scale = [S::zero_int(); P];
                for p in 0..P {
                    scale[p] = S::load_int(scales.add(p * S::LANES).cast());
                }
                let mut dots = [[S::zero_int(); C]; P];
                let depth = const { depth::<S>(B::MAX_QUANT, B::SUB / 4) };
                for first in (0..B::SUB / 4).step_by(depth) {
                    let mut sums_i16 = [[S::zero_int(); C]; P];
                    for i in first..first + depth {
                        let mut w = [S::zero_int(); P];
                        for p in 0..P {
                            w[p] = S::load_int(panel.add(p * S::LANES * 4));
                        }
                        panel = panel.add(height * 4);
                        for c in 0..C {
                            let x = (*columns.add(c)).quants.as_ptr().add(j * B::SUB / 4 + i);
                            let x = S::splat_int(*x);
                            for p in 0..P {
                                if depth > 1 {
                                    let products = S::multiply_pairs(w[p], x);
                                    sums_i16[p][c] = S::add_i16(sums_i16[p][c], products);
                                } else if Self::SCALES == Scales::Pairs {
                                    let sum = integers[p][c];
                                    integers[p][c] = match B::WIDE {
                                        true => S::dot_scaled_wide(sum, w[p], x, scale[p]),
                                        false => S::dot_scaled(sum, w[p], x, scale[p]),
                                    };
                                } else if B::WIDE {
                                    dots[p][c] = S::dot_wide(dots[p][c], w[p], x);
                                } else {
                                    dots[p][c] = S::dot(dots[p][c], w[p], x);
                                }
                            }
                        }
                    }
                    if depth > 1 {
                        for p in 0..P {
                            for c in 0..C {
                                let (sum, pairs) = (integers[p][c], sums_i16[p][c]);
                                integers[p][c] = S::dot_pairs(sum, pairs, scale[p]);
                            }
                        }
                    }
                }
                for p in 0..P {
                    let float_scale = S::v_load(scales.add(p * S::LANES).cast(), S::LANES);
                    for c in 0..C {
                        let (dots, sum) = (dots[p][c], integers[p][c]);
                        match Self::SCALES {
                            Scales::Pairs => {}
                            Scales::Integers => {
                                integers[p][c] = S::multiply_add_int(sum, dots, scale[p]);
                            }
                            Scales::Floats => {
                                let dots = S::to_floats(dots);
                                floats[p][c] = S::v_mul_add(dots, float_scale, floats[p][c]);
                            }
                        }
                    }
                }
                scales = scales.add(height);
            }
            let mut min_sums = [[S::zero_int(); C]; P];
            if Self::MINS {
                let mut mins = self.mins.as_ptr().cast::<u8>();
                for i in 0..CHUNK / B::SUB / 2 {
                    for c in 0..C {
                        let pair = S::splat_int((*columns.add(c)).sums[i]);
                        for p in 0..P {
                            let m = S::load_int(mins.add(p * S::LANES * 4));
                            min_sums[p][c] = S::dot_pairs(min_sums[p][c], m, pair);
                        }
                    }
                    mins = mins.add(height * 4);
                }
            }
            for p in 0..P {
                let d = S::v_load(self.d.as_ptr().add(p * S::LANES), S::LANES);
                let dmin = S::v_load(self.dmin.as_ptr().add(p * S::LANES), S::LANES);
                for c in 0..C {
                    let d_x = S::v_splat((*columns.add(c)).d);
                    let mut scaled = floats[p][c];
                    if Self::SCALES != Scales::Floats {
                        let mut sum = integers[p][c];
                        if Self::MINS && !B::HAS_MIN {
                            sum = S::sub_int(sum, min_sums[p][c]);
                        }
                        scaled = S::to_floats(sum);
                    }
                    let mut acc = sums.load::<S, P>(p, c);
                    acc = S::v_mul_add(scaled, S::v_mul(d, d_x), acc);
                    if B::HAS_MIN || Self::MINS && Self::SCALES == Scales::Floats {
                        let excess = S::to_floats(min_sums[p][c]);
                        acc = S::v_neg_mul_add(excess, S::v_mul(dmin, d_x), acc);
                    }
                    sums.store::<S, P>(p, c, acc);
                }
            }
        }
    }
}

impl<B: SuperBlockKernel> BytePanel for KQuantPanel<Avx512, B> {
    const GROUP: usize = B::SUB;

    #[inline(always)]
    unsafe fn bytes(&self, word: usize, v: usize) -> __m512i {
        // SAFETY: `unpack` has written the 128 bytes of `word`, of which vector `v < 2` is read.
        // The caller guarantees AVX-512.
        unsafe { _mm512_load_si512(self.quants[word].as_ptr().add(64 * v).cast()) }
    }

    #[inline(always)]
    unsafe fn factors(&self, group: usize, v: usize) -> (__m512, __m512) {
        // SAFETY: `unpack` has written the scales of `group` and, if there are any, the minimums of
        // two groups at a time, for 32 rows, of which vector `v < 2` is read; and `d` and `dmin` of
        // these rows. The caller guarantees AVX-512.
        unsafe {
            let scales = _mm512_load_si512(self.scales[group].as_ptr().add(16 * v).cast());
            let scales = match Self::SCALES {
                Scales::Integers => _mm512_cvtepi32_ps(scales),
                Scales::Floats => _mm512_castsi512_ps(scales),
                Scales::Pairs => unreachable!("AVX-512 sums in 32 bits"),
            };
            let d = _mm512_mul_ps(scales, _mm512_load_ps(self.d.as_ptr().add(16 * v)));
            let m = match B::HAS_MIN {
                true => {
                    let mins = self.mins[group / 2].as_ptr().add(16 * v);
                    let mins = _mm512_load_si512(mins.cast());
                    let min = match group % 2 {
                        0 => _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(mins)),
                        _ => _mm512_srai_epi32::<16>(mins),
                    };
                    let dmin = _mm512_load_ps(self.dmin.as_ptr().add(16 * v));
                    _mm512_mul_ps(_mm512_cvtepi32_ps(min), dmin)
                }
                false => _mm512_mul_ps(_mm512_set1_ps(B::OFFSET as f32), d),
            };
            (d, _mm512_sub_ps(_mm512_setzero_ps(), m))
        }
    }
}
