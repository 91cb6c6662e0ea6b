//! Q5_0: 32 signed 5-bit quants and a scale.

use super::block32::{
    QuantizeBlock32, add_fifth_bits, inverse, nibbles, pack_nibbles, round_quant, signed_max,
};
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_q5_0`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ5_0 {
    /// Scale (F16).
    pub d: u16,
    /// The fifth bits, element `j` in bit `j`, little endian.
    pub qh: [u8; 4],
    /// Element `j` in the low, `j + 16` in the high nibble of byte `j`; 16 is zero.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ5_0>() == 22);

impl Block32Format for BlockQ5_0 {
    const ELEMENTS: usize = 32;
    const OFFSET: i32 = 16;

    #[inline(always)]
    fn group(&self, _: usize) -> Quants32 {
        let mut q = nibbles(&self.qs);
        add_fifth_bits(&mut q, u32::from_le_bytes(self.qh));
        Quants32 {
            q,
            d: [f16_to_f32(self.d); 2],
            m: 0.0,
        }
    }
}

impl QuantizeBlock32<32> for BlockQ5_0 {
    fn quantize(x: &[f32; 32]) -> Self {
        let d = signed_max(x) / -16.0;
        let id = inverse(d);
        let (qs, qh) = pack_nibbles(&x.map(|x| round_quant(x * id + 16.5, 31)));
        BlockQ5_0 {
            d: f32_to_f16(d),
            qh: qh.to_le_bytes(),
            qs,
        }
    }
}
