//! Shared weights: reservations, proofs, and their limits.

mod common;

use std::cell::Cell;

use common::model::{for_weights, hash, lookup, read_all, upload, write};
use common::weights::{MODEL, SMALL, ask, first, guest, host, model, parts};
use common::{Guest, Host, MEMORY, PAGE, wait_for};
use vgpu_executor::weights::Sharing;
use vgpu_executor::{LinkKind, Peer};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{ContentHash, MAX_EXTENTS, MIN_EXTENT, Reply, Request};

/// A reservation for `buffer` of the two parts of a model.
fn reserve(guest: &mut Guest, buffer: BufferId, model: &[u8]) {
    let wanted = parts(model).map(|(_, part)| (hash(part), part.len() as u64));
    assert_eq!(ask(guest, buffer, &wanted), [0, 1]);
}

fn attach(guest: &mut Guest, buffer: BufferId, (offset, part): (u64, &[u8])) {
    guest.send(&Request::Attach {
        buffer,
        offset,
        len: part.len() as u64,
        hash: hash(part),
    });
}

#[test]
fn reservations_end_when_their_buffer_is_full_of_other_bytes() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(40);
    for attaches in [true, false] {
        let (mut one, one_has) = first(&host, &weights, 7, &model);
        let mut two = guest(&host, 7);
        let (buffer, _) = for_weights(&mut two, MODEL);
        reserve(&mut two, buffer, &model);
        if attaches {
            for part in parts(&model) {
                attach(&mut two, buffer, part);
            }
        }
        two.send(&Request::Fill {
            buffer,
            offset: 0,
            len: MODEL,
            value: 9,
        });
        two.fence();
        one.send(&Request::Free { buffer: one_has });
        one.fence();
        // Both buffers were charged for, and one is left: so is its memory, and no other.
        assert_eq!((weights.stats().extents, weights.stats().bytes), (0, 0));
        let pages = MODEL.next_multiple_of(PAGE);
        assert_eq!(host.engine.memory().free, MEMORY - pages);
        attach(&mut two, buffer, parts(&model)[1]);
        two.send(&Request::Fence {});
        let (reply, _) = two.receive();
        let Reply::Failed { reason, .. } = reply else {
            panic!("{reply:?}");
        };
        assert!(reason.contains("no longer on the host"), "{reason}");
        two.receive();
        assert!(
            read_all(&mut two, buffer, MODEL)
                .iter()
                .all(|&byte| byte == 9)
        );
    }
}

/// A model of small tensors: no tensor begins or ends at a page boundary, and each page between
/// two of them also has bytes of a part that is too small to be shared. The last other owner of the
/// tensors ends when the guest has attached some of them, for each number of them.
#[test]
fn reservations_of_a_model_last_while_its_other_parts_are_sent() {
    const TENSORS: usize = 8;
    const TENSOR: usize = (MIN_EXTENT + SMALL) as usize;
    const STRIDE: usize = TENSOR + SMALL as usize;
    const SIZE: u64 = (TENSORS * STRIDE) as u64;
    let bytes = &model(44)[..SIZE as usize];
    let tensor = |i: usize| ((i * STRIDE) as u64, &bytes[i * STRIDE..][..TENSOR]);
    let write_small_parts = |guest: &mut Guest, buffer| {
        for i in 0..TENSORS {
            let at = i * STRIDE + TENSOR;
            write(guest, buffer, at as u64, &bytes[at..][..SMALL as usize]);
        }
    };
    for attached in 0..TENSORS {
        let (host, weights) = host(Sharing::Tenant, None);
        let mut one = guest(&host, 7);
        let (one_has, _) = for_weights(&mut one, SIZE);
        for (offset, content) in (0..TENSORS).map(tensor) {
            upload(&mut one, one_has, offset, content);
        }
        write_small_parts(&mut one, one_has);
        one.send(&Request::Seal { buffer: one_has });
        wait_for("hashing", || weights.stats().extents == TENSORS as u64);

        let mut two = guest(&host, 7);
        let (buffer, _) = for_weights(&mut two, SIZE);
        let wanted = (0..TENSORS).map(|i| (hash(tensor(i).1), TENSOR as u64));
        let known = ask(&mut two, buffer, &wanted.collect::<Vec<_>>());
        assert_eq!(known.len(), TENSORS);
        for i in 0..attached {
            attach(&mut two, buffer, tensor(i));
        }
        write_small_parts(&mut two, buffer);
        two.fence();
        one.send(&Request::Free { buffer: one_has });
        one.fence();
        for i in attached..TENSORS {
            attach(&mut two, buffer, tensor(i));
        }
        two.fence();
        assert!(read_all(&mut two, buffer, SIZE) == bytes);
    }
}

#[test]
fn a_challenge_keeps_no_weights() {
    let (host, weights) = host(Sharing::All, None);
    let model = model(41);
    let (mut one, one_has) = first(&host, &weights, 7, &model);
    let mut other = guest(&host, 8);
    let (buffer, _) = for_weights(&mut other, MODEL);
    let [(offset, part), _] = parts(&model);
    let reply = other.ask(&Request::Lookup {
        buffer,
        offset,
        len: part.len() as u64,
        hash: hash(part),
    });
    let Reply::Prove { nonce, .. } = reply else {
        panic!("{reply:?}");
    };
    one.send(&Request::Free { buffer: one_has });
    one.fence();
    assert_eq!((weights.stats().extents, weights.stats().bytes), (0, 0));
    let proof = ContentHash(*blake3::keyed_hash(&nonce.0, part).as_bytes());
    let answer = other.ask(&Request::Proof { proof });
    assert!(matches!(answer, Reply::Missing { .. }), "{answer:?}");
}

