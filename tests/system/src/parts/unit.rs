//! `cargo test` over the whole workspace.

use xtask_common::ggml_releases;
use xtask_common::llama;
use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};

use crate::test_run::TestRun;

/// The variable with which some tests take a sixth of their cases (host-kernels/check/tests).
const SAMPLE: &str = "VGPU_TEST_SAMPLE";
/// The variable with which tests fail if a ggml is missing (tests/abi.rs, host-kernels/ggml/tests).
const ALL_GGML: &str = "VGPU_TEST_ALL_GGML";

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("unit, property and ABI tests");
    // Some tests compare with the headers of every ggml, and with real ones: the oldest, the
    // newest, and that of most tests.
    let ready = tests.prepare("sources and builds of ggml", |tests| {
        packages::libclang(tests.cache)?;
        llama::newest_ops(tests.cache)?;
        ggml_releases::RELEASES[0].ops(tests.cache)?;
        ggml_releases::fetch_sources(tests.cache)?;
        llama::build(tests.cache, llama::Stage::Ops)
    });
    if ready.is_none() {
        return;
    }

    let mut counted = Counted::default();
    let seed = tests.options.seed();
    let progress = Progress::new("cargo test");
    let log = tests.log("cargo-test");
    let mut cargo = tests.cargo();
    cargo.args(["test", "--workspace", "--no-fail-fast"]);
    cargo.env(ALL_GGML, "1");
    let mut drawn = String::new();
    if !tests.options.full {
        cargo.env(SAMPLE, seed.to_string());
        drawn = format!("; a sixth of the operators' random cases; --seed {seed}");
    }
    let ended = process::run_lines(&mut cargo, &log, |line| {
        counted.line(line);
        progress.note(line);
    });
    match ended {
        Ok(status) if status.success() => {
            progress.done(&format!("{} tests{drawn}", counted.passed))
        }
        Ok(_) if !counted.failed.is_empty() => {
            let failed = counted.failed.len();
            let mut text = format!("{failed} tests, see {}", log.display());
            { counted.said.iter() }.for_each(|line| text.extend(["\n    ", line]));
            progress.failed(&text);
        }
        // cargo failed before the tests, or the tests did not complete.
        Ok(status) => {
            progress.failed(&format!(
                "cargo ended with {status}\n{}",
                process::tail(&log)
            ));
            counted.failed.push("cargo test".to_owned());
        }
        Err(error) => {
            progress.failed(&format!("{error:#}"));
            counted.failed.push("cargo test".to_owned());
        }
    }
    tests.passed += counted.passed;
    tests.failed.append(&mut counted.failed);
}

/// The number of output lines that are shown per failed test.
const SAID_LINES: usize = 20;

/// The output of the test harness.
#[derive(Debug, Default)]
struct Counted {
    passed: u64,
    failed: Vec<String>,
    /// The first output lines of each failed test, after a line with its name.
    said: Vec<String>,
    /// The number of lines of the current test that are still to be kept.
    wanted: usize,
}

impl Counted {
    fn line(&mut self, line: &str) {
        // "---- name stdout ----" precedes the output of each failed test, and "failures:" follows
        // the last.
        if line.starts_with("---- ") && line.ends_with(" ----") {
            self.wanted = SAID_LINES + 1;
        } else if line == "failures:" {
            self.wanted = 0;
        }
        if self.wanted > 0 && !line.is_empty() {
            self.wanted -= 1;
            self.said.push(line.to_owned());
        }
        let Some((name, outcome)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.rsplit_once(" ... "))
        else {
            return;
        };
        match outcome {
            "ok" => self.passed += 1,
            "FAILED" => self.failed.push(name.to_owned()),
            _ => {} // ignored, or compiled only
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_counted() {
        let mut counted = Counted::default();
        for line in [
            "running 3 tests",
            "test cache::tests::a ... ok",
            "test src/lib.rs - f (line 3) ... ok",
            "test src/lib.rs - g (line 9) - compile ... ok",
            "test gguf::tests::b ... FAILED",
            "failures:",
            "",
            "---- gguf::tests::b stdout ----",
            "",
            "thread 'gguf::tests::b' panicked at xtask/src/gguf.rs:7:9:",
            "assertion failed",
            "",
            "failures:",
            "    gguf::tests::b",
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            counted.line(line);
        }
        assert_eq!(counted.passed, 3);
        assert_eq!(counted.failed, ["gguf::tests::b"]);
        assert_eq!(
            counted.said,
            [
                "---- gguf::tests::b stdout ----",
                "thread 'gguf::tests::b' panicked at xtask/src/gguf.rs:7:9:",
                "assertion failed",
            ]
        );
    }

    #[test]
    fn first_lines_of_a_failed_test_are_kept() {
        let mut counted = Counted::default();
        for name in ["a", "b"] {
            counted.line(&format!("---- {name} stdout ----"));
            (0..500).for_each(|i| counted.line(&format!("line {i}")));
        }
        assert_eq!(counted.said.len(), 2 * (1 + SAID_LINES));
        assert_eq!(counted.said[SAID_LINES + 1], "---- b stdout ----");
    }
}
