//! The link between processes of one machine: a unix socket to meet at, a [window](crate::window) to talk through.
//!
//! ```text
//!  guest                                        host
//!  connect            ------------------------> accept, credentials from the kernel
//!  hello: layouts, window size wanted --------> choose
//!                     <------------------------ welcome: size; memfd, two eventfds
//!  check seals and size, map
//!  opened: epoch      ------------------------> the session begins
//! ```
//!
//! The socket is of packets (`SOCK_SEQPACKET`), so each of these is one whole message, and something else that
//! listens at the path is noticed when connecting. Afterwards it carries memory that the host shares, and stays
//! open as the lifeline, which the kernel cuts when either process dies.
//!
//! Whoever may open the socket may use the executor; beyond that a guest is trusted with nothing. Each step has
//! a time limit, and [`Listener::accept`] does none of the talking, so a silent guest holds up only itself.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::LinkError;
use super::fd_passing::Files;
use super::scm_rights;
use super::window::{WindowGuest, WindowHost};
use crate::shm::doorbell::{EventDoorbell, is_eventfd, new_eventfd, poll, system};
use crate::shm::layout::{self, DEFAULT_SIZE, Layout, LayoutError, MAX_SIZE, MIN_SIZE};
use crate::shm::liveness::{self, Liveness, STALL};
use crate::shm::memory::{MapError, Window, sealed_file};

/// What both sides begin with: `VGPULINK`.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"VGPULINK");

/// File descriptors of a welcome: the window, the guest's eventfd, the host's.
const FDS: usize = 3;

/// Words of a hello: magic, lowest and highest layout spoken, window size wanted (0: as the host likes).
const HELLO: usize = 4;
/// Words of a welcome: magic, verdict, layout chosen, window size.
const WELCOME: usize = 4;
/// Words of an opened: magic, epoch.
const OPENED: usize = 2;

/// The verdicts of a welcome.
const VERDICT_COME_IN: u64 = 0;
const VERDICT_OTHER_LAYOUT: u64 = 1;

/// Why there is no connection, from the guest's point of view.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ConnectError {
    #[error("{path}: no such socket; is the executor running?", path = path.display())]
    NoSuchFile { path: PathBuf },
    #[error("{path}: nobody listens on this socket; the executor has gone", path = path.display())]
    Refused { path: PathBuf },
    #[error("{path}: no permission to open this socket (it is for its owner and group)", path = path.display())]
    Permission { path: PathBuf },
    #[error("{path}: not the socket of a vgpu executor ({why})", path = path.display())]
    NotVgpu { path: PathBuf, why: String },
    #[error("{path}: no answer within {ms} ms", path = path.display())]
    Timeout { path: PathBuf, ms: u128 },
    #[error("{path}: the executor does not speak layout {ours} of the window, only {theirs}", path = path.display())]
    OtherLayout {
        path: PathBuf,
        ours: u64,
        theirs: u64,
    },
    #[error("{path}: {error}", path = path.display())]
    Link { path: PathBuf, error: LinkError },
}

/// Connects to the executor that listens at `path`, waiting no longer than `timeout` in all.
pub fn connect(path: &Path, timeout: Duration) -> Result<WindowGuest, ConnectError> {
    let path = path.to_path_buf();
    let deadline = Instant::now() + timeout;
    let late = || ConnectError::Timeout {
        path: path.clone(),
        ms: timeout.as_millis(),
    };
    let failed = |error| match error {
        StepError::Late => late(),
        StepError::Garbage(why) => ConnectError::NotVgpu {
            path: path.clone(),
            why,
        },
        StepError::Link(LinkError::Closed) => ConnectError::NotVgpu {
            path: path.clone(),
            why: "it hung up".into(),
        },
        StepError::Link(error) => ConnectError::Link {
            path: path.clone(),
            error,
        },
    };

    let socket = loop {
        let socket = new_socket().map_err(|error| failed(error.into()))?;
        match connect_socket(&socket, &path) {
            Ok(()) => break socket,
            // The queue of the listener is full.
            Err(Errno::AGAIN) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::AGAIN) => return Err(late()),
            Err(error) => return Err(not_connected(path, error)),
        }
    };

    let hello = [MAGIC, layout::VERSION, layout::VERSION, 0];
    send_packet(&socket, &hello, &[], deadline).map_err(failed)?;
    let (words, mut fds) = receive_packet(&socket, WELCOME, FDS, deadline).map_err(failed)?;
    if words[1] == VERDICT_OTHER_LAYOUT {
        return Err(ConnectError::OtherLayout {
            path,
            ours: layout::VERSION,
            theirs: words[2],
        });
    }
    let garbage = |why: &str| failed(StepError::Garbage(why.into()));
    if words[1] != VERDICT_COME_IN || words[2] != layout::VERSION || fds.len() != FDS {
        return Err(garbage("its welcome makes no sense"));
    }
    let (Some(host_bell), Some(guest_bell), Some(file)) = (fds.pop(), fds.pop(), fds.pop()) else {
        return Err(garbage("its welcome lacks files"));
    };
    if !is_eventfd(host_bell.as_fd()) || !is_eventfd(guest_bell.as_fd()) {
        return Err(garbage("its doorbells are no eventfds"));
    }
    if words[3] > MAX_SIZE as u64 {
        return Err(garbage("its window is too large"));
    }
    let window = match Window::map_foreign(file.as_fd(), words[3]) {
        Ok(window) => Arc::new(window),
        Err(MapError::System { what, error }) => {
            return Err(failed(LinkError::System { what, error }.into()));
        }
        Err(error) => return Err(garbage(&error.to_string())),
    };
    let layout = Layout::read(&*window, window.size()).map_err(|e| garbage(&e.to_string()))?;
    send_packet(&socket, &[MAGIC, layout.epoch()], &[], deadline).map_err(failed)?;
    let liveness = Liveness::new(&window, STALL);
    // When no file can be opened any more nothing is shared.
    let files = socket.try_clone().ok().map(Files::Socket);
    let doorbell = EventDoorbell::new(guest_bell, host_bell, Some(socket));
    let mut guest = WindowGuest::new(window, &layout, Box::new(doorbell), Some(liveness));
    guest.files = files;
    Ok(guest)
}

