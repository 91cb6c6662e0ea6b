//! TLS 1.3 over a socket. Both sides have certificates of one private authority.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};

use super::channel::Channel;
use crate::fork::OwnFd;
use crate::poll::poll;

/// The file of the authority's certificate, in a folder with certificates.
pub const AUTHORITY: &str = "ca.pem";
/// The file of this side's certificate.
pub const CERTIFICATE: &str = "cert.pem";
/// The file of the private key of [`CERTIFICATE`].
pub const KEY: &str = "key.pem";

/// Why TLS has failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum TlsError {
    #[error("{file}: {cause}", file = file.display())]
    File {
        file: PathBuf,
        cause: CertificateFileError,
    },
    #[error("the certificates do not fit together: {0}")]
    Configuration(ConfigurationError),
    #[error("{0:?} is not a name that a certificate can have")]
    Name(String),
    #[error("TLS: {0}")]
    Handshake(io::Error),
    #[error("TLS: the handshake did not end in time; does the peer use TLS?")]
    Timeout,
}

/// What is wrong with a file of certificates or of a key.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum CertificateFileError {
    #[error("{0}")]
    Read(io::Error),
    #[error("not a PEM file of the expected kind ({0:?})")]
    Pem(rustls::pki_types::pem::Error),
    #[error("the file holds no certificate")]
    Empty,
    /// The certificate cannot be that of an authority.
    #[error("{0}")]
    Authority(rustls::Error),
}

impl From<rustls::pki_types::pem::Error> for CertificateFileError {
    fn from(error: rustls::pki_types::pem::Error) -> CertificateFileError {
        match error {
            rustls::pki_types::pem::Error::Io(error) => CertificateFileError::Read(error),
            error => CertificateFileError::Pem(error),
        }
    }
}

/// Why certificates do not fit together.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum ConfigurationError {
    #[error(transparent)]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Verifier(#[from] VerifierBuilderError),
}

/// An authority's certificate, and a certificate of this side with its key.
#[derive(Clone)]
pub struct Certificates {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificates")
    }
}

impl Certificates {
    /// Reads the three files of a folder that `vgpu cert` has made.
    ///
    /// # Errors
    ///
    /// [`TlsError::File`] names the file that is missing or malformed; [`TlsError::Configuration`]
    /// when the certificates do not fit together.
    pub fn load(folder: &Path) -> Result<Certificates, TlsError> {
        let bad = |name: &str, cause: CertificateFileError| TlsError::File {
            file: folder.join(name),
            cause,
        };
        let certificates = |name: &str| -> Result<Vec<CertificateDer<'static>>, TlsError> {
            let list: Result<Vec<_>, _> = CertificateDer::pem_file_iter(folder.join(name))
                .map_err(|e| bad(name, e.into()))?
                .collect();
            let list = list.map_err(|e| bad(name, e.into()))?;
            if list.is_empty() {
                return Err(bad(name, CertificateFileError::Empty));
            }
            Ok(list)
        };
        let mut roots = RootCertStore::empty();
        for authority in certificates(AUTHORITY)? {
            roots
                .add(authority)
                .map_err(|e| bad(AUTHORITY, CertificateFileError::Authority(e)))?;
        }
        let chain = certificates(CERTIFICATE)?;
        let key = PrivateKeyDer::from_pem_file(folder.join(KEY)).map_err(|e| bad(KEY, e.into()))?;

        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = [&rustls::version::TLS13];
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)
            .map_err(wrong)?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(wrong)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(wrong)?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(wrong)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(wrong)?;
        Ok(Certificates {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// Opens the guest's side of a connection to `host`. The host must have a certificate for that
    /// name.
    pub(super) fn connect(
        &self,
        host: &str,
        socket: TcpStream,
        deadline: Instant,
    ) -> Result<Secure, TlsError> {
        let name =
            ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Name(host.into()))?;
        let connection = ClientConnection::new(Arc::clone(&self.client), name).map_err(wrong)?;
        Secure::begin(connection.into(), socket, deadline)
    }

    /// Opens the host's side of a connection.
    pub(super) fn accept(&self, socket: TcpStream, deadline: Instant) -> Result<Secure, TlsError> {
        let connection = ServerConnection::new(Arc::clone(&self.server)).map_err(wrong)?;
        Secure::begin(connection.into(), socket, deadline)
    }
}

/// For `map_err`.
fn wrong(error: impl Into<ConfigurationError>) -> TlsError {
    TlsError::Configuration(error.into())
}

/// An encrypted channel.
pub(super) struct Secure {
    connection: Connection,
    socket: Socket,
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
    fn begin(
        connection: Connection,
        socket: TcpStream,
        deadline: Instant,
    ) -> Result<Secure, TlsError> {
        let mut secure = Secure {
            connection,
            socket: Socket(OwnFd::new(socket)),
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
                match secure.read_encrypted() {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(failed(error)),
                }
            }
        }
    }

    /// The peer's certificate, in DER.
    pub(super) fn certificate(&self) -> Option<Vec<u8>> {
        let chain = self.connection.peer_certificates()?;
        chain.first().map(|own| own.to_vec())
    }

    /// Reads and decrypts the bytes that have arrived.
    fn read_encrypted(&mut self) -> io::Result<()> {
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
                Err(io::Error::new(io::ErrorKind::InvalidData, explain(&error)))
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

fn explain(error: &rustls::Error) -> String {
    match error {
        rustls::Error::AlertReceived(_) => {
            format!("the peer rejects this side's certificate ({error})")
        }
        rustls::Error::InvalidCertificate(_) => {
            format!("this side rejects the peer's certificate ({error})")
        }
        rustls::Error::NoCertificatesPresented => "the peer has sent no certificate".into(),
        error => error.to_string(),
    }
}

impl Channel for Secure {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.read_encrypted()?,
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
    use super::*;
    use crate::signals;

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
        assert!(is_broken(
            super::super::channel::Plain::new(broken()).write(b"part")
        ));
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
