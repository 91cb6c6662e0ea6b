//! An executor with several devices: what is of each device, and what all have in common.

mod common;

use std::sync::Arc;

use common::hanging_engine::{Call, HangingEngine};
use common::model::read_all;
use common::weights::{FIRST, MODEL, SECOND, load, model};
use common::{Guest, Host, PAGE, add, bytes, cpu, wait_for};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::status::Progress;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{GuestRule, Limits, Policy, Process, Rules, RulesError, WeightStore};
use vgpu_transport::wire::Request;
use vgpu_transport::wire::{DeviceCount, DeviceIndex, GraphId, Offer, ProtocolVersion, Reply};

const GRAPH: GraphId = GraphId(1);

/// The memory of each device.
const SIZES: [u64; 3] = [64 << 20, 32 << 20, 16 << 20];

fn engines() -> Vec<Arc<dyn Engine>> {
    let engines = SIZES.map(|size| -> Arc<dyn Engine> {
        Arc::new(CpuEngine::new(1, Some(size)).expect("a thread and memory"))
    });
    engines.into()
}

fn host() -> Host {
    Host::with_devices(engines(), Limits::default(), 64)
}

/// A program of a user on a device, and the memory that WELCOME names.
fn program(host: &Host, uid: u32, device: u32) -> (Guest, u64) {
    let process = Process {
        pid: 1,
        uid,
        program: None,
    };
    let mut guest = host.connect_as(Some(process));
    match guest.hello_for(Offer::SERVED, device) {
        Reply::Welcome { memory_total, .. } => (guest, memory_total),
        other => panic!("{other:?}"),
    }
}

/// The bytes that each device has in use.
fn used(host: &Host) -> Vec<u64> {
    let status = host.server.status_handle().status();
    let engines = status.engines();
    engines
        .map(|engine| engine.memory_total - engine.memory_free)
        .collect()
}

/// The user with this id is the guest of this name.
fn guest_rule(name: &str, uid: u32, policy: Policy) -> GuestRule {
    GuestRule {
        name: name.into(),
        uids: vec![uid],
        cids: Vec::new(),
        certificates: Vec::new(),
        policy,
    }
}

fn rules(guests: Vec<GuestRule>) -> Rules {
    Rules {
        guests,
        ..Rules::default()
    }
}

#[test]
fn guests_see_each_device_with_memory_of_its_own() {
    let host = host();
    let mut programs = Vec::new();
    for (device, size) in (0..).zip(SIZES) {
        let mut guest = host.connect();
        let Reply::Welcome {
            memory_total,
            devices,
            ..
        } = guest.hello_for(Offer::SERVED, device)
        else {
            unreachable!("hello_for() has checked it")
        };
        assert_eq!((memory_total, devices), (size, DeviceCount(3)));
        programs.push(guest);
    }
    for (at, guest) in programs.iter_mut().enumerate() {
        let numbers = guest.alloc_with(&bytes(&[at as f32; 8]));
        let ones = guest.alloc_with(&bytes(&[1.0; 8]));
        guest.graph(GRAPH, &add(8, numbers, numbers, ones));
        guest.submit(GRAPH);
        assert_eq!(guest.read_f32(numbers, 8), [at as f32 + 1.0; 8]);
    }
    let full = programs[2].refusal(SIZES[2]);
    assert!(full.contains("out of memory"), "{full}");
    programs[0].alloc(SIZES[2]);
    assert_eq!(used(&host), [SIZES[2] + 2 * PAGE, 2 * PAGE, 2 * PAGE]);
    let status = host.server.status_handle().status();
    let devices: Vec<usize> = status.sessions.iter().map(|one| one.device).collect();
    assert_eq!(devices, [0, 1, 2]);
    let [unnamed] = &status.guests[..] else {
        panic!("{status:?}")
    };
    // As many as there are sessions on one device.
    assert_eq!(unnamed.sessions, 1);
    assert_eq!(unnamed.usage.graphs, 3);
    let graphs: Vec<u64> = unnamed.by_device.iter().map(|usage| usage.graphs).collect();
    assert_eq!(graphs, [1, 1, 1]);
    let text = host.server.status_handle().dump();
    assert_eq!(text.matches("engine cpu:").count(), 3, "{text}");
    // What the sessions have done counts after their end, too.
    drop(programs);
    host.wait_until_empty();
    let status = host.server.status_handle().status();
    let graphs: Vec<u64> = { status.guests[0].by_device.iter() }
        .map(|usage| usage.graphs)
        .collect();
    assert_eq!(graphs, [1, 1, 1]);
    assert_eq!(used(&host), [0, 0, 0]);
}

