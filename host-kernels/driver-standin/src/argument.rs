//! Pointers that a caller of the C interface gives.

use std::ffi::{CStr, c_char, c_void};

use crate::codes::{Answer, Code};

/// A place for a result, or null. Only callers of the C interface make one: they guarantee that it
/// is null, or valid for writes of a `T`, as `cuda.h` asks.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the result.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn put(&self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller of the entry point guarantees the place; it is not null.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Writes the result, if the caller wants it.
    pub(crate) fn put_if_wanted(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the caller of the entry point guarantees the place; it is not null.
            unsafe { self.0.write(value) };
        }
    }

    /// The address.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0
    }
}

/// Values that the caller gives, or null. Only callers of the C interface make one: they guarantee
/// that it is null, or points to as many `T` as the entry point's other arguments say.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The first value.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn get(&self) -> Answer<T> {
        self.at(0)
    }

    /// The value at an index below the count that the caller has given.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn at(&self, index: usize) -> Answer<T> {
        if self.0.is_null() {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller of the entry point guarantees the values; the pointer is not null.
        Ok(unsafe { self.0.add(index).read() })
    }

    /// The address.
    pub(crate) fn as_ptr(&self) -> *const T {
        self.0
    }
}

/// A text that ends with a zero byte, or null. As for [`In`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// The text.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null, and for what is no UTF-8.
    pub(crate) fn get(&self) -> Answer<&str> {
        if self.0.is_null() {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller of the entry point guarantees a text that ends with a zero byte and
        // lives until the entry point returns, as `self` does.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Code::CUDA_ERROR_INVALID_VALUE)
    }
}

/// Machine code: a file image, or null. As for [`In`].
#[repr(transparent)]
pub(crate) struct Image(*const c_void);

impl Image {
    /// The image, of which only texts are known.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null, `INVALID_IMAGE` for what is no text.
    pub(crate) fn text(&self) -> Answer<&str> {
        let text = Text(self.0.cast());
        if self.0.is_null() {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: an image has a byte at least: the caller of the entry point guarantees it.
        if unsafe { self.0.cast::<u8>().read() } != crate::code::MAGIC.as_bytes()[0] {
            return Err(Code::CUDA_ERROR_INVALID_IMAGE);
        }
        // SAFETY: a file that begins so is a text that ends with a zero byte, which lives as long
        // as `self`.
        let text = unsafe { CStr::from_ptr(text.0) };
        text.to_str().map_err(|_| Code::CUDA_ERROR_INVALID_IMAGE)
    }
}
