//! Copies in the order of the backend's graphs, over a stand-in for a GPU with a queue that is
//! carried out by `synchronize` only: a copy that is not in order, or that nobody waits for, leaves
//! wrong bytes.

#[path = "../../../tests/common/backend_counters.rs"]
mod backend_counters;
#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod graphs;

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_counters::{counters, set};
use changed_backend::{Changes, Queue, changed_backend};
use graphs::{Place, floats, graph_over, put};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, Memory, Plan, RunStatus, Turn};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{Op, Type};

const KIB: u64 = 1 << 10;

/// Elements of a vector, and its bytes.
const WIDTH: usize = 64;
const VECTOR: u64 = 4 * WIDTH as u64;

/// The vectors that a token writes.
const INPUTS: u64 = 6;

/// Runs in which pieces are measured, each alone.
const MEASURED: usize = 2;

const CUMSUM: &str = "GGML_OP_CUMSUM";

/// A GPU with a queue for graphs and copies.
fn gpu() -> Changes<'static> {
    Changes {
        end: "return compute_queued(backend, graph);",
        queue: Queue::GraphsAndCopies,
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    }
}

/// An engine over a changed backend.
struct Device {
    engine: GgmlEngine,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

/// What the backend has been called for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Calls {
    sets: i32,
    gets: i32,
    async_sets: i32,
    async_gets: i32,
    waits: i32,
    /// Whether graphs were computed: on a busy machine, a run can have more than one.
    computes: bool,
}

impl Device {
    fn start(changes: &Changes<'_>) -> Device {
        Device::with_options(changes, &BackendOptions::default())
    }

    fn with_options(changes: &Changes<'_>, options: &BackendOptions<'_>) -> Device {
        let folder = tempfile::tempdir().unwrap();
        let path = changed_backend(&common::cached(""), folder.path(), changes);
        let options = BackendOptions {
            threads: 1,
            memory: Some(1 << 30),
            ..*options
        };
        let cpu: Arc<dyn Engine> = Arc::new(CpuEngine::new(1, None).unwrap());
        Device {
            engine: GgmlEngine::start(&path, &options, cpu).unwrap(),
            path,
            _folder: folder,
        }
    }

    /// What the backend was called for since it was loaded.
    fn all_calls(&self) -> [i32; 8] {
        let all = counters::<8>(&self.path, c"calls").expect("loaded");
        assert_eq!(all[6..], [0, 0], "unpinned copies, and buffers freed early");
        all
    }

    /// What the backend is called for by `call`.
    fn called<T>(&self, call: impl FnOnce() -> T) -> (T, Calls) {
        let before = self.all_calls();
        let outcome = call();
        let after = self.all_calls();
        let [sets, gets, async_sets, async_gets, waits, graphs, ..] =
            [0, 1, 2, 3, 4, 5, 6, 7].map(|at: usize| after[at] - before[at]);
        let calls = Calls {
            sets,
            gets,
            async_sets,
            async_gets,
            waits,
            computes: graphs > 0,
        };
        (outcome, calls)
    }

    /// A guest with two buffers of `size` bytes and a plan over them.
    fn guest(&self, size: u64, tensors: &[Place], nodes: &[(Op, u32, &[u32])]) -> Guest {
        let valid = graph_over(&self.engine, size, tensors, nodes);
        let memory = [0, 1].map(|_| self.engine.alloc(size).unwrap());
        Guest {
            plan: self.engine.compile(&valid, &memory, &|| false).unwrap(),
            memory,
        }
    }

    /// A guest whose plan adds the vectors of the first buffer, into the first one of the second.
    fn adder(&self, size: u64) -> Guest {
        let result = INPUTS as u32;
        let mut nodes: Vec<(Op, u32, &[u32])> = vec![(Op::Add {}, result, &[0, 1])];
        let others = [[6, 2], [6, 3], [6, 4], [6, 5]];
        nodes.extend(others.iter().map(|of| (Op::Add {}, result, &of[..])));
        let mut guest = self.guest(size, &vectors(INPUTS, 1), &nodes);
        guest.measure();
        guest
    }
}

/// So many vectors in the first buffer, and in the second one.
fn vectors(first: u64, second: u64) -> Vec<Place> {
    let of = |buffer| move |at| (Type::F32, [WIDTH as u64, 1, 1, 1], buffer, at * VECTOR);
    (0..first)
        .map(of(0))
        .chain((0..second).map(of(1)))
        .collect()
}

