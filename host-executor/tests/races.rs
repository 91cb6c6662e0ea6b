//! A guest that writes to its buffers while graphs of every operator run: to row ids, expert ids,
//! masks, blocks and numbers, in source and destination. A graph gives some result, or fails
//! because of an index. Nothing beside its destination changes: the kernel ends the test at an
//! access to the pages around a buffer.

mod common;
#[path = "common/operations.rs"]
mod operations;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{Build, Guest, Host, MEMORY, OtherGuest};
use operations::{Operation, every_operator, of_types};
use vgpu_cpu::CpuEngine;
use vgpu_gguf::Rng;
use vgpu_transport::ir::{BufferId, OpKind, Shape};
use vgpu_transport::shm::memory::Window;
use vgpu_transport::wire::{GraphId, Reply, Request};

const GRAPH: GraphId = GraphId(1);

/// Runs of each graph.
const RUNS: usize = 12;

/// A buffer that the guest has mapped, if the engine shares it.
fn mapped(guest: &mut Guest, shape: &Shape) -> (BufferId, Option<Window>) {
    let buffer = guest.new_buffer();
    let size = shape.byte_len().expect("a small shape").max(4);
    let window = guest.alloc_mapped(buffer, size);
    (buffer, window)
}

/// Writes words to windows until it is told to stop: numbers, small indices, and wild ones.
fn scribble(windows: &[&Window], seed: u64, stop: &AtomicBool) {
    let mut random = Rng::new(seed, 0);
    while !stop.load(Ordering::Relaxed) {
        for window in windows {
            let words = window.size() as u64 / 4;
            for _ in 0..words.min(64) {
                let at = 4 * random.below(words) as usize;
                let word = match random.below(8) {
                    0 => random.next_u64() as u32,
                    1 => u32::MAX - random.below(4) as u32,
                    2 => 1 << 31,
                    3 => 0x3f80_0000,
                    _ => random.below(4) as u32,
                };
                window
                    .bytes_mut(at..at + 4)
                    .copy_from((&word.to_le_bytes()[..]).into());
            }
        }
    }
}

/// Runs the operation while all its buffers change. Returns whether all runs had valid indices.
fn run_while_buffers_change(host: &Host, operation: &Operation, seed: u64) -> bool {
    let name = &operation.name;
    let mut guest = host.guest_of(1);
    let content: Vec<u8> = (0..1 << 12).map(|i: u32| i as u8).collect();
    // Buffers before and behind those of the graph.
    let before = guest.alloc_with(&content);
    let mut build = Build::default();
    let mut windows = Vec::new();
    let (dst, window) = mapped(&mut guest, &operation.dst);
    windows.extend(window);
    let dst = build.place(operation.dst, dst, 0);
    let mut src = Vec::new();
    for (i, shape) in operation.src.iter().enumerate() {
        if operation.is_in_place && i == 0 {
            src.push(dst);
            continue;
        }
        let (buffer, window) = mapped(&mut guest, shape);
        windows.extend(window);
        src.push(build.place(*shape, buffer, 0));
    }
    let behind = guest.alloc_with(&content);
    assert!(!windows.is_empty(), "{name}: no buffer is shared");
    build.node(operation.op, dst, &src);
    guest.graph(GRAPH, &build.0);
    guest.fence();
    let stop = AtomicBool::new(false);
    let windows: Vec<&Window> = windows.iter().collect();
    let all_valid = thread::scope(|scope| {
        scope.spawn(|| scribble(&windows, seed, &stop));
        let runs = (0..RUNS).map(|_| {
            let submitted = guest.submit(GRAPH);
            let fence = guest.send(&Request::Fence {});
            match guest.receive().0 {
                Reply::Failed { request, reason } => {
                    assert_eq!(request, submitted, "{name}");
                    assert!(reason.contains("out of range"), "{name}: {reason}");
                    assert_eq!(guest.receive().0, Reply::Done { request: fence }, "{name}");
                    false
                }
                reply => {
                    assert_eq!(reply, Reply::Done { request: fence }, "{name}");
                    true
                }
            }
        });
        // All runs, also after one that failed.
        let outcomes: Vec<bool> = runs.collect();
        stop.store(true, Ordering::Relaxed);
        outcomes.iter().all(|&is_valid| is_valid)
    });
    for buffer in [before, behind] {
        assert!(
            guest.read(buffer, 0, content.len() as u64) == content,
            "{name} has changed another buffer"
        );
    }
    all_valid
}

/// Further tries of an operator that has seen no wrong index.
const MORE: u64 = 100;

#[test]
fn a_guest_that_rewrites_its_buffers_while_any_operator_runs_harms_nobody() {
    // A page without access lies before and behind each buffer.
    let engine = CpuEngine::new(2, Some(MEMORY)).expect("two threads and 64 MiB");
    let host = Host::new(Arc::new(engine.with_checks()));
    let mut other = OtherGuest::new(host.guest_of(2));
    let mut failed = Vec::new();
    let operations = every_operator().into_iter().chain(of_types());
    for (seed, operation) in operations.enumerate() {
        if !run_while_buffers_change(&host, &operation, seed as u64) {
            failed.push(operation.name);
        }
        other.compute();
    }
    // Every operator that has indices has seen wrong ones.
    for kind in [
        OpKind::GetRows,
        OpKind::SetRows,
        OpKind::AddId,
        OpKind::MulMatId,
        OpKind::SsmScan,
    ] {
        let name = kind.ggml_name();
        let has_failed = failed.iter().any(|operation| operation.starts_with(name));
        // On a machine without a free core, the thread that changes buffers may not have run.
        let mut more = (0..MORE).flat_map(|round| {
            let operations = every_operator().into_iter();
            let operations = operations.filter(|operation| operation.name.starts_with(name));
            operations.map(move |operation| (1000 + round, operation))
        });
        let fails = |(seed, operation)| !run_while_buffers_change(&host, &operation, seed);
        assert!(
            has_failed || more.any(fails),
            "{name} has never failed: {failed:?}"
        );
    }
}
