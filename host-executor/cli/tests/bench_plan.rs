//! `vgpu bench plan`: the lower bound of a step, its measured time, and the comparison with earlier
//! figures.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::process::Output;

use serde_json::Value;
use served::{Scratch, vgpu};

fn plan(args: &[&str]) -> Output {
    let args: Vec<&str> = ["bench", "plan"].iter().chain(args).copied().collect();
    vgpu(&args).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

const RATES: [&str; 4] = ["--bandwidth", "4800", "--tflops", "989"];

#[test]
fn lower_bound_needs_neither_engine_nor_memory() {
    let scratch = Scratch::new("bench-plan-floor");
    let json = scratch.path().join("floor.json");
    let file = json.to_str().expect("a path of text");
    let mut args = vec!["--floor-only", "--model", "8b", "--json", file];
    args.extend(RATES);
    let output = plan(&args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let figures: Value = serde_json::from_slice(&fs::read(&json).expect("figures")).expect("JSON");
    // 7.5e9 parameters in products, of 4.85 bits on average, and the operations of the products.
    let memory = figures["total"]["memory"].as_u64().expect("bytes");
    assert!((4_550_000_000..4_750_000_000).contains(&memory), "{memory}");
    let operations = figures["total"]["operations"].as_u64().expect("operations");
    assert!(
        (15_000_000_000..15_300_000_000).contains(&operations),
        "{operations}"
    );
    let floor = figures["total"]["floor"].as_f64().expect("seconds");
    assert!((floor - memory as f64 / 4.8e12).abs() < 1e-9, "{floor}");
    assert_eq!(figures["seconds"], Value::Null);
    assert!(text(&output.stdout).contains("MUL_MAT q6_K"));
}

#[test]
fn a_step_is_measured_and_compared() {
    let scratch = Scratch::new("bench-plan-step");
    let json = scratch.path().join("step.json");
    let file = json.to_str().expect("a path of text");
    let args = [
        "--engine",
        "cpu",
        "--model",
        "256m",
        "--weights",
        "q4_0",
        "--repeats",
        "1",
        "--bandwidth",
        "20",
        "--tflops",
        "0.2",
    ];
    let output = plan(&[&args[..], &["--timeline", "--json", file]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut figures: Value =
        serde_json::from_slice(&fs::read(&json).expect("figures")).expect("JSON");
    let parts = figures["by_op"].as_array().expect("parts");
    let nodes =
        |parts: &[Value]| -> u64 { parts.iter().filter_map(|part| part["nodes"].as_u64()).sum() };
    assert_eq!(
        nodes(parts),
        figures["nodes"].as_u64().expect("nodes"),
        "each node is in one part"
    );
    assert!(
        parts
            .iter()
            .all(|part| part["seconds"].as_f64().is_some_and(|s| s > 0.0))
    );
    let lines = text(&output.stdout)
        .lines()
        .filter(|line| line.ends_with("MUL_MAT q4_0"))
        .count();
    assert!(
        lines >= 16,
        "the timeline has the products of each layer: {lines}"
    );

    // Compared with a step of an hour, this one is not slower; compared with one of no time, it is.
    for (before, is_success) in [(3600.0, true), (1e-9, false)] {
        figures["seconds"] = before.into();
        fs::write(&json, figures.to_string()).expect("written");
        let output = plan(&[&args[..], &["--against", file]].concat());
        assert_eq!(
            output.status.success(),
            is_success,
            "{}",
            text(&output.stdout)
        );
    }
    let output = plan(&[&args[..], &["--past", "300", "--against", file]].concat());
    assert!(
        text(&output.stderr).contains("are compared with"),
        "other steps are not compared"
    );
}

#[test]
fn impossible_plans_are_reported() {
    for (args, words) in [
        (vec!["--weights", "q9_9"], "not a type of ggml"),
        (
            vec!["--model", "gpt-oss-20b", "--weights", "q4_K"],
            "not whole blocks",
        ),
        (
            vec!["--engine", "cpu", "--model", "70b", "--past", "1000000"],
            "MiB free",
        ),
    ] {
        let output = plan(&[&args[..], &RATES].concat());
        assert!(!output.status.success());
        let said = text(&output.stderr);
        assert!(said.contains(words), "{said}");
    }
}
