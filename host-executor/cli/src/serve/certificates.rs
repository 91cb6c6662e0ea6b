//! The certificates of TCP links: read at the start and on a reload, and watched for their end.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tracing::warn;
use vgpu_executor::config::Settings;
use vgpu_transport::link::stream::tls::{CertificateFiles, Certificates};

/// How often the log says that a certificate ends soon.
const WARN_INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);

/// Reads and checks the certificates that the settings name.
pub(super) fn load(settings: &Settings) -> anyhow::Result<Option<Certificates>> {
    let Some(folder) = &settings.certs else {
        if let Some(crl) = &settings.crl {
            bail!(
                "the list of revoked certificates {} needs certificates: name their folder with \
                 certs in [server], or --certs",
                crl.display()
            );
        }
        return Ok(None);
    };
    let files = CertificateFiles::read(folder, settings.crl.as_deref());
    let files = files.context("certificates")?;
    let certificates = Certificates::check(files).context("certificates")?;
    Ok(Some(certificates))
}

/// Says in the log once a day which certificates end soon.
pub(super) struct EndWatch {
    certificates: Option<Certificates>,
    next: Cell<Instant>,
}

impl EndWatch {
    /// Says it for the first time.
    pub(super) fn new(certificates: Option<Certificates>) -> EndWatch {
        let watch = EndWatch {
            certificates,
            next: Cell::new(Instant::now()),
        };
        watch.check_if_due();
        watch
    }

    /// Checks the certificates if a check is due. Called now and then.
    pub(super) fn check_if_due(&self) {
        if Instant::now() < self.next.get() {
            return;
        }
        self.next.set(Instant::now() + WARN_INTERVAL);
        let endings = self.certificates.iter().flat_map(Certificates::ending);
        endings.for_each(|(file, ending)| warn!("{}: {ending}", file.display()));
    }
}
