//! A hostile driver in a virtual machine. The driver overwrites the window with random values while
//! commands run, and rings the doorbell without end. No other guest may be affected.

mod common;
mod machine;

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vgpu_gguf::Rng;
use vgpu_transport::link::pci::directory;
use vgpu_transport::shm::layout;
use vgpu_transport::shm::memory::{SharedWords, Window};
use vgpu_transport::wire::GraphId;

use common::{Guest, add, bytes, floats, wait_for};
use machine::{Dir, Machine, executor};

/// Duration of the attack.
const ATTACK: Duration = Duration::from_secs(8);

/// A value at which code fails: a small one, a huge one, or a neighbour of the present value.
fn boundary_value(random: &mut Rng, present: u64) -> u64 {
    match random.next_u64() % 8 {
        0 => 0,
        1 => u64::MAX,
        2 => random.next_u64() % 4096,
        3 => present.wrapping_add(64),
        4 => present.wrapping_sub(64),
        5 => 1 << (random.next_u64() % 64),
        6 => present ^ 1 << (random.next_u64() % 64),
        _ => random.next_u64(),
    }
}

/// Writes random values to the window: mostly to control words, sometimes to rings, the bulk area
/// and the directory.
fn attack(memory: &Window, size: usize, stop: &AtomicBool, seed: u64, writes: &AtomicU64) {
    let mut random = Rng::new(seed, 0);
    let slot_size = size / directory::PARTS;
    while !stop.load(Ordering::Relaxed) {
        let slot = (random.next_u64() as usize % directory::SLOTS + 1) * slot_size;
        let offset = match random.next_u64() % 16 {
            0 => random.next_u64() as usize % directory::PAGE,
            1..=9 => slot + random.next_u64() as usize % layout::PAGE,
            10..=13 => slot + layout::PAGE + random.next_u64() as usize % (300 << 10),
            _ => slot + random.next_u64() as usize % slot_size,
        } & !7;
        let present = memory.load(offset);
        memory.store(offset, boundary_value(&mut random, present));
        writes.fetch_add(1, Ordering::Relaxed);
        // The pauses let commands run between the writes.
        if random.next_u64().is_multiple_of(4) {
            thread::sleep(Duration::from_micros(random.next_u64() % 300));
        }
        if random.next_u64().is_multiple_of(2000) {
            thread::sleep(Duration::from_millis(random.next_u64() % 50));
        }
        if offset < 0x100 {
            // With a wrong header of the directory, the programs of this machine cannot connect.
            memory.store(offset, present);
        }
    }
}

/// A step of a guest that keeps to the protocol. The expected results are known.
fn step(guest: &mut Guest, i: u64) -> Vec<f32> {
    let values: Vec<f32> = (0..1024).map(|k| (k as u64 + i) as f32).collect();
    let a = guest.alloc_with(&bytes(&values));
    let b = guest.alloc_with(&bytes(&values));
    let c = guest.alloc(4096);
    guest.graph(GraphId(i), &add(1024, c, a, b));
    guest.submit(GraphId(i));
    let sum = floats(&guest.read(c, 0, 4096));
    guest.send(&vgpu_transport::wire::Request::Forget { graph: GraphId(i) });
    for buffer in [a, b, c] {
        guest.send(&vgpu_transport::wire::Request::Free { buffer });
    }
    sum
}

/// A program in the attacked machine: sends requests, and ignores all failures.
fn run_sessions(machine: &Machine, stop: &AtomicBool, sessions: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        let Ok(end) = machine.try_connect(Duration::from_millis(200)) else {
            continue;
        };
        sessions.fetch_add(1, Ordering::Relaxed);
        // The guest's end may detect the broken window at any point. `Guest` then panics, which is
        // allowed.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut guest = Guest::new(Box::new(end));
            guest.hello();
            for i in 1..1000 {
                step(&mut guest, i);
            }
        }));
    }
}

#[test]
fn hostile_virtual_machine_affects_only_its_own_sessions() {
    let dir = Dir::new();
    let server = executor(&dir.0, &["bad", "good"], 0);
    let bad = Machine::plug(&dir.0.join("bad.sock"));
    let good = Machine::plug(&dir.0.join("good.sock"));
    let size = rustix::fs::fstat(&bad.memory).unwrap().st_size as usize;
    let memory = Window::map(bad.memory.as_fd(), size).unwrap();
    let untouched = Window::map(good.memory.as_fd(), size).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (writes, rings, sessions) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));

    let mut guest = good.guest();
    let mut steps = 0;
    let epoch = untouched.load(directory::word::EPOCH);
    thread::scope(|scope| {
        let (memory, bad, stop) = (&memory, &bad, &*stop);
        let (writes, rings, sessions) = (&writes, &rings, &sessions);
        for seed in 1..3 {
            scope.spawn(move || attack(memory, size, stop, seed * 0x9e37_79b9, writes));
        }
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let _ = rustix::io::write(&bad.bell, &1u64.to_ne_bytes());
                if rings.fetch_add(1, Ordering::Relaxed).is_multiple_of(100) {
                    // The other threads of the test need processor time.
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        scope.spawn(move || run_sessions(bad, stop, sessions));
        let began = Instant::now();
        while began.elapsed() < ATTACK {
            steps += 1;
            let sum = step(&mut guest, steps);
            for (k, value) in sum.iter().enumerate() {
                assert_eq!(*value, 2.0 * (k as u64 + steps) as f32, "step {steps}");
            }
        }
        stop.store(true, Ordering::Relaxed);
        // Close the machine first: one of its programs may wait for a reply that the attack has
        // overwritten.
        bad.line.shutdown(std::net::Shutdown::Both).unwrap();
    });
    let [writes, rings, sessions] = [&writes, &rings, &sessions].map(|n| n.load(Ordering::Relaxed));
    println!(
        "{writes} writes, {rings} rings, {sessions} sessions of the attacked machine; {steps} good \
         steps"
    );
    assert!(writes > 1000 && rings > 100 && steps > 10 && sessions > 2);
    assert_eq!(untouched.load(directory::word::EPOCH), epoch);

    // No session of the machine is left, and the other guest still computes.
    drop(memory);
    drop(bad);
    wait_for("the end of the attacked sessions", || {
        server.sessions().len() == 1
    });
    assert_eq!(step(&mut guest, steps + 1)[0], 2.0 * (steps + 1) as f32);
    // All memory of its sessions is free again.
    let again = Machine::plug(&dir.0.join("bad.sock"));
    let mut guest = again.guest();
    guest.alloc(common::MEMORY / 2);
}
