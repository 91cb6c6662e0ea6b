//! Sequences of launches, and how they reach the device: one by one the first time, as CUDA graphs
//! from then on.
//!
//! A graph instance outlives the plan that it was made for. When the KV cache has grown, the guest
//! sends a graph with other lengths and offsets, and its plan has the same kernels in the same
//! order, on the same memory, with other parameters here and there. Such plans share a *template*
//! ([`GraphTemplate`]) with its graph instances: nodes whose parameters differ are updated in
//! place, about a microsecond each, and nothing is instantiated again. So parameters stay constants
//! of their launches, and no kernel has to read them from memory first.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing::warn;

use crate::device::{Device, Event, GraphExecId, KernelId, Launch};
use crate::launch::planned::PlannedLaunch;
use crate::launch::policy::LaunchPolicy;
use crate::lock::Rank;
use vgpu_engine::{ALLOCATION_BYTES, BatchGroup, BatchKeys, EngineError, RunStatus, Turn};
use vgpu_transport::lock::lock_at;

/// The most launches of a batch until a run was measured. Such a run begins with a single launch,
/// and adapts its batches to the time that each takes.
const MAX_UNKNOWN_BATCH: usize = 32;

/// Batches that are handed to the device beyond the one that is running.
const BATCHES_AHEAD: usize = 1;

/// A sequence of launches.
pub(crate) struct LaunchSequence {
    launches: Arc<[Launch]>,
    nodes: Vec<u32>,
    /// Whether another plan may run after each launch.
    stops: Vec<bool>,
    /// Whether each launch is a part of a divided node, with which a batch ends.
    long: Vec<bool>,
    /// The number of launches of `plain` that each launch replaces.
    covers: Vec<usize>,
    /// The same work without megakernels and merged launches: for a device that refuses a
    /// megakernel, and for profiles.
    plain: Option<Box<LaunchSequence>>,
    template: Arc<BatchGroup<Mutex<GraphTemplate>>>,
    /// Keeps the number of the memory.
    _memory: PlanMemory,
    /// Launches that the current run has handed to the device.
    done: usize,
    /// The megakernel launch that the device has just refused.
    refused: Option<usize>,
    /// The time of the turns of this run that are over. Each ended with the device idle.
    spent: Duration,
    /// Launches of the next batch, until a run was measured.
    unknown_batch: usize,
    /// Whether a part of the current run was in a batch of plans, and is not in `spent`.
    is_partial: bool,
}

/// An error of a launch, or of work under way when it was handed to the device.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) node: usize,
    /// The launch that the device has refused, which has not run, and none behind it. `None` if it
    /// is not known what has run.
    pub(crate) refused: Option<usize>,
    pub(crate) error: EngineError,
}

/// The templates of a context that are in use.
#[derive(Default)]
pub(crate) struct GraphTemplates {
    /// The memory of plans. A plan can have thousands of buffers and of sequences, so sequences
    /// have the number of the memory, and neither copy nor compare the buffers.
    memory: BatchKeys,
    /// By the number of the memory and the kernels in order.
    known: BatchKeys<Mutex<GraphTemplate>>,
}

/// The memory of a plan, which its sequences have in common.
pub(crate) type PlanMemory = Arc<BatchGroup>;

impl GraphTemplates {
    /// The memory with these addresses.
    pub(crate) fn memory(&self, addresses: impl Iterator<Item = usize>) -> PlanMemory {
        self.memory.group(addresses.map(|at| at as u64).collect())
    }

    fn of(
        &self,
        steps: &[PlannedLaunch],
        memory: &PlanMemory,
    ) -> Arc<BatchGroup<Mutex<GraphTemplate>>> {
        let kernels = steps.iter().map(|step| u64::from(step.launch.kernel.0));
        let key = std::iter::once(memory.number).chain(kernels);
        self.known.group(key.collect())
    }
}

/// What sequences with the same kernels on the same memory share.
#[derive(Default)]
struct GraphTemplate {
    /// Launches of a batch, once a run was measured.
    batch: Option<usize>,
    /// Whether graphs are of no use, or the device does not make them.
    is_disabled: bool,
    graphs: Vec<GraphExec>,
    /// The launches whose parameters the graph instances have.
    params_of: Option<Arc<[Launch]>>,
}

