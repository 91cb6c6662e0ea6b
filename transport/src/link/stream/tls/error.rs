//! Why TLS has failed.
#![forbid(unsafe_code)]

use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use rustls::server::VerifierBuilderError;

use super::certificate_fault::OwnCertificateError;
use super::certificate_files::CertificateFileError;
use crate::link::stream::x509::utc;

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

/// For `map_err`: the certificates do not fit together.
pub(super) fn wrong(error: impl Into<ConfigurationError>) -> TlsError {
    TlsError::Configuration(error.into())
}
