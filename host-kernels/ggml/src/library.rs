//! A backend of ggml, loaded from its file together with the ggml that it was built with.

use std::ffi::{CStr, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use vgpu_ggml_abi as abi;
use vgpu_ggml_abi::versions::{self, Version};
use vgpu_ggml_abi::{ApiVersion, Function};

use crate::ids::Ids;
use crate::loader::{self, Handle, LibraryError, text};
use crate::log;

/// The functions of ggml that the engine calls. These functions hide the layout of a buffer type,
/// which depends on the release.
#[derive(Debug)]
pub(crate) struct Functions {
    pub(crate) buft_get_max_size: Function<abi::ggml_backend_buft_get_max_size_fn>,
    pub(crate) buft_get_alloc_size: Function<abi::ggml_backend_buft_get_alloc_size_fn>,
    pub(crate) buft_alloc_buffer: Function<abi::ggml_backend_buft_alloc_buffer_fn>,
    pub(crate) buffer_free: Function<abi::ggml_backend_buffer_free_fn>,
    pub(crate) backend_free: Function<abi::ggml_backend_free_fn>,
}

/// Backends that keep an object of their own for each tensor of ggml, which `init_tensor` makes.
/// The engine makes tensors anew for each plan and calls no such function; the backend would read
/// memory through a null pointer. (`ggml-opencl.cpp`: `tensor->extra`.)
const NEED_TENSOR_OBJECTS: [&str; 1] = ["OpenCL"];

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

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that uses the memory of the host.
    IntegratedGpu,
    /// The processor, or an accelerator that works with it.
    Other,
}

/// What a backend says of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// ggml's name, such as `Vulkan0`.
    pub name: String,
    /// The model, for people.
    pub description: String,
    /// What the device is.
    pub kind: DeviceKind,
    pub(crate) is_cpu: bool,
}

impl DeviceInfo {
    /// # Safety
    /// The device object must exist.
    pub(crate) unsafe fn of(device: NonNull<abi::ggml_backend_device>) -> DeviceInfo {
        let raw = device.as_ptr();
        // SAFETY: the object exists (this function's contract). Its functions take the object
        // itself, and return C strings or a number.
        unsafe {
            let iface = &(*raw).iface;
            let kind = iface.get_type.map(|get| get(raw));
            DeviceInfo {
                name: { iface.get_name }.map_or_else(String::new, |get| text(get(raw))),
                description: { iface.get_description }
                    .map_or_else(String::new, |get| text(get(raw))),
                kind: match kind {
                    Some(abi::GGML_BACKEND_DEVICE_TYPE_GPU) => DeviceKind::Gpu,
                    Some(abi::GGML_BACKEND_DEVICE_TYPE_IGPU) => DeviceKind::IntegratedGpu,
                    _ => DeviceKind::Other,
                },
                is_cpu: kind == Some(abi::GGML_BACKEND_DEVICE_TYPE_CPU),
            }
        }
    }
}

impl Library {
    /// Loads the backend at `path`. If `libggml-base.so` lies in the same folder, or in the one
    /// above as in Ollama, it is loaded first, so that a backend without a run path finds it. So is
    /// any other library from these folders that the dynamic linker does not find.
    ///
    /// A process has one ggml: a second backend with another `libggml-base.so` is refused.
    ///
    /// # Errors
    /// [`LibraryError`] says why the file cannot be used.
    pub fn load(path: &Path) -> Result<Library, LibraryError> {
        const FLAGS: c_int = libc::RTLD_NOW | libc::RTLD_LOCAL;
        let folder = path.parent().unwrap_or(Path::new("."));
        let folders: Vec<&Path> = [Some(folder), folder.parent()]
            .into_iter()
            .flatten()
            .collect();
        let mut bases = folders.iter().flat_map(|folder| {
            ["libggml-base.so.0", "libggml-base.so"].map(|name| folder.join(name))
        });
        let base = bases.find(|base| base.exists());
        if let Some(base) = &base {
            Handle::open_with_dependencies(base, &folders, FLAGS)?;
        }
        let handle = Handle::open_with_dependencies(path, &folders, FLAGS)?;
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
        // The dynamic linker takes a library that is loaded for any other of the same name.
        if let (Some(base), Some(loaded)) = (base, loader::file_of(version as *const c_void))
            && !loader::is_same_file(&base, &loaded)
        {
            let path = path.to_owned();
            return Err(LibraryError::OtherGgml { path, base, loaded });
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
                buft_get_alloc_size: handle.function(c"ggml_backend_buft_get_alloc_size")?,
                buft_alloc_buffer: handle.function(c"ggml_backend_buft_alloc_buffer")?,
                buffer_free: handle.function(c"ggml_backend_buffer_free")?,
                backend_free: handle.function(c"ggml_backend_free")?,
            }
        };
        // SAFETY: the type of the symbol is that of its declaration in vendor/. The callback may be
        // called by any thread, as long as the process lives.
        unsafe {
            let log_set: Function<abi::ggml_log_set_fn> = handle.function(c"ggml_log_set")?;
            log_set(Some(log::forward), std::ptr::null_mut());
        }
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
        // SAFETY: the function of a registry object takes the object, and returns a string literal.
        let name = unsafe {
            let get = (*registry.as_ptr()).iface.get_name;
            get.map_or_else(String::new, |get| text(get(registry.as_ptr())))
        };
        if NEED_TENSOR_OBJECTS.contains(&name.as_str()) {
            let path = path.to_owned();
            return Err(LibraryError::TensorObjects { path, name });
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

    /// What the backend says of its devices, in its order.
    pub fn device_infos(&self) -> Vec<DeviceInfo> {
        let devices = self.devices().into_iter();
        // SAFETY: the device objects are constant and never freed.
        devices
            .map(|device| unsafe { DeviceInfo::of(device) })
            .collect()
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
