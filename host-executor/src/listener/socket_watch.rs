//! Socket files that somebody removes under a listener that has them.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tracing::{error, info, warn};
use vgpu_transport::link::socket_file::{FileState, SocketFile, SocketFileError};
use vgpu_transport::link::stream::vsock;
use vgpu_transport::link::unix;

use super::guest::{GuestListener, IncomingGuest, ListeningSocket, SocketListener};
use crate::machine_watch::MachineWatch;
use crate::peer::Peer;

/// How often a listener looks at its socket file.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The pause after a failed attempt to listen again, if nothing else is at the path since.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

/// The pause if another process listens there: an attempt connects to that process.
const RETRY_PAUSE_IN_USE: Duration = Duration::from_secs(60);

/// A listener that may have a socket file.
pub trait SocketOwner {
    /// The socket file. `None`: the listener has none.
    fn socket_file(&mut self) -> Option<&mut SocketFile>;

    /// Accepts on `socket` from now on, which [`SocketFile::bind_again`] has returned, and closes
    /// the former socket.
    fn use_socket(&mut self, socket: OwnedFd);
}

impl SocketOwner for unix::Listener {
    fn socket_file(&mut self) -> Option<&mut SocketFile> {
        Some(self.file())
    }

    fn use_socket(&mut self, socket: OwnedFd) {
        unix::Listener::use_socket(self, socket);
    }
}

impl SocketOwner for vsock::Listener {
    fn socket_file(&mut self) -> Option<&mut SocketFile> {
        match self {
            vsock::Listener::Unix(_, file) => Some(file),
            vsock::Listener::Kernel(_) => None,
        }
    }

    fn use_socket(&mut self, socket: OwnedFd) {
        if let vsock::Listener::Unix(listener, _) = self {
            *listener = socket.into();
        }
    }
}

/// A listener that listens again when its socket file is gone. Open connections stay.
pub struct Watched<L> {
    listener: L,
    watch: SocketWatch,
}

impl<L: SocketOwner> Watched<L> {
    /// Looks after the socket file of `listener` each time that no guest connects.
    pub fn new(listener: L) -> Watched<L> {
        Watched {
            listener,
            watch: SocketWatch::default(),
        }
    }

    /// Called when nobody waits at the socket: a guest that has connected before is accepted first.
    fn look(&mut self) {
        let file = self.listener.socket_file();
        let socket = file.and_then(|file| self.watch.look(file));
        if let Some(socket) = socket {
            self.listener.use_socket(socket);
        }
    }
}

impl<L: ListeningSocket> ListeningSocket for Watched<L> {
    fn listening_socket(&self) -> Option<BorrowedFd<'_>> {
        self.listener.listening_socket()
    }
}

impl<L: GuestListener + SocketOwner> GuestListener for Watched<L> {
    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        let guest = self.listener.accept(timeout)?;
        if guest.is_none() {
            self.look();
        }
        Ok(guest)
    }

    fn machine(&self) -> Option<&Arc<MachineWatch>> {
        self.listener.machine()
    }
}

impl<L: SocketListener + SocketOwner> SocketListener for Watched<L> {
    fn accept_socket(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let guest = self.listener.accept_socket(timeout)?;
        if guest.is_none() {
            self.look();
        }
        Ok(guest)
    }
}

/// Notices that a socket file is gone.
#[derive(Default)]
pub struct SocketWatch {
    /// When to look next. `None`: now.
    next: Option<Instant>,
    /// What the log says already.
    told: Option<String>,
    /// What was at the path at the last failed attempt, and when to try again.
    failed: Option<(FileState, Instant)>,
}

/// A line of the log.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    /// The file that was gone is there again.
    Back(String),
    /// The listener listens again.
    Mended(String),
    /// Nobody can connect.
    Broken(String),
}

