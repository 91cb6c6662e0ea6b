//! What weights that several buffers share take besides their bytes, and how long requests last.
//! Buffers have the size of a model's, so that a constant of some KiB is not what is measured.

#[path = "../../../tests/common/backend_counters.rs"]
mod backend_counters;
#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod counted_backend;
#[allow(dead_code)] // other tests use the rest
#[path = "../../check/tests/common/counting.rs"]
mod counting;
mod graphs;
mod products;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use backend_counters::{counters, set};
use changed_backend::{Changes, changed_backend};
use counted_backend::{copied_by, counted_backend};
use counting::{Counting, counted};
use graphs::{PRODUCT, Place, graph_over};
use products::{BLOCK, COLUMNS, Quota, ROWS, WEIGHTS, taken};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, EngineError, Extent, Memory};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{GraphCounts, Op, Type, ValidGraph};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The bytes of a buffer for weights.
const MODEL: u64 = 32 * MIB;

const GPU: &str = "GGML_BACKEND_DEVICE_TYPE_GPU";

/// ggml's CPU backend, whose new buffers have old bytes, with so much memory.
fn start(folder: &Path, changes: &Changes<'_>, memory: u64) -> (GgmlEngine, PathBuf) {
    start_with(folder, changes, memory, Some(true))
}

/// The same, which shares weights or does not.
fn start_with(
    folder: &Path,
    changes: &Changes<'_>,
    memory: u64,
    shares_weights: Option<bool>,
) -> (GgmlEngine, PathBuf) {
    // A library that is loaded stays as it is.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let folder = folder.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
    std::fs::create_dir(&folder).unwrap();
    let path = changed_backend(&common::cached(""), &folder, changes);
    (start_at(&path, memory, shares_weights, false), path)
}

/// The same, which counts what is copied.
fn start_counted(folder: &Path, changes: &Changes<'_>, memory: u64) -> (GgmlEngine, PathBuf) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let folder = folder.join(format!("counted-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
    std::fs::create_dir(&folder).unwrap();
    let path = changed_backend(&common::cached(""), &folder, changes);
    let path = counted_backend(&common::cached(""), &folder, &path);
    (start_at(&path, memory, Some(true), false), path)
}

fn start_at(path: &Path, memory: u64, shares_weights: Option<bool>, repacks: bool) -> GgmlEngine {
    let options = BackendOptions {
        threads: 1,
        memory: Some(memory),
        repacks,
        shares_weights,
        ..BackendOptions::default()
    };
    let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
    GgmlEngine::start(path, &options, cpu).unwrap()
}

fn old_bytes() -> Changes<'static> {
    Changes {
        old_bytes: true,
        ..Changes::default()
    }
}

/// The host, and a GPU.
fn kinds() -> [Changes<'static>; 2] {
    let gpu = Changes {
        kind: GPU,
        ..old_bytes()
    };
    [old_bytes(), gpu]
}

/// A buffer for weights of `size` bytes, for which a guest with so many bytes left pays.
fn for_weights(engine: &dyn Engine, size: u64, quota: &Arc<AtomicU64>) -> Arc<dyn Memory> {
    let first = engine.alloc(size).unwrap();
    first.charge_copies(Arc::new(Quota(Arc::clone(quota))));
    let weights = engine.alloc_weights(&first).unwrap().expect("segments");
    weights.mark_weights();
    weights
}

fn unlimited() -> Arc<AtomicU64> {
    Arc::new(AtomicU64::new(1 << 40))
}

/// Bytes of which no two chunks are equal.
fn content(len: u64, seed: u64) -> Vec<u8> {
    (0..len / 8)
        .flat_map(|at| (at ^ (seed << 32)).to_le_bytes())
        .collect()
}

fn write(memory: &dyn Memory, offset: u64, bytes: &[u8]) -> Result<(), EngineError> {
    memory.write(offset, Bytes::from(bytes))
}

fn read(memory: &dyn Memory, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![1; len as usize];
    memory.read(offset, BytesMut::from(&mut bytes[..])).unwrap();
    bytes
}

fn upload(memory: &dyn Memory, at: u64, bytes: &[u8]) -> Result<Arc<dyn Extent>, EngineError> {
    let extent = memory.begin_extent(at, bytes.len() as u64)?;
    for part in bytes.chunks(MIB as usize) {
        memory.append(&extent, Bytes::from(part))?;
    }
    Ok(extent)
}

/// Takes all memory that the engine has left.
fn fill_up(engine: &dyn Engine) -> Vec<Arc<dyn Memory>> {
    let (mut all, mut size) = (Vec::new(), engine.memory().total);
    while size > 0 {
        match engine.alloc(size) {
            Ok(memory) => all.push(memory),
            Err(_) => size /= 2,
        }
    }
    all
}

/// Writes 64 bytes of `7` to as many places as the buffer of [`MODEL`] bytes may have segments. The
/// last place is [`LAST`]; the gap before it begins at less than 3 MiB.
fn use_all_slots(memory: &dyn Memory, is_gpu: bool) {
    // Each leaves a gap before it, and there is one behind the last: 160 slots, and 6 on a GPU.
    let others = if is_gpu { 1 } else { 78 };
    let places = (0..others).map(|number| 256 + number * 8 * KIB);
    for at in places.chain([LAST]) {
        write(memory, at, &[7; 64]).unwrap();
    }
}