/// A guest without a process that the host sees, at this address.
fn guest_at(host: &Host, address: [u8; 4]) -> Guest {
    let peer = Peer {
        endpoint: "tcp".into(),
        link: LinkKind::Tcp,
        address: Some(address.into()),
        vm: None,
        machine: None,
        certificate: None,
        process: None,
    };
    let mut guest = host.connect_from(peer);
    guest.hello();
    guest
}

#[test]
fn wrong_proofs_are_limited_and_others_are_unaffected() {
    wrong_proofs_are_limited(|host| guest(host, 8), |host| guest(host, 9));
}

/// Programs at an address share no weights without a proof, and answer together for wrong ones.
#[test]
fn wrong_proofs_of_an_address_are_limited_in_all_its_sessions() {
    wrong_proofs_are_limited(
        |host| guest_at(host, [192, 0, 2, 1]),
        |host| guest_at(host, [192, 0, 2, 2]),
    );
}

/// All addresses of the loopback interface are one.
#[test]
fn wrong_proofs_of_loopback_addresses_are_limited_together() {
    let last = Cell::new(0);
    wrong_proofs_are_limited(
        |host| {
            last.set(last.get() + 1);
            guest_at(host, [127, 0, 0, last.get()])
        },
        |host| guest_at(host, [192, 0, 2, 2]),
    );
}

fn wrong_proofs_are_limited(liar: impl Fn(&Host) -> Guest, other: impl Fn(&Host) -> Guest) {
    const MAX_WRONG: usize = 16;
    let (host, weights) = host(Sharing::All, None);
    let model = model(42);
    let (_one, _) = first(&host, &weights, 7, &model);
    let [(offset, part), _] = parts(&model);
    let mut proofs = 0;
    // New sessions get no new attempts.
    for _ in 0..3 {
        let mut liar = liar(&host);
        let (buffer, _) = for_weights(&mut liar, MODEL);
        for _ in 0..MAX_WRONG {
            let reply = liar.ask(&Request::Lookup {
                buffer,
                offset,
                len: part.len() as u64,
                hash: hash(part),
            });
            if matches!(reply, Reply::Missing { .. }) {
                break;
            }
            assert!(matches!(reply, Reply::Prove { .. }), "{reply:?}");
            let proof = ContentHash([0; 32]);
            let answer = liar.ask(&Request::Proof { proof });
            assert!(matches!(answer, Reply::Missing { .. }), "{answer:?}");
            proofs += 1;
        }
        // The session goes on.
        liar.write(buffer, 0, &[1; 10]);
        assert_eq!(liar.read(buffer, 0, 10), [1; 10]);
    }
    assert_eq!(proofs, MAX_WRONG);
    let mut other = other(&host);
    let (buffer, _) = for_weights(&mut other, MODEL);
    assert!(lookup(&mut other, buffer, offset, part));
}

#[test]
fn extents_taken_per_buffer_are_limited() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(43);
    let (_one, _) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (buffer, _) = for_weights(&mut two, MODEL);
    let (offset, part) = parts(&model)[1];
    let request = Request::Lookup {
        buffer,
        offset,
        len: part.len() as u64,
        hash: hash(part),
    };
    for _ in 0..MAX_EXTENTS {
        let answer = two.ask(&request);
        assert!(matches!(answer, Reply::Done { .. }), "{answer:?}");
    }
    assert!(!lookup(&mut two, buffer, offset, part));
    // The bytes can still be sent, and the buffer has those that it took.
    upload(&mut two, buffer, 0, parts(&model)[0].1);
    let read = read_all(&mut two, buffer, MODEL);
    for (offset, part) in parts(&model) {
        assert!(read[offset as usize..][..part.len()] == *part);
    }
}

/// A guest whose quota has no room for the entries of extents loads its model all the same: nothing
/// of it is shared.
#[test]
fn a_load_goes_on_without_memory_for_extents() {
    let (host, weights) = host(Sharing::Tenant, None);
    let model = model(44);
    let (_one, _) = first(&host, &weights, 7, &model);
    let mut two = guest(&host, 7);
    let (buffer, lengths) = for_weights(&mut two, MODEL);
    assert!(!lengths.is_empty());
    let (offset, part) = parts(&model)[1];
    let Reply::Memory { free, .. } = two.ask(&Request::Memory {}) else {
        panic!("no figures");
    };
    let rest = two.alloc(free / PAGE * PAGE);
    let wanted = [(hash(part), part.len() as u64)];
    assert!(ask(&mut two, buffer, &wanted).is_empty());
    assert!(!lookup(&mut two, buffer, offset, part));
    for (offset, part) in parts(&model) {
        upload(&mut two, buffer, offset, part);
    }
    let read = read_all(&mut two, buffer, MODEL);
    for (offset, part) in parts(&model) {
        assert!(read[offset as usize..][..part.len()] == *part);
    }
    assert_eq!(weights.stats().extents, 2);
    // With room again, the host gives what it has.
    two.send(&Request::Free { buffer: rest });
    two.fence();
    assert!(lookup(&mut two, buffer, offset, part));
}
