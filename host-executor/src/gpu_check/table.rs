//! One table of all that was found out about a GPU, from the files that the parts have left in a folder.
//!
//! `parts.tsv` says of each part its name, exit status and seconds. `check.json` is ours. `bench-<engine>-<model>.json` is
//! what llama-bench writes with `-o json`. What is missing is left out: a part that failed must not hide the others.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};

/// Tokens a second, by model and test, of each engine.
type Speeds = BTreeMap<(String, String), BTreeMap<String, f64>>;

/// Our own engine, in names of files.
const OURS: &str = "vgpu";

/// Prints the table, and writes everything to `summary.json` in the folder. Returns whether all parts went well.
pub(super) fn print(folder: &Path) -> anyhow::Result<bool> {
    let parts = parts(&read(&folder.join("parts.tsv"))?);
    let speeds = speeds(folder)?;
    let check: Value = match fs::read_to_string(folder.join("check.json")) {
        Ok(text) => serde_json::from_str(&text).context("check.json")?,
        Err(_) => Value::Null,
    };
    print!("{}", text(&parts, &speeds));
    let summary = json!({
        "parts": parts.iter().map(|part| json!({
            "name": part.name, "status": part.status, "seconds": part.seconds,
        })).collect::<Vec<_>>(),
        "tokens_per_second": speeds.iter().map(|((model, test), by_engine)| json!({
            "model": model, "test": test, "engines": by_engine,
        })).collect::<Vec<_>>(),
        "check": check,
    });
    let path = folder.join("summary.json");
    fs::write(&path, format!("{summary:#}\n")).with_context(|| path.display().to_string())?;
    Ok(parts.iter().all(|part| part.status == 0))
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// A part of the script.
struct Part {
    name: String,
    status: i64,
    seconds: f64,
}

fn parts(text: &str) -> Vec<Part> {
    let part = |line: &str| {
        let mut words = line.split('\t');
        Some(Part {
            name: words.next()?.to_owned(),
            status: words.next()?.parse().ok()?,
            seconds: words.next()?.parse().ok()?,
        })
    };
    text.lines().filter_map(part).collect()
}

/// What `timeout` ends with when the time is up.
const TIME_IS_UP: i64 = 124;

fn text(parts: &[Part], speeds: &Speeds) -> String {
    let mut out = String::new();
    let mut line = |text: String| writeln!(out, "{text}").expect("a string grows");
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
    if speeds.is_empty() {
        return out;
    }
    let mut line = |text: String| writeln!(out, "{text}").expect("a string grows");
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

fn speeds(folder: &Path) -> anyhow::Result<Speeds> {
    let mut speeds = Speeds::new();
    let entries = fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))?;
    for entry in entries {
        let path = entry.context("listing results")?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let named = name
            .strip_prefix("bench-")
            .and_then(|name| name.strip_suffix(".json"));
        let Some((engine, model)) = named.and_then(|name| name.split_once('-')) else {
            continue;
        };
        // A benchmark that was ended in the middle has left half a file.
        let Ok(Value::Array(tests)) = serde_json::from_str(&read(&path)?) else {
            continue;
        };
        for test in tests {
            let count = |key: &str| test[key].as_u64().unwrap_or(0);
            let name = match (count("n_prompt"), count("n_gen")) {
                (prompt, 0) => format!("pp{prompt}"),
                (0, gen_tokens) => format!("tg{gen_tokens}"),
                (prompt, gen_tokens) => format!("pp{prompt}+tg{gen_tokens}"),
            };
            let Some(speed) = test["avg_ts"].as_f64() else {
                continue;
            };
            let row = speeds.entry((model.to_owned(), name)).or_default();
            row.insert(engine.to_owned(), speed);
        }
    }
    Ok(speeds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_in_the_table_whatever_is_missing() {
        let name = format!("vgpu-gpu-check-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        write(
            "parts.tsv",
            "check\t0\t1.5\nmodel-8b\t124\t60\nops\t1\t2\nnonsense\n",
        );
        write(
            "bench-vgpu-8b-q4_k_m.json",
            r#"[{"n_prompt": 512, "n_gen": 0, "avg_ts": 3000.0}, {"n_prompt": 0, "n_gen": 128, "avg_ts": 300.0}]"#,
        );
        write(
            "bench-cuda-8b-q4_k_m.json",
            r#"[{"n_prompt": 0, "n_gen": 128, "avg_ts": 150.0}]"#,
        );
        write("bench-vgpu-half.json", r#"[{"n_prompt": 512"#);
        assert!(!print(&folder).unwrap());
        let summary = read(&folder.join("summary.json")).unwrap();
        let summary: Value = serde_json::from_str(&summary).unwrap();
        assert_eq!(summary["parts"].as_array().unwrap().len(), 3);
        assert_eq!(summary["check"], Value::Null);
        let table = text(
            &parts("check\t0\t1.5\nops\t1\t2\n"),
            &speeds(&folder).unwrap(),
        );
        for wanted in ["ok", "FAILED (1)", "pp512", "tg128", "2.00", "3000.0"] {
            assert!(table.contains(wanted), "{wanted}: {table}");
        }
        assert!(!table.contains("half"), "{table}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
