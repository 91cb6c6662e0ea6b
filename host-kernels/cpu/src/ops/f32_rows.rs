//! Runs of elements, computed with as `f32`: the basis of the element-wise and the row-wise
//! operators.
//!
//! A run consists of elements at equal distances: a row, part of a row, or several adjacent rows.
//! [`Access`] describes how elements are read and written. Dense `f32` is used in place; everything
//! else passes through a buffer of [`STAGE`] floats on the stack.
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

/// Floats brought together at once when they do not lie as dense `f32`.
pub(super) const STAGE: usize = 256;

/// Elements of one piece of work.
const GRAIN: usize = 2048;

/// Elements that are added up in `f32` before the sum goes on in `f64`.
const SUM_BLOCK: usize = 4096;

/// How the elements of a line are read and written.
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

    /// Adjacent `f32`, as they are on the stack.
    pub(super) fn direct() -> Access {
        Access::new(Type::F32, size_of::<f32>())
    }

    /// Whether the line is plain adjacent `f32`.
    pub(super) fn is_direct(&self) -> bool {
        self.ty == Type::F32 && self.step == size_of::<f32>()
    }

    /// Where element `i` of a line from `line` on begins. Of quantised types `i` begins a block.
    pub(super) fn at(&self, line: *const u8, i: usize) -> *const u8 {
        line.wrapping_add(i / self.ty.block_elements() as usize * self.step)
    }

    /// Reads `n` elements.
    ///
    /// # Safety
    /// The line at `line` has `n` elements, a multiple of the type's block, in readable memory; `out`
    /// is writable for `n` floats and no part of a tensor.
    pub(super) unsafe fn load(&self, line: *const u8, n: usize, out: *mut f32) {
        // SAFETY: the caller guarantees `n` elements `step` apart, and as many floats of room.
        unsafe {
            let (step, count) = (self.step, if self.step == 0 { n.min(1) } else { n });
            match (self.ty, self.format) {
                (ty, Some(format)) if step == ty.block_bytes() as usize => {
                    (format.dequantize_row)(line, out, n);
                }
                (Type::F32, _) => gather(line, step, count, out, |x: f32| x),
                (Type::F16, _) => gather(line, step, count, out, f16_to_f32),
                (Type::Bf16, _) => gather(line, step, count, out, bf16_to_f32),
                (Type::I32, _) => gather(line, step, count, out, |x: i32| x as f32),
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
    /// As [`Access::load`], the other way round.
    pub(super) unsafe fn store(&self, x: *const f32, n: usize, line: *mut u8) {
        // SAFETY: the caller guarantees `n` floats, and as many elements of room `step` apart.
        unsafe {
            let step = self.step;
            match (self.ty, self.format) {
                (ty, Some(format)) if step == ty.block_bytes() as usize => {
                    (format.quantize_row)(x, line, n);
                }
                (Type::F32, _) => scatter(x, n, line, step, |x| x),
                (Type::F16, _) => scatter(x, n, line, step, f32_to_f16),
                (Type::Bf16, _) => scatter(x, n, line, step, f32_to_bf16),
                (Type::I32, _) => scatter(x, n, line, step, |x| x as i32),
                (ty, _) => unreachable!("the rules claim no strided {ty:?}"),
            }
        }
    }
}

/// Reads `n` elements `step` bytes apart.
///
/// # Safety
/// They are readable and aligned; `out` is writable for `n` floats.
unsafe fn gather<T>(
    line: *const u8,
    step: usize,
    n: usize,
    out: *mut f32,
    convert: impl Fn(T) -> f32,
) {
    for i in 0..n {
        // SAFETY: the caller guarantees `n` floats.
        unsafe {
            out.add(i)
                .write(convert(line.wrapping_add(i * step).cast::<T>().read()))
        };
    }
}

/// Writes `n` elements `step` bytes apart.
///
/// # Safety
/// They are writable and aligned; `x` is readable for `n` floats.
unsafe fn scatter<T>(
    x: *const f32,
    n: usize,
    line: *mut u8,
    step: usize,
    convert: impl Fn(f32) -> T,
) {
    for i in 0..n {
        // SAFETY: the caller guarantees `n` elements and floats.
        unsafe {
            line.wrapping_add(i * step)
                .cast::<T>()
                .write(convert(x.add(i).read()))
        };
    }
}

/// A function of `N` floats, computed in all lanes at once.
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
            // SAFETY: the contract of `Apply` guarantees `n` floats everywhere.
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

/// Rooms for floats, not cleared: most lines do not need them.
type BarrierSchedule<const N: usize> = [MaybeUninit<[f32; STAGE]>; N];

fn empty_stages<const N: usize>() -> BarrierSchedule<N> {
    [const { MaybeUninit::uninit() }; N]
}

/// Where the elements `start..start + n` of lines are as dense floats: in place, or in the stages.
///
/// # Safety
/// Every line has these elements as [`Access::load`] wants them. Unless all lines are direct, `n` is at
/// most [`STAGE`].
unsafe fn floats<const N: usize>(
    src: [(Access, *const u8); N],
    start: usize,
    n: usize,
    stages: &mut BarrierSchedule<N>,
) -> [*const f32; N] {
    let mut places = [std::ptr::null(); N];
    for ((place, stage), (access, line)) in places.iter_mut().zip(stages).zip(src) {
        let line = access.at(line, start);
        *place = if access.is_direct() {
            line.cast()
        } else {
            // SAFETY: the caller guarantees the line; a stage has room for `n` floats.
            unsafe { access.load(line, n, stage.as_mut_ptr().cast()) };
            stage.as_ptr().cast()
        };
    }
    places
}

/// `dst[i] = f(src[0][i], ...)` on lines of any types.
///
/// # Safety
/// Every line has `n` elements as [`Access::load`] and [`Access::store`] want them, all plain.
pub(super) unsafe fn apply<const N: usize, M: Map<N>>(
    f: M,
    (out, dst): (Access, *mut u8),
    src: [(Access, *const u8); N],
    n: usize,
) {
    if out.is_direct() && src.iter().all(|(access, _)| access.is_direct()) {
        let src = src.map(|(_, ptr)| ptr.cast());
        // SAFETY: the caller guarantees `n` dense floats in every row.
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
        // SAFETY: the caller guarantees the lines; `n` is at most a stage, and the task writes as
        // many results.
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
pub(super) fn map<const N: usize, M: Map<N>>(dst: View, src: [View; N], f: M) -> Compiled {
    let walk = Walk::new(dst, src);
    let line = *walk.line();
    let out = Access::new(dst.ty, line.dst);
    let ins: [Access; N] = std::array::from_fn(|i| Access::new(src[i].ty, line.src[i]));
    Compiled::one(move |w| {
        walk.pieces(w, GRAIN, |dst, src, n| {
            let src = std::array::from_fn(|i| (ins[i], src[i]));
            // SAFETY: the walk stays inside the tensors, which the accesses were made for.
            unsafe { apply(f, (out, dst), src, n) };
        });
        Ok(())
    })
}

/// The sum of `term(src[0][i], ...)` over dense floats. Contract: every pointer has `n` floats.
struct Sum<const N: usize, M> {
    term: M,
    src: [*const f32; N],
    n: usize,
}

/// Independent partial sums, which hide the latency of an addition.
const SUMS: usize = 4;

impl<const N: usize, M: Map<N>> PtrTask for Sum<N, M> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) -> f32 {
        let Sum { term, src, n } = self;
        // SAFETY: the contract of `Sum` guarantees `n` floats everywhere.
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

/// The sum of `term(src[0][i], ...)` over lines of any types.
///
/// # Safety
/// Every line has `n` elements as [`Access::load`] wants them.
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
        // SAFETY: the caller guarantees the lines; a stage is used for parts of its size only.
        let src = unsafe { floats(src, start, n, &mut stages) };
        // SAFETY: `floats` has returned `n` dense floats of every source.
        total += f64::from(unsafe { dispatch_ptr(Sum { term, src, n }) });
    }
    total
}

/// The largest of dense floats. Contract: `src` has `n` floats.
struct Largest {
    src: *const f32,
    n: usize,
}

impl PtrTask for Largest {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) -> f32 {
        let Largest { src, n } = self;
        let mut largest = simd.splat(f32::NEG_INFINITY);
        let whole = n / S::LANES * S::LANES;
        // SAFETY: the contract of `Largest` guarantees `n` floats.
        unsafe {
            chunks::<S>(whole, |i, len| {
                largest = simd.load_ptr(src.add(i), len).max(largest);
            });
            let rest = simd.load_ptr(src.add(whole), n - whole).largest(n - whole);
            largest.largest(S::LANES).max(rest)
        }
    }
}

/// The largest element of a line; `-inf` if there is none. NaN is passed over.
///
/// # Safety
/// The line has `n` elements as [`Access::load`] wants them.
pub(super) unsafe fn largest(line: (Access, *const u8), n: usize) -> f32 {
    let mut stages = empty_stages();
    let mut result = f32::NEG_INFINITY;
    for start in (0..n).step_by(STAGE) {
        let n = STAGE.min(n - start);
        // SAFETY: the caller guarantees the line.
        let [src] = unsafe { floats([line], start, n, &mut stages) };
        // SAFETY: `floats` has returned `n` dense floats.
        result = result.max(unsafe { dispatch_ptr(Largest { src, n }) });
    }
    result
}

maps! {
    /// The value itself, for sums.
    Identity |x| x;
    /// `sum + weight * x`
    Weighted { weight } |x, sum| x.mul_add(x.splat(weight), sum);
}