/// How a host listens.
#[derive(Debug, Clone)]
pub struct ListenOptions {
    /// Bytes of each guest's window: a power of two.
    pub window_size: usize,
    /// Who may open the socket: permission bits.
    pub mode: u32,
    /// How long a guest may take to say who it is.
    pub handshake_timeout: Duration,
}

impl Default for ListenOptions {
    fn default() -> ListenOptions {
        ListenOptions {
            window_size: DEFAULT_SIZE,
            mode: 0o660,
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

/// Why a host cannot listen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ListenError {
    #[error("{path}: an executor already listens here", path = path.display())]
    InUse { path: PathBuf },
    #[error("{path}: there is something here that is not a socket", path = path.display())]
    NotASocket { path: PathBuf },
    #[error("{path}: the directory for this socket does not exist", path = path.display())]
    NoDirectory { path: PathBuf },
    #[error("{0}")]
    Window(#[from] LayoutError),
    #[error("{path}: {what}: {error}", path = path.display())]
    System {
        path: PathBuf,
        what: &'static str,
        error: Errno,
    },
}

/// A socket at which guests arrive. The socket file goes away with it.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the socket file, to remove no other.
    file: (u64, u64),
    options: ListenOptions,
}

impl Listener {
    /// Listens at `path`. A socket file that an executor left behind when it died is replaced; one that somebody listens on
    /// is not.
    pub fn bind(path: &Path, options: ListenOptions) -> Result<Listener, ListenError> {
        Layout::new(options.window_size, 1)?;
        let at = |what| {
            let path = path.to_path_buf();
            move |error| ListenError::System { path, what, error }
        };
        let socket = new_socket().map_err(|_| at("making a socket")(Errno::MFILE))?;
        let address = SocketAddrUnix::new(path).map_err(at("the path of the socket"))?;
        match rustix::net::bind(&socket, &address) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => {
                remove_stale(path)?;
                rustix::net::bind(&socket, &address).map_err(at("binding the socket"))?;
            }
            Err(Errno::NOENT) => return Err(ListenError::NoDirectory { path: path.into() }),
            Err(error) => return Err(at("binding the socket")(error)),
        }
        // Between bind and listen nobody can connect, so there is no time with other permissions.
        rustix::fs::chmod(path, Mode::from_raw_mode(options.mode))
            .map_err(at("setting the permissions of the socket"))?;
        let file = rustix::fs::lstat(path).map_err(at("looking at the socket"))?;
        rustix::net::listen(&socket, 64).map_err(at("listening"))?;
        Ok(Listener {
            socket,
            path: path.into(),
            file: (file.st_dev, file.st_ino),
            options,
        })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits up to `timeout` for a guest to arrive. `None` when none came.
    ///
    /// It has said nothing yet: [`Arrival::handshake`] talks to it, on another thread if others are not to wait.
    pub fn accept(&self, timeout: Duration) -> Result<Option<Arrival>, LinkError> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        if poll(&mut fds, timeout).map_err(system("waiting for guests"))? == 0 {
            return Ok(None);
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => Ok(Some(Arrival {
                peer: super::credentials::of(&socket)?,
                socket,
                options: self.options.clone(),
            })),
            // It did not wait for us.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(error) => Err(system("accepting a guest")(error)),
        }
    }
}

impl AsFd for Listener {
    /// Readable when a guest has arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let is_ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|file| (file.dev(), file.ino()) == self.file);
        if is_ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Who is at the other end, as the kernel tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process id; 0 when the process is in a namespace that we cannot see into.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// A guest that has connected and has not been spoken to.
#[derive(Debug)]
pub struct Arrival {
    socket: OwnedFd,
    peer: Peer,
    options: ListenOptions,
}

/// Why a guest got no session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum HandshakeError {
    #[error("the guest said nothing sensible within {ms} ms")]
    Timeout { ms: u128 },
    #[error("the guest broke the handshake: {0}")]
    Garbage(String),
    #[error(
        "the guest speaks layouts {from} to {to} of the window, not {}",
        layout::VERSION
    )]
    OtherLayout { from: u64, to: u64 },
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl Arrival {
    /// The guest at the other end of a socket that [`into_socket`](Arrival::into_socket) has given, in another process.
    pub fn from_socket(socket: OwnedFd, options: ListenOptions) -> Result<Arrival, LinkError> {
        Ok(Arrival {
            peer: super::credentials::of(&socket)?,
            socket,
            options,
        })
    }

    /// The socket, for another process to talk to the guest.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Who it is.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Makes the guest's window and hands it over. Waits for the guest, but not for ever.
    pub fn handshake(self) -> Result<WindowHost, HandshakeError> {
        let timeout = self.options.handshake_timeout;
        let deadline = Instant::now() + timeout;
        let failed = |error| match error {
            StepError::Late => HandshakeError::Timeout {
                ms: timeout.as_millis(),
            },
            StepError::Garbage(why) => HandshakeError::Garbage(why),
            StepError::Link(error) => HandshakeError::Link(error),
        };
        let (words, _) = receive_packet(&self.socket, HELLO, 0, deadline).map_err(failed)?;
        let (from, to) = (words[1], words[2]);
        if !(from..=to).contains(&layout::VERSION) {
            let verdict = [MAGIC, VERDICT_OTHER_LAYOUT, layout::VERSION, 0];
            send_packet(&self.socket, &verdict, &[], deadline).map_err(failed)?;
            return Err(HandshakeError::OtherLayout { from, to });
        }
        let size = match usize::try_from(words[3]) {
            Ok(0) => self.options.window_size,
            Ok(wanted) if wanted <= self.options.window_size => wanted
                .next_power_of_two()
                .clamp(MIN_SIZE, self.options.window_size),
            _ => self.options.window_size,
        };

        let epoch = new_epoch();
        let layout =
            Layout::new(size, epoch).map_err(|error| HandshakeError::Garbage(error.to_string()))?;
        let file = sealed_file(size).map_err(unmapped)?;
        let window = Arc::new(Window::map(file.as_fd(), size).map_err(unmapped)?);
        layout.write(&*window);
        let (guest_bell, host_bell) = (new_eventfd()?, new_eventfd()?);
        let welcome = [MAGIC, VERDICT_COME_IN, layout::VERSION, size as u64];
        let fds = [file.as_fd(), guest_bell.as_fd(), host_bell.as_fd()];
        send_packet(&self.socket, &welcome, &fds, deadline).map_err(failed)?;
        let (words, _) = receive_packet(&self.socket, OPENED, 0, deadline).map_err(failed)?;
        if words[1] != epoch {
            return Err(HandshakeError::Garbage(format!(
                "it opened session {:#x} instead of {epoch:#x}",
                words[1]
            )));
        }
        liveness::start(&window).map_err(|error| LinkError::System {
            what: "starting the heartbeat's thread",
            error: Errno::from_io_error(&error).unwrap_or(Errno::AGAIN),
        })?;
        let files = self.socket.try_clone().ok().map(Files::of_host);
        let doorbell = EventDoorbell::new(host_bell, guest_bell, Some(self.socket));
        let mut host = WindowHost::new(window, &layout, Box::new(doorbell));
        host.files = files;
        Ok(host)
    }
}

