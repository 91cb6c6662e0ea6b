//! From a graph to launches.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tracing::error;
use vgpu_transport::ir::{Graph, Op, Shape, Tensor, Type};

pub(super) use super::builder::{Builder, MOST_BLOCKS, threads_for};
use super::device::Address;
use super::emit::{Seen, emit};
use super::host::{Host, HostNode};
use super::kept::{KEPT_BYTES, Kept};
use super::layout::Layout;
use super::memory::CudaMemory;
use super::ops::{self, vector};
use super::params::{VgFault, VgView};
use super::scratch::Claim;
use super::segment::{Failure, Segment, Step};
use super::step;
use super::stream::{Stream, Taken};
use vgpu_engine::fuse::{Arrangement, Kind};
use vgpu_engine::{EngineError, Memory, Plan, Progress, RunError, Span, Turn};

/// A graph, compiled: launches in order, and now and then work of the host.
pub(super) struct CudaPlan {
    stream: Arc<Stream>,
    parts: Vec<Part>,
    /// The part that a run that has yielded goes on with.
    at: usize,
    /// What the launches and the host's pieces of work are for, in order: how many, and the nodes.
    groups: Vec<(usize, Vec<usize>)>,
    /// Names of the nodes' operators, for errors.
    ops: Vec<&'static str>,
    /// What it is called in logs.
    name: String,
    /// That the device works on the end of a run.
    under_way: Option<UnderWay>,
    /// Whether a run has yielded and is not over.
    has_yielded: bool,
    /// What the addresses in the launches point into, and [`Arranged::changes`](super::arranged::Arranged::changes) of each.
    memory: Vec<(Arc<dyn Memory>, u64)>,
    _scratch: Claim,
    /// The tables of steps.
    _tables: Vec<CudaMemory>,
}

/// The end of a run, which the device works on.
struct UnderWay {
    /// The node of the last launch.
    node: usize,
    _device: Taken,
}

enum Part {
    Launches(Segment),
    /// Runs on the host, between launches.
    Host {
        work: HostNode,
        node: usize,
    },
}

impl CudaPlan {
    pub(super) fn compile(
        graph: &Graph,
        buffers: &[Arc<dyn Memory>],
        stream: &Arc<Stream>,
    ) -> Result<CudaPlan, EngineError> {
        let memories = { buffers.iter() }
            .map(|memory| {
                let memory = cuda_memory(memory).ok_or(EngineError::ForeignMemory)?;
                memory.check_there()?;
                match memory.is_of(&stream.pool) {
                    true => Ok(memory),
                    false => Err(EngineError::ForeignMemory),
                }
            })
            .collect::<Result<Vec<&CudaMemory>, EngineError>>()?;
        let bases: Vec<Address> = memories.iter().map(|memory| memory.address()).collect();
        if let Some(tensor) = graph.tensors.iter().find(|tensor| !is_aligned(tensor)) {
            return Err(EngineError::Unsupported {
                op: "a graph",
                why: format!(
                    "{} at offset {} with strides {:?} is not where a GPU reads it",
                    tensor.shape.ty.ggml_name(),
                    tensor.offset,
                    tensor.shape.nb
                ),
            });
        }
        let plain: Vec<VgView> = graph
            .tensors
            .iter()
            .map(|t| VgView::new(bases[t.buffer as usize] + t.offset, &t.shape))
            .collect();
        let arrangement = match stream.pace.fuses {
            true => Arrangement::of(graph, vector::FEW_COLUMNS as u64),
            false => Arrangement::plain(graph),
        };
        let mut layout = Layout::of(graph, &memories, stream)?;
        let mut views;
        let mut compiler = loop {
            views = plain.clone();
            layout.mark(&mut views);
            let compiler = Compiler::of(&arrangement, &views, &bases, stream)?;
            if !layout.refuse(&compiler.refused) {
                break compiler;
            }
        };
        let needed = compiler.needed();
        let groups = std::mem::take(&mut compiler.groups);
        let ops: Vec<&'static str> = { graph.nodes.iter() }
            .map(|n| n.op.kind().ggml_name())
            .collect();
        let places: Vec<usize> = { buffers.iter() }
            .map(|memory| Arc::as_ptr(memory).cast::<()>() as usize)
            .collect();
        let (parts, tables) = compiler.into_parts(&places, &ops)?;
        let scratch = stream.scratch.claim(needed)?;
        layout.apply()?;
        let changes = memories.iter().map(|memory| memory.arranged().changes());
        Ok(CudaPlan {
            stream: Arc::clone(stream),
            parts,
            at: 0,
            groups,
            ops,
            name: "a graph".into(),
            under_way: None,
            has_yielded: false,
            memory: buffers.iter().cloned().zip(changes).collect(),
            _tables: tables,
            _scratch: scratch,
        })
    }

