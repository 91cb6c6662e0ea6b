//! Named guests: memory quotas, links, shares of the device's time, and the isolation of their
//! data.

mod common;

use std::thread;

use common::{Build, Guest, Host, MEMORY, add, bytes, cpu};
use vgpu_executor::{GuestRule, Identity, LinkKind, Peer, Policy, QuotaError, Rules, RulesError};
use vgpu_transport::ir::{BufferId, Graph, Op, Precision, Type};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, Reply, Request};

const GRAPH: GraphId = GraphId(1);

fn rule(name: &str, uid: u32, policy: Policy) -> GuestRule {
    GuestRule {
        name: name.into(),
        uids: vec![uid],
        cids: Vec::new(),
        certificates: Vec::new(),
        policy,
    }
}

fn quota(memory: u64) -> Policy {
    Policy {
        memory: Some(memory),
        ..Policy::default()
    }
}

fn rules(guests: Vec<GuestRule>) -> Rules {
    Rules {
        guests,
        ..Rules::default()
    }
}

/// Total and free memory that the guest is told.
fn figures(guest: &mut Guest) -> (u64, u64) {
    match guest.ask(&Request::Memory {}) {
        Reply::Memory { total, free, .. } => (total, free),
        other => panic!("{other:?}"),
    }
}

#[test]
fn guest_at_its_quota_is_refused_with_numbers_and_others_are_unaffected() {
    let host = Host::new(cpu());
    let quotas = rules(vec![
        rule("alice", 1, quota(10 << 20)),
        rule("bob", 2, quota(20 << 20)),
    ]);
    host.server.apply(quotas).expect("they fit");
    let mut alice = host.guest_of(1);
    let mut bob = host.guest_of(2);
    let mut unnamed = host.guest_of(3);
    let rest = MEMORY - (30 << 20);
    assert_eq!(figures(&mut alice), (10 << 20, 10 << 20));
    assert_eq!(figures(&mut bob), (20 << 20, 20 << 20));
    assert_eq!(figures(&mut unnamed), (rest, rest));

    let first = alice.alloc(6 << 20);
    assert_eq!(figures(&mut alice), (10 << 20, 4 << 20));
    let reason = alice.refusal(5 << 20);
    assert_eq!(
        reason,
        "guest alice: out of memory: 5.0 MiB wanted, 4.0 MiB of 10.0 MiB free"
    );
    // A second program of the guest shares the quota.
    let mut again = host.guest_of(1);
    assert_eq!(figures(&mut again), (10 << 20, 4 << 20));
    again.alloc(4 << 20);
    assert_eq!(figures(&mut alice), (10 << 20, 0));

    assert_eq!(figures(&mut bob), (20 << 20, 20 << 20), "bob's have moved");
    assert_eq!(
        figures(&mut unnamed),
        (rest, rest),
        "the unnamed guest's have moved"
    );
    bob.alloc(20 << 20);
    unnamed.alloc(rest);
    alice.send(&Request::Free { buffer: first });
    assert_eq!(figures(&mut alice), (10 << 20, 6 << 20));
    drop(again);
    drop(alice);
    let mut alice = host.guest_of(1);
    while figures(&mut alice).1 < 10 << 20 {
        // The earlier sessions may still be freeing memory.
        thread::yield_now();
    }
}

#[test]
fn refused_allocation_uses_no_memory() {
    let host = Host::new(cpu());
    host.server
        .apply(rules(vec![rule("alice", 1, quota(1 << 20))]))
        .expect("it fits");
    let mut alice = host.guest_of(1);
    for _ in 0..100 {
        alice.refusal((1 << 20) + 1);
        alice.refusal(u64::MAX);
    }
    assert_eq!(figures(&mut alice), (1 << 20, 1 << 20));
    alice.alloc(1 << 20);
    assert_eq!(host.engine.memory().free, MEMORY - (1 << 20));
}

