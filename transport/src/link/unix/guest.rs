//! The guest's side of the handshake.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketType;

use super::handshake::{
    HELLO_WORDS, VERDICT_ACCEPTED, VERDICT_OTHER_LAYOUT, WELCOME_FILES, WELCOME_WORDS,
};
use crate::error::{LinkError, LinkViolation};
use crate::link::fd_passing::Files;
use crate::link::packet::{self, PacketError};
use crate::link::socket_file;
use crate::link::window::WindowGuest;
use crate::shm::doorbell::{EventDoorbell, is_eventfd};
use crate::shm::layout::{self, Layout, LayoutError, MAX_SIZE};
use crate::shm::liveness::{Liveness, STALL};
use crate::shm::memory::{MapError, Window};

/// Why the guest cannot connect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum UnixConnectError {
    #[error(
        "{path}: no such socket; start `vgpu serve --listen unix:{path}` on the host",
        path = path.display()
    )]
    NoSuchFile { path: PathBuf },
    #[error(
        "{path}: no process listens on this socket; the executor has ended",
        path = path.display()
    )]
    Refused { path: PathBuf },
    #[error(
        "{path}: no permission to open this socket (its owner and group may open it)",
        path = path.display()
    )]
    Permission { path: PathBuf },
    #[error("{path}: not the socket of a vgpu executor: {cause}", path = path.display())]
    NotVgpu {
        path: PathBuf,
        cause: SocketMismatch,
    },
    #[error(
        "{path}: the connection was closed before an answer: the executor does not accept it now, \
         and its log says why, or another program listens there",
        path = path.display()
    )]
    Closed { path: PathBuf },
    #[error("{path}: no answer within {ms} ms", path = path.display())]
    Timeout { path: PathBuf, ms: u128 },
    #[error(
        "{path}: the executor supports window layout {theirs}, this guest supports {ours}: update \
         ggml-vgpu {}",
        layout::outdated(*.ours, *.theirs),
        path = path.display()
    )]
    OtherLayout {
        path: PathBuf,
        ours: u64,
        theirs: u64,
    },
    #[error("{path}: {error}", path = path.display())]
    Link { path: PathBuf, error: LinkError },
}

