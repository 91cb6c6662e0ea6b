//! The certificates of TCP links.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use vgpu_executor::config::Settings;
use vgpu_transport::link::connect::CERTIFICATES;
use vgpu_transport::link::stream::tls::{
    CertificateFault, CertificateFileFault, CertificateFiles, Certificates, TlsError,
};
use vgpu_transport::link::stream::x509::utc;

use super::report::Report;

const PART: &str = "certs";

pub(super) fn check(given: &[PathBuf], host: Option<&Settings>, report: &mut Report) {
    let variable = std::env::var_os(CERTIFICATES).filter(|folder| !folder.is_empty());
    let named = given.iter().cloned().chain(variable.map(PathBuf::from));
    let own = host.and_then(|settings| Some((settings.certs.as_deref()?, settings.crl.as_deref())));
    for folder in named {
        // The executor's own folder is checked once, with its list of revoked certificates.
        if own.is_none_or(|(own, _)| own != folder) {
            check_folder(&folder, None, report);
        }
    }
    if let Some((folder, crl)) = own {
        check_folder(folder, crl, report);
    }
}

fn check_folder(folder: &Path, crl: Option<&Path>, report: &mut Report) {
    let files = CertificateFiles::read(folder, crl);
    let certificates = files.map_err(TlsError::from).and_then(Certificates::check);
    let certificates = match certificates {
        Ok(certificates) => certificates,
        Err(error) if is_hidden(&error) => {
            report.note(
                PART,
                format!("{error}: run vgpu doctor as the user of the folder"),
            );
            return;
        }
        Err(error) => {
            let next = next(&error);
            report.fail(PART, error.to_string(), next);
            return;
        }
    };
    let own = certificates.own();
    let ends = own.not_after.map_or_else(|| "no known day".into(), utc);
    report.ok(
        PART,
        format!("{}: of {}, until {ends}", folder.display(), own.name()),
    );
    for (file, ending) in certificates.ending() {
        report.note(PART, format!("{}: {ending}", file.display()));
    }
}

/// What to do about certificates that cannot be used. The folder of their authority, FOLDER, may be
/// on another machine.
fn next(error: &TlsError) -> &'static str {
    let TlsError::Own(own) = error else {
        return "vgpu cert --help";
    };
    match own.fault {
        CertificateFault::Expired { .. } => "vgpu cert renew FOLDER NAME",
        CertificateFault::NotYetValid { .. } => "timedatectl",
        _ => "vgpu cert --help",
    }
}

/// Whether this user may not read a file.
fn is_hidden(error: &TlsError) -> bool {
    let TlsError::File(error) = error else {
        return false;
    };
    matches!(&error.cause, CertificateFileFault::Read(e) if e.kind() == ErrorKind::PermissionDenied)
}