#[test]
fn excessive_quotas_are_refused_and_the_previous_quotas_remain() {
    let host = Host::new(cpu());
    host.server
        .apply(rules(vec![rule("alice", 1, quota(10))]))
        .expect("it fits");
    let too_much = rules(vec![
        rule("alice", 1, quota(MEMORY)),
        rule("bob", 2, quota(1)),
    ]);
    let error = host.server.apply(too_much.clone()).expect_err("one byte");
    let quota = QuotaError {
        device: 0,
        promised: MEMORY + 1,
        total: MEMORY,
    };
    assert_eq!(error, RulesError::Quota(quota));
    assert_eq!(figures(&mut host.guest_of(1)), (10, 10));
    let overcommitted = Rules {
        overcommit: true,
        ..too_much
    };
    host.server.apply(overcommitted).expect("it is wanted");
    assert_eq!(figures(&mut host.guest_of(1)), (MEMORY, MEMORY));
}

#[test]
fn quotas_of_unnamed_guests_change_during_a_session() {
    let host = Host::new(cpu());
    let apply = |memory| {
        let rules = Rules {
            unnamed: Some(quota(memory)),
            ..Rules::default()
        };
        host.server.apply(rules).expect("it fits");
    };
    apply(8192);
    let mut unnamed = host.guest_of(3);
    unnamed.alloc(4096);
    assert_eq!(figures(&mut unnamed), (8192, 4096));
    apply(16384);
    assert_eq!(figures(&mut unnamed), (16384, 12288));
    apply(4096);
    assert_eq!(figures(&mut unnamed), (4096, 0));
}

#[test]
fn quotas_change_during_a_session() {
    let host = Host::new(cpu());
    let apply = |memory| {
        let rules = rules(vec![rule("alice", 1, quota(memory))]);
        host.server.apply(rules).expect("it fits");
    };
    apply(8192);
    let mut alice = host.guest_of(1);
    let buffer = alice.alloc_with(&[7; 8192]);
    apply(4096);
    assert_eq!(figures(&mut alice), (4096, 0));
    assert_eq!(alice.read(buffer, 0, 8192), [7; 8192]);
    apply(16384);
    assert_eq!(figures(&mut alice), (16384, 8192));
    alice.alloc(8192);
    // The guest is no longer named. The session stays, and the next session is unnamed.
    host.server.apply(Rules::default()).expect("nothing to fit");
    assert_eq!(alice.read(buffer, 0, 8192), [7; 8192]);
    let (total, _) = figures(&mut host.guest_of(1));
    assert_eq!(total, MEMORY);
}

#[test]
fn refused_guests_receive_the_reason() {
    let host = Host::new(cpu());
    let alice = Policy {
        links: vec![LinkKind::Pci, LinkKind::Tcp],
        ..Policy::default()
    };
    host.server
        .apply(Rules {
            unnamed: None,
            ..rules(vec![
                rule("alice", 1, alice),
                rule("bob", 2, Policy::default()),
            ])
        })
        .expect("nothing to fit");
    let reason = host.connect_of(1).ended();
    assert!(
        reason.contains("guest alice may not connect over unix, only over pci, tcp"),
        "{reason}"
    );
    let reason = host.connect_of(3).ended();
    assert!(reason.contains("rejects unnamed guests"), "{reason}");
    host.guest_of(2).fence();
}

