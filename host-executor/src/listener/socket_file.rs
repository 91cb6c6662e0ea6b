//! A stream socket at a path of the file system.
#![forbid(unsafe_code)]

use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Permissions of a socket for which the configuration says nothing: its owner and group.
pub const DEFAULT_MODE: u32 = 0o660;

/// Why a process cannot listen at a path.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum SocketFileError {
    #[error("{path}: another process already listens here", path = path.display())]
    InUse { path: PathBuf },
    #[error("{path} exists and is not a socket", path = path.display())]
    NotASocket { path: PathBuf },
    #[error("{path}: {what}: {error}", path = path.display())]
    System {
        path: PathBuf,
        what: &'static str,
        error: io::Error,
    },
}

/// The socket file of a listener. Dropping this removes the file, unless another file has taken its
/// place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode: identifies the file.
    file: (u64, u64),
    /// Whether another owner removes the file.
    is_kept: bool,
}

impl SocketFile {
    /// The file at `path`, which this process has just bound.
    fn of(path: &Path) -> io::Result<SocketFile> {
        let file = std::fs::symlink_metadata(path)?;
        Ok(SocketFile {
            path: path.to_owned(),
            file: (file.dev(), file.ino()),
            is_kept: false,
        })
    }
}

impl SocketFile {
    /// Leaves the file to its listener, which removes it.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let file = std::fs::symlink_metadata(&self.path);
        if !self.is_kept && file.is_ok_and(|file| (file.dev(), file.ino()) == self.file) {
            // If removal fails, the next `bind_stream` replaces the stale file.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`, for the users whom `mode` allows. Replaces the socket file of a process that
/// has died. The listener does not block. Dropping the [`SocketFile`] removes the file.
///
/// # Errors
/// [`SocketFileError`] names the path and says whether it is in use, is another kind of file, or
/// which system call failed.
pub fn bind_stream(path: &Path, mode: u32) -> Result<(UnixListener, SocketFile), SocketFileError> {
    let at = |what| {
        let path = path.to_owned();
        move |error| SocketFileError::System { path, what, error }
    };
    if let Ok(file) = std::fs::symlink_metadata(path) {
        if !file.file_type().is_socket() {
            return Err(SocketFileError::NotASocket { path: path.into() });
        }
        match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(at("removing a stale socket"))?;
            }
            _ => return Err(SocketFileError::InUse { path: path.into() }),
        }
    }
    let listener = UnixListener::bind(path).map_err(at("binding the socket"))?;
    let file = SocketFile::of(path).map_err(at("reading the socket's metadata"))?;
    // The permissions of the directory protect the socket between these two calls.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(at("setting the permissions of the socket"))?;
    listener
        .set_nonblocking(true)
        .map_err(at("making the socket non-blocking"))?;
    Ok((listener, file))
}

/// Waits up to `timeout` for a listener to have a connection. Returns whether it has one.
///
/// # Errors
/// The system call failed.
pub(crate) fn wait_readable(listener: &UnixListener, timeout: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match rustix::event::poll(&mut fds, Some(&timeout)) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
