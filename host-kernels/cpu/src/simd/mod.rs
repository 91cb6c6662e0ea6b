//! Vectors of `f32` for every instruction set, behind one type, so that a kernel is written once.
//!
//! A kernel is a [`Task`], or a [`PtrTask`] if its arguments contain pointers: a value with the
//! arguments and one `#[inline(always)]` method, generic over the instruction set. [`dispatch`]
//! compiles it once per instruction set and calls the best one:
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
//! [`Lanes`] has the operators and the methods of `f32`; the module `math` adds `exp` and related
//! functions. Each is the IEEE 754 operation per lane, except that [`Lanes::mul_add`] rounds twice
//! where there is no fused instruction.
//!
//! Two traits of the matrix products extend [`Simd`] on the x86 types: `IntSimd`
//! (`gemm::x86::int_simd`) adds integers, and `BlockSimd` (`gemm::x86::block_simd`) unpacks blocks.
//! [`Simd`] has neither, because `Scalar` and the kernels of the operators need only `f32`.
//! `IntSimd` does not unpack blocks, because the block formats (`gemm::x86::blocks`) are written
//! with `IntSimd`: the two modules would import each other.

mod scalar;
mod task;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use task::{PtrTask, Task};
pub(crate) use vector::{Lanes, Simd};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx2Vnni, Avx512, Ymm, register_fns};

use crate::isa::Level;
use scalar::Scalar;
use task::Checked;
use vector::MAX_LANES;

/// Runs a kernel with the best instructions of this machine.
#[inline]
pub(crate) fn dispatch<T: Task>(task: T) -> T::Output {
    // SAFETY: `Level::best` returns a supported level.
    unsafe { run_at(Level::best(), task) }
}

/// Runs a kernel with pointer arguments with the best instructions of this machine.
///
/// # Safety
/// The memory is as the type of `task` documents ([`PtrTask::run`]).
#[inline]
pub(crate) unsafe fn dispatch_ptr<T: PtrTask>(task: T) -> T::Output {
    // SAFETY: `Checked` requires the memory of `task` until the task has run. The caller guarantees
    // it during this call, and `dispatch` runs the task before it returns.
    dispatch(unsafe { Checked::new(task) })
}

/// Runs a kernel with the instructions of a level.
///
/// # Panics
/// If `level` is not supported.
#[cfg(test)]
pub(crate) fn dispatch_at<T: Task>(level: Level, task: T) -> T::Output {
    level.expect_supported();
    // SAFETY: the line above: the processor supports `level`.
    unsafe { run_at(level, task) }
}

/// [`dispatch_at`] for a kernel with pointer arguments.
///
/// # Safety
/// As [`dispatch_ptr`].
#[cfg(test)]
pub(crate) unsafe fn dispatch_ptr_at<T: PtrTask>(level: Level, task: T) -> T::Output {
    // SAFETY: the caller guarantees the memory of `task` during this call. `dispatch_at` runs the
    // task before it returns, or panics and never runs it.
    dispatch_at(level, unsafe { Checked::new(task) })
}

/// # Safety
/// The processor supports `level`.
#[inline]
unsafe fn run_at<T: Task>(level: Level, task: T) -> T::Output {
    match level {
        Level::Scalar => task.run(Scalar(())),
        // SAFETY: `x86::avx2` requires AVX2, FMA and F16C, which both levels include. The caller
        // guarantees that the processor supports `level`.
        #[cfg(all(target_arch = "x86_64", any(feature = "avx2", feature = "avx-vnni")))]
        Level::Avx2 | Level::Avx2Vnni => unsafe { x86::avx2(task) },
        // SAFETY: `x86::avx512` requires the instructions of `Level::Avx512`, which these levels
        // include. The caller guarantees that the processor supports `level`.
        #[cfg(all(target_arch = "x86_64", feature = "avx512"))]
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe { x86::avx512(task) },
        // A level that is not compiled in is not supported.
        #[allow(unreachable_patterns)]
        _ => task.run(Scalar(())),
    }
}

/// Transposes a matrix of floats: rows of `src` become columns of `dst`. Strides are in floats.
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
    /// # Panics
    /// Unless `rows` and `columns` are multiples of 16, the lanes of the widest vector.
    ///
    /// # Safety
    /// `src` is readable for `rows` rows of `columns` floats, `dst` writable for `columns` rows of
    /// `rows` floats, and they do not overlap.
    pub(crate) unsafe fn run(self) {
        assert!(self.rows.is_multiple_of(MAX_LANES) && self.columns.is_multiple_of(MAX_LANES));
        // SAFETY: the contract of the task is that of this function: the caller guarantees `rows`
        // rows of `columns` floats at `src` and `columns` rows of `rows` floats at `dst`, without
        // overlap.
        unsafe { dispatch_ptr(self) }
    }
}

impl PtrTask for Transpose {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, _: S) {
        const BYTES: usize = size_of::<f32>();
        for row in (0..self.rows).step_by(S::LANES) {
            for column in (0..self.columns).step_by(S::LANES) {
                // SAFETY: `Transpose::run` has checked that `LANES` divides `rows` and `columns`,
                // so the square of `LANES` rows and columns from (`row`, `column`) on is inside
                // both matrices, whose memory the caller guarantees. The token exists only where
                // the processor has the instructions of `S`.
                unsafe {
                    let src = self.src.add(row * self.src_stride + column).cast();
                    let dst = self.dst.add(column * self.dst_stride + row).cast();
                    S::v_transpose(src, self.src_stride * BYTES, dst, self.dst_stride * BYTES);
                }
            }
        }
    }
}

/// Calls `body(start, len)` for each vector of `n` floats. The last vector may be shorter than the
/// others.
#[inline(always)]
pub(crate) fn chunks<S: Simd>(n: usize, mut body: impl FnMut(usize, usize)) {
    let mut start = 0;
    while start < n {
        // The only call: a closure with two call sites may not be inlined, and would then be
        // compiled without the instructions of `S`.
        body(start, S::LANES.min(n - start));
        start += S::LANES;
    }
}
