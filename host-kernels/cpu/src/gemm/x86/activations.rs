//! Conversion of activations (src1) from f32, bit-identical to the portable code in
//! [`crate::formats`].

use std::arch::x86_64::*;

use crate::formats::{BlockQ8_0, BlockQ8_1, BlockQ8K, QuantizeRow, Type, f32_to_bf16};

/// The fastest conversion to `activation` at AVX2 or, with `wide`, at AVX-512.
pub(super) fn quantizer(activation: Type, wide: bool) -> Option<QuantizeRow> {
    match (activation, wide) {
        (Type::F16, _) => Some(to_f16),
        (Type::Bf16, _) => Some(to_bf16),
        (Type::Q8_0, false) => Some(to_q8_0),
        (Type::Q8_0, true) => Some(to_q8_0_wide),
        (Type::Q8_1, false) => Some(to_q8_1),
        (Type::Q8_1, true) => Some(to_q8_1_wide),
        (Type::Q8K, false) => Some(to_q8_k),
        (Type::Q8K, true) => Some(to_q8_k_wide),
        _ => None,
    }
}

/// # Safety
/// As [`QuantizeRow`]; AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
unsafe fn to_f16(src: *const f32, dst: *mut u8, n: usize) {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
    // SAFETY: `src` is readable for `n` floats and `dst` writable for `n` F16, `2 * n` bytes.
    // Vectors of eight are used up to `whole <= n`; the last `n - whole < 8` elements are copied to
    // `tail` and from `bytes`, which have room for eight.
    unsafe {
        let whole = n / 8 * 8;
        for i in (0..whole).step_by(8) {
            let halves = _mm256_cvtps_ph::<NEAREST>(_mm256_loadu_ps(src.add(i)));
            _mm_storeu_si128(dst.add(2 * i).cast(), halves);
        }
        let mut tail = [0.0f32; 8];
        src.add(whole)
            .copy_to_nonoverlapping(tail.as_mut_ptr(), n - whole);
        let halves = _mm256_cvtps_ph::<NEAREST>(_mm256_loadu_ps(tail.as_ptr()));
        let mut bytes = [0u8; 16];
        _mm_storeu_si128(bytes.as_mut_ptr().cast(), halves);
        bytes
            .as_ptr()
            .copy_to_nonoverlapping(dst.add(2 * whole), 2 * (n - whole));
    }
}

/// # Safety
/// As [`QuantizeRow`]; AVX2.
#[target_feature(enable = "avx2")]
unsafe fn to_bf16(src: *const f32, dst: *mut u8, n: usize) {
    for i in 0..n {
        // SAFETY: `i < n`: `src` is readable for `n` floats, and `dst` writable for `n` BF16 of two
        // bytes. The write is unaligned. The compiler vectorises the loop.
        unsafe {
            dst.cast::<u16>()
                .add(i)
                .write_unaligned(f32_to_bf16(*src.add(i)))
        }
    }
}

/// Unlike the portable code, subnormal numbers become zero, as in the products of BF16.
///
/// # Safety
/// As [`QuantizeRow`]; AVX-512 with BF16.
#[cfg(feature = "avx512")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn to_bf16_wide(src: *const f32, dst: *mut u8, n: usize) {
    for i in (0..n).step_by(16) {
        let mask = ((1u32 << (n - i).min(16)) - 1) as u16;
        // SAFETY: the mask has the `n - i` lowest lanes, or all, and masked lanes are not accessed:
        // `src` is readable for `n` floats, and `dst` writable for `n` BF16 of two bytes.
        // `__m256bh` and `__m256i` both have 32 bytes, any of which are valid.
        unsafe {
            let halves = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, src.add(i)));
            let halves = std::mem::transmute::<__m256bh, __m256i>(halves);
            _mm256_mask_storeu_epi16(dst.add(2 * i).cast(), mask, halves);
        }
    }
}

/// # Safety
/// As [`QuantizeRow`]; AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
unsafe fn to_q8_0(src: *const f32, dst: *mut u8, n: usize) {
    for g in 0..n / 32 {
        // SAFETY: `g < n / 32`: float `32 g` of `src` begins 32 of its `n` floats, and `dst` is
        // writable for `n / 32` blocks. A block has 34 bytes: two for the scale, then the 32 that
        // `quantize_group` writes.
        unsafe {
            let block = dst.add(g * size_of::<BlockQ8_0>());
            let (d, _) = quantize_group(src.add(32 * g), block.add(2));
            block.cast::<u16>().write_unaligned(half_bits(d));
        }
    }
}

