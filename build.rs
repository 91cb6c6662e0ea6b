//! Build script of the plugin: bindings for ggml's C interface, the SONAME, the version stamp.

#[path = "vendor/libclang.rs"]
mod libclang;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use libclang::fail;

fn main() {
    // The file name under which the library is installed. cargo names the file `libggml_vgpu.so`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libggml-vgpu.so");
    // ggml unloads a plugin that has scored 0, while threads of the plugin may still be ending.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    stamp();
    bindings();
}

/// Translates `vendor/*.h` to Rust, with an assertion at compile time for every size and offset.
fn bindings() {
    println!("cargo::rerun-if-changed=vendor");
    libclang::load();
    let bindings = bindgen::Builder::default()
        .header("vendor/ggml-abi-v2.h")
        .header("vendor/ggml-abi-v3.h")
        .clang_arg("-std=c11")
        .allowlist_file(".*ggml-abi-.*")
        .prepend_enum_name(false)
        .generate_comments(false)
        .layout_tests(true)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .generate()
        .unwrap_or_else(|error| fail(&format!("vendor/: {error}")));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings
        .write_to_file(out.join("ggml_abi.rs"))
        .unwrap_or_else(|error| fail(&format!("{}: {error}", out.display())));
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
