//! A buffer becomes a buffer for weights while the free memory does not suffice.

mod common;

use std::sync::{Arc, Mutex};

use common::model::{for_weights, hash, lookup, upload};
use common::{Guest, Host, MEMORY, PAGE, cpu};
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan};
use vgpu_executor::weights::Sharing;
use vgpu_executor::{Process, WeightStore};
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};
use vgpu_transport::wire::{MIN_EXTENT, Reply, Request, Wanted};

/// An action before an allocation of memory for weights. The old memory is free at that time.
type Meanwhile = Box<dyn FnOnce() -> Result<(), EngineError> + Send>;

/// The CPU engine, with an action at the next allocation of memory for weights.
struct Contended {
    cpu: Arc<dyn Engine>,
    meanwhile: Mutex<Option<Meanwhile>>,
    /// The error of the next allocation after the action.
    fails: Mutex<Option<EngineError>>,
}

impl Contended {
    fn new() -> Arc<Contended> {
        Arc::new(Contended {
            cpu: cpu(),
            meanwhile: Mutex::default(),
            fails: Mutex::default(),
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
        match self.fails.lock().unwrap().take() {
            Some(error) => Err(error),
            None => self.cpu.alloc(size),
        }
    }

    fn supports_weights(&self) -> bool {
        true
    }

    fn alloc_weights(&self, size: u64) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        let meanwhile = self.meanwhile.lock().unwrap().take();
        meanwhile.map_or(Ok(()), |act| act())?;
        self.cpu.alloc_weights(size)
    }

    fn compile_bytes(&self, counts: &GraphCounts) -> u64 {
        self.cpu.compile_bytes(counts)
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
    ) -> Result<Box<dyn Plan>, EngineError> {
        self.cpu.compile(graph, buffers)
    }
}

fn host(engine: &Arc<Contended>) -> Host {
    let host = Host::new(engine.clone());
    let weights = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(weights);
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

fn out_of_memory(wanted: u64) -> EngineError {
    EngineError::OutOfMemory {
        wanted,
        free: 5,
        total: MEMORY,
    }
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
    let free = format!("{} of {MEMORY} free", MEMORY / 4);
    assert!(reason.contains(&free), "{reason}");
    one.write(buffer, 0, b"mine");
    assert_eq!(one.read(buffer, 0, 4), b"mine");
}

#[test]
fn memory_that_cannot_be_shared_holds_the_weights() {
    let engine = Contended::new();
    let host = host(&engine);
    let mut guest = guest(&host);
    *engine.meanwhile.lock().unwrap() = Some(Box::new(|| Err(out_of_memory(1))));
    let (buffer, lengths) = for_weights(&mut guest, 2 * MIN_EXTENT);
    assert!(lengths.is_empty(), "{lengths:?}");
    let part = [3; MIN_EXTENT as usize];
    assert!(!lookup(&mut guest, buffer, 0, &part));
    let wanted = Wanted(vec![(hash(&part), MIN_EXTENT)]);
    let reply = guest.ask(&Request::Query { buffer, wanted });
    assert!(matches!(reply, Reply::Have { .. }), "{reply:?}");
    upload(&mut guest, buffer, MIN_EXTENT, &part);
    guest.send(&Request::Seal { buffer });
    guest.fence();
    assert_eq!(guest.read(buffer, MIN_EXTENT, MIN_EXTENT), part);
    assert_eq!(guest.read(buffer, 0, 4), [0; 4]);
    assert_eq!(engine.memory().free, MEMORY - 2 * MIN_EXTENT);
}

#[test]
fn without_memory_writes_fail_with_the_numbers_and_the_session_goes_on() {
    let engine = Contended::new();
    let host = host(&engine);
    let mut guest = guest(&host);
    let other = guest.alloc_with(b"mine");
    let taken = Arc::clone(&engine);
    *engine.meanwhile.lock().unwrap() = Some(Box::new(move || {
        *taken.fails.lock().unwrap() = Some(out_of_memory(2));
        Err(out_of_memory(1))
    }));
    let (buffer, _) = for_weights(&mut guest, MIN_EXTENT);
    guest.write(buffer, 0, &[1; 100]);
    guest.send(&Request::Fence {});
    let (reply, _) = guest.receive();
    let Reply::Failed { reason, .. } = reply else {
        panic!("{reply:?}");
    };
    assert!(reason.contains("2 bytes wanted, 5 of"), "{reason}");
    guest.receive();
    guest.send(&Request::Free { buffer });
    assert_eq!(guest.read(other, 0, 4), b"mine");
    assert_eq!(engine.memory().free, MEMORY - PAGE);
    assert_eq!(guest.alloc(MEMORY - PAGE).0, buffer.0 + 1);
}
