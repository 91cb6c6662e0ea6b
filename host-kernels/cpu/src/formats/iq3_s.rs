//! IQ3_S: 8 sub-blocks of 32 quants, four at a time from a codebook of magnitudes.

use super::codebook::{self, QuantRange, fit, with_signs};
use super::grids::{IQ3_S, SIGN_OFFSET, signed};
use super::k_quants::{QuantizeSuperBlock, pack_scale_nibbles};
use super::{Quants256, SuperBlockFormat, f16_to_f32};

/// ggml's `block_iq3_s`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq3S {
    /// Scale (F16).
    pub d: u16,
    /// For each four elements the low eight bits of an index.
    pub qs: [u8; 64],
    /// For each four elements the ninth bit of the index.
    pub qh: [u8; 8],
    /// For each eight elements their signs.
    pub signs: [u8; 32],
    /// Two scales in a byte.
    pub scales: [u8; 4],
}

const _: () = assert!(size_of::<BlockIq3S>() == 110);

impl SuperBlockFormat for BlockIq3S {
    const SUB: usize = 32;
    const OFFSET: i32 = SIGN_OFFSET as i32;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let (mut q, mut scales) = ([0; 256], [0; 16]);
        for (i, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let ninth = usize::from(self.qh[i / 4]) >> (2 * (i % 4));
            let low = IQ3_S[usize::from(self.qs[2 * i]) | (ninth & 1) << 8];
            let high = IQ3_S[usize::from(self.qs[2 * i + 1]) | (ninth >> 1 & 1) << 8];
            *q = signed(low | high << 32, self.signs[i]);
        }
        for (j, scale) in scales.iter_mut().enumerate().take(8) {
            *scale = 2 * i16::from(self.scales[j / 2] >> (4 * (j % 2)) & 15) + 1;
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

impl QuantizeSuperBlock for BlockIq3S {
    fn quantize(x: &[f32; 256]) -> Self {
        let range = QuantRange {
            sub: 32,
            scales: 16,
            unit: 1.0,
            largest: 15.0,
        };
        let fit = fit(x, range, &[|x: &_| with_signs(&codebook::IQ3_S, x, false)]);
        let (mut qs, mut qh) = ([0; 64], [0; 8]);
        for (i, octet) in fit.octets.iter().enumerate() {
            for (half, index) in octet.index.into_iter().enumerate() {
                qs[2 * i + half] = index as u8;
                qh[i / 4] |= ((index >> 8) as u8) << (2 * (i % 4) + half);
            }
        }
        BlockIq3S {
            d: fit.d,
            qs,
            qh,
            signs: fit.octets.map(|octet| octet.signs),
            scales: pack_scale_nibbles(&fit.scales),
        }
    }
}
