//! Weights that several buffers share.

#[path = "../../../tests/common/backend_counters.rs"]
mod backend_counters;
#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod counted_backend;
mod graphs;
mod products;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use changed_backend::{Changes, changed_backend};
use counted_backend::{counted_backend, on_alloc};
use graphs::{SIZE, graph};
use products::{
    BLOCK, COLUMNS, Quota, ROWS, TENSORS, WEIGHTS, check, compile, content, even, fill_up, odd,
    start, start_at, taken,
};
use vgpu_engine::{Engine, EngineError, Extent, Memory, RunError, Turn};
use vgpu_ggml::GgmlEngine;
use vgpu_gguf::Rng;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{Op, Type};

/// The bytes of a row of the weights.
const ROW: u64 = COLUMNS / 32 * BLOCK;

/// What the backend's buffer for a segment takes besides it, at most.
const BESIDES: u64 = 8448;

/// A buffer for weights, and one for other tensors.
fn for_weights(engine: &dyn Engine) -> [Arc<dyn Memory>; 2] {
    let first = engine.alloc(SIZE).unwrap();
    let weights = engine.alloc_weights(&first).unwrap().expect("segments");
    weights.mark_weights();
    [weights, engine.alloc(SIZE).unwrap()]
}

/// Uploads the weights as an extent.
fn upload(memory: &dyn Memory, bytes: &[u8]) {
    let extent = memory.begin_extent(0, bytes.len() as u64).unwrap();
    for part in bytes.chunks(16 << 10) {
        memory.append(&extent, Bytes::from(part)).unwrap();
    }
}

/// A guest that has uploaded the weights, and the extent that it offers.
fn first(engine: &dyn Engine) -> ([Arc<dyn Memory>; 2], Arc<dyn Extent>) {
    let buffers = for_weights(engine);
    upload(&*buffers[0], &content(odd));
    assert!(buffers[0].freeze());
    let extent = buffers[0].extent(0, WEIGHTS).unwrap();
    (buffers, extent)
}

/// A guest that takes the weights from another one.
fn next(engine: &dyn Engine, extent: &Arc<dyn Extent>) -> [Arc<dyn Memory>; 2] {
    let buffers = for_weights(engine);
    let shared = buffers[0].attach(0, extent, &|| false).unwrap();
    assert_eq!(shared, WEIGHTS);
    assert!(buffers[0].freeze());
    buffers
}

fn read(memory: &dyn Memory, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    memory.read(offset, BytesMut::from(&mut bytes[..])).unwrap();
    bytes
}

/// Without copies in another layout.
fn plain(memory: Option<u64>) -> GgmlEngine {
    start(memory, false)
}

#[test]
fn weights_are_held_once_as_long_as_a_memory_has_them() {
    let engine = plain(None);
    assert!(engine.supports_weights());
    let (one, extent) = first(&engine);
    let mut plan = compile(&engine, &one);
    check(&mut *plan, &one, odd);
    let alone = taken(&engine);
    let mut others: Vec<_> = (0..3).map(|_| next(&engine, &extent)).collect();
    drop(extent);
    // Each has a buffer for other tensors of its own.
    let of_others = 3 * engine.allocation_size(SIZE);
    assert_eq!(taken(&engine), alone + of_others);
    for other in &others {
        check(&mut *compile(&engine, other), other, odd);
        assert_eq!(read(&*other[0], 0, WEIGHTS), content(odd));
    }
    // The memory that has uploaded them ends first.
    drop((plan, one));
    let last = others.pop().unwrap();
    drop(others);
    let mut plan = compile(&engine, &last);
    check(&mut *plan, &last, odd);
    let used = taken(&engine) - engine.allocation_size(SIZE);
    assert!((WEIGHTS..WEIGHTS + BESIDES).contains(&used), "{used}");
    drop((plan, last));
    assert_eq!(taken(&engine), 0);
}

