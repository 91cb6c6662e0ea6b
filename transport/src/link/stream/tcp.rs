//! The link over TCP, to an executor on another machine. Off the loopback the link requires TLS,
//! with a certificate on each side.
#![forbid(unsafe_code)]

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::accept::accept_within;
use super::channel::{Channel, Plain};
use super::framing::{KEEPALIVE_IDLE, KEEPALIVE_PERIOD, KEEPALIVE_PROBES};
use super::guest::StreamGuest;
use super::host::StreamHost;
use super::tls::{Certificates, TlsError};
use crate::link::side::Side;

/// Why a TCP link cannot be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum TcpError {
    #[error("{host}: the name has no address: {error}")]
    Name { host: String, error: io::Error },
    #[error("{host}: the name was not looked up within {ms} ms: does a name server answer?")]
    Lookup { host: String, ms: u128 },
    #[error("{host}:{port}: {error}")]
    Connect {
        host: String,
        port: u16,
        error: io::Error,
    },
    #[error(
        "{host} is another machine, and this guest has no certificates: set VGPU_CERTS to a folder \
         that `vgpu cert` has made"
    )]
    Unprotected { host: String },
    #[error("{0}")]
    Tls(#[from] TlsError),
}

/// Connects to the executor at `host`:`port`. `timeout` limits the whole call.
///
/// # Errors
///
/// A [`TcpError`] that names the failed step. [`TcpError::Unprotected`] is the caller's fault: it
/// gave no certificates for another machine.
pub fn connect(
    host: &str,
    port: u16,
    certificates: Option<&Certificates>,
    timeout: Duration,
) -> Result<StreamGuest, TcpError> {
    let deadline = Instant::now() + timeout;
    let addresses = look_up(host, timeout, move |host| {
        Ok((host, port).to_socket_addrs()?.collect())
    })?;
    let failed = |error| TcpError::Connect {
        host: host.into(),
        port,
        error,
    };
    if certificates.is_none() && !addresses.iter().all(|address| address.ip().is_loopback()) {
        return Err(TcpError::Unprotected { host: host.into() });
    }
    let socket = connect_any(&addresses, deadline, TcpStream::connect_timeout).map_err(failed)?;
    prepare(&socket, Side::Guest).map_err(failed)?;
    let channel: Box<dyn Channel> = match certificates {
        Some(certificates) => Box::new(certificates.connect(host, socket, deadline)?),
        None => Box::new(Plain::new(socket)),
    };
    StreamGuest::new(channel).with_heartbeat().map_err(failed)
}

