//! Guests on the CUDA engine, whose kernels run on the CPU here.

mod common;
#[path = "../../host-kernels/shim/device.rs"]
mod shim;
#[path = "../../host-kernels/check/tests/cuda/spy.rs"]
#[allow(dead_code)] // the tests of the kernels use more of the module
mod spy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::model::{for_weights, lookup, read_all, upload, write};
use common::weights::{FIRST, MODEL, SECOND, SMALL, first, guest, load, model, parts};
use common::{Build, Host, TIMEOUT, add, bytes, floats, wait_for};
use spy::{Call, Fails, Spy};
use vgpu_cuda::CudaEngine;
use vgpu_cuda::device::Device;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{GuestRule, Limits, Policy, Rules, WeightStore};
use vgpu_transport::ir::{BufferId, Graph, Op, PoolKind, Precision, Type};
use vgpu_transport::size::shown;
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, Reply, Request};

const MIB: u64 = 1 << 20;
const GRAPH: GraphId = GraphId(7);

fn host_on(device: &Arc<Spy>) -> Host {
    let device: Arc<dyn Device> = Arc::clone(device) as Arc<dyn Device>;
    Host::new(Arc::new(CudaEngine::new(device).expect("an engine")))
}

#[test]
fn out_of_memory_is_an_error_to_that_guest_only() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let (mut large_guest, mut small_guest) = (host.guest(), host.guest());
    let a = small_guest.alloc_with(&bytes(&[1.0; 4]));
    let held = large_guest.alloc(300 * MIB);
    let buffer = large_guest.new_buffer();
    let size = 300 * MIB;
    let reply = large_guest.ask(&Request::Alloc { buffer, size });
    let Reply::Refused { reason, .. } = reply else {
        panic!("{reply:?}")
    };
    assert!(reason.contains("memory"), "{reason}");
    // This session and all other sessions continue.
    large_guest.fence();
    small_guest.graph(GRAPH, &add(4, a, a, a));
    small_guest.submit(GRAPH);
    assert_eq!(floats(&small_guest.read(a, 0, 16)), [2.0; 4]);
    // Freed memory is zeroed before another guest gets it.
    large_guest.send_with(
        &Request::Fill {
            buffer: held,
            offset: 0,
            len: 300 * MIB,
            value: 9,
        },
        &[],
    );
    large_guest.send(&Request::Free { buffer: held });
    large_guest.fence();
    let large = small_guest.alloc(300 * MIB);
    assert_eq!(small_guest.read(large, 100 * MIB, 64), [0; 64]);
}

#[test]
fn a_guest_at_its_quota_is_refused_while_the_device_has_memory_for_others() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let alice = GuestRule {
        name: "alice".into(),
        uids: vec![1],
        cids: Vec::new(),
        certificates: Vec::new(),
        policy: Policy {
            memory: Some(100 * MIB),
            ..Policy::default()
        },
    };
    let rules = Rules {
        guests: vec![alice],
        ..Rules::default()
    };
    host.server.apply(rules).expect("it fits");
    let (mut alice, mut other) = (host.guest_of(1), host.guest_of(2));
    let a = alice.alloc_with(&bytes(&[1.0; 4]));
    let held = alice.alloc(90 * MIB);
    let reason = alice.refusal(20 * MIB);
    assert!(
        reason.starts_with("guest alice: out of memory: 20.0 MiB wanted"),
        "{reason}"
    );
    // The guest keeps its memory, and another guest can allocate memory.
    let b = other.alloc_with(&bytes(&[2.0; 4]));
    let large = other.alloc(200 * MIB);
    for (guest, buffer, sum) in [(&mut alice, a, 2.0), (&mut other, b, 4.0)] {
        guest.graph(GRAPH, &add(4, buffer, buffer, buffer));
        guest.submit(GRAPH);
        assert_eq!(floats(&guest.read(buffer, 0, 16)), [sum; 4]);
    }
    assert_eq!(other.read(large, 199 * MIB, 16), [0; 16]);
    alice.send(&Request::Free { buffer: held });
    alice.alloc(20 * MIB);
}

