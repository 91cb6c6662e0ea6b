//! CUDA graphs: launches as a chain of kernel nodes, instantiated once and launched as one.
//!
//! Where the GPU and the driver can, the edges are programmatic (CUDA programming guide,
//! "Programmatic Dependent Launch and Synchronization"): a kernel may begin before the one before
//! it has ended, and waits for its end itself (`KERNEL` in `kernels/device.cuh`).

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use vgpu_engine::EngineError;
use vgpu_transport::lock::{Guard, lock_at};

use super::kernels::Kernels;
use super::stream::Stream;
use crate::device::{GraphExecId, Launch};
use crate::lock::Rank;

/// The instantiated graphs of a GPU.
pub(super) struct Graphs {
    stream: Arc<Stream>,
    kernels: Arc<Kernels>,
    /// Whether edges between kernels are programmatic.
    is_programmatic: bool,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    last: u64,
    graphs: HashMap<u64, Graph>,
}

/// A graph, and its executable instance. Either handle may be null.
struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    /// One node for each launch.
    nodes: Vec<sys::CUgraphNode>,
}

// SAFETY: the handles may be used from any thread with the context current. The CUDA driver API
// ("Graph Management") asks callers to synchronise access to a graph object: the table has a lock.
unsafe impl Send for Graph {}

