//! Messages between a supervisor and a worker: JSON in packets, over a private socket pair.
//!
//! A guest may have taken over its worker. The supervisor therefore uses a worker's messages only
//! for figures of the worker's own guest.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vgpu_transport::link::scm_rights;

use crate::peer::Peer;
use crate::session::{RejectReason, SessionEnd};
use crate::status::Report;
use crate::tenant_registry::Rules;

/// The longest packet in bytes: below the default socket buffer of Linux, and enough for the report
/// of [`MAX_WORKER_SESSIONS`] sessions.
pub(super) const MAX_PACKET: usize = 200 << 10;

/// Most programs of a guest that one worker serves.
pub(super) const MAX_WORKER_SESSIONS: usize = 96;

/// A message from the supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// The limits of the guest from now on.
    Rules(Rules),
    /// The certificates of TCP links from now on, in the file that comes with the message.
    Certificates,
    /// A program of the guest to serve. The socket of the program comes with the message.
    Serve {
        session: u64,
        /// The guest's name, if it has one.
        guest: Option<String>,
        peer: Peer,
        /// The program is not to be served, but to be told this reason.
        rejection: Option<Rejection>,
    },
    /// The host drains, and the time in milliseconds that the sessions had has passed. No session
    /// begins any more, either.
    EndDrained { limit_ms: u64 },
    /// Sessions begin again.
    Undrain,
    /// The guest was removed: its sessions end, and none begins any more.
    Removed,
    /// An operator ends this session.
    Kill { session: u64 },
    /// The supervisor asks for a [`WorkerMessage::Dump`] with this number.
    Dump { number: u64 },
}

/// Why a program is not served.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Rejection {
    Full { sessions: usize, limit: usize },
    Rejected { reason: String },
    Draining,
}

impl From<Rejection> for SessionEnd {
    fn from(rejection: Rejection) -> SessionEnd {
        match rejection {
            Rejection::Full { sessions, limit } => SessionEnd::Full { sessions, limit },
            Rejection::Rejected { reason } => RejectReason::OfSupervisor(reason).into(),
            Rejection::Draining => SessionEnd::Draining,
        }
    }
}

/// The longest text of a dump in bytes: as JSON it fits into a packet.
const MAX_DUMP: usize = 64 << 10;

/// A message from a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum WorkerMessage {
    /// Sent periodically, and whenever a session has begun or ended.
    Report(Box<WorkerReport>),
    /// What the worker does.
    Dump { number: u64, text: String },
}

impl From<WorkerReport> for WorkerMessage {
    fn from(report: WorkerReport) -> WorkerMessage {
        WorkerMessage::Report(Box::new(report))
    }
}

impl WorkerMessage {
    /// The answer to [`Command::Dump`].
    pub(super) fn dump(number: u64, mut text: String) -> WorkerMessage {
        if text.len() > MAX_DUMP {
            let mut end = MAX_DUMP;
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            text.truncate(end);
            text.push_str("\n(the rest is left out)\n");
        }
        WorkerMessage::Dump { number, text }
    }
}

/// The figures of a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WorkerReport {
    /// How many [`Command::Serve`] the worker has carried out.
    pub(super) served: u64,
    /// The programs among them that have neither a session yet nor ended.
    pub(super) pending: Vec<u64>,
    /// The programs that have ended without a session since the last report.
    #[serde(default)]
    pub(super) without_session: Vec<u64>,
    pub(super) report: Report,
}

/// One end of the socket pair.
#[derive(Debug)]
pub(super) struct IpcSocket(OwnedFd);

impl IpcSocket {
    /// The end of the supervisor, and the socket of the worker.
    pub(super) fn pair() -> io::Result<(IpcSocket, OwnedFd)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((IpcSocket(ours), theirs))
    }

    /// The end of the worker.
    pub(super) fn new(socket: OwnedFd) -> IpcSocket {
        IpcSocket(socket)
    }

    /// Sends a message, with a file if there is one. Does not wait for the receiver.
    pub(super) fn send(&self, message: &impl Serialize, file: Option<&OwnedFd>) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        let file = file.map(AsFd::as_fd);
        loop {
            return match scm_rights::send(&self.0, &text, file.as_slice(), SendFlags::DONTWAIT) {
                Ok(_) => Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => Err(error.into()),
            };
        }
    }

    /// Waits for the next message, at most for `timeout` if there is one.
    pub(super) fn receive<T: DeserializeOwned>(
        &self,
        timeout: Option<Duration>,
    ) -> io::Result<ReceiveOutcome<T>> {
        if let Some(timeout) = timeout {
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
            match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(0) | Err(Errno::INTR) => return Ok(ReceiveOutcome::Nothing),
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut text = vec![0; MAX_PACKET];
        let got = match scm_rights::receive(&self.0, &mut text, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got,
            Err(Errno::INTR) => return Ok(ReceiveOutcome::Nothing),
            // The other end was closed with unread messages.
            Err(Errno::CONNRESET) => return Ok(ReceiveOutcome::Closed),
            Err(error) => return Err(error.into()),
        };
        if got.bytes == 0 {
            return Ok(ReceiveOutcome::Closed);
        }
        let message = match got.is_truncated {
            true => Err(InvalidPacket::TooLong),
            false => serde_json::from_slice(&text[..got.bytes]).map_err(InvalidPacket::from),
        };
        Ok(match message {
            Ok(message) => ReceiveOutcome::Message(message, got.files.into_iter().next()),
            Err(why) => ReceiveOutcome::Invalid(why),
        })
    }

    /// Closes the connection for both ends.
    pub(super) fn close(&self) {
        // Fails if the other end is closed already.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

/// Why a packet is not a message.
#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidPacket {
    #[error("a packet of more than {MAX_PACKET} bytes")]
    TooLong,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// The result of [`IpcSocket::receive`].
#[derive(Debug)]
pub(super) enum ReceiveOutcome<T> {
    Message(T, Option<OwnedFd>),
    /// A packet that is not a message, and why.
    Invalid(InvalidPacket),
    /// No message in time.
    Nothing,
    /// The other end is closed.
    Closed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LinkKind;

    #[test]
    fn messages_arrive_and_invalid_packets_are_detected() {
        let (ours, theirs) = IpcSocket::pair().unwrap();
        let theirs = IpcSocket::new(theirs);
        let order = Command::Serve {
            session: 7,
            guest: Some("a".into()),
            peer: Peer::new("test".into(), LinkKind::Unix),
            rejection: None,
        };
        let (file, _) = IpcSocket::pair().unwrap();
        ours.send(&order, Some(&file.0)).unwrap();
        let ReceiveOutcome::Message(Command::Serve { session: 7, .. }, Some(_)) =
            theirs.receive(None).unwrap()
        else {
            panic!("an unexpected message");
        };
        let none = theirs
            .receive::<Command>(Some(Duration::from_millis(1)))
            .unwrap();
        assert!(matches!(none, ReceiveOutcome::Nothing), "{none:?}");
        theirs.send(&"nonsense", None).unwrap();
        let invalid = ours.receive::<WorkerReport>(None).unwrap();
        assert!(matches!(invalid, ReceiveOutcome::Invalid(_)), "{invalid:?}");
        ours.close();
        assert!(matches!(
            theirs.receive::<Command>(None).unwrap(),
            ReceiveOutcome::Closed
        ));
    }
}
