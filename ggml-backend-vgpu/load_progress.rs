//! Log lines about the progress of loading a model: at level `info`, one for the model, at level
//! `debug`, one in every second until then. Other large writes have lines at `debug` only.
//!
//! A model can have several buffers, and nothing in ggml's interface says which belong together.
//! [`LoadLog`] therefore collects the buffers that are complete until the first graph computes.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use vgpu_transport::ir::BufferId;
use vgpu_transport::lock::{Guard, lock};

/// A buffer that is not for weights has log lines from so many bytes on.
const MIN_BUFFER_BYTES: u64 = 64 << 20;

/// Weights of fewer bytes are no model: `test-backend-ops` has some for nearly every case.
const MIN_MODEL_BYTES: u64 = 1 << 20;

/// A buffer that lacks at most so many bytes holds all of its tensors. Padding between tensors is
/// never written: some bytes for each tensor.
const MAX_PADDING: u64 = 1 << 20;

/// The time between two log lines.
const PERIOD: Duration = Duration::from_secs(1);

/// The progress of writing into one buffer, from the first write until the buffer is full.
#[derive(Debug)]
pub(crate) struct LoadProgress {
    device: String,
    /// Bytes of the buffer.
    size: u64,
    state: Mutex<WrittenBytes>,
}

#[derive(Debug, Default)]
struct WrittenBytes {
    /// Bytes written.
    done: u64,
    /// The time of the first write, and of the last log line.
    times: Option<(Instant, Instant)>,
    is_complete: bool,
}

impl LoadProgress {
    /// For a buffer of `size` bytes.
    pub(crate) fn new(device: &str, size: u64) -> LoadProgress {
        LoadProgress {
            device: device.to_owned(),
            size,
            state: Mutex::default(),
        }
    }

    /// Counts `bytes` more bytes as written to the buffer `id`, and logs the progress. `is_model`:
    /// the program uses the buffer for weights, whose progress is added to `log`.
    pub(crate) fn advance(&self, bytes: u64, is_model: bool, id: BufferId, log: &LoadLog) {
        if !is_model && self.size < MIN_BUFFER_BYTES {
            return;
        }
        let Some(step) = self.step(bytes, is_model, Instant::now()) else {
            return;
        };
        if let Some(line) = step.line {
            tracing::debug!("{line}");
        }
        if is_model {
            let has_all = step.loaded.bytes + MAX_PADDING >= self.size;
            log.update(id, step.loaded, step.is_complete || has_all);
        }
    }

    /// What is known after a write of `bytes` bytes. `None` after the end of the loading.
    fn step(&self, bytes: u64, is_model: bool, now: Instant) -> Option<Advance> {
        let mut state = lock(&self.state);
        if state.is_complete {
            return None;
        }
        state.done += bytes;
        let (began, logged) = *state.times.get_or_insert((now, now));
        // Padding between tensors is never written: 99 % counts as complete.
        state.is_complete = state.done + self.size / 100 >= self.size;
        let loaded = Loaded {
            device: self.device.clone(),
            buffers: 1,
            bytes: state.done,
            began,
            ended: now,
        };
        let (done, size) = (state.done >> 20, self.size >> 20);
        let line = match (state.is_complete, is_model) {
            (true, true) => Some(loaded.line("buffer with weights")),
            (true, false) => Some(loaded.line("buffer")),
            (false, _) if now - logged < PERIOD => None,
            (false, _) => {
                let (device, rate) = (&self.device, loaded.rate());
                let what = if is_model { "model" } else { "buffer" };
                Some(format!(
                    "{device}: {done} of {size} MiB of a {what} loaded ({rate:.0} MB/s)"
                ))
            }
        };
        if line.is_some() {
            state.times = Some((began, now));
        }
        Some(Advance {
            loaded,
            line,
            is_complete: state.is_complete,
        })
    }
}

/// What is known after a write.
#[derive(Debug, PartialEq)]
struct Advance {
    /// The bytes so far.
    loaded: Loaded,
    /// A line, if it is time for one.
    line: Option<String>,
    is_complete: bool,
}

/// What was written to buffers.
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

/// The buffers of a session with weights.
#[derive(Debug, Default)]
pub(crate) struct LoadLog(Mutex<Loads>);

#[derive(Debug, Default)]
struct Loads {
    buffers: Vec<WeightBuffer>,
    /// Of uploads that a graph ended before a buffer was ready: the line of that buffer says them.
    shared: SharedBytes,
}

/// A buffer with weights.
#[derive(Debug)]
struct WeightBuffer {
    id: BufferId,
    loaded: Loaded,
    /// Whether all tensors may have been written.
    is_ready: bool,
    /// Whether the buffer was part of a line.
    is_logged: bool,
}

impl LoadLog {
    /// So much was written to a buffer.
    fn update(&self, id: BufferId, loaded: Loaded, is_ready: bool) {
        let mut loads = self.loads();
        match loads.buffers.iter_mut().find(|buffer| buffer.id == id) {
            Some(buffer) => (buffer.loaded, buffer.is_ready) = (loaded, is_ready),
            None => loads.buffers.push(WeightBuffer {
                id,
                loaded,
                is_ready,
                is_logged: false,
            }),
        }
    }

    /// The buffer is freed.
    pub(crate) fn forget(&self, id: BufferId) {
        self.loads().buffers.retain(|buffer| buffer.id != id);
    }

    /// A graph computes: logs the buffers that were loaded before the graph, in one line. `shared`:
    /// weights that were not sent, and all weights of the uploads that the graph ends.
    pub(crate) fn graph_begins(&self, shared: SharedBytes) {
        if let Some(line) = self.line(shared) {
            tracing::info!("{line}");
        }
    }

