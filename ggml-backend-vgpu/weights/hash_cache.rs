//! Hashes of the parts of weight files, kept in the user's cache folder.
//!
//! Each weight file has one small text file in the folder:
//!
//! ```text
//! weights 1 device 2049 inode 131 size 4096000 modified 1700000000.0 changed 1700000000.0
//! OFFSET LENGTH HASH          (one line for each part)
//! end HASH                    (the hash of all lines above)
//! ```
//!
//! A file in any other form counts as absent. The folder is used only if no other user can write to
//! the folder: a user who can do so could make the plugin ask for other bytes than those of the
//! program.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use vgpu_transport::lock::{Guard, lock};
use vgpu_transport::wire::{ContentHash, MAX_EXTENTS, MIN_EXTENT};

use super::file_identity::FileIdentity;

/// Files in the cache folder. The oldest are removed.
const MAX_FILES: usize = 64;

/// The known hashes of one weight file.
#[derive(Debug)]
pub(super) struct HashCache {
    /// The text file; `None` if there is no usable cache folder.
    path: Option<PathBuf>,
    parts: Mutex<Parts>,
}

/// Hashes by offset and length in the weight file, in bytes.
type Parts = BTreeMap<(u64, u64), ContentHash>;

impl HashCache {
    /// Reads the known hashes of a file.
    pub(super) fn open(identity: &FileIdentity) -> HashCache {
        let title = title(identity);
        let name = blake3::hash(title.as_bytes()).to_hex();
        let path = folder().map(|folder| folder.join(&name[..32]));
        let text = path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        let parts = text
            .and_then(|text| parse(&text, &title))
            .unwrap_or_default();
        HashCache {
            path,
            parts: Mutex::new(parts),
        }
    }

    /// The hash of `len` bytes at `offset`, if known.
    pub(super) fn get(&self, offset: u64, len: u64) -> Option<ContentHash> {
        self.parts().get(&(offset, len)).copied()
    }

    /// All known hashes, with the lengths of their parts.
    pub(super) fn all(&self) -> Vec<(ContentHash, u64)> {
        let parts = self.parts();
        parts.iter().map(|(&(_, len), &hash)| (hash, len)).collect()
    }

    fn parts(&self) -> Guard<'_, Parts> {
        lock(&self.parts)
    }

    /// Adds hashes of an unchanged file, in memory and on disk.
    ///
    /// # Errors
    ///
    /// The error of writing the text file. The hashes are then known to this process only.
    pub(super) fn add(
        &self,
        identity: &FileIdentity,
        hashes: Vec<((u64, u64), ContentHash)>,
    ) -> io::Result<()> {
        let text = {
            let mut parts = self.parts();
            parts.extend(hashes);
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

/// The cache folder; `None` if it cannot be made, or if another user can write to it.
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
    // SAFETY: `geteuid` takes no argument and cannot fail.
    let user = unsafe { libc::geteuid() };
    if metadata.uid() != user || metadata.mode() & 0o022 != 0 {
        tracing::debug!(
            "{} is not used: another user can write to it",
            folder.display()
        );
        return None;
    }
    remove_oldest(&folder);
    Some(folder)
}

/// Removes the oldest files if there are more than [`MAX_FILES`].
fn remove_oldest(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    let entries = entries.flatten().filter_map(|entry| {
        let modified = entry.metadata().ok()?.modified().ok()?;
        Some((modified, entry.path()))
    });
    let mut files: Vec<_> = entries.collect();
    if files.len() > MAX_FILES {
        files.sort();
        for (_, path) in &files[..files.len() - MAX_FILES] {
            let _ = fs::remove_file(path);
        }
    }
}

/// The first line of the text file.
fn title(identity: &FileIdentity) -> String {
    let FileIdentity {
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

fn format(parts: &Parts, title: &str) -> String {
    let mut text = format!("{title}\n");
    for ((offset, len), hash) in parts {
        let _ = writeln!(text, "{offset} {len} {hash}"); // writing to a string cannot fail
    }
    let checksum = blake3::hash(text.as_bytes());
    let _ = writeln!(text, "end {checksum}");
    text
}

/// The inverse of [`format()`]; `None` for any other text.
fn parse(text: &str, title: &str) -> Option<Parts> {
    let (body, checksum) = text.strip_suffix('\n')?.rsplit_once('\n')?;
    let body = format!("{body}\n");
    if checksum.strip_prefix("end ")? != blake3::hash(body.as_bytes()).to_hex().as_str() {
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
    fn modified_cache_text_is_rejected() {
        let parts: Parts = (1..4u64)
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