/// Looks up the addresses of a name within `timeout`. The C library waits for name servers for
/// half a minute and more, and cannot be interrupted: a thread waits for it, and is left alone if
/// it takes too long.
fn look_up(
    host: &str,
    timeout: Duration,
    lookup: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> Result<Vec<SocketAddr>, TcpError> {
    let failed = |error| TcpError::Name {
        host: host.into(),
        error,
    };
    if host.parse::<IpAddr>().is_ok() {
        return lookup(host).map_err(failed);
    }
    let (sender, found) = mpsc::sync_channel(1);
    let name = host.to_owned();
    thread::Builder::new()
        .name("vgpu-lookup".into())
        .spawn(move || sender.send(lookup(&name)))
        .map_err(failed)?;
    match found.recv_timeout(timeout) {
        Ok(addresses) => addresses.map_err(failed),
        Err(_) => Err(TcpError::Lookup {
            host: host.into(),
            ms: timeout.as_millis(),
        }),
    }
}

/// Connects to the first of the addresses that answers. Each has an equal share of the time that is
/// left: an address that does not answer, such as that of a host without IPv6, leaves time for the
/// others. `connect` connects to one address within a time.
fn connect_any<T>(
    addresses: &[SocketAddr],
    deadline: Instant,
    mut connect: impl FnMut(&SocketAddr, Duration) -> io::Result<T>,
) -> io::Result<T> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for (address, waiting) in addresses.iter().zip((1..=addresses.len() as u32).rev()) {
        let left = deadline.saturating_duration_since(Instant::now());
        match connect(address, share(left, waiting)) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The share of the time `left` for one of `waiting` addresses.
fn share(left: Duration, waiting: u32) -> Duration {
    // `connect_timeout` refuses zero.
    (left / waiting).max(Duration::from_millis(1))
}

/// Sets the options of a connected socket of this side.
pub(super) fn prepare(socket: &TcpStream, side: Side) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    // Keep-alive probes detect a peer machine that has lost power or network. A user timeout
    // decides for how long they may stay without an answer, instead of their number.
    rustix::net::sockopt::set_socket_keepalive(socket, true)?;
    rustix::net::sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    rustix::net::sockopt::set_tcp_keepintvl(socket, KEEPALIVE_PERIOD)?;
    rustix::net::sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
    if let Some(limit) = side.user_timeout() {
        rustix::net::sockopt::set_tcp_user_timeout(socket, limit.as_millis() as u32)?;
    }
    Ok(())
}

/// Why an executor cannot listen on TCP.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum TcpListenError {
    #[error("{address}: {error}")]
    Bind { address: String, error: io::Error },
    #[error(
        "{address} is reachable from other machines, and there are no certificates: create them \
         with `vgpu cert` and pass their folder with --certs"
    )]
    Unprotected { address: String },
}

/// A listening socket for guests on other machines.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    certificates: Option<Certificates>,
}

impl Listener {
    /// Listens at `host`:`port`. Without `certificates` the address must be a loopback address.
    ///
    /// # Errors
    ///
    /// [`TcpListenError::Unprotected`] when `certificates` are missing, and
    /// [`TcpListenError::Bind`] when a system call fails.
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

    /// The local address.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Waits up to `timeout` for a guest to connect. `None` when no guest has connected.
    ///
    /// # Errors
    ///
    /// The error of a system call.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<Arrival>> {
        match accept_within(&self.socket, timeout, || self.socket.accept())? {
            Some((socket, address)) => Ok(Some(Arrival {
                socket,
                from: address.ip(),
                certificates: self.certificates.clone(),
            })),
            None => Ok(None),
        }
    }
}

impl AsFd for Listener {
    /// The descriptor is readable when a guest has connected.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A connected guest before the handshake.
#[derive(Debug)]
pub struct Arrival {
    socket: TcpStream,
    from: IpAddr,
    certificates: Option<Certificates>,
}

impl AsFd for Arrival {
    /// The guest's socket.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Arrival {
    /// The guest at the other end of `socket`. Another process may have accepted the socket and
    /// passed it on from [`into_socket`](Arrival::into_socket).
    ///
    /// # Errors
    ///
    /// When the socket is not connected.
    pub fn from_socket(socket: OwnedFd, certificates: Option<Certificates>) -> io::Result<Arrival> {
        let socket = TcpStream::from(socket);
        Ok(Arrival {
            from: socket.peer_addr()?.ip(),
            socket,
            certificates,
        })
    }

    /// The socket, for a handshake in another process.
    pub fn into_socket(self) -> OwnedFd {
        self.socket.into()
    }

    /// The address of the guest.
    pub fn from(&self) -> IpAddr {
        self.from
    }

