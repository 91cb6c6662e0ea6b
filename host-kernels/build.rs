//! Build script of the kernels: the parameters of CUDA kernels, translated to Rust.

#[path = "../vendor/libclang.rs"]
mod libclang;

use std::env;
use std::path::PathBuf;

use bindgen::callbacks::{DeriveInfo, ParseCallbacks};
use libclang::fail;

fn main() {
    println!("cargo::rerun-if-changed=cuda/params.h");
    libclang::load();
    let bindings = bindgen::Builder::default()
        .header("cuda/params.h")
        .clang_arg("-std=c11")
        .allowlist_file(".*params.h")
        .prepend_enum_name(false)
        .generate_comments(false)
        .derive_default(true)
        .parse_callbacks(Box::new(AsBytes))
        .layout_tests(true)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .generate()
        .unwrap_or_else(|error| fail(&format!("cuda/params.h: {error}")));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings
        .write_to_file(out.join("cuda_params.rs"))
        .unwrap_or_else(|error| fail(&format!("{}: {error}", out.display())));
}

/// Derives that structures are made of their fields' bytes alone.
#[derive(Debug)]
struct AsBytes;

impl ParseCallbacks for AsBytes {
    fn add_derives(&self, _: &DeriveInfo<'_>) -> Vec<String> {
        vec!["zerocopy::IntoBytes".into(), "zerocopy::Immutable".into()]
    }
}
