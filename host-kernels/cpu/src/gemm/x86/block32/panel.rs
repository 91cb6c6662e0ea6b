//! Products with many columns: chunks of weights, unpacked into panels.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::chunk::{CHUNK, GroupColumn, prepare};
use super::dot::{dot, offset};
use crate::gemm::kernel::GemmArgs;
use crate::gemm::x86::amx::BytePanel;
use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::block32_decode::{GROUPS, chunk_scales, decode_words, depth, rows_from};
use crate::gemm::x86::blocks::{Block32Kernel, Codes};
use crate::gemm::x86::panel::{Panel, Prefetch, Tile, interleave};
use crate::simd::Avx512;

/// A chunk of up to 32 rows of weights, interleaved.
#[repr(C, align(64))]
pub(in crate::gemm::x86) struct Block32Panel<S, B> {
    /// For each four elements of `k`, four quants of each row.
    quants: [[u8; 128]; CHUNK / 4],
    /// For each group, the scale of each row. Then for each group, the minimum of each row, or the
    /// scale of the second half of the group.
    scales: [[f32; 32]; 2 * GROUPS],
    /// The quants of each row before they are interleaved, for formats of [`Codes::Other`].
    rows: [[u8; CHUNK]; 32],
    /// The scales of each row before they are interleaved.
    row_scales: [[f32; 16]; 32],
    format: PhantomData<(S, B)>,
}

impl<S: BlockSimd, B: Block32Kernel> Panel<S> for Block32Panel<S, B> {
    const CHUNK: usize = CHUNK;
    const BYTES: usize = CHUNK / B::ELEMENTS * size_of::<B>();
    const VECTORS: usize = S::PANEL;
    const COLS: usize = S::COLS;
    type Column = GroupColumn;
    const UNITS: usize = GROUPS;

