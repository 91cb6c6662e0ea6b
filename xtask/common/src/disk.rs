//! The space that is free on a disk, looked at before a command fills the disk.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A folder of the user, and how many bytes a command leaves there in all.
#[derive(Clone, Copy, Debug)]
pub struct Need<'a> {
    /// The folder, which exists.
    pub folder: &'a Path,
    /// Bytes of the folder when the command has ended. What is there already counts.
    pub bytes: u64,
}

/// Why a command does not begin.
#[derive(Debug, Error)]
pub enum SpaceError {
    /// The file system said nothing about a folder.
    #[error("looking for free space in {}", folder.display())]
    Unknown {
        /// The folder.
        folder: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A disk is too full.
    #[error(
        "the disk of {folders} has {:.1} GiB free, and {:.1} GiB more are needed there",
        gib(*free),
        gib(*needed)
    )]
    Short {
        /// The folders on this disk.
        folders: String,
        /// Bytes that this user may still write.
        free: u64,
        /// Bytes that the command writes.
        needed: u64,
    },
}

/// Compares what a command needs with what is free. Folders on one disk count together.
///
/// # Errors
/// If a disk has too little space, or its file system cannot say.
pub fn expect_space(needs: &[Need<'_>]) -> Result<(), SpaceError> {
    let mut disks: BTreeMap<u64, (Vec<&Path>, u64)> = BTreeMap::new();
    for need in needs {
        let unknown = |source| SpaceError::Unknown {
            folder: need.folder.to_path_buf(),
            source,
        };
        let device = fs::metadata(need.folder).map_err(unknown)?.dev();
        let more = need.bytes.saturating_sub(size_of_folder(need.folder));
        let (folders, needed) = disks.entry(device).or_default();
        folders.push(need.folder);
        *needed += more;
    }
    for (folders, needed) in disks.into_values() {
        let folder = folders[0];
        let disk = rustix::fs::statvfs(folder).map_err(|error| SpaceError::Unknown {
            folder: folder.to_path_buf(),
            source: error.into(),
        })?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        // Some network file systems do not know their size.
        if disk.f_blocks > 0 && free < needed {
            let names: Vec<String> = { folders.iter() }
                .map(|folder| folder.display().to_string())
                .collect();
            return Err(SpaceError::Short {
                folders: names.join(" and "),
                free,
                needed,
            });
        }
    }
    Ok(())
}

/// Bytes on the disk of all files below a folder. What cannot be read counts as nothing, and a file
/// with two names counts once for each.
fn size_of_folder(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(found) if found.is_dir() => size_of_folder(&entry.path()),
            Ok(found) => found.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_refused_with_the_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let disk = rustix::fs::statvfs(folder.path()).unwrap();
        let all = disk.f_blocks * disk.f_frsize;
        let need = |bytes| Need {
            folder: folder.path(),
            bytes,
        };
        expect_space(&[need(0)]).unwrap();
        // Each of two halves may fit, but both together are more than the disk has.
        let half = need(all / 2 + (1 << 30));
        let error = expect_space(&[half, half]).unwrap_err();
        assert!(
            matches!(&error, SpaceError::Short { needed, .. } if *needed > all),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains(&format!("{:.1} GiB more", gib(2 * half.bytes))),
            "{text}"
        );
    }

    #[test]
    fn what_is_there_already_counts() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("below")).unwrap();
        fs::write(folder.path().join("below/file"), vec![1; 3 << 20]).unwrap();
        let size = size_of_folder(folder.path());
        assert!((3 << 20..4 << 20).contains(&size), "{size}");
    }
}
