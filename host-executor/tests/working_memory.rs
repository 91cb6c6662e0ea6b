//! Working memory of graphs: charged to the tenant, refused with numbers, given back.

mod common;

use std::fs;
use std::sync::Arc;

use common::{Build, Host};
use vgpu_cpu::CpuEngine;
use vgpu_transport::ir::{BufferId, Graph, Op, Precision, Shape, Type};
use vgpu_transport::wire::{GraphId, Reply, Request};

/// Memory of the engine.
const MEMORY: u64 = 512 << 20;

/// Bytes of the attacker's buffer.
const BUFFER: u64 = 60 << 20;

/// What the process may have besides its tenants' memory: code, threads, kept scratch memory.
const CONSTANT: u64 = 256 << 20;

fn product() -> Op {
    Op::MulMat {
        accumulator: Precision::F32,
        activation: Precision::F32,
        hadamard: false,
    }
}

/// A product of one row of weights with millions of columns of one element, all in one buffer. The
/// columns have the same memory, and each is converted to a cache line.
fn attack(buffer: BufferId) -> Graph {
    let columns = BUFFER / 2 / 4 - 31;
    let mut build = Build::default();
    let weight = Shape::contiguous(Type::Q8_0, [32, 1, 1, 1]).expect("dense");
    let mut activations = Shape::contiguous(Type::F32, [32, columns, 1, 1]).expect("dense");
    activations.nb = [4, 4, 4 * columns, 4 * columns];
    let result = Shape::contiguous(Type::F32, [1, columns, 1, 1]).expect("dense");
    let dst = build.place(result, buffer, 0);
    let weight = build.place(weight, buffer, 0);
    let x = build.place(activations, buffer, BUFFER / 2);
    build.node(product(), dst, &[weight, x]);
    build.0
}

/// The highest resident memory of this process so far, in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<u64>().ok())
        .expect("a number of KiB")
        << 10
}

#[test]
fn working_memory_beyond_the_quota_is_refused_with_numbers_and_never_allocated() {
    let host = Host::new(Arc::new(
        CpuEngine::new(2, Some(MEMORY)).expect("two threads"),
    ));
    let mut guest = host.guest();
    let buffer = guest.alloc(BUFFER);
    let rest = guest.alloc(MEMORY - BUFFER - (64 << 20));
    guest.graph(GraphId(1), &attack(buffer));
    let request = guest.submit(GraphId(1));
    // GRAPH fails, and so does SUBMIT.
    for _ in 0..2 {
        match guest.receive().0 {
            Reply::Failed { reason, .. } => {
                assert!(reason.contains("out of memory"), "{reason}");
                assert!(reason.contains(" of 512.0 MiB free"), "{reason}");
            }
            other => panic!("{request}: {other:?}"),
        }
    }
    // With more memory the graph runs, and its working memory is free again when it is gone.
    guest.send(&Request::Free { buffer: rest });
    guest.send(&Request::Forget { graph: GraphId(1) });
    let free = |guest: &mut common::Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    };
    assert_eq!(free(&mut guest), MEMORY - BUFFER);
    guest.graph(GraphId(2), &attack(buffer));
    guest.submit(GraphId(2));
    let during = free(&mut guest);
    assert!(during < MEMORY - BUFFER - (64 << 20), "{during}");
    guest.send(&Request::Forget { graph: GraphId(2) });
    assert_eq!(free(&mut guest), MEMORY - BUFFER);
    drop(guest);
    host.wait_until_empty();
    assert!(peak() < MEMORY + CONSTANT, "{} bytes were resident", peak());
}
