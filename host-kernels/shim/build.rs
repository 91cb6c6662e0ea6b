//! Compiles the CUDA kernels for the CPU.

fn main() {
    for watched in ["../cuda", "shim.h", "shim.cpp", "kernels.cpp"] {
        println!("cargo::rerun-if-changed={watched}");
    }
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .define("VGPU_SHIM", None)
        .include("../cuda")
        .include(".")
        .files(["shim.cpp", "kernels.cpp"])
        .flag("-fno-strict-aliasing")
        .flag("-ffp-contract=off")
        // Kernels jump between stacks, which the checks of a hardened compiler take for an attack.
        .flag("-U_FORTIFY_SOURCE")
        .flag_if_supported("-fcf-protection=none")
        .opt_level(2)
        .link_lib_modifier("+whole-archive") // kernels register themselves
        .compile("vgpu_kernels_shim");
}
