//! `vgpu cert renew`.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use rcgen::{KeyPair, PublicKeyData, SignatureAlgorithm};
use vgpu_executor::{CertificateRule, Identity};
use vgpu_transport::link::stream::tls::{KEY, PemFile};
use vgpu_transport::link::stream::x509::CertificateInfo;

use super::authority::Authority;
use super::files::{DAYS, check_name, replace};
use super::issue::{Side, parameters};

/// Makes a new certificate for the name, the addresses and the key of an existing one.
///
/// FOLDER/NAME/cert.pem is replaced: copy the file to the machine that uses it. The key stays, and
/// does not have to be in FOLDER. The old certificate is valid until its end; a stolen key needs
/// `vgpu cert revoke` and a certificate with a new key.
#[derive(Parser)]
pub(super) struct Args {
    /// The folder of the authority
    folder: PathBuf,

    /// The name of the certificate
    name: String,

    /// How many days the new certificate is valid
    #[arg(
        long,
        value_name = "N",
        default_value_t = DAYS,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    days: u32,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    check_name(&args.name)?;
    let authority = Authority::load(&args.folder)?;
    let file = authority.certificate_file(&args.name);
    ensure!(
        file.exists(),
        "there is no {}: `vgpu cert {} host {}` or `vgpu cert {} guest {}` makes a certificate",
        file.display(),
        args.folder.display(),
        args.name,
        args.folder.display(),
        args.name
    );
    let old = PemFile::read(&file)?.info()?;
    let revoked = authority.revoked()?;
    if revoked.iter().any(|one| one.serial == old.serial) {
        bail!(
            "{} is revoked, and so are certificates with its key: remove {}, and make a \
             certificate with a new key",
            file.display(),
            args.folder.join(&args.name).display()
        );
    }
    let key = CertifiedKey::of(&old)
        .with_context(|| format!("{} has a key of an unknown kind", file.display()))?;
    check_key(args, &old)?;
    let side = match old.is_for_servers {
        true => Side::Host,
        false => Side::Guest,
    };
    let addresses = old.addresses.iter().map(ToString::to_string);
    let names = old.dns_names.iter().cloned().chain(addresses).collect();
    let params = parameters(side, &args.name, names)?;
    let certificate = authority.sign(&args.name, params, &key, args.days)?;
    replace(&file, certificate.pem().as_bytes())?;
    println!("{}", file.display());
    let fingerprint = CertificateRule::Fingerprint(Identity::of(certificate.der()).fingerprint);
    eprintln!(
        "vgpu: a configuration that names it by its fingerprint needs the new one, {fingerprint}"
    );
    Ok(())
}

/// Refuses a key in the folder that is not that of the certificate.
fn check_key(args: &Args, old: &CertificateInfo) -> anyhow::Result<()> {
    let path = args.folder.join(&args.name).join(KEY);
    if !path.exists() {
        return Ok(());
    }
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let pair = KeyPair::from_pem(&text)
        .with_context(|| format!("{} is not a private key", path.display()))?;
    ensure!(
        pair.subject_public_key_info() == old.public_key,
        "{} is not the key of the certificate beside it",
        path.display()
    );
    Ok(())
}

/// The public key of a certificate.
struct CertifiedKey {
    algorithm: &'static SignatureAlgorithm,
    bytes: Vec<u8>,
}

impl CertifiedKey {
    fn of(certificate: &CertificateInfo) -> Option<CertifiedKey> {
        let known = [
            &rcgen::PKCS_ECDSA_P256_SHA256,
            &rcgen::PKCS_ECDSA_P384_SHA384,
            &rcgen::PKCS_ED25519,
            &rcgen::PKCS_RSA_SHA256,
        ];
        let candidates = known.map(|algorithm| CertifiedKey {
            algorithm,
            bytes: certificate.key_bytes.clone(),
        });
        let mut candidates = candidates.into_iter();
        candidates.find(|key| key.subject_public_key_info() == certificate.public_key)
    }
}

impl PublicKeyData for CertifiedKey {
    fn der_bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.algorithm
    }
}