impl SocketWatch {
    /// Looks at the file, at most once each [`LOOK_INTERVAL`]. If it is gone, binds a socket at its
    /// path, and returns that socket, on which the listener accepts from now on. Removes no file of
    /// another process. The log says once what has happened, or why nobody can connect.
    pub fn look(&mut self, file: &mut SocketFile) -> Option<OwnedFd> {
        let (socket, line) = self.look_at(file, Instant::now());
        match line {
            None => {}
            Some(Line::Back(text)) => info!("{text}"),
            Some(Line::Mended(text)) => warn!("{text}"),
            Some(Line::Broken(text)) => error!("{text}"),
        }
        socket
    }

    /// [`look`](SocketWatch::look) at this time, and what the log is to say.
    fn look_at(&mut self, file: &mut SocketFile, now: Instant) -> (Option<OwnedFd>, Option<Line>) {
        if self.next.is_some_and(|next| now < next) {
            return (None, None);
        }
        self.next = Some(now + LOOK_INTERVAL);
        let path = file.path().display().to_string();
        // An error: this process may not search the folder, and whether the file is there is
        // unknown.
        let Ok(state) = file.state() else {
            return (None, None);
        };
        let what = match state {
            FileState::Bound => {
                self.failed = None;
                let was_gone = self.told.take().is_some();
                let text = || format!("{path}: the file of this socket is there again");
                return (None, was_gone.then(|| Line::Back(text())));
            }
            FileState::Removed => "the file of this socket was removed",
            FileState::Replaced => "another file has the place of this socket's file",
        };
        if self
            .failed
            .is_some_and(|(at, next)| at == state && now < next)
        {
            return (None, None);
        }
        match file.bind_again() {
            Ok(socket) => {
                (self.told, self.failed) = (None, None);
                let text = format!("{path}: {what}; listening there again. Open connections stay");
                (Some(socket), Some(Line::Mended(text)))
            }
            Err(SocketFileError::Ending { .. }) => (None, None),
            Err(error) => {
                let pause = match error {
                    SocketFileError::InUse { .. } => RETRY_PAUSE_IN_USE,
                    _ => RETRY_PAUSE,
                };
                self.failed = Some((state, now + pause));
                let text = format!(
                    "{path}: {what}, so that nobody can connect, and listening there again fails: \
                     {error}{}. Open connections stay; next try in {pause:?}",
                    hint(&error)
                );
                let is_new = self.told.as_ref() != Some(&text);
                self.told = Some(text.clone());
                (None, is_new.then_some(Line::Broken(text)))
            }
        }
    }
}

