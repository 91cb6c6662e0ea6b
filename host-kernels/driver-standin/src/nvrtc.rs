//! The entry points of NVRTC that the engine uses.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, Mutex, MutexGuard};

use crate::argument::{In, Out, Text};
use crate::code::Module;
use crate::context::new_handle;
use crate::faults::Fault;
use crate::lock::lock;
use crate::settings::settings;

const SUCCESS: c_int = 0;
const INVALID_INPUT: c_int = 3;
const INVALID_PROGRAM: c_int = 4;
const COMPILATION: c_int = 6;
const INTERNAL_ERROR: c_int = 11;

/// Of no NVRTC: its code is kept under names of its own.
const VERSION: (c_int, c_int) = (0, 1);

/// A program, and what it was compiled to.
struct Program {
    source: String,
    code: Option<String>,
    log: String,
}

fn programs() -> MutexGuard<'static, HashMap<u64, Program>> {
    static PROGRAMS: LazyLock<Mutex<HashMap<u64, Program>>> = LazyLock::new(Mutex::default);
    lock(&PROGRAMS)
}

/// Runs the body of an entry point.
fn answer(name: &str, body: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match settings().faults.of_call(name) {
        Some(Fault::Code(code)) => return code as c_int,
        // For entry points of NVML only.
        Some(Fault::Nvml(_)) => return INTERNAL_ERROR,
        Some(Fault::Nothing) => return SUCCESS,
        Some(Fault::Abort) => std::process::abort(),
        Some(Fault::Hang) => loop {
            std::thread::park();
        },
        None => {}
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => INTERNAL_ERROR,
    }
}

fn invalid<E>(_: E) -> c_int {
    INVALID_INPUT
}

/// The text of a program with the size that the caller has asked for before.
fn text_of(program: u64, which: impl FnOnce(&Program) -> Option<&String>) -> Result<String, c_int> {
    let programs = programs();
    let program = programs.get(&program).ok_or(INVALID_PROGRAM)?;
    which(program).cloned().ok_or(INVALID_PROGRAM)
}

/// Writes a text with its zero byte.
fn write(text: &str, to: &Out<c_char>) -> Result<(), c_int> {
    if to.as_ptr().is_null() {
        return Err(INVALID_INPUT);
    }
    // SAFETY: the caller of the entry point guarantees as many bytes as the function that tells the
    // size has said, which are those of the text and its zero byte.
    unsafe {
        let to = to.as_ptr().cast::<u8>();
        to.copy_from_nonoverlapping(text.as_ptr(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// The version.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcVersion(major: Out<c_int>, minor: Out<c_int>) -> c_int {
    answer("nvrtcVersion", || {
        major.put(VERSION.0).map_err(invalid)?;
        minor.put(VERSION.1).map_err(invalid)
    })
}

/// Creates a program.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcCreateProgram(
    program: Out<u64>,
    source: Text,
    _name: Text,
    _headers: c_int,
    _header_texts: In<*const c_char>,
    _header_names: In<*const c_char>,
) -> c_int {
    answer("nvrtcCreateProgram", || {
        let source = source.get().map_err(invalid)?.to_owned();
        let handle = new_handle();
        program.put(handle).map_err(invalid)?;
        let new = Program {
            source,
            code: None,
            log: String::new(),
        };
        programs().insert(handle, new);
        Ok(())
    })
}

/// Compiles a program: finds the kernels in it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcCompileProgram(
    program: u64,
    count: c_int,
    options: In<Text>,
) -> c_int {
    answer("nvrtcCompileProgram", || {
        let mut architecture = None;
        for index in 0..usize::try_from(count).map_err(invalid)? {
            let option = options.at(index).map_err(invalid)?;
            let option = option.get().map_err(invalid)?;
            if let Some(wanted) = option.strip_prefix("--gpu-architecture=") {
                architecture = Some(wanted.to_owned());
            }
        }
        let architecture = settings().code.clone().or(architecture);
        let architecture = architecture.ok_or(INVALID_INPUT)?;
        let mut programs = programs();
        let program = programs.get_mut(&program).ok_or(INVALID_PROGRAM)?;
        let module = Module::of_source(&program.source, &architecture);
        if module.kernels.is_empty() {
            program.log = "there is no kernel in the source".into();
            return Err(COMPILATION);
        }
        program.code = Some(module.to_text());
        Ok(())
    })
}

/// The size of the log, with its zero byte.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetProgramLogSize(program: u64, size: Out<usize>) -> c_int {
    answer("nvrtcGetProgramLogSize", || {
        let log = text_of(program, |program| Some(&program.log))?;
        size.put(log.len() + 1).map_err(invalid)
    })
}

/// The log.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetProgramLog(program: u64, to: Out<c_char>) -> c_int {
    answer("nvrtcGetProgramLog", || {
        write(&text_of(program, |program| Some(&program.log))?, &to)
    })
}

/// The size of the code, with its zero byte.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetCUBINSize(program: u64, size: Out<usize>) -> c_int {
    answer("nvrtcGetCUBINSize", || {
        let code = text_of(program, |program| program.code.as_ref())?;
        size.put(code.len() + 1).map_err(invalid)
    })
}

/// The code.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetCUBIN(program: u64, to: Out<c_char>) -> c_int {
    answer("nvrtcGetCUBIN", || {
        write(&text_of(program, |program| program.code.as_ref())?, &to)
    })
}

/// Destroys a program.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcDestroyProgram(program: Out<u64>) -> c_int {
    answer("nvrtcDestroyProgram", || {
        if program.as_ptr().is_null() {
            return Err(INVALID_INPUT);
        }
        // SAFETY: the caller gives the place of a handle that `nvrtcCreateProgram` has written.
        let handle = unsafe { program.as_ptr().read() };
        programs()
            .remove(&handle)
            .map(|_| ())
            .ok_or(INVALID_PROGRAM)?;
        program.put(0).map_err(invalid)
    })
}
