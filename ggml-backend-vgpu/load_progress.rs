//! Log lines about the progress of loading a model: at level `info`, one when the model is loaded,
//! at level `debug`, one in every second until then. Other large writes have lines at `debug` only.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Buffers of at least so many bytes may hold a model.
const MIN_MODEL_BYTES: u64 = 64 << 20;

/// The time between two log lines.
const PERIOD: Duration = Duration::from_secs(1);

/// The progress of writing into one buffer, from the first write until the buffer is full. A model
/// has one buffer on a device.
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

    /// Counts `bytes` more bytes as written, and logs the progress. `is_model`: the program uses
    /// the buffer for weights.
    pub(crate) fn advance(&self, bytes: u64, is_model: bool) {
        match self.line(bytes, is_model, Instant::now()) {
            Some((true, line)) => tracing::info!("{line}"),
            Some((false, line)) => tracing::debug!("{line}"),
            None => (),
        }
    }

    /// A log line, and whether everybody should read it.
    fn line(&self, bytes: u64, is_model: bool, now: Instant) -> Option<(bool, String)> {
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
        let what = if is_model { "model" } else { "buffer" };
        Some(match is_complete {
            true => (
                is_model,
                format!("{device}: {what} of {done} MiB loaded in {seconds:.2} s ({rate:.0} MB/s)"),
            ),
            false => (
                false,
                format!("{device}: {done} of {size} MiB of a {what} loaded ({rate:.0} MB/s)"),
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_that_a_model_is_loaded() {
        assert!(LoadProgress::new("VGPU0", 1 << 20).is_none());
        for is_model in [true, false] {
            let progress = LoadProgress::new("VGPU0", 200 << 20).unwrap();
            let start = Instant::now();
            let line = |mib: u64, ms| {
                progress.line(mib << 20, is_model, start + Duration::from_millis(ms))
            };
            assert_eq!(line(50, 0), None);
            assert_eq!(line(10, 900), None);
            let (is_for_all, text) = line(40, 2000).unwrap();
            assert!(!is_for_all, "{text}");
            let what = if is_model { "model" } else { "buffer" };
            assert_eq!(
                text,
                format!("VGPU0: 100 of 200 MiB of a {what} loaded (52 MB/s)")
            );
            assert_eq!(line(50, 2500), None);
            let (is_for_all, text) = line(48, 2600).unwrap();
            assert_eq!(is_for_all, is_model, "{text}");
            assert_eq!(
                text,
                format!("VGPU0: {what} of 198 MiB loaded in 2.60 s (80 MB/s)")
            );
            // Writes after the end are not part of the loading.
            assert_eq!(line(48, 9000), None);
        }
    }
}