#[test]
fn a_guest_without_a_field_for_devices_has_the_first_one() {
    let host = host();
    for version in ProtocolVersion::ALL {
        let mut guest = host.connect();
        let Reply::Welcome {
            memory_total,
            devices,
            ..
        } = guest.hello_with(Offer::only(version))
        else {
            unreachable!("hello_with() has checked it")
        };
        assert_eq!(memory_total, SIZES[0]);
        let counted = match version {
            ProtocolVersion::V3 => 1,
            ProtocolVersion::V4 => 3,
        };
        assert_eq!(devices, DeviceCount(counted));
    }
}

#[test]
fn a_device_that_there_is_not_is_refused_with_the_number_of_devices() {
    for (engines, words) in [
        (
            engines(),
            "has 3 devices for this guest, and it has asked for device 3,",
        ),
        (
            vec![cpu()],
            "has one device for this guest, and it has asked for device 3,",
        ),
    ] {
        let host = Host::with_devices(engines, Limits::default(), 64);
        let mut guest = host.connect();
        guest.send(&Request::Hello {
            offer: Offer::SERVED,
            name: "test".into(),
            device: DeviceIndex(3),
        });
        let reason = guest.ended();
        assert!(reason.contains(words), "{reason}");
    }
}

#[test]
fn a_guest_sees_the_devices_that_it_may_use_in_the_order_of_its_rule() {
    let host = host();
    let of = |devices: &[usize]| Policy {
        devices: devices.into(),
        ..Policy::default()
    };
    let guests = vec![
        guest_rule("a", 1, of(&[2, 0])),
        guest_rule("b", 2, of(&[1])),
    ];
    host.server.apply(rules(guests)).expect("there are three");
    assert_eq!(program(&host, 1, 0).1, SIZES[2]);
    assert_eq!(program(&host, 1, 1).1, SIZES[0]);
    assert_eq!(program(&host, 2, 0).1, SIZES[1]);
    assert_eq!(program(&host, 3, 1).1, SIZES[1], "another guest sees all");
    let mut guest = host.connect_of(2);
    guest.send(&Request::Hello {
        offer: Offer::SERVED,
        name: "test".into(),
        device: DeviceIndex(1),
    });
    let reason = guest.ended();
    assert!(reason.contains("has one device for this guest"), "{reason}");
    // The rules at HELLO decide, not those at the connection.
    let mut late = host.connect_of(1);
    wait_for("the connection is taken", || {
        !host.server.pending().is_empty()
    });
    let narrowed = vec![guest_rule("a", 1, of(&[2])), guest_rule("b", 2, of(&[1]))];
    host.server.apply(rules(narrowed)).expect("there are three");
    late.send(&Request::Hello {
        offer: Offer::SERVED,
        name: "test".into(),
        device: DeviceIndex(1),
    });
    let reason = late.ended();
    assert!(reason.contains("has one device for this guest"), "{reason}");
    // A rule with a device that there is not changes nothing.
    let error = host.server.apply(rules(vec![guest_rule("a", 1, of(&[3]))]));
    let words = RulesError::Device {
        guest: "a".into(),
        device: 3,
        devices: 3,
    };
    assert_eq!(error, Err(words));
    assert_eq!(program(&host, 1, 0).1, SIZES[2]);
}

#[test]
fn quotas_and_reservations_hold_on_each_device() {
    let host = host();
    let quota = |bytes| Policy {
        memory: Some(bytes),
        ..Policy::default()
    };
    host.server
        .apply(rules(vec![guest_rule("a", 1, quota(8 << 20))]))
        .expect("each device has more");
    let mut programs = Vec::new();
    for device in 0..3 {
        let (mut guest, total) = program(&host, 1, device);
        assert_eq!(total, 8 << 20, "device {device}");
        guest.alloc(8 << 20);
        assert!(guest.refusal(1).contains("0 B of 8.0 MiB free"));
        // Others have what is not reserved on this device.
        let (_, others) = program(&host, 9, device);
        assert_eq!(others, SIZES[device as usize] - (8 << 20));
        programs.push(guest);
    }
    // A guest reserves nothing on a device that it may not use, but what it has there, and gets no
    // more.
    let large = Policy {
        devices: vec![0, 1],
        ..quota(17 << 20)
    };
    let limited = rules(vec![guest_rule("a", 1, large)]);
    host.server.apply(limited).expect("both devices have more");
    assert_eq!(program(&host, 9, 2).1, SIZES[2] - (8 << 20));
    assert_eq!(program(&host, 9, 1).1, SIZES[1] - (17 << 20));
    assert!(programs[2].refusal(1).contains("0 B of 0 B free"));
    drop(programs);
    host.wait_until_empty();
    assert_eq!(program(&host, 9, 2).1, SIZES[2]);
    host.server
        .apply(rules(vec![guest_rule("a", 1, quota(8 << 20))]))
        .expect("as before");
    // Each device of the guest has to have the quota.
    let error = host
        .server
        .apply(rules(vec![guest_rule("a", 1, quota(17 << 20))]));
    let text = error.expect_err("the third device has 16 MiB").to_string();
    assert!(
        text.contains("the engine of device 2 has 16.0 MiB"),
        "{text}"
    );
    let status = host.server.status_handle().status();
    let limits: Vec<u64> = { status.guests.iter() }
        .filter_map(|guest| guest.quota)
        .collect();
    assert_eq!(limits, [8 << 20]);
}

