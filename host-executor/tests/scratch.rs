//! Working memory of the engine, which all tenants use one after the other: what one tenant has
//! computed with reaches no result of another.

mod common;
#[path = "common/operations.rs"]
mod operations;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use common::{Build, Guest, Host, MEMORY};
use operations::{Operation, every_operator, of_types};
use vgpu_cpu::CpuEngine;
use vgpu_gguf::Rng;
use vgpu_transport::ir::{BufferId, Shape, Type};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD};

const GRAPH: GraphId = GraphId(1);

/// What the inputs of a tenant contain.
#[derive(Clone, Copy)]
enum Content {
    /// The same number everywhere, and the first row or expert of each table.
    Marker,
    /// Random numbers, and ids of the first two.
    Random(u64),
}

impl Content {
    fn bytes(self, shape: &Shape) -> Vec<u8> {
        const MARKER: f32 = 300.0;
        let len = shape.byte_len().expect("a small shape") as usize;
        let mut random = match self {
            Content::Marker => None,
            Content::Random(seed) => Some(Rng::new(seed, 0)),
        };
        let mut word = || match (shape.ty, &mut random) {
            (Type::I32, None) => [0; 4],
            (Type::I32, Some(random)) => (random.below(2) as u32).to_le_bytes(),
            (_, None) => MARKER.to_le_bytes(),
            (Type::F32, Some(random)) => (0.5 + random.below(1000) as f32 / 1e3).to_le_bytes(),
            // Half floats, also as factors of blocks, are below 1.
            (_, Some(random)) => (random.next_u64() as u32 & 0x3b3b_3b3b).to_le_bytes(),
        };
        let mut bytes: Vec<u8> = (0..len.div_ceil(4)).flat_map(|_| word()).collect();
        bytes.truncate(len);
        bytes
    }
}

/// Runs the operation in a session of this guest. Returns all bytes of its result.
fn run(mut guest: Guest, operation: &Operation, content: Content) -> Vec<u8> {
    let alloc = |guest: &mut Guest, shape: &Shape| -> BufferId {
        let len = shape.byte_len().expect("a small shape");
        guest.alloc(len.max(4))
    };
    let write = |guest: &mut Guest, buffer, shape: &Shape| {
        for (i, part) in content.bytes(shape).chunks(MAX_PAYLOAD).enumerate() {
            guest.write(buffer, (i * MAX_PAYLOAD) as u64, part);
        }
    };
    let mut build = Build::default();
    let result = alloc(&mut guest, &operation.dst);
    let dst = build.place(operation.dst, result, 0);
    let mut src = Vec::new();
    for (i, shape) in operation.src.iter().enumerate() {
        if operation.is_in_place && i == 0 {
            write(&mut guest, result, shape);
            src.push(dst);
            continue;
        }
        let buffer = alloc(&mut guest, shape);
        write(&mut guest, buffer, shape);
        src.push(build.place(*shape, buffer, 0));
    }
    build.node(operation.op, dst, &src);
    guest.graph(GRAPH, &build.0);
    guest.submit(GRAPH);
    guest.fence();
    let len = operation.dst.byte_len().expect("a small shape");
    let parts = (0..len).step_by(MAX_PAYLOAD);
    parts
        .flat_map(|offset| guest.read(result, offset, (len - offset).min(MAX_PAYLOAD as u64)))
        .collect()
}

/// Compares the results of a tenant alone and after another one. Returns whether the operation
/// depends on its inputs.
fn check(operation: &Operation, content: Content) -> bool {
    // One thread, so that all tenants use the same memory.
    let host = || {
        let engine = CpuEngine::new(1, Some(MEMORY)).expect("a thread and 64 MiB");
        Host::new(Arc::new(engine))
    };
    let alone = run(host().guest_of(2), operation, content);
    let shared = host();
    let marked = run(shared.guest_of(1), operation, Content::Marker);
    let after = run(shared.guest_of(2), operation, content);
    assert!(
        after == alone,
        "{} has another result after that of another tenant",
        operation.name
    );
    marked != alone
}

#[test]
fn results_do_not_depend_on_what_another_tenant_has_computed() {
    let operations: Vec<Operation> = every_operator().into_iter().chain(of_types()).collect();
    let next = AtomicUsize::new(0);
    // Most of the time a thread waits for a host that ends.
    let depends = thread::scope(|scope| {
        let check_all = || {
            let taken = std::iter::from_fn(|| {
                let index = next.fetch_add(1, Ordering::Relaxed);
                Some((index as u64, operations.get(index)?))
            });
            taken
                .filter(|(seed, operation)| check(operation, Content::Random(*seed)))
                .count()
        };
        let threads = [(); 16].map(|()| scope.spawn(check_all));
        threads.map(|thread| thread.join().expect("no failure"))
    });
    let depend: usize = depends.iter().sum();
    assert!(depend > 100, "only {depend} results depend on the inputs");
}