const LAST: u64 = 24 * MIB;

/// A graph that copies tensors of `len` bytes at these places of the weights to another buffer.
fn copies(engine: &dyn Engine, size: u64, len: u64, places: &[u64]) -> ValidGraph {
    let row = [len / 4, 1, 1, 1];
    let mut tensors: Vec<Place> = vec![(Type::I32, row, 1, 0)];
    tensors.extend(places.iter().map(|&at| (Type::I32, row, 0, at)));
    let sources: Vec<[u32; 1]> = (1..=places.len() as u32).map(|source| [source]).collect();
    let nodes: Vec<(Op, u32, &[u32])> = { sources.iter() }
        .map(|source| (Op::Copy {}, 0, &source[..]))
        .collect();
    graph_over(engine, size, &tensors, &nodes)
}

/// How often a call asks whether it is cancelled, and that it ends when it is.
fn questions(mut call: impl FnMut(&dyn Fn() -> bool) -> Result<(), EngineError>) -> u64 {
    for allowed in 0.. {
        let asked = AtomicU64::new(0);
        let outcome = call(&|| asked.fetch_add(1, Ordering::Relaxed) >= allowed);
        match outcome {
            Err(EngineError::Cancelled) => assert_eq!(asked.into_inner(), allowed + 1),
            outcome => {
                outcome.unwrap();
                return asked.into_inner();
            }
        }
    }
    unreachable!("the call ends");
}

/// On a GPU, what a load reserves for segments may be more than there is.
#[test]
fn weights_are_shared_by_default_on_the_cpu_only() {
    let folder = tempfile::tempdir().unwrap();
    for (changes, default) in kinds().into_iter().zip([true, false]) {
        for option in [None, Some(true), Some(false)] {
            let (engine, _) = start_with(folder.path(), &changes, 128 * MIB, option);
            let first = engine.alloc(MODEL).unwrap();
            let is_shared = engine.alloc_weights(&first).unwrap().is_some();
            assert_eq!(is_shared, option.unwrap_or(default), "{option:?}");
            assert_eq!(engine.supports_weights(), is_shared);
        }
    }
}

/// Whatever a guest names and writes, its segments take what it is charged for.
#[test]
fn many_small_segments_take_what_is_charged() {
    let folder = tempfile::tempdir().unwrap();
    for changes in kinds() {
        let (engine, _) = start(folder.path(), &changes, 4 << 30);
        let quota = unlimited();
        let before = quota.load(Ordering::Relaxed);
        let memory = for_weights(&engine, MODEL, &quota);
        let charged = || before - quota.load(Ordering::Relaxed) + engine.allocation_size(MODEL);
        assert!(charged() <= MODEL + 3 * MIB, "{}", charged());
        for at in (0..MODEL).step_by(8 << 10) {
            // As an extent, if that is possible.
            drop(memory.begin_extent(at + 256, 4096));
            write(&*memory, at + 7, &[1, 2, 3]).unwrap();
            assert!(taken(&engine) <= charged(), "at {at}: {}", charged());
            assert!(charged() < MODEL + MODEL / 6 + 10 * MIB, "{}", charged());
        }
        memory.freeze();
        assert!(
            taken(&engine) <= charged(),
            "{} of {}",
            taken(&engine),
            charged()
        );
        let bytes = read(&*memory, 0, MODEL);
        for (at, byte) in (0..).zip(bytes) {
            let expected = match at % (8 << 10) {
                at @ 7..=9 => at - 6,
                _ => 0,
            };
            assert_eq!(u64::from(byte), expected, "at {at}");
        }
        drop(memory);
        assert_eq!(taken(&engine), 0);
        assert_eq!(quota.load(Ordering::Relaxed), before);
    }
}

/// The guest pays for what segments take besides: one for each gap, and each when it begins.
#[test]
fn what_segments_take_besides_is_charged() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, _) = start(folder.path(), &old_bytes(), 1 << 30);
    const LITTLE: u64 = 8 * KIB;
    let quota = Arc::new(AtomicU64::new(LITTLE));
    let first = engine.alloc(MODEL).unwrap();
    first.charge_copies(Arc::new(Quota(Arc::clone(&quota))));
    write(&*first, 0, &[9; 64]).unwrap();
    // Less than is needed: the buffer stays as it was.
    let before = taken(&engine);
    let refused = engine.alloc_weights(&first).map(|_| ());
    let is_refused = matches!(refused, Err(EngineError::OutOfMemory { .. }));
    assert!(is_refused, "{refused:?}");
    assert_eq!(
        (quota.load(Ordering::Relaxed), taken(&engine)),
        (LITTLE, before)
    );
    assert_eq!(read(&*first, 0, 64), [9; 64]);
    quota.store(8 * MIB, Ordering::Relaxed);
    let memory = engine.alloc_weights(&first).unwrap().expect("segments");
    drop(first);
    let loading = 8 * MIB - quota.load(Ordering::Relaxed);
    assert!((8 * KIB..9 * KIB).contains(&loading), "{loading}");
    upload(&*memory, 0, &content(8 * MIB, 1)).unwrap();
    let more = 8 * MIB - quota.load(Ordering::Relaxed);
    assert_eq!(more, 2 * loading);
    // A guest that may not pay for another one.
    quota.store(LITTLE, Ordering::Relaxed);
    let refused = memory.begin_extent(16 * MIB, MIB).map(|_| ());
    assert!(refused.is_err(), "{refused:?}");
    write(&*memory, 16 * MIB, &[3; 64]).unwrap();
    assert_eq!(memory.bytes_in_use(), MODEL);
    assert_eq!(quota.load(Ordering::Relaxed), LITTLE);
    quota.store(8 * MIB - more, Ordering::Relaxed);
    memory.freeze();
    let frozen = 8 * MIB - quota.load(Ordering::Relaxed);
    assert!((8 * KIB..256 * KIB).contains(&frozen), "{frozen}");
    drop(memory);
    assert_eq!(quota.load(Ordering::Relaxed), 8 * MIB);
}

