//! Q2_0: 64 quants of -1, 0, 1 or 2, and a scale.

use super::block32::{QuantizeBlock32, inverse};
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_q2_0`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ2_0 {
    /// Scale (F16).
    pub d: u16,
    /// Element `j` in bits `2 * (j % 4)` of byte `j / 4`; 1 is zero.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ2_0>() == 18);

impl Block32Format for BlockQ2_0 {
    const ELEMENTS: usize = 64;
    const OFFSET: i32 = 1;

    #[inline(always)]
    fn group(&self, index: usize) -> Quants32 {
        let mut q = [0; 32];
        for (j, q) in q.iter_mut().enumerate() {
            *q = self.qs[8 * index + j / 4] >> (2 * (j % 4)) & 3;
        }
        Quants32 {
            q,
            d: [f16_to_f32(self.d); 2],
            m: 0.0,
        }
    }
}

impl QuantizeBlock32<64> for BlockQ2_0 {
    fn quantize(x: &[f32; 64]) -> Self {
        let mut d = 0.0f32;
        for &x in x {
            if x.abs() > d {
                d = x.abs();
            }
        }
        let id = inverse(d);
        let mut qs = [0; 16];
        for (j, &x) in x.iter().enumerate() {
            let q = ((x * id).round().clamp(-1.0, 2.0) + 1.0) as u8;
            qs[j / 4] |= q << (2 * (j % 4));
        }
        BlockQ2_0 {
            d: f32_to_f16(d),
            qs,
        }
    }
}
