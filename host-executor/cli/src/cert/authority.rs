//! The authority of a folder.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SerialNumber,
};
use rustix::fs::FlockOperation;
use vgpu_transport::link::stream::tls::{AUTHORITY, PemFile, REVOKED};
use vgpu_transport::link::stream::x509::{CertificateInfo, RevokedCertificate, revoked, utc};

use super::files::{ISSUED, replace, write_new};

/// The authority's private key, which must not leave this machine.
const AUTHORITY_KEY: &str = "ca-key.pem";

/// Days of validity of an authority.
const AUTHORITY_DAYS: u32 = 3650;

/// Certificates are valid from this time before now on, for machines whose clocks are behind.
const CLOCK_ERROR: Duration = Duration::from_secs(60 * 60);

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The authority of a folder. Other calls of `vgpu cert` in the same folder wait until it is
/// dropped.
pub(super) struct Authority {
    folder: PathBuf,
    pem: String,
    not_after: Option<SystemTime>,
    issuer: Issuer<'static, KeyPair>,
    _lock: File,
}

impl Authority {
    /// Loads the authority of a folder. Creates it if there is none.
    pub(super) fn load_or_create(folder: &Path) -> anyhow::Result<Authority> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let lock = lock(folder)?;
        let (certificate, key) = (folder.join(AUTHORITY), folder.join(AUTHORITY_KEY));
        if !certificate.exists() && !key.exists() {
            let pair = KeyPair::generate().context("making a key")?;
            // A name of its own tells the lists of two authorities apart.
            let mut params = parameters(&format!("vgpu authority {}", hex(&random::<4>()?)))?;
            set_validity(&mut params, AUTHORITY_DAYS);
            let signed = params.self_signed(&pair).context("making an authority")?;
            write_new(&key, pair.serialize_pem().as_bytes(), 0o600)?;
            write_new(&certificate, signed.pem().as_bytes(), 0o644)?;
        }
        Authority::read(folder, lock)
    }

    /// Loads the authority of a folder.
    pub(super) fn load(folder: &Path) -> anyhow::Result<Authority> {
        ensure!(
            folder.join(AUTHORITY_KEY).exists(),
            "{} is no folder of an authority: it has no {AUTHORITY_KEY}",
            folder.display()
        );
        Authority::read(folder, lock(folder)?)
    }

    fn read(folder: &Path, lock: File) -> anyhow::Result<Authority> {
        let (certificate, key) = (folder.join(AUTHORITY), folder.join(AUTHORITY_KEY));
        let pem = PemFile::read(&certificate)?;
        let info = pem.info()?;
        let text =
            fs::read_to_string(&key).with_context(|| format!("reading {}", key.display()))?;
        let pair = KeyPair::from_pem(&text)
            .with_context(|| format!("{} is not a private key", key.display()))?;
        // The subject is written into what the authority signs.
        let ([name], 1) = (&info.common_names[..], info.subject_attributes) else {
            bail!(
                "{} is not an authority of `vgpu cert`",
                certificate.display()
            );
        };
        ensure!(
            pair.subject_public_key_info() == info.public_key,
            "{} is not the key of {}",
            key.display(),
            certificate.display()
        );
        Ok(Authority {
            folder: folder.into(),
            pem: String::from_utf8(pem.content).context("the authority is not text")?,
            not_after: info.not_after,
            issuer: Issuer::new(parameters(name)?, pair),
            _lock: lock,
        })
    }

    /// The authority's certificate in PEM.
    pub(super) fn pem(&self) -> &str {
        &self.pem
    }

    /// Signs a certificate for `days`, and keeps a copy.
    pub(super) fn sign(
        &self,
        name: &str,
        mut params: CertificateParams,
        key: &impl PublicKeyData,
        days: u32,
    ) -> anyhow::Result<Certificate> {
        let now = SystemTime::now();
        let left = self.not_after.map_or(Duration::MAX, |end| {
            end.duration_since(now).unwrap_or_default()
        });
        let end = self.not_after.map(utc).unwrap_or_default();
        if left < DAY {
            bail!(
                "the authority ends on {end}: make a new one with `vgpu cert` in a new folder, and \
                 new certificates for all machines"
            );
        }
        if left < DAY * days {
            bail!(
                "the authority ends on {end}, before a certificate for {days} days: use --days {} \
                 or less, or make a new authority with `vgpu cert` in a new folder",
                left.as_secs() / DAY.as_secs()
            );
        }
        set_validity(&mut params, days);
        // Not a digest of the key, as rcgen would do: the same key gets several certificates.
        let mut serial = random::<16>()?;
        serial[0] = serial[0] & 0x7f | 0x40; // positive, and of a fixed length
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        params.use_authority_key_identifier_extension = true;
        let certificate = params
            .signed_by(key, &self.issuer)
            .context("signing a certificate")?;
        let copies = self.folder.join(ISSUED);
        fs::create_dir_all(&copies).with_context(|| format!("creating {}", copies.display()))?;
        let copy = copies.join(format!("{name}-{}.pem", hex(&serial)));
        write_new(&copy, certificate.pem().as_bytes(), 0o644)?;
        Ok(certificate)
    }

    /// The certificates that have the name `name`: copies, and those of the name's folder.
    pub(super) fn certificates_of(&self, name: &str) -> anyhow::Result<Vec<CertificateInfo>> {
        let copies = self.folder.join(ISSUED);
        let mut files = vec![self.certificate_file(name)];
        if copies.exists() {
            for entry in
                fs::read_dir(&copies).with_context(|| format!("reading {}", copies.display()))?
            {
                files.push(entry?.path());
            }
        }
        files.retain(|file| file.exists());
        let mut found: Vec<CertificateInfo> = Vec::new();
        for file in files {
            let info = PemFile::read(&file)?.info()?;
            let is_known = found.iter().any(|known| known.serial == info.serial);
            if info.common_names.iter().any(|own| own == name) && !is_known {
                found.push(info);
            }
        }
        Ok(found)
    }

    /// The file of the certificate of a name.
    pub(super) fn certificate_file(&self, name: &str) -> PathBuf {
        self.folder
            .join(name)
            .join(vgpu_transport::link::stream::tls::CERTIFICATE)
    }

    /// The file of the list of revoked certificates.
    pub(super) fn revoked_file(&self) -> PathBuf {
        self.folder.join(REVOKED)
    }

    /// The revoked certificates.
    pub(super) fn revoked(&self) -> anyhow::Result<Vec<RevokedCertificate>> {
        let path = self.revoked_file();
        if !path.exists() {
            return Ok(Vec::new());
        }
        let lists = PemFile::read(&path)?.lists()?;
        let [list] = &lists[..] else {
            bail!(
                "{} has {} lists, expected is one",
                path.display(),
                lists.len()
            );
        };
        revoked(list).with_context(|| format!("{} is not a list of certificates", path.display()))
    }

    /// Replaces the list of revoked certificates.
    pub(super) fn write_revoked(&self, revoked: &[RevokedCertificate]) -> anyhow::Result<()> {
        let now = SystemTime::now();
        let number = now
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let number = u64::try_from(number).context("the clock of this machine")?;
        let params = rcgen::CertificateRevocationListParams {
            this_update: date(now),
            // The operator decides when the next list is due: whenever a certificate is revoked.
            next_update: date(self.not_after.unwrap_or(now + DAY * AUTHORITY_DAYS)),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked
                .iter()
                .map(|one| rcgen::RevokedCertParams {
                    serial_number: SerialNumber::from_slice(&one.serial),
                    revocation_time: date(one.at),
                    reason_code: None,
                    invalidity_date: None,
                })
                .collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        let list = params.signed_by(&self.issuer).context("signing the list")?;
        let pem = list.pem().context("the list in PEM")?;
        replace(&self.revoked_file(), pem.as_bytes())
    }
}

/// Waits until no other call works in the folder.
fn lock(folder: &Path) -> anyhow::Result<File> {
    let file = File::open(folder).with_context(|| format!("opening {}", folder.display()))?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)
        .with_context(|| format!("locking {}", folder.display()))?;
    Ok(file)
}

fn parameters(name: &str) -> anyhow::Result<CertificateParams> {
    let mut params = CertificateParams::new(Vec::new()).context("making an authority")?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn set_validity(params: &mut CertificateParams, days: u32) {
    let now = SystemTime::now();
    params.not_before = date(now - CLOCK_ERROR);
    params.not_after = date(now + DAY * days);
}

/// A time for rcgen, in whole seconds.
fn date(at: SystemTime) -> time::OffsetDateTime {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(since.as_secs())
}

fn random<const N: usize>() -> anyhow::Result<[u8; N]> {
    let mut bytes = [0; N];
    vgpu_transport::random::fill(&mut bytes).context("random bytes")?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
