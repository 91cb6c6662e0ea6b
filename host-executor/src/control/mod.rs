//! The control socket: `vgpu ps`, `vgpu top`, `vgpu dump`, `vgpu reload`, `vgpu set` and `vgpu
//! drain` talk to a running executor through it.
//!
//! The client sends one line with a command or an [`OperatorRequest`] as JSON, the executor answers
//! with one JSON document. The command `guests` is followed by a [`GuestRequest`] as JSON. The
//! socket is for the executor's user and root (mode 600). The protocol is not HTTP, as that of the
//! metrics is: supervisors and commands ask from threads without an asynchronous runtime.
#![forbid(unsafe_code)]

mod server;

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde::{Deserialize, Serialize};
use vgpu_transport::link::credentials;
use vgpu_transport::link::socket_file::connect_stream;

use crate::added_guests::{GuestAnswer, GuestList, GuestRequest};
use crate::operator_request::OperatorRequest;
use crate::status::{Report, Status};

pub use server::{ControlSocket, bind};

/// How long a client may take to send its command, and to take the answer; and how long an executor
/// may take to accept a client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest command in bytes.
const MAX_COMMAND: usize = 4096;

/// Most bytes of an answer that `vgpu ps` reads. A snapshot has less than 4 KiB for each guest and
/// session.
const MAX_ANSWER: usize = 64 << 20;

/// Most bytes of a report that a supervisor reads: the process of a virtual machine that a guest
/// has taken over may send any number. Such a process has one guest and at most 7 sessions.
const MAX_REPORT: usize = 256 << 10;

/// Clients whose commands wait or are carried out at once, dumps apart. Further clients get a
/// [`Refusal`].
const MAX_CLIENTS: usize = 16;

/// How long a client waits for an answer: longer than a reload takes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The outcome of reloading the configuration, or of an [`OperatorRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadOutcome {
    /// Whether it took effect.
    pub ok: bool,
    /// What has changed, or what is wrong.
    pub message: String,
}

/// Why an executor does not answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nothing listens at the socket, this user may not connect, or the socket fails.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// The executor accepts no client.
    #[error(
        "no connection within {limit:?}: as many clients wait as its socket takes, and the \
         executor accepts none; it is stopped, or hangs"
    )]
    Busy {
        /// How long this process has waited.
        limit: Duration,
    },
    /// The answer takes too long.
    #[error("no complete answer in time, {bytes} bytes so far")]
    Late {
        /// Bytes of the answer that have arrived.
        bytes: usize,
    },
    /// The executor answers as many clients as it can at once.
    #[error(
        "{clients} clients of the control socket wait for an answer, and the executor answers no \
         more at once: try again"
    )]
    TooManyClients {
        /// How many clients the executor answers at once.
        clients: usize,
    },
    /// The answer is too long.
    #[error("an answer of more than {limit} bytes")]
    TooLong {
        /// The most bytes of an answer.
        limit: usize,
    },
    /// The answer is not what this version expects.
    #[error("invalid answer ({0}): is the executor a vgpu of another version?")]
    Invalid(serde_json::Error),
    /// The thread that asks has panicked.
    #[error("the querying thread panicked")]
    Panicked,
}

/// The answer to a client that is not served.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Refusal {
    /// How many clients are answered at once, if so many are connected.
    too_many_clients: usize,
}

/// Reloads the configuration.
pub type Reload = Box<dyn Fn() -> ReloadOutcome + Send + Sync>;

/// Carries out a request of the operator.
pub type Perform = Box<dyn Fn(OperatorRequest) -> ReloadOutcome + Send + Sync>;

/// Adds, removes and lists guests.
pub type ChangeGuests = Box<dyn Fn(GuestRequest) -> GuestAnswer + Send + Sync>;

/// What clients can ask for beside the status.
pub struct Actions {
    /// Reloads the configuration.
    pub reload: Reload,
    /// Carries out a request of the operator.
    pub perform: Perform,
    /// Adds, removes and lists guests.
    pub guests: ChangeGuests,
}

/// Asks the executor at `path` for a snapshot.
///
/// # Errors
/// [`ControlError`] says why there is no answer.
pub fn status(path: &Path) -> Result<Status, ControlError> {
    ask(path, "status", ANSWER_TIMEOUT, MAX_ANSWER)
}

/// Asks the executor at `path` what everybody does now.
///
/// # Errors
/// As [`status`].
pub fn dump(path: &Path) -> Result<String, ControlError> {
    ask(path, "dump", ANSWER_TIMEOUT, MAX_ANSWER)
}

