//! Compiles the CUDA kernels for the CPU, one translation unit per file. Kernels register
//! themselves.

use std::fs;

fn main() {
    for watched in [
        "../cuda/kernels",
        "shim.h",
        "fibers.h",
        "shim.cpp",
        "sm90.cpp",
        "checks.cpp",
    ] {
        println!("cargo::rerun-if-changed={watched}");
    }
    let folder = fs::read_dir("../cuda/kernels").expect("the folder of the kernels");
    let mut kernels: Vec<_> = folder
        .map(|entry| entry.expect("an entry of the folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    kernels.sort();
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .define("VGPU_SHIM", None)
        .include("../cuda/kernels")
        .include(".")
        .flag("-xc++") // whatever its file is called
        .file("shim.cpp")
        .file("sm90.cpp")
        .file("checks.cpp")
        .files(kernels)
        .flag("-fno-strict-aliasing")
        .flag("-ffp-contract=off")
        // Kernels jump between stacks, which the checks of a hardened compiler take for an attack.
        .flag("-U_FORTIFY_SOURCE")
        .flag_if_supported("-fcf-protection=none")
        .opt_level(2)
        .link_lib_modifier("+whole-archive") // kernels register themselves
        .compile("vgpu_cuda_shim");
}
