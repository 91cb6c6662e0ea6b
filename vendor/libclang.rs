//! Finding libclang, for build scripts that run bindgen.

use std::env;
use std::path::PathBuf;
use std::process::exit;

/// Loads libclang for bindgen. Ends the build with a reason if there is none, where bindgen would
/// panic.
///
/// The first of these is used: `LIBCLANG_PATH`, the copy in xtask's cache, the copy of the system.
/// All of them read headers alike, so that the build script need not run again if one changes.
pub(crate) fn load() {
    let cached = cache().map(|cache| cache.join("libclang"));
    if env::var_os("LIBCLANG_PATH").is_none()
        && let Some(cached) = cached.filter(|dir| dir.join("libclang.so").exists())
    {
        // SAFETY: a build script has one thread, so that nobody reads the environment meanwhile.
        unsafe { env::set_var("LIBCLANG_PATH", cached) };
    }
    if let Err(reason) = clang_sys::load() {
        fail(&format!(
            "libclang, which reads C headers, was not found. `cargo xtask build` installs it. Or \
             set LIBCLANG_PATH to the folder of a libclang.so.\n{reason}"
        ));
    }
}

/// The folder of xtask's downloads.
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

/// Ends the build and prints the reason.
pub(crate) fn fail(reason: &str) -> ! {
    eprintln!("ggml-vgpu: {reason}");
    exit(1)
}
