//! Certificates that have been checked, and what an error of TLS means with these certificates.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, RootCertStore};

use super::certificate_fault::{CertificateFault, FaultFiles, OwnCertificateError, PeerError};
use super::certificate_files::{CertificateFileFault, CertificateFiles, REVOKED};
use super::error::{TlsError, wrong};
use crate::link::stream::x509::CertificateInfo;

/// Certificates that have been checked.
pub(super) struct Checked {
    pub(super) files: CertificateFiles,
    pub(super) own: CertificateInfo,
    pub(super) authorities: Vec<CertificateInfo>,
    pub(super) provider: Arc<CryptoProvider>,
    pub(super) identity: Arc<SingleCertAndKey>,
    pub(super) hosts: Arc<WebPkiServerVerifier>,
    pub(super) guests: Arc<dyn ClientCertVerifier>,
}

impl Checked {
    pub(super) fn new(files: CertificateFiles) -> Result<Checked, TlsError> {
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
    pub(super) fn fault(
        &self,
        error: &rustls::Error,
        certificate: &CertificateDer<'_>,
    ) -> CertificateFault {
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
    pub(super) fn explain(
        &self,
        error: &rustls::Error,
        shown: Option<&CertificateDer<'_>>,
    ) -> io::Error {
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
