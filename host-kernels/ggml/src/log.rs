//! What ggml and the backend log.

use std::ffi::{CStr, c_char, c_void};
use std::panic;
use std::time::Instant;

use tracing::{debug, error, warn};
use vgpu_engine::log_limit::LogLimit;
use vgpu_ggml_abi as abi;

/// Errors of ggml that the log has in 10 s, and as many warnings: graphs of guests can make a
/// backend write a line for each node.
const MAX_LINES: u64 = 50;

static ERRORS: LogLimit = LogLimit::new(MAX_LINES);
static WARNINGS: LogLimit = LogLimit::new(MAX_LINES);

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
    let _ = panic::catch_unwind(|| {
        let limit = match level {
            abi::GGML_LOG_LEVEL_ERROR => &ERRORS,
            abi::GGML_LOG_LEVEL_WARN => &WARNINGS,
            _ => {
                debug!("ggml: {text}");
                return;
            }
        };
        let Some(suppressed) = limit.allow(Instant::now()) else {
            return;
        };
        if suppressed > 0 {
            warn!("ggml: {suppressed} lines were left out before");
        }
        match level {
            abi::GGML_LOG_LEVEL_ERROR => error!("ggml: {text}"),
            _ => warn!("ggml: {text}"),
        }
    });
}
