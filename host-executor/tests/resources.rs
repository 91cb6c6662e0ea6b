//! What a process has a fixed number of: memory mappings and file descriptors, divided among
//! guests.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::model::{for_weights, upload};
use common::{Guest, Host, add, bytes, cpu};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan, SharedMemory};
use vgpu_executor::Limits;
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};
use vgpu_transport::wire::{GraphId, MIN_EXTENT, Reply, Request};

fn compute(guest: &mut Guest) {
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(1), &add(2, a, a, a));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
}

fn host_with(limits: Limits) -> Host {
    Host::limited(cpu(), limits, 64)
}

/// Allocates buffers of one byte until one is refused. Returns their number, and the reason.
fn fill(guest: &mut Guest) -> (usize, String) {
    for count in 0.. {
        let buffer = guest.new_buffer();
        match guest.ask(&Request::Alloc { buffer, size: 1 }) {
            Reply::Done { .. } => {}
            // As a guest does that wants no mapping of its own.
            Reply::Shared { size, .. } => drop(guest.end.receive_shared(size).expect("a file")),
            Reply::Refused { reason, .. } => return (count, reason),
            other => panic!("{other:?}"),
        }
    }
    unreachable!("there is a limit")
}

#[test]
fn mappings_are_divided_among_guests() {
    let host = host_with(Limits {
        mappings: 60,
        ..Limits::default()
    });
    let mut first = host.guest_of(1);
    let (count, reason) = fill(&mut first);
    assert_eq!(count, 30);
    assert_eq!(
        reason,
        "guest uid:1: out of memory mappings: 1 wanted, the guest has 30, 30 of 60 are free, and \
         one guest gets no more than it leaves free for others"
    );
    // A second program of the guest gets none, another guest does.
    assert_eq!(fill(&mut host.guest_of(1)).0, 0);
    let mut other = host.guest_of(2);
    compute(&mut other);
    assert_eq!(fill(&mut other).0, 14);
    compute(&mut host.guest_of(3));
    // Buffers without bytes take no mapping, and a session that ends gives back its own.
    first.alloc(0);
    drop(other);
    drop(first);
    host.wait_until_empty();
    assert_eq!(fill(&mut host.guest_of(2)).0, 30);
}

#[test]
fn weights_take_their_mappings_from_the_guest() {
    let host = host_with(Limits {
        mappings: 80,
        ..Limits::default()
    });
    host.server
        .share_weights(
            vgpu_executor::WeightStore::new(vgpu_executor::weights::Sharing::Tenant, None)
                .expect("no folder"),
        )
        .expect("a thread");
    let mut guest = host.guest_of(1);
    // Each takes 17: two for its regions, 15 for parts that are written while others use them.
    let content = vec![7; MIN_EXTENT as usize];
    for _ in 0..2 {
        let (buffer, _) = for_weights(&mut guest, MIN_EXTENT);
        upload(&mut guest, buffer, 0, &content);
    }
    let buffer = guest.alloc(MIN_EXTENT);
    match guest.ask(&Request::Weights { buffer }) {
        Reply::Refused { reason, .. } => {
            assert!(
                reason.contains("out of memory mappings: 15 wanted"),
                "{reason}"
            );
        }
        other => panic!("{other:?}"),
    }
    // The buffer stays an ordinary one.
    guest.write(buffer, 0, &content);
    assert_eq!(guest.read(buffer, 0, 4), [7; 4]);
    drop(guest);
    host.wait_until_empty();
    assert_eq!(fill(&mut host.guest_of(2)).0, 40);
}

