//! Shared weights: access, copy on write, and the release of memory.

mod common;

use std::sync::Arc;

use common::model::{for_weights, hash, lookup, read_all, upload, write};
use common::weights::{EXTENTS, FIRST, MODEL, SECOND, ask, first, guest, host, load, model, parts};
use common::{Guest, Host, MEMORY, PAGE, add, bytes, wait_for};
use vgpu_cpu::CpuEngine;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{GuestRule, Limits, Policy, Rules, WeightStore};
use vgpu_transport::ir::BufferId;
use vgpu_transport::size::shown;
use vgpu_transport::wire::{
    ContentHash, GraphId, MAX_EXTENTS, MAX_QUERIED, MIN_EXTENT, Reply, Request, Wanted,
};

const GRAPH: GraphId = GraphId(1);

#[test]
fn second_guest_uploads_nothing_and_writes_are_private() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(1);
    let (mut one, one_has) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (two_has, not_sent) = load(&mut two, &model);
    assert_eq!(not_sent, FIRST + SECOND);
    assert!(read_all(&mut two, two_has, MODEL) == model);
    let mut witness = guest(&host, 7);
    let (witness_has, _) = load(&mut witness, &model);

    // By messages: WRITE, FILL, COPY.
    one.write(one_has, 10, &[1; 100]);
    let fill = Request::Fill {
        buffer: two_has,
        offset: MIN_EXTENT,
        len: MIN_EXTENT,
        value: 2,
    };
    two.send(&fill);
    one.send(&Request::Copy {
        dst: one_has,
        dst_offset: 3 * MIN_EXTENT,
        src: one_has,
        src_offset: 0,
        len: 1000,
    });
    let mut expected = [model.clone(), model.clone()];
    expected[0][10..110].fill(1);
    expected[0].copy_within(..1000, 3 * MIN_EXTENT as usize);
    expected[1][MIN_EXTENT as usize..][..MIN_EXTENT as usize].fill(2);
    assert!(read_all(&mut one, one_has, MODEL) == expected[0]);
    assert!(read_all(&mut two, two_has, MODEL) == expected[1]);

    assert!(read_all(&mut witness, witness_has, MODEL) == model);

    // The next guest gets the uploaded bytes, not later changes.
    let mut next = guest(&host, 7);
    let (next_has, not_sent) = load(&mut next, &model);
    assert_eq!(not_sent, FIRST + SECOND);
    assert!(read_all(&mut next, next_has, MODEL) == model);
    assert_eq!(weights.stats().not_sent, 3 * (FIRST + SECOND));
    let sessions = host.server.sessions();
    let shared: Vec<u64> = sessions.iter().map(|s| s.stats.weights_shared).collect();
    assert_eq!(shared[0], 0);
    assert!(shared[1] > (FIRST + SECOND) * 9 / 10, "{shared:?}");
}

#[test]
fn lookup_takes_kept_weights_without_waiting_even_after_their_guest_ended() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(30);
    let (one, _) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (buffer, _) = for_weights(&mut two, MODEL);
    let [first, second] = parts(&model).map(|(_, part)| (hash(part), part.len() as u64));
    let nobodys = (ContentHash([1; 32]), FIRST);
    let wanted = [nobodys, first, (first.0, SECOND), second, second];
    assert_eq!(ask(&mut two, buffer, &wanted), [1, 3, 4]);
    drop(one);
    wait_for("the first one's end", || host.server.sessions().len() == 1);
    for (offset, part) in parts(&model) {
        two.send(&Request::Attach {
            buffer,
            offset,
            len: part.len() as u64,
            hash: hash(part),
        });
    }
    let read = read_all(&mut two, buffer, MODEL);
    for (offset, part) in parts(&model) {
        assert!(read[offset as usize..][..part.len()] == *part);
    }
    assert_eq!(weights.stats().not_sent, FIRST + SECOND);
    // A session reserves no more bytes than it has been charged for.
    let mut small = guest(&host, 7);
    let (buffer, _) = for_weights(&mut small, SECOND);
    assert_eq!(ask(&mut small, buffer, &wanted), [3, 4]);
    // Only known extents are reserved, and only until the buffer is sealed.
    small.send(&Request::Seal { buffer });
    assert_eq!(ask(&mut small, buffer, &wanted).len(), 0);
    small.send(&Request::Attach {
        buffer,
        offset: 0,
        len: SECOND,
        hash: second.0,
    });
    let reason = small.ended();
    assert!(reason.contains("which QUERY has not reserved"), "{reason}");
    // The host tells other users of no extents.
    let mut other = guest(&host, 8);
    let (buffer, _) = for_weights(&mut other, MODEL);
    assert_eq!(ask(&mut other, buffer, &wanted).len(), 0);
    let wanted = Wanted(vec![first; MAX_QUERIED + 1]);
    other.send(&Request::Query { buffer, wanted });
    let reason = other.ended();
    assert!(reason.contains("QUERY names 1025 extents"), "{reason}");
    drop((two, host));
}

