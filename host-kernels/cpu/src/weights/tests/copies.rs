//! What a writer of shared bytes copies, and what the copies cost.

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{PAGES, content, read, shared, weights};
use crate::CpuEngine;
use crate::memory::CpuMemory;
use crate::plan::views;
use crate::region::{Budget, page};
use crate::weights::segments::{Backing, COPIED_AT_ONCE, Segment};
use vgpu_engine::{CopyAccount, Engine, EngineError, MAX_COPIES, Memory};
use vgpu_transport::ir::{BufferId, Graph, Limits, Node, Op, Shape, Sources, Tensor, Type};
use vgpu_transport::ir::{ValidGraph, validate};

/// Bytes of a short extent.
const SHORT: u64 = 8 << 10;

#[test]
fn overlapping_copies_are_correct() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let bytes = content(PAGES * page());
    let one = weights(&budget, &bytes);
    let extent = shared(&one, 4 * page(), 4 * page());
    for (to, from) in [(3 * page(), 2 * page() + 5), (page() + 5, 2 * page())] {
        let two = weights(&budget, &bytes);
        two.freeze();
        two.attach(4 * page(), &extent, &|| false).unwrap();
        two.copy_from(to, &two, from, 5 * page()).unwrap();
        let mut expected = bytes.clone();
        expected.copy_within(from as usize..(from + 5 * page()) as usize, to as usize);
        assert!(read(&two, 0, PAGES * page()) == expected);
    }
    let mut out = vec![0; 4 * page() as usize];
    extent.read(0, &mut out).unwrap();
    assert!(out == bytes[4 * page() as usize..][..4 * page() as usize]);
}

#[test]
fn copies_of_shared_bytes_need_memory() {
    let budget = Arc::new(Budget::new(Some(3 * PAGES * page())));
    let bytes = content(2 * PAGES * page());
    let one = weights(&budget, &bytes);
    let extent = shared(&one, 0, 2 * PAGES * page());
    assert!(matches!(
        one.fill(0, 1, 1),
        Err(EngineError::OutOfMemory { .. })
    ));
    assert!(one.is_unmodified());
    drop(extent);
    one.fill(0, 1, 1).unwrap();
    assert_eq!(
        budget.used(),
        2 * PAGES * page(),
        "no other buffer shares the bytes"
    );
    drop(one);
    assert_eq!(budget.used(), 0);
}

/// A guest that may have so many bytes of copies.
struct Account {
    left: Arc<AtomicU64>,
}

/// Bytes that are charged to an [`Account`].
struct Charged {
    left: Arc<AtomicU64>,
    bytes: u64,
}

impl CopyAccount for Account {
    fn charge(
        &self,
        bytes: u64,
        allocate: &mut dyn FnMut() -> Result<(), EngineError>,
    ) -> Result<Box<dyn Any + Send + Sync>, EngineError> {
        let free = self.left.load(Ordering::Relaxed);
        let left = free.checked_sub(bytes).ok_or(EngineError::OutOfMemory {
            wanted: bytes,
            free,
            total: 0,
        })?;
        self.left.store(left, Ordering::Relaxed);
        let charged = Charged {
            left: Arc::clone(&self.left),
            bytes,
        };
        allocate()?;
        Ok(Box::new(charged))
    }
}

