//! node-llama-cpp: the quickest real program on a fresh machine, because npm carries it prebuilt
//! (ggml 0.25.1, backend API 2).

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::cache::Cache;
use crate::packages;
use crate::process;
use crate::progress::Progress;

const VERSION: &str = "3.22.1";

/// An installed node-llama-cpp.
#[derive(Debug)]
pub struct Node {
    /// Search path with `node` on it.
    path: OsString,
    /// Folder whose `node_modules` holds the package.
    modules: PathBuf,
}

impl Node {
    /// Installs Node.js and node-llama-cpp in the cache, unless they are there.
    ///
    /// # Errors
    /// If something cannot be fetched or installed.
    pub fn ensure(cache: &Cache) -> Result<Node> {
        let path = packages::node(cache)?;
        let machine = packages::machine()?;
        let name = format!("node-llama-cpp-{VERSION}");
        let modules = cache.folder(&name, |dir| {
            let progress = Progress::new(&format!("installing {name} and its prebuilt llama.cpp"));
            let mut npm = Command::new("npm");
            npm.env("PATH", &path)
                .current_dir(dir)
                .args(["install", "--prefix", ".", "--no-audit", "--no-fund"])
                // The install script of node-llama-cpp would look for something to compile; the
                // optional packages are the builds for other machines.
                .args(["--ignore-scripts", "--omit=optional"])
                .arg(format!("node-llama-cpp@{VERSION}"))
                .arg(format!("@node-llama-cpp/{machine}@{VERSION}"));
            process::run(&mut npm, &progress, &cache.log(&name))?;
            progress.done("");
            Ok(())
        })?;
        Ok(Node { path, modules })
    }

    /// The folder of the libraries that npm carries for release `version`, without the rest of it.
    ///
    /// # Errors
    /// If npm is missing or fails, or npm has no libraries for this machine.
    pub fn prebuilt(cache: &Cache, version: &str) -> Result<PathBuf> {
        let path = packages::node(cache)?;
        let machine = packages::machine()?;
        let package = format!("@node-llama-cpp/{machine}");
        let name = format!("node-llama-cpp-prebuilt-{version}");
        let folder = cache.folder(&name, |dir| {
            let progress = Progress::new(&format!("fetching {name}"));
            let mut npm = Command::new("npm");
            npm.env("PATH", &path)
                .current_dir(dir)
                .args([
                    "install",
                    "--prefix",
                    ".",
                    "--no-audit",
                    "--no-fund",
                    "--ignore-scripts",
                ])
                .arg(format!("{package}@{version}"));
            process::run(&mut npm, &progress, &cache.log(&name))?;
            progress.done("");
            Ok(())
        })?;
        Ok(folder
            .join("node_modules")
            .join(package)
            .join("bins")
            .join(machine))
    }

    /// A command that runs one of the scripts in `tests/programs`.
    pub fn script(&self, script: &Path) -> Command {
        let mut command = Command::new("node");
        command
            .env("PATH", &self.path)
            .env("NODE_LLAMA_CPP", &self.modules)
            .arg(script);
        command
    }
}
