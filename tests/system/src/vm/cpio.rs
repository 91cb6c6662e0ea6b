//! An initramfs: the archive that a kernel unpacks as its first root (cpio, format "newc").

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use cpio::newc::{self, Builder};

const FOLDER: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// An archive that is being written.
pub(super) struct Archive {
    out: BufWriter<File>,
    inode: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    pub(super) fn create(path: &Path) -> Result<Archive> {
        let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Archive {
            out: BufWriter::with_capacity(1 << 20, file),
            inode: 0,
            folders: BTreeSet::new(),
        })
    }

    /// Adds a folder and its parents. Paths have no leading slash.
    pub(super) fn folder(&mut self, path: &str) -> Result<()> {
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let folder = &path[..end];
            if !folder.is_empty() && self.folders.insert(folder.to_owned()) {
                self.entry(folder, FOLDER, &[])?;
            }
        }
        Ok(())
    }

    /// Adds a copy of the file at `from`.
    pub(super) fn file(&mut self, path: &str, from: &Path) -> Result<()> {
        let read = || -> std::io::Result<(Vec<u8>, u32)> {
            Ok((std::fs::read(from)?, from.metadata()?.permissions().mode()))
        };
        let (content, mode) = read().with_context(|| format!("reading {}", from.display()))?;
        self.content(path, mode & 0o777, &content)
    }

    /// Adds a file with this content.
    pub(super) fn content(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.parents(path)?;
        self.entry(path, REGULAR | mode, content)
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) -> Result<()> {
        self.parents(path)?;
        self.entry(path, LINK | 0o777, target.as_bytes())
    }

    /// Adds all files below the folder `from`, except those below `without`.
    pub(super) fn tree(&mut self, from: &Path, without: &[&str]) -> Result<()> {
        self.branch(from, "", without)
    }

    fn branch(&mut self, from: &Path, path: &str, without: &[&str]) -> Result<()> {
        let reading = || format!("reading {}", from.display());
        let mut entries = std::fs::read_dir(from)
            .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
            .with_context(reading)?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let (name, place) = (entry.file_name(), entry.path());
            let name = name.to_str().with_context(reading)?;
            let path = [path, name].join(if path.is_empty() { "" } else { "/" });
            if without.contains(&path.as_str()) {
                continue;
            }
            let kind = entry.file_type().with_context(reading)?;
            if kind.is_symlink() {
                let target = std::fs::read_link(&place).with_context(reading)?;
                self.link(&path, target.to_str().with_context(reading)?)?;
            } else if kind.is_dir() {
                self.folder(&path)?;
                self.branch(&place, &path, without)?;
            } else {
                self.file(&path, &place)?;
            }
        }
        Ok(())
    }

    fn parents(&mut self, path: &str) -> Result<()> {
        path.rsplit_once('/')
            .map_or(Ok(()), |(folder, _)| self.folder(folder))
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.inode += 1;
        let size = u32::try_from(content.len()).with_context(|| format!("{path} has 4 GiB"))?;
        let head = Builder::new(path).ino(self.inode).mode(mode).nlink(1);
        let mut entry = head.write(&mut self.out, size);
        { entry.write_all(content) }
            .and_then(|()| entry.finish())
            .map(drop)
            .with_context(|| format!("writing {path} to an initramfs"))
    }

    /// Writes the end of the archive.
    pub(super) fn finish(self) -> Result<()> {
        newc::trailer(self.out)
            .and_then(|mut out| out.flush())
            .context("writing an initramfs")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_aligned_entries_and_an_end() {
        let scratch = xtask_common::scratch::Scratch::new().unwrap();
        let path = scratch.path().join("archive");
        let mut archive = Archive::create(&path).unwrap();
        archive.content("a/b/c", 0o755, b"12345").unwrap();
        archive.link("a/l", "b/c").unwrap();
        archive.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let (mut at, mut names) = (0, Vec::new());
        while at < bytes.len() {
            let field = |i: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + i * 8..at + 14 + i * 8]).unwrap();
                u32::from_str_radix(text, 16).unwrap() as usize
            };
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (size, len) = (field(6), field(11));
            let name = std::str::from_utf8(&bytes[at + 110..at + 110 + len - 1]).unwrap();
            names.push((name.to_owned(), size));
            at = (at + 110 + len).next_multiple_of(4) + size.next_multiple_of(4);
        }
        let expected = [
            ("a", 0),
            ("a/b", 0),
            ("a/b/c", 5),
            ("a/l", 3),
            ("TRAILER!!!", 0),
        ];
        assert_eq!(names, expected.map(|(name, size)| (name.to_owned(), size)));
    }
}