/// A graph instance of consecutive launches.
struct GraphExec {
    device: Arc<dyn Device>,
    id: GraphExecId,
    first: usize,
    count: usize,
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        self.device.destroy_graph(self.id);
    }
}

impl LaunchSequence {
    /// A sequence of `steps`, at least one, over `memory`, which the plan keeps alive.
    pub(crate) fn new(
        steps: Vec<PlannedLaunch>,
        memory: &PlanMemory,
        templates: &GraphTemplates,
    ) -> LaunchSequence {
        let template = templates.of(&steps, memory);
        LaunchSequence {
            nodes: steps.iter().map(|step| step.node as u32).collect(),
            stops: steps.iter().map(|step| step.may_yield).collect(),
            long: steps.iter().map(|step| step.is_long).collect(),
            covers: steps.iter().map(|step| step.covers).collect(),
            plain: None,
            launches: steps.into_iter().map(|step| step.launch).collect(),
            template,
            _memory: Arc::clone(memory),
            done: 0,
            refused: None,
            spent: Duration::ZERO,
            unknown_batch: 1,
            is_partial: false,
        }
    }

    /// The same sequence, which is replaced by `plain` when the device refuses a megakernel, and
    /// whose profile is that of `plain`.
    #[must_use]
    pub(crate) fn or(self, plain: LaunchSequence) -> LaunchSequence {
        LaunchSequence {
            plain: Some(Box::new(plain)),
            ..self
        }
    }

    /// Hands launches to the device until all are under way, or until another plan waits and may
    /// run. In the latter case the device is idle when the call returns.
    ///
    /// # Errors
    /// [`Failure`] with the node and the error of the device.
    ///
    /// # Safety
    /// The memory that the launches use exists, and nobody else uses the device.
    pub(crate) unsafe fn advance(
        &mut self,
        device: &Arc<dyn Device>,
        policy: LaunchPolicy,
        turn: &Turn,
    ) -> Result<RunStatus, Failure> {
        // SAFETY: the caller guarantees that the memory in the parameters of `self.launches` exists
        // and that nobody else uses the device.
        let outcome = unsafe { self.go_on(device, policy, turn) };
        let (Err(Failure { error, .. }), Some(at)) = (&outcome, self.refused.take()) else {
            return outcome;
        };
        let Some(mut plain) = self.plain.take() else {
            return outcome;
        };
        // A refused launch has not run. The launches before it have run or are under way.
        warn!("the device refuses a megakernel, its launches run one by one from now on: {error}");
        plain.done = self.covers[..at].iter().sum();
        *self = *plain;
        // SAFETY: `self` is now the plain sequence, whose launches use the memory of the megakernel
        // that they replace. The caller guarantees that this memory exists and that nobody else
        // uses the device.
        unsafe { self.go_on(device, policy, turn) }
    }

