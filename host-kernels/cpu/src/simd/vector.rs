//! [`Simd`]: the operations of an instruction set. [`Lanes`]: a vector of `f32` with the operators
//! and methods of `f32`.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// Lanes of the widest vector.
pub(super) const MAX_LANES: usize = 16;

/// Calls a function of [`Simd`] whose operands are registers and numbers. `$token` is a value of
/// `$simd`. The function must not be one that takes a pointer.
macro_rules! with_token {
    ($token:expr, $simd:ident::$function:ident($($operand:expr),*)) => {{
        const {
            assert!(
                !is_access(stringify!($function)),
                concat!(stringify!($function), " accesses memory")
            );
        }
        let _: $simd = $token;
        // SAFETY: a value of `$simd`, such as `$token`, exists only where the processor has the
        // instructions of `$simd`. `$function` requires nothing else: it is none of those that
        // access memory (`is_access`).
        unsafe { $simd::$function($($operand),*) }
    }};
}

/// Whether a function of [`Simd`] has a pointer among its operands, by its name.
const fn is_access(name: &str) -> bool {
    const fn begins_with(name: &[u8], start: &[u8]) -> bool {
        let mut i = 0;
        while i < start.len() {
            if i >= name.len() || name[i] != start[i] {
                return false;
            }
            i += 1;
        }
        true
    }
    let name = name.as_bytes();
    begins_with(name, b"v_load")
        || begins_with(name, b"v_store")
        || begins_with(name, b"v_transpose")
}