/// What can go wrong in one step of a handshake.
pub(super) enum StepError {
    Late,
    Garbage(String),
    Link(LinkError),
}

impl From<LinkError> for StepError {
    fn from(error: LinkError) -> StepError {
        StepError::Link(error)
    }
}

fn new_socket() -> Result<OwnedFd, LinkError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(system("making a socket"))
}

fn connect_socket(socket: &OwnedFd, path: &Path) -> Result<(), Errno> {
    rustix::net::connect(socket, &SocketAddrUnix::new(path)?)
}

fn not_connected(path: PathBuf, error: Errno) -> ConnectError {
    match error {
        Errno::NOENT => ConnectError::NoSuchFile { path },
        Errno::CONNREFUSED => match std::fs::symlink_metadata(&path) {
            // The kernel refuses connections to what is no socket at all, too.
            Ok(file) if !is_socket(&file) => ConnectError::NotVgpu {
                path,
                why: "it is no socket".into(),
            },
            _ => ConnectError::Refused { path },
        },
        Errno::ACCESS | Errno::PERM => ConnectError::Permission { path },
        Errno::PROTOTYPE => ConnectError::NotVgpu {
            path,
            why: "it is a socket of another type".into(),
        },
        error => ConnectError::Link {
            path,
            error: LinkError::System {
                what: "connecting",
                error,
            },
        },
    }
}

