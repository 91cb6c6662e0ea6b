//! Memory: suballocation, zeroed memory, and a device that fails.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vgpu_cuda::CudaEngine;
use vgpu_cuda::device::Device;
use vgpu_engine::{Engine, EngineError};
use vgpu_transport::bytes::Mapped;

use crate::engine_on;
use crate::spy::{Call, Fails, Spy};
use vgpu_check::model::{StepShape, TINY};

const MIB: u64 = 1 << 20;

fn allocations(log: &[Call]) -> Vec<u64> {
    { log.iter() }
        .filter_map(|call| match call {
            Call::Alloc(size) => Some(*size),
            _ => None,
        })
        .collect()
}

#[test]
fn small_allocations_are_suballocated() {
    let device = Arc::new(Spy::with_memory(1024 * MIB));
    let engine = engine_on(&device);
    device.take_log();
    let before = engine.memory();
    let mut held: Vec<_> = (1..=100).map(|i| engine.alloc(i * 1000).unwrap()).collect();
    let log = device.take_log();
    assert!(
        allocations(&log).is_empty(),
        "the first chunk has room: {log:?}"
    );
    let taken: u64 = (1..=100u64).map(|i| (i * 1000).next_multiple_of(256)).sum();
    assert_eq!(engine.memory().free, before.free - taken);

    // A new allocation does not show what another user wrote.
    for memory in &held {
        memory.fill(0, memory.size(), 0xee).unwrap();
    }
    held.clear();
    assert_eq!(engine.memory(), before);
    for i in 1..=100 {
        let memory = engine.alloc(i * 1000).unwrap();
        let mut bytes = vec![1; memory.size() as usize];
        memory.read(0, bytes.as_mut_slice().into()).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));
        held.push(memory);
    }
    assert!(allocations(&device.take_log()).is_empty());

    // Large allocations come from the device, and return to it.
    let large = engine.alloc(100 * MIB).unwrap();
    assert_eq!(allocations(&device.take_log()), [100 * MIB]);
    drop(large);
    assert_eq!(device.take_log(), [Call::Free(100 * MIB)]);
}

#[test]
fn allocation_failure_affects_only_the_requesting_guest() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let engine = engine_on(&device);
    let neighbour = engine.alloc(1000).unwrap();
    neighbour.fill(0, 1000, 7).unwrap();
    // Unused chunks make room for large allocations.
    let parts: Vec<_> = (0..12).map(|_| engine.alloc(16 * MIB).unwrap()).collect();
    drop(parts);
    let large = engine
        .alloc(400 * MIB)
        .expect("spare chunks are given back");
    let info = engine.memory();
    let error = engine.alloc(200 * MIB).unwrap_err();
    assert_eq!(
        error,
        EngineError::OutOfMemory {
            wanted: 200 * MIB,
            free: info.free,
            total: 512 * MIB
        }
    );
    let mut bytes = [0; 1000];
    neighbour.read(0, bytes.as_mut_slice().into()).unwrap();
    assert_eq!(bytes, [7; 1000]);
    drop(large);
    engine.alloc(200 * MIB).expect("there is room again");
}

/// An engine that reopens a lost device, and all its devices.
fn reopening_engine() -> (CudaEngine, Arc<Mutex<Vec<Arc<Spy>>>>) {
    let devices = Arc::new(Mutex::new(vec![Arc::new(Spy::running())]));
    let first = Arc::clone(&devices.lock().unwrap()[0]);
    let more = Arc::clone(&devices);
    let engine = engine_on(&first).with_reopen(move || {
        let device = Arc::new(Spy::running());
        more.lock().unwrap().push(Arc::clone(&device));
        Ok(device as Arc<dyn Device>)
    });
    (engine, devices)
}

#[test]
fn device_is_reset_after_a_permanent_failure() {
    let (engine, devices) = reopening_engine();
    let first = Arc::clone(&devices.lock().unwrap()[0]);
    let built = TINY.graph(StepShape {
        tokens: 1,
        seen: 32,
    });
    // Two guests.
    let (mine, theirs) = (built.load(&engine), built.load(&engine));
    let mut my_plan = built.compile(&engine, &mine);
    let mut their_plan = built.compile(&engine, &theirs);
    for (loaded, plan) in [(&mine, &mut my_plan), (&theirs, &mut their_plan)] {
        built.write_inputs(loaded, 0);
        plan.run().unwrap();
    }
    let want = built.read_result(&theirs);
    first.fail(Fails::Launch(0));
    let error = my_plan.run().unwrap_err().to_string();
    assert!(error.contains("illegal memory access"), "{error}");

    // The other guest learns that its memory is lost, whatever it calls.
    let lost = |error: String| {
        assert!(error.contains("illegal memory access"), "{error}");
        assert!(
            error.contains("the contents of its memory are lost"),
            "{error}"
        );
    };
    lost(their_plan.run().unwrap_err().to_string());
    let mut byte = [0];
    let memory = &theirs.buffers[0];
    lost(
        memory
            .read(0, byte.as_mut_slice().into())
            .unwrap_err()
            .to_string(),
    );
    lost(
        memory
            .write(0, byte.as_slice().into())
            .unwrap_err()
            .to_string(),
    );
    lost(memory.fill(0, 1, 0).unwrap_err().to_string());
    lost(
        { engine.compile(&built.valid(&engine), &theirs.buffers, &|| false) }
            .err()
            .unwrap()
            .to_string(),
    );
    let log = first.take_log();
    assert_eq!(log.iter().filter(|call| **call == Call::Abandon).count(), 1);

    // The next guest is served.
    let next = built.load(&engine);
    let mut plan = built.compile(&engine, &next);
    built.write_inputs(&next, 0);
    plan.run().unwrap();
    assert_eq!(built.read_result(&next), want);
    assert_eq!(devices.lock().unwrap().len(), 2);
    // The memory and the plans of the old device are dropped without harm while the new device is
    // in use.
    drop((my_plan, their_plan, mine, theirs));
    plan.run().unwrap();
    // Memory of the two devices is not mixed.
    assert!(engine.memory().free > 0);
}

