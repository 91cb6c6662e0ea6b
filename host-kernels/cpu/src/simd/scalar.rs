//! The portable implementation, the reference for all others.

use super::vector::Simd;
use crate::convert::{bf16_to_f32, f16_to_f32, f32_to_f16};

/// Portable Rust: one lane, no required instructions.
#[derive(Clone, Copy)]
pub(crate) struct Scalar(pub(super) ());

impl Simd for Scalar {
    type Vector = f32;
    type Mask = bool;
    const LANES: usize = 1;

    #[inline(always)]
    unsafe fn v_splat(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn v_load(ptr: *const f32, n: usize) -> f32 {
        if n == 0 {
            return 0.0;
        }
        // SAFETY: `0 < n <= LANES = 1`, so the caller guarantees one float at `ptr`: four readable
        // bytes. The read is unaligned.
        unsafe { ptr.read_unaligned() }
    }
    #[inline(always)]
    unsafe fn v_store(x: f32, ptr: *mut f32, n: usize) {
        if n > 0 {
            // SAFETY: `0 < n <= LANES = 1`, so the caller guarantees one float at `ptr`: four
            // writable bytes. The write is unaligned.
            unsafe { ptr.write_unaligned(x) }
        }
    }
    #[inline(always)]
    unsafe fn v_load_f16(ptr: *const u16, n: usize) -> f32 {
        if n == 0 {
            return 0.0;
        }
        // SAFETY: `0 < n <= LANES = 1`, so the caller guarantees one F16 at `ptr`: two readable
        // bytes. The read is unaligned.
        f16_to_f32(unsafe { ptr.read_unaligned() })
    }
    #[inline(always)]
    unsafe fn v_store_f16(x: f32, ptr: *mut u16, n: usize) {
        if n > 0 {
            // SAFETY: `0 < n <= LANES = 1`, so the caller guarantees one F16 at `ptr`: two writable
            // bytes. The write is unaligned.
            unsafe { ptr.write_unaligned(f32_to_f16(x)) }
        }
    }
    #[inline(always)]
    unsafe fn v_load_bf16(ptr: *const u16, n: usize) -> f32 {
        if n == 0 {
            return 0.0;
        }
        // SAFETY: `0 < n <= LANES = 1`, so the caller guarantees one BF16 at `ptr`: two readable
        // bytes. The read is unaligned.
        bf16_to_f32(unsafe { ptr.read_unaligned() })
    }
    #[inline(always)]
    unsafe fn v_add(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    unsafe fn v_sub(a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    unsafe fn v_mul(a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    unsafe fn v_div(a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    unsafe fn v_mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c // without the instruction, `f32::mul_add` is a slow function call
    }
    #[inline(always)]
    unsafe fn v_min(a: f32, b: f32) -> f32 {
        if a < b { a } else { b }
    }
    #[inline(always)]
    unsafe fn v_max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    unsafe fn v_sqrt(a: f32) -> f32 {
        a.sqrt()
    }
    #[inline(always)]
    unsafe fn v_floor(a: f32) -> f32 {
        a.floor()
    }
    #[inline(always)]
    unsafe fn v_ceil(a: f32) -> f32 {
        a.ceil()
    }
    #[inline(always)]
    unsafe fn v_trunc(a: f32) -> f32 {
        a.trunc()
    }
    #[inline(always)]
    unsafe fn v_round_even(a: f32) -> f32 {
        a.round_ties_even()
    }
    #[inline(always)]
    unsafe fn v_neg_mul_add(a: f32, b: f32, c: f32) -> f32 {
        c - a * b
    }
    #[inline(always)]
    unsafe fn v_sum(a: f32) -> f32 {
        a
    }
    #[inline(always)]
    unsafe fn v_copysign(a: f32, b: f32) -> f32 {
        a.copysign(b)
    }
    #[inline(always)]
    unsafe fn v_scale(a: f32, n: f32) -> f32 {
        // In f64 the power and the product are normal numbers, so only the conversion rounds.
        let power = f64::from_bits(((n as i64 + 1023) as u64) << 52);
        (f64::from(a) * power) as f32
    }
    #[inline(always)]
    unsafe fn v_split(a: f32) -> (f32, f32) {
        // A quarter of a binade is added before the exponent is extracted, so that the limit is
        // 1.5.
        let bits = a.to_bits();
        let e = (bits.wrapping_add(0x0040_0000) >> 23) as i32 - 127;
        (
            f32::from_bits(bits.wrapping_sub((e as u32) << 23)),
            e as f32,
        )
    }
    #[inline(always)]
    unsafe fn v_lt(a: f32, b: f32) -> bool {
        a < b
    }
    #[inline(always)]
    unsafe fn v_le(a: f32, b: f32) -> bool {
        a <= b
    }
    #[inline(always)]
    unsafe fn v_select(m: bool, a: f32, b: f32) -> f32 {
        if m { a } else { b }
    }
    #[inline(always)]
    unsafe fn v_transpose(src: *const u8, _: usize, dst: *mut u8, _: usize) {
        // SAFETY: with `LANES = 1`, the caller guarantees one word of four bytes, readable at `src`
        // and writable at `dst`, without overlap. The copy is by bytes.
        unsafe { src.copy_to_nonoverlapping(dst, size_of::<f32>()) }
    }
}