#[test]
fn graph_output_to_shared_weights_is_private() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(2);
    let (mut one, one_has) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (two_has, _) = load(&mut two, &model);
    let mut witness = guest(&host, 7);
    let (witness_has, _) = load(&mut witness, &model);
    const COUNT: u64 = 20_000;
    let ones = two.alloc_with(&bytes(&[1.0; COUNT as usize]));
    two.graph(GRAPH, &add(COUNT, two_has, two_has, ones));
    two.submit(GRAPH);
    two.submit(GRAPH);
    let numbers = |bytes: &[u8]| common::floats(&bytes[..4 * COUNT as usize]);
    let plus = |by: f32| -> Vec<f32> { numbers(&model).iter().map(|n| n + by).collect() };
    assert_eq!(numbers(&read_all(&mut two, two_has, MODEL)), plus(2.0));
    assert!(read_all(&mut one, one_has, MODEL) == model);

    // The first owner, with a graph.
    let ones = one.alloc_with(&bytes(&[1.0; COUNT as usize]));
    one.graph(GRAPH, &add(COUNT, one_has, one_has, ones));
    one.submit(GRAPH);
    assert_eq!(numbers(&read_all(&mut one, one_has, MODEL)), plus(1.0));
    assert_eq!(numbers(&read_all(&mut two, two_has, MODEL)), plus(2.0));
    assert!(read_all(&mut witness, witness_has, MODEL) == model);
    // The host offers no freed contents.
    witness.send(&Request::Free {
        buffer: witness_has,
    });
    witness.fence();
    let mut next = guest(&host, 7);
    let (next_has, not_sent) = load(&mut next, &model);
    assert_eq!(not_sent, SECOND);
    assert!(read_all(&mut next, next_has, MODEL) == model);
}

#[test]
fn graphs_compiled_before_completion_or_merge_of_weights_still_run() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(8);
    let (mut one, one_has) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (two_has, _) = for_weights(&mut two, MODEL);
    const COUNT: u64 = 10;
    let numbers = |by: f32| -> Vec<f32> {
        let numbers = common::floats(&model[..4 * COUNT as usize]);
        numbers.iter().map(|n| n + by).collect()
    };
    let ones = two.alloc_with(&bytes(&[1.0; COUNT as usize]));
    let result = two.alloc(4 * COUNT);
    let (reader, writer) = (GRAPH, GraphId(2));
    two.graph(reader, &add(COUNT, result, two_has, ones));
    two.graph(writer, &add(COUNT, two_has, two_has, ones));
    for (offset, part) in parts(&model) {
        upload(&mut two, two_has, offset, part);
    }
    two.submit(reader);
    assert_eq!(
        common::floats(&two.read(result, 0, 4 * COUNT)),
        numbers(1.0)
    );
    two.send(&Request::Seal { buffer: two_has });
    two.submit(reader);
    wait_for("the second copy's end", || {
        two.fence();
        weights.stats().merged >= FIRST + SECOND
    });
    two.submit(reader);
    assert_eq!(
        common::floats(&two.read(result, 0, 4 * COUNT)),
        numbers(1.0)
    );
    two.submit(writer);
    two.submit(writer);
    two.submit(reader);
    assert_eq!(
        common::floats(&two.read(result, 0, 4 * COUNT)),
        numbers(3.0)
    );
    assert!(read_all(&mut one, one_has, MODEL) == model);
}

