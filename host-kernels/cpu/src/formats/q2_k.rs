//! Q2_K: 16 sub-blocks of 16 unsigned 2-bit quants, each with a 4-bit scale and minimum.

use super::k_quants::{QuantizeSuperBlock, pack_two_bits, unpack_two_bits};
use super::search::{Error, fit_affine, nearest_int};
use super::{Quants256, SuperBlockFormat, f16_to_f32, f32_to_f16};

/// ggml's `block_q2_K`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ2K {
    /// The scale in the low, the minimum in the high nibble.
    pub scales: [u8; 16],
    /// In each half of the block (128 elements, 32 bytes), element `32 * i + j` in bits `2 * i` of
    /// byte `j`.
    pub qs: [u8; 64],
    /// Scale of the scales (F16).
    pub d: u16,
    /// Scale of the minimums (F16).
    pub dmin: u16,
}

const _: () = assert!(size_of::<BlockQ2K>() == 84);

impl SuperBlockFormat for BlockQ2K {
    const SUB: usize = 16;
    const OFFSET: i32 = 0;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        Quants256 {
            q: unpack_two_bits(&self.qs),
            scales: self.scales.map(|s| i16::from(s & 15)),
            mins: self.scales.map(|s| i16::from(s >> 4)),
            d: f16_to_f32(self.d),
            dmin: f16_to_f32(self.dmin),
        }
    }
}

impl QuantizeSuperBlock for BlockQ2K {
    fn quantize(x: &[f32; 256]) -> Self {
        let mut q = [0; 256];
        let (mut scales, mut mins) = ([0.0f32; 16], [0.0f32; 16]);
        for (j, (x, q)) in x.chunks_exact(16).zip(q.chunks_exact_mut(16)).enumerate() {
            let mut weights = [0.0f32; 16];
            for (w, x) in weights.iter_mut().zip(x) {
                *w = x.abs();
            }
            (scales[j], mins[j]) = fit_affine(x, &weights, 3, q, -0.5, 0.1, 15, Error::Magnitude);
        }
        let (d, scales) = to_four_bits(&scales);
        let (dmin, mins) = to_four_bits(&mins);
        for (j, (x, q)) in x.chunks_exact(16).zip(q.chunks_exact_mut(16)).enumerate() {
            let scale = f16_to_f32(d) * f32::from(scales[j]);
            if scale == 0.0 {
                continue;
            }
            let min = f16_to_f32(dmin) * f32::from(mins[j]);
            for (&x, q) in x.iter().zip(q) {
                *q = nearest_int((x + min) / scale).clamp(0, 3) as u8;
            }
        }
        let mut packed = [0; 16];
        for (packed, (s, m)) in packed.iter_mut().zip(scales.into_iter().zip(mins)) {
            *packed = s | m << 4;
        }
        BlockQ2K {
            scales: packed,
            qs: pack_two_bits(&q),
            d,
            dmin,
        }
    }
}

/// Numbers as multiples of a half, `0..=15` of them.
fn to_four_bits(x: &[f32; 16]) -> (u16, [u8; 16]) {
    let mut max = 0.0f32;
    for &x in x {
        if x > max {
            max = x;
        }
    }
    if max <= 0.0 {
        return (f32_to_f16(0.0), [0; 16]);
    }
    let inverse = 15.0 / max;
    (
        f32_to_f16(max / 15.0),
        x.map(|x| nearest_int(inverse * x) as u8),
    )
}
