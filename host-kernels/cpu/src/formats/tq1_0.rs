//! TQ1_0: 256 quants of -1, 0 or 1, five to a byte, and a scale.

use super::k_quants::{QuantizeSuperBlock, quantize_ternary};
use super::{Quants256, SuperBlockFormat, f16_to_f32, f32_to_f16};

/// ggml's `block_tq1_0`.
///
/// A byte has five digits to base 3 as a fraction of 256, rounded up: the first digit is the carry
/// of the multiplication by 3.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockTq1_0 {
    /// 32 bytes for the first 160 elements (`32 * i + j` is digit `i` of byte `j`), 16 for the next
    /// 80.
    pub qs: [u8; 48],
    /// The last 16 elements: `4 * i + j` is digit `i` of byte `j`, the fifth digit is unused.
    pub qh: [u8; 4],
    /// Scale (F16).
    pub d: u16,
}

const _: () = assert!(size_of::<BlockTq1_0>() == 54);

/// Digit `i` of a byte.
#[inline(always)]
fn digit(byte: u8, i: usize) -> u8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let rest = byte.wrapping_mul(POWERS[i]);
    ((u16::from(rest) * 3) >> 8) as u8
}

/// A byte of five digits.
fn pack(digits: impl Iterator<Item = u8>) -> u8 {
    let number = digits.fold(0, |number, digit| 3 * number + u16::from(digit));
    (number * 256).div_ceil(243) as u8
}

impl SuperBlockFormat for BlockTq1_0 {
    const SUB: usize = 32;
    const OFFSET: i32 = 1;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        let mut q = [0; 256];
        for i in 0..5 {
            for j in 0..32 {
                q[32 * i + j] = digit(self.qs[j], i);
            }
            for j in 0..16 {
                q[160 + 16 * i + j] = digit(self.qs[32 + j], i);
            }
        }
        for i in 0..4 {
            for j in 0..4 {
                q[240 + 4 * i + j] = digit(self.qh[j], i);
            }
        }
        Quants256 {
            q,
            scales: [1; 16],
            mins: [0; 16],
            d: f16_to_f32(self.d),
            dmin: 0.0,
        }
    }
}

impl QuantizeSuperBlock for BlockTq1_0 {
    fn quantize(x: &[f32; 256]) -> Self {
        let (d, q) = quantize_ternary(x);
        let mut block = BlockTq1_0 {
            qs: [0; 48],
            qh: [0; 4],
            d: f32_to_f16(d),
        };
        for j in 0..32 {
            block.qs[j] = pack((0..5).map(|i| q[32 * i + j]));
        }
        for j in 0..16 {
            block.qs[32 + j] = pack((0..5).map(|i| q[160 + 16 * i + j]));
        }
        for j in 0..4 {
            block.qh[j] = pack((0..4).map(|i| q[240 + 4 * i + j]).chain([0]));
        }
        block
    }
}
