//! IQ3_XXS: 8 sub-blocks of 32 quants, four at a time from a codebook of magnitudes.

use super::codebook::{self, QuantRange, fit, with_signs};
use super::grids::{IQ3_XXS, SIGN_OFFSET, signed_evenly};
use super::k_quants::QuantizeSuperBlock;
use super::{Quants256, SuperBlockFormat, f16_to_f32};

/// ggml's `block_iq3_xxs`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq3Xxs {
    /// Scale (F16).
    pub d: u16,
    /// For each four elements an index.
    pub qs: [u8; 64],
    /// For each sub-block, little endian, four times seven signs and the scale.
    pub signs: [[u8; 4]; 8],
}

const _: () = assert!(size_of::<BlockIq3Xxs>() == 98);

impl SuperBlockFormat for BlockIq3Xxs {
    const SUB: usize = 32;
    const OFFSET: i32 = SIGN_OFFSET as i32;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let (mut q, mut scales) = ([0; 256], [0; 16]);
        for (j, q) in q.chunks_exact_mut(32).enumerate() {
            let signs = u32::from_le_bytes(self.signs[j]);
            scales[j] = 2 * (signs >> 28) as i16 + 1;
            for (i, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let low = IQ3_XXS[usize::from(self.qs[8 * j + 2 * i])];
                let high = IQ3_XXS[usize::from(self.qs[8 * j + 2 * i + 1])];
                *q = signed_evenly(low | high << 32, signs >> (7 * i));
            }
        }
        // Scales are `(s + 1/2) / 2`, here `(2 s + 1) / 4`.
        Quants256 {
            q,
            scales,
            mins: [0; 16],
            d: f16_to_f32(self.d) * 0.25,
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockIq3Xxs {
    fn quantize(x: &[f32; 256]) -> Self {
        let range = QuantRange {
            sub: 32,
            scales: 16,
            unit: 0.25,
            largest: 62.0,
        };
        let fit = fit(x, range, &[|x: &_| with_signs(&codebook::IQ3_XXS, x, true)]);
        let mut qs = [0; 64];
        for (qs, octet) in qs.as_chunks_mut::<2>().0.iter_mut().zip(&fit.octets) {
            *qs = octet.index.map(|index| index as u8);
        }
        let mut signs = [[0; 4]; 8];
        for (j, octets) in fit.octets.as_chunks::<4>().0.iter().enumerate() {
            let mut packed = u32::from(fit.scales[j]) << 28;
            for (i, octet) in octets.iter().enumerate() {
                packed |= u32::from(octet.signs & 127) << (7 * i);
            }
            signs[j] = packed.to_le_bytes();
        }
        BlockIq3Xxs {
            d: fit.d,
            qs,
            signs,
        }
    }
}