struct Guest {
    plan: Box<dyn Plan>,
    memory: [Arc<dyn Memory>; 2],
}

impl Guest {
    /// Runs the plan until the device's time is known.
    fn measure(&mut self) {
        for _ in 0..MEASURED {
            self.plan.run().unwrap();
        }
    }

    /// Writes the vectors of an [adder](Device::adder), which differ from token to token. Returns
    /// their sum.
    fn write_inputs(&self, token: u64) -> f32 {
        for at in 0..INPUTS {
            put(&*self.memory[0], at * VECTOR, &[(token * at) as f32; WIDTH]);
        }
        (0..INPUTS).map(|at| (token * at) as f32).sum()
    }

    fn launch(&mut self) {
        let status = self.plan.launch(&Turn::new());
        assert_eq!(status, Ok(RunStatus::InFlight));
    }

    fn result(&self) -> f32 {
        let values = floats(&*self.memory[1], 0, WIDTH);
        assert!(values.iter().all(|&value| value == values[0]), "{values:?}");
        values[0]
    }

    /// What the buffers have, all of each.
    fn bytes(&self) -> [Vec<u8>; 2] {
        [0, 1].map(|at: usize| all_bytes(&*self.memory[at]))
    }
}

fn all_bytes(memory: &dyn Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.size() as usize];
    memory.read(0, BytesMut::from(&mut bytes[..])).unwrap();
    bytes
}

fn write(memory: &dyn Memory, offset: u64, bytes: &[u8]) {
    memory.write(offset, Bytes::from(bytes)).unwrap();
}

#[test]
fn a_token_waits_for_the_device_once() {
    let device = Device::start(&gpu());
    let mut guest = device.adder(64 * KIB);
    for token in 1..6 {
        let ((result, expected), calls) = device.called(|| {
            let expected = guest.write_inputs(token);
            guest.launch();
            // As the executor does with a READ behind a SUBMIT.
            let result = guest.result();
            guest.plan.wait().unwrap();
            (result, expected)
        });
        assert_eq!(result, expected);
        let once = Calls {
            async_sets: INPUTS as i32,
            async_gets: 1,
            waits: 1,
            computes: true,
            ..Calls::default()
        };
        assert_eq!(calls, once);
    }
    // Without a read behind the graph, the wait is the plan's.
    let (expected, calls) = device.called(|| {
        let expected = guest.write_inputs(7);
        guest.launch();
        guest.plan.wait().unwrap();
        guest.plan.wait().unwrap();
        expected
    });
    assert_eq!((calls.sets, calls.gets, calls.waits), (0, 0, 1));
    let (result, calls) = device.called(|| guest.result());
    assert_eq!((result, calls.gets, calls.waits), (expected, 1, 0));
}

#[test]
fn a_plan_in_flight_can_be_launched_again_and_run_to_its_end() {
    let device = Device::start(&gpu());
    let mut guest = device.adder(64 * KIB);
    let (expected, calls) = device.called(|| {
        let expected = guest.write_inputs(1);
        guest.launch();
        guest.launch();
        guest.plan.run().unwrap();
        expected
    });
    assert_eq!((calls.waits, calls.computes), (3, true));
    assert_eq!(guest.result(), expected);
    // Another plan over the same memory waits for it, too.
    let valid = graph_over(
        &device.engine,
        64 * KIB,
        &vectors(1, 1),
        &[(Op::Add {}, 1, &[1, 0])],
    );
    let mut other = device
        .engine
        .compile(&valid, &guest.memory, &|| false)
        .unwrap();
    (0..MEASURED).for_each(|_| other.run().unwrap());
    let (first, calls) = device.called(|| {
        let expected = guest.write_inputs(2);
        guest.launch();
        assert_eq!(other.launch(&Turn::new()), Ok(RunStatus::InFlight));
        expected
    });
    assert_eq!((calls.waits, calls.computes), (1, true));
    guest.plan.wait().unwrap();
    // The first input is zero, and the result is that of both.
    assert_eq!(guest.result(), first);
    other.wait().unwrap();
    assert_eq!(
        device.called(|| guest.result()),
        (
            first,
            Calls {
                gets: 1,
                ..Calls::default()
            }
        )
    );
}

