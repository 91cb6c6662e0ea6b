//! Log lines about the progress of loading a model.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Buffers of at least so many bytes may hold a model.
const MIN_MODEL_BYTES: u64 = 64 << 20;

/// The time between two log lines.
const PERIOD: Duration = Duration::from_secs(1);

/// The progress of writing into one buffer, from the first write until the buffer is full.
#[derive(Debug)]
pub(crate) struct LoadProgress {
    device: String,
    /// Bytes of the buffer.
    size: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes written.
    done: u64,
    /// The time of the first write, and of the last log line.
    times: Option<(Instant, Instant)>,
    is_complete: bool,
}

impl LoadProgress {
    /// For a buffer of `size` bytes; `None` if the buffer is too small to hold a model.
    pub(crate) fn new(device: &str, size: u64) -> Option<LoadProgress> {
        (size >= MIN_MODEL_BYTES).then(|| LoadProgress {
            device: device.to_owned(),
            size,
            state: Mutex::default(),
        })
    }

    /// Counts `bytes` more bytes as written, and logs the progress once a second and at the end.
    pub(crate) fn advance(&self, bytes: u64) {
        if let Some(line) = self.line(bytes, Instant::now()) {
            tracing::info!("{line}");
        }
    }

    fn line(&self, bytes: u64, now: Instant) -> Option<String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.done += bytes;
        let (began, logged) = *state.times.get_or_insert((now, now));
        // Padding between tensors is never written: 99 % counts as complete.
        let is_complete = state.done + self.size / 100 >= self.size;
        if state.is_complete || !is_complete && now - logged < PERIOD {
            return None;
        }
        state.is_complete = is_complete;
        state.times = Some((began, now));
        let (done, size) = (state.done >> 20, self.size >> 20);
        let seconds = (now - began).as_secs_f64();
        let rate = state.done as f64 / seconds.max(1e-3) / 1e6;
        let device = &self.device;
        Some(match is_complete {
            true => format!("{device}: {done} MiB loaded in {seconds:.2} s ({rate:.0} MB/s)"),
            false => format!("{device}: {done} of {size} MiB loaded ({rate:.0} MB/s)"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_logged_once_a_second_and_at_the_end() {
        assert!(LoadProgress::new("VGPU0", 1 << 20).is_none());
        let progress = LoadProgress::new("VGPU0", 200 << 20).unwrap();
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        assert_eq!(progress.line(50 << 20, after(0)), None);
        assert_eq!(progress.line(10 << 20, after(900)), None);
        assert_eq!(
            progress.line(40 << 20, after(2000)).unwrap(),
            "VGPU0: 100 of 200 MiB loaded (52 MB/s)"
        );
        assert_eq!(progress.line(50 << 20, after(2500)), None);
        assert_eq!(
            progress.line(48 << 20, after(2600)).unwrap(),
            "VGPU0: 198 MiB loaded in 2.60 s (80 MB/s)"
        );
        // Writes after the end are not part of the loading.
        assert_eq!(progress.line(48 << 20, after(9000)), None);
    }
}
