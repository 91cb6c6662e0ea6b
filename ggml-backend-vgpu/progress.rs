//! How far the loading of a model has come, in the log.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Buffers from this size on may hold a model.
const MODEL_SCALE: u64 = 64 << 20;

/// How often to speak.
const PERIOD: Duration = Duration::from_secs(1);

/// Uploads into one buffer.
#[derive(Debug)]
pub(crate) struct Progress {
    device: String,
    size: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    done: u64,
    /// The beginning, and when it was last spoken of.
    times: Option<(Instant, Instant)>,
    is_over: bool,
}

impl Progress {
    /// For a buffer of `size` bytes, if it is worth speaking of.
    pub(crate) fn of(device: &str, size: u64) -> Option<Progress> {
        (size >= MODEL_SCALE).then(|| Progress {
            device: device.to_owned(),
            size,
            state: Mutex::default(),
        })
    }

    /// So many bytes more are on their way.
    pub(crate) fn advance(&self, bytes: u64) {
        if let Some(line) = self.line(bytes, Instant::now()) {
            tracing::info!("{line}");
        }
    }

    fn line(&self, bytes: u64, now: Instant) -> Option<String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.done += bytes;
        let (began, said) = *state.times.get_or_insert((now, now));
        // Between tensors there are gaps: the last hundredth may never come.
        let is_whole = state.done + self.size / 100 >= self.size;
        if state.is_over || !is_whole && now - said < PERIOD {
            return None;
        }
        state.is_over = is_whole;
        state.times = Some((began, now));
        let (done, size) = (state.done >> 20, self.size >> 20);
        let seconds = (now - began).as_secs_f64();
        let rate = state.done as f64 / seconds.max(1e-3) / 1e6;
        let device = &self.device;
        Some(match is_whole {
            true => format!("{device}: {done} MiB loaded in {seconds:.2} s ({rate:.0} MB/s)"),
            false => format!("{device}: {done} of {size} MiB loaded ({rate:.0} MB/s)"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_speaks_every_second_and_at_the_end() {
        assert!(Progress::of("VGPU0", 1 << 20).is_none());
        let progress = Progress::of("VGPU0", 200 << 20).unwrap();
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
        // The state of a sequence that is written later is no model.
        assert_eq!(progress.line(48 << 20, after(9000)), None);
    }
}
