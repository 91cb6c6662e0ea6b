//! Loading a library, and the functions in it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
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
    /// A library that the backend depends on is neither beside the backend nor where the dynamic
    /// linker looks.
    #[error(
        "{path} needs {library}, which is missing on this machine: {next}",
        path = path.display(),
        next = provider(library)
    )]
    #[allow(missing_docs)]
    Missing { path: PathBuf, library: String },
    /// The file is no backend of ggml, or of a ggml that lacks a function.
    #[error("{path} is not a backend of ggml: no function `{symbol}` in it or what it depends on")]
    #[allow(missing_docs)]
    Symbol { path: PathBuf, symbol: String },
    /// The backend uses another ggml than the one beside it.
    #[error(
        "{path} lies beside {base}, and uses {loaded}: this process has loaded that one before for \
         another backend, or the folder has files of two releases. The backends of one process \
         need the same ggml: name backends of one folder, or start another executor",
        path = path.display(),
        base = base.display(),
        loaded = loaded.display()
    )]
    #[allow(missing_docs)]
    OtherGgml {
        path: PathBuf,
        base: PathBuf,
        loaded: PathBuf,
    },
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
    /// The backend keeps objects of its own with tensors.
    #[error(
        "{path} cannot be used: the backend {name} of ggml keeps objects of its own for tensors. \
         GPUs with Vulkan run with libggml-vulkan.so"
    )]
    #[allow(missing_docs)]
    TensorObjects { path: PathBuf, name: String },
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
            // The linker begins with the path, as the error does.
            let own = format!("{}: ", path.display());
            let reason = match reason.strip_prefix(&own) {
                Some(rest) if path.is_absolute() => rest.to_owned(),
                _ => reason,
            };
            failed(reason)
        })?;
        Ok(Handle {
            raw,
            path: path.to_owned(),
        })
    }

    /// Loads the file at `path`. A library that it depends on, that the dynamic linker does not
    /// find and that lies in one of `folders` is loaded before: programs such as Ollama name these
    /// folders in `LD_LIBRARY_PATH`, which a process cannot change for itself.
    ///
    /// # Errors
    /// [`LibraryError::Missing`] if a library is not found, [`LibraryError::Load`] with the message
    /// of the dynamic linker otherwise.
    pub(crate) fn open_with_dependencies(
        path: &Path,
        folders: &[&Path],
        flags: c_int,
    ) -> Result<Handle, LibraryError> {
        fn open(
            path: &Path,
            folders: &[&Path],
            flags: c_int,
            tried: &mut Vec<PathBuf>,
        ) -> Result<Handle, LibraryError> {
            // Each library is tried once: two that need each other end here.
            tried.push(path.to_owned());
            loop {
                let error = match Handle::open(path, flags) {
                    Ok(handle) => return Ok(handle),
                    Err(error) => error,
                };
                let LibraryError::Load { reason, .. } = &error else {
                    return Err(error);
                };
                // A file without a folder is looked for, too: it is not what it needs.
                let missing = missing_library(reason).filter(|name| Path::new(name) != path);
                let Some(missing) = missing else {
                    return Err(error);
                };
                let mut places = { folders.iter() }
                    .map(|folder| folder.join(missing))
                    .filter(|place| place.exists() && !tried.contains(place));
                let Some(place) = places.next() else {
                    let library = missing.to_owned();
                    let path = path.to_owned();
                    return Err(LibraryError::Missing { path, library });
                };
                open(&place, folders, flags, tried)?;
            }
        }
        open(path, folders, flags, &mut Vec::new())
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

/// The file of the loaded library that has this address, if any has.
pub(crate) fn file_of(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: every field is a pointer that may be null.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `dladdr` looks the address up and does not read it, and `info` is writable. The name
    // of a library that stays loaded stays valid.
    unsafe {
        let is_found = libc::dladdr(address, &raw mut info) != 0 && !info.dli_fname.is_null();
        is_found.then(|| {
            let name = CStr::from_ptr(info.dli_fname).to_bytes();
            PathBuf::from(std::ffi::OsStr::from_bytes(name))
        })
    }
}

/// Whether two paths lead to one file.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    let file = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        Some((found.dev(), found.ino()))
    };
    file(one).is_some() && file(one) == file(other)
}