/// What shows that a socket is not the socket of a vgpu executor. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum SocketMismatch {
    #[error("the file is not a socket")]
    NotSocket,
    /// The socket is not a `SOCK_SEQPACKET` socket.
    #[error("the socket has another type")]
    SocketType,
    /// The peer has sent something other than a packet of the handshake.
    #[error(transparent)]
    Packet(#[from] LinkViolation),
    #[error(
        "its welcome is malformed: verdict {verdict}, window layout {layout}, {files} files; \
         expected verdict {VERDICT_ACCEPTED}, window layout {expected}, {WELCOME_FILES} files",
        expected = layout::VERSION
    )]
    Welcome {
        verdict: u64,
        layout: u64,
        files: usize,
    },
    #[error("its doorbells are not non-blocking eventfds")]
    Doorbells,
    #[error("its window of {size} bytes is too large: the limit is {MAX_SIZE} bytes")]
    WindowSize { size: u64 },
    /// The window's file cannot be mapped. Never [`MapError::System`].
    #[error(transparent)]
    Map(#[from] MapError),
    /// The window's memory is not a window.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Connects to the executor that listens at `path`. `timeout` limits the whole call.
///
/// # Errors
///
/// A [`UnixConnectError`] that tells apart a missing executor, missing permission, another program
/// at `path`, and an executor that broke the handshake or did not answer in time.
pub fn connect(path: &Path, timeout: Duration) -> Result<WindowGuest, UnixConnectError> {
    let path = path.to_path_buf();
    let deadline = Instant::now() + timeout;
    let late = || UnixConnectError::Timeout {
        path: path.clone(),
        ms: timeout.as_millis(),
    };
    let failed = |error| match error {
        PacketError::Late => late(),
        PacketError::Garbage(why) => UnixConnectError::NotVgpu {
            path: path.clone(),
            cause: why.into(),
        },
        PacketError::Link(LinkError::Closed) => UnixConnectError::Closed { path: path.clone() },
        PacketError::Link(error) => UnixConnectError::Link {
            path: path.clone(),
            error,
        },
    };

    let socket = socket_file::socket(SocketType::SEQPACKET)
        .map_err(LinkError::system("creating a socket"))
        .map_err(|error| failed(error.into()))?;
    match socket_file::connect_until(&socket, &path, deadline) {
        Ok(()) => {}
        Err(Errno::AGAIN) => return Err(late()),
        Err(error) => return Err(not_connected(path, error)),
    }

    let hello: [u64; HELLO_WORDS] = [packet::MAGIC, layout::VERSION, layout::VERSION, 0];
    packet::send(&socket, &hello, &[], deadline).map_err(failed)?;
    let (words, fds) =
        packet::receive(&socket, WELCOME_WORDS, WELCOME_FILES, deadline).map_err(failed)?;
    if words[1] == VERDICT_OTHER_LAYOUT {
        return Err(UnixConnectError::OtherLayout {
            path,
            ours: layout::VERSION,
            theirs: words[2],
        });
    }
    let not_vgpu = |cause| UnixConnectError::NotVgpu {
        path: path.clone(),
        cause,
    };
    let welcome = SocketMismatch::Welcome {
        verdict: words[1],
        layout: words[2],
        files: fds.len(),
    };
    if words[1] != VERDICT_ACCEPTED || words[2] != layout::VERSION {
        return Err(not_vgpu(welcome));
    }
    let Ok([file, guest_bell, host_bell]) = <[OwnedFd; WELCOME_FILES]>::try_from(fds) else {
        return Err(not_vgpu(welcome));
    };
    if !is_eventfd(host_bell.as_fd()) || !is_eventfd(guest_bell.as_fd()) {
        return Err(not_vgpu(SocketMismatch::Doorbells));
    }
    if words[3] > MAX_SIZE as u64 {
        return Err(not_vgpu(SocketMismatch::WindowSize { size: words[3] }));
    }
    let window = match Window::map_foreign(file.as_fd(), words[3]) {
        Ok(window) => Arc::new(window),
        Err(MapError::System { what, error }) => {
            return Err(failed(LinkError::System { what, error }.into()));
        }
        Err(error) => return Err(not_vgpu(error.into())),
    };
    let layout = Layout::read(&*window, window.size()).map_err(|error| not_vgpu(error.into()))?;
    packet::send(&socket, &[packet::MAGIC, layout.epoch()], &[], deadline).map_err(failed)?;
    let liveness = Liveness::new(&window, STALL);
    // Without a free file descriptor the link works, and the host shares no files.
    let files = socket.try_clone().ok().map(Files::of_guest);
    let doorbell = EventDoorbell::new(guest_bell, host_bell, Some(socket));
    let guest = WindowGuest::new(window, &layout, Box::new(doorbell), Some(liveness));
    Ok(guest.with_files(files))
}

fn not_connected(path: PathBuf, error: Errno) -> UnixConnectError {
    match error {
        Errno::NOENT => UnixConnectError::NoSuchFile { path },
        Errno::CONNREFUSED => match std::fs::symlink_metadata(&path) {
            // The kernel also refuses a connection to a file that is not a socket.
            Ok(file) if !file.file_type().is_socket() => UnixConnectError::NotVgpu {
                path,
                cause: SocketMismatch::NotSocket,
            },
            _ => UnixConnectError::Refused { path },
        },
        Errno::ACCESS | Errno::PERM => UnixConnectError::Permission { path },
        Errno::PROTOTYPE => UnixConnectError::NotVgpu {
            path,
            cause: SocketMismatch::SocketType,
        },
        error => UnixConnectError::Link {
            path,
            error: LinkError::System {
                what: "connecting",
                error,
            },
        },
    }
}
