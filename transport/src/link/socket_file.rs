//! Listening sockets at a path of the file system, and their files.
#![forbid(unsafe_code)]

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::lock::lock;

/// Permissions of a socket for which the configuration says nothing: its owner and group.
pub const DEFAULT_MODE: u32 = 0o660;

/// Reads the permissions of a socket, as `chmod` takes them.
pub fn parse_mode(text: &str) -> Option<u32> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| mode & !0o777 == 0)
}

/// The file that gives groups their numbers.
const GROUPS: &str = "/etc/group";

/// Connections that the kernel queues until the process accepts them.
const BACKLOG: i32 = 128;

/// Pause before the next attempt to connect to a listener whose queue is full.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// Why a process cannot listen at a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum SocketFileError {
    #[error("{path}: another process already listens here", path = path.display())]
    InUse { path: PathBuf },
    #[error("{path}: the file exists and is not a socket", path = path.display())]
    NotASocket { path: PathBuf },
    #[error("{path}: the directory for this socket does not exist", path = path.display())]
    NoDirectory { path: PathBuf },
    #[error("{path}: {GROUPS} has no group {group}", path = path.display())]
    NoGroup { path: PathBuf, group: String },
    #[error("{path}: this process ends", path = path.display())]
    Ending { path: PathBuf },
    #[error("{path}: {what}: {error}", path = path.display())]
    System {
        path: PathBuf,
        what: &'static str,
        error: Errno,
    },
}

/// The socket file of a listener. Dropping this removes the file, unless another file has taken its
/// place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    file: FileId,
    kind: SocketType,
    mode: u32,
    group: Option<Gid>,
}

/// Device and inode of a file.
type FileId = (u64, u64);

/// What is at the path of a listener now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// The file of the listener.
    Bound,
    /// Nothing: nobody can connect.
    Removed,
    /// Another file, or the socket of another process: nobody can connect to this listener.
    Replaced,
}

impl SocketFile {
    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is at the path of the file now. Compares device and inode, which no other file can have
    /// while the listener's socket is open.
    ///
    /// # Errors
    ///
    /// The kernel does not say, for example because this process may not search the folder.
    pub fn state(&self) -> Result<FileState, Errno> {
        match rustix::fs::lstat(&self.path) {
            Ok(file) if (file.st_dev, file.st_ino) == self.file => Ok(FileState::Bound),
            Ok(_) => Ok(FileState::Replaced),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(FileState::Removed),
            Err(error) => Err(error),
        }
    }

    /// Listens at the path with a further socket, with the same type, permissions and group, and
    /// returns it. Replaces the socket file of a process that has died, and no other file. The
    /// caller has the former socket of the listener open until this returns. On failure nothing has
    /// changed.
    ///
    /// # Errors
    ///
    /// As for [`bind_stream_for_group`], and [`SocketFileError::Ending`] after [`remove_all`].
    pub fn bind_again(&mut self) -> Result<OwnedFd, SocketFileError> {
        let (socket, file) = bind(&self.path, self.kind, self.mode, self.group)?;
        // `bind` has taken the lock of the list: either `remove_all` finds the file in the list, or
        // this load sees its store.
        if IS_ENDING.load(Ordering::Relaxed) {
            let path = self.path.clone();
            return Err(SocketFileError::Ending { path });
        }
        // The former file is not at the path: dropping its value removes nothing.
        *self = file;
        Ok(socket)
    }
}

/// The socket files of this process.
static FILES: Mutex<Vec<(PathBuf, FileId)>> = Mutex::new(Vec::new());

/// Whether [`remove_all`] was called.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// Removes the socket files of this process at its end, which runs no destructors of other threads.
/// No thread binds one of them again.
pub fn remove_all() {
    IS_ENDING.store(true, Ordering::Relaxed);
    let files = lock(&FILES);
    files.iter().for_each(|(path, file)| remove(path, *file));
}

/// Removes a socket file, unless another file has taken its place.
fn remove(path: &Path, own: FileId) {
    let file = rustix::fs::lstat(path);
    if file.is_ok_and(|file| (file.st_dev, file.st_ino) == own) {
        // If removal fails, the next listener replaces the stale file.
        let _ = rustix::fs::unlink(path);
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let mut files = lock(&FILES);
        files.retain(|(_, file)| *file != self.file);
        drop(files);
        remove(&self.path, self.file);
    }
}