    /// Goes on from where the last turn has ended; `Done` says that all is launched. The node of the last launch is told,
    /// too, if there was one.
    ///
    /// # Safety
    /// The device is the caller's.
    unsafe fn go_on(&mut self, turn: &Turn) -> Result<(Progress, usize), RunError> {
        let stream = Arc::clone(&self.stream);
        let device = &stream.device;
        // SAFETY: the device is ours; what failed has ended, or the device is lost.
        unsafe { stream.mend() }.map_err(|error| failure(&self.ops, 0, &error))?;
        let mut last = 0;
        while let Some(part) = self.parts.get_mut(self.at) {
            let outcome = match part {
                Part::Launches(segment) => {
                    last = segment.last_node();
                    // SAFETY: compiled from a validated graph over memory that this plan holds on to; the device is
                    // the caller's.
                    unsafe { segment.advance(device, stream.pace, turn) }
                        .map_err(|Failure { node, error }| failure(&self.ops, node, &error))
                }
                // SAFETY: as above.
                Part::Host { work, node } => unsafe { work.run(&**device) }
                    .map(|()| Progress::Done)
                    .map_err(|error| at_node(&self.ops, *node, error)),
            };
            // What runs on the device still can fail as well, and comes first in the graph.
            let outcome = match outcome {
                Ok(Progress::Done) => {
                    self.at += 1;
                    continue;
                }
                Err(error) => {
                    stream.is_torn.store(true, Ordering::Relaxed);
                    Err(error)
                }
                other => other,
            };
            // One error is enough; and what runs on reports no fault.
            let outcome = outcome.map(|progress| (progress, last));
            if outcome.is_err() && device.synchronize().is_err() {
                return outcome;
            }
            // SAFETY: no kernel runs, and the device is the caller's.
            if let Some(fault) = unsafe { stream.take_fault() } {
                return Err(self.fault(&fault));
            }
            return outcome;
        }
        Ok((Progress::Done, last))
    }

    /// Begins anew the next time, whatever became of this run.
    fn rewind(&mut self) {
        (self.at, self.has_yielded) = (0, false);
        for part in &mut self.parts {
            if let Part::Launches(segment) = part {
                segment.rewind();
            }
        }
    }

    /// The failure of a run on a device that was there when it began. If it is lost now, that is logged with what ran.
    fn failed(&self, error: RunError) -> RunError {
        if let Some(reason) = self.stream.device.lost() {
            // What failed began at this node or before: the device works on several at a time.
            error!(
                "{} of {} nodes: {error}; the device is lost, with the memory of all guests: {reason}",
                self.name,
                self.ops.len()
            );
        }
        error
    }

    /// Runs part by part, and says how many seconds each launch and each piece of the host's work took.
    ///
    /// # Safety
    /// The device is the caller's.
    unsafe fn time(&mut self) -> Result<Vec<f64>, RunError> {
        let stream = Arc::clone(&self.stream);
        let mut times = Vec::new();
        for part in &mut self.parts {
            match part {
                Part::Launches(segment) => {
                    // SAFETY: as in `go_on`.
                    let outcome = unsafe { segment.time(&*stream.device) };
                    times.extend(
                        outcome
                            .map_err(|Failure { node, error }| failure(&self.ops, node, &error))?,
                    );
                }
                Part::Host { work, node } => {
                    let start = Instant::now();
                    // SAFETY: as in `go_on`.
                    unsafe { work.run(&*stream.device) }
                        .map_err(|error| at_node(&self.ops, *node, error))?;
                    times.push(start.elapsed().as_secs_f64());
                }
            }
        }
        // SAFETY: all has been waited for, and the device is the caller's.
        match unsafe { stream.take_fault() } {
            Some(fault) => Err(self.fault(&fault)),
            None => Ok(times),
        }
    }

    fn fault(&self, fault: &VgFault) -> RunError {
        let node = fault.node as usize;
        RunError::Index {
            node,
            op: self.ops[node],
            index: fault.index,
            count: fault.count as u64,
        }
    }
}

