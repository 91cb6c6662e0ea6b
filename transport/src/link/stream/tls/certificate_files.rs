//! The files of one side: an authority, a certificate with its key, a list of revoked certificates.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};

use crate::link::stream::x509::CertificateInfo;

/// The file of the authority's certificate, in a folder with certificates.
pub const AUTHORITY: &str = "ca.pem";
/// The file of this side's certificate.
pub const CERTIFICATE: &str = "cert.pem";
/// The file of the private key of [`CERTIFICATE`].
pub const KEY: &str = "key.pem";
/// The file of the lists of revoked certificates, which a folder may have.
pub const REVOKED: &str = "crl.pem";

/// The largest file that is read, in bytes: a list of some 100,000 revoked certificates.
const MAX_FILE: u64 = 8 << 20;

/// A file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {cause}", file = file.display())]
pub struct CertificateFileError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub cause: CertificateFileFault,
}

/// What is wrong with a file of certificates, of a key or of lists.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum CertificateFileFault {
    #[error("{0}")]
    Read(io::Error),
    #[error("more than {MAX_FILE} bytes")]
    TooLong,
    #[error("not a PEM file of the expected kind ({0:?})")]
    Pem(pem::Error),
    #[error("the file holds no certificate")]
    NoCertificate,
    #[error("the file holds no list of revoked certificates")]
    NoList,
    /// The certificate cannot be that of an authority, the key does not belong to the certificate,
    /// or a list cannot be decoded.
    #[error("{0}")]
    Content(String),
}

/// A file in PEM, and where its content comes from.
#[derive(Clone)]
pub struct PemFile {
    /// The path, for messages.
    pub path: PathBuf,
    /// The content.
    pub content: Vec<u8>,
}

impl PemFile {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is too long.
    pub fn read(path: &Path) -> Result<PemFile, CertificateFileError> {
        let fault = |cause| CertificateFileError {
            file: path.into(),
            cause,
        };
        let mut content = Vec::new();
        let file = fs::File::open(path).map_err(|e| fault(CertificateFileFault::Read(e)))?;
        file.take(MAX_FILE + 1)
            .read_to_end(&mut content)
            .map_err(|e| fault(CertificateFileFault::Read(e)))?;
        if content.len() as u64 > MAX_FILE {
            return Err(fault(CertificateFileFault::TooLong));
        }
        Ok(PemFile {
            path: path.into(),
            content,
        })
    }

    /// The error that `cause` is wrong with this file.
    pub(super) fn wrong(&self, cause: CertificateFileFault) -> CertificateFileError {
        CertificateFileError {
            file: self.path.clone(),
            cause,
        }
    }

    /// The objects of one kind in the file.
    pub(super) fn objects<T: PemObject>(&self) -> Result<Vec<T>, CertificateFileError> {
        let objects: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&self.content).collect();
        objects.map_err(|error| self.wrong(CertificateFileFault::Pem(error)))
    }

    /// The certificates in the file, at least one.
    ///
    /// # Errors
    ///
    /// The file is not a PEM file with certificates.
    pub fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, CertificateFileError> {
        let certificates: Vec<CertificateDer<'static>> = self.objects()?;
        match certificates.is_empty() {
            true => Err(self.wrong(CertificateFileFault::NoCertificate)),
            false => Ok(certificates),
        }
    }

    /// What the first certificate in the file says.
    ///
    /// # Errors
    ///
    /// As [`certificates`](PemFile::certificates).
    pub fn info(&self) -> Result<CertificateInfo, CertificateFileError> {
        Ok(CertificateInfo::of(&self.certificates()?[0]))
    }

    /// The lists of revoked certificates in the file, at least one.
    ///
    /// # Errors
    ///
    /// The file is not a PEM file with lists.
    pub fn lists(
        &self,
    ) -> Result<Vec<CertificateRevocationListDer<'static>>, CertificateFileError> {
        let lists: Vec<CertificateRevocationListDer<'static>> = self.objects()?;
        match lists.is_empty() {
            true => Err(self.wrong(CertificateFileFault::NoList)),
            false => Ok(lists),
        }
    }
}

/// The files of one side.
#[derive(Clone)]
pub struct CertificateFiles {
    /// The certificates of the authorities.
    pub authority: PemFile,
    /// The certificate of this side.
    pub certificate: PemFile,
    /// The private key of the certificate.
    pub key: PemFile,
    /// The lists of revoked certificates.
    pub revoked: Option<PemFile>,
}

impl CertificateFiles {
    /// Reads the files of a folder that `vgpu cert` has made, and the lists of revoked
    /// certificates: `revoked`, or [`REVOKED`] in the folder if it exists.
    ///
    /// # Errors
    ///
    /// A file cannot be read.
    pub fn read(
        folder: &Path,
        revoked: Option<&Path>,
    ) -> Result<CertificateFiles, CertificateFileError> {
        let usual = folder.join(REVOKED);
        let revoked = match revoked {
            Some(revoked) => Some(revoked),
            None => usual.exists().then_some(usual.as_path()),
        };
        Ok(CertificateFiles {
            authority: PemFile::read(&folder.join(AUTHORITY))?,
            certificate: PemFile::read(&folder.join(CERTIFICATE))?,
            key: PemFile::read(&folder.join(KEY))?,
            revoked: revoked.map(PemFile::read).transpose()?,
        })
    }
}