#[test]
fn memory_of_one_guest_is_zero_for_the_next() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    // Sizes within a chunk of the allocator, one above a chunk, and sizes without alignment.
    let sizes = [24, 4096, 70_001, MIB, 5 * MIB + 3, 15 * MIB, 40 * MIB];
    let mut first = host.guest();
    for size in sizes {
        let buffer = first.alloc(size);
        let fill = Request::Fill {
            buffer,
            offset: 0,
            len: size,
            value: 0x5e,
        };
        first.send(&fill);
        assert_eq!(first.read(buffer, size - 4, 4), [0x5e; 4]);
    }
    drop(first);
    host.wait_until_empty();
    let mut second = host.guest();
    // In reverse order, so that small buffers reuse the memory of large buffers.
    for size in sizes.into_iter().rev() {
        let buffer = second.alloc(size);
        for offset in (0..size).step_by(MAX_PAYLOAD) {
            let part = second.read(buffer, offset, (size - offset).min(MAX_PAYLOAD as u64));
            assert!(part.iter().all(|&b| b == 0), "{size}: a byte of another");
        }
    }
}

#[test]
fn read_after_a_graph_waits_once() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let mut guest = host.guest();
    let a = guest.alloc_with(&bytes(&[1.0; 4]));
    guest.graph(GRAPH, &add(4, a, a, a));
    for _ in 0..3 {
        guest.submit(GRAPH);
        guest.read(a, 0, 16);
    }
    // The time until the host sees the next request is unknown here, so only an upper bound is
    // checked.
    device.take_whole_log();
    guest.write(a, 0, &bytes(&[3.0; 4]));
    guest.submit(GRAPH);
    assert_eq!(floats(&guest.read(a, 0, 16)), [6.0; 4]);
    let log = device.take_whole_log();
    let count = |of: fn(&Call) -> bool| log.iter().filter(|event| of(event)).count();
    assert_eq!(count(|event| *event == Call::UploadBatch), 1, "{log:?}");
    assert_eq!(
        count(|event| matches!(event, Call::Launch(_))),
        1,
        "{log:?}"
    );
    assert_eq!(
        count(|event| matches!(event, Call::Download(_))),
        1,
        "{log:?}"
    );
    assert!(count(|event| *event == Call::Wait) <= 1, "{log:?}");
}

#[test]
fn device_loss_is_reported_to_every_guest_with_memory_on_it() {
    let device = Arc::new(Spy::running());
    let host = host_on(&device);
    let (mut one, mut other) = (host.guest(), host.guest());
    let a = one.alloc_with(&bytes(&[1.0; 4]));
    let b = other.alloc_with(&bytes(&[1.0; 4]));
    one.graph(GRAPH, &add(4, a, a, a));
    one.fence();
    other.fence();
    device.fail(Fails::Launch(0));
    one.submit(GRAPH);
    let (reply, _) = one.receive();
    let Reply::Failed { reason, .. } = reply else {
        panic!("{reply:?}")
    };
    assert!(reason.contains("illegal memory access"), "{reason}");
    other.send(&Request::Fill {
        buffer: b,
        offset: 0,
        len: 1,
        value: 0,
    });
    let (reply, _) = other.receive();
    let Reply::Failed { reason, .. } = reply else {
        panic!("{reply:?}")
    };
    assert!(
        reason.contains("the contents of its memory are lost"),
        "{reason}"
    );
}

/// A graph that quantises `count` floats of a buffer so often, which the CPU does.
fn quantise(count: u64, times: usize, [from, to]: [BufferId; 2]) -> Graph {
    let mut build = Build::default();
    let from = build.tensor(Type::F32, [count, 1, 1, 1], from);
    let to = build.tensor(Type::Iq2Xxs, [count, 1, 1, 1], to);
    for _ in 0..times {
        build.node(Op::Copy {}, to, &[from]);
    }
    build.0
}

