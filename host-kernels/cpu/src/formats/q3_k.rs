//! Q3_K: 16 sub-blocks of 16 signed 3-bit quants, each with a 6-bit scale.

use super::k_quants::{QuantizeSuperBlock, pack_two_bits, unpack_two_bits};
use super::search::{fit_signed_scale_stepwise, nearest_int};
use super::{Quants256, SuperBlockFormat, f16_to_f32, f32_to_f16};

/// ggml's `block_q3_K`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ3K {
    /// Third bits: element `32 * i + j` in bit `i` of byte `j`.
    pub hmask: [u8; 32],
    /// In each half of the block (128 elements, 32 bytes), element `32 * i + j` in bits `2 * i` of
    /// byte `j`; with the third bit, 4 is zero.
    pub qs: [u8; 64],
    /// Scales, six bits each, 32 is zero: the low four bits of scale `j` in a nibble of
    /// byte `j % 8`, the high two in bits `2 * (j / 4)` of byte `8 + j % 4`.
    pub scales: [u8; 12],
    /// Scale of the scales (F16).
    pub d: u16,
}

const _: () = assert!(size_of::<BlockQ3K>() == 110);

impl SuperBlockFormat for BlockQ3K {
    const SUB: usize = 16;
    const OFFSET: i32 = 4;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let mut q = unpack_two_bits(&self.qs);
        for (i, q) in q.chunks_exact_mut(32).enumerate() {
            for (q, mask) in q.iter_mut().zip(self.hmask) {
                *q |= (mask >> i & 1) << 2;
            }
        }
        let mut scales = [0; 16];
        for (j, scale) in scales.iter_mut().enumerate() {
            let low = self.scales[j % 8] >> (4 * (j / 8)) & 15;
            let high = self.scales[8 + j % 4] >> (2 * (j / 4)) & 3;
            *scale = i16::from(low | high << 4) - 32;
        }
        Quants256 {
            q,
            scales,
            mins: [0; 16],
            d: f16_to_f32(self.d),
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockQ3K {
    fn quantize(x: &[f32; 256]) -> Self {
        let mut block = BlockQ3K {
            hmask: [0; 32],
            qs: [0; 64],
            scales: [0; 12],
            d: 0,
        };
        let mut q = [0u8; 256];
        let mut scales = [0.0f32; 16];
        for (j, (x, q)) in x
            .as_chunks::<16>()
            .0
            .iter()
            .zip(q.chunks_exact_mut(16))
            .enumerate()
        {
            scales[j] = fit_signed_scale_stepwise(x, 4, q);
        }
        let max = super::block32::signed_max(&scales);
        if max != 0.0 {
            let inverse = -32.0 / max;
            for (j, scale) in scales.into_iter().enumerate() {
                let l = ((nearest_int(inverse * scale) as i8).clamp(-32, 31) + 32) as u8;
                block.scales[j % 8] |= (l & 15) << (4 * (j / 8));
                block.scales[8 + j % 4] |= (l >> 4) << (2 * (j / 4));
            }
            block.d = f32_to_f16(1.0 / inverse);
        }
        let decoded = block.decode();
        for (j, (x, q)) in x.chunks_exact(16).zip(q.chunks_exact_mut(16)).enumerate() {
            let d = decoded.d * f32::from(decoded.scales[j]);
            if d == 0.0 {
                continue;
            }
            for (&x, q) in x.iter().zip(q) {
                *q = (nearest_int(x / d).clamp(-4, 3) + 4) as u8;
            }
        }
        for (j, q) in q.iter_mut().enumerate() {
            block.hmask[j % 32] |= (*q >> 2) << (j / 32);
            *q &= 3;
        }
        block.qs = pack_two_bits(&q);
        block
    }
}
