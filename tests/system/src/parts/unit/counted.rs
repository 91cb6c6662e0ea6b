//! What the test harness prints.

/// The number of output lines that are shown per failed test.
const SAID_LINES: usize = 20;

/// The output of the test harness.
#[derive(Debug, Default)]
pub(super) struct Counted {
    pub(super) passed: u64,
    pub(super) failed: Vec<String>,
    /// The first output lines of each failed test, after a line with its name.
    pub(super) said: Vec<String>,
    /// The number of lines of the current test that are still to be kept.
    wanted: usize,
}

impl Counted {
    /// Adds the results of other programs.
    pub(super) fn add(&mut self, mut other: Counted) {
        self.passed += other.passed;
        self.failed.append(&mut other.failed);
        self.said.append(&mut other.said);
    }

    /// Counts a line of the output.
    pub(super) fn line(&mut self, line: &str) {
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
