//! RPM packages, for Fedora, RHEL and their relatives. rpmbuild packs them, as dpkg-deb packs those
//! of Debian.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::contents::Package;
use super::layout::{GLIBC, lay_out, source_date_epoch};
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

/// The scripts that a package may have, in `deploy/rpm`.
const SCRIPTS: [&str; 3] = ["post", "preun", "postun"];

/// What rpmbuild does besides packing, or differs between machines, or between two runs.
const SETTINGS: [&str; 9] = [
    "_build_id_links none",
    "_missing_build_ids_terminate_build 0",
    "debug_package %{nil}",
    "__os_install_post %{nil}",
    "use_source_date_epoch_as_buildtime 1",
    "clamp_mtime_to_source_date_epoch 1",
    "_buildhost ggml-vgpu.invalid",
    "_binary_payload w7.xzdio",
    "_binary_filedigest_algorithm 8",
];

/// Packs a package that requires `requires`, besides the C library.
pub(super) fn pack(
    package: &Package,
    requires: &str,
    version: &str,
    folder: &Path,
) -> Result<PathBuf> {
    let Package { name, summary, .. } = package;
    let architecture = std::env::consts::ARCH;
    let scratch = Scratch::new()?;
    let tree = scratch.path().join("tree");
    lay_out(&tree, &package.entries)?;
    let mut spec = format!(
        "Name: {name}\nVersion: {version}\nRelease: 1\nSummary: {summary}\nLicense: MIT\n\
         AutoReqProv: no\nRequires: glibc >= {}.{}, libgcc, {requires}\n\n\
         %description\n{}\n\n%install\ncp -a {}/. %{{buildroot}}\n\n%files\n\
         %defattr(-,root,root,-)\n",
        GLIBC.0,
        GLIBC.1,
        package.description.join("\n"),
        tree.display(),
    );
    // Writing to a string cannot fail.
    for entry in &package.entries {
        let kind = match package.conffiles.contains(&entry.place.as_str()) {
            true => "%config(noreplace) ",
            false => "",
        };
        let _ = writeln!(spec, "{kind}\"/{}\"", entry.place);
    }
    let deploy = workspace::root().join("deploy/rpm");
    for script in SCRIPTS {
        let file = deploy.join(format!("{name}.{script}"));
        if let Ok(text) = fs::read_to_string(file) {
            let _ = writeln!(spec, "\n%{script}\n{text}");
        }
    }
    let spec_file = scratch.path().join("package.spec");
    fs::write(&spec_file, spec).context("writing a spec file")?;
    let mut rpmbuild = Command::new("rpmbuild");
    let top = scratch.path().join("top");
    rpmbuild.args(["-bb", "--quiet", "--target", architecture]);
    rpmbuild.args(["--define", &format!("_topdir {}", top.display())]);
    for setting in SETTINGS {
        rpmbuild.args(["--define", setting]);
    }
    rpmbuild
        .arg(&spec_file)
        .env("SOURCE_DATE_EPOCH", source_date_epoch()?.to_string());
    process::output(&mut rpmbuild).context("packing, which needs rpmbuild")?;
    let file_name = format!("{name}-{version}-1.{architecture}.rpm");
    let file = folder.join(&file_name);
    fs::copy(top.join("RPMS").join(architecture).join(&file_name), &file)
        .with_context(|| format!("taking {file_name} from rpmbuild"))?;
    Ok(file)
}
