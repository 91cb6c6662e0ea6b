//! What operators' files see of a plan that is compiled: a node, and where its launches go.

use std::ops::Range;

use vgpu_transport::ir::{Graph, Node, Shape, Type};

use super::grid::THREADS;
use super::q8::next_product_quantizes;
use crate::activation_cache::{ACTIVATION_CACHE_BYTES, ActivationCache};
use crate::autotune::GemmVariant;
use crate::context::ExecutionContext;
use crate::device::{Address, Launch};
use crate::launch::grid::MAX_GRID_YZ;
use crate::launch::planned::PlannedLaunch;
use crate::launch::q8::Q8Activations;
use crate::params::{
    Params, VG_MOVE_REPEAT, VgConvertF16Sm90Params, VgFaultSite, VgMoveParams, VgView,
};
use crate::source::HOPPER;
use vgpu_engine::EngineError;

/// What an operator's file sees of a node, and where it puts launches.
pub(crate) struct Builder<'a> {
    graph: &'a Graph,
    views: &'a [VgView],
    node: &'a Node,
    index: usize,
    context: &'a ExecutionContext,
    scratch_bytes: u64,
    launches: Vec<Launch>,
    kept: &'a mut ActivationCache,
    /// Bytes of working memory that others use before this node's.
    reserved: u64,
    /// Launches of the plan before these.
    before: usize,
    /// Weights in planes that no kernel reads so.
    refused: Vec<Address>,
}

impl<'a> Builder<'a> {
    /// For node `index` of a graph whose tensors lie at `views`, with what is kept of the launches `before`.
    pub(crate) fn new(
        graph: &'a Graph,
        views: &'a [VgView],
        index: usize,
        context: &'a ExecutionContext,
        (kept, before): (&'a mut ActivationCache, usize),
    ) -> Builder<'a> {
        Builder {
            graph,
            views,
            node: &graph.nodes[index],
            index,
            context,
            scratch_bytes: 0,
            launches: Vec::new(),
            reserved: kept.reserved(),
            kept,
            before,
            refused: Vec::new(),
        }
    }
}

