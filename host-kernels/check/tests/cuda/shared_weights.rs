//! Buffers for weights that hold pieces of each other.

use std::sync::Arc;

use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::{Engine, EngineError, Extent, Memory, Plan};
use vgpu_transport::ir::{Graph, Tensor, Type};

use crate::engine_with;
use crate::repack::{
    Loaded, WEIGHTS, assert_close, content_of, plain_result, product, repacked, rows_of, size,
    tensor,
};
use crate::spy::{Fails, Spy};

/// Bytes before the tensor in its buffer, and behind it.
pub(crate) const BESIDE: u64 = 256;

/// 450 KiB of weights that can be repacked.
pub(crate) fn weights() -> Tensor {
    tensor(WEIGHTS, Type::Q4_0, [2880, 285, 1, 1], BESIDE)
}

/// The bytes of a buffer with these weights.
pub(crate) fn content() -> Vec<u8> {
    content_of(Type::Q4_0, size(&weights()) + 2 * BESIDE, 1)
}

fn policy() -> LaunchPolicy {
    LaunchPolicy::default()
}

/// An engine on a device that divides its memory as a GPU does.
pub(crate) fn engine() -> (CudaEngine, Arc<Spy>) {
    let device = Arc::new(Spy::with_memory(512 << 20));
    (engine_with(&device, policy()), device)
}

/// An empty buffer for weights.
pub(crate) fn buffer(engine: &dyn Engine, size: u64) -> Arc<dyn Memory> {
    let plain = engine.alloc(size).unwrap();
    let memory = engine.alloc_weights(&plain).unwrap().unwrap();
    memory.mark_weights();
    memory
}

/// A guest that uploads `bytes`. Returns the extent of the weights, too.
pub(crate) fn first(engine: &dyn Engine, bytes: &[u8]) -> (Loaded, Arc<dyn Extent>) {
    let mut loaded = Loaded::new(engine, bytes);
    let memory = buffer(engine, bytes.len() as u64);
    let (start, end) = (BESIDE as usize, bytes.len() - BESIDE as usize);
    memory.write(0, bytes[..start].into()).unwrap();
    memory.write(end as u64, bytes[end..].into()).unwrap();
    let extent = memory.begin_extent(BESIDE, (end - start) as u64).unwrap();
    for part in bytes[start..end].chunks(100_000) {
        memory.append(&extent, part.into()).unwrap();
    }
    assert!(memory.freeze());
    loaded.buffers[0] = memory;
    (loaded, extent)
}

/// A guest that attaches the extent, and uploads the rest.
pub(crate) fn next(engine: &dyn Engine, bytes: &[u8], extent: &Arc<dyn Extent>) -> Loaded {
    let mut loaded = Loaded::new(engine, bytes);
    let memory = buffer(engine, bytes.len() as u64);
    let end = bytes.len() - BESIDE as usize;
    memory.write(0, bytes[..BESIDE as usize].into()).unwrap();
    memory.write(end as u64, bytes[end..].into()).unwrap();
    let shared = memory.attach(BESIDE, extent, &|| false).unwrap();
    assert_eq!(shared, extent.size());
    memory.freeze();
    loaded.buffers[0] = memory;
    loaded
}

pub(crate) fn all(loaded: &Loaded) -> Vec<u8> {
    loaded.read(0, loaded.weights().size())
}

pub(crate) fn free(engine: &CudaEngine) -> u64 {
    engine.memory().free
}

/// A plan that is current: compiled a second time if the first compilation has moved weights.
pub(crate) fn plan(loaded: &Loaded, engine: &CudaEngine, graph: &Graph) -> Box<dyn Plan> {
    let plan = loaded.compile(engine, graph);
    if plan.is_current() {
        return plan;
    }
    drop(plan);
    let plan = loaded.compile(engine, graph);
    assert!(plan.is_current());
    plan
}

fn check(loaded: &Loaded, plan: &mut dyn Plan, graph: &Graph, what: &str) {
    plan.run().unwrap();
    assert_close(
        &loaded.result(graph),
        &plain_result(&content(), graph),
        what,
    );
}

