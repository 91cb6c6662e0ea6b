//! What we remember of files: the hashes of their parts, in the user's cache folder.
//!
//! One small text file for each file of weights: a line that says which one, one for each part, and one with a hash of
//! all of these. Anything that is not exactly as we write it counts as nothing. The folder is used only if nobody else
//! can write to it: who could, could make us ask for other bytes than the program's.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vgpu_transport::wire::{ContentHash, MAX_EXTENTS, MIN_EXTENT};

use super::files::{Identity, ModelFile, Region};

/// Bytes read at once.
const PIECE: usize = 256 << 10;

/// Files of ours that are kept; the oldest go.
const MOST_FILES: usize = 64;

/// What is remembered of one file.
#[derive(Debug)]
pub(super) struct Memory {
    /// Where it is kept, if anywhere.
    path: Option<PathBuf>,
    /// By offset and length.
    parts: Mutex<BTreeMap<(u64, u64), ContentHash>>,
}

/// A part of a file whose hash is to be remembered.
pub(super) struct Learned {
    pub(super) region: Region,
    /// If it was hashed anyway.
    pub(super) hash: Option<ContentHash>,
}

impl Memory {
    /// What is known of a file.
    pub(super) fn open(identity: &Identity) -> Memory {
        let title = title(identity);
        let name = blake3::hash(title.as_bytes()).to_hex();
        let path = folder().map(|folder| folder.join(&name[..32]));
        let text = path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        let parts = text
            .and_then(|text| parse(&text, &title))
            .unwrap_or_default();
        Memory {
            path,
            parts: Mutex::new(parts),
        }
    }

    pub(super) fn get(&self, offset: u64, len: u64) -> Option<ContentHash> {
        self.parts().get(&(offset, len)).copied()
    }

    /// Every hash and length that is known.
    pub(super) fn all(&self) -> Vec<(ContentHash, u64)> {
        let parts = self.parts();
        parts.iter().map(|(&(_, len), &hash)| (hash, len)).collect()
    }

    fn parts(&self) -> MutexGuard<'_, BTreeMap<(u64, u64), ContentHash>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers hashes of an unchanged file, for other processes, too.
    fn add(&self, identity: &Identity, news: Vec<((u64, u64), ContentHash)>) -> io::Result<()> {
        let text = {
            let mut parts = self.parts();
            parts.extend(news);
            while parts.len() > 4 * MAX_EXTENTS {
                parts.pop_first();
            }
            format(&parts, &title(identity))
        };
        let Some(path) = &self.path else {
            return Ok(());
        };
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{count}", std::process::id()));
        let written = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }
}

/// Hashes parts of files, and remembers them, on a thread of its own.
pub(super) fn later(learned: Vec<Learned>) {
    if learned.is_empty() {
        return;
    }
    let spawned = std::thread::Builder::new()
        .name("vgpu-weights".into())
        .spawn(move || {
            // The program's own work comes first. Threads have priorities of their own in Linux, whatever POSIX says.
            // SAFETY: a call without memory.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 15) };
            remember(learned);
        });
    if let Err(error) = spawned {
        tracing::debug!("weights are not remembered, there is no thread: {error}");
    }
}

fn remember(learned: Vec<Learned>) {
    let mut by_file: Vec<(Arc<ModelFile>, Vec<Learned>)> = Vec::new();
    for part in learned {
        let file = &part.region.file;
        match by_file
            .iter_mut()
            .find(|(known, _)| Arc::ptr_eq(known, file))
        {
            Some((_, parts)) => parts.push(part),
            None => by_file.push((Arc::clone(file), vec![part])),
        }
    }
    for (file, parts) in by_file {
        let news: io::Result<Vec<_>> = parts
            .into_iter()
            .map(|Learned { region, hash }| {
                let Region { offset, len, .. } = region;
                let hash = hash.map_or_else(|| hash_part(&file, offset, len), Ok)?;
                Ok(((offset, len), hash))
            })
            .collect();
        // Looked at last: what was read is what the file still is.
        let remembered = match news {
            Ok(news) if file.is_unchanged() => file.memory.add(&file.identity, news),
            Ok(_) => continue,
            Err(error) => Err(error),
        };
        if let Err(error) = remembered {
            tracing::debug!("hashes of weights are not remembered: {error}");
        }
    }
}

