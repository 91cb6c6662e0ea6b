//! Launches between two pieces of the host's work, and how they get to the device: one by one the first time, as
//! recordings (CUDA graphs) from then on.
//!
//! A recording outlives the plan it was made for. When a model's cache of keys and values has grown, the guest sends a
//! graph that differs from the one before in some extents and offsets, and its plan has the same kernels in the same
//! order, on the same memory, with other parameters here and there. Such plans are of one *template* and hand the
//! template's recordings on: what differs is changed in place, which costs a microsecond for each launch that does, and
//! nothing is recorded anew. Parameters so stay constants of their launches, and no kernel has to fetch them from
//! memory before it can begin.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tracing::warn;

use crate::device::{Device, Event, GraphExecId, Launch};
use crate::launch::planned::PlannedLaunch;
use crate::launch::policy::LaunchPolicy;
use vgpu_engine::{EngineError, RunStatus, Turn};

/// So many launches go between two looks before it is known how long they take.
const FIRST_PIECE: usize = 32;

/// Fewer are as fast one by one.
const MIN_RECORDED: usize = 4;

/// Pieces that are handed to the device ahead of the one that it works on.
const AHEAD: usize = 1;

/// Launches that follow each other.
pub(crate) struct LaunchSequence {
    launches: Arc<[Launch]>,
    nodes: Vec<u32>,
    /// After which launches another plan may run.
    stops: Vec<bool>,
    /// How many of the launches of `plain` each stands for.
    covers: Vec<usize>,
    /// The same with no steps, for devices that refuse them.
    plain: Option<Box<LaunchSequence>>,
    template: Arc<Mutex<GraphTemplate>>,
    /// Launches done in the run under way.
    done: usize,
    /// The step that the device has just refused to launch.
    refused: Option<usize>,
    /// Whether the run under way has yielded, so that its time says nothing.
    has_yielded: bool,
}

/// A failure in a launch, or in what was under way.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) node: usize,
    pub(crate) error: EngineError,
}

/// The kernels of a sequence in order, and the memory its plan was compiled for.
#[derive(Debug, PartialEq, Eq, Hash, Clone)]
struct Key {
    kernels: Vec<u32>,
    memory: Vec<usize>,
}

/// The templates of a context that have plans.
#[derive(Default)]
pub(crate) struct GraphTemplates {
    known: Mutex<HashMap<Key, Weak<Mutex<GraphTemplate>>>>,
}

impl GraphTemplates {
    fn of(&self, key: Key) -> Arc<Mutex<GraphTemplate>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(template) = known.get(&key).and_then(Weak::upgrade) {
            return template;
        }
        known.retain(|_, template| template.strong_count() > 0);
        let template = Arc::default();
        known.insert(key, Arc::downgrade(&template));
        template
    }
}

/// What segments with the same kernels on the same memory share.
#[derive(Default)]
struct GraphTemplate {
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
    id: GraphExecId,
    first: usize,
    count: usize,
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.device.destroy_graph(self.id);
    }
}

impl LaunchSequence {
    /// A sequence of `steps`, at least one, over the memory at the addresses `memory`, which the plan keeps.
    pub(crate) fn new(
        steps: Vec<PlannedLaunch>,
        memory: &[usize],
        templates: &GraphTemplates,
    ) -> LaunchSequence {
        let key = Key {
            kernels: steps.iter().map(|step| step.launch.kernel.0).collect(),
            memory: memory.to_vec(),
        };
        LaunchSequence {
            nodes: steps.iter().map(|step| step.node as u32).collect(),
            stops: steps.iter().map(|step| step.may_yield).collect(),
            covers: steps.iter().map(|step| step.covers).collect(),
            plain: None,
            launches: steps.into_iter().map(|step| step.launch).collect(),
            template: templates.of(key),
            done: 0,
            refused: None,
            has_yielded: false,
        }
    }

    /// The same, which becomes `plain` when the device refuses a step.
    #[must_use]
    pub(crate) fn or(self, plain: LaunchSequence) -> LaunchSequence {
        LaunchSequence {
            plain: Some(Box::new(plain)),
            ..self
        }
    }

