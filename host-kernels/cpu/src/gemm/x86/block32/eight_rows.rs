//! Products with few columns: eight rows at a time, in the order of sums of a panel.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::chunk::{CHUNK, GroupColumn, prepare};
use super::dot::{dot, dot_halves, offset};
use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::block32_decode::{GROUPS, chunk_scales};
use crate::gemm::x86::blocks::{Block32Kernel, Codes};
use crate::gemm::x86::eight_rows::{EightRows, EightRowsKernel, ROWS, group_sums, lane_sums};
use crate::simd::{Avx2, Simd};

/// The products of blocks of `B`.
pub(super) struct Block32Rows<S, B>(PhantomData<(S, B)>);

impl<S: BlockSimd, B: Block32Kernel> Block32Rows<S, B> {
    /// The groups whose quants are multiplied at once. A group of nibbles is a lane of 16 bytes in
    /// each of two vectors.
    const AT_ONCE: usize = match B::CODES {
        Codes::Nibbles(_) => S::LANES / 4,
        _ => S::GROUPS,
    };
}

impl<S: BlockSimd, B: Block32Kernel> EightRowsKernel for Block32Rows<S, B> {
    const CHUNK: usize = CHUNK;
    // With rows of 768 elements, the next eight come too late: Q8_0 is 1.45 times as fast so.
    const PREFETCHED: usize = 2 * ROWS;
    type Column = GroupColumn;

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut GroupColumn) {
        // SAFETY: `prepare` has the contract of this function. `start` and `len` are multiples of
        // 32, as `k` is. `column` is valid and accessed by no one else.
        unsafe {
            prepare::<S, B>(x, start, len, column);
            if let Codes::Nibbles(_) = B::CODES {
                split_halves(&mut (*column).quants, Self::AT_ONCE);
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<const C: usize>(
        rows: &EightRows,
        k: usize,
        x: *const GroupColumn,
    ) -> [__m256; C] {
        let groups = k / 32;
        let chunks = groups.div_ceil(GROUPS);
        // SAFETY: `chunk_times` gets groups `first .. first + n` with `first + n <= groups`, all in
        // the rows, and chunk `first / GROUPS < chunks` of the `C` columns of `x`. The caller
        // guarantees the rows, the columns and the instructions.
        unsafe {
            let mut acc = [Avx2::v_splat(0.0); C];
            for chunk in 0..groups / GROUPS {
                let x = x.add(chunk);
                Self::chunk_times::<C>(rows, chunk * GROUPS, GROUPS, x, chunks, &mut acc);
            }
            let left = groups % GROUPS;
            if left > 0 {
                let x = x.add(chunks - 1);
                Self::chunk_times::<C>(rows, groups - left, left, x, chunks, &mut acc);
            }
            acc
        }
    }
}

/// The first halves of `groups` groups, then their second halves: the order of the nibbles of as
/// many blocks in two vectors.
fn split_halves(quants: &mut [[u32; 8]; GROUPS], groups: usize) {
    for quants in quants.chunks_exact_mut(groups) {
        let mut split = [[0; 4]; 2 * GROUPS];
        for (g, group) in quants.iter().enumerate() {
            split[g].copy_from_slice(&group[..4]);
            split[groups + g].copy_from_slice(&group[4..]);
        }
        let split = split[..2 * groups].as_flattened();
        quants.as_flattened_mut().copy_from_slice(split);
    }
}

impl<S: BlockSimd, B: Block32Kernel> Block32Rows<S, B> {
    /// Eight rows times `C` columns: `n` groups from group `first` on. The chunks of `x` with these
    /// groups are `chunks` apart from one column to the next.
    ///
    /// # Safety
    /// Each row is readable for the groups, and `x` has `C` prepared columns with their chunk. `n
    /// <= 8`, and `first` is a multiple of 8. The processor has the instructions of `S`.
    #[inline(always)]
    unsafe fn chunk_times<const C: usize>(
        rows: &EightRows,
        first: usize,
        n: usize,
        x: *const GroupColumn,
        chunks: usize,
        acc: &mut [__m256; C],
    ) {
        const {
            assert!(S::LANES < B::ONE_ORDER_LANES || B::ELEMENTS == 32 && !B::HALF_SCALES);
        }
        // SAFETY: groups `first .. first + n` are in the rows. `scales`, `load_quads` and `groups`
        // get `n` or the last group, so no byte behind a row is read. `x` has `C` chunks of eight
        // groups of 32 bytes; `g < n`, a multiple of `AT_ONCE`, which divides 8, so the vectors of
        // activations from `g` on are inside. Groups from `n` on have arbitrary activations, whose
        // sums are not used. The caller guarantees the rows, the columns and the instructions.
        unsafe {
            let (d, m) = Self::scales(rows, first, n);
            for g in (0..n).step_by(Self::AT_ONCE) {
                let at = (first + g) * size_of::<B>();
                rows.prefetch(ROWS * at, ROWS * (at + Self::AT_ONCE * size_of::<B>()));
                let mut dots = [[S::zero_int(); ROWS]; C];
                for r in 0..ROWS {
                    let row = rows.rows[r];
                    if let Codes::Nibbles(offset) = B::CODES {
                        let codes = row.add(at + offset);
                        let codes = S::load_quads(codes, size_of::<B>(), n - 1 - g);
                        let low = B::decode::<S>(S::low_nibbles(codes));
                        let high = B::decode::<S>(S::high_nibbles(codes));
                        for c in 0..C {
                            let x = (*x.add(c * chunks)).quants.as_ptr().add(g).cast::<u8>();
                            let x = [S::load_int(x), S::load_int(x.add(4 * S::LANES))];
                            dots[c][r] = dot_halves::<S, B>([low, high], x);
                        }
                    } else {
                        let q = S::groups::<B>(row, first + g, first + n - 1);
                        for c in 0..C {
                            let x = (*x.add(c * chunks)).quants.as_ptr().add(g).cast::<u8>();
                            dots[c][r] = dot::<S, B>(S::zero_int(), q, S::load_int(x));
                        }
                    }
                }
                for c in 0..C {
                    let x = &*x.add(c * chunks);
                    let sums = match B::CODES {
                        Codes::Nibbles(_) => lane_sums::<S>(dots[c]),
                        _ => group_sums::<S>(dots[c]),
                    };
                    for i in 0..Self::AT_ONCE {
                        let g = g + i;
                        if g >= n {
                            break;
                        }
                        let mut sum = sums[i];
                        if offset::<S, B>() != 0 {
                            let correction = _mm256_set1_epi32(x.corrections[g][0]);
                            sum = _mm256_add_epi32(sum, correction);
                        }
                        let scale =
                            Avx2::v_mul(_mm256_loadu_ps(d[g].as_ptr()), Avx2::v_splat(x.scales[g]));
                        acc[c] = Avx2::v_mul_add(_mm256_cvtepi32_ps(sum), scale, acc[c]);
                        if B::HAS_MIN {
                            let m = _mm256_loadu_ps(m[g].as_ptr());
                            acc[c] = Avx2::v_mul_add(m, Avx2::v_splat(x.sums[g]), acc[c]);
                        }
                    }
                }
            }
        }
    }

    /// The scales and the minimums of `n` groups from group `first` on: for each group, one of each
    /// row.
    ///
    /// # Safety
    /// As [`Block32Rows::chunk_times`].
    #[inline(always)]
    unsafe fn scales(
        rows: &EightRows,
        first: usize,
        n: usize,
    ) -> ([[f32; ROWS]; GROUPS], [[f32; ROWS]; GROUPS]) {
        let (mut row_d, mut row_m) = ([[0.0f32; GROUPS]; ROWS], [[0.0f32; GROUPS]; ROWS]);
        let (mut d, mut m) = ([[0.0; ROWS]; GROUPS], [[0.0; ROWS]; GROUPS]);
        // SAFETY: the caller guarantees groups `first .. first + n`, `n <= 8`, of each row, and the
        // instructions. A block whose codes are 32 bytes begins with the F16 of its scale. Each
        // array has eight rows of eight floats, 32 bytes, and the arrays do not overlap.
        unsafe {
            if let Codes::Bytes(_) = B::CODES {
                const { assert!(!B::HAS_MIN || !matches!(B::CODES, Codes::Bytes(_))) }
                for g in 0..n {
                    let halves = first_halves(&rows.rows, (first + g) * size_of::<B>());
                    _mm256_storeu_ps(d[g].as_mut_ptr(), halves);
                }
                return (d, m);
            }
            for r in 0..ROWS {
                let (d, m) = chunk_scales::<S, B>(rows.rows[r], first, n);
                _mm256_storeu_ps(row_d[r].as_mut_ptr(), d);
                if B::HAS_MIN {
                    _mm256_storeu_ps(row_m[r].as_mut_ptr(), m);
                }
            }
            const BYTES: usize = ROWS * size_of::<f32>();
            Avx2::v_transpose(row_d.as_ptr().cast(), BYTES, d.as_mut_ptr().cast(), BYTES);
            if B::HAS_MIN {
                Avx2::v_transpose(row_m.as_ptr().cast(), BYTES, m.as_mut_ptr().cast(), BYTES);
            }
        }
        (d, m)
    }
}

/// The F16 at byte `at` of each row.
///
/// # Safety
/// Each row is readable for 16 bytes from `at` on. The processor has AVX2 and F16C.
#[inline(always)]
unsafe fn first_halves(rows: &[*const u8; ROWS], at: usize) -> __m256 {
    // SAFETY: eight loads of 16 bytes, which the caller guarantees at `at` of each row. Unpacking
    // and conversion are on registers. The caller guarantees AVX2 and F16C.
    unsafe {
        let load = |r: usize| _mm_loadu_si128(rows[r].add(at).cast());
        let two = |r: usize| _mm_unpacklo_epi16(load(r), load(r + 1));
        let four = |r: usize| _mm_unpacklo_epi32(two(r), two(r + 2));
        _mm256_cvtph_ps(_mm_unpacklo_epi64(four(0), four(4)))
    }
}
