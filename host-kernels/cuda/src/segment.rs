//! Launches between two pieces of the host's work, and how they get to the device: one by one the first time, as
//! recordings (CUDA graphs) from then on.
//!
//! A recording outlives the plan it was made for. When a model's cache of keys and values has grown, the guest sends a
//! graph that differs from the one before in some extents and offsets, and its plan has the same kernels in the same
//! order, on the same memory, with other parameters here and there. Such plans are of one *lineage* and hand the
//! lineage's recordings on: what differs is changed in place, which costs a microsecond for each launch that does, and
//! nothing is recorded anew. Parameters so stay constants of their launches, and no kernel has to fetch them from
//! memory before it can begin.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tracing::warn;

use super::device::{Device, Launch, Mark, RecordingId};
use vgpu_engine::{EngineError, Progress, Turn};

/// So many launches go between two looks before it is known how long they take.
const FIRST_PIECE: usize = 32;

/// Fewer are as fast one by one.
const LEAST_RECORDED: usize = 4;

/// Pieces that are handed to the device ahead of the one that it works on.
const AHEAD: usize = 1;

/// How plans hand launches to the device.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// How long the launches between two looks at the turn should take.
    pub piece: Duration,
    /// Launches that take longer than this on average hide the time that it takes to launch the next: recording them
    /// saves nothing.
    pub long: Duration,
    /// Whether nodes that can be one launch are.
    pub fuses: bool,
    /// Whether launches that can be one step are, on devices that have steps.
    pub steps: bool,
    /// Whether weights are arranged as kernels like to read them.
    pub arranges: bool,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            piece: Duration::from_micros(1500),
            long: Duration::from_micros(40),
            fuses: true,
            // No GPU has run one yet.
            steps: false,
            arranges: true,
        }
    }
}

/// A launch of a plan.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) launch: Launch,
    /// The node it is of.
    pub(super) node: usize,
    /// Whether nothing in working memory is needed after it, so that another plan may run.
    pub(super) may_stop: bool,
    /// How many launches it stands for: 1, or as many as were made a step.
    pub(super) stands_for: usize,
}

/// Launches that follow each other.
pub(super) struct Segment {
    launches: Arc<[Launch]>,
    nodes: Vec<u32>,
    /// After which launches another plan may run.
    stops: Vec<bool>,
    /// How many of the launches of `plain` each stands for.
    stands_for: Vec<usize>,
    /// The same with no steps, for devices that refuse them.
    plain: Option<Box<Segment>>,
    lineage: Arc<Mutex<Lineage>>,
    /// Launches done in the run under way.
    done: usize,
    /// The step that the device has just refused to launch.
    refused: Option<usize>,
    /// Whether the run under way has yielded, so that its time says nothing.
    has_yielded: bool,
}

/// A failure in a launch, or in what was under way.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) node: usize,
    pub(super) error: EngineError,
}

/// The kernels of a segment in order, and the memory its plan was compiled for.
#[derive(Debug, PartialEq, Eq, Hash, Clone)]
struct Key {
    kernels: Vec<u32>,
    memory: Vec<usize>,
}

/// The lineages of a stream that have plans.
#[derive(Default)]
pub(super) struct Lineages {
    known: Mutex<HashMap<Key, Weak<Mutex<Lineage>>>>,
}

impl Lineages {
    fn of(&self, key: Key) -> Arc<Mutex<Lineage>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lineage) = known.get(&key).and_then(Weak::upgrade) {
            return lineage;
        }
        known.retain(|_, lineage| lineage.strong_count() > 0);
        let lineage = Arc::default();
        known.insert(key, Arc::downgrade(&lineage));
        lineage
    }
}

/// What segments with the same kernels on the same memory share.
#[derive(Default)]
struct Lineage {
    /// Launches in a piece, once a run has shown how long they take.
    piece: Option<usize>,
    /// Whether recordings are of no use, or the device does not make them.
    is_plain: bool,
    recordings: Vec<Recording>,
    /// The launches that the recordings do.
    holds: Option<Arc<[Launch]>>,
}

/// A recording of some of the launches.
struct Recording {
    device: Arc<dyn Device>,
    id: RecordingId,
    first: usize,
    count: usize,
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.device.forget(self.id);
    }
}