/// Listens at `path` with a non-blocking stream socket, for the users whom `mode` allows.
///
/// Replaces the socket file of a process that has died, and no other file. Dropping the
/// [`SocketFile`] removes the file.
///
/// # Errors
///
/// [`SocketFileError`] names the path and says whether the path is in use, is another kind of file,
/// is in no directory, or which system call failed.
pub fn bind_stream(path: &Path, mode: u32) -> Result<(UnixListener, SocketFile), SocketFileError> {
    bind_stream_for_group(path, mode, None)
}

/// [`bind_stream`], for the members of a group: its name in `/etc/group`, or its number. `None`:
/// the group of this process.
///
/// # Errors
///
/// As for [`bind_stream`], and [`SocketFileError::NoGroup`]. Without privileges, a process can give
/// a socket only to a group of which it is a member.
pub fn bind_stream_for_group(
    path: &Path,
    mode: u32,
    group: Option<&str>,
) -> Result<(UnixListener, SocketFile), SocketFileError> {
    let group = group.map(|group| group_id(path, group)).transpose()?;
    let (socket, file) = bind(path, SocketType::STREAM, mode, group)?;
    Ok((socket.into(), file))
}

/// The number of the group of the socket at `path`.
fn group_id(path: &Path, group: &str) -> Result<Gid, SocketFileError> {
    if let Ok(number) = group.parse() {
        return Ok(Gid::from_raw(number));
    }
    let groups = std::fs::read_to_string(GROUPS).unwrap_or_default();
    let number = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_group = fields.next() == Some(group);
        fields.nth(1).filter(|_| is_group)?.parse().ok()
    });
    let number = number.ok_or_else(|| SocketFileError::NoGroup {
        path: path.into(),
        group: group.into(),
    })?;
    Ok(Gid::from_raw(number))
}

/// [`bind_stream`] with a socket of type `kind`, for `group`.
pub(super) fn bind(
    path: &Path,
    kind: SocketType,
    mode: u32,
    group: Option<Gid>,
) -> Result<(OwnedFd, SocketFile), SocketFileError> {
    let at = |what| failed(path, what);
    let socket = socket(kind).map_err(at("creating a socket"))?;
    let address = SocketAddrUnix::new(path).map_err(at("the path of the socket"))?;
    match rustix::net::bind(&socket, &address) {
        Ok(()) => {}
        Err(Errno::ADDRINUSE) => {
            remove_stale(path, kind)?;
            rustix::net::bind(&socket, &address).map_err(at("binding the socket"))?;
        }
        Err(Errno::NOENT) => return Err(SocketFileError::NoDirectory { path: path.into() }),
        Err(error) => return Err(at("binding the socket")(error)),
    }
    let file = rustix::fs::lstat(path).map_err(at("reading the inode of the socket"))?;
    let file = SocketFile {
        path: path.into(),
        file: (file.st_dev, file.st_ino),
        kind,
        mode,
        group,
    };
    let mut files = lock(&FILES);
    files.push((file.path.clone(), file.file));
    drop(files);
    // No client can connect between `bind` and `listen`, so the file never has other permissions
    // while the socket accepts connections.
    // By descriptor: whoever may write the folder could put a link in the place of the socket.
    let opened = open_socket_file(path, file.file).map_err(at("opening the socket"))?;
    if group.is_some() {
        rustix::fs::chownat(&opened, "", None, group, AtFlags::EMPTY_PATH)
            .map_err(at("setting the group of the socket"))?;
    }
    rustix::fs::chmod(
        format!("/proc/self/fd/{}", opened.as_raw_fd()),
        Mode::from_raw_mode(mode),
    )
    .map_err(at("setting the permissions of the socket"))?;
    rustix::net::listen(&socket, BACKLOG).map_err(at("listening"))?;
    Ok((socket, file))
}

/// The file at `path` without access to what it stands for, if it still is `file`.
///
/// # Errors
///
/// That of the system call, and [`Errno::STALE`] if another file is there now.
fn open_socket_file(path: &Path, file: (u64, u64)) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&opened)?;
    match (found.st_dev, found.st_ino) == file {
        true => Ok(opened),
        false => Err(Errno::STALE),
    }
}

