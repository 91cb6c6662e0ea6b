//! Ollama, the real program: built from its Go module, in the layout of a release.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask_common::cache::Cache;
use xtask_common::ggml_releases::{PROGRAMS, RELEASES, Release};
use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::Progress;
use xtask_common::workspace;

/// The Go module, verified with Go's checksum database when it is downloaded.
const MODULE: &str = "github.com/ollama/ollama";
/// The releases that the tests run, oldest first. `vgpu install` names them.
pub(crate) const VERSIONS: [&str; 2] = ["0.33.0", "0.34.4"];
/// The prefix of Ollama's installer.
pub(super) const PREFIX: &str = "usr/local";
/// The builds of llama.cpp that the releases of [`VERSIONS`] carry.
const LLAMA_CPP: [&str; 2] = ["b10488", "b11081"];

/// The build of llama.cpp that a release of [`VERSIONS`] carries, or one with the same operators.
/// `None` for another release.
pub(crate) fn llama_cpp(version: &str) -> Option<&'static Release> {
    let at = VERSIONS.iter().position(|known| *known == version)?;
    RELEASES
        .iter()
        .find(|release| release.is_named(LLAMA_CPP[at]))
}

/// The program `ollama` of a release, built once.
pub(crate) fn binary(cache: &Cache, version: &str) -> Result<PathBuf> {
    let name = format!("ollama-{version}");
    let folder = cache.folder(&name, |dir| {
        let go = packages::go(cache)?;
        let progress = Progress::new(&format!(
            "building {name} (about three minutes on two cores)"
        ));
        let mut install = Command::new(go);
        install
            .arg("install")
            .args(["-p", &workspace::cores().to_string(), "-ldflags"])
            .arg(format!("-s -w -X={MODULE}/version.Version={version}"))
            .arg(format!("{MODULE}@v{version}"))
            .env("GOBIN", dir)
            // The module cache has 600 MB and is not needed again. Without the flag it could not be
            // removed.
            .env("GOMODCACHE", dir.join("modules"))
            .env("GOCACHE", dir.join("objects"))
            .env("GOFLAGS", "-modcacherw -buildvcs=false")
            .env("GOTOOLCHAIN", "local")
            .env("CGO_ENABLED", "1");
        process::run(&mut install, &progress, &cache.log(&name))?;
        for rest in ["modules", "objects"] {
            fs::remove_dir_all(dir.join(rest)).context("removing the other downloads")?;
        }
        progress.done("");
        Ok(())
    })?;
    Ok(folder.join("ollama"))
}

/// Creates an installation below `root` like Ollama's installer: program, libraries, service.
///
/// `llama` is a build of llama.cpp. Ollama's releases contain one, but its Go module does not.
pub(crate) fn lay_out(root: &Path, ollama: &Path, llama: &Path) -> Result<()> {
    let (bin, lib) = (
        root.join(PREFIX).join("bin"),
        root.join(PREFIX).join("lib/ollama"),
    );
    let units = root.join("etc/systemd/system");
    for folder in [&bin, &lib, &units] {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    place(ollama, &bin.join("ollama"))?;
    for entry in fs::read_dir(llama).with_context(|| format!("listing {}", llama.display()))? {
        let entry = entry.context("listing a folder")?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_library = name.contains(".so") && !name.contains("rpc");
        if is_library || PROGRAMS.contains(&name.as_str()) {
            place(&entry.path(), &lib.join(name))?;
        }
    }
    let unit = format!("[Service]\nExecStart=/{PREFIX}/bin/ollama serve\n");
    fs::write(units.join("ollama.service"), unit).context("writing a unit")
}

/// Copies a file or a link.
fn place(from: &Path, to: &Path) -> Result<()> {
    let placing = || format!("placing {}", to.display());
    match fs::read_link(from) {
        Ok(target) => std::os::unix::fs::symlink(target, to).with_context(placing),
        // A hard link takes no space, but cannot cross file systems.
        Err(_) => fs::hard_link(from, to)
            .or_else(|_| fs::copy(from, to).map(drop))
            .with_context(placing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_release_has_a_build_of_llama_cpp() {
        let builds = VERSIONS.map(|version| llama_cpp(version).map(|release| release.build));
        assert_eq!(builds, [Some(10488), Some(11076)]);
        assert!(llama_cpp("0.32.0").is_none());
    }
}
