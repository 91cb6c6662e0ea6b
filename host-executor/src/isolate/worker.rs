//! The process of one guest.

use std::error::Error;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tracing::{info_span, warn};
use vgpu_kernels::Engine;
use vgpu_transport::link::HostEnd;
use vgpu_transport::link::stream::tls::Certificates;
use vgpu_transport::link::stream::{tcp, vsock};
use vgpu_transport::link::unix::{self, ListenOptions};

use crate::limits::Limits;
use crate::net::HANDSHAKE;
use crate::session::{Ending, Session, Stop, dismiss};
use crate::tenant::LinkKind;

/// What a supervisor tells a worker of its guest, whose socket is the worker's standard input.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub struct Arrived {
    /// Number of the session.
    #[arg(long)]
    pub session: u64,
    /// The kind of link.
    #[arg(long)]
    pub kind: LinkKind,
    /// Who it is, for logs.
    #[arg(long)]
    pub peer: String,
    /// Set when there is no place for it: how many there are.
    #[arg(long)]
    pub full: Option<usize>,
}

impl Arrived {
    /// As arguments of a command.
    pub(super) fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            format!("--session={}", self.session),
            format!("--kind={}", self.kind.name()),
            format!("--peer={}", self.peer),
        ];
        arguments.extend(self.full.map(|places| format!("--full={places}")));
        arguments
    }
}

/// Serves the guest at the other end of `socket` until it goes, or `stop` is asked for.
pub fn serve(
    socket: OwnedFd,
    arrived: &Arrived,
    engine: Arc<dyn Engine>,
    limits: Limits,
    certificates: Option<Certificates>,
    stop: &Stop,
) {
    let _span = info_span!("session", id = arrived.session, peer = arrived.peer).entered();
    let mut link = match open(socket, arrived.kind, certificates) {
        Ok(link) => link,
        Err(error) => {
            warn!("the guest got no session: {error}");
            return;
        }
    };
    if let Some(limit) = arrived.full {
        let full = Ending::Full {
            sessions: limit,
            limit,
        };
        warn!("turned away: {full}");
        dismiss(link.as_mut(), &full);
        return;
    }
    Session::new(arrived.session, engine, limits).run(link.as_mut(), stop);
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

/// The socket that the supervisor has given this process as its standard input.
pub fn take_socket() -> io::Result<OwnedFd> {
    io::stdin().as_fd().try_clone_to_owned()
}
