//! Products with the BF16 dot product instruction (AVX-512 BF16), which adds the products of pairs.
//!
//! Weights are BF16, or F16 rounded to BF16 (see
//! [`MatmulKernel::rounded`](crate::gemm::MatmulKernel::rounded)).

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::int_simd::{IntSimd, prefetch_line};
use super::panel::{self, Panel, Prefetch, Tile};
use crate::gemm::kernel::GemmArgs;
use crate::simd::{Avx512, Simd, register_fns};

/// The elements of `k` in a panel.
const CHUNK: usize = 128;
/// Pairs in a chunk.
const PAIRS: usize = CHUNK / 2;
/// Pairs between two prefetches of weights.
const STEP: usize = 8;
/// From this many columns on, a panel is faster than tiles of rows and columns.
pub(super) const PANEL_COLS: usize = 32;
/// Independent sums of one product, which hide the latency of the instruction.
const UNROLL: usize = 4;

/// Weights that are loaded as bfloat16, two bytes each.
///
/// # Safety
/// The processor has AVX-512 BF16. `p` is readable for the weights that are loaded, two bytes each:
/// 32, or `n`. No alignment is needed.
pub(in crate::gemm) trait Bf16Weights: Copy + 'static {
    /// 32 weights whose bits are `halves`.
    unsafe fn round(halves: __m512i) -> __m512i;

    /// 32 weights.
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        // SAFETY: one vector of 64 bytes is the 32 weights that are readable at `p`. `round` takes
        // it in a register and needs AVX-512 BF16, which the caller guarantees.
        unsafe { Self::round(Avx512::load_int(p)) }
    }

    /// `n < 32` weights, the rest 0.
    #[inline(always)]
    unsafe fn load_first(p: *const u8, n: usize) -> __m512i {
        // SAFETY: the mask has the low `n` of 32 bits, and a masked word is not accessed, so the
        // `n` weights that are readable at `p` are read. The load needs AVX-512 BW and `round`
        // AVX-512 BF16, which the caller guarantees.
        unsafe { Self::round(_mm512_maskz_loadu_epi16((1 << n) - 1, p.cast())) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bf16;
#[derive(Clone, Copy)]
pub(super) struct F16;

impl Bf16Weights for Bf16 {
    #[inline(always)]
    unsafe fn round(halves: __m512i) -> __m512i {
        halves
    }
}

impl Bf16Weights for F16 {
    #[inline(always)]
    unsafe fn round(halves: __m512i) -> __m512i {
        // SAFETY: `__m512bh` and `__m512i` both have 64 bytes, and every bit pattern is valid for
        // both. The conversions take registers, and need AVX-512 BF16, which the caller guarantees.
        unsafe {
            let low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
            let high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
            std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
        }
    }
}

/// Multiplies, in tiles of rows and columns or through panels.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with AVX-512 BF16.
#[inline(always)]
pub(super) unsafe fn gemm<W: Bf16Weights>(call: &GemmArgs) {
    // SAFETY: `panel::gemm` and `few` have the contract of this function for `call`, as it is. `r <
    // call.rows`, so row `r` and the only column, `call.x`, are readable for `call.k` elements of
    // two bytes, and `dst` is writable for float `r`. The caller guarantees AVX-512 BF16.
    unsafe {
        match call.cols {
            PANEL_COLS.. => panel::gemm::<Avx512, PairPanel<W>>(call),
            1 => {
                for r in 0..call.rows {
                    let row = call.w.add(r * call.w_stride);
                    *call.dst.add(r) = row_dot::<W>(row, call.x, call.k);
                }
            }
            _ => few::<W>(call),
        }
    }
}

/// Multiplies tile by tile. The loop over the rows is the outer one, so that each row is read from
/// memory once.
///
/// # Safety
/// As [`gemm`].
#[inline(always)]
unsafe fn few<W: Bf16Weights>(call: &GemmArgs) {
    // The sums of two rows and eight columns, or of four rows and four columns, fit the registers.
    let height = if call.cols >= 8 { 2 } else { 4 };
    let mut r = 0;
    while r < call.rows {
        let rows = if call.rows - r >= height { height } else { 1 };
        let mut c = 0;
        while c < call.cols {
            // SAFETY: `tile::<R, C>(r, c)` is called only with `R = rows <= call.rows - r` and `C
            // <= call.cols - c`. The rest of its contract is that of `gemm`, which the caller
            // guarantees for `call`.
            c += unsafe {
                match (rows, call.cols - c) {
                    (2, 8..) => tile::<W, 2, 8>(call, r, c),
                    (2, 4..) => tile::<W, 2, 4>(call, r, c),
                    (2, 2..) => tile::<W, 2, 2>(call, r, c),
                    (2, _) => tile::<W, 2, 1>(call, r, c),
                    (4, 4..) => tile::<W, 4, 4>(call, r, c),
                    (4, 2..) => tile::<W, 4, 2>(call, r, c),
                    (4, _) => tile::<W, 4, 1>(call, r, c),
                    _ => tile::<W, 1, 1>(call, r, c),
                }
            };
        }
        r += rows;
    }
}

/// `acc` plus the dot product of the two pairs of each lane.
///
/// # Safety
/// The processor has AVX-512 BF16.
#[inline(always)]
unsafe fn dot(acc: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: `__m512i` and `__m512bh` both have 64 bytes, and every bit pattern is valid for both.
    // The product takes registers, and needs AVX-512 BF16, which the caller guarantees.
    unsafe {
        let a = std::mem::transmute::<__m512i, __m512bh>(a);
        let b = std::mem::transmute::<__m512i, __m512bh>(b);
        _mm512_dpbf16_ps(acc, a, b)
    }
}

/// One row times one column.
///
/// # Safety
/// `row` and `x` are readable for `k` elements of two bytes. The processor has AVX-512 BF16.
#[inline(always)]
unsafe fn row_dot<W: Bf16Weights>(row: *const u8, x: *const u8, k: usize) -> f32 {
    // SAFETY: `row` and `x` are readable for `k` elements. A vector of 32 elements is loaded from
    // element `i` only if `i + 32 <= k`; the last mask has the low `k - i` bits, and a masked word
    // is not accessed. The caller guarantees AVX-512 BF16.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); UNROLL];
        let mut i = 0;
        while i + UNROLL * 32 <= k {
            Avx512::prefetch(row.add(2 * i), UNROLL * 64);
            for u in 0..UNROLL {
                let at = 2 * (i + 32 * u);
                acc[u] = dot(acc[u], W::load(row.add(at)), Avx512::load_int(x.add(at)));
            }
            i += UNROLL * 32;
        }
        while i < k {
            let mask = if k - i >= 32 {
                u32::MAX
            } else {
                (1 << (k - i)) - 1
            };
            let w = W::round(_mm512_maskz_loadu_epi16(mask, row.add(2 * i).cast()));
            let x = _mm512_maskz_loadu_epi16(mask, x.add(2 * i).cast());
            acc[0] = dot(acc[0], w, x);
            i += 32;
        }
        let (low, high) = (_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3]));
        Avx512::v_sum(_mm512_add_ps(low, high))
    }
}

