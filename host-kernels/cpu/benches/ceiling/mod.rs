//! What the processor can do at most: products between registers, of single precision and of
//! integers of 16 bits, nothing read or written.

use std::hint::black_box;

use vgpu_cpu::formats::Type;
use vgpu_cpu::gemm::Level;

/// Sums that are added to in turn: more than an addition takes times as many as begin in a cycle.
const SUMS: usize = 12;
const ROUNDS: usize = 1 << 20;

/// Floating-point operations of a second of one thread, in units of 10^9, by the instructions of
/// `level`; `None` for the portable one, whose instructions the compiler chooses. `seconds`
/// measures what it is given.
pub(crate) fn single_precision(level: Level, seconds: impl Fn(fn()) -> f64) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    return rate(
        level,
        [
            // SAFETY: the caller measures levels that the processor supports.
            (|| unsafe { x86::avx2() }, 8),
            // SAFETY: `rate` calls this for the AVX-512 levels only, which the processor supports.
            (|| unsafe { x86::avx512() }, 16),
        ],
        seconds,
    );
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (level, seconds, ROUNDS, SUMS);
        None
    }
}

/// The same for integers of 16 bits, of which an instruction adds up two products in 32 bits;
/// adding up those is left out.
pub(crate) fn int16(level: Level, seconds: impl Fn(fn()) -> f64) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    return rate(
        level,
        [
            // SAFETY: the caller measures levels that the processor supports.
            (|| unsafe { x86::avx2_int16() }, 16),
            // SAFETY: `rate` calls this for the AVX-512 levels only, which the processor supports.
            (|| unsafe { x86::avx512_int16() }, 32),
        ],
        seconds,
    );
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (level, seconds);
        None
    }
}

/// The rate of the work for AVX2 or for AVX-512, whose instructions multiply so many pairs.
#[cfg(target_arch = "x86_64")]
fn rate(level: Level, work: [(fn(), usize); 2], seconds: impl Fn(fn()) -> f64) -> Option<f64> {
    let (work, lanes) = match level {
        Level::Scalar => return None,
        Level::Avx2 | Level::Avx2Vnni => work[0],
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => work[1],
    };
    let best = (0..10).map(|_| seconds(work)).fold(f64::MAX, f64::min);
    Some((2 * lanes * SUMS * ROUNDS) as f64 / best / 1e9)
}

/// Whether products with weights of this type are products of single precision, which the ceiling
/// holds for.
pub(crate) fn holds_for(ty: Type, level: Level) -> bool {
    match ty {
        Type::F32 | Type::F16 => true,
        Type::Bf16 => level < Level::Avx512Bf16,
        _ => false,
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{ROUNDS, SUMS, black_box};

    /// # Safety
    /// The processor has the instructions.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2() {
        let (a, b) = black_box((_mm256_set1_ps(1.0), _mm256_set1_ps(1e-9)));
        let mut sums = [_mm256_setzero_ps(); SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(a, b, *sum);
            }
        }
        black_box(sums);
    }

    /// # Safety
    /// The processor has the instructions.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512() {
        let (a, b) = black_box((_mm512_set1_ps(1.0), _mm512_set1_ps(1e-9)));
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
        }
        black_box(sums);
    }

    /// # Safety
    /// The processor has the instructions.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2_int16() {
        let a = black_box(_mm256_set1_epi16(3));
        let mut sums = black_box([_mm256_set1_epi16(5); SUMS]);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_madd_epi16(a, *sum);
            }
        }
        black_box(sums);
    }

    /// # Safety
    /// The processor has the instructions.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn avx512_int16() {
        let a = black_box(_mm512_set1_epi16(3));
        let mut sums = black_box([_mm512_set1_epi16(5); SUMS]);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_madd_epi16(a, *sum);
            }
        }
        black_box(sums);
    }
}
