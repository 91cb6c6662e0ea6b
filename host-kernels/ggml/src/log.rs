//! What ggml and the backend log.

use std::ffi::{CStr, c_char, c_void};
use std::panic;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::{debug, error, warn};
use vgpu_ggml_abi as abi;
use vgpu_transport::lock::try_lock;

/// The most errors and warnings of ggml that the log has in a [`PERIOD`]: graphs of guests can make
/// a backend write a line for each node.
const MOST: u32 = 50;

/// The period of [`MOST`].
const PERIOD: Duration = Duration::from_secs(10);

/// Counts lines.
struct LineLimit {
    /// When the present period has begun.
    began: Option<Instant>,
    /// Lines of the period.
    lines: u32,
    /// Further ones, which were dropped.
    dropped: u64,
}

static LIMIT: Mutex<LineLimit> = Mutex::new(LineLimit::NEW);

impl LineLimit {
    const NEW: LineLimit = LineLimit {
        began: None,
        lines: 0,
        dropped: 0,
    };

    /// Whether there is room for a line. With how many were dropped in the period before.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let lasts = |began| now.saturating_duration_since(began) < PERIOD;
        if !self.began.is_some_and(lasts) {
            let dropped = self.dropped;
            *self = LineLimit {
                began: Some(now),
                lines: 1,
                dropped: 0,
            };
            return Some(dropped);
        }
        if self.lines == MOST {
            self.dropped += 1;
            return None;
        }
        self.lines += 1;
        Some(0)
    }
}

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
        if !matches!(level, abi::GGML_LOG_LEVEL_ERROR | abi::GGML_LOG_LEVEL_WARN) {
            debug!("ggml: {text}");
            return;
        }
        // A line that comes while another thread counts one is not counted.
        let admitted = try_lock(&LIMIT).map_or(Some(0), |mut limit| limit.admit(Instant::now()));
        let Some(dropped) = admitted else { return };
        if dropped > 0 {
            warn!("ggml: {dropped} lines were dropped before");
        }
        match level {
            abi::GGML_LOG_LEVEL_ERROR => error!("ggml: {text}"),
            _ => warn!("ggml: {text}"),
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_dropped_and_counted() {
        let mut limit = LineLimit::NEW;
        let start = Instant::now();
        for _ in 0..MOST {
            assert_eq!(limit.admit(start), Some(0));
        }
        let just_before = start + PERIOD - Duration::from_millis(1);
        for now in [start, just_before, just_before] {
            assert_eq!(limit.admit(now), None);
        }
        assert_eq!(limit.admit(start + PERIOD), Some(3));
        assert_eq!(limit.admit(start + PERIOD), Some(0));
    }
}
