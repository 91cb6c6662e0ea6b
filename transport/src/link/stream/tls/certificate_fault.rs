//! Why a certificate is not accepted, in words that say what to do.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertRevocationListError, CertificateError, Error};

use crate::link::stream::x509::{CertificateInfo, utc};

/// A certificate that ends within this time causes warnings.
pub const WARN_BEFORE: Duration = Duration::from_secs(30 * DAY);

/// Seconds of a day.
const DAY: u64 = 24 * 60 * 60;

/// What is wrong with a certificate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum CertificateFault {
    #[error(
        "the certificate of {name} expired on {}, and the clock of this machine says {}: make a \
         new one with `vgpu cert renew FOLDER {}`, and copy its cert.pem to the machine of {name}",
        utc(*at), utc(*now), argument(name)
    )]
    Expired {
        name: String,
        at: SystemTime,
        now: SystemTime,
    },
    #[error(
        "the certificate of {name} is valid from {} on, and the clock of this machine says {}: \
         compare the clocks of both machines (`timedatectl`)",
        utc(*from), utc(*now)
    )]
    NotYetValid {
        name: String,
        from: SystemTime,
        now: SystemTime,
    },
    #[error(
        "the certificate of {name} is revoked by {}: a machine that may connect again needs a \
         certificate with a new name and key (`vgpu cert FOLDER host NAME` or `vgpu cert FOLDER \
         guest NAME`)",
        list.display()
    )]
    Revoked { name: String, list: PathBuf },
    #[error(
        "no authority in {} has signed the certificate of {name}: both sides need certificates of \
         one authority",
        authority.display()
    )]
    UnknownAuthority { name: String, authority: PathBuf },
    #[error(
        "{} has no list of the authority that has signed the certificate of {name}: it needs the \
         list of every authority in ca.pem (`vgpu cert revoke`)",
        list.display()
    )]
    NoList { name: String, list: PathBuf },
    #[error(
        "{}: no authority in ca.pem has signed this list of revoked certificates",
        list.display()
    )]
    ForgedList { list: PathBuf },
    #[error("the certificate of {name}: {error}")]
    Other { name: String, error: String },
}

/// Files that a fault may name.
#[derive(Debug, Clone, Copy)]
pub(super) struct FaultFiles<'a> {
    pub(super) authority: &'a Path,
    pub(super) list: &'a Path,
}

impl CertificateFault {
    /// Why `error` rejects a certificate. `None`: the error is about something else.
    pub(super) fn of(
        error: &Error,
        shown: &CertificateInfo,
        files: FaultFiles<'_>,
    ) -> Option<CertificateFault> {
        let name = shown.name();
        let list = files.list.to_owned();
        let authority = files.authority.to_owned();
        let certificate = match error {
            Error::InvalidCertificate(error) => error,
            Error::InvalidCertRevocationList(CertRevocationListError::BadSignature) => {
                return Some(CertificateFault::ForgedList { list });
            }
            _ => return None,
        };
        Some(match certificate {
            &CertificateError::ExpiredContext { time, not_after } => CertificateFault::Expired {
                name,
                at: system(not_after),
                now: system(time),
            },
            &CertificateError::NotValidYetContext { time, not_before } => {
                CertificateFault::NotYetValid {
                    name,
                    from: system(not_before),
                    now: system(time),
                }
            }
            CertificateError::Revoked => CertificateFault::Revoked { name, list },
            CertificateError::UnknownRevocationStatus => CertificateFault::NoList { name, list },
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                CertificateFault::UnknownAuthority { name, authority }
            }
            error => CertificateFault::Other {
                name,
                error: error.to_string(),
            },
        })
    }
}

/// A certificate of this side is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {fault}", file.display())]
pub struct OwnCertificateError {
    /// The file of the certificate.
    pub file: PathBuf,
    /// What is wrong with it.
    pub fault: CertificateFault,
}

/// A peer and this side do not accept each other's certificates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum PeerError {
    #[error("this side rejects the peer's certificate: {0}")]
    Rejected(CertificateFault),
    #[error(
        "the peer rejects this side's certificate, {} of {name}, because it has expired or is not \
         valid yet by the peer's clock. It ends on {}, the clock of this machine says {}: compare \
         the clocks (`timedatectl`), or make a new one with `vgpu cert renew FOLDER {}`",
        file.display(), ends.map_or("no known day".into(), utc), utc(*now), argument(name)
    )]
    Expired {
        file: PathBuf,
        name: String,
        ends: Option<SystemTime>,
        now: SystemTime,
    },
    #[error(
        "the peer rejects this side's certificate, {} of {name}, because it is revoked: ask the \
         operator of the peer for a new one",
        file.display()
    )]
    Revoked { file: PathBuf, name: String },
    #[error("the peer rejects this side's certificate, {} of {name} ({alert:?})", file.display())]
    Other {
        file: PathBuf,
        name: String,
        alert: AlertDescription,
    },
}

impl PeerError {
    /// What an alert of the peer says about the certificate `own` of `file`.
    pub(super) fn of_alert(
        alert: AlertDescription,
        own: &CertificateInfo,
        file: &Path,
    ) -> PeerError {
        let (file, name) = (file.to_owned(), own.name());
        match alert {
            AlertDescription::CertificateExpired => PeerError::Expired {
                file,
                name,
                ends: own.not_after,
                now: SystemTime::now(),
            },
            AlertDescription::CertificateRevoked => PeerError::Revoked { file, name },
            alert => PeerError::Other { file, name, alert },
        }
    }
}

/// A certificate that ends soon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    name: String,
    at: SystemTime,
    now: SystemTime,
    is_authority: bool,
}

impl Ending {
    /// Whether a certificate ends within [`WARN_BEFORE`] of `now`, and has not ended.
    pub fn of(info: &CertificateInfo, now: SystemTime) -> Option<Ending> {
        let at = info.not_after?;
        let left = at.duration_since(now).ok()?;
        (left <= WARN_BEFORE).then(|| Ending {
            name: info.name(),
            at,
            now,
            is_authority: false,
        })
    }

    /// As [`of`](Ending::of), for the certificate of an authority.
    pub(super) fn of_authority(info: &CertificateInfo, now: SystemTime) -> Option<Ending> {
        let ending = Ending::of(info, now)?;
        Some(Ending {
            is_authority: true,
            ..ending
        })
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let left = self.at.duration_since(self.now).unwrap_or_default();
        let (name, at, days) = (&self.name, utc(self.at), left.as_secs() / DAY);
        match self.is_authority {
            true => write!(
                f,
                "the authority {name} ends on {at}, in {days} days: make a new authority with \
                 `vgpu cert` in a new folder, and new certificates for all machines"
            ),
            false => write!(
                f,
                "the certificate of {name} ends on {at}, in {days} days: make a new one with \
                 `vgpu cert renew FOLDER {}`",
                argument(name)
            ),
        }
    }
}

fn system(time: UnixTime) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(time.as_secs())
}

/// A name as an argument of a command that people copy. A certificate that nobody has verified may
/// have any name.
fn argument(name: &str) -> &str {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    match name.bytes().all(is_plain) && !name.starts_with(['-', '.']) {
        true => name,
        false => "NAME",
    }
}