#[test]
fn a_node_that_the_cpu_runs_ends_with_its_guest() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let mut guest = host.guest();
    let buffers = [0; 2].map(|_| guest.alloc(16 * MIB));
    let random: Vec<f32> = (0..1u32 << 14).map(|i| (i as f32).sin()).collect();
    guest.write(buffers[0], 0, &bytes(&random));
    guest.graph(GRAPH, &quantise(4 * MIB, 16, buffers));
    guest.submit(GRAPH);
    // A turn has ended, and the graph goes on.
    let begin = Instant::now();
    loop {
        let sessions = host.server.sessions();
        let stats = &sessions[0].stats;
        assert_eq!(stats.graphs_run, 0, "the graph has no end");
        if stats.turns > 1 {
            break;
        }
        assert!(begin.elapsed() < TIMEOUT, "no turn ends");
        std::thread::yield_now();
    }
    drop(guest);
    host.wait_until_empty();
}

#[test]
fn a_node_that_takes_the_cpu_too_long_is_refused_with_its_numbers() {
    let device: Arc<dyn Device> = Arc::new(Spy::with_memory(512 * MIB));
    let limits = Limits {
        node_time: Some(Duration::from_micros(600)),
        ..Limits::default()
    };
    let engine = CudaEngine::new(device).expect("an engine");
    let host = Host::limited(Arc::new(engine), limits, 1);
    let mut guest = host.guest();
    // The estimate is 0.5 ms at the speed of the device, and 19 ms on two threads.
    let count = 64 << 10;
    let buffers = [0; 2].map(|_| guest.alloc(4 * count));
    guest.graph(GRAPH, &quantise(count, 1, buffers));
    let (Reply::Failed { reason, .. }, _) = guest.receive() else {
        panic!("the graph is refused");
    };
    assert!(
        reason.contains("node 0 (CPY) would take") && reason.contains("the limit is 600µs"),
        "{reason}"
    );
}

#[test]
fn a_long_node_that_is_not_divided_is_refused_with_its_numbers() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let mut guest = host.guest();
    let [a, b, dst] = [0; 3].map(|_| guest.alloc(64 * MIB));
    // Rows that may have the same id are added one after the other: 2 us each by estimate.
    let gradients = |rows| {
        let mut build = Build::default();
        let dst = build.tensor(Type::F32, [1, 8, 1, 1], dst);
        let x = build.tensor(Type::F32, [1, rows, 1, 1], a);
        let ids = build.tensor(Type::I32, [rows, 1, 1, 1], b);
        build.node(Op::GetRowsBack {}, dst, &[x, ids]);
        build.0
    };
    guest.graph(GRAPH, &gradients(1 << 20));
    // Which is answered if the graph is not refused.
    let fence = guest.send(&Request::Fence {});
    let (Reply::Failed { reason, .. }, _) = guest.receive() else {
        panic!("the graph is refused");
    };
    assert_eq!(guest.receive().0, Reply::Done { request: fence });
    for words in [
        "node 0 (GET_ROWS_BACK) would take 2.1s by estimate",
        "Nothing ends its launches (1) once they run, the limit of each is 1s",
    ] {
        assert!(reason.contains(words), "{words:?} is not in {reason:?}");
    }
    guest.graph(GRAPH, &gradients(1 << 18));
    guest.fence();
    // A node that takes longer, and is divided: windows of 128 by 128.
    let mut build = Build::default();
    let image = build.tensor(Type::F32, [4096, 4096, 1, 1], a);
    let pooled = build.tensor(Type::F32, [3969, 3969, 1, 1], dst);
    let op = Op::Pool2d {
        kind: PoolKind::Max,
        k0: 128,
        k1: 128,
        s0: 1,
        s1: 1,
        p0: 0,
        p1: 0,
    };
    build.node(op, pooled, &[image]);
    guest.graph(GraphId(2), &build.0);
    guest.fence();
}

