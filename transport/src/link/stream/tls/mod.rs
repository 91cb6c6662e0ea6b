//! TLS 1.3 over a socket. Both sides have certificates of one private authority.
//!
//! No session is resumed: each connection checks the certificates again.

mod certificate_fault;
mod certificate_files;
mod certificates;
mod channel;
mod checked;
mod error;
mod recording_verifier;

#[cfg(test)]
mod test_certificates;

pub use certificate_fault::{
    CertificateFault, Ending, OwnCertificateError, PeerError, WARN_BEFORE,
};
pub use certificate_files::{
    AUTHORITY, CERTIFICATE, CertificateFileError, CertificateFileFault, CertificateFiles, KEY,
    PemFile, REVOKED,
};
pub use certificates::{Certificates, is_host_name};
pub use error::{ConfigurationError, TlsError};
