//! NVRTC, NVIDIA's run-time compiler, loaded when it is first needed.
//!
//! cudarc loads the NVRTC of one CUDA version and returns PTX only. This module loads any version
//! and returns machine code.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

use crate::source::{HEADERS, OPTIONS, Source};

/// The names of the library, the newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Why a kernel was not compiled.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum CompileError {
    #[error("NVRTC is not there: {reason}")]
    NoCompiler { reason: String },
    #[error("{file}.cu does not compile for {arch}: {log}")]
    Rejected {
        file: &'static str,
        arch: String,
        log: String,
    },
    #[error("NVRTC failed in {call} (error {code})")]
    Failed { call: &'static str, code: c_int },
}

/// Machine code, and the log of the compiler.
#[derive(Debug)]
pub struct Compiled {
    /// The machine code.
    pub cubin: Vec<u8>,
    /// Warnings, and the report of ptxas: registers, shared memory and spills.
    pub log: String,
}

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;

/// The compiler. The function pointers are valid while the library is loaded, which this object
/// ensures.
pub struct Nvrtc {
    create: Create,
    compile: Compile,
    log_size: Size,
    log: Text,
    cubin_size: Size,
    cubin: Text,
    destroy: Destroy,
    version: (c_int, c_int),
    _library: Library,
}

impl Nvrtc {
    /// Loads the library from a folder, or by the search path of the system.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] if there is no library, or it lacks a function.
    pub fn load(folder: Option<&Path>) -> Result<Nvrtc, CompileError> {
        if let Some(folder) = folder {
            builtins(folder);
        }
        let mut reason = String::new();
        for name in NAMES {
            let path = folder.map_or_else(|| name.into(), |folder| folder.join(name));
            // SAFETY: loading a library runs its initialisers; NVRTC's only set up its own state.
            match unsafe { Library::new(&path) } {
                // SAFETY: the library was found by one of the `NAMES`, which are those of NVRTC.
                Ok(library) => return unsafe { Nvrtc::of(library) },
                Err(error) if reason.is_empty() => reason = error.to_string(),
                Err(_) => {}
            }
        }
        Err(CompileError::NoCompiler { reason })
    }

    /// The compiler in `library`.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] if the library lacks a function, [`CompileError::Failed`] if it
    /// does not tell its version.
    ///
    /// # Safety
    /// The library is NVRTC.
    unsafe fn of(library: Library) -> Result<Nvrtc, CompileError> {
        let missing = |error: libloading::Error| CompileError::NoCompiler {
            reason: error.to_string(),
        };
        // SAFETY: the functions have these types in nvrtc.h since CUDA 11, and the caller
        // guarantees that `library` is NVRTC. Each pointer is used while `_library` is loaded.
        unsafe {
            let mut version = (0, 0);
            let get_version: Version = *library.get(b"nvrtcVersion\0").map_err(missing)?;
            check("nvrtcVersion", get_version(&mut version.0, &mut version.1))?;
            Ok(Nvrtc {
                create: *library.get(b"nvrtcCreateProgram\0").map_err(missing)?,
                compile: *library.get(b"nvrtcCompileProgram\0").map_err(missing)?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0").map_err(missing)?,
                log: *library.get(b"nvrtcGetProgramLog\0").map_err(missing)?,
                cubin_size: *library.get(b"nvrtcGetCUBINSize\0").map_err(missing)?,
                cubin: *library.get(b"nvrtcGetCUBIN\0").map_err(missing)?,
                destroy: *library.get(b"nvrtcDestroyProgram\0").map_err(missing)?,
                version,
                _library: library,
            })
        }
    }

    /// The major and the minor version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles a source file to machine code for `arch`, such as `sm_90a`.
    ///
    /// # Errors
    /// [`CompileError::Rejected`] with the log if the source does not compile,
    /// [`CompileError::Failed`] if NVRTC itself fails.
    pub fn compile(&self, source: &Source, arch: &str) -> Result<Compiled, CompileError> {
        let text = |text: &str| CString::new(text).expect("our texts have no zero bytes");
        let arch_option = format!("--gpu-architecture={arch}");
        let options = std::iter::once(arch_option.as_str()).chain(OPTIONS);
        let options: Vec<CString> = options.map(text).collect();
        let names: Vec<CString> = HEADERS.iter().map(|(name, _)| text(name)).collect();
        let texts: Vec<CString> = HEADERS.iter().map(|(_, header)| text(header)).collect();
        let pointers = |all: &[CString]| all.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (options, names, texts) = (
            (pointers(&options), &options),
            (pointers(&names), &names),
            (pointers(&texts), &texts),
        );
        let mut program = Open {
            nvrtc: self,
            program: std::ptr::null_mut(),
        };
        // SAFETY: all strings end with a zero byte and live until the end of this function; the
        // counts are the lengths of the lists. `program.program` is set by the first call before
        // the second uses it.
        let outcome = unsafe {
            check(
                "nvrtcCreateProgram",
                (self.create)(
                    &mut program.program,
                    text(source.text).as_ptr(),
                    text(&format!("{}.cu", source.name)).as_ptr(),
                    HEADERS.len() as c_int,
                    texts.0.as_ptr(),
                    names.0.as_ptr(),
                ),
            )?;
            (self.compile)(
                program.program,
                options.0.len() as c_int,
                options.0.as_ptr(),
            )
        };
        let log = program.read("nvrtcGetProgramLog", self.log_size, self.log)?;
        let log = CStr::from_bytes_until_nul(&log)
            .map(|log| log.to_string_lossy().into_owned())
            .unwrap_or_default();
        if outcome != 0 {
            return Err(CompileError::Rejected {
                file: source.name,
                arch: arch.into(),
                log,
            });
        }
        let cubin = program.read("nvrtcGetCUBIN", self.cubin_size, self.cubin)?;
        Ok(Compiled { cubin, log })
    }
}

/// A program object of NVRTC, destroyed when dropped.
struct Open<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Open<'_> {
    /// Reads a result by a pair of functions: its size, then its bytes.
    ///
    /// # Errors
    /// [`CompileError::Failed`] with the name `call` if one of the functions fails.
    fn read(&self, call: &'static str, size: Size, text: Text) -> Result<Vec<u8>, CompileError> {
        let mut bytes = 0;
        // SAFETY: the program exists; the second function writes exactly as many bytes as the first
        // has reported.
        unsafe {
            check(call, size(self.program, &mut bytes))?;
            let mut out = vec![0u8; bytes];
            check(call, text(self.program, out.as_mut_ptr().cast()))?;
            Ok(out)
        }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: `nvrtcCreateProgram` has created the program, and nothing uses it from now
            // on.
            unsafe { (self.nvrtc.destroy)(&mut self.program) };
        }
    }
}

/// Loads the library `libnvrtc-builtins` of a folder. NVRTC loads it by name when it compiles, and
/// finds it only if it is loaded already. The library is never unloaded.
fn builtins(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("libnvrtc-builtins.so") {
            // SAFETY: loading a library runs its initialisers; this one only has data and functions
            // for NVRTC.
            if let Ok(library) = unsafe { Library::new(entry.path()) } {
                std::mem::forget(library);
            }
        }
    }
}

/// The outcome of `call`, which has returned `code`.
///
/// # Errors
/// [`CompileError::Failed`] if the code is not 0.
fn check(call: &'static str, code: c_int) -> Result<(), CompileError> {
    if code == 0 {
        Ok(())
    } else {
        Err(CompileError::Failed { call, code })
    }
}