/// Asks processes that this process has started for their dumps: all at once, within `timeout`, and
/// without a thread for each, whose start may wait for the dynamic linker. Returns each name with
/// the answer.
pub(crate) fn dumps_of_processes(
    processes: Vec<(String, PathBuf)>,
    timeout: Duration,
) -> Vec<(String, Result<String, ControlError>)> {
    let end = Instant::now() + timeout;
    let mut questions: Vec<_> = processes.into_iter().map(DumpQuestion::new).collect();
    loop {
        questions.iter_mut().for_each(DumpQuestion::go_on);
        let is_open = questions.iter().any(|question| question.outcome.is_none());
        if !is_open || Instant::now() >= end {
            break;
        }
        thread::sleep(QUESTION_PERIOD);
    }
    questions
        .into_iter()
        .map(|question| question.end(timeout))
        .collect()
}

/// How long [`dumps_of_processes`] waits for one process before it looks at the next one.
const QUESTION_PERIOD: Duration = Duration::from_millis(1);

/// A process that is asked for its dump.
struct DumpQuestion {
    name: String,
    path: PathBuf,
    /// Once the command is sent.
    socket: Option<UnixStream>,
    answer: Vec<u8>,
    outcome: Option<Result<String, ControlError>>,
}

impl DumpQuestion {
    fn new((name, path): (String, PathBuf)) -> DumpQuestion {
        DumpQuestion {
            name,
            path,
            socket: None,
            answer: Vec::new(),
            outcome: None,
        }
    }

    /// Connects if there is no connection yet, and reads what there is of the answer.
    fn go_on(&mut self) {
        if self.outcome.is_none() {
            self.outcome = match self.attempt() {
                // The queue of the process may have room at the next attempt.
                Err(ControlError::Late { .. } | ControlError::Busy { .. }) => None,
                outcome => Some(outcome),
            };
        }
    }

    fn attempt(&mut self) -> Result<String, ControlError> {
        let socket = match &self.socket {
            Some(socket) => socket,
            None => {
                let socket = send(&self.path, "dump", Duration::ZERO)?;
                self.socket.insert(socket)
            }
        };
        let deadline = Instant::now() + QUESTION_PERIOD;
        read_answer(socket, &mut self.answer, deadline, MAX_REPORT)?;
        parse(&self.answer)
    }

    /// The name, and the answer that has come within `limit`.
    fn end(self, limit: Duration) -> (String, Result<String, ControlError>) {
        let bytes = self.answer.len();
        let without = match self.socket {
            Some(_) => ControlError::Late { bytes },
            None => ControlError::Busy { limit },
        };
        (self.name, self.outcome.unwrap_or(Err(without)))
    }
}

/// What became of a question.
pub(crate) struct QuestionOutcome<T> {
    /// The number of the process that has opened the control socket, if there was a connection.
    pub(crate) process: Option<i32>,
    pub(crate) answer: Result<T, ControlError>,
    /// The question, if its answer was not there in time.
    pub(crate) open: Option<OpenQuestion>,
}

/// A question that the executor has not answered in time. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct OpenQuestion(UnixStream);

impl OpenQuestion {
    #[cfg(test)]
    pub(crate) fn of(socket: UnixStream) -> OpenQuestion {
        OpenQuestion(socket)
    }

    /// Whether the executor has begun to answer since. Does not wait.
    pub(crate) fn is_answered(&self) -> bool {
        matches!(peek(&self.0), Ok(1..))
    }

    /// Whether the executor has closed the connection, and has left no answer in it. Does not wait.
    pub(crate) fn is_closed(&self) -> bool {
        !matches!(peek(&self.0), Ok(1..) | Err(Errno::AGAIN))
    }
}

/// The number of bytes that can be read, at most 1. 0: the connection is closed. Does not wait.
fn peek(socket: &UnixStream) -> Result<usize, Errno> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    recv(socket, &mut [0], flags).map(|(len, _)| len)
}

/// Asks an executor that this process has started for its complete report.
pub(crate) fn report(path: &Path, timeout: Duration) -> QuestionOutcome<Report> {
    let deadline = Instant::now() + timeout;
    match send(path, "report", timeout) {
        Ok(socket) => {
            let answer = receive(&socket, deadline, MAX_REPORT);
            let is_late = matches!(answer, Err(ControlError::Late { .. }));
            QuestionOutcome {
                process: credentials::of(&socket).map(|peer| peer.pid).ok(),
                answer,
                open: is_late.then_some(OpenQuestion(socket)),
            }
        }
        Err(error) => QuestionOutcome {
            process: None,
            answer: Err(error),
            open: None,
        },
    }
}

