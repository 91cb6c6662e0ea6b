//! Computations with rows of elements as `f32`: the basis of the element-wise and the row-wise
//! operators.
//!
//! A row here is elements at equal distances: a row of a tensor, part of one, or several adjacent
//! ones. [`Access`] describes how elements are read and written. Dense `f32` is used in place;
//! everything else is converted in a buffer of [`STAGE`] floats on the stack.
//!
//! Source and destination may be the same memory, or overlap in any way in a hostile graph. This
//! module creates no references to tensor memory: elements are loaded through raw pointers before
//! elements at the same address are stored.

use std::mem::MaybeUninit;

use vgpu_transport::ir::Type;

use super::walk::Walk;
use crate::formats::{Format, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::kernel::Compiled;
use crate::simd::{Lanes, PtrTask, Simd, chunks, dispatch_ptr};
use crate::view::View;

/// Elements that are converted at once if they are not dense `f32`.
pub(super) const STAGE: usize = 256;

/// Elements of a unit of work.
const GRAIN: usize = 2048;

/// Elements that are summed in `f32` before the sum is added to an `f64`.
const SUM_BLOCK: usize = 4096;

/// How the elements of a row are read and written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Access {
    ty: Type,
    /// Bytes from one element (of quantised types: block) to the next; 0 repeats one element.
    step: usize,
    format: Option<&'static Format>,
}

impl Access {
    /// Elements `step` bytes apart. Of quantised types the blocks must be adjacent.
    pub(super) fn new(ty: Type, step: usize) -> Access {
        let format = Format::of(ty);
        debug_assert!(
            format.is_some() || ty == Type::I32,
            "the rules claim no other types"
        );
        debug_assert!(!ty.is_quantized() || step == ty.block_bytes() as usize);
        Access { ty, step, format }
    }

    /// The rows of `view`.
    pub(super) fn rows(view: &View) -> Access {
        let dense = view.ty.block_bytes() as usize;
        Access::new(view.ty, if view.dense_rows() { dense } else { view.nb[0] })
    }

    /// Adjacent `f32`, for example a buffer on the stack.
    pub(super) fn direct() -> Access {
        Access::new(Type::F32, size_of::<f32>())
    }

    /// Whether the elements are adjacent `f32`.
    pub(super) fn is_direct(&self) -> bool {
        self.ty == Type::F32 && self.step == size_of::<f32>()
    }

    /// The address of element `i` of a row. For quantised types `i` is the first element of a
    /// block.
    pub(super) fn at(&self, row: *const u8, i: usize) -> *const u8 {
        row.wrapping_add(i / self.ty.block_elements() as usize * self.step)
    }

    /// Reads `n` elements.
    ///
    /// # Safety
    /// `row` is readable for `n` elements of this access; `n` is a multiple of the block of the
    /// type. `out` is writable for `n` floats and does not overlap the row.
    pub(super) unsafe fn load(&self, row: *const u8, n: usize, out: *mut f32) {
        // SAFETY: the caller guarantees `n` elements `step` bytes apart at `row` and `n` floats at
        // `out`. If `step` is 0, `count <= 1` element is read, and `out` has `n` copies of it.
        unsafe {
            let (step, count) = (self.step, if self.step == 0 { n.min(1) } else { n });
            match (self.ty, self.format) {
                (ty, Some(format)) if step == ty.block_bytes() as usize => {
                    (format.dequantize_row)(row, out, n);
                }
                (Type::F32, _) => gather(row, step, count, out, |x: f32| x),
                (Type::F16, _) => gather(row, step, count, out, f16_to_f32),
                (Type::Bf16, _) => gather(row, step, count, out, bf16_to_f32),
                (Type::I32, _) => gather(row, step, count, out, |x: i32| x as f32),
                (ty, _) => unreachable!("the rules claim no strided {ty:?}"),
            }
            if step == 0 {
                for i in 1..n {
                    out.add(i).write(out.read());
                }
            }
        }
    }

