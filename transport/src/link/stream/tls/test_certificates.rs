//! Certificates for tests.

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair};

use super::certificate_files::{AUTHORITY, CERTIFICATE, CertificateFiles, KEY, PemFile};

/// The certificates of two sides, of one authority.
pub(super) fn two_sides() -> [CertificateFiles; 2] {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap().pem();
    let issuer = rcgen::Issuer::new(params, key);
    let pem = |name: &str, content: String| PemFile {
        path: name.into(),
        content: content.into_bytes(),
    };
    let usages = [
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    usages.map(|usage| {
        let mut params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        CertificateFiles {
            authority: pem(AUTHORITY, authority.clone()),
            certificate: pem(CERTIFICATE, certificate.pem()),
            key: pem(KEY, key.serialize_pem()),
            revoked: None,
        }
    })
}
