//! Build script of the plugin: bindings for ggml's C interface, the SONAME, the version stamp.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

fn main() {
    // The name that a loader knows the plugin by; cargo itself spells the file `libggml_vgpu.so`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libggml-vgpu.so");
    stamp();
    bindings();
}

/// Translates `vendor/*.h` to Rust, with a compile-time assertion for every size and offset.
fn bindings() {
    println!("cargo::rerun-if-changed=vendor");
    load_libclang();
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

/// Loads libclang for bindgen, which would panic if it had to say that there is none.
///
/// `LIBCLANG_PATH` comes first, then the copy that xtask keeps in its cache, then the system's. They all
/// read the headers alike, so a change of these variables is no reason to run this script again.
fn load_libclang() {
    let cached = cache().map(|cache| cache.join("libclang"));
    if env::var_os("LIBCLANG_PATH").is_none()
        && let Some(cached) = cached.filter(|dir| dir.join("libclang.so").exists())
    {
        // SAFETY: this process has a single thread, so nobody reads the environment meanwhile.
        unsafe { env::set_var("LIBCLANG_PATH", cached) };
    }
    if let Err(reason) = clang_sys::load() {
        fail(&format!(
            "libclang, which reads the C headers in vendor/, was not found. \
             `cargo xtask build` installs it; or set LIBCLANG_PATH to the folder of a libclang.so.\n\
             {reason}"
        ));
    }
}

/// The folder for everything that xtask downloads.
fn cache() -> Option<PathBuf> {
    let folder = |name| {
        env::var_os(name)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    };
    folder("VGPU_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("ggml-vgpu")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/ggml-vgpu")))
}

/// Passes `git describe` on to the stamp that is compiled into the library.
fn stamp() {
    let describe = git(&["describe", "--always", "--tags"]);
    println!(
        "cargo::rustc-env=VGPU_GIT={}",
        describe.as_deref().unwrap_or("unknown")
    );
    // The reflog of HEAD grows with every commit and checkout. A path that does not exist would make
    // cargo run this script every time.
    if let Some(reflog) = git(&["rev-parse", "--git-path", "logs/HEAD"])
        && Path::new(&reflog).exists()
    {
        println!("cargo::rerun-if-changed={reflog}");
    }
}

/// What a git command prints, or `None` without git or outside our own repository.
fn git(arguments: &[&str]) -> Option<String> {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let output = Command::new("git")
        .args(arguments)
        // A copy of the sources inside somebody else's repository must not carry its name.
        .env(
            "GIT_CEILING_DIRECTORIES",
            package.parent().unwrap_or(&package),
        )
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn fail(reason: &str) -> ! {
    eprintln!("ggml-vgpu: {reason}");
    exit(1)
}