    /// Writes `n` elements, rounded to the type.
    ///
    /// # Safety
    /// `row` is writable for `n` elements of this access; `n` is a multiple of the block of the
    /// type. `x` is readable for `n` floats and does not overlap the row.
    pub(super) unsafe fn store(&self, x: *const f32, n: usize, row: *mut u8) {
        // SAFETY: the caller guarantees `n` floats at `x`, and `n` writable elements `step` bytes
        // apart at `row`.
        unsafe {
            let step = self.step;
            match (self.ty, self.format) {
                (ty, Some(format)) if step == ty.block_bytes() as usize => {
                    (format.quantize_row)(x, row, n);
                }
                (Type::F32, _) => scatter(x, n, row, step, |x| x),
                (Type::F16, _) => scatter(x, n, row, step, f32_to_f16),
                (Type::Bf16, _) => scatter(x, n, row, step, f32_to_bf16),
                (Type::I32, _) => scatter(x, n, row, step, |x| x as i32),
                (ty, _) => unreachable!("the rules claim no strided {ty:?}"),
            }
        }
    }
}

/// Reads `n` elements `step` bytes apart.
///
/// # Safety
/// The elements are readable and aligned. `out` is writable for `n` floats.
unsafe fn gather<T>(
    row: *const u8,
    step: usize,
    n: usize,
    out: *mut f32,
    convert: impl Fn(T) -> f32,
) {
    for i in 0..n {
        // SAFETY: `i < n`: the caller guarantees the element and the float.
        unsafe {
            out.add(i)
                .write(convert(row.wrapping_add(i * step).cast::<T>().read()))
        };
    }
}

/// Writes `n` elements `step` bytes apart.
///
/// # Safety
/// The elements are writable and aligned. `x` is readable for `n` floats.
unsafe fn scatter<T>(
    x: *const f32,
    n: usize,
    row: *mut u8,
    step: usize,
    convert: impl Fn(f32) -> T,
) {
    for i in 0..n {
        // SAFETY: `i < n`: the caller guarantees the element and the float.
        unsafe {
            row.wrapping_add(i * step)
                .cast::<T>()
                .write(convert(x.add(i).read()))
        };
    }
}

/// A function of `N` floats, computed for all lanes of a vector.
pub(super) trait Map<const N: usize>: Copy + Send + Sync + 'static {
    /// The function. Implementations are `#[inline(always)]`.
    fn map<S: Simd>(self, x: [Lanes<S>; N]) -> Lanes<S>;
}

/// Declares functions of lanes: `Name { parameters } |arguments| value;`
macro_rules! maps {
    ($($(#[$doc:meta])* $name:ident $({ $($field:ident),* })? |$($x:ident),*| $value:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name { $($(pub(super) $field: f32),*)? }

        impl Map<{ [$(stringify!($x)),*].len() }> for $name {
            #[inline(always)]
            fn map<S: Simd>(self, x: [Lanes<S>; [$(stringify!($x)),*].len()]) -> Lanes<S> {
                $(let $name { $($field),* } = self;)?
                let [$($x),*] = x;
                $value
            }
        }
    )*};
}
pub(super) use maps;

/// `dst[i] = f(src[0][i], ...)` on dense floats. Contract: every pointer has `n` floats.
struct Apply<const N: usize, M> {
    f: M,
    dst: *mut f32,
    src: [*const f32; N],
    n: usize,
}

impl<const N: usize, M: Map<N>> PtrTask for Apply<N, M> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Apply { f, dst, src, n } = self;
        chunks::<S>(n, |i, len| {
            // SAFETY: the contract of `Apply` guarantees `n` floats at each source and at `dst`,
            // and `i + len <= n`.
            unsafe {
                let mut x = [simd.splat(0.0); N];
                for (x, s) in x.iter_mut().zip(src) {
                    *x = simd.load_ptr(s.add(i), len);
                }
                f.map(x).store_ptr(dst.add(i), len);
            }
        });
    }
}

