//! Vectors of `f32` at every [`Level`], behind one type, so that a kernel is written once.
//!
//! A kernel is a [`Task`]: a value with the arguments and one `#[inline(always)]` method, generic over
//! the instruction set. [`dispatch`] compiles it once per instruction set and calls the best one:
//!
//! ```ignore
//! impl Task for Sum<'_> {
//!     type Output = f32;
//!
//!     #[inline(always)]
//!     fn run<S: Simd>(self, simd: S) -> f32 {
//!         let mut sum = simd.splat(0.0);
//!         chunks::<S>(self.x.len(), |i, n| sum = sum + simd.load(&self.x[i..i + n]));
//!         sum.sum()
//!     }
//! }
//! ```
//!
//! [`Lanes`] has the operators and the methods of `f32`; [`math`](super::math) adds `exp` and its
//! relatives. All are the IEEE operation in each lane, except that [`Lanes::mul_add`] rounds twice where
//! there is no fused instruction.
//!
//! The instruction sets are zero-sized tokens. Only [`dispatch`] makes one, after the processor was
//! asked: that a token exists is the proof that its instructions do.

use std::ops::{Add, Div, Mul, Neg, Sub};

use super::formats::{bf16_to_f32, f16_to_f32, f32_to_f16};
use super::gemm::Level;

/// A kernel, generic over the instruction set.
pub(crate) trait Task {
    /// What it returns.
    type Output;

    /// Runs it. Implementations are `#[inline(always)]`, so that they are compiled with the
    /// instructions of `S`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a kernel with the best instructions of this machine.
#[inline]
pub(crate) fn dispatch<T: Task>(task: T) -> T::Output {
    dispatch_at(Level::best(), task)
}

/// Runs a kernel with the instructions of a level, for tests.
///
/// # Panics
/// If this machine does not support `level`.
#[inline]
pub(crate) fn dispatch_at<T: Task>(level: Level, task: T) -> T::Output {
    debug_assert!(level == Level::best() || level.is_supported());
    match level {
        Level::Scalar => task.run(Scalar(())),
        // SAFETY: `Level::best` is a supported level, and tests ask `is_supported`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx2Vnni => unsafe { x86::avx2(task) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 => unsafe { x86::avx512(task) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => task.run(Scalar(())),
    }
}

/// Makes rows of `columns` floats columns of as many; strides are in floats.
pub(crate) struct Transpose {
    pub(crate) src: *const f32,
    pub(crate) src_stride: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) dst: *mut f32,
    pub(crate) dst_stride: usize,
}

impl Transpose {
    /// Transposes.
    ///
    /// # Safety
    /// Rows and columns are multiples of the longest vector; `src` is readable, `dst` writable for them, and they do
    /// not overlap.
    pub(crate) unsafe fn run(self) {
        debug_assert!(
            self.rows.is_multiple_of(MAX_LANES) && self.columns.is_multiple_of(MAX_LANES)
        );
        dispatch(Transposition(self));
    }
}

/// A [`Transpose`] whose memory was vouched for.
struct Transposition(Transpose);

impl Task for Transposition {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let t = self.0;
        for row in (0..t.rows).step_by(S::LANES) {
            for column in (0..t.columns).step_by(S::LANES) {
                // SAFETY: `Transpose::run` had the memory vouched for.
                unsafe {
                    let src = t.src.add(row * t.src_stride + column);
                    let dst = t.dst.add(column * t.dst_stride + row);
                    simd.v_transpose(src, t.src_stride, dst, t.dst_stride);
                }
            }
        }
    }
}

/// Calls `body(start, len)` for each vector of `n` floats; the last may be shorter than the others.
#[inline(always)]
pub(crate) fn chunks<S: Simd>(n: usize, mut body: impl FnMut(usize, usize)) {
    let mut start = 0;
    while start < n {
        // The only call: a closure that is called twice might not be inlined, and would then be compiled
        // without the instructions of `S`.
        body(start, S::LANES.min(n - start));
        start += S::LANES;
    }
}