    /// Hands launches to the device from `self.done` on.
    ///
    /// # Errors
    /// As for [`LaunchSequence::advance`]. `self.refused` is the launch if the device refused a
    /// megakernel.
    ///
    /// # Safety
    /// As for [`LaunchSequence::advance`].
    unsafe fn go_on(
        &mut self,
        device: &Arc<dyn Device>,
        policy: LaunchPolicy,
        turn: &Turn,
    ) -> Result<RunStatus, Failure> {
        let template = Arc::clone(&self.template);
        let mut template = lock_at(Rank::Template, &template.state);
        let failed = |node: usize, error| Failure {
            node,
            refused: None,
            error,
        };
        let start = Instant::now();
        if let (Some(batch), 0) = (template.batch, self.done) {
            self.prepare(&mut template, device, (batch, policy.min_graph_launches));
        }
        let mut under_way: Vec<Event> = Vec::new();
        while self.done < self.launches.len() {
            let batch = template.batch.unwrap_or(self.unknown_batch);
            let (begin, end) = (Instant::now(), self.end_of_batch(self.done, batch));
            let launches = end - self.done;
            let graph = template
                .has_params_of(self)
                .and_then(|()| template.at(self.done))
                .filter(|graph| graph.count == launches);
            // SAFETY: `has_params_of` has confirmed that the nodes of the graph have the parameters
            // of `self.launches`. The caller guarantees that the memory in these parameters exists
            // until the device is synchronised.
            let launched = graph.map(|graph| unsafe { device.launch_graph(graph.id) });
            match launched {
                Some(Ok(())) => {}
                Some(Err(error)) if device.lost().is_some() => {
                    return Err(failed(self.nodes[self.done] as usize, error));
                }
                refused => {
                    if let Some(Err(error)) = refused {
                        template.give_up(&error);
                    }
                    for at in self.done..end {
                        // SAFETY: the caller guarantees that the memory in the parameters of
                        // `self.launches` exists until the device is synchronised.
                        unsafe { device.launch(&self.launches[at]) }.map_err(|error| {
                            let is_refused = matches!(error, EngineError::Unsupported { .. });
                            self.refused =
                                (self.launches[at].cooperative && is_refused).then_some(at);
                            Failure {
                                node: self.nodes[at] as usize,
                                refused: Some(at),
                                error,
                            }
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
            // The time of a batch is measured alone.
            let ahead = template.batch.map_or(0, |_| BATCHES_AHEAD);
            if under_way.len() > ahead {
                let event = under_way.remove(0);
                device
                    .wait_event(event)
                    .map_err(|error| failed(here, error))?;
            }
            if template.batch.is_none() {
                let fitting = fitting_launches(begin.elapsed(), launches, policy.time_slice);
                let most = MAX_UNKNOWN_BATCH.min(2 * self.unknown_batch);
                self.unknown_batch = fitting.clamp(1, most);
            }
            if turn.is_over() {
                device.synchronize().map_err(|error| failed(here, error))?;
                self.spent += start.elapsed();
                return Ok(RunStatus::Yielded);
            }
        }
        if template.batch.is_none() && !self.is_partial {
            let last = self.last_node();
            device.synchronize().map_err(|error| failed(last, error))?;
            template.learn(self.spent + start.elapsed(), self.launches.len(), policy);
        }
        self.rewind();
        Ok(RunStatus::Done)
    }

    /// Runs all launches without megakernels, and returns the seconds that each took.
    ///
    /// # Errors
    /// As for [`LaunchSequence::advance`].
    ///
    /// # Safety
    /// As for [`LaunchSequence::advance`].
    pub(crate) unsafe fn time(&mut self, device: &dyn Device) -> Result<Vec<f64>, Failure> {
        self.rewind();
        // SAFETY: the launches are those of `self` or of `self.plain`, which use the same memory.
        // The caller guarantees that this memory exists and that nobody else uses the device.
        let outcome =
            unsafe { device.time_launches(&self.plain.as_deref().unwrap_or(self).launches) };
        outcome.map_err(|error| Failure {
            node: self.last_node(),
            refused: None,
            error,
        })
    }

    /// Bytes of host memory, without the sequence itself and the memory of its plan. The graph
    /// instances of the driver do not count.
    pub(crate) fn bytes(&self) -> usize {
        let params = self.launches.iter().map(|launch| launch.params.capacity());
        let each = size_of::<Launch>() + ALLOCATION_BYTES;
        let tables = self.nodes.capacity() * size_of::<u32>()
            + self.stops.capacity()
            + self.long.capacity()
            + self.covers.capacity() * size_of::<usize>()
            + 5 * ALLOCATION_BYTES;
        let plain = self.plain.as_deref();
        let plain = plain.map_or(0, |plain| size_of::<LaunchSequence>() + plain.bytes());
        let template = self.template.bytes() + 8 * ALLOCATION_BYTES;
        params.sum::<usize>() + self.launches.len() * each + tables + plain + template
    }

    /// The kernels of the launches, in order.
    pub(crate) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        self.launches.iter().map(|launch| launch.kernel)
    }

    /// The node of the last launch.
    pub(crate) fn last_node(&self) -> usize {
        *self.nodes.last().expect("a sequence has launches") as usize
    }

    /// Starts the next run at the first launch.
    pub(crate) fn rewind(&mut self) {
        self.done = 0;
        self.spent = Duration::ZERO;
        self.is_partial = false;
    }

    /// The launches.
    pub(crate) fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// The node of launch `at`.
    pub(crate) fn node(&self, at: usize) -> usize {
        self.nodes[at] as usize
    }

    /// Launches that the current run has handed to the device.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Says that the current run has got to launch `done` with other plans.
    pub(crate) fn resume_at(&mut self, done: usize) {
        self.done = done;
        self.is_partial = true;
    }

    /// The end of the batch that begins with launch `at`.
    fn end_of_batch(&self, at: usize, batch: usize) -> usize {
        let all = self.launches.len();
        let least = at.saturating_add(batch).min(all);
        // The time of a batch is learned from other parameters, with which no node was long.
        let long = (at..least).find(|&launch| self.long[launch]);
        let least = long.map_or(least, |launch| launch + 1);
        let stop = (least..all).find(|&end| self.stops[end - 1]);
        stop.unwrap_or(all)
    }

    /// Makes the graph instances of the template run the launches of this sequence. If the device
    /// cannot, launches go one by one.
    fn prepare(
        &self,
        template: &mut GraphTemplate,
        device: &Arc<dyn Device>,
        (batch, least): (usize, usize),
    ) {
        if template.is_disabled || template.has_params_of(self).is_some() {
            return;
        }
        let outcome = match template.params_of.take() {
            Some(held) => self.update(template, device, &held),
            None => self.instantiate(template, device, (batch, least)),
        };
        match outcome {
            Ok(()) => template.params_of = Some(Arc::clone(&self.launches)),
            Err(error) => {
                template.give_up(&error);
            }
        }
    }

    /// Instantiates a graph for each batch of at least `least` launches.
    ///
    /// # Errors
    /// [`EngineError`] of the device if it refuses a graph.
    fn instantiate(
        &self,
        template: &mut GraphTemplate,
        device: &Arc<dyn Device>,
        (batch, least): (usize, usize),
    ) -> Result<(), EngineError> {
        let mut first = 0;
        while first < self.launches.len() {
            let end = self.end_of_batch(first, batch);
            if end - first >= least {
                template.graphs.push(GraphExec {
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

    /// Updates the nodes that differ from the launches `held`, which the instances have now.
    ///
    /// # Errors
    /// [`EngineError`] of the device if it refuses the parameters of a node.
    fn update(
        &self,
        template: &GraphTemplate,
        device: &Arc<dyn Device>,
        held: &[Launch],
    ) -> Result<(), EngineError> {
        for graph in &template.graphs {
            for index in 0..graph.count {
                let at = graph.first + index;
                if self.launches[at] != held[at] {
                    device.update_graph_node(graph.id, index, &self.launches[at])?;
                }
            }
        }
        Ok(())
    }
}

/// How many launches fit a time slice, if `launches` have taken `took`.
fn fitting_launches(took: Duration, launches: usize, time_slice: Duration) -> usize {
    let fitting = time_slice.as_nanos() * launches as u128 / took.as_nanos().max(1);
    usize::try_from(fitting).unwrap_or(usize::MAX)
}

impl GraphTemplate {
    /// `Some` if the graph instances have the parameters of this sequence.
    fn has_params_of(&self, sequence: &LaunchSequence) -> Option<()> {
        let held = self.params_of.as_ref()?;
        Arc::ptr_eq(held, &sequence.launches).then_some(())
    }

    /// Runs launches one by one from now on, since the device refuses graphs.
    fn give_up(&mut self, error: &EngineError) {
        warn!("no CUDA graph is used, launches run one by one: {error}");
        self.graphs.clear();
        (self.params_of, self.is_disabled) = (None, true);
    }

    /// The graph instance that begins with launch `at`.
    fn at(&self, at: usize) -> Option<&GraphExec> {
        self.graphs.iter().find(|graph| graph.first == at)
    }

    /// Derives the size of batches from the duration of a whole run.
    fn learn(&mut self, took: Duration, launches: usize, policy: LaunchPolicy) {
        let each = took / launches.max(1) as u32;
        let fitting = fitting_launches(took, launches, policy.time_slice).max(1);
        // A sequence of at most two batches is not cut.
        self.batch = Some(if fitting.saturating_mul(2) >= launches {
            usize::MAX
        } else {
            fitting
        });
        self.is_disabled |= each > policy.graph_threshold;
    }
}
