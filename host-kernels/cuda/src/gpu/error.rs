//! Errors of the CUDA driver.

use std::ffi::CStr;
use std::ptr;

use cudarc::driver::sys::{self, CUresult};
use vgpu_engine::EngineError;

use crate::nvrtc::CompileError;

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum GpuError {
    #[error(
        "NVIDIA's driver (libcuda.so.1) is not installed: install the driver for CUDA 12.0 or \
         newer (version 525 or newer), or use the CPU engine (--engine cpu, VGPU_ENGINE=cpu)"
    )]
    NoDriver,
    #[error(
        "NVIDIA's driver supports CUDA {}.{}; 12.0 or newer is needed",
        .version / 1000, .version % 1000 / 10
    )]
    OldDriver { version: i32 },
    #[error("there is no GPU {ordinal}: this machine has {count}")]
    NoDevice { ordinal: u32, count: i32 },
    #[error("{name} has compute capability {major}.{minor}; 8.0 or newer is needed")]
    OldCard {
        name: String,
        major: i32,
        minor: i32,
    },
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Engine(EngineError),
    #[error("{call} failed: {reason}")]
    Driver { call: &'static str, reason: String },
}

/// Result codes that make the context unusable: the driver answers every later call in the context
/// with the same code. The causes are kernels, the hardware and the link to the hardware.
///
/// From the comments of `CUresult` in `cuda.h` (CUDA Driver API, "Data types used by CUDA driver"),
/// as numbers, because newer drivers add codes.
const STICKY: [u32; 13] = [
    214, // ECC_UNCORRECTABLE
    220, // NVLINK_UNCORRECTABLE
    226, // CONTAINED
    700, // ILLEGAL_ADDRESS
    702, // LAUNCH_TIMEOUT
    709, // CONTEXT_IS_DESTROYED
    710, // ASSERT
    714, // HARDWARE_STACK_ERROR
    715, // ILLEGAL_INSTRUCTION
    716, // MISALIGNED_ADDRESS
    717, // INVALID_ADDRESS_SPACE
    718, // INVALID_PC
    719, // LAUNCH_FAILED
];

/// Whether the context is lost after a call has returned `code`.
pub(super) fn is_sticky(code: CUresult) -> bool {
    STICKY.contains(&(code as u32))
}

/// The driver's text for `code`.
pub(super) fn reason(code: CUresult) -> String {
    let mut text = ptr::null();
    // SAFETY: `text` is a valid place for the result. The call needs no context.
    let known = unsafe { sys::cuGetErrorString(code, &mut text) } == CUresult::CUDA_SUCCESS;
    if known && !text.is_null() {
        // SAFETY: the driver has set `text` to a string of its own that ends with a zero byte and
        // lives as long as the library, which is never unloaded.
        let text = unsafe { CStr::from_ptr(text) };
        return text.to_string_lossy().into_owned();
    }
    format!("{code:?}")
}

/// The result of a driver call as an error.
///
/// # Errors
/// [`GpuError::Driver`] if `code` is not `CUDA_SUCCESS`.
pub(super) fn check(call: &'static str, code: CUresult) -> Result<(), GpuError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(GpuError::Driver {
        call,
        reason: reason(code),
    })
}