/// Attempts of a guest to read the data of another guest, or freed data of the guest itself.
#[test]
fn memory_of_one_guest_is_never_visible_to_another() {
    const SECRET: u8 = 0xa5;
    const SIZE: u64 = 4 << 20;
    let host = Host::new(cpu());
    let mut owner = host.guest_of(1);
    let secret = owner.alloc(SIZE);
    owner.send(&Request::Fill {
        buffer: secret,
        offset: 0,
        len: SIZE,
        value: SECRET,
    });
    owner.fence();

    // The id of the owner's buffer. An id is valid in one session only.
    let read = |buffer, offset, len| Request::Read {
        buffer,
        offset,
        len,
    };
    let mut attacker = host.guest_of(2);
    attacker.send(&read(secret, 0, 64));
    assert!(attacker.ended().contains("which the session does not have"));
    // Ranges after and before the guest's own buffer, and around the largest offset.
    for (offset, len) in [
        (4096, 1),
        (4095, 2),
        (0, 4097),
        (u64::MAX, 2),
        (u64::MAX - 4095, 8192),
        (1 << 40, 64),
    ] {
        let mut attacker = host.guest_of(2);
        let own = attacker.alloc(4096);
        attacker.send(&read(own, offset, len));
        let reason = attacker.ended();
        assert!(
            reason.contains("which has 4096"),
            "{offset}+{len}: {reason}"
        );
    }
    // Copies from such ranges.
    let mut attacker = host.guest_of(2);
    let own = attacker.alloc(8192);
    attacker.send(&Request::Copy {
        dst: own,
        dst_offset: 0,
        src: BufferId(77),
        src_offset: 0,
        len: 64,
    });
    assert!(attacker.ended().contains("buffer 77"));
    // Graphs that read beyond a buffer, or from another session's buffer.
    for (a, count) in [(BufferId(1), 2048), (BufferId(2), 16)] {
        let mut attacker = host.guest_of(2);
        let own = attacker.alloc(4096);
        attacker.image(GRAPH, &common::image(&add(count, own, a, a)));
        attacker.submit(GRAPH);
        assert!(attacker.ended().contains("broke the protocol"));
    }
    // The id of a freed buffer, and a graph that was compiled with it.
    let mut attacker = host.guest_of(2);
    let own = attacker.alloc_with(&bytes(&[1.0; 16]));
    let kept = attacker.alloc(64);
    attacker.graph(GRAPH, &add(16, kept, own, own));
    attacker.send(&Request::Free { buffer: own });
    attacker.submit(GRAPH);
    assert!(attacker.ended().contains("used a buffer that was freed"));
    let mut attacker = host.guest_of(2);
    let own = attacker.alloc(64);
    attacker.send(&Request::Free { buffer: own });
    attacker.send(&read(own, 0, 64));
    assert!(attacker.ended().contains("which the session does not have"));

    // New memory of all sizes, before and after the owner has disconnected.
    let mut attacker = host.guest_of(2);
    let mut look = |round: &str| {
        for size in [64, 4096, 65_536, SIZE, 2 * SIZE] {
            let fresh = attacker.alloc(size);
            for offset in (0..size).step_by(MAX_PAYLOAD) {
                let bytes = attacker.read(fresh, offset, (size - offset).min(MAX_PAYLOAD as u64));
                let found = bytes.iter().filter(|&&byte| byte != 0).count();
                assert_eq!(found, 0, "{round}, {size} bytes: not all zero");
            }
            attacker.send(&Request::Free { buffer: fresh });
        }
    };
    look("while the owner is there");
    owner.send(&Request::Free { buffer: secret });
    owner.fence();
    look("after it has freed");
    drop(owner);
    look("after it has gone");
}

/// Guests with long and short graphs at once. All results are right.
#[test]
fn interleaved_graphs_compute_the_same_results_as_alone() {
    let host = Host::new(cpu());
    let weights = |(i, weight)| {
        let policy = Policy {
            weight,
            graphs_in_flight: 1,
            ..Policy::default()
        };
        rule(&format!("guest{i}"), i, policy)
    };
    let named = [(1, 1), (2, 3), (3, 10)].map(weights);
    host.server.apply(rules(named.into())).expect("no quotas");
    thread::scope(|scope| {
        for uid in [1, 1, 2, 2, 3] {
            let host = &host;
            scope.spawn(move || {
                let count = 1 << (6 + 4 * uid);
                let mut guest = host.guest_of(uid);
                let numbers = guest.alloc_with(&bytes(&vec![uid as f32; count as usize]));
                let ones = guest.alloc_with(&bytes(&vec![1.0; count as usize]));
                guest.graph(GRAPH, &add(count, numbers, numbers, ones));
                for round in 1..=60 {
                    guest.submit(GRAPH);
                    let expected = vec![(uid + round) as f32; count as usize];
                    assert_eq!(
                        guest.read_f32(numbers, count),
                        expected,
                        "uid {uid}, round {round}"
                    );
                }
            });
        }
    });
    let status = host.server.status_handle().status();
    let named: Vec<(&str, u64)> = status
        .guests
        .iter()
        .map(|guest| (guest.name.as_str(), guest.usage.graphs))
        .collect();
    assert_eq!(
        named,
        [("guest1", 120), ("guest2", 120), ("guest3", 60), ("-", 0)]
    );
}

