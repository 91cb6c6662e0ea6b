//! The encrypted channel: rustls over a socket.
#![forbid(unsafe_code)]

use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};
use rustls::Connection;
use rustls::pki_types::CertificateDer;

use super::checked::Checked;
use super::error::TlsError;
use crate::fork::OwnFd;
use crate::link::stream::channel::Channel;
use crate::poll::poll;

/// An encrypted channel.
pub(in crate::link::stream) struct Secure {
    connection: Connection,
    socket: Socket,
    /// The certificates of this side, which messages name.
    certificates: Arc<Checked>,
}

/// The socket under the encryption.
struct Socket(OwnFd);

impl io::Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(&*self.0, bytes, RecvFlags::empty())?.0)
    }
}

/// `TcpStream` writes several buffers with `writev`, which raises SIGPIPE on a closed connection:
/// the plugin's program may not ignore that signal.
impl io::Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&*self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut control = SendAncillaryBuffer::default();
        let flags = SendFlags::NOSIGNAL;
        Ok(rustix::net::sendmsg(&*self.0, parts, &mut control, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Secure {
    /// Completes the handshake of a connection until `deadline`. `shown`: the certificate that the
    /// peer has presented so far.
    pub(super) fn begin(
        connection: Connection,
        socket: TcpStream,
        deadline: Instant,
        certificates: Arc<Checked>,
        shown: impl Fn() -> Option<CertificateDer<'static>>,
    ) -> Result<Secure, TlsError> {
        let mut secure = Secure {
            connection,
            socket: Socket(OwnFd::new(socket)),
            certificates,
        };
        let failed = TlsError::Handshake;
        loop {
            let flushed = secure.flush_out().map_err(failed)?;
            if !secure.connection.is_handshaking() && flushed {
                return Ok(secure);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TlsError::Timeout);
            }
            let mut events = PollFlags::IN;
            if !flushed {
                events |= PollFlags::OUT;
            }
            poll(&mut [PollFd::new(&*secure.socket.0, events)], left)
                .map_err(|e| failed(e.into()))?;
            if secure.connection.is_handshaking() {
                match secure.read_encrypted(&shown) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(failed(error)),
                }
            }
        }
    }

    /// The peer's certificate, in DER, and those of authorities that the peer has sent with it.
    pub(in crate::link::stream) fn peer_certificates(&self) -> Vec<Vec<u8>> {
        let chain = self.connection.peer_certificates().unwrap_or_default();
        chain.iter().map(|one| one.to_vec()).collect()
    }

    /// Reads and decrypts the bytes that have arrived. `shown`: the certificate that the peer has
    /// presented so far.
    fn read_encrypted(
        &mut self,
        shown: impl Fn() -> Option<CertificateDer<'static>>,
    ) -> io::Result<()> {
        if self.connection.read_tls(&mut self.socket)? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the peer closed the connection",
            ));
        }
        match self.connection.process_new_packets() {
            Ok(_) => Ok(()),
            Err(error) => {
                // Sends the alert that tells the peer the reason.
                let _ = self.flush_out();
                Err(self.certificates.explain(&error, shown().as_ref()))
            }
        }
    }

    /// Writes the encrypted bytes. Returns whether none are left.
    fn flush_out(&mut self) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

