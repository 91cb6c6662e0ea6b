//! The builder of launches: what an operator sees of a node, and where it adds launches.

use std::cell::Cell;
use std::ops::Range;

use vgpu_transport::ir::{Graph, Node, Shape, Type};

use super::grid::THREADS;
use super::q8::next_product_quantizes;
use crate::activation_cache::ActivationCache;
use crate::autotune::GemmVariant;
use crate::context::ExecutionContext;
use crate::device::{Address, KernelId, Launch};
use crate::launch::grid::MAX_GRID_YZ;
use crate::launch::planned::PlannedLaunch;
use crate::launch::q8::Q8Activations;
use crate::params::{
    Params, VG_MOVE_REPEAT, VgConvertF16Sm90Params, VgFaultSite, VgMoveParams, VgView,
};
use crate::source::SM_90A;
use crate::written::WrittenRanges;
use vgpu_engine::EngineError;
use vgpu_engine::fuse::Share;

/// The builder of the launches of a node, or of a group of nodes.
pub(crate) struct Builder<'a> {
    graph: &'a Graph,
    views: &'a [VgView],
    node: &'a Node,
    index: usize,
    context: &'a ExecutionContext,
    scratch_bytes: u64,
    launches: Vec<Launch>,
    cache: &'a mut ActivationCache,
    /// Bytes at the start of the nodes' scratch memory that other nodes still use.
    reserved: u64,
    /// The number of launches of the plan before these.
    before: usize,
    /// Repacked weights that no kernel reads.
    refused: Vec<Address>,
    /// What the nodes of the graph write, if it is known.
    written: Option<&'a WrittenRanges>,
    /// The kernel that was asked for and may not be used.
    missing: Cell<Option<&'static str>>,
    /// The share of the node that the launches compute.
    share: Share,
}

impl<'a> Builder<'a> {
    /// A builder for node `index` of a graph whose tensors are at `views`, with the activation
    /// cache of the plan and the number of launches `before`.
    pub(crate) fn new(
        graph: &'a Graph,
        views: &'a [VgView],
        index: usize,
        context: &'a ExecutionContext,
        (cache, before): (&'a mut ActivationCache, usize),
    ) -> Builder<'a> {
        Builder {
            graph,
            views,
            node: &graph.nodes[index],
            index,
            context,
            scratch_bytes: 0,
            launches: Vec::new(),
            reserved: cache.reserved(),
            cache,
            before,
            refused: Vec::new(),
            written: None,
            missing: Cell::new(None),
            share: Share::WHOLE,
        }
    }

    /// Says what the nodes of the graph write.
    pub(crate) fn set_written(&mut self, written: &'a WrittenRanges) {
        self.written = Some(written);
    }
}

