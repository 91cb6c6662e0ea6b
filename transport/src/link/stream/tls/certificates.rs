//! The certificates of one side, and the connections that use the certificates.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Instant, SystemTime};

use rustls::client::Resumption;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

use super::certificate_fault::{CertificateFault, Ending};
use super::certificate_files::CertificateFiles;
use super::channel::Secure;
use super::checked::Checked;
use super::error::{TlsError, wrong};
use super::recording_verifier::RecordingVerifier;
use crate::link::stream::x509::CertificateInfo;

/// Whether guests can reach a host under `name`: it is a host name or an address, without a port
/// and without brackets.
pub fn is_host_name(name: &str) -> bool {
    ServerName::try_from(name).is_ok()
}

/// An authority's certificate, and a certificate of this side with its key. Clones share them, and
/// see when they are [replaced](Certificates::replace).
#[derive(Clone)]
pub struct Certificates(Arc<RwLock<Arc<Checked>>>);

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

    pub(super) fn current(&self) -> Arc<Checked> {
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
    pub(in crate::link::stream) fn connect(
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
    pub(in crate::link::stream) fn accept(
        &self,
        socket: TcpStream,
        deadline: Instant,
    ) -> Result<Secure, TlsError> {
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

#[cfg(test)]
mod tests {
    use super::super::test_certificates::two_sides;
    use super::*;

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
}
