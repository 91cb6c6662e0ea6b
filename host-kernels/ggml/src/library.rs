//! A backend of ggml, loaded from its file together with the ggml that it was built with.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

use vgpu_ggml_abi as abi;
use vgpu_ggml_abi::versions::{self, UnsupportedVersion, Version};
use vgpu_ggml_abi::{ApiVersion, Function};

use crate::ids::Ids;

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

/// The functions of ggml that the engine calls. They hide the layout of a buffer type, which
/// depends on the release.
#[derive(Debug)]
pub(crate) struct Functions {
    pub(crate) buft_get_max_size: Function<abi::ggml_backend_buft_get_max_size_fn>,
    pub(crate) buft_alloc_buffer: Function<abi::ggml_backend_buft_alloc_buffer_fn>,
    pub(crate) buffer_free: Function<abi::ggml_backend_buffer_free_fn>,
    pub(crate) backend_free: Function<abi::ggml_backend_free_fn>,
}

/// A loaded backend library. The library is never unloaded: threads of a driver may still run its
/// code.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    release: String,
    version: Version,
    functions: Functions,
    ids: Ids,
    registry: NonNull<abi::ggml_backend_reg>,
}

// SAFETY: the registry object is constant, and any thread may call the functions of ggml that this
// module calls.
unsafe impl Send for Library {}
// SAFETY: as for `Send`.
unsafe impl Sync for Library {}

/// A handle of `dlopen`, which is never closed.
struct Handle(NonNull<c_void>);

