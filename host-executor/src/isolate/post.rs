//! What a supervisor and a worker say to each other: JSON in packets, over a socket that only the two of them have.
//!
//! A supervisor believes nothing that a worker says but what concerns the worker's own guest: a worker that was taken over
//! by its guest says anything.
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

use crate::roster::Rules;
use crate::server::Peer;
use crate::session::Ending;
use crate::status::Report;

/// The longest packet: what Linux lets through a socket by default, and room for the report of [`MOST_SESSIONS`].
const MOST_BYTES: usize = 200 << 10;

/// Programs of one guest that one worker serves.
pub(super) const MOST_SESSIONS: usize = 96;

/// What a supervisor says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// What the guest may use from now on.
    Rules(Rules),
    /// A program of the guest; its socket comes with this.
    Serve {
        session: u64,
        /// The guest's name, if it has one.
        guest: Option<String>,
        peer: Peer,
        /// It is not to be served, but to be told why.
        away: Option<Away>,
    },
}

/// Why a program is turned away.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Away {
    Full { sessions: usize, limit: usize },
    Refused { why: String },
}

impl From<Away> for Ending {
    fn from(away: Away) -> Ending {
        match away {
            Away::Full { sessions, limit } => Ending::Full { sessions, limit },
            Away::Refused { why } => Ending::Refused { why },
        }
    }
}

/// What a worker says, from time to time and whenever a session has ended.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct News {
    /// How many [`Order::Serve`] it has followed.
    pub(super) served: u64,
    pub(super) report: Report,
}

/// One end of the socket.
#[derive(Debug)]
pub(super) struct Post(OwnedFd);

impl Post {
    /// Both ends.
    pub(super) fn pair() -> io::Result<(Post, OwnedFd)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Post(ours), theirs))
    }

    /// The worker's end.
    pub(super) fn new(socket: OwnedFd) -> Post {
        Post(socket)
    }

    /// Says something without waiting for the other side to listen.
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

    /// Waits for what the other side says next, at most for `timeout` if there is one.
    pub(super) fn receive<T: DeserializeOwned>(
        &self,
        timeout: Option<Duration>,
    ) -> io::Result<Heard<T>> {
        if let Some(timeout) = timeout {
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
            match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(0) | Err(Errno::INTR) => return Ok(Heard::Nothing),
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut text = vec![0; MOST_BYTES];
        let got = match scm_rights::receive(&self.0, &mut text, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got,
            Err(Errno::INTR) => return Ok(Heard::Nothing),
            // How a socket ends whose other side had something unread.
            Err(Errno::CONNRESET) => return Ok(Heard::End),
            Err(error) => return Err(error.into()),
        };
        if got.bytes == 0 {
            return Ok(Heard::End);
        }
        let message = match got.is_cut {
            true => Err(format!("a packet of more than {MOST_BYTES} bytes")),
            false => serde_json::from_slice(&text[..got.bytes]).map_err(|error| error.to_string()),
        };
        Ok(match message {
            Ok(message) => Heard::Message(message, got.files.into_iter().next()),
            Err(why) => Heard::Garbage(why),
        })
    }

    /// Has both sides hear the end.
    pub(super) fn close(&self) {
        // Fails when the other side has gone already, which is the same.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

/// What came of listening.
#[derive(Debug)]
pub(super) enum Heard<T> {
    Message(T, Option<OwnedFd>),
    /// Something that is no message, and why.
    Garbage(String),
    /// Nothing yet.
    Nothing,
    /// The other side is gone.
    End,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_and_what_is_no_message_is_noticed() {
        let (ours, theirs) = Post::pair().unwrap();
        let theirs = Post::new(theirs);
        let order = Order::Serve {
            session: 7,
            guest: Some("a".into()),
            peer: Peer::test(),
            away: None,
        };
        let (file, _) = Post::pair().unwrap();
        ours.send(&order, Some(&file.0)).unwrap();
        let Heard::Message(Order::Serve { session: 7, .. }, Some(_)) =
            theirs.receive(None).unwrap()
        else {
            panic!("another message");
        };
        let none = theirs
            .receive::<Order>(Some(Duration::from_millis(1)))
            .unwrap();
        assert!(matches!(none, Heard::Nothing), "{none:?}");
        theirs.send(&"nonsense", None).unwrap();
        let garbage = ours.receive::<News>(None).unwrap();
        assert!(matches!(garbage, Heard::Garbage(_)), "{garbage:?}");
        ours.close();
        assert!(matches!(theirs.receive::<Order>(None).unwrap(), Heard::End));
    }
}
