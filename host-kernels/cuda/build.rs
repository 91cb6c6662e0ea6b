//! Build script of the CUDA engine: translates the parameter structures of kernels to Rust, and
//! lists precompiled machine code.

#[path = "../../vendor/libclang.rs"]
mod libclang;

use std::path::PathBuf;
use std::{env, fs};

use bindgen::callbacks::{DeriveInfo, ParseCallbacks};
use libclang::fail;

fn main() {
    params();
    cubins();
}

/// Translates `kernels/params.h` to Rust.
fn params() {
    println!("cargo::rerun-if-changed=kernels/params.h");
    libclang::load();
    let bindings = bindgen::Builder::default()
        .header("kernels/params.h")
        .clang_arg("-std=c11")
        .allowlist_file(".*params.h")
        .prepend_enum_name(false)
        .generate_comments(false)
        .derive_default(true)
        .parse_callbacks(Box::new(AsBytes))
        .layout_tests(true)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .generate()
        .unwrap_or_else(|error| fail(&format!("kernels/params.h: {error}")));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings
        .write_to_file(out.join("cuda_params.rs"))
        .unwrap_or_else(|error| fail(&format!("{}: {error}", out.display())));
}

/// Lists the files `<source>.<architecture>.cubin` of the folder `VGPU_CUBINS`. Without the
/// variable the list is empty, and kernels are compiled at run time.
fn cubins() {
    println!("cargo::rerun-if-env-changed=VGPU_CUBINS");
    let mut table = String::from("&[");
    if let Some(folder) = env::var_os("VGPU_CUBINS").map(PathBuf::from) {
        println!("cargo::rerun-if-changed={}", folder.display());
        let entries = fs::read_dir(&folder)
            .unwrap_or_else(|error| fail(&format!("VGPU_CUBINS={}: {error}", folder.display())));
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        // The order of a folder is another one on each machine.
        paths.sort_unstable();
        for path in paths {
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or("");
            let parts: Vec<&str> = name.split('.').collect();
            if let [source, arch, "cubin"] = parts[..] {
                table += &format!("({source:?}, {arch:?}, include_bytes!({path:?})),");
            }
        }
    }
    table += "]";
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(out.join("cubins.rs"), table)
        .unwrap_or_else(|error| fail(&format!("{}: {error}", out.display())));
}

/// Derives `zerocopy` traits, which fail to compile for a structure with padding.
#[derive(Debug)]
struct AsBytes;

impl ParseCallbacks for AsBytes {
    fn add_derives(&self, _: &DeriveInfo<'_>) -> Vec<String> {
        ["IntoBytes", "FromBytes", "KnownLayout", "Immutable"]
            .map(|name| format!("zerocopy::{name}"))
            .to_vec()
    }
}
