//! A stand-in for NVIDIA's driver (`libcuda.so.1`), for NVRTC (`libnvrtc.so.13`) and for NVML
//! (`libnvidia-ml.so.1`), for tests.
//!
//! The CUDA engine loads it as it loads the real libraries. The stand-in keeps the rules of the
//! driver API, with the limits of real GPUs, and runs the kernels on the CPU through the shim.
//! docs/driver-standin.md says how to use it, and what it takes for granted.
//!
//! - `cards`, `settings`, `faults`: the GPUs, the environment, the faults that it asks for.
//! - `queue`: the work of a context, in order, on a thread of its own.
//! - `memory`: allocations, address ranges, page-locked host memory.
//! - `code`, `function`: modules, functions and their limits, launches.
//! - `context`, `graph`: contexts and what belongs to them.
//! - `driver`, `nvrtc`, `nvml`: the entry points; `nvml_codes`: the result codes of NVML.
#![allow(non_snake_case)] // the names of the entry points are NVIDIA's

mod argument;
mod cards;
mod code;
mod codes;
mod context;
mod driver;
mod faults;
mod function;
mod graph;
mod lock;
mod memory;
mod nvml;
mod nvml_codes;
mod nvrtc;
mod queue;
mod settings;

use std::ffi::{CString, c_char, c_int};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use driver::entries;

/// The names under which a program loads the three libraries.
const NAMES: [&str; 3] = ["libcuda.so.1", "libnvrtc.so.13", "libnvidia-ml.so.1"];

/// A folder that has the library under the names of the real ones. A program that starts with the
/// folder in `LD_LIBRARY_PATH` loads it.
///
/// # Errors
/// If cargo has not built the library beside this program.
pub fn folder() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let built = program.parent().unwrap_or(Path::new("."));
    // Cargo builds the library into the folder of the test programs.
    let library = built.join("libvgpu_driver_standin.so").canonicalize()?;
    let folder = built.join("driver-standin");
    std::fs::create_dir_all(&folder)?;
    for name in NAMES {
        match std::os::unix::fs::symlink(&library, folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(folder)
}

/// Sets the faults of the driver of this process, in place of those before, and counts calls anew.
///
/// # Panics
/// If the stand-in is not the driver of this process, or the text is no list of faults.
pub fn set_faults(faults: &str) {
    let text = CString::new(faults).expect("no zero byte");
    // SAFETY: loads the library again, which has no initialiser, and is never unloaded.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "there is no driver");
    // SAFETY: the library is loaded; the name ends with a zero byte.
    let found = unsafe { libc::dlsym(library, c"vgpuStandinSetFaults".as_ptr()) };
    assert!(!found.is_null(), "the driver is a real one");
    // SAFETY: the stand-in has a function of this type under this name.
    let set: extern "C" fn(*const c_char) -> c_int = unsafe { std::mem::transmute(found) };
    assert_eq!(set(text.as_ptr()), 0, "{faults}");
}

/// Set in the processes of [`in_process`].
const IS_CHILD: &str = "VGPU_STANDIN_TEST";

/// Runs the body of the test called `test` in a process of its own, in which the stand-in is the
/// driver, with these settings. Returns what the process has written to standard error.
///
/// # Panics
/// If the body does, or if the process ends otherwise.
pub fn in_process(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) -> String {
    if std::env::var_os(IS_CHILD).is_some() {
        body();
        return String::new();
    }
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env("LD_LIBRARY_PATH", folder().expect("the library"))
        .env(IS_CHILD, "1")
        .envs(settings.iter().copied());
    let output = command.output().expect("this program starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let (ended, out) = (output.status, String::from_utf8_lossy(&output.stdout));
    assert!(
        ended.success(),
        "{test}, {settings:?}: {ended}\n{out}\n{said}"
    );
    assert!(out.contains("1 passed"), "{test} did not run:\n{out}");
    said
}