/// What the operator can do about a socket that cannot be bound again.
fn hint(error: &SocketFileError) -> &'static str {
    match error {
        SocketFileError::InUse { .. } => "; stop that process",
        SocketFileError::NotASocket { .. } => "; remove that file",
        SocketFileError::NoDirectory { .. } => "; create the folder",
        SocketFileError::System {
            error: Errno::PERM | Errno::ACCESS | Errno::ROFS,
            ..
        } => {
            "; this process may not do so, by its sandbox or the permissions of the folder: \
             restart the executor"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use vgpu_transport::link::unix::{ListenOptions, Listener, connect};

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    fn listener(path: &Path) -> Listener {
        let options = ListenOptions {
            mode: 0o600,
            ..ListenOptions::default()
        };
        Listener::bind(path, options).unwrap()
    }

    fn text(line: Option<Line>) -> String {
        match line {
            Some(Line::Back(text) | Line::Mended(text) | Line::Broken(text)) => text,
            None => panic!("the log says nothing"),
        }
    }

    #[test]
    fn listener_whose_file_was_removed_listens_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vgpu.sock");
        let mut watched = Watched::new(listener(&path));
        assert!(watched.accept(Duration::ZERO).unwrap().is_none());
        fs::remove_file(&path).unwrap();
        // As if the interval was over.
        watched.watch.next = None;
        assert!(watched.accept(Duration::ZERO).unwrap().is_none());
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let guest = {
            let path = path.clone();
            std::thread::spawn(move || connect(&path, TEST_TIMEOUT).map(drop))
        };
        let incoming = watched.accept(TEST_TIMEOUT).unwrap();
        let _link = (incoming.expect("a guest").open)().unwrap();
        guest.join().unwrap().unwrap();
        drop(watched);
        assert!(!path.exists(), "the file is left behind");
    }

    #[test]
    fn guest_that_connected_before_its_file_was_removed_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vgpu.sock");
        let mut watched = Watched::new(listener(&path));
        let guest = {
            let path = path.clone();
            std::thread::spawn(move || connect(&path, TEST_TIMEOUT).map(drop))
        };
        // It waits in the queue of the socket.
        let mut fds = [rustix::event::PollFd::new(
            &watched.listener,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut fds, None).unwrap();
        fs::remove_file(&path).unwrap();
        let incoming = watched.accept(Duration::ZERO).unwrap();
        let _link = (incoming.expect("a guest").open)().unwrap();
        guest.join().unwrap().unwrap();
    }

    #[test]
    fn log_says_once_why_nobody_can_connect() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vgpu.sock");
        let mut own = listener(&path);
        let mut watch = SocketWatch::default();
        let mut now = Instant::now();
        assert!(matches!(watch.look_at(own.file(), now), (None, None)));

        // Another process, which listens there: its file is kept.
        let elsewhere = folder.path().join("elsewhere.sock");
        let other = listener(&elsewhere);
        fs::rename(&elsewhere, &path).unwrap();
        assert!(matches!(watch.look_at(own.file(), now), (None, None)));
        now += LOOK_INTERVAL;
        let (socket, line) = watch.look_at(own.file(), now);
        assert!(socket.is_none() && matches!(line, Some(Line::Broken(_))));
        let said = text(line);
        for words in [
            "another process already listens here",
            "; stop that process",
        ] {
            assert!(said.contains(words), "{said}");
        }
        assert!(said.starts_with(&path.display().to_string()), "{said}");
        // Not tried again before the pause is over, and not said again.
        now += RETRY_PAUSE_IN_USE - LOOK_INTERVAL;
        let again = watch.failed;
        assert!(matches!(watch.look_at(own.file(), now), (None, None)));
        assert_eq!(watch.failed, again);
        now += LOOK_INTERVAL;
        assert!(matches!(watch.look_at(own.file(), now), (None, None)));
        assert_ne!(watch.failed, again);
        assert!(
            connect_to(&path),
            "the file of the other process was removed"
        );
        drop(other);

        // A file that is no socket.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "kept").unwrap();
        now += RETRY_PAUSE_IN_USE;
        let said = text(watch.look_at(own.file(), now).1);
        assert!(said.contains("not a socket; remove that file"), "{said}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "kept");

        // Nothing is there any more, which is tried at once.
        fs::remove_file(&path).unwrap();
        now += LOOK_INTERVAL;
        let (socket, line) = watch.look_at(own.file(), now);
        assert!(matches!(line, Some(Line::Mended(_))), "{line:?}");
        own.use_socket(socket.expect("a socket"));
        assert!(connect_to(&path));

        // Moved away, and back.
        let moved = folder.path().join("moved.sock");
        fs::rename(&path, &moved).unwrap();
        fs::create_dir(&path).unwrap();
        now += LOOK_INTERVAL;
        assert!(matches!(
            watch.look_at(own.file(), now),
            (None, Some(Line::Broken(_)))
        ));
        fs::remove_dir(&path).unwrap();
        fs::rename(&moved, &path).unwrap();
        now += LOOK_INTERVAL;
        let (socket, line) = watch.look_at(own.file(), now);
        assert!(socket.is_none() && matches!(line, Some(Line::Back(_))));

        // The folder is gone, and comes back.
        let gone = folder.path().with_extension("gone");
        fs::rename(folder.path(), &gone).unwrap();
        now += LOOK_INTERVAL;
        let said = text(watch.look_at(own.file(), now).1);
        assert!(said.contains("; create the folder"), "{said}");
        fs::rename(&gone, folder.path()).unwrap();
        now += LOOK_INTERVAL;
        let (socket, line) = watch.look_at(own.file(), now);
        assert!(socket.is_none() && matches!(line, Some(Line::Back(_))));
    }

    /// Whether a process listens at `path`.
    fn connect_to(path: &Path) -> bool {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
        let client = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&client, &SocketAddrUnix::new(path).unwrap()).is_ok()
    }
}
