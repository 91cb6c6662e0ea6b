//! The results of a run of `test-backend-ops`, read from its output.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

/// The device under test.
pub(crate) const DEVICE: &str = "VGPU0";

/// Operators of which `test-backend-ops` compares indices that computed values select. Two values
/// whose difference is below the rounding error of one function are selected in either order, so a
/// correct result differs from the reference in a few of 100,000 rows of random values.
pub(super) const SELECTING: [&str; 1] = ["TOPK_MOE"];

/// Cases by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) ok: u64,
    pub(crate) failed: u64,
    /// Not supported by the device. A program would run the op on its CPU.
    pub(crate) unsupported: u64,
    /// Not supported by the reference only, so the result cannot be compared.
    pub(crate) incomparable: u64,
}

impl Counts {
    fn plus(self, other: &Counts) -> Counts {
        Counts {
            ok: self.ok + other.ok,
            failed: self.failed + other.failed,
            unsupported: self.unsupported + other.unsupported,
            incomparable: self.incomparable + other.incomparable,
        }
    }

    /// All cases.
    pub(crate) fn all(&self) -> u64 {
        self.ok + self.failed + self.unsupported + self.incomparable
    }
}

#[derive(Debug)]
struct Failure {
    case: String,
    /// What the program printed: the error, the case and the outcome.
    output: String,
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    cases: BTreeMap<String, Counts>,
    failures: Vec<Failure>,
    /// Failures that were near ties, with what shows it.
    near_ties: Vec<String>,
    /// The program's own counts: passed, run.
    own_count: Option<(u64, u64)>,
}

impl Report {
    /// Parses one line of the program's output. Returns the case if the line has one.
    pub(crate) fn line(&mut self, line: &str) -> Option<String> {
        let line = without_colours(line);
        if let Some(count) = own_count(&line) {
            self.own_count = Some(count);
        }
        let (case, outcome) = case(&line)?;
        let counts = self.cases.entry(case.to_owned()).or_default();
        match outcome {
            Outcome::Ok => counts.ok += 1,
            Outcome::Fail => {
                counts.failed += 1;
                self.failures.push(Failure {
                    case: case.to_owned(),
                    // Including the error before the case on the same line.
                    output: line.trim().to_owned(),
                });
            }
            Outcome::Unsupported(devices) if devices.contains(DEVICE) => counts.unsupported += 1,
            Outcome::Unsupported(_) => counts.incomparable += 1,
        }
        Some(case.to_owned())
    }

    /// Returns an error if a case failed, or if this report lacks a case of the program's own
    /// count.
    pub(super) fn check(&self) -> Result<()> {
        if !self.failures.is_empty() {
            let first = self.failures.iter().take(10);
            let shown: Vec<&str> = first.map(|failure| failure.output.as_str()).collect();
            bail!(
                "{}; the first: \n    {}",
                self.summary(),
                shown.join("\n    ")
            );
        }
        let (ok, own) = (self.totals().ok, self.own_count);
        ensure!(
            own == Some((ok, ok)),
            "{ok} cases passed; the program counts {own:?}"
        );
        Ok(())
    }

    /// The failed cases if each may be a near tie: of an operator of [`SELECTING`], and no case
    /// twice.
    pub(super) fn possible_near_ties(&self) -> Vec<String> {
        let cases = self.failures.iter().map(|failure| failure.case.clone());
        let mut cases: Vec<String> = cases.collect();
        cases.sort_unstable();
        let is_near_tie = |case: &String| {
            let op = case.split('(').next().unwrap_or_default();
            SELECTING.contains(&op)
        };
        let is_once = cases.windows(2).all(|pair| pair[0] != pair[1]);
        match is_once && cases.iter().all(is_near_tie) {
            true => cases,
            false => Vec::new(),
        }
    }

    /// Counts the failure of `case` as a pass, because of `repeats`.
    pub(super) fn accept_near_tie(&mut self, case: &str, repeats: &str) {
        let Some(at) = self.failures.iter().position(|failed| failed.case == case) else {
            return;
        };
        let Failure { case, output } = self.failures.remove(at);
        if let Some(counts) = self.cases.get_mut(&case) {
            counts.failed -= 1;
            counts.ok += 1;
        }
        if let Some((passed, _)) = &mut self.own_count {
            *passed += 1;
        }
        self.near_ties.push(format!("{output}; {repeats}"));
    }

