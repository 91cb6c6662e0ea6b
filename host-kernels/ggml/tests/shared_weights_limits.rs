//! Weights that several buffers share where memory, or the number of buffers, is short.

#[path = "../../../tests/common/backend_counters.rs"]
mod backend_counters;
#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod counted_backend;
mod graphs;
mod products;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use backend_counters::{counters, set};
use changed_backend::{Changes, changed_backend};
use counted_backend::{copied_by, counted_backend};
use graphs::{Place, graph_over};
use products::{Quota, fill_up, taken};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, EngineError, Extent, Memory};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{Op, Type};

const MIB: u64 = 1 << 20;

/// The bytes of a tensor of the model, and of all of them.
const TENSOR: u64 = 24 * MIB;
const TENSORS: u64 = 4;
const MODEL: u64 = TENSORS * TENSOR;

/// A stand-in for a GPU, which counts its buffers and what is copied.
fn gpu(folder: &Path) -> PathBuf {
    let changes = Changes {
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    };
    let cache = common::cached("");
    counted_backend(&cache, folder, &changed_backend(&cache, folder, &changes))
}

fn start(path: &Path, memory: u64, shares_weights: bool) -> GgmlEngine {
    let options = BackendOptions {
        threads: 1,
        memory: Some(memory),
        shares_weights: Some(shares_weights),
        ..BackendOptions::default()
    };
    let cpu = Arc::new(CpuEngine::new(1, None).unwrap());
    GgmlEngine::start(path, &options, cpu).unwrap()
}

/// Bytes of which no two tensors are equal.
fn content(seed: u64) -> Vec<u8> {
    (0..MODEL / 8)
        .flat_map(|at| (at ^ (seed << 32)).to_le_bytes())
        .collect()
}

fn read_all(memory: &dyn Memory) -> Vec<u8> {
    let mut bytes = vec![1; MODEL as usize];
    memory.read(0, BytesMut::from(&mut bytes[..])).unwrap();
    bytes
}

/// A buffer for the model, which is shared if the engine has room for that, as the executor has it.
fn for_model(engine: &dyn Engine) -> Arc<dyn Memory> {
    let buffer = engine.alloc(MODEL).unwrap();
    match engine.alloc_weights(&buffer) {
        Ok(Some(weights)) => weights,
        Ok(None) | Err(_) => buffer,
    }
}

/// Uploads these tensors, as extents as far as that is possible. Returns how many were.
fn upload(memory: &dyn Memory, bytes: &[u8], tensors: impl Iterator<Item = u64>) -> u64 {
    let mut extents = 0;
    for at in tensors.map(|tensor| tensor * TENSOR) {
        let part = &bytes[at as usize..][..TENSOR as usize];
        match memory.begin_extent(at, TENSOR) {
            Ok(extent) => {
                extents += 1;
                memory.append(&extent, Bytes::from(part)).unwrap();
            }
            Err(_) => memory.write(at, Bytes::from(part)).unwrap(),
        }
    }
    extents
}

/// The extents of a sealed buffer.
fn offered(memory: &dyn Memory) -> Vec<(u64, Arc<dyn Extent>)> {
    { (0..MODEL).step_by(TENSOR as usize) }
        .filter_map(|at| Some((at, memory.extent(at, TENSOR).ok()?)))
        .collect()
}

/// A driver allows so many buffers, and refuses others.
#[test]
fn loads_work_when_the_driver_allows_few_buffers() {
    const LIMIT: u64 = 20;
    let folder = tempfile::tempdir().unwrap();
    let path = gpu(folder.path());
    // Both count together: the driver does.
    let engines = [0; 2].map(|_| start(&path, 4 << 30, true));
    engines
        .iter()
        .for_each(|engine| engine.limit_allocations(LIMIT));
    set(&path, c"limit", LIMIT as i32);
    let counted = |name| u64::from(counters::<1>(&path, name).unwrap()[0].cast_unsigned());
    for round in 0..2 {
        let mut loaded = Vec::new();
        let mut extents = Vec::new();
        for (number, engine) in engines.iter().cycle().take(6).enumerate() {
            let bytes = content(number as u64);
            let memory = for_model(engine);
            extents.push(upload(&*memory, &bytes, 0..TENSORS));
            memory.freeze();
            loaded.push((memory, bytes));
            let (buffers, refused) = (counted(c"buffers"), counted(c"refused"));
            assert_eq!(refused, 0, "{buffers} buffers in round {round}");
            // The rest is for others.
            assert!(buffers <= LIMIT, "{buffers}");
        }
        // The first load has its tensors in segments, and the last one has a buffer.
        assert!(extents[0] == TENSORS && extents[5] == 0, "{extents:?}");
        let buffers = counted(c"buffers");
        let others = loaded.len() as u64;
        assert!(
            (LIMIT / 2..=LIMIT / 4 * 3 + others).contains(&buffers),
            "{buffers}"
        );
        for (memory, bytes) in &loaded {
            assert!(read_all(&**memory) == *bytes);
        }
        drop(loaded);
        assert_eq!(counted(c"buffers"), 0);
    }
}