#[test]
fn scratch_memory_is_charged_refused_with_numbers_and_given_back() {
    const QUOTA: u64 = 100 * MIB;
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let alice = GuestRule {
        name: "alice".into(),
        uids: vec![1],
        cids: Vec::new(),
        certificates: Vec::new(),
        policy: Policy {
            memory: Some(QUOTA),
            ..Policy::default()
        },
    };
    let rules = Rules {
        guests: vec![alice],
        ..Rules::default()
    };
    host.server.apply(rules).expect("it fits");
    let mut guest = host.guest_of(1);
    let free = |guest: &mut common::Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    };
    // The engine rounds the activations of such a product to 8 bits, in scratch memory.
    let (k, columns) = (2048, 4096);
    let [weights, x, dst] = [MIB, 4 * k * columns, MIB].map(|size| guest.alloc(size));
    let mut build = Build::default();
    let w = build.tensor(Type::Q8_0, [k, 16, 1, 1], weights);
    let x = build.tensor(Type::F32, [k, columns, 1, 1], x);
    let dst = build.tensor(Type::F32, [16, columns, 1, 1], dst);
    let op = Op::MulMat {
        accumulator: Precision::Default,
        activation: Precision::Default,
        hadamard: false,
    };
    build.node(op, dst, &[w, x]);
    let before = free(&mut guest);
    guest.graph(GRAPH, &build.0);
    guest.fence();
    let taken = before - free(&mut guest);
    assert!(taken >= k * columns, "{taken} bytes are charged");
    guest.send(&Request::Forget { graph: GRAPH });
    assert_eq!(free(&mut guest), before);
    // Not enough is left.
    let held = guest.alloc(before - taken + MIB);
    guest.graph(GRAPH, &build.0);
    let (Reply::Failed { reason, .. }, _) = guest.receive() else {
        panic!("the graph is refused");
    };
    let numbers = format!("out of memory: {} wanted", shown(taken));
    assert!(
        reason.contains(&numbers) && reason.contains(&format!("of {} free", shown(QUOTA))),
        "{reason}"
    );
    guest.send(&Request::Free { buffer: held });
    assert_eq!(free(&mut guest), before);
}

#[test]
fn graphs_of_all_guests_have_a_limit_of_host_memory() {
    const ALL: u64 = 4 * MIB;
    let device: Arc<dyn Device> = Arc::new(Spy::with_memory(512 * MIB));
    let limits = Limits {
        host_memory: ALL,
        ..Limits::default()
    };
    let engine = CudaEngine::new(device).expect("an engine");
    let host = Host::limited(Arc::new(engine), limits, 4);
    // The number of graphs that a guest can keep, and the reason for which one more is refused.
    let fill = |guest: &mut common::Guest, first: u64| {
        let buffers = [0; 2].map(|_| guest.alloc(4096));
        for kept in 0..500 {
            guest.graph(GraphId(first + kept), &quantise(1024, 1, buffers));
            guest.send(&Request::Fence {});
            if let (Reply::Failed { reason, .. }, _) = guest.receive() {
                guest.receive();
                return (kept, reason);
            }
        }
        panic!("no limit");
    };
    let mut guests = [1, 2, 3].map(|uid| host.guest_of(uid));
    let found = guests.each_mut().map(|guest| fill(guest, 0));
    for (kept, reason) in &found {
        let of_all = format!(
            "of the {} for all guests of this process are free",
            shown(ALL)
        );
        assert!(
            *kept > 0 && reason.contains("out of host memory") && reason.contains(&of_all),
            "{kept} graphs: {reason}"
        );
    }
    let [first, second, third] = found.map(|(kept, _)| kept);
    assert!(
        first > 2 * second,
        "{first} and {second}: each has its part"
    );
    assert_eq!(second, third);
    // What the first one has had is free for others.
    let [gone, mut other, _third] = guests;
    drop(gone);
    let begin = Instant::now();
    while host.server.sessions().len() > 2 {
        assert!(begin.elapsed() < TIMEOUT, "the session does not end");
        std::thread::yield_now();
    }
    let (more, reason) = fill(&mut other, 1000);
    assert!(more > second, "{more} more than {second}: {reason}");
}

/// A matrix product of weights with a column, or of a view of their rows.
fn of_weights(weights: BufferId, ne: [u64; 4], others: [BufferId; 2], op: Op) -> Graph {
    let mut build = Build::default();
    let w = build.tensor(Type::Mxfp4, ne, weights);
    let (x, dst) = match op {
        Op::GetRows {} => (
            build.tensor(Type::I32, [1, 1, 1, 1], others[0]),
            build.tensor(Type::F32, [ne[0], 1, 1, 1], others[1]),
        ),
        _ => (
            build.tensor(Type::F32, [ne[0], 1, 1, 1], others[0]),
            build.tensor(Type::F32, [ne[1], 1, 1, 1], others[1]),
        ),
    };
    build.node(op, dst, &[w, x]);
    build.0
}