#[test]
fn a_backend_without_copies_in_order_or_pinned_memory_copies_at_once() {
    for queue in [Queue::Graphs, Queue::WithoutPinned] {
        let device = Device::start(&Changes { queue, ..gpu() });
        let mut guest = device.adder(64 * KIB);
        for token in 1..4 {
            let ((result, expected), calls) = device.called(|| {
                let expected = guest.write_inputs(token);
                assert_eq!(guest.plan.launch(&Turn::new()), Ok(RunStatus::Done));
                (guest.result(), expected)
            });
            assert_eq!(result, expected);
            let blocking = Calls {
                sets: INPUTS as i32,
                gets: 1,
                waits: 1,
                computes: true,
                ..Calls::default()
            };
            assert_eq!(calls, blocking);
        }
    }
}

#[test]
fn the_last_write_wins_in_any_sizes() {
    let size = 256 * KIB;
    let device = Device::start(&gpu());
    let mut guest = device.adder(size);
    let mut model = guest.bytes();
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for step in 0..1000u64 {
        let which = random(2) as usize;
        let memory = Arc::clone(&guest.memory[which]);
        // Mostly small, and near the beginning, where they overlap.
        let most = if random(4) == 0 { size } else { 2 * KIB };
        let offset = random(most);
        let len = 1 + random(most - offset);
        let range = offset as usize..(offset + len) as usize;
        match random(8) {
            0 => {
                memory.fill(offset, len, step as u8).unwrap();
                model[which][range].fill(step as u8);
            }
            1 => {
                let to = random(size - len + 1);
                memory
                    .copy_from(to, &*guest.memory[1 - which], offset, len)
                    .unwrap();
                let bytes = model[1 - which][range].to_vec();
                model[which][to as usize..(to + len) as usize].copy_from_slice(&bytes);
            }
            2 => {
                let mut bytes = vec![0; len as usize];
                memory.read(offset, BytesMut::from(&mut bytes[..])).unwrap();
                assert!(bytes == model[which][range], "{step}");
            }
            3 => {
                let sum = guest.write_inputs(step);
                for at in 0..INPUTS {
                    let input = ((step * at) as f32).to_le_bytes().repeat(WIDTH);
                    model[0][(at * VECTOR) as usize..][..input.len()].copy_from_slice(&input);
                }
                guest.launch();
                let result = sum.to_le_bytes().repeat(WIDTH);
                model[1][..result.len()].copy_from_slice(&result);
                match random(2) {
                    0 => assert_eq!(guest.result(), sum),
                    _ => guest.plan.wait().unwrap(),
                }
                guest.plan.wait().unwrap();
            }
            _ => {
                let bytes: Vec<u8> = (0..len).map(|_| random(256) as u8).collect();
                write(&*memory, offset, &bytes);
                model[which][range].copy_from_slice(&bytes);
            }
        }
    }
    assert!(guest.bytes() == model);
    let [sets, _, async_sets, ..] = device.all_calls();
    assert!(sets > 100 && async_sets > 100, "{sets} and {async_sets}");
}

#[test]
fn a_large_write_comes_behind_the_small_ones_before_it() {
    let device = Device::start(&gpu());
    let guest = device.adder(256 * KIB);
    let memory = &*guest.memory[0];
    let ((), calls) = device.called(|| {
        write(memory, 0, &[1; 64]);
        write(memory, 32, &[2; 64]);
    });
    assert_eq!(calls, Calls::default());
    let ((), calls) = device.called(|| write(memory, 0, &[3; 80 << 10]));
    assert_eq!(calls.sets, 3);
    let ((), calls) = device.called(|| write(memory, 8, &[4; 8]));
    assert_eq!(calls, Calls::default());
    let (bytes, calls) = device.called(|| all_bytes(memory));
    assert_eq!((calls.sets, calls.gets), (1, 1));
    let mut expected = vec![0; 256 << 10];
    expected[..80 << 10].fill(3);
    expected[8..16].fill(4);
    assert!(bytes == expected);
}