    fn line(&self, shared: SharedBytes) -> Option<String> {
        let mut loads = self.loads();
        loads.shared.not_sent += shared.not_sent;
        loads.shared.all += shared.all;
        let device = { loads.buffers.first() }.map(|buffer| buffer.loaded.device.clone());
        let is_new = |buffer: &&mut WeightBuffer| buffer.is_ready && !buffer.is_logged;
        let new = loads.buffers.iter_mut().filter(is_new);
        let model = new
            .map(|buffer| {
                buffer.is_logged = true;
                buffer.loaded.clone()
            })
            .reduce(|a, b| Loaded {
                buffers: a.buffers + b.buffers,
                bytes: a.bytes + b.bytes,
                began: a.began.min(b.began),
                ended: a.ended.max(b.ended),
                device: a.device,
            });
        let model = model.filter(|model| model.bytes >= MIN_MODEL_BYTES);
        let loaded = model.map(|model| model.line("model"));
        // Another model of the program can compute while this one is loaded.
        let is_loading = loads.buffers.iter().any(|buffer| !buffer.is_ready);
        if loaded.is_none() && is_loading {
            return None;
        }
        let shared = std::mem::take(&mut loads.shared);
        let is_model = shared.all >= MIN_MODEL_BYTES && shared.not_sent > 0;
        let not_sent = is_model.then(|| {
            let (not_sent, all) = (shared.not_sent >> 20, shared.all >> 20);
            format!("{not_sent} MiB of {all} MiB of weights were on the host already")
        });
        match (loaded, not_sent) {
            (Some(loaded), Some(not_sent)) => Some(format!("{loaded}; {not_sent}")),
            (None, Some(not_sent)) => device.map(|device| format!("{device}: {not_sent}")),
            (loaded, None) => loaded,
        }
    }

    fn loads(&self) -> Guard<'_, Loads> {
        lock(&self.0)
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
        for is_model in [true, false] {
            let progress = LoadProgress::new("VGPU0", 200 << 20);
            let start = Instant::now();
            let step = |mib: u64, ms| {
                let now = start + Duration::from_millis(ms);
                let step = progress.step(mib << 20, is_model, now)?;
                Some((step.line, step.is_complete))
            };
            assert_eq!(step(50, 0), Some((None, false)));
            assert_eq!(step(10, 900), Some((None, false)));
            let what = if is_model { "model" } else { "buffer" };
            let line = format!("VGPU0: 100 of 200 MiB of a {what} loaded (52 MB/s)");
            assert_eq!(step(40, 2000), Some((Some(line), false)));
            assert_eq!(step(50, 2500), Some((None, false)));
            let what = match is_model {
                true => "buffer with weights",
                false => "buffer",
            };
            let line = format!("VGPU0: {what} of 198 MiB loaded in 2.60 s (80 MB/s)");
            assert_eq!(step(48, 2600), Some((Some(line), true)));
            // Writes after the end are not part of the loading.
            assert_eq!(step(48, 9000), None);
        }
    }

    #[test]
    fn small_model_has_a_line_and_other_small_buffers_have_none() {
        let none = SharedBytes::default();
        let lines = |is_model, size: u64, written: &[u64]| {
            let (log, id) = (LoadLog::default(), BufferId(1));
            let progress = LoadProgress::new("VGPU0", size);
            for &bytes in written {
                progress.advance(bytes, is_model, id, &log);
            }
            let first = log.line(none);
            // A later write, as of a program that trains, is no other model.
            progress.advance(4096, is_model, id, &log);
            (first, log.line(none))
        };
        let of = |line: &Option<String>, words: &str| {
            line.as_ref().is_some_and(|line| line.contains(words))
        };
        // Two tensors of 10 MiB, with padding of 500 KiB.
        let size = (20 << 20) + (500 << 10);
        let (first, later) = lines(true, size, &[10 << 20, 10 << 20]);
        assert!(of(&first, "VGPU0: model of 20 MiB loaded in"), "{first:?}");
        assert_eq!(later, None);
        assert_eq!(lines(false, size, &[10 << 20, 10 << 20]), (None, None));
        // A part of a model, and weights that are no model.
        assert_eq!(lines(true, size, &[10 << 20]), (None, None));
        assert_eq!(lines(true, 64 << 10, &[64 << 10]), (None, None));
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
        let shared = "150 MiB of 300 MiB of weights were on the host already";
        assert_eq!(log.line(none), None);
        log.update(BufferId(1), buffer(100, 0, 1), false);
        assert_eq!(log.line(none), None, "the buffer is not complete");
        // A graph of another model, during the load.
        let half = SharedBytes {
            not_sent: 75 << 20,
            all: 150 << 20,
        };
        assert_eq!(log.line(half), None, "the buffer's own line says that");
        log.update(BufferId(1), buffer(200, 0, 2), true);
        log.update(BufferId(2), buffer(100, 1, 4), true);
        log.update(BufferId(3), buffer(500, 0, 9), true);
        log.forget(BufferId(3));
        let line = "VGPU0: model of 300 MiB in 2 buffers loaded in 4.00 s (79 MB/s)";
        assert_eq!(log.line(half), Some(format!("{line}; {shared}")));
        assert_eq!(log.line(none), None, "the line was logged already");
        let no_model = SharedBytes {
            not_sent: 64 << 10,
            all: 96 << 10,
        };
        assert_eq!(log.line(no_model), None, "96 KiB are no model");
        // A later upload into the same buffer, of which the host has a part.
        let some = SharedBytes {
            not_sent: 150 << 20,
            all: 300 << 20,
        };
        assert_eq!(log.line(some), Some(format!("VGPU0: {shared}")));
    }
}
