//! What a certificate says, and a list of revoked certificates (RFC 5280).
//!
//! The content is untrusted. Only the fields below are decoded: whatever else TLS has accepted is
//! accepted here, and a field that cannot be decoded is missing.
#![forbid(unsafe_code)]

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use der::asn1::{GeneralizedTime, UtcTime};
use der::{AnyRef, DateTime, Decode as _, Reader as _, SliceReader, Tag, TagNumber, Tagged as _};

/// Most names of a certificate that are read, and most characters of each.
const MAX_NAMES: usize = 64;
const MAX_CHARS: usize = 253;

/// The contents of object identifiers (RFC 5280, appendix A).
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03]; // 2.5.4.3
const ALTERNATIVE_NAME: &[u8] = &[0x55, 0x1d, 0x11]; // 2.5.29.17
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x25]; // 2.5.29.37
const SERVER_AUTHENTICATION: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01];

/// What a certificate says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CertificateInfo {
    /// The common names of the subject: usually one.
    pub common_names: Vec<String>,
    /// How many attributes the subject has.
    pub subject_attributes: usize,
    /// The alternative names that are DNS names.
    pub dns_names: Vec<String>,
    /// The alternative names that are addresses.
    pub addresses: Vec<IpAddr>,
    /// The serial number: the bytes of a DER integer.
    pub serial: Vec<u8>,
    /// The start of the validity.
    pub not_before: Option<SystemTime>,
    /// The end of the validity.
    pub not_after: Option<SystemTime>,
    /// Whether the certificate is for a TLS server.
    pub is_for_servers: bool,
    /// The public key: SubjectPublicKeyInfo in DER.
    pub public_key: Vec<u8>,
    /// The key in it: the contents of its BIT STRING.
    pub key_bytes: Vec<u8>,
}

impl CertificateInfo {
    /// Reads a certificate in DER.
    pub fn of(certificate: &[u8]) -> CertificateInfo {
        read(certificate).unwrap_or_default()
    }

    /// The common names, then the DNS names, without duplicates.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in self.common_names.iter().chain(&self.dns_names) {
            if !names.contains(name) && names.len() < MAX_NAMES {
                names.push(name.clone());
            }
        }
        names
    }

    /// The name for people: the first name, or `a certificate without a name`.
    pub fn name(&self) -> String {
        let name = self.names().into_iter().next();
        name.unwrap_or_else(|| "a certificate without a name".into())
    }
}

fn read(certificate: &[u8]) -> Option<CertificateInfo> {
    let certificate = AnyRef::from_der(certificate).ok()?;
    let to_be_signed = elements(certificate.value()).next()?;
    let mut fields = elements(to_be_signed.value()).peekable();
    let version = fields.next_if(|version| is_context(version.tag(), 0));
    let serial = fields.next()?;
    // The algorithm and the issuer are before the validity.
    let validity = fields.nth(2)?;
    let mut times = elements(validity.value());
    let (not_before, not_after) = (times.next().and_then(time), times.next().and_then(time));
    let subject = fields.next()?;
    let attributes = || elements(subject.value()).flat_map(|set| elements(set.value()));
    let common_names = attributes()
        .filter_map(|attribute| value_of(attribute, COMMON_NAME))
        .filter_map(text)
        .filter(|name| is_sound(name));
    // With the version, the public key is the seventh field.
    let position = 5 + usize::from(version.is_some());
    let public_key = encoded(to_be_signed.value(), position);
    let key = fields.next();
    let key = key.and_then(|key| elements(key.value()).nth(1));
    // The first byte of a BIT STRING is the number of its unused bits.
    let key_bytes = key.and_then(|bits| bits.value().strip_prefix(&[0]));
    let extensions = fields.find(|field| is_context(field.tag(), 3));
    let extensions = extensions.and_then(|field| elements(field.value()).next());
    let extensions = extensions.map_or(&[][..], |list| list.value());
    let values = |identifier: &'static [u8]| {
        elements(extensions)
            .filter_map(move |extension| value_of(extension, identifier))
            .filter_map(|value| AnyRef::from_der(value.value()).ok())
            .flat_map(|list| elements(list.value()))
    };
    let dns_names = values(ALTERNATIVE_NAME)
        .filter(|name| is_context(name.tag(), 2)) // a dNSName
        .filter_map(|name| std::str::from_utf8(name.value()).ok())
        .filter(|name| is_sound(name));
    let addresses = values(ALTERNATIVE_NAME)
        .filter(|name| is_context(name.tag(), 7)) // an iPAddress
        .filter_map(|name| address(name.value()));
    Some(CertificateInfo {
        common_names: common_names.take(MAX_NAMES).map(str::to_owned).collect(),
        subject_attributes: attributes().count(),
        dns_names: dns_names.take(MAX_NAMES).map(str::to_owned).collect(),
        addresses: addresses.take(MAX_NAMES).collect(),
        serial: serial.value().to_vec(),
        not_before,
        not_after,
        is_for_servers: values(EXTENDED_KEY_USAGE)
            .any(|usage| usage.value() == SERVER_AUTHENTICATION),
        public_key: public_key.unwrap_or_default().to_vec(),
        key_bytes: key_bytes.unwrap_or_default().to_vec(),
    })
}