/// # Safety
/// As [`QuantizeRow`]; AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
unsafe fn to_q8_1(src: *const f32, dst: *mut u8, n: usize) {
    for g in 0..n / 32 {
        // SAFETY: `g < n / 32`: float `32 g` of `src` begins 32 of its `n` floats, and `dst` is
        // writable for `n / 32` blocks. A block has 36 bytes: two for the scale, two for the sum,
        // then the 32 that `quantize_group` writes.
        unsafe {
            let block = dst.add(g * size_of::<BlockQ8_1>());
            let (d, sum) = quantize_group(src.add(32 * g), block.add(4));
            block.cast::<u16>().write_unaligned(half_bits(d));
            block
                .cast::<u16>()
                .add(1)
                .write_unaligned(half_bits(d * sum as f32));
        }
    }
}

/// # Safety
/// As [`QuantizeRow`]; AVX-512.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn to_q8_0_wide(src: *const f32, dst: *mut u8, n: usize) {
    for g in 0..n / 32 {
        // SAFETY: `g < n / 32`: float `32 g` of `src` begins 32 of its `n` floats, and `dst` is
        // writable for `n / 32` blocks. A block has 34 bytes: two for the scale, then the 32 that
        // `quantize_group_wide` writes. This function has its features.
        unsafe {
            let block = dst.add(g * size_of::<BlockQ8_0>());
            let (d, _) = quantize_group_wide(src.add(32 * g), block.add(2));
            block.cast::<u16>().write_unaligned(half_bits(d));
        }
    }
}

/// # Safety
/// As [`QuantizeRow`]; AVX-512.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn to_q8_1_wide(src: *const f32, dst: *mut u8, n: usize) {
    for g in 0..n / 32 {
        // SAFETY: `g < n / 32`: float `32 g` of `src` begins 32 of its `n` floats, and `dst` is
        // writable for `n / 32` blocks. A block has 36 bytes: two for the scale, two for the sum,
        // then the 32 that `quantize_group_wide` writes. This function has its features.
        unsafe {
            let block = dst.add(g * size_of::<BlockQ8_1>());
            let (d, quants) = quantize_group_wide(src.add(32 * g), block.add(4));
            let sum = _mm512_reduce_add_epi32(quants);
            block.cast::<u16>().write_unaligned(half_bits(d));
            block
                .cast::<u16>()
                .add(1)
                .write_unaligned(half_bits(d * sum as f32));
        }
    }
}

/// The half nearest to `value`.
#[inline]
#[target_feature(enable = "f16c")]
fn half_bits(value: f32) -> u16 {
    let halves = _mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(value));
    _mm_extract_epi16::<0>(halves) as u16
}

/// The factor that scales the largest magnitude of a group to 127; 0 for a group of zeros.
#[inline(always)]
fn group_factor(amax: f32) -> f32 {
    if amax != 0.0 { 127.0 / amax } else { 0.0 }
}

/// Writes the quants of 32 values. Returns the scale and the sum of the quants.
///
/// # Safety
/// `src` is readable for 32 floats, `quants` writable for 32 bytes. The processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn quantize_group(src: *const f32, quants: *mut u8) -> (f32, i32) {
    // SAFETY: four vectors of eight floats are the 32 that are readable at `src`. The loads are
    // unaligned.
    let x = unsafe {
        [
            _mm256_loadu_ps(src),
            _mm256_loadu_ps(src.add(8)),
            _mm256_loadu_ps(src.add(16)),
            _mm256_loadu_ps(src.add(24)),
        ]
    };
    let sign = _mm256_set1_ps(-0.0);
    let a = _mm256_max_ps(_mm256_andnot_ps(sign, x[0]), _mm256_andnot_ps(sign, x[1]));
    let b = _mm256_max_ps(_mm256_andnot_ps(sign, x[2]), _mm256_andnot_ps(sign, x[3]));
    let amax = max_of_lanes(_mm256_max_ps(a, b));
    let factor = _mm256_set1_ps(group_factor(amax));
    // Conversion rounds to nearest, ties to even.
    let q = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, factor)));
    let low = _mm256_packs_epi32(q[0], q[1]);
    let high = _mm256_packs_epi32(q[2], q[3]);
    // Packing works within 128-bit halves; the permutation restores the order of the words.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    // SAFETY: one unaligned store of 32 bytes, all of which are writable at `quants`.
    unsafe { _mm256_storeu_si256(quants.cast(), bytes) };
    let sums = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
    (amax / 127.0, sum_of_lanes(sums))
}

