//! From a graph to launches.

use std::sync::{Arc, Mutex, PoisonError};

use vgpu_transport::ir::{Graph, Node, Shape, Tensor, Type};

use super::device::{Address, Device, Launch, SharedMemory};
use super::host::{Host, HostNode};
use super::memory::CudaMemory;
use super::ops;
use super::params::{Params, VG_MOVE_REPEAT, VgCodebooks, VgFault, VgMoveParams, VgPlace, VgView};
use crate::engine::{EngineError, Memory, Plan, RunError};

/// What plans of an engine share: the device, and where kernels report faults. One plan runs at a time.
pub(super) struct Stream {
    pub(super) device: Arc<dyn Device>,
    fault: SharedMemory,
    codebooks: CudaMemory,
    host: Host,
    running: Mutex<()>,
}

impl Stream {
    pub(super) fn new(device: Arc<dyn Device>) -> Result<Stream, EngineError> {
        let fault = device.alloc_shared(size_of::<VgFault>())?;
        let codebooks = CudaMemory::new(&device, size_of::<VgCodebooks>() as u64)?;
        codebooks.write(0, codebooks_of_formats().as_slice().into())?;
        Ok(Stream {
            device,
            fault,
            codebooks,
            host: Host::default(),
            running: Mutex::new(()),
        })
    }
}

/// The bytes of `VgCodebooks`.
fn codebooks_of_formats() -> Vec<u8> {
    use crate::cpu::formats::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    let books: [&[u64]; 6] = [&IQ2_XXS, &IQ2_XS, &IQ2_S, &IQ3_XXS, &IQ3_S, &IQ1];
    let entries = books.into_iter().flatten();
    entries.flat_map(|entry| entry.to_le_bytes()).collect()
}

/// A graph, compiled: launches in order, and now and then work of the host.
pub(super) struct CudaPlan {
    stream: Arc<Stream>,
    steps: Vec<Step>,
    /// Names of the nodes' operators, for errors.
    ops: Vec<&'static str>,
    /// What the addresses in the launches point into.
    _memory: Vec<Arc<dyn Memory>>,
    _scratch: Option<CudaMemory>,
}

struct Step {
    work: Work,
    node: usize,
}

enum Work {
    Launch(Launch),
    /// Runs on the host, between launches.
    Host(HostNode),
}

impl CudaPlan {
    pub(super) fn compile(
        graph: &Graph,
        buffers: &[Arc<dyn Memory>],
        stream: &Arc<Stream>,
    ) -> Result<CudaPlan, EngineError> {
        let device = &stream.device;
        let bases = buffers
            .iter()
            .map(|memory| {
                let memory: &CudaMemory = memory.as_any().downcast_ref()?;
                memory.is_of(device).then(|| memory.address())
            })
            .collect::<Option<Vec<Address>>>()
            .ok_or(EngineError::ForeignMemory)?;
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
        let views: Vec<VgView> = graph
            .tensors
            .iter()
            .map(|t| VgView::new(bases[t.buffer as usize] + t.offset, &t.shape))
            .collect();
        // Twice: first to learn how much scratch memory is needed, then with its address.
        let mut scratch: Option<CudaMemory> = None;
        loop {
            let mut steps = Vec::new();
            let mut most = 0;
            for (i, node) in graph.nodes.iter().enumerate() {
                let mut builder = Builder {
                    graph,
                    views: &views,
                    node,
                    index: i,
                    stream,
                    scratch: scratch.as_ref().map_or(0, CudaMemory::address),
                    scratch_bytes: 0,
                    launches: Vec::new(),
                };
                if graph.dst(node).shape.is_empty() {
                    continue;
                }
                if Host::takes(graph, node) {
                    let work = Work::Host(stream.host.compile(graph, node, &bases)?);
                    steps.push(Step { work, node: i });
                    continue;
                }
                ops::compile(&node.op, &mut builder)?;
                most = most.max(builder.scratch_bytes);
                let launches = builder.launches.into_iter().map(Work::Launch);
                steps.extend(launches.map(|work| Step { work, node: i }));
            }
            if most > scratch.as_ref().map_or(0, Memory::size) {
                scratch = Some(CudaMemory::new(device, most)?);
                continue;
            }
            return Ok(CudaPlan {
                stream: Arc::clone(stream),
                steps,
                ops: graph
                    .nodes
                    .iter()
                    .map(|n| n.op.kind().ggml_name())
                    .collect(),
                _memory: buffers.to_vec(),
                _scratch: scratch,
            });
        }
    }
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
    }
    error
}

impl Plan for CudaPlan {
    fn run(&mut self) -> Result<(), RunError> {
        let Some(last) = self.steps.last().map(|step| step.node) else {
            return Ok(());
        };
        let Stream {
            device,
            fault,
            running,
            ..
        } = &*Arc::clone(&self.stream);
        let _turn = running.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = fault.host.cast::<VgFault>();
        let mut host_error = None;
        for step in &mut self.steps {
            let (node, ops) = (step.node, &self.ops);
            match &mut step.work {
                Work::Launch(launch) => {
                    // SAFETY: compiled from a validated graph over memory that this plan holds on to.
                    let launched = unsafe { device.launch(launch) };
                    launched.map_err(|error| failure(ops, node, &error))?;
                }
                Work::Host(work) => {
                    // SAFETY: as above.
                    if let Err(error) = unsafe { work.run(&**device) } {
                        host_error = Some(at_node(ops, node, error));
                        break;
                    }
                }
            }
        }
        device
            .synchronize()
            .map_err(|error| failure(&self.ops, last, &error))?;
        // SAFETY: the cell belongs to the stream, whose turn is ours, and no kernel runs any more.
        let found = unsafe { cell.read_volatile() };
        if found.taken == 0 {
            return host_error.map_or(Ok(()), Err);
        }
        // SAFETY: as above.
        unsafe { cell.write_volatile(VgFault::default()) };
        let node = found.node as usize;
        Err(RunError::Index {
            node,
            op: self.ops[node],
            index: found.index,
            count: found.count as u64,
        })
    }
}

