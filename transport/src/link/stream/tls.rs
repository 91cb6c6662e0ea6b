//! TLS 1.3 over a socket. Both sides have certificates of one private authority.
//!
//! No session is resumed: each connection checks the certificates again.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Instant, SystemTime};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig,
    ServerConnection,
};

pub use super::certificate_fault::{
    CertificateFault, Ending, OwnCertificateError, PeerError, WARN_BEFORE,
};
pub use super::certificate_files::{
    AUTHORITY, CERTIFICATE, CertificateFileError, CertificateFileFault, CertificateFiles, KEY,
    PemFile, REVOKED,
};

use super::certificate_fault::FaultFiles;
use super::channel::Channel;
use super::recording_verifier::RecordingVerifier;
use super::x509::{CertificateInfo, utc};
use crate::fork::OwnFd;
use crate::poll::poll;

/// Why TLS has failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum TlsError {
    #[error(transparent)]
    File(#[from] CertificateFileError),
    #[error(transparent)]
    Own(#[from] OwnCertificateError),
    #[error(
        "{}: the authority {name} expired on {}: make a new authority with `vgpu cert` in a new \
         folder, and new certificates for all machines",
        file.display(), utc(*at)
    )]
    AuthorityExpired {
        file: PathBuf,
        name: String,
        at: SystemTime,
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

/// Why certificates do not fit together.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum ConfigurationError {
    #[error(transparent)]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Verifier(#[from] VerifierBuilderError),
}

/// Whether guests can reach a host under `name`: it is a host name or an address, without a port
/// and without brackets.
pub fn is_host_name(name: &str) -> bool {
    ServerName::try_from(name).is_ok()
}

/// An authority's certificate, and a certificate of this side with its key. Clones share them, and
/// see when they are [replaced](Certificates::replace).
#[derive(Clone)]
pub struct Certificates(Arc<RwLock<Arc<Checked>>>);

/// Certificates that have been checked.
struct Checked {
    files: CertificateFiles,
    own: CertificateInfo,
    authorities: Vec<CertificateInfo>,
    provider: Arc<CryptoProvider>,
    identity: Arc<SingleCertAndKey>,
    hosts: Arc<WebPkiServerVerifier>,
    guests: Arc<dyn ClientCertVerifier>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificates")
    }
}

impl Certificates {
    /// Reads the files of a folder that `vgpu cert` has made, and its `crl.pem` if there is one.
    ///
    /// # Errors
    ///
    /// As [`CertificateFiles::read`] and [`check`](Certificates::check).
    pub fn load(folder: &Path) -> Result<Certificates, TlsError> {
        Certificates::check(CertificateFiles::read(folder, None)?)
    }

    /// Checks files: this side's certificate has a key, is within its validity, is signed by an
    /// authority, and is not revoked.
    ///
    /// # Errors
    ///
    /// [`TlsError::File`] names the file that is malformed; [`TlsError::Own`] and
    /// [`TlsError::AuthorityExpired`] name the certificate that is not accepted;
    /// [`TlsError::Configuration`] when the certificates do not fit together.
    pub fn check(files: CertificateFiles) -> Result<Certificates, TlsError> {
        let checked = Checked::new(files)?;
        Ok(Certificates(Arc::new(RwLock::new(Arc::new(checked)))))
    }

    /// Uses other certificates from now on, in all clones. Open connections stay.
    pub fn replace(&self, new: &Certificates) {
        let new = new.current();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = new;
    }

    fn current(&self) -> Arc<Checked> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The files that are in use.
    pub fn files(&self) -> CertificateFiles {
        self.current().files.clone()
    }

    /// What this side's own certificate says.
    pub fn own(&self) -> CertificateInfo {
        self.current().own.clone()
    }

    /// The certificates of this side that end soon, each with its file.
    pub fn ending(&self) -> Vec<(PathBuf, Ending)> {
        let current = self.current();
        let now = SystemTime::now();
        let own = Ending::of(&current.own, now);
        let own = own.map(|ending| (current.files.certificate.path.clone(), ending));
        let authorities = current.authorities.iter();
        let authorities = authorities.filter_map(|info| Ending::of_authority(info, now));
        let path = &current.files.authority.path;
        own.into_iter()
            .chain(authorities.map(|ending| (path.clone(), ending)))
            .collect()
    }

