//! The checks of `vgpu doctor`, as text and as JSON.

use serde_json::{Value, json};

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Ok,
    Note,
    Fail,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Note => "note",
            Outcome::Fail => "FAIL",
        }
    }
}

/// One check.
#[derive(Debug)]
struct Check {
    part: &'static str,
    outcome: Outcome,
    what: String,
}

/// The checks so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    checks: Vec<Check>,
}

impl Report {
    fn add(&mut self, part: &'static str, outcome: Outcome, what: impl Into<String>) {
        self.checks.push(Check {
            part,
            outcome,
            what: what.into(),
        });
    }

    pub(super) fn ok(&mut self, part: &'static str, what: impl Into<String>) {
        self.add(part, Outcome::Ok, what);
    }

    pub(super) fn note(&mut self, part: &'static str, what: impl Into<String>) {
        self.add(part, Outcome::Note, what);
    }

    pub(super) fn fail(&mut self, part: &'static str, what: impl Into<String>) {
        self.add(part, Outcome::Fail, what);
    }

    pub(super) fn is_well(&self) -> bool {
        self.checks.iter().all(|c| c.outcome != Outcome::Fail)
    }

    pub(super) fn lines(&self) -> String {
        let mut text = String::new();
        for Check {
            part,
            outcome,
            what,
        } in &self.checks
        {
            text.push_str(&format!("{:<5} {part:<9} {what}\n", outcome.name()));
        }
        text.push_str(if self.is_well() {
            "\nThis machine can use a vGPU.\n"
        } else {
            "\nSome checks failed; see the lines with FAIL.\n"
        });
        text
    }

    pub(super) fn json(&self) -> Value {
        let checks: Vec<Value> = self
            .checks
            .iter()
            .map(|c| json!({"part": c.part, "outcome": c.outcome.name(), "what": c.what}))
            .collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ok": self.is_well(),
            "checks": checks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failed_check_fails_the_report() {
        let mut report = Report::default();
        report.ok("pci", "there");
        report.note("host", "slow");
        assert!(report.is_well());
        assert_eq!(report.json()["ok"], true);
        report.fail("link", "gone");
        assert!(!report.is_well());
        assert_eq!(report.json()["checks"][2]["outcome"], "FAIL");
        assert!(report.lines().contains("FAIL  link      gone\n"));
    }
}