/// Buffers for converted elements, not initialised, since most rows do not need the buffers.
type Stages<const N: usize> = [MaybeUninit<[f32; STAGE]>; N];

fn empty_stages<const N: usize>() -> Stages<N> {
    [const { MaybeUninit::uninit() }; N]
}

/// Pointers to the elements `start..start + n` of rows as dense floats: in place, or in the
/// stages.
///
/// # Safety
/// [`Access::load`] may read these elements of every row. Unless all rows are direct, `n` is at
/// most [`STAGE`].
unsafe fn floats<const N: usize>(
    src: [(Access, *const u8); N],
    start: usize,
    n: usize,
    stages: &mut Stages<N>,
) -> [*const f32; N] {
    let mut floats = [std::ptr::null(); N];
    for ((ptr, stage), (access, row)) in floats.iter_mut().zip(stages).zip(src) {
        let row = access.at(row, start);
        *ptr = if access.is_direct() {
            row.cast()
        } else {
            // SAFETY: the caller guarantees `n` elements of the row from `start` on. The row is
            // not direct, so `n <= STAGE`, the floats of a stage.
            unsafe { access.load(row, n, stage.as_mut_ptr().cast()) };
            stage.as_ptr().cast()
        };
    }
    floats
}

/// `dst[i] = f(src[0][i], ...)` on rows of any types.
///
/// # Safety
/// [`Access::load`] may read `n` elements of every source, and [`Access::store`] may write `n`
/// elements of the destination. All types are plain.
pub(super) unsafe fn apply<const N: usize, M: Map<N>>(
    f: M,
    (out, dst): (Access, *mut u8),
    src: [(Access, *const u8); N],
    n: usize,
) {
    if out.is_direct() && src.iter().all(|(access, _)| access.is_direct()) {
        let src = src.map(|(_, ptr)| ptr.cast());
        // SAFETY: all accesses are direct, so the caller guarantees `n` dense floats at every
        // pointer.
        unsafe {
            dispatch_ptr(Apply {
                f,
                dst: dst.cast(),
                src,
                n,
            })
        };
        return;
    }
    let mut stages = empty_stages();
    let [result] = &mut empty_stages::<1>();
    let result = result.as_mut_ptr().cast::<f32>();
    for start in (0..n).step_by(STAGE) {
        let n = STAGE.min(n - start);
        // SAFETY: the caller guarantees the elements `start .. start + n` of the rows. `n <=
        // STAGE`, so the sources fit the stages and the results fit `result`.
        unsafe {
            let src = floats(src, start, n, &mut stages);
            dispatch_ptr(Apply {
                f,
                dst: result,
                src,
                n,
            });
            out.store(result, n, out.at(dst, start).cast_mut());
        }
    }
}

/// The element-wise operator `dst = f(src[0], ...)`, in which smaller sources repeat.
///
/// # Panics
/// If a tensor is quantised.
pub(super) fn map<const N: usize, M: Map<N>>(dst: View, src: [View; N], f: M) -> Compiled {
    let is_plain = |view: &View| !view.ty.is_quantized();
    assert!(is_plain(&dst) && src.iter().all(is_plain));
    let walk = Walk::new(dst, src);
    let inner = *walk.inner();
    let out = Access::new(dst.ty, inner.dst);
    let ins: [Access; N] = std::array::from_fn(|i| Access::new(src[i].ty, inner.src[i]));
    Compiled::one(move |w| {
        walk.strips(w, GRAIN, |dst, src, n| {
            let src = std::array::from_fn(|i| (ins[i], src[i]));
            // SAFETY: the walk returns `n` elements of each tensor, with the strides of its
            // innermost loop, which are the steps of the accesses.
            unsafe { apply(f, (out, dst), src, n) };
        });
        Ok(())
    })
}

