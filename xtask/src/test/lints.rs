//! Nothing that the compiler's tools would remark on.

use crate::packages;
use crate::process;
use crate::progress::heading;
use crate::workspace;

use super::Bench;

pub(super) fn run(bench: &mut Bench<'_>) {
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
    for (name, arguments) in lints {
        bench.check(name, |bench, step| {
            packages::libclang(bench.cache)?;
            let mut cargo = workspace::cargo();
            cargo.args(arguments).env("RUSTDOCFLAGS", "-D warnings");
            process::run(&mut cargo, step, &bench.log(&name.replace(' ', "-")))?;
            Ok(String::new())
        });
    }
}
