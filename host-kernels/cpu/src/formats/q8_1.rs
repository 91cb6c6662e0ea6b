//! Q8_1: Q8_0 with the sum of its values: the activations of the group formats with a minimum.

use super::block32::QuantizeBlock32;
use super::q8_0::quantize_bytes;
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_q8_1`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ8_1 {
    /// Scale (F16).
    pub d: u16,
    /// `d` times the sum of the quants (F16).
    pub s: u16,
    /// The quants.
    pub qs: [i8; 32],
}

const _: () = assert!(size_of::<BlockQ8_1>() == 36);

impl Block32Format for BlockQ8_1 {
    const ELEMENTS: usize = 32;
    const OFFSET: i32 = 128;

    #[inline(always)]
    fn group(&self, _: usize) -> Quants32 {
        Quants32 {
            q: self.qs.map(|q| q as u8 ^ 0x80),
            d: [f16_to_f32(self.d); 2],
            m: 0.0,
        }
    }
}

impl QuantizeBlock32<32> for BlockQ8_1 {
    fn quantize(x: &[f32; 32]) -> Self {
        let (d, qs) = quantize_bytes(x);
        let sum: i32 = qs.iter().map(|&q| i32::from(q)).sum();
        BlockQ8_1 {
            d: f32_to_f16(d),
            s: f32_to_f16(d * sum as f32),
            qs,
        }
    }
}