#[test]
fn the_other_engine_reads_what_was_written_and_the_device_what_it_leaves() {
    let device = Device::start(&Changes {
        lacks: CUMSUM,
        ..gpu()
    });
    // Two vectors of the guest, and the results.
    let tensors = vectors(2, 3);
    let mut guest = device.guest(
        64 * KIB,
        &tensors,
        &[
            (Op::Add {}, 2, &[0, 1]),
            (Op::Cumsum {}, 3, &[2]),
            (Op::Add {}, 4, &[3, 0]),
        ],
    );
    guest.measure();
    for token in 1..4u8 {
        let (values, calls) = device.called(|| {
            put(&*guest.memory[0], 0, &[f32::from(token); WIDTH]);
            put(&*guest.memory[0], VECTOR, &[1.0; WIDTH]);
            guest.launch();
            let values = floats(&*guest.memory[1], 2 * VECTOR, WIDTH);
            guest.plan.wait().unwrap();
            values
        });
        let sum = f32::from(token) + 1.0;
        let expected = (1..=WIDTH).map(|count| count as f32 * sum + f32::from(token));
        assert_eq!(values, expected.collect::<Vec<f32>>());
        // The node's tensors are read, and its result waits for the next graph.
        let expected = Calls {
            gets: 2,
            async_sets: 3,
            async_gets: 1,
            waits: 2,
            computes: true,
            ..Calls::default()
        };
        assert_eq!(calls, expected);
    }
    // A run that begins and ends with the other engine.
    let nodes = [(Op::Cumsum {}, 2, &[0][..]), (Op::Cumsum {}, 3, &[2])];
    let mut other = device.guest(64 * KIB, &tensors, &nodes);
    for token in 1..4u8 {
        put(&*other.memory[0], 0, &[f32::from(token); WIDTH]);
        assert_eq!(other.plan.launch(&Turn::new()), Ok(RunStatus::Done));
        let values = floats(&*other.memory[1], VECTOR, 3);
        assert_eq!(values, [1.0, 3.0, 6.0].map(|it| it * f32::from(token)));
    }
}

#[test]
fn writes_of_another_guest_are_not_overtaken_and_its_reads_do_not_wait() {
    let device = Device::start(&gpu());
    let mut running = device.adder(256 * KIB);
    let other = device.adder(256 * KIB);
    write(&*other.memory[0], 0, &[1; 64]);
    let expected = running.write_inputs(3);
    running.launch();
    let ((), calls) = device.called(|| {
        write(&*other.memory[0], 0, &[2; 80 << 10]);
        // In as many places as the writes have that the device is to carry out.
        (0..2 * INPUTS).for_each(|_| write(&*other.memory[0], 16, &[3; 16]));
        let mut bytes = [0; 64];
        { &*other.memory[0] }
            .read(0, BytesMut::from(&mut bytes[..]))
            .unwrap();
        assert_eq!((bytes[0], bytes[16], bytes[63]), (2, 3, 2));
    });
    assert_eq!((calls.waits, calls.computes), (0, false), "{calls:?}");
    running.plan.wait().unwrap();
    assert_eq!(running.result(), expected);
    let mut expected = vec![0; 256 << 10];
    expected[..80 << 10].fill(2);
    expected[16..32].fill(3);
    assert!(all_bytes(&*other.memory[0]) == expected);
}

#[test]
fn a_small_write_does_not_wait_for_the_device_that_another_guest_waits_for() {
    let device = Device::start(&Changes {
        node_time: 100_000,
        ..gpu()
    });
    let one = || device.guest(64 * KIB, &vectors(1, 1), &[(Op::Add {}, 1, &[0, 0])]);
    let (mut running, other) = (one(), one());
    running.measure();
    // A write that waited would take the rest of the 100 ms each time.
    let mut took = Vec::new();
    for _ in 0..5 {
        running.launch();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| running.plan.wait().unwrap());
            std::thread::sleep(Duration::from_millis(20));
            let begin = Instant::now();
            put(&*other.memory[0], 0, &[1.0; WIDTH]);
            took.push((begin.elapsed(), waiter.is_finished()));
            waiter.join().unwrap();
        });
        if took
            .last()
            .is_some_and(|(took, ended)| took.as_millis() < 40 && !ended)
        {
            return;
        }
    }
    panic!("the time of each write, and whether the wait had ended: {took:?}");
}

#[test]
fn a_plan_that_is_dropped_in_flight_is_waited_for() {
    let device = Device::start(&gpu());
    let mut guest = device.adder(64 * KIB);
    guest.write_inputs(1);
    guest.launch();
    let ((), calls) = device.called(|| drop(guest));
    assert_eq!((calls.waits, calls.computes), (1, true));
    // The plan is the last that has the memory.
    let Guest { mut plan, memory } = device.adder(64 * KIB);
    assert_eq!(plan.launch(&Turn::new()), Ok(RunStatus::InFlight));
    drop(memory);
    let ((), calls) = device.called(|| drop(plan));
    assert_eq!((calls.waits, calls.computes), (1, true));
    // Reads of memory whose plan is gone wait for nothing.
    let Guest { mut plan, memory } = device.adder(64 * KIB);
    assert_eq!(plan.launch(&Turn::new()), Ok(RunStatus::InFlight));
    drop(plan);
    let (_, calls) = device.called(|| floats(&*memory[1], 0, WIDTH));
    assert_eq!((calls.waits, calls.gets), (0, 1));
}

