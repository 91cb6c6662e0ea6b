//! What build scripts that run bindgen share: finding libclang.

use std::env;
use std::path::PathBuf;
use std::process::exit;

/// Loads libclang for bindgen, which would panic if it had to say that there is none.
///
/// `LIBCLANG_PATH` comes first, then the copy that xtask keeps in its cache, then the system's.
/// They all read headers alike, so a change of these variables is no reason to run this script
/// again.
pub(crate) fn load() {
    let cached = cache().map(|cache| cache.join("libclang"));
    if env::var_os("LIBCLANG_PATH").is_none()
        && let Some(cached) = cached.filter(|dir| dir.join("libclang.so").exists())
    {
        // SAFETY: this process has a single thread, so nobody reads the environment meanwhile.
        unsafe { env::set_var("LIBCLANG_PATH", cached) };
    }
    if let Err(reason) = clang_sys::load() {
        fail(&format!(
            "libclang, which reads C headers, was not found. \
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

/// Ends the build with a reason.
pub(crate) fn fail(reason: &str) -> ! {
    eprintln!("ggml-vgpu: {reason}");
    exit(1)
}