/// The largest lane.
#[inline]
#[target_feature(enable = "avx2")]
fn max_of_lanes(v: __m256) -> f32 {
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
}

/// The sum of the lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_of_lanes(v: __m256i) -> i32 {
    let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b00_00_11_10>(v));
    _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0b00_00_00_01>(v)))
}

/// Writes the quants of 32 values. Returns the scale, and 16 partial sums of the quants.
///
/// # Safety
/// `src` is readable for 32 floats, `quants` writable for 32 bytes. The processor has AVX-512.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn quantize_group_wide(src: *const f32, quants: *mut u8) -> (f32, __m512i) {
    // SAFETY: two vectors of 16 floats are the 32 that are readable at `src`. The loads are
    // unaligned.
    let (a, b) = unsafe { (_mm512_loadu_ps(src), _mm512_loadu_ps(src.add(16))) };
    let largest = _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
    let high = _mm512_extractf32x8_ps::<1>(largest);
    let amax = max_of_lanes(_mm256_max_ps(_mm512_castps512_ps256(largest), high));
    let factor = _mm512_set1_ps(group_factor(amax));
    // Conversion rounds to nearest, ties to even.
    let a = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor));
    let b = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
    // SAFETY: two unaligned stores of 16 bytes are the 32 that are writable at `quants`.
    unsafe {
        _mm_storeu_si128(quants.cast(), _mm512_cvtsepi32_epi8(a));
        _mm_storeu_si128(quants.add(16).cast(), _mm512_cvtsepi32_epi8(b));
    }
    (amax / 127.0, _mm512_add_epi32(a, b))
}

/// Adding 1.5 * 2^23 leaves the nearest integer in the low bits of a float.
const MAGIC: f32 = 12_582_912.0;
const MAGIC_BITS: i32 = 0x007f_ffff;
const MAGIC_ZERO: i32 = 0x0040_0000;

/// # Safety
/// As [`QuantizeRow`]; AVX2.
#[target_feature(enable = "avx2")]
unsafe fn to_q8_k(src: *const f32, dst: *mut u8, n: usize) {
    for b in 0..n / 256 {
        // SAFETY: `b < n / 256`: `src` is readable for the 256 floats of the block, and `dst`
        // writable for `n / 256` blocks. `BlockQ8K` is packed, so any address is aligned, and
        // consists of numbers, so any bytes are valid. The vectors of eight floats and of 16
        // quants, and element `i + 7` at most, are inside the 256.
        unsafe {
            let src = src.add(256 * b);
            let block = &mut *dst.cast::<BlockQ8K>().add(b);
            let sign = _mm256_set1_ps(-0.0);
            let mut largest = _mm256_setzero_ps();
            for i in (0..256).step_by(8) {
                let magnitude = _mm256_andnot_ps(sign, _mm256_loadu_ps(src.add(i)));
                largest = _mm256_max_ps(magnitude, largest);
            }
            let amax = max_of_lanes(largest);
            if amax == 0.0 {
                *block = BlockQ8K {
                    d: 0.0,
                    qs: [0; 256],
                    bsums: [0; 16],
                };
                continue;
            }
            // The sign is the sign of the first element with the largest magnitude.
            let mut max = amax;
            for i in (0..256).step_by(8) {
                let x = _mm256_loadu_ps(src.add(i));
                let is =
                    _mm256_cmp_ps::<_CMP_EQ_OQ>(_mm256_andnot_ps(sign, x), _mm256_set1_ps(amax));
                let is = _mm256_movemask_ps(is);
                if is != 0 {
                    max = *src.add(i + is.trailing_zeros() as usize);
                    break;
                }
            }
            let inverse = -127.0 / max;
            let (factor, magic) = (_mm256_set1_ps(inverse), _mm256_set1_ps(MAGIC));
            let mut sums = [0i16; 16];
            for i in 0..16 {
                let q = [src.add(16 * i), src.add(16 * i + 8)].map(|x| {
                    // Multiplied, then added: rounded twice, as in the reference.
                    let x = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(x), factor), magic);
                    let bits =
                        _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(MAGIC_BITS));
                    let q = _mm256_sub_epi32(bits, _mm256_set1_epi32(MAGIC_ZERO));
                    _mm256_min_epi32(q, _mm256_set1_epi32(127))
                });
                sums[i] = sum_of_lanes(_mm256_add_epi32(q[0], q[1])) as i16;
                let words =
                    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(q[0], q[1]));
                let bytes = _mm_packs_epi16(
                    _mm256_castsi256_si128(words),
                    _mm256_extracti128_si256::<1>(words),
                );
                _mm_storeu_si128(block.qs.as_mut_ptr().add(16 * i).cast(), bytes);
            }
            block.d = 1.0 / inverse;
            block.bsums = sums;
        }
    }
}

