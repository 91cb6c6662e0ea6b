//! Registers of x86-64: AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::task::Task;
use super::vector::Simd;

/// AVX2, FMA and F16C, and AVX-VNNI if `VNNI`: 8 lanes.
#[derive(Clone, Copy)]
pub(crate) struct Ymm<const VNNI: bool>(());

/// [`Level::Avx2`](crate::isa::Level::Avx2).
pub(crate) type Avx2 = Ymm<false>;

/// [`Level::Avx2Vnni`](crate::isa::Level::Avx2Vnni).
pub(crate) type Avx2Vnni = Ymm<true>;

/// [`Level::Avx512`](crate::isa::Level::Avx512): 16 lanes.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// Runs a task compiled for AVX2.
///
/// # Safety
/// The processor supports [`Level::Avx2`](crate::isa::Level::Avx2).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn avx2<T: Task>(task: T) -> T::Output {
    task.run(Ymm::<false>(()))
}

/// Runs a task compiled for AVX-512.
///
/// # Safety
/// The processor supports [`Level::Avx512`](crate::isa::Level::Avx512).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn avx512<T: Task>(task: T) -> T::Output {
    task.run(Avx512(()))
}

/// Defines functions on registers and numbers, with the instructions of [`Avx2`] (`avx2;`) or of
/// [`Level::Avx512`](crate::isa::Level::Avx512) (`avx512;`).
///
/// Such a function is `#[inline(always)]` and so cannot be compiled with these instructions itself.
/// Its body is therefore compiled twice: in the function, as one `unsafe` block, and in `check`,
/// which has the instructions and is never called, as safe code. A body that follows a pointer,
/// calls an `unsafe` function or needs other instructions does not compile.
///
/// # Safety
/// The contract of the functions is only that the processor has the instructions of the body. The
/// function, its trait or its module documents which ones these are.
macro_rules! register_fns {
    (avx2; $($functions:tt)*) => {
        $crate::simd::register_fns! { @ "avx2,fma,f16c"; $($functions)* }
    };
    (avx512; $($functions:tt)*) => {
        $crate::simd::register_fns! {
            @ "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"; $($functions)*
        }
    };
    (@ $instructions:literal; $(
        $(#[$attribute:meta])*
        $visibility:vis unsafe fn $name:ident $(<$($param:ident: $bound:ident),+>)?
        ($($arg:ident: $ty:ty),* $(,)?) -> $result:ty { $($body:tt)* }
    )*) => {$(
        $(#[$attribute])*
        #[inline(always)]
        $visibility unsafe fn $name $(<$($param: $bound),+>)? ($($arg: $ty),*) -> $result {
            #[allow(dead_code)] // only compiled
            #[forbid(unsafe_code)]
            #[target_feature(enable = $instructions)]
            fn check $(<$($param: $bound),+>)? ($($arg: $ty),*) -> $result { $($body)* }
            // SAFETY: `check` has the same body and is safe: the body follows no pointer, and calls
            // nothing but intrinsics that are safe where the processor has their instructions,
            // which the caller guarantees.
            unsafe { $($body)* }
        }
    )*};
}
pub(crate) use register_fns;

/// Functions of [`Simd`] that are one intrinsic, as [`register_fns`], of arguments of one type.
macro_rules! intrinsics {
    ($level:ident, $vector:ident; $(
        $name:ident($($arg:ident),*) -> $result:ident = $intrinsic:expr;
    )*) => {
        register_fns! {
            $level;
            $(unsafe fn $name($($arg: $vector),*) -> $result { $intrinsic($($arg),*) })*
        }
    };
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
const DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
const UP: i32 = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
const ZERO: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;

impl<const VNNI: bool> Simd for Ymm<VNNI> {
    type Vector = __m256;
    type Mask = __m256;
    const LANES: usize = 8;

    register_fns! {
        avx2;
        unsafe fn v_splat(x: f32) -> __m256 {
            _mm256_set1_ps(x)
        }
    }
    #[inline(always)]
    unsafe fn v_load(ptr: *const f32, n: usize) -> __m256 {
        // SAFETY: the caller guarantees `n <= 8` floats at `ptr`. Eight are read at once; otherwise
        // lane `i` is read only if `i < n`, because a masked lane is not accessed. The loads need
        // AVX and the mask AVX2, which the caller guarantees with the level.
        unsafe {
            if n == 8 {
                _mm256_loadu_ps(ptr)
            } else {
                _mm256_maskload_ps(ptr, first(n))
            }
        }
    }
    #[inline(always)]
    unsafe fn v_store(x: __m256, ptr: *mut f32, n: usize) {
        // SAFETY: the caller guarantees that `ptr` is writable for `n <= 8` floats. Eight are
        // written at once; otherwise lane `i` is written only if `i < n`. The stores need AVX and
        // the mask AVX2, which the caller guarantees with the level.
        unsafe {
            if n == 8 {
                _mm256_storeu_ps(ptr, x)
            } else {
                _mm256_maskstore_ps(ptr, first(n), x)
            }
        }
    }
    #[inline(always)]
    unsafe fn v_load_f16(ptr: *const u16, n: usize) -> __m256 {
        // SAFETY: `load_words` has the contract of this function: `n <= 8` words at `ptr`. The
        // conversion takes a register and needs F16C, which the level includes.
        unsafe { _mm256_cvtph_ps(load_words(ptr, n)) }
    }
    #[inline(always)]
    unsafe fn v_store_f16(x: __m256, ptr: *mut u16, n: usize) {
        // SAFETY: the caller guarantees that `ptr` is writable for `n <= 8` F16. Eight are 16
        // bytes, one store; otherwise `2 * n` of the 16 bytes of `stage` are copied. The conversion
        // needs F16C, which the level includes.
        unsafe {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            if n == 8 {
                _mm_storeu_si128(ptr.cast(), halves);
            } else {
                let mut stage = [0u16; 8];
                _mm_storeu_si128(stage.as_mut_ptr().cast(), halves);
                // The copy is by bytes, for any alignment.
                ptr.cast::<u8>()
                    .copy_from_nonoverlapping(stage.as_ptr().cast(), n * size_of::<u16>());
            }
        }
    }
    #[inline(always)]
    unsafe fn v_load_bf16(ptr: *const u16, n: usize) -> __m256 {
        // SAFETY: `load_words` has the contract of this function: `n <= 8` words at `ptr`. The
        // words are widened and shifted in registers with AVX2.
        unsafe {
            let words = _mm256_cvtepu16_epi32(load_words(ptr, n));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }
    intrinsics! {
        avx2, __m256;
        v_add(a, b) -> __m256 = _mm256_add_ps;
        v_sub(a, b) -> __m256 = _mm256_sub_ps;
        v_mul(a, b) -> __m256 = _mm256_mul_ps;
        v_div(a, b) -> __m256 = _mm256_div_ps;
        v_mul_add(a, b, c) -> __m256 = _mm256_fmadd_ps;
        v_neg_mul_add(a, b, c) -> __m256 = _mm256_fnmadd_ps;
        v_min(a, b) -> __m256 = _mm256_min_ps;
        v_max(a, b) -> __m256 = _mm256_max_ps;
        v_sqrt(a) -> __m256 = _mm256_sqrt_ps;
        v_floor(a) -> __m256 = _mm256_round_ps::<DOWN>;
        v_ceil(a) -> __m256 = _mm256_round_ps::<UP>;
        v_trunc(a) -> __m256 = _mm256_round_ps::<ZERO>;
        v_round_even(a) -> __m256 = _mm256_round_ps::<NEAREST>;
        v_lt(a, b) -> __m256 = _mm256_cmp_ps::<_CMP_LT_OQ>;
        v_le(a, b) -> __m256 = _mm256_cmp_ps::<_CMP_LE_OQ>;
    }
    register_fns! {
        avx2;
        unsafe fn v_copysign(a: __m256, b: __m256) -> __m256 {
            let sign = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(sign, a), _mm256_and_ps(sign, b))
        }

        unsafe fn v_scale(a: __m256, n: __m256) -> __m256 {
            // A power of two in f32 has an exponent of at most 127, so 2^300 needs three factors.
            // The smallest factor is first, so that only the last product can round.
            let n = _mm256_cvtps_epi32(n);
            let limit = |n| {
                _mm256_max_epi32(
                    _mm256_min_epi32(n, _mm256_set1_epi32(100)),
                    _mm256_set1_epi32(-100),
                )
            };
            let power = |n| {
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(
                    n,
                    _mm256_set1_epi32(127),
                )))
            };
            let first = limit(n);
            let rest = _mm256_sub_epi32(n, first);
            let second = limit(rest);
            let third = _mm256_sub_epi32(rest, second);
            let a = _mm256_mul_ps(a, power(third));
            let a = _mm256_mul_ps(a, power(second));
            _mm256_mul_ps(a, power(first))
        }

        unsafe fn v_split(a: __m256) -> (__m256, __m256) {
            let bits = _mm256_castps_si256(a);
            let up = _mm256_add_epi32(bits, _mm256_set1_epi32(0x0040_0000));
            let e = _mm256_sub_epi32(_mm256_srli_epi32::<23>(up), _mm256_set1_epi32(127));
            let m = _mm256_sub_epi32(bits, _mm256_slli_epi32::<23>(e));
            (_mm256_castsi256_ps(m), _mm256_cvtepi32_ps(e))
        }

        unsafe fn v_select(m: __m256, a: __m256, b: __m256) -> __m256 {
            _mm256_blendv_ps(b, a, m)
        }

        unsafe fn v_sum(a: __m256) -> f32 {
            let v = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    unsafe fn v_transpose(src: *const u8, src_stride: usize, dst: *mut u8, dst_stride: usize) {
        // SAFETY: rows 0 to 7 are accessed, `src_stride` and `dst_stride` bytes apart, with one
        // unaligned vector of 32 bytes each: the `LANES` words of a row. The caller guarantees
        // these rows at `src` and `dst`, no overlap, and AVX2.
        unsafe {
            let load = |p: *const u8| _mm256_loadu_si256(p.cast());
            let store = |p: *mut u8, v| _mm256_storeu_si256(p.cast(), v);
            let mut quads = [_mm256_setzero_si256(); 8];
            for i in 0..2 {
                let row = src.add(4 * i * src_stride);
                let (a, b) = (load(row), load(row.add(src_stride)));
                let row = row.add(2 * src_stride);
                let (c, d) = (load(row), load(row.add(src_stride)));
                let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                quads[4 * i] = _mm256_unpacklo_epi64(ab_low, cd_low);
                quads[4 * i + 1] = _mm256_unpackhi_epi64(ab_low, cd_low);
                quads[4 * i + 2] = _mm256_unpacklo_epi64(ab_high, cd_high);
                quads[4 * i + 3] = _mm256_unpackhi_epi64(ab_high, cd_high);
            }
            for j in 0..4 {
                let (low, high) = (quads[j], quads[4 + j]);
                let out = dst.add(j * dst_stride);
                store(out, _mm256_permute2x128_si256(low, high, 0x20));
                store(
                    out.add(4 * dst_stride),
                    _mm256_permute2x128_si256(low, high, 0x31),
                );
            }
        }
    }
}

/// The first `n` of 8 words; 0 in the other lanes.
///
/// # Safety
/// `ptr` is readable for `n <= 8` words; the processor has AVX2.
#[inline(always)]
unsafe fn load_words(ptr: *const u16, n: usize) -> __m128i {
    // SAFETY: eight words are one load of 16 bytes at `ptr`. For fewer, `2 * n` bytes are copied to
    // the 16 bytes of `stage`, which the load then reads. The caller guarantees the `n` words and
    // AVX2.
    unsafe {
        if n == 8 {
            return _mm_loadu_si128(ptr.cast());
        }
        let mut stage = [0u16; 8];
        // The copy is by bytes, for any alignment.
        { stage.as_mut_ptr().cast::<u8>() }
            .copy_from_nonoverlapping(ptr.cast(), n * size_of::<u16>());
        _mm_loadu_si128(stage.as_ptr().cast())
    }
}

register_fns! {
    avx2;
    /// A mask of the first `n` of 8 lanes.
    ///
    /// # Safety
    /// The processor has AVX2.
    unsafe fn first(n: usize) -> __m256i {
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lane)
    }
}

/// The first `n` of 16 words; 0 in the other lanes.
///
/// # Safety
/// `ptr` is readable for `n <= 16` words; the processor has AVX-512 BW and VL.
#[inline(always)]
unsafe fn load_wide_words(ptr: *const u16, n: usize) -> __m256i {
    // SAFETY: 16 words are one load of 32 bytes at `ptr`. For fewer, word `i` is read only if `i <
    // n`, because a masked word is not accessed. The caller guarantees the `n` words, and AVX-512
    // BW and VL for the mask.
    unsafe {
        if n == 16 {
            _mm256_loadu_si256(ptr.cast())
        } else {
            _mm256_maskz_loadu_epi16(((1u32 << n) - 1) as u16, ptr.cast())
        }
    }
}

impl Simd for Avx512 {
    type Vector = __m512;
    type Mask = __mmask16;
    const LANES: usize = 16;

    register_fns! {
        avx512;
        unsafe fn v_splat(x: f32) -> __m512 {
            _mm512_set1_ps(x)
        }
    }
    #[inline(always)]
    unsafe fn v_load(ptr: *const f32, n: usize) -> __m512 {
        // SAFETY: the caller guarantees `n <= 16` floats at `ptr`. The mask of a shorter load has
        // the low `n` bits, and a masked lane is not accessed. Both loads need AVX-512 F, which the
        // caller guarantees with the level.
        unsafe {
            if n == 16 {
                _mm512_loadu_ps(ptr)
            } else {
                _mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, ptr)
            }
        }
    }
    #[inline(always)]
    unsafe fn v_store(x: __m512, ptr: *mut f32, n: usize) {
        // SAFETY: the caller guarantees that `ptr` is writable for `n <= 16` floats. The mask of a
        // shorter store has the low `n` bits, and a masked lane is not written. Both stores need
        // AVX-512 F, which the caller guarantees with the level.
        unsafe {
            if n == 16 {
                _mm512_storeu_ps(ptr, x)
            } else {
                _mm512_mask_storeu_ps(ptr, ((1u32 << n) - 1) as u16, x)
            }
        }
    }
    #[inline(always)]
    unsafe fn v_load_f16(ptr: *const u16, n: usize) -> __m512 {
        // SAFETY: `load_wide_words` has the contract of this function: `n <= 16` words at `ptr`,
        // and AVX-512 BW and VL, which the level includes. The conversion takes a register.
        unsafe { _mm512_cvtph_ps(load_wide_words(ptr, n)) }
    }
    #[inline(always)]
    unsafe fn v_store_f16(x: __m512, ptr: *mut u16, n: usize) {
        // SAFETY: the caller guarantees that `ptr` is writable for `n <= 16` F16. Sixteen are 32
        // bytes, one store; otherwise the mask has the low `n` bits, and needs AVX-512 BW and VL,
        // which the level includes.
        unsafe {
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            if n == 16 {
                _mm256_storeu_si256(ptr.cast(), halves)
            } else {
                _mm256_mask_storeu_epi16(ptr.cast(), ((1u32 << n) - 1) as u16, halves)
            }
        }
    }
    #[inline(always)]
    unsafe fn v_load_bf16(ptr: *const u16, n: usize) -> __m512 {
        // SAFETY: `load_wide_words` has the contract of this function: `n <= 16` words at `ptr`,
        // and AVX-512 BW and VL, which the level includes. The words are widened and shifted in
        // registers.
        unsafe {
            let words = _mm512_cvtepu16_epi32(load_wide_words(ptr, n));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
    intrinsics! {
        avx512, __m512;
        v_add(a, b) -> __m512 = _mm512_add_ps;
        v_sub(a, b) -> __m512 = _mm512_sub_ps;
        v_mul(a, b) -> __m512 = _mm512_mul_ps;
        v_div(a, b) -> __m512 = _mm512_div_ps;
        v_mul_add(a, b, c) -> __m512 = _mm512_fmadd_ps;
        v_neg_mul_add(a, b, c) -> __m512 = _mm512_fnmadd_ps;
        v_min(a, b) -> __m512 = _mm512_min_ps;
        v_max(a, b) -> __m512 = _mm512_max_ps;
        v_sqrt(a) -> __m512 = _mm512_sqrt_ps;
        v_floor(a) -> __m512 = _mm512_roundscale_ps::<DOWN>;
        v_ceil(a) -> __m512 = _mm512_roundscale_ps::<UP>;
        v_trunc(a) -> __m512 = _mm512_roundscale_ps::<ZERO>;
        v_round_even(a) -> __m512 = _mm512_roundscale_ps::<NEAREST>;
        v_scale(a, n) -> __m512 = _mm512_scalef_ps;
    }
    register_fns! {
        avx512;
        unsafe fn v_copysign(a: __m512, b: __m512) -> __m512 {
            let sign = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(sign, a), _mm512_and_ps(sign, b))
        }

        unsafe fn v_split(a: __m512) -> (__m512, __m512) {
            let bits = _mm512_castps_si512(a);
            let up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x0040_0000));
            let e = _mm512_sub_epi32(_mm512_srli_epi32::<23>(up), _mm512_set1_epi32(127));
            let m = _mm512_sub_epi32(bits, _mm512_slli_epi32::<23>(e));
            (_mm512_castsi512_ps(m), _mm512_cvtepi32_ps(e))
        }

        unsafe fn v_lt(a: __m512, b: __m512) -> __mmask16 {
            _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b)
        }

        unsafe fn v_le(a: __m512, b: __m512) -> __mmask16 {
            _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b)
        }

        unsafe fn v_select(m: __mmask16, a: __m512, b: __m512) -> __m512 {
            _mm512_mask_blend_ps(m, b, a)
        }
    }
    #[inline(always)]
    unsafe fn v_sum(a: __m512) -> f32 {
        // SAFETY: `Avx2::v_sum` needs AVX2, and the halves of the register AVX-512 DQ. The caller
        // guarantees both with the level.
        unsafe {
            let high = _mm512_extractf32x8_ps(a, 1);
            Avx2::v_sum(_mm256_add_ps(_mm512_castps512_ps256(a), high))
        }
    }
    #[inline(always)]
    unsafe fn v_transpose(src: *const u8, src_stride: usize, dst: *mut u8, dst_stride: usize) {
        // SAFETY: rows 0 to 15 are accessed, `src_stride` and `dst_stride` bytes apart, with one
        // unaligned vector of 64 bytes each: the `LANES` words of a row. The caller guarantees
        // these rows at `src` and `dst`, no overlap, and AVX-512 F.
        unsafe {
            let load = |p: *const u8| _mm512_loadu_si512(p.cast());
            let store = |p: *mut u8, v| _mm512_storeu_si512(p.cast(), v);
            // Interleaves the words of two rows, then of four rows: 128-bit lane `l` of a vector
            // has word `4 l + j` of rows `4 i .. 4 i + 4`.
            let mut quads = [_mm512_setzero_si512(); 16];
            for i in 0..4 {
                let row = src.add(4 * i * src_stride);
                let (a, b) = (load(row), load(row.add(src_stride)));
                let row = row.add(2 * src_stride);
                let (c, d) = (load(row), load(row.add(src_stride)));
                let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
                quads[4 * i] = _mm512_unpacklo_epi64(ab_low, cd_low);
                quads[4 * i + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
                quads[4 * i + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
                quads[4 * i + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
            }
            // The last step is a 4 x 4 transposition of 128-bit lanes for each `j`.
            for j in 0..4 {
                let (a, b, c, d) = (quads[j], quads[4 + j], quads[8 + j], quads[12 + j]);
                let even_low = _mm512_shuffle_i32x4(a, b, 0b10_00_10_00);
                let odd_low = _mm512_shuffle_i32x4(a, b, 0b11_01_11_01);
                let even_high = _mm512_shuffle_i32x4(c, d, 0b10_00_10_00);
                let odd_high = _mm512_shuffle_i32x4(c, d, 0b11_01_11_01);
                let out = dst.add(j * dst_stride);
                let four = 4 * dst_stride;
                store(
                    out,
                    _mm512_shuffle_i32x4(even_low, even_high, 0b10_00_10_00),
                );
                store(
                    out.add(four),
                    _mm512_shuffle_i32x4(odd_low, odd_high, 0b10_00_10_00),
                );
                let out = out.add(2 * four);
                store(
                    out,
                    _mm512_shuffle_i32x4(even_low, even_high, 0b11_01_11_01),
                );
                store(
                    out.add(four),
                    _mm512_shuffle_i32x4(odd_low, odd_high, 0b11_01_11_01),
                );
            }
        }
    }
}