impl Handle {
    /// Loads the file at `path`.
    ///
    /// # Errors
    /// [`LibraryError::Load`] with the message of the dynamic linker.
    fn open(path: &Path, flags: c_int) -> Result<Handle, LibraryError> {
        let failed = |reason: String| LibraryError::Load {
            path: path.to_owned(),
            reason,
        };
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| failed("the path has a zero byte".to_owned()))?;
        // SAFETY: `name` is a C string. The constructors of a library that the operator names run
        // with this process's rights: that is what the operator asks for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        NonNull::new(handle).map(Handle).ok_or_else(|| {
            // SAFETY: `dlerror` returns null or a C string that lives until the next call of a
            // `dl` function by this thread.
            let reason = unsafe { text(libc::dlerror()) };
            failed(reason)
        })
    }

    /// The function `name` of the library or of what it depends on.
    ///
    /// # Errors
    /// [`LibraryError::Symbol`] if there is none.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to the function.
    unsafe fn function<F: Copy>(&self, path: &Path, name: &CStr) -> Result<F, LibraryError> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is open, and `name` is a C string.
        let symbol = unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) };
        if symbol.is_null() {
            return Err(LibraryError::Symbol {
                path: path.to_owned(),
                symbol: name.to_string_lossy().into_owned(),
            });
        }
        // SAFETY: the address is not null and is that of the function, whose pointer type is `F`
        // (this function's contract). The sizes are equal (asserted above).
        Ok(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

impl Library {
    /// Loads the backend at `path`. If `libggml-base.so` lies in the same folder, it is loaded
    /// first, so that a backend without a run path finds it.
    ///
    /// # Errors
    /// [`LibraryError`] says why the file cannot be used.
    pub fn load(path: &Path) -> Result<Library, LibraryError> {
        let folder = path.parent().unwrap_or(Path::new("."));
        for name in ["libggml-base.so.0", "libggml-base.so"] {
            let base = folder.join(OsString::from(name));
            if base.exists() {
                Handle::open(&base, libc::RTLD_NOW | libc::RTLD_LOCAL)?;
                break;
            }
        }
        let handle = Handle::open(path, libc::RTLD_NOW | libc::RTLD_LOCAL)?;
        let version: Function<abi::ggml_version_fn>;
        let init: Function<abi::ggml_backend_init_fn>;
        let score: Option<Function<abi::ggml_backend_score_fn>>;
        // SAFETY: the type of each symbol is that of its declaration in vendor/, which tests/abi.rs
        // compares with the declaration in ggml's headers.
        unsafe {
            version = handle.function(path, c"ggml_version")?;
            init = handle.function(path, c"ggml_backend_init")?;
            score = handle.function(path, c"ggml_backend_score").ok();
        }
        // SAFETY: `ggml_version` takes no argument and returns a string literal of a library that
        // stays loaded.
        let release = unsafe { text(version()) };
        let (version, api) =
            versions::api_of(&release).map_err(|reason| LibraryError::Release {
                path: path.to_owned(),
                reason,
            })?;
        // SAFETY: the type of each symbol is that of its declaration in vendor/.
        let functions = unsafe {
            Functions {
                buft_get_max_size: handle.function(path, c"ggml_backend_buft_get_max_size")?,
                buft_alloc_buffer: handle.function(path, c"ggml_backend_buft_alloc_buffer")?,
                buffer_free: handle.function(path, c"ggml_backend_buffer_free")?,
                backend_free: handle.function(path, c"ggml_backend_free")?,
            }
        };
        let namer = Namer {
            handle: &handle,
            path,
        };
        let ids = Ids::of(&namer)?;
        // SAFETY: the function takes no argument.
        if score.is_some_and(|score| unsafe { score() } == 0) {
            let path = path.to_owned();
            return Err(LibraryError::Score { path });
        }
        // SAFETY: the function takes no argument and returns null or the backend's registry object,
        // which is never freed.
        let registry = NonNull::new(unsafe { init() }).ok_or_else(|| LibraryError::Init {
            path: path.to_owned(),
        })?;
        // SAFETY: the first field of a registry object is its version in every release.
        let found = unsafe { (*registry.as_ptr()).api_version };
        let is_newer_build = found == ApiVersion::V3.number() && api == ApiVersion::V2;
        if found != api.number() && !is_newer_build {
            return Err(LibraryError::Api {
                path: path.to_owned(),
                release,
                api: found,
                expected: api.number(),
            });
        }
        Ok(Library {
            path: path.to_owned(),
            release,
            version,
            functions,
            ids,
            registry,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The answer of `ggml_version()`.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The release series of the ggml.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(crate) fn ids(&self) -> &Ids {
        &self.ids
    }

    /// The devices, in the backend's order.
    pub(crate) fn devices(&self) -> Vec<NonNull<abi::ggml_backend_device>> {
        let registry = self.registry.as_ptr();
        // SAFETY: the registry object and its table are constant and never freed. The functions
        // take the object itself, and indices below the count.
        unsafe {
            let iface = &(*registry).iface;
            let count = iface.get_device_count.map_or(0, |count| count(registry));
            (0..count)
                .filter_map(|i| NonNull::new(iface.get_device?(registry, i)))
                .collect()
        }
    }

    /// A function beyond the interface, by its name.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to the function that the backend has under `name`.
    pub(crate) unsafe fn proc_address<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let registry = self.registry.as_ptr();
        // SAFETY: the registry object is constant and never freed, and `name` is a C string.
        let address = unsafe { (*registry).iface.get_proc_address?(registry, name.as_ptr()) };
        // SAFETY: an address that is not null is that of the function, whose pointer type is `F`
        // (this function's contract).
        (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
    }
}

/// Resolves functions of a library that is being loaded.
pub(crate) struct Namer<'a> {
    handle: &'a Handle,
    path: &'a Path,
}

impl Namer<'_> {
    /// The function `name`.
    ///
    /// # Errors
    /// [`LibraryError::Symbol`] if there is none.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to the function.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, LibraryError> {
        // SAFETY: this function's contract.
        unsafe { self.handle.function(self.path, name) }
    }
}

/// A copy of a string of C; empty if the pointer is null.
///
/// # Safety
/// `string` must be null or a C string.
pub(crate) unsafe fn text(string: *const c_char) -> String {
    if ptr::eq(string, ptr::null()) {
        return String::new();
    }
    // SAFETY: a C string, because it is not null: this function's contract.
    unsafe { CStr::from_ptr(string) }
        .to_string_lossy()
        .into_owned()
}