/// An instruction set.
///
/// The implementing types are zero-sized tokens. A value exists only where the processor has the
/// instructions: it is created by [`dispatch`](super::dispatch) after the processor was queried.
/// Kernels use the methods, which take `self` and return [`Lanes`].
///
/// # Safety
/// The functions whose names begin with `v_` are the raw operations on registers. The contract of
/// these functions is that the processor has the instructions of the type, and what the function
/// adds to that. A value of the type proves the first part.
#[allow(clippy::missing_safety_doc)] // see above
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A register of `LANES` floats.
    type Vector: Copy;
    /// A truth value for each lane.
    type Mask: Copy;
    /// Floats in a vector.
    const LANES: usize;

    /// The vector of one value.
    unsafe fn v_splat(x: f32) -> Self::Vector;
    /// `n <= LANES` floats at `ptr`; 0 in the other lanes.
    ///
    /// # Safety
    /// `ptr` is readable for `n` floats. No alignment is needed.
    unsafe fn v_load(ptr: *const f32, n: usize) -> Self::Vector;
    /// Writes the first `n <= LANES` lanes.
    ///
    /// # Safety
    /// `ptr` is writable for `n` floats. No alignment is needed.
    unsafe fn v_store(x: Self::Vector, ptr: *mut f32, n: usize);
    /// `n <= LANES` elements of F16 at `ptr`; 0 in the other lanes.
    ///
    /// # Safety
    /// `ptr` is readable for `n` elements. No alignment is needed.
    unsafe fn v_load_f16(ptr: *const u16, n: usize) -> Self::Vector;
    /// Writes the first `n <= LANES` lanes as F16, rounded to nearest, ties to even.
    ///
    /// # Safety
    /// `ptr` is writable for `n` elements. No alignment is needed.
    unsafe fn v_store_f16(x: Self::Vector, ptr: *mut u16, n: usize);
    /// `n <= LANES` elements of BF16 at `ptr`; 0 in the other lanes.
    ///
    /// # Safety
    /// `ptr` is readable for `n` elements. No alignment is needed.
    unsafe fn v_load_bf16(ptr: *const u16, n: usize) -> Self::Vector;

    unsafe fn v_add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn v_sub(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn v_mul(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn v_div(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, rounded once where there is an instruction for it.
    unsafe fn v_mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// `c - a * b`, rounded once where there is an instruction for it.
    unsafe fn v_neg_mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The smaller; `b` if they are equal or either is NaN.
    unsafe fn v_min(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The larger; `b` if they are equal or either is NaN.
    unsafe fn v_max(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn v_sqrt(a: Self::Vector) -> Self::Vector;
    unsafe fn v_floor(a: Self::Vector) -> Self::Vector;
    unsafe fn v_ceil(a: Self::Vector) -> Self::Vector;
    unsafe fn v_trunc(a: Self::Vector) -> Self::Vector;
    unsafe fn v_round_even(a: Self::Vector) -> Self::Vector;
    /// The magnitude of `a` with the sign of `b`.
    unsafe fn v_copysign(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * 2^n` for a whole `n` from -300 to 300, rounded once.
    unsafe fn v_scale(a: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// For a positive normal number `a = m * 2^e` with `0.75 <= m < 1.5`: `(m, e)`.
    unsafe fn v_split(a: Self::Vector) -> (Self::Vector, Self::Vector);

    /// The sum of the lanes: first those half a vector apart, then a quarter, and so on.
    unsafe fn v_sum(a: Self::Vector) -> f32;

    unsafe fn v_lt(a: Self::Vector, b: Self::Vector) -> Self::Mask;
    unsafe fn v_le(a: Self::Vector, b: Self::Vector) -> Self::Mask;
    /// `a` where `m` is true, `b` elsewhere.
    unsafe fn v_select(m: Self::Mask, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// Transposes `LANES` rows of `LANES` 32-bit words: word `i` of row `r` goes to word `r` of row
    /// `i`. Rows are `src_stride` and `dst_stride` bytes apart.
    ///
    /// # Safety
    /// `src` is readable and `dst` writable for `LANES` rows, and they do not overlap.
    unsafe fn v_transpose(src: *const u8, src_stride: usize, dst: *mut u8, dst_stride: usize);

    /// The vector of one value.
    #[inline(always)]
    fn splat(self, x: f32) -> Lanes<Self> {
        Lanes {
            simd: self,
            v: with_token!(self, Self::v_splat(x)),
        }
    }

    /// The first values of `x`, at most a vector; 0 in the other lanes.
    #[inline(always)]
    fn load(self, x: &[f32]) -> Lanes<Self> {
        // SAFETY: `x` is readable for `x.len()` floats, and `n`, the number of floats that are
        // read, is at most that and at most `LANES`.
        unsafe { self.load_ptr(x.as_ptr(), x.len().min(Self::LANES)) }
    }

    /// `n <= LANES` floats from `ptr`; 0 in the other lanes.
    ///
    /// # Safety
    /// `ptr` is readable for `n <= LANES` floats; no alignment is needed.
    #[inline(always)]
    unsafe fn load_ptr(self, ptr: *const f32, n: usize) -> Lanes<Self> {
        // SAFETY: the caller guarantees `n <= LANES` floats, `4 * n` bytes, at `ptr`. The token
        // `self` exists only where the processor has the instructions.
        let v = unsafe { Self::v_load(ptr, n) };
        Lanes { simd: self, v }
    }

    /// `n <= LANES` F16 from `ptr`; 0 in the other lanes.
    ///
    /// # Safety
    /// `ptr` is readable for `n <= LANES` F16; no alignment is needed.
    #[inline(always)]
    unsafe fn load_f16_ptr(self, ptr: *const u16, n: usize) -> Lanes<Self> {
        // SAFETY: the caller guarantees `n <= LANES` F16, `2 * n` bytes, at `ptr`. The conversion
        // needs the instructions that the token `self` stands for.
        let v = unsafe { Self::v_load_f16(ptr, n) };
        Lanes { simd: self, v }
    }

    /// `n <= LANES` BF16 from `ptr`; 0 in the other lanes.
    ///
    /// # Safety
    /// `ptr` is readable for `n <= LANES` BF16; no alignment is needed.
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, ptr: *const u16, n: usize) -> Lanes<Self> {
        // SAFETY: the caller guarantees `n <= LANES` BF16, `2 * n` bytes, at `ptr`. The token
        // `self` exists only where the processor can widen them to floats.
        let v = unsafe { Self::v_load_bf16(ptr, n) };
        Lanes { simd: self, v }
    }
}

/// A vector of `f32` with the operators and methods of `f32`.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<S: Simd> {
    simd: S,
    v: S::Vector,
}

/// A truth value for each lane.
#[derive(Clone, Copy)]
pub(crate) struct Mask<S: Simd> {
    m: S::Mask,
}

impl<S: Simd> Mask<S> {
    /// `a` in lanes that are true, `b` in the other lanes.
    #[inline(always)]
    pub(crate) fn select(self, a: Lanes<S>, b: Lanes<S>) -> Lanes<S> {
        a.with(with_token!(a.simd, S::v_select(self.m, a.v, b.v)))
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
        // SAFETY: `out` is writable for `out.len()` floats, and the number of floats that are
        // written is at most that and at most `LANES`.
        unsafe { self.store_ptr(out.as_mut_ptr(), out.len().min(S::LANES)) }
    }

    /// Writes the first `n` lanes to `ptr`.
    ///
    /// # Safety
    /// `ptr` is writable for `n <= LANES` floats; no alignment is needed.
    #[inline(always)]
    pub(crate) unsafe fn store_ptr(self, ptr: *mut f32, n: usize) {
        // SAFETY: the caller guarantees that `ptr` is writable for `n <= LANES` floats, `4 * n`
        // bytes. The token in `self` exists only where the processor has the instructions.
        unsafe { S::v_store(self.v, ptr, n) }
    }

    /// Writes the first `n` lanes to `ptr` as F16, rounded to nearest, ties to even.
    ///
    /// # Safety
    /// `ptr` is writable for `n <= LANES` F16; no alignment is needed.
    #[inline(always)]
    pub(crate) unsafe fn store_f16_ptr(self, ptr: *mut u16, n: usize) {
        // SAFETY: the caller guarantees that `ptr` is writable for `n <= LANES` F16, `2 * n` bytes.
        // Rounding to F16 needs the instructions that the token in `self` stands for.
        unsafe { S::v_store_f16(self.v, ptr, n) }
    }

    /// `self * b + c`, rounded once if there is an instruction for it.
    #[inline(always)]
    pub(crate) fn mul_add(self, b: Lanes<S>, c: Lanes<S>) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_mul_add(self.v, b.v, c.v)))
    }

    /// The smaller; `b` if they are equal or either is NaN.
    #[inline(always)]
    pub(crate) fn min(self, b: Lanes<S>) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_min(self.v, b.v)))
    }

    /// The larger; `b` if they are equal or either is NaN.
    #[inline(always)]
    pub(crate) fn max(self, b: Lanes<S>) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_max(self.v, b.v)))
    }

    #[inline(always)]
    pub(crate) fn sqrt(self) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_sqrt(self.v)))
    }

    #[inline(always)]
    pub(crate) fn floor(self) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_floor(self.v)))
    }

    #[inline(always)]
    pub(crate) fn ceil(self) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_ceil(self.v)))
    }

    #[inline(always)]
    pub(crate) fn trunc(self) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_trunc(self.v)))
    }

    /// The nearest whole number, ties to even.
    #[inline(always)]
    pub(crate) fn round_even(self) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_round_even(self.v)))
    }

    /// The nearest whole number, ties away from zero.
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
        self.with(with_token!(self.simd, S::v_copysign(self.v, sign.v)))
    }

    /// `self * 2^n` for a whole `n` from -300 to 300.
    #[inline(always)]
    pub(crate) fn scale(self, n: Lanes<S>) -> Lanes<S> {
        self.with(with_token!(self.simd, S::v_scale(self.v, n.v)))
    }

    /// For positive normal numbers `m * 2^e` with `0.75 <= m < 1.5`: `(m, e)`.
    #[inline(always)]
    pub(crate) fn split(self) -> (Lanes<S>, Lanes<S>) {
        let (m, e) = with_token!(self.simd, S::v_split(self.v));
        (self.with(m), self.with(e))
    }

    #[inline(always)]
    pub(crate) fn lt(self, b: Lanes<S>) -> Mask<S> {
        Mask {
            m: with_token!(self.simd, S::v_lt(self.v, b.v)),
        }
    }

    #[inline(always)]
    pub(crate) fn le(self, b: Lanes<S>) -> Mask<S> {
        Mask {
            m: with_token!(self.simd, S::v_le(self.v, b.v)),
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

    /// The lanes as an array; 0 after the last lane.
    #[inline(always)]
    fn to_array(self) -> [f32; MAX_LANES] {
        let mut lanes = [0.0; MAX_LANES];
        self.store(&mut lanes[..S::LANES]);
        lanes
    }

    /// Applies a function to each lane, one after the other.
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
        with_token!(self.simd, S::v_sum(self.v))
    }

    /// The largest of the first `n` lanes; `-inf` if `n` is 0. NaN is ignored.
    #[inline(always)]
    pub(crate) fn largest(self, n: usize) -> f32 {
        self.to_array()[..n]
            .iter()
            .fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $raw:ident;)*) => {$(
        impl<S: Simd> $trait for Lanes<S> {
            type Output = Lanes<S>;
            #[inline(always)]
            fn $method(self, b: Lanes<S>) -> Lanes<S> {
                self.with(with_token!(self.simd, S::$raw(self.v, b.v)))
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
