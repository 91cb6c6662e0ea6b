//! Q4_1: 32 unsigned 4-bit quants, a scale and a minimum.

use super::block32::{QuantizeBlock32, inverse, nibbles, pack_nibbles, range, round_quant};
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_q4_1`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ4_1 {
    /// Scale (F16).
    pub d: u16,
    /// Minimum (F16).
    pub m: u16,
    /// Element `j` in the low, `j + 16` in the high nibble of byte `j`.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_1>() == 20);

impl Block32Format for BlockQ4_1 {
    const ELEMENTS: usize = 32;
    const OFFSET: i32 = 0;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn group(&self, _: usize) -> Quants32 {
        Quants32 {
            q: nibbles(&self.qs),
            d: [f16_to_f32(self.d); 2],
            m: f16_to_f32(self.m),
        }
    }
}

impl QuantizeBlock32<32> for BlockQ4_1 {
    fn quantize(x: &[f32; 32]) -> Self {
        let (min, max) = range(x);
        let d = (max - min) / 15.0;
        let id = inverse(d);
        let (qs, _) = pack_nibbles(&x.map(|x| round_quant((x - min) * id + 0.5, 15)));
        BlockQ4_1 {
            d: f32_to_f16(d),
            m: f32_to_f16(min),
            qs,
        }
    }
}