/// A guest whose buffer was allocated can load its weights in any way, whatever others allocate
/// meanwhile.
#[test]
fn a_load_goes_on_when_the_memory_of_the_engine_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = || kinds().into_iter();
    let variants = [0, 9].map(|full_at| kinds().map(move |changes| (changes, full_at)));
    // The memory is full from the beginning, or after some tensors.
    for (changes, full_at) in variants.into_iter().flatten() {
        let (engine, _) = start(folder.path(), &changes, 128 * MIB);
        let memory = for_weights(&engine, MODEL, &unlimited());
        let mut filler = Vec::new();
        let bytes = content(MODEL, 2);
        let mut expected = vec![0; MODEL as usize];
        let mut at = 0;
        // Large and small tensors in turn, of sizes that waste the end of a page.
        for (number, len) in (0..).zip(
            [2 * MIB + 256, 300, 64 * KIB + 8, 5 * MIB, 8, 4096]
                .iter()
                .cycle(),
        ) {
            if number == full_at {
                filler = fill_up(&engine);
            }
            let end = MODEL.min(at + len);
            let part = &bytes[at as usize..end as usize];
            if upload(&*memory, at, part).is_err() {
                write(&*memory, at, part).unwrap();
            }
            expected[at as usize..end as usize].copy_from_slice(part);
            if end == MODEL {
                break;
            }
            at = end.next_multiple_of(256);
            if number % 3 == 0 {
                // What lies between two tensors.
                let between = end as usize..at as usize;
                write(&*memory, end, &bytes[between.clone()]).unwrap();
                expected[between.clone()].copy_from_slice(&bytes[between]);
            }
        }
        assert!(read(&*memory, 0, MODEL) == expected);
        memory.fill(0, MODEL, 3).unwrap();
        memory.freeze();
        assert!(read(&*memory, 0, MODEL).iter().all(|byte| *byte == 3));
        // What is not needed any more is free.
        drop((memory, filler));
        let memory = for_weights(&engine, MODEL, &unlimited());
        write(&*memory, 0, &[1; 4096]).unwrap();
        assert!(taken(&engine) >= MODEL);
        memory.freeze();
        assert!(taken(&engine) <= 2 * MIB, "{}", taken(&engine));
    }
}

/// Also if the driver refuses a buffer in between.
#[test]
fn a_refusal_of_the_driver_takes_nothing_of_what_is_reserved() {
    let folder = tempfile::tempdir().unwrap();
    for changes in kinds() {
        let (engine, path) = start(folder.path(), &changes, 128 * MIB);
        let memory = for_weights(&engine, MODEL, &unlimited());
        let mut filler = fill_up(&engine);
        set(&path, c"refuses", 1);
        let is_refused = |outcome: Result<(), EngineError>| {
            let is_so = matches!(outcome, Err(EngineError::OutOfMemory { .. }));
            assert!(is_so, "{outcome:?}");
        };
        let before = taken(&engine);
        for _ in 0..3 {
            is_refused(write(&*memory, 0, &[1; 4096]));
            // Others get nothing of it.
            assert_eq!(taken(&engine), before);
        }
        // An extent takes more, which is given back.
        filler.clear();
        let before = taken(&engine);
        for _ in 0..3 {
            is_refused(memory.begin_extent(0, 16 * MIB).map(|_| ()));
            assert_eq!(taken(&engine), before);
        }
        set(&path, c"refuses", 0);
        filler = fill_up(&engine);
        assert!(engine.alloc(4096).is_err());
        write(&*memory, 0, &content(MODEL, 3)).unwrap();
        drop((memory, filler));
        assert_eq!(taken(&engine), 0);
    }
}

