//! `vgpu cert`: a private certificate authority, and certificates for hosts and guests.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Parser, ValueEnum};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use vgpu_transport::link::stream::tls::{AUTHORITY, CERTIFICATE, KEY};

/// The authority's private key, which must not leave this machine.
const AUTHORITY_KEY: &str = "ca-key.pem";

/// Makes certificates for TCP links: a private authority, and a certificate for each host and
/// guest.
///
/// FOLDER holds the authority, which the first call creates. Each call creates one more folder in
/// it, NAME, with the files that one side needs: ca.pem, cert.pem, key.pem. A host uses its folder
/// with `vgpu serve --certs`, a guest with the environment variable VGPU_CERTS.
#[derive(Parser)]
pub(crate) struct Args {
    /// The folder of the authority
    folder: PathBuf,

    /// The side that uses the certificate
    side: Side,

    /// The name of the folder and of the certificate. Guests reach a host by this name, unless
    /// --address is given
    name: String,

    /// Names and addresses by which guests reach a host, as in VGPU_ENDPOINT=tcp:ADDRESS:PORT
    #[arg(long = "address", value_name = "ADDRESS")]
    addresses: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Side {
    /// A machine that runs `vgpu serve`.
    Host,
    /// A machine with guest programs.
    Guest,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let is_name = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if args.name.is_empty() || args.name.starts_with('.') || !args.name.bytes().all(is_name) {
        bail!(
            "the name {:?}: letters, digits, `.`, `_` and `-`",
            args.name
        );
    }
    if args.side == Side::Guest && !args.addresses.is_empty() {
        bail!("--address is for hosts: nothing connects to a guest");
    }
    fs::create_dir_all(&args.folder)
        .with_context(|| format!("creating {}", args.folder.display()))?;
    let (authority, issuer) = authority(&args.folder)?;

    let names = match (args.side, args.addresses.is_empty()) {
        (Side::Host, false) => args.addresses.clone(),
        _ => vec![args.name.clone()],
    };
    let mut params =
        CertificateParams::new(names).context("the names are not valid in a certificate")?;
    params
        .distinguished_name
        .push(DnType::CommonName, args.name.as_str());
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![match args.side {
        Side::Host => ExtendedKeyUsagePurpose::ServerAuth,
        Side::Guest => ExtendedKeyUsagePurpose::ClientAuth,
    }];
    let key = KeyPair::generate().context("making a key")?;
    let certificate = params
        .signed_by(&key, &issuer)
        .context("signing a certificate")?;

    let folder = args.folder.join(&args.name);
    fs::create_dir(&folder).with_context(|| {
        format!(
            "creating {} (a name is used once; remove the folder to replace its certificate)",
            folder.display()
        )
    })?;
    write(&folder.join(AUTHORITY), authority.as_bytes(), 0o644)?;
    write(
        &folder.join(CERTIFICATE),
        certificate.pem().as_bytes(),
        0o644,
    )?;
    write(&folder.join(KEY), key.serialize_pem().as_bytes(), 0o600)?;
    println!("{}", folder.display());
    Ok(())
}

/// Loads the authority of a folder: its certificate and its key. Creates it if there is none.
fn authority(folder: &Path) -> anyhow::Result<(String, Issuer<'static, KeyPair>)> {
    let (certificate, key) = (folder.join(AUTHORITY), folder.join(AUTHORITY_KEY));
    // All authorities have the same parameters, so only the key has to be stored.
    let mut params = CertificateParams::new(Vec::new()).context("making an authority")?;
    params
        .distinguished_name
        .push(DnType::CommonName, "vgpu authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    if certificate.exists() || key.exists() {
        let read = |path: &Path| {
            fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
        };
        let text = read(&certificate)?;
        let key = KeyPair::from_pem(&read(&key)?)
            .with_context(|| format!("{} is not a private key", key.display()))?;
        return Ok((text, Issuer::new(params, key)));
    }
    let pair = KeyPair::generate().context("making a key")?;
    let signed = params.self_signed(&pair).context("making an authority")?;
    write(&key, pair.serialize_pem().as_bytes(), 0o600)?;
    write(&certificate, signed.pem().as_bytes(), 0o644)?;
    Ok((signed.pem(), Issuer::new(params, pair)))
}

/// Writes a new file. Fails if the file exists.
fn write(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path);
    file.and_then(|mut file| file.write_all(content))
        .with_context(|| format!("writing {}", path.display()))
}
