//! Memory files (memfd) that two processes may map.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::OnceLock;

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
    new_file(name, size, is_overcommit_forbidden())
}

/// Whether the kernel promises no more memory than it has (`vm.overcommit_memory` is 2), as of the
/// first call.
fn is_overcommit_forbidden() -> bool {
    static IS_FORBIDDEN: OnceLock<bool> = OnceLock::new();
    *IS_FORBIDDEN.get_or_init(|| {
        let setting = std::fs::read_to_string("/proc/sys/vm/overcommit_memory");
        setting.is_ok_and(|setting| setting.trim() == "2")
    })
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