    #[inline(always)]
    fn new() -> Self {
        Block32Panel {
            quants: [[0; 128]; CHUNK / 4],
            scales: [[0.0; 32]; 2 * GROUPS],
            rows: [[0; CHUNK]; 32],
            row_scales: [[0.0; 16]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut GroupColumn) {
        // SAFETY: `prepare` has the contract of this function: a column of `start + len`
        // activations at `x`, `start` and `len` multiples of 32, as `k` is, and a valid `column`.
        // The contract of `Panel` includes the instructions of `S`.
        unsafe { prepare::<S, B>(x, start, len, column) }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize) {
        let height = S::PANEL * S::LANES;
        let groups = len / 32;
        // SAFETY: `rows_from` returns rows of the call, readable for `call.k >= start + len`
        // weights: groups `first` to `last`. `height <= 32` rows and `groups <= GROUPS` groups fit
        // the arrays: 16 scales a row, and word `8 g + i`, `i < 8`, of `S::PANEL` vectors of rows.
        // A vector of `S::GROUPS` groups ends inside the `CHUNK` quants of a row. The contract of
        // `Panel` includes the instructions of `S`.
        unsafe {
            let first = start / 32;
            let last = first + groups - 1;
            let from = rows_from(call, row, height);
            for r in 0..height {
                let (d, m) = chunk_scales::<S, B>(from[r], first, groups);
                _mm256_storeu_ps(self.row_scales[r].as_mut_ptr(), d);
                _mm256_storeu_ps(self.row_scales[r].as_mut_ptr().add(8), m);
            }
            let rows = self.row_scales.as_ptr().cast();
            let scales = self.scales.as_mut_ptr().cast();
            let words = if B::HAS_MIN || B::HALF_SCALES { 16 } else { 8 };
            interleave::<S>(rows, 64, words, S::PANEL, scales);

            let quants = self.quants.as_mut_ptr().cast::<u8>();
            for g in 0..groups {
                let block = (first + g) * size_of::<B>();
                for v in 0..S::PANEL {
                    let rows = from.as_ptr().add(v * S::LANES);
                    decode_words::<S, B>(rows, block, |i, word| {
                        let offset = ((8 * g + i) * S::PANEL + v) * 4 * S::LANES;
                        S::store_int(quants.add(offset), word);
                    });
                }
            }
            if B::CODES == Codes::Other {
                for r in 0..height {
                    let mut g = 0;
                    while g < groups {
                        let q = S::groups::<B>(from[r], first + g, last);
                        S::store_int(self.rows[r].as_mut_ptr().add(32 * g), q);
                        g += S::GROUPS;
                    }
                }
                let rows = self.rows.as_ptr().cast();
                interleave::<S>(rows, CHUNK, groups * 8, S::PANEL, quants);
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<GroupColumn>,
        len: usize,
        prefetch: &mut Prefetch,
    ) {
        let Tile { columns, sums } = tile;
        // SAFETY: `unpack` has written the quants, eight words, and the scales of group `g < len /
        // 32 <= GROUPS` for `P * S::LANES` rows, with `P == VECTORS`. `columns` has `C` columns of
        // `len / 32` groups, each with eight words. The contract of `Panel` includes these, their
        // sums, and the instructions of `S`.
        unsafe {
            let mut acc = [[S::v_splat(0.0); C]; P];
            for p in 0..P {
                for c in 0..C {
                    acc[p][c] = sums.load::<S, P>(p, c);
                }
            }
            let mut panel = self.quants.as_ptr().cast::<u8>();
            // A scale belongs to a group, or to half of a group.
            let parts = if B::HALF_SCALES { 2 } else { 1 };
            for unit in 0..len / 32 * parts {
                let (g, part) = (unit / parts, unit % parts);
                if part == 0 {
                    prefetch.step();
                }
                let mut dots = [[S::zero_int(); C]; P];
                if offset::<S, B>() != 0 {
                    for c in 0..C {
                        let correction =
                            S::splat_int((*columns.add(c)).corrections[g][part] as u32);
                        for p in 0..P {
                            dots[p][c] = correction;
                        }
                    }
                }
                let words = 8 / parts;
                let depth = const { depth::<S>(B::MAX_QUANT, if B::HALF_SCALES { 4 } else { 8 }) };
                for first in (0..words).step_by(depth) {
                    let mut sums_i16 = [[S::zero_int(); C]; P];
                    for i in first..first + depth {
                        let mut w = [S::zero_int(); P];
                        for p in 0..P {
                            w[p] = S::load_int(panel.add(p * S::LANES * 4));
                        }
                        panel = panel.add(P * S::LANES * 4);
                        for c in 0..C {
                            let x = (*columns.add(c)).quants.as_ptr().cast::<u32>();
                            let x = S::splat_int(*x.add(8 * g + part * words + i));
                            for p in 0..P {
                                if depth == 1 {
                                    dots[p][c] = dot::<S, B>(dots[p][c], w[p], x);
                                } else {
                                    let products = S::multiply_pairs(w[p], x);
                                    sums_i16[p][c] = S::add_i16(sums_i16[p][c], products);
                                }
                            }
                        }
                    }
                    if depth > 1 {
                        for p in 0..P {
                            for c in 0..C {
                                dots[p][c] = S::add_i16_pairs(dots[p][c], sums_i16[p][c]);
                            }
                        }
                    }
                }
                let scales = self.scales.as_ptr().cast::<f32>();
                let (height, second) = (P * S::LANES, GROUPS * P * S::LANES);
                let d = scales.add(part * second + g * height);
                for p in 0..P {
                    let d = S::v_load(d.add(p * S::LANES), S::LANES);
                    for c in 0..C {
                        let d_x = S::v_splat((*columns.add(c)).scales[g]);
                        let dot = S::to_floats(dots[p][c]);
                        acc[p][c] = S::v_mul_add(dot, S::v_mul(d, d_x), acc[p][c]);
                    }
                    if B::HAS_MIN {
                        let m = scales.add(second + g * height + p * S::LANES);
                        let m = S::v_load(m, S::LANES);
                        for c in 0..C {
                            let s_x = S::v_splat((*columns.add(c)).sums[g]);
                            acc[p][c] = S::v_mul_add(m, s_x, acc[p][c]);
                        }
                    }
                }
            }
            for p in 0..P {
                for c in 0..C {
                    sums.store::<S, P>(p, c, acc[p][c]);
                }
            }
        }
    }
}

impl<B: Block32Kernel> BytePanel for Block32Panel<Avx512, B> {
    const GROUP: usize = if B::HALF_SCALES { 16 } else { 32 };

    #[inline(always)]
    unsafe fn bytes(&self, word: usize, v: usize) -> __m512i {
        // SAFETY: `unpack` has written the 128 bytes of `word`, of which vector `v < 2` is read.
        // The caller guarantees AVX-512.
        unsafe { _mm512_load_si512(self.quants[word].as_ptr().add(64 * v).cast()) }
    }

    #[inline(always)]
    unsafe fn factors(&self, group: usize, v: usize) -> (__m512, __m512) {
        let (g, part) = match B::HALF_SCALES {
            true => (group / 2, group % 2),
            false => (group, 0),
        };
        // SAFETY: `unpack` has written the scales of group `g < GROUPS` for 32 rows, of which
        // vector `v < 2` is read; behind those of all groups are the scales of the second halves,
        // or the minimums. The caller guarantees AVX-512.
        unsafe {
            let row = |i: usize| _mm512_load_ps(self.scales[i].as_ptr().add(16 * v));
            let d = row(part * GROUPS + g);
            let m = match B::HAS_MIN {
                true => row(GROUPS + g),
                false => _mm512_setzero_ps(),
            };
            let offset = _mm512_set1_ps(B::OFFSET as f32);
            (d, _mm512_fnmadd_ps(offset, d, m))
        }
    }
}
