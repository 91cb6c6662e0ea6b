//! `vgpu doctor`: checks each part from the machine to the executor, and says what to do.

mod devices;
mod host;
mod link;
mod plugin;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use serde_json::{Value, json};
use vgpu_transport::link::Endpoint;

/// Finds what keeps programs from using a vGPU: in a guest, in a container, or on the host.
///
/// Each line is `ok`, `note` (information) or `FAIL` with what to do. The exit status is 0 when
/// nothing failed, 1 otherwise.
#[derive(Parser)]
pub(crate) struct Args {
    /// The executor's address, as in VGPU_ENDPOINT. May be given several times. [default:
    /// VGPU_ENDPOINT, or the addresses that the plugin tries]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Vec<Endpoint>,

    /// The plugin. [default: GGML_BACKEND_PATH, or libggml-vgpu.so beside this program or in
    /// ../lib/vgpu]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,

    /// The ggml library that loads the plugin, libggml-base.so. [default: the one beside the
    /// plugin, if there is one]
    #[arg(long, value_name = "FILE")]
    ggml: Option<PathBuf>,

    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

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
struct Report {
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

    fn ok(&mut self, part: &'static str, what: impl Into<String>) {
        self.add(part, Outcome::Ok, what);
    }

    fn note(&mut self, part: &'static str, what: impl Into<String>) {
        self.add(part, Outcome::Note, what);
    }

    fn fail(&mut self, part: &'static str, what: impl Into<String>) {
        self.add(part, Outcome::Fail, what);
    }

    fn is_well(&self) -> bool {
        self.checks.iter().all(|c| c.outcome != Outcome::Fail)
    }

    fn lines(&self) -> String {
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

    fn json(&self) -> Value {
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

pub(crate) fn run(args: &Args) -> ExitCode {
    let mut report = Report::default();
    report.ok(
        "vgpu",
        format!(
            "version {}, protocol {}, graphs {}",
            env!("CARGO_PKG_VERSION"),
            vgpu_transport::wire::PROTOCOL_VERSION,
            vgpu_transport::ir::IR_VERSION
        ),
    );
    host::check(&mut report);
    devices::check(&mut report);
    link::check(&args.endpoint, &mut report);
    plugin::check(args.plugin.as_deref(), args.ggml.as_deref(), &mut report);
    if args.json {
        println!("{:#}", report.json());
    } else {
        print!("{}", report.lines());
    }
    if report.is_well() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_makes_the_whole_fail() {
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
