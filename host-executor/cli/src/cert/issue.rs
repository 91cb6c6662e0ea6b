//! `vgpu cert FOLDER SIDE NAME`: a new certificate.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};
use vgpu_transport::link::stream::tls::{AUTHORITY, CERTIFICATE, KEY, is_host_name};

use super::authority::Authority;
use super::files::{DAYS, check_name, write_new};

#[derive(Args)]
pub(super) struct NewCertificate {
    /// The folder of the authority
    folder: PathBuf,

    /// The side that uses the certificate
    side: Side,

    /// The name of the folder and of the certificate. Guests reach a host by this name, unless
    /// --address is given
    name: String,

    /// Names and addresses by which guests reach a host, as in VGPU_ENDPOINT=tcp:ADDRESS:PORT,
    /// separated by commas. May be given several times
    #[arg(long = "address", value_name = "ADDRESS", value_delimiter = ',')]
    addresses: Vec<String>,

    /// How many days the certificate is valid
    #[arg(
        long,
        value_name = "N",
        default_value_t = DAYS,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    days: u32,
}

/// Who shows a certificate.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Side {
    /// A machine that runs `vgpu serve`.
    Host,
    /// A machine with guest programs.
    Guest,
}

pub(super) fn run(args: &NewCertificate) -> anyhow::Result<()> {
    check_name(&args.name)?;
    ensure!(
        args.side == Side::Host || args.addresses.is_empty(),
        "--address is for hosts: nothing connects to a guest"
    );
    if let Some(wrong) = args.addresses.iter().find(|name| !is_host_name(name)) {
        bail!(
            "--address {wrong:?} is neither a host name nor an address: write it as in \
             tcp:ADDRESS:PORT, without port, brackets and spaces"
        );
    }
    let names = match (args.side, args.addresses.is_empty()) {
        (Side::Host, false) => args.addresses.clone(),
        _ => vec![args.name.clone()],
    };
    ensure!(
        args.side == Side::Guest || names.iter().all(|name| is_host_name(name)),
        "{:?} is no host name: give the names by which guests reach the host with --address",
        args.name
    );
    let folder = args.folder.join(&args.name);
    ensure!(
        !folder.exists(),
        "{} exists: `vgpu cert renew {} {}` makes a new certificate of the same name. A name whose \
         folder is removed can be used again",
        folder.display(),
        args.folder.display(),
        args.name
    );
    let authority = Authority::load_or_create(&args.folder)?;
    let params = parameters(args.side, &args.name, names)?;
    let key = KeyPair::generate().context("making a key")?;
    let certificate = authority.sign(&args.name, params, &key, args.days)?;

    fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
    write_new(&folder.join(AUTHORITY), authority.pem().as_bytes(), 0o644)?;
    write_new(
        &folder.join(CERTIFICATE),
        certificate.pem().as_bytes(),
        0o644,
    )?;
    write_new(&folder.join(KEY), key.serialize_pem().as_bytes(), 0o600)?;
    println!("{}", folder.display());
    Ok(())
}

/// The parameters of a certificate of `name` with the alternative names `names`.
pub(super) fn parameters(
    side: Side,
    name: &str,
    names: Vec<String>,
) -> anyhow::Result<CertificateParams> {
    let mut params =
        CertificateParams::new(names).context("the names are not valid in a certificate")?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![match side {
        Side::Host => ExtendedKeyUsagePurpose::ServerAuth,
        Side::Guest => ExtendedKeyUsagePurpose::ClientAuth,
    }];
    Ok(params)
}
