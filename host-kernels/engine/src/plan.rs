//! Compiled graphs and the turns in which they run.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{EngineError, RunError};

/// Bytes that an allocator adds to an allocation, on average: its head, and the rounding of its
/// size. For [`Plan::plan_bytes`].
pub const ALLOCATION_BYTES: usize = 16;

/// A compiled graph.
///
/// [`launch`](Plan::launch) and [`wait`](Plan::wait) are the two steps of every run. Callers
/// without a turn to respect use `run`, which is made of both.
pub trait Plan: Send {
    /// Starts a run of the graph, or continues one that has yielded. Returns when `turn` is over,
    /// when all results are in memory, or when the device has been given all remaining work.
    ///
    /// Every call makes progress, however short its turn. An engine that cannot stop in the middle
    /// of a graph ignores `turn`; other guests wait that long.
    ///
    /// After [`RunStatus::InFlight`] the device works until [`wait`](Plan::wait) returns. Reads of
    /// the engine's memory are ordered after that work, so one wait is enough for both.
    ///
    /// # Errors
    /// Why the run failed. The next call starts a new run.
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError>;

    /// Waits for the work that [`launch`](Plan::launch) left in flight. Returns at once if there is
    /// none.
    ///
    /// # Errors
    /// Why the run failed.
    fn wait(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    /// Runs the graph once, part by part, each after the one before has finished, and returns the
    /// time that each part took. The sum exceeds the time of a normal run, in which parts overlap.
    ///
    /// An engine that cannot time parts returns one part without nodes.
    ///
    /// # Errors
    /// Why the run failed.
    fn profile(&mut self) -> Result<Vec<NodeTiming>, RunError> {
        let start = Instant::now();
        run(self)?;
        Ok(vec![NodeTiming {
            nodes: Vec::new(),
            seconds: start.elapsed().as_secs_f64(),
        }])
    }

    /// The names of the kernels that a run launches, sorted, for reports. Empty if the kernels of
    /// the engine have no names.
    fn kernels(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Sets the name of the plan in logs and profiles.
    fn set_label(&mut self, label: &str) {
        let _ = label;
    }

    /// Bytes of host memory that the plan itself holds, without buffers and working memory: at
    /// least what the allocator has given to it, and at most twice as much. Before
    /// [`allocate`](Plan::allocate), these are the bytes that the plan has afterwards, at most.
    fn plan_bytes(&self) -> u64;

    /// Allocates what the plan needs for itself and compilation has left out, since
    /// [`compile_bytes`](crate::Engine::compile_bytes) has no part for it: copies of tensors. The
    /// caller has charged the [`plan_bytes`](Plan::plan_bytes) and the
    /// [`device_bytes`](Plan::device_bytes). The first [`launch`](Plan::launch) does so otherwise.
    ///
    /// # Errors
    /// [`EngineError`] of the engine that the memory is for.
    fn allocate(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Bytes of host memory that a run needs besides the buffers of the graph, at most. A run
    /// allocates these bytes when it starts, and frees them when it ends. Memory that the engine
    /// keeps for all plans does not count.
    fn working_bytes(&self) -> u64 {
        0
    }

    /// Bytes of the engine's memory that the plan itself holds, if that is not memory of the host.
    fn device_bytes(&self) -> u64 {
        0
    }

    /// Bytes of the engine's memory that a run needs besides the buffers of the graph, at most, if
    /// that is not memory of the host. Plans of an engine may share them.
    fn device_working_bytes(&self) -> u64 {
        0
    }

    /// Takes the [`device_working_bytes`](Plan::device_working_bytes), for as long as the plan
    /// lives. The first [`launch`](Plan::launch) does so otherwise.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the device has not that much left.
    fn reserve(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Plans of one engine with equal keys can run [as a batch](crate::Engine::launch_batch): they
    /// multiply with the same weights at the same addresses, and have got equally far. `None` if
    /// the plan runs alone only.
    fn batch_key(&self) -> Option<BatchKey> {
        None
    }

    /// The work of a run, in a unit that plans with equal [keys](Plan::batch_key) have in common.
    /// The time of a batch is charged to its members in proportion to their work.
    fn batch_work(&self) -> u64 {
        1
    }

    /// The plan as the type of its engine. `None` if the engine does not need it.
    fn as_any_mut(&mut self) -> Option<&mut dyn Any> {
        None
    }

    /// Whether the memory of the graph still has the addresses and layouts that the plan was
    /// compiled for. If not, the graph must be compiled again: weights have been deduplicated,
    /// written, or converted to another layout.
    fn is_current(&self) -> bool {
        true
    }
}

impl dyn Plan + '_ {
    /// Runs the graph once, or completes a run that has yielded. All results are in memory on
    /// return.
    ///
    /// # Errors
    /// Why the run failed.
    pub fn run(&mut self) -> Result<(), RunError> {
        run(self)
    }
}

fn run<P: Plan + ?Sized>(plan: &mut P) -> Result<(), RunError> {
    let turn = Turn::new();
    loop {
        match plan.launch(&turn)? {
            RunStatus::Done => return Ok(()),
            RunStatus::InFlight => return plan.wait(),
            RunStatus::Yielded => {}
        }
    }
}

/// What plans have in common that can run as a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BatchKey {
    /// A number of the sequence of products with weights.
    pub products: u64,
    /// How far the run has got; `(0, 0)` before its first turn.
    pub position: (usize, usize),
}

/// Part of a plan, and how long it took.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeTiming {
    /// Indices of the graph's nodes that the part computes.
    pub nodes: Vec<usize>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// State of a run after [`Plan::launch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunStatus {
    /// All results are in memory.
    Done,
    /// The turn was over before the graph was. The destinations are undefined until the run is
    /// done.
    Yielded,
    /// The device has been given all remaining work. [`Plan::wait`] waits for it.
    InFlight,
}

/// A time slice of a device. The scheduler can change its end at any time; an engine checks
/// [`is_over`](Turn::is_over) between pieces of work of about a millisecond.
#[derive(Debug)]
pub struct Turn {
    start: Instant,
    /// Nanoseconds after `start`; `u64::MAX` for no end.
    end: AtomicU64,
}

impl Turn {
    /// A turn without an end.
    pub fn new() -> Turn {
        Turn {
            start: Instant::now(),
            end: AtomicU64::new(u64::MAX),
        }
    }

    /// The time since the turn was created.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Sets the end of the turn, as a time since it was created. `None` removes the end.
    pub fn set_end(&self, end: Option<Duration>) {
        let end = end.map_or(u64::MAX, |end| {
            u64::try_from(end.as_nanos()).unwrap_or(u64::MAX)
        });
        // Relaxed: a hint about time, which orders no other memory.
        self.end.store(end, Ordering::Relaxed);
    }

    /// Whether the turn ended when it was created: a plan should stop after each unit of work. Does
    /// not read the clock.
    pub fn is_empty(&self) -> bool {
        self.end.load(Ordering::Relaxed) == 0
    }

    /// Whether the plan should stop. Reads the clock only if the turn has an end.
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
