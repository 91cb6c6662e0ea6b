//! Work that a device has been given and that nobody has waited for.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use vgpu_engine::Turn;
use vgpu_ggml_abi as abi;

use crate::device::BackendDevice;
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

/// What the device did until somebody waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Landing {
    /// How long the device had work.
    pub(crate) took: Duration,
    /// How long it should have taken, by the times of its pieces.
    pub(crate) predicted: Duration,
    /// Whether the device had nothing to do in between, since the next piece came too late.
    pub(crate) is_late: bool,
}

/// Pieces of a run that follow each other without a wait. The device is idle when this is dropped.
pub(crate) struct Flight<'a> {
    device: &'a BackendDevice,
    /// When the device got the first piece that nobody has waited for.
    since: Option<Instant>,
    /// How long all of them take, by the times of the pieces.
    predicted: Duration,
    /// How many there are.
    pieces: usize,
    has_slept: bool,
}

impl<'a> Flight<'a> {
    /// Of an idle device.
    pub(crate) fn new(device: &'a BackendDevice) -> Flight<'a> {
        Flight {
            device,
            since: None,
            predicted: Duration::ZERO,
            pieces: 0,
            has_slept: false,
        }
    }

    /// Gives the device a graph, which takes `predicted`.
    ///
    /// # Errors
    /// `enum ggml_status` of the backend.
    ///
    /// # Safety
    /// The graph, its tensors and their buffers must exist, and nobody may access them, until this
    /// flight has landed.
    pub(crate) unsafe fn submit(
        &mut self,
        graph: *mut abi::ggml_cgraph,
        predicted: Duration,
    ) -> Result<(), c_int> {
        self.since.get_or_insert_with(Instant::now);
        self.predicted += predicted;
        self.pieces += 1;
        // SAFETY: the contract of this function, and `drop` waits if nobody else does.
        unsafe { self.device.submit(graph) }
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

    /// Waits until the device is idle. `None` if it was.
    pub(crate) fn land(&mut self) -> Option<Landing> {
        let since = self.since.take()?;
        let begin = Instant::now();
        self.device.synchronize();
        self.pieces = 0;
        let (took, waited) = (since.elapsed(), begin.elapsed());
        let landing = Landing {
            took,
            predicted: std::mem::take(&mut self.predicted),
            is_late: std::mem::take(&mut self.has_slept) && waited < LATE,
        };
        self.device.used.device_ran(took);
        Some(landing)
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.land();
    }
}