/// Rows `r .. r + R` times columns `c .. c + C`. Returns `C`.
///
/// # Safety
/// As [`gemm`]; `r + R <= call.rows` and `c + C <= call.cols`.
#[inline(always)]
unsafe fn tile<W: Bf16Weights, const R: usize, const C: usize>(
    call: &GemmArgs,
    r: usize,
    c: usize,
) -> usize {
    // SAFETY: rows `r .. r + R` and columns `c .. c + C` are in the call, each readable for
    // `call.k` elements. A whole vector is loaded from element `i` only if `i + 32 <= call.k`; the
    // last loads are masked to `call.k - i`. `sums` has the 16 floats of a vector, and `R * C <=
    // 16`. `dst` has a float for each row and column. The caller guarantees AVX-512 BF16.
    unsafe {
        let w = call.w.add(r * call.w_stride);
        let x = call.x.add(c * call.x_stride);
        let mut acc = [[_mm512_setzero_ps(); C]; R];
        let mut i = 0;
        while i + 32 <= call.k {
            let mut x_now = [_mm512_setzero_si512(); C];
            for c in 0..C {
                x_now[c] = Avx512::load_int(x.add(c * call.x_stride + 2 * i));
            }
            for r in 0..R {
                let w = w.add(r * call.w_stride + 2 * i);
                if c == 0 {
                    // The next rows at the same offset.
                    prefetch_line::<_MM_HINT_T0>(w.wrapping_add(R.wrapping_mul(call.w_stride)));
                }
                let w = W::load(w);
                for c in 0..C {
                    acc[r][c] = dot(acc[r][c], w, x_now[c]);
                }
            }
            i += 32;
        }
        if i < call.k {
            let mask = (1 << (call.k - i)) - 1;
            for r in 0..R {
                let w = W::load_first(w.add(r * call.w_stride + 2 * i), call.k - i);
                for c in 0..C {
                    let x = x.add(c * call.x_stride + 2 * i);
                    acc[r][c] = dot(acc[r][c], w, _mm512_maskz_loadu_epi16(mask, x.cast()));
                }
            }
        }
        // Every tile reduces its sums in the same order: a result must not depend on the tile that
        // it is in.
        let mut all = [_mm512_setzero_ps(); 16];
        for r in 0..R {
            for c in 0..C {
                all[r * C + c] = acc[r][c];
            }
        }
        let mut sums = [0f32; 16];
        _mm512_storeu_ps(sums.as_mut_ptr(), sum_each(all));
        for r_tile in 0..R {
            for c_tile in 0..C {
                let dst = call.dst.add((c + c_tile) * call.dst_stride + r + r_tile);
                *dst = sums[r_tile * C + c_tile];
            }
        }
    }
    C
}

