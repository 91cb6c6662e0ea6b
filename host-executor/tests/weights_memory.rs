//! A buffer becomes a buffer for weights while there is no free memory.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::model::for_weights;
use common::{Guest, Host, MEMORY, cpu};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan};
use vgpu_executor::weights::Sharing;
use vgpu_executor::{Process, WeightStore};
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};
use vgpu_transport::size::shown;
use vgpu_transport::wire::{MIN_EXTENT, Reply, Request};

/// An action before an allocation of memory for weights.
type Meanwhile = Box<dyn FnOnce() -> Result<(), EngineError> + Send>;

/// The CPU engine, with an action at the next allocation of memory for weights.
struct Contended {
    cpu: Arc<dyn Engine>,
    meanwhile: Mutex<Option<Meanwhile>>,
}

impl Contended {
    fn new() -> Arc<Contended> {
        Arc::new(Contended {
            cpu: cpu(),
            meanwhile: Mutex::default(),
        })
    }
}

impl Engine for Contended {
    fn name(&self) -> &str {
        "contended"
    }

    fn description(&self) -> &str {
        "an engine for tests"
    }

    fn memory(&self) -> MemoryInfo {
        self.cpu.memory()
    }

    fn capabilities(&self) -> &Capabilities {
        self.cpu.capabilities()
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        self.cpu.alloc(size)
    }

    fn supports_weights(&self) -> bool {
        true
    }

    fn alloc_weights(
        &self,
        instead: &Arc<dyn Memory>,
    ) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        let meanwhile = self.meanwhile.lock().unwrap().take();
        meanwhile.map_or(Ok(()), |act| act())?;
        self.cpu.alloc_weights(instead)
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
        self.cpu.compile(graph, buffers, is_cancelled)
    }
}

fn host(engine: &Arc<Contended>) -> Host {
    let host = Host::new(engine.clone());
    let weights = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(weights).expect("a thread");
    host
}

/// A program of a user.
fn guest(host: &Host) -> Guest {
    let mut guest = host.connect_as(Some(Process {
        pid: 1,
        uid: 7,
        program: None,
    }));
    guest.hello();
    guest
}

#[test]
fn no_other_guest_gets_the_memory_meanwhile() {
    let engine = Contended::new();
    let host = host(&engine);
    let (mut one, mut two) = (guest(&host), guest(&host));
    let (refusals, refused) = std::sync::mpsc::channel();
    *engine.meanwhile.lock().unwrap() = Some(Box::new(move || {
        let buffer = two.new_buffer();
        let size = MEMORY / 2;
        let reply = two.ask(&Request::Alloc { buffer, size });
        // The message carries the guest, because dropping the guest would free the memory.
        refusals.send((reply, two)).expect("the test listens");
        Ok(())
    }));
    let (buffer, _) = for_weights(&mut one, MEMORY / 4 * 3);
    let (reply, _two) = refused.recv().expect("the engine was asked");
    let Reply::Refused { reason, .. } = reply else {
        panic!("{reply:?}");
    };
    let free = format!("{} of {} free", shown(MEMORY / 4), shown(MEMORY));
    assert!(reason.contains(&free), "{reason}");
    one.write(buffer, 0, b"mine");
    assert_eq!(one.read(buffer, 0, 4), b"mine");
}

#[test]
fn a_refused_exchange_keeps_the_buffer_usable() {
    let engine = Contended::new();
    let host = host(&engine);
    let mut guest = guest(&host);
    let buffer = guest.alloc_with(&[5; 3 * MIN_EXTENT as usize]);
    let error = EngineError::OutOfMemory {
        wanted: 1,
        free: 5,
        total: MEMORY,
    };
    *engine.meanwhile.lock().unwrap() = Some(Box::new(|| Err(error)));
    let Reply::Refused { reason, .. } = guest.ask(&Request::Weights { buffer }) else {
        panic!("the exchange was not refused");
    };
    assert!(reason.contains("1 B wanted, 5 B of"), "{reason}");
    // The buffer has its bytes, and takes an upload as one that is not for weights.
    assert_eq!(guest.read(buffer, MIN_EXTENT, 4), [5; 4]);
    guest.write(buffer, MIN_EXTENT, &[3; MIN_EXTENT as usize]);
    guest.fence();
    assert_eq!(
        guest.read(buffer, MIN_EXTENT, MIN_EXTENT),
        [3; MIN_EXTENT as usize]
    );
    assert_eq!(engine.memory().free, MEMORY - 3 * MIN_EXTENT);
    // The guest may try again.
    let reply = guest.ask(&Request::Weights { buffer });
    assert!(matches!(reply, Reply::Held { .. }), "{reply:?}");
    assert_eq!(guest.read(buffer, 0, 4), [0; 4]);
}

/// The warnings and errors of this process.
static WARNINGS: AtomicUsize = AtomicUsize::new(0);

/// A log that counts [`WARNINGS`].
struct CountingLog;

impl Subscriber for CountingLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        WARNINGS.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn refusals_without_end_are_logged_a_hundred_times() {
    tracing::subscriber::set_global_default(CountingLog).expect("the first one");
    let engine = Contended::new();
    let host = host(&engine);
    let mut guest = guest(&host);
    let buffer = guest.alloc(MIN_EXTENT);
    for _ in 0..300 {
        *engine.meanwhile.lock().unwrap() = Some(Box::new(|| Err(EngineError::ForeignMemory)));
        let reply = guest.ask(&Request::Weights { buffer });
        assert!(matches!(reply, Reply::Refused { .. }), "{reply:?}");
    }
    // The line that says so, and those of the other tests of this process.
    let logged = WARNINGS.load(Ordering::Relaxed);
    assert!((100..120).contains(&logged), "{logged} lines");
}

#[test]
fn the_exchange_needs_no_further_memory() {
    let engine = Contended::new();
    let host = host(&engine);
    let mut one = guest(&host);
    // All of the memory of the engine.
    let (buffer, _) = for_weights(&mut one, MEMORY);
    assert_eq!(engine.memory().free, 0);
    one.write(buffer, MEMORY - 4, b"mine");
    assert_eq!(one.read(buffer, MEMORY - 4, 4), b"mine");
    one.send(&Request::Free { buffer });
    one.fence();
    assert_eq!(engine.memory().free, MEMORY);
}