#[test]
fn a_write_is_seen_by_its_memory_only() {
    let engine = plain(None);
    let (one, extent) = first(&engine);
    let last_row = |value: i8| move |row| if row == ROWS - 1 { value } else { odd(row) };
    let zeros = engine.alloc(SIZE).unwrap();
    let row = vec![0; ROW as usize];
    for write in 0..3 {
        let two = next(&engine, &extent);
        let mut before = compile(&engine, &two);
        let shared = taken(&engine);
        let at = WEIGHTS - ROW;
        match write {
            0 => two[0].write(at, Bytes::from(&*row)),
            1 => two[0].fill(at, ROW, 0),
            _ => two[0].copy_from(at, &*zeros, 0, ROW),
        }
        .unwrap();
        let used = taken(&engine) - shared;
        assert!((WEIGHTS..WEIGHTS + BESIDES).contains(&used), "{used}");
        assert!(!two[0].is_unmodified() && one[0].is_unmodified());
        // A plan that would read the bytes of others does not run.
        assert!(!before.is_current());
        let outcome = before.launch(&Turn::new());
        assert!(matches!(outcome, Err(RunError::Stale)), "{outcome:?}");
        let mut plan = compile(&engine, &two);
        check(&mut *plan, &two, last_row(0));
        check(&mut *compile(&engine, &one), &one, odd);
        // A further write changes the copy in place.
        two[0].fill(at, ROW, 0).unwrap();
        assert!(plan.is_current());
        assert_eq!(taken(&engine) - shared, used);
        drop(two);
        // The plans keep it.
        assert_eq!(taken(&engine) - shared, used);
    }
    assert_eq!(read(&*one[0], 0, WEIGHTS), content(odd));
    let mut bytes = vec![0; WEIGHTS as usize];
    extent.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, content(odd));
}

/// The executor finds extents through weak references. A guest must not get bytes that were written
/// later.
#[test]
fn an_extent_ends_when_its_only_memory_writes() {
    let engine = plain(None);
    let (one, extent) = first(&engine);
    let mut plan = compile(&engine, &one);
    let weak = Arc::downgrade(&extent);
    drop(extent);
    let before = taken(&engine);
    one[0].fill(0, ROW, 0).unwrap();
    assert!(weak.upgrade().is_none());
    // In place: the plan still reads the weights.
    assert!(plan.is_current());
    assert_eq!(taken(&engine), before);
    check(&mut *plan, &one, |row| if row == 0 { 0 } else { odd(row) });
}

/// A guest that names an extent again may send only some of its bytes.
#[test]
fn an_extent_is_not_begun_where_bytes_were_written() {
    let engine = plain(None);
    let [one, _] = for_weights(&engine);
    one.write(8192, Bytes::from(&[7; 256][..])).unwrap();
    let outcome = one.begin_extent(0, WEIGHTS).map(|_| ());
    let is_refused = matches!(outcome, Err(EngineError::OutOfBounds { .. }));
    assert!(is_refused, "{outcome:?}");
    assert_eq!(read(&*one, 8192, 256), [7; 256]);
    let [two, _] = for_weights(&engine);
    drop(two.begin_extent(0, WEIGHTS).unwrap());
    // Nothing was written.
    let extent = two.begin_extent(0, WEIGHTS).unwrap();
    two.append(&extent, Bytes::from(&[1; 256][..])).unwrap();
    drop(extent);
    assert!(two.begin_extent(0, WEIGHTS).is_err());
    assert_eq!(read(&*two, 0, 512), [vec![1; 256], vec![0; 256]].concat());
}

/// Another guest compares its upload with this one, and has the extent meanwhile.
#[test]
fn a_write_withdraws_an_extent_that_is_not_complete() {
    let engine = plain(None);
    let [one, _] = for_weights(&engine);
    let extent = one.begin_extent(0, WEIGHTS).unwrap();
    one.append(&extent, Bytes::from(&[1; 4096][..])).unwrap();
    assert_eq!(extent.filled(), 4096);
    one.write(0, Bytes::from(&[2; 256][..])).unwrap();
    let outcome = one.append(&extent, Bytes::from(&[3; 256][..]));
    let is_refused = matches!(outcome, Err(EngineError::OutOfBounds { .. }));
    assert!(is_refused, "{outcome:?}");
    let mut bytes = [0; 4096];
    extent.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 4096]);
    assert!(extent.read(0, &mut [0; 4097]).is_err());
    let expected = [vec![2; 256], vec![1; 3840], vec![0; 256]].concat();
    assert_eq!(read(&*one, 0, 4352), expected);
    // Nor is anything appended to memory that is frozen.
    let [two, _] = for_weights(&engine);
    let extent = two.begin_extent(0, WEIGHTS).unwrap();
    two.freeze();
    let outcome = two.append(&extent, Bytes::from(&[3; 256][..]));
    let is_refused = matches!(outcome, Err(EngineError::OutOfBounds { .. }));
    assert!(is_refused, "{outcome:?}");
}

/// The extent that another guest gets while the engine makes a buffer, and what it has got.
static WANTED: Mutex<Option<Weak<dyn Extent>>> = Mutex::new(None);
static GOT: Mutex<Option<Arc<dyn Extent>>> = Mutex::new(None);

extern "C" fn get_wanted() {
    let wanted = WANTED.lock().unwrap_or_else(PoisonError::into_inner);
    let got = wanted.as_ref().and_then(Weak::upgrade);
    *GOT.lock().unwrap_or_else(PoisonError::into_inner) = got;
}

