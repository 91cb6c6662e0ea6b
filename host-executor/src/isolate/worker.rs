//! The process of one guest: a server like any other, to which a supervisor hands the sockets.

use std::error::Error;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tracing::{debug, error, info_span, warn};
use vgpu_transport::link::HostEnd;
use vgpu_transport::link::stream::tls::Certificates;
use vgpu_transport::link::stream::{tcp, vsock};
use vgpu_transport::link::unix::{self, ListenOptions};

use super::post::{Away, Heard, News, Order, Post};
use crate::net::HANDSHAKE;
use crate::server::{Guest, Peer, Server};
use crate::session::{Ending, Stop, dismiss};
use crate::tenant::LinkKind;

/// How often a worker looks whether to stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// How often it says how it is, if nobody comes or goes.
const PERIOD: Duration = Duration::from_millis(500);

/// Serves the programs of one guest that the supervisor at the other end of `socket` hands over, until that closes the
/// socket, or `stop` is asked for.
pub fn serve(socket: OwnedFd, server: Server, certificates: Option<&Certificates>, stop: &Stop) {
    let post = Post::new(socket);
    let (served, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let watch = server.watch();
    let tell = |served| {
        let report = watch.report();
        let ids: Vec<u64> = report.status.sessions.iter().map(|s| s.id).collect();
        if let Err(error) = post.send(&News { served, report }, None) {
            debug!("the supervisor does not listen: {error}");
        }
        ids
    };
    thread::scope(|scope| {
        let reporter = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // In this order: whoever is counted was on the list before.
                let known = tell(served.load(Ordering::Acquire));
                server.wait_for_change(&known, &is_over, PERIOD);
            }
        });
        while !stop.is_asked() {
            match post.receive(Some(PATIENCE)) {
                Ok(Heard::Message(order, socket)) => {
                    follow(&server, order, socket, certificates, &served);
                    // Who was turned away is no session whose end anybody would notice.
                    tell(served.load(Ordering::Acquire));
                }
                Ok(Heard::Nothing) => {}
                Ok(Heard::Garbage(why)) => error!("the supervisor says {why}, a bug of the host"),
                Ok(Heard::End) => break,
                Err(error) => {
                    error!("the supervisor is not heard any more: {error}");
                    break;
                }
            }
        }
        is_over.store(true, Ordering::Relaxed);
        server.nudge();
        if reporter.join().is_err() {
            error!("the reporter has panicked, a bug of the host");
        }
    });
    let served = served.into_inner();
    server.shutdown();
    // What the last sessions have done, if there is still somebody to hear it.
    tell(served);
}

fn follow(
    server: &Server,
    order: Order,
    socket: Option<OwnedFd>,
    certificates: Option<&Certificates>,
    served: &AtomicU64,
) {
    match order {
        Order::Rules(rules) => {
            if let Err(error) = server.apply(rules) {
                error!("the guest's quota stays as it was: {error}");
            }
        }
        Order::Serve {
            session,
            guest,
            peer,
            away,
        } => {
            match (socket, away) {
                (None, _) => error!(
                    session,
                    "the supervisor has sent no socket, a bug of the host"
                ),
                (Some(socket), None) => {
                    let (kind, certificates) = (peer.link, certificates.cloned());
                    let open = Box::new(move || open(socket, kind, certificates));
                    server.receive(session, guest.as_deref(), Guest { peer, open });
                }
                (Some(socket), Some(away)) => turn_away(session, &peer, socket, away, certificates),
            }
            served.fetch_add(1, Ordering::Release);
        }
    }
}

fn turn_away(
    session: u64,
    peer: &Peer,
    socket: OwnedFd,
    away: Away,
    certificates: Option<&Certificates>,
) {
    let _span = info_span!("session", id = session, %peer).entered();
    let ending = Ending::from(away);
    match open(socket, peer.link, certificates.cloned()) {
        Ok(mut link) => {
            warn!("turned away: {ending}");
            dismiss(link.as_mut(), &ending);
        }
        Err(error) => warn!("the guest got no session: {error}"),
    }
}

fn open(
    socket: OwnedFd,
    kind: LinkKind,
    certificates: Option<Certificates>,
) -> Result<Box<dyn HostEnd>, Box<dyn Error>> {
    Ok(match kind {
        LinkKind::Unix => {
            Box::new(unix::Arrival::from_socket(socket, ListenOptions::default())?.handshake()?)
        }
        LinkKind::Tcp => {
            Box::new(tcp::Arrival::from_socket(socket, certificates)?.handshake(HANDSHAKE)?)
        }
        LinkKind::Vsock => Box::new(vsock::host(UnixStream::from(socket))?),
        LinkKind::Pci => {
            return Err("virtual machines have no socket that could be handed on".into());
        }
    })
}

/// The socket to the supervisor, which has given it to this process as its standard input.
pub fn take_socket() -> io::Result<OwnedFd> {
    io::stdin().as_fd().try_clone_to_owned()
}
