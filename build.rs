//! Build script of the plugin: the SONAME and the version stamp.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    // The file name under which the library is installed. cargo names the file `libggml_vgpu.so`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libggml-vgpu.so");
    // ggml unloads a plugin that has scored 0, while threads of the plugin may still be ending.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    stamp();
}

/// Passes `git describe` to the version stamp in the library.
fn stamp() {
    let describe = git(&["describe", "--always", "--tags"]);
    println!(
        "cargo::rustc-env=VGPU_GIT={}",
        describe.as_deref().unwrap_or("unknown")
    );
    // The reflog of HEAD changes with every commit and checkout. A path that does not exist would
    // make cargo run this script every time.
    if let Some(reflog) = git(&["rev-parse", "--git-path", "logs/HEAD"])
        && Path::new(&reflog).exists()
    {
        println!("cargo::rerun-if-changed={reflog}");
    }
}

/// The output of a git command. `None` without git, and outside the repository of this package.
fn git(arguments: &[&str]) -> Option<String> {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let output = Command::new("git")
        .args(arguments)
        // The sources may be a copy inside another repository, whose version is not that of the
        // plugin.
        .env(
            "GIT_CEILING_DIRECTORIES",
            package.parent().unwrap_or(&package),
        )
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
