//! The mechanism of the C boundary, which every function that ggml calls uses.
//!
//! Each of those functions has the same three steps: enter the panic boundary ([`guard`]), turn
//! ggml's pointers into references ([`object`]), call safe Rust. A panic never unwinds into ggml.
//! [`guard`] turns it into the value that means failure to ggml.
//!
//! The plugin keeps its own state in the `context` field of ggml's objects. [`into_context`] puts a
//! value there, [`drop_context`] frees it.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// Runs `body`. If `body` panics, logs the panic with the name of the C function and returns
/// `failure`. The thread is not cancelled (`pthread_cancel`) before the end: cancellation would
/// unwind Rust frames and leave locks taken.
pub(crate) fn guard<T>(function: &'static str, failure: T, body: impl FnOnce() -> T) -> T {
    let _cancellation = CancellationOff::new();
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(payload) => {
            let message = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| payload.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            // Logging calls back into the program. `failure` must be returned even if that panics.
            let _ = catch_unwind(AssertUnwindSafe(|| {
                tracing::error!("{function} panicked: {message}. This is a bug in ggml-vgpu");
            }));
            failure
        }
    }
}

/// Keeps this thread from being cancelled until the value is dropped.
struct CancellationOff {
    before: c_int,
}

unsafe extern "C" {
    /// POSIX `pthread_setcancelstate`, which the crate `libc` does not declare for Linux.
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE` of Linux' `pthread.h`.
const PTHREAD_CANCEL_DISABLE: c_int = 1;

impl CancellationOff {
    fn new() -> CancellationOff {
        let mut before = 0;
        // SAFETY: the function writes the state before to `before`, which is valid. The constant is
        // one of the two states, so the call cannot fail.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        CancellationOff { before }
    }
}

impl Drop for CancellationOff {
    fn drop(&mut self) {
        // SAFETY: `before` is a state that the same function has returned. The function is no
        // cancellation point, and it accepts a null pointer for the old state.
        unsafe { pthread_setcancelstate(self.before, ptr::null_mut()) };
    }
}

/// The object behind a pointer from ggml, or `None` if the pointer is null.
///
/// # Safety
///
/// `ptr` must be null, or point to a valid `T` that nobody writes to or frees during `'a`. For an
/// object of the plugin this holds until ggml has called the function that frees the object.
pub(crate) unsafe fn object<'a, T>(ptr: *const T) -> Option<&'a T> {
    // SAFETY: `ptr` is null or valid for `'a`: this function's contract.
    unsafe { ptr.as_ref() }
}

/// Moves `value` to the heap and returns the pointer for the `context` field of one of ggml's
/// objects.
pub(crate) fn into_context<T>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(value)).cast()
}

/// Frees the value behind a `context` field and sets the field to null. Does nothing if the field
/// is null.
///
/// # Safety
///
/// `context` must be null or come from [`into_context`] with the same `T`, and no reference to the
/// value may be used after this call.
pub(crate) unsafe fn drop_context<T>(context: &mut *mut c_void) {
    let value = std::mem::replace(context, ptr::null_mut()).cast::<T>();
    if !value.is_null() {
        // SAFETY: `value` comes from `Box::into_raw` in `into_context`, and the field that held it
        // is null now, so that the box is made once. The caller gives the value up.
        drop(unsafe { Box::from_raw(value) });
    }
}

/// The offsets of each row of a 2D copy: in the tensor, which ggml has checked, and in the
/// program's memory. Both in bytes.
pub(crate) fn rows_2d(
    copies: usize,
    offset: usize,
    stride_tensor: usize,
    stride_data: usize,
) -> impl Iterator<Item = (usize, usize)> {
    (0..copies).map(move |i| {
        let at = offset.wrapping_add(i.wrapping_mul(stride_tensor));
        (at, i.wrapping_mul(stride_data))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn a_panic_becomes_the_failure_value() {
        assert_eq!(guard("test", -1, || 7), 7);
        assert_eq!(guard("test", -1, || panic!("boom")), -1);
    }

    /// Cancellation acts after the call. Without the guard, `pthread_testcancel` would unwind the
    /// frames of this test, which ends the process.
    #[test]
    fn a_thread_is_not_cancelled_inside_a_call() {
        use std::os::unix::thread::JoinHandleExt as _;
        use std::sync::mpsc;

        unsafe extern "C" {
            fn pthread_testcancel();
            fn pthread_cancel(thread: libc::pthread_t) -> c_int;
        }
        let (inside, is_inside) = mpsc::channel();
        let (cancelled, is_cancelled) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let returned = guard("test", -1, || {
                inside.send(()).unwrap();
                is_cancelled.recv().unwrap();
                // SAFETY: cancellation is off, so the function returns.
                unsafe { pthread_testcancel() };
                7
            });
            // The request is pending now. The request must not act in the frames of this test.
            std::mem::forget(CancellationOff::new());
            returned
        });
        is_inside.recv().unwrap();
        // SAFETY: the thread runs until `cancelled` is sent to, so its handle is valid.
        assert_eq!(unsafe { pthread_cancel(thread.as_pthread_t()) }, 0);
        cancelled.send(()).unwrap();
        assert_eq!(thread.join().unwrap(), 7);
    }

    #[test]
    fn a_context_is_freed_once() {
        let value = Rc::new(());
        let mut context = into_context(Rc::clone(&value));
        // SAFETY: the context was just made of an `Rc<()>`.
        unsafe { drop_context::<Rc<()>>(&mut context) };
        assert!(context.is_null());
        assert_eq!(Rc::strong_count(&value), 1);
        // SAFETY: null is allowed.
        unsafe { drop_context::<Rc<()>>(&mut context) };
    }
}
