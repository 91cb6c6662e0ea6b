//! Rows of the float types F32, F16 and BF16.

use crate::convert::f32_to_bf16;
use crate::simd::{PtrTask, Simd, chunks, dispatch_ptr};

/// F32 to `f32`: a copy.
///
/// # Safety
/// As [`super::DequantizeRow`].
pub(super) unsafe fn copy_f32(src: *const u8, dst: *mut f32, n: usize) {
    // SAFETY: the caller guarantees `n` readable floats at `src` and `n` floats at `dst`. `src` may
    // be unaligned, so the copy is by bytes.
    unsafe { src.copy_to_nonoverlapping(dst.cast(), n * size_of::<f32>()) }
}

/// `f32` to F32: a copy.
///
/// # Safety
/// As [`super::QuantizeRow`].
pub(super) unsafe fn write_f32(src: *const f32, dst: *mut u8, n: usize) {
    // SAFETY: the caller guarantees `n` floats at `src` and `n` writable floats at `dst`. `dst` may
    // be unaligned, so the copy is by bytes.
    unsafe {
        src.cast::<u8>()
            .copy_to_nonoverlapping(dst, n * size_of::<f32>())
    }
}

/// # Safety
/// As [`super::DequantizeRow`].
pub(super) unsafe fn read_f16(src: *const u8, dst: *mut f32, n: usize) {
    // SAFETY: the caller guarantees `n` elements at `src` and `n` floats at `dst`, the contract of
    // `ReadF16`.
    unsafe { dispatch_ptr(ReadF16(src.cast(), dst, n)) };
}

/// # Safety
/// As [`super::QuantizeRow`].
pub(super) unsafe fn write_f16(src: *const f32, dst: *mut u8, n: usize) {
    // SAFETY: the caller guarantees `n` floats at `src` and `n` elements at `dst`, the contract of
    // `WriteF16`.
    unsafe { dispatch_ptr(WriteF16(src, dst.cast(), n)) };
}

/// # Safety
/// As [`super::DequantizeRow`].
pub(super) unsafe fn read_bf16(src: *const u8, dst: *mut f32, n: usize) {
    // SAFETY: the caller guarantees `n` elements at `src` and `n` floats at `dst`, the contract of
    // `ReadBf16`.
    unsafe { dispatch_ptr(ReadBf16(src.cast(), dst, n)) };
}

/// Source, destination and number of elements. Contract: [`super::DequantizeRow`].
struct ReadF16(*const u16, *mut f32, usize);

impl PtrTask for ReadF16 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let ReadF16(src, dst, n) = self;
        chunks::<S>(n, |i, lanes| {
            // SAFETY: `i + lanes <= n`, the elements that the caller of `read_f16` guarantees at
            // `src` and `dst`.
            unsafe {
                simd.load_f16_ptr(src.add(i), lanes)
                    .store_ptr(dst.add(i), lanes)
            }
        });
    }
}

/// Source, destination and number of elements. Contract: [`super::QuantizeRow`].
struct WriteF16(*const f32, *mut u16, usize);

impl PtrTask for WriteF16 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let WriteF16(src, dst, n) = self;
        chunks::<S>(n, |i, lanes| {
            // SAFETY: `i + lanes <= n`, the elements that the caller of `write_f16` guarantees at
            // `src` and `dst`.
            unsafe {
                simd.load_ptr(src.add(i), lanes)
                    .store_f16_ptr(dst.add(i), lanes)
            }
        });
    }
}

/// Source, destination and number of elements. Contract: [`super::DequantizeRow`].
struct ReadBf16(*const u16, *mut f32, usize);

impl PtrTask for ReadBf16 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let ReadBf16(src, dst, n) = self;
        chunks::<S>(n, |i, lanes| {
            // SAFETY: `i + lanes <= n`, the elements that the caller of `read_bf16` guarantees at
            // `src` and `dst`.
            unsafe {
                simd.load_bf16_ptr(src.add(i), lanes)
                    .store_ptr(dst.add(i), lanes)
            }
        });
    }
}

/// # Safety
/// As [`super::QuantizeRow`].
pub(super) unsafe fn write_bf16(src: *const f32, dst: *mut u8, n: usize) {
    for i in 0..n {
        // SAFETY: `i < n`: the caller guarantees the float and the element. The write is unaligned.
        unsafe {
            dst.cast::<u16>()
                .add(i)
                .write_unaligned(f32_to_bf16(*src.add(i)))
        }
    }
}