    /// Whether a guest that connected with these certificates, its own first, could connect now.
    ///
    /// # Errors
    ///
    /// Why it could not.
    pub fn check_guest(&self, certificates: &[Vec<u8>]) -> Result<(), CertificateFault> {
        let current = self.current();
        let mut chain = certificates
            .iter()
            .map(|der| CertificateDer::from(&der[..]));
        let Some(own) = chain.next() else {
            return Ok(());
        };
        let more: Vec<CertificateDer<'_>> = chain.collect();
        match { &current.guests }.verify_client_cert(&own, &more, UnixTime::now()) {
            Ok(_) => Ok(()),
            Err(error) => Err(current.fault(&error, &own)),
        }
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
        let current = self.current();
        let verifier = Arc::new(RecordingVerifier::new(Arc::clone(&current.hosts)));
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&current.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(wrong)?
            .dangerous() // `verifier` asks the verifier of rustls
            .with_custom_certificate_verifier(Arc::clone(&verifier) as _)
            .with_client_cert_resolver(Arc::clone(&current.identity) as _);
        config.resumption = Resumption::disabled();
        let connection = ClientConnection::new(Arc::new(config), name).map_err(wrong)?;
        Secure::begin(connection.into(), socket, deadline, current, || {
            verifier.certificate()
        })
    }

    /// Opens the host's side of a connection.
    pub(super) fn accept(&self, socket: TcpStream, deadline: Instant) -> Result<Secure, TlsError> {
        let current = self.current();
        let verifier = Arc::new(RecordingVerifier::new(Arc::clone(&current.guests)));
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&current.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(wrong)?
            .with_client_cert_verifier(Arc::clone(&verifier) as _)
            .with_cert_resolver(Arc::clone(&current.identity) as _);
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        let connection = ServerConnection::new(Arc::new(config)).map_err(wrong)?;
        Secure::begin(connection.into(), socket, deadline, current, || {
            verifier.certificate()
        })
    }
}

impl Checked {
    fn new(files: CertificateFiles) -> Result<Checked, TlsError> {
        let now = SystemTime::now();
        let mut roots = RootCertStore::empty();
        let mut authorities = Vec::new();
        for authority in files.authority.certificates()? {
            let info = CertificateInfo::of(&authority);
            // The verifiers do not look at the validity of an authority.
            if let Some(at) = info.not_after.filter(|at| *at < now) {
                return Err(TlsError::AuthorityExpired {
                    file: files.authority.path.clone(),
                    name: info.name(),
                    at,
                });
            }
            authorities.push(info);
            let content = |error: rustls::Error| CertificateFileFault::Content(error.to_string());
            { roots.add(authority) }.map_err(|e| files.authority.wrong(content(e)))?;
        }
        let lists = match &files.revoked {
            Some(file) => file.lists()?,
            None => Vec::new(),
        };
        let chain = files.certificate.certificates()?;
        let own = CertificateInfo::of(&chain[0]);
        let key = PrivateKeyDer::from_pem_slice(&files.key.content)
            .map_err(|error| files.key.wrong(CertificateFileFault::Pem(error)))?;

        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let identity = CertifiedKey::from_der(chain.clone(), key, &provider).map_err(wrong)?;
        let unreadable = |error: VerifierBuilderError| match (&files.revoked, error) {
            (Some(file), VerifierBuilderError::InvalidCrl(error)) => file
                .wrong(CertificateFileFault::Content(format!("{error:?}")))
                .into(),
            (_, error) => wrong(error),
        };
        let guests =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .with_crls(lists.clone())
                .build()
                .map_err(unreadable)?;
        let hosts = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .with_crls(lists)
            .build()
            .map_err(unreadable)?;
        let checked = Checked {
            files,
            own,
            authorities,
            provider,
            identity: Arc::new(SingleCertAndKey::from(identity)),
            hosts,
            guests,
        };
        checked.check_own(&chain)?;
        Ok(checked)
    }

