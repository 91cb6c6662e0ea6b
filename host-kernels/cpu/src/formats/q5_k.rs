//! Q5_K: 8 sub-blocks of 32 unsigned 5-bit quants, each with a 6-bit scale and minimum.

use super::k_quants::{QuantizeSuperBlock, pack_scales, unpack_scales};
use super::search::{fit_scales_and_mins, nearest_int};
use super::{Quants256, SuperBlockFormat, f16_to_f32, f32_to_f16};

/// ggml's `block_q5_K`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ5K {
    /// Scale of the scales (F16).
    pub d: u16,
    /// Scale of the minimums (F16).
    pub dmin: u16,
    /// Scales and minimums, six bits each.
    pub scales: [u8; 12],
    /// Fifth bits: element `i` of sub-block `j` in bit `j` of byte `i`.
    pub qh: [u8; 32],
    /// 32 bytes hold two sub-blocks: the even one in the low nibbles, the odd one in the high.
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockQ5K>() == 176);

impl SuperBlockFormat for BlockQ5K {
    const SUB: usize = 32;
    const OFFSET: i32 = 0;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let (scales, mins) = unpack_scales(&self.scales);
        let mut q = [0; 256];
        for (pair, (q, qs)) in q
            .chunks_exact_mut(64)
            .zip(self.qs.chunks_exact(32))
            .enumerate()
        {
            for j in 0..32 {
                q[j] = qs[j] & 15 | (self.qh[j] >> (2 * pair) & 1) << 4;
                q[j + 32] = qs[j] >> 4 | (self.qh[j] >> (2 * pair + 1) & 1) << 4;
            }
        }
        Quants256 {
            q,
            scales,
            mins,
            d: f16_to_f32(self.d),
            dmin: f16_to_f32(self.dmin),
        }
    }
}

impl QuantizeSuperBlock for BlockQ5K {
    fn quantize(x: &[f32; 256]) -> Self {
        let fit = fit_scales_and_mins(x, 31, -0.5, 15);
        let (d, dmin) = (f32_to_f16(fit.d), f32_to_f16(fit.dmin));
        let (mut qs, mut qh) = ([0; 128], [0; 32]);
        for (j, x) in x.chunks_exact(32).enumerate() {
            let scale = f16_to_f32(d) * f32::from(fit.scales[j]);
            let min = f16_to_f32(dmin) * f32::from(fit.mins[j]);
            for (i, &x) in x.iter().enumerate() {
                let q = match scale {
                    0.0 => fit.q[32 * j + i],
                    _ => nearest_int((x + min) / scale).clamp(0, 31) as u8,
                };
                qs[j / 2 * 32 + i] |= (q & 15) << (4 * (j % 2));
                qh[i] |= (q >> 4) << j;
            }
        }
        BlockQ5K {
            d,
            dmin,
            scales: pack_scales(&fit.scales, &fit.mins),
            qh,
            qs,
        }
    }
}
