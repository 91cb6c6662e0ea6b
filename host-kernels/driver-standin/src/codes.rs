//! Result codes of the driver.

pub(crate) use cudarc::driver::sys::CUresult as Code;

/// The outcome of an entry point.
pub(crate) type Answer<T = ()> = Result<T, Code>;

/// Codes, their names without `CUDA_ERROR_`, and their texts, as `cuda.h` and the driver have them.
macro_rules! codes {
    ($($code:ident $name:literal $text:literal,)*) => {
        const CODES: &[(Code, &str, &str)] = &[$((Code::$code, $name, $text),)*];
    };
}

codes! {
    CUDA_SUCCESS "CUDA_SUCCESS\0" "no error\0",
    CUDA_ERROR_INVALID_VALUE "INVALID_VALUE\0" "invalid argument\0",
    CUDA_ERROR_OUT_OF_MEMORY "OUT_OF_MEMORY\0" "out of memory\0",
    CUDA_ERROR_NOT_INITIALIZED "NOT_INITIALIZED\0" "initialization error\0",
    CUDA_ERROR_NO_DEVICE "NO_DEVICE\0" "no CUDA-capable device is detected\0",
    CUDA_ERROR_INVALID_DEVICE "INVALID_DEVICE\0" "invalid device ordinal\0",
    CUDA_ERROR_INVALID_IMAGE "INVALID_IMAGE\0" "device kernel image is invalid\0",
    CUDA_ERROR_INVALID_CONTEXT "INVALID_CONTEXT\0" "invalid device context\0",
    CUDA_ERROR_NO_BINARY_FOR_GPU "NO_BINARY_FOR_GPU\0"
        "no kernel image is available for execution on the device\0",
    CUDA_ERROR_ECC_UNCORRECTABLE "ECC_UNCORRECTABLE\0" "uncorrectable ECC error encountered\0",
    CUDA_ERROR_INVALID_HANDLE "INVALID_HANDLE\0" "invalid resource handle\0",
    CUDA_ERROR_NOT_FOUND "NOT_FOUND\0" "named symbol not found\0",
    CUDA_ERROR_NOT_READY "NOT_READY\0" "device not ready\0",
    CUDA_ERROR_ILLEGAL_ADDRESS "ILLEGAL_ADDRESS\0" "an illegal memory access was encountered\0",
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES "LAUNCH_OUT_OF_RESOURCES\0"
        "too many resources requested for launch\0",
    CUDA_ERROR_LAUNCH_TIMEOUT "LAUNCH_TIMEOUT\0"
        "the launch timed out and was terminated\0",
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE "PRIMARY_CONTEXT_ACTIVE\0"
        "cannot set while device is active in this process\0",
    CUDA_ERROR_CONTEXT_IS_DESTROYED "CONTEXT_IS_DESTROYED\0" "context is destroyed\0",
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED "HOST_MEMORY_ALREADY_REGISTERED\0"
        "part or all of the requested memory range is already mapped\0",
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED "HOST_MEMORY_NOT_REGISTERED\0"
        "pointer does not correspond to a registered memory region\0",
    CUDA_ERROR_MISALIGNED_ADDRESS "MISALIGNED_ADDRESS\0" "misaligned address\0",
    CUDA_ERROR_LAUNCH_FAILED "LAUNCH_FAILED\0" "unspecified launch failure\0",
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE "COOPERATIVE_LAUNCH_TOO_LARGE\0"
        "too many blocks in cooperative launch\0",
    CUDA_ERROR_NOT_PERMITTED "NOT_PERMITTED\0" "operation not permitted\0",
    CUDA_ERROR_NOT_SUPPORTED "NOT_SUPPORTED\0" "operation not supported\0",
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH "SYSTEM_DRIVER_MISMATCH\0"
        "system has unsupported display driver / cuda driver combination\0",
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED "STREAM_CAPTURE_UNSUPPORTED\0"
        "operation not permitted when stream is capturing\0",
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED "STREAM_CAPTURE_INVALIDATED\0"
        "operation failed due to a previous error during capture\0",
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED "STREAM_CAPTURE_UNMATCHED\0"
        "capture was not ended in the same stream as it began\0",
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD "STREAM_CAPTURE_WRONG_THREAD\0"
        "attempt to terminate a thread-local capture sequence from another thread\0",
    CUDA_ERROR_UNKNOWN "UNKNOWN\0" "unknown error\0",
}

/// Codes that the driver answers for every later call in the context, after a kernel or the
/// hardware has failed (`CUresult` in `cuda.h`).
pub(crate) fn is_sticky(code: Code) -> bool {
    matches!(
        code,
        Code::CUDA_ERROR_ECC_UNCORRECTABLE
            | Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_FAILED
    )
}

/// The code with this number.
pub(crate) fn code_of(number: u32) -> Option<Code> {
    let found = CODES.iter().find(|(code, ..)| *code as u32 == number);
    found.map(|(code, ..)| *code)
}

/// The code with this name, with or without `CUDA_ERROR_`, or with this number.
pub(crate) fn code_named(text: &str) -> Option<Code> {
    let name = text.strip_prefix("CUDA_ERROR_").unwrap_or(text);
    if let Ok(number) = name.parse() {
        return code_of(number);
    }
    let found = { CODES.iter() }.find(|(_, known, _)| known.trim_end_matches('\0') == name);
    found.map(|(code, ..)| *code)
}

/// The driver's text for the code with this number, which ends with a zero byte.
pub(crate) fn text_of(number: u32) -> Option<&'static str> {
    let found = CODES.iter().find(|(code, ..)| *code as u32 == number);
    found.map(|(_, _, text)| *text)
}

/// As [`text_of`], the name.
pub(crate) fn name_of(number: u32) -> Option<&'static str> {
    let found = CODES.iter().find(|(code, ..)| *code as u32 == number);
    found.map(|(_, name, _)| *name)
}