/// A graph makes as many segments as its buffer may have, and none for tensors that no node names.
#[test]
fn a_graph_with_many_tensors_makes_few_segments() {
    let folder = tempfile::tempdir().unwrap();
    for changes in kinds() {
        let (engine, _) = start(folder.path(), &changes, 4 << 30);
        let quota = unlimited();
        let before = quota.load(Ordering::Relaxed);
        let memory = for_weights(&engine, MODEL, &quota);
        let charged = || before - quota.load(Ordering::Relaxed) + engine.allocation_size(MODEL);
        let other = engine.alloc(MODEL).unwrap();
        let row = [16, 1, 1, 1];
        let tensors: Vec<Place> = { (0..MODEL).step_by(1024) }
            .map(|at| (Type::I32, row, 0, at))
            .chain([(Type::I32, row, 1, 0)])
            .collect();
        let last = tensors.len() as u32 - 1;
        let one = graph_over(&engine, MODEL, &tensors, &[(Op::Copy {}, last, &[5])]);
        let buffers = [Arc::clone(&memory), Arc::clone(&other)];
        let mut plan = engine.compile(&one, &buffers, &|| false).unwrap();
        plan.run().unwrap();
        let of_one = memory.bytes_in_use();
        assert!((64..=2 * MIB).contains(&of_one), "{of_one}");
        // All of them, aligned and not.
        for place in [0, 4] {
            let places: Vec<u64> = (place..MODEL - 64).step_by(1024).collect();
            let many = copies(&engine, MODEL, 64, &places);
            let mut plan = engine.compile(&many, &buffers, &|| false).unwrap();
            plan.run().unwrap();
            assert_eq!(read(&*other, 0, 64), [0; 64]);
            let used = taken(&engine) - engine.allocation_size(MODEL);
            assert!(used <= charged(), "{used} of {}", charged());
            assert!(charged() < MODEL + MODEL / 6 + 10 * MIB, "{}", charged());
        }
        drop((plan, buffers, memory, other));
        assert_eq!(taken(&engine), 0);
    }
}

/// A tensor in a gap gets a segment for all of the gap, in which the next tensor begins.
#[test]
fn a_graph_moves_a_tensor_that_straddles_the_segment_of_another_one() {
    let folder = tempfile::tempdir().unwrap();
    for (changes, is_gpu) in kinds().into_iter().zip([false, true]) {
        let (engine, _) = start(folder.path(), &changes, 1 << 30);
        let memory = for_weights(&engine, MODEL, &unlimited());
        use_all_slots(&*memory, is_gpu);
        let before = read(&*memory, 0, MODEL);
        let other = engine.alloc(MODEL).unwrap();
        let graph = copies(&engine, MODEL, 64, &[8 * MIB, LAST - 32]);
        let buffers = [Arc::clone(&memory), Arc::clone(&other)];
        let mut plan = engine.compile(&graph, &buffers, &|| false).unwrap();
        plan.run().unwrap();
        assert_eq!(read(&*other, 0, 64), [[0; 32], [7; 32]].concat());
        assert!(read(&*memory, 0, MODEL) == before);
        assert!(plan.is_current());
        assert!(memory.bytes_in_use() > LAST - 3 * MIB, "the gap was filled");
    }
}

/// The segments are found in one pass over them and the tensors, which can be cancelled, in the
/// memory that is announced.
#[test]
fn compiling_for_many_segments_is_announced_and_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, _) = start(folder.path(), &old_bytes(), 4 << 30);
    let size = 256 * MIB;
    let memory = for_weights(&engine, size, &unlimited());
    let other = engine.alloc(size).unwrap();
    // Segments that touch each other at odd places.
    for at in (0..900).map(|number| number * 1001) {
        write(&*memory, at, &[3; 1001]).unwrap();
    }
    let places: Vec<u64> = (0..60_000).map(|number| number * 4096 + 16).collect();
    let graph = copies(&engine, size, 64, &places);
    let buffers = [memory, other];
    let asked = AtomicU64::new(0);
    let count = || asked.fetch_add(1, Ordering::Relaxed) == u64::MAX;
    let (plan, allocated) = counted(|| engine.compile(&graph, &buffers, &count).unwrap());
    let counts = GraphCounts {
        buffers: 2,
        tensors: places.len() + 1,
        nodes: places.len(),
    };
    let announced = engine.compile_bytes(&counts);
    assert!(
        allocated.most <= announced,
        "{} of {announced}",
        allocated.most
    );
    drop(plan);
    let all = asked.into_inner();
    assert!(all > 100, "{all}");
    for allowed in [0, 1, all / 4, all / 2, all - 1] {
        let asked = AtomicU64::new(0);
        let is_cancelled = || asked.fetch_add(1, Ordering::Relaxed) >= allowed;
        let outcome = engine.compile(&graph, &buffers, &is_cancelled).map(|_| ());
        if asked.into_inner() > allowed {
            assert_eq!(outcome, Err(EngineError::Cancelled), "{allowed} of {all}");
        }
    }
}