/// Removes a socket file of type `kind` on which no process listens, if there is one.
///
/// # Errors
///
/// [`SocketFileError::NotASocket`] if the path is another kind of file, [`SocketFileError::InUse`]
/// if a process listens there or the socket is of another type, and [`SocketFileError::System`] if
/// a system call fails.
pub fn remove_stale(path: &Path, kind: SocketType) -> Result<(), SocketFileError> {
    let Ok(file) = rustix::fs::lstat(path) else {
        // Another process has removed the file meanwhile.
        return Ok(());
    };
    if FileType::from_raw_mode(file.st_mode) != FileType::Socket {
        return Err(SocketFileError::NotASocket { path: path.into() });
    }
    let socket = socket(kind).map_err(failed(path, "creating a socket"))?;
    match connect(&socket, path) {
        Err(Errno::CONNREFUSED) => {
            rustix::fs::unlink(path).map_err(failed(path, "removing a stale socket"))
        }
        // Connected, a full backlog, or a socket of another type: a process listens.
        _ => Err(SocketFileError::InUse { path: path.into() }),
    }
}

/// A new non-blocking socket.
pub(super) fn socket(kind: SocketType) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
}

/// Connects to the stream socket at `path`, and waits until `deadline` if the queue of its listener
/// is full. The result blocks.
///
/// # Errors
///
/// [`Errno::AGAIN`] if the queue is still full at `deadline`: its process accepts nobody. Otherwise
/// the error of the system call.
pub fn connect_stream(path: &Path, deadline: Instant) -> Result<UnixStream, Errno> {
    let socket = socket(SocketType::STREAM)?;
    connect_until(&socket, path, deadline)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket.into())
}

/// As [`connect`], and waits until `deadline` if the queue of the listener is full. Then the error
/// is [`Errno::AGAIN`].
pub(super) fn connect_until(socket: &OwnedFd, path: &Path, deadline: Instant) -> Result<(), Errno> {
    loop {
        match connect(socket, path) {
            Err(Errno::AGAIN) if Instant::now() < deadline => thread::sleep(RETRY_PAUSE),
            outcome => return outcome,
        }
    }
}

/// Connects to the socket at `path`.
pub(super) fn connect(socket: &OwnedFd, path: &Path) -> Result<(), Errno> {
    rustix::net::connect(socket, &SocketAddrUnix::new(path)?)
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(Errno) -> SocketFileError {
    let path = path.to_path_buf();
    move |error| SocketFileError::System { path, what, error }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    #[test]
    fn file_is_bound_again_and_a_file_of_somebody_else_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let (first, mut file) = bind(&path, SocketType::STREAM, 0o600, None).unwrap();
        assert_eq!(file.state(), Ok(FileState::Bound));
        fs::remove_file(&path).unwrap();
        assert_eq!(file.state(), Ok(FileState::Removed));
        let second = file.bind_again().unwrap();
        assert_eq!(file.state(), Ok(FileState::Bound));
        drop(first);
        let mode = rustix::fs::stat(&path).unwrap().st_mode;
        assert_eq!(Mode::from_raw_mode(mode), Mode::from_raw_mode(0o600));
        connect_stream(&path, Instant::now()).unwrap();
        let second: UnixListener = second.into();
        second.accept().unwrap();

        // Somebody's file has the place.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "kept").unwrap();
        assert_eq!(file.state(), Ok(FileState::Replaced));
        let error = file.bind_again().unwrap_err();
        assert_eq!(error, SocketFileError::NotASocket { path: path.clone() });
        drop(file);
        assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
    }

    /// In the environment of a process that ends.
    const CHILD: &str = "VGPU_TEST_SOCKET_FILE";

    #[test]
    fn process_that_ends_binds_no_file_again() {
        if let Some(path) = std::env::var_os(CHILD) {
            let path = PathBuf::from(path);
            let (_socket, mut file) = bind(&path, SocketType::STREAM, 0o600, None).unwrap();
            remove_all();
            assert_eq!(file.state(), Ok(FileState::Removed));
            let error = file.bind_again().unwrap_err();
            assert_eq!(error, SocketFileError::Ending { path: path.clone() });
            assert_eq!(file.state(), Ok(FileState::Removed));
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let name = "link::socket_file::tests::process_that_ends_binds_no_file_again";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args([name, "--exact", "--nocapture"]);
        let output = child.env(CHILD, folder.path().join("a.sock")).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("1 passed"), "{text}");
    }
}