register_fns! {
    avx512;
    /// The sum of the lanes of each of 16 vectors, in two thirds of the instructions of 16 separate
    /// sums.
    ///
    /// # Safety
    /// AVX-512.
    unsafe fn sum_each(v: [__m512; 16]) -> __m512 {
        // For each four vectors, the sums of their four 128-bit lanes.
        let mut fours = [_mm512_setzero_ps(); 4];
        for (i, four) in fours.iter_mut().enumerate() {
            let pair = |a: __m512, b: __m512| {
                _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
            };
            let ab = _mm512_castps_pd(pair(v[4 * i], v[4 * i + 1]));
            let cd = _mm512_castps_pd(pair(v[4 * i + 2], v[4 * i + 3]));
            let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
            *four = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        }
        let halves = |a: __m512, b: __m512| {
            let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
            _mm512_add_ps(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
        };
        halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]))
    }
}

/// 32 rows of a chunk, interleaved by pairs. As a [`Panel`], it needs AVX-512 BF16 besides the
/// instructions of [`Avx512`].
#[repr(C, align(64))]
pub(super) struct PairPanel<W> {
    pairs: [[u32; 32]; PAIRS],
    rows: [[u16; CHUNK]; 32],
    format: PhantomData<W>,
}

impl<W: Bf16Weights> PairPanel<W> {
    /// [`Panel::unpack`] to other memory.
    ///
    /// # Safety
    /// As [`Panel::unpack`]. `pairs` is writable for `len / 2` pairs of 32 rows, rounded up to 16
    /// pairs.
    #[inline(always)]
    pub(super) unsafe fn unpack_to(
        &mut self,
        call: &GemmArgs,
        row: usize,
        start: usize,
        len: usize,
        pairs: *mut [u32; 32],
    ) {
        // SAFETY: `call.row` returns a row of the call, readable for `call.k >= start + len`
        // weights; the loads end at `start + len`. `len <= CHUNK`, a multiple of 32, so the stores
        // are inside the `CHUNK` elements of `to`. `interleave` reads 32 rows of `CHUNK` elements
        // and writes `len / 2` pairs of 32 rows, rounded up to 16 pairs, which the caller
        // guarantees. The contract of `Panel` includes AVX-512.
        unsafe {
            for (r, to) in self.rows.iter_mut().enumerate() {
                let from = call.row(row + r);
                let (from, to) = (from.add(2 * start), to.as_mut_ptr());
                let whole = len / 32 * 32;
                for i in (0..whole).step_by(32) {
                    Avx512::store_int(to.add(i).cast(), W::load(from.add(2 * i)));
                }
                if whole < len {
                    let last = W::load_first(from.add(2 * whole), len - whole);
                    Avx512::store_int(to.add(whole).cast(), last);
                }
            }
            let rows = self.rows.as_ptr().cast();
            panel::interleave::<Avx512>(rows, CHUNK * 2, len.div_ceil(2), 2, pairs.cast());
        }
    }
}

