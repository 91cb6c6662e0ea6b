//! Q5_1: 32 unsigned 5-bit quants, a scale and a minimum.

use super::block32::{QuantizeBlock32, add_fifth_bits, inverse, nibbles, pack_nibbles, range};
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_q5_1`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ5_1 {
    /// Scale (F16).
    pub d: u16,
    /// Minimum (F16).
    pub m: u16,
    /// The fifth bits, element `j` in bit `j`, little endian.
    pub qh: [u8; 4],
    /// Element `j` in the low, `j + 16` in the high nibble of byte `j`.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ5_1>() == 24);

impl Block32Format for BlockQ5_1 {
    const ELEMENTS: usize = 32;
    const OFFSET: i32 = 0;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn group(&self, _: usize) -> Quants32 {
        let mut q = nibbles(&self.qs);
        add_fifth_bits(&mut q, u32::from_le_bytes(self.qh));
        Quants32 {
            q,
            d: [f16_to_f32(self.d); 2],
            m: f16_to_f32(self.m),
        }
    }
}

impl QuantizeBlock32<32> for BlockQ5_1 {
    fn quantize(x: &[f32; 32]) -> Self {
        let (min, max) = range(x);
        let d = (max - min) / 31.0;
        let id = inverse(d);
        let (qs, qh) = pack_nibbles(&x.map(|x| ((x - min) * id + 0.5) as u8));
        BlockQ5_1 {
            d: f32_to_f16(d),
            m: f32_to_f16(min),
            qh: qh.to_le_bytes(),
            qs,
        }
    }
}