/// Sessions of one guest allocate as many buffers as they may, with the limits of a real process.
/// Without limits of a guest, they use up all mappings of the process (`vm.max_map_count`).
#[test]
fn guest_with_many_small_buffers_does_not_affect_other_guests() {
    const SESSIONS: usize = 5;
    let limits = Limits::of_this_process().expect("limits of the kernel");
    let engine = CpuEngine::new(1, Some(4 << 30)).expect("a thread");
    let host = Host::limited(Arc::new(engine), limits, 64);
    let mut other = host.guest_of(2);
    compute(&mut other);
    let mut large_guest: Vec<Guest> = (0..SESSIONS).map(|_| host.guest_of(1)).collect();
    let mut total = 0;
    let mut reasons = Vec::new();
    for guest in &mut large_guest {
        let (count, reason) = fill(guest);
        total += count;
        reasons.push(reason);
        compute(&mut other);
    }
    // A new guest gets a thread, a session and memory.
    let mut late = host.guest_of(3);
    for size in [1, 4096, 1 << 20] {
        late.alloc(size);
    }
    compute(&mut late);
    compute(&mut other);
    let last = reasons.pop().expect("sessions");
    let half = limits.mappings / 2;
    let reached = (half - 100..=half).contains(&total) && last.contains("out of memory mappings");
    // Where the kernel permits many more mappings, the limit of buffers comes first.
    let many = half > SESSIONS * limits.buffers;
    assert!(
        reached || many && last.contains("buffers"),
        "{total}: {last}"
    );
}

/// The CPU engine, in a process that has no descriptor for a buffer's file, or no memory.
struct WithoutFiles {
    engine: Arc<dyn Engine>,
    /// What is free when a buffer's memory is allocated; `None` for what the engine says.
    free: Option<u64>,
    /// How often memory without a file was asked for.
    private: AtomicUsize,
}

impl WithoutFiles {
    fn new(free: Option<u64>) -> Arc<WithoutFiles> {
        Arc::new(WithoutFiles {
            engine: cpu(),
            free,
            private: AtomicUsize::new(0),
        })
    }
}

impl Engine for WithoutFiles {
    fn name(&self) -> &str {
        self.engine.name()
    }

    fn description(&self) -> &str {
        self.engine.description()
    }

    fn memory(&self) -> MemoryInfo {
        self.engine.memory()
    }

    fn capabilities(&self) -> &Capabilities {
        self.engine.capabilities()
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        self.private.fetch_add(1, Ordering::Relaxed);
        self.engine.alloc(size)
    }

    fn alloc_shared(&self, size: u64) -> Result<Option<SharedMemory>, EngineError> {
        let MemoryInfo { total, free } = self.memory();
        let free = self.free.unwrap_or(free);
        Err(EngineError::OutOfMemory {
            wanted: size,
            free,
            total,
        })
    }

    fn compile_bytes(&self, counts: &GraphCounts) -> u64 {
        self.engine.compile_bytes(counts)
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError> {
        self.engine.compile(graph, buffers, is_cancelled)
    }
}

#[test]
fn buffer_that_cannot_be_shared_is_used_by_messages() {
    let host = Host::new(WithoutFiles::new(None));
    let mut guest = host.guest();
    let buffer = guest.new_buffer();
    let reply = guest.ask(&Request::Alloc { buffer, size: 4096 });
    assert!(matches!(reply, Reply::Done { .. }), "{reply:?}");
    compute(&mut guest);
}

#[test]
fn memory_that_an_engine_does_not_have_is_asked_for_once() {
    let engine = WithoutFiles::new(Some(4095));
    let host = Host::new(Arc::clone(&engine) as Arc<dyn Engine>);
    let mut guest = host.guest();
    let buffer = guest.new_buffer();
    let reply = guest.ask(&Request::Alloc { buffer, size: 4096 });
    assert!(matches!(reply, Reply::Refused { .. }), "{reply:?}");
    assert_eq!(engine.private.load(Ordering::Relaxed), 0);
}

#[test]
fn descriptors_are_divided_among_guests() {
    // Six sessions of eight descriptors.
    let host = host_with(Limits {
        descriptors: 48,
        ..Limits::default()
    });
    let mut first: Vec<Guest> = (0..3).map(|_| host.guest_of(1)).collect();
    let mut fourth = host.connect_of(1);
    fourth.send(&Request::Fence {});
    let reason = fourth.ended();
    assert!(
        reason.contains(
            "guest uid:1: out of file descriptors: 8 wanted, the guest has 24, 24 of 48 are free"
        ),
        "{reason}"
    );
    compute(&mut host.guest_of(2));
    first.pop();
    while host.server.sessions().len() > 2 {
        std::thread::yield_now();
    }
    compute(&mut host.guest_of(1));
}
