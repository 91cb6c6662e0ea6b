//! MXFP4: 32 floats of 4 bits (E2M1) and an exponent.

use super::block32::{QuantizeBlock32, nibbles, pack_nibbles};
use super::grids::FP4_VALUES;
use super::search::nearest_fp4;
use super::{Block32Format, Quants32};

/// ggml's `block_mxfp4`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockMxfp4 {
    /// Exponent, biased by 127.
    pub e: u8,
    /// Element `j` in the low, `j + 16` in the high nibble of byte `j`.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockMxfp4>() == 17);

/// `2^(e - 128)`: half the scale, because the quants are twice the values.
#[inline(always)]
pub(crate) const fn exponent_to_f32(e: u8) -> f32 {
    // The two smallest results are subnormal.
    f32::from_bits(if e < 2 {
        0x0020_0000 << e
    } else {
        (e as u32 - 1) << 23
    })
}

impl Block32Format for BlockMxfp4 {
    const ELEMENTS: usize = 32;
    const OFFSET: i32 = 12;

    #[inline(always)]
    fn group(&self, _: usize) -> Quants32 {
        let q = nibbles(&self.qs).map(|q| (FP4_VALUES[usize::from(q)] + 12) as u8);
        Quants32 {
            q,
            d: [exponent_to_f32(self.e); 2],
            m: 0.0,
        }
    }
}

impl QuantizeBlock32<32> for BlockMxfp4 {
    fn quantize(x: &[f32; 32]) -> Self {
        let mut amax = 0.0f32;
        for &x in x {
            if x.abs() > amax {
                amax = x.abs();
            }
        }
        // The largest value of the format is 6, whose exponent is 2.
        let e = if amax > 0.0 {
            (amax.log2().floor() - 2.0 + 127.0) as i32 as u8
        } else {
            0
        };
        let d = exponent_to_f32(e);
        let (qs, _) = pack_nibbles(&x.map(|x| nearest_fp4(x, d)));
        BlockMxfp4 { e, qs }
    }
}
