//! The certificates of TCP links on their way to a worker, which cannot open files: as JSON in a
//! sealed memory file, which all workers get.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};
use vgpu_transport::link::stream::tls::{CertificateFiles, PemFile};

/// A file in PEM.
#[derive(Serialize, Deserialize)]
struct Pem {
    path: PathBuf,
    text: String,
}

/// The files of one side.
#[derive(Serialize, Deserialize)]
struct Packed {
    authority: Pem,
    certificate: Pem,
    key: Pem,
    revoked: Option<Pem>,
}

impl From<&PemFile> for Pem {
    fn from(file: &PemFile) -> Pem {
        Pem {
            path: file.path.clone(),
            // What is not ASCII is a comment.
            text: String::from_utf8_lossy(&file.content).into_owned(),
        }
    }
}

impl From<Pem> for PemFile {
    fn from(pem: Pem) -> PemFile {
        PemFile {
            path: pem.path,
            content: pem.text.into_bytes(),
        }
    }
}

/// Writes the files into a memory file that nobody can change any more.
///
/// # Errors
/// A system call failed.
pub(super) fn pack(files: &CertificateFiles) -> io::Result<OwnedFd> {
    let packed = Packed {
        authority: Pem::from(&files.authority),
        certificate: Pem::from(&files.certificate),
        key: Pem::from(&files.key),
        revoked: files.revoked.as_ref().map(Pem::from),
    };
    let text = serde_json::to_vec(&packed)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create("vgpu-certificates", flags)?);
    file.write_all(&text)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(file.as_fd(), seals)?;
    Ok(file.into())
}

/// Reads what [`pack`] has written.
///
/// # Errors
/// A system call failed, or the supervisor has sent another file: its fault.
pub(super) fn unpack(file: OwnedFd) -> io::Result<CertificateFiles> {
    let file = File::from(file);
    let len = file.metadata()?.len();
    let mut text = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    // The position of the file belongs to all workers.
    file.read_exact_at(&mut text, 0)?;
    let packed: Packed = serde_json::from_slice(&text)?;
    Ok(CertificateFiles {
        authority: packed.authority.into(),
        certificate: packed.certificate.into(),
        key: packed.key.into(),
        revoked: packed.revoked.map(PemFile::from),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_arrive_whole_and_nobody_can_change_them() {
        let pem = |name: &str| PemFile {
            path: name.into(),
            content: format!("the content of {name}").into(),
        };
        let files = CertificateFiles {
            authority: pem("ca.pem"),
            certificate: pem("cert.pem"),
            key: pem("key.pem"),
            revoked: Some(pem("crl.pem")),
        };
        let packed = pack(&files).unwrap();
        let worker = File::from(packed.try_clone().unwrap());
        assert!(worker.write_at(b"x", 0).is_err(), "a worker writes");
        assert!(worker.set_len(0).is_err(), "a worker truncates");
        // Each worker reads all of it.
        for _ in 0..2 {
            let got = unpack(packed.try_clone().unwrap()).unwrap();
            assert_eq!(got.key.content, files.key.content);
            assert_eq!(got.revoked.unwrap().path, PathBuf::from("crl.pem"));
        }
    }
}