#[test]
fn plans_read_one_copy_which_lives_as_long_as_its_last_buffer() {
    let (engine, device) = engine();
    let bytes = content();
    let (one, extent) = first(&engine, &bytes);
    let graph = product(weights(), 3);
    let mut of_one = plan(&one, &engine, &graph);
    assert_eq!(repacked(&device), 1);
    check(&one, &mut *of_one, &graph, "the first");
    // The second buffer needs memory for what it has uploaded, and no pass of the kernel.
    let others = Loaded::new(&engine, &bytes).buffers.swap_remove(1);
    drop(others);
    let before = free(&engine);
    let mut two = next(&engine, &bytes, &extent);
    two.buffers[1] = Arc::clone(&one.buffers[1]);
    let used = before - free(&engine);
    assert_eq!(used, 2 * BESIDE, "{used} bytes for {}", bytes.len());
    let mut of_two = plan(&two, &engine, &graph);
    assert_eq!(repacked(&device), 0);
    check(&two, &mut *of_two, &graph, "the second");
    assert!(of_one.is_current());
    check(&one, &mut *of_one, &graph, "the first again");
    for loaded in [&one, &two] {
        assert!(all(loaded) == bytes);
        assert!(loaded.weights().is_unmodified());
    }
    // The first ends: its own bytes are free, those of the second are not.
    let before = free(&engine);
    let numbers = Arc::clone(&one.buffers[1]);
    let of_plan = of_one.device_bytes();
    drop((of_one, one, extent));
    assert_eq!(free(&engine) - before, 2 * BESIDE + of_plan);
    check(&two, &mut *of_two, &graph, "the second alone");
    let before = free(&engine);
    drop((of_two, two));
    assert!(free(&engine) - before >= size(&weights()));
    drop(numbers);
}

#[test]
fn write_to_shared_weights_is_seen_by_its_buffer_only() {
    let (engine, _) = engine();
    let bytes = content();
    let (one, extent) = first(&engine, &bytes);
    let graph = product(weights(), 1);
    let mut of_one = plan(&one, &engine, &graph);
    let two = next(&engine, &bytes, &extent);
    let three = next(&engine, &bytes, &extent);
    let mut of_three = plan(&three, &engine, &graph);
    let of_two = plan(&two, &engine, &graph);
    // The second writes, then the first, whose bytes they were.
    for (loaded, old) in [(&two, of_two), (&one, of_one)] {
        let before = free(&engine);
        loaded
            .weights()
            .write(BESIDE + 1000, [77; 300][..].into())
            .unwrap();
        let mut expected = bytes.clone();
        expected[BESIDE as usize + 1000..][..300].fill(77);
        assert!(all(loaded) == expected);
        assert!(before - free(&engine) >= size(&weights()), "a copy");
        assert!(!loaded.weights().is_unmodified());
        assert!(!old.is_current());
        assert!(all(&three) == bytes);
        assert!(of_three.is_current());
    }
    of_one = plan(&one, &engine, &graph);
    of_one.run().unwrap();
    check(&three, &mut *of_three, &graph, "the third");
    // What nobody else has is written in place, and is no extent any more.
    let weak = Arc::downgrade(&extent);
    drop((one, two, of_one, of_three, extent));
    let before = free(&engine);
    three.weights().fill(BESIDE, 100, 1).unwrap();
    assert_eq!(free(&engine), before);
    assert!(weak.upgrade().is_none());
}

#[test]
fn format_of_shared_weights_is_that_of_all_who_read_them() {
    let (engine, device) = engine();
    let bytes = content();
    let (one, extent) = first(&engine, &bytes);
    // Shared before the first plan: no one repacks them.
    let two = next(&engine, &bytes, &extent);
    let graph = product(weights(), 1);
    let mut of_one = plan(&one, &engine, &graph);
    assert_eq!(repacked(&device), 0);
    let mut of_two = plan(&two, &engine, &graph);
    check(&one, &mut *of_one, &graph, "plain");
    check(&two, &mut *of_two, &graph, "plain");
    drop((of_one, one));
    // The last one does, when it compiles again.
    of_two = plan(&two, &engine, &graph);
    assert_eq!(repacked(&device), 1);
    check(&two, &mut *of_two, &graph, "repacked");
    // One that needs them plain gets a copy, and the others keep their format.
    let three = next(&engine, &bytes, &extent);
    let rows = rows_of(weights());
    let before = free(&engine);
    let mut of_three = plan(&three, &engine, &rows);
    assert!(before - free(&engine) >= size(&weights()), "a copy");
    check(&three, &mut *of_three, &rows, "rows");
    assert!(of_two.is_current());
    check(&two, &mut *of_two, &graph, "still repacked");
    assert!(all(&two) == bytes && all(&three) == bytes);
    let mut read = vec![0; extent.size() as usize];
    extent.read(0, &mut read).unwrap();
    assert!(read == bytes[BESIDE as usize..][..read.len()]);
}