/// The second extent begins in the last bytes of the first one, which nobody has written. Another
/// guest gets the first one while the engine makes the buffer of the second.
#[test]
fn an_extent_that_another_guest_gets_meanwhile_is_not_cut() {
    const FIRST: u64 = 16 << 10;
    const CUT: u64 = 12 << 10;
    const SECOND: u64 = 8 << 10;
    let folder = tempfile::tempdir().unwrap();
    let path = common::cached("build-llama-0.3.36/bin/libggml-cpu.so");
    let path = counted_backend(&common::cached(""), folder.path(), &path);
    let engine = start_at(&path, None, false);
    for others_get_it in [false, true] {
        let [one, _] = for_weights(&engine);
        let extent = one.begin_extent(0, FIRST).unwrap();
        one.append(&extent, Bytes::from(&[1; 4096][..])).unwrap();
        *WANTED.lock().unwrap() = others_get_it.then(|| Arc::downgrade(&extent));
        drop(extent);
        on_alloc(&path, Some(get_wanted));
        let before = taken(&engine);
        let second = one.begin_extent(CUT, SECOND);
        on_alloc(&path, None);
        let got = GOT.lock().unwrap().take();
        assert_eq!(got.is_some(), others_get_it);
        let mut expected = [vec![1; 4096], vec![0; SIZE as usize - 4096]].concat();
        if let Some(first) = got {
            let is_refused = matches!(second, Err(EngineError::OutOfBounds { .. }));
            assert!(is_refused, "{second:?}");
            assert_eq!((one.bytes_in_use(), taken(&engine)), (FIRST, before));
            // It is the extent that it was.
            let rest = vec![2; FIRST as usize - 4096];
            one.append(&first, Bytes::from(&*rest)).unwrap();
            expected[4096..FIRST as usize].fill(2);
        } else {
            one.append(&second.unwrap(), Bytes::from(&[3; SECOND as usize][..]))
                .unwrap();
            assert_eq!(one.bytes_in_use(), CUT + SECOND);
            expected[CUT as usize..][..SECOND as usize].fill(3);
        }
        assert!(read(&*one, 0, SIZE) == expected);
    }
    assert_eq!(taken(&engine), 0);
}

#[test]
fn a_plan_from_before_the_weights_were_shared_holds_no_memory() {
    let engine = plain(None);
    let (one, extent) = first(&engine);
    let two = for_weights(&engine);
    upload(&*two[0], &content(odd));
    let mut old = compile(&engine, &two);
    check(&mut *old, &two, odd);
    assert!(two[0].freeze());
    // Frozen, the memory offers its own bytes. They are equal to those of the first.
    drop(two[0].extent(0, WEIGHTS).unwrap());
    let before = taken(&engine);
    assert_eq!(two[0].attach(0, &extent, &|| false), Ok(WEIGHTS));
    let freed = before - taken(&engine);
    assert!(freed >= WEIGHTS, "{freed}");
    assert!(!old.is_current());
    assert!(old.launch(&Turn::new()).is_err());
    let mut new = compile(&engine, &two);
    assert!(new.is_current());
    check(&mut *new, &two, odd);
    // Also when the memory that has uploaded the weights is gone.
    drop((one, extent));
    check(&mut *new, &two, odd);
}

/// The plan writes to the first row. Others may hold the segment from the freeze on.
#[test]
fn a_plan_writes_to_a_copy_of_its_own() {
    let engine = plain(None);
    let row = [ROW / 4, 1, 1, 1];
    let tensors = [(Type::I32, row, 1, 8192), (Type::I32, row, 0, 0)];
    let into = graph(&engine, &tensors, &[(Op::Copy {}, 1, &[0])]);
    let zeroed = |row| if row == 0 { 0 } else { odd(row) };
    let hostile = for_weights(&engine);
    upload(&*hostile[0], &content(odd));
    let old = engine.compile(&into, &hostile, &|| false).unwrap();
    hostile[0].freeze();
    assert!(!old.is_current());
    let between = engine.compile(&into, &hostile, &|| false).unwrap();
    // The graph writes, so that nothing is offered any more.
    assert!(hostile[0].extent(0, WEIGHTS).is_err());
    drop((old, between));

    let (one, extent) = first(&engine);
    let two = next(&engine, &extent);
    for buffers in [&one, &two] {
        let mut writes = engine.compile(&into, buffers, &|| false).unwrap();
        assert!(writes.is_current());
        assert_eq!(writes.run(), Ok(()));
        check(&mut *compile(&engine, buffers), buffers, zeroed);
        let mut bytes = vec![0; WEIGHTS as usize];
        extent.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, content(odd));
    }
}