/// Tensors across the ends of segments, of which some are those of another guest: each segment is
/// read once, and written once.
#[test]
fn a_compilation_copies_each_segment_once() {
    /// The bytes of an extent, and of a segment that was written.
    const EXTENT: u64 = 256 * KIB;
    const PART: u64 = 10_001;
    /// The segments of each kind.
    const EXTENTS: u64 = 8;
    const PARTS: u64 = 60;
    let folder = tempfile::tempdir().unwrap();
    let (engine, path) = start_counted(folder.path(), &old_bytes(), 1 << 30);
    let bytes = content(EXTENTS * EXTENT, 9);
    let first = for_weights(&engine, MODEL, &unlimited());
    let places = || (0..EXTENTS).map(|number| number * EXTENT);
    for at in places() {
        let part = &bytes[at as usize..][..EXTENT as usize];
        drop(upload(&*first, at, part).unwrap());
    }
    first.freeze();
    let other = engine.alloc(MODEL).unwrap();
    let all = EXTENTS * EXTENT + PARTS * PART;
    let ends = (1..=EXTENTS).map(|number| number * EXTENT);
    let ends = ends.chain((1..PARTS).map(|number| EXTENTS * EXTENT + number * PART));
    let across: Vec<u64> = ends.map(|end| (end - 32) / 4 * 4).collect();
    for writes in [false, true] {
        let memory = for_weights(&engine, MODEL, &unlimited());
        for at in places() {
            let extent = first.extent(at, EXTENT).unwrap();
            assert_eq!(memory.attach(at, &extent, &|| false), Ok(EXTENT));
        }
        let written = content(PARTS * PART / 8 * 8 + 8, 10);
        let written = &written[..(PARTS * PART) as usize];
        for (at, part) in (0..).zip(written.chunks(PART as usize)) {
            write(&*memory, EXTENTS * EXTENT + at * PART, part).unwrap();
        }
        assert!(memory.bytes_in_use() == all && memory.freeze());
        // The graph writes to the first tensor, with its own bytes.
        let mut graph = copies(&engine, MODEL, 64, &across);
        if writes {
            let row = [16, 1, 1, 1];
            let mut tensors: Vec<Place> = vec![(Type::I32, row, 1, 0)];
            tensors.extend(across.iter().map(|&at| (Type::I32, row, 0, at)));
            let read: Vec<[u32; 1]> = (1..=across.len() as u32).map(|at| [at]).collect();
            let nodes: Vec<(Op, u32, &[u32])> = { read.iter() }
                .map(|read| (Op::Copy {}, 0, &read[..]))
                .chain([(Op::Copy {}, 1, &[1][..])])
                .collect();
            graph = graph_over(&engine, MODEL, &tensors, &nodes);
        }
        let buffers = [Arc::clone(&memory), Arc::clone(&other)];
        let compile = || engine.compile(&graph, &buffers, &|| false).unwrap();
        let (plan, copied) = copied_by(&path, compile);
        assert_eq!(copied.read, all, "{copied:?}");
        // Bytes behind the new segment, which are no whole words, are cleared by a write.
        assert!((all..all + 8).contains(&copied.written), "{copied:?}");
        drop(plan);
        let (mut plan, copied) = copied_by(&path, compile);
        assert_eq!((copied.read, copied.written), (0, 0), "{copied:?}");
        plan.run().unwrap();
        let expected = [&bytes[..], written].concat();
        assert!(read(&*memory, 0, all) == expected);
        assert!(read(&*first, 0, EXTENTS * EXTENT) == bytes);
    }
}

/// An operator, and the dimensions of its sources and of its result.
type Operator<'a> = (Op, &'a [[u64; 4]], [u64; 4]);

/// A graph with so many nodes of one operator, and the numbers that are announced for it. Each node
/// has tensors of its own if `are_own`; otherwise all have the same.
fn repeated(
    engine: &dyn Engine,
    (op, sources, result): Operator<'_>,
    nodes: usize,
    are_own: bool,
) -> (ValidGraph, GraphCounts) {
    let groups = if are_own { nodes } else { 1 };
    let each = sources.len() + 1;
    let tensors: Vec<Place> = (0..groups as u64)
        .flat_map(|group| {
            let at = group * 1024;
            let source =
                move |(index, &ne): (usize, &[u64; 4])| (Type::F32, ne, 0, at + index as u64 * 64);
            let sources = sources.iter().enumerate().map(source);
            sources.chain([(Type::F32, result, 1, at)])
        })
        .collect();
    let names: Vec<Vec<u32>> = (0..nodes)
        .map(|node| (node % groups * each) as u32)
        .map(|first| (first..first + sources.len() as u32).collect())
        .collect();
    let nodes: Vec<(Op, u32, &[u32])> = { names.iter() }
        .map(|names| (op, names[0] + sources.len() as u32, &names[..]))
        .collect();
    let counts = GraphCounts {
        buffers: 2,
        tensors: tensors.len(),
        nodes: nodes.len(),
    };
    (graph_over(engine, MODEL, &tensors, &nodes), counts)
}

/// Whether compiling takes what is announced at most, and, if `is_close`, a quarter at least.
fn check_announced(
    engine: &dyn Engine,
    (graph, counts): &(ValidGraph, GraphCounts),
    buffers: &[Arc<dyn Memory>],
    is_close: bool,
) {
    let compile = || engine.compile(graph, buffers, &|| false).unwrap();
    let (_plan, allocated) = counted(compile);
    let announced = engine.compile_bytes(counts);
    let most = allocated.most;
    assert!(most <= announced, "{most} of {announced} for {counts:?}");
    assert!(
        !is_close || most >= announced / 4,
        "{most} of {announced} for {counts:?}"
    );
}