fn hash_part(file: &ModelFile, offset: u64, len: u64) -> io::Result<ContentHash> {
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE.min(len as usize)];
    let mut at = 0;
    while at < len {
        let part = &mut piece[..PIECE.min((len - at) as usize)];
        file.file.read_exact_at(part, offset + at)?;
        hasher.update(part);
        at += part.len() as u64;
    }
    Ok(ContentHash(*hasher.finalize().as_bytes()))
}

/// Our folder, if it is ours alone.
fn folder() -> Option<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    };
    let cache = variable("VGPU_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("ggml-vgpu")))
        .or_else(|| Some(variable("HOME")?.join(".cache/ggml-vgpu")))?;
    let folder = cache.join("weights");
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .ok()?;
    let metadata = fs::metadata(&folder).ok()?;
    // SAFETY: a call without memory, which cannot fail.
    let user = unsafe { libc::geteuid() };
    if metadata.uid() != user || metadata.mode() & 0o022 != 0 {
        tracing::debug!("{}: others can write there", folder.display());
        return None;
    }
    sweep(&folder);
    Some(folder)
}

/// Removes the oldest files, if there are too many.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    let entries = entries.flatten().filter_map(|entry| {
        let modified = entry.metadata().ok()?.modified().ok()?;
        Some((modified, entry.path()))
    });
    let mut files: Vec<_> = entries.collect();
    if files.len() > MOST_FILES {
        files.sort();
        for (_, path) in &files[..files.len() - MOST_FILES] {
            let _ = fs::remove_file(path);
        }
    }
}

/// The line that says which file this is about.
fn title(identity: &Identity) -> String {
    let Identity {
        device,
        inode,
        size,
        modified,
        changed,
    } = identity;
    format!(
        "weights 1 device {device} inode {inode} size {size} modified {}.{} changed {}.{}",
        modified.0, modified.1, changed.0, changed.1
    )
}

fn format(parts: &BTreeMap<(u64, u64), ContentHash>, title: &str) -> String {
    let mut text = format!("{title}\n");
    for ((offset, len), hash) in parts {
        let _ = writeln!(text, "{offset} {len} {hash}"); // a string takes it
    }
    let seal = blake3::hash(text.as_bytes());
    let _ = writeln!(text, "end {seal}");
    text
}

/// What [`format()`] has written; `None` when it is anything else.
fn parse(text: &str, title: &str) -> Option<BTreeMap<(u64, u64), ContentHash>> {
    let (body, seal) = text.strip_suffix('\n')?.rsplit_once('\n')?;
    let body = format!("{body}\n");
    if seal.strip_prefix("end ")? != blake3::hash(body.as_bytes()).to_hex().as_str() {
        return None;
    }
    let mut lines = body.lines();
    if lines.next()? != title {
        return None;
    }
    lines
        .map(|line| {
            let mut words = line.split(' ');
            let offset = words.next()?.parse().ok()?;
            let len = words
                .next()?
                .parse()
                .ok()
                .filter(|&len: &u64| len >= MIN_EXTENT)?;
            let hash = blake3::Hash::from_hex(words.next()?).ok()?;
            Some(((offset, len), ContentHash(*hash.as_bytes())))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_written_is_believed() {
        let parts: BTreeMap<_, _> = (1..4u64)
            .map(|i| ((i * 4096, i << 20), ContentHash([i as u8; 32])))
            .collect();
        let text = format(&parts, "a file");
        assert_eq!(parse(&text, "a file"), Some(parts));
        assert_eq!(parse(&text, "another file"), None);
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            if let Ok(changed) = String::from_utf8(bytes) {
                assert_eq!(parse(&changed, "a file"), None, "byte {at} changed");
            }
            assert_eq!(parse(&text[..at], "a file"), None, "cut at {at}");
        }
    }
}