#[test]
fn terminated_guests_free_their_weights_and_others_keep_theirs() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(3);
    let (one, _) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (two_has, not_sent) = load(&mut two, &model);
    assert_eq!(not_sent, FIRST + SECOND);
    drop(one);
    wait_for("the first one's end", || host.server.sessions().len() == 1);
    assert!(read_all(&mut two, two_has, MODEL) == model);
    let mut three = guest(&host, 7);
    let (three_has, not_sent) = load(&mut three, &model);
    assert_eq!(
        not_sent,
        FIRST + SECOND,
        "the second one keeps it for others"
    );
    drop(two);
    assert!(read_all(&mut three, three_has, MODEL) == model);
    drop(three);
    host.wait_until_empty();
    assert_eq!(host.engine.memory().free, MEMORY);
    assert_eq!((weights.stats().extents, weights.stats().bytes), (0, 0));
    let mut four = guest(&host, 7);
    assert_eq!(load(&mut four, &model).1, 0, "it is gone");
}

#[test]
fn equal_uploads_of_two_guests_are_merged() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(4);
    let mut guests: Vec<Guest> = (0..3).map(|_| guest(&host, 7)).collect();
    // All guests ask before the first upload, so that the host knows no content yet.
    let buffers: Vec<BufferId> = guests
        .iter_mut()
        .map(|guest| {
            let (buffer, lengths) = for_weights(guest, MODEL);
            assert!(lengths.is_empty(), "{lengths:?}");
            buffer
        })
        .collect();
    for (guest, &buffer) in guests.iter_mut().zip(&buffers) {
        write(guest, buffer, 0, &model);
        for (offset, part) in parts(&model) {
            let len = part.len() as u64;
            guest.send(&Request::Extent {
                buffer,
                offset,
                len,
            });
        }
        guest.send(&Request::Seal { buffer });
        guest.fence();
    }
    wait_for("merging", || {
        weights.stats().merged > 2 * (FIRST + SECOND) * 9 / 10
    });
    for (guest, &buffer) in guests.iter_mut().zip(&buffers) {
        assert!(read_all(guest, buffer, MODEL) == model);
    }
    // From here on the guests write different data.
    for (i, (guest, &buffer)) in guests.iter_mut().zip(&buffers).enumerate() {
        guest.write(buffer, 5000, &[i as u8; 10_000]);
    }
    for (i, (guest, &buffer)) in guests.iter_mut().zip(&buffers).enumerate() {
        let mut expected = model.clone();
        expected[5000..15_000].fill(i as u8);
        assert!(read_all(guest, buffer, MODEL) == expected);
    }
}

#[test]
fn lookup_returns_only_content_uploaded_under_the_same_hash() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(5);
    let (_one, _) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (buffer, _) = for_weights(&mut two, MODEL);
    let [(_, part), _] = parts(&model);
    // A random hash, a hash with one wrong bit, the right hash with a wrong length.
    let mut near = hash(part);
    near.0[31] ^= 1;
    for (hash, len) in [
        (ContentHash([0; 32]), FIRST),
        (near, FIRST),
        (hash(part), FIRST - 1),
        (hash(part), FIRST + 1),
    ] {
        let answer = two.ask(&Request::Lookup {
            buffer,
            offset: 0,
            len,
            hash,
        });
        assert!(matches!(answer, Reply::Missing { .. }), "{answer:?}");
    }
    assert!(read_all(&mut two, buffer, MODEL).iter().all(|&b| b == 0));
    // Many lookups of unknown contents.
    for i in 0..20_000u32 {
        let mut hash = ContentHash([9; 32]);
        hash.0[..4].copy_from_slice(&i.to_le_bytes());
        two.send(&Request::Lookup {
            buffer,
            offset: 0,
            len: FIRST,
            hash,
        });
        if i % 64 == 63 {
            for _ in 0..64 {
                assert!(matches!(two.receive().0, Reply::Missing { .. }));
            }
        }
    }
    assert_eq!(weights.stats().extents, 2);
}

