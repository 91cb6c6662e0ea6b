//! Work that a device has been given and that nobody has waited for.

use std::ffi::c_int;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use vgpu_engine::{EngineError, Turn};
use vgpu_ggml_abi as abi;
use vgpu_transport::bytes::BytesMut;

use crate::buffer::{DeviceBuffer, StagedWrite};
use crate::device::{BackendDevice, Queue};
use crate::pace::Took;
use crate::staging::MAX_READ;
use crate::tensors::MAX_PARTS;

/// The device gets its next piece when it has so much left to do. A turn that ends then lasts
/// another piece, and this.
const LEAD: Duration = Duration::from_millis(1);

/// How long the thread sleeps at most before it looks whether the turn is over.
const NAP: Duration = Duration::from_micros(500);

/// A prediction was too long if it left so much to do when the device had nothing to do.
const LATE: Duration = Duration::from_micros(250);

/// After so much work by the measurements, somebody waits: errors of the prediction add up.
const MAX_FLIGHT: Duration = Duration::from_millis(32);

/// The device had nothing to do when somebody began to wait, if the wait took less.
const IDLE: Duration = Duration::from_micros(100);

/// What the device did until somebody waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Landing {
    /// How long the device had work.
    pub(crate) took: Took,
    /// How long it should have taken, by the times of its pieces.
    pub(crate) predicted: Duration,
}

/// When somebody has waited for all work of a flight, and how long.
#[derive(Debug, Clone, Copy)]
struct Landed {
    at: Instant,
    waited: Duration,
}

impl Landed {
    /// Waits for all that the queue was given.
    fn wait(queue: &mut Queue<'_>) -> Landed {
        let begin = Instant::now();
        queue.synchronize();
        let at = Instant::now();
        Landed {
            at,
            waited: at - begin,
        }
    }
}

/// The work that a plan has left to the device, for the memory of the plan: reads come behind it.
pub(crate) struct Underway {
    device: Arc<BackendDevice>,
    /// Set with the lock of the backend.
    landed: OnceLock<Landed>,
}

impl Underway {
    /// Waits for the work, unless somebody has.
    pub(crate) fn land(&self) {
        self.land_in(&mut self.device.queue());
    }

    fn land_in(&self, queue: &mut Queue<'_>) -> Landed {
        *self.landed.get_or_init(|| Landed::wait(queue))
    }

    /// Reads `out.len()` bytes at `offset` of a buffer of the device, as they are after the work.
    /// One wait is for both, if there are no more than [`MAX_READ`].
    ///
    /// # Errors
    /// As [`DeviceBuffer::read`].
    pub(crate) fn read(
        &self,
        buffer: &DeviceBuffer,
        offset: u64,
        out: BytesMut<'_>,
    ) -> Result<(), EngineError> {
        buffer.check(offset, out.len() as u64)?;
        let mut queue = self.device.queue();
        let staging = self.device.allocator.staging().filter(|_| {
            let fits = (1..=MAX_READ).contains(&out.len());
            fits && self.landed.get().is_none() && !buffer.has_staged()
        });
        let Some(staging) = staging else {
            self.land_in(&mut queue);
            drop(queue);
            return buffer.read(offset, out);
        };
        // SAFETY: the range lies inside of the buffer (checked above), which the caller keeps. The
        // part for reads has the bytes, and is this call's as long as it has the queue, in which it
        // waits for the copy.
        unsafe {
            queue.read(buffer.whole(), offset, staging.for_reads(), out.len());
            self.land_in(&mut queue);
            staging.take_read(out);
        }
        Ok(())
    }
}

/// Pieces of a run that follow each other without a wait. The device is idle when this is dropped.
pub(crate) struct Flight {
    device: Arc<BackendDevice>,
    /// When the device got the first piece that nobody has waited for.
    since: Option<Instant>,
    /// How long all of them take, by the times of the pieces.
    predicted: Duration,
    /// How many there are.
    pieces: usize,
    has_slept: bool,
    /// Writes that the device may not have carried out: it reads their bytes.
    sent: Vec<StagedWrite>,
    /// The same work, if the plan has left it to the device.
    underway: Option<Arc<Underway>>,
}