    /// Goes on with the launches until they are done or, at a place where that is possible, the turn is over. Then
    /// nothing runs on the device any more; otherwise it may.
    ///
    /// # Safety
    /// The memory that the launches use is there, and nobody else uses the device.
    pub(crate) unsafe fn advance(
        &mut self,
        device: &Arc<dyn Device>,
        policy: LaunchPolicy,
        turn: &Turn,
    ) -> Result<RunStatus, Failure> {
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.go_on(device, policy, turn) };
        let (Err(Failure { error, .. }), Some(at)) = (&outcome, self.refused.take()) else {
            return outcome;
        };
        let Some(mut plain) = self.plain.take() else {
            return outcome;
        };
        // Nothing of a launch that is refused has run. What came before it has, or is under way.
        warn!("a step is not launched, and goes launch by launch from now on: {error}");
        plain.done = self.covers[..at].iter().sum();
        *self = *plain;
        // SAFETY: as above.
        unsafe { self.go_on(device, policy, turn) }
    }

    /// # Safety
    /// As for [`LaunchSequence::advance`].
    unsafe fn go_on(
        &mut self,
        device: &Arc<dyn Device>,
        policy: LaunchPolicy,
        turn: &Turn,
    ) -> Result<RunStatus, Failure> {
        let template = Arc::clone(&self.template);
        let mut template = template.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |node: usize, error| Failure { node, error };
        self.has_yielded |= self.done > 0;
        let start = Instant::now();
        let (first, piece) = (self.done, template.piece.unwrap_or(FIRST_PIECE));
        if template.piece.is_some() && first == 0 {
            self.prepare(&mut template, device, piece);
        }
        let mut under_way: Vec<Event> = Vec::new();
        while self.done < self.launches.len() {
            let end = self.end_of_piece(self.done, piece);
            let recording = template
                .holds_of(self)
                .and_then(|()| template.at(self.done));
            match recording {
                Some(recording) if recording.count == end - self.done => {
                    let node = self.nodes[self.done] as usize;
                    // SAFETY: the caller's promise; the recording holds the launches of this sequence.
                    unsafe { device.launch_graph(recording.id) }
                        .map_err(|error| failed(node, error))?;
                }
                _ => {
                    for at in self.done..end {
                        // SAFETY: the caller's promise.
                        unsafe { device.launch(&self.launches[at]) }.map_err(|error| {
                            let is_refused = matches!(error, EngineError::Unsupported { .. });
                            self.refused =
                                (self.launches[at].cooperative && is_refused).then_some(at);
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
            under_way.push(device.record_event().map_err(|error| failed(here, error))?);
            if under_way.len() > AHEAD {
                let event = under_way.remove(0);
                device
                    .wait_event(event)
                    .map_err(|error| failed(here, error))?;
            }
            if turn.is_over() {
                device.synchronize().map_err(|error| failed(here, error))?;
                return Ok(RunStatus::Yielded);
            }
        }
        if template.piece.is_none() && !self.has_yielded {
            let last = self.last_node();
            device.synchronize().map_err(|error| failed(last, error))?;
            template.learn(start.elapsed(), self.launches.len(), policy);
        }
        self.rewind();
        Ok(RunStatus::Done)
    }

    /// Runs all launches, none of them as steps, and says how many seconds each took.
    ///
    /// # Safety
    /// As for [`advance`](LaunchSequence::advance).
    pub(crate) unsafe fn time(&mut self, device: &dyn Device) -> Result<Vec<f64>, Failure> {
        self.rewind();
        // SAFETY: the caller's promise.
        let outcome =
            unsafe { device.time_launches(&self.plain.as_deref().unwrap_or(self).launches) };
        outcome.map_err(|error| Failure {
            node: self.last_node(),
            error,
        })
    }

    /// The node of the last launch.
    pub(crate) fn last_node(&self) -> usize {
        *self.nodes.last().expect("a sequence has launches") as usize
    }

    /// Begins from the first launch the next time.
    pub(crate) fn rewind(&mut self) {
        self.done = 0;
        self.has_yielded = false;
    }

    /// The end of the piece that begins with launch `at`.
    fn end_of_piece(&self, at: usize, piece: usize) -> usize {
        let least = at.saturating_add(piece).min(self.launches.len());
        let stop = (least..self.launches.len()).find(|&end| self.stops[end - 1]);
        stop.unwrap_or(self.launches.len())
    }

    /// Sees that the template's recordings do the launches of this sequence. Where the device fails to, launches go one
    /// by one.
    fn prepare(&self, template: &mut GraphTemplate, device: &Arc<dyn Device>, piece: usize) {
        if template.is_plain || template.holds_of(self).is_some() {
            return;
        }
        let outcome = match template.holds.take() {
            Some(held) => self.change(template, device, &held),
            None => self.record(template, device, piece),
        };
        match outcome {
            Ok(()) => template.holds = Some(Arc::clone(&self.launches)),
            Err(error) => {
                warn!("launches are not recorded, and go one by one: {error}");
                template.recordings.clear();
                template.is_plain = true;
            }
        }
    }

    fn record(
        &self,
        template: &mut GraphTemplate,
        device: &Arc<dyn Device>,
        piece: usize,
    ) -> Result<(), EngineError> {
        let mut first = 0;
        while first < self.launches.len() {
            let end = self.end_of_piece(first, piece);
            if end - first >= MIN_RECORDED {
                template.recordings.push(Recording {
                    id: device.create_graph(&self.launches[first..end])?,
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
        template: &GraphTemplate,
        device: &Arc<dyn Device>,
        held: &[Launch],
    ) -> Result<(), EngineError> {
        for recording in &template.recordings {
            for index in 0..recording.count {
                let at = recording.first + index;
                if self.launches[at] != held[at] {
                    device.update_graph_node(recording.id, index, &self.launches[at])?;
                }
            }
        }
        Ok(())
    }
}

impl GraphTemplate {
    /// Something, if the recordings hold the launches of this very sequence.
    fn holds_of(&self, sequence: &LaunchSequence) -> Option<()> {
        let held = self.holds.as_ref()?;
        Arc::ptr_eq(held, &sequence.launches).then_some(())
    }

    /// The recording that begins with launch `at`.
    fn at(&self, at: usize) -> Option<&Recording> {
        self.recordings
            .iter()
            .find(|recording| recording.first == at)
    }

    /// Takes from the time of a whole run how to cut the next ones.
    fn learn(&mut self, took: Duration, launches: usize, policy: LaunchPolicy) {
        let each = took / launches.max(1) as u32;
        let fitting = policy.time_slice.as_nanos() / each.as_nanos().max(1);
        let fitting = usize::try_from(fitting).unwrap_or(usize::MAX).max(1);
        // What nearly fits is not cut.
        self.piece = Some(if fitting.saturating_mul(2) >= launches {
            usize::MAX
        } else {
            fitting
        });
        self.is_plain |= each > policy.graph_threshold;
    }
}
