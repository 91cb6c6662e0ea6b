//! IQ1_M: 16 sub-blocks of 16 quants, eight at a time from a codebook of -1, 0 and 1, each eight
//! shifted by an eighth up or down.

use super::codebook::{QuantRange, fit, shifted_either_way};
use super::grids::{IQ1, shifted};
use super::k_quants::QuantizeSuperBlock;
use super::{Quants256, SuperBlockFormat, f16_to_f32};

/// ggml's `block_iq1_m`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq1M {
    /// For each eight elements the low eight bits of an index.
    pub qs: [u8; 32],
    /// For each eight elements a nibble: the high three bits of the index, and whether they are
    /// shifted down.
    pub qh: [u8; 16],
    /// Four times three bits of scale in the low bits of each; the high four bits are, in order,
    /// the nibbles of the scale of the scales (F16).
    pub scales: [u16; 4],
}

const _: () = assert!(size_of::<BlockIq1M>() == 56);

impl SuperBlockFormat for BlockIq1M {
    const SUB: usize = 16;
    const OFFSET: i32 = 16;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let (mut q, mut scales) = ([0; 256], [0; 16]);
        for (i, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let nibble = self.qh[i / 2] >> (4 * (i % 2)) & 15;
            let index = usize::from(self.qs[i]) | usize::from(nibble & 7) << 8;
            *q = shifted(IQ1[index], nibble >> 3 == 1);
        }
        let packed = self.scales;
        for (j, scale) in scales.iter_mut().enumerate() {
            *scale = 2 * (packed[j / 4] >> (3 * (j % 4)) & 7) as i16 + 1;
        }
        let d = (0..4).fold(0, |d, i| d | (packed[i] >> 12) << (4 * i));
        Quants256 {
            q,
            scales,
            mins: [0; 16],
            d: f16_to_f32(d) * 0.125,
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockIq1M {
    fn quantize(x: &[f32; 256]) -> Self {
        let range = QuantRange {
            sub: 16,
            scales: 8,
            unit: 0.125,
            largest: 9.0,
        };
        let fit = fit(x, range, &[shifted_either_way]);
        let mut qh = [0; 16];
        for (i, octet) in fit.octets.iter().enumerate() {
            let nibble = (octet.index[0] >> 8) as u8 | u8::from(octet.down) << 3;
            qh[i / 2] |= nibble << (4 * (i % 2));
        }
        let mut scales = std::array::from_fn(|i| (fit.d >> (4 * i) & 15) << 12);
        for (j, &scale) in fit.scales.iter().enumerate() {
            scales[j / 4] |= u16::from(scale) << (3 * (j % 4));
        }
        BlockIq1M {
            qs: fit.octets.map(|octet| octet.index[0] as u8),
            qh,
            scales,
        }
    }
}