/// Whether it reads or writes: here it reads.
#[test]
fn a_plan_is_stale_once_a_segment_of_its_memory_is_offered() {
    let engine = plain(None);
    let (one, extent) = first(&engine);
    drop(extent);
    let plan = compile(&engine, &one);
    assert!(plan.is_current());
    let extent = one[0].extent(0, WEIGHTS).unwrap();
    assert!(!plan.is_current());
    drop(extent);
}

#[test]
fn a_failed_allocation_changes_nothing() {
    let engine = plain(Some(4 << 20));
    let (one, extent) = first(&engine);
    let two = next(&engine, &extent);
    let three = for_weights(&engine);
    let plain = engine.alloc(SIZE).unwrap();
    let mut plan = compile(&engine, &two);
    // In two segments, which a graph needs as one.
    let bytes = content(even);
    let (head, tail) = bytes.split_at(WEIGHTS as usize / 512 * 256);
    three[0].write(0, Bytes::from(head)).unwrap();
    let at = head.len() as u64;
    three[0].write(at, Bytes::from(tail)).unwrap();
    // With a gap before what is there, and a larger one behind.
    let four = for_weights(&engine);
    four[0].write(8192, Bytes::from(&[4; 256][..])).unwrap();
    four[0].freeze();
    let of_first_gap = engine.alloc(8192).unwrap();
    // No further allocation: what is free is less than the least one.
    let mut filler = Vec::new();
    let mut size = 2 << 20;
    while size > 0 {
        match engine.alloc(size) {
            Ok(memory) => filler.push(memory),
            Err(_) => size /= 2,
        }
    }
    three[0].freeze();
    while let Ok(memory) = engine.alloc(1) {
        filler.push(memory);
    }
    let before = taken(&engine);
    let is_refused = |outcome: Result<(), EngineError>| {
        let is_so = matches!(outcome, Err(EngineError::OutOfMemory { .. }));
        assert!(is_so, "{outcome:?}");
        assert_eq!(taken(&engine), before);
    };
    is_refused(two[0].write(0, Bytes::from(&[1; 64][..])));
    is_refused(two[0].fill(WEIGHTS - 64, 64, 1));
    is_refused(two[0].unshare(0, WEIGHTS, &|| false));
    is_refused(three[0].write(SIZE - 64, Bytes::from(&[1; 64][..])));
    is_refused(engine.alloc_weights(&plain).map(|_| ()));
    let product = graph(&engine, &TENSORS, &[(graphs::PRODUCT, 2, &[0, 1])]);
    is_refused(engine.compile(&product, &three, &|| false).map(|_| ()));
    assert!(plan.is_current() && two[0].is_unmodified());
    check(&mut *plan, &two, odd);
    check(&mut *compile(&engine, &one), &one, odd);
    assert_eq!(read(&*three[0], 0, WEIGHTS), bytes);
    plain.write(0, Bytes::from(&[1; 64][..])).unwrap();
    // The bytes of the first gap have memory, and those of the second one have not.
    drop(of_first_gap);
    let before = taken(&engine);
    let outcome = four[0].fill(0, SIZE, 1);
    let is_refused = matches!(outcome, Err(EngineError::OutOfMemory { .. }));
    assert!(is_refused, "{outcome:?}");
    assert_eq!((taken(&engine), four[0].bytes_in_use()), (before, 256));
    assert_eq!(
        read(&*four[0], 8000, 256),
        [vec![0; 192], vec![4; 64]].concat()
    );
    // With memory, all of it works.
    drop(filler);
    four[0].fill(0, SIZE, 1).unwrap();
    assert_eq!(read(&*four[0], 0, SIZE), vec![1; SIZE as usize]);
    check(&mut *compile(&engine, &three), &three, even);
    two[0].fill(0, ROW, 0).unwrap();
    assert!(engine.alloc_weights(&plain).unwrap().is_some());
    drop((plan, one, two, three, four, extent, plain));
    assert_eq!(taken(&engine), 0);
}

/// As a program does that reads a model in parts.
#[test]
fn weights_in_any_parts_are_moved_together_for_a_graph() {
    let engine = plain(None);
    let bytes = content(odd);
    for part in [256, 1000, 4096, 10_000] {
        let buffers = for_weights(&engine);
        // The last part also has bytes that are not of the tensor.
        let mut all = bytes.clone();
        all.extend([9; 5000]);
        let parts: Vec<(usize, &[u8])> = all.chunks(part).enumerate().collect();
        for (index, chunk) in parts.iter().rev() {
            let at = (index * part) as u64;
            buffers[0].write(at, Bytes::from(*chunk)).unwrap();
        }
        let mut plan = compile(&engine, &buffers);
        check(&mut *plan, &buffers, odd);
        assert_eq!(read(&*buffers[0], 0, WEIGHTS + 5000), all);
        // The next graph moves nothing.
        assert!(compile(&engine, &buffers).is_current() && plan.is_current());
        assert!(buffers[0].freeze());
    }
    assert_eq!(taken(&engine), 0);
}

