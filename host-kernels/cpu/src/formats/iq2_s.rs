//! IQ2_S: 16 sub-blocks of 16 quants, eight at a time from a codebook of magnitudes.

use super::codebook::{self, QuantRange, fit, with_signs};
use super::grids::{IQ2_S, SIGN_OFFSET, signed};
use super::k_quants::{QuantizeSuperBlock, pack_scale_nibbles};
use super::{Quants256, SuperBlockFormat, f16_to_f32};

/// ggml's `block_iq2_s`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq2S {
    /// Scale (F16).
    pub d: u16,
    /// For each eight elements the low eight bits of an index.
    pub qs: [u8; 32],
    /// For each eight elements their signs.
    pub signs: [u8; 32],
    /// For each eight elements the high two bits of the index, four in a byte.
    pub qh: [u8; 8],
    /// Two scales in a byte.
    pub scales: [u8; 8],
}

const _: () = assert!(size_of::<BlockIq2S>() == 82);

impl SuperBlockFormat for BlockIq2S {
    const SUB: usize = 16;
    const OFFSET: i32 = SIGN_OFFSET as i32;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let (mut q, mut scales) = ([0; 256], [0; 16]);
        for (i, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = self.qh[i / 4] >> (2 * (i % 4)) & 3;
            let index = usize::from(self.qs[i]) | usize::from(high) << 8;
            *q = signed(IQ2_S[index], self.signs[i]);
        }
        for (j, scale) in scales.iter_mut().enumerate() {
            *scale = 2 * i16::from(self.scales[j / 2] >> (4 * (j % 2)) & 15) + 1;
        }
        // Scales are `(s + 1/2) / 4`, here `(2 s + 1) / 8`.
        Quants256 {
            q,
            scales,
            mins: [0; 16],
            d: f16_to_f32(self.d) * 0.125,
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockIq2S {
    fn quantize(x: &[f32; 256]) -> Self {
        let range = QuantRange {
            sub: 16,
            scales: 16,
            unit: 0.125,
            largest: 43.0,
        };
        let fit = fit(x, range, &[|x: &_| with_signs(&codebook::IQ2_S, x, false)]);
        let mut qh = [0; 8];
        for (i, octet) in fit.octets.iter().enumerate() {
            qh[i / 4] |= ((octet.index[0] >> 8) as u8) << (2 * (i % 4));
        }
        BlockIq2S {
            d: fit.d,
            qs: fit.octets.map(|octet| octet.index[0] as u8),
            signs: fit.octets.map(|octet| octet.signs),
            qh,
            scales: pack_scale_nibbles(&fit.scales),
        }
    }
}
