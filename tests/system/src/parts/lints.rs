//! Formatting, clippy and rustdoc without a warning.

use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::heading;
use xtask_common::workspace;

use crate::test_run::TestRun;

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
    for (name, arguments) in lints {
        tests.check(name, |tests, step| {
            packages::libclang(tests.cache)?;
            let mut cargo = workspace::cargo();
            cargo.args(arguments).env("RUSTDOCFLAGS", "-D warnings");
            process::run(&mut cargo, step, &tests.log(&name.replace(' ', "-")))?;
            Ok(String::new())
        });
    }
}
