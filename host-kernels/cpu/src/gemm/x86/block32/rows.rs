//! Products with few columns: row by row.

use std::arch::x86_64::*;

use super::columns::{Columns, moves_signs, prepare};
use super::dot::{dot, dot_halves, folds, offset};
use crate::gemm::kernel::GemmArgs;
use crate::gemm::thread_memory::PREPARED;
use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::block32_decode::GROUPS;
use crate::gemm::x86::blocks::{Block32Kernel, Codes};
use crate::gemm::x86::by_columns::by_columns;

/// Elements of a chunk: the eight scales of its groups fill a vector.
const CHUNK: usize = GROUPS * 32;

/// Multiplies row by row. The groups of a row are unpacked into registers and multiplied with up to
/// four columns.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn rows<S: BlockSimd, B: Block32Kernel>(call: &GemmArgs) {
    let groups = call.k / 32;
    // Whole chunks: a vector may be read past the last group, and is 0 there.
    let padded = call.k.next_multiple_of(CHUNK);
    let layout = Columns::new(padded);
    let mut memory = PREPARED.take(call.cols * layout.stride);
    let columns = memory.as_mut_ptr().cast::<u8>();
    // SAFETY: `columns` has `layout.stride` bytes, a multiple of 64, for each column and is aligned
    // to a cache line. `prepare` fills all columns before a row is multiplied; it reads `groups`
    // blocks of each column of the call. `r < call.rows`, so the row has `groups` groups and each
    // column a float of `dst`. Each arm multiplies at most the columns that are left. The caller
    // guarantees the contract of `Gemm` and the features of `S`.
    unsafe {
        for c in 0..call.cols {
            prepare::<S, B>(
                call.column(c),
                groups,
                padded,
                columns.add(c * layout.stride),
                &layout,
            );
        }
        for r in 0..call.rows {
            let row = call.w.add(r * call.w_stride);
            by_columns!(call.cols, c, COLUMNS, {
                let x = columns.add(c * layout.stride);
                let results = row_times::<S, B, COLUMNS>(row, groups, x, &layout);
                for (i, result) in results.into_iter().enumerate() {
                    *call.result(c + i).add(r) = result;
                }
            });
        }
    }
    PREPARED.give_back(memory);
}

/// The vectors in which each product is summed: independent sums hide the latency of an addition.
/// The number does not depend on the number of columns, so neither does a result.
const SUMS: usize = 2;

/// One row times `C` columns.
///
/// # Safety
/// `row` is readable for `groups` groups, `x` has `C` prepared columns of `layout`, and the
/// processor has the instructions of `S`.
#[inline(always)]
unsafe fn row_times<S: BlockSimd, B: Block32Kernel, const C: usize>(
    row: *const u8,
    groups: usize,
    x: *const u8,
    layout: &Columns,
) -> [f32; C] {
    // SAFETY: `chunk_times` gets groups `chunk .. chunk + n` with `chunk + n <= groups`, all in the
    // row, and the `C` columns of `x`. The caller guarantees the row, the columns and the
    // instructions of `S`.
    unsafe {
        let mut acc = [[S::v_splat(0.0); SUMS]; C];
        let mut mins = [_mm256_setzero_ps(); C];
        let mut chunk = 0;
        while chunk + GROUPS <= groups {
            let bytes = CHUNK / B::ELEMENTS * size_of::<B>();
            S::prefetch(row.add(chunk / GROUPS * bytes), bytes);
            chunk_times::<S, B, C>(row, chunk, GROUPS, groups, x, layout, &mut acc, &mut mins);
            chunk += GROUPS;
        }
        if chunk < groups {
            let n = groups - chunk;
            chunk_times::<S, B, C>(row, chunk, n, groups, x, layout, &mut acc, &mut mins);
        }
        let mut results = [0.0; C];
        for c in 0..C {
            let mut all = acc[c][0];
            for u in 1..SUMS {
                all = S::v_add(all, acc[c][u]);
            }
            results[c] = if B::HAS_MIN || folds::<S, B>() {
                S::sum_both(all, mins[c])
            } else {
                S::v_sum(all)
            };
        }
        results
    }
}