/// Nodes of the device, results that are copied to their place, nodes that the other engine has,
/// products that read copies in another layout, and tensors that are moved: few of them, and many.
#[test]
fn what_a_compilation_takes_is_announced() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        greedy: "GGML_OP_CUMSUM",
        lacks: "GGML_OP_RWKV_WKV7",
        ..old_bytes()
    };
    let (engine, _) = start(folder.path(), &changes, 1 << 30);
    for nodes in [1, 2, 7, 100, 5000] {
        let buffers = || {
            [
                for_weights(&engine, MODEL, &unlimited()),
                engine.alloc(MODEL).unwrap(),
            ]
        };
        let row = [16, 1, 1, 1];
        let (token, state) = ([4, 1, 1, 1], [16, 1, 1, 1]);
        let recurrent = [token, token, token, token, token, token, state];
        let operators: [Operator<'_>; 3] = [
            (Op::Add {}, &[row, row], row),
            (Op::Cumsum {}, &[row], row),
            (Op::RwkvWkv7 {}, &recurrent, [4, 5, 1, 1]),
        ];
        for operator in operators {
            for are_own in [false, true] {
                let graph = repeated(&engine, operator, nodes, are_own);
                // A node of the device could be followed by a copy.
                let is_close = nodes == 5000 && operator.0 != Op::Add {};
                // The first compilation also makes the segment.
                check_announced(&engine, &graph, &buffers(), is_close);
                let whole = [0; 2].map(|_| engine.alloc(MODEL).unwrap());
                check_announced(&engine, &graph, &whole, is_close);
            }
        }
        // Each tensor is in two segments, as far as there may be so many.
        let [memory, other] = buffers();
        let places: Vec<u64> = (0..nodes as u64).map(|at| at * 4096).collect();
        for &at in &places {
            write(&*memory, at + 1, &[1; 40]).unwrap();
            write(&*memory, at + 41, &[2; 40]).unwrap();
        }
        let graph = copies(&engine, MODEL, 64, &places);
        let counts = GraphCounts {
            buffers: 2,
            tensors: nodes + 1,
            nodes,
        };
        check_announced(&engine, &(graph, counts), &[memory, other], false);
        // Two large segments, of which the tensor has a part.
        let [memory, other] = buffers();
        write(&*memory, 0, &vec![1; MIB as usize]).unwrap();
        write(&*memory, MIB, &vec![2; MIB as usize]).unwrap();
        let graph = copies(&engine, MODEL, 64, &[MIB - 32]);
        let counts = GraphCounts {
            buffers: 2,
            tensors: 2,
            nodes: 1,
        };
        check_announced(&engine, &(graph, counts), &[memory, other], true);
    }
    // Products with many weights, which are repacked.
    let engine = start_at(
        &common::cached("build-llama-0.3.36/bin/libggml-cpu.so"),
        1 << 30,
        Some(true),
        true,
    );
    for nodes in [1, 2, 7, 100, 500] {
        let memory = for_weights(&engine, MODEL, &unlimited());
        let matrix = vec![0; (ROWS * COLUMNS / 32 * BLOCK) as usize];
        let mut tensors: Vec<Place> = vec![(Type::F32, [COLUMNS, 1, 1, 1], 1, 0)];
        for at in (0..nodes as u64).map(|number| number * WEIGHTS) {
            if upload(&*memory, at, &matrix).is_err() {
                write(&*memory, at, &matrix).unwrap();
            }
            tensors.push((Type::Q4_0, [COLUMNS, ROWS, 1, 1], 0, at));
        }
        tensors
            .extend((0..nodes as u64).map(|at| (Type::F32, [ROWS, 1, 1, 1], 1, (1 + at) * 4096)));
        let sources: Vec<[u32; 2]> = (1..=nodes as u32).map(|from| [from, 0]).collect();
        let products: Vec<(Op, u32, &[u32])> = { (nodes as u32 + 1..).zip(&sources) }
            .map(|(to, from)| (PRODUCT, to, &from[..]))
            .collect();
        let counts = GraphCounts {
            buffers: 2,
            tensors: tensors.len(),
            nodes,
        };
        let graph = graph_over(&engine, MODEL, &tensors, &products);
        let before = engine.repacked_bytes();
        let buffers = [memory, engine.alloc(MODEL).unwrap()];
        check_announced(&engine, &(graph, counts), &buffers, false);
        let copied = engine.repacked_bytes() - before;
        assert!(copied > nodes as u64 * WEIGHTS, "{copied}");
    }
}

/// A seal asks after each 4 MiB that it copies.
#[test]
fn an_extent_that_is_copied_can_be_cancelled() {
    const LEN: u64 = 21 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let (engine, _) = start(folder.path(), &old_bytes(), 1 << 30);
    let memory = for_weights(&engine, MODEL, &unlimited());
    let bytes = content(LEN, 4);
    for (number, part) in bytes.chunks(MIB as usize).enumerate() {
        write(&*memory, number as u64 * MIB, part).unwrap();
    }
    memory.freeze();
    let before = taken(&engine);
    let mut made = None;
    let asked = questions(|is_cancelled| {
        assert!(taken(&engine) <= before && read(&*memory, 0, LEN) == bytes);
        made = Some(memory.extent_unless(0, LEN, is_cancelled)?);
        Ok(())
    });
    assert_eq!(asked, 1 + LEN / (4 * MIB));
    let mut there = vec![0; LEN as usize];
    made.unwrap().read(0, &mut there).unwrap();
    assert!(there == bytes);
}

