//! Q1_0: 128 signs and a magnitude.

use super::block32::QuantizeBlock32;
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_q1_0`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ1_0 {
    /// Magnitude (F16).
    pub d: u16,
    /// A set bit is plus; element `j` in bit `j % 8` of byte `j / 8`.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ1_0>() == 18);

impl Block32Format for BlockQ1_0 {
    const ELEMENTS: usize = 128;
    const OFFSET: i32 = 1;

    #[inline(always)]
    fn group(&self, index: usize) -> Quants32 {
        let mut q = [0; 32];
        for (j, q) in q.iter_mut().enumerate() {
            *q = (self.qs[4 * index + j / 8] >> (j % 8) & 1) << 1;
        }
        Quants32 {
            q,
            d: [f16_to_f32(self.d); 2],
            m: 0.0,
        }
    }
}

impl QuantizeBlock32<128> for BlockQ1_0 {
    fn quantize(x: &[f32; 128]) -> Self {
        let mut sum = 0.0f32;
        for &x in x {
            sum += x.abs();
        }
        let mut qs = [0; 16];
        for (j, &x) in x.iter().enumerate() {
            qs[j / 8] |= u8::from(x >= 0.0) << (j % 8);
        }
        BlockQ1_0 {
            d: f32_to_f16(sum / 128.0),
            qs,
        }
    }
}