#[test]
fn weights_come_in_any_order_and_size() {
    let (engine, _) = engine();
    let bytes = content();
    let len = bytes.len() as u64;
    let memory = buffer(&engine, len);
    let free_before = free(&engine);
    assert_eq!(memory.bytes_in_use(), 0);
    let mut model = vec![0; bytes.len()];
    // Parts that overlap, and leave gaps.
    for (start, end) in [
        (300_000, 300_001),
        (65_000, 70_000),
        (69_000, 200_100),
        (0, 10),
    ] {
        memory
            .write(start, bytes[start as usize..end as usize].into())
            .unwrap();
        model[start as usize..end as usize].copy_from_slice(&bytes[start as usize..end as usize]);
    }
    memory.copy_from(100_000, &*memory, 60_000, 90_000).unwrap();
    model.copy_within(60_000..150_000, 100_000);
    let read = |memory: &Arc<dyn Memory>| {
        let mut out = vec![1; bytes.len()];
        memory.read(0, out.as_mut_slice().into()).unwrap();
        out
    };
    assert!(read(&memory) == model);
    assert!(memory.bytes_in_use() <= len);
    // What is not written is kept for the buffer, until it is complete.
    assert!(free(&engine) <= free_before);
    assert!(memory.freeze());
    assert!(free(&engine) > free_before - len);
    // An extent over several pieces, and one over a part of it.
    let extent = memory.extent(66_048, 130_000).unwrap();
    let other = buffer(&engine, len);
    other.write(0, bytes[..].into()).unwrap();
    other.attach(10_001, &extent, &|| false).unwrap();
    other.attach(100_000, &extent, &|| false).unwrap();
    let mut expected = bytes.clone();
    expected[10_001..140_001].copy_from_slice(&model[66_048..196_048]);
    expected[100_000..230_000].copy_from_slice(&model[66_048..196_048]);
    assert!(read(&other) == expected);
    for (offset, len) in [(1, 1000), (0, len + 1), (256 << 10, 70_000)] {
        assert!(memory.extent(offset, len).is_err(), "{offset} {len}");
    }
    let plain = engine.alloc(len).unwrap();
    plain.copy_from(5, &*other, 0, len - 5).unwrap();
    let mut out = vec![0; bytes.len()];
    plain.read(0, out.as_mut_slice().into()).unwrap();
    assert!(out[5..] == expected[..expected.len() - 5]);
}

/// A guest that names an extent again may send only some of its bytes.
#[test]
fn an_extent_is_not_begun_where_bytes_were_written() {
    const LEN: u64 = 70_000;
    let (engine, _device) = engine();
    let read = |memory: &dyn Memory, offset, len| {
        let mut bytes = vec![1; len];
        memory.read(offset, (&mut bytes[..]).into()).unwrap();
        bytes
    };
    let is_refused = |memory: &dyn Memory| {
        let outcome = memory.begin_extent(0, LEN).map(drop);
        let is_so = matches!(outcome, Err(EngineError::OutOfBounds { .. }));
        assert!(is_so, "{outcome:?}");
    };
    let one = buffer(&engine, 2 * LEN);
    one.write(8192, (&[7; 256][..]).into()).unwrap();
    is_refused(&*one);
    assert_eq!(read(&*one, 8192, 256), [7; 256]);
    let two = buffer(&engine, 2 * LEN);
    drop(two.begin_extent(0, LEN).unwrap());
    // Nothing was written.
    let extent = two.begin_extent(0, LEN).unwrap();
    two.append(&extent, (&[1; 256][..]).into()).unwrap();
    drop(extent);
    is_refused(&*two);
    assert_eq!(read(&*two, 0, 512), [vec![1; 256], vec![0; 256]].concat());
    // The first piece begins before what is written, until the bytes before are written, too.
    let three = buffer(&engine, 2 * LEN);
    three.write(LEN, (&[2; 256][..]).into()).unwrap();
    drop(three.begin_extent(0, LEN).unwrap());
    assert_eq!(read(&*three, LEN - 1, 2), [0, 2]);
    let four = buffer(&engine, 2 * LEN);
    four.write(LEN, (&[2; 256][..]).into()).unwrap();
    four.write(LEN - 1, (&[3][..]).into()).unwrap();
    is_refused(&*four);
    assert_eq!(read(&*four, LEN - 2, 3), [0, 3, 2]);
    // What was written ends where the extent begins.
    assert!(two.begin_extent(256, LEN).is_ok());
    assert_eq!(read(&*two, 0, 512), [vec![1; 256], vec![0; 256]].concat());
}

