//! What ggml and the backend log.

use std::ffi::{CStr, c_char, c_void};
use std::panic;

use tracing::{debug, error, warn};
use vgpu_ggml_abi as abi;

/// Writes a text of ggml into the log of this process. ggml prints texts of every level otherwise:
/// a line for each weight that it repacks. Its level "info" is for users of a program that computes
/// with ggml, and is "debug" here.
///
/// # Safety
/// `text` must be null or a C string.
pub(crate) unsafe extern "C" fn forward(
    level: abi::ggml_log_level,
    text: *const c_char,
    _: *mut c_void,
) {
    if text.is_null() {
        return;
    }
    // SAFETY: the text is a C string: the contract of this function.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let text = text.trim_end();
    if text.is_empty() {
        return;
    }
    // A panic must not reach the caller, which is C++.
    let _ = panic::catch_unwind(|| match level {
        abi::GGML_LOG_LEVEL_ERROR => error!("ggml: {text}"),
        abi::GGML_LOG_LEVEL_WARN => warn!("ggml: {text}"),
        _ => debug!("ggml: {text}"),
    });
}
