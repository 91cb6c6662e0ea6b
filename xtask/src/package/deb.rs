//! Debian packages: `vgpu` for hosts, `vgpu-guest` for machines that use one.
//!
//! dpkg-deb packs them. cargo-deb is not used: it packs the files of one crate, as it builds them
//! itself. Here each of two packages has files of builds with features of their own, and the
//! machine that packs would first have to compile it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::layout::{Entry, GLIBC, VERSION, lay_out, source_date_epoch};
use xtask_common::dist::Dist;
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

/// The packages' names.
const HOST: &str = "vgpu";
const GUEST: &str = "vgpu-guest";

/// What a package says of itself.
struct Control<'a> {
    name: &'a str,
    /// Packages beside the C library.
    depends: &'a str,
    summary: &'a str,
    description: &'a str,
    scripts: &'a [&'a str],
    /// Files that an update replaces only if the administrator has not changed them.
    conffiles: &'a [&'a str],
}

/// The configuration of the service.
const CONFIGURATION: &str = "etc/vgpu/vgpu.toml";

/// The command and its service.
pub(super) fn host(dist: &Dist, folder: &Path) -> Result<PathBuf> {
    let deploy = workspace::root().join("deploy/host");
    pack(
        &Control {
            name: HOST,
            depends: "passwd",
            summary: "executor that gives guests a GPU for LLM inference",
            description: "The vgpu command, and a service that runs tensor work for virtual \
                          machines and\n containers that load libggml-vgpu.so. The service is not \
                          started by itself.",
            scripts: &["postinst", "prerm", "postrm"],
            conffiles: &[CONFIGURATION],
        },
        &[
            ("usr/bin/vgpu", &dist.vgpu, 0o755),
            (
                "usr/lib/systemd/system/vgpu.service",
                &deploy.join("vgpu.service"),
                0o644,
            ),
            (
                "usr/lib/systemd/system/vgpu@.service",
                &deploy.join("vgpu@.service"),
                0o644,
            ),
            (CONFIGURATION, &deploy.join("vgpu.toml"), 0o644),
            (
                "usr/share/doc/vgpu/examples/vgpu.toml",
                &deploy.join("vgpu.toml"),
                0o644,
            ),
            (
                "usr/lib/sysusers.d/vgpu.conf",
                &deploy.join("vgpu.sysusers"),
                0o644,
            ),
            (
                "usr/lib/tmpfiles.d/vgpu.conf",
                &deploy.join("vgpu.tmpfiles"),
                0o644,
            ),
        ],
        folder,
    )
}

/// The plugin, and what gives it access to a virtual machine's window. The command comes with the
/// other package: `vgpu install` is what a guest needs of it.
pub(super) fn guest(dist: &Dist, folder: &Path) -> Result<PathBuf> {
    let rules = workspace::root().join("deploy/guest/60-vgpu.rules");
    pack(
        &Control {
            name: GUEST,
            depends: &format!("vgpu (= {VERSION})"),
            summary: "GPU for LLM inference in a guest, as a ggml backend",
            description: "The plugin libggml-vgpu.so for Ollama, llama.cpp and other programs that \
                          compute with\n ggml. `vgpu install` gives it to Ollama.",
            scripts: &["postinst"],
            conffiles: &[],
        },
        &[
            ("usr/lib/vgpu/libggml-vgpu.so", &dist.plugin, 0o644),
            ("usr/lib/udev/rules.d/60-vgpu.rules", &rules, 0o644),
        ],
        folder,
    )
}

fn pack(control: &Control<'_>, entries: &[Entry<'_>], folder: &Path) -> Result<PathBuf> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("Debian has no name for {other} that we know"),
    };
    let Control {
        name,
        depends,
        summary,
        description,
        ..
    } = control;
    let scratch = Scratch::new()?;
    let root = scratch.path().join(name);
    let license = workspace::root().join("LICENSE");
    let copyright = format!("usr/share/doc/{name}/copyright");
    let entries = [entries, &[(copyright.as_str(), license.as_path(), 0o644)]].concat();
    lay_out(&root, &entries)?;

    let bytes: u64 = entries
        .iter()
        .filter_map(|e| e.1.metadata().ok())
        .map(|m| m.len())
        .sum();
    let text = format!(
        "Package: {name}\nVersion: {VERSION}\nArchitecture: {architecture}\n\
         Maintainer: ggml-vgpu <maintainers@ggml-vgpu.invalid>\nInstalled-Size: {}\n\
         Depends: libc6 (>= {}.{}), libgcc-s1, {depends}\nSection: utils\nPriority: optional\n\
         Description: {summary}\n {description}\n",
        bytes.div_ceil(1024),
        GLIBC.0,
        GLIBC.1,
    );
    let debian = root.join("DEBIAN");
    let deploy = workspace::root().join("deploy/debian");
    let scripts: Vec<_> = control
        .scripts
        .iter()
        .map(|script| deploy.join(format!("{name}.{script}")))
        .collect();
    let scripts: Vec<Entry<'_>> = control
        .scripts
        .iter()
        .zip(&scripts)
        .map(|(place, file)| (*place, file.as_path(), 0o755))
        .collect();
    lay_out(&debian, &scripts)?;
    fs::write(debian.join("control"), text).context("writing a control file")?;
    if !control.conffiles.is_empty() {
        let lines = control.conffiles.iter().map(|file| format!("/{file}\n"));
        let text: String = lines.collect();
        fs::write(debian.join("conffiles"), text).context("writing the list of conffiles")?;
    }
    let package = folder.join(format!("{name}_{VERSION}_{architecture}.deb"));
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.args(["--build", "--root-owner-group", "-Zxz"])
        .arg(&root)
        .arg(&package)
        .env("SOURCE_DATE_EPOCH", source_date_epoch()?.to_string());
    process::output(&mut dpkg).context("packing, which needs Debian's dpkg-deb")?;
    Ok(package)
}
