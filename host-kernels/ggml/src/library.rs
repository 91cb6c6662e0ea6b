//! A backend of ggml, loaded from its file together with the ggml that it was built with.

use std::ffi::{CStr, OsString, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use vgpu_ggml_abi as abi;
use vgpu_ggml_abi::versions::{self, Version};
use vgpu_ggml_abi::{ApiVersion, Function};

use crate::ids::Ids;
use crate::loader::{Handle, LibraryError, text};

/// The functions of ggml that the engine calls. These functions hide the layout of a buffer type,
/// which depends on the release.
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
// SAFETY: the registry object is constant: no method changes it through `&self`.
unsafe impl Sync for Library {}

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
            version = handle.function(c"ggml_version")?;
            init = handle.function(c"ggml_backend_init")?;
            score = handle.function(c"ggml_backend_score").ok();
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
                buft_get_max_size: handle.function(c"ggml_backend_buft_get_max_size")?,
                buft_alloc_buffer: handle.function(c"ggml_backend_buft_alloc_buffer")?,
                buffer_free: handle.function(c"ggml_backend_buffer_free")?,
                backend_free: handle.function(c"ggml_backend_free")?,
            }
        };
        let ids = Ids::of(&handle)?;
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
