//! The executor's side of the control socket.
//!
//! One thread accepts clients and reads their commands, none of which it carries out. A dump goes
//! to the [`DumpThread`]. Every other command gets a thread, started by a second thread: to start
//! one waits for the dynamic linker's lock, which a driver that hangs may have (`dump_thread`).
//! Both threads begin before an engine.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::{Level, debug};
use vgpu_transport::link::socket_file::{SocketFile, bind_stream};
use vgpu_transport::lock::{lock, wait, wait_timeout};

use super::{Actions, CLIENT_TIMEOUT, MAX_CLIENTS, MAX_COMMAND, Refusal, ReloadOutcome};
use crate::added_guests::GuestAnswer;
use crate::dump_thread::{DumpThread, MAX_DUMP_CLIENTS};
use crate::listener::{LOOK_INTERVAL, SocketWatch};
use crate::log_queue;
use crate::status::StatusHandle;

/// Permissions of the socket.
const MODE: u32 = 0o600;

/// Clients that have not sent their command yet, at most. A further one takes the place of the
/// oldest.
const MAX_CONNECTED: usize = 64;

/// Pause after a failed accept.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// Binds the control socket at `path`, without serving anyone. The listener does not block.
/// Dropping the [`SocketFile`] removes the file.
///
/// # Errors
/// The socket cannot be bound.
pub fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    bind_stream(path, MODE).map_err(io::Error::other)
}

/// The control socket of a process that starts. Dumps are answered, and all other commands wait for
/// [`serve`](ControlSocket::serve).
pub struct ControlSocket {
    shared: Arc<SharedSocket>,
}

struct SharedSocket {
    dumps: DumpThread,
    /// What answers other commands than that for a dump.
    served: OnceLock<(StatusHandle, Actions)>,
    state: Mutex<SocketState>,
    changed: Condvar,
}

/// What the threads of a control socket tell each other.
#[derive(Default)]
struct SocketState {
    /// Threads that run, of the two.
    begun: usize,
    /// Clients that no thread has yet, with their commands.
    commands: VecDeque<(UnixStream, String)>,
    /// Clients that have a thread.
    threads: usize,
    /// The socket that the path has now.
    bound_again: Option<UnixListener>,
}

/// A client that has not sent its whole command.
struct Connected {
    socket: UnixStream,
    command: Vec<u8>,
    deadline: Instant,
}

