//! A worker: the process of one guest. A server whose guests a supervisor hands over.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tracing::{Level, debug, error, info_span, warn};
use vgpu_transport::link::HostEnd;
use vgpu_transport::link::stream::tls::{Certificates, TlsError};
use vgpu_transport::link::stream::{tcp, vsock};
use vgpu_transport::link::unix::{self, ListenOptions};

use super::certificates::unpack;
use super::ipc::{Command, IpcSocket, ReceiveOutcome, Rejection, WorkerMessage, WorkerReport};
use crate::last_log::end_with_last_log;
use crate::listener::{HANDSHAKE_TIMEOUT, IncomingGuest, OpenError};
use crate::peer::Peer;
use crate::policy::LinkKind;
use crate::server::{Server, Shutdown};
use crate::session::{SessionEnd, reject};
use crate::stop::StopFlag;

/// How often a worker checks its stop flag.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How often a worker reports while no session begins or ends.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// Serves the programs of one guest that the supervisor at the other end of `socket` hands over,
/// until the supervisor closes the socket, `stop` is set, or an engine cannot work again in this
/// process: returns why, for the caller to end with an error.
pub fn serve(socket: OwnedFd, server: Server, stop: &StopFlag) -> Option<String> {
    let health = server.health();
    let mut fatal = None;
    let mut certificates: Option<Certificates> = None;
    let ipc = IpcSocket::new(socket);
    let (served, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let handle = server.status_handle();
    let report_to_supervisor = |served| {
        // Before the sessions: a program that gets its session meanwhile is in both lists.
        let pending = server.pending();
        let without_session = server.take_without_session();
        let report = handle.report();
        let ids: Vec<u64> = report.status.sessions.iter().map(|s| s.id).collect();
        let message = WorkerMessage::from(WorkerReport {
            served,
            pending: pending.clone(),
            without_session,
            report,
        });
        if let Err(error) = ipc.send(&message, None) {
            debug!("no report to the supervisor: {error}");
        }
        (ids, pending)
    };
    thread::scope(|scope| {
        let reporter = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // The counter is read first: a guest that it counts is in a list by then.
                let (known, pending) = report_to_supervisor(served.load(Ordering::Acquire));
                server.wait_for_change(&known, &pending, &is_over, REPORT_INTERVAL);
            }
        });
        while !stop.is_set() {
            fatal = health.fatal_error();
            if fatal.is_some() {
                break;
            }
            match ipc.receive(Some(POLL_INTERVAL)) {
                Ok(ReceiveOutcome::Message(Command::Dump { number }, _)) => {
                    let message = WorkerMessage::dump(number, handle.dump());
                    if let Err(error) = ipc.send(&message, None) {
                        debug!("no dump to the supervisor: {error}");
                    }
                }
                Ok(ReceiveOutcome::Message(command, socket)) => {
                    carry_out(&server, command, socket, &mut certificates, &served);
                    // A rejected guest has no session whose end would cause a report.
                    report_to_supervisor(served.load(Ordering::Acquire));
                }
                Ok(ReceiveOutcome::Nothing) => {}
                Ok(ReceiveOutcome::Invalid(why)) => {
                    error!("invalid message from the supervisor: {why}; this is a bug of the host");
                }
                Ok(ReceiveOutcome::Closed) => break,
                Err(error) => {
                    error!("no connection to the supervisor any more: {error}");
                    break;
                }
            }
        }
        is_over.store(true, Ordering::Relaxed);
        server.wake_waiters();
        if reporter.join().is_err() {
            error!("the reporting thread panicked; this is a bug of the host");
        }
    });
    let served = served.into_inner();
    let without_session = server.take_without_session();
    if let Shutdown::Stuck(why) = server.shutdown() {
        end_with_last_log(
            1,
            Level::ERROR,
            &format!("{why}: the worker ends all the same"),
        );
    }
    // The final figures of the sessions.
    let message = WorkerMessage::from(WorkerReport {
        served,
        pending: Vec::new(),
        without_session,
        report: handle.report(),
    });
    if let Err(error) = ipc.send(&message, None) {
        debug!("no last report to the supervisor: {error}");
    }
    fatal
}

