//! Random weights in ggml's storage formats.
//!
//! No numbers are quantised, because that is slow for models of many gigabytes: a block of random
//! bits with suitable scales is a valid quantised block. Each function fills whole blocks whose
//! numbers have zero mean and the given standard deviation.

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};

use crate::tensor::TensorType;

/// Numbers per super-block of the K formats.
const QK_K: usize = 256;
/// Deviation of a uniform 4-bit number: `sqrt((16² - 1) / 12)`.
const SD_4BIT: f32 = 4.609_772;
/// Root mean square of a uniform 6-bit number around 32: `sqrt((64² - 1) / 12 + 1/4)`.
const RMS_6BIT: f32 = 18.479_717;
/// Root mean square of a uniform signed byte: `sqrt((256² - 1) / 12 + 1/4)`.
const RMS_8BIT: f32 = 73.901_96;
/// Root mean square of a uniform 4-bit number around 8: `sqrt((16² - 1) / 12 + 1/4)`.
const RMS_4BIT: f32 = 4.636_809;
/// Root mean square of the values that IQ4_NL's sixteen codes stand for.
const RMS_IQ4_NL: f32 = 67.438_86;
/// Mean square of the values of MXFP4's sixteen codes, doubled to be integers (0, 1, 2, 3, 4, 6,
/// 8, 12).
const MEAN_SQUARE_FP4: f32 = 34.25;
/// Mean of a 4-bit number: what the block's minimum has to take away again.
const MEAN_4BIT: f32 = 7.5;

/// A random generator with the same numbers on every machine: xoshiro256++.
#[derive(Debug)]
pub struct Rng(Xoshiro256PlusPlus);

impl Rng {
    /// An independent stream for every (`seed`, `stream`).
    pub fn new(seed: u64, stream: u64) -> Rng {
        let mixed = seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
        Rng(Xoshiro256PlusPlus::seed_from_u64(mixed))
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// An integer below `n`, nearly uniform.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next_u64() >> 16) % n
    }

    /// Fills `bytes` with random bits.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }

    /// Nearly normal, mean 0, deviation 1: the sum of four uniform 16-bit numbers (Irwin-Hall).
    fn normal(&mut self) -> f32 {
        let bits = self.next_u64();
        let sum = (0..4)
            .map(|i| (bits >> (16 * i)) as u16 as i32)
            .sum::<i32>()
            - 2 * 65_535;
        // Four times the variance (2^32 - 1) / 12 of one of them.
        sum as f32 / 37_837.22
    }
}

/// Fills `out`, whole blocks of `kind`, with numbers of mean `mean` and standard deviation `sd`.
///
/// Quantised types have a mean of zero. A mean is for norm weights, which are never quantised.
///
/// # Panics
///
/// If `kind` is a K type and `mean` is not zero.
pub fn fill(kind: TensorType, mean: f32, sd: f32, rng: &mut Rng, out: &mut [u8]) {
    match kind {
        TensorType::F32 => {
            for x in out.chunks_exact_mut(4) {
                x.copy_from_slice(&(mean + sd * rng.normal()).to_le_bytes());
            }
        }
        TensorType::F16 => {
            let (mut wide, mut narrow) = ([0f32; 64], [f16::ZERO; 64]);
            for group in out.chunks_mut(2 * 64) {
                wide.fill_with(|| mean + sd * rng.normal());
                narrow.convert_from_f32_slice(&wide);
                for (bytes, x) in group.chunks_exact_mut(2).zip(narrow) {
                    bytes.copy_from_slice(&x.to_le_bytes());
                }
            }
        }
        TensorType::Q4_0 => fill_groups(18, sd / RMS_4BIT, rng, out),
        TensorType::Q8_0 => fill_groups(34, sd / RMS_8BIT, rng, out),
        TensorType::Iq4Nl => fill_groups(18, sd / RMS_IQ4_NL, rng, out),
        TensorType::Mxfp4 => fill_mxfp4(sd, rng, out),
        TensorType::Q4K => {
            assert_eq!(mean, 0.0, "quantised weights centre on zero");
            out.chunks_exact_mut(144)
                .for_each(|block| fill_q4_k(sd, rng, block));
        }
        TensorType::Q6K => {
            assert_eq!(mean, 0.0, "quantised weights centre on zero");
            out.chunks_exact_mut(210)
                .for_each(|block| fill_q6_k(sd, rng, block));
        }
    }
}

/// Blocks of an f16 scale and codes of any value. The mean of the codes is not quite zero: scales
/// of random sign cancel it.
fn fill_groups(block_bytes: usize, d: f32, rng: &mut Rng, out: &mut [u8]) {
    for block in out.chunks_exact_mut(block_bytes) {
        let sign = if rng.next_u64() & 1 == 0 { 1.0 } else { -1.0 };
        let (scale, codes) = block.split_at_mut(2);
        scale.copy_from_slice(&f16::from_f32(sign * d).to_le_bytes());
        rng.fill(codes);
    }
}

