//! Certificates for a test, of `vgpu cert` and forged ones.
#![allow(dead_code)] // each test binary uses its part

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rcgen::{
    CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};
use vgpu_transport::link::stream::tls::{Certificates, PemFile};
use vgpu_transport::link::stream::x509::CertificateInfo;

use crate::served::vgpu;

/// Runs `vgpu cert`.
pub(crate) fn cert(arguments: &[&str]) -> Output {
    let output = vgpu(&["cert"]).args(arguments).output();
    output.expect("it starts")
}

/// Runs `vgpu cert`, which has to succeed.
pub(crate) fn cert_ok(arguments: &[&str]) {
    let output = cert(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
}

/// Makes a certificate, and reads its folder.
pub(crate) fn certify(folder: &Path, side: &str, name: &str, more: &[&str]) -> Certificates {
    let folder_name = folder.display().to_string();
    let mut arguments = vec![&folder_name[..], side, name];
    arguments.extend(more);
    cert_ok(&arguments);
    Certificates::load(&folder.join(name)).expect("what vgpu cert has made can be loaded")
}

/// What the certificate of a name says.
pub(crate) fn info(folder: &Path, name: &str) -> CertificateInfo {
    let file = PemFile::read(&folder.join(name).join("cert.pem")).expect("a file");
    file.info().expect("a certificate")
}

/// Makes a certificate of the authority in `folder` that is valid from 1 January of `from` to that
/// of `to`, which `vgpu cert` refuses to do. Returns its folder.
pub(crate) fn forge(folder: &Path, side: &str, name: &str, from: i32, to: i32) -> PathBuf {
    let end = std::time::SystemTime::from(date_time_ymd(to, 1, 1));
    forge_until(folder, side, name, from, end)
}

/// As [`forge`], valid until the second of `end`.
pub(crate) fn forge_until(
    folder: &Path,
    side: &str,
    name: &str,
    from: i32,
    end: std::time::SystemTime,
) -> PathBuf {
    let text = |path: PathBuf| fs::read_to_string(path).expect("a file of the authority");
    let authority = PemFile::read(&folder.join("ca.pem")).expect("an authority");
    let authority = authority
        .info()
        .expect("an authority")
        .common_names
        .remove(0);
    let mut issuer = CertificateParams::new(Vec::new()).expect("parameters");
    issuer.distinguished_name = rcgen::DistinguishedName::new();
    issuer
        .distinguished_name
        .push(DnType::CommonName, authority);
    issuer.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::from_pem(&text(folder.join("ca-key.pem"))).expect("a key");
    let issuer = Issuer::new(issuer, key);

    let names = match side {
        "host" => vec!["127.0.0.1".into()],
        _ => vec![name.to_owned()],
    };
    let mut params = CertificateParams::new(names).expect("parameters");
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(from, 1, 1);
    params.not_after = end.into();
    params.extended_key_usages = vec![match side {
        "host" => ExtendedKeyUsagePurpose::ServerAuth,
        _ => ExtendedKeyUsagePurpose::ClientAuth,
    }];
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, &issuer).expect("a certificate");
    let own = folder.join(name);
    fs::create_dir(&own).expect("a new folder");
    fs::write(own.join("cert.pem"), certificate.pem()).expect("a certificate");
    fs::write(own.join("key.pem"), key.serialize_pem()).expect("a key");
    fs::copy(folder.join("ca.pem"), own.join("ca.pem")).expect("an authority");
    own
}

/// The command openssl, which accepts any certificate of its own side.
pub(crate) fn openssl(arguments: &[&str], certificates: &Path) -> Command {
    let file = |name: &str| certificates.join(name);
    let mut command = Command::new("openssl");
    command
        .args(arguments)
        .arg("-tls1_3")
        .arg("-cert")
        .arg(file("cert.pem"))
        .arg("-key")
        .arg(file("key.pem"))
        .arg("-CAfile")
        .arg(file("ca.pem"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// The SHA-256 of a guest's certificate, in the format of openssl.
pub(crate) fn fingerprint(folder: &Path, name: &str) -> String {
    let output = Command::new("openssl")
        .args(["x509", "-noout", "-fingerprint", "-sha256", "-in"])
        .arg(folder.join(name).join("cert.pem"))
        .output()
        .expect("openssl is installed");
    let said = String::from_utf8(output.stdout).expect("text");
    let (_, digits) = said.trim().split_once('=').expect("a fingerprint");
    digits.to_owned()
}

/// A port that was free a moment ago.
pub(crate) fn port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}