/// A chain of matrix products, `b = w * x`, `c = w * b`, so often.
fn products(side: u64, times: usize, [w, x, b, c]: [BufferId; 4]) -> Graph {
    let mut build = Build::default();
    let [w, x, b, c] =
        [w, x, b, c].map(|buffer| build.tensor(Type::F32, [side, side, 1, 1], buffer));
    for (dst, src) in [(b, x), (c, b)].repeat(times) {
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: false,
        };
        build.node(op, dst, &[w, src]);
    }
    build.0
}

/// Matrix products that last for seconds yield to another guest. The results have the same bits as
/// without yielding.
#[test]
fn interrupted_matrix_products_are_bit_identical() {
    const SIDE: u64 = 640;
    const BYTES: u64 = 4 * SIDE * SIDE;
    const TIMES: usize = 200;
    let host = Host::new(cpu());
    let start = |uid: u32, times| {
        let mut guest = host.guest_of(uid);
        let values: Vec<f32> = (0..SIDE * SIDE)
            .map(|i| ((i * 2_654_435_761 + u64::from(uid)) % 1009) as f32 / 1009.0 - 0.5)
            .collect();
        let data = bytes(&values);
        let buffers = [0; 4].map(|_| guest.alloc(BYTES));
        for buffer in &buffers[..2] {
            for (i, part) in data.chunks(MAX_PAYLOAD).enumerate() {
                guest.write(*buffer, (i * MAX_PAYLOAD) as u64, part);
            }
        }
        guest.graph(GRAPH, &products(SIDE, times, buffers));
        guest.submit(GRAPH);
        (guest, buffers[3])
    };
    let result = |(mut guest, buffer): (Guest, BufferId)| {
        let parts = (0..BYTES).step_by(MAX_PAYLOAD);
        let each = parts.map(|offset| {
            let len = (BYTES - offset).min(MAX_PAYLOAD as u64);
            guest.read(buffer, offset, len)
        });
        each.collect::<Vec<_>>().concat()
    };
    let alone = [1, 2].map(|uid| result(start(uid, 1)));
    host.wait_until_empty();
    // The graphs of the first guest that have ended, and its turns.
    let figures = || {
        let sessions = host.server.sessions();
        let of_first = |process: &vgpu_executor::Process| process.uid == 1;
        let mut sessions = sessions.into_iter();
        let first = sessions.find(|s| s.peer.process.as_ref().is_some_and(of_first));
        let stats = first.expect("the session is open").stats;
        (stats.graphs_run, stats.turns)
    };
    let long = start(1, TIMES);
    while figures().1 == 0 {
        thread::yield_now();
    }
    let (_, before) = figures();
    for round in 0..3 {
        assert!(result(start(2, 1)) == alone[1], "round {round}");
    }
    // Others had the engine in between.
    let (ended, after) = figures();
    assert_eq!(ended, 0, "the long graph has ended");
    assert!(after >= before + 3, "{before} turns, then {after}");
    assert!(result(long) == alone[0], "the long graph");
}

#[test]
fn unnamed_guest_has_one_quota_and_one_weight_however_often_it_connects() {
    let host = Host::new(cpu());
    host.server
        .apply(Rules {
            unnamed: Some(quota(10 << 20)),
            ..Rules::default()
        })
        .expect("nothing to fit");
    let mut programs: Vec<Guest> = (0..5).map(|_| host.guest_of(1)).collect();
    let mut other = host.guest_of(2);
    programs[0].alloc(8 << 20);
    for program in &mut programs {
        assert_eq!(figures(program), (10 << 20, 2 << 20));
    }
    let reason = programs[4].refusal(4 << 20);
    assert!(reason.contains("2.0 MiB of 10.0 MiB free"), "{reason}");
    assert_eq!(figures(&mut other), (10 << 20, 10 << 20));
    // A new policy holds for all of them, once one connects.
    host.server
        .apply(Rules {
            unnamed: Some(quota(9 << 20)),
            ..Rules::default()
        })
        .expect("nothing to fit");
    host.guest_of(1).fence();
    assert_eq!(figures(&mut programs[1]), (9 << 20, 1 << 20));
}