#[test]
fn declared_weights_are_repacked_and_read_back_unchanged() {
    let (product, rows) = (GraphId(1), GraphId(2));
    let op = Op::MulMat {
        accumulator: Precision::Default,
        activation: Precision::Default,
        hadamard: false,
    };
    let ne = [64, 2048, 1, 1];
    let device = Arc::new(Spy::running());
    let host = host_on(&device);
    let mut guest = host.guest();
    let content: Vec<u8> = (0..64 / 32 * 17 * 2048u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 % 8 + 0x78)
        .collect();
    let repacked = |device: &Spy| {
        let log = device.take_log();
        log.contains(&Call::Launch("vg_repack"))
    };
    let mut results = Vec::new();
    for is_declared in [false, true] {
        let weights = guest.alloc(content.len() as u64);
        if is_declared {
            let reply = guest.ask(&Request::Weights { buffer: weights });
            assert!(matches!(reply, Reply::Refused { .. }), "{reply:?}");
        }
        write(&mut guest, weights, 0, &content);
        let x = guest.alloc_with(&bytes(&[0.5; 64]));
        let dst = guest.alloc(4 * 2048);
        guest.graph(product, &of_weights(weights, ne, [x, dst], op));
        guest.fence();
        assert_eq!(repacked(&device), is_declared);
        guest.submit(product);
        results.push(guest.read_f32(dst, 2048));
        assert!(read_all(&mut guest, weights, content.len() as u64) == content);
        // Reading rows restores the original layout. The engine compiles the earlier graph again.
        let ids = guest.alloc_with(&3i32.to_le_bytes());
        let row = guest.alloc(4 * 64);
        guest.graph(rows, &of_weights(weights, ne, [ids, row], Op::GetRows {}));
        guest.submit(rows);
        results.push(guest.read_f32(row, 64));
        guest.submit(product);
        results.push(guest.read_f32(dst, 2048));
        assert!(!repacked(&device));
        assert!(read_all(&mut guest, weights, content.len() as u64) == content);
        guest.send(&Request::Free { buffer: weights });
    }
    let [plain, row, again, repacked_product, repacked_row, restored] = &results[..] else {
        panic!("six results")
    };
    assert_eq!((plain, row), (again, repacked_row));
    assert_eq!(plain, restored);
    let largest = plain.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert!(largest > 0.0);
    for (got, want) in repacked_product.iter().zip(plain) {
        assert!((got - want).abs() <= 1e-3 * largest, "{got} {want}");
    }
}

/// The bytes of the engine's memory that are free.
fn free(host: &Host) -> u64 {
    host.engine.memory().free
}

#[test]
fn guests_that_load_the_same_model_use_one_copy_of_it() {
    const COUNT: u64 = 1000;
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let store = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(store.clone()).expect("a thread");
    let model = model(3);
    let (mut one, one_has) = first(&host, &store, 7, &model);
    // The second sends nothing of the large tensors.
    let (mut two, mut three) = (guest(&host, 7), guest(&host, 7));
    let before = free(&host);
    let (two_has, not_sent) = load(&mut two, &model);
    assert_eq!(not_sent, FIRST + SECOND);
    let used = before - free(&host);
    assert!(used <= SMALL, "{used} bytes for {MODEL}");
    // The third sends them, and gives the memory back once they are hashed.
    let (three_has, _) = for_weights(&mut three, MODEL);
    for (offset, part) in parts(&model) {
        upload(&mut three, three_has, offset, part);
    }
    write(
        &mut three,
        three_has,
        FIRST,
        &model[FIRST as usize..][..SMALL as usize],
    );
    three.send(&Request::Seal { buffer: three_has });
    three.fence();
    wait_for("the third's memory", || {
        three.fence();
        before - free(&host) <= 2 * SMALL
    });
    let ones = bytes(&[1.0; COUNT as usize]);
    let sums: Vec<f32> = { floats(&model[..4 * COUNT as usize]).into_iter() }
        .map(|x| x + 1.0)
        .collect();
    let mut guests = [(one, one_has), (two, two_has), (three, three_has)];
    for (guest, weights) in &mut guests {
        let (dst, addend) = (guest.alloc(4 * COUNT), guest.alloc_with(&ones));
        guest.graph(GRAPH, &add(COUNT, dst, *weights, addend));
        guest.submit(GRAPH);
        assert_eq!(floats(&guest.read(dst, 0, 4 * COUNT)), sums);
        assert!(read_all(guest, *weights, MODEL) == model);
    }
    [(one, _), (two, _), (three, _)] = guests;
    // The first writes, and ends. No one else sees it.
    let before = free(&host);
    one.write(one_has, 0, &[7; 64]);
    assert_eq!(one.read(one_has, 0, 64), [7; 64]);
    assert_eq!(before - free(&host), FIRST);
    drop(one);
    wait_for("the first's end", || host.server.sessions().len() == 2);
    assert!(read_all(&mut two, two_has, MODEL) == model);
    drop(two);
    wait_for("the second's end", || host.server.sessions().len() == 1);
    assert!(read_all(&mut three, three_has, MODEL) == model);
    drop(three);
    host.wait_until_empty();
    assert_eq!(store.stats().extents, 0);
}