/// A certificate in a list of revoked certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevokedCertificate {
    /// The serial number: the bytes of a DER integer.
    pub serial: Vec<u8>,
    /// When the certificate was revoked.
    pub at: SystemTime,
}

/// The certificates in a list (RFC 5280, section 5.1) in DER. `None`: not a list, or a list with an
/// entry that cannot be read.
pub fn revoked(list: &[u8]) -> Option<Vec<RevokedCertificate>> {
    let list = AnyRef::from_der(list).ok()?;
    let to_be_signed = elements(list.value()).next()?;
    let mut fields = elements(to_be_signed.value()).peekable();
    fields.next_if(|version| version.tag() == Tag::Integer);
    // The algorithm and the issuer are before the times.
    time(fields.nth(2)?)?;
    fields.next_if(|next_update| time(*next_update).is_some());
    let Some(entries) = fields.next_if(|entries| entries.tag() == Tag::Sequence) else {
        return Some(Vec::new());
    };
    let mut reader = SliceReader::new(entries.value()).ok()?;
    let entries =
        std::iter::from_fn(|| (!reader.is_finished()).then(|| AnyRef::decode(&mut reader).ok()));
    entries
        .map(|entry| {
            let entry = entry?;
            let mut parts = elements(entry.value());
            Some(RevokedCertificate {
                serial: parts.next()?.value().to_vec(),
                at: time(parts.next()?)?,
            })
        })
        .collect()
}

/// A time as in `2027-11-24T20:31:44Z`.
pub fn utc(at: SystemTime) -> String {
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    let since = Duration::from_secs(since.unwrap_or_default().as_secs());
    let date = DateTime::from_unix_duration(since).unwrap_or(DateTime::INFINITY);
    date.to_string()
}

fn time(value: AnyRef<'_>) -> Option<SystemTime> {
    let since = match value.tag() {
        Tag::UtcTime => value.decode_as::<UtcTime>().ok()?.to_unix_duration(),
        Tag::GeneralizedTime => value
            .decode_as::<GeneralizedTime>()
            .ok()?
            .to_unix_duration(),
        _ => return None,
    };
    SystemTime::UNIX_EPOCH.checked_add(since)
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    }
}

/// Whether a name can be shown and compared.
fn is_sound(name: &str) -> bool {
    name.len() <= MAX_CHARS && !name.is_empty() && !name.chars().any(char::is_control)
}

/// The elements of a SEQUENCE or SET with these contents, up to the first that is not DER.
fn elements(contents: &[u8]) -> impl Iterator<Item = AnyRef<'_>> {
    let mut reader = SliceReader::new(contents).ok();
    std::iter::from_fn(move || {
        let reader = reader.as_mut().filter(|reader| !reader.is_finished())?;
        AnyRef::decode(reader).ok()
    })
}

/// The element at `position` of a SEQUENCE with these contents, with its tag and length.
fn encoded(contents: &[u8], position: usize) -> Option<&[u8]> {
    let mut reader = SliceReader::new(contents).ok()?;
    for _ in 0..position {
        reader.tlv_bytes().ok()?;
    }
    reader.tlv_bytes().ok()
}

/// The last element of a SEQUENCE that begins with this object identifier.
fn value_of<'a>(sequence: AnyRef<'a>, identifier: &[u8]) -> Option<AnyRef<'a>> {
    let mut parts = elements(sequence.value());
    let found = parts.next()?;
    let is_it = found.tag() == Tag::ObjectIdentifier && found.value() == identifier;
    is_it.then(|| parts.last())?
}

/// Whether a tag is `[number]`.
fn is_context(tag: Tag, number: u32) -> bool {
    matches!(tag, Tag::ContextSpecific { number: found, .. } if found == TagNumber(number))
}

/// The text of a value, if the value has one of the types of text whose bytes are UTF-8.
fn text(value: AnyRef<'_>) -> Option<&str> {
    let is_utf8 = matches!(
        value.tag(),
        Tag::Utf8String | Tag::PrintableString | Tag::Ia5String | Tag::NumericString
    );
    is_utf8
        .then(|| std::str::from_utf8(value.value()).ok())
        .flatten()
}