/// Kernels expect tensors at the alignment of their buffer. The segment moves, and its copy begins
/// where the tensor is aligned.
#[test]
fn a_tensor_in_a_segment_at_an_odd_place_is_aligned() {
    let engine = plain(None);
    let (_one, extent) = first(&engine);
    let buffers = for_weights(&engine);
    assert_eq!(buffers[0].attach(100, &extent, &|| false), Ok(WEIGHTS));
    buffers[0].freeze();
    let before = taken(&engine);
    let row = [ROW / 4, 1, 1, 1];
    let tensors = [(Type::I32, row, 0, 256), (Type::I32, row, 1, 0)];
    let from = graph(&engine, &tensors, &[(Op::Copy {}, 1, &[0])]);
    let mut plan = engine.compile(&from, &buffers, &|| false).unwrap();
    plan.run().unwrap();
    let expected = content(odd)[156..][..ROW as usize].to_vec();
    assert_eq!(read(&*buffers[1], 0, ROW), expected);
    assert!(
        taken(&engine) - before >= WEIGHTS,
        "the segment has not moved"
    );
    // At a place that suits tensors, nothing moves.
    let buffers = next(&engine, &extent);
    let before = taken(&engine);
    let plan = engine.compile(&from, &buffers, &|| false).unwrap();
    assert_eq!(taken(&engine), before);
    drop(plan);
}

/// The graph also reads bytes that nobody has written.
#[test]
fn bytes_that_were_never_written_are_zero_for_graphs() {
    let engine = plain(None);
    let buffers = for_weights(&engine);
    let row = [ROW / 4, 1, 1, 1];
    let tensors = [(Type::I32, row, 0, 32 << 10), (Type::I32, row, 1, 8192)];
    let from = graph(&engine, &tensors, &[(Op::Copy {}, 1, &[0])]);
    buffers[1].fill(8192, ROW, 1).unwrap();
    engine
        .compile(&from, &buffers, &|| false)
        .unwrap()
        .run()
        .unwrap();
    assert_eq!(read(&*buffers[1], 8192, ROW), vec![0; ROW as usize]);
}

#[test]
fn a_compilation_that_is_cancelled_moves_nothing() {
    let engine = plain(None);
    let buffers = for_weights(&engine);
    let bytes = content(odd);
    for (index, chunk) in bytes.chunks(4096).enumerate() {
        let at = index as u64 * 4096;
        buffers[0].write(at, Bytes::from(chunk)).unwrap();
    }
    let before = taken(&engine);
    let product = graph(&engine, &TENSORS, &[(graphs::PRODUCT, 2, &[0, 1])]);
    let cancelled = engine.compile(&product, &buffers, &|| true).map(|_| ());
    assert_eq!(cancelled, Err(EngineError::Cancelled));
    assert_eq!(taken(&engine), before);
    assert_eq!(read(&*buffers[0], 0, WEIGHTS), bytes);
}

/// A copy asks after each 4 MiB whether it is still wanted.
#[test]
fn a_copy_of_a_large_segment_can_be_cancelled() {
    const LARGE: u64 = 13 << 20;
    let engine = plain(None);
    let [one, two] = [0; 2].map(|_| {
        let first = engine.alloc(LARGE).unwrap();
        engine.alloc_weights(&first).unwrap().expect("segments")
    });
    let bytes: Vec<u8> = (0..LARGE).map(|at| (at >> 8) as u8).collect();
    upload(&*one, &bytes);
    one.freeze();
    let extent = one.extent(0, LARGE).unwrap();
    two.attach(0, &extent, &|| false).unwrap();
    two.freeze();
    let before = taken(&engine);
    // The first question comes before the copy.
    for allowed in 0..4 {
        let questions = AtomicU64::new(0);
        let is_cancelled = || questions.fetch_add(1, Ordering::Relaxed) >= allowed;
        let outcome = two.unshare(0, 1, &is_cancelled);
        assert_eq!(outcome, Err(EngineError::Cancelled), "{allowed}");
        assert_eq!(questions.into_inner(), allowed + 1);
        assert_eq!(taken(&engine), before);
    }
    let questions = AtomicU64::new(0);
    let count = || questions.fetch_add(1, Ordering::Relaxed) == u64::MAX;
    two.unshare(0, 1, &count).unwrap();
    assert_eq!(questions.into_inner(), 4);
    assert!(taken(&engine) - before >= LARGE);
    assert!(read(&*two, 0, LARGE) == bytes);
}