/// Makes the executor at `path` reload its configuration.
///
/// # Errors
/// As [`status`]. A configuration with a mistake is no error here: see [`ReloadOutcome::ok`].
pub fn reload(path: &Path) -> Result<ReloadOutcome, ControlError> {
    ask(path, "reload", ANSWER_TIMEOUT, MAX_ANSWER)
}

/// Makes the executor at `path` carry out a request.
///
/// # Errors
/// As [`status`]. A request that cannot be carried out is no error here: see
/// [`ReloadOutcome::ok`].
pub fn perform(path: &Path, request: &OperatorRequest) -> Result<ReloadOutcome, ControlError> {
    perform_within(path, request, ANSWER_TIMEOUT)
}

/// As [`perform`], within `timeout`, for an executor that this process has started.
pub(crate) fn perform_within(
    path: &Path,
    request: &OperatorRequest,
    timeout: Duration,
) -> Result<ReloadOutcome, ControlError> {
    let line = serde_json::to_string(request).map_err(ControlError::Invalid)?;
    ask(path, &line, timeout, MAX_REPORT)
}

/// Why an executor has not carried out a [`GuestRequest`].
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The executor does not answer.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The executor has refused the request: the client's fault, or the executor has too little
    /// memory.
    #[error("the executor refuses: {0}")]
    Refused(String),
}

/// Adds, removes or lists guests of the executor at `path`. Waits up to `timeout`.
///
/// # Errors
/// [`GuestError`] says why the request was not carried out.
pub fn guests(
    path: &Path,
    request: &GuestRequest,
    timeout: Duration,
) -> Result<GuestList, GuestError> {
    let request = serde_json::to_string(request).map_err(ControlError::Invalid)?;
    match ask(path, &format!("guests {request}"), timeout, MAX_ANSWER)? {
        GuestAnswer::Done(list) => Ok(list),
        GuestAnswer::Refused(why) => Err(GuestError::Refused(why)),
    }
}

/// Reads up to the end of the stream, of a peer that may send forever, and appends the bytes to
/// `answer`.
///
/// # Errors
/// The answer is not complete at `deadline`, is longer than `limit` bytes, or the socket fails.
fn read_answer(
    mut socket: &UnixStream,
    answer: &mut Vec<u8>,
    deadline: Instant,
    limit: usize,
) -> Result<(), ControlError> {
    let mut part = [0; 16 << 10];
    loop {
        let bytes = answer.len();
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ControlError::Late { bytes });
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut part) {
            Ok(0) => return Ok(()),
            Ok(count) => answer.extend_from_slice(&part[..count]),
            // The deadline has passed in the read.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(ControlError::Late { bytes });
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The executor has closed the connection without reading the command. An answer is a
            // line.
            Err(error)
                if error.kind() == io::ErrorKind::ConnectionReset && answer.ends_with(b"\n") =>
            {
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        if answer.len() > limit {
            return Err(ControlError::TooLong { limit });
        }
    }
}

fn ask<T: for<'de> Deserialize<'de>>(
    path: &Path,
    command: &str,
    timeout: Duration,
    limit: usize,
) -> Result<T, ControlError> {
    let deadline = Instant::now() + timeout;
    let socket = send(path, command, timeout)?;
    receive(&socket, deadline, limit)
}

/// Receives the answer to a command.
fn receive<T: for<'de> Deserialize<'de>>(
    socket: &UnixStream,
    deadline: Instant,
    limit: usize,
) -> Result<T, ControlError> {
    let mut answer = Vec::new();
    read_answer(socket, &mut answer, deadline, limit)?;
    parse(&answer)
}

/// Reads a complete answer.
fn parse<T: for<'de> Deserialize<'de>>(answer: &[u8]) -> Result<T, ControlError> {
    if let Ok(refusal) = serde_json::from_slice::<Refusal>(answer) {
        return Err(ControlError::TooManyClients {
            clients: refusal.too_many_clients,
        });
    }
    serde_json::from_slice(answer).map_err(ControlError::Invalid)
}

