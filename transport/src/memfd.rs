//! Memory files (memfd) that two processes may map.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

/// The seals of a file. Without `SHRINK` a process that has the file could truncate it, and an
/// access of another process to its mapping would raise SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// A system call that made a file has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {error}")]
pub struct MemfdError {
    /// What the system call was for.
    pub what: &'static str,
    /// The error of the system call.
    pub error: Errno,
}

impl MemfdError {
    fn of(what: &'static str) -> impl FnOnce(Errno) -> MemfdError {
        move |error| MemfdError { what, error }
    }
}

/// Makes a memfd of `size` zero bytes, sealed against resizing. `/proc/*/maps` shows the name.
///
/// # Errors
///
/// [`MemfdError`] when a system call fails.
pub fn sealed(name: &str, size: usize) -> Result<OwnedFd, MemfdError> {
    new_file(name, size, OVERCOMMIT.is_forbidden())
}

/// The setting of this machine.
static OVERCOMMIT: OvercommitSetting = OvercommitSetting::of("/proc/sys/vm/overcommit_memory");

/// Whether the kernel promises no more memory than it has. An administrator can change that at any
/// time.
struct OvercommitSetting {
    file: &'static str,
    /// Whether it was so when the file was read last.
    was_forbidden: AtomicBool,
}

impl OvercommitSetting {
    const fn of(file: &'static str) -> OvercommitSetting {
        OvercommitSetting {
            file,
            was_forbidden: AtomicBool::new(false),
        }
    }

    /// Whether it is so now, or was when a process that has given up its files could still read
    /// the setting.
    fn is_forbidden(&self) -> bool {
        match std::fs::read_to_string(self.file) {
            Ok(setting) => {
                let is_forbidden = setting.trim() == "2";
                self.was_forbidden.store(is_forbidden, Ordering::Relaxed);
                is_forbidden
            }
            Err(_) => self.was_forbidden.load(Ordering::Relaxed),
        }
    }
}

/// Makes a sealed file. `is_reserved` says whether the kernel has to provide its pages now. Where
/// overcommitment is forbidden, the kernel otherwise counts each page at its first access, and ends
/// the process with SIGBUS if there is none.
fn new_file(name: &str, size: usize, is_reserved: bool) -> Result<OwnedFd, MemfdError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file =
        rustix::fs::memfd_create(name, flags).map_err(MemfdError::of("creating a memory file"))?;
    rustix::fs::ftruncate(&file, size as u64)
        .map_err(MemfdError::of("setting the size of a memory file"))?;
    if is_reserved && size > 0 {
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size as u64)
            .map_err(MemfdError::of("reserving the memory of a memory file"))?;
    }
    rustix::fs::fcntl_add_seals(file.as_fd(), SEALS)
        .map_err(MemfdError::of("sealing a memory file"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overcommitment_that_is_forbidden_later_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("overcommit_memory");
        let setting = OvercommitSetting::of(file.to_str().unwrap().to_owned().leak());
        assert!(!setting.is_forbidden(), "nothing is known");
        for (text, is_forbidden) in [("0\n", false), ("2\n", true), ("1\n", false), ("2\n", true)] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(setting.is_forbidden(), is_forbidden, "{text}");
        }
        // The process has given up its files.
        std::fs::remove_file(&file).unwrap();
        assert!(setting.is_forbidden());
    }

    #[test]
    fn where_overcommitment_is_forbidden_memory_is_taken_at_once() {
        const SIZE: usize = 1 << 20;
        let pages = |is_reserved| {
            let file = new_file("test", SIZE, is_reserved).unwrap();
            rustix::fs::fstat(&file).unwrap().st_blocks as usize * 512
        };
        assert_eq!((pages(false), pages(true)), (0, SIZE));
        assert!(new_file("test", 0, true).is_ok());
    }
}