impl Segment {
    /// A segment of `steps`, at least one, over the memory at the addresses `memory`, which the plan keeps.
    pub(super) fn new(steps: Vec<Step>, memory: &[usize], lineages: &Lineages) -> Segment {
        let key = Key {
            kernels: steps.iter().map(|step| step.launch.kernel.0).collect(),
            memory: memory.to_vec(),
        };
        Segment {
            nodes: steps.iter().map(|step| step.node as u32).collect(),
            stops: steps.iter().map(|step| step.may_stop).collect(),
            stands_for: steps.iter().map(|step| step.stands_for).collect(),
            plain: None,
            launches: steps.into_iter().map(|step| step.launch).collect(),
            lineage: lineages.of(key),
            done: 0,
            refused: None,
            has_yielded: false,
        }
    }

    /// The same, which becomes `plain` when the device refuses a step.
    #[must_use]
    pub(super) fn or(self, plain: Segment) -> Segment {
        Segment {
            plain: Some(Box::new(plain)),
            ..self
        }
    }

    /// Goes on with the launches until they are done or, at a place where that is possible, the turn is over. Then
    /// nothing runs on the device any more; otherwise it may.
    ///
    /// # Safety
    /// The memory that the launches use is there, and nobody else uses the device.
    pub(super) unsafe fn advance(
        &mut self,
        device: &Arc<dyn Device>,
        pace: Pace,
        turn: &Turn,
    ) -> Result<Progress, Failure> {
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.go_on(device, pace, turn) };
        let (Err(Failure { error, .. }), Some(at)) = (&outcome, self.refused.take()) else {
            return outcome;
        };
        let Some(mut plain) = self.plain.take() else {
            return outcome;
        };
        // Nothing of a launch that is refused has run. What came before it has, or is under way.
        warn!("a step is not launched, and goes launch by launch from now on: {error}");
        plain.done = self.stands_for[..at].iter().sum();
        *self = *plain;
        // SAFETY: as above.
        unsafe { self.go_on(device, pace, turn) }
    }

    /// # Safety
    /// As for [`Segment::advance`].
    unsafe fn go_on(
        &mut self,
        device: &Arc<dyn Device>,
        pace: Pace,
        turn: &Turn,
    ) -> Result<Progress, Failure> {
        let lineage = Arc::clone(&self.lineage);
        let mut lineage = lineage.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |node: usize, error| Failure { node, error };
        self.has_yielded |= self.done > 0;
        let start = Instant::now();
        let (first, piece) = (self.done, lineage.piece.unwrap_or(FIRST_PIECE));
        if lineage.piece.is_some() && first == 0 {
            self.prepare(&mut lineage, device, piece);
        }
        let mut under_way: Vec<Mark> = Vec::new();
        while self.done < self.launches.len() {
            let end = self.end_of_piece(self.done, piece);
            let recording = lineage.holds_of(self).and_then(|()| lineage.at(self.done));
            match recording {
                Some(recording) if recording.count == end - self.done => {
                    let node = self.nodes[self.done] as usize;
                    // SAFETY: the caller's promise; the recording holds the launches of this segment.
                    unsafe { device.replay(recording.id) }.map_err(|error| failed(node, error))?;
                }
                _ => {
                    for at in self.done..end {
                        // SAFETY: the caller's promise.
                        unsafe { device.launch(&self.launches[at]) }.map_err(|error| {
                            let is_refused = matches!(error, EngineError::Unsupported { .. });
                            self.refused = (self.launches[at].together && is_refused).then_some(at);
                            failed(self.nodes[at] as usize, error)
                        })?;
                    }
                }
            }
            self.done = end;
            if self.done == self.launches.len() {
                break;
            }
            let here = self.nodes[end - 1] as usize;
            under_way.push(device.mark().map_err(|error| failed(here, error))?);
            if under_way.len() > AHEAD {
                let mark = under_way.remove(0);
                device.wait(mark).map_err(|error| failed(here, error))?;
            }
            if turn.is_over() {
                device.synchronize().map_err(|error| failed(here, error))?;
                return Ok(Progress::Yielded);
            }
        }
        if lineage.piece.is_none() && !self.has_yielded {
            let last = self.last_node();
            device.synchronize().map_err(|error| failed(last, error))?;
            lineage.learn(start.elapsed(), self.launches.len(), pace);
        }
        self.rewind();
        Ok(Progress::Done)
    }

    /// Runs all launches, none of them as steps, and says how many seconds each took.
    ///
    /// # Safety
    /// As for [`advance`](Segment::advance).
    pub(super) unsafe fn time(&mut self, device: &dyn Device) -> Result<Vec<f64>, Failure> {
        self.rewind();
        // SAFETY: the caller's promise.
        let outcome = unsafe { device.time(&self.plain.as_deref().unwrap_or(self).launches) };
        outcome.map_err(|error| Failure {
            node: self.last_node(),
            error,
        })
    }

    /// The node of the last launch.
    pub(super) fn last_node(&self) -> usize {
        *self.nodes.last().expect("a segment has launches") as usize
    }

    /// Begins from the first launch the next time.
    pub(super) fn rewind(&mut self) {
        self.done = 0;
        self.has_yielded = false;
    }

    /// The end of the piece that begins with launch `at`.
    fn end_of_piece(&self, at: usize, piece: usize) -> usize {
        let least = at.saturating_add(piece).min(self.launches.len());
        let stop = (least..self.launches.len()).find(|&end| self.stops[end - 1]);
        stop.unwrap_or(self.launches.len())
    }

    /// Sees that the lineage's recordings do the launches of this segment. Where the device fails to, launches go one
    /// by one.
    fn prepare(&self, lineage: &mut Lineage, device: &Arc<dyn Device>, piece: usize) {
        if lineage.is_plain || lineage.holds_of(self).is_some() {
            return;
        }
        let outcome = match lineage.holds.take() {
            Some(held) => self.change(lineage, device, &held),
            None => self.record(lineage, device, piece),
        };
        match outcome {
            Ok(()) => lineage.holds = Some(Arc::clone(&self.launches)),
            Err(error) => {
                warn!("launches are not recorded, and go one by one: {error}");
                lineage.recordings.clear();
                lineage.is_plain = true;
            }
        }
    }

    fn record(
        &self,
        lineage: &mut Lineage,
        device: &Arc<dyn Device>,
        piece: usize,
    ) -> Result<(), EngineError> {
        let mut first = 0;
        while first < self.launches.len() {
            let end = self.end_of_piece(first, piece);
            if end - first >= LEAST_RECORDED {
                lineage.recordings.push(Recording {
                    id: device.record(&self.launches[first..end])?,
                    device: Arc::clone(device),
                    first,
                    count: end - first,
                });
            }
            first = end;
        }
        Ok(())
    }

    /// Changes what differs from the launches that the recordings held until now.
    fn change(
        &self,
        lineage: &Lineage,
        device: &Arc<dyn Device>,
        held: &[Launch],
    ) -> Result<(), EngineError> {
        for recording in &lineage.recordings {
            for index in 0..recording.count {
                let at = recording.first + index;
                if self.launches[at] != held[at] {
                    device.change(recording.id, index, &self.launches[at])?;
                }
            }
        }
        Ok(())
    }
}

impl Lineage {
    /// Something, if the recordings hold the launches of this very segment.
    fn holds_of(&self, segment: &Segment) -> Option<()> {
        let held = self.holds.as_ref()?;
        Arc::ptr_eq(held, &segment.launches).then_some(())
    }

    /// The recording that begins with launch `at`.
    fn at(&self, at: usize) -> Option<&Recording> {
        self.recordings
            .iter()
            .find(|recording| recording.first == at)
    }

    /// Takes from the time of a whole run how to cut the next ones.
    fn learn(&mut self, took: Duration, launches: usize, pace: Pace) {
        let each = took / launches.max(1) as u32;
        let fitting = pace.piece.as_nanos() / each.as_nanos().max(1);
        let fitting = usize::try_from(fitting).unwrap_or(usize::MAX).max(1);
        // What nearly fits is not cut.
        self.piece = Some(if fitting.saturating_mul(2) >= launches {
            usize::MAX
        } else {
            fitting
        });
        self.is_plain |= each > pace.long;
    }
}
