//! Q6_K: 16 sub-blocks of 16 signed 6-bit quants, each with an 8-bit scale.

use super::k_quants::QuantizeSuperBlock;
use super::search::{GROUP_MAX_EPS, fit_signed_scale, nearest_int};
use super::{Quants256, SuperBlockFormat, f16_to_f32, f32_to_f16};

/// ggml's `block_q6_K`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ6K {
    /// Low four bits: in each half of the block (128 elements, 64 bytes), elements 0..64 in the low
    /// nibbles and 64..128 in the high.
    pub ql: [u8; 128],
    /// High two bits: in each half (32 bytes), element `32 * i + j` in bits `2 * i` of byte `j`.
    pub qh: [u8; 64],
    /// Scales of the sub-blocks.
    pub scales: [i8; 16],
    /// Scale of the scales (F16).
    pub d: u16,
}

const _: () = assert!(size_of::<BlockQ6K>() == 210);

impl SuperBlockFormat for BlockQ6K {
    const SUB: usize = 16;
    const OFFSET: i32 = 32;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let mut q = [0; 256];
        for (half, q) in q.chunks_exact_mut(128).enumerate() {
            let (ql, qh) = (&self.ql[64 * half..][..64], &self.qh[32 * half..][..32]);
            for j in 0..32 {
                q[j] = ql[j] & 15 | (qh[j] & 3) << 4;
                q[j + 32] = ql[j + 32] & 15 | (qh[j] >> 2 & 3) << 4;
                q[j + 64] = ql[j] >> 4 | (qh[j] >> 4 & 3) << 4;
                q[j + 96] = ql[j + 32] >> 4 | (qh[j] >> 6) << 4;
            }
        }
        let scales = self.scales.map(i16::from);
        Quants256 {
            q,
            scales,
            mins: [0; 16],
            d: f16_to_f32(self.d),
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockQ6K {
    fn quantize(x: &[f32; 256]) -> Self {
        let mut block = BlockQ6K {
            ql: [0; 128],
            qh: [0; 64],
            scales: [0; 16],
            d: 0,
        };
        let mut q = [0u8; 256];
        let mut scales = [0.0f32; 16];
        let mut max_scale = 0.0f32;
        for (j, (x, q)) in x.chunks_exact(16).zip(q.chunks_exact_mut(16)).enumerate() {
            scales[j] = fit_signed_scale(x, 32, q);
            if scales[j].abs() > max_scale.abs() {
                max_scale = scales[j];
            }
        }
        if max_scale.abs() < GROUP_MAX_EPS {
            return block;
        }
        let inverse = -128.0 / max_scale;
        block.d = f32_to_f16(1.0 / inverse);
        for (j, (x, q)) in x.chunks_exact(16).zip(q.chunks_exact_mut(16)).enumerate() {
            block.scales[j] = nearest_int(inverse * scales[j]).min(127) as i8;
            let d = f16_to_f32(block.d) * f32::from(block.scales[j]);
            if d == 0.0 {
                continue;
            }
            for (&x, q) in x.iter().zip(q) {
                *q = (nearest_int(x / d).clamp(-32, 31) + 32) as u8;
            }
        }
        for (half, q) in q.chunks_exact(128).enumerate() {
            for j in 0..32 {
                block.ql[64 * half + j] = q[j] & 15 | q[j + 64] << 4;
                block.ql[64 * half + j + 32] = q[j + 32] & 15 | q[j + 96] << 4;
                block.qh[32 * half + j] = (0..4).map(|i| q[32 * i + j] >> 4 << (2 * i)).sum();
            }
        }
        block
    }
}