impl Builder<'_> {
    /// Gives the node the number that the guest knows it by.
    pub(crate) fn set_label(&mut self, node: usize) {
        self.index = node;
    }

    /// Bytes of working memory that the launches use, and others before them.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.reserved + self.scratch_bytes
    }

    /// Says that `w` is in planes, and there is no kernel that reads it so. Then nothing of the plan is of use.
    pub(crate) fn refuse(&mut self, w: &VgView) {
        self.refused.push(w.data);
    }

    /// What was [refused](Builder::refuse).
    pub(crate) fn refused(&self) -> &[Address] {
        &self.refused
    }

    /// The launches. What one leaves in working memory for the next is in use until the last.
    pub(crate) fn into_launches(self) -> impl Iterator<Item = PlannedLaunch> {
        let count = self.launches.len();
        let node = self.index;
        { self.launches.into_iter().enumerate() }.map(move |(i, launch)| PlannedLaunch {
            launch,
            node,
            may_yield: i + 1 == count,
            covers: 1,
        })
    }

    /// The destination.
    pub(crate) fn dst(&self) -> VgView {
        self.views[self.node.dst as usize]
    }

    /// The destination's type, extents and strides as the IR has them.
    pub(crate) fn dst_shape(&self) -> &Shape {
        &self.graph.tensors[self.node.dst as usize].shape
    }

    /// Source `i`, which the operator's rules demand.
    pub(crate) fn src(&self, i: usize) -> VgView {
        let index = self.source(i);
        self.views[index.expect("validation refuses operations without a source they need")]
    }

    /// Source `i`, if there is one; a view of nothing otherwise.
    pub(crate) fn optional(&self, i: usize) -> VgView {
        self.source(i)
            .map_or_else(VgView::default, |index| self.views[index])
    }

    fn source(&self, i: usize) -> Option<usize> {
        let index = self.node.src.as_slice().get(i).copied().flatten()?;
        Some(index as usize)
    }

    /// Where kernels of this node report faults.
    pub(crate) fn place(&self) -> VgFaultSite {
        VgFaultSite {
            fault: self.context.fault(),
            node: self.index as u32,
            reserved: 0,
        }
    }

    /// The codebooks of the IQ formats (`VgCodebooks`).
    pub(crate) fn codebooks(&self) -> Address {
        self.context.codebooks()
    }

    /// What blocks of a launch count with: see [`ExecutionContext::counters`].
    pub(crate) fn counters(&self) -> Address {
        self.context.counters()
    }

    /// Working memory of the node: `bytes` more, aligned to 256 bytes. Nothing is known of its content.
    pub(crate) fn scratch(&mut self, bytes: u64) -> Address {
        let address = self.scratch_at(self.reserved + self.scratch_bytes);
        self.scratch_bytes += bytes.next_multiple_of(256);
        address
    }

    fn scratch_at(&self, offset: u64) -> Address {
        self.context.scratch.base() + ACTIVATION_CACHE_BYTES + offset
    }

    /// The halves that were laid out before under this key, for the launch that is added next.
    pub(crate) fn cached_f16(&mut self, key: &[u8]) -> Option<VgConvertF16Sm90Params> {
        self.kept.halves(key, self.before + self.launches.len())
    }

    /// `bytes` of working memory for what the launches that are added next lay out, and later nodes may find. Returns where
    /// it is and the launch that is next, for [`cache_f16`](Builder::cache_f16).
    pub(crate) fn reserve_f16(&mut self, bytes: u64) -> (Range<u64>, usize) {
        let bytes = bytes.next_multiple_of(256);
        // What was kept before is not used any more.
        let begin = if bytes <= self.reserved {
            0
        } else {
            self.reserved + self.scratch_bytes
        };
        if begin > 0 || self.reserved == 0 {
            self.scratch_bytes += bytes;
        }
        (begin..begin + bytes, self.before + self.launches.len())
    }

    /// The address of a part of [`reserve_f16`](Builder::reserve_f16).
    pub(crate) fn f16_address(&self, place: &Range<u64>, offset: u64) -> Address {
        self.scratch_at(place.start + offset)
    }

    /// Has later nodes find what was laid out there of these sources.
    pub(crate) fn cache_f16(
        &mut self,
        key: Vec<u8>,
        sources: &[&VgView],
        (place, made): (Range<u64>, usize),
        params: VgConvertF16Sm90Params,
    ) {
        let sources = { sources.iter() }.filter(|source| source.data != 0);
        let sources = sources.map(|source| source.extent()).collect();
        self.kept.cache_f16(key, sources, place, params, made);
    }

    /// What is kept of `x`, rounded, for the launch that is added next.
    pub(crate) fn cached_q8(&mut self, x: &VgView) -> Option<Q8Activations> {
        self.kept.get(x, self.before + self.launches.len())
    }

    /// A place where the launch that is added next leaves `x`, rounded, for products of later nodes, too. `None` where it
    /// is too large for that. `is_result` where that launch makes `x`.
    pub(crate) fn reserve_q8(&mut self, x: &VgView, is_result: bool) -> Option<Q8Activations> {
        self.kept
            .put(x, self.before + self.launches.len(), is_result)
    }

    /// Whether a product that comes next rounds `x`, and may find that done by the node before it.
    pub(crate) fn next_quantizes(&self, x: &VgView) -> bool {
        self.context.policy.fusion
            && next_product_quantizes(self.graph, self.views, self.index + 1, x)
    }

    /// Takes [`reserve_q8`](Builder::reserve_q8) back.
    pub(crate) fn drop_q8(&mut self, x: &VgView) {
        self.kept.forget(x);
    }

    /// Whether there are the kernels for Hopper GPUs.
    pub(crate) fn is_sm90(&self) -> bool {
        self.context.device.architecture() == HOPPER
    }

    /// The way of a product with weights of type `ty` and a result of so many rows and columns that was the fastest on this
    /// device, if that was measured.
    pub(crate) fn tuned_variant(&self, ty: Type, rows: i64, columns: i64) -> Option<GemmVariant> {
        { self.context.tuning() }?.lookup(ty, rows as u64, columns as u64)
    }

    /// Whether launches become steps where they can.
    pub(crate) fn uses_megakernel(&self) -> bool {
        self.context.policy.megakernel
    }

    /// Multiprocessors of the device.
    pub(crate) fn sm_count(&self) -> u32 {
        self.context.device.sm_count()
    }

    /// Adds a launch.
    pub(crate) fn launch(
        &mut self,
        kernel: &'static str,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        params: &impl Params,
    ) -> Result<(), EngineError> {
        self.launches.push(Launch {
            kernel: self.context.device.kernel(kernel)?,
            grid,
            threads: [threads, 1, 1],
            shared,
            params: params.as_bytes().to_vec(),
            cooperative: false,
        });
        Ok(())
    }

    /// Adds a launch with a thread for each of `n` things, or, where that would be very many, a thread for
    /// several of them.
    pub(crate) fn for_each(
        &mut self,
        kernel: &'static str,
        n: i64,
        params: &impl Params,
    ) -> Result<(), EngineError> {
        let most = u64::from(self.sm_count()) * 64;
        let blocks = (n as u64).div_ceil(u64::from(THREADS)).clamp(1, most);
        let threads = (n as u64).next_multiple_of(32).clamp(32, THREADS.into());
        self.launch(kernel, [blocks as u32, 1, 1], threads as u32, 0, params)
    }

    /// Adds a launch with a block for each of `rows`, or for several of them where there are very many.
    pub(crate) fn for_each_row(
        &mut self,
        kernel: &'static str,
        rows: i64,
        threads: u32,
        shared: u32,
        params: &impl Params,
    ) -> Result<(), EngineError> {
        let blocks = rows.clamp(1, 1 << 20) as u32;
        self.launch(kernel, [blocks, 1, 1], threads, shared, params)
    }

    /// Adds a launch with a block for each index below `grid`, or in dimensions 1 and 2 for every so many of them: the
    /// kernel goes on from its own index by the extent of the grid.
    pub(crate) fn launch_over(
        &mut self,
        kernel: &'static str,
        grid: [i64; 3],
        threads: u32,
        shared: u32,
        params: &impl Params,
    ) -> Result<(), EngineError> {
        let most = [i64::from(i32::MAX), MAX_GRID_YZ, MAX_GRID_YZ];
        let blocks = std::array::from_fn(|d| grid[d].min(most[d]) as u32);
        self.launch(kernel, blocks, threads, shared, params)
    }

    /// Has `body` add launches that write rows of `f32` to the view it is given: the destination, or, if that overlaps a
    /// source, scratch memory that is copied there in the end. No sane graph lets them overlap, but the result must not
    /// depend on which block comes first.
    pub(crate) fn staged(
        &mut self,
        body: impl FnOnce(&mut Self, VgView) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let dst = self.dst();
        let sources = (0..self.node.src.as_slice().len()).map(|i| self.optional(i));
        if !{ sources }.any(|source| source.overlaps(&dst)) {
            return body(self, dst);
        }
        let shape = Shape::contiguous(Type::F32, dst.ne.map(|n| n as u64))
            .ok_or_else(|| self.unsupported("results beyond any memory"))?;
        let bytes = shape.extent().unwrap_or(u64::MAX / 2);
        let staged = VgView::new(self.scratch(bytes), &shape);
        body(self, staged)?;
        let copy = VgMoveParams {
            dst,
            src: staged,
            size: size_of::<f32>() as u32,
            op: VG_MOVE_REPEAT,
            ..VgMoveParams::default()
        };
        self.for_each("vg_move", dst.elements(), &copy)
    }

    /// Most bytes of shared memory that a launch may ask for.
    pub(crate) fn max_shared_per_block(&self) -> u32 {
        self.context.device.max_shared_per_block()
    }

    /// The error for what the engine cannot do after all.
    pub(crate) fn unsupported(&self, why: impl Into<String>) -> EngineError {
        EngineError::Unsupported {
            op: self.node.op.kind().ggml_name(),
            why: why.into(),
        }
    }
}
