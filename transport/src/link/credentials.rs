//! The credentials of the process at the other end of a unix socket.

use std::fmt;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Once;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use tracing::info;

use crate::error::LinkError;
use crate::poll::poll;

/// The nanoseconds of a second.
const NANOS: u64 = 1_000_000_000;

/// A peer's credentials, as the kernel reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// The process id. 0 for a process in a PID namespace that is not visible from this one.
    pub pid: i32,
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
}

/// Reads the credentials of the process that connected to `socket`, or, of a socket that has
/// connected, of the process that listens (`SO_PEERCRED`).
///
/// `rustix` has this call too, but its process id cannot be 0.
///
/// # Errors
/// [`LinkError::System`] if the kernel does not say.
pub fn of(socket: impl AsFd) -> Result<PeerCredentials, LinkError> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers refer to a local ucred and to its length, and both outlive the call. The
    // kernel writes at most `len` bytes, and every bit pattern is a valid ucred.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        return Err(LinkError::io("reading the peer's credentials")(error));
    }
    Ok(PeerCredentials {
        pid: credentials.pid,
        uid: credentials.uid,
        gid: credentials.gid,
    })
}

/// The process that connected to `socket`, as a descriptor that becomes readable when the process
/// ends. `known` are the credentials of the socket, which the host has read at the time `known_at`
/// since the machine started, or before.
///
/// Linux before 6.5 has no `SO_PEERPIDFD`: the process is found by its id. Another process may have
/// that id meanwhile, and is not taken for the peer if it started at least one tick of the kernel's
/// clock (10 ms) after `known_at`. One that started between the connection and that time cannot be
/// told from the peer: the kernel would have to give out all other ids first.
///
/// `None` if the process has ended already. Before Linux 6.5, also if the sandbox of this process
/// allows no look at others, or if `/proc` hides processes of other users (`ProtectProc=` of
/// systemd, `hidepid=`): the socket alone then shows the end.
pub(super) fn process(
    socket: &OwnedFd,
    known: PeerCredentials,
    known_at: Duration,
) -> Option<OwnedFd> {
    match by_socket(socket) {
        Err(Errno::NOPROTOOPT) => by_id(known.pid, known_at),
        known => known.ok(),
    }
}

/// The time since the machine started, by the clock of [`started_at`].
pub(super) fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// The process that connected to `socket` (`SO_PEERPIDFD`).
fn by_socket(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    /// `SO_PEERPIDFD` of `asm-generic/socket.h`, which x86-64 and AArch64 use.
    const SO_PEERPIDFD: libc::c_int = 77;
    #[cfg(test)]
    if tests::IS_OLD_KERNEL.get() {
        return Err(Errno::NOPROTOOPT);
    }
    let (mut process, mut len): (RawFd, _) = (-1, size_of::<RawFd>() as libc::socklen_t);
    // SAFETY: the pointers refer to a local integer and to its length, and both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut process).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
    }
    if process < 0 {
        return Err(Errno::SRCH);
    }
    // SAFETY: the kernel has opened the descriptor for this call, close-on-exec, and nobody else
    // knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(process) })
}

/// The process with the id `pid`, unless it started after `known_at`.
fn by_id(pid: i32, known_at: Duration) -> Option<OwnedFd> {
    let id = Pid::from_raw(pid)?;
    let process = match rustix::process::pidfd_open(id, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(error) => {
            if error != Errno::SRCH {
                is_seen_by_socket_only(&error);
            }
            return None;
        }
    };
    let started = started_at(pid);
    // A process that runs after its start was read has had the id all the time.
    let mut end = [PollFd::new(&process, PollFlags::IN)];
    poll(&mut end, Duration::ZERO).ok()?;
    if !end[0].revents().is_empty() {
        return None;
    }
    let Some(started) = started else {
        is_seen_by_socket_only(&"/proc does not show when they have started");
        return None;
    };
    (started <= known_at).then_some(process)
}

/// Logs once why guests are not watched.
fn is_seen_by_socket_only(why: &dyn fmt::Display) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        info!("processes of guests are not watched, and sessions end with their sockets: {why}");
    });
}

/// When the process with this id started, rounded down to a tick of the kernel, as the time since
/// the machine started (field 22 of `/proc/PID/stat`).
fn started_at(pid: i32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, field 2, is in parentheses, and may have any characters.
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks: u64 = rest.split_ascii_whitespace().nth(19)?.parse().ok()?;
    let tick = NANOS / rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_nanos(ticks.saturating_mul(tick)))
}

/// A datagram, with the process that has sent it.
#[derive(Debug)]
pub struct Datagram {
    /// The number of bytes.
    pub bytes: usize,
    /// The first file that came with the bytes. Further files are closed.
    pub file: Option<OwnedFd>,
    /// The sender, as the kernel reports it. `None` without [`report_senders`].
    pub sender: Option<PeerCredentials>,
}

/// Makes the kernel report the sender of each datagram that arrives at `socket` from now on
/// (`SO_PASSCRED`).
///
/// # Errors
///
/// The errors of `setsockopt(2)`.
pub fn report_senders(socket: impl AsFd) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_passcred(socket, true)
}

