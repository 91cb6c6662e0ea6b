//! Build script of the plugin: the SONAME and the version stamp.

#[path = "xtask/common/src/version.rs"]
mod version;

use std::path::Path;

fn main() {
    // The file name under which the library is installed. cargo names the file `libggml_vgpu.so`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libggml-vgpu.so");
    // ggml unloads a plugin that has scored 0, while threads of the plugin may still be ending.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    version::stamp(Path::new("."));
}