/// So does an attachment of bytes that have to be copied.
#[test]
fn an_attachment_that_copies_can_be_cancelled() {
    const LEN: u64 = 21 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let (engine, _) = start(folder.path(), &old_bytes(), 1 << 30);
    let one = for_weights(&engine, MODEL, &unlimited());
    let bytes = content(LEN, 5);
    drop(upload(&*one, 0, &bytes).unwrap());
    one.freeze();
    let extent = one.extent(0, LEN).unwrap();
    let asked = questions(|is_cancelled| {
        let two = for_weights(&engine, MODEL, &unlimited());
        // The extent would cut this segment.
        write(&*two, LEN - MIB, &content(2 * MIB, 6)).unwrap();
        let shared = two.attach(0, &extent, is_cancelled)?;
        assert_eq!(shared, 0);
        assert!(read(&*two, 0, LEN) == bytes);
        assert!(read(&*two, LEN, MIB) == content(2 * MIB, 6)[MIB as usize..]);
        Ok(())
    });
    assert_eq!(asked, 1 + LEN / (4 * MIB));
}

/// What a guest uploads is written once, and what it does not upload is zero for all who read it.
#[test]
fn memory_is_cleared_only_where_nothing_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, path) = start(folder.path(), &old_bytes(), 1 << 30);
    let memory = for_weights(&engine, MODEL, &unlimited());
    let other = engine.alloc(MODEL).unwrap();
    let cleared = || counters::<1>(&path, c"cleared_kib").unwrap()[0] as u64 * KIB;
    let before = cleared();
    let bytes = content(16 * MIB, 7);
    drop(upload(&*memory, 0, &bytes).unwrap());
    write(&*memory, 16 * MIB, &bytes).unwrap();
    assert!(cleared() - before < 64 * KIB, "{}", cleared() - before);
    assert!(read(&*memory, 16 * MIB, 16 * MIB) == bytes);
    // An upload that ends in the middle.
    let half = || {
        let memory = for_weights(&engine, MODEL, &unlimited());
        let extent = memory.begin_extent(0, 16 * MIB).unwrap();
        memory.append(&extent, Bytes::from(&bytes[..4096])).unwrap();
        (memory, extent)
    };
    let (memory, extent) = half();
    let before = cleared();
    assert!(extent.read(4096, &mut [0; 1]).is_err());
    let rest = |memory: &dyn Memory| read(memory, 4096, 16 * MIB - 4096);
    assert!(rest(&*memory).iter().all(|byte| *byte == 0));
    assert!(cleared() - before < 64 * KIB);
    // A graph, which can be cancelled meanwhile.
    let graph = copies(&engine, MODEL, 64, &[8192]);
    let buffers = [Arc::clone(&memory), Arc::clone(&other)];
    write(&*other, 0, &[1; 64]).unwrap();
    let mut asked = Vec::new();
    for allowed in [4, u64::MAX] {
        let questions = AtomicU64::new(0);
        let is_cancelled = || questions.fetch_add(1, Ordering::Relaxed) >= allowed;
        let outcome = engine.compile(&graph, &buffers, &is_cancelled);
        match outcome {
            Err(error) => assert_eq!((error, allowed), (EngineError::Cancelled, 4)),
            Ok(mut plan) => plan.run().unwrap(),
        }
        asked.push(questions.into_inner());
    }
    assert_eq!(read(&*other, 0, 64), [0; 64]);
    // Three for its one node, and three while almost 16 MiB are cleared.
    assert_eq!(asked, [5, 6]);
    assert!(rest(&*memory).iter().all(|byte| *byte == 0));
    // A write, which the executor prepares.
    let (memory, extent) = half();
    drop(extent);
    let cancelled = memory.unshare(15 * MIB, 4, &|| true);
    assert_eq!(cancelled, Err(EngineError::Cancelled));
    let asked = questions(|is_cancelled| memory.unshare(7 * MIB, 4, is_cancelled));
    assert_eq!(asked, 0, "3 MiB are left");
    memory.unshare(15 * MIB, 4, &|| false).unwrap();
    let before = cleared();
    write(&*memory, 15 * MIB, &[5; 4]).unwrap();
    assert_eq!(cleared(), before);
    assert_eq!(
        read(&*memory, 15 * MIB - 4, 12),
        [0, 0, 0, 0, 5, 5, 5, 5, 0, 0, 0, 0]
    );
    // What is not complete at the seal never is.
    let (memory, extent) = half();
    memory.freeze();
    assert!(memory.extent(0, 16 * MIB).is_err());
    assert!(extent.read(4096, &mut [0; 1]).is_err());
    assert!(rest(&*memory).iter().all(|byte| *byte == 0));
}