#[test]
fn sealed_extent_has_the_hash_of_its_actual_content() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(6);
    // The extent is named, never written, and sealed. The host stores zeros under the hash of
    // zeros.
    let mut liar = guest(&host, 7);
    let (buffer, _) = for_weights(&mut liar, FIRST);
    let (offset, len) = (0, FIRST);
    liar.send(&Request::Extent {
        buffer,
        offset,
        len,
    });
    liar.send(&Request::Seal { buffer });
    liar.fence();
    wait_for("hashing", || weights.stats().extents == 1);
    // Each extent is named and written, and its buffer is never sealed. The first session ends at
    // once.
    for is_staying in [false, true] {
        let mut slow = guest(&host, 7);
        let (buffer, _) = for_weights(&mut slow, FIRST);
        upload(&mut slow, buffer, 0, &model[..FIRST as usize]);
        slow.fence();
        if is_staying {
            let mut two = guest(&host, 7);
            let (buffer, lengths) = for_weights(&mut two, FIRST);
            assert_eq!(lengths, [FIRST], "of the zeros");
            assert!(!lookup(&mut two, buffer, 0, &model[..FIRST as usize]));
            assert!(lookup(&mut two, buffer, 0, &vec![0; FIRST as usize]));
            assert!(read_all(&mut two, buffer, FIRST).iter().all(|&b| b == 0));
        }
    }
}

#[test]
fn interrupted_upload_is_not_offered_and_can_restart() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(7);
    let mut broken = guest(&host, 7);
    let (buffer, _) = for_weights(&mut broken, MODEL);
    upload(&mut broken, buffer, 0, &model[..(FIRST / 2) as usize]);
    drop(broken);
    host.wait_until_empty();
    assert_eq!(weights.stats().extents, 0);
    assert_eq!(host.engine.memory().free, MEMORY);
    let (mut one, one_has) = first(&host, &weights, 7, &model);
    assert!(read_all(&mut one, one_has, MODEL) == model);
}

#[test]
fn weights_are_not_shared_with_other_users() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(8);
    let (_one, _) = first(&host, &weights, 7, &model);
    let mut other = guest(&host, 8);
    let (buffer, lengths) = for_weights(&mut other, MODEL);
    assert!(lengths.is_empty(), "not even the lengths: {lengths:?}");
    let [(offset, part), _] = parts(&model);
    assert!(!lookup(&mut other, buffer, offset, part));
    // The same for a guest without an identity.
    let (mut source, mut twin) = (host.guest(), host.guest());
    load(&mut source, &model);
    wait_for("hashing", || weights.stats().extents == 4);
    let (buffer, lengths) = for_weights(&mut twin, MODEL);
    assert!(lengths.is_empty(), "{lengths:?}");
    assert!(!lookup(&mut twin, buffer, offset, part));
}

#[test]
fn sharing_among_all_users_requires_a_proof() {
    let (host, weights) = host(Sharing::All, None);
    let model = model(9);
    let (_one, _) = first(&host, &weights, 7, &model);
    let mut other = guest(&host, 8);
    let (buffer, lengths) = for_weights(&mut other, MODEL);
    assert_eq!(lengths.len(), 2);
    let [(offset, part), _] = parts(&model);
    let len = part.len() as u64;
    let ask = Request::Lookup {
        buffer,
        offset,
        len,
        hash: hash(part),
    };
    // Neither the hash alone, nor an old proof, nor a proof of a part of the bytes suffices.
    let mut nonces = Vec::new();
    for wrong in 0..3 {
        let Reply::Prove { nonce, .. } = other.ask(&ask) else {
            panic!("no proof was asked for");
        };
        assert!(!nonces.contains(&nonce));
        let mut almost = part.to_vec();
        almost[part.len() - 1] ^= 1;
        let proof = match wrong {
            0 => hash(part).0,
            1 => *blake3::keyed_hash(&nonce.0, &almost).as_bytes(),
            _ => *blake3::keyed_hash(&nonces[0].0, part).as_bytes(),
        };
        nonces.push(nonce);
        let answer = other.ask(&Request::Proof {
            proof: ContentHash(proof),
        });
        assert!(matches!(answer, Reply::Missing { .. }), "{answer:?}");
    }
    assert!(read_all(&mut other, buffer, len).iter().all(|&b| b == 0));
    assert!(lookup(&mut other, buffer, offset, part));
    assert!(read_all(&mut other, buffer, len) == part);
    // The host does not ask a sharing domain for a second proof.
    let mut again = guest(&host, 8);
    let (buffer, _) = for_weights(&mut again, MODEL);
    let ask = Request::Lookup {
        buffer,
        offset,
        len,
        hash: hash(part),
    };
    assert!(matches!(again.ask(&ask), Reply::Done { .. }));
    // A proof belongs to the challenge directly before it.
    let mut late = guest(&host, 9);
    let (buffer, _) = for_weights(&mut late, MODEL);
    let ask = Request::Lookup {
        buffer,
        offset,
        len,
        hash: hash(part),
    };
    let Reply::Prove { nonce, .. } = late.ask(&ask) else {
        panic!("no proof was asked for");
    };
    late.fence();
    late.send(&Request::Proof {
        proof: ContentHash(*blake3::keyed_hash(&nonce.0, part).as_bytes()),
    });
    let reason = late.ended();
    assert!(reason.contains("PROOF without a challenge"), "{reason}");
}

