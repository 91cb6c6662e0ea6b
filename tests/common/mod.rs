//! What the plugin's tests share: the folder in which `cargo xtask setup` builds ggml.

use std::env;
use std::path::PathBuf;

/// A file or folder in the cache of `cargo xtask setup`.
pub(crate) fn cached(entry: &str) -> PathBuf {
    let folder = |variable| {
        env::var_os(variable)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    };
    let cache = folder("VGPU_CACHE")
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("ggml-vgpu")))
        .or_else(|| Some(folder("HOME")?.join(".cache/ggml-vgpu")))
        .expect("VGPU_CACHE, XDG_CACHE_HOME or HOME is set");
    let path = cache.join(entry);
    assert!(
        path.exists(),
        "{} is missing: `cargo xtask setup` makes it",
        path.display()
    );
    path
}
