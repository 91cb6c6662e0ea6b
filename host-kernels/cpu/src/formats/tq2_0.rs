//! TQ2_0: 256 quants of -1, 0 or 1, four to a byte, and a scale.

use super::k_quants::{QuantizeSuperBlock, pack_two_bits, quantize_ternary, unpack_two_bits};
use super::{Quants256, SuperBlockFormat, f16_to_f32, f32_to_f16};

/// ggml's `block_tq2_0`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockTq2_0 {
    /// In each half of the block (128 elements, 32 bytes), element `32 * i + j` in bits `2 * i` of
    /// byte `j`; 1 is zero.
    pub qs: [u8; 64],
    /// Scale (F16).
    pub d: u16,
}

const _: () = assert!(size_of::<BlockTq2_0>() == 66);

impl SuperBlockFormat for BlockTq2_0 {
    const SUB: usize = 32;
    const OFFSET: i32 = 1;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let q = unpack_two_bits(&self.qs);
        Quants256 {
            q,
            scales: [1; 16],
            mins: [0; 16],
            d: f16_to_f32(self.d),
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockTq2_0 {
    fn quantize(x: &[f32; 256]) -> Self {
        let (d, q) = quantize_ternary(x);
        BlockTq2_0 {
            qs: pack_two_bits(&q),
            d: f32_to_f16(d),
        }
    }
}
