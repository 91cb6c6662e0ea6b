//! Variables of a changed backend of ggml (`changed_backend.rs`).
#![allow(dead_code)] // each test binary uses a part of this module

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// What the backend at `path` has counted so far in its variable `name`, an array of `int` or one
/// `int`. `None` if nothing has loaded the backend yet.
pub(crate) fn counters<const N: usize>(path: &Path, name: &CStr) -> Option<[i32; N]> {
    let path = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    // SAFETY: the library is loaded and never unloaded. The variable is one of the backend
    // with so many elements, which changes only while the backend computes, and the test computes
    // nothing now.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            return None;
        }
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        Some(*found.cast::<[i32; N]>())
    }
}

/// Sets the variable `name`, an `int`, of the backend at `path`, which is loaded.
pub(crate) fn set(path: &Path, name: &CStr, value: i32) {
    let path = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    // SAFETY: the library is loaded and never unloaded. The variable is one `int` of the backend,
    // which the test does not call meanwhile.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        assert!(!library.is_null(), "the backend is loaded");
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        *found.cast::<i32>() = value;
    }
}