/// Receives a datagram of a unix socket. Files that came with it are closed on exec.
///
/// `rustix` has this call too, but its process id cannot be 0.
///
/// # Errors
///
/// The errors of `recvmsg(2)`.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<Datagram> {
    // Room for the sender and 16 files, in words, for the alignment of the headers.
    let mut control = [0u64; 32];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: `msghdr` is a C struct of integers and pointers, for which all zero bits are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: `message` points to one part, which is the caller's buffer with its length, and to
    // `control` with its length. All of them outlive the call.
    let got = unsafe {
        libc::recvmsg(
            socket.as_fd().as_raw_fd(),
            &raw mut message,
            libc::MSG_CMSG_CLOEXEC,
        )
    };
    let bytes = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    let (mut files, mut sender) = (Vec::new(), None);
    // SAFETY: the kernel has set the length of the control data in `message`, and the macros walk
    // the headers within that length. The data of a header follows it, as long as `cmsg_len` says;
    // it is read without alignment. Descriptors that have arrived belong to nobody else. Every bit
    // pattern is a valid ucred.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            let len = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for index in 0..len / size_of::<RawFd>() {
                        let file = data.cast::<RawFd>().add(index).read_unaligned();
                        files.push(OwnedFd::from_raw_fd(file));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if len >= size_of::<libc::ucred>() => {
                    let libc::ucred { pid, uid, gid } = data.cast::<libc::ucred>().read_unaligned();
                    sender = Some(PeerCredentials { pid, uid, gid });
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok(Datagram {
        bytes,
        file: files.into_iter().next(),
        sender,
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};

    use rustix::net::SendFlags;

    use super::*;
    use crate::link::scm_rights;
    use crate::shm::doorbell::{Doorbell as _, EventDoorbell, Wake, new_eventfd};

    /// A process that waits for the end of its standard input, in an ordinary name.
    fn waiting() -> Child {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        command.spawn().expect("cat")
    }

    #[test]
    fn peer_is_found_by_its_id_where_the_kernel_knows_no_other_way() {
        let mut peer = waiting();
        let pid = peer.id() as i32;
        let process = by_id(pid, now()).expect("it runs");
        // The session's doorbell shows the end, although somebody holds the socket.
        let (ours, _held) = UnixStream::pair().unwrap();
        let [own, other] = [(); 2].map(|()| new_eventfd().unwrap());
        let doorbell = EventDoorbell::new(own, other, Some(ours.into())).watching(Some(process));
        assert_eq!(doorbell.wait(Duration::ZERO), Ok(Wake::Look));
        peer.kill().unwrap();
        assert_eq!(doorbell.wait(Duration::from_secs(60)), Ok(Wake::PeerGone));
        // It is there until its parent has asked for its status, and does not run.
        assert!(by_id(pid, now()).is_none(), "it has ended");
        peer.wait().unwrap();
        assert!(by_id(pid, now()).is_none(), "nobody has the id");
        assert!(by_id(0, now()).is_none(), "a process of another namespace");
    }

    /// The id of the peer belongs to another process, which started after the connection.
    #[test]
    fn another_process_with_the_id_of_the_peer_is_not_taken_for_it() {
        let connected_at = now();
        // A tick of the kernel's clock, by which starts are rounded.
        std::thread::sleep(Duration::from_millis(30));
        let mut other = waiting();
        let pid = other.id() as i32;
        assert!(started_at(pid).unwrap() > connected_at);
        assert!(by_id(pid, connected_at).is_none());
        assert!(by_id(pid, now()).is_some());
        other.kill().unwrap();
        other.wait().unwrap();
        // The name of a process may look like the fields after it.
        let own = std::process::id() as i32;
        assert!(started_at(own).unwrap() <= now() && started_at(own).unwrap() > Duration::ZERO);
    }

    thread_local! {
        /// Whether the kernel of this thread is one before Linux 6.5.
        pub(super) static IS_OLD_KERNEL: Cell<bool> = const { Cell::new(false) };
    }

    #[test]
    fn peer_of_a_socket_is_the_process_that_has_connected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let _guest = UnixStream::connect(&path).unwrap();
        let socket = OwnedFd::from(listener.accept().unwrap().0);
        let known = of(&socket).unwrap();
        assert_eq!(known.pid.cast_unsigned(), std::process::id());
        for is_old in [false, true] {
            IS_OLD_KERNEL.set(is_old);
            let process = process(&socket, known, now()).expect("it runs");
            let info = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
            let info = std::fs::read_to_string(info).unwrap();
            let id = format!("Pid:\t{}", known.pid);
            assert!(info.lines().any(|line| line == id), "{info}");
        }
    }

    #[test]
    fn datagrams_come_with_their_sender_and_a_file() {
        let (here, there) = UnixDatagram::pair().unwrap();
        report_senders(&there).unwrap();
        let (one, two) = (
            rustix::io::dup(&here).unwrap(),
            rustix::io::dup(&here).unwrap(),
        );
        let files = [one.as_fd(), two.as_fd()];
        scm_rights::send(&here, b"files", &files, SendFlags::empty()).unwrap();
        scm_rights::send(&here, b"", &[], SendFlags::empty()).unwrap();
        let mut bytes = [0; 16];
        let got = receive(&there, &mut bytes).unwrap();
        assert_eq!(&bytes[..got.bytes], b"files");
        assert!(got.file.is_some());
        let sender = got.sender.expect("a sender");
        assert_eq!(sender.pid.cast_unsigned(), std::process::id());
        assert_eq!(sender.uid, rustix::process::getuid().as_raw());
        let got = receive(&there, &mut bytes).unwrap();
        assert!(got.bytes == 0 && got.file.is_none() && got.sender.is_some());
    }
}
