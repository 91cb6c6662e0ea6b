//! The files of the two packages, `vgpu` for hosts and `vgpu-guest` for machines that use one, in
//! any format.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::layout::{Entry, entry, files_below};
use xtask_common::dist::Dist;
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

/// The configuration of the service, which an update replaces only if the administrator has not
/// changed it.
pub(super) const CONFIGURATION: &str = "etc/vgpu/vgpu.toml";

/// A package in any format.
#[derive(Debug)]
pub(super) struct Package {
    pub(super) name: &'static str,
    pub(super) summary: &'static str,
    /// Lines of text.
    pub(super) description: &'static [&'static str],
    pub(super) entries: Vec<Entry>,
    /// Files of the administrator.
    pub(super) conffiles: &'static [&'static str],
}

/// The command and its service.
pub(super) fn host(dist: &Dist, generated: &Generated) -> Result<Package> {
    let deploy = workspace::root().join("deploy/host");
    let mut entries = vec![
        entry("usr/bin/vgpu", &dist.vgpu, 0o755),
        entry(CONFIGURATION, deploy.join("vgpu.toml"), 0o644),
    ];
    for (place, file) in [
        ("usr/lib/systemd/system/vgpu.service", "vgpu.service"),
        ("usr/lib/systemd/system/vgpu@.service", "vgpu@.service"),
        ("usr/share/doc/vgpu/examples/vgpu.toml", "vgpu.toml"),
        ("usr/lib/sysusers.d/vgpu.conf", "vgpu.sysusers"),
        ("usr/lib/tmpfiles.d/vgpu.conf", "vgpu.tmpfiles"),
    ] {
        entries.push(entry(place, deploy.join(file), 0o644));
    }
    entries.extend(generated.manuals.iter().cloned());
    entries.extend(documents("vgpu", generated));
    Ok(Package {
        name: "vgpu",
        summary: "executor that gives guests a GPU for LLM inference",
        description: &[
            "The vgpu command, and a service that runs tensor work for virtual machines and",
            "containers that load libggml-vgpu.so. The service is not started by itself.",
        ],
        entries,
        conffiles: &[CONFIGURATION],
    })
}

/// The plugin, and what gives it access to a virtual machine's window. The command comes with the
/// other package: `vgpu install` is what a guest needs of it.
pub(super) fn guest(dist: &Dist, generated: &Generated) -> Package {
    let rules = workspace::root().join("deploy/guest/60-vgpu.rules");
    let mut entries = vec![
        entry("usr/lib/vgpu/libggml-vgpu.so", &dist.plugin, 0o644),
        entry("usr/lib/udev/rules.d/60-vgpu.rules", rules, 0o644),
    ];
    entries.extend(documents("vgpu-guest", generated));
    Package {
        name: "vgpu-guest",
        summary: "GPU for LLM inference in a guest, as a ggml backend",
        description: &[
            "The plugin libggml-vgpu.so for Ollama, llama.cpp and other programs that compute with",
            "ggml. `vgpu install` gives it to Ollama.",
        ],
        entries,
        conffiles: &[],
    }
}

/// The licences, where Debian and others look for them.
fn documents(name: &str, generated: &Generated) -> [Entry; 2] {
    let license = workspace::root().join("LICENSE");
    let folder = format!("usr/share/doc/{name}");
    [
        entry(format!("{folder}/copyright"), license, 0o644),
        entry(
            format!("{folder}/third-party-licenses.txt"),
            &generated.licenses,
            0o644,
        ),
    ]
}

/// What is made for the packages besides the two files of the build.
#[derive(Debug)]
pub(super) struct Generated {
    /// Man pages and completions of shells.
    pub(super) manuals: Vec<Entry>,
    /// The licences of all crates in the two files.
    pub(super) licenses: PathBuf,
    // The files are in it.
    _scratch: Scratch,
}

impl Generated {
    /// Asks `vgpu` for its man pages and completions. `licenses`: the text of the licences.
    pub(super) fn new(vgpu: &Path, licenses: &str) -> Result<Generated> {
        let scratch = Scratch::new()?;
        let share = scratch.path().join("share");
        process::output(Command::new(vgpu).arg("generate").arg(&share))
            .context("asking vgpu for its man pages")?;
        for page in files_below(&share, "man")? {
            // Without name and time of the file.
            process::output(Command::new("gzip").arg("-9n").arg(share.join(page)))?;
        }
        let manuals = files_below(scratch.path(), "share")?;
        let manuals = { manuals.into_iter() }
            .map(|file| entry(format!("usr/{file}"), scratch.path().join(&file), 0o644))
            .collect();
        let text = scratch.path().join("licenses");
        fs::write(&text, licenses).context("writing the licences")?;
        Ok(Generated {
            manuals,
            licenses: text,
            _scratch: scratch,
        })
    }
}
