//! IQ4_XS: 8 sub-blocks of 32 quants of 4 bits, unevenly spaced, each with a 6-bit scale.

use super::block32::{inverse, nibbles, pack_nibbles};
use super::grids::IQ4_VALUES;
use super::k_quants::QuantizeSuperBlock;
use super::search::{UnevenFit, nearest_int, nearest_uneven};
use super::{Quants256, SuperBlockFormat, f16_to_f32, f32_to_f16};

/// ggml's `block_iq4_xs`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq4Xs {
    /// Scale of the scales (F16).
    pub d: u16,
    /// High two bits of scale `j` in bits `2 * j`.
    pub scales_h: u16,
    /// Low four bits of scale `j` in a nibble of byte `j / 2`; 32 is zero.
    pub scales_l: [u8; 4],
    /// 16 bytes for each sub-block: element `j` in the low, `j + 16` in the high nibble of byte
    /// `j`.
    pub qs: [u8; 128],
}

const _: () = assert!(size_of::<BlockIq4Xs>() == 136);

impl SuperBlockFormat for BlockIq4Xs {
    const SUB: usize = 32;
    const OFFSET: i32 = 128;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let mut q = [0; 256];
        for (q, qs) in q
            .as_chunks_mut::<32>()
            .0
            .iter_mut()
            .zip(self.qs.as_chunks::<16>().0)
        {
            *q = nibbles(qs).map(|q| IQ4_VALUES[usize::from(q)] as u8 ^ 0x80);
        }
        let mut scales = [0; 16];
        for (j, scale) in scales.iter_mut().enumerate().take(8) {
            let low = self.scales_l[j / 2] >> (4 * (j % 2)) & 15;
            let high = (self.scales_h >> (2 * j) & 3) as u8;
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

impl QuantizeSuperBlock for BlockIq4Xs {
    fn quantize(x: &[f32; 256]) -> Self {
        let x = x.as_chunks::<32>().0;
        let mut scales = [0.0f32; 8];
        for (scale, x) in scales.iter_mut().zip(x) {
            if let Some(mut fit) = UnevenFit::start(x, true) {
                fit.refine(x, 7);
                *scale = fit.scale;
            }
        }
        let d = -super::block32::signed_max(&scales) / 32.0;
        let id = inverse(d);
        let mut block = BlockIq4Xs {
            d: f32_to_f16(d),
            scales_h: 0,
            scales_l: [0; 4],
            qs: [0; 128],
        };
        for (j, (x, qs)) in x.iter().zip(block.qs.as_chunks_mut::<16>().0).enumerate() {
            let l = nearest_int(id * scales[j]).clamp(-32, 31);
            let factor = inverse(d * l as f32);
            (*qs, _) = pack_nibbles(&x.map(|x| nearest_uneven(factor * x)));
            let l = (l + 32) as u8;
            block.scales_l[j / 2] |= (l & 15) << (4 * (j % 2));
            block.scales_h |= u16::from(l >> 4) << (2 * j);
        }
        block
    }
}
