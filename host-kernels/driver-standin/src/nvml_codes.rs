//! Result codes of NVML, `nvmlReturn_t` in `nvml.h`.
#![forbid(unsafe_code)]

use std::ffi::{CStr, c_int};

/// How the names of NVML's entry points begin.
pub(crate) const PREFIX: &str = "nvml";

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const UNINITIALIZED: c_int = 1;
pub(crate) const INVALID_ARGUMENT: c_int = 2;
pub(crate) const NOT_FOUND: c_int = 6;
pub(crate) const UNKNOWN: c_int = 999;

/// Codes, their names without `NVML_ERROR_`, and their texts.
const CODES: [(c_int, &str, &CStr); 11] = [
    (UNINITIALIZED, "UNINITIALIZED", c"Uninitialized"),
    (INVALID_ARGUMENT, "INVALID_ARGUMENT", c"Invalid Argument"),
    (3, "NOT_SUPPORTED", c"Not Supported"),
    (4, "NO_PERMISSION", c"Insufficient Permissions"),
    (NOT_FOUND, "NOT_FOUND", c"Not Found"),
    (9, "DRIVER_NOT_LOADED", c"Driver Not Loaded"),
    (10, "TIMEOUT", c"Timeout"),
    (15, "GPU_IS_LOST", c"GPU is lost"),
    (16, "RESET_REQUIRED", c"GPU requires reset"),
    (
        18,
        "LIB_RM_VERSION_MISMATCH",
        c"Driver/library version mismatch",
    ),
    (UNKNOWN, "UNKNOWN", c"Unknown Error"),
];

/// The code with this name.
pub(crate) fn code_named(name: &str) -> Option<c_int> {
    let found = CODES.iter().find(|(_, known, _)| *known == name);
    found.map(|(code, ..)| *code)
}

/// The text of a code.
pub(crate) fn text_of(code: c_int) -> &'static CStr {
    let found = CODES.iter().find(|(known, ..)| *known == code);
    found.map_or(c"Success", |(.., text)| text)
}