#[test]
fn recovery_of_a_lost_device_is_not_attempted_on_every_call() {
    let device = Arc::new(Spy::running());
    let tries = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&tries);
    let engine = engine_on(&device).with_reopen(move || {
        count.fetch_add(1, Ordering::Relaxed);
        Err(EngineError::Device {
            message: "no such device".into(),
        })
    });
    let built = TINY.graph(StepShape {
        tokens: 1,
        seen: 32,
    });
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    device.fail(Fails::Launch(3));
    plan.run().unwrap_err();
    for _ in 0..10 {
        let error = engine.alloc(1).unwrap_err().to_string();
        assert!(error.contains("restart vgpu serve"), "{error}");
        assert!(error.contains("no such device"), "{error}");
        assert_eq!(engine.memory().free, 0);
    }
    assert_eq!(tries.load(Ordering::Relaxed), 1);
}

#[test]
fn device_is_unrecoverable_after_repeated_failed_resets() {
    let device = Arc::new(Spy::running());
    let can_reopen = Arc::new(AtomicBool::new(false));
    let works = Arc::clone(&can_reopen);
    let engine = engine_on(&device)
        .with_reopen(move || match works.load(Ordering::Relaxed) {
            true => Ok(Arc::new(Spy::running()) as Arc<dyn Device>),
            false => Err(EngineError::Device {
                message: "no such device".into(),
            }),
        })
        .with_retry_delay(Duration::ZERO);
    let lose = |device: &Spy| {
        let built = TINY.graph(StepShape {
            tokens: 1,
            seen: 32,
        });
        let loaded = built.load(&engine);
        let mut plan = built.compile(&engine, &loaded);
        device.fail(Fails::Launch(0));
        plan.run().unwrap_err();
    };
    assert_eq!(engine.fatal_error(), None, "it works");
    lose(&device);
    assert_eq!(engine.fatal_error(), None, "one attempt");
    can_reopen.store(true, Ordering::Relaxed);
    assert_eq!(engine.fatal_error(), None, "it works again");
    engine.alloc(1).unwrap();

    let device = Arc::new(Spy::running());
    let engine = engine_on(&device)
        .with_reopen(|| {
            Err(EngineError::Device {
                message: "no such device".into(),
            })
        })
        .with_retry_delay(Duration::ZERO);
    let built = TINY.graph(StepShape {
        tokens: 1,
        seen: 32,
    });
    let loaded = built.load(&engine);
    let mut plan = built.compile(&engine, &loaded);
    device.fail(Fails::Launch(0));
    plan.run().unwrap_err();
    let found: Vec<bool> = (0..4).map(|_| engine.fatal_error().is_some()).collect();
    assert_eq!(found, [false, false, true, true]);
    let reason = engine.fatal_error().unwrap();
    assert!(reason.contains("illegal memory access"), "{reason}");
}

/// A megabyte of this process.
struct Megabyte(Vec<u8>);

impl Megabyte {
    fn new() -> Arc<Megabyte> {
        Arc::new(Megabyte(vec![0; 1 << 20]))
    }
}

// SAFETY: nothing changes the vector, so that its bytes stay where they are.
unsafe impl Mapped for Megabyte {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut()
    }

    fn size(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn pinned_memory_stays_mapped_until_unpinned() {
    let device = Arc::new(Spy::logging());
    let engine = engine_on(&device);
    device.take_log();
    let memory = Megabyte::new();
    let weak = Arc::downgrade(&memory);
    let pinned = engine.pin(memory).expect("it can be prepared");
    assert_eq!(device.take_log(), [Call::Pin(1 << 20)]);
    assert!(weak.upgrade().is_some(), "it stays mapped as long");
    drop(pinned);
    assert_eq!(device.take_log(), [Call::Unpin]);
    assert!(weak.upgrade().is_none());
    // If the memory cannot be page-locked, nothing is lost.
    device.fail(Fails::Pinning);
    assert!(engine.pin(Megabyte::new()).is_none());
    assert!(device.take_log().is_empty());
}