/// `block_mxfp4`: an exponent e and sixteen bytes of codes. A weight is `2^(e - 128)` times the
/// code's doubled value. Powers of two reach any deviation only as a mix of two neighbours.
fn fill_mxfp4(sd: f32, rng: &mut Rng, out: &mut [u8]) {
    let square = sd * sd / MEAN_SQUARE_FP4;
    let exponent = (square.log2() / 2.0).floor();
    let low = (2.0 * exponent).exp2();
    // The part of the blocks that take the next power, whose square is four times this one's.
    let larger = (square / low - 1.0) / 3.0;
    for block in out.chunks_exact_mut(17) {
        let uniform = (rng.next_u64() >> 40) as f32 / (1 << 24) as f32;
        block[0] = (exponent + 128.0) as u8 + u8::from(uniform < larger);
        rng.fill(&mut block[1..]);
    }
}

/// `block_q4_K`: f16 d, f16 dmin, eight 6-bit scales and eight 6-bit minima in 12 bytes, 4-bit
/// numbers q. A weight is `d * scale * q - dmin * minimum`; with `minimum = scale` and
/// `dmin = 7.5 d` its mean is zero.
fn fill_q4_k(sd: f32, rng: &mut Rng, block: &mut [u8]) {
    // Scales in the upper half of their range, as a quantiser that uses the range leaves them.
    let bits = rng.next_u64();
    let scales: [u8; 8] = std::array::from_fn(|i| 32 + ((bits >> (5 * i)) & 31) as u8);
    let mean_square = scales.iter().map(|&s| f32::from(s).powi(2)).sum::<f32>() / 8.0;
    let d = f16::from_f32(sd / (SD_4BIT * mean_square.sqrt()));
    let dmin = f16::from_f32(MEAN_4BIT * d.to_f32());
    block[0..2].copy_from_slice(&d.to_le_bytes());
    block[2..4].copy_from_slice(&dmin.to_le_bytes());
    for i in 0..4 {
        let (low, high) = (scales[i], scales[i + 4]);
        // Bytes 0-3: scales 0-3, and above them the upper two bits of scales 4-7; bytes 4-7 the
        // same for the minima; bytes 8-11: the lower four bits of scales 4-7 and of minima 4-7.
        block[4 + i] = low | (high >> 4) << 6;
        block[8 + i] = low | (high >> 4) << 6;
        block[12 + i] = (high & 15) | (high & 15) << 4;
    }
    rng.fill(&mut block[16..]);
}

/// `block_q6_K`: the lower four and the upper two bits of the numbers q, sixteen 8-bit scales, f16
/// d. A weight is `d * scale * (q - 32)`. The mean of q is 31.5: scales of random sign cancel the
/// half.
fn fill_q6_k(sd: f32, rng: &mut Rng, block: &mut [u8]) {
    rng.fill(&mut block[..192]);
    let bits = [rng.next_u64(), rng.next_u64()];
    let mut square = 0.0;
    for i in 0..16 {
        let byte = (bits[i / 8] >> (8 * (i % 8))) as u8;
        let magnitude = 64 + (byte & 63) as i8;
        let scale = if byte & 64 == 0 {
            magnitude
        } else {
            -magnitude
        };
        square += f32::from(scale).powi(2);
        block[192 + i] = scale as u8;
    }
    let d = f16::from_f32(sd / (RMS_6BIT * (square / 16.0).sqrt()));
    block[208..210].copy_from_slice(&d.to_le_bytes());
}

const _: () = assert!(TensorType::Q4K.block_len() == QK_K as u64);
const _: () = assert!(TensorType::Q6K.block_len() == QK_K as u64);

#[cfg(test)]
mod tests {
    use super::*;

    /// Cached models are named by their seed: the numbers must never change.
    #[test]
    fn numbers_of_a_seed_are_fixed() {
        let first = |stream| {
            let mut rng = Rng::new(1, stream);
            [rng.next_u64(), rng.next_u64(), rng.next_u64()]
        };
        assert_eq!(
            first(0),
            [
                0xcfc5_d07f_6f03_c29b,
                0xbf42_4132_963f_e08d,
                0x19a3_7d57_57aa_f520
            ]
        );
        assert_eq!(
            first(7),
            [
                0xc086_fbab_0de3_cabd,
                0x691a_bf10_020a_8791,
                0x7f73_2a9f_44c7_9aae
            ]
        );
    }

    const BLOCKS: usize = 4000;
    const SD: f32 = 0.036;

