//! The checks of `vgpu doctor`, as text and as JSON.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Serialize, Deserialize)]
struct Check {
    part: Cow<'static, str>,
    outcome: Outcome,
    what: String,
    /// The command to type after a failure, with a word in capitals where it needs one of this
    /// machine; what else to do, where no command helps.
    next: Option<String>,
}

/// The checks so far.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Report {
    checks: Vec<Check>,
}

impl Report {
    fn add(&mut self, part: &'static str, outcome: Outcome, what: String, next: Option<String>) {
        self.checks.push(Check {
            part: part.into(),
            outcome,
            what,
            next,
        });
    }

    pub(super) fn ok(&mut self, part: &'static str, what: impl Into<String>) {
        self.add(part, Outcome::Ok, what.into(), None);
    }

    pub(super) fn note(&mut self, part: &'static str, what: impl Into<String>) {
        self.add(part, Outcome::Note, what.into(), None);
    }

    /// `next`: the command to type, or what else to do.
    pub(super) fn fail(
        &mut self,
        part: &'static str,
        what: impl Into<String>,
        next: impl Into<String>,
    ) {
        self.add(part, Outcome::Fail, what.into(), Some(next.into()));
    }

    /// Adds the checks of another process.
    pub(super) fn append(&mut self, mut other: Report) {
        self.checks.append(&mut other.checks);
    }

    /// Whether a check of this part has already said this, maybe with more behind it.
    pub(super) fn has(&self, part: &str, what: &str) -> bool {
        { self.checks.iter() }.any(|check| check.part == part && check.what.starts_with(what))
    }

    pub(super) fn is_well(&self) -> bool {
        self.checks.iter().all(|c| c.outcome != Outcome::Fail)
    }

    /// Makes the commands those of root on a machine that has no `sudo`.
    pub(super) fn leave_out_sudo(&mut self) {
        let all = self.checks.iter_mut();
        for next in all.filter_map(|check| check.next.as_mut()) {
            *next = without_sudo(next);
        }
    }

    /// What to do about the first failure. A later one is often its consequence.
    fn next(&self) -> Option<&str> {
        self.checks.iter().find_map(|check| check.next.as_deref())
    }

    pub(super) fn lines(&self) -> String {
        let mut text = String::new();
        for Check {
            part,
            outcome,
            what,
            ..
        } in &self.checks
        {
            text.push_str(&format!("{:<5} {part:<9} {what}\n", outcome.name()));
        }
        match self.next() {
            Some(next) => text.push_str(&format!(
                "\nSome checks failed; see the lines with FAIL.\nnext: {next}\n"
            )),
            None => text.push_str("\nThis machine can use a vGPU.\n"),
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        let checks: Vec<Value> = { self.checks.iter() }
            .map(|c| {
                let mut check =
                    json!({"part": c.part, "outcome": c.outcome.name(), "what": c.what});
                if let Some(next) = &c.next {
                    check["next"] = next.as_str().into();
                }
                check
            })
            .collect();
        json!({
            "version": crate::own_program::VERSION,
            "ok": self.is_well(),
            "checks": checks,
            "next": self.next(),
        })
    }
}

/// How what is to be done on another machine is named.
const ELSEWHERE: [&str; 2] = ["on the host", "on the executor's machine"];

/// The command for root. What is to be done on another machine stays as it is.
fn without_sudo(next: &str) -> String {
    if ELSEWHERE.iter().any(|place| next.contains(place)) {
        return next.to_owned();
    }
    next.replace("sudoedit ", "${EDITOR:-vi} ")
        .replace("sudo ", "")
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
        report.fail("link", "gone", "start it");
        report.fail("plugin", "no executor", "wait");
        assert!(!report.is_well());
        assert_eq!(report.json()["checks"][2]["outcome"], "FAIL");
        assert_eq!(report.json()["next"], "start it");
        assert!(report.lines().contains("FAIL  link      gone\n"));
        assert!(report.lines().ends_with("\nnext: start it\n"));
    }

    #[test]
    fn root_gets_commands_without_sudo() {
        for (next, of_root) in [
            (
                "sudo vgpu dump; sudo systemctl restart vgpu",
                "vgpu dump; systemctl restart vgpu",
            ),
            (
                "sudoedit /etc/vgpu/vgpu.toml",
                "${EDITOR:-vi} /etc/vgpu/vgpu.toml",
            ),
            (
                "on the host: sudo systemctl restart vgpu",
                "on the host: sudo systemctl restart vgpu",
            ),
            (
                "on the executor's machine: sudo vgpu dump",
                "on the executor's machine: sudo vgpu dump",
            ),
            (
                "sudo apt update && sudo apt install nvidia-driver",
                "apt update && apt install nvidia-driver",
            ),
            ("wait", "wait"),
        ] {
            let mut report = Report::default();
            report.fail("link", "gone", next);
            report.leave_out_sudo();
            assert_eq!(report.json()["next"], of_root);
        }
    }
}