#[test]
fn without_memory_everything_stays_as_it_was() {
    // Each allocation is one of the device.
    let device = Arc::new(Spy::running());
    let engine = engine_with(&device, policy());
    let bytes = content();
    let (one, extent) = first(&engine, &bytes);
    let graph = product(weights(), 1);
    let mut of_one = plan(&one, &engine, &graph);
    let two = next(&engine, &bytes, &extent);
    let part = buffer(&engine, 4096);
    part.write(0, bytes[..4096].into()).unwrap();
    part.freeze();
    let part = part.extent(0, 4096).unwrap();
    let new = buffer(&engine, 1 << 20);
    let memory = two.weights();
    type Work<'a> = &'a dyn Fn() -> Result<(), EngineError>;
    let works: [(&str, Work<'_>); 6] = [
        ("write", &|| memory.write(BESIDE, [1; 5][..].into())),
        ("unshare", &|| memory.unshare(BESIDE, 1, &|| false)),
        ("attach", &|| {
            memory.attach(5000, &part, &|| false).map(drop)
        }),
        ("fill", &|| new.fill(100_000, 1, 1)),
        ("begin_extent", &|| new.begin_extent(0, 70_000).map(drop)),
        ("copy_from", &|| memory.copy_from(0, memory, 5000, 100)),
    ];
    device.fail(Fails::Memory);
    for (what, work) in &works {
        let outcome = work();
        let is_full = matches!(outcome, Err(EngineError::OutOfMemory { .. }));
        assert!(is_full, "{what}: {outcome:?}");
        assert!(all(&two) == bytes && all(&one) == bytes, "{what}");
        assert!(memory.is_unmodified(), "{what}");
        assert_eq!(new.bytes_in_use(), 0, "{what}");
    }
    device.fail(None);
    check(&one, &mut *of_one, &graph, "the first");
    for (what, work) in &works {
        assert_eq!(work(), Ok(()), "{what}");
    }
    assert!(all(&one) == bytes);
}

#[test]
fn tensor_in_an_extent_at_an_odd_place_is_aligned() {
    let (engine, _) = engine();
    let bytes = content();
    let (one, extent) = first(&engine, &bytes);
    let mut two = Loaded::new(&engine, &bytes);
    let memory = buffer(&engine, bytes.len() as u64 + 4096);
    memory.attach(1001, &extent, &|| false).unwrap();
    two.buffers[0] = Arc::clone(&memory);
    // 20 rows of what is there.
    let there = 4096..4096 + 20 * 2880 / 32 * 18;
    let weights = tensor(WEIGHTS, Type::Q4_0, [2880, 20, 1, 1], there.start);
    let part = content_of(Type::Q4_0, size(&weights), 5);
    memory.write(there.start, part[..].into()).unwrap();
    let read = |memory: &Arc<dyn Memory>| {
        let mut out = vec![1; part.len()];
        memory.read(there.start, out.as_mut_slice().into()).unwrap();
        out
    };
    assert!(read(&memory) == part);
    let graph = product(weights, 2);
    let mut plan = plan(&two, &engine, &graph);
    plan.run().unwrap();
    let mut alone = vec![0; there.start as usize];
    alone.extend_from_slice(&part);
    assert_close(
        &two.result(&graph),
        &plain_result(&alone, &graph),
        "aligned",
    );
    assert!(read(&memory) == part);
    assert!(all(&one) == bytes);
}

#[test]
fn extent_of_a_lost_device_has_no_bytes() {
    let (engine, device) = engine();
    let bytes = content();
    let (one, extent) = first(&engine, &bytes);
    assert_eq!(extent.filled(), extent.size());
    let mut plan = plan(&one, &engine, &product(weights(), 1));
    device.fail(Fails::Launch(0));
    assert!(plan.run().is_err());
    assert_eq!(extent.filled(), 0);
    let outcome = extent.read(0, &mut [0]);
    let is_lost = matches!(outcome, Err(EngineError::DeviceLost { .. }));
    assert!(is_lost, "{outcome:?}");
    assert!(one.weights().attach(0, &extent, &|| false).is_err());
}