impl Channel for Secure {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.read_encrypted(|| None)?
                }
                other => return other,
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.flush_out()?;
        match self.connection.writer().write(bytes)? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            count => Ok(count),
        }
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.flush_out()
    }

    fn close(&mut self) {
        self.connection.send_close_notify();
        let _ = self.flush_out();
        let _ = rustix::net::shutdown(&*self.socket.0, Shutdown::Both);
    }

    fn socket(&self) -> io::Result<OwnedFd> {
        self.socket.0.try_clone()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, HandshakeKind};

    use super::super::certificates::Certificates;
    use super::super::test_certificates::two_sides;
    use super::*;
    use crate::link::stream::channel::Plain;
    use crate::signals;

    /// A guest that resumes a session shows no certificate, so nothing would notice that the
    /// certificate has expired or is revoked.
    #[test]
    fn no_session_is_resumed() {
        let [host, guest] = two_sides().map(|files| Certificates::check(files).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        // A guest that would resume sessions, as every client of rustls does.
        let current = guest.current();
        let config = ClientConfig::builder_with_provider(Arc::clone(&current.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&current.hosts) as _)
            .with_client_cert_resolver(Arc::clone(&current.identity) as _);
        let config = Arc::new(config);
        for _ in 0..2 {
            let host = host.clone();
            let accepting = std::thread::scope(|scope| {
                let accepted = scope.spawn(|| {
                    let (socket, _) = listener.accept().unwrap();
                    socket.set_nonblocking(true).unwrap();
                    let mut host = host.accept(socket, deadline).unwrap();
                    host.write(b"x").unwrap();
                    host.flush().unwrap();
                    host.connection.handshake_kind()
                });
                let socket = TcpStream::connect(address).unwrap();
                socket.set_nonblocking(true).unwrap();
                let name = ServerName::try_from("127.0.0.1").unwrap();
                let connection = ClientConnection::new(Arc::clone(&config), name).unwrap();
                let mut guest =
                    Secure::begin(connection.into(), socket, deadline, guest.current(), || {
                        None
                    })
                    .unwrap();
                // Tickets come before the first byte.
                let mut byte = [0];
                while guest.read(&mut byte).is_err() {
                    assert!(Instant::now() < deadline, "no byte");
                    std::thread::yield_now();
                }
                accepted.join().unwrap()
            });
            assert_eq!(accepting, Some(HandshakeKind::Full));
        }
    }

    /// The guest's end of a connection, and the host's.
    fn connected() -> [Secure; 2] {
        let [host, guest] = two_sides().map(|files| Certificates::check(files).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        for socket in [&socket, &accepted] {
            socket.set_nonblocking(true).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let host = scope.spawn(|| host.accept(accepted, deadline).unwrap());
            let guest = guest.connect("127.0.0.1", socket, deadline).unwrap();
            [guest, host.join().unwrap()]
        })
    }

    /// rustls updates the keys by itself after 2^24 records.
    #[test]
    fn connection_goes_on_across_key_updates() {
        let [mut sender, mut receiver] = connected();
        for round in 0..6 {
            sender.connection.refresh_traffic_keys().unwrap();
            assert!(sender.connection.wants_write(), "no update");
            assert_eq!(sender.write(&[round]).unwrap(), 1);
            while !sender.flush().unwrap() {}
            let mut byte = [u8::MAX];
            let count = loop {
                match receiver.read(&mut byte) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    other => break other.unwrap(),
                }
            };
            assert_eq!((count, byte), (1, [round]));
            // The next sender has the request for an update of its own keys to answer.
            std::mem::swap(&mut sender, &mut receiver);
        }
    }

    /// The plugin's program may have the default action for SIGPIPE, which ends the program.
    #[test]
    fn writing_to_a_closed_connection_raises_no_signal() {
        signals::catch(libc::SIGPIPE);
        let broken = || {
            let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            drop(theirs);
            OwnedFd::from(ours)
        };
        let parts = [IoSlice::new(b"two"), IoSlice::new(b"parts")];
        let mut socket = Socket(OwnFd::new(broken()));
        let is_broken =
            |written: io::Result<usize>| written.unwrap_err().kind() == io::ErrorKind::BrokenPipe;
        assert!(is_broken(socket.write(b"part")));
        assert!(is_broken(socket.write_vectored(&parts)));
        assert!(is_broken(Plain::new(broken()).write(b"part")));
        let sent =
            crate::link::scm_rights::send(broken(), b"part", &[], rustix::net::SendFlags::empty());
        assert_eq!(sent, Err(rustix::io::Errno::PIPE));
        assert_eq!(signals::received(), 0);
        // The check sees a signal.
        let mut file = std::fs::File::from(broken());
        assert!(is_broken(file.write_vectored(&parts)));
        assert_eq!(signals::received(), 1);
    }
}
