//! The memory that a session allocates while it reads and compiles the graphs of a hostile guest,
//! beside what the guest is charged: an allocator counts the bytes of the whole process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

use common::model::{for_weights, lookup, upload};
use common::{Build, Guest, Host, image, wait_for, weights};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::weights::Sharing;
use vgpu_transport::ir::{BufferId, Graph, GraphCounts, Op, Shape, Type};
use vgpu_transport::wire::{GraphId, MAX_EXTENTS, MIN_EXTENT, Reply, Request};

/// Memory of the engine.
const MEMORY: u64 = 1 << 30;

/// What the process may allocate besides: a payload on both sides, and tables that grow.
const CONSTANT: u64 = 3 << 20;

/// Passes every call to the allocator of the system.
struct Counting;

/// Bytes that the process has allocated and not freed, and the most since the last reset.
static HELD: AtomicIsize = AtomicIsize::new(0);
static MOST: AtomicIsize = AtomicIsize::new(0);

/// The size of an allocation that does not count: the executor asks for the memory of a compilation
/// and gives it back at once.
static ASKED: AtomicIsize = AtomicIsize::new(0);

fn count(bytes: isize) {
    if bytes.abs() == ASKED.load(Ordering::Relaxed) {
        return;
    }
    let now = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
    if bytes > 0 {
        MOST.fetch_max(now, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed to the allocator of the system, which fulfils the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller fulfils the contract of `alloc`, which is that of the system's
        // allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller fulfils the contract of `dealloc`, and the system's allocator has
        // allocated `ptr`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks exist while the contents are copied.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller fulfils the contract of `realloc`, and the system's allocator has
        // allocated `ptr`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Begins a measurement. Returns what is held.
fn begin() -> isize {
    let held = HELD.load(Ordering::Relaxed);
    MOST.store(held, Ordering::Relaxed);
    held
}

fn free(guest: &mut Guest) -> u64 {
    match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    }
}

fn row(elements: u64) -> Shape {
    Shape::contiguous(Type::F32, [elements, 1, 1, 1]).expect("a row")
}

/// Sums and norms of rows of their own.
fn rows_of_their_own(buffer: BufferId, nodes: u64) -> Graph {
    let mut build = Build::default();
    let mut last = build.place(row(32), buffer, 0);
    for at in 1..=nodes {
        let dst = build.place(row(32), buffer, 128 * at);
        match at % 2 {
            0 => build.node(Op::Add {}, dst, &[last, last]),
            _ => build.node(Op::RmsNorm { eps: 0.1 }, dst, &[last]),
        }
        last = dst;
    }
    build.0
}

/// One sum, and a long table of tensors.
fn unused_tensors(buffer: BufferId, tensors: usize) -> Graph {
    let mut build = Build::default();
    let first = build.place(row(32), buffer, 0);
    build.node(Op::Add {}, first, &[first, first]);
    let tensor = build.0.tensors[0];
    build.0.tensors.resize(tensors, tensor);
    build.0
}

/// Some sums, and a long table of buffers.
fn many_buffers(buffers: &[BufferId], nodes: usize) -> Graph {
    let mut build = Build::default();
    let first = build.place(row(32), buffers[0], 0);
    (0..nodes).for_each(|_| build.node(Op::Add {}, first, &[first, first]));
    build.0.buffers = buffers.to_vec();
    build.0
}

/// What is kept of a graph without a plan.
fn kept(words: &[u32]) -> u64 {
    let counts = GraphCounts::of_image(words).expect("an image");
    4 * words.len() as u64 + 8 * counts.buffers as u64 + 512
}

/// What the compilation of a graph takes, with the decoded graph.
fn compiled(engine: &dyn Engine, words: &[u32]) -> u64 {
    let counts = GraphCounts::of_image(words).expect("an image");
    counts.decoded_bytes() + 32 * counts.buffers as u64 + engine.compile_bytes(&counts)
}

/// Sends a graph to a guest that has just so much memory free, and one page less.
fn check(name: &str, host: &Host, guest: &mut Guest, graph: &Graph) {
    let words = graph.encode();
    let compiled = compiled(host.engine.as_ref(), &words);
    let wanted = (8 * words.len() as u64 + 512).max(kept(&words) + compiled);
    let bytes = image(graph);
    for is_enough in [true, false] {
        ASKED.store(compiled as isize, Ordering::Relaxed);
        // A buffer has whole pages.
        let more = free(guest) - wanted;
        let rest = match is_enough {
            true => more / 4096 * 4096,
            false => (more + 1).next_multiple_of(4096),
        };
        let rest = guest.alloc(rest);
        let has = free(guest);
        guest.fence();
        let before = begin();
        guest.image(GraphId(1), &bytes);
        guest.send(&Request::Forget { graph: GraphId(1) });
        let fence = guest.send(&Request::Fence {});
        let outcome = match guest.receive().0 {
            Reply::Done { request } if request == fence => Ok(()),
            Reply::Failed { reason, .. } => {
                guest.receive();
                Err(reason)
            }
            other => panic!("{name}: {other:?}"),
        };
        let most = u64::try_from(MOST.load(Ordering::Relaxed) - before).unwrap_or(0);
        ASKED.store(0, Ordering::Relaxed);
        println!("{name}: {wanted} bytes wanted, {has} free, {most} allocated: {outcome:?}");
        match outcome {
            Ok(()) => assert!(is_enough, "{name}: {wanted} wanted, {has} free"),
            Err(reason) => {
                assert!(!is_enough, "{name}: {reason}");
                assert!(reason.contains("out of memory: "), "{reason}");
            }
        }
        assert!(
            most <= has + CONSTANT,
            "{name}: {most} bytes were allocated, the guest had {has}"
        );
        guest.send(&Request::Free { buffer: rest });
    }
}

#[test]
fn graphs_are_read_and_compiled_in_the_memory_of_their_guest() {
    let engine = CpuEngine::new(1, Some(MEMORY)).expect("an engine");
    let host = Host::new(Arc::new(engine));
    let mut guest = host.guest();
    let buffer = guest.alloc(4 << 20);
    // What the process allocates for its first graph.
    guest.graph(GraphId(1), &rows_of_their_own(buffer, 100));
    guest.submit(GraphId(1));
    guest.fence();
    guest.send(&Request::Forget { graph: GraphId(1) });
    let graph = rows_of_their_own(buffer, 10_000);
    check("rows of their own", &host, &mut guest, &graph);
    let graph = unused_tensors(buffer, 150_000);
    check("unused tensors", &host, &mut guest, &graph);
    let buffers: Vec<BufferId> = (0..2000).map(|_| guest.alloc(128)).collect();
    let graph = many_buffers(&buffers, 1);
    check("many buffers", &host, &mut guest, &graph);
}

/// Graphs that are kept without a plan have tables of buffers, which are charged, too.
#[test]
fn tables_of_graphs_without_a_plan_are_charged() {
    let engine = CpuEngine::new(1, Some(MEMORY)).expect("an engine");
    let host = Host::new(Arc::new(engine));
    let mut guest = host.guest();
    // Tables of all images take more than what is not charged.
    let buffers: Vec<BufferId> = (0..8000).map(|_| guest.alloc(128)).collect();
    let graph = many_buffers(&buffers, 1200);
    let words = graph.encode();
    let bytes = image(&graph);
    // Room for many images, and for no plan.
    let plan = compiled(host.engine.as_ref(), &words);
    let room = 20 * kept(&words);
    assert!(room < plan, "{room} bytes are enough for {plan}");
    let rest = (free(&mut guest) - room) / 4096 * 4096;
    guest.alloc(rest);
    guest.fence();
    let (has, before) = (free(&mut guest), begin());
    for id in 0..100 {
        guest.image(GraphId(id), &bytes);
        match guest.receive().0 {
            Reply::Failed { reason, .. } => assert!(reason.contains("out of memory"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
    let held = u64::try_from(HELD.load(Ordering::Relaxed) - before).unwrap_or(0);
    let charged = has - free(&mut guest);
    println!("{held} bytes are held, {charged} charged, of {has}");
    assert!(charged > has / 2, "few images were kept");
    // The entries of the table, and the reasons.
    assert!(
        held <= charged + CONSTANT / 4,
        "{held} held, {charged} charged"
    );
}

/// The entries of as many extents as a buffer may have are charged: `has` bytes were free before,
/// `left` are now, and the process held `before`.
fn expect_charged(has: u64, left: u64, before: isize) {
    let held = u64::try_from(HELD.load(Ordering::Relaxed) - before).unwrap_or(0);
    let charged = has - left;
    println!("{held} bytes are held, {charged} charged for extents");
    assert!(charged >= MAX_EXTENTS as u64 * 1024, "{charged} charged");
    assert!(held <= charged, "{held} held, {charged} charged");
}

/// A guest names as many extents as a buffer may have, each as short as possible, and another one
/// of the same quota takes them from the store.
#[test]
fn extents_of_weights_are_charged() {
    let (host, weights) = weights::host_on(
        Arc::new(CpuEngine::new(1, Some(MEMORY)).expect("an engine")),
        Sharing::Tenant,
        None,
    );
    let content = |at: u64| -> Vec<u8> {
        { (0..MIN_EXTENT / 8).flat_map(|i| (at << 32 | i).to_le_bytes()) }.collect()
    };
    let size = MAX_EXTENTS as u64 * MIN_EXTENT;
    let mut first = weights::guest(&host, 7);
    let mut second = weights::guest(&host, 7);
    // What the process allocates for its first extents.
    weights::load(&mut second, &weights::model(1));
    let (buffer, _) = for_weights(&mut first, size);
    let (other, _) = for_weights(&mut second, size);
    first.fence();
    let (all, before) = (free(&mut first), begin());
    for at in 0..MAX_EXTENTS as u64 {
        upload(&mut first, buffer, at * MIN_EXTENT, &content(at));
    }
    first.send(&Request::Seal { buffer });
    wait_for("hashing", || weights.stats().extents >= MAX_EXTENTS as u64);
    expect_charged(all, free(&mut first), before);
    let (has, before) = (free(&mut first), begin());
    for at in 0..MAX_EXTENTS as u64 {
        let content = content(at);
        assert!(
            lookup(&mut second, other, at * MIN_EXTENT, &content),
            "{at}"
        );
    }
    second.fence();
    expect_charged(has, free(&mut first), before);
    drop((first, second));
    let mut last = weights::guest(&host, 7);
    wait_for("the memory of both", || free(&mut last) >= all);
}
