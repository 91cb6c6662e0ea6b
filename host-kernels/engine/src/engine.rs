//! The contract that every engine fulfils.
//!
//! An engine owns memory, compiles validated graphs into plans, and runs plans. An engine knows
//! nothing of guests, sessions or wires.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vgpu_transport::bytes::Mapped;
use vgpu_transport::ir::{Capabilities, Graph, GraphCounts, Node, ValidGraph};

use crate::error::{EngineError, RunError};
use crate::memory::{MAX_COPIES, Memory, MemoryInfo, SharedMemory};
use crate::plan::{Plan, RunStatus, Turn};
use crate::work::{Launches, Speed};

/// The default of [`Engine::max_node_time`]. The largest products of real models take far less,
/// also on a slow processor: 2 * 10^12 multiply-adds for 4096 tokens and a matrix of the
/// feed-forward network of Llama 70B (8192 by 28672), half an hour at 10^9 per second; the estimate
/// of a thread with AVX2 is 97 seconds.
const MAX_NODE_TIME: Duration = Duration::from_secs(3600);

/// What an engine has run on its device, and what it has left to another engine, since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FallbackUse {
    /// Nodes that the device has run.
    pub device_nodes: u64,
    /// Nodes that the other engine has run.
    pub other_nodes: u64,
    /// How long the device had work.
    pub device_time: Duration,
    /// How long the other engine had work, copies from and to the device included.
    pub other_time: Duration,
}

/// The nodes of one operator in all graphs that an engine has compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placed {
    /// Nodes that the device computes.
    pub device: u64,
    /// Nodes that the other engine computes.
    pub fallback: u64,
}