    /// The numbers of a filled region, read back by the formats' definitions.
    fn numbers(kind: TensorType, bytes: &[u8]) -> Vec<f32> {
        let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
        match kind {
            TensorType::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            TensorType::F16 => bytes.chunks_exact(2).map(half).collect(),
            TensorType::Q4_0 => bytes
                .chunks_exact(18)
                .flat_map(|b| nibbles(&b[2..], half(b), |code| f32::from(code) - 8.0))
                .collect(),
            TensorType::Iq4Nl => bytes
                .chunks_exact(18)
                .flat_map(|b| nibbles(&b[2..], half(b), |code| IQ4_NL[usize::from(code)]))
                .collect(),
            TensorType::Mxfp4 => bytes
                .chunks_exact(17)
                .flat_map(|b| {
                    let scale = (f32::from(b[0]) - 128.0).exp2();
                    nibbles(&b[1..], scale, |code| FP4[usize::from(code)])
                })
                .collect(),
            TensorType::Q8_0 => bytes
                .chunks_exact(34)
                .flat_map(|b| b[2..].iter().map(move |&q| half(b) * f32::from(q as i8)))
                .collect(),
            TensorType::Q4K => bytes
                .chunks_exact(144)
                .flat_map(|b| q4_k(b, half))
                .collect(),
            TensorType::Q6K => bytes
                .chunks_exact(210)
                .flat_map(|b| q6_k(b, half))
                .collect(),
        }
    }

    const IQ4_NL: [f32; 16] = [
        -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0,
        69.0, 89.0, 113.0,
    ];
    const FP4: [f32; 16] = [
        0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0,
    ];

    fn nibbles(codes: &[u8], scale: f32, value: impl Fn(u8) -> f32) -> Vec<f32> {
        let low = codes.iter().map(|byte| byte & 15);
        let high = codes.iter().map(|byte| byte >> 4);
        low.chain(high).map(|code| scale * value(code)).collect()
    }

    fn q4_k(b: &[u8], half: impl Fn(&[u8]) -> f32) -> Vec<f32> {
        let (d, dmin, s, q) = (half(&b[0..]), half(&b[2..]), &b[4..16], &b[16..]);
        (0..QK_K)
            .map(|x| {
                let group = x / 32;
                let (scale, minimum) = if group < 4 {
                    (s[group] & 63, s[group + 4] & 63)
                } else {
                    (
                        (s[group + 4] & 15) | (s[group - 4] >> 6) << 4,
                        (s[group + 4] >> 4) | (s[group] >> 6) << 4,
                    )
                };
                // Groups come in pairs that share 32 bytes: the first in the lower halves.
                let byte = q[32 * (group / 2) + x % 32];
                let number = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
                d * f32::from(scale) * f32::from(number) - dmin * f32::from(minimum)
            })
            .collect()
    }

    fn q6_k(b: &[u8], half: impl Fn(&[u8]) -> f32) -> Vec<f32> {
        let d = half(&b[208..]);
        (0..QK_K)
            .map(|x| {
                let (part, quarter, l) = (x / 128, x % 128 / 32, x % 32);
                let low = b[64 * part + 32 * (quarter % 2) + l] >> (4 * (quarter / 2)) & 15;
                let high = b[128 + 32 * part + l] >> (2 * quarter) & 3;
                let scale = b[192 + 8 * part + 2 * quarter + l / 16] as i8;
                d * f32::from(scale) * (f32::from(low | high << 4) - 32.0)
            })
            .collect()
    }

    #[test]
    fn weights_have_zero_mean_and_the_wanted_deviation() {
        for kind in [
            TensorType::F32,
            TensorType::F16,
            TensorType::Q4_0,
            TensorType::Q8_0,
            TensorType::Iq4Nl,
            TensorType::Mxfp4,
            TensorType::Q4K,
            TensorType::Q6K,
        ] {
            let blocks = BLOCKS * QK_K / kind.block_len() as usize;
            let mut bytes = vec![0; blocks * kind.block_bytes() as usize];
            fill(kind, 0.0, SD, &mut Rng::new(1, 2), &mut bytes);
            let x = numbers(kind, &bytes);
            assert_eq!(x.len(), BLOCKS * QK_K);
            let n = x.len() as f64;
            let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
            let sd =
                (x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n - mean * mean).sqrt();
            // Five standard errors of the mean of a million independent numbers; for the deviation,
            // the rounding of the f16 scales (2^-11) on top.
            assert!(
                mean.abs() < 5.0 * f64::from(SD) / n.sqrt() * 1.5,
                "{kind:?}: mean {mean}"
            );
            assert!(
                (sd / f64::from(SD) - 1.0).abs() < 0.005,
                "{kind:?}: deviation {sd}"
            );
        }
    }

    #[test]
    fn norm_weights_lie_around_their_mean() {
        let mut bytes = vec![0; 4 * 4096];
        fill(TensorType::F32, 1.0, 0.05, &mut Rng::new(3, 0), &mut bytes);
        let x = numbers(TensorType::F32, &bytes);
        assert!(x.iter().all(|x| (0.8..1.2).contains(x)));
        assert!((x.iter().sum::<f32>() / 4096.0 - 1.0).abs() < 0.01);
    }

    #[test]
    fn stream_is_reproducible_and_differs_from_the_next_one() {
        let stream = |seed, stream| {
            let mut rng = Rng::new(seed, stream);
            (0..8).map(|_| rng.next_u64()).collect::<Vec<_>>()
        };
        assert_eq!(stream(7, 1), stream(7, 1));
        assert_ne!(stream(7, 1), stream(7, 2));
        assert_ne!(stream(7, 1), stream(8, 1));
    }
}