/// # Safety
/// As [`QuantizeRow`]; AVX-512 VNNI.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn to_q8_k_wide(src: *const f32, dst: *mut u8, n: usize) {
    for b in 0..n / 256 {
        // SAFETY: `b < n / 256`: `src` is readable for the 256 floats of the block, and `dst`
        // writable for `n / 256` blocks. `BlockQ8K` is packed, so any address is aligned, and
        // consists of numbers, so any bytes are valid. The 16 vectors of 16 floats or quants are
        // the 256 elements; so are the four of 64 quants. `bsums` has the 32 bytes of the last
        // store.
        unsafe {
            let src = src.add(256 * b);
            let block = &mut *dst.cast::<BlockQ8K>().add(b);
            let mut x = [_mm512_setzero_ps(); 16];
            let mut largest = _mm512_setzero_ps();
            for (i, x) in x.iter_mut().enumerate() {
                *x = _mm512_loadu_ps(src.add(16 * i));
                largest = _mm512_max_ps(_mm512_abs_ps(*x), largest);
            }
            let high = _mm512_extractf32x8_ps::<1>(largest);
            let amax = max_of_lanes(_mm256_max_ps(_mm512_castps512_ps256(largest), high));
            if amax == 0.0 {
                *block = BlockQ8K {
                    d: 0.0,
                    qs: [0; 256],
                    bsums: [0; 16],
                };
                continue;
            }
            // The sign is the sign of the first element with the largest magnitude.
            let mut max = amax;
            for (i, &x) in x.iter().enumerate() {
                let is = _mm512_cmpeq_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(amax));
                if is != 0 {
                    max = *src.add(16 * i + is.trailing_zeros() as usize);
                    break;
                }
            }
            let inverse = -127.0 / max;
            let (factor, magic) = (_mm512_set1_ps(inverse), _mm512_set1_ps(MAGIC));
            for (i, &x) in x.iter().enumerate() {
                // Multiplied, then added: rounded twice, as in the reference.
                let x = _mm512_add_ps(_mm512_mul_ps(x, factor), magic);
                let bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(MAGIC_BITS));
                let q = _mm512_sub_epi32(bits, _mm512_set1_epi32(MAGIC_ZERO));
                let q = _mm512_min_epi32(q, _mm512_set1_epi32(127));
                let to = block.qs.as_mut_ptr().add(16 * i);
                _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(q));
            }
            // Sums of four bytes, then a transposing sum of four of these sums: in 128-bit lane `l`
            // of `sums`, word `v` is the sum of the 16 quants from `64 v + 16 l` on.
            let fours = |v: usize| {
                let q = _mm512_loadu_si512(block.qs.as_ptr().add(64 * v).cast());
                _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), q)
            };
            let (s0, s1, s2, s3) = (fours(0), fours(1), fours(2), fours(3));
            let s01 =
                _mm512_add_epi32(_mm512_unpacklo_epi32(s0, s1), _mm512_unpackhi_epi32(s0, s1));
            let s23 =
                _mm512_add_epi32(_mm512_unpacklo_epi32(s2, s3), _mm512_unpackhi_epi32(s2, s3));
            let sums = _mm512_add_epi32(
                _mm512_unpacklo_epi64(s01, s23),
                _mm512_unpackhi_epi64(s01, s23),
            );
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let sums = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, sums));
            let mut bsums = [0i16; 16];
            _mm256_storeu_si256(bsums.as_mut_ptr().cast(), sums);
            block.bsums = bsums;
            block.d = 1.0 / inverse;
        }
    }
}