/// Removes a socket file that nobody listens on.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let file = match std::fs::symlink_metadata(path) {
        Ok(file) => file,
        // Somebody else removed it just now.
        Err(_) => return Ok(()),
    };
    if !is_socket(&file) {
        return Err(ListenError::NotASocket { path: path.into() });
    }
    let at = |what| {
        let path = path.to_path_buf();
        move |error| ListenError::System { path, what, error }
    };
    let socket = new_socket().map_err(|_| at("making a socket")(Errno::MFILE))?;
    match connect_socket(&socket, path) {
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(path).map_err(at("removing a stale socket")),
        // Connected, or a full queue, or a socket of another type: there is somebody.
        _ => Err(ListenError::InUse { path: path.into() }),
    }
}

fn is_socket(file: &std::fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_socket(&file.file_type())
}

/// Sends one packet of words, with files.
pub(super) fn send_packet(
    socket: &OwnedFd,
    words: &[u64],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<(), StepError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    loop {
        match scm_rights::send(socket, &bytes, fds, SendFlags::empty()) {
            Ok(_) => return Ok(()),
            Err(Errno::AGAIN) => wait_for(socket, PollFlags::OUT, deadline)?,
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(LinkError::Closed.into()),
            Err(error) => return Err(system("sending the handshake")(error).into()),
        }
    }
}

/// Receives one packet of exactly `count` words that begins with the magic, with at most `max_fds` files.
pub(super) fn receive_packet(
    socket: &OwnedFd,
    count: usize,
    max_fds: usize,
    deadline: Instant,
) -> Result<(Vec<u64>, Vec<OwnedFd>), StepError> {
    loop {
        // One byte more than is right, to notice what is too long.
        let mut bytes = vec![0; count * 8 + 1];
        let got = match scm_rights::receive(socket, &mut bytes, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got,
            Err(Errno::AGAIN) => {
                wait_for(socket, PollFlags::IN, deadline)?;
                continue;
            }
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Err(LinkError::Closed.into()),
            Err(error) => return Err(system("receiving the handshake")(error).into()),
        };
        let fds = got.files;
        if got.bytes == 0 {
            return Err(LinkError::Closed.into());
        }
        if got.bytes != count * 8 || fds.len() > max_fds || got.is_cut {
            return Err(StepError::Garbage(format!(
                "a packet of {} bytes with {} files where {} bytes were expected",
                got.bytes,
                fds.len(),
                count * 8
            )));
        }
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| {
                word.iter()
                    .rev()
                    .fold(0, |value, byte| value << 8 | u64::from(*byte))
            })
            .collect();
        if words[0] != MAGIC {
            return Err(StepError::Garbage(format!(
                "a packet that begins with {:#018x}",
                words[0]
            )));
        }
        return Ok((words, fds));
    }
}

/// Waits until the socket is ready, but not beyond the deadline.
fn wait_for(socket: &OwnedFd, ready: PollFlags, deadline: Instant) -> Result<(), StepError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(StepError::Late);
    }
    let mut fds = [PollFd::new(socket, ready)];
    poll(&mut fds, left).map_err(system("waiting for the handshake"))?;
    Ok(())
}

/// A number that no other window of this machine has had.
pub(crate) fn new_epoch() -> u64 {
    let mut number = [0; 8];
    match rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::NONBLOCK) {
        // The wall clock may be set back to a time that was used before; chance is not.
        Ok(8) => u64::from_le_bytes(number).max(1),
        // A machine that has just booted, and has no chance yet.
        _ => {
            static COUNT: AtomicU64 = AtomicU64::new(0);
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            let nanos = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
            (nanos << 8 | COUNT.fetch_add(1, Ordering::Relaxed) & 0xff).max(1)
        }
    }
}

fn unmapped(error: MapError) -> LinkError {
    match error {
        MapError::System { what, error } => LinkError::System { what, error },
        other => LinkError::PeerMisbehaved(other.to_string()),
    }
}
