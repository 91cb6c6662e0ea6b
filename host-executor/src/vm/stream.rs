//! A stream socket at a path: where a virtual machine monitor connects.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Why there is no such socket.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum VmListenError {
    #[error("{path}: another process already listens here", path = path.display())]
    InUse { path: PathBuf },
    #[error("{path}: there is something here that is not a socket", path = path.display())]
    NotASocket { path: PathBuf },
    #[error("{path}: {what}: {error}", path = path.display())]
    System {
        path: PathBuf,
        what: &'static str,
        error: io::Error,
    },
}

/// A socket file of ours: removed when this is dropped.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode, to remove no other.
    file: (u64, u64),
}

impl SocketFile {
    /// The file at `path`, where this process listens.
    pub fn at(path: &Path) -> io::Result<SocketFile> {
        let file = std::fs::symlink_metadata(path)?;
        Ok(SocketFile {
            path: path.to_owned(),
            file: (file.dev(), file.ino()),
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let file = std::fs::symlink_metadata(&self.path);
        if file.is_ok_and(|file| (file.dev(), file.ino()) == self.file) {
            // One that stays is replaced by the next who listens there.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`, for its owner and group. A socket file that a process left behind when it died is replaced.
pub fn listen_stream(path: &Path) -> Result<UnixListener, VmListenError> {
    let at = |what| {
        let path = path.to_owned();
        move |error| VmListenError::System { path, what, error }
    };
    if let Ok(file) = std::fs::symlink_metadata(path) {
        if !file.file_type().is_socket() {
            return Err(VmListenError::NotASocket { path: path.into() });
        }
        match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(at("removing a stale socket"))?;
            }
            _ => return Err(VmListenError::InUse { path: path.into() }),
        }
    }
    let listener = UnixListener::bind(path).map_err(at("binding the socket"))?;
    // Whoever connects between the two calls could have waited and connected behind them: the directory's permissions
    // are what keeps strangers out until then.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .map_err(at("setting the permissions of the socket"))?;
    listener
        .set_nonblocking(true)
        .map_err(at("preparing the socket"))?;
    Ok(listener)
}
