//! Compiles a graph to launches.

use std::ops::Range;
use std::sync::Arc;

use vgpu_engine::fuse::{Arrangement, FusionKind};
use vgpu_engine::{Cancellation, EngineError};
use vgpu_transport::ir::{Graph, Shape, Tensor, Type};

use super::split::Split;
use crate::activation_cache::ActivationCache;
use crate::context::ExecutionContext;
use crate::cpu_fallback::{CpuFallback, FallbackNode};
use crate::device::{Address, Launch};
use crate::fused_launch::{GroupNode, add_launch};
use crate::graph_exec::{LaunchSequence, PlanMemory};
use crate::launch::builder::Builder;
use crate::launch::place::Place;
use crate::launch::planned::PlannedLaunch;
use crate::launch::q8::next_product_quantizes;
use crate::megakernel::lowering;
use crate::memory::CudaMemory;
use crate::ops;
use crate::params::VgView;
use crate::written::WrittenRanges;

/// The state of a compilation.
pub(crate) struct Compiler<'a> {
    context: &'a Arc<ExecutionContext>,
    views: &'a [VgView],
    /// The graph in the order of execution, and the position of each node in the guest's graph.
    graph: &'a Graph,
    origin: &'a [usize],
    arrangement: &'a Arrangement,
    /// What the nodes write.
    written: WrittenRanges,
    cache: ActivationCache,
    work: Vec<Work>,
    pub(crate) groups: Vec<(usize, Vec<usize>)>,
    scratch_bytes: u64,
    /// Repacked weights that no kernel reads.
    pub(crate) refused: Vec<Address>,
}

