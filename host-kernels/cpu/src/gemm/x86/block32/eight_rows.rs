//! Products with few columns: eight rows at a time, in the order of sums of a panel.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::chunk::{CHUNK, GroupColumn, prepare};
use super::dot::{dot, offset};
use crate::gemm::x86::block32_decode::GROUPS;
use crate::gemm::x86::blocks::Block32Kernel;
use crate::gemm::x86::eight_rows::{EightRows, EightRowsKernel, ROWS, sums};
use crate::gemm::x86::int_simd::IntSimd;
use crate::simd::{Avx2, Simd};

/// The products of blocks of `B`.
pub(super) struct Block32Rows<B>(PhantomData<B>);

impl<B: Block32Kernel> EightRowsKernel for Block32Rows<B> {
    const CHUNK: usize = CHUNK;
    type Column = GroupColumn;

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut GroupColumn) {
        // SAFETY: `prepare` has the contract of this function. `start` and `len` are multiples of
        // 32, as `k` is.
        unsafe { prepare::<Avx2, B>(x, start, len, column) }
    }

    #[inline(always)]
    unsafe fn multiply<const C: usize>(
        rows: &EightRows,
        k: usize,
        x: *const GroupColumn,
    ) -> [__m256; C] {
        // SAFETY: `rows_times` has the contract of this function: `k / 32` groups.
        unsafe { rows_times::<B, C>(rows, k / 32, x) }
    }
}

/// Eight rows times `C` columns: a vector of results for each column.
///
/// # Safety
/// Each row is readable for `groups` groups, and `x` has `C` prepared columns of all their chunks.
/// The processor has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn rows_times<B: Block32Kernel, const C: usize>(
    rows: &EightRows,
    groups: usize,
    x: *const GroupColumn,
) -> [__m256; C] {
    let chunks = groups.div_ceil(GROUPS);
    // SAFETY: `chunk_times` gets groups `first .. first + n` with `first + n <= groups`, all in the
    // rows, and chunk `first / GROUPS < chunks` of the `C` columns of `x`. The caller guarantees
    // the rows, the columns and the instructions.
    unsafe {
        let mut acc = [Avx2::v_splat(0.0); C];
        for chunk in 0..groups / GROUPS {
            let x = x.add(chunk);
            chunk_times::<B, C>(rows, chunk * GROUPS, GROUPS, x, chunks, &mut acc);
        }
        let left = groups % GROUPS;
        if left > 0 {
            let x = x.add(chunks - 1);
            chunk_times::<B, C>(rows, groups - left, left, x, chunks, &mut acc);
        }
        acc
    }
}

/// `n` groups of [`rows_times`], from group `first` on. The chunks of `x` with these groups are
/// `chunks` apart from one column to the next.
///
/// # Safety
/// As [`rows_times`], with `n <= 8` groups from `first` on, a multiple of 8.
#[inline(always)]
unsafe fn chunk_times<B: Block32Kernel, const C: usize>(
    rows: &EightRows,
    first: usize,
    n: usize,
    x: *const GroupColumn,
    chunks: usize,
    acc: &mut [__m256; C],
) {
    const {
        assert!(!B::ONE_ORDER || B::ELEMENTS == 32 && size_of::<B>() >= 16);
        assert!(!B::ONE_ORDER || !(B::HAS_MIN || B::HALF_SCALES || offset::<Avx2, B>() != 0));
    }
    // SAFETY: groups `first .. first + n` are in the rows, a block of at least 16 bytes each, and
    // no others are read. `x` has `C` chunks of `n <= GROUPS` groups of 32 bytes. The caller
    // guarantees the rows, the columns and the instructions.
    unsafe {
        for g in 0..n {
            let at = (first + g) * size_of::<B>();
            rows.prefetch(ROWS * at, ROWS * (at + size_of::<B>()));
            let d = scales(&rows.rows, at);
            let mut quants = [Avx2::zero_int(); ROWS];
            for r in 0..ROWS {
                quants[r] = B::single(rows.rows[r], first + g);
            }
            for c in 0..C {
                let x = &*x.add(c * chunks);
                let group = Avx2::load_int(x.quants.as_ptr().add(g).cast());
                let mut dots = [Avx2::zero_int(); ROWS];
                for r in 0..ROWS {
                    dots[r] = dot::<Avx2, B>(Avx2::zero_int(), quants[r], group);
                }
                let dots = Avx2::to_floats(sums(dots));
                let d_x = Avx2::v_splat(*x.scales.as_ptr().add(g));
                acc[c] = Avx2::v_mul_add(dots, Avx2::v_mul(d, d_x), acc[c]);
            }
        }
    }
}

/// The F16 at byte `at` of each row.
///
/// # Safety
/// Each row is readable for 16 bytes from `at` on. The processor has AVX2 and F16C.
#[inline(always)]
unsafe fn scales(rows: &[*const u8; ROWS], at: usize) -> __m256 {
    // SAFETY: eight loads of 16 bytes, which the caller guarantees at `at` of each row. Unpacking
    // and conversion are on registers. The caller guarantees AVX2 and F16C.
    unsafe {
        let load = |r: usize| _mm_loadu_si128(rows[r].add(at).cast());
        let two = |r: usize| _mm_unpacklo_epi16(load(r), load(r + 1));
        let four = |r: usize| _mm_unpacklo_epi32(two(r), two(r + 2));
        _mm256_cvtph_ps(_mm_unpacklo_epi64(four(0), four(4)))
    }
}