impl Drop for Charged {
    fn drop(&mut self) {
        self.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[test]
fn copies_of_shared_bytes_are_charged_to_the_guest_until_they_are_freed() {
    let (copy, room) = (4 * page(), 6 * page());
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let one = weights(&budget, &content(PAGES * page()));
    let left = Arc::new(AtomicU64::new(room));
    let account = Account {
        left: Arc::clone(&left),
    };
    one.charge_copies(Arc::new(account));
    let extents = [0, 4].map(|at| shared(&one, at * page(), copy));
    let used = budget.used();
    one.fill(0, 1, 1).unwrap();
    let charged = |copies: u64| {
        assert_eq!(left.load(Ordering::Relaxed), room - copies * page());
        assert_eq!(budget.used(), used + copies * page());
    };
    charged(4);
    // The account refuses, and the engine has charged nothing.
    let refused = one.fill(copy, 1, 1).unwrap_err();
    assert_eq!(
        refused,
        EngineError::OutOfMemory {
            wanted: copy,
            free: room - copy,
            total: 0,
        }
    );
    charged(4);
    assert_eq!(
        read(&one, copy, 1),
        content(PAGES * page())[copy as usize..][..1]
    );
    // The engine refuses, and the account has charged nothing.
    let small = Arc::new(Budget::new(Some(PAGES * page())));
    let two = weights(&small, &content(PAGES * page()));
    two.charge_copies(Arc::new(Account {
        left: Arc::clone(&left),
    }));
    let extent = shared(&two, 0, page());
    two.fill(0, 1, 1).unwrap_err();
    assert_eq!(left.load(Ordering::Relaxed), room - copy);
    drop((extent, two));
    // The bytes are in the base again, whose extents are gone.
    drop(extents);
    one.fill(0, 2 * copy, 1).unwrap();
    charged(0);
    drop(one);
    assert_eq!((left.load(Ordering::Relaxed), budget.used()), (room, 0));
}

/// Each of many extents is in use elsewhere when its bytes are written.
#[test]
fn written_buffer_has_a_limited_number_of_regions() {
    let budget = Arc::new(Budget::new(Some(64 << 20)));
    let pages = 4 * MAX_COPIES as u64;
    let bytes = content(pages * page());
    let (one, two) = (
        weights(&budget, &bytes),
        CpuMemory::weights(pages * page(), &budget).unwrap(),
    );
    let places: Vec<u64> = (0..pages / 2).map(|i| 2 * i * page()).collect();
    for &place in &places {
        two.attach(place, &shared(&one, place, page()), &|| false)
            .unwrap();
    }
    let copies = || {
        let state = one.as_weights().unwrap().state();
        let own = |segment: &&Segment| matches!(segment.backing, Backing::Own { .. });
        state.segments.values().filter(own).count()
    };
    let mut expected = bytes.clone();
    let mut most = 0;
    for &place in &places {
        one.fill(place, 10, 7).unwrap();
        expected[place as usize..][..10].fill(7);
        most = most.max(copies());
        assert!(read(&one, 0, pages * page()) == expected);
    }
    assert_eq!((most, copies()), (MAX_COPIES, 1));
    for &place in &places {
        let at = place as usize..(place + page()) as usize;
        assert!(read(&two, place, page()) == bytes[at]);
    }
}

/// Two buffers for weights of `size` bytes. The first one is frozen, and the second one has
/// attached all its extents of `each` bytes.
fn sharing_all(engine: &CpuEngine, size: u64, each: u64) -> [Arc<dyn Memory>; 2] {
    let [one, two] = [(); 2].map(|()| {
        let plain = engine.alloc(size).unwrap();
        engine.alloc_weights(&plain).unwrap().unwrap()
    });
    one.write(0, content(size)[..].into()).unwrap();
    one.freeze();
    for at in (0..size).step_by(each as usize) {
        let extent = one.extent(at, each).unwrap();
        assert_eq!(two.attach(at, &extent, &|| false).unwrap(), each);
    }
    [one, two]
}

/// A graph that writes 16 bytes to buffer 0 around each multiple of `each` bytes, from numbers of
/// buffer 1.
fn writes_around(engine: &CpuEngine, size: u64, each: u64) -> ValidGraph {
    let shape = Shape::contiguous(Type::F32, [4, 1, 1, 1]).unwrap();
    let tensor = |buffer, offset| Tensor {
        shape,
        buffer,
        offset,
    };
    let mut graph = Graph {
        buffers: vec![BufferId(1), BufferId(2)],
        tensors: vec![tensor(1, 0)],
        nodes: Vec::new(),
    };
    for boundary in (each..size).step_by(each as usize) {
        graph.tensors.push(tensor(0, boundary - 8));
        let (scale, bias) = (0.0, 7.0);
        graph.nodes.push(Node {
            op: Op::Scale { scale, bias },
            dst: graph.tensors.len() as u32 - 1,
            src: Sources::new([Some(0)]),
        });
    }
    let size_of = |buffer| Some(if buffer == BufferId(1) { size } else { 16 });
    validate(graph, engine.capabilities(), &Limits::default(), size_of).unwrap()
}

/// The memory of this engine behind a buffer.
fn of_engine(memory: &Arc<dyn Memory>) -> &CpuMemory {
    memory.as_any().downcast_ref().unwrap()
}

/// The bytes that a buffer for weights has copied since it was made.
fn copied(memory: &Arc<dyn Memory>) -> u64 {
    of_engine(memory).as_weights().unwrap().state().gathered
}

/// Each write merges two extents, of which one has been merged before.
#[test]
fn graph_that_writes_across_extents_in_use_copies_each_byte_a_few_times() {
    const EXTENTS: u64 = 512;
    let size = EXTENTS * page();
    let engine = CpuEngine::new(1, Some(64 << 20)).unwrap();
    let [one, two] = sharing_all(&engine, size, page());
    let graph = writes_around(&engine, size, page());
    let numbers = engine.alloc(16).unwrap();
    let memories = [&one, &numbers].map(of_engine);
    let (views, _) = views(graph.graph(), &memories, &|| false).unwrap();
    assert!(copied(&one) >= size, "the writes touch every extent");
    assert!(copied(&one) <= 2 * size, "{} of {size}", copied(&one));
    // What the nodes would write, at the addresses that they have.
    let mut expected = content(size);
    let boundaries = (page()..size).step_by(page() as usize);
    for (node, boundary) in graph.graph().nodes.iter().zip(boundaries) {
        let written = views[node.dst as usize].ptr();
        // SAFETY: the view has 16 bytes of `one`, which exists, and no one else uses it now.
        unsafe { written.write_bytes(7, 16) };
        expected[boundary as usize - 8..][..16].fill(7);
    }
    assert!(read(one.as_ref(), 0, size) == expected);
    assert!(read(two.as_ref(), 0, size) == content(size));
}

#[test]
fn cancelled_copy_of_weights_ends_with_its_part_and_changes_nothing() {
    let size = 8 * COPIED_AT_ONCE;
    let engine = CpuEngine::new(1, Some(256 << 20)).unwrap();
    let [one, two] = sharing_all(&engine, size, size / 2);
    let graph = writes_around(&engine, size, size / 2);
    let numbers = engine.alloc(16).unwrap();
    let memories = [&one, &numbers].map(of_engine);
    // An extent that is attached over a part of another one.
    let part = engine.alloc(SHORT).unwrap();
    let part = engine.alloc_weights(&part).unwrap().unwrap();
    part.freeze();
    let part = part.extent(0, SHORT).unwrap();
    // Each copy has four parts or more.
    let asked = Cell::new(0);
    let third = || {
        asked.set(asked.get() + 1);
        asked.get() % 3 == 0
    };
    let cancelled = [
        views(graph.graph(), &memories, &third).map(drop),
        one.unshare(0, 1, &third),
        two.unshare(0, 1, &third),
        two.attach(size - SHORT, &part, &third).map(drop),
    ];
    for (what, outcome) in cancelled.into_iter().enumerate() {
        assert_eq!(outcome, Err(EngineError::Cancelled), "{what}");
    }
    assert_eq!((asked.get(), copied(&one), copied(&two)), (12, 0, 0));
    assert!(one.is_unmodified());
    for memory in [one, two] {
        assert!(read(memory.as_ref(), 0, size) == content(size));
    }
}
