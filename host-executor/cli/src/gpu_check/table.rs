//! One table of all findings about a GPU, from the files in a folder.
//!
//! Missing findings are left out, so that a failed part does not hide the others.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::results::{OURS, Part, Speeds, TIME_IS_UP, parts, read, speeds};

/// Prints the table, and writes `summary.json` to the folder. Returns whether all parts succeeded.
pub(super) fn print(folder: &Path) -> anyhow::Result<bool> {
    let parts = parts(&read(&folder.join("parts.tsv"))?);
    let speeds = speeds(folder)?;
    let check: Value = match fs::read_to_string(folder.join("check.json")) {
        Ok(text) => serde_json::from_str(&text).context("check.json")?,
        Err(_) => Value::Null,
    };
    let ops = fs::read_to_string(folder.join("test-backend-ops.txt"));
    let ops = ops.ok().as_deref().map(Ops::of);
    print!("{}", text(&parts, &check, ops.as_ref(), &speeds));
    let summary = json!({
        "parts": parts,
        "tokens_per_second": speeds.iter().map(|((model, test), by_engine)| json!({
            "model": model, "test": test, "engines": by_engine,
        })).collect::<Vec<_>>(),
        "test_backend_ops": ops.as_ref().map(|ops| json!({
            "ok": ops.ok, "unsupported": ops.unsupported, "incomparable": ops.incomparable,
            "ended": ops.ended, "failed": ops.failed,
        })),
        "check": check,
    });
    let path = folder.join("summary.json");
    fs::write(&path, format!("{summary:#}\n")).with_context(|| path.display().to_string())?;
    Ok(parts.iter().all(|part| part.status == 0))
}

/// Results of ggml's test-backend-ops, as far as it ran.
#[derive(Debug, Default, PartialEq)]
struct Ops {
    ok: u64,
    /// Not supported by the vGPU.
    unsupported: u64,
    /// Not supported by ggml's CPU backend, so there is no reference.
    incomparable: u64,
    failed: Vec<String>,
    /// Whether the tests ran to the end.
    ended: bool,
}

impl Ops {
    /// Reads the output: one line per case, `  OP(parameters): ` and the outcome, with colour
    /// codes.
    fn of(said: &str) -> Ops {
        let mut ops = Ops::default();
        for line in said.lines() {
            let line = plain(line);
            ops.ended |= line.contains("tests passed");
            let Some((case, outcome)) = line.rsplit_once("): ") else {
                continue;
            };
            // The reason of a FAIL precedes it on the same line.
            match outcome.trim() {
                "OK" => ops.ok += 1,
                outcome if outcome.starts_with("not supported [VGPU") => ops.unsupported += 1,
                outcome if outcome.starts_with("not supported") => ops.incomparable += 1,
                outcome if outcome.ends_with("FAIL") => {
                    ops.failed.push(format!("{case}): {outcome}").trim().into())
                }
                _ => {}
            }
        }
        ops
    }
}

/// A line without colour codes.
fn plain(line: &str) -> String {
    let mut parts = line.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| {
        all + part.split_once('m').map_or("", |(_, rest)| rest)
    })
}

/// Most failed cases that are listed.
const MAX_SHOWN: usize = 10;

fn text(parts: &[Part], check: &Value, ops: Option<&Ops>, speeds: &Speeds) -> String {
    let mut out = String::new();
    let mut line = |text: String| writeln!(out, "{text}").expect("writing to a string");
    line(format!("{:32} {:>16} {:>9}", "part", "result", "seconds"));
    for part in parts {
        let result = match part.status {
            0 => "ok".into(),
            TIME_IS_UP => "time was up".into(),
            other => format!("FAILED ({other})"),
        };
        line(format!(
            "{:32} {result:>16} {:9.1}",
            part.name, part.seconds
        ));
    }
    compared(check, &mut line);
    if let Some(ops) = ops {
        let end = if ops.ended { "" } else { ", not to the end" };
        line(format!(
            "test-backend-ops: {} ok, {} failed, {} not supported, {} that ggml's CPU cannot \
             compute{end}",
            ops.ok,
            ops.failed.len(),
            ops.unsupported,
            ops.incomparable
        ));
        for case in ops.failed.iter().take(MAX_SHOWN) {
            line(format!("  FAILED {case}"));
        }
    }
    if speeds.is_empty() {
        return out;
    }
    line(format!(
        "{:28} {:>8} {:>12} {:>12} {:>7}",
        "model, tokens a second", "test", OURS, "ggml-cuda", "ratio"
    ));
    for ((model, test), by_engine) in speeds {
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
        let ours = by_engine.get(OURS).copied();
        let theirs = by_engine
            .iter()
            .find(|(engine, _)| *engine != OURS)
            .map(|(_, v)| *v);
        let ratio = ours
            .zip(theirs)
            .map_or("-".into(), |(a, b)| format!("{:.2}", a / b));
        line(format!(
            "{model:28} {test:>8} {:>12} {:>12} {ratio:>7}",
            number(ours),
            number(theirs)
        ));
    }
    out
}

