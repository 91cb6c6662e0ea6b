//! What a guest cannot do with weights that buffers share: write into the bytes of others, and make
//! the device copy more than a few times its own bytes.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vgpu_cuda::LaunchPolicy;
use vgpu_engine::{Engine, EngineError, RunError};
use vgpu_gguf::Rng;
use vgpu_transport::ir::{Graph, Op, Tensor, Type};

use crate::engine_with;
use crate::repack::{Loaded, OTHERS, WEIGHTS, graph, product, tensor};
use crate::shared_weights::{BESIDE, all, buffer, content, engine, free, next};
use crate::spy::Spy;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// `dst = a + a` on f32 at the start of the other buffer, into the weights.
fn into_weights(offset: u64, bytes: u64) -> Graph {
    let dst = tensor(WEIGHTS, Type::F32, [bytes / 4, 1, 1, 1], offset);
    let a = tensor(OTHERS, Type::F32, [bytes / 4, 1, 1, 1], 0);
    graph(&[dst, a], &[(Op::Add {}, 0, &[1, 1])])
}

/// Sums of tensors of the weights with themselves, into the other buffer.
fn readers(tensors: &[Tensor]) -> Graph {
    let mut table = tensors.to_vec();
    let mut nodes = Vec::new();
    for (i, it) in tensors.iter().enumerate() {
        table.push(tensor(OTHERS, Type::F32, it.shape.ne, 0));
        nodes.push([i as u32, (tensors.len() + i) as u32]);
    }
    let nodes: Vec<(Op, u32, [u32; 2])> = { nodes.iter() }
        .map(|&[from, to]| (Op::Add {}, to, [from, from]))
        .collect();
    let nodes: Vec<(Op, u32, &[u32])> = { nodes.iter() }
        .map(|(op, to, from)| (*op, *to, &from[..]))
        .collect();
    graph(&table, &nodes)
}

#[test]
fn plan_from_before_the_seal_does_not_write_into_the_bytes_of_others() {
    let (engine, _) = engine();
    let bytes = content();
    let (start, end) = (BESIDE as usize, bytes.len() - BESIDE as usize);
    let len = (end - start) as u64;
    // The plan is compiled before the seal, or between the seal and the extent.
    for is_sealed in [false, true] {
        let mut one = Loaded::new(&engine, &bytes);
        let memory = buffer(&engine, bytes.len() as u64);
        memory.write(0, bytes[..start].into()).unwrap();
        memory.write(end as u64, bytes[end..].into()).unwrap();
        let begun = memory.begin_extent(BESIDE, len).unwrap();
        memory.append(&begun, bytes[start..end].into()).unwrap();
        drop(begun);
        one.buffers[0] = Arc::clone(&memory);
        if is_sealed {
            assert!(memory.freeze());
        }
        let graph = into_weights(BESIDE, len / 4 * 4);
        let mut plan = one.compile(&engine, &graph);
        let extent = match is_sealed {
            // What a plan may write to is no extent.
            true => {
                assert!(memory.extent(BESIDE, len).is_err());
                continue;
            }
            false => {
                assert!(memory.freeze());
                assert!(!plan.is_current());
                memory.extent(BESIDE, len).unwrap()
            }
        };
        let two = next(&engine, &bytes, &extent);
        assert_eq!(plan.run(), Err(RunError::Stale));
        assert!(all(&two) == bytes);
        // Compiled again, it writes to a copy.
        plan = one.compile(&engine, &graph);
        plan.run().unwrap();
        assert!(all(&two) == bytes);
        assert!(all(&one) != bytes);
    }
}

#[test]
fn plan_is_stale_once_a_piece_is_an_extent() {
    let (engine, _) = engine();
    let bytes = content();
    let mut one = Loaded::new(&engine, &bytes);
    let memory = buffer(&engine, bytes.len() as u64);
    memory.write(0, bytes[..].into()).unwrap();
    one.buffers[0] = Arc::clone(&memory);
    assert!(memory.freeze());
    let reader = readers(&[tensor(WEIGHTS, Type::F32, [64, 1, 1, 1], 0)]);
    let plan = one.compile(&engine, &reader);
    assert!(plan.is_current());
    memory.extent(0, bytes.len() as u64).unwrap();
    assert!(!plan.is_current());
}

