//! ggml's own `test-backend-ops`: every op it knows, on VGPU0 and on its reference CPU, compared.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::dist::Dist;
use crate::host::{self, Backend};
use crate::llama;
use crate::process;
use crate::progress::{Step, heading};
use crate::workspace;

use super::{Bench, Served};

/// Cases that must have run on VGPU0, not just been skipped there.
const MINIMUM: u64 = 6_000;
/// Leaves out three cases whose random weights take five minutes each to quantise.
const WITHOUT_GIANTS: &str = r"^(?!.*n_mats=128,n_used=4,b=0,m=4096)";

pub(super) fn run(bench: &mut Bench<'_>) {
    heading("test-backend-ops on VGPU0");
    let Some(dist) = bench.dist() else { return };
    let built = bench.prepare("build of test-backend-ops", |bench| {
        llama::build(bench.cache, llama::Stage::Ops)
    });
    let Some(bin) = built else { return };

    for link in ["unix", "inproc"] {
        bench.check(&format!("every op over {link}"), |bench, step| {
            let served = match link {
                "unix" => Some(Served::start(&dist, &bench.log("ops-vgpu-serve"))?),
                _ => None,
            };
            let endpoint = served
                .as_ref()
                .map_or_else(|| link.to_owned(), |s| s.executor.endpoint());
            let result = test(bench, &bin, &dist, &endpoint, link, step)?;
            if let Some(served) = served {
                served.executor.stop().context("stopping the executor")?;
            }
            Ok(result)
        });
    }
}

fn test(
    bench: &Bench<'_>,
    bin: &Path,
    dist: &Dist,
    endpoint: &str,
    link: &str,
    step: &Step,
) -> Result<String> {
    let name = format!("test-backend-ops-{link}");
    let mut program = Command::new(bin.join("test-backend-ops"));
    program.args(["test", "-b", "VGPU0", "-j", &workspace::cores().to_string()]);
    if !bench.options.full {
        program.args(["-p", WITHOUT_GIANTS]);
    }
    if let Some(ops) = &bench.options.ops {
        program.args(["-o", ops]);
    }
    let stats = workspace::reports().join(format!("{name}.stats.json"));
    host::set_backend(&mut program, &Backend::Plugin { dist, endpoint }, &stats);

    let mut report = Report::default();
    let log = bench.log(&name);
    let status = process::run_lines(&mut program, &log, |line| {
        if report.line(line) {
            step.note(&format!(
                "{}; {}",
                report.summary(),
                without_colours(line).trim()
            ));
        }
    })?;
    let path = workspace::reports().join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(&report.to_json()).context("writing a report")?;
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;

    if !report.failures.is_empty() {
        let shown: Vec<_> = report.failures.iter().take(10).cloned().collect();
        bail!(
            "{}; the first: \n    {}",
            report.summary(),
            shown.join("\n    ")
        );
    }
    ensure!(
        status.success(),
        "it ended with {status}\n{}",
        process::tail(&log)
    );
    let ran = report.totals().ok;
    ensure!(
        bench.options.ops.is_some() || ran > MINIMUM,
        "{}: more than {MINIMUM} must run on VGPU0",
        report.summary()
    );
    Ok(report.summary())
}

/// Cases by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    ok: u64,
    failed: u64,
    /// Denied by VGPU0: a host would run the op on its CPU.
    unsupported: u64,
    /// Denied by ggml's CPU backend alone: there is nothing to compare with.
    incomparable: u64,
}

#[derive(Debug, Default)]
struct Report {
    ops: BTreeMap<String, Counts>,
    failures: Vec<String>,
}

impl Report {
    /// Takes one line of the program's output; says whether it was a case.
    fn line(&mut self, line: &str) -> bool {
        let line = without_colours(line);
        let Some((case, outcome)) = case(&line) else {
            return false;
        };
        let op = case.split('(').next().unwrap_or_default();
        let counts = self.ops.entry(op.to_owned()).or_default();
        match outcome {
            Outcome::Ok => counts.ok += 1,
            Outcome::Fail => {
                counts.failed += 1;
                // With what was said before it on the same line: the error's size.
                self.failures.push(line.trim().to_owned());
            }
            Outcome::Unsupported(devices) if devices.contains("VGPU0") => counts.unsupported += 1,
            Outcome::Unsupported(_) => counts.incomparable += 1,
        }
        true
    }

    fn totals(&self) -> Counts {
        self.ops
            .values()
            .fold(Counts::default(), |sum, counts| Counts {
                ok: sum.ok + counts.ok,
                failed: sum.failed + counts.failed,
                unsupported: sum.unsupported + counts.unsupported,
                incomparable: sum.incomparable + counts.incomparable,
            })
    }

    fn summary(&self) -> String {
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

    fn to_json(&self) -> Value {
        let row = |c: &Counts| {
            json!({"ok": c.ok, "failed": c.failed, "unsupported": c.unsupported,
                   "incomparable": c.incomparable})
        };
        let ops: serde_json::Map<_, _> = self
            .ops
            .iter()
            .map(|(op, counts)| (op.clone(), row(counts)))
            .collect();
        json!({"totals": row(&self.totals()), "ops": ops, "failures": self.failures})
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome<'a> {
    Ok,
    Fail,
    Unsupported(&'a str),
}

/// Splits `  OP(parameters): outcome`. Messages about an error may stand before it on the line.
fn case(line: &str) -> Option<(&str, Outcome<'_>)> {
    let (head, outcome) = line.rsplit_once("): ")?;
    let outcome = match outcome.trim_end() {
        "OK" => Outcome::Ok,
        "FAIL" => Outcome::Fail,
        other => Outcome::Unsupported(other.strip_prefix("not supported [")?.strip_suffix(']')?),
    };
    // The case begins behind the last two spaces that an op's name follows.
    let starts = head
        .match_indices("  ")
        .map(|(at, _)| head[at..].trim_start());
    let name = |text: &str| -> bool {
        text.split_once('(').is_some_and(|(op, _)| {
            let upper = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
            !op.is_empty() && op.chars().all(upper)
        })
    };
    let case = starts.filter(|text| name(text)).last()?;
    Some((case, outcome))
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
    fn an_output_is_counted() {
        let mut report = Report::default();
        let cases = OUTPUT.lines().filter(|line| report.line(line)).count();
        assert_eq!(cases, 6);
        let expected = Counts {
            ok: 2,
            failed: 1,
            unsupported: 2,
            incomparable: 1,
        };
        assert_eq!(report.totals(), expected);
        assert_eq!(report.ops["ADD"].ok, 2);
        assert_eq!(report.ops["MUL_MAT"].unsupported, 2);
        assert_eq!(report.failures.len(), 1);
        assert!(
            report.failures[0].contains("ERR = 0.01"),
            "{}",
            report.failures[0]
        );
        assert_eq!(report.to_json()["ops"]["MUL_MAT"]["failed"], 1);
    }
}
