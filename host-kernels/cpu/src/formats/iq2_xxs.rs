//! IQ2_XXS: 8 sub-blocks of 32 quants, eight at a time from a codebook of magnitudes.

use super::codebook::{self, QuantRange, fit, with_signs};
use super::grids::{IQ2_XXS, SIGN_OFFSET, signed_evenly};
use super::k_quants::QuantizeSuperBlock;
use super::{Quants256, SuperBlockFormat, f16_to_f32};

/// ggml's `block_iq2_xxs`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq2Xxs {
    /// Scale (F16).
    pub d: u16,
    /// Eight bytes for each sub-block: four indices; then, little endian, four times seven signs
    /// and the scale.
    pub qs: [u8; 64],
}

const _: () = assert!(size_of::<BlockIq2Xxs>() == 66);

impl SuperBlockFormat for BlockIq2Xxs {
    const SUB: usize = 32;
    const OFFSET: i32 = SIGN_OFFSET as i32;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let (mut q, mut scales) = ([0; 256], [0; 16]);
        for (j, (q, qs)) in q
            .chunks_exact_mut(32)
            .zip(self.qs.as_chunks::<8>().0)
            .enumerate()
        {
            let signs = u32::from_le_bytes([qs[4], qs[5], qs[6], qs[7]]);
            scales[j] = 2 * (signs >> 28) as i16 + 1;
            for (i, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                *q = signed_evenly(IQ2_XXS[usize::from(qs[i])], signs >> (7 * i));
            }
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

impl QuantizeSuperBlock for BlockIq2Xxs {
    fn quantize(x: &[f32; 256]) -> Self {
        let range = QuantRange {
            sub: 32,
            scales: 16,
            unit: 0.125,
            largest: 43.0,
        };
        let fit = fit(x, range, &[|x: &_| with_signs(&codebook::IQ2_XXS, x, true)]);
        let mut qs = [0; 64];
        for (j, (qs, octets)) in qs
            .as_chunks_mut::<8>()
            .0
            .iter_mut()
            .zip(fit.octets.as_chunks::<4>().0)
            .enumerate()
        {
            let mut signs = u32::from(fit.scales[j]) << 28;
            for (i, octet) in octets.iter().enumerate() {
                qs[i] = octet.index[0] as u8;
                signs |= u32::from(octet.signs & 127) << (7 * i);
            }
            qs[4..].copy_from_slice(&signs.to_le_bytes());
        }
        BlockIq2Xxs { d: fit.d, qs }
    }
}
