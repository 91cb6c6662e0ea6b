//! Guests that load a model with the messages for weights.

use std::sync::Arc;

use super::model::{for_weights, lookup, upload, write};
use super::{Guest, Host, bytes, cpu, wait_for};
use vgpu_engine::Engine;
use vgpu_executor::weights::{CacheOptions, Sharing};
use vgpu_executor::{Limits, Process, WeightStore};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{ContentHash, MIN_EXTENT, Reply, Request, Wanted};

/// Bytes of the model of most tests: two tensors and a small part in between.
pub(crate) const FIRST: u64 = 8 * MIN_EXTENT;
pub(crate) const SMALL: u64 = 512;
pub(crate) const SECOND: u64 = 4 * MIN_EXTENT;
pub(crate) const MODEL: u64 = FIRST + SMALL + SECOND;

/// What a buffer is charged for its first 64 extents.
pub(crate) const EXTENTS: u64 = 64 << 10;

/// A model in which all parts differ.
pub(crate) fn model(seed: u32) -> Vec<u8> {
    model_of(seed, MODEL)
}

/// The same with so many bytes, of which the first tensor has two thirds, but for the small part.
pub(crate) fn model_of(seed: u32, len: u64) -> Vec<u8> {
    let numbers: Vec<f32> = (0..len as u32 / 4)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 9) as f32)
        .collect();
    bytes(&numbers)
}

pub(crate) fn host(sharing: Sharing, cache: Option<CacheOptions>) -> (Host, WeightStore) {
    host_on(cpu(), sharing, cache)
}

pub(crate) fn host_on(
    engine: Arc<dyn Engine>,
    sharing: Sharing,
    cache: Option<CacheOptions>,
) -> (Host, WeightStore) {
    let host = Host::limited(engine, Limits::default(), 64);
    let weights = WeightStore::new(sharing, cache).expect("a store");
    let shared = host.server.share_weights(weights.clone());
    shared.expect("a thread");
    (host, weights)
}

/// A program of a user.
pub(crate) fn guest(host: &Host, uid: u32) -> Guest {
    let process = Process {
        pid: 1,
        uid,
        program: None,
    };
    let mut guest = host.connect_as(Some(process));
    guest.hello();
    guest
}

pub(crate) fn parts(model: &[u8]) -> [(u64, &[u8]); 2] {
    let (first, _) = small(model);
    let second = (first + SMALL) as usize;
    [
        (0, &model[..first as usize]),
        (second as u64, &model[second..]),
    ]
}

/// The small part between the tensors.
pub(crate) fn small(model: &[u8]) -> (u64, &[u8]) {
    let first = (model.len() as u64 - SMALL) / 3 * 2;
    (first, &model[first as usize..][..SMALL as usize])
}

/// Loads a model as a guest does. Returns the buffer, and the number of bytes that were not sent.
pub(crate) fn load(guest: &mut Guest, model: &[u8]) -> (BufferId, u64) {
    let (buffer, lengths) = for_weights(guest, model.len() as u64);
    let mut not_sent = 0;
    for (offset, part) in parts(model) {
        if lengths.contains(&(part.len() as u64)) && lookup(guest, buffer, offset, part) {
            not_sent += part.len() as u64;
        } else {
            upload(guest, buffer, offset, part);
        }
    }
    let (offset, part) = small(model);
    write(guest, buffer, offset, part);
    guest.send(&Request::Seal { buffer });
    guest.fence();
    (buffer, not_sent)
}

/// A guest with the model, after it has been hashed.
pub(crate) fn first(
    host: &Host,
    weights: &WeightStore,
    uid: u32,
    model: &[u8],
) -> (Guest, BufferId) {
    let before = weights.stats().extents;
    let mut first = guest(host, uid);
    let (buffer, not_sent) = load(&mut first, model);
    assert_eq!(not_sent, 0);
    wait_for("hashing", || weights.stats().extents == before + 2);
    (first, buffer)
}

/// The extents that the host reserves for a buffer.
pub(crate) fn ask(guest: &mut Guest, buffer: BufferId, wanted: &[(ContentHash, u64)]) -> Vec<u64> {
    let wanted = Wanted(wanted.to_vec());
    match guest.ask(&Request::Query { buffer, wanted }) {
        Reply::Have { indices, .. } => indices.0,
        other => panic!("{other:?}"),
    }
}
