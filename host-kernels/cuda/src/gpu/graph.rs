//! Launches as CUDA graphs: a node for each, in a chain.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;

use super::Gpu;
use crate::device::{GraphExecId, Launch};
use vgpu_engine::EngineError;

/// The graphs of a GPU.
#[derive(Default)]
pub(crate) struct Graphs {
    last: u64,
    known: HashMap<u64, Graph>,
}

/// A graph with what can be run of it.
struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    /// A node for each launch.
    nodes: Vec<sys::CUgraphNode>,
}

impl Graph {
    /// Gives back what there is of it.
    ///
    /// # Safety
    /// Its context is current and not destroyed.
    unsafe fn destroy(&self) {
        // SAFETY: handles of the driver that nobody uses from here on. Replays under way end first: the driver keeps
        // what they need. What a call says about handles that cannot be given back helps nobody.
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

impl Gpu {
    /// Calls `body` with a launch as the driver wants nodes of graphs.
    fn as_node<T>(
        &self,
        launch: &Launch,
        body: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> T,
    ) -> T {
        let (_, function) = self.kernels[launch.kernel.0 as usize];
        let ([gx, gy, gz], [tx, ty, tz]) = (launch.grid, launch.threads);
        // Kernels have one parameter, a structure, which the driver copies. It knows its size.
        let mut params: [*mut c_void; 1] = [launch.params.as_ptr().cast_mut().cast()];
        body(&sys::CUDA_KERNEL_NODE_PARAMS {
            func: function,
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

    pub(crate) fn graph_create(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError> {
        let _entered = self.enter()?;
        let mut graph = Graph {
            graph: ptr::null_mut(),
            exec: ptr::null_mut(),
            nodes: Vec::with_capacity(launches.len()),
        };
        let outcome = self.fill_graph(&mut graph, launches);
        if let Err(error) = outcome {
            // SAFETY: entered above; the graph goes nowhere.
            unsafe { graph.destroy() };
            return Err(error);
        }
        let mut graphs = self.graphs();
        graphs.last += 1;
        let id = graphs.last;
        graphs.known.insert(id, graph);
        Ok(GraphExecId(id))
    }

    fn fill_graph(&self, graph: &mut Graph, launches: &[Launch]) -> Result<(), EngineError> {
        // SAFETY: a place for the result.
        let code = unsafe { sys::cuGraphCreate(&mut graph.graph, 0) };
        self.done("cuGraphCreate", code)?;
        for launch in launches {
            let mut node = ptr::null_mut();
            let before = graph.nodes.last();
            let (dependencies, count) = match before {
                Some(before) => (ptr::from_ref(before), 1),
                None => (ptr::null(), 0),
            };
            let code = self.as_node(launch, |params| {
                // SAFETY: a graph of ours with the node before; a function of ours with a structure of the size that
                // it takes, which is copied before this returns.
                unsafe {
                    sys::cuGraphAddKernelNode_v2(
                        &mut node,
                        graph.graph,
                        dependencies,
                        count,
                        params,
                    )
                }
            });
            self.done("cuGraphAddKernelNode", code)?;
            if launch.cooperative {
                // SAFETY: plain numbers, of which one is set.
                let mut value: sys::CUlaunchAttributeValue = unsafe { std::mem::zeroed() };
                value.cooperative = 1;
                let which = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
                // SAFETY: the node that was just added, and a whole structure.
                let code = unsafe { sys::cuGraphKernelNodeSetAttribute(node, which, &value) };
                self.done("cuGraphKernelNodeSetAttribute", code)?;
            }
            graph.nodes.push(node);
        }
        // SAFETY: a whole graph, and a place for the result.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut graph.exec, graph.graph, 0) };
        self.done("cuGraphInstantiate", code)
    }

    pub(crate) fn graph_update(
        &self,
        id: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        let graphs = self.graphs();
        let graph = graphs.find(id)?;
        let code = self.as_node(launch, |params| {
            // SAFETY: a node of the graph that this was made of; function and structure as above. Replays that are
            // under way keep what they began with.
            unsafe {
                sys::cuGraphExecKernelNodeSetParams_v2(graph.exec, graph.nodes[index], params)
            }
        });
        self.done("cuGraphExecKernelNodeSetParams", code)
    }

    /// # Safety
    /// The addresses in the launches are of memory that the kernels may use.
    pub(crate) unsafe fn graph_launch(&self, id: GraphExecId) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        let graphs = self.graphs();
        let graph = graphs.find(id)?;
        // SAFETY: the caller's promise; graph and stream are there.
        self.done("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(graph.exec, self.stream)
        })
    }

    pub(crate) fn graph_destroy(&self, id: GraphExecId) {
        let graph = self.graphs().known.remove(&id.0);
        if let (Some(graph), Ok(_entered)) = (graph, self.enter()) {
            // SAFETY: entered; it is in no table any more.
            unsafe { graph.destroy() };
        }
    }
}

impl Graphs {
    fn find(&self, id: GraphExecId) -> Result<&Graph, EngineError> {
        self.known.get(&id.0).ok_or_else(|| EngineError::Device {
            message: format!("there is no graph {}", id.0),
        })
    }
}
