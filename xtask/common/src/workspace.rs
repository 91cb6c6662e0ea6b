//! Paths of the checkout, and cargo as a command.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::compiler_cache;
use crate::version;

/// The root of the checkout this command was built from.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("xtask/common lies in the workspace")
}

/// The version of the checkout, with `dirty` at its end if files of it have been changed.
/// `VGPU_VERSION` in the environment comes first.
pub fn version() -> String {
    if let Some(given) = std::env::var("VGPU_VERSION")
        .ok()
        .filter(|given| !given.is_empty())
    {
        return given;
    }
    let version = version::version(root(), env!("CARGO_PKG_VERSION"));
    match (changed_files().is_empty(), version.contains('+')) {
        (true, _) => version,
        (false, true) => format!("{version}.dirty"),
        (false, false) => format!("{version}+dirty"),
    }
}

/// A version as packages of Debian and RPM have it: both order a tilde before the end of a version,
/// as Semantic Versioning orders a hyphen, which they keep for other purposes.
pub fn package_version(version: &str) -> String {
    version.replacen('-', "~", 1)
}

/// The files that differ from those of the commit, as git lists them.
pub fn changed_files() -> Vec<String> {
    let status = version::git(root(), &["status", "--porcelain", "--untracked-files=no"]);
    status
        .unwrap_or_default()
        .lines()
        .map(str::to_owned)
        .collect()
}

/// Where cargo compiles.
pub fn target() -> PathBuf {
    let named = std::env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty());
    named.map_or_else(|| root().join("target"), PathBuf::from)
}

/// Where [`crate::dist`] puts the files a user needs.
pub fn dist() -> PathBuf {
    root().join("target/dist")
}

/// Where the tests leave what they found and what the programs under test wrote.
pub fn reports() -> PathBuf {
    root().join("target/test-reports")
}

/// Cargo, the one that runs this program, in the root of the workspace.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    // `cargo run` describes the package of this program to it. Build scripts of dependencies watch
    // these variables (ring's: `CARGO_MANIFEST_DIR`): with those of this program, cargo would
    // compile all that depends on them again when another program of the workspace builds.
    for (name, _) in std::env::vars_os().filter(|(name, _)| describes_package(name)) {
        cargo.env_remove(name);
    }
    compiler_cache::use_in(&mut cargo);
    cargo
}

/// Whether a variable describes the package that cargo compiles or runs.
fn describes_package(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    [&b"CARGO_MANIFEST_"[..], b"CARGO_PKG_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_build_does_not_see_the_package_of_this_program() {
        // Cargo has set both for this test.
        for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME"] {
            assert!(std::env::var_os(name).is_some(), "{name}");
            let removed = (OsStr::new(name), None);
            assert!(
                cargo().get_envs().any(|changed| changed == removed),
                "{name}"
            );
        }
        assert!(!describes_package(OsStr::new("CARGO_HOME")));
    }
}