    /// Accepts the near ties of the run with this output, which [`Report::to_json`] has kept in
    /// `kept`. A near tie of another run changes nothing: its error is another number.
    pub(super) fn accept_kept_near_ties(&mut self, kept: &Value) {
        let ties = kept["near_ties"].as_array().into_iter().flatten();
        for tie in ties.filter_map(Value::as_str) {
            let of_tie = self.failures.iter().find_map(|failed| {
                let repeats = tie.strip_prefix(&failed.output)?.strip_prefix("; ")?;
                Some((failed.case.clone(), repeats))
            });
            if let Some((case, repeats)) = of_tie {
                self.accept_near_tie(&case, repeats);
            }
        }
    }

    /// Failures that were accepted.
    pub(crate) fn near_ties(&self) -> &[String] {
        &self.near_ties
    }

    pub(crate) fn totals(&self) -> Counts {
        self.cases.values().fold(Counts::default(), Counts::plus)
    }

    /// Totals of each op.
    pub(crate) fn by_op(&self) -> BTreeMap<&str, Counts> {
        let mut ops: BTreeMap<&str, Counts> = BTreeMap::new();
        for (case, counts) in &self.cases {
            let op = case.split('(').next().unwrap_or_default();
            let sum = ops.entry(op).or_default();
            *sum = sum.plus(counts);
        }
        ops
    }

    /// The number of runs of each case that the device did not support, and that it did.
    pub(super) fn by_case(&self) -> BTreeMap<&str, (u64, u64)> {
        let split = |c: &Counts| (c.unsupported, c.all() - c.unsupported);
        self.cases
            .iter()
            .map(|(case, counts)| (case.as_str(), split(counts)))
            .collect()
    }

    /// The distinct cases that the device does not support.
    pub(crate) fn denied(&self) -> Vec<&str> {
        let denied = self.cases.iter().filter(|(_, c)| c.unsupported > 0);
        denied.map(|(case, _)| case.as_str()).collect()
    }

    /// The cases without a reference, with the number of each.
    pub(crate) fn incomparable(&self) -> impl Iterator<Item = (&str, u64)> {
        let found = self.cases.iter().filter(|(_, c)| c.incomparable > 0);
        found.map(|(case, counts)| (case.as_str(), counts.incomparable))
    }

    /// The names of the ops of these cases.
    pub(crate) fn incomparable_ops(&self) -> BTreeSet<&str> {
        self.by_op()
            .into_iter()
            .filter(|(_, counts)| counts.incomparable > 0)
            .map(|(op, _)| op)
            .collect()
    }

    /// The distinct cases that failed.
    pub(crate) fn failed(&self) -> BTreeSet<&str> {
        let failed = self.failures.iter();
        failed.map(|failure| failure.case.as_str()).collect()
    }

    /// The number of runs of the case that passed.
    pub(crate) fn passed(&self, case: &str) -> u64 {
        self.cases.get(case).map_or(0, |counts| counts.ok)
    }

    pub(crate) fn summary(&self) -> String {
        let Counts {
            ok,
            failed,
            unsupported,
            incomparable,
        } = self.totals();
        format!(
            "{ok} ok, {failed} failed, {unsupported} not supported, {incomparable} incomparable"
        )
    }