/// Connects within `timeout`, and [`CLIENT_TIMEOUT`] at most, and sends a command.
fn send(path: &Path, command: &str, timeout: Duration) -> Result<UnixStream, ControlError> {
    let limit = timeout.min(CLIENT_TIMEOUT);
    let socket = match connect_stream(path, Instant::now() + limit) {
        Ok(socket) => socket,
        Err(Errno::AGAIN) => return Err(ControlError::Busy { limit }),
        Err(error) => return Err(ControlError::Socket(error.into())),
    };
    socket.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    send_command(&socket, command)?;
    Ok(socket)
}

/// Sends a command, also to an executor that has refused it before it was sent.
fn send_command(mut socket: &UnixStream, command: &str) -> io::Result<()> {
    let sent = socket.write_all(format!("{command}\n").as_bytes());
    match sent {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => match peek(socket) {
            Ok(1..) => Ok(()),
            _ => Err(error),
        },
        sent => sent,
    }
}

/// A process that starts, and answers when it serves. One connection at a time asks it, since each
/// takes a place among those that the process has not accepted.
#[derive(Default)]
pub(crate) struct StartingProcess {
    question: Option<UnixStream>,
    answer: Vec<u8>,
}

impl StartingProcess {
    /// Waits up to `timeout` for an answer of the process whose control socket is `path`. Returns
    /// whether it has answered. A process that does not listen yet is asked at the next call.
    pub(crate) fn has_answered(&mut self, path: &Path, timeout: Duration) -> bool {
        let question = match self.question.take() {
            Some(question) => question,
            None => match send(path, "report", timeout) {
                Ok(question) => question,
                Err(_) => return false,
            },
        };
        let deadline = Instant::now() + timeout;
        match read_answer(&question, &mut self.answer, deadline, MAX_REPORT) {
            Ok(()) => {
                let answer = std::mem::take(&mut self.answer);
                serde_json::from_slice::<Report>(&answer).is_ok()
            }
            Err(ControlError::Late { .. }) => {
                self.question = Some(question);
                false
            }
            Err(_) => {
                self.answer.clear();
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use vgpu_transport::link::socket_file::SocketFile;

    use super::server::refuse;
    use super::*;

    #[test]
    fn answer_that_is_too_long_or_never_ends_is_refused() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let later = || Instant::now() + Duration::from_secs(60);
        theirs.write_all(&[b'x'; 100]).unwrap();
        let read = |socket: &UnixStream, deadline, limit| {
            let mut answer = Vec::new();
            read_answer(socket, &mut answer, deadline, limit).map(|()| answer)
        };
        let error = read(&ours, later(), 99).unwrap_err();
        let is_expected = matches!(error, ControlError::TooLong { limit: 99 });
        assert!(is_expected, "{error}");

        // A byte now and then does not extend the time.
        let slow = thread::spawn(move || while theirs.write_all(b"x").is_ok() {});
        let soon = Instant::now() + Duration::from_millis(100);
        let error = read(&ours, soon, usize::MAX).unwrap_err();
        assert!(matches!(error, ControlError::Late { .. }), "{error}");
        drop(ours);
        slow.join().unwrap();

        // A peer that says nothing: the read itself waits until the deadline.
        let (ours, silent) = UnixStream::pair().unwrap();
        let soon = Instant::now() + Duration::from_millis(20);
        let error = read(&ours, soon, 99).unwrap_err();
        assert!(matches!(error, ControlError::Late { bytes: 0 }), "{error}");
        drop(silent);

        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"{}").unwrap();
        drop(theirs);
        assert_eq!(read(&ours, later(), 2).unwrap(), b"{}");
    }

    #[test]
    fn question_stays_open_for_a_late_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let (listener, _file) = bind(&path).unwrap();
        listener.set_nonblocking(false).unwrap();
        let asked = report(&path, Duration::from_millis(1));
        assert!(matches!(asked.answer, Err(ControlError::Late { .. })));
        let question = asked.open.expect("it is open");
        assert!(!question.is_answered());
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(b"{").unwrap();
        assert!(question.is_answered());
        // Refused in time: it will not be answered.
        let refuses = thread::spawn(move || drop(listener.accept().unwrap()));
        let asked = report(&path, Duration::from_secs(60));
        assert!(asked.answer.is_err() && asked.open.is_none());
        refuses.join().unwrap();
    }

    /// A listener that never accepts, with as many connections as the kernel queues.
    fn full(path: &Path) -> (UnixListener, SocketFile, Vec<UnixStream>) {
        let (listener, file) = bind(path).unwrap();
        let mut queued = Vec::new();
        while let Ok(queue) = connect_stream(path, Instant::now()) {
            queued.push(queue);
        }
        (listener, file, queued)
    }

