//! Finds an Ollama installation, its ggml, and the service that runs it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use vgpu_elf::Library;

use super::stamp::{PLUGIN, Stamp, Unsupported, V3_SYMBOL};

/// Library folders of the usual Ollama packages.
const PLACES: [&str; 3] = [
    "usr/local/lib/ollama",
    "usr/lib/ollama",
    "opt/ollama/lib/ollama",
];
/// Folders of systemd units. Drop-ins of the administrator go to the first.
const UNITS: [&str; 4] = [
    "etc/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
];
const UNIT: &str = "ollama.service";
/// The folder of the plugin below Ollama's libraries.
pub(super) const FOLDER: &str = "vgpu";

/// An Ollama installation.
#[derive(Debug)]
pub(crate) struct Ollama {
    /// The folder of `llama-server` and ggml, without links.
    pub(crate) lib: PathBuf,
    /// The same as it was named or found. An update may make a link in it lead to another release.
    pub(crate) found: PathBuf,
}

/// The ggml of an Ollama installation.
#[derive(Debug)]
pub(crate) struct Ggml {
    pub(crate) file: PathBuf,
    pub(crate) version: String,
    pub(crate) api: u32,
}

impl Ollama {
    /// The installation at `named`, or in one of the usual folders below `root`.
    pub(crate) fn find(root: &Path, named: Option<&Path>) -> Result<Ollama> {
        let candidates = match named {
            Some(dir) => {
                let below = PLACES.iter().map(|place| dir.join(place));
                let mut all = vec![dir.to_owned(), dir.join("lib/ollama")];
                all.extend(below);
                all
            }
            None => {
                let below = PLACES.iter().map(|place| root.join(place));
                let own = if root == Path::new("/") {
                    of_this_user()
                } else {
                    Vec::new()
                };
                below.chain(own).collect()
            }
        };
        let Some(found) = candidates.iter().find(|dir| is_lib(dir)) else {
            let list: Vec<_> = candidates.iter().map(|c| c.display().to_string()).collect();
            bail!(
                "no Ollama found: none of {} holds libggml-base.so. Name its folder with --ollama \
                 DIR (the one with llama-server, or the prefix above it)",
                list.join(", ")
            );
        };
        let lib = found
            .canonicalize()
            .with_context(|| format!("resolving {}", found.display()))?;
        ensure!(
            lib.join("llama-server").exists(),
            "{} has no llama-server: this Ollama is older than 0.30, which loads no other \
             backends; update Ollama",
            lib.display()
        );
        let found = found.clone();
        Ok(Ollama { lib, found })
    }

    /// The subfolder for the plugin, by whose name Ollama is told to use it.
    pub(crate) fn backend_folder(&self) -> PathBuf {
        self.lib.join(FOLDER)
    }

    /// Ollama's ggml. Fails if the plugin does not work with it.
    pub(crate) fn check_ggml(&self, plugin: &Library, stamp: &Stamp) -> Result<Ggml> {
        let mut checked = None;
        // The links usually lead to one file. If there are several files, any of them may be
        // loaded, so all are checked.
        for file in self.bases()? {
            let ggml = Library::read(&file)?;
            let path = file.display();
            ensure!(
                ggml.machine() == plugin.machine(),
                "{path} is for {}, the plugin for {}",
                ggml.machine(),
                plugin.machine()
            );
            let version = ggml
                .returned_string("ggml_version")
                .context("the version of Ollama's ggml cannot be read")?;
            let has_v3_symbol = ggml.exports(V3_SYMBOL);
            let api = stamp.api_of(&version, has_v3_symbol).map_err(|reason| {
                let build = match reason {
                    Unsupported::TooNewBuild => {
                        format!(" of a later build, without `{V3_SYMBOL}`")
                    }
                    _ => String::new(),
                };
                let remedy = reason.remedy().map(|remedy| format!(": {remedy}"));
                anyhow!(
                    "{path} is ggml {version}{build}; {stamp} works with {}{}",
                    stamp.ggml,
                    remedy.unwrap_or_default()
                )
            })?;
            let missing = stamp.missing_from(&ggml);
            ensure!(
                missing.is_empty(),
                "{path} (ggml {version}) lacks {}, which the plugin calls",
                missing.join(", ")
            );
            checked = Some(Ggml { file, version, api });
        }
        checked.with_context(|| format!("{} holds no libggml-base.so", self.lib.display()))
    }

    /// The files behind all links named libggml-base.
    fn bases(&self) -> Result<BTreeSet<PathBuf>> {
        let mut files = BTreeSet::new();
        for name in names(&self.lib)?
            .iter()
            .filter(|name| name.starts_with("libggml-base.so"))
        {
            let path = self.lib.join(name);
            let file = path
                .canonicalize()
                .with_context(|| format!("{} is a broken link", path.display()))?;
            files.insert(file);
        }
        Ok(files)
    }

    /// Other libraries in the plugin's folder: Ollama loads the first one by name.
    pub(crate) fn foreign_libraries(&self) -> Result<Vec<PathBuf>> {
        let folder = self.backend_folder();
        if !folder.exists() {
            return Ok(Vec::new());
        }
        let names = names(&folder)?;
        let libraries = names
            .iter()
            .filter(|name| name.contains("ggml-") && *name != PLUGIN);
        Ok(libraries.map(|name| folder.join(name)).collect())
    }

    /// The folder for drop-ins of the service that runs this Ollama, if a service does.
    pub(crate) fn drop_ins(&self, root: &Path) -> Option<PathBuf> {
        let unit = UNITS
            .iter()
            .map(|dir| root.join(dir).join(UNIT))
            .find(|unit| unit.exists())?;
        let text = fs::read_to_string(unit).ok()?;
        let program = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("ExecStart="))?;
        // systemd allows prefixes, as in `-/usr/bin/ollama serve`.
        let program = program.trim_start_matches(['-', '@', ':', '+', '!', '|']);
        let program = program.split_whitespace().next()?.trim_matches('"');
        let program = root
            .join(program.trim_start_matches('/'))
            .canonicalize()
            .ok()?;
        let lib = program
            .parent()?
            .join("../lib/ollama")
            .canonicalize()
            .ok()?;
        (lib == self.lib).then(|| root.join(UNITS[0]).join(format!("{UNIT}.d")))
    }
}

/// The folder beside the `ollama` on the search path, and the one in the user's own prefix.
fn of_this_user() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = std::env::split_paths(&path)
        .map(|dir| dir.join("ollama"))
        .find_map(|program| program.canonicalize().ok());
    let beside = program.and_then(|program| Some(program.parent()?.parent()?.join("lib/ollama")));
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/lib/ollama"));
    beside.into_iter().chain(home).collect()
}

fn is_lib(dir: &Path) -> bool {
    names(dir).is_ok_and(|names| names.iter().any(|name| name.starts_with("libggml-base.so")))
}

/// The names of the files in a folder, sorted.
fn names(dir: &Path) -> Result<Vec<String>> {
    let reading = || format!("reading the folder {}", dir.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).with_context(reading)? {
        let name = entry.with_context(reading)?.file_name();
        names.push(name.to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}