impl Builder<'_> {
    /// Whether no launch of the plan writes these weights: no node does, and they are not in
    /// scratch memory.
    pub(crate) fn is_constant(&self, w: &VgView) -> bool {
        let range = w.address_range();
        let is_written = |written: &WrittenRanges| written.overlap(&range);
        self.written.is_some_and(|written| !is_written(written)) && !self.cache.place().has(w.data)
    }

    /// Sets the node number that faults and errors name: the number in the guest's graph.
    pub(crate) fn set_label(&mut self, node: usize) {
        self.index = node;
    }

    /// Sets the share of the node that the launches compute, instead of all of it. Only operators
    /// that ask for [`share_of`](Builder::share_of) have shares.
    pub(crate) fn set_share(&mut self, share: Share) {
        self.share = share;
    }

    /// The share of `0..n` that the launches compute. Empty: there is nothing to launch.
    pub(crate) fn share_of(&self, n: i64) -> Range<i64> {
        self.checked(self.share.range(n as u64))
    }

    /// The share of rows `0..n` that the launches compute, of which each is a sum over those before
    /// it.
    pub(crate) fn share_of_sums(&self, n: i64) -> Range<i64> {
        self.checked(self.share.range_of_sums(n as u64))
    }

    /// A share that is not empty: a node has at most as many shares as it has something for
    /// ([`most_parts`](vgpu_engine::fuse::most_parts)).
    fn checked(&self, share: Range<u64>) -> Range<i64> {
        debug_assert!(
            !share.is_empty() || self.share.of == 1,
            "node {} has nothing for {:?}",
            self.index,
            self.share
        );
        share.start as i64..share.end as i64
    }

    /// Whether no launches of the node come before these.
    pub(crate) fn is_first_share(&self) -> bool {
        self.share.at == 0
    }

    /// Bytes of scratch memory that the launches use, those of other nodes before them included.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.reserved + self.scratch_bytes
    }

    /// Says that `w` is repacked and that no kernel reads it so. The graph has to be compiled again
    /// with plain weights.
    pub(crate) fn refuse(&mut self, w: &VgView) {
        self.refused.push(w.data);
    }

    /// The weights that were [refused](Builder::refuse).
    pub(crate) fn refused(&self) -> &[Address] {
        &self.refused
    }

    /// A kernel that a launch needs and that may not be used. The error of that launch has ended
    /// what was built.
    pub(crate) fn missing(&self) -> Option<&'static str> {
        self.missing.get()
    }

    /// Whether a kernel may be used. Each choice between kernels asks this.
    pub(crate) fn has(&self, kernel: &'static str) -> bool {
        self.context.kernels.has(kernel)
    }

    /// The kernel called `name`, without which the node does not run on the device.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the kernel may not be used. [`missing`](Builder::missing) names
    /// it from now on.
    pub(crate) fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError> {
        let found = self.context.kernels.find(name);
        if found.is_err() {
            self.missing.set(Some(name));
        }
        found
    }

    /// The launches. Scratch memory is in use from the first launch to the last, so only the last
    /// may yield.
    pub(crate) fn into_launches(self) -> impl Iterator<Item = PlannedLaunch> {
        let count = self.launches.len();
        let node = self.index;
        { self.launches.into_iter().enumerate() }.map(move |(i, launch)| PlannedLaunch {
            launch,
            node,
            may_yield: i + 1 == count,
            is_long: false,
            covers: 1,
        })
    }

    /// The destination.
    pub(crate) fn dst(&self) -> VgView {
        self.views[self.node.dst as usize]
    }

    /// The destination's type, lengths and strides in the IR.
    pub(crate) fn dst_shape(&self) -> &Shape {
        &self.graph.tensors[self.node.dst as usize].shape
    }

    /// Source `i`, which the rules of the operator require.
    pub(crate) fn src(&self, i: usize) -> VgView {
        let index = self.source(i);
        self.views[index.expect("validation refuses nodes without a required source")]
    }

    /// Source `i`, or an empty view if there is none.
    pub(crate) fn optional(&self, i: usize) -> VgView {
        self.source(i)
            .map_or_else(VgView::default, |index| self.views[index])
    }

    fn source(&self, i: usize) -> Option<usize> {
        let index = self.node.src.as_slice().get(i).copied().flatten()?;
        Some(index as usize)
    }

    /// Where kernels report faults of this node.
    pub(crate) fn fault_site(&self) -> VgFaultSite {
        VgFaultSite {
            fault: self.cache.place().fault,
            node: self.index as u32,
            reserved: 0,
        }
    }

    /// The codebooks of the IQ formats (`VgCodebooks`).
    pub(crate) fn codebooks(&self) -> Address {
        self.context.codebooks()
    }

    /// The counters for the blocks of a launch: see [`ExecutionContext::counters`].
    pub(crate) fn counters(&self) -> Address {
        self.context.counters()
    }

    /// Allocates `bytes` of scratch memory of unknown content for the node, aligned to 256 bytes.
    pub(crate) fn scratch(&mut self, bytes: u64) -> Address {
        let address = self.scratch_at(self.reserved + self.scratch_bytes);
        self.scratch_bytes += bytes.next_multiple_of(256);
        address
    }

    fn scratch_at(&self, offset: u64) -> Address {
        let place = self.cache.place();
        place.scratch + place.cache_bytes + offset
    }

    /// The F16 activations cached under this key, for the launch that is added next.
    pub(crate) fn cached_f16(&mut self, key: &[u8]) -> Option<VgConvertF16Sm90Params> {
        self.cache.f16(key, self.before + self.launches.len())
    }

    /// Allocates `bytes` of scratch memory for F16 activations that later nodes may find. Returns
    /// the range and the index of the next launch, for [`cache_f16`](Builder::cache_f16).
    pub(crate) fn reserve_f16(&mut self, bytes: u64) -> (Range<u64>, usize) {
        let bytes = bytes.next_multiple_of(256);
        // The activations that were cached before are given up.
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

    /// The address at `offset` of a range from [`reserve_f16`](Builder::reserve_f16).
    pub(crate) fn f16_address(&self, range: &Range<u64>, offset: u64) -> Address {
        self.scratch_at(range.start + offset)
    }

    /// Caches F16 activations in that range, made of these sources.
    pub(crate) fn cache_f16(
        &mut self,
        key: Vec<u8>,
        sources: &[&VgView],
        (range, made): (Range<u64>, usize),
        params: VgConvertF16Sm90Params,
    ) {
        let sources = { sources.iter() }.filter(|source| source.data != 0);
        let sources = sources.map(|source| source.address_range()).collect();
        self.cache.cache_f16(key, sources, range, params, made);
    }

    /// The cached q8 activations of `x`, for the launch that is added next.
    pub(crate) fn cached_q8(&mut self, x: &VgView) -> Option<Q8Activations> {
        self.cache.get(x, self.before + self.launches.len())
    }

    /// Allocates room in the activation cache for the q8 activations of `x`, which the launch that
    /// is added next writes. `is_result`: that launch also computes `x`. `None` if they are too
    /// large.
    pub(crate) fn reserve_q8(&mut self, x: &VgView, is_result: bool) -> Option<Q8Activations> {
        self.cache
            .put(x, self.before + self.launches.len(), is_result)
    }

    /// Whether a product soon after this node quantises `x`, so that this node may do it.
    pub(crate) fn next_quantizes(&self, x: &VgView) -> bool {
        let context = self.context;
        let first = self.index + 1;
        context.policy.fusion
            && next_product_quantizes(self.graph, self.views, first, context.mmv_columns(), x)
    }

    /// Undoes [`reserve_q8`](Builder::reserve_q8).
    pub(crate) fn drop_q8(&mut self, x: &VgView) {
        self.cache.forget(x);
    }

    /// Whether the device has the kernels for sm_90a.
    pub(crate) fn is_sm90(&self) -> bool {
        self.context.device.architecture() == SM_90A
    }

    /// The fastest kernel variant for a product with weights of type `ty` and a result of this many
    /// rows and columns, if the tuning table knows one.
    pub(crate) fn tuned_variant(&self, ty: Type, rows: i64, columns: i64) -> Option<GemmVariant> {
        { self.context.tuning() }?.lookup(ty, rows as u64, columns as u64)
    }

    /// Whether launches become megakernels where possible.
    pub(crate) fn uses_megakernel(&self) -> bool {
        self.context.stage_kernels().is_some()
    }

    /// The number of SMs of the device.
    pub(crate) fn sm_count(&self) -> u32 {
        self.context.device.sm_count()
    }

    /// The blocks of a kernel that the device runs at a time, with this number of threads and
    /// `shared` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks the kernel.
    pub(crate) fn resident_blocks(
        &self,
        kernel: &'static str,
        threads: u32,
        shared: u32,
    ) -> Result<i64, EngineError> {
        let device = &self.context.device;
        let kernel = self.kernel(kernel)?;
        let each = device.blocks_per_sm(kernel, threads, shared);
        Ok(i64::from(device.sm_count()) * i64::from(each))
    }

    /// Adds a launch with a grid and a block in one dimension of threads.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device has no such kernel; the same for the methods below.
    pub(crate) fn launch(
        &mut self,
        kernel: &'static str,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        params: &impl Params,
    ) -> Result<(), EngineError> {
        self.launches.push(Launch {
            kernel: self.kernel(kernel)?,
            grid,
            threads: [threads, 1, 1],
            shared,
            params: params.as_bytes().to_vec(),
            cooperative: false,
        });
        Ok(())
    }

    /// Adds a launch with one thread for each of `n` elements. For very large `n` the kernel loops
    /// over the grid.
    ///
    /// # Errors
    /// As for [`launch`](Builder::launch).
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

    /// Adds a launch with one block for each of `rows`. For very many rows the kernel loops over
    /// the grid.
    ///
    /// # Errors
    /// As for [`launch`](Builder::launch).
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

    /// Adds a launch with one block for each index below `grid`. Beyond the limits of a grid the
    /// kernel loops over the grid.
    ///
    /// # Errors
    /// As for [`launch`](Builder::launch).
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

    /// Calls `body` to add launches that write rows of f32 to the given view: the destination or,
    /// if the destination overlaps a source, scratch memory that is copied there afterwards. Valid
    /// graphs do not overlap them, but the result must not depend on the order of blocks.
    ///
    /// # Errors
    /// The error of `body`; [`EngineError::Unsupported`] if a copy of the result does not fit 64
    /// bits.
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
            .ok_or_else(|| self.unsupported("the result is larger than any memory"))?;
        let bytes = shape.byte_len().unwrap_or(u64::MAX / 2);
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

    /// The most bytes of dynamic shared memory of a block of `kernel`. 0 if the kernel may not be
    /// used.
    pub(crate) fn max_dynamic_shared(&self, kernel: &'static str) -> u32 {
        let found = self.context.kernels.find(kernel);
        found.map_or(0, |kernel| self.context.device.max_dynamic_shared(kernel))
    }

    /// The error for an operation that the engine cannot run.
    pub(crate) fn unsupported(&self, why: impl Into<String>) -> EngineError {
        EngineError::Unsupported {
            op: self.node.op.kind().ggml_name(),
            why: why.into(),
        }
    }
}
