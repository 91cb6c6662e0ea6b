//! The identity of a guest by its TLS certificate.
//!
//! TLS has verified each certificate here: the operator's authority has signed it, it is within its
//! validity, and the guest has its key. The parser still treats the content as untrusted.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use vgpu_transport::link::stream::x509::CertificateInfo;

/// Bytes of a SHA-256 digest.
const DIGEST: usize = 32;

/// Prefix of a fingerprint in text.
const SHA256: &str = "sha256:";

/// Most characters of a name.
const MAX_CHARS: usize = 253;

/// The identity in a certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The subject's common name, then its alternative DNS names.
    pub names: Vec<String>,
    /// SHA-256 of the certificate in DER.
    pub fingerprint: [u8; DIGEST],
}

impl Identity {
    /// Reads a certificate in DER. An unreadable certificate has a fingerprint and no names.
    pub fn of(certificate: &[u8]) -> Identity {
        let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
        let mut fingerprint = [0; DIGEST];
        fingerprint.copy_from_slice(digest.as_ref());
        Identity {
            names: CertificateInfo::of(certificate).names(),
            fingerprint,
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.as_slice() {
            [] => f.write_str("without a name")?,
            names => write!(f, "of {}", names.join(", "))?,
        }
        write!(f, " ({})", CertificateRule::Fingerprint(self.fingerprint))
    }
}

/// What a certificate must have to identify a guest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CertificateRule {
    /// This common name or DNS name, in any case.
    Name(String),
    /// This SHA-256 digest.
    Fingerprint([u8; DIGEST]),
}

impl CertificateRule {
    /// Whether a certificate satisfies the rule.
    pub fn fits(&self, identity: &Identity) -> bool {
        match self {
            CertificateRule::Name(name) => {
                let names = identity.names.iter();
                names
                    .into_iter()
                    .any(|shown| shown.eq_ignore_ascii_case(name))
            }
            CertificateRule::Fingerprint(fingerprint) => *fingerprint == identity.fingerprint,
        }
    }
}

/// Why a text is no rule for certificates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ParseCertificateRuleError {
    #[error("{0:?} is neither a name in a certificate nor sha256: and 64 hexadecimal digits")]
    Name(String),
    #[error(
        "{0:?}: expected sha256: and 64 hexadecimal digits, as openssl x509 -fingerprint -sha256 \
         prints them"
    )]
    Fingerprint(String),
}

impl FromStr for CertificateRule {
    type Err = ParseCertificateRuleError;

    fn from_str(text: &str) -> Result<CertificateRule, ParseCertificateRuleError> {
        let Some(digits) = text.strip_prefix(SHA256) else {
            let is_name = !text.is_empty() && text.len() <= MAX_CHARS;
            return match is_name && !text.chars().any(|c| c.is_control() || c == ':') {
                true => Ok(CertificateRule::Name(text.to_ascii_lowercase())),
                false => Err(ParseCertificateRuleError::Name(text.into())),
            };
        };
        // In the format of `openssl x509 -fingerprint -sha256`, or without the colons.
        let digits: Vec<u8> = digits
            .bytes()
            .filter(|b| *b != b':')
            .map_while(|b| (b as char).to_digit(16).map(|digit| digit as u8))
            .collect();
        let written = text[SHA256.len()..].bytes().filter(|b| *b != b':').count();
        let mut fingerprint = [0; DIGEST];
        if digits.len() != 2 * DIGEST || written != digits.len() {
            return Err(ParseCertificateRuleError::Fingerprint(text.into()));
        }
        for (byte, pair) in fingerprint.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        Ok(CertificateRule::Fingerprint(fingerprint))
    }
}

impl fmt::Display for CertificateRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CertificateRule::Name(name) => f.write_str(name),
            CertificateRule::Fingerprint(fingerprint) => {
                f.write_str(SHA256)?;
                fingerprint
                    .iter()
                    .try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, CustomExtension, DnType, DnValue, KeyPair, SanType};

    use super::*;

    #[test]
    fn names_and_fingerprint_come_from_the_certificate() {
        let mut params =
            CertificateParams::new(vec!["desk.example".into(), "Laptop".into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "Laptop");
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let identity = Identity::of(certificate.der());
        assert_eq!(identity.names, ["Laptop", "desk.example"]);
        let text = CertificateRule::Fingerprint(identity.fingerprint).to_string();
        for rule in [
            "laptop",
            "LAPTOP",
            "desk.example",
            &text,
            &text.to_uppercase().replace("SHA256", "sha256"),
        ] {
            let rule: CertificateRule = rule.parse().unwrap();
            assert!(rule.fits(&identity), "{rule}");
        }
        for rule in ["lap", "example", "sha256:00"] {
            let fits = rule
                .parse()
                .is_ok_and(|rule: CertificateRule| rule.fits(&identity));
            assert!(!fits, "{rule}");
        }
    }

    #[test]
    fn names_are_read_beside_whatever_else_a_certificate_has() {
        let mut params = CertificateParams::new(vec!["desk.example".into()]).unwrap();
        params.subject_alt_names.splice(
            0..0,
            [
                SanType::IpAddress([10, 0, 0, 1].into()),
                SanType::URI("spiffe://example/desk".try_into().unwrap()),
            ],
        );
        // A name in UUIDs (2.25), and a long serial number.
        let long = CustomExtension::from_oid_content(&[2, 25, u64::MAX >> 1], vec![5, 0]);
        params.custom_extensions.push(long);
        params.serial_number = Some(vec![0x7f; 40].into());
        for text in ["Laptop", "Desk"] {
            params.distinguished_name.push(
                DnType::CustomDnType(vec![2, 5, 4, 3]),
                DnValue::PrintableString(text.try_into().unwrap()),
            );
        }
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let names = Identity::of(certificate.der()).names;
        assert!(names.contains(&"desk.example".into()), "{names:?}");
        assert!(names.contains(&"Desk".into()), "{names:?}");
        // Cut off anywhere, a certificate has no names that the whole one does not have.
        for len in 0..certificate.der().len() {
            let cut = Identity::of(&certificate.der()[..len]).names;
            assert!(cut.iter().all(|name| names.contains(name)), "{cut:?}");
        }
    }

    #[test]
    fn fingerprints_are_read_with_and_without_colons_and_nothing_else_is() {
        let bare = "0123456789abcdef".repeat(4);
        let pairs: Vec<&str> = (0..32).map(|i| &bare[2 * i..2 * i + 2]).collect();
        let rule = |text: &str| format!("sha256:{text}").parse::<CertificateRule>();
        assert_eq!(rule(&bare), rule(&pairs.join(":")));
        assert!(rule(&bare).is_ok());
        for wrong in [
            &bare[1..],
            "",
            &format!("{bare}0"),
            &bare.replace('a', "g"),
            &format!("{bare}x"),
        ] {
            assert!(rule(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "md5:00", "a\nb"] {
            assert!(wrong.parse::<CertificateRule>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn bytes_that_are_no_certificate_have_no_name() {
        assert!(Identity::of(&[]).names.is_empty());
        assert!(Identity::of(&[0x30; 100]).names.is_empty());
    }
}