/// The executor prepares a write, which then clears nothing under the lock.
#[test]
fn what_a_write_clears_is_cleared_before_with_questions() {
    let folder = tempfile::tempdir().unwrap();
    for (changes, is_gpu) in kinds().into_iter().zip([false, true]) {
        let (engine, path) = start(folder.path(), &changes, 1 << 30);
        let cleared = || counters::<1>(&path, c"cleared_kib").unwrap()[0] as u64 * KIB;
        let prepare = |memory: &dyn Memory, at, len| {
            let cancelled = memory.unshare(at, len, &|| true);
            assert_eq!(cancelled, Err(EngineError::Cancelled));
            let asked = AtomicU64::new(0);
            let count = || asked.fetch_add(1, Ordering::Relaxed) == u64::MAX;
            memory.unshare(at, len, &count).unwrap();
            asked.into_inner()
        };
        // One byte, whose segment has the whole gap. The gap has more than 20 MiB before the byte,
        // and 4 MiB of them are cleared before the first question.
        let memory = for_weights(&engine, MODEL, &unlimited());
        use_all_slots(&*memory, is_gpu);
        let at = LAST - 2 * MIB;
        let asked = prepare(&*memory, at, 1);
        assert_eq!(asked, 4);
        let before = cleared();
        write(&*memory, at, &[1]).unwrap();
        assert_eq!(cleared(), before);
        assert_eq!(read(&*memory, at - 1, 3), [0, 1, 0]);
        // A copy that begins with the last bytes.
        let memory = for_weights(&engine, MODEL, &unlimited());
        let asked = prepare(&*memory, 0, 24 * MIB);
        assert_eq!(asked, 5);
        let before = cleared();
        write(&*memory, 24 * MIB - 4, &[1; 4]).unwrap();
        assert_eq!(cleared(), before);
        let end = read(&*memory, 24 * MIB - 8, 12);
        assert_eq!(end, [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]);
    }
}

/// A driver rounds allocations up, so that small extents would take more than their bytes.
#[test]
fn small_tensors_are_no_extents_on_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let [_, changes] = kinds();
    let (engine, _) = start(folder.path(), &changes, 1 << 30);
    let memory = for_weights(&engine, MODEL, &unlimited());
    for len in [64 * KIB, MIB, 2 * MIB - 1] {
        let outcome = memory.begin_extent(0, len).map(|_| ());
        assert!(
            matches!(outcome, Err(EngineError::OutOfBounds { .. })),
            "{len}: {outcome:?}"
        );
    }
    // Small tensors that follow each other have one segment, which ends where an extent begins.
    for at in (0..MIB).step_by(4096) {
        write(&*memory, at, &[4; 4096]).unwrap();
    }
    let bytes = content(4 * MIB, 8);
    drop(upload(&*memory, MIB, &bytes).unwrap());
    // Two segments and the gap behind them.
    let most = MODEL + 3 * (2 * MIB + 4352);
    assert!(taken(&engine) <= most, "{} of {most}", taken(&engine));
    memory.freeze();
    let used = taken(&engine);
    assert!(used <= 2 * MIB + 6 * MIB, "{used}");
    assert!(memory.extent(MIB, 4 * MIB).is_ok());
    assert!(memory.extent(0, MIB).is_err());
    assert_eq!(read(&*memory, 0, MIB), vec![4; MIB as usize]);
    // Nor is a small buffer one for weights.
    let small = engine.alloc(MIB).unwrap();
    assert!(engine.alloc_weights(&small).unwrap().is_none());
}

/// ggml's Vulkan backend must not outlive a buffer that it has computed with.
#[test]
fn a_vulkan_backend_is_renewed_once_for_all_segments_that_were_freed() {
    let folder = tempfile::tempdir().unwrap();
    let changes = Changes {
        device_name: "Vulkan0",
        ..old_bytes()
    };
    let (engine, path) = start(folder.path(), &changes, 1 << 30);
    let made = || counters::<1>(&path, c"made").unwrap()[0];
    let before = made();
    let buffers = [
        for_weights(&engine, MODEL, &unlimited()),
        engine.alloc(MODEL).unwrap(),
    ];
    let places: Vec<u64> = (0..8).map(|number| number * 4 * MIB).collect();
    let mut extents = Vec::new();
    let one = for_weights(&engine, MODEL, &unlimited());
    for &at in &places {
        drop(upload(&*one, at, &content(4 * MIB, at)).unwrap());
    }
    one.freeze();
    for &at in &places {
        extents.push((at, one.extent(at, 4 * MIB).unwrap()));
    }
    let graph = copies(&engine, MODEL, 64, &places);
    let run = || engine.compile(&graph, &buffers, &|| false).unwrap().run();
    for (at, _) in &extents {
        drop(upload(&*buffers[0], *at, &content(4 * MIB, *at)).unwrap());
    }
    run().unwrap();
    // Segments that no graph has used are freed.
    for at in &places {
        let two = for_weights(&engine, MODEL, &unlimited());
        drop(upload(&*two, *at, &content(4 * MIB, *at)).unwrap());
        drop(two);
        run().unwrap();
    }
    assert_eq!(made(), before);
    // All of them are merged.
    buffers[0].freeze();
    for (at, extent) in &extents {
        assert_eq!(buffers[0].attach(*at, extent, &|| false), Ok(4 * MIB));
    }
    run().unwrap();
    run().unwrap();
    assert_eq!(made(), before + 1);
}