/// The findings of `vgpu gpu-check`.
fn compared(check: &Value, line: &mut impl FnMut(String)) {
    let all = |key: &str| check[key].as_array().into_iter().flatten();
    let count = all("cases").count();
    if check["complete"] == false {
        line("vgpu gpu-check was interrupted; its findings until then:".to_owned());
    }
    if count > 0 {
        let right = { all("cases") }
            .filter(|case| case["right"] == true)
            .count();
        line(format!(
            "operators: {right} of {count} agree with the CPU engine"
        ));
    }
    for text in all("texts") {
        let number = |key: &str| text[key].as_u64();
        let name = text["name"].as_str().unwrap_or_default();
        line(match (number("same"), number("tokens")) {
            (Some(same), Some(tokens)) => {
                format!("text, {name}: {same} of {tokens} tokens are the CPU engine's")
            }
            _ => format!("text, {name}: FAILED: {}", text["failed"]),
        });
    }
    let copies = &check["copies"];
    let within = copies["within"].as_f64();
    let gigabytes = |rate: f64| format!("{:.1} GB/s", rate / 1e9);
    for (name, key) in [
        ("copies within the device", "within"),
        ("copies from the host", "upload"),
        ("copies to the host", "download"),
    ] {
        if let Some(rate) = copies[key].as_f64() {
            line(format!("{name:36} {:>16}", gigabytes(rate)));
        }
    }
    for rate in all("rates") {
        let name = rate["name"].as_str().unwrap_or_default();
        let value = match (rate["rate"].as_f64(), rate["unit"].as_str()) {
            (Some(value), Some("bytes/s")) => {
                let percent = within.map_or(0.0, |within| 100.0 * value / within);
                format!("{:>16} {percent:5.0} % of copies", gigabytes(value))
            }
            (Some(value), _) => format!("{:>9.2} TFLOPS", value / 1e12),
            _ => rate["failed"].as_str().unwrap_or("failed").to_owned(),
        };
        line(format!("{name:36} {value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_shows_available_values_when_others_are_missing() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        write(
            "parts.tsv",
            "check\t0\t1.5\nmodel-8b\t124\t60\nops\t1\t2\nnonsense\n",
        );
        write(
            "bench-vgpu-8b-q4_k_m.json",
            r#"[{"n_prompt": 512, "n_gen": 0, "avg_ts": 3000.0},
                {"n_prompt": 0, "n_gen": 128, "avg_ts": 300.0}]"#,
        );
        write(
            "bench-cuda-8b-q4_k_m.json",
            r#"[{"n_prompt": 0, "n_gen": 128, "avg_ts": 150.0}]"#,
        );
        write("bench-vgpu-half.json", r#"[{"n_prompt": 512"#);
        assert!(!print(folder).unwrap());
        let summary = read(&folder.join("summary.json")).unwrap();
        let summary: Value = serde_json::from_str(&summary).unwrap();
        assert_eq!(summary["parts"].as_array().unwrap().len(), 3);
        assert_eq!(summary["check"], Value::Null);
        let check = json!({
            "cases": [{"name": "ADD", "right": true}, {"name": "MUL", "right": false}],
            "texts": [{"name": "llama", "tokens": 48, "same": 47}],
            "copies": {"within": 4e12},
            "rates": [
                {"name": "MUL_MAT q4_K x 1", "unit": "bytes/s", "rate": 3e12},
                {"name": "cuBLASLt f16 x 128", "failed": "not there"},
            ],
            "complete": false,
        });
        let ops = Ops::of(
            "  ADD(type=f32): \u{1b}[1;32mOK\u{1b}[0m\n  MUL(type=f16,ne=[1,2]): [MUL] ERR = 0.5 \
             > 0.1 \u{1b}[1;31mFAIL\u{1b}[0m\n  \
             SUB(type=f32): not supported [VGPU0] \n  DUP(type=q1): not supported [CPU] \n  \
             DIV(type=f",
        );
        let expected = Ops {
            ok: 1,
            unsupported: 1,
            incomparable: 1,
            failed: vec!["MUL(type=f16,ne=[1,2]): [MUL] ERR = 0.5 > 0.1 FAIL".into()],
            ended: false,
        };
        assert_eq!(ops, expected);
        let table = text(
            &parts("check\t0\t1.5\nops\t1\t2\n"),
            &check,
            Some(&ops),
            &speeds(folder).unwrap(),
        );
        for wanted in [
            "ok",
            "FAILED (1)",
            "pp512",
            "tg128",
            "2.00",
            "3000.0",
            "1 of 2 agree",
            "47 of 48",
            "was interrupted",
            "75 % of copies",
            "not there",
            "1 ok, 1 failed, 1 not supported, 1 that ggml's CPU cannot compute, not to the end",
        ] {
            assert!(table.contains(wanted), "{wanted}: {table}");
        }
        assert!(!table.contains("half"), "{table}");
    }
}