impl Flight {
    /// Of an idle device.
    pub(crate) fn new(device: &Arc<BackendDevice>) -> Flight {
        Flight {
            device: Arc::clone(device),
            since: None,
            predicted: Duration::ZERO,
            pieces: 0,
            has_slept: false,
            sent: Vec::new(),
            underway: None,
        }
    }

    /// Gives the device the writes that wait in these buffers, and then a graph, which takes
    /// `predicted`.
    ///
    /// # Errors
    /// `enum ggml_status` of the backend.
    ///
    /// # Safety
    /// The graph, its tensors, their buffers and `buffers` must exist, and nobody may access them,
    /// until this flight has landed.
    pub(crate) unsafe fn submit<'b>(
        &mut self,
        buffers: impl Iterator<Item = &'b DeviceBuffer>,
        graph: *mut abi::ggml_cgraph,
        predicted: Duration,
    ) -> Result<(), c_int> {
        let mut queue = self.device.queue();
        // Before the writes: a new backend has another queue.
        queue.make_ready()?;
        self.since.get_or_insert_with(Instant::now);
        self.predicted += predicted;
        self.pieces += 1;
        for buffer in buffers {
            let writes = buffer.take_staged();
            for StagedWrite { offset, bytes } in &writes {
                let (from, len) = (bytes.as_ptr().cast(), bytes.len());
                // SAFETY: the range was checked when the write was staged, which a backend that
                // does not copy in order never has. The contract of this function is for the
                // buffer; `sent` keeps the bytes until the flight has landed.
                unsafe { queue.write(buffer.whole(), *offset, from, len) };
            }
            self.sent.extend(writes);
        }
        // SAFETY: the contract of this function, and `drop` waits if nobody else does.
        unsafe { queue.compute(graph) }
    }

    /// How much the device has left to do by the measurements, which are `correction` times the
    /// times of the pieces.
    fn left(&self, correction: f64) -> Duration {
        let gone = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        self.predicted.mul_f64(correction).saturating_sub(gone)
    }

    /// Sleeps until the device needs its next piece, or until `turn` is over.
    pub(crate) fn keep_back(&mut self, correction: f64, turn: &Turn) {
        // The calls of a backend that does nothing later return when all is done.
        if !self.device.is_asynchronous() {
            return;
        }
        loop {
            let early = self.left(correction).saturating_sub(LEAD);
            if early.is_zero() || turn.is_over() {
                return;
            }
            self.has_slept = true;
            std::thread::sleep(early.min(NAP));
        }
    }

    /// How many pieces nobody has waited for.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces
    }

    /// Whether somebody should wait before the device gets more. The pieces take `correction` times
    /// their times.
    pub(crate) fn is_long(&self, correction: f64) -> bool {
        self.predicted.mul_f64(correction) >= MAX_FLIGHT || self.pieces >= MAX_PARTS
    }

    /// The work so far, for reads that come behind it. Whoever reads first waits for it.
    pub(crate) fn underway(&mut self) -> &Arc<Underway> {
        self.underway.get_or_insert_with(|| {
            Arc::new(Underway {
                device: Arc::clone(&self.device),
                landed: OnceLock::new(),
            })
        })
    }

    /// Waits until the device is idle. `None` if it was.
    pub(crate) fn land(&mut self) -> Option<Landing> {
        let since = self.since.take()?;
        let underway = self.underway.take();
        let mut queue = self.device.queue();
        let Landed { at, waited } = match &underway {
            Some(underway) => underway.land_in(&mut queue),
            None => Landed::wait(&mut queue),
        };
        drop(queue);
        self.pieces = 0;
        self.sent.clear();
        let took = at.saturating_duration_since(since);
        let is_late = std::mem::take(&mut self.has_slept) && waited < LATE;
        let landing = Landing {
            took: match is_late {
                true => Took::Late(took),
                // The guest's next request came first.
                false if underway.is_some() && waited < IDLE => Took::AtMost(took),
                false => Took::Exactly(took),
            },
            predicted: std::mem::take(&mut self.predicted),
        };
        self.device.used.device_ran(took);
        Some(landing)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.land();
    }
}
