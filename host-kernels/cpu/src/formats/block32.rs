//! The formats with scales per 32 elements (or 16), multiplied with activations in Q8_0 or Q8_1.

use crate::simd::{PtrTask, Simd, dispatch_ptr};

/// 32 weights of one block: `value = d * (q - OFFSET) + m`.
#[derive(Debug, Clone, Copy)]
pub struct Quants32 {
    /// The quants in element order, plus `OFFSET`, so that they are unsigned.
    pub q: [u8; 32],
    /// The scale of each half. Both are equal unless the format has a scale for each 16 elements.
    pub d: [f32; 2],
    /// The minimum, the value of quant 0; 0 if the format has none.
    pub m: f32,
}

/// A block of a format with scales per 32 elements.
pub trait Block32Format: Copy + 'static {
    /// Elements in the block, a multiple of 32.
    const ELEMENTS: usize;
    /// The number that was added to each quant to make it unsigned.
    const OFFSET: i32;
    /// Whether the format has a minimum, and is multiplied with Q8_1 instead of Q8_0.
    const HAS_MIN: bool = false;
    /// Whether each half of a group has its own scale.
    const HALF_SCALES: bool = false;

    /// The group `index < ELEMENTS / 32`.
    fn group(&self, index: usize) -> Quants32;
}

/// A format that ggml can write without an importance matrix.
pub(super) trait QuantizeBlock32<const N: usize>: Block32Format {
    /// The block nearest to `x` by ggml's rule.
    fn quantize(x: &[f32; N]) -> Self;
}

/// # Safety
/// As [`super::DequantizeRow`].
pub(super) unsafe fn dequantize<B: Block32Format>(src: *const u8, dst: *mut f32, n: usize) {
    // SAFETY: the caller guarantees `n` weights in blocks at `src` and `n` floats at `dst`, the
    // contract of `Dequantize`.
    unsafe { dispatch_ptr(Dequantize::<B>(src.cast(), dst, n)) };
}

/// Dequantises a row of blocks: source, destination, number of elements. Contract:
/// [`super::DequantizeRow`].
struct Dequantize<B>(*const B, *mut f32, usize);

impl<B: Block32Format> PtrTask for Dequantize<B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, _simd: S) {
        let Dequantize(src, dst, n) = self;
        debug_assert!(n.is_multiple_of(B::ELEMENTS));
        for b in 0..n / B::ELEMENTS {
            // SAFETY: block `b` is below the number of blocks in the caller's `n` elements. `B` is
            // packed, so any address is aligned, and consists of integers, so any bytes are valid.
            let (block, out) = unsafe {
                let out = dst.add(b * B::ELEMENTS);
                (
                    &*src.add(b),
                    std::slice::from_raw_parts_mut(out, B::ELEMENTS),
                )
            };
            for (i, out) in out.chunks_exact_mut(32).enumerate() {
                let group = block.group(i);
                for (j, y) in out.iter_mut().enumerate() {
                    let scaled = (i32::from(group.q[j]) - B::OFFSET) as f32 * group.d[j / 16];
                    *y = if B::HAS_MIN { scaled + group.m } else { scaled };
                }
            }
        }
    }
}

/// # Safety
/// As [`super::QuantizeRow`].
pub(super) unsafe fn quantize<const N: usize, B: QuantizeBlock32<N>>(
    src: *const f32,
    dst: *mut u8,
    n: usize,
) {
    const { assert!(N == B::ELEMENTS) };
    debug_assert!(n.is_multiple_of(N));
    for b in 0..n / N {
        // SAFETY: block `b` is below the number of blocks in the caller's `n` elements. `B` is
        // packed, so any address is aligned.
        unsafe { *dst.cast::<B>().add(b) = B::quantize(&*src.cast::<[f32; N]>().add(b)) }
    }
}

/// The first element of `x` with the largest magnitude, with its sign, as in ggml.
pub(super) fn signed_max(x: &[f32]) -> f32 {
    let mut max = 0.0f32;
    for &v in x {
        if v.abs() > max.abs() {
            max = v;
        }
    }
    max
}

/// The smallest and the largest element.
pub(super) fn range(x: &[f32]) -> (f32, f32) {
    let (mut min, mut max) = (f32::MAX, f32::MIN);
    for &v in x {
        if v < min {
            min = v;
        }
        if v > max {
            max = v;
        }
    }
    (min, max)
}

/// `1 / d`, or 0 for a scale of 0.
pub(super) fn inverse(d: f32) -> f32 {
    if d != 0.0 { 1.0 / d } else { 0.0 }
}

/// Rounds half up and clamps to `0..=max`, the way ggml packs nibbles (a C cast through `int8_t`).
pub(super) fn round_quant(x: f32, max: u8) -> u8 {
    (x as i32 as i8 as u8).min(max)
}

/// The low nibbles of 16 bytes, then the high nibbles.
#[inline(always)]
pub(super) fn nibbles(qs: &[u8; 16]) -> [u8; 32] {
    let mut q = [0; 32];
    for j in 0..16 {
        q[j] = qs[j] & 15;
        q[j + 16] = qs[j] >> 4;
    }
    q
}

/// Adds bit `j` of `qh` to quant `j` as its fifth bit.
#[inline(always)]
pub(super) fn add_fifth_bits(q: &mut [u8; 32], qh: u32) {
    for (j, q) in q.iter_mut().enumerate() {
        *q |= ((qh >> j & 1) as u8) << 4;
    }
}

/// Packs 32 quants of up to 5 bits: nibbles as [`nibbles`] reads them, and the fifth bits.
pub(super) fn pack_nibbles(q: &[u8; 32]) -> ([u8; 16], u32) {
    let mut qs = [0; 16];
    let mut qh = 0;
    for j in 0..16 {
        qs[j] = (q[j] & 15) | (q[j + 16] & 15) << 4;
    }
    for (j, &q) in q.iter().enumerate() {
        qh |= u32::from(q >> 4 & 1) << j;
    }
    (qs, qh)
}