#[test]
fn violations_of_the_weights_protocol_end_the_session() {
    let (host, _weights) = host(Sharing::Tenant, None);
    let extent = |buffer, offset, len| Request::Extent {
        buffer,
        offset,
        len,
    };
    let lookup = |buffer, offset, len| Request::Lookup {
        buffer,
        offset,
        len,
        hash: ContentHash([0; 32]),
    };
    // The reason, and the request on a buffer for weights and on another buffer.
    type Case<'a> = (&'a str, &'a dyn Fn(BufferId, BufferId) -> Request);
    let cases: [Case<'_>; 9] = [
        ("an extent of 65535 bytes", &|w, _| {
            extent(w, 0, MIN_EXTENT - 1)
        }),
        ("an extent of 0 bytes", &|w, _| lookup(w, 0, 0)),
        ("accesses", &|w, _| extent(w, 1, MODEL)),
        ("accesses", &|w, _| lookup(w, u64::MAX, MODEL)),
        ("not for weights", &|_, plain| extent(plain, 0, MIN_EXTENT)),
        ("not for weights", &|_, plain| lookup(plain, 0, MIN_EXTENT)),
        ("not for weights", &|_, plain| Request::Seal {
            buffer: plain,
        }),
        ("does not have", &|_, _| Request::Weights {
            buffer: BufferId(77),
        }),
        ("PROOF without a challenge", &|_, _| Request::Proof {
            proof: ContentHash([0; 32]),
        }),
    ];
    for (expected, request) in cases {
        let mut guest = guest(&host, 7);
        let (weights, _) = for_weights(&mut guest, MODEL);
        let plain = guest.alloc(MODEL);
        guest.send(&request(weights, plain));
        let reason = guest.ended();
        assert!(reason.contains(expected), "{expected}: {reason}");
    }
    host.wait_until_empty();
}

#[test]
fn extents_per_buffer_are_limited() {
    const MEMORY: u64 = 1 << 30; // never used
    let engine = CpuEngine::new(1, Some(MEMORY)).expect("a thread");
    let host = Host::limited(Arc::new(engine), Limits::default(), 64);
    let weights = WeightStore::new(Sharing::Tenant, None).expect("a store");
    host.server.share_weights(weights).expect("a thread");
    let mut guest = guest(&host, 7);
    let (buffer, _) = for_weights(&mut guest, (MAX_EXTENTS as u64 + 1) * MIN_EXTENT);
    let extent = |offset| Request::Extent {
        buffer,
        offset,
        len: MIN_EXTENT,
    };
    // Overlapping extents replace each other.
    for i in 0..2 * MAX_EXTENTS as u64 {
        guest.send(&extent(i % 1000));
    }
    guest.fence();
    for i in 0..=MAX_EXTENTS as u64 {
        guest.send(&extent(i * MIN_EXTENT));
    }
    assert!(guest.ended().contains("more than 4096 extents"));
}

