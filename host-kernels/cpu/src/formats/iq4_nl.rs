//! IQ4_NL: 32 quants of 4 bits, unevenly spaced, and a scale.

use super::block32::{QuantizeBlock32, nibbles, pack_nibbles};
use super::grids::IQ4_VALUES;
use super::search::{UnevenFit, nearest_uneven};
use super::{Block32Format, Quants32, f16_to_f32, f32_to_f16};

/// ggml's `block_iq4_nl`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockIq4Nl {
    /// Scale (F16).
    pub d: u16,
    /// Element `j` in the low, `j + 16` in the high nibble of byte `j`.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockIq4Nl>() == 18);

impl Block32Format for BlockIq4Nl {
    const ELEMENTS: usize = 32;
    const OFFSET: i32 = 128;

    #[inline(always)]
    fn group(&self, _: usize) -> Quants32 {
        let q = nibbles(&self.qs).map(|q| IQ4_VALUES[usize::from(q)] as u8 ^ 0x80);
        Quants32 {
            q,
            d: [f16_to_f32(self.d); 2],
            m: 0.0,
        }
    }
}

impl QuantizeBlock32<32> for BlockIq4Nl {
    fn quantize(x: &[f32; 32]) -> Self {
        let Some(fit) = UnevenFit::start(x, false) else {
            return BlockIq4Nl { d: 0, qs: [0; 16] };
        };
        // The quants are those of the first guess; only the scale is fitted to them.
        let d = fit.scale;
        let q = x.map(|x| nearest_uneven(fit.inverse * x));
        let (qs, _) = pack_nibbles(&q);
        BlockIq4Nl {
            d: f32_to_f16(d),
            qs,
        }
    }
}
