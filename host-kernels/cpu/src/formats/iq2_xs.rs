//! IQ2_XS: 16 sub-blocks of 16 quants, eight at a time from a codebook of magnitudes.

use super::codebook::{self, QuantRange, fit, with_signs};
use super::grids::{IQ2_XS, SIGN_OFFSET, signed_evenly};
use super::k_quants::{QuantizeSuperBlock, pack_scale_nibbles};
use super::{Quants256, SuperBlockFormat, f16_to_f32};

/// ggml's `block_iq2_xs`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq2Xs {
    /// Scale (F16).
    pub d: u16,
    /// For each eight elements nine bits of index and seven signs.
    pub qs: [u16; 32],
    /// Two scales in a byte.
    pub scales: [u8; 8],
}

const _: () = assert!(size_of::<BlockIq2Xs>() == 74);

impl SuperBlockFormat for BlockIq2Xs {
    const SUB: usize = 16;
    const OFFSET: i32 = SIGN_OFFSET as i32;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let (mut q, mut scales) = ([0; 256], [0; 16]);
        for (q, code) in q.as_chunks_mut::<8>().0.iter_mut().zip(self.qs) {
            let magnitudes = IQ2_XS[usize::from(code & 511)];
            *q = signed_evenly(magnitudes, u32::from(code >> 9));
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

impl QuantizeSuperBlock for BlockIq2Xs {
    fn quantize(x: &[f32; 256]) -> Self {
        let range = QuantRange {
            sub: 16,
            scales: 16,
            unit: 0.125,
            largest: 43.0,
        };
        let fit = fit(x, range, &[|x: &_| with_signs(&codebook::IQ2_XS, x, true)]);
        BlockIq2Xs {
            d: fit.d,
            qs: fit
                .octets
                .map(|octet| octet.index[0] | u16::from(octet.signs & 127) << 9),
            scales: pack_scale_nibbles(&fit.scales),
        }
    }
}