impl ControlSocket {
    /// Serves the control socket on threads of its own, for the life of the process, and waits
    /// until they run. If `file` is removed meanwhile, listens at its path again. At the end of the
    /// process `socket_file::remove_all` removes the file.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        listener: UnixListener,
        file: SocketFile,
        dumps: DumpThread,
    ) -> io::Result<ControlSocket> {
        let shared = Arc::new(SharedSocket {
            dumps,
            served: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        thread::Builder::new()
            .name("vgpu-control".into())
            .spawn(move || own.accept(listener))?;
        let own = Arc::clone(&shared);
        thread::Builder::new()
            .name("vgpu-commands".into())
            .spawn(move || own.start_threads(file))?;
        let mut state = lock(&shared.state);
        // A thread that has not begun waits for the linker's lock, too.
        while state.begun < 2 {
            state = wait(&shared.changed, state);
        }
        drop(state);
        Ok(ControlSocket { shared })
    }

    /// Answers all commands from now on, also those that have come before.
    pub fn serve(self, status: StatusHandle, actions: Actions) {
        // This is the only call, since it takes the value.
        let _ = self.shared.served.set((status, actions));
        // Under the lock: the thread between its check and its wait would miss the notification.
        drop(lock(&self.shared.state));
        self.shared.changed.notify_all();
    }
}

impl SharedSocket {
    fn begin(&self) {
        lock(&self.state).begun += 1;
        self.changed.notify_all();
    }

    /// Accepts clients and reads their commands. Waits for no client, for no lock that a thread
    /// keeps, and not for the dynamic linker: the log is written past `tracing`.
    fn accept(&self, mut listener: UnixListener) {
        self.begin();
        let mut connected: VecDeque<Connected> = VecDeque::new();
        loop {
            if let Err(error) = wait_for_clients(&listener, &connected) {
                self.pause(&format!("cannot wait for control clients: {error}"));
                continue;
            }
            if let Some(socket) = lock(&self.state).bound_again.take() {
                listener = socket;
            }
            match listener.accept() {
                Ok((socket, _)) => {
                    if connected.len() >= MAX_CONNECTED
                        && let Some(oldest) = connected.pop_front()
                    {
                        // It may be gone.
                        let _ = refuse(&oldest.socket, MAX_CONNECTED);
                    }
                    if socket.set_nonblocking(true).is_ok() {
                        connected.push_back(Connected {
                            socket,
                            command: Vec::new(),
                            deadline: Instant::now() + CLIENT_TIMEOUT,
                        });
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => self.pause(&format!("cannot accept a control client: {error}")),
            }
            // Each is read in its turn, and goes to the back if its command is not complete.
            for _ in 0..connected.len() {
                let Some(mut client) = connected.pop_front() else {
                    break;
                };
                match client.read() {
                    ReadCommand::Complete(command) => self.pass_on(client.socket, command),
                    ReadCommand::Incomplete => connected.push_back(client),
                    ReadCommand::Failed => {}
                }
            }
        }
    }

    fn pause(&self, what: &str) {
        let text = format!("{what}; next try in {ERROR_PAUSE:?}");
        log_queue::write_line(Level::ERROR, &text);
        thread::sleep(ERROR_PAUSE);
    }

    /// Has a command carried out, or tells the client that too many wait.
    fn pass_on(&self, client: UnixStream, command: String) {
        let refused = match command.trim() {
            "dump" => self.dumps.answer(client).err().zip(Some(MAX_DUMP_CLIENTS)),
            _ => self.queue(client, command).zip(Some(MAX_CLIENTS)),
        };
        if let Some((client, limit)) = refused {
            // The client may be gone, or may have no room in its socket.
            let _ = refuse(&client, limit);
        }
    }

    /// Queues a command for a thread of its own. Returns the client if too many wait.
    fn queue(&self, client: UnixStream, command: String) -> Option<UnixStream> {
        let mut state = lock(&self.state);
        if state.commands.len() + state.threads >= MAX_CLIENTS {
            // Some may have given up while the process started.
            state.commands.retain(|(client, _)| !has_hung_up(client));
        }
        if state.commands.len() + state.threads >= MAX_CLIENTS {
            return Some(client);
        }
        state.commands.push_back((client, command));
        drop(state);
        self.changed.notify_all();
        None
    }

    /// Starts a thread for each command, once the executor serves. Looks after the socket's file.
    fn start_threads(self: Arc<SharedSocket>, mut file: SocketFile) {
        self.begin();
        let mut watch = SocketWatch::default();
        let mut state = lock(&self.state);
        loop {
            let command = match self.served.get() {
                Some(_) => state.commands.pop_front(),
                None => None,
            };
            let Some((client, command)) = command else {
                state = wait_timeout(&self.changed, state, LOOK_INTERVAL);
                // A former socket stays open until the file is bound again: the thread that accepts
                // has it, and takes the new one afterwards.
                if state.bound_again.is_none() {
                    drop(state);
                    let socket = watch.look(&mut file).map(UnixListener::from);
                    state = lock(&self.state);
                    state.bound_again = socket;
                }
                continue;
            };
            state.threads += 1;
            drop(state);
            let own = Arc::clone(&self);
            let spawned = thread::Builder::new()
                .name("vgpu-control-answer".into())
                .spawn(move || {
                    let _place = Place(&own);
                    if let Some((status, actions)) = own.served.get()
                        && let Err(error) = answer(&client, &command, status, actions)
                    {
                        debug!("a control client was not answered: {error}");
                    }
                });
            if let Err(error) = &spawned {
                let text = format!("no thread for a control client: {error}");
                log_queue::write_line(Level::ERROR, &text);
            }
            state = lock(&self.state);
            state.threads -= usize::from(spawned.is_err());
        }
    }
}

/// The place of a client that has a thread, also of one that panics.
struct Place<'a>(&'a SharedSocket);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).threads -= 1;
    }
}