/// What loads of the same model need of the device at any time: a guest needs room for each tensor
/// until the tensor is attached, or hashed after the seal. No upload is compared with another one.
#[test]
fn loads_of_the_same_model_need_room_for_a_copy_each_until_they_share() {
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let store = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(store.clone()).expect("a thread");
    // Pieces are rounded to 256 bytes.
    let rounded = 1024;
    let is_about = |used: u64, bytes: u64| bytes <= used && used <= bytes + rounded;
    let empty = free(&host);
    let used = || empty - free(&host);

    // Two guests that load at once, up to their last byte.
    let other = model(11);
    let mut at_once = [0; 2].map(|_| {
        let mut guest = guest(&host, 7);
        let (buffer, _) = for_weights(&mut guest, MODEL);
        (guest, buffer)
    });
    assert!(is_about(used(), 2 * MODEL), "{} at the beginning", used());
    for (guest, buffer) in &mut at_once {
        for (offset, part) in parts(&other) {
            upload(guest, *buffer, offset, part);
        }
        let small = &other[FIRST as usize..][..SMALL as usize];
        write(guest, *buffer, FIRST, small);
        guest.fence();
    }
    assert!(is_about(used(), 2 * MODEL), "{} before the seals", used());
    for (guest, buffer) in &mut at_once {
        guest.send(&Request::Seal { buffer: *buffer });
        guest.fence();
    }
    wait_for("the memory of one of them", || {
        at_once.iter_mut().for_each(|(guest, _)| guest.fence());
        is_about(used(), MODEL + SMALL)
    });
    drop(at_once);
    host.wait_until_empty();

    // One after the other: the second has room for the model until it has attached the tensors.
    let model = model(12);
    let (_one, _) = first(&host, &store, 7, &model);
    assert!(is_about(used(), MODEL), "{} for one", used());
    let mut two = guest(&host, 7);
    let buffer = two.alloc(MODEL);
    assert!(is_about(used(), 2 * MODEL), "{} allocated", used());
    two.ask(&Request::Weights { buffer });
    assert!(is_about(used(), 2 * MODEL), "{} reserved", used());
    let [(at, large), (second, rest)] = parts(&model);
    assert!(lookup(&mut two, buffer, at, large));
    assert!(is_about(used(), MODEL + SMALL + SECOND), "{}", used());
    assert!(lookup(&mut two, buffer, second, rest));
    assert!(is_about(used(), MODEL + SMALL), "{} attached", used());

    // So a third is refused where there is no room for a copy, although it would need none.
    let mut filler = guest(&host, 8);
    let mut size = 256 * MIB;
    while free(&host) >= MODEL {
        let buffer = filler.new_buffer();
        if let Reply::Refused { .. } = filler.ask(&Request::Alloc { buffer, size }) {
            size /= 2;
            assert!(size > 0, "{} free", free(&host));
        }
    }
    let reason = guest(&host, 7).refusal(MODEL);
    let wanted = format!("{} wanted", shown(MODEL));
    assert!(reason.contains(&wanted), "{reason}");
}

