//! Formatting, clippy and rustdoc without a warning.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use vgpu_gguf::Rng;
use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::heading;

use crate::ops::draw;
use crate::test_run::TestRun;

/// The features of `vgpu-cpu` that builds for one processor have, and none. Of these, a default run
/// compiles one that the seed draws; every other build has all.
const INSTRUCTION_SETS: [&str; 4] = ["", "avx2", "avx-vnni", "avx512"];

/// The compiler that `cargo clippy` runs.
fn clippy_driver() -> Result<PathBuf> {
    let sysroot = process::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    Ok(PathBuf::from(sysroot.trim()).join("bin/clippy-driver"))
}

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("lints");
    let lints: [(&str, &[&str]); 3] = [
        ("cargo fmt", &["fmt", "--all", "--check"]),
        (
            "cargo clippy",
            &[
                "clippy",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ],
        ),
        (
            "cargo doc",
            &[
                "doc",
                "--workspace",
                "--no-deps",
                "--document-private-items",
            ],
        ),
    ];
    let mut instruction_sets = INSTRUCTION_SETS.to_vec();
    if !tests.options.full {
        draw(
            &mut instruction_sets,
            1,
            &mut Rng::new(tests.options.seed(), 5),
        );
    }
    for set in instruction_sets {
        let name = match set {
            "" => "the CPU engine without instruction sets".to_owned(),
            set => format!("the CPU engine with {set} only"),
        };
        tests.check(&name, |tests, step| {
            let mut cargo = tests.cargo();
            cargo.args(["clippy", "--package", "vgpu-cpu", "--no-default-features"]);
            cargo.args(["--features", set, "--", "-D", "warnings"]);
            process::run(&mut cargo, step, &tests.log("cargo-clippy-cpu"))?;
            Ok(String::new())
        });
    }
    tests.check("the features of the demo", |tests, step| {
        packages::libclang(tests.cache)?;
        let mut cargo = tests.cargo();
        cargo.args(["clippy", "--package", "ggml-vgpu", "--package", "vgpu"]);
        cargo.args(["--no-default-features", "--", "-D", "warnings"]);
        process::run(&mut cargo, step, &tests.log("cargo-clippy-demo"))?;
        Ok(String::new())
    });
    for (name, arguments) in lints {
        tests.check(name, |tests, step| {
            packages::libclang(tests.cache)?;
            let mut cargo = tests.cargo();
            cargo.args(arguments).env("RUSTDOCFLAGS", "-D warnings");
            if name == "cargo doc" {
                // What `cargo clippy` sets: the documentation needs each crate checked, as it was.
                cargo.env("RUSTC_WORKSPACE_WRAPPER", clippy_driver()?);
                cargo.env(
                    "CLIPPY_ARGS",
                    "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__",
                );
            }
            process::run(&mut cargo, step, &tests.log(&name.replace(' ', "-")))?;
            Ok(String::new())
        });
    }
}