/// The name of the library that the dynamic linker of the GNU C library does not find, from its
/// message.
fn missing_library(reason: &str) -> Option<&str> {
    let (name, _) =
        reason.split_once(": cannot open shared object file: No such file or directory")?;
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

/// What a person does about a missing library. The names are those that ggml's backends of GPUs are
/// linked with.
fn provider(library: &str) -> &'static str {
    /// The beginnings of names, and who has these libraries.
    const PROVIDERS: [(&[&str], &str); 5] = [
        (&["libcuda.so", "libnvidia-"], "install NVIDIA's driver"),
        (
            &["libcudart.", "libcublas", "libnvrtc", "libnccl"],
            "install NVIDIA's CUDA libraries of the version in the name, or name a backend whose \
             folder has them, such as Ollama's",
        ),
        (
            &["libamdhip", "libhip", "librocblas", "librocm", "libhsa-"],
            "install AMD's ROCm, or name a backend whose folder has its libraries, such as \
             Ollama's",
        ),
        (
            &["libvulkan."],
            "install the Vulkan loader and a Vulkan driver for the GPU (Debian: libvulkan1 and, \
             but for NVIDIA, mesa-vulkan-drivers)",
        ),
        (
            &[
                "libsycl", "libze_", "libmkl_", "libdnnl", "libsvml", "libimf", "libintlc",
                "libur_",
            ],
            "install Intel's oneAPI runtime",
        ),
    ];
    let found =
        { PROVIDERS.iter() }.find(|(names, _)| names.iter().any(|name| library.starts_with(name)));
    found.map_or(
        "install the package that provides the library, or start vgpu serve with the library's \
         folder in LD_LIBRARY_PATH",
        |(_, next)| next,
    )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_libraries_are_read_from_the_message_of_the_linker() {
        let reason = |name: &str| {
            format!("{name}: cannot open shared object file: No such file or directory")
        };
        let missing = reason("libcublas.so.13");
        assert_eq!(missing_library(&missing), Some("libcublas.so.13"));
        // The named file itself.
        assert_eq!(missing_library(&reason("/a/libggml-cuda.so")), None);
        assert_eq!(missing_library("/a/x.so: undefined symbol: y"), None);
        let denied = "libcuda.so.1: cannot open shared object file: Permission denied";
        assert_eq!(missing_library(denied), None);
        // What the linker of this machine says.
        let error = Handle::open("libvgpu-none.so.7".as_ref(), libc::RTLD_NOW).err();
        let Some(LibraryError::Load { reason, .. }) = error else {
            panic!("such a library exists");
        };
        assert_eq!(missing_library(&reason), Some("libvgpu-none.so.7"));
    }

    /// As in Ollama, where the folders of a backend are in no search path.
    #[test]
    fn a_library_is_loaded_with_what_it_needs_from_its_folders() {
        let root = tempfile::tempdir().expect("a new folder");
        let (above, own) = (root.path(), root.path().join("backend"));
        std::fs::create_dir(&own).expect("a folder");
        let compile = |file: &Path, source: &str, needed: &[&Path]| {
            let code = file.with_extension("c");
            std::fs::write(&code, source).expect("a file");
            let mut cc = std::process::Command::new("cc");
            cc.args(["-shared", "-fPIC", "-o"]).arg(file).arg(&code);
            let own = file.file_name().expect("a name").display();
            cc.arg(format!("-Wl,-soname,{own}"));
            for library in needed {
                let folder = library.parent().expect("a folder");
                let name = library.file_name().expect("a name").display();
                cc.arg("-L").arg(folder).arg(format!("-l:{name}"));
            }
            let output = cc.output().expect("a compiler");
            assert!(output.status.success(), "{output:?}");
        };
        let base = above.join("libvgpu-test-base.so");
        let maths = own.join("libvgpu-test-maths.so");
        let backend = own.join("libvgpu-test-backend.so");
        compile(&base, "int base(void) { return 40; }", &[]);
        let source = "int base(void); int maths(void) { return base() + 1; }";
        compile(&maths, source, &[&base]);
        let source = "int base(void); int maths(void); int answer(void) { return maths() + 1; }";
        compile(&backend, source, &[&maths, &base]);
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        let error = Handle::open(&backend, flags).err().expect("no search path");
        let LibraryError::Load { reason, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(missing_library(&reason), Some("libvgpu-test-maths.so"));
        let folders = [own.as_path(), above];
        let handle = Handle::open_with_dependencies(&backend, &folders, flags);
        let handle = handle.expect("all it needs is there");
        // SAFETY: the function has this type.
        let answer = unsafe { handle.function::<extern "C" fn() -> c_int>(c"answer") };
        assert_eq!(answer.expect("a function")(), 42);
        // What is in none of the folders is still missing.
        let other = own.join("libvgpu-test-other.so");
        let absent = own.join("libvgpu-test-absent.so");
        compile(&absent, "int two(void) { return 2; }", &[]);
        let source = "int two(void); int three(void) { return two() + 1; }";
        compile(&other, source, &[&absent]);
        std::fs::remove_file(&absent).expect("a file");
        let error = Handle::open_with_dependencies(&other, &folders, flags).err();
        let text = error.expect("a library is missing").to_string();
        let said = format!(
            "{} needs libvgpu-test-absent.so, which is missing on this machine: install the \
             package that provides the library, or start vgpu serve with the library's folder in \
             LD_LIBRARY_PATH",
            other.display()
        );
        assert_eq!(text, said);
        // The backend itself, and a file that is there and may not be opened.
        let absent = Path::new("libvgpu-none.so.7");
        let error = Handle::open_with_dependencies(absent, &folders, flags).err();
        assert!(
            matches!(error, Some(LibraryError::Load { .. })),
            "{error:?}"
        );
    }

    #[test]
    fn missing_libraries_of_makers_have_a_next_step() {
        for (library, next) in [
            ("libcuda.so.1", "install NVIDIA's driver"),
            ("libcudart.so.13", "install NVIDIA's CUDA libraries"),
            ("libcublasLt.so.12", "install NVIDIA's CUDA libraries"),
            ("libamdhip64.so.7", "install AMD's ROCm"),
            ("libhipblas.so.3", "install AMD's ROCm"),
            ("libvulkan.so.1", "install the Vulkan loader"),
            ("libsycl.so.8", "install Intel's oneAPI"),
            ("libgomp.so.1", "install the package that provides"),
        ] {
            assert!(provider(library).starts_with(next), "{library}");
        }
    }
}
