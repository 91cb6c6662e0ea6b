//! The CPU engine with a planted fault, which the checks of a fuzzed session must notice.

use std::sync::{Arc, Mutex};
use std::thread;

use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan, RunError, RunStatus, Turn};
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};

use crate::targets::session::usage::{REQUEST_TIME, processor_time};
use crate::targets::session::{self, Setup};

/// A fault that the checks of the fuzzed session must notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A byte of new memory is not zero.
    OldBytes,
    /// A graph changes the last byte of each of its buffers.
    WriteBesideDestination,
    /// Memory is not freed.
    LostAllocation,
    /// A graph fails for another reason than an index.
    FailedRun,
    /// A kernel panics.
    Panic,
    /// An allocation works for too long.
    LongRequest,
    /// An allocation leaves a mapping behind.
    LostMapping,
    /// An allocation leaves a thread behind.
    LostThread,
    /// An allocation leaves a descriptor behind.
    LostDescriptor,
    /// An allocation leaves touched memory of the heap behind.
    LostHeap,
    /// An allocation needs memory that is charged to nobody, and gives it back.
    TransientHeap,
    /// So does the run of a graph.
    TransientHeapOfARun,
}

/// Bytes of the heap that nobody is charged for, beyond what a session of each set-up may need.
fn transient_heap(setup: &Setup) {
    let bytes = (64 << 20) + 2 * setup.memory as usize;
    drop(std::hint::black_box(vec![1u8; bytes]));
}

/// Bytes of the heap that an allocation leaves behind.
const LOST_HEAP: usize = 1 << 20;

/// The CPU engine with a fault.
pub(crate) struct Faulty {
    inner: CpuEngine,
    fault: Planted,
    setup: &'static Setup,
    /// Memory that is never freed.
    lost: Mutex<Vec<Arc<dyn Memory>>>,
}

impl Faulty {
    pub(crate) fn new(fault: Planted, setup: &'static Setup) -> Faulty {
        Faulty {
            inner: session::cpu_engine(setup),
            fault,
            setup,
            lost: Mutex::default(),
        }
    }
}

/// Keeps this thread busy for longer than a request with a short graph may.
fn work_for_too_long() {
    let end = processor_time() + 2 * REQUEST_TIME;
    while processor_time() < end {
        std::hint::spin_loop();
    }
}

struct FaultyPlan {
    inner: Box<dyn Plan>,
    fault: Planted,
    setup: &'static Setup,
    buffers: Vec<Arc<dyn Memory>>,
}

/// Inverts the last byte of memory, unless it is a sealed buffer of weights.
fn invert_last_byte(memory: &Arc<dyn Memory>) {
    let Some(at) = memory.size().checked_sub(1) else {
        return;
    };
    let mut byte = [0];
    if memory.read(at, (&mut byte[..]).into()).is_ok() {
        let _ = memory.write(at, (&[!byte[0]][..]).into());
    }
}

impl Engine for Faulty {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn description(&self) -> &str {
        self.inner.description()
    }

    fn memory(&self) -> MemoryInfo {
        self.inner.memory()
    }

    fn allocation_size(&self, size: u64) -> u64 {
        self.inner.allocation_size(size)
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        let memory = self.inner.alloc(size)?;
        match self.fault {
            Planted::OldBytes => invert_last_byte(&memory),
            Planted::LostAllocation => {
                let mut lost = self.lost.lock().expect("no thread has panicked");
                lost.push(Arc::clone(&memory));
            }
            Planted::LongRequest => work_for_too_long(),
            // The budget of this engine does not know it. Guard pages keep the kernel from merging
            // it with another mapping.
            Planted::LostMapping => {
                let other = session::cpu_engine(self.setup);
                std::mem::forget(other.alloc(1).expect("a page"));
            }
            Planted::LostThread => {
                // It never ends.
                thread::spawn(|| {
                    loop {
                        thread::park();
                    }
                });
            }
            Planted::LostDescriptor => {
                // It is never closed.
                std::mem::forget(std::fs::File::open("/dev/null"));
            }
            Planted::LostHeap => {
                std::mem::forget(std::hint::black_box(vec![1u8; LOST_HEAP]));
            }
            Planted::TransientHeap => transient_heap(self.setup),
            _ => {}
        }
        Ok(memory)
    }

    fn supports_weights(&self) -> bool {
        self.inner.supports_weights()
    }

    fn alloc_weights(
        &self,
        instead: &Arc<dyn Memory>,
    ) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        self.inner.alloc_weights(instead)
    }

    fn weight_mappings(&self, size: u64) -> usize {
        self.inner.weight_mappings(size)
    }

    fn compile_bytes(&self, counts: &GraphCounts) -> u64 {
        self.inner.compile_bytes(counts)
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError> {
        Ok(Box::new(FaultyPlan {
            inner: self.inner.compile(graph, buffers, is_cancelled)?,
            fault: self.fault,
            setup: self.setup,
            buffers: buffers.to_vec(),
        }))
    }
}

impl Plan for FaultyPlan {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        match self.fault {
            Planted::FailedRun => return Err(RunError::OutOfMemory { wanted: 1 }),
            Planted::Panic => panic!("a planted fault"),
            Planted::TransientHeapOfARun => transient_heap(self.setup),
            _ => {}
        }
        let status = self.inner.launch(turn)?;
        if self.fault == Planted::WriteBesideDestination {
            self.buffers.iter().for_each(invert_last_byte);
        }
        Ok(status)
    }

    fn wait(&mut self) -> Result<(), RunError> {
        self.inner.wait()
    }

    fn plan_bytes(&self) -> u64 {
        self.inner.plan_bytes()
    }

    fn working_bytes(&self) -> u64 {
        self.inner.working_bytes()
    }
}
