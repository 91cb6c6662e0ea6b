//! Log lines about the progress of loading a model: at level `info`, one for the model, at level
//! `debug`, one in every second until then. Other large writes have lines at `debug` only.
//!
//! A model can have several buffers, and nothing in ggml's interface says which belong together.
//! [`LoadLog`] therefore collects the buffers that are complete until the first graph computes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vgpu_transport::ir::BufferId;

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

    /// Counts `bytes` more bytes as written to the buffer `id`, and logs the progress. `is_model`:
    /// the program uses the buffer for weights. A complete one is added to `log`.
    pub(crate) fn advance(&self, bytes: u64, is_model: bool, id: BufferId, log: &LoadLog) {
        match self.step(bytes, is_model, Instant::now()) {
            Some(Step::Line(line)) => tracing::debug!("{line}"),
            Some(Step::Complete(buffer)) if is_model => log.add(id, buffer),
            Some(Step::Complete(buffer)) => tracing::debug!("{}", buffer.line("buffer")),
            None => (),
        }
    }

    fn step(&self, bytes: u64, is_model: bool, now: Instant) -> Option<Step> {
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
        let loaded = Loaded {
            device: self.device.clone(),
            buffers: 1,
            bytes: state.done,
            began,
            ended: now,
        };
        if is_complete {
            return Some(Step::Complete(loaded));
        }
        let (device, rate) = (&self.device, loaded.rate());
        let (done, size) = (state.done >> 20, self.size >> 20);
        let what = if is_model { "model" } else { "buffer" };
        Some(Step::Line(format!(
            "{device}: {done} of {size} MiB of a {what} loaded ({rate:.0} MB/s)"
        )))
    }
}

/// What is known after a write.
#[derive(Debug, PartialEq)]
enum Step {
    /// It is time for a line.
    Line(String),
    /// The buffer is complete.
    Complete(Loaded),
}

/// Buffers that are complete.
#[derive(Clone, Debug, PartialEq)]
struct Loaded {
    device: String,
    buffers: usize,
    /// Bytes written.
    bytes: u64,
    began: Instant,
    ended: Instant,
}

impl Loaded {
    /// Megabytes in a second.
    fn rate(&self) -> f64 {
        let seconds = (self.ended - self.began).as_secs_f64();
        self.bytes as f64 / seconds.max(1e-3) / 1e6
    }

    fn line(&self, what: &str) -> String {
        let (device, mib, rate) = (&self.device, self.bytes >> 20, self.rate());
        let seconds = (self.ended - self.began).as_secs_f64();
        let parts = match self.buffers {
            1 => String::new(),
            buffers => format!(" in {buffers} buffers"),
        };
        format!("{device}: {what} of {mib} MiB{parts} loaded in {seconds:.2} s ({rate:.0} MB/s)")
    }
}

/// The buffers of a session with weights that were loaded since the last graph.
#[derive(Debug, Default)]
pub(crate) struct LoadLog(Mutex<Vec<(BufferId, Loaded)>>);

impl LoadLog {
    fn add(&self, id: BufferId, buffer: Loaded) {
        tracing::debug!("{}", buffer.line("buffer with weights"));
        self.buffers().push((id, buffer));
    }

    /// The buffer is freed.
    pub(crate) fn forget(&self, id: BufferId) {
        self.buffers().retain(|(one, _)| *one != id);
    }

    /// A graph computes: logs the buffers that were loaded before the graph, in one line. `shared`:
    /// weights that were not sent, and all weights of the uploads that the graph ends.
    pub(crate) fn graph_begins(&self, shared: SharedBytes) {
        if let Some(line) = self.line(shared) {
            tracing::info!("{line}");
        }
    }

    fn line(&self, shared: SharedBytes) -> Option<String> {
        let buffers = std::mem::take(&mut *self.buffers());
        let model = { buffers.into_iter() }
            .map(|(_, buffer)| buffer)
            .reduce(|a, b| Loaded {
                buffers: a.buffers + b.buffers,
                bytes: a.bytes + b.bytes,
                began: a.began.min(b.began),
                ended: a.ended.max(b.ended),
                device: a.device,
            });
        let loaded = model.map(|model| model.line("model"));
        let not_sent = (shared.not_sent > 0).then(|| {
            let (not_sent, all) = (shared.not_sent >> 20, shared.all >> 20);
            format!("{not_sent} MiB of {all} MiB of weights were on the host already")
        });
        match (loaded, not_sent) {
            (Some(loaded), Some(not_sent)) => Some(format!("{loaded}; {not_sent}")),
            (loaded, not_sent) => loaded.or(not_sent),
        }
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<(BufferId, Loaded)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What uploads of weights did not have to send.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SharedBytes {
    /// Bytes that the executor had.
    pub(crate) not_sent: u64,
    /// All bytes.
    pub(crate) all: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_has_lines_and_an_end() {
        assert!(LoadProgress::new("VGPU0", 1 << 20).is_none());
        for is_model in [true, false] {
            let progress = LoadProgress::new("VGPU0", 200 << 20).unwrap();
            let start = Instant::now();
            let step = |mib: u64, ms| {
                progress.step(mib << 20, is_model, start + Duration::from_millis(ms))
            };
            assert_eq!(step(50, 0), None);
            assert_eq!(step(10, 900), None);
            let what = if is_model { "model" } else { "buffer" };
            let line = format!("VGPU0: 100 of 200 MiB of a {what} loaded (52 MB/s)");
            assert_eq!(step(40, 2000), Some(Step::Line(line)));
            assert_eq!(step(50, 2500), None);
            let Some(Step::Complete(loaded)) = step(48, 2600) else {
                panic!("the buffer is complete");
            };
            assert_eq!(
                loaded.line(what),
                format!("VGPU0: {what} of 198 MiB loaded in 2.60 s (80 MB/s)")
            );
            // Writes after the end are not part of the loading.
            assert_eq!(step(48, 9000), None);
        }
    }

    #[test]
    fn model_in_two_buffers_has_one_line() {
        let start = Instant::now();
        let buffer = |mib: u64, began, ended| Loaded {
            device: "VGPU0".into(),
            buffers: 1,
            bytes: mib << 20,
            began: start + Duration::from_secs(began),
            ended: start + Duration::from_secs(ended),
        };
        let log = LoadLog::default();
        let none = SharedBytes::default();
        let some = SharedBytes {
            not_sent: 150 << 20,
            all: 300 << 20,
        };
        let shared = "150 MiB of 300 MiB of weights were on the host already";
        assert_eq!(log.line(none), None);
        assert_eq!(log.line(some).as_deref(), Some(shared));
        log.add(BufferId(1), buffer(200, 0, 2));
        log.add(BufferId(2), buffer(100, 1, 4));
        log.add(BufferId(3), buffer(500, 0, 9));
        log.forget(BufferId(3));
        let line = "VGPU0: model of 300 MiB in 2 buffers loaded in 4.00 s (79 MB/s)";
        assert_eq!(log.line(some), Some(format!("{line}; {shared}")));
        assert_eq!(log.line(none), None, "the line was logged already");
    }
}