/// An instruction set. Its methods are the raw operations; kernels use [`Lanes`].
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A register of `LANES` floats.
    type Vector: Copy;
    /// A truth value for each lane.
    type Mask: Copy;
    /// Floats in a vector.
    const LANES: usize;

    fn v_splat(self, x: f32) -> Self::Vector;
    /// # Safety
    /// `ptr` is readable for `n <= LANES` floats; no alignment is needed.
    unsafe fn v_load(self, ptr: *const f32, n: usize) -> Self::Vector;
    /// # Safety
    /// `ptr` is writable for `n <= LANES` floats; no alignment is needed.
    unsafe fn v_store(self, x: Self::Vector, ptr: *mut f32, n: usize);
    /// # Safety
    /// `ptr` is readable for `n <= LANES` halves; no alignment is needed.
    unsafe fn v_load_f16(self, ptr: *const u16, n: usize) -> Self::Vector;
    /// # Safety
    /// `ptr` is writable for `n <= LANES` halves; no alignment is needed.
    unsafe fn v_store_f16(self, x: Self::Vector, ptr: *mut u16, n: usize);
    /// # Safety
    /// `ptr` is readable for `n <= LANES` bfloat16; no alignment is needed.
    unsafe fn v_load_bf16(self, ptr: *const u16, n: usize) -> Self::Vector;

    fn v_add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn v_sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn v_mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn v_div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn v_mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    fn v_min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn v_max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn v_sqrt(self, a: Self::Vector) -> Self::Vector;
    fn v_floor(self, a: Self::Vector) -> Self::Vector;
    fn v_ceil(self, a: Self::Vector) -> Self::Vector;
    fn v_trunc(self, a: Self::Vector) -> Self::Vector;
    fn v_round_even(self, a: Self::Vector) -> Self::Vector;
    /// The magnitude of `a` with the sign of `b`.
    fn v_copysign(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * 2^n` for a whole `n` from -300 to 300, rounded once.
    fn v_scale(self, a: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// For a positive normal number `a = m * 2^e` with `0.75 <= m < 1.5`: `(m, e)`.
    fn v_split(self, a: Self::Vector) -> (Self::Vector, Self::Vector);

    fn v_lt(self, a: Self::Vector, b: Self::Vector) -> Self::Mask;
    fn v_le(self, a: Self::Vector, b: Self::Vector) -> Self::Mask;
    fn v_select(self, m: Self::Mask, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// Transposes `LANES` rows of `LANES` floats; strides are in floats.
    ///
    /// # Safety
    /// `src` is readable and `dst` writable for as many rows; they do not overlap.
    unsafe fn v_transpose(
        self,
        src: *const f32,
        src_stride: usize,
        dst: *mut f32,
        dst_stride: usize,
    );

    /// The vector of one value.
    #[inline(always)]
    fn splat(self, x: f32) -> Lanes<Self> {
        Lanes {
            simd: self,
            v: self.v_splat(x),
        }
    }

    /// The first values of `x`, at most a vector; 0 in lanes beyond them.
    #[inline(always)]
    fn load(self, x: &[f32]) -> Lanes<Self> {
        // SAFETY: the slice holds as many floats as are read.
        unsafe { self.load_ptr(x.as_ptr(), x.len().min(Self::LANES)) }
    }

    /// `n <= LANES` floats from `ptr`; 0 in lanes beyond them.
    ///
    /// # Safety
    /// `ptr` is readable for `n <= LANES` floats; no alignment is needed.
    #[inline(always)]
    unsafe fn load_ptr(self, ptr: *const f32, n: usize) -> Lanes<Self> {
        // SAFETY: handed on.
        let v = unsafe { self.v_load(ptr, n) };
        Lanes { simd: self, v }
    }

    /// `n <= LANES` halves from `ptr`; 0 in lanes beyond them.
    ///
    /// # Safety
    /// `ptr` is readable for `n <= LANES` halves; no alignment is needed.
    #[inline(always)]
    unsafe fn load_f16_ptr(self, ptr: *const u16, n: usize) -> Lanes<Self> {
        // SAFETY: handed on.
        let v = unsafe { self.v_load_f16(ptr, n) };
        Lanes { simd: self, v }
    }

    /// `n <= LANES` bfloat16 from `ptr`; 0 in lanes beyond them.
    ///
    /// # Safety
    /// `ptr` is readable for `n <= LANES` bfloat16; no alignment is needed.
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, ptr: *const u16, n: usize) -> Lanes<Self> {
        // SAFETY: handed on.
        let v = unsafe { self.v_load_bf16(ptr, n) };
        Lanes { simd: self, v }
    }
}

/// A vector of floats with the operators of one.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<S: Simd> {
    simd: S,
    v: S::Vector,
}

/// A truth value for each lane.
#[derive(Clone, Copy)]
pub(crate) struct Mask<S: Simd> {
    simd: S,
    m: S::Mask,
}

impl<S: Simd> Mask<S> {
    /// `a` where true, `b` where false.
    #[inline(always)]
    pub(crate) fn select(self, a: Lanes<S>, b: Lanes<S>) -> Lanes<S> {
        a.with(self.simd.v_select(self.m, a.v, b.v))
    }
}

impl<S: Simd> Lanes<S> {
    #[inline(always)]
    fn with(self, v: S::Vector) -> Lanes<S> {
        Lanes { v, ..self }
    }

    /// The vector of one value.
    #[inline(always)]
    pub(crate) fn splat(self, x: f32) -> Lanes<S> {
        self.simd.splat(x)
    }

    /// Writes the first lanes to `out`, at most a vector.
    #[inline(always)]
    pub(crate) fn store(self, out: &mut [f32]) {
        // SAFETY: the slice has room for as many floats as are written.
        unsafe { self.store_ptr(out.as_mut_ptr(), out.len().min(S::LANES)) }
    }

    /// Writes the first `n` lanes to `ptr`.
    ///
    /// # Safety
    /// `ptr` is writable for `n <= LANES` floats; no alignment is needed.
    #[inline(always)]
    pub(crate) unsafe fn store_ptr(self, ptr: *mut f32, n: usize) {
        // SAFETY: handed on.
        unsafe { self.simd.v_store(self.v, ptr, n) }
    }

    /// Writes the first `n` lanes to `ptr` as halves, to nearest, ties to even.
    ///
    /// # Safety
    /// `ptr` is writable for `n <= LANES` halves; no alignment is needed.
    #[inline(always)]
    pub(crate) unsafe fn store_f16_ptr(self, ptr: *mut u16, n: usize) {
        // SAFETY: handed on.
        unsafe { self.simd.v_store_f16(self.v, ptr, n) }
    }

    /// `self * b + c`, rounded once where the machine can.
    #[inline(always)]
    pub(crate) fn mul_add(self, b: Lanes<S>, c: Lanes<S>) -> Lanes<S> {
        self.with(self.simd.v_mul_add(self.v, b.v, c.v))
    }

    /// The smaller; `b` where they are equal or either is NaN.
    #[inline(always)]
    pub(crate) fn min(self, b: Lanes<S>) -> Lanes<S> {
        self.with(self.simd.v_min(self.v, b.v))
    }

    /// The larger; `b` where they are equal or either is NaN.
    #[inline(always)]
    pub(crate) fn max(self, b: Lanes<S>) -> Lanes<S> {
        self.with(self.simd.v_max(self.v, b.v))
    }

    #[inline(always)]
    pub(crate) fn sqrt(self) -> Lanes<S> {
        self.with(self.simd.v_sqrt(self.v))
    }

    #[inline(always)]
    pub(crate) fn floor(self) -> Lanes<S> {
        self.with(self.simd.v_floor(self.v))
    }

    #[inline(always)]
    pub(crate) fn ceil(self) -> Lanes<S> {
        self.with(self.simd.v_ceil(self.v))
    }

    #[inline(always)]
    pub(crate) fn trunc(self) -> Lanes<S> {
        self.with(self.simd.v_trunc(self.v))
    }

    /// The nearest whole number, the even one of two.
    #[inline(always)]
    pub(crate) fn round_even(self) -> Lanes<S> {
        self.with(self.simd.v_round_even(self.v))
    }

    /// The nearest whole number, the one farther from zero of two.
    #[inline(always)]
    pub(crate) fn round(self) -> Lanes<S> {
        // The largest float below one half: adding a half itself would round 0.49999997 up.
        (self + self.splat(0.499_999_97).copysign(self)).trunc()
    }

    #[inline(always)]
    pub(crate) fn abs(self) -> Lanes<S> {
        self.copysign(self.splat(0.0))
    }

    /// The magnitude of `self` with the sign of `sign`.
    #[inline(always)]
    pub(crate) fn copysign(self, sign: Lanes<S>) -> Lanes<S> {
        self.with(self.simd.v_copysign(self.v, sign.v))
    }

    /// `self * 2^n` for a whole `n` from -300 to 300.
    #[inline(always)]
    pub(crate) fn scale(self, n: Lanes<S>) -> Lanes<S> {
        self.with(self.simd.v_scale(self.v, n.v))
    }

    /// For positive normal numbers `m * 2^e` with `0.75 <= m < 1.5`: `(m, e)`.
    #[inline(always)]
    pub(crate) fn split(self) -> (Lanes<S>, Lanes<S>) {
        let (m, e) = self.simd.v_split(self.v);
        (self.with(m), self.with(e))
    }

    #[inline(always)]
    pub(crate) fn lt(self, b: Lanes<S>) -> Mask<S> {
        Mask {
            simd: self.simd,
            m: self.simd.v_lt(self.v, b.v),
        }
    }

    #[inline(always)]
    pub(crate) fn le(self, b: Lanes<S>) -> Mask<S> {
        Mask {
            simd: self.simd,
            m: self.simd.v_le(self.v, b.v),
        }
    }

    #[inline(always)]
    pub(crate) fn gt(self, b: Lanes<S>) -> Mask<S> {
        b.lt(self)
    }

    #[inline(always)]
    pub(crate) fn ge(self, b: Lanes<S>) -> Mask<S> {
        b.le(self)
    }

    /// The lanes as an array; those beyond the vector are 0.
    #[inline(always)]
    fn to_array(self) -> [f32; MAX_LANES] {
        let mut lanes = [0.0; MAX_LANES];
        self.store(&mut lanes[..S::LANES]);
        lanes
    }

    /// A function of one float in each lane, one after the other.
    #[inline(always)]
    pub(crate) fn each(self, f: impl Fn(f32) -> f32) -> Lanes<S> {
        let mut lanes = self.to_array();
        lanes[..S::LANES].iter_mut().for_each(|x| *x = f(*x));
        self.simd.load(&lanes[..S::LANES])
    }

    /// The first `n` lanes, 0 in the others.
    #[inline(always)]
    pub(crate) fn first(self, n: usize) -> Lanes<S> {
        self.simd.load(&self.to_array()[..n])
    }

    /// The sum of the lanes.
    #[inline(always)]
    pub(crate) fn sum(self) -> f32 {
        let mut lanes = self.to_array();
        let mut half = S::LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// The largest of the first `n` lanes; `-inf` of none; NaN lanes are passed over.
    #[inline(always)]
    pub(crate) fn largest(self, n: usize) -> f32 {
        self.to_array()[..n]
            .iter()
            .fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
    }
}

/// Lanes of the widest vector.
const MAX_LANES: usize = 16;

macro_rules! operators {
    ($($trait:ident $method:ident $raw:ident;)*) => {$(
        impl<S: Simd> $trait for Lanes<S> {
            type Output = Lanes<S>;
            #[inline(always)]
            fn $method(self, b: Lanes<S>) -> Lanes<S> {
                self.with(self.simd.$raw(self.v, b.v))
            }
        }

        impl<S: Simd> $trait<f32> for Lanes<S> {
            type Output = Lanes<S>;
            #[inline(always)]
            fn $method(self, b: f32) -> Lanes<S> {
                $trait::$method(self, self.splat(b))
            }
        }

        impl<S: Simd> $trait<Lanes<S>> for f32 {
            type Output = Lanes<S>;
            #[inline(always)]
            fn $method(self, b: Lanes<S>) -> Lanes<S> {
                $trait::$method(b.splat(self), b)
            }
        }
    )*};
}

operators! {
    Add add v_add;
    Sub sub v_sub;
    Mul mul v_mul;
    Div div v_div;
}

impl<S: Simd> Neg for Lanes<S> {
    type Output = Lanes<S>;
    #[inline(always)]
    fn neg(self) -> Lanes<S> {
        // Not `0 - x`, which loses the sign of zero.
        self.splat(-0.0) - self
    }
}

/// Portable Rust, one lane.
#[derive(Clone, Copy)]
pub(crate) struct Scalar(());

impl Simd for Scalar {
    type Vector = f32;
    type Mask = bool;
    const LANES: usize = 1;

    #[inline(always)]
    fn v_splat(self, x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn v_load(self, ptr: *const f32, n: usize) -> f32 {
        if n == 0 {
            return 0.0;
        }
        // SAFETY: the caller vouches for `n` floats.
        unsafe { ptr.read_unaligned() }
    }
    #[inline(always)]
    unsafe fn v_store(self, x: f32, ptr: *mut f32, n: usize) {
        if n > 0 {
            // SAFETY: the caller vouches for `n` floats.
            unsafe { ptr.write_unaligned(x) }
        }
    }
    #[inline(always)]
    unsafe fn v_load_f16(self, ptr: *const u16, n: usize) -> f32 {
        if n == 0 {
            return 0.0;
        }
        // SAFETY: the caller vouches for `n` halves.
        f16_to_f32(unsafe { ptr.read_unaligned() })
    }
    #[inline(always)]
    unsafe fn v_store_f16(self, x: f32, ptr: *mut u16, n: usize) {
        if n > 0 {
            // SAFETY: the caller vouches for `n` halves.
            unsafe { ptr.write_unaligned(f32_to_f16(x)) }
        }
    }
    #[inline(always)]
    unsafe fn v_load_bf16(self, ptr: *const u16, n: usize) -> f32 {
        if n == 0 {
            return 0.0;
        }
        // SAFETY: the caller vouches for `n` bfloat16.
        bf16_to_f32(unsafe { ptr.read_unaligned() })
    }
    #[inline(always)]
    fn v_add(self, a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn v_sub(self, a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    fn v_mul(self, a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    fn v_div(self, a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    fn v_mul_add(self, a: f32, b: f32, c: f32) -> f32 {
        a * b + c // `f32::mul_add` without the instruction is a slow call
    }
    #[inline(always)]
    fn v_min(self, a: f32, b: f32) -> f32 {
        if a < b { a } else { b }
    }
    #[inline(always)]
    fn v_max(self, a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    fn v_sqrt(self, a: f32) -> f32 {
        a.sqrt()
    }
    #[inline(always)]
    fn v_floor(self, a: f32) -> f32 {
        a.floor()
    }
    #[inline(always)]
    fn v_ceil(self, a: f32) -> f32 {
        a.ceil()
    }
    #[inline(always)]
    fn v_trunc(self, a: f32) -> f32 {
        a.trunc()
    }
    #[inline(always)]
    fn v_round_even(self, a: f32) -> f32 {
        a.round_ties_even()
    }
    #[inline(always)]
    fn v_copysign(self, a: f32, b: f32) -> f32 {
        a.copysign(b)
    }
    #[inline(always)]
    fn v_scale(self, a: f32, n: f32) -> f32 {
        // In f64 neither the power nor the product leaves the normal range, and one rounding is left.
        let power = f64::from_bits(((n as i64 + 1023) as u64) << 52);
        (f64::from(a) * power) as f32
    }
    #[inline(always)]
    fn v_split(self, a: f32) -> (f32, f32) {
        // Adding a quarter of a binade before cutting the exponent off puts the cut at 1.5.
        let bits = a.to_bits();
        let e = (bits.wrapping_add(0x0040_0000) >> 23) as i32 - 127;
        (
            f32::from_bits(bits.wrapping_sub((e as u32) << 23)),
            e as f32,
        )
    }
    #[inline(always)]
    fn v_lt(self, a: f32, b: f32) -> bool {
        a < b
    }
    #[inline(always)]
    fn v_le(self, a: f32, b: f32) -> bool {
        a <= b
    }
    #[inline(always)]
    fn v_select(self, m: bool, a: f32, b: f32) -> f32 {
        if m { a } else { b }
    }
    #[inline(always)]
    unsafe fn v_transpose(self, src: *const f32, _: usize, dst: *mut f32, _: usize) {
        // SAFETY: the caller vouches for a float in both places.
        unsafe { dst.write(src.read()) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Simd, Task};
    use crate::gemm::{transpose_8, transpose_16};

    /// # Safety
    /// The processor has these instructions.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn avx2<T: Task>(task: T) -> T::Output {
        task.run(Avx2(()))
    }

    /// # Safety
    /// The processor has these instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn avx512<T: Task>(task: T) -> T::Output {
        task.run(Avx512(()))
    }

    /// A transposition, which the products of matrices need, too.
    macro_rules! transpose {
        ($transpose:ident) => {
            #[inline(always)]
            unsafe fn v_transpose(
                self,
                src: *const f32,
                src_stride: usize,
                dst: *mut f32,
                dst_stride: usize,
            ) {
                const BYTES: usize = size_of::<f32>();
                // SAFETY: the caller vouches for the rows; `self` was made where the processor has the
                // instructions (module header).
                unsafe {
                    $transpose(
                        src.cast(),
                        src_stride * BYTES,
                        dst.cast(),
                        dst_stride * BYTES,
                    )
                }
            }
        };
    }

    /// AVX2 and FMA: 8 lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(());

    /// AVX-512: 16 lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(());

    /// Operations that are one intrinsic.
    macro_rules! intrinsics {
        ($($name:ident($($arg:ident),*) = $intrinsic:expr;)*) => {$(
            #[inline(always)]
            fn $name(self, $($arg: Self::Vector),*) -> Self::Vector {
                // SAFETY: `self` was made where the processor has the instruction (module header).
                unsafe { $intrinsic($($arg),*) }
            }
        )*};
    }

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const UP: i32 = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
    const ZERO: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;

    impl Simd for Avx2 {
        type Vector = __m256;
        type Mask = __m256;
        const LANES: usize = 8;

        #[inline(always)]
        fn v_splat(self, x: f32) -> __m256 {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn v_load(self, ptr: *const f32, n: usize) -> __m256 {
            // SAFETY: the caller vouches for `n` floats; masked lanes are not touched.
            unsafe {
                if n == 8 {
                    _mm256_loadu_ps(ptr)
                } else {
                    _mm256_maskload_ps(ptr, first(n))
                }
            }
        }
        #[inline(always)]
        unsafe fn v_store(self, x: __m256, ptr: *mut f32, n: usize) {
            // SAFETY: the caller vouches for `n` floats; masked lanes are not touched.
            unsafe {
                if n == 8 {
                    _mm256_storeu_ps(ptr, x)
                } else {
                    _mm256_maskstore_ps(ptr, first(n), x)
                }
            }
        }
        #[inline(always)]
        unsafe fn v_load_f16(self, ptr: *const u16, n: usize) -> __m256 {
            // SAFETY: the caller vouches for `n` halves; `self` for the instructions.
            unsafe { _mm256_cvtph_ps(load_words(ptr, n)) }
        }
        #[inline(always)]
        unsafe fn v_store_f16(self, x: __m256, ptr: *mut u16, n: usize) {
            // SAFETY: the caller vouches for `n` halves; `self` for the instructions.
            unsafe {
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
                if n == 8 {
                    _mm_storeu_si128(ptr.cast(), halves);
                } else {
                    let mut stage = [0u16; 8];
                    _mm_storeu_si128(stage.as_mut_ptr().cast(), halves);
                    // By bytes, which need no alignment.
                    ptr.cast::<u8>()
                        .copy_from_nonoverlapping(stage.as_ptr().cast(), n * size_of::<u16>());
                }
            }
        }
        #[inline(always)]
        unsafe fn v_load_bf16(self, ptr: *const u16, n: usize) -> __m256 {
            // SAFETY: the caller vouches for `n` bfloat16; `self` for the instructions.
            unsafe {
                let words = _mm256_cvtepu16_epi32(load_words(ptr, n));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
            }
        }
        intrinsics! {
            v_add(a, b) = _mm256_add_ps;
            v_sub(a, b) = _mm256_sub_ps;
            v_mul(a, b) = _mm256_mul_ps;
            v_div(a, b) = _mm256_div_ps;
            v_mul_add(a, b, c) = _mm256_fmadd_ps;
            v_min(a, b) = _mm256_min_ps;
            v_max(a, b) = _mm256_max_ps;
            v_sqrt(a) = _mm256_sqrt_ps;
            v_floor(a) = _mm256_round_ps::<DOWN>;
            v_ceil(a) = _mm256_round_ps::<UP>;
            v_trunc(a) = _mm256_round_ps::<ZERO>;
            v_round_even(a) = _mm256_round_ps::<NEAREST>;
            v_lt(a, b) = _mm256_cmp_ps::<_CMP_LT_OQ>;
            v_le(a, b) = _mm256_cmp_ps::<_CMP_LE_OQ>;
        }
        #[inline(always)]
        fn v_copysign(self, a: __m256, b: __m256) -> __m256 {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe {
                let sign = _mm256_set1_ps(-0.0);
                _mm256_or_ps(_mm256_andnot_ps(sign, a), _mm256_and_ps(sign, b))
            }
        }
        #[inline(always)]
        fn v_scale(self, a: __m256, n: __m256) -> __m256 {
            // A power of two that is a float has an exponent of at most 127: three factors reach 300.
            // The smallest factor goes first, so that only the last product can round.
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe {
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
        }
        #[inline(always)]
        fn v_split(self, a: __m256) -> (__m256, __m256) {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe {
                let bits = _mm256_castps_si256(a);
                let up = _mm256_add_epi32(bits, _mm256_set1_epi32(0x0040_0000));
                let e = _mm256_sub_epi32(_mm256_srli_epi32::<23>(up), _mm256_set1_epi32(127));
                let m = _mm256_sub_epi32(bits, _mm256_slli_epi32::<23>(e));
                (_mm256_castsi256_ps(m), _mm256_cvtepi32_ps(e))
            }
        }
        #[inline(always)]
        fn v_select(self, m: __m256, a: __m256, b: __m256) -> __m256 {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe { _mm256_blendv_ps(b, a, m) }
        }
        transpose!(transpose_8);
    }

    /// `n` of 8 words, 0 beyond them.
    ///
    /// # Safety
    /// `ptr` is readable for `n <= 8` words; the processor has AVX2.
    #[inline(always)]
    unsafe fn load_words(ptr: *const u16, n: usize) -> __m128i {
        // SAFETY: the caller vouches for the words and the instructions.
        unsafe {
            if n == 8 {
                return _mm_loadu_si128(ptr.cast());
            }
            let mut stage = [0u16; 8];
            // By bytes, which need no alignment.
            { stage.as_mut_ptr().cast::<u8>() }
                .copy_from_nonoverlapping(ptr.cast(), n * size_of::<u16>());
            _mm_loadu_si128(stage.as_ptr().cast())
        }
    }

    /// A mask of the first `n` of 8 lanes.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn first(n: usize) -> __m256i {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lane)
        }
    }

    /// `n` of 16 words, 0 beyond them.
    ///
    /// # Safety
    /// `ptr` is readable for `n <= 16` words; the processor has AVX-512 BW and VL.
    #[inline(always)]
    unsafe fn load_wide_words(ptr: *const u16, n: usize) -> __m256i {
        // SAFETY: the caller vouches for the words and the instructions; masked ones are not touched.
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

        #[inline(always)]
        fn v_splat(self, x: f32) -> __m512 {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn v_load(self, ptr: *const f32, n: usize) -> __m512 {
            // SAFETY: the caller vouches for `n` floats; masked lanes are not touched.
            unsafe {
                if n == 16 {
                    _mm512_loadu_ps(ptr)
                } else {
                    _mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, ptr)
                }
            }
        }
        #[inline(always)]
        unsafe fn v_store(self, x: __m512, ptr: *mut f32, n: usize) {
            // SAFETY: the caller vouches for `n` floats; masked lanes are not touched.
            unsafe {
                if n == 16 {
                    _mm512_storeu_ps(ptr, x)
                } else {
                    _mm512_mask_storeu_ps(ptr, ((1u32 << n) - 1) as u16, x)
                }
            }
        }
        #[inline(always)]
        unsafe fn v_load_f16(self, ptr: *const u16, n: usize) -> __m512 {
            // SAFETY: the caller vouches for `n` halves; masked lanes are not touched.
            unsafe { _mm512_cvtph_ps(load_wide_words(ptr, n)) }
        }
        #[inline(always)]
        unsafe fn v_store_f16(self, x: __m512, ptr: *mut u16, n: usize) {
            // SAFETY: the caller vouches for `n` halves; masked lanes are not touched.
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
        unsafe fn v_load_bf16(self, ptr: *const u16, n: usize) -> __m512 {
            // SAFETY: the caller vouches for `n` bfloat16; masked lanes are not touched.
            unsafe {
                let words = _mm512_cvtepu16_epi32(load_wide_words(ptr, n));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
            }
        }
        intrinsics! {
            v_add(a, b) = _mm512_add_ps;
            v_sub(a, b) = _mm512_sub_ps;
            v_mul(a, b) = _mm512_mul_ps;
            v_div(a, b) = _mm512_div_ps;
            v_mul_add(a, b, c) = _mm512_fmadd_ps;
            v_min(a, b) = _mm512_min_ps;
            v_max(a, b) = _mm512_max_ps;
            v_sqrt(a) = _mm512_sqrt_ps;
            v_floor(a) = _mm512_roundscale_ps::<DOWN>;
            v_ceil(a) = _mm512_roundscale_ps::<UP>;
            v_trunc(a) = _mm512_roundscale_ps::<ZERO>;
            v_round_even(a) = _mm512_roundscale_ps::<NEAREST>;
            v_scale(a, n) = _mm512_scalef_ps;
        }
        #[inline(always)]
        fn v_copysign(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe {
                let sign = _mm512_set1_ps(-0.0);
                _mm512_or_ps(_mm512_andnot_ps(sign, a), _mm512_and_ps(sign, b))
            }
        }
        #[inline(always)]
        fn v_split(self, a: __m512) -> (__m512, __m512) {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe {
                let bits = _mm512_castps_si512(a);
                let up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x0040_0000));
                let e = _mm512_sub_epi32(_mm512_srli_epi32::<23>(up), _mm512_set1_epi32(127));
                let m = _mm512_sub_epi32(bits, _mm512_slli_epi32::<23>(e));
                (_mm512_castsi512_ps(m), _mm512_cvtepi32_ps(e))
            }
        }
        #[inline(always)]
        fn v_lt(self, a: __m512, b: __m512) -> __mmask16 {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
        }
        #[inline(always)]
        fn v_le(self, a: __m512, b: __m512) -> __mmask16 {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b) }
        }
        #[inline(always)]
        fn v_select(self, m: __mmask16, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` was made where the processor has the instruction (module header).
            unsafe { _mm512_mask_blend_ps(m, b, a) }
        }
        transpose!(transpose_16);
    }
}