/// Waits for a client, or for the command of one, and at most until a deadline or the next look at
/// the socket.
fn wait_for_clients(listener: &UnixListener, connected: &VecDeque<Connected>) -> io::Result<()> {
    let now = Instant::now();
    let left = connected
        .iter()
        .map(|client| client.deadline.saturating_duration_since(now));
    let timeout = left
        .min()
        .map_or(LOOK_INTERVAL, |left| left.min(LOOK_INTERVAL));
    let sockets = connected.iter().map(|client| &client.socket);
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    fds.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether the client has closed its socket. Does not wait.
fn has_hung_up(client: &UnixStream) -> bool {
    let mut fds = [PollFd::new(client, PollFlags::empty())];
    let now = Timespec::default();
    let polled = poll(&mut fds, Some(&now));
    polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// What there is of a client's command.
enum ReadCommand {
    Complete(String),
    Incomplete,
    /// The client is gone, is late, or sends no text.
    Failed,
}

impl Connected {
    /// Reads what has come of the command. Does not wait.
    fn read(&mut self) -> ReadCommand {
        let mut part = [0; 512];
        loop {
            let room = MAX_COMMAND - self.command.len();
            let len = room.min(part.len());
            let is_over = match self.socket.read(&mut part[..len]) {
                Ok(0) if self.command.is_empty() => return ReadCommand::Failed,
                Ok(0) => true,
                Ok(count) => {
                    self.command.extend_from_slice(&part[..count]);
                    self.command.ends_with(b"\n") || self.command.len() == MAX_COMMAND
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => false,
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && Instant::now() < self.deadline =>
                {
                    return ReadCommand::Incomplete;
                }
                Err(_) => return ReadCommand::Failed,
            };
            if is_over {
                let command = String::from_utf8(std::mem::take(&mut self.command));
                return command.map_or(ReadCommand::Failed, ReadCommand::Complete);
            }
        }
    }
}

/// Tells a client that `clients` others wait. Does not wait for the client: neither for its
/// command, nor for room in the socket.
pub(super) fn refuse(mut client: &UnixStream, clients: usize) -> io::Result<()> {
    client.set_nonblocking(true)?;
    let refusal = Refusal {
        too_many_clients: clients,
    };
    let mut answer = serde_json::to_string(&refusal).map_err(io::Error::other)?;
    answer.push('\n');
    // Linux keeps the answer for the client after the end of the connection.
    client.write_all(answer.as_bytes())
}

/// Carries out a command, and answers its client.
fn answer(
    mut client: &UnixStream,
    command: &str,
    status: &StatusHandle,
    actions: &Actions,
) -> io::Result<()> {
    client.set_nonblocking(false)?;
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let answer = match command.trim() {
        "status" => serde_json::to_string(&status.status()),
        "report" => serde_json::to_string(&status.report()),
        "reload" => serde_json::to_string(&(actions.reload)()),
        request => match request.strip_prefix("guests ") {
            Some(request) => serde_json::to_string(&match serde_json::from_str(request) {
                Ok(request) => (actions.guests)(request),
                Err(error) => GuestAnswer::Refused(format!("invalid request: {error}")),
            }),
            None => serde_json::to_string(&match serde_json::from_str(request) {
                Ok(request) => (actions.perform)(request),
                Err(_) => ReloadOutcome {
                    ok: false,
                    message: "unknown command: expected status, dump, reload, guests, or a \
                              request that this version knows"
                        .into(),
                },
            }),
        },
    };
    let mut answer = answer.map_err(io::Error::other)?;
    answer.push('\n');
    client.write_all(answer.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver, Sender};

    use vgpu_transport::link::socket_file::connect_stream;

    use super::super::{ControlError, MAX_ANSWER, dump, receive, reload, send};
    use super::*;
    use crate::status::{DrainStatus, Progress, Status, StatusSource, TenantLatency};

    /// After this time a test fails.
    const TIMEOUT: Duration = Duration::from_secs(60);

    /// An executor that has only a dump.
    struct DumpOnly;

    impl StatusSource for DumpOnly {
        fn status(&self) -> Status {
            panic!("nobody asks for the status");
        }
        fn latencies(&self) -> Vec<TenantLatency> {
            Vec::new()
        }
        fn dump(&self) -> String {
            "a dump".into()
        }
        fn progress(&self) -> Progress {
            Progress::Runs(String::new())
        }
        fn draining(&self) -> Option<DrainStatus> {
            None
        }
    }

    fn outcome() -> ReloadOutcome {
        ReloadOutcome {
            ok: true,
            message: "reloaded".into(),
        }
    }

    /// Each reload waits until something is sent, or the sender is gone.
    fn waiting_reloads() -> (Sender<()>, Actions) {
        let (end, ends) = mpsc::channel::<()>();
        let ends: Mutex<Receiver<()>> = Mutex::new(ends);
        let actions = Actions {
            reload: Box::new(move || {
                let _ = lock(&ends).recv();
                outcome()
            }),
            perform: Box::new(|_| outcome()),
            guests: Box::new(|_| GuestAnswer::Refused("no guests".into())),
        };
        (end, actions)
    }

    fn executor() -> StatusHandle {
        StatusHandle::new(Arc::new(DumpOnly))
    }

    fn start(path: &Path) -> (DumpThread, ControlSocket) {
        let (listener, file) = bind(path).unwrap();
        let dumps = DumpThread::start().unwrap();
        let socket = ControlSocket::start(listener, file, dumps.clone()).unwrap();
        (dumps, socket)
    }

    /// A reload for which nobody waits yet.
    fn begin_reload(path: &Path) -> UnixStream {
        send(path, "reload", TIMEOUT).unwrap()
    }

    fn reloaded(client: &UnixStream) {
        let answer = receive(client, Instant::now() + TIMEOUT, MAX_ANSWER);
        let answer: ReloadOutcome = answer.unwrap();
        assert_eq!(answer, outcome());
    }

    fn is_refused<T: std::fmt::Debug>(answer: Result<T, ControlError>, limit: usize) -> bool {
        matches!(answer, Err(ControlError::TooManyClients { clients }) if clients == limit)
    }

    #[test]
    fn dump_is_answered_while_too_many_other_clients_wait() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let (dumps, socket) = start(&path);
        dumps.set_source(executor());
        let (end, actions) = waiting_reloads();
        socket.serve(executor(), actions);
        let clients: Vec<_> = (0..MAX_CLIENTS).map(|_| begin_reload(&path)).collect();
        let refused = reload(&path);
        assert!(is_refused(refused, MAX_CLIENTS), "more wait than can");
        assert_eq!(dump(&path).unwrap(), "a dump");
        // Clients that send nothing delay nobody. The oldest gives its place to another one.
        let connect = |_| connect_stream(&path, Instant::now() + TIMEOUT).unwrap();
        let silent: Vec<_> = (0..MAX_CONNECTED + 3).map(connect).collect();
        assert_eq!(dump(&path).unwrap(), "a dump");
        // On a busy machine the time for its command may have passed before.
        let refused = receive::<()>(&silent[0], Instant::now() + TIMEOUT, MAX_ANSWER);
        let is_late = matches!(refused, Err(ControlError::Invalid(_)));
        assert!(
            is_late || is_refused(refused, MAX_CONNECTED),
            "the oldest stays"
        );
        assert!(is_refused(reload(&path), MAX_CLIENTS), "more wait than can");
        drop(silent);

        drop(end);
        clients.iter().for_each(reloaded);
        // The thread of a client ends after its answer.
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match reload(&path) {
                Ok(answer) => break assert_eq!(answer, outcome()),
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        }
    }

    /// An engine starts, possibly for ever.
    #[test]
    fn commands_wait_for_the_executor_and_a_dump_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let (dumps, socket) = start(&path);
        dumps.begin_step("the engine test:0 starts");
        let text = dump(&path).unwrap();
        assert!(
            text.contains("start: the engine test:0 starts, for "),
            "{text}"
        );
        let mut waiting: Vec<_> = (0..MAX_CLIENTS).map(|_| begin_reload(&path)).collect();
        assert!(is_refused(reload(&path), MAX_CLIENTS), "more wait than can");
        // One gives up, and another one has its place.
        waiting.pop();
        waiting.push(begin_reload(&path));
        assert!(is_refused(reload(&path), MAX_CLIENTS), "more wait than can");
        dumps.set_source(executor());
        assert_eq!(dump(&path).unwrap(), "a dump");
        let (end, actions) = waiting_reloads();
        drop(end);
        socket.serve(executor(), actions);
        waiting.iter().for_each(reloaded);
    }

    /// The place of a client is free again when its thread panics.
    #[test]
    fn panics_take_no_places() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let (_dumps, socket) = start(&path);
        let (end, actions) = waiting_reloads();
        drop(end);
        socket.serve(executor(), actions);
        for _ in 0..2 * MAX_CLIENTS {
            let error = super::super::status(&path).unwrap_err();
            assert!(matches!(error, ControlError::Invalid(_)), "{error}");
        }
        assert_eq!(reload(&path).unwrap(), outcome());
    }
}