/// A load without names: the writes do not end where tensors do. Each byte is copied a few times at
/// most when a graph needs all tensors, and also when they overlap.
#[test]
fn tensors_in_many_pieces_are_copied_a_few_times() {
    const EACH: u64 = 24 * KIB;
    const COUNT: u64 = 200;
    let size = COUNT * EACH;
    let device = Arc::new(Spy::with_memory(512 << 20));
    let engine = engine_with(&device, LaunchPolicy::default());
    let mut random = Rng::new(7, 0);
    let bytes: Vec<u8> = (0..size).map(|_| random.below(256) as u8).collect();
    // Each tensor alone, or with half of the next one.
    for of_tensor in [EACH, EACH + EACH / 2] {
        let mut one = Loaded::new(&engine, &bytes);
        let memory = buffer(&engine, size);
        for (i, part) in bytes.chunks(10_000).enumerate() {
            memory.write(10_000 * i as u64, part.into()).unwrap();
        }
        one.buffers[0] = Arc::clone(&memory);
        let tensors: Vec<Tensor> = (0..COUNT - 1)
            .map(|i| tensor(WEIGHTS, Type::F32, [of_tensor / 4, 1, 1, 1], i * EACH))
            .collect();
        device.take_copied();
        let plan = one.compile(&engine, &readers(&tensors));
        let copied = device.take_copied();
        assert!(plan.is_current());
        assert!(copied <= 3 * size, "{copied} bytes of {size}");
        assert!(all(&one) == bytes);
        // Nothing moves again.
        let again = one.compile(&engine, &readers(&tensors));
        assert_eq!(device.take_copied(), 0);
        assert!(plan.is_current() && again.is_current());
        assert!(memory.freeze());
    }
}

/// From some thousands of pieces on, a write gets a piece with more than its bytes.
#[test]
fn many_small_writes_keep_their_bytes_and_tensors_stay_aligned() {
    const SIZE: u64 = 24 * MIB;
    const STEP: u64 = 1088;
    let (engine, device) = engine();
    let mut one = Loaded::new(&engine, &[0; SIZE as usize]);
    let memory = buffer(&engine, SIZE);
    let mut bytes = vec![0; SIZE as usize];
    // An extent whose end is no multiple of the alignment.
    memory.begin_extent(20 * MIB, 64 * KIB + 1).unwrap();
    for at in (0..20 * MIB).step_by(STEP as usize) {
        memory.write(at, [1, 2, 3, 4][..].into()).unwrap();
        bytes[at as usize..][..4].copy_from_slice(&[1, 2, 3, 4]);
    }
    assert!(memory.bytes_in_use() < SIZE);
    one.buffers[0] = Arc::clone(&memory);
    assert!(all(&one) == bytes);
    device.take_copied();
    // This one was never written. Its kernel reads several bytes at a time.
    let at = 20 * MIB + 64 * KIB + 256;
    let weights = product(tensor(WEIGHTS, Type::Q4_0, [2880, 20, 1, 1], at), 2);
    one.compile(&engine, &weights).run().unwrap();
    assert!(one.result(&weights).iter().all(|&x| x == 0.0));
    let tensors = [0, STEP * 256, MIB].map(|at| tensor(WEIGHTS, Type::F32, [300, 1, 1, 1], at));
    let graph = readers(&tensors);
    let mut plan = one.compile(&engine, &graph);
    plan.run().unwrap();
    assert!(all(&one) == bytes);
    assert!(device.take_copied() < MIB);
}