#[test]
fn one_guest_cannot_take_all_sessions() {
    let host = Host::limited(cpu(), vgpu_executor::Limits::default(), 8);
    let mut programs: Vec<Guest> = (0..6).map(|_| host.guest_of(1)).collect();
    let reason = host.connect_of(1).ended();
    assert!(
        reason.contains("guest uid:1 has 6 programs here, its limit is 6"),
        "{reason}"
    );
    host.guest_of(2).fence();
    programs.pop();
    while host.server.sessions().len() > 5 {
        thread::yield_now();
    }
    host.guest_of(1).fence();
}

/// A guest over a network or from a virtual machine, about which nothing else is known.
fn peer(link: LinkKind) -> Peer {
    Peer {
        endpoint: link.to_string(),
        link,
        address: None,
        vm: None,
        machine: None,
        process: None,
        certificate: None,
    }
}

fn from_address(address: &str) -> Peer {
    Peer {
        address: Some(address.parse().expect("an address")),
        ..peer(LinkKind::Tcp)
    }
}

fn with_certificate(address: &str, number: u8) -> Peer {
    Peer {
        certificate: Some(Identity {
            names: vec![format!("guest{number}")],
            fingerprint: [number; 32],
        }),
        ..from_address(address)
    }
}

fn served(host: &Host, peer: Peer) -> Guest {
    let mut guest = host.connect_from(peer);
    guest.hello();
    guest
}

#[test]
fn certificates_at_one_address_cannot_take_all_sessions() {
    let host = Host::limited(cpu(), vgpu_executor::Limits::default(), 8);
    // Addresses of one network of 64 bits.
    let address = |i: u8| format!("2001:db8::{i}");
    let programs: Vec<Guest> = (0..6)
        .map(|i| served(&host, with_certificate(&address(i), i)))
        .collect();
    let reason = host
        .connect_from(with_certificate("2001:db8::77", 7))
        .ended();
    assert!(
        reason.contains("the unnamed guests at tcp:2001:db8::/64 together have 6 programs"),
        "{reason}"
    );
    let reason = host.connect_from(from_address("2001:db8::78")).ended();
    assert!(reason.contains("its limit is 6"), "{reason}");
    served(&host, with_certificate("2001:db8:0:1::1", 8)).fence();
    served(&host, from_address("10.0.0.1")).fence();
    drop(programs);
}

/// Every program of this machine may connect from any address of its loopback interface.
#[test]
fn certificates_at_loopback_addresses_cannot_take_all_sessions() {
    let host = Host::limited(cpu(), vgpu_executor::Limits::default(), 8);
    let certified = |i: u8| with_certificate(&format!("127.0.{i}.1"), i);
    let programs: Vec<Guest> = (0..6).map(|i| served(&host, certified(i))).collect();
    for further in [certified(7), with_certificate("::1", 8)] {
        let reason = host.connect_from(further).ended();
        let says = "the unnamed guests at tcp:loopback together have 6 programs";
        assert!(reason.contains(says), "{reason}");
    }
    served(&host, from_address("10.0.0.1")).fence();
    drop(programs);
}

#[test]
fn addresses_and_virtual_machines_have_one_quota_each() {
    let host = Host::new(cpu());
    host.server
        .apply(Rules {
            unnamed: Some(quota(10 << 20)),
            ..Rules::default()
        })
        .expect("nothing to fit");
    let machine = |cid| Peer {
        machine: Some(cid),
        ..peer(LinkKind::Vsock)
    };
    let monitor = |path: &str| Peer {
        endpoint: format!("vsock at {path}"),
        ..peer(LinkKind::Vsock)
    };
    for (one, same, other) in [
        (
            from_address("10.0.0.1"),
            from_address("::ffff:10.0.0.1"),
            from_address("10.0.0.2"),
        ),
        (
            from_address("2001:db8::1"),
            from_address("2001:db8::2"),
            from_address("2001:db8:0:1::1"),
        ),
        (machine(5), machine(5), machine(6)),
        (monitor("/run/a"), monitor("/run/a"), monitor("/run/b")),
    ] {
        let mut first = served(&host, one);
        first.alloc(8 << 20);
        assert_eq!(figures(&mut served(&host, same)), (10 << 20, 2 << 20));
        assert_eq!(figures(&mut served(&host, other)), (10 << 20, 10 << 20));
    }
}