#[test]
fn a_failed_run_leaves_what_was_written_and_nothing_in_the_queue() {
    let device = Device::start(&Changes {
        end: "return refuses ? GGML_STATUS_FAILED : compute_queued(backend, graph);",
        ..gpu()
    });
    let mut guest = device.adder(64 * KIB);
    let refuses: &CStr = c"refuses";
    set(&device.path, refuses, 1);
    guest.write_inputs(5);
    let (outcome, calls) = device.called(|| guest.plan.launch(&Turn::new()));
    assert!(outcome.is_err(), "{outcome:?}");
    assert_eq!((calls.async_sets, calls.waits), (INPUTS as i32, 1));
    assert_eq!(floats(&*guest.memory[0], 3 * VECTOR, 1), [15.0]);
    set(&device.path, refuses, 0);
    let expected = guest.write_inputs(6);
    guest.launch();
    assert_eq!(guest.result(), expected);
}

#[test]
fn a_turn_that_ends_leaves_nothing_in_the_queue() {
    let device = Device::start(&Changes {
        node_time: 4000,
        ..gpu()
    });
    let mut guest = device.adder(64 * KIB);
    let expected = guest.write_inputs(2);
    let mut turns = 1;
    loop {
        let turn = Turn::new();
        turn.set_end(Some(Duration::ZERO));
        let (status, calls) = device.called(|| guest.plan.launch(&turn));
        match status.unwrap() {
            RunStatus::Yielded => assert_eq!((calls.waits, calls.computes), (1, true)),
            RunStatus::InFlight => break,
            RunStatus::Done => panic!("the last piece is in flight"),
        }
        turns += 1;
    }
    assert!(turns > 2, "{turns}");
    assert_eq!(guest.result(), expected);
    // A run that is cancelled between its turns: nothing is waited for when the plan is dropped.
    guest.plan.wait().unwrap();
    let turn = Turn::new();
    turn.set_end(Some(Duration::ZERO));
    assert_eq!(guest.plan.launch(&turn), Ok(RunStatus::Yielded));
    let ((), calls) = device.called(|| drop(guest));
    assert_eq!(calls, Calls::default());
}

#[test]
fn writes_that_have_no_room_to_wait_are_written_at_once() {
    const PART: usize = 64;
    let page = [7; 4 << 10];
    let size = 1 << 20;
    let device = Device::start(&gpu());
    let guests = [(); 5].map(|()| device.adder(size));
    let fill = |guest: &Guest, count: usize| {
        for at in 0..count {
            write(&*guest.memory[0], (at * page.len()) as u64, &page);
        }
    };
    // A buffer has a quarter of the room, and is written when it wants more.
    let ((), calls) = device.called(|| fill(&guests[0], PART));
    assert_eq!(calls, Calls::default());
    let ((), calls) = device.called(|| fill(&guests[0], 1));
    assert_eq!(calls.sets, PART as i32 + 1);
    let ((), calls) = device.called(|| guests[..4].iter().for_each(|guest| fill(guest, PART)));
    assert_eq!(calls, Calls::default());
    // All of it is taken, by buffers that no graph uses: others write at once.
    let ((), calls) = device.called(|| fill(&guests[4], 3));
    assert_eq!((calls.sets, calls.async_sets), (3, 0));
    for guest in &guests[..4] {
        assert!(
            all_bytes(&*guest.memory[0])[..PART << 12]
                .iter()
                .all(|&byte| byte == 7)
        );
    }
    assert!(
        all_bytes(&*guests[4].memory[0])[..3 << 12]
            .iter()
            .all(|&byte| byte == 7)
    );
    // Memory that is dropped gives its room back, and so does a run.
    for _ in 0..3 {
        guests[..4].iter().for_each(|guest| fill(guest, 1));
        let more = [(); 4].map(|()| device.engine.alloc(size).unwrap());
        let ((), calls) = device.called(|| {
            for memory in &more {
                (0..PART - 1).for_each(|at| write(&**memory, at as u64 * 4096, &page));
            }
        });
        assert_eq!(calls, Calls::default());
        let (_, calls) = device.called(|| guests.each_ref().map(|guest| guest.bytes()));
        assert_eq!(calls.sets, 4);
    }
    let [mut guest, ..] = guests;
    for token in 1..50 {
        let (expected, calls) = device.called(|| {
            fill(&guest, PART - INPUTS as usize);
            let expected = guest.write_inputs(token);
            guest.launch();
            expected
        });
        assert_eq!((calls.sets, guest.result()), (0, expected), "{token}");
    }
}

