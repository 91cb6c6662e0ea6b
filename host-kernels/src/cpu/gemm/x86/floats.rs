//! Products with plain floats: F32, F16 and BF16, summed in single precision.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::panel::{self, Panel, Sums};
use super::simd::Simd;
use super::{Call, scratch};

/// Elements of `k` in a panel, which then takes half of a 32 KiB cache.
const CHUNK: usize = 128;
/// Running sums of a row, so that one multiplication need not wait for the last.
const UNROLL: usize = 4;

/// A float format as vectors of `f32`.
///
/// # Safety
/// As in [`super::simd`].
pub(super) trait Float: Copy + 'static {
    /// Bytes of an element.
    const BYTES: usize;
    /// A vector of elements.
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;

    /// `n < S::LANES` elements, the rest 0.
    #[inline(always)]
    unsafe fn load_first<S: Simd>(p: *const u8, n: usize) -> S::F {
        let mut elements = [0u8; 64];
        // SAFETY: the module's contract; an element has at most 4 bytes, a vector at most 16 elements.
        unsafe {
            p.copy_to_nonoverlapping(elements.as_mut_ptr(), n * Self::BYTES);
            Self::load::<S>(elements.as_ptr())
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct F32;
#[derive(Clone, Copy)]
pub(super) struct F16;
#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the module's contract.
        unsafe { S::load_floats(p.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the module's contract.
        unsafe { S::load_halves(p) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the module's contract.
        unsafe { S::load_bf16(p) }
    }
}

/// Multiplies, choosing between rows and panels.
///
/// # Safety
/// As [`super::super::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd, T: Float>(call: &Call) {
    // SAFETY: the caller's promise.
    unsafe {
        if call.cols >= super::PANEL_COLS {
            panel::gemm::<S, FloatPanel<S, T>>(call);
        } else {
            rows::<S, T>(call);
        }
    }
}

/// Writes `n` elements as `f32`, and zeros up to `padded`.
///
/// # Safety
/// `x` has `n` elements, `to` room for `padded`, a multiple of `S::LANES`.
#[inline(always)]
unsafe fn widen<S: Simd, T: Float>(x: *const u8, n: usize, padded: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut i = 0;
        while i < padded {
            let v = match n.saturating_sub(i) {
                0 => S::zero_floats(),
                left if left < S::LANES => T::load_first::<S>(x.add(i * T::BYTES), left),
                _ => T::load::<S>(x.add(i * T::BYTES)),
            };
            S::store_first(to.add(i), S::LANES, v);
            i += S::LANES;
        }
    }
}

/// Few columns: each row once through the registers.
///
/// # Safety
/// As [`super::super::Gemm`], with the features of `S`.
#[inline(always)]
unsafe fn rows<S: Simd, T: Float>(call: &Call) {
    let padded = call.k.next_multiple_of(S::LANES);
    let mut memory = scratch::take(call.cols * padded * size_of::<f32>());
    let columns = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: all offsets are those of rows, columns and elements of the call.
    unsafe {
        for c in 0..call.cols {
            let x = call.x.add(c * call.x_stride);
            widen::<S, T>(x, call.k, padded, columns.add(c * padded));
        }
        for r in 0..call.rows {
            let row = call.w.add(r * call.w_stride);
            let mut c = 0;
            while c < call.cols {
                let x = columns.add(c * padded);
                let dst = call.dst.add(c * call.dst_stride + r);
                c += match call.cols - c {
                    4.. => {
                        row_times::<S, T, 4>(row, call.k, x, padded, dst, call.dst_stride);
                        4
                    }
                    2.. => {
                        row_times::<S, T, 2>(row, call.k, x, padded, dst, call.dst_stride);
                        2
                    }
                    _ => {
                        row_times::<S, T, 1>(row, call.k, x, padded, dst, call.dst_stride);
                        1
                    }
                };
            }
        }
    }
    scratch::give_back(memory);
}

/// One row times `C` columns.
///
/// # Safety
/// The row has `k` elements, the columns are padded to whole vectors, and `dst` has `C` floats.
#[inline(always)]
unsafe fn row_times<S: Simd, T: Float, const C: usize>(
    row: *const u8,
    k: usize,
    x: *const f32,
    padded: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[S::zero_floats(); UNROLL]; C];
        let mut i = 0;
        while i + UNROLL * S::LANES <= k {
            for u in 0..UNROLL {
                let at = i + u * S::LANES;
                let w = T::load::<S>(row.add(at * T::BYTES));
                for c in 0..C {
                    acc[c][u] = S::mul_add(w, S::load_floats(x.add(c * padded + at)), acc[c][u]);
                }
            }
            i += UNROLL * S::LANES;
        }
        while i < k {
            let w = match k - i {
                left if left < S::LANES => T::load_first::<S>(row.add(i * T::BYTES), left),
                _ => T::load::<S>(row.add(i * T::BYTES)),
            };
            for c in 0..C {
                acc[c][0] = S::mul_add(w, S::load_floats(x.add(c * padded + i)), acc[c][0]);
            }
            i += S::LANES;
        }
        for c in 0..C {
            let low = S::add_floats(acc[c][0], acc[c][1]);
            let high = S::add_floats(acc[c][2], acc[c][3]);
            *dst.add(c * dst_stride) = S::sum(S::add_floats(low, high));
        }
    }
}