/// Both guests pay for the copy, and it exists once.
#[test]
fn copies_in_another_layout_are_shared_and_each_guest_pays() {
    const QUOTA: u64 = 1 << 20;
    let engine = start(None, true);
    let (one, extent) = first(&engine);
    let quotas = [0; 3].map(|_| Arc::new(AtomicU64::new(QUOTA)));
    let left = |guest: usize| quotas[guest].load(Ordering::Relaxed);
    one[0].charge_copies(Arc::new(Quota(Arc::clone(&quotas[0]))));
    let mut plan = compile(&engine, &one);
    let copied = engine.repacked_bytes();
    assert!(copied > WEIGHTS, "ggml repacks no Q4_0 on this machine");
    assert_eq!(left(0), QUOTA - copied);
    let before = taken(&engine);
    let two = next(&engine, &extent);
    two[0].charge_copies(Arc::new(Quota(Arc::clone(&quotas[1]))));
    let mut of_two = compile(&engine, &two);
    assert_eq!(engine.repacked_bytes(), copied);
    assert_eq!(taken(&engine) - before, engine.allocation_size(SIZE));
    assert_eq!(left(1), QUOTA - copied);
    // A guest that may not have a copy reads the plain bytes.
    let three = next(&engine, &extent);
    quotas[2].store(copied, Ordering::Relaxed);
    three[0].charge_copies(Arc::new(Quota(Arc::clone(&quotas[2]))));
    let mut of_three = compile(&engine, &three);
    assert_eq!((left(2), engine.repacked_bytes()), (copied, copied));
    for (plan, buffers) in [
        (&mut plan, &one),
        (&mut of_two, &two),
        (&mut of_three, &three),
    ] {
        check(&mut **plan, buffers, odd);
    }
    // A write ends the copy for its guest.
    one[0].fill(0, ROW, 0).unwrap();
    let zeroed = |row| if row == 0 { 0 } else { odd(row) };
    assert_eq!((left(0), left(1)), (QUOTA, QUOTA - copied));
    check(&mut *of_two, &two, odd);
    let mut own = compile(&engine, &one);
    check(&mut *own, &one, zeroed);
    assert_eq!(engine.repacked_bytes(), 2 * copied);
    assert_eq!(left(0), QUOTA - copied);
    check(&mut *of_two, &two, odd);
    drop((plan, own, one));
    assert_eq!(left(0), QUOTA);
    check(&mut *of_two, &two, odd);
    drop((of_two, of_three, two, three, extent));
    assert_eq!((left(1), engine.repacked_bytes()), (QUOTA, 0));
    assert_eq!(taken(&engine), 0);
}

/// A guest that has uploaded and repacked the weights itself gives its copies up as well.
#[test]
fn merged_weights_have_one_copy_in_another_layout() {
    let engine = start(None, true);
    let (one, extent) = first(&engine);
    let mut plan = compile(&engine, &one);
    let copied = engine.repacked_bytes();
    let two = for_weights(&engine);
    upload(&*two[0], &content(odd));
    let old = compile(&engine, &two);
    assert_eq!(engine.repacked_bytes(), 2 * copied);
    two[0].freeze();
    assert_eq!(two[0].attach(0, &extent, &|| false), Ok(WEIGHTS));
    let mut new = compile(&engine, &two);
    assert_eq!(engine.repacked_bytes(), copied);
    check(&mut *plan, &one, odd);
    check(&mut *new, &two, odd);
    drop(old);
}

/// Plans go on with copies of weights that are where they were.
#[test]
fn what_moves_nothing_ends_no_copy_in_another_layout() {
    let engine = start(None, true);
    let (one, extent) = first(&engine);
    let mut plan = compile(&engine, &one);
    let copied = engine.repacked_bytes();
    // The memory has this extent already.
    assert_eq!(one[0].attach(0, &extent, &|| false), Ok(WEIGHTS));
    // An extent that would cut a segment is not attached to memory that is frozen.
    let two = for_weights(&engine);
    let bytes = [content(odd), vec![0; 256]].concat();
    upload(&*two[0], &bytes);
    two[0].freeze();
    let mut of_two = compile(&engine, &two);
    assert_eq!(engine.repacked_bytes(), 2 * copied);
    assert_eq!(two[0].attach(0, &extent, &|| false), Ok(0));
    assert!(two[0].begin_extent(0, WEIGHTS).is_err());
    assert_eq!(engine.repacked_bytes(), 2 * copied);
    assert!(plan.is_current() && of_two.is_current());
    check(&mut *plan, &one, odd);
    check(&mut *of_two, &two, odd);
}

