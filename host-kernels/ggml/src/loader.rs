//! Loading a library, and the functions in it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use vgpu_ggml_abi::versions::UnsupportedVersion;

/// Why a backend cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The dynamic linker refuses the file.
    #[error("{path}: {reason}")]
    #[allow(missing_docs)] // the message names every field
    Load { path: PathBuf, reason: String },
    /// The file is no backend of ggml, or of a ggml that lacks a function.
    #[error("{path} is not a backend of ggml: no function `{symbol}` in it or what it depends on")]
    #[allow(missing_docs)]
    Symbol { path: PathBuf, symbol: String },
    /// The release of ggml is not supported.
    #[error("{path}: {reason}")]
    #[allow(missing_docs)]
    Release {
        path: PathBuf,
        reason: UnsupportedVersion,
    },
    /// The backend says that it cannot work on this machine.
    #[error("{path} does not support this machine: ggml_backend_score() is 0")]
    #[allow(missing_docs)]
    Score { path: PathBuf },
    /// The backend does not start: it has no driver, for example.
    #[error("{path} does not start: ggml_backend_init() returns null. A driver may be missing")]
    #[allow(missing_docs)]
    Init { path: PathBuf },
    /// The backend was built for another interface than the release of its ggml has.
    #[error("{path} has API version {api}, but ggml {release} has {expected}")]
    #[allow(missing_docs)]
    Api {
        path: PathBuf,
        release: String,
        api: c_int,
        expected: c_int,
    },
    /// The backend has no device.
    #[error("{path} has no device. A GPU or its driver may be missing")]
    #[allow(missing_docs)]
    NoDevice { path: PathBuf },
    /// No device has the wanted name.
    #[error("{path} has no device `{wanted}`: it has {known}", known = .known.join(", "))]
    #[allow(missing_docs)]
    UnknownDevice {
        path: PathBuf,
        wanted: String,
        known: Vec<String>,
    },
    /// The device does not make a backend.
    #[error("the device {device} of {path} does not start")]
    #[allow(missing_docs)]
    Device { path: PathBuf, device: String },
}

/// A handle of `dlopen`, which is never closed.
pub(crate) struct Handle {
    raw: NonNull<c_void>,
    path: PathBuf,
}

impl Handle {
    /// Loads the file at `path`.
    ///
    /// # Errors
    /// [`LibraryError::Load`] with the message of the dynamic linker.
    pub(crate) fn open(path: &Path, flags: c_int) -> Result<Handle, LibraryError> {
        let failed = |reason: String| LibraryError::Load {
            path: path.to_owned(),
            reason,
        };
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| failed("the path has a zero byte".to_owned()))?;
        // SAFETY: `name` is a C string. The constructors of a library that the operator names run
        // with this process's rights: that is what the operator asks for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        let raw = NonNull::new(handle).ok_or_else(|| {
            // SAFETY: `dlerror` returns null or a C string that lives until the next call of a
            // `dl` function by this thread.
            let reason = unsafe { text(libc::dlerror()) };
            failed(reason)
        })?;
        Ok(Handle {
            raw,
            path: path.to_owned(),
        })
    }

    /// The function `name` of the library or of what it depends on.
    ///
    /// # Errors
    /// [`LibraryError::Symbol`] if there is none.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to the function.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, LibraryError> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is open, and `name` is a C string.
        let symbol = unsafe { libc::dlsym(self.raw.as_ptr(), name.as_ptr()) };
        if symbol.is_null() {
            return Err(LibraryError::Symbol {
                path: self.path.clone(),
                symbol: name.to_string_lossy().into_owned(),
            });
        }
        // SAFETY: the address is not null and is that of the function, whose pointer type is `F`
        // (this function's contract). The sizes are equal (asserted above).
        Ok(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

/// A copy of a string of C; empty if the pointer is null.
///
/// # Safety
/// `string` must be null or a C string.
pub(crate) unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: a C string, because it is not null: this function's contract.
    unsafe { CStr::from_ptr(string) }
        .to_string_lossy()
        .into_owned()
}
