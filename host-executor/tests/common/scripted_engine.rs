//! An engine that fails on command, around the CPU engine.

use std::any::Any;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};

use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan, RunError, RunStatus, Turn};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{Capabilities, GraphCounts, OpKind, Rule, Type, TypeSet, ValidGraph};

/// What the next graph does.
#[derive(Default)]
pub(crate) enum Act {
    /// Does nothing.
    #[default]
    Run,
    /// Panics in `compile`.
    CompilePanics,
    /// Fails to compile.
    CompileFails,
    /// Sends a message when compilation begins, and compiles until it is cancelled.
    CompilesUntilCancelled(Sender<()>),
    /// Panics while it runs, on the session's thread.
    RunPanics,
    /// Fails like a kernel that has panicked.
    KernelPanics,
    /// Sends a message when the plan runs, and waits for a message before the plan continues.
    Waits(Sender<()>, Receiver<()>),
    /// Has copies of so many bytes. Says when they are allocated.
    Copies(u64, Sender<()>),
    /// As `Waits`. The plan is then in flight. When the host waits for the plan, the plan sets its
    /// first buffer to 9, or fails.
    Launches {
        running: Sender<()>,
        go_on: Receiver<()>,
        fails: bool,
    },
}

/// An engine whose only operator is ADD on f32.
pub(crate) struct ScriptedEngine {
    cpu: CpuEngine,
    capabilities: Capabilities,
    act: Mutex<Act>,
}

/// An allocation of this size panics.
pub(crate) const PANIC_SIZE: u64 = 6666;

/// An allocation of this size returns memory that cannot be read.
pub(crate) const UNREADABLE_SIZE: u64 = 4444;

impl ScriptedEngine {
    pub(crate) fn new() -> Arc<ScriptedEngine> {
        let f32s = TypeSet::of(&[Type::F32]);
        Arc::new(ScriptedEngine {
            cpu: CpuEngine::new(1, Some(super::MEMORY)).expect("a thread and 64 MiB"),
            capabilities: Capabilities::new(vec![Rule::uniform(OpKind::Add, f32s, 2)]),
            act: Mutex::default(),
        })
    }

    /// Sets what the next graph does.
    pub(crate) fn next(&self, act: Act) {
        *self.act.lock().unwrap() = act;
    }
}

/// An allocation of this size returns memory without bytes, of which every access succeeds at once.
pub(crate) const HOLLOW_SIZE: u64 = 1 << 60;

impl Engine for ScriptedEngine {
    fn name(&self) -> &str {
        "scripted"
    }

    fn description(&self) -> &str {
        "an engine for tests"
    }

    fn memory(&self) -> MemoryInfo {
        self.cpu.memory()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        assert_ne!(size, PANIC_SIZE, "told to panic");
        if size == HOLLOW_SIZE {
            return Ok(Arc::new(Hollow));
        }
        let memory = self.cpu.alloc(size)?;
        if size == UNREADABLE_SIZE {
            return Ok(Arc::new(Unreadable(memory)));
        }
        Ok(memory)
    }

    fn allocation_size(&self, size: u64) -> u64 {
        match size {
            HOLLOW_SIZE => 0,
            size => self.cpu.allocation_size(size),
        }
    }

    fn compile_bytes(&self, counts: &GraphCounts) -> u64 {
        self.cpu.compile_bytes(counts)
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError> {
        assert_eq!(graph.graph().buffers.len(), buffers.len());
        match std::mem::take(&mut *self.act.lock().unwrap()) {
            Act::CompilePanics => panic!("told to panic"),
            Act::CompileFails => Err(EngineError::Unsupported {
                op: "ADD",
                why: "told to fail".into(),
            }),
            Act::CompilesUntilCancelled(began) => {
                began.send(()).expect("the test listens");
                while !is_cancelled() {
                    std::thread::yield_now();
                }
                Err(EngineError::Cancelled)
            }
            act => Ok(Box::new(ScriptedPlan(act, buffers.to_vec()))),
        }
    }
}

struct ScriptedPlan(Act, Vec<Arc<dyn Memory>>);

impl Plan for ScriptedPlan {
    fn plan_bytes(&self) -> u64 {
        match self.0 {
            Act::Copies(bytes, _) => bytes,
            _ => size_of::<ScriptedPlan>() as u64,
        }
    }

    fn allocate(&mut self) -> Result<(), EngineError> {
        if let Act::Copies(_, allocated) = &self.0 {
            allocated.send(()).expect("the test listens");
        }
        Ok(())
    }

    fn launch(&mut self, _: &Turn) -> Result<RunStatus, RunError> {
        match &self.0 {
            Act::RunPanics => panic!("told to panic"),
            Act::KernelPanics => Err(RunError::Kernel {
                node: 0,
                op: "ADD",
                message: "told to fail".into(),
            }),
            Act::Waits(running, go_on) => {
                running.send(()).expect("the test listens");
                go_on.recv().expect("the test says go on");
                Ok(RunStatus::Done)
            }
            Act::Launches { running, go_on, .. } => {
                running.send(()).expect("the test listens");
                go_on.recv().expect("the test says go on");
                Ok(RunStatus::InFlight)
            }
            _ => Ok(RunStatus::Done),
        }
    }

    fn wait(&mut self) -> Result<(), RunError> {
        let Act::Launches { fails, .. } = self.0 else {
            return Ok(());
        };
        self.1[0].fill(0, self.1[0].size(), 9).expect("its memory");
        match fails {
            true => Err(RunError::Kernel {
                node: 0,
                op: "ADD",
                message: "told to fail".into(),
            }),
            false => Ok(()),
        }
    }
}

/// Memory of a device that is lost.
struct Unreadable(Arc<dyn Memory>);

impl Memory for Unreadable {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        self.0.write(offset, data)
    }

    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        Err(EngineError::OutOfBounds {
            offset,
            len: out.len() as u64,
            size: 0,
        })
    }

    fn fill(&self, _: u64, _: u64, _: u8) -> Result<(), EngineError> {
        Err(EngineError::ForeignMemory)
    }

    fn copy_from(&self, _: u64, _: &dyn Memory, _: u64, _: u64) -> Result<(), EngineError> {
        Err(EngineError::ForeignMemory)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Memory without bytes.
struct Hollow;

impl Memory for Hollow {
    fn size(&self) -> u64 {
        HOLLOW_SIZE
    }

    fn write(&self, _: u64, _: Bytes<'_>) -> Result<(), EngineError> {
        Ok(())
    }

    fn read(&self, _: u64, _: BytesMut<'_>) -> Result<(), EngineError> {
        Ok(())
    }

    fn fill(&self, _: u64, _: u64, _: u8) -> Result<(), EngineError> {
        Ok(())
    }

    fn copy_from(&self, _: u64, _: &dyn Memory, _: u64, _: u64) -> Result<(), EngineError> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
