//! A lock on one byte of a file, owned by the open file description and not by the process.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

/// Locks byte `at` of `file` until the file is closed. `false` when another open file holds the
/// lock.
///
/// `rustix` has process-owned locks only, which do not exclude two sessions of one process.
pub(super) fn lock_byte(file: &File, at: usize) -> io::Result<bool> {
    let range = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: at as libc::off_t,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the pointer refers to a local flock, which outlives the call. F_OFD_SETLK only reads
    // it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if result == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_has_one_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let open = || {
            File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .unwrap()
        };
        let (a, b) = (open(), open());
        assert!(lock_byte(&a, 0).unwrap());
        assert!(!lock_byte(&b, 0).unwrap());
        assert!(lock_byte(&b, 1).unwrap());
        drop(a);
        assert!(lock_byte(&b, 0).unwrap());
    }
}
