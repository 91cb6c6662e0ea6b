//! `vgpu cert revoke`.

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::ensure;
use clap::Parser;
use vgpu_transport::link::stream::tls::PemFile;
use vgpu_transport::link::stream::x509::RevokedCertificate;

use super::authority::Authority;

/// Revokes certificates: adds them to the list FOLDER/crl.pem, which the authority signs.
///
/// Copy crl.pem into the folders with certificates of hosts, or name it with `vgpu serve --crl`,
/// and run `vgpu reload` there. The reload ends the sessions of these certificates. Without NAMES,
/// the list is made anew as it is, and an empty list if there is none.
#[derive(Parser)]
pub(super) struct Args {
    /// The folder of the authority
    folder: PathBuf,

    /// Names of certificates, each with all certificates that were made for it, or files of
    /// certificates (a path with a `/`)
    #[arg(value_name = "NAME|FILE")]
    names: Vec<String>,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let authority = Authority::load(&args.folder)?;
    let mut revoked = authority.revoked()?;
    let at = SystemTime::now();
    let mut added = 0;
    for name in &args.names {
        let certificates = match name.contains('/') {
            true => vec![PemFile::read(name.as_ref())?.info()?],
            false => authority.certificates_of(name)?,
        };
        ensure!(
            !certificates.is_empty(),
            "no certificate of {name:?} is in {}: give the file of the certificate instead, such \
             as ./cert.pem",
            args.folder.display()
        );
        for certificate in certificates {
            ensure!(
                !certificate.serial.is_empty(),
                "{name}: the certificate has no serial number"
            );
            if revoked.iter().all(|one| one.serial != certificate.serial) {
                added += 1;
                revoked.push(RevokedCertificate {
                    serial: certificate.serial,
                    at,
                });
            }
        }
    }
    authority.write_revoked(&revoked)?;
    println!("{}", authority.revoked_file().display());
    eprintln!(
        "vgpu: {added} certificates are revoked, {} in all; copy the list to the hosts, and run \
         `vgpu reload` there",
        revoked.len()
    );
    Ok(())
}
