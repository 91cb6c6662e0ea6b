//! Translates `vendor/*.h` to Rust, with an assertion at compile time for every size and offset.

mod libclang;

use std::env;
use std::path::PathBuf;

use libclang::fail;

fn main() {
    for name in ["common", "v2", "v3"] {
        println!("cargo::rerun-if-changed=ggml-abi-{name}.h");
    }
    println!("cargo::rerun-if-changed=libclang.rs");
    libclang::load();
    let bindings = bindgen::Builder::default()
        .header("ggml-abi-v2.h")
        .header("ggml-abi-v3.h")
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