/// A guest whose plan writes to a tensor cannot reach the bytes of another guest with the plan,
/// once that guest has attached the tensor.
#[test]
fn graph_from_before_the_seal_does_not_write_into_the_weights_of_others() {
    const COUNT: u64 = FIRST / 4;
    let device = Arc::new(Spy::with_memory(512 * MIB));
    let host = host_on(&device);
    let store = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(store.clone()).expect("a thread");
    let model = model(5);
    let mut hostile = guest(&host, 7);
    let (weights, _) = for_weights(&mut hostile, MODEL);
    for (offset, part) in parts(&model) {
        upload(&mut hostile, weights, offset, part);
    }
    let small = &model[FIRST as usize..][..SMALL as usize];
    write(&mut hostile, weights, FIRST, small);
    let addend = hostile.alloc_with(&bytes(&[7.0; COUNT as usize]));
    hostile.graph(GRAPH, &add(COUNT, weights, addend, addend));
    hostile.send(&Request::Seal { buffer: weights });
    hostile.fence();
    wait_for("hashing", || store.stats().extents == 2);
    let mut other = guest(&host, 7);
    let (others, not_sent) = load(&mut other, &model);
    assert_eq!(not_sent, FIRST + SECOND);
    hostile.submit(GRAPH);
    hostile.fence();
    assert!(read_all(&mut other, others, MODEL) == model);
    assert_eq!(hostile.read_f32(weights, COUNT), [14.0; COUNT as usize]);
}

/// The weights that a graph reads are attached after the graph was compiled. The weights are
/// repacked, and the graph needs them plain: it is compiled again, gets a copy, and is compiled
/// once more. Without memory for the copy the run fails, and the next one tries again.
#[test]
fn graph_that_needs_a_copy_of_attached_weights_runs_once_there_is_memory() {
    let (product, rows) = (GraphId(1), GraphId(2));
    let op = Op::MulMat {
        accumulator: Precision::Default,
        activation: Precision::Default,
        hadamard: false,
    };
    let ne = [64, 4096, 1, 1];
    let device = Arc::new(Spy::running());
    let host = host_on(&device);
    let store = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(store.clone()).expect("a thread");
    let content: Vec<u8> = (0..64 / 32 * 17 * 4096u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 % 8 + 0x78)
        .collect();
    let len = content.len() as u64;
    let mut one = guest(&host, 7);
    let (of_one, _) = for_weights(&mut one, len);
    upload(&mut one, of_one, 0, &content);
    one.send(&Request::Seal { buffer: of_one });
    let x = one.alloc_with(&bytes(&[0.5; 64]));
    let dst = one.alloc(4 * 4096);
    one.graph(product, &of_weights(of_one, ne, [x, dst], op));
    one.submit(product);
    one.fence();
    assert!(device.take_log().contains(&Call::Launch("vg_repack")));
    let ids = one.alloc_with(&3i32.to_le_bytes());
    let row = one.alloc(4 * 64);
    wait_for("hashing", || store.stats().extents == 1);
    let mut two = guest(&host, 7);
    let (of_two, _) = for_weights(&mut two, len);
    let ids_of_two = two.alloc_with(&3i32.to_le_bytes());
    let row_of_two = two.alloc(4 * 64);
    two.graph(
        rows,
        &of_weights(of_two, ne, [ids_of_two, row_of_two], Op::GetRows {}),
    );
    two.fence();
    assert!(lookup(&mut two, of_two, 0, &content));
    device.fail(Fails::Memory);
    two.submit(rows);
    let (Reply::Failed { reason, .. }, _) = two.receive() else {
        panic!("there is no memory for a copy");
    };
    assert!(reason.contains("out of memory"), "{reason}");
    device.fail(None);
    two.submit(rows);
    let got = two.read_f32(row_of_two, 64);
    one.graph(rows, &of_weights(of_one, ne, [ids, row], Op::GetRows {}));
    one.submit(rows);
    assert_eq!(got, one.read_f32(row, 64));
    assert!(got.iter().any(|&x| x != 0.0));
    assert!(read_all(&mut two, of_two, len) == content);
}
