//! The corpora of the fuzzers, as tests.

#[path = "../../tests/fuzz/targets/mod.rs"]
#[allow(dead_code, unreachable_pub)] // the fuzzers need more of the targets
mod targets;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use targets::session::{self, Setup};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan, RunError, RunStatus, Turn};
use vgpu_gguf::Rng;
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};

/// Runs each file of a corpus through its fuzz target.
fn corpus(name: &str, least: usize) {
    let (_, run) = targets::TARGETS
        .into_iter()
        .find(|(target, _)| *target == name)
        .expect("a target of that name");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fuzz/corpus")
        .join(name);
    let mut files: Vec<_> = fs::read_dir(&corpus)
        .expect("the corpus is in the repository")
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    assert!(
        files.len() >= least,
        "{} files in {}",
        files.len(),
        corpus.display()
    );
    for file in files {
        // If the test fails, the last line of the output names the input.
        println!("{}", file.display());
        run(&fs::read(&file).expect("a file"));
    }
}

macro_rules! corpora {
    ($($test:ident: $name:literal, $least:literal;)*) => {
        $(#[test]
        fn $test() {
            corpus($name, $least);
        })*

        #[test]
        fn every_target_has_a_test() {
            let tested = [$($name),*];
            assert_eq!(tested, targets::TARGETS.map(|(name, _)| name));
        }
    };
}

corpora! {
    batches_of_the_corpus: "batch", 10;
    messages_of_the_corpus: "codec", 10;
    configurations_of_the_corpus: "config", 10;
    devices_of_the_corpus: "device", 10;
    frames_of_the_corpus: "frames", 10;
    gguf_files_of_the_corpus: "gguf", 10;
    graphs_of_the_corpus: "graph", 10;
    monitors_of_the_corpus: "monitor", 10;
    pages_of_the_corpus: "pages", 10;
    rings_of_the_corpus: "ring", 10;
    sessions_of_the_corpus: "session", 20;
    texts_of_the_corpus: "text", 10;
}

/// Sessions with random bytes, in addition to the corpus.
#[test]
fn sessions_at_random() {
    let mut random = Rng::new(1, 0);
    for _ in 0..2000 {
        let bytes: Vec<u8> = (0..600).map(|_| random.next_u64() as u8).collect();
        session::run(&bytes);
    }
}

/// A fault that the checks of the fuzzed session must notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planted {
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
}

/// The CPU engine with a fault.
struct Faulty {
    inner: CpuEngine,
    fault: Planted,
    /// Memory that is never freed.
    lost: Mutex<Vec<Arc<dyn Memory>>>,
}

struct FaultyPlan {
    inner: Box<dyn Plan>,
    fault: Planted,
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
            buffers: buffers.to_vec(),
        }))
    }
}

impl Plan for FaultyPlan {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        match self.fault {
            Planted::FailedRun => return Err(RunError::OutOfMemory { wanted: 1 }),
            Planted::Panic => panic!("a planted fault"),
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

/// Whether one of a thousand random sessions on an engine with this fault fails a check.
fn is_noticed(fault: Option<Planted>, setup: &'static Setup) -> bool {
    let mut random = Rng::new(2, 0);
    (0..1000).any(|_| {
        let bytes: Vec<u8> = (0..600).map(|_| random.next_u64() as u8).collect();
        let inner = session::cpu_engine(setup);
        let engine: Arc<dyn Engine> = match fault {
            Some(fault) => Arc::new(Faulty {
                inner,
                fault,
                lost: Mutex::default(),
            }),
            None => Arc::new(inner),
        };
        catch_unwind(AssertUnwindSafe(|| session::run_on(&engine, setup, &bytes))).is_err()
    })
}

#[test]
fn the_checks_of_a_fuzzed_session_notice_planted_faults() {
    for setup in [&session::SMALL, &session::DEFAULT] {
        let unharmed = !is_noticed(None, setup);
        assert!(unharmed, "a session without a fault fails");
        for fault in [
            Planted::OldBytes,
            Planted::WriteBesideDestination,
            Planted::LostAllocation,
            Planted::FailedRun,
            Planted::Panic,
        ] {
            let is_noticed = is_noticed(Some(fault), setup);
            assert!(is_noticed, "{fault:?} is not noticed");
        }
    }
}
