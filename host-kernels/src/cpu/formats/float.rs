//! Plain floating-point rows: F32, F16, BF16.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// The value of an IEEE half given by its bits.
#[inline(always)]
pub const fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32_const()
}

/// The bits of the IEEE half nearest to `value`, ties to even, as F16C rounds.
#[inline(always)]
pub const fn f32_to_f16(value: f32) -> u16 {
    f16::from_f32_const(value).to_bits()
}

/// The value of a bfloat16 given by its bits.
#[inline(always)]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The bits of the bfloat16 nearest to `value`, ties to even; a NaN stays one and becomes quiet.
#[inline(always)]
pub const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        (bits >> 16) as u16 | 0x40
    } else {
        ((bits + (0x7fff + (bits >> 16 & 1))) >> 16) as u16
    }
}

/// F32 to `f32`: a copy.
///
/// # Safety
/// As [`super::DequantizeRow`].
pub(super) unsafe fn copy_f32(src: *const u8, dst: *mut f32, n: usize) {
    // SAFETY: the caller gives `n` readable floats, possibly unaligned, hence the copy by bytes.
    unsafe { src.copy_to_nonoverlapping(dst.cast(), n * size_of::<f32>()) }
}

/// `f32` to F32: a copy.
///
/// # Safety
/// As [`super::QuantizeRow`].
pub(super) unsafe fn write_f32(src: *const f32, dst: *mut u8, n: usize) {
    // SAFETY: the caller gives `n` writable floats, possibly unaligned, hence the copy by bytes.
    unsafe {
        src.cast::<u8>()
            .copy_to_nonoverlapping(dst, n * size_of::<f32>())
    }
}

/// Elements handled at once on the stack, so that unaligned rows reach the vectorised slice functions.
const CHUNK: usize = 256;

/// # Safety
/// As [`super::DequantizeRow`].
pub(super) unsafe fn read_f16(src: *const u8, dst: *mut f32, n: usize) {
    let mut halves = [f16::ZERO; CHUNK];
    for start in (0..n).step_by(CHUNK) {
        let len = CHUNK.min(n - start);
        // SAFETY: `start + len <= n`, for which the caller vouches; the stack array is aligned and the
        // destination of f32 is, too.
        let out = unsafe {
            src.add(start * 2)
                .copy_to_nonoverlapping(halves.as_mut_ptr().cast(), len * 2);
            std::slice::from_raw_parts_mut(dst.add(start), len)
        };
        halves[..len].convert_to_f32_slice(out);
    }
}

/// # Safety
/// As [`super::QuantizeRow`].
pub(super) unsafe fn write_f16(src: *const f32, dst: *mut u8, n: usize) {
    let mut halves = [f16::ZERO; CHUNK];
    for start in (0..n).step_by(CHUNK) {
        let len = CHUNK.min(n - start);
        // SAFETY: `start + len <= n`, for which the caller vouches.
        let values = unsafe { std::slice::from_raw_parts(src.add(start), len) };
        halves[..len].convert_from_f32_slice(values);
        // SAFETY: as above; the destination may be unaligned, hence the copy by bytes.
        unsafe {
            halves
                .as_ptr()
                .cast::<u8>()
                .copy_to_nonoverlapping(dst.add(start * 2), len * 2);
        }
    }
}

/// # Safety
/// As [`super::DequantizeRow`].
pub(super) unsafe fn read_bf16(src: *const u8, dst: *mut f32, n: usize) {
    for i in 0..n {
        // SAFETY: `i < n`, for which the caller vouches.
        unsafe { *dst.add(i) = bf16_to_f32(src.cast::<u16>().add(i).read_unaligned()) }
    }
}

/// # Safety
/// As [`super::QuantizeRow`].
pub(super) unsafe fn write_bf16(src: *const f32, dst: *mut u8, n: usize) {
    for i in 0..n {
        // SAFETY: `i < n`, for which the caller vouches.
        unsafe {
            dst.cast::<u16>()
                .add(i)
                .write_unaligned(f32_to_bf16(*src.add(i)))
        }
    }
}

const _: () = assert!(size_of::<f16>() == 2 && size_of::<bf16>() == 2);
