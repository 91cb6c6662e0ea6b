//! Products of eight rows of quantised weights at a time, with AVX2: a vector has one lane for each
//! row, as in a panel, and so a result is the same sum as in a panel. What a row contributes is
//! computed in a vector of its own, and eight such vectors are summed across their lanes at once.

use std::arch::x86_64::*;

use super::int_simd::prefetch_line;
use crate::gemm::kernel::GemmArgs;
use crate::gemm::thread_memory::PREPARED;
use crate::simd::{Avx2, Simd, register_fns};

/// The rows.
pub(super) const ROWS: usize = 8;

/// Eight rows of weights.
pub(super) struct EightRows {
    /// The first byte of each row. The last row is repeated if there are fewer.
    pub(super) rows: [*const u8; ROWS],
    /// The first byte of the next eight rows.
    next: *const u8,
}

impl EightRows {
    /// The rows from `first` on.
    #[inline(always)]
    pub(super) fn new(call: &GemmArgs, first: usize) -> EightRows {
        EightRows {
            rows: std::array::from_fn(|r| call.row(first + r)),
            next: call.w.wrapping_add((first + ROWS) * call.w_stride),
        }
    }

    /// Prefetches bytes `from .. to` of the next eight rows, to the L2 cache. The prefetches are
    /// spread evenly over the products of these rows, and go through memory in order, as the
    /// hardware prefetcher continues; the products go from row to row.
    #[inline(always)]
    pub(super) fn prefetch(&self, from: usize, to: usize) {
        for line in from.div_ceil(64)..to.div_ceil(64) {
            prefetch_line::<_MM_HINT_T1>(self.next.wrapping_add(64 * line));
        }
    }
}

/// A family of formats whose products take eight rows at a time.
///
/// # Safety
/// A caller guarantees AVX2, FMA and F16C, and
/// - [`EightRowsKernel::prepare`]: `x` is readable for a column of `start + len` activations,
///   `start` is a multiple of `CHUNK`, `len <= CHUNK` is one of the blocks, and `column` is a valid
///   column that no one else accesses;
/// - [`EightRowsKernel::multiply`]: each row is readable for `k` weights, and `x` has `C` columns,
///   each with all chunks of `k` prepared, one column after the other.
pub(super) trait EightRowsKernel {
    /// The elements of a column that are prepared at once.
    const CHUNK: usize;
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
/// As [`crate::gemm::Gemm`], with AVX2, FMA and F16C.
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
            let rows = EightRows::new(call, first);
            let n = ROWS.min(call.rows - first);
            let mut c = 0;
            while c < call.cols {
                let x = columns.add(c * chunks);
                macro_rules! multiply {
                    ($columns:literal) => {{
                        let results = K::multiply::<$columns>(&rows, call.k, x);
                        for (i, result) in results.into_iter().enumerate() {
                            Avx2::v_store(result, call.result(c + i).add(first), n);
                        }
                        $columns
                    }};
                }
                c += match call.cols - c {
                    4.. => multiply!(4),
                    2.. => multiply!(2),
                    _ => multiply!(1),
                };
            }
        }
    }
    PREPARED.give_back(memory);
}

/// For each of eight vectors, the sum of its lanes. Unpacking and one addition take half the time
/// of a horizontal addition on a processor of AMD.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn sums(v: [__m256i; ROWS]) -> __m256i {
    // SAFETY: everything is on registers. The caller guarantees AVX2.
    unsafe {
        let low = fold_pairs(fold_lanes(v[0], v[1]), fold_lanes(v[2], v[3]));
        let high = fold_pairs(fold_lanes(v[4], v[5]), fold_lanes(v[6], v[7]));
        fold_halves(low, high)
    }
}

register_fns! {
    avx2;
    /// In each half, `a0 + a2`, `b0 + b2`, `a1 + a3` and `b1 + b3`.
    unsafe fn fold_lanes(a: __m256i, b: __m256i) -> __m256i {
        _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b))
    }

    /// In each half, the sums of the pairs of lanes of `a` and `b` that [`fold_lanes`] has left.
    unsafe fn fold_pairs(a: __m256i, b: __m256i) -> __m256i {
        _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
    }

    /// The sums of the halves of `low`, then those of `high`.
    unsafe fn fold_halves(low: __m256i, high: __m256i) -> __m256i {
        _mm256_add_epi32(
            _mm256_permute2x128_si256(low, high, 0x20),
            _mm256_permute2x128_si256(low, high, 0x31),
        )
    }
}
