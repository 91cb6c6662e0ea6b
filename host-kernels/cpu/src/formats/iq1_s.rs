//! IQ1_S: 8 sub-blocks of 32 quants, eight at a time from a codebook of -1, 0 and 1, each sub-block
//! shifted by an eighth up or down.

use super::codebook::{self, QuantRange, fit};
use super::grids::{IQ1, shifted};
use super::k_quants::QuantizeSuperBlock;
use super::{Quants256, SuperBlockFormat, f16_to_f32};

/// ggml's `block_iq1_s`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq1S {
    /// Scale (F16).
    pub d: u16,
    /// For each eight elements the low eight bits of an index.
    pub qs: [u8; 32],
    /// For each sub-block four times the high three bits of an index, the scale, and whether it is
    /// shifted down.
    pub qh: [u16; 8],
}

const _: () = assert!(size_of::<BlockIq1S>() == 50);

impl SuperBlockFormat for BlockIq1S {
    const SUB: usize = 32;
    const OFFSET: i32 = 16;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let (mut q, mut scales) = ([0; 256], [0; 16]);
        for (j, (q, qh)) in q.chunks_exact_mut(32).zip(self.qh).enumerate() {
            scales[j] = 2 * (qh >> 12 & 7) as i16 + 1;
            for (i, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let index = u16::from(self.qs[4 * j + i]) | (qh >> (3 * i) & 7) << 8;
                *q = shifted(IQ1[usize::from(index)], qh >> 15 == 1);
            }
        }
        Quants256 {
            q,
            scales,
            mins: [0; 16],
            d: f16_to_f32(self.d) * 0.125,
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockIq1S {
    fn quantize(x: &[f32; 256]) -> Self {
        let range = QuantRange {
            sub: 32,
            scales: 8,
            unit: 0.125,
            largest: 9.0,
        };
        let ways = [false, true].map(|down| move |x: &_| codebook::shifted(x, down));
        let fit = fit(x, range, &ways);
        let mut qh = [0; 8];
        for (j, (qh, octets)) in qh.iter_mut().zip(fit.octets.as_chunks::<4>().0).enumerate() {
            *qh = u16::from(fit.scales[j]) << 12 | u16::from(octets[0].down) << 15;
            for (i, octet) in octets.iter().enumerate() {
                *qh |= octet.index[0] >> 8 << (3 * i);
            }
        }
        BlockIq1S {
            d: fit.d,
            qs: fit.octets.map(|octet| octet.index[0] as u8),
            qh,
        }
    }
}
