//! Q8_0: 32 signed bytes and a scale; also the activations of the group formats without a minimum.

use super::block32::QuantizeBlock32;
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_q8_0`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockQ8_0 {
    /// Scale (F16).
    pub d: u16,
    /// The quants.
    pub qs: [i8; 32],
}

const _: () = assert!(size_of::<BlockQ8_0>() == 34);

impl Block32Format for BlockQ8_0 {
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

impl QuantizeBlock32<32> for BlockQ8_0 {
    fn quantize(x: &[f32; 32]) -> Self {
        let (d, qs) = quantize_bytes(x);
        BlockQ8_0 {
            d: f32_to_f16(d),
            qs,
        }
    }
}

/// Scale and quants of Q8_0 and Q8_1 by the rule of ggml-cpu on x86: the inverse scale is `127 /
/// amax` and ties round to even. (ggml-base's portable code inverts the scale and rounds ties away,
/// so files written by it differ from activations in a few quants.)
pub(super) fn quantize_bytes(x: &[f32; 32]) -> (f32, [i8; 32]) {
    let mut amax = 0.0f32;
    for &x in x {
        amax = amax.max(x.abs());
    }
    let inverse = if amax != 0.0 { 127.0 / amax } else { 0.0 };
    (
        amax / 127.0,
        x.map(|x| (x * inverse).round_ties_even() as i8),
    )
}