#[test]
fn programs_on_different_devices_are_one_guest_for_its_share_of_the_sessions() {
    let host = Host::with_devices(engines(), Limits::default(), 8);
    let programs: Vec<Guest> = (0..6).map(|at| program(&host, 1, at % 3).0).collect();
    for device in 0..3 {
        let mut guest = host.connect_of(1);
        guest.send(&Request::Hello {
            offer: Offer::SERVED,
            name: "test".into(),
            device: DeviceIndex(device),
        });
        let reason = guest.ended();
        assert!(reason.contains("its limit is 6"), "{reason}");
    }
    program(&host, 2, 2);
    drop(programs);
}

#[test]
fn weights_are_shared_on_each_device_and_never_between_two() {
    let host = host();
    let weights = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(weights).expect("a thread");
    let model = model(1);
    let stored = |device: usize| {
        let status = host.server.status_handle().status();
        let engine = status.engines().nth(device).expect("three devices");
        engine.weights.bytes
    };
    let mut loaded = Vec::new();
    for device in 0..2 {
        let (mut first, _) = program(&host, 7, device);
        let (buffer, not_sent) = load(&mut first, &model);
        assert_eq!(not_sent, 0, "device {device} has nothing of another one");
        let place = device as usize;
        wait_for("the weights are hashed", || stored(place) == FIRST + SECOND);
        let (mut second, _) = program(&host, 7, device);
        let (again, not_sent) = load(&mut second, &model);
        assert_eq!(not_sent, FIRST + SECOND);
        assert!(read_all(&mut second, again, MODEL) == model);
        first.write(buffer, 0, &[9; 100]);
        assert!(read_all(&mut second, again, MODEL) == model);
        loaded.push((first, second));
    }
    assert_eq!(stored(2), 0);
}

#[test]
fn an_engine_that_hangs_keeps_no_guest_of_another_device_waiting() {
    let hanging = HangingEngine::new();
    let limits = Limits {
        slow: std::time::Duration::from_millis(200),
        ..Limits::default()
    };
    let engines: Vec<Arc<dyn Engine>> = vec![Arc::clone(&hanging) as _, cpu()];
    let host = Host::with_devices(engines, limits, 64);
    host.server.watch(|_| {}).expect("a thread");
    let (mut stuck, _) = program(&host, 1, 0);
    let mut other = program(&host, 2, 1).0;
    hanging.hang(&[Call::Alloc, Call::Memory]);
    let buffer = stuck.new_buffer();
    stuck.send(&Request::Alloc { buffer, size: 4096 });
    let status = host.server.status_handle();
    wait_for("the hang is found", || {
        status.status().engine.hang.is_some()
    });
    // Requests, new sessions and status of the other device need nothing of the one that hangs.
    let numbers = other.alloc_with(&bytes(&[1.0; 8]));
    other.graph(GRAPH, &add(8, numbers, numbers, numbers));
    other.submit(GRAPH);
    assert_eq!(other.read_f32(numbers, 8), [2.0; 8]);
    let (mut next, _) = program(&host, 2, 1);
    next.alloc(PAGE);
    let shown = status.status();
    assert_eq!(shown.further_engines[0].hang, None);
    assert!(matches!(status.progress(), Progress::Stalled(_)));
    hanging.hang(&[]);
    assert!(matches!(stuck.receive().0, Reply::Done { .. }));
    wait_for("the engine answers again", || {
        status.status().engine.hang.is_none()
    });
}