    pub(super) fn to_json(&self) -> Value {
        let row = |c: &Counts| {
            json!({"ok": c.ok, "failed": c.failed, "unsupported": c.unsupported,
                   "incomparable": c.incomparable})
        };
        let ops: serde_json::Map<_, _> = self
            .by_op()
            .iter()
            .map(|(&op, counts)| (op.to_owned(), row(counts)))
            .collect();
        let failures: Vec<&str> = { self.failures.iter() }
            .map(|failure| failure.output.as_str())
            .collect();
        json!({"totals": row(&self.totals()), "ops": ops, "failures": failures,
               "near_ties": self.near_ties})
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome<'a> {
    Ok,
    Fail,
    Unsupported(&'a str),
}

/// Splits `  OP(parameters): outcome`. Error messages may precede the case on the line.
fn case(line: &str) -> Option<(&str, Outcome<'_>)> {
    let (head, outcome) = line.rsplit_once("): ")?;
    let outcome = match outcome.trim_end() {
        "OK" => Outcome::Ok,
        "FAIL" => Outcome::Fail,
        other => Outcome::Unsupported(other.strip_prefix("not supported [")?.strip_suffix(']')?),
    };
    // The case begins after the last two spaces before an op's name.
    let starts = head
        .match_indices("  ")
        .map(|(at, _)| at + (head[at..].len() - head[at..].trim_start().len()));
    let name = |text: &str| -> bool {
        text.split_once('(').is_some_and(|(op, _)| {
            let upper = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
            !op.is_empty() && op.chars().all(upper)
        })
    };
    let start = starts.filter(|&at| name(&head[at..])).last()?;
    // With the closing bracket.
    Some((&line[start..head.len() + 1], outcome))
}

/// Reads `  17971/17971 tests passed`.
fn own_count(line: &str) -> Option<(u64, u64)> {
    let (passed, run) = line.trim().strip_suffix(" tests passed")?.split_once('/')?;
    Some((passed.parse().ok()?, run.parse().ok()?))
}

/// `text` without terminal escape sequences.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut parts = text.split("\u{1b}[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        plain.push_str(part.split_once('m').map_or("", |(_, rest)| rest));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
Testing 2 devices

Backend 1/2: VGPU0
  Device description: VGPU0
  ADD(type=f32,ne=[1,1,8,1],nr=[1,1,1,1],nf=1): \u{1b}[1;32mOK\u{1b}[0m
  ADD(type=f16,ne=[1,1,8,1],nr=[1,1,1,1],nf=1): \u{1b}[1;32mOK\u{1b}[0m
[MUL_MAT] ERR = 0.010000000 > 0.000500000   MUL_MAT(type_a=q4_0,m=16): \u{1b}[1;31mFAIL\u{1b}[0m
  MUL_MAT(type_a=iq1_s,m=16): not supported [VGPU0] \n  MUL_MAT(type_a=f32): not supported [VGPU0, CPU] 
  TIMESTEP_EMBEDDING(type=f32): not supported [CPU] 
  fa_vec (Q,NE) slice: 0 cases run, 0 failed
  2/3 tests passed

Failing tests:
  MUL_MAT(type_a=q4_0,m=16)
  Backend VGPU0: \u{1b}[1;31mFAIL\u{1b}[0m
";

    #[test]
    fn results_in_the_output_are_counted() {
        let mut report = Report::default();
        let cases: Vec<_> = OUTPUT
            .lines()
            .filter_map(|line| report.line(line))
            .collect();
        assert_eq!(cases.len(), 6);
        assert_eq!(cases[2], "MUL_MAT(type_a=q4_0,m=16)");
        let expected = Counts {
            ok: 2,
            failed: 1,
            unsupported: 2,
            incomparable: 1,
        };
        assert_eq!(report.totals(), expected);
        assert_eq!((expected.all(), report.own_count), (6, Some((2, 3))));
        assert_eq!(report.by_op()["ADD"].ok, 2);
        assert_eq!(report.by_op()["MUL_MAT"].unsupported, 2);
        assert_eq!(report.denied().len(), 2);
        let incomparable: Vec<_> = report.incomparable().collect();
        assert_eq!(incomparable, [("TIMESTEP_EMBEDDING(type=f32)", 1)]);
        let error = report.check().unwrap_err().to_string();
        assert!(error.contains("ERR = 0.01"), "{error}");
        assert_eq!(report.to_json()["ops"]["MUL_MAT"]["failed"], 1);
    }

    #[test]
    fn kept_near_ties_are_those_of_the_run_that_kept_them() {
        let run = |error: &str| {
            let mut report = Report::default();
            for line in [
                "  ADD(type=f32): OK",
                &format!("[VIEW] ERR = {error} > 0.0000001   TOPK_MOE(ne=[8,22]): FAIL"),
                "  1/2 tests passed",
            ] {
                report.line(line);
            }
            report
        };
        let mut report = run("0.0004");
        report.accept_near_tie("TOPK_MOE(ne=[8,22])", "1 of 50 repeats failed");
        let kept = report.to_json();
        let mut again = run("0.0004");
        assert!(again.check().is_err());
        again.accept_kept_near_ties(&kept);
        again.check().unwrap();
        assert_eq!(again.near_ties(), report.near_ties());
        assert_eq!(again.totals(), report.totals());
        // The program's output without the report of its run, and of another run.
        for (error, kept) in [("0.0004", json!({})), ("0.0005", kept)] {
            let mut other = run(error);
            other.accept_kept_near_ties(&kept);
            assert!(other.check().is_err(), "{error}");
        }
    }

    #[test]
    fn missing_test_case_is_detected() {
        let mut report = Report::default();
        report.line("  ADD(type=f32): OK");
        assert!(report.check().is_err(), "the program did not end its list");
        report.line("  2/2 tests passed");
        assert!(report.check().is_err(), "one of two was seen");
        report.line("  ADD(type=f16): OK");
        report.check().unwrap();
    }
}