/// A plan in the making.
struct Compiler<'a> {
    stream: &'a Arc<Stream>,
    bases: &'a [Address],
    views: &'a [VgView],
    /// In our order, and where nodes were in the guest's.
    graph: &'a Graph,
    origin: &'a [usize],
    kept: Kept,
    work: Vec<Work>,
    groups: Vec<(usize, Vec<usize>)>,
    scratch_bytes: u64,
    /// Weights in planes that kernels do not read so.
    refused: Vec<Address>,
}

/// What a plan does, in order.
enum Work {
    Launch(Step),
    Host(HostNode, usize),
}

impl<'a> Compiler<'a> {
    /// Compiles all nodes, over tensors at these places.
    fn of(
        arrangement: &'a Arrangement,
        views: &'a [VgView],
        bases: &'a [Address],
        stream: &'a Arc<Stream>,
    ) -> Result<Compiler<'a>, EngineError> {
        let mut compiler = Compiler {
            stream,
            bases,
            views,
            graph: &arrangement.graph,
            origin: &arrangement.origin,
            kept: Kept::new(stream.scratch.base()),
            work: Vec::new(),
            groups: Vec::new(),
            scratch_bytes: 0,
            refused: Vec::new(),
        };
        let mut at = 0;
        while at < arrangement.graph.nodes.len() {
            at = match arrangement.group_at(at) {
                Some((kind, nodes)) => {
                    compiler.group(kind, nodes.clone())?;
                    nodes.end
                }
                None => {
                    compiler.node(at)?;
                    at + 1
                }
            };
        }
        Ok(compiler)
    }

    /// Compiles nodes that may become one launch.
    fn group(&mut self, kind: Kind, nodes: Range<usize>) -> Result<(), EngineError> {
        let seen: Vec<Seen> = { self.graph.nodes[nodes.clone()].iter() }
            .map(|node| Seen {
                op: node.op,
                dst: self.views[node.dst as usize],
                src: { node.src.as_slice().iter() }
                    .map(|src| src.map_or_else(VgView::default, |src| self.views[src as usize]))
                    .collect(),
            })
            .collect();
        let (graph, views) = (self.graph, self.views);
        let is_rounded = |x: &VgView| will_be_rounded(graph, views, nodes.end, x);
        let added = self.build(nodes.clone(), |builder| {
            emit(kind, &seen, is_rounded, builder)
        });
        match added {
            Some(outcome) => outcome,
            None => nodes.clone().try_for_each(|at| self.node(at)),
        }
    }

    /// Compiles a node by itself.
    fn node(&mut self, at: usize) -> Result<(), EngineError> {
        let node = &self.graph.nodes[at];
        if self.graph.dst(node).shape.is_empty() {
            return Ok(());
        }
        if Host::takes(self.graph, node) {
            let work = self.stream.host.compile(self.graph, node, self.bases)?;
            self.work.push(Work::Host(work, self.origin[at]));
            self.groups.push((1, vec![self.origin[at]]));
            self.wrote(at..at + 1, usize::MAX);
            return Ok(());
        }
        let outcome = self.build(at..at + 1, |builder| Some(ops::compile(&node.op, builder)));
        outcome.unwrap_or(Ok(()))
    }

    /// Adds what `body` adds for some nodes.
    fn build(
        &mut self,
        nodes: Range<usize>,
        body: impl FnOnce(&mut Builder<'_>) -> Option<Result<(), EngineError>>,
    ) -> Option<Result<(), EngineError>> {
        let before = self.work.len();
        let kept = (&mut self.kept, before);
        let mut builder = Builder::new(self.graph, self.views, nodes.start, self.stream, kept);
        builder.call_it(self.origin[nodes.start]);
        if let Err(error) = body(&mut builder)? {
            return Some(Err(error));
        }
        self.scratch_bytes = self.scratch_bytes.max(builder.scratch_bytes());
        self.refused.extend(builder.refused());
        let steps: Vec<Step> = builder.into_steps().collect();
        let origin = &self.origin[nodes.clone()];
        self.groups.push((steps.len(), origin.to_vec()));
        self.work.extend(steps.into_iter().map(Work::Launch));
        self.wrote(nodes, before);
        Some(Ok(()))
    }

    /// Forgets what was kept, before launch `since`, of what nodes have written.
    fn wrote(&mut self, nodes: Range<usize>, since: usize) {
        for node in &self.graph.nodes[nodes] {
            let also = matches!(node.op, Op::OptStepAdamw {} | Op::OptStepSgd {});
            let sources = node.src.as_slice().iter().flatten().filter(|_| also);
            for &written in sources.chain([&node.dst]) {
                self.kept
                    .wrote(&self.views[written as usize].extent(), since);
            }
        }
    }

    /// Bytes of working memory that the plan needs.
    fn needed(&self) -> u64 {
        match (self.scratch_bytes, self.kept.is_used()) {
            (0, false) => 0,
            (bytes, _) => KEPT_BYTES + bytes,
        }
    }

    /// The plan's parts, over the memory at these addresses, and the tables of its steps.
    fn into_parts(
        mut self,
        memory: &[usize],
        ops: &[&'static str],
    ) -> Result<(Vec<Part>, Vec<CudaMemory>), EngineError> {
        for &(made, used) in self.kept.spans() {
            for work in &mut self.work[made..used] {
                if let Work::Launch(step) = work {
                    step.may_stop = false;
                }
            }
        }
        let lineages = &self.stream.lineages;
        let mut tables = Vec::new();
        let mut segment = |plain: Vec<Step>| -> Result<Part, EngineError> {
            let arranged = step::arrange(&plain, self.stream, ops)?;
            let has_steps = !arranged.memory.is_empty();
            tables.extend(arranged.memory);
            let plain = Segment::new(plain, memory, lineages);
            Ok(Part::Launches(match has_steps {
                true => Segment::new(arranged.steps, memory, lineages).or(plain),
                false => plain,
            }))
        };
        let mut parts = Vec::new();
        let mut steps: Vec<Step> = Vec::new();
        for work in self.work {
            match work {
                Work::Launch(step) => steps.push(step),
                Work::Host(work, node) => {
                    if !steps.is_empty() {
                        parts.push(segment(std::mem::take(&mut steps))?);
                    }
                    parts.push(Part::Host { work, node });
                }
            }
        }
        if !steps.is_empty() {
            parts.push(segment(steps)?);
        }
        Ok((parts, tables))
    }
}

/// Memory as the engine's own.
fn cuda_memory(memory: &Arc<dyn Memory>) -> Option<&CudaMemory> {
    memory.as_any().downcast_ref()
}

/// How many nodes ahead of a norm its products are looked for.
const PRODUCTS_AHEAD: usize = 16;

/// Whether one of the nodes from `first` on rounds `x` for a product of few columns.
pub(super) fn will_be_rounded(graph: &Graph, views: &[VgView], first: usize, x: &VgView) -> bool {
    let ahead = graph.nodes[first..].iter().take(PRODUCTS_AHEAD);
    let mut products = ahead.filter(|node| match node.op {
        Op::MulMat { .. } => graph.dst(node).shape.ne[1] <= vector::FEW_COLUMNS as u64,
        Op::MulMatId { .. } => graph.dst(node).shape.ne[2] <= vector::FEW_COLUMNS as u64,
        _ => false,
    });
    products.any(|node| {
        let [Some(w), Some(y), ..] = *node.src.as_slice() else {
            return false;
        };
        let y = &views[y as usize];
        let is_quantized = graph.tensors[w as usize].shape.ty.is_quantized();
        is_quantized && y.data == x.data && y.ne[0] == x.ne[0] && y.rows() == x.rows()
    })
}

/// Whether elements lie at multiples of their size, and blocks at multiples of the 16-bit numbers in them. A GPU ends
/// everything that runs on it when a kernel reads elsewhere; ggml never puts tensors there.
fn is_aligned(tensor: &Tensor) -> bool {
    let Shape { ty, .. } = tensor.shape;
    let wanted = match ty {
        Type::Mxfp4 => 1,
        ty if ty.is_quantized() => 2,
        ty => ty.block_bytes(),
    };
    // Those of dimensions without extent do not count.
    let strides = tensor.shape.with_plain_strides().nb;
    std::iter::once(tensor.offset)
        .chain(strides)
        .all(|place| place.is_multiple_of(wanted))
}

fn failure(ops: &[&'static str], node: usize, error: &EngineError) -> RunError {
    RunError::Kernel {
        node,
        op: ops[node],
        message: error.to_string(),
    }
}

/// An error of a graph that consists of this one node, as one of the whole graph.
fn at_node(ops: &[&'static str], at: usize, mut error: RunError) -> RunError {
    match &mut error {
        RunError::Index { node, op, .. } | RunError::Kernel { node, op, .. } => {
            (*node, *op) = (at, ops[at]);
        }
        RunError::Moved => {}
    }
    error
}

impl Plan for CudaPlan {
    fn run(&mut self) -> Result<(), RunError> {
        let turn = Turn::new();
        while self.advance(&turn)? == Progress::Yielded {}
        Ok(())
    }

    fn advance(&mut self, turn: &Turn) -> Result<Progress, RunError> {
        match self.launch(turn)? {
            Progress::UnderWay => self.land().map(|()| Progress::Done),
            progress => Ok(progress),
        }
    }

    fn launch(&mut self, turn: &Turn) -> Result<Progress, RunError> {
        self.land()?;
        if !self.has_yielded && !self.is_current() {
            return Err(RunError::Moved);
        }
        let stream = Arc::clone(&self.stream);
        let taken = stream.take();
        if let Some(reason) = stream.device.lost() {
            self.rewind();
            return Err(failure(&self.ops, 0, &EngineError::Lost { reason }));
        }
        // SAFETY: the device is ours.
        match unsafe { self.go_on(turn) } {
            Ok((Progress::Done, node)) => {
                self.under_way = Some(UnderWay {
                    node,
                    _device: taken,
                });
                Ok(Progress::UnderWay)
            }
            Ok((progress, _)) => {
                self.has_yielded = true;
                Ok(progress)
            }
            Err(error) => {
                self.rewind();
                Err(self.failed(error))
            }
        }
    }

    fn land(&mut self) -> Result<(), RunError> {
        let Some(under_way) = self.under_way.take() else {
            return Ok(());
        };
        self.rewind();
        let outcome = match self.stream.device.synchronize() {
            Err(error) => {
                self.stream.is_torn.store(true, Ordering::Relaxed);
                Err(failure(&self.ops, under_way.node, &error))
            }
            // SAFETY: nothing runs any more, and the device is still ours.
            Ok(()) => match unsafe { self.stream.take_fault() } {
                Some(fault) => Err(self.fault(&fault)),
                None => Ok(()),
            },
        };
        outcome.map_err(|error| self.failed(error))
    }

    fn timeline(&mut self) -> Result<Vec<Span>, RunError> {
        self.land()?;
        if !self.is_current() {
            return Err(RunError::Moved);
        }
        let stream = Arc::clone(&self.stream);
        let _device = stream.take();
        if let Some(reason) = stream.device.lost() {
            return Err(failure(&self.ops, 0, &EngineError::Lost { reason }));
        }
        // SAFETY: the device is ours for as long as this runs.
        let times = unsafe { self.time() };
        self.rewind();
        let mut times = times.map_err(|error| self.failed(error))?.into_iter();
        let spans = self.groups.iter().map(|(count, nodes)| Span {
            nodes: nodes.clone(),
            seconds: times.by_ref().take(*count).sum(),
        });
        Ok(spans.collect())
    }

    fn call_it(&mut self, name: &str) {
        self.name = name.to_owned();
    }

    fn is_current(&self) -> bool {
        self.memory.iter().all(|(memory, changes)| {
            cuda_memory(memory).is_some_and(|memory| memory.arranged().changes() == *changes)
        })
    }
}

impl Drop for CudaPlan {
    fn drop(&mut self) {
        // Its memory must not be used any more, and the next plan must not find its faults.
        let _ = self.land();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_gpu_cannot_read_is_found() {
        let tensor = |ty, offset, stride: u64| {
            let mut shape = Shape::contiguous(ty, [256, 4, 1, 1]).expect("a small shape");
            shape.nb[1] += stride;
            Tensor {
                shape,
                buffer: 0,
                offset,
            }
        };
        for (ty, offset, stride, is_right) in [
            (Type::Q8_0, 24, 0, true),
            (Type::Q8_0, 25, 0, false),
            (Type::Q8_0, 24, 1, false),
            (Type::Mxfp4, 25, 1, true),
            (Type::F32, 4, 4, true),
            (Type::F32, 4, 2, false),
            (Type::F16, 2, 2, true),
        ] {
            let tensor = tensor(ty, offset, stride);
            assert_eq!(is_aligned(&tensor), is_right, "{tensor:?}");
        }
        // A stride over a dimension of one element says nothing.
        let mut one = tensor(Type::Q8_0, 24, 0);
        (one.shape.ne[1], one.shape.nb[1]) = (1, 33);
        assert!(is_aligned(&one));
    }
}