#[test]
fn a_large_read_comes_behind_the_graph() {
    const BIG: u64 = 3 << 20;
    let device = Device::start(&gpu());
    let tensors = [0, 1].map(|buffer| (Type::F32, [BIG / 4, 1, 1, 1], buffer, 0));
    let mut guest = device.guest(BIG, &tensors, &[(Op::Add {}, 1, &[0, 0])]);
    guest.measure();
    put(&*guest.memory[0], 0, &vec![1.5; (BIG / 4) as usize]);
    guest.launch();
    let (values, calls) = device.called(|| floats(&*guest.memory[1], 0, (BIG / 4) as usize));
    assert!(values.iter().all(|&value| value == 3.0));
    assert_eq!((calls.waits, calls.gets, calls.async_gets), (1, 1, 0));
    let ((), calls) = device.called(|| guest.plan.wait().unwrap());
    assert_eq!(calls.waits, 0);
    // Further reads before the wait, and one of memory that the plan does not use.
    guest.launch();
    assert_eq!(floats(&*guest.memory[1], 0, 2), [3.0, 3.0]);
    let (_, calls) = device.called(|| floats(&*guest.memory[1], 8, 2));
    assert_eq!((calls.waits, calls.gets), (0, 1));
    let mut too_much = [0; 8];
    let out = BytesMut::from(&mut too_much[..]);
    assert!(guest.memory[1].read(BIG - 4, out).is_err());
}

#[test]
fn reads_of_weights_that_a_graph_writes_come_behind_it() {
    let options = BackendOptions {
        shares_weights: Some(true),
        ..BackendOptions::default()
    };
    let device = Device::with_options(&gpu(), &options);
    let size = 4 << 20;
    let tensors = [0, 1].map(|buffer| (Type::F32, [size / 4, 1, 1, 1], buffer, 0));
    let nodes = [(Op::Add {}, 1, &[0, 0][..])];
    let valid = graph_over(&device.engine, size, &tensors, &nodes);
    let memory = [0, 1].map(|_| device.engine.alloc(size).unwrap());
    let weights = device
        .engine
        .alloc_weights(&memory[1])
        .unwrap()
        .expect("large enough");
    write(&*weights, 0, &vec![0; size as usize]);
    let buffers = [Arc::clone(&memory[0]), Arc::clone(&weights)];
    let plan = device.engine.compile(&valid, &buffers, &|| false);
    let mut guest = Guest {
        plan: plan.unwrap(),
        memory: buffers,
    };
    guest.measure();
    for token in 1..4u8 {
        put(&*guest.memory[0], 0, &[f32::from(token); WIDTH]);
        guest.launch();
        assert_eq!(floats(&*weights, 0, 1), [2.0 * f32::from(token)]);
        guest.plan.wait().unwrap();
    }
}

/// ggml's Vulkan backend is made anew once a buffer that a graph has used is freed.
#[test]
fn a_backend_that_is_made_anew_gets_what_waits() {
    let device = Device::start(&Changes {
        device_name: "Vulkan0",
        ..gpu()
    });
    let mut guest = device.adder(64 * KIB);
    let made = || counters::<1>(&device.path, c"made").unwrap();
    for token in 1..4 {
        let before = made();
        let expected = guest.write_inputs(token);
        drop(device.adder(64 * KIB));
        guest.launch();
        assert_eq!(made()[0], before[0] + 1);
        assert_eq!(guest.result(), expected);
        guest.plan.wait().unwrap();
    }
    // There is no new one: the writes are not lost.
    guest.write_inputs(9);
    drop(device.adder(64 * KIB));
    set(&device.path, c"refuses_backends", 1);
    assert!(guest.plan.launch(&Turn::new()).is_err());
    assert_eq!(floats(&*guest.memory[0], 3 * VECTOR, 1), [27.0]);
}
