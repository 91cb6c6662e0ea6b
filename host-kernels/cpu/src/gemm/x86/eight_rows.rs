//! Products of eight rows of quantised weights at a time: a vector has one lane for each row, as in
//! a panel, and so a result is the same sum as in a panel. What a row contributes is computed in a
//! vector of its own, and eight such vectors are summed across their lanes at once.

use std::arch::x86_64::*;

use super::by_columns::by_columns;
use super::int_simd::{IntSimd, prefetch_line};
use crate::gemm::kernel::GemmArgs;
use crate::gemm::thread_memory::PREPARED;
use crate::simd::{Avx2, Simd};

/// The rows.
pub(super) const ROWS: usize = 8;

/// Eight rows of weights.
pub(super) struct EightRows {
    /// The first byte of each row. The last row is repeated if there are fewer.
    pub(super) rows: [*const u8; ROWS],
    /// The first byte of the eight rows that are prefetched.
    prefetched: *const u8,
}

impl EightRows {
    /// The rows from `first` on. The rows that are `prefetched` rows behind these are prefetched.
    #[inline(always)]
    fn new(call: &GemmArgs, first: usize, prefetched: usize) -> EightRows {
        EightRows {
            rows: std::array::from_fn(|r| call.row(first + r)),
            // A single row may have any stride.
            prefetched: call
                .w
                .wrapping_add((first + prefetched).wrapping_mul(call.w_stride)),
        }
    }

    /// Prefetches bytes `from .. to` of later rows, to the L2 cache. The prefetches are
    /// spread evenly over the products of these rows, and go through memory in order, as the
    /// hardware prefetcher continues; the products go from row to row.
    #[inline(always)]
    pub(super) fn prefetch(&self, from: usize, to: usize) {
        for line in from.div_ceil(64)..to.div_ceil(64) {
            prefetch_line::<_MM_HINT_T1>(self.prefetched.wrapping_add(64 * line));
        }
    }
}

/// A family of formats whose products take eight rows at a time.
///
/// # Safety
/// A caller guarantees the instructions of the implementing type, which include AVX2, FMA and F16C,
/// and
/// - [`EightRowsKernel::prepare`]: `x` is readable for a column of `start + len` activations,
///   `start` is a multiple of `CHUNK`, `len <= CHUNK` is one of the blocks, and `column` is a valid
///   column that no one else accesses;
/// - [`EightRowsKernel::multiply`]: each row is readable for `k` weights, and `x` has `C` columns,
///   each with all chunks of `k` prepared, one column after the other.
pub(super) trait EightRowsKernel {
    /// The elements of a column that are prepared at once.
    const CHUNK: usize;
    /// How many rows behind a row the row is that is prefetched with it: a multiple of [`ROWS`].
    const PREFETCHED: usize;
    /// A chunk of a column, prepared.
    type Column;

    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut Self::Column);

    /// Eight rows times `C` columns: a vector of results for each column.
    unsafe fn multiply<const C: usize>(
        rows: &EightRows,
        k: usize,
        x: *const Self::Column,
    ) -> [__m256; C];
}

/// Multiplies eight rows at a time, in the order of sums of a panel. The blocks of the rows are
/// unpacked into registers and multiplied with up to four columns.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the instructions of `K`.
#[inline(always)]
pub(super) unsafe fn gemm<K: EightRowsKernel>(call: &GemmArgs) {
    let chunks = call.k.div_ceil(K::CHUNK);
    let mut memory = PREPARED.take(call.cols * chunks * size_of::<K::Column>());
    let columns = memory.as_mut_ptr().cast::<K::Column>();
    // SAFETY: `columns` has `chunks` chunks for each column, aligned to a cache line, and all are
    // prepared before a row is multiplied. A chunk ends at or before `call.k`, the elements of a
    // column and of a row. `EightRows` has rows of the call. Each arm multiplies at most the
    // columns that are left, and writes at most the rows that are left. The caller guarantees the
    // contract of `Gemm` and the instructions.
    unsafe {
        for c in 0..call.cols {
            for chunk in 0..chunks {
                let start = chunk * K::CHUNK;
                let len = K::CHUNK.min(call.k - start);
                let to = columns.add(c * chunks + chunk);
                K::prepare(call.column(c), start, len, to);
            }
        }
        for first in (0..call.rows).step_by(ROWS) {
            let rows = EightRows::new(call, first, K::PREFETCHED);
            let n = ROWS.min(call.rows - first);
            by_columns!(call.cols, c, COLUMNS, {
                let results = K::multiply::<COLUMNS>(&rows, call.k, columns.add(c * chunks));
                for (i, result) in results.into_iter().enumerate() {
                    Avx2::v_store(result, call.result(c + i).add(first), n);
                }
            });
        }
    }
    PREPARED.give_back(memory);
}

/// For each of eight vectors, the sum of its lanes. Unpacking and one addition take half the time
/// of a horizontal addition on a processor of AMD.
///
/// # Safety
/// The processor has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn sums<S: IntSimd>(v: [S::I; ROWS]) -> __m256i {
    // SAFETY: everything is on registers. The instructions of `S`, which the caller guarantees,
    // include AVX2.
    unsafe {
        let mut halves = [_mm256_setzero_si256(); ROWS];
        for r in 0..ROWS {
            let [low, high] = S::halves(v[r]);
            halves[r] = match S::GROUPS {
                1 => low,
                _ => _mm256_add_epi32(low, high),
            };
        }
        group_sums::<Avx2>(halves)[0]
    }
}

/// For each group of 32 bytes of eight vectors, the sums of its lanes in each vector.
///
/// # Safety
/// The processor has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn group_sums<S: IntSimd>(v: [S::I; ROWS]) -> [__m256i; 4] {
    // SAFETY: everything is on registers. The caller guarantees the instructions of `S`.
    unsafe {
        let [low, high] = four_sums::<S>(v);
        let [first, second] = S::halves(S::sum_lanes(low, high));
        [first, second, first, second]
    }
}

/// For each lane of 16 bytes of eight vectors, the sums of its four integers in each vector.
///
/// # Safety
/// The processor has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn lane_sums<S: IntSimd>(v: [S::I; ROWS]) -> [__m256i; 4] {
    // SAFETY: everything is on registers. The caller guarantees the instructions of `S`.
    unsafe {
        let [low, high] = four_sums::<S>(v);
        let [first, second] = S::zip_lanes(low, high);
        match S::GROUPS {
            1 => {
                let ([first, _], [second, _]) = (S::halves(first), S::halves(second));
                [first, second, first, second]
            }
            _ => {
                let ([a, b], [c, d]) = (S::halves(first), S::halves(second));
                [a, b, c, d]
            }
        }
    }
}

/// In each lane of 16 bytes, the sums of the integers of this lane in vectors 0 to 3, and in
/// vectors 4 to 7.
///
/// # Safety
/// The processor has the instructions of `S`.
#[inline(always)]
unsafe fn four_sums<S: IntSimd>(v: [S::I; ROWS]) -> [S::I; 2] {
    // SAFETY: everything is on registers. The caller guarantees the instructions of `S`.
    unsafe {
        // Without a closure, which would be compiled without the instructions of `S`.
        let low = S::sum_pairs(S::sum_alternate(v[0], v[1]), S::sum_alternate(v[2], v[3]));
        let high = S::sum_pairs(S::sum_alternate(v[4], v[5]), S::sum_alternate(v[6], v[7]));
        [low, high]
    }
}
