//! TCP: an executor on another machine. Off the loopback only with TLS, both sides with certificates.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::channel::{Channel, Plain};
use super::tls::{Certificates, TlsError};
use super::{StreamGuest, StreamHost};

/// How long the other machine may leave bytes unacknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_secs(15);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum TcpError {
    #[error("{host}: no address of this name: {error}")]
    Name { host: String, error: io::Error },
    #[error("{host}:{port}: {error}")]
    Connect {
        host: String,
        port: u16,
        error: io::Error,
    },
    #[error(
        "{host} is another machine, and there are no certificates: set VGPU_CERTS to a folder that `vgpu cert` has made"
    )]
    Unprotected { host: String },
    #[error("{0}")]
    Tls(#[from] TlsError),
}

/// Connects to the executor at `host`:`port`, waiting no longer than `timeout` in all.
pub fn connect(
    host: &str,
    port: u16,
    certificates: Option<&Certificates>,
    timeout: Duration,
) -> Result<StreamGuest, TcpError> {
    let deadline = Instant::now() + timeout;
    let addresses = (host, port)
        .to_socket_addrs()
        .map_err(|error| TcpError::Name {
            host: host.into(),
            error,
        })?;
    let failed = |error| TcpError::Connect {
        host: host.into(),
        port,
        error,
    };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if certificates.is_none() && !address.ip().is_loopback() {
            return Err(TcpError::Unprotected { host: host.into() });
        }
        match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1))) {
            Ok(socket) => {
                prepare(&socket).map_err(failed)?;
                let channel: Box<dyn Channel> = match certificates {
                    Some(certificates) => Box::new(certificates.connect(host, socket, deadline)?),
                    None => Box::new(Plain(socket)),
                };
                return Ok(StreamGuest::new(channel));
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    // A machine that has gone without a word is noticed.
    rustix::net::sockopt::set_socket_keepalive(socket, true)?;
    rustix::net::sockopt::set_tcp_keepidle(socket, Duration::from_secs(5))?;
    rustix::net::sockopt::set_tcp_keepintvl(socket, Duration::from_secs(2))?;
    rustix::net::sockopt::set_tcp_keepcnt(socket, 5)?;
    rustix::net::sockopt::set_tcp_user_timeout(socket, UNACKNOWLEDGED.as_millis() as u32)?;
    Ok(())
}

/// Why an executor cannot listen.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum TcpListenError {
    #[error("{address}: {error}")]
    Bind { address: String, error: io::Error },
    #[error(
        "{address} can be reached from other machines, and there are no certificates: make some with `vgpu cert`, and \
         name their folder with --certs"
    )]
    Unprotected { address: String },
}

/// A socket at which guests from other machines arrive.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    certificates: Option<Certificates>,
}

impl Listener {
    /// Listens at `host`:`port`. Without certificates only on the loopback.
    pub fn bind(
        host: &str,
        port: u16,
        certificates: Option<Certificates>,
    ) -> Result<Listener, TcpListenError> {
        let failed = |error| TcpListenError::Bind {
            address: format!("{host}:{port}"),
            error,
        };
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(failed)?.collect();
        if certificates.is_none() && !addresses.iter().all(|a| a.ip().is_loopback()) {
            return Err(TcpListenError::Unprotected {
                address: format!("{host}:{port}"),
            });
        }
        let socket = TcpListener::bind(&addresses[..]).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Listener {
            socket,
            certificates,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Waits up to `timeout` for a guest to arrive. `None` when none came.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<Arrival>> {
        match super::vsock::accept_within(&self.socket, timeout, || self.socket.accept())? {
            Some((socket, address)) => Ok(Some(Arrival {
                socket,
                from: address.ip(),
                certificates: self.certificates.clone(),
            })),
            None => Ok(None),
        }
    }
}

/// A guest that has connected and has not been spoken to.
#[derive(Debug)]
pub struct Arrival {
    socket: TcpStream,
    from: IpAddr,
    certificates: Option<Certificates>,
}

impl Arrival {
    /// The guest at the other end of a socket that [`into_socket`](Arrival::into_socket) has given, in another process.
    pub fn from_socket(socket: OwnedFd, certificates: Option<Certificates>) -> io::Result<Arrival> {
        let socket = TcpStream::from(socket);
        Ok(Arrival {
            from: socket.peer_addr()?.ip(),
            socket,
            certificates,
        })
    }

    /// The socket, for another process to talk to the guest.
    pub fn into_socket(self) -> OwnedFd {
        self.socket.into()
    }

    /// Where it comes from.
    pub fn from(&self) -> IpAddr {
        self.from
    }

    /// Brings the stream up; with TLS this waits for the guest, but not for ever.
    pub fn handshake(self, timeout: Duration) -> Result<StreamHost, TcpError> {
        let failed = |error| TcpError::Connect {
            host: self.from.to_string(),
            port: 0,
            error,
        };
        prepare(&self.socket).map_err(failed)?;
        let (channel, certificate): (Box<dyn Channel>, _) = match &self.certificates {
            Some(certificates) => {
                let secure = certificates.accept(self.socket, Instant::now() + timeout)?;
                let certificate = secure.certificate();
                (Box::new(secure), certificate)
            }
            None => (Box::new(Plain(self.socket)), None),
        };
        let host = StreamHost::new(channel).map_err(failed)?;
        Ok(host.with_certificate(certificate))
    }
}