/// What an operator's file sees of a node, and where it puts launches.
pub(super) struct Builder<'a> {
    graph: &'a Graph,
    views: &'a [VgView],
    node: &'a Node,
    index: usize,
    stream: &'a Stream,
    scratch: Address,
    scratch_bytes: u64,
    launches: Vec<Launch>,
}

/// Most threads of a block of the kernels that give each element a thread, and of those that give a row a block.
const THREADS: u32 = 256;

/// Most blocks in dimensions 1 and 2 of a grid.
pub(super) const MOST_BLOCKS: i64 = 65535;

/// Threads of a block for rows of `n` elements: whole warps, with a few elements for each thread.
pub(super) fn threads_for(n: i64) -> u32 {
    let threads = (n as u64).div_ceil(4).next_power_of_two();
    threads.clamp(32, u64::from(THREADS)) as u32
}

impl Builder<'_> {
    /// The destination.
    pub(super) fn dst(&self) -> VgView {
        self.views[self.node.dst as usize]
    }

    /// The destination's type, extents and strides as the IR has them.
    pub(super) fn dst_shape(&self) -> &Shape {
        &self.graph.tensors[self.node.dst as usize].shape
    }

    /// Source `i`, which the operator's rules demand.
    pub(super) fn src(&self, i: usize) -> VgView {
        let index = self.source(i);
        self.views[index.expect("validation refuses operations without a source they need")]
    }

    /// Source `i`, if there is one; a view of nothing otherwise.
    pub(super) fn optional(&self, i: usize) -> VgView {
        self.source(i)
            .map_or_else(VgView::default, |index| self.views[index])
    }

    fn source(&self, i: usize) -> Option<usize> {
        let index = self.node.src.as_slice().get(i).copied().flatten()?;
        Some(index as usize)
    }

    /// Where kernels of this node report faults.
    pub(super) fn place(&self) -> VgPlace {
        VgPlace {
            fault: self.stream.fault.device,
            node: self.index as u32,
            reserved: 0,
        }
    }

    /// The codebooks of the IQ formats (`VgCodebooks`).
    pub(super) fn codebooks(&self) -> Address {
        self.stream.codebooks.address()
    }

    /// Working memory of the node: `bytes` more, aligned to 256 bytes. Nothing is known of its content.
    pub(super) fn scratch(&mut self, bytes: u64) -> Address {
        let address = self.scratch + self.scratch_bytes;
        self.scratch_bytes += bytes.next_multiple_of(256);
        address
    }

    /// Multiprocessors of the device.
    pub(super) fn multiprocessors(&self) -> u32 {
        self.stream.device.multiprocessors()
    }

    /// Adds a launch.
    pub(super) fn launch(
        &mut self,
        kernel: &'static str,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        params: &impl Params,
    ) -> Result<(), EngineError> {
        self.launches.push(Launch {
            kernel: self.stream.device.kernel(kernel)?,
            grid,
            threads: [threads, 1, 1],
            shared,
            params: params.as_bytes().to_vec(),
        });
        Ok(())
    }

    /// Adds a launch with a thread for each of `n` things, or, where that would be very many, a thread for
    /// several of them.
    pub(super) fn for_each(
        &mut self,
        kernel: &'static str,
        n: i64,
        params: &impl Params,
    ) -> Result<(), EngineError> {
        let most = u64::from(self.multiprocessors()) * 64;
        let blocks = (n as u64).div_ceil(u64::from(THREADS)).clamp(1, most);
        let threads = (n as u64).next_multiple_of(32).clamp(32, THREADS.into());
        self.launch(kernel, [blocks as u32, 1, 1], threads as u32, 0, params)
    }

    /// Adds a launch with a block for each of `rows`, or for several of them where there are very many.
    pub(super) fn for_each_row(
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
    pub(super) fn launch_over(
        &mut self,
        kernel: &'static str,
        grid: [i64; 3],
        threads: u32,
        shared: u32,
        params: &impl Params,
    ) -> Result<(), EngineError> {
        let most = [i64::from(i32::MAX), MOST_BLOCKS, MOST_BLOCKS];
        let blocks = std::array::from_fn(|d| grid[d].min(most[d]) as u32);
        self.launch(kernel, blocks, threads, shared, params)
    }

    /// Has `body` add launches that write rows of `f32` to the view it is given: the destination, or, if that overlaps a
    /// source, scratch memory that is copied there in the end. No sane graph lets them overlap, but the result must not
    /// depend on which block comes first.
    pub(super) fn staged(
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
    pub(super) fn most_shared(&self) -> u32 {
        self.stream.device.most_shared()
    }

    /// The error for what the engine cannot do after all.
    pub(super) fn unsupported(&self, why: impl Into<String>) -> EngineError {
        EngineError::Unsupported {
            op: self.node.op.kind().ggml_name(),
            why: why.into(),
        }
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