    /// Opens the stream. With TLS the call waits for the guest, for at most `timeout`.
    ///
    /// # Errors
    ///
    /// [`TcpError::Tls`] when the TLS handshake fails, and [`TcpError::Connect`] when a system call
    /// fails.
    pub fn handshake(self, timeout: Duration) -> Result<StreamHost, TcpError> {
        let failed = |error| TcpError::Connect {
            host: self.from.to_string(),
            port: 0,
            error,
        };
        prepare(&self.socket, Side::Host).map_err(failed)?;
        let (channel, certificates): (Box<dyn Channel>, _) = match &self.certificates {
            Some(certificates) => {
                let secure = certificates.accept(self.socket, Instant::now() + timeout)?;
                let shown = secure.peer_certificates();
                (Box::new(secure), shown)
            }
            None => (Box::new(Plain::new(self.socket)), Vec::new()),
        };
        let host = StreamHost::new(channel).map_err(failed)?;
        Ok(host.with_certificates(certificates))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::liveness::SILENCE;

    #[test]
    fn host_waits_as_long_for_a_paused_machine_as_on_other_links() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (host, _) = listener.accept().unwrap();
        let limit = |socket: &TcpStream, side| {
            prepare(socket, side).unwrap();
            let limit = rustix::net::sockopt::tcp_user_timeout(socket).unwrap();
            Duration::from_millis(limit.into())
        };
        assert_eq!(limit(&host, Side::Host), SILENCE);
        // The kernel counts the time in which a busy host takes no bytes, too.
        assert_eq!(limit(&guest, Side::Guest), Duration::ZERO);
    }

    #[test]
    fn name_server_that_does_not_answer_is_not_waited_for() {
        let (answer, asked) = mpsc::channel();
        let limit = Duration::from_millis(20);
        let error = look_up("executor.example", limit, move |_| {
            // Until the test has ended.
            let _ = asked.recv();
            Ok(Vec::new())
        });
        let error = error.unwrap_err();
        assert!(matches!(error, TcpError::Lookup { ms: 20, .. }), "{error}");
        drop::<mpsc::Sender<()>>(answer);
        let found = SocketAddr::from(([127, 0, 0, 1], 7));
        let limit = Duration::from_secs(60);
        let addresses = look_up("executor.example", limit, move |_| Ok(vec![found]));
        assert_eq!(addresses.unwrap(), [found]);
        let unknown = |_: &str| Err(io::ErrorKind::NotFound.into());
        let error = look_up("executor.example", limit, unknown).unwrap_err();
        assert!(matches!(error, TcpError::Name { .. }), "{error}");
        // An address needs no name server, and no thread.
        let this = thread::current().id();
        let addresses = look_up("127.0.0.1", limit, move |host| {
            assert_eq!(thread::current().id(), this);
            Ok((host, 7).to_socket_addrs()?.collect())
        });
        assert_eq!(addresses.unwrap(), [found]);
    }

    #[test]
    fn address_without_an_answer_leaves_time_for_the_next() {
        let [dead, good] = [1, 2].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let limit = Duration::from_secs(10);
        let mut times = Vec::new();
        let mut connect = |address: &SocketAddr, time: Duration| {
            times.push(time);
            match *address == good {
                true => Ok(*address),
                false => Err(io::Error::from(io::ErrorKind::TimedOut)),
            }
        };
        let found = connect_any(&[dead, good], Instant::now() + limit, &mut connect);
        assert_eq!(found.ok(), Some(good));
        let error = connect_any(&[dead], Instant::now() + limit, &mut connect).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let error = connect_any(&[], Instant::now() + limit, &mut connect).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let [first, second, alone] = times[..] else {
            panic!("{times:?}");
        };
        assert!(
            first <= limit / 2 && second > first && alone > limit / 2,
            "{times:?}"
        );
        assert!(share(Duration::ZERO, 1) > Duration::ZERO);
    }

    #[test]
    fn address_that_drops_packets_does_not_hide_the_next() {
        // The kernel drops connections to a listener with a full backlog, as a network drops those
        // to a dead address.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let address = silent.local_addr().unwrap();
        let short = Duration::from_millis(200);
        let mut backlog = Vec::new();
        while let Ok(socket) = TcpStream::connect_timeout(&address, short) {
            backlog.push(socket);
        }
        let good = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = [address, good.local_addr().unwrap()];
        let connect = TcpStream::connect_timeout;
        let socket = connect_any(&addresses, Instant::now() + 2 * short, connect).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), addresses[1]);
        let error = connect_any(&addresses[..1], Instant::now() + short, connect).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
