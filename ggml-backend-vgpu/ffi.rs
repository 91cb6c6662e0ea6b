//! The mechanism of the C boundary, used by every function that ggml calls.
//!
//! Every such function reads the same: [`guard`], turn the pointers ggml hands over into references
//! ([`object`]), call safe Rust. A panic never crosses into ggml; it becomes the value that means failure there.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body`; if it panics, logs that and returns `failure`.
pub(crate) fn guard<T>(function: &'static str, failure: T, body: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(payload) => {
            let message = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| payload.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            // The logger runs the host's callback; should that fail too, the failure value must still arrive.
            let _ = catch_unwind(AssertUnwindSafe(|| {
                tracing::error!(
                    "internal error in {function}: {message}; this is a bug in the plugin"
                );
            }));
            failure
        }
    }
}

/// The object behind a pointer that ggml hands back to us.
///
/// # Safety
///
/// `ptr` must be null or a pointer that we gave to ggml as the context (or the object) of type `T`, not
/// yet freed, and stay valid for `'a`. ggml keeps each for as long as it may call functions with it.
pub(crate) unsafe fn object<'a, T>(ptr: *const T) -> Option<&'a T> {
    // SAFETY: the caller's promise, word for word.
    unsafe { ptr.as_ref() }
}

/// Where each piece of a 2D copy begins: in its tensor, which ggml has checked, and in the program's memory.
pub(crate) fn pieces(
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
    use super::guard;

    #[test]
    fn a_panic_becomes_the_failure_value() {
        assert_eq!(guard("test", -1, || 7), 7);
        assert_eq!(guard("test", -1, || panic!("boom")), -1);
    }
}