    /// Checks this side's own certificate as the peer will do.
    fn check_own(&self, chain: &[CertificateDer<'static>]) -> Result<(), OwnCertificateError> {
        let (own, more) = (&chain[0], &chain[1..]);
        let now = UnixTime::now();
        // Whatever the name of the machine is: it is checked last.
        let name = ServerName::from(std::net::Ipv4Addr::UNSPECIFIED);
        let checked = match self.own.is_for_servers {
            true => { self.hosts.verify_server_cert(own, more, &name, &[], now) }.map(drop),
            false => { self.guests.verify_client_cert(own, more, now) }.map(drop),
        };
        let error = match checked {
            Ok(())
            | Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => return Ok(()),
            Err(error) => error,
        };
        let fault = self.fault(&error, own);
        let file = match &fault {
            CertificateFault::NoList { list, .. } | CertificateFault::ForgedList { list } => list,
            _ => &self.files.certificate.path,
        };
        Err(OwnCertificateError {
            file: file.clone(),
            fault,
        })
    }

    /// Why `error` rejects a certificate.
    fn fault(&self, error: &rustls::Error, certificate: &CertificateDer<'_>) -> CertificateFault {
        let info = CertificateInfo::of(certificate);
        let list = self.files.revoked.as_ref();
        let files = FaultFiles {
            authority: &self.files.authority.path,
            list: list.map_or(Path::new(REVOKED), |list| &list.path),
        };
        CertificateFault::of(error, &info, files).unwrap_or_else(|| CertificateFault::Other {
            name: info.name(),
            error: error.to_string(),
        })
    }

    /// What an error of TLS means. `shown`: the certificate that the peer has presented.
    fn explain(&self, error: &rustls::Error, shown: Option<&CertificateDer<'_>>) -> io::Error {
        let (kind, own) = (io::ErrorKind::InvalidData, &self.files.certificate.path);
        match (error, shown) {
            (rustls::Error::AlertReceived(alert), _) => {
                io::Error::new(kind, PeerError::of_alert(*alert, &self.own, own))
            }
            (
                rustls::Error::InvalidCertificate(_) | rustls::Error::InvalidCertRevocationList(_),
                Some(shown),
            ) => io::Error::new(kind, PeerError::Rejected(self.fault(error, shown))),
            (rustls::Error::NoCertificatesPresented, _) => {
                io::Error::new(kind, "the peer has sent no certificate")
            }
            (error, _) => io::Error::new(kind, error.to_string()),
        }
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
    fn begin(
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
    pub(super) fn peer_certificates(&self) -> Vec<Vec<u8>> {
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

    use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair};
    use rustls::HandshakeKind;

    use super::*;
    use crate::signals;

    /// The certificates of two sides, of one authority.
    fn two_sides() -> [CertificateFiles; 2] {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let authority = params.self_signed(&key).unwrap().pem();
        let issuer = rcgen::Issuer::new(params, key);
        let pem = |name: &str, content: String| PemFile {
            path: name.into(),
            content: content.into_bytes(),
        };
        let usages = [
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        usages.map(|usage| {
            let mut params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &issuer).unwrap();
            CertificateFiles {
                authority: pem(AUTHORITY, authority.clone()),
                certificate: pem(CERTIFICATE, certificate.pem()),
                key: pem(KEY, key.serialize_pem()),
                revoked: None,
            }
        })
    }

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

    #[test]
    fn clones_use_replaced_certificates_and_guests_of_the_old_authority_are_refused() {
        let [host, guest] = two_sides();
        let [other_host, other_guest] = two_sides();
        let der =
            |files: &CertificateFiles| vec![files.certificate.certificates().unwrap()[0].to_vec()];
        let used = Certificates::check(host).unwrap();
        let clone = used.clone();
        assert_eq!(clone.check_guest(&der(&guest)), Ok(()));
        used.replace(&Certificates::check(other_host).unwrap());
        let fault = clone.check_guest(&der(&guest)).unwrap_err();
        assert!(
            matches!(fault, CertificateFault::UnknownAuthority { .. }),
            "{fault}"
        );
        assert_eq!(clone.check_guest(&der(&other_guest)), Ok(()));
        // A link without certificates has none to check.
        assert_eq!(clone.check_guest(&[]), Ok(()));
    }

    #[test]
    fn certificate_of_another_authority_is_refused_at_once() {
        let [mut host, _] = two_sides();
        host.authority = two_sides()[0].authority.clone();
        let error = Certificates::check(host).unwrap_err();
        assert!(
            matches!(&error, TlsError::Own(own)
                if matches!(own.fault, CertificateFault::UnknownAuthority { .. })),
            "{error}"
        );
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
