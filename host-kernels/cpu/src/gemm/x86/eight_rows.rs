//! Products of eight rows of quantised weights at a time, with AVX2: a vector has one lane for each
//! row, as in a panel, and so a result is the same sum as in a panel. What a row contributes is
//! computed in a vector of its own, and eight such vectors are summed across their lanes at once.

use std::arch::x86_64::*;

use super::int_simd::prefetch_line;
use crate::gemm::kernel::GemmArgs;
use crate::simd::register_fns;

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