/// Copies of shared bytes are further buffers.
#[test]
fn copies_of_shared_bytes_are_limited() {
    const LIMIT: u64 = 8;
    let folder = tempfile::tempdir().unwrap();
    let path = gpu(folder.path());
    let engine = start(&path, 4 << 30, true);
    engine.limit_allocations(LIMIT);
    set(&path, c"limit", LIMIT as i32);
    let bytes = content(1);
    let one = for_model(&engine);
    upload(&*one, &bytes, 0..TENSORS);
    one.freeze();
    let two = for_model(&engine);
    let extents = offered(&*one);
    for (at, extent) in &extents {
        assert_eq!(two.attach(*at, extent, &|| false), Ok(TENSOR));
    }
    two.freeze();
    let mut expected = read_all(&*two);
    let mut refused = 0;
    for (at, _) in &extents {
        match two.fill(*at, 64, 9) {
            Ok(()) => expected[*at as usize..][..64].fill(9),
            Err(EngineError::Device { message }) => {
                assert!(message.contains("may have 6"), "{message}");
                refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!((extents.len(), refused), (4, 2));
    assert!(read_all(&*two) == expected && read_all(&*one) == bytes);
    let others: Vec<_> = (0..LIMIT / 4)
        .map(|_| engine.alloc(4096).unwrap())
        .collect();
    assert_eq!(counters::<1>(&path, c"refused"), Some([0]));
    drop(others);
}

/// The KV cache of the guest is allocated before the weights are sent, between them, or after them.
#[test]
fn a_load_that_fits_without_sharing_fits_with_it() {
    /// The KV cache.
    const CACHE: u64 = 40 * MIB;
    /// What the segments of the tensors take besides, and one for a gap. The buffer may have 12
    /// segments, which could take 24 MiB.
    const BESIDES: u64 = (TENSORS + 1) * (2 * MIB + 8192);
    let folder = tempfile::tempdir().unwrap();
    let path = gpu(folder.path());
    let bytes = content(2);
    for shares_weights in [false, true] {
        for before in [0, TENSORS / 2, TENSORS] {
            let engine = start(&path, MODEL + CACHE + BESIDES, shares_weights);
            let memory = for_model(&engine);
            let is_shared = memory.bytes_in_use() == 0;
            assert_eq!(is_shared, shares_weights);
            let first = upload(&*memory, &bytes, 0..before);
            let cache = engine.alloc(CACHE).unwrap();
            let more = upload(&*memory, &bytes, before..TENSORS);
            assert_eq!(first + more > 0, shares_weights);
            assert!(read_all(&*memory) == bytes);
            memory.freeze();
            assert_eq!(offered(&*memory).len() as u64, first + more);
            drop((memory, cache));
            assert_eq!(taken(&engine), 0);
        }
        // No byte is left: the buffer has what it needs without segments.
        let engine = start(&path, MODEL + CACHE + 4 * MIB, shares_weights);
        let memory = for_model(&engine);
        let cache = engine.alloc(CACHE).unwrap();
        let rest = fill_up(&engine);
        assert_eq!(upload(&*memory, &bytes, 0..TENSORS), 0);
        assert!(read_all(&*memory) == bytes);
        drop((memory, cache, rest));
    }
}

/// The second load attaches what the first one has, although nothing is left for segments.
#[test]
fn a_second_load_shares_where_the_memory_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let path = gpu(folder.path());
    let bytes = content(3);
    let engine = start(&path, 2 * MODEL + 40 * MIB, true);
    let one = for_model(&engine);
    assert_eq!(upload(&*one, &bytes, 0..TENSORS), TENSORS);
    one.freeze();
    let two = for_model(&engine);
    let _rest = fill_up(&engine);
    let before = taken(&engine);
    let mut shared = 0;
    // The first one has a gap before it and one behind it.
    for at in [2, 0, 1, 3].map(|tensor| tensor * TENSOR) {
        let extent = one.extent(at, TENSOR).unwrap();
        shared += two.attach(at, &extent, &|| false).unwrap();
    }
    two.freeze();
    assert_eq!(shared, MODEL);
    let given_up = before - taken(&engine);
    assert!(given_up >= MODEL, "{given_up}");
    assert!(read_all(&*two) == bytes && read_all(&*one) == bytes);
}

/// At the seal, a guest gets back what its segments do not take, also if it has no quota for a
/// second charge meanwhile.
#[test]
fn a_seal_gives_back_what_is_not_needed() {
    /// What a segment takes besides at most.
    const SLOT: u64 = 8448;
    const ALL: u64 = 1 << 30;
    let folder = tempfile::tempdir().unwrap();
    let path = common::cached("build-llama-0.3.36/bin/libggml-cpu.so");
    let path = counted_backend(&common::cached(""), folder.path(), &path);
    let engine = start(&path, ALL, true);
    let other = engine.alloc(MODEL).unwrap();
    let row = [MODEL / 4, 1, 1, 1];
    let tensors: [Place; 2] = [(Type::I32, row, 0, 0), (Type::I32, row, 1, 0)];
    let graph = graph_over(&engine, MODEL, &tensors, &[(Op::Copy {}, 1, &[0])]);
    // Of so many segments, with gaps before and behind each.
    for (segments, kept) in [(40, 17), (4, 9)] {
        let quota = Arc::new(AtomicU64::new(ALL));
        let buffer = engine.alloc(MODEL).unwrap();
        buffer.charge_copies(Arc::new(Quota(Arc::clone(&quota))));
        let memory = engine.alloc_weights(&buffer).unwrap().expect("segments");
        drop(buffer);
        for at in (1..=segments).map(|number| number * 2 * MIB) {
            memory.write(at, Bytes::from(&[1; 64][..])).unwrap();
        }
        assert_eq!(
            ALL - quota.load(Ordering::Relaxed),
            SLOT * (2 * segments + 1)
        );
        // The graph leaves one segment.
        let buffers = [Arc::clone(&memory), Arc::clone(&other)];
        drop(engine.compile(&graph, &buffers, &|| false).unwrap());
        assert_eq!(memory.bytes_in_use(), MODEL);
        quota.fetch_sub(ALL - SLOT * (2 * segments + 1), Ordering::Relaxed);
        assert_eq!(quota.load(Ordering::Relaxed), 0);
        memory.freeze();
        let given_back = quota.load(Ordering::Relaxed);
        assert_eq!(given_back, SLOT * (2 * segments + 1 - kept), "{segments}");
        drop((memory, buffers));
        assert_eq!(quota.load(Ordering::Relaxed), SLOT * (2 * segments + 1));
    }
}

/// Each call of a GPU's backend waits for the device.
#[test]
fn segments_of_a_gpu_are_copied_in_few_calls() {
    const LEN: u64 = 32 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let path = gpu(folder.path());
    let engine = start(&path, 1 << 30, true);
    let memory = for_model(&engine);
    let bytes = content(4);
    let half = LEN as usize / 2;
    for (at, part) in [(0, &bytes[..half]), (LEN / 2, &bytes[half..LEN as usize])] {
        memory.write(at, Bytes::from(part)).unwrap();
    }
    let row = [LEN / 4, 1, 1, 1];
    let tensors: [Place; 2] = [(Type::I32, row, 0, 0), (Type::I32, row, 1, 0)];
    let graph = graph_over(&engine, MODEL, &tensors, &[(Op::Copy {}, 1, &[0])]);
    let buffers = [Arc::clone(&memory), engine.alloc(MODEL).unwrap()];
    // Before each 4 MiB, it is asked whether the compilation is cancelled.
    let asked = AtomicU64::new(0);
    let compile = |is_cancelled: &dyn Fn() -> bool| {
        let compile = || engine.compile(&graph, &buffers, is_cancelled).map(|_| ());
        copied_by(&path, compile)
    };
    let (outcome, _) = compile(&|| asked.fetch_add(1, Ordering::Relaxed) >= 5);
    assert_eq!(outcome, Err(EngineError::Cancelled));
    asked.store(0, Ordering::Relaxed);
    let (outcome, copied) = compile(&|| asked.fetch_add(1, Ordering::Relaxed) == u64::MAX);
    outcome.unwrap();
    assert_eq!((copied.read, copied.written), (LEN, LEN));
    // For each of the segments, the last one has less.
    let most = LEN / (4 * MIB) + 2;
    assert!(copied.reads.max(copied.writes) <= most, "{copied:?}");
    assert!(
        asked.into_inner() >= LEN / (4 * MIB),
        "it is asked too rarely"
    );
    assert!(read_all(&*memory)[..LEN as usize] == bytes[..LEN as usize]);
}