/// `n` groups of [`row_times`], from group `first` of `groups` on.
///
/// # Safety
/// As [`row_times`], with `n <= 8`, `first + n <= groups`, and `first` a multiple of 8.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn chunk_times<S: BlockSimd, B: Block32Kernel, const C: usize>(
    row: *const u8,
    first: usize,
    n: usize,
    groups: usize,
    x: *const u8,
    layout: &Columns,
    acc: &mut [[S::Vector; SUMS]; C],
    mins: &mut [__m256; C],
) {
    // SAFETY: groups `first .. first + n` are in the row. `scales` gets `n`, `load_quads` and
    // `groups` the last group, so no byte behind the row is read. The columns are padded to whole
    // chunks of eight groups, so a vector of activations, corrections, scales or sums that begins
    // at one of these groups is inside them. The caller guarantees the row, the `C` columns and the
    // instructions of `S`.
    unsafe {
        let (d, m) = match B::CODES {
            Codes::Nibbles(_) => S::scales_for_quads::<B>(row, first, n),
            _ => S::scales::<B>(row, first, n),
        };
        let mut scales = [_mm256_setzero_ps(); C];
        let mut second_scales = [_mm256_setzero_ps(); C];
        for c in 0..C {
            let column = x.add(c * layout.stride);
            let d_x = _mm256_loadu_ps(column.add(layout.scales).cast::<f32>().add(first));
            scales[c] = _mm256_mul_ps(d, d_x);
            if B::HALF_SCALES {
                second_scales[c] = _mm256_mul_ps(m, d_x);
            }
            if B::HAS_MIN || folds::<S, B>() {
                let s_x = _mm256_loadu_ps(column.add(layout.sums).cast::<f32>().add(first));
                let m = if B::HAS_MIN { m } else { d };
                mins[c] = _mm256_fmadd_ps(m, s_x, mins[c]);
            }
        }
        // The groups of a vector.
        let at_once = match B::CODES {
            Codes::Nibbles(_) => S::LANES / 4,
            _ => S::GROUPS,
        };
        let vectors = n.div_ceil(at_once);
        for first_v in (0..vectors).step_by(SUMS) {
            for u in 0..SUMS {
                let v = first_v + u;
                if v >= vectors {
                    break;
                }
                let g = first + v * at_once;
                let x = x.add(g * 32);
                if let Codes::Nibbles(offset) = B::CODES {
                    let codes = row.add(g * size_of::<B>() + offset);
                    // A constant if the chunk is whole.
                    let last = if n == GROUPS { at_once } else { groups - g } - 1;
                    let codes = S::load_quads(codes, size_of::<B>(), last);
                    let low = B::decode::<S>(S::low_nibbles(codes));
                    let high = B::decode::<S>(S::high_nibbles(codes));
                    for c in 0..C {
                        let x = x.add(c * layout.stride);
                        let (x_low, x_high) = (S::load_int(x), S::load_int(x.add(4 * S::LANES)));
                        let dots = if moves_signs::<S, B>() {
                            let magnitudes = x.add(layout.corrections);
                            let (m_low, m_high) = (
                                S::load_int(magnitudes),
                                S::load_int(magnitudes.add(4 * S::LANES)),
                            );
                            let dots = S::dot_with_magnitudes(
                                S::zero_int(),
                                S::add_128(low),
                                x_low,
                                m_low,
                            );
                            S::dot_with_magnitudes(dots, S::add_128(high), x_high, m_high)
                        } else {
                            dot_halves::<S, B>([low, high], [x_low, x_high])
                        };
                        let scale = S::spread_quads(scales[c], v);
                        acc[c][u] = S::v_mul_add(S::to_floats(dots), scale, acc[c][u]);
                    }
                    continue;
                }
                let q = S::groups::<B>(row, g, groups - 1);
                for c in 0..C {
                    let x = x.add(c * layout.stride);
                    let start = if offset::<S, B>() == 0 || folds::<S, B>() {
                        S::zero_int()
                    } else {
                        S::load_int(x.add(layout.corrections))
                    };
                    let dots = dot::<S, B>(start, q, S::load_int(x));
                    let mut scale = S::spread_groups(scales[c], v);
                    if B::HALF_SCALES {
                        scale = S::second_halves(scale, S::spread_groups(second_scales[c], v));
                    }
                    acc[c][u] = S::v_mul_add(S::to_floats(dots), scale, acc[c][u]);
                }
            }
        }
    }
}