#[test]
fn host_without_sharing_reports_it_and_serves_guests() {
    let (host, _weights) = host(Sharing::Off, None);
    let mut guest = guest(&host, 7);
    let buffer = guest.alloc_with(&[5; 1000]);
    let answer = guest.ask(&Request::Weights { buffer });
    assert!(matches!(answer, Reply::Refused { .. }), "{answer:?}");
    assert_eq!(guest.read(buffer, 0, 1000), [5; 1000]);
}

#[test]
fn copies_of_shared_weights_must_fit_the_memory() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(10);
    let (mut one, one_has) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (two_has, _) = load(&mut two, &model);
    let Reply::Memory { free, .. } = one.ask(&Request::Memory {}) else {
        panic!("no figures");
    };
    let filler = one.alloc(free / PAGE * PAGE);
    one.write(one_has, 0, &[1]);
    let (failed, _) = {
        one.send(&Request::Fence {});
        one.receive()
    };
    let Reply::Failed { reason, .. } = failed else {
        panic!("{failed:?}");
    };
    assert!(reason.contains("out of memory"), "{reason}");
    one.receive();
    assert!(read_all(&mut one, one_has, MODEL) == model);
    one.send(&Request::Free { buffer: filler });
    one.write(one_has, 0, &[!model[0]]);
    assert_eq!(one.read(one_has, 0, 1), [!model[0]]);
    assert!(read_all(&mut two, two_has, MODEL) == model);
}

/// The engine has memory left for the copy.
#[test]
fn copies_of_shared_weights_are_charged_to_their_guest() {
    let (host, weights) = host(Sharing::Tenant, None);
    let apply = |memory| {
        let alice = GuestRule {
            name: "alice".into(),
            uids: vec![7],
            cids: Vec::new(),
            certificates: Vec::new(),
            policy: Policy {
                memory: Some(memory),
                ..Policy::default()
            },
        };
        let rules = Rules {
            guests: vec![alice],
            ..Rules::default()
        };
        host.server.apply(rules).expect("it fits");
    };
    let free = |guest: &mut Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    };
    let two_buffers = 2 * (MODEL.next_multiple_of(PAGE) + EXTENTS);
    apply(two_buffers);
    let model = model(14);
    let (mut one, one_has) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (two_has, not_sent) = load(&mut two, &model);
    assert_eq!(not_sent, FIRST + SECOND);
    one.write(one_has, 0, &[!model[0]]);
    one.send(&Request::Fence {});
    let (failed, _) = one.receive();
    let Reply::Failed { reason, .. } = failed else {
        panic!("{failed:?}");
    };
    let (first, all) = (shown(FIRST), shown(two_buffers));
    let figures = format!("{first} wanted, 0 B of {all} free");
    assert!(reason.contains(&figures), "{reason}");
    one.receive();
    assert!(read_all(&mut one, one_has, MODEL) == model);
    // With room for the copy, and one byte beside it.
    apply(two_buffers + FIRST + 1);
    one.write(one_has, 0, &[!model[0]]);
    assert_eq!(one.read(one_has, 0, 1), [!model[0]]);
    assert_eq!(free(&mut one), 1);
    assert!(read_all(&mut two, two_has, MODEL) == model);
    one.send(&Request::Free { buffer: one_has });
    assert_eq!(free(&mut one), two_buffers / 2 + FIRST + 1);
}

#[test]
fn eight_guests_share_one_copy() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = Arc::new(model(13));
    let (one, _) = first(&host, &weights, 7, &model);
    let others: Vec<Guest> = (1..8)
        .map(|_| {
            let mut guest = guest(&host, 7);
            let (buffer, not_sent) = load(&mut guest, &model);
            assert_eq!(not_sent, FIRST + SECOND);
            assert!(read_all(&mut guest, buffer, MODEL) == *model);
            guest
        })
        .collect();
    let sessions = host.server.sessions();
    let held: u64 = sessions
        .iter()
        .map(|s| s.stats.buffer_bytes - s.stats.weights_shared)
        .sum();
    assert!(held * 10 <= MODEL * 12, "{held} bytes for {MODEL}");
    drop((one, others));
    host.wait_until_empty();
    assert_eq!(host.engine.memory().free, MEMORY);
}