    #[test]
    fn process_that_accepts_nobody_is_not_waited_for_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let (listener, _file, queued) = full(&path);
        assert!(queued.len() > 100, "{}", queued.len());
        let error = status(&path).unwrap_err();
        assert!(matches!(error, ControlError::Busy { .. }), "{error}");
        let limit = Duration::from_millis(20);
        let error = report(&path, limit).answer.unwrap_err();
        assert!(
            matches!(error, ControlError::Busy { limit: l } if l == limit),
            "{error}"
        );
        // A place that becomes free meanwhile is taken.
        let client = {
            let path = path.clone();
            thread::spawn(move || status(&path))
        };
        thread::sleep(Duration::from_millis(50));
        drop(queued);
        drop(listener);
        let error = client.join().unwrap().unwrap_err();
        assert!(!matches!(error, ControlError::Busy { .. }), "{error}");
    }

    /// One process answers, one does not accept, one does not listen, one answers in part.
    #[test]
    fn dumps_of_processes_come_within_one_time_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (answers, _file) = bind(&path("answers")).unwrap();
        answers.set_nonblocking(false).unwrap();
        let (begins, _file) = bind(&path("begins")).unwrap();
        begins.set_nonblocking(false).unwrap();
        let (_full, _file, _queued) = full(&path("full"));
        let (listeners, limit) = ([answers, begins], Duration::from_millis(300));
        let processes = thread::spawn(move || {
            let mut clients = listeners.map(|listener| listener.accept().unwrap().0);
            clients[1].write_all(b"\"part").unwrap();
            // More than a socket takes.
            let dump = serde_json::to_vec(&"x".repeat(MAX_REPORT - 10)).unwrap();
            let [first, second] = &mut clients;
            first.write_all(&dump).unwrap();
            first.shutdown(std::net::Shutdown::Both).unwrap();
            // Until the other side gives up.
            let _ = second.read_to_end(&mut Vec::new());
        });
        let names = ["begins", "full", "none", "answers"];
        let asked = names.map(|name| (name.to_owned(), path(name)));
        let answers = dumps_of_processes(asked.into(), limit);
        assert_eq!(answers.len(), names.len());
        for ((name, answer), asked) in answers.iter().zip(names) {
            assert_eq!(name, asked);
            let is_expected = match asked {
                "begins" => matches!(answer, Err(ControlError::Late { bytes: 5 })),
                "full" => matches!(answer, Err(ControlError::Busy { limit: l }) if *l == limit),
                "none" => matches!(answer, Err(ControlError::Socket(_))),
                _ => answer
                    .as_ref()
                    .is_ok_and(|dump| dump.len() == MAX_REPORT - 10),
            };
            assert!(is_expected, "{asked}: {answer:?}");
        }
        processes.join().unwrap();
    }

    #[test]
    fn process_that_starts_is_asked_by_one_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let mut process = StartingProcess::default();
        let pause = Duration::from_millis(1);
        assert!(!process.has_answered(&path, pause));
        let (listener, _file) = bind(&path).unwrap();
        for _ in 0..10 {
            assert!(!process.has_answered(&path, pause));
        }
        let (client, _) = listener.accept().unwrap();
        let error = listener.accept().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        // One that ends without an answer is asked again.
        drop(client);
        assert!(!process.has_answered(&path, pause));
        assert!(!process.has_answered(&path, pause));
        assert!(listener.accept().is_ok());
    }

    #[test]
    fn refusal_is_read_whether_the_command_was_sent_before_or_after_it() {
        for is_sent_before in [true, false] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            if is_sent_before {
                send_command(&ours, "dump").unwrap();
            }
            refuse(&theirs, MAX_CLIENTS).unwrap();
            drop(theirs);
            if !is_sent_before {
                send_command(&ours, "dump").unwrap();
            }
            let later = Instant::now() + Duration::from_secs(60);
            let error = receive::<String>(&ours, later, MAX_ANSWER).unwrap_err();
            let is_expected = matches!(error, ControlError::TooManyClients { .. });
            assert!(is_expected, "sent before: {is_sent_before}: {error}");
        }
        // Nothing can be said to a client whose socket is full, and nobody waits for it.
        let (_ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        while (&theirs).write(&[0; 4096]).is_ok() {}
        while (&theirs).write(&[0]).is_ok() {}
        theirs.set_nonblocking(false).unwrap();
        let error = refuse(&theirs, MAX_CLIENTS).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
