//! The contract that every engine fulfils.
//!
//! An engine owns memory, compiles validated graphs into plans, and runs them. It knows nothing of
//! guests, sessions or wires.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{Capabilities, ValidGraph};
use vgpu_transport::shm::memory::Window;

/// A device that does the arithmetic.
pub trait Engine: Send + Sync + 'static {
    /// A short name, `cpu` or `cuda:0`.
    fn name(&self) -> &str;

    /// One line for people: the model of the device.
    fn description(&self) -> &str;

    /// Memory of the device, in bytes, as it is now.
    fn memory(&self) -> MemoryInfo;

    /// What the engine can run. Does not change while the engine lives.
    fn capabilities(&self) -> &Capabilities;

    /// `size` bytes, all zero, at least 256-byte aligned. `size` 0 is allowed.
    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError>;

    /// The same in memory that a guest may map: it writes and reads there while nothing of its session runs, and,
    /// if it breaks that rule, at any time. `None` when the engine's memory is not memory of this machine, or such
    /// memory of this size would be slower than it is worth.
    fn alloc_shared(&self, size: u64) -> Result<Option<SharedMemory>, EngineError> {
        let _ = size;
        Ok(None)
    }

    /// Whether [`alloc_weights`](Engine::alloc_weights) ever gives memory.
    fn keeps_weights(&self) -> bool {
        false
    }

    /// The same as [`alloc`](Engine::alloc) for weights: memory that can be [frozen](Memory::freeze), and that takes
    /// [extents](Extent) of other such memory. `None` when the engine has no such memory.
    fn alloc_weights(&self, size: u64) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        let _ = size;
        Ok(None)
    }

    /// Why the engine will not work again in this process, if it has come to that: then nothing in its memory is worth
    /// anything, and only a new process helps. An engine that may recover tries to.
    fn beyond_repair(&self) -> Option<String> {
        None
    }

    /// Prepares a window that copies will come from or go to, so that the device reaches it by itself; until what is
    /// returned is dropped. `None` where there is nothing to prepare, or it cannot be done: copies work all the same.
    fn pin(&self, window: &Arc<Window>) -> Option<Box<dyn Any + Send>> {
        let _ = window;
        None
    }

    /// Prepares a graph to run many times. `buffers[i]` is the memory of the graph's buffer `i`, of at
    /// least the size it was validated against; the plan keeps it alive.
    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
    ) -> Result<Box<dyn Plan>, EngineError>;
}

/// Memory that another process can map.
#[derive(Debug)]
pub struct SharedMemory {
    /// The memory. When it is dropped its pages are given back, whoever still maps the file.
    pub memory: Arc<dyn Memory>,
    /// The file behind it, sealed so that nobody can shrink or grow it.
    pub file: OwnedFd,
    /// Bytes of the file.
    pub size: u64,
}

/// Total and free memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryInfo {
    /// All of it.
    pub total: u64,
    /// What an allocation could still get.
    pub free: u64,
}

/// Memory of an engine. Freed when dropped.
///
/// Accesses are ordered with the plans of the same engine by the caller: none overlaps a plan that uses
/// the memory.
pub trait Memory: Send + Sync + Any {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Writes `data` at `offset`.
    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError>;

    /// Reads into `out` from `offset`.
    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError>;

    /// Sets `len` bytes from `offset` to `value`.
    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError>;

    /// Copies `len` bytes from `source`, memory of the same engine, possibly this very one, as if through
    /// a temporary.
    fn copy_from(
        &self,
        offset: u64,
        source: &dyn Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), EngineError>;

    /// The guest has this memory for weights: it writes them once, and runs many plans with them. An engine may let them lie
    /// as its kernels like to read them; whoever reads the memory finds what was written. Plans may have to be compiled again.
    fn hold_weights(&self) {}

    /// What memory for weights holds now can be offered to others, as extents; from here on, what is written to this
    /// memory leaves those as they are. `false` for memory of other kinds.
    fn freeze(&self) -> bool {
        false
    }

    /// A part of what was [frozen](Memory::freeze). It does not overlap others of this memory.
    fn extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        let _ = (offset, len);
        Err(EngineError::ForeignMemory)
    }

    /// Puts the bytes of `extent` at `offset`, where nothing is held twice that need not be. Returns how many bytes
    /// are held once. In frozen memory the same bytes must be there already. Plans may have to be compiled again.
    fn adopt(&self, offset: u64, extent: &Arc<dyn Extent>) -> Result<u64, EngineError> {
        let _ = (offset, extent);
        Err(EngineError::ForeignMemory)
    }

    /// Whether this is frozen, and nothing was written since.
    fn is_pristine(&self) -> bool {
        false
    }

    /// For engines to get back their own type.
    fn as_any(&self) -> &dyn Any;
}

/// Bytes that never change, in memory of an engine. What was [frozen](Memory::freeze) of them is kept for as long as
/// there is one.
pub trait Extent: Send + Sync + Any {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Reads into `out` from `offset`. May run at the same time as anything else.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), EngineError>;

    /// For engines to get back their own type.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

impl fmt::Debug for dyn Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extent({} bytes)", self.size())
    }
}

impl fmt::Debug for dyn Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.size())
    }
}