impl Graph {
    /// Destroys what there is of the graph.
    ///
    /// # Safety
    /// The context of the graph is entered, and nobody uses the handles from now on.
    unsafe fn destroy(&self) {
        // SAFETY: the handles are null or valid, and not used again. The driver keeps what launches
        // under way need. There is nothing to do about a handle that cannot be destroyed.
        unsafe {
            if !self.exec.is_null() {
                sys::cuGraphExecDestroy(self.exec);
            }
            if !self.graph.is_null() {
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

impl Graphs {
    /// No graphs yet, of `kernels`, to be launched on `stream`. `is_programmatic`: GPU and driver
    /// have programmatic dependent launch in graphs.
    pub(super) fn new(stream: Arc<Stream>, kernels: Arc<Kernels>, is_programmatic: bool) -> Graphs {
        Graphs {
            stream,
            kernels,
            is_programmatic,
            table: Mutex::default(),
        }
    }

    fn table(&self) -> Guard<'_, Table> {
        lock_at(Rank::Graphs, &self.table)
    }

    /// Calls `body` with the node parameters of a launch.
    fn with_node_params<T>(
        &self,
        launch: &Launch,
        body: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> T,
    ) -> T {
        let ([gx, gy, gz], [tx, ty, tz]) = (launch.grid, launch.threads);
        // Every kernel has one parameter, a structure. The driver knows its size.
        let mut params: [*mut c_void; 1] = [launch.params.as_ptr().cast_mut().cast()];
        body(&sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.kernels.function(launch.kernel),
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: tx,
            blockDimY: ty,
            blockDimZ: tz,
            sharedMemBytes: launch.shared,
            kernelParams: params.as_mut_ptr(),
            extra: ptr::null_mut(),
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        })
    }

    /// Creates and instantiates a graph of launches, each after the one before.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver refuses the graph.
    pub(super) fn create(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError> {
        let _entered = self.stream.context().enter()?;
        let mut graph = Graph {
            graph: ptr::null_mut(),
            exec: ptr::null_mut(),
            nodes: Vec::with_capacity(launches.len()),
        };
        if let Err(error) = self.build(&mut graph, launches) {
            // SAFETY: the context is entered; `graph` is dropped here.
            unsafe { graph.destroy() };
            return Err(error);
        }
        let mut table = self.table();
        table.last += 1;
        let id = table.last;
        table.graphs.insert(id, graph);
        Ok(GraphExecId(id))
    }

    /// Adds a node for each launch to `graph` and instantiates it.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver refuses the graph, which then may be incomplete.
    fn build(&self, graph: &mut Graph, launches: &[Launch]) -> Result<(), EngineError> {
        let context = self.stream.context();
        // SAFETY: `graph.graph` is a valid place for the handle.
        let code = unsafe { sys::cuGraphCreate(&mut graph.graph, 0) };
        context.check("cuGraphCreate", code)?;
        let mut previous: Option<&Launch> = None;
        for launch in launches {
            let mut node = ptr::null_mut();
            let code = self.with_node_params(launch, |params| {
                // SAFETY: the graph was created above. The function is of this context, and its
                // parameter structure, which the driver copies before it returns, has the size that
                // the kernel takes.
                unsafe {
                    sys::cuGraphAddKernelNode_v2(&mut node, graph.graph, ptr::null(), 0, params)
                }
            });
            context.check("cuGraphAddKernelNode", code)?;
            if launch.cooperative {
                // SAFETY: the union consists of integers and plain structures, so all zeros are a
                // valid value.
                let mut value: sys::CUlaunchAttributeValue = unsafe { std::mem::zeroed() };
                value.cooperative = 1;
                let which = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
                // SAFETY: `node` is the kernel node that was just added; `value` holds the member
                // that `which` names.
                let code = unsafe { sys::cuGraphKernelNodeSetAttribute(node, which, &value) };
                context.check("cuGraphKernelNodeSetAttribute", code)?;
            }
            if let (Some(previous), Some(before)) = (previous, graph.nodes.last()) {
                // The blocks of a cooperative launch must all be resident.
                let is_programmatic =
                    self.is_programmatic && !launch.cooperative && !previous.cooperative;
                // SAFETY: both nodes were added to this graph above.
                unsafe { self.add_edge(graph.graph, *before, node, is_programmatic)? };
            }
            previous = Some(launch);
            graph.nodes.push(node);
        }
        // SAFETY: the graph is complete; `graph.exec` is a valid place for the handle.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut graph.exec, graph.graph, 0) };
        context.check("cuGraphInstantiate", code)
    }

    /// Adds the edge between two kernel nodes of a graph.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver refuses the edge.
    ///
    /// # Safety
    /// The nodes are of `graph`, and the context is entered.
    unsafe fn add_edge(
        &self,
        graph: sys::CUgraph,
        from: sys::CUgraphNode,
        to: sys::CUgraphNode,
        is_programmatic: bool,
    ) -> Result<(), EngineError> {
        let context = self.stream.context();
        if !is_programmatic {
            // SAFETY: the caller guarantees that both nodes are of `graph`; one of each is given.
            let code = unsafe { sys::cuGraphAddDependencies(graph, &from, &to, 1) };
            return context.check("cuGraphAddDependencies", code);
        }
        let edge = sys::CUgraphEdgeData {
            from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
            to_port: 0,
            type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
            reserved: [0; 5],
        };
        // SAFETY: the caller guarantees that both nodes are of `graph`; one of each is given, and
        // one `edge`, which the driver copies.
        let code = unsafe { sys::cuGraphAddDependencies_v2(graph, &from, &to, &edge, 1) };
        context.check("cuGraphAddDependencies_v2", code)
    }

    /// Replaces the parameters of node `index` of an instance by those of `launch`, of the same
    /// kernel. Launches of the graph that are under way keep the old parameters.
    ///
    /// # Errors
    /// [`EngineError::Device`] if there is no such graph, or the driver refuses the change.
    pub(super) fn update(
        &self,
        id: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        let _entered = self.stream.context().enter()?;
        let table = self.table();
        let graph = table.find(id)?;
        let code = self.with_node_params(launch, |params| {
            // SAFETY: the node is of the graph that `exec` was instantiated from; function and
            // parameters are as in `build`.
            unsafe {
                sys::cuGraphExecKernelNodeSetParams_v2(graph.exec, graph.nodes[index], params)
            }
        });
        self.stream
            .context()
            .check("cuGraphExecKernelNodeSetParams", code)
    }

    /// Launches a graph on the stream.
    ///
    /// # Errors
    /// As for [`Graphs::update`].
    ///
    /// # Safety
    /// The addresses in the parameters of all nodes are of memory that the kernels may use, until
    /// the stream is synchronised.
    pub(super) unsafe fn launch(&self, id: GraphExecId) -> Result<(), EngineError> {
        let _entered = self.stream.context().enter()?;
        let table = self.table();
        let graph = table.find(id)?;
        // SAFETY: `exec` and the stream are of the context that is entered, and alive while the
        // table is locked. The caller guarantees that the kernels may use the addresses in the
        // parameters of the nodes until the stream is synchronised.
        let code = unsafe { sys::cuGraphLaunch(graph.exec, self.stream.raw()) };
        self.stream.context().check("cuGraphLaunch", code)
    }

    /// Destroys a graph.
    pub(super) fn destroy(&self, id: GraphExecId) {
        let graph = self.table().graphs.remove(&id.0);
        if let (Some(graph), Ok(_entered)) = (graph, self.stream.context().enter()) {
            // SAFETY: the context is entered, and the table no longer has the graph.
            unsafe { graph.destroy() };
        }
    }
}

impl Table {
    /// The graph called `id`.
    ///
    /// # Errors
    /// [`EngineError::Device`] if there is no such graph.
    fn find(&self, id: GraphExecId) -> Result<&Graph, EngineError> {
        self.graphs.get(&id.0).ok_or_else(|| EngineError::Device {
            message: format!("there is no graph {}", id.0),
        })
    }
}
