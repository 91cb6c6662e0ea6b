//! Q8_K: 256 signed bytes, a scale, and the sums of every 16: the activations of the super-block
//! formats.

use super::block32::signed_max;
use super::k_quants::QuantizeSuperBlock;
use super::search::nearest_int;
use super::{Quants256, SuperBlockFormat};

/// ggml's `block_q8_K`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ8K {
    /// Scale.
    pub d: f32,
    /// The quants.
    pub qs: [i8; 256],
    /// Sums of 16 quants each.
    pub bsums: [i16; 16],
}

const _: () = assert!(size_of::<BlockQ8K>() == 292);

impl SuperBlockFormat for BlockQ8K {
    const SUB: usize = 32;
    const OFFSET: i32 = 128;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let q = self.qs.map(|q| q as u8 ^ 0x80);
        Quants256 {
            q,
            scales: [1; 16],
            mins: [0; 16],
            d: self.d,
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockQ8K {
    fn quantize(x: &[f32; 256]) -> Self {
        let max = signed_max(x);
        if max == 0.0 {
            return BlockQ8K {
                d: 0.0,
                qs: [0; 256],
                bsums: [0; 16],
            };
        }
        let inverse = -127.0 / max;
        let qs = x.map(|x| nearest_int(inverse * x).min(127) as i8);
        let mut bsums = [0; 16];
        for (sum, q) in bsums.iter_mut().zip(qs.chunks_exact(16)) {
            *sum = q.iter().map(|&q| i16::from(q)).sum();
        }
        BlockQ8K {
            d: 1.0 / inverse,
            qs,
            bsums,
        }
    }
}
