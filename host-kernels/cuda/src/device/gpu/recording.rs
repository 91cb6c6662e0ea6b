//! Launches as CUDA graphs: a node for each, in a chain.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;

use super::Gpu;
use crate::device::{Launch, RecordingId};
use vgpu_engine::EngineError;

/// The recordings of a GPU.
#[derive(Default)]
pub(super) struct Recordings {
    last: u64,
    known: HashMap<u64, Recording>,
}

/// A graph with what can be run of it.
struct Recording {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    /// A node for each launch.
    nodes: Vec<sys::CUgraphNode>,
}

impl Recording {
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

    pub(super) fn record_graph(&self, launches: &[Launch]) -> Result<RecordingId, EngineError> {
        let _entered = self.enter()?;
        let mut recording = Recording {
            graph: ptr::null_mut(),
            exec: ptr::null_mut(),
            nodes: Vec::with_capacity(launches.len()),
        };
        let outcome = self.fill_graph(&mut recording, launches);
        if let Err(error) = outcome {
            // SAFETY: entered above; the recording goes nowhere.
            unsafe { recording.destroy() };
            return Err(error);
        }
        let mut recordings = self.recordings();
        recordings.last += 1;
        let id = recordings.last;
        recordings.known.insert(id, recording);
        Ok(RecordingId(id))
    }

    fn fill_graph(
        &self,
        recording: &mut Recording,
        launches: &[Launch],
    ) -> Result<(), EngineError> {
        // SAFETY: a place for the result.
        let code = unsafe { sys::cuGraphCreate(&mut recording.graph, 0) };
        self.done("cuGraphCreate", code)?;
        for launch in launches {
            let mut node = ptr::null_mut();
            let before = recording.nodes.last();
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
                        recording.graph,
                        dependencies,
                        count,
                        params,
                    )
                }
            });
            self.done("cuGraphAddKernelNode", code)?;
            if launch.together {
                // SAFETY: plain numbers, of which one is set.
                let mut value: sys::CUlaunchAttributeValue = unsafe { std::mem::zeroed() };
                value.cooperative = 1;
                let which = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
                // SAFETY: the node that was just added, and a whole structure.
                let code = unsafe { sys::cuGraphKernelNodeSetAttribute(node, which, &value) };
                self.done("cuGraphKernelNodeSetAttribute", code)?;
            }
            recording.nodes.push(node);
        }
        // SAFETY: a whole graph, and a place for the result.
        let code =
            unsafe { sys::cuGraphInstantiateWithFlags(&mut recording.exec, recording.graph, 0) };
        self.done("cuGraphInstantiate", code)
    }

    pub(super) fn change_graph(
        &self,
        id: RecordingId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        let recordings = self.recordings();
        let recording = recordings.find(id)?;
        let code = self.as_node(launch, |params| {
            // SAFETY: a node of the graph that this was made of; function and structure as above. Replays that are
            // under way keep what they began with.
            unsafe {
                sys::cuGraphExecKernelNodeSetParams_v2(
                    recording.exec,
                    recording.nodes[index],
                    params,
                )
            }
        });
        self.done("cuGraphExecKernelNodeSetParams", code)
    }

    /// # Safety
    /// The addresses in the launches are of memory that the kernels may use.
    pub(super) unsafe fn replay_graph(&self, id: RecordingId) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        let recordings = self.recordings();
        let recording = recordings.find(id)?;
        // SAFETY: the caller's promise; recording and stream are there.
        self.done("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(recording.exec, self.stream)
        })
    }

    pub(super) fn forget_graph(&self, id: RecordingId) {
        let recording = self.recordings().known.remove(&id.0);
        if let (Some(recording), Ok(_entered)) = (recording, self.enter()) {
            // SAFETY: entered; it is in no table any more.
            unsafe { recording.destroy() };
        }
    }
}

impl Recordings {
    fn find(&self, id: RecordingId) -> Result<&Recording, EngineError> {
        self.known.get(&id.0).ok_or_else(|| EngineError::Device {
            message: format!("there is no recording {}", id.0),
        })
    }
}