/// Rows of a chunk, interleaved.
#[repr(C, align(64))]
struct FloatPanel<S, T> {
    /// Each element of every row.
    elements: [[f32; 32]; CHUNK],
    rows: [[f32; CHUNK]; 32],
    format: PhantomData<(S, T)>,
}

impl<S: Simd, T: Float> Panel<S> for FloatPanel<S, T> {
    const CHUNK: usize = CHUNK;
    const VECTORS: usize = 2;
    type Column = [f32; CHUNK];

    #[inline(always)]
    fn new() -> Self {
        FloatPanel {
            elements: [[0.0; 32]; CHUNK],
            rows: [[0.0; CHUNK]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut [f32; CHUNK]) {
        // SAFETY: the caller's promise.
        unsafe {
            let padded = len.next_multiple_of(S::LANES);
            widen::<S, T>(x.add(start * T::BYTES), len, padded, column.cast());
        }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &Call, row: usize, start: usize, len: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let padded = len.next_multiple_of(S::LANES);
            for r in 0..2 * S::LANES {
                let from = call.w.add((row + r).min(call.rows - 1) * call.w_stride);
                widen::<S, T>(
                    from.add(start * T::BYTES),
                    len,
                    padded,
                    self.rows[r].as_mut_ptr(),
                );
            }
            let rows = self.rows.as_ptr().cast();
            let elements = self.elements.as_mut_ptr().cast();
            panel::interleave::<S>(rows, CHUNK * 4, len, 2, elements);
        }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        _: *const u8,
        _: usize,
        columns: *const [f32; CHUNK],
        _: usize,
        len: usize,
        sums: Sums,
    ) {
        // SAFETY: the caller's promise; the panel has `len` elements.
        unsafe {
            let mut acc = [[S::zero_floats(); C]; P];
            for p in 0..P {
                for c in 0..C {
                    acc[p][c] = sums.load::<S, P>(p, c);
                }
            }
            let mut panel = self.elements.as_ptr().cast::<f32>();
            for i in 0..len {
                let mut w = [S::zero_floats(); P];
                for p in 0..P {
                    w[p] = S::load_floats(panel.add(p * S::LANES));
                }
                panel = panel.add(P * S::LANES);
                for c in 0..C {
                    let x = S::splat_float(*columns.cast::<f32>().add(c * CHUNK + i));
                    for p in 0..P {
                        acc[p][c] = S::mul_add(w[p], x, acc[p][c]);
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

/// BF16 by the instruction made for it, which sums the products of pairs.
pub(super) mod bf16_pairs {
    use super::*;
    use crate::cpu::gemm::x86::simd::Avx512;

    /// Pairs in a chunk.
    const PAIRS: usize = CHUNK / 2;

    /// Multiplies, choosing between rows and panels.
    ///
    /// # Safety
    /// As [`super::super::super::Gemm`], with AVX-512 BF16.
    #[inline(always)]
    pub(in super::super) unsafe fn gemm(call: &Call) {
        // SAFETY: the caller's promise.
        unsafe {
            if call.cols >= super::super::PANEL_COLS {
                panel::gemm::<Avx512, PairPanel>(call);
                return;
            }
            for r in 0..call.rows {
                let row = call.w.add(r * call.w_stride);
                let mut c = 0;
                while c < call.cols {
                    let x = call.x.add(c * call.x_stride);
                    let dst = call.dst.add(c * call.dst_stride + r);
                    c += match call.cols - c {
                        4.. => {
                            row_times::<4>(row, call.k, x, call.x_stride, dst, call.dst_stride);
                            4
                        }
                        2.. => {
                            row_times::<2>(row, call.k, x, call.x_stride, dst, call.dst_stride);
                            2
                        }
                        _ => {
                            row_times::<1>(row, call.k, x, call.x_stride, dst, call.dst_stride);
                            1
                        }
                    };
                }
            }
        }
    }

    /// Adds the products of 16 pairs.
    #[inline(always)]
    unsafe fn dot(acc: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: AVX-512 BF16, of which the caller of `gemm` is sure; the types have the same size, and
        // every pattern of bits is valid.
        unsafe { _mm512_dpbf16_ps(acc, std::mem::transmute(a), std::mem::transmute(b)) }
    }

    /// One row times `C` columns.
    ///
    /// # Safety
    /// The row and the columns have `k` elements, and `dst` has `C` floats.
    #[inline(always)]
    unsafe fn row_times<const C: usize>(
        row: *const u8,
        k: usize,
        x: *const u8,
        x_stride: usize,
        dst: *mut f32,
        dst_stride: usize,
    ) {
        // SAFETY: the caller's promise; the masks keep the tail's loads within `k`.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); UNROLL]; C];
            let mut i = 0;
            while i + UNROLL * 32 <= k {
                for u in 0..UNROLL {
                    let at = 2 * (i + 32 * u);
                    let w = Avx512::load(row.add(at));
                    for c in 0..C {
                        acc[c][u] = dot(acc[c][u], w, Avx512::load(x.add(c * x_stride + at)));
                    }
                }
                i += UNROLL * 32;
            }
            while i < k {
                let mask = if k - i >= 32 {
                    u32::MAX
                } else {
                    (1 << (k - i)) - 1
                };
                let w = _mm512_maskz_loadu_epi16(mask, row.add(2 * i).cast());
                for c in 0..C {
                    let x = _mm512_maskz_loadu_epi16(mask, x.add(c * x_stride + 2 * i).cast());
                    acc[c][0] = dot(acc[c][0], w, x);
                }
                i += 32;
            }
            for c in 0..C {
                let low = _mm512_add_ps(acc[c][0], acc[c][1]);
                let high = _mm512_add_ps(acc[c][2], acc[c][3]);
                *dst.add(c * dst_stride) = Avx512::sum(_mm512_add_ps(low, high));
            }
        }
    }

    /// 32 rows of a chunk, interleaved by pairs.
    #[repr(C, align(64))]
    struct PairPanel {
        pairs: [[u32; 32]; PAIRS],
        rows: [[u16; CHUNK]; 32],
    }

    impl Panel<Avx512> for PairPanel {
        const CHUNK: usize = CHUNK;
        const VECTORS: usize = 2;
        /// Pairs, the last of an odd chunk with a zero.
        type Column = [u32; PAIRS];

        #[inline(always)]
        fn new() -> Self {
            PairPanel {
                pairs: [[0; 32]; PAIRS],
                rows: [[0; CHUNK]; 32],
            }
        }

        #[inline(always)]
        unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut [u32; PAIRS]) {
            // SAFETY: the caller's promise.
            unsafe {
                (*column)[len.div_ceil(2) - 1] = 0;
                x.add(2 * start)
                    .copy_to_nonoverlapping(column.cast(), 2 * len);
            }
        }

        #[inline(always)]
        unsafe fn unpack(&mut self, call: &Call, row: usize, start: usize, len: usize) {
            // SAFETY: the caller's promise.
            unsafe {
                for (r, to) in self.rows.iter_mut().enumerate() {
                    let from = call.w.add((row + r).min(call.rows - 1) * call.w_stride);
                    if !len.is_multiple_of(2) {
                        to[len] = 0;
                    }
                    from.add(2 * start)
                        .copy_to_nonoverlapping(to.as_mut_ptr().cast(), 2 * len);
                }
                let (rows, pairs) = (self.rows.as_ptr().cast(), self.pairs.as_mut_ptr().cast());
                panel::interleave::<Avx512>(rows, CHUNK * 2, len.div_ceil(2), 2, pairs);
            }
        }

        #[inline(always)]
        unsafe fn multiply<const P: usize, const C: usize>(
            &self,
            _: *const u8,
            _: usize,
            columns: *const [u32; PAIRS],
            _: usize,
            len: usize,
            sums: Sums,
        ) {
            // SAFETY: the caller's promise; the panel has `len` elements.
            unsafe {
                let mut acc = [[_mm512_setzero_ps(); C]; P];
                for p in 0..P {
                    for c in 0..C {
                        acc[p][c] = sums.load::<Avx512, P>(p, c);
                    }
                }
                for i in 0..len.div_ceil(2) {
                    let panel = self.pairs.as_ptr().add(i).cast::<u8>();
                    let mut w = [_mm512_setzero_si512(); P];
                    for p in 0..P {
                        w[p] = Avx512::load(panel.add(64 * p));
                    }
                    for c in 0..C {
                        let x = Avx512::splat(*columns.cast::<u32>().add(c * PAIRS + i));
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
}
