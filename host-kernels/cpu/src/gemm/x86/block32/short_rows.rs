//! Products of short rows, such as keys, with few columns, such as queries: as many rows at a time
//! as a vector has lanes. Each four quants of the rows are transposed to one vector, so that
//! nothing is summed across lanes. The order of sums is that of a panel, for any number of columns.

use super::chunk::{CHUNK, GroupColumn, prepare};
use super::dot::{dot, offset};
use crate::formats::{BlockQ8_0, BlockQ8_1};
use crate::gemm::kernel::GemmArgs;
use crate::gemm::x86::activations::quantizer;
use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::block32_decode::{GROUPS, decode_words, depth, rows_from};
use crate::gemm::x86::blocks::{Block32Kernel, Codes};

/// Bytes of a column of `k` elements, prepared by [`prepare_column`].
pub(in crate::gemm) fn column_bytes(k: usize) -> usize {
    k.div_ceil(CHUNK) * size_of::<GroupColumn>()
}

/// Rounds a column of `k` floats to the activations of `B`, and prepares them.
///
/// # Safety
/// As [`crate::formats::QuantizeRow`] with blocks of 32 elements and [`column_bytes`] bytes at
/// `to`, which are aligned to floats. The processor has the instructions of `S`.
#[inline(always)]
pub(in crate::gemm::x86) unsafe fn prepare_column<S: BlockSimd, B: Block32Kernel>(
    from: *const f32,
    to: *mut u8,
    k: usize,
) {
    const BYTES: usize = GROUPS
        * if size_of::<BlockQ8_0>() > size_of::<BlockQ8_1>() {
            size_of::<BlockQ8_0>()
        } else {
            size_of::<BlockQ8_1>()
        };
    let activation = match B::HAS_MIN {
        true => crate::formats::Type::Q8_1,
        false => crate::formats::Type::Q8_0,
    };
    let quantize = quantizer(activation, S::LANES == 16).expect("both have a conversion");
    let columns = to.cast::<GroupColumn>();
    let mut blocks = [0u8; BYTES];
    for (i, start) in (0..k).step_by(CHUNK).enumerate() {
        let len = CHUNK.min(k - start);
        // SAFETY: the caller guarantees `k >= start + len` floats at `from`, a multiple of 32, and
        // `k.div_ceil(CHUNK) > i` chunks at `to`. `blocks` has the activations of a chunk. A chunk
        // consists of numbers, so any bytes are valid.
        unsafe {
            quantize(from.add(start), blocks.as_mut_ptr(), len);
            prepare::<S, B>(blocks.as_ptr(), 0, len, columns.add(i));
        }
    }
}

/// Multiplies rows with prepared columns.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`; the columns are those of [`prepare_column`],
/// and there is no table.
#[inline(always)]
pub(in crate::gemm::x86) unsafe fn gemm<S: BlockSimd, B: Block32Kernel>(call: &GemmArgs) {
    let groups = call.k / 32;
    for first in (0..call.rows).step_by(S::LANES) {
        let rows = rows_from(call, first, S::LANES);
        let n = S::LANES.min(call.rows - first);
        let mut c = 0;
        while c < call.cols {
            macro_rules! columns {
                ($n:literal) => {{
                    // SAFETY: `c + $n <= call.cols`, and all columns are prepared. `rows` has the
                    // rows of the call, the last one repeated. `n` rows from `first` on have a
                    // result in each column. The caller guarantees the instructions.
                    unsafe {
                        let x = call.column(c);
                        let results = times::<S, B, $n>(rows.as_ptr(), groups, x, call.x_stride);
                        for (i, result) in results.into_iter().enumerate() {
                            S::v_store(result, call.result(c + i).add(first), n);
                        }
                    }
                    c += $n;
                }};
            }
            match call.cols - c {
                8.. if S::LANES == 16 => columns!(8),
                4.. => columns!(4),
                2.. => columns!(2),
                _ => columns!(1),
            }
        }
    }
}

