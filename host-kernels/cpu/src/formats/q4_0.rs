//! Q4_0: 32 signed 4-bit quants and a scale.

use super::block32::{QuantizeBlock32, inverse, nibbles, pack_nibbles, round_quant, signed_max};
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_q4_0`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ4_0 {
    /// Scale (F16).
    pub d: u16,
    /// Element `j` in the low, `j + 16` in the high nibble of byte `j`; 8 is zero.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_0>() == 18);

impl Block32Format for BlockQ4_0 {
    const ELEMENTS: usize = 32;
    const OFFSET: i32 = 8;

    #[inline(always)]
    fn group(&self, _: usize) -> Quants32 {
        Quants32 {
            q: nibbles(&self.qs),
            d: [f16_to_f32(self.d); 2],
            m: 0.0,
        }
    }
}

impl QuantizeBlock32<32> for BlockQ4_0 {
    fn quantize(x: &[f32; 32]) -> Self {
        let d = signed_max(x) / -8.0;
        let id = inverse(d);
        let (qs, _) = pack_nibbles(&x.map(|x| round_quant(x * id + 8.5, 15)));
        BlockQ4_0 {
            d: f32_to_f16(d),
            qs,
        }
    }
}
