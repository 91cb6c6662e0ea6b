//! Does nothing: cargo regards build dependencies only of a package with a build script.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