/// `S::LANES` rows times `C` columns, `stride` bytes apart.
///
/// # Safety
/// `rows` points to `S::LANES` pointers, each readable for `groups` groups. The columns from `x` on
/// are prepared. The processor has the instructions of `S`.
#[inline(always)]
unsafe fn times<S: BlockSimd, B: Block32Kernel, const C: usize>(
    rows: *const *const u8,
    groups: usize,
    x: *const u8,
    stride: usize,
) -> [S::Vector; C] {
    const { assert!(B::SCALE_FIRST && B::ELEMENTS == 32 && !B::HALF_SCALES) }
    // The groups whose quants are transposed at once.
    let at_once = match B::CODES {
        Codes::Other => S::GROUPS,
        _ => 1,
    };
    // SAFETY: group `first + i < groups` is in the rows, and in chunk `(first + i) / GROUPS` of the
    // `C` columns. `transpose_groups` gets the last group, and `decode_words` and `scales` a block
    // of the rows. A block of `SCALE_FIRST` begins with one or two F16. The caller guarantees the
    // instructions of `S`.
    unsafe {
        let mut acc = [S::v_splat(0.0); C];
        let mut words = [[S::zero_int(); 8]; 2];
        for first in (0..groups).step_by(at_once) {
            if let Codes::Other = B::CODES {
                transpose_groups::<S, B>(rows, first, groups - 1, &mut words);
            } else {
                let block = first * size_of::<B>();
                decode_words::<S, B>(rows, block, |i, word| words[0][i] = word);
            }
            for i in 0..at_once.min(groups - first) {
                let block = (first + i) * size_of::<B>();
                let d = S::halves_of_rows(rows, block);
                let m = match B::HAS_MIN {
                    true => S::halves_of_rows(rows, block + size_of::<u16>()),
                    false => d,
                };
                for c in 0..C {
                    let column = x.add(c * stride).cast::<GroupColumn>();
                    let column = &*column.add((first + i) / GROUPS);
                    let g = (first + i) % GROUPS;
                    let dots = group_times::<S, B>(&words[i], column, g);
                    let scale = S::v_mul(d, S::v_splat(column.scales[g]));
                    acc[c] = S::v_mul_add(S::to_floats(dots), scale, acc[c]);
                    if B::HAS_MIN {
                        acc[c] = S::v_mul_add(m, S::v_splat(column.sums[g]), acc[c]);
                    }
                }
            }
        }
        acc
    }
}

/// The integer dot products of the quants of `S::LANES` rows and group `g` of a column.
///
/// # Safety
/// The processor has the instructions of `S`.
#[inline(always)]
unsafe fn group_times<S: BlockSimd, B: Block32Kernel>(
    words: &[S::I; 8],
    column: &GroupColumn,
    g: usize,
) -> S::I {
    // SAFETY: everything is on registers. The caller guarantees the instructions of `S`.
    unsafe {
        let mut dots = S::zero_int();
        if offset::<S, B>() != 0 {
            dots = S::splat_int(column.corrections[g][0] as u32);
        }
        let depth = const { depth::<S>(B::MAX_QUANT, 8) };
        for first in (0..8).step_by(depth) {
            let mut sums_i16 = S::zero_int();
            for i in first..first + depth {
                let x = S::splat_int(column.quants[g][i]);
                if depth == 1 {
                    dots = dot::<S, B>(dots, words[i], x);
                } else {
                    sums_i16 = S::add_i16(sums_i16, S::multiply_pairs(words[i], x));
                }
            }
            if depth > 1 {
                dots = S::add_i16_pairs(dots, sums_i16);
            }
        }
        dots
    }
}

/// The quants of the `S::GROUPS` groups from group `g` of `S::LANES` rows on: eight vectors of each
/// group, of which vector `i` has the elements `4 i .. 4 i + 4` of each row. The quants of groups
/// after `last` are arbitrary.
///
/// # Safety
/// `rows` points to `S::LANES` pointers, each readable for groups up to `last >= g`. The processor
/// has the instructions of `S`.
#[inline(always)]
unsafe fn transpose_groups<S: BlockSimd, B: Block32Kernel>(
    rows: *const *const u8,
    g: usize,
    last: usize,
    words: &mut [[S::I; 8]; 2],
) {
    /// Bytes of the longest vector, and rows of the largest square of words.
    const BYTES: usize = 64;
    let (mut quants, mut transposed) = ([[0u8; BYTES]; 16], [[0u8; BYTES]; 16]);
    // SAFETY: `r < S::LANES`, and row `r` is readable for groups `g` to `last`. A vector has
    // `4 * S::LANES <= BYTES` bytes, and both arrays have `S::LANES <= 16` rows of a vector, which
    // is the square that is transposed; they do not overlap. `S::GROUPS` groups of eight vectors
    // are `S::LANES` vectors. The caller guarantees the instructions of `S`.
    unsafe {
        for r in 0..S::LANES {
            let vector = S::groups::<B>(*rows.add(r), g, last);
            S::store_int(quants[r].as_mut_ptr(), vector);
        }
        let to = transposed.as_mut_ptr().cast::<u8>();
        S::v_transpose(quants.as_ptr().cast(), BYTES, to, BYTES);
        for i in 0..S::LANES {
            words[i / 8][i % 8] = S::load_int(transposed[i].as_ptr());
        }
    }
}