#[test]
fn weights_of_another_engine_are_refused() {
    let [one, other] = [plain(None), plain(None)];
    let (_weights, extent) = first(&one);
    let buffers = for_weights(&other);
    let outcome = buffers[0].attach(0, &extent, &|| false);
    assert_eq!(outcome, Err(EngineError::ForeignMemory));
    let of_one = one.alloc(SIZE).unwrap();
    let outcome = other.alloc_weights(&of_one).map(|_| ());
    assert_eq!(outcome, Err(EngineError::ForeignMemory));
    // Nor is an ordinary buffer one for weights.
    assert!(!of_one.freeze());
    let outcome = of_one.attach(0, &extent, &|| false);
    assert_eq!(outcome, Err(EngineError::ForeignMemory));
}

/// A buffer of the test below, and the bytes that it must have.
struct Modelled {
    memory: Arc<dyn Memory>,
    bytes: Vec<u8>,
    is_frozen: bool,
    /// Whether it may share a segment, so that a write copies.
    may_share: bool,
    /// What the guest has named.
    named: Vec<(u64, u64)>,
    /// What the guest uploads, where it begins, and how many bytes are there.
    open: Option<(Weak<dyn Extent>, u64, u64)>,
}

/// Random requests to buffers that share extents. After each, all buffers and extents have the
/// bytes of a model.
#[test]
fn random_requests_keep_the_bytes_of_all_buffers_and_extents() {
    let folder = tempfile::tempdir().unwrap();
    // New buffers have the bytes of others, which nobody may read.
    let changes = Changes {
        old_bytes: true,
        ..Changes::default()
    };
    let path = changed_backend(&common::cached(""), folder.path(), &changes);
    for engine in [plain(None), start_at(&path, None, false)] {
        let mut shared = 0;
        for seed in 0..30 {
            shared += random_requests(&engine, seed, false);
            assert_eq!(taken(&engine), 0, "seed {seed}");
        }
        assert!(shared > 10 * SIZE, "{shared} bytes were shared");
    }
}

/// The same where others take all memory of the engine before every fourth request. Then only bytes
/// that a buffer may share cannot be written, and a graph moves nothing.
#[test]
fn random_requests_keep_all_bytes_when_the_memory_of_the_engine_is_full() {
    let engine = plain(Some(24 * SIZE));
    let mut shared = 0;
    for seed in 0..30 {
        shared += random_requests(&engine, seed, true);
        assert_eq!(taken(&engine), 0, "seed {seed}");
    }
    assert!(shared > 2 * SIZE, "{shared} bytes were shared");
}

/// Whether a request was carried out. It may lack memory if `may_lack`.
fn has_worked<T>(outcome: Result<T, EngineError>, may_lack: bool) -> bool {
    match outcome {
        Ok(_) => true,
        Err(EngineError::OutOfMemory { .. }) if may_lack => false,
        Err(error) => panic!("{error}"),
    }
}