#[test]
fn extent_inside_a_large_piece_is_no_reason_to_copy_the_piece() {
    let device = Arc::new(Spy::with_memory(512 << 20));
    let engine = engine_with(&device, LaunchPolicy::default());
    let memory = buffer(&engine, 8 * MIB);
    memory.fill(0, 8 * MIB, 7).unwrap();
    assert!(memory.begin_extent(MIB, 64 * KIB).is_err());
    let source = buffer(&engine, 64 * KIB);
    source.fill(0, 64 * KIB, 3).unwrap();
    assert!(source.freeze());
    let extent = source.extent(0, 64 * KIB).unwrap();
    device.take_copied();
    // The bytes come, but are not shared.
    assert_eq!(memory.attach(MIB, &extent, &|| false), Ok(0));
    assert_eq!(device.take_copied(), 64 * KIB);
    let mut read = vec![0; 8 * MIB as usize];
    memory.read(0, read.as_mut_slice().into()).unwrap();
    let (start, end) = (MIB as usize, (MIB + 64 * KIB) as usize);
    assert!(read[..start].iter().chain(&read[end..]).all(|&x| x == 7));
    assert!(read[start..end].iter().all(|&x| x == 3));
    assert!(memory.freeze());
    assert!(memory.extent(2 * MIB, 64 * KIB).is_err());
    // Frozen memory has the bytes of an extent already.
    assert_eq!(memory.attach(MIB, &extent, &|| false), Ok(0));
    assert_eq!(device.take_copied(), 0);
    assert!(memory.is_unmodified());
    // Small pieces are cut.
    let small = buffer(&engine, MIB);
    small.fill(0, MIB, 7).unwrap();
    assert_eq!(
        small.attach(64 * KIB, &extent, &|| false),
        Ok(64 * KIB),
        "shared"
    );
}

#[test]
fn copy_of_a_large_piece_can_be_cancelled() {
    const SIZE: u64 = 200 * MIB;
    let device = Arc::new(Spy::with_memory(2 << 30));
    let engine = engine_with(&device, LaunchPolicy::default());
    let one = buffer(&engine, SIZE);
    one.fill(0, SIZE, 5).unwrap();
    assert!(one.freeze());
    let extent = one.extent(0, SIZE).unwrap();
    let two = buffer(&engine, SIZE);
    assert_eq!(two.attach(0, &extent, &|| false), Ok(SIZE));
    let before = free(&engine);
    let left = Cell::new(3);
    let is_cancelled = || {
        left.set(left.get() - 1);
        left.get() == 0
    };
    device.take_copied();
    let outcome = two.unshare(0, 1, &is_cancelled);
    assert_eq!(outcome, Err(EngineError::Cancelled));
    assert_eq!(device.take_copied(), 64 * MIB);
    assert_eq!(free(&engine), before);
    two.unshare(0, 1, &|| false).unwrap();
    assert_eq!(device.take_copied(), SIZE);
}

#[test]
fn no_other_allocation_finds_reserved_memory_free() {
    const TOTAL: u64 = 400 * MIB;
    const SIZE: u64 = 200 * MIB;
    let device = Arc::new(Spy::with_memory(TOTAL));
    let engine = Arc::new(engine_with(&device, LaunchPolicy::default()));
    let memory = buffer(&*engine, SIZE);
    let unreserved = free(&engine);
    assert!(unreserved < TOTAL - SIZE);
    let most = Arc::new(AtomicU64::new(0));
    device.on_alloc(Some(Arc::new({
        let (engine, most) = (Arc::downgrade(&engine), Arc::clone(&most));
        move || {
            let engine = engine.upgrade().expect("the engine allocates");
            // As another guest does: this thread has the lock of the weights.
            let other = std::thread::spawn(move || engine.memory().free);
            most.fetch_max(other.join().expect("an answer"), Ordering::Relaxed);
        }
    })));
    for at in (0..SIZE).step_by(20 * MIB as usize) {
        memory.fill(at, 20 * MIB, 1).unwrap();
        let outcome = engine.alloc(unreserved + MIB).map(drop);
        assert!(matches!(outcome, Err(EngineError::OutOfMemory { .. })));
    }
    device.on_alloc(None);
    let most = most.load(Ordering::Relaxed);
    assert!(most > 0 && most <= unreserved, "{most} of {unreserved}");
    assert_eq!(free(&engine), unreserved);
    assert_eq!(memory.bytes_in_use(), SIZE);
}
