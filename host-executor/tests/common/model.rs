//! Weights as guests upload and look them up.

use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{ContentHash, Lengths, MIN_EXTENT, Reply, Request};

use super::Guest;

pub(crate) fn hash(bytes: &[u8]) -> ContentHash {
    ContentHash(*blake3::hash(bytes).as_bytes())
}

/// Makes a buffer for weights. Returns the buffer and the lengths that the host knows.
pub(crate) fn for_weights(guest: &mut Guest, size: u64) -> (BufferId, Vec<u64>) {
    let buffer = guest.alloc(size);
    match guest.ask(&Request::Weights { buffer }) {
        Reply::Held {
            lengths: Lengths(lengths),
            ..
        } => (buffer, lengths),
        other => panic!("{other:?}"),
    }
}

/// Looks an extent up. Returns whether the host has it.
pub(crate) fn lookup(guest: &mut Guest, buffer: BufferId, offset: u64, content: &[u8]) -> bool {
    let answer = guest.ask(&Request::Lookup {
        buffer,
        offset,
        len: content.len() as u64,
        hash: hash(content),
    });
    let answer = match answer {
        Reply::Prove { nonce, .. } => guest.ask(&Request::Proof {
            proof: ContentHash(*blake3::keyed_hash(&nonce.0, content).as_bytes()),
        }),
        answer => answer,
    };
    match answer {
        Reply::Done { .. } => true,
        Reply::Missing { .. } => false,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn upload(guest: &mut Guest, buffer: BufferId, offset: u64, content: &[u8]) {
    let len = content.len() as u64;
    guest.send(&Request::Extent {
        buffer,
        offset,
        len,
    });
    write(guest, buffer, offset, content);
}

pub(crate) fn write(guest: &mut Guest, buffer: BufferId, offset: u64, content: &[u8]) {
    for (i, chunk) in content.chunks(MIN_EXTENT as usize).enumerate() {
        guest.write(buffer, offset + i as u64 * MIN_EXTENT, chunk);
    }
}

pub(crate) fn read_all(guest: &mut Guest, buffer: BufferId, len: u64) -> Vec<u8> {
    let chunk = MIN_EXTENT;
    (0..len)
        .step_by(chunk as usize)
        .flat_map(|at| guest.read(buffer, at, chunk.min(len - at)))
        .collect()
}