/// Why certificates that the supervisor has sent cannot be used.
#[derive(Debug, thiserror::Error)]
enum CertificatesError {
    #[error("no file has come with them")]
    NoFile,
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// The certificates in the file that has come with a command.
fn received(file: Option<OwnedFd>) -> Result<Certificates, CertificatesError> {
    let files = unpack(file.ok_or(CertificatesError::NoFile)?)?;
    Ok(Certificates::check(files)?)
}

fn carry_out(
    server: &Server,
    command: Command,
    socket: Option<OwnedFd>,
    certificates: &mut Option<Certificates>,
    served: &AtomicU64,
) {
    match command {
        // Answered by the caller.
        Command::Dump { .. } => {}
        Command::Rules(rules) => {
            if let Err(error) = server.apply(rules) {
                error!("the guest's limits stay unchanged: {error}");
            }
        }
        Command::EndDrained { limit_ms } => {
            // First: a program that is in its handshake gets no session afterwards.
            server.drain(None);
            server.end_drained(Duration::from_millis(limit_ms));
        }
        Command::Undrain => {
            server.undrain();
        }
        Command::Removed => server.remove_guests(),
        // If it has ended meanwhile, there is nothing to do.
        Command::Kill { session } => drop(server.kill_session(session)),
        Command::Certificates => {
            match (received(socket), &certificates) {
                (Ok(new), Some(used)) => {
                    used.replace(&new);
                    server.recheck_certificates();
                }
                (Ok(new), None) => {
                    server.use_certificates(new.clone());
                    *certificates = Some(new);
                }
                // The supervisor has checked them.
                (Err(error), _) => error!("the certificates cannot be used: {error}"),
            }
        }
        Command::Serve {
            session,
            guest,
            peer,
            rejection,
        } => {
            match (socket, rejection) {
                (None, _) => error!(
                    session,
                    "the supervisor has sent no socket; this is a bug of the host"
                ),
                (Some(socket), None) => {
                    let (kind, certificates) = (peer.link, certificates.clone());
                    let duplicate = socket.try_clone().ok();
                    let incoming = IncomingGuest {
                        peer,
                        open: Box::new(move || open(socket, kind, certificates)),
                        socket: duplicate,
                    };
                    server.serve_guest(session, guest.as_deref(), incoming);
                }
                (Some(socket), Some(rejection)) => {
                    reject_guest(session, &peer, socket, rejection, certificates.as_ref())
                }
            }
            served.fetch_add(1, Ordering::Release);
        }
    }
}

fn reject_guest(
    session: u64,
    peer: &Peer,
    socket: OwnedFd,
    rejection: Rejection,
    certificates: Option<&Certificates>,
) {
    let _span = info_span!("session", id = session, %peer).entered();
    let end = SessionEnd::from(rejection);
    match open(socket, peer.link, certificates.cloned()) {
        Ok(mut link) => {
            warn!("rejected: {end}");
            reject(link.as_mut(), &end);
        }
        Err(error) => warn!("the guest gets no session: {error}"),
    }
}

fn open(
    socket: OwnedFd,
    kind: LinkKind,
    certificates: Option<Certificates>,
) -> Result<Box<dyn HostEnd>, OpenError> {
    Ok(match kind {
        LinkKind::Unix => {
            Box::new(unix::Arrival::from_socket(socket, ListenOptions::default())?.handshake()?)
        }
        LinkKind::Tcp => {
            Box::new(tcp::Arrival::from_socket(socket, certificates)?.handshake(HANDSHAKE_TIMEOUT)?)
        }
        LinkKind::Vsock => Box::new(vsock::host(socket)?),
        LinkKind::Pci => return Err(OpenError::NoSocket),
    })
}

/// The socket to the supervisor: the standard input of this process.
///
/// # Errors
/// Standard input is closed.
pub fn take_socket() -> io::Result<OwnedFd> {
    io::stdin().as_fd().try_clone_to_owned()
}