/// The sum of `term(src[0][i], ...)` over dense floats. Contract: every pointer has `n` floats.
struct SumTerms<const N: usize, M> {
    term: M,
    src: [*const f32; N],
    n: usize,
}

/// Independent sums, which hide the latency of an addition.
const SUMS: usize = 4;

impl<const N: usize, M: Map<N>> PtrTask for SumTerms<N, M> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) -> f32 {
        let SumTerms { term, src, n } = self;
        // SAFETY: the contract of `SumTerms` guarantees `n` floats at each source. The closure is
        // called with `i + len <= n`.
        let load = |i: usize, len: usize| unsafe {
            let mut x = [simd.splat(0.0); N];
            for (x, s) in x.iter_mut().zip(src) {
                *x = simd.load_ptr(s.add(i), len);
            }
            x
        };
        let mut sums = [simd.splat(0.0); SUMS];
        let mut i = 0;
        while i + SUMS * S::LANES <= n {
            for sum in &mut sums {
                *sum = *sum + term.map(load(i, S::LANES));
                i += S::LANES;
            }
        }
        while i < n {
            let len = S::LANES.min(n - i);
            sums[0] = sums[0] + term.map(load(i, len)).first(len);
            i += len;
        }
        ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum()
    }
}

/// The sum of `term(src[0][i], ...)` over rows of any types.
///
/// # Safety
/// [`Access::load`] may read `n` elements of every row.
pub(super) unsafe fn sum<const N: usize, M: Map<N>>(
    term: M,
    src: [(Access, *const u8); N],
    n: usize,
) -> f64 {
    let part = if src.iter().all(|(access, _)| access.is_direct()) {
        SUM_BLOCK
    } else {
        STAGE
    };
    let mut stages = empty_stages();
    let mut total = 0.0;
    for start in (0..n).step_by(part) {
        let n = part.min(n - start);
        // SAFETY: the caller guarantees the elements `start .. start + n` of the rows. If a row
        // is not direct, `n <= part = STAGE`.
        let src = unsafe { floats(src, start, n, &mut stages) };
        // SAFETY: `floats` has returned `n` dense floats of every source.
        total += f64::from(unsafe { dispatch_ptr(SumTerms { term, src, n }) });
    }
    total
}

/// The largest of `n` dense floats. Contract: `src` is readable for `n` floats.
struct FindLargest {
    src: *const f32,
    n: usize,
}

impl PtrTask for FindLargest {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) -> f32 {
        let FindLargest { src, n } = self;
        let mut largest = simd.splat(f32::NEG_INFINITY);
        let whole = n / S::LANES * S::LANES;
        // SAFETY: the contract of `FindLargest` guarantees `n` floats; `i + len <= whole <= n`, and
        // `n - whole < LANES` floats are left.
        unsafe {
            chunks::<S>(whole, |i, len| {
                largest = simd.load_ptr(src.add(i), len).max(largest);
            });
            let rest = simd.load_ptr(src.add(whole), n - whole).largest(n - whole);
            largest.largest(S::LANES).max(rest)
        }
    }
}

/// The largest element of a row; `-inf` if there is none. NaN is ignored.
///
/// # Safety
/// [`Access::load`] may read `n` elements of the row.
pub(super) unsafe fn largest(row: (Access, *const u8), n: usize) -> f32 {
    let mut stages = empty_stages();
    let mut result = f32::NEG_INFINITY;
    for start in (0..n).step_by(STAGE) {
        let n = STAGE.min(n - start);
        // SAFETY: the caller guarantees the elements `start .. start + n` of the row; `n <=
        // STAGE`.
        let [src] = unsafe { floats([row], start, n, &mut stages) };
        // SAFETY: `floats` has returned `n` dense floats.
        result = result.max(unsafe { dispatch_ptr(FindLargest { src, n }) });
    }
    result
}

maps! {
    /// The value itself, for sums.
    Identity |x| x;
    /// `sum + weight * x`
    Weighted { weight } |x, sum| x.mul_add(x.splat(weight), sum);
}
