//! Certificates for the TCP link, made by `vgpu cert`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask_common::process;

/// The address of the host's loopback interface in QEMU's user network.
pub(super) const HOST: &str = "10.0.2.2";
const FILES: [&str; 3] = ["ca.pem", "cert.pem", "key.pem"];

/// Certificates of `vgpu cert`: for the host, for its guest, and for a guest of another authority.
pub(super) struct Certificates {
    pub(super) host: PathBuf,
    files: Vec<(String, PathBuf)>,
}

impl Certificates {
    pub(super) fn make(vgpu: &Path, folder: &Path) -> Result<Certificates> {
        let make = |authority: &str, arguments: &[&str]| -> Result<PathBuf> {
            let authority = folder.join(authority);
            let mut cert = Command::new(vgpu);
            cert.arg("cert").arg(&authority).args(arguments);
            let made = process::output(&mut cert).context("making a certificate")?;
            Ok(made.trim().into())
        };
        let host = make("certs", &["host", "executor", "--address", HOST])?;
        let mut files = Vec::new();
        for (authority, name) in [("certs", "guest"), ("others", "foreign")] {
            let made = make(authority, &["guest", name])?;
            for file in FILES {
                files.push((format!("certs/{name}/{file}"), made.join(file)));
            }
        }
        Ok(Certificates { host, files })
    }

    /// The files for guests: the path in the guest and the path on the host.
    pub(super) fn for_guests(&self) -> Vec<(&str, &Path)> {
        self.files
            .iter()
            .map(|(target, file)| (target.as_str(), file.as_path()))
            .collect()
    }
}
