//! Hashes parts of files on a background thread and stores the hashes in the cache.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use vgpu_transport::wire::ContentHash;

use super::mapped_file::{FileRange, MappedFile};

/// Bytes that are read and hashed at once.
const CHUNK: usize = 256 << 10;

/// A part of a file whose hash is to be stored.
#[derive(Debug)]
pub(crate) struct UnstoredHash {
    /// The part of the file.
    pub(crate) range: FileRange,
    /// The hash of the range, if known. Otherwise the background thread computes it.
    pub(crate) hash: Option<ContentHash>,
}

/// Starts a thread of low priority that stores `hashes`, and computes those that are not known.
pub(crate) fn store_in_background(hashes: Vec<UnstoredHash>) {
    if hashes.is_empty() {
        return;
    }
    let spawned = std::thread::Builder::new()
        .name("vgpu-hash".into())
        .spawn(move || {
            // On Linux a priority belongs to one thread, not to the process: `who` 0 is this
            // thread.
            // SAFETY: `setpriority` takes integers only.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 15) };
            store(hashes);
        });
    if let Err(error) = spawned {
        tracing::debug!("hashes of weights are not stored: cannot start a thread: {error}");
    }
}

fn store(hashes: Vec<UnstoredHash>) {
    let mut by_file: Vec<(Arc<MappedFile>, Vec<UnstoredHash>)> = Vec::new();
    for hash in hashes {
        let file = &hash.range.file;
        let known = by_file
            .iter_mut()
            .find(|(known, _)| Arc::ptr_eq(known, file));
        match known {
            Some((_, hashes)) => hashes.push(hash),
            None => by_file.push((Arc::clone(file), vec![hash])),
        }
    }
    for (file, hashes) in by_file {
        let computed: io::Result<Vec<_>> = hashes
            .into_iter()
            .map(|UnstoredHash { range, hash }| {
                let FileRange { offset, len, .. } = range;
                let hash = hash.map_or_else(|| hash_range(&file, offset, len), Ok)?;
                Ok(((offset, len), hash))
            })
            .collect();
        // The check comes after the reads: the hashes are those of the unchanged file.
        let stored = match computed {
            Ok(hashes) if file.is_unchanged() => file.hashes.add(&file.identity, hashes),
            Ok(_) => continue,
            Err(error) => Err(error),
        };
        if let Err(error) = stored {
            tracing::debug!("hashes of weights are not stored: {error}");
        }
    }
}

fn hash_range(file: &MappedFile, offset: u64, len: u64) -> io::Result<ContentHash> {
    let mut hasher = blake3::Hasher::new();
    let mut chunk = vec![0; CHUNK.min(len as usize)];
    let mut at = 0;
    while at < len {
        let part = &mut chunk[..CHUNK.min((len - at) as usize)];
        file.file.read_exact_at(part, offset + at)?;
        hasher.update(part);
        at += part.len() as u64;
    }
    Ok(ContentHash(*hasher.finalize().as_bytes()))
}
