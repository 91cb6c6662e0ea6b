//! NVFP4: 64 floats of 4 bits (E2M1), every 16 with a scale that is a float of 8 bits (UE4M3).

use super::block32::QuantizeBlock32;
use super::grids::FP4_VALUES;
use super::search::nearest_fp4;
use super::{Block32Format, Quants32};

/// ggml's `block_nvfp4`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub struct BlockNvfp4 {
    /// Scales: four bits of exponent, biased by 7, three of mantissa.
    pub d: [u8; 4],
    /// Eight bytes for each 16 elements: `j` in the low, `j + 8` in the high nibble of byte `j`.
    pub qs: [u8; 32],
}

const _: () = assert!(size_of::<BlockNvfp4>() == 36);

/// Half the value of every scale, because the quants are twice the values.
pub(crate) static SCALES: [f32; 256] = {
    let mut scales = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        let (exponent, mantissa) = (bits as u32 >> 3 & 15, (bits & 7) as f32);
        scales[bits] = match exponent {
            0 => mantissa * (0.5 / 512.0),
            _ => (1.0 + mantissa / 8.0) * f32::from_bits((exponent + 127 - 8) << 23),
        };
        bits += 1;
    }
    // NaN, which ggml reads as zero.
    scales[0x7f] = 0.0;
    scales
};

#[inline(always)]
fn scale_to_f32(bits: u8) -> f32 {
    SCALES[usize::from(bits)]
}

/// The scale nearest to `x`, ties rounded up. Negative numbers and NaN become zero.
fn f32_to_scale(x: f32) -> u8 {
    const MAX: u8 = 0x7e;
    if x <= 0.0 || x.is_nan() {
        return 0;
    }
    let bits = x.min(448.0).to_bits();
    let exponent = (bits >> 23) as i32 - 127 + 7;
    if exponent <= 0 {
        return ((x * 512.0 + 0.5) as u8).min(7);
    }
    // Rounding the mantissa may carry into the exponent.
    let rounded = (exponent << 3) + (bits >> 20 & 7) as i32 + (bits >> 19 & 1) as i32;
    if rounded >> 3 >= 15 {
        MAX
    } else {
        rounded as u8
    }
}

impl Block32Format for BlockNvfp4 {
    const ELEMENTS: usize = 64;
    const OFFSET: i32 = 12;
    const HALF_SCALES: bool = true;

    #[inline(always)]
    fn group(&self, index: usize) -> Quants32 {
        let value = |q: u8| (FP4_VALUES[usize::from(q)] + 12) as u8;
        let mut q = [0; 32];
        for (half, q) in q.chunks_exact_mut(16).enumerate() {
            for j in 0..8 {
                let byte = self.qs[16 * index + 8 * half + j];
                q[j] = value(byte & 15);
                q[j + 8] = value(byte >> 4);
            }
        }
        let d = [
            scale_to_f32(self.d[2 * index]),
            scale_to_f32(self.d[2 * index + 1]),
        ];
        Quants32 { q, d, m: 0.0 }
    }
}

impl QuantizeBlock32<64> for BlockNvfp4 {
    fn quantize(x: &[f32; 64]) -> Self {
        let mut block = BlockNvfp4 {
            d: [0; 4],
            qs: [0; 32],
        };
        for (i, x) in x.chunks_exact(16).enumerate() {
            let mut amax = 0.0f32;
            for &x in x {
                if x.abs() > amax {
                    amax = x.abs();
                }
            }
            block.d[i] = f32_to_scale(amax / 6.0);
            let d = scale_to_f32(block.d[i]);
            for j in 0..8 {
                block.qs[8 * i + j] = nearest_fp4(x[j], d) | nearest_fp4(x[j + 8], d) << 4;
            }
        }
        block
    }
}