impl<W: Bf16Weights> Panel<Avx512> for PairPanel<W> {
    const CHUNK: usize = CHUNK;
    const BYTES: usize = CHUNK * 2;
    const VECTORS: usize = 2;
    const COLS: usize = 12;
    /// Pairs of activations. The last pair of an odd chunk contains a zero.
    type Column = [u32; PAIRS];
    const UNITS: usize = PAIRS / STEP;

    #[inline(always)]
    fn new() -> Self {
        PairPanel {
            pairs: [[0; 32]; PAIRS],
            rows: [[0; CHUNK]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut [u32; PAIRS]) {
        // SAFETY: `x` is readable for `start + len` elements of two bytes, of which the last `len`
        // are copied. `column` is a valid column, and `0 < len <= CHUNK = 2 * PAIRS`, so the copy
        // and the last pair are inside it. `x` and `column` do not overlap: no one else accesses
        // `column`.
        unsafe {
            (*column)[len.div_ceil(2) - 1] = 0;
            x.add(2 * start)
                .copy_to_nonoverlapping(column.cast(), 2 * len);
        }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize) {
        let pairs = self.pairs.as_mut_ptr();
        // SAFETY: the contract of `unpack_to` is that of this function, and `self.pairs` has room
        // for all pairs of a chunk. `unpack_to` accesses `self.rows` besides.
        unsafe { self.unpack_to(call, row, start, len, pairs) }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<[u32; PAIRS]>,
        len: usize,
        prefetch: &mut Prefetch,
    ) {
        let Tile { columns, sums } = tile;
        // SAFETY: pair `i < len.div_ceil(2) <= PAIRS` of the panel has 32 words, of which `P <= 2`
        // vectors of 16 are read; `unpack` has written them. Column `c < C` of `columns` has
        // `PAIRS` pairs. The contract of `Panel` includes `C` columns, their sums, and AVX-512
        // BF16.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); C]; P];
            for p in 0..P {
                for c in 0..C {
                    acc[p][c] = sums.load::<Avx512, P>(p, c);
                }
            }
            for i in 0..len.div_ceil(2) {
                if i % STEP == 0 {
                    prefetch.step();
                }
                let panel = self.pairs.as_ptr().add(i).cast::<u8>();
                let mut w = [_mm512_setzero_si512(); P];
                for p in 0..P {
                    w[p] = Avx512::load_int(panel.add(64 * p));
                }
                for c in 0..C {
                    let x = Avx512::splat_int(*columns.cast::<u32>().add(c * PAIRS + i));
                    for p in 0..P {
                        acc[p][c] = dot(acc[p][c], w[p], x);
                    }
                }
            }
            for p in 0..P {
                for c in 0..C {
                    sums.store::<Avx512, P>(p, c, acc[p][c]);
                }
            }
        }
    }
}
