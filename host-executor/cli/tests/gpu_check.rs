//! `vgpu gpu-check`: a child process that dies or hangs costs one case, and the others run.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The processes that a process has started and that still run.
fn children_of(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .filter_map(|id| id.parse().ok())
        .collect()
}

fn cases(report: &Path) -> Vec<Value> {
    let text = fs::read_to_string(report).unwrap_or_default();
    let report: Value = serde_json::from_str(&text).unwrap_or_default();
    report["cases"].as_array().cloned().unwrap_or_default()
}

fn failed_cases(cases: &[Value]) -> Vec<&Value> {
    let failed = cases.iter().filter(|case| case["right"] == false);
    failed.collect()
}

/// Cases after a signal that show that the signal came between two cases, where it costs none.
const CASES_AFTER: usize = 8;

/// Waits until the report has more than `count` cases, and sends a signal to the child until the
/// report has `failures` failed cases.
fn disturb(check: &Child, report: &Path, count: usize, signal: Signal, failures: usize) {
    let begin = Instant::now();
    let mut count = count;
    loop {
        let cases = cases(report);
        if failed_cases(&cases).len() == failures {
            return;
        }
        if cases.len() > count {
            // A child that has just ended is not there. The next one is.
            if let Some(&child) = children_of(check.id()).first() {
                let child = Pid::from_raw(child as i32).expect("a process id");
                let _ = kill_process(child, signal); // it may have ended just now
            }
            count = cases.len() + CASES_AFTER;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{count} cases");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_child_that_dies_or_hangs_costs_one_case() {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("check.json");
    let check = |silence: &str| {
        Command::new(env!("CARGO_BIN_EXE_vgpu"))
            .args(["gpu-check", "--engine", "cpu", "--compare-only"])
            .args(["--tokens", "0", "--silence", silence, "--json"])
            .arg(&report)
            .stdout(Stdio::null())
            .spawn()
            .expect("vgpu gpu-check")
    };
    let mut whole = check("60");
    assert!(whole.wait().expect("it ends").success());
    let names_of =
        |cases: &[Value]| -> Vec<Value> { cases.iter().map(|case| case["name"].clone()).collect() };
    let names = names_of(&cases(&report));
    fs::remove_file(&report).expect("the report of the first run");

    // Longer than any case takes, also beside other work.
    let mut disturbed = check("5");
    disturb(&disturbed, &report, 20, Signal::KILL, 1);
    disturb(&disturbed, &report, 60, Signal::STOP, 2);
    let status = disturbed.wait().expect("it ends");
    assert!(!status.success());
    assert_eq!(children_of(disturbed.id()), [0; 0]);
    let all = cases(&report);
    let failed = failed_cases(&all);
    assert_eq!(failed.len(), 2, "{failed:?}");
    let reason = |case: &Value| case["failed"].as_str().unwrap_or_default().to_owned();
    assert!(reason(failed[0]).contains("signal: 9"), "{failed:?}");
    assert!(reason(failed[1]).contains("silent for"), "{failed:?}");
    assert_eq!(names_of(&all), names, "every case is there once, in order");
}

#[test]
fn a_selection_of_nothing_is_an_error() {
    let output = Command::new(env!("CARGO_BIN_EXE_vgpu"))
        .args(["gpu-check", "--engine", "cpu", "--compare-only"])
        .args(["--only", "no such case"])
        .output()
        .expect("vgpu gpu-check");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("no case, text or rate matches"), "{said}");
}