/// A compute device.
pub trait Engine: Send + Sync + 'static {
    /// A short name, `cpu` or `cuda:0`.
    fn name(&self) -> &str;

    /// The model of the device, in one line for people.
    fn description(&self) -> &str;

    /// Present memory of the device, in bytes.
    fn memory(&self) -> MemoryInfo;

    /// Whether [`memory`](Engine::memory) calls no driver and waits for nothing, so that any thread
    /// may ask.
    fn knows_its_memory(&self) -> bool {
        false
    }

    /// Whether [`memory`](Engine::memory) is memory of the host: buffers and plans then share it.
    fn is_host_memory(&self) -> bool {
        true
    }

    /// Bytes of the host's memory that the engine keeps for the next graph, and that no guest is
    /// charged for. Takes no lock, and waits for nothing.
    fn kept_scratch_bytes(&self) -> u64 {
        0
    }

    /// Bytes of [`memory`](Engine::memory) that an allocation of `size` bytes takes: whole pages,
    /// or whole blocks of the device.
    fn allocation_size(&self, size: u64) -> u64 {
        size
    }

    /// The operators, types and shapes that the engine can run. Constant for the life of the
    /// engine.
    fn capabilities(&self) -> &Capabilities;

    /// The families of kernels that are for this device's architecture only, as prefixes of names
    /// in [`Plan::kernels`]. A self-test that has run none of a family has not tested the device.
    fn kernel_families(&self) -> &'static [&'static str] {
        &[]
    }

    /// How fast the engine is at least, for estimates of the time that a node takes.
    fn speed(&self) -> Speed {
        Speed::default()
    }

    /// The speed of what runs this node of a graph: of the engine, or of another engine that it
    /// leaves the node to.
    fn speed_of(&self, graph: &Graph, node: &Node) -> Speed {
        let _ = (graph, node);
        self.speed()
    }

    /// How much the engine has left to another engine. `None` if the engine does not count that, or
    /// leaves nothing to others. Calls no driver and waits for nothing.
    fn fallback_use(&self) -> Option<FallbackUse> {
        None
    }

    /// Where the nodes of each operator are computed, by the operator's name in ggml. Empty if the
    /// engine does not count that, or leaves nothing to others. Takes no lock, and waits for
    /// nothing.
    fn placement(&self) -> BTreeMap<&'static str, Placed> {
        BTreeMap::new()
    }

    /// Whether a turn can end in the middle of every node, so that a turn is never as long as a
    /// node.
    fn stops_within_nodes(&self) -> bool {
        false
    }

    /// The longest time that a node may take by estimate, if the configuration says nothing else.
    /// An engine that cannot stop in the middle of a node has a short one.
    fn max_node_time(&self) -> Duration {
        MAX_NODE_TIME
    }

    /// The launches of a node that takes so long by estimate, if nothing ends a launch once it runs
    /// and they have a limit. `None`: the limit of the node is all there is.
    fn launches_of(&self, graph: &Graph, node: &Node, estimate: Duration) -> Option<Launches> {
        let _ = (graph, node, estimate);
        None
    }

    /// Allocates `size` zeroed bytes, aligned to at least 256 bytes. `size` may be 0.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`], or what the device reports.
    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError>;

    /// As [`alloc`](Engine::alloc), in memory that a guest may map. The guest accesses it while no
    /// graph of its session runs; a guest that breaks this rule may access it at any time. `None`
    /// if the engine's memory is not host memory, or if shared memory of this size would slow down
    /// the engine.
    ///
    /// # Errors
    /// As [`alloc`](Engine::alloc).
    fn alloc_shared(&self, size: u64) -> Result<Option<SharedMemory>, EngineError> {
        let _ = size;
        Ok(None)
    }

    /// Whether [`alloc_weights`](Engine::alloc_weights) can return memory.
    fn supports_weights(&self) -> bool {
        false
    }

    /// Memory for weights of the size of `instead`, which is memory of this engine. The new memory
    /// can be [frozen](Memory::freeze), and can share pages with [extents](crate::Extent) of other
    /// such memory. The caller drops `instead` and uses the new memory in place of `instead`: both
    /// count once against the memory of the engine, which needs no room for both. `None` if
    /// the engine has no such memory.
    ///
    /// # Errors
    /// As [`alloc`](Engine::alloc), and [`EngineError::ForeignMemory`] if `instead` belongs to
    /// another engine. `instead` is as before.
    fn alloc_weights(
        &self,
        instead: &Arc<dyn Memory>,
    ) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        let _ = instead;
        Ok(None)
    }

    /// The mappings of the process that [memory for weights](Engine::alloc_weights) of `size` bytes
    /// takes at most besides its first one.
    fn weight_mappings(&self, size: u64) -> usize {
        let _ = size;
        MAX_COPIES
    }

    /// Why the engine cannot work again in this process, if so: the contents of its memory are
    /// lost, and only a new process helps. An engine that may recover tries to recover first.
    fn fatal_error(&self) -> Option<String> {
        None
    }

    /// Registers (pins) memory with the device, so that the device can copy from and to it by DMA.
    /// Dropping the returned value unregisters the memory, and drops it. `None` if the engine does
    /// not need this, or if registration failed; copies then work without it.
    fn pin(&self, memory: Arc<dyn Mapped>) -> Option<Box<dyn Any + Send>> {
        let _ = memory;
        None
    }

    /// Bytes of host memory that [`compile`](Engine::compile) has allocated at any time, at most,
    /// while it compiles a graph of so many tensors and nodes. The plan counts, the graph does not.
    fn compile_bytes(&self, counts: &GraphCounts) -> u64;

    /// Compiles a graph for many runs. The graph was validated with the
    /// [`capabilities`](Engine::capabilities) of this engine. `buffers[i]` is the memory of the
    /// graph's buffer `i`, at least as large as the size that the graph was validated against. The
    /// plan keeps the buffers alive. `is_cancelled` is called every few thousand nodes, and every
    /// few MiB of weights that are copied because the graph writes them or needs them contiguous;
    /// compilation ends when the result is no longer wanted. `is_cancelled` may pause and takes
    /// locks of the executor: the engine holds no lock above
    /// [`CHARGING`](vgpu_transport::lock::CHARGING) while it calls it.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`] if `is_cancelled` has returned `true`;
    /// [`EngineError::ForeignMemory`] if a buffer belongs to another engine;
    /// [`EngineError::Unsupported`] if there is no kernel for a node; [`EngineError::OutOfMemory`];
    /// or what the device reports.
    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError>;

    /// The most plans of a batch; 1 if the engine runs one plan at a time.
    fn max_batch(&self) -> usize {
        1
    }

    /// As [`Plan::launch`] for each of several plans, which share a turn: at most
    /// [`max_batch`](Engine::max_batch) plans of this engine with equal
    /// [batch keys](Plan::batch_key). Returns their outcomes, in order. Each result is the same as
    /// if its plan ran alone, and the failure of one plan changes nothing for the others.
    fn launch_batch(
        &self,
        plans: &mut [&mut dyn Plan],
        turn: &Turn,
    ) -> Vec<Result<RunStatus, RunError>> {
        plans.iter_mut().map(|plan| plan.launch(turn)).collect()
    }
}
