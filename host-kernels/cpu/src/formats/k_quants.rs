//! The super-block formats: 256 elements, multiplied with activations in Q8_K.

use crate::simd::{PtrTask, Simd, dispatch_ptr};

/// One super-block: `value = (d * scales[j]) * (q - OFFSET) - dmin * mins[j]`, where `j` is the
/// element's sub-block.
#[derive(Debug, Clone, Copy)]
pub struct Quants256 {
    /// The quants, in element order, made unsigned by the format's `OFFSET`.
    pub q: [u8; 256],
    /// Scales of the sub-blocks; the first `256 / SUB` count.
    pub scales: [i16; 16],
    /// Minimums of the sub-blocks where the format has them, else 0.
    pub mins: [i16; 16],
    /// Scale of the scales.
    pub d: f32,
    /// Scale of the minimums.
    pub dmin: f32,
}

/// A block of a super-block format: 256 elements.
pub trait SuperBlockFormat: Copy + 'static {
    /// Elements in a sub-block: 16 or 32.
    const SUB: usize;
    /// What was added to each quant to make it unsigned; 0 in formats with minimums.
    const OFFSET: i32;
    /// Whether the sub-blocks have minimums.
    const HAS_MIN: bool = false;

    /// The decoded block.
    fn decode(&self) -> Quants256;
}

/// A super-block format that can be written without an importance matrix.
pub(super) trait QuantizeSuperBlock: SuperBlockFormat {
    /// The block nearest to `x`: by ggml's rule where it has one.
    fn quantize(x: &[f32; 256]) -> Self;
}

/// # Safety
/// As [`super::DequantizeRow`].
pub(super) unsafe fn dequantize<B: SuperBlockFormat>(src: *const u8, dst: *mut f32, n: usize) {
    // SAFETY: the caller guarantees `n` weights in blocks at `src` and `n` floats at `dst`, the
    // contract of `Dequantize`.
    unsafe { dispatch_ptr(Dequantize::<B>(src.cast(), dst, n)) };
}

/// Dequantises a row of blocks: source, destination, number of elements. Contract:
/// [`super::DequantizeRow`].
struct Dequantize<B>(*const B, *mut f32, usize);

impl<B: SuperBlockFormat> PtrTask for Dequantize<B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, _simd: S) {
        let Dequantize(src, dst, n) = self;
        debug_assert!(n.is_multiple_of(256));
        for b in 0..n / 256 {
            // SAFETY: block `b` is below the number of blocks in the caller's `n` elements. `B` is
            // packed, so any address is aligned, and consists of integers and floats, so any bytes
            // are valid.
            let (block, out) = unsafe {
                (
                    &*src.add(b),
                    std::slice::from_raw_parts_mut(dst.add(b * 256), 256),
                )
            };
            let block = block.decode();
            for (j, (out, q)) in out
                .chunks_exact_mut(B::SUB)
                .zip(block.q.chunks_exact(B::SUB))
                .enumerate()
            {
                let d = block.d * f32::from(block.scales[j]);
                let m = block.dmin * f32::from(block.mins[j]);
                for (y, &q) in out.iter_mut().zip(q) {
                    let scaled = d * (i32::from(q) - B::OFFSET) as f32;
                    *y = if B::HAS_MIN { scaled - m } else { scaled };
                }
            }
        }
    }
}

/// # Safety
/// As [`super::QuantizeRow`].
pub(super) unsafe fn quantize<B: QuantizeSuperBlock>(src: *const f32, dst: *mut u8, n: usize) {
    debug_assert!(n.is_multiple_of(256));
    for b in 0..n / 256 {
        // SAFETY: block `b` is below the number of blocks in the caller's `n` elements. `B` is
        // packed, so any address is aligned.
        unsafe { *dst.cast::<B>().add(b) = B::quantize(&*src.cast::<[f32; 256]>().add(b)) }
    }
}

/// The eight 6-bit scales and minimums that Q4_K and Q5_K pack into 12 bytes: the first four of
/// each in the low six bits of bytes 0..8, the others in nibbles of bytes 8..12 with their top bits
/// above the former.
#[inline(always)]
pub(super) fn unpack_scales(packed: &[u8; 12]) -> ([i16; 16], [i16; 16]) {
    let (mut scales, mut mins) = ([0; 16], [0; 16]);
    for j in 0..4 {
        scales[j] = i16::from(packed[j] & 63);
        mins[j] = i16::from(packed[j + 4] & 63);
        scales[j + 4] = i16::from(packed[j + 8] & 15 | packed[j] >> 6 << 4);
        mins[j + 4] = i16::from(packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4);
    }
    (scales, mins)
}

/// The inverse of [`unpack_scales`].
pub(super) fn pack_scales(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for j in 0..4 {
        packed[j] = scales[j] | scales[j + 4] >> 4 << 6;
        packed[j + 4] = mins[j] | mins[j + 4] >> 4 << 6;
        packed[j + 8] = scales[j + 4] & 15 | mins[j + 4] << 4;
    }
    packed
}

/// The two-bit quants of Q2_K, Q3_K and TQ2_0: in each half of the block, element `32 * i + j` in
/// bits `2 * i` of byte `j`.
#[inline(always)]
pub(super) fn unpack_two_bits(qs: &[u8; 64]) -> [u8; 256] {
    let mut q = [0; 256];
    for (q, qs) in q.chunks_exact_mut(128).zip(qs.chunks_exact(32)) {
        for (j, q) in q.iter_mut().enumerate() {
            *q = qs[j % 32] >> (2 * (j / 32)) & 3;
        }
    }
    q
}

/// The inverse of [`unpack_two_bits`].
pub(super) fn pack_two_bits(q: &[u8; 256]) -> [u8; 64] {
    let mut qs = [0; 64];
    for (qs, q) in qs.chunks_exact_mut(32).zip(q.chunks_exact(128)) {
        for (j, q) in q.iter().enumerate() {
            qs[j % 32] |= q << (2 * (j / 32));
        }
    }
    qs
}

/// The largest magnitude, and values as -1, 0 or 1 times it, plus one.
pub(super) fn quantize_ternary(x: &[f32; 256]) -> (f32, [u8; 256]) {
    let mut d = 0.0f32;
    for &x in x {
        d = d.max(x.abs());
    }
    let inverse = super::block32::inverse(d);
    (
        d,
        x.map(|x| ((x * inverse).round().clamp(-1.0, 1.0) + 1.0) as u8),
    )
}

/// Packs two scales of four bits in a byte, the first in the low bits.
pub(super) fn pack_scale_nibbles<const N: usize>(scales: &[u8; 16]) -> [u8; N] {
    std::array::from_fn(|i| scales[2 * i] | scales[2 * i + 1] << 4)
}