/// Returns the bytes that were shared.
fn random_requests(engine: &GgmlEngine, seed: u64, is_full: bool) -> u64 {
    let mut random = Rng::new(seed, 0);
    let mut next = |below: u64| random.below(below);
    let others = engine.alloc(SIZE).unwrap();
    let mut buffers: Vec<Modelled> = Vec::new();
    let mut extents: Vec<(Weak<dyn Extent>, Vec<u8>)> = Vec::new();
    // Every third run has ranges that begin anywhere.
    let unit = if seed.is_multiple_of(3) { 1 } else { 256 };
    let mut shared = 0;
    for step in 0..400 {
        let what = format!("seed {seed}, step {step}");
        let count = buffers.len() as u64;
        let which = next(count.max(1)) as usize;
        let start = next(SIZE / unit) * unit;
        let len = (1 + next((SIZE - start) / unit)).min(next(SIZE / unit / 4) + 1) * unit;
        let range = start as usize..(start + len).min(SIZE) as usize;
        let len = (range.end - range.start) as u64;
        let request = next(18);
        if request == 0 && count < 4 {
            let [memory, _] = for_weights(engine);
            buffers.push(Modelled {
                memory,
                bytes: vec![0; SIZE as usize],
                is_frozen: false,
                may_share: false,
                named: Vec::new(),
                open: None,
            });
            continue;
        }
        if request == 1 && count > 3 {
            buffers.swap_remove(which);
            continue;
        }
        let Some(it) = buffers.get_mut(which) else {
            continue;
        };
        let filler = match is_full && next(4) == 0 {
            true => fill_up(engine),
            false => Vec::new(),
        };
        let is_full = !filler.is_empty();
        let mut content = vec![0; range.len()];
        content.iter_mut().for_each(|byte| *byte = next(256) as u8);
        match request {
            2 => {
                let outcome = it.memory.write(start, Bytes::from(&*content));
                if has_worked(outcome, is_full && it.may_share) {
                    it.bytes[range].copy_from_slice(&content);
                }
            }
            3 => {
                let outcome = it.memory.fill(start, len, step as u8);
                if has_worked(outcome, is_full && it.may_share) {
                    it.bytes[range].fill(step as u8);
                }
            }
            4..=7 => {
                if let Ok(extent) = it.memory.begin_extent(start, len) {
                    // Nothing was written there, which the comparison below shows.
                    assert!(!it.is_frozen, "{what}");
                    it.named.push((start, len));
                    it.open = Some((Arc::downgrade(&extent), start, 0));
                }
            }
            8 | 9 => {
                let Some((extent, at, done)) = it.open.take() else {
                    continue;
                };
                let Some(extent) = extent.upgrade() else {
                    continue;
                };
                let part = content.len().min((extent.size() - done) as usize);
                let part = &content[..part];
                // A write has withdrawn the extent, or a move.
                if it.memory.append(&extent, Bytes::from(part)).is_ok() {
                    let to = (at + done) as usize;
                    it.bytes[to..to + part.len()].copy_from_slice(part);
                    it.open = Some((Arc::downgrade(&extent), at, done + part.len() as u64));
                }
            }
            10 if it.named.len() > 2 => {
                it.is_frozen |= it.memory.freeze();
                it.may_share = true;
                for (offset, len) in std::mem::take(&mut it.named) {
                    if let Ok(extent) = it.memory.extent(offset, len) {
                        assert!(it.is_frozen, "{what}");
                        let bytes = &it.bytes[offset as usize..][..len as usize];
                        extents.push((Arc::downgrade(&extent), bytes.to_vec()));
                    }
                }
            }
            11..=15 => {
                let known = extents.get(next(extents.len().max(1) as u64) as usize);
                let known = known.and_then(|(extent, bytes)| Some((extent.upgrade()?, bytes)));
                let Some((extent, bytes)) = known else {
                    continue;
                };
                let end = start + extent.size();
                let to = start as usize..end as usize;
                if end > SIZE || it.is_frozen && it.bytes[to.clone()] != **bytes {
                    continue;
                }
                let outcome = it.memory.attach(start, &extent, &|| false);
                let may_lack = is_full && it.may_share;
                it.may_share = true;
                if has_worked(outcome.clone(), may_lack) {
                    shared += outcome.unwrap();
                    it.bytes[to].copy_from_slice(bytes);
                }
            }
            16 | 17 => {
                // A graph copies up to 4 KiB from there to the other buffer, or the other way.
                let words = (len / 4).clamp(1, 1024);
                let at = (start / 4 * 4).min(SIZE - 4 * words);
                let row = [words, 1, 1, 1];
                let tensors = [(Type::I32, row, 0, at), (Type::I32, row, 1, 0)];
                let (from, to) = if next(2) == 0 { (0, 1) } else { (1, 0) };
                others
                    .write(0, Bytes::from(&vec![step as u8; 4096][..]))
                    .unwrap();
                let copies = graph(engine, &tensors, &[(Op::Copy {}, to, &[from])]);
                let both = [Arc::clone(&it.memory), Arc::clone(&others)];
                let plan = engine.compile(&copies, &both, &|| false);
                // What is moved needs room for a second copy.
                if is_full && matches!(plan, Err(EngineError::OutOfMemory { .. })) {
                    continue;
                }
                let mut plan = plan.unwrap();
                assert!(plan.is_current(), "{what}");
                plan.run().unwrap();
                let place = at as usize..(at + 4 * words) as usize;
                match to {
                    1 => assert!(read(&*others, 0, 4 * words) == it.bytes[place], "{what}"),
                    _ => it.bytes[place].fill(step as u8),
                }
            }
            _ => {}
        }
        for it in &buffers {
            assert!(read(&*it.memory, 0, SIZE) == it.bytes, "{what}");
            assert!(it.memory.bytes_in_use() <= SIZE, "{what}");
        }
        extents.retain(|(extent, bytes)| {
            let Some(extent) = extent.upgrade() else {
                return false;
            };
            let mut there = vec![0; bytes.len()];
            extent.read(0, &mut there).unwrap();
            assert!(there == *bytes, "an extent has changed: {what}");
            true
        });
    }
    shared
}