/// What came of building the launches of some nodes.
enum Built {
    /// They were added.
    Added,
    /// No kernel takes the operands.
    NoKernel,
    /// This kernel may not be used, and has no fallback on the device.
    Missing(&'static str),
}

/// The work of a plan, in order.
enum Work {
    Launch(PlannedLaunch),
    Cpu(FallbackNode, usize),
}

impl<'a> Compiler<'a> {
    /// Compiles all nodes over tensors at these views, with memory of the engine at `place`.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if no kernel takes the operands of a node; [`EngineError`] of
    /// the CPU engine for its nodes; [`EngineError::Cancelled`] once `is_cancelled` returns `true`.
    pub(crate) fn of(
        arrangement: &'a Arrangement,
        views: &'a [VgView],
        place: Place,
        (context, is_cancelled): (&'a Arc<ExecutionContext>, &dyn Fn() -> bool),
    ) -> Result<Compiler<'a>, EngineError> {
        let mut compiler = Compiler {
            context,
            views,
            graph: &arrangement.graph,
            origin: &arrangement.origin,
            arrangement,
            written: WrittenRanges::of(&arrangement.graph, views),
            cache: ActivationCache::new(place),
            work: Vec::new(),
            groups: Vec::new(),
            scratch_bytes: 0,
            refused: Vec::new(),
        };
        let mut cancellation = Cancellation::new(is_cancelled);
        let mut at = 0;
        while at < arrangement.graph.nodes.len() {
            cancellation.check(at)?;
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

    /// Compiles a group of nodes, to one launch if there is a kernel for it.
    ///
    /// # Errors
    /// As for [`Compiler::of`].
    fn group(&mut self, kind: FusionKind, nodes: Range<usize>) -> Result<(), EngineError> {
        let seen: Vec<GroupNode> = { self.graph.nodes[nodes.clone()].iter() }
            .map(|node| GroupNode {
                op: node.op,
                dst: self.views[node.dst as usize],
                src: { node.src.as_slice().iter() }
                    .map(|src| src.map_or_else(VgView::default, |src| self.views[src as usize]))
                    .collect(),
            })
            .collect();
        let (graph, views) = (self.graph, self.views);
        let context = self.context;
        let needs_q8 =
            |x: &VgView| next_product_quantizes(graph, views, nodes.end, context.mmv_columns(), x);
        let added = self.build(nodes.clone(), |builder| {
            add_launch(kind, &seen, needs_q8, builder)
        });
        match added? {
            Built::Added => Ok(()),
            Built::NoKernel | Built::Missing(_) => nodes.clone().try_for_each(|at| self.node(at)),
        }
    }

    /// Compiles one node.
    ///
    /// # Errors
    /// As for [`Compiler::of`].
    fn node(&mut self, at: usize) -> Result<(), EngineError> {
        let node = &self.graph.nodes[at];
        if self.graph.dst(node).shape.is_empty() {
            return Ok(());
        }
        if CpuFallback::takes(self.graph, node) {
            return self.node_on_cpu(at);
        }
        let is_part = self.is_part(at);
        if is_part {
            // The turn may end behind each part, and another plan then uses the scratch memory of
            // the cache.
            self.cache.clear();
        }
        let before = self.work.len();
        let built = self.build(at..at + 1, |builder| Some(ops::compile(&node.op, builder)))?;
        let Built::Missing(kernel) = built else {
            for work in &mut self.work[before..] {
                if let Work::Launch(step) = work {
                    step.is_long = is_part;
                }
            }
            if is_part {
                self.cache.clear();
            }
            return Ok(());
        };
        let op = node.op.kind().ggml_name();
        self.context.kernels.report_missing(kernel, op);
        self.node_on_cpu(at).map_err(|error| match error {
            EngineError::Unsupported { op, why } => EngineError::Unsupported {
                op,
                why: format!(
                    "the kernel {kernel} is disabled or was not loaded, and the CPU engine does \
                     not run the node instead: {why}"
                ),
            },
            error => error,
        })
    }

    /// Whether the node is one of several parts of a divided node.
    fn is_part(&self, at: usize) -> bool {
        let is_of_the_same = |other: Option<usize>| {
            let origin = other.and_then(|other| self.origin.get(other));
            origin == Some(&self.origin[at])
        };
        is_of_the_same(at.checked_sub(1)) || is_of_the_same(Some(at + 1))
    }

    /// Compiles one node for the CPU engine.
    ///
    /// # Errors
    /// [`EngineError`] of the CPU engine.
    fn node_on_cpu(&mut self, at: usize) -> Result<(), EngineError> {
        // The CPU engine has no shares: the first one is the whole node.
        if self.arrangement.share(at).at > 0 {
            return Ok(());
        }
        let fallback = &self.context.cpu_fallback;
        let work = fallback.compile(self.graph, at, self.views)?;
        let node = &self.graph.nodes[at];
        let sources = node.src.as_slice().iter().flatten();
        // The CPU engine reads ggml's layout.
        let repacked = sources.filter(|&&src| self.views[src as usize].is_repacked());
        self.refused
            .extend(repacked.map(|&src| self.views[src as usize].data));
        self.work.push(Work::Cpu(work, self.origin[at]));
        self.groups.push((1, vec![self.origin[at]]));
        // The turn may end in the middle of the node, and another plan then uses the scratch memory
        // of the cache.
        self.cache.clear();
        Ok(())
    }

    /// Adds the launches that `body` builds for some nodes.
    ///
    /// # Errors
    /// As for [`Compiler::of`].
    fn build(
        &mut self,
        nodes: Range<usize>,
        body: impl FnOnce(&mut Builder<'_>) -> Option<Result<(), EngineError>>,
    ) -> Result<Built, EngineError> {
        let before = self.work.len();
        let cache = (&mut self.cache, before);
        let mut builder = Builder::new(self.graph, self.views, nodes.start, self.context, cache);
        builder.set_written(&self.written);
        builder.set_label(self.origin[nodes.start]);
        builder.set_share(self.arrangement.share(nodes.start));
        match body(&mut builder) {
            None => return Ok(Built::NoKernel),
            Some(Ok(())) => {}
            Some(Err(error)) => {
                let missing = builder.missing().ok_or(error)?;
                self.cache.forget_since(before);
                return Ok(Built::Missing(missing));
            }
        }
        self.scratch_bytes = self.scratch_bytes.max(builder.scratch_bytes());
        self.refused.extend(builder.refused());
        let steps: Vec<PlannedLaunch> = builder.into_launches().collect();
        let origin = &self.origin[nodes.clone()];
        self.groups.push((steps.len(), origin.to_vec()));
        self.work.extend(steps.into_iter().map(Work::Launch));
        self.wrote(nodes, before);
        Ok(Built::Added)
    }

    /// Drops cached activations that were made before launch `since` from what these nodes write.
    fn wrote(&mut self, nodes: Range<usize>, since: usize) {
        for node in &self.graph.nodes[nodes] {
            for written in node.written_tensors() {
                self.cache
                    .wrote(&self.views[written].address_range(), since);
            }
        }
    }

    /// Bytes of scratch memory of the plan.
    pub(crate) fn needed(&self) -> u64 {
        match (self.scratch_bytes, self.cache.is_used()) {
            (0, false) => 0,
            (bytes, _) => self.cache.place().cache_bytes + bytes,
        }
    }

    /// Bytes of scratch memory of the activation cache, and of nodes.
    pub(crate) fn parts(&self) -> (u64, u64) {
        (self.cache.peak(), self.scratch_bytes)
    }

    /// The launches, if nothing else runs and none is long: no node on the CPU engine, no
    /// megakernel, and no part of a divided node.
    pub(crate) fn launches(&self) -> Option<impl Iterator<Item = &Launch>> {
        let is_launch = |work: &Work| matches!(work, Work::Launch(step) if !step.is_long);
        let are_launches =
            self.context.stage_kernels().is_none() && self.work.iter().all(is_launch);
        let launches = self.work.iter().filter_map(|work| match work {
            Work::Launch(step) => Some(&step.launch),
            Work::Cpu(..) => None,
        });
        are_launches.then_some(launches)
    }

    /// The splits of the plan, over its memory, and the stage tables of its megakernels. `has_own`:
    /// no other plan uses the scratch memory.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if there is no memory for a stage table.
    pub(crate) fn into_splits(
        mut self,
        memory: &PlanMemory,
        ops: &[&'static str],
        has_own: bool,
    ) -> Result<(Vec<Split>, Vec<CudaMemory>), EngineError> {
        for &(made, used) in self.cache.spans() {
            for work in &mut self.work[made..used] {
                if let Work::Launch(step) = work {
                    step.may_yield = false;
                }
            }
        }
        for work in &mut self.work {
            if let Work::Launch(step) = work {
                step.may_yield |= has_own;
            }
        }
        let templates = &self.context.templates;
        let mut tables = Vec::new();
        let mut sequence = |plain: Vec<PlannedLaunch>| -> Result<Split, EngineError> {
            let lowered = lowering::lower(&plain, self.context, ops)?;
            let has_megakernels = !lowered.tables.is_empty();
            tables.extend(lowered.tables);
            let launches = match has_megakernels {
                true => Some(lowered.launches),
                false => { self.context.merge_kernels() }.and_then(|kernels| kernels.merge(&plain)),
            };
            let plain = LaunchSequence::new(plain, memory, templates);
            Ok(Split::Launches(match launches {
                Some(launches) => LaunchSequence::new(launches, memory, templates).or(plain),
                None => plain,
            }))
        };
        let mut splits = Vec::new();
        let mut steps: Vec<PlannedLaunch> = Vec::new();
        for work in self.work {
            match work {
                Work::Launch(step) => steps.push(step),
                Work::Cpu(work, node) => {
                    if !steps.is_empty() {
                        splits.push(sequence(std::mem::take(&mut steps))?);
                    }
                    splits.push(Split::Cpu { work, node });
                }
            }
        }
        if !steps.is_empty() {
            splits.push(sequence(steps)?);
        }
        Ok((splits, tables))
    }
}

/// Whether the tensor is aligned for kernels: plain elements to their size, quantised blocks to
/// their 16-bit fields. A misaligned access is a sticky error on a GPU; ggml never places tensors
/// so.
pub(crate) fn is_aligned(tensor: &Tensor) -> bool {
    let Shape { ty, .. } = tensor.shape;
    let wanted = match ty {
        Type::Mxfp4 => 1,
        ty if ty.is_quantized() => 2,
        ty => ty.block_bytes(),
    };
    // Strides of dimensions with one element do not count.
    let strides = tensor.shape.with_plain_strides().nb;
    std::iter::once(tensor.offset)
        .chain(strides)
        .all(|offset| offset.is_multiple_of(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_that_a_gpu_cannot_read_are_detected() {
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
        // The stride of a dimension with one element does not count.
        let mut one = tensor(Type::Q8_0, 24, 0);
        (one.shape.ne[1], one.shape.nb[1]) = (1, 33);
        assert!(is_aligned(&one));
    }
}