/// A compiled graph.
pub trait Plan: Send {
    /// Runs the graph once and returns when all its results are in memory. A run that has begun and yielded is
    /// brought to its end.
    fn run(&mut self) -> Result<(), RunError>;

    /// The same, but stops in between when `turn` is over: then nothing of the plan runs on the device any more, and
    /// the next call goes on from there. Every call gets ahead, however short its turn.
    ///
    /// An engine that cannot stop in between runs to the end, and other guests wait that long.
    fn advance(&mut self, turn: &Turn) -> Result<Progress, RunError> {
        let _ = turn;
        self.run().map(|()| Progress::Done)
    }

    /// Runs the graph once, part by part, each when the one before is done, and says how long each took: a run takes
    /// less, since then one begins while the other ends.
    ///
    /// An engine that cannot tell parts apart gives one, without nodes.
    fn timeline(&mut self) -> Result<Vec<Span>, RunError> {
        let start = Instant::now();
        self.run()?;
        Ok(vec![Span {
            nodes: Vec::new(),
            seconds: start.elapsed().as_secs_f64(),
        }])
    }

    /// The same, but need not wait for the end: [`Progress::UnderWay`] says that the device has been handed all that is
    /// left and works on it, until [`land`](Plan::land) has returned. What is read from the engine's memory meanwhile
    /// comes after it, so that one wait is enough for both.
    fn launch(&mut self, turn: &Turn) -> Result<Progress, RunError> {
        self.advance(turn)
    }

    /// Waits for what [`launch`](Plan::launch) has left under way, if there is something, and says what became of it.
    fn land(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    /// What the plan is called in logs.
    fn set_label(&mut self, name: &str) {
        let _ = name;
    }

    /// Whether the memory that it was compiled for still lies where and how it lay then. If not, the graph has to be compiled
    /// again: weights have been found to be there twice, or somebody writes to them or needs them otherwise.
    fn is_current(&self) -> bool {
        true
    }
}

/// A part of a plan, and how long it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// The nodes of the graph that it computes.
    pub nodes: Vec<usize>,
    /// Seconds.
    pub seconds: f64,
}

/// How far a plan has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All results are in memory.
    Done,
    /// The turn was over. What the graph writes is undefined until the run is done.
    Yielded,
    /// The device works on the last of it. Only [`Plan::launch`] says so.
    UnderWay,
}

/// How long a plan may keep the device. Whoever hands out turns can shorten or lengthen this one at any time; an
/// engine asks between pieces of work of about a millisecond.
#[derive(Debug)]
pub struct Turn {
    epoch: Instant,
    /// Nanoseconds after `epoch`; `u64::MAX` for no end.
    end: AtomicU64,
}

impl Turn {
    /// A turn without an end, until one is set.
    pub fn new() -> Turn {
        Turn {
            epoch: Instant::now(),
            end: AtomicU64::new(u64::MAX),
        }
    }

    /// What the turn's clock shows: the time since the turn was made.
    pub fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Sets when the turn ends, by its own clock. `None`: it does not.
    pub fn set_end(&self, end: Option<Duration>) {
        let end = end.map_or(u64::MAX, |end| {
            u64::try_from(end.as_nanos()).unwrap_or(u64::MAX)
        });
        // Advice about time: it orders nothing.
        self.end.store(end, Ordering::Relaxed);
    }

    /// Whether the plan should stop. Reads no clock while nobody wants the device.
    pub fn is_over(&self) -> bool {
        match self.end.load(Ordering::Relaxed) {
            u64::MAX => false,
            end => self.now().as_nanos() >= u128::from(end),
        }
    }
}

impl Default for Turn {
    fn default() -> Turn {
        Turn::new()
    }
}

/// Why an engine could not do something. The session that asked goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum EngineError {
    #[error("out of memory: {wanted} bytes wanted, {free} of {total} free")]
    OutOfMemory { wanted: u64, free: u64, total: u64 },
    #[error("access to bytes {offset}..+{len} of a buffer of {size}")]
    OutOfBounds { offset: u64, len: u64, size: u64 },
    #[error("a buffer belongs to another engine")]
    ForeignMemory,
    #[error("the engine cannot compile {op}: {why}")]
    Unsupported { op: &'static str, why: String },
    #[error("the device failed: {message}")]
    Device { message: String },
    #[error("the device failed ({reason}): what was in its memory is lost")]
    Lost { reason: String },
}

/// Why a graph failed while it ran. Its results are undefined; memory outside its destinations is
/// untouched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum RunError {
    /// An index that lies in tensor data is out of range: the guest's fault.
    #[error("node {node} ({op}): index {index} is out of range, there are {count}")]
    Index {
        node: usize,
        op: &'static str,
        index: i64,
        count: u64,
    },
    /// The engine's own fault: a kernel panicked.
    #[error("node {node} ({op}): the kernel failed: {message}")]
    Kernel {
        node: usize,
        op: &'static str,
        message: String,
    },
    /// The plan is not [current](Plan::is_current): the caller's fault, who did not ask.
    #[error("the memory of the graph has moved since it was compiled")]
    Moved,
}

/// Refuses an access to memory of `size` bytes that is not all inside.
pub fn check_range(offset: u64, len: u64, size: u64) -> Result<(), EngineError> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(EngineError::OutOfBounds { offset, len, size }),
    }
}
