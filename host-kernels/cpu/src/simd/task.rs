//! Kernels that are generic over the instruction set.

use super::vector::Simd;

/// A kernel, generic over the instruction set, whose arguments are references or values.
pub(crate) trait Task {
    /// The result.
    type Output;

    /// Runs the kernel. Implementations are `#[inline(always)]`, so that they are compiled with the
    /// instructions of `S`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// A kernel, generic over the instruction set, whose arguments contain pointers.
///
/// Each implementing type documents the memory that its pointers refer to.
pub(crate) trait PtrTask {
    /// The result.
    type Output;

    /// Runs the kernel. Implementations are `#[inline(always)]`, as for [`Task::run`].
    ///
    /// # Safety
    /// The memory is as the type documents.
    unsafe fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// A [`PtrTask`] whose contract the creator of the value has fulfilled.
pub(super) struct Checked<T>(T);

impl<T: PtrTask> Checked<T> {
    /// # Safety
    /// The contract of [`PtrTask::run`], until the task has run.
    pub(super) unsafe fn new(task: T) -> Checked<T> {
        Checked(task)
    }
}

impl<T: PtrTask> Task for Checked<T> {
    type Output = T::Output;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> T::Output {
        // SAFETY: the creator of this value with `Checked::new` guarantees the memory of the task
        // until the task has run, which is now.
        unsafe { self.0.run(simd) }
    }
}
