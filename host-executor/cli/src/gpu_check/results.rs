//! What the scripts of the bundle leave in a folder.
//!
//! `parts.tsv` says of each part its name, exit status and seconds. `check.json` is ours.
//! `bench-<engine>-<model>.json` is what llama-bench writes with `-o json`, `plan-<name>.json` what
//! `vgpu bench plan` does.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;

/// Tokens a second, by model and test, of each engine.
pub(super) type Speeds = BTreeMap<(String, String), BTreeMap<String, f64>>;

/// Our own engine, in names of files.
pub(super) const OURS: &str = "vgpu";

/// What `timeout` ends with when the time is up.
pub(super) const TIME_IS_UP: i64 = 124;

pub(super) fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// A part of a script.
#[derive(Serialize)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) status: i64,
    pub(super) seconds: f64,
}

pub(super) fn parts(text: &str) -> Vec<Part> {
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

/// The files of a kind, read as JSON, by what their names have between `kind` and `.json`. A
/// program that was ended in the middle has left half a file, which is none.
fn files(folder: &Path, kind: &str) -> anyhow::Result<BTreeMap<String, Value>> {
    let mut files = BTreeMap::new();
    let entries = fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))?;
    for entry in entries {
        let path = entry.context("listing results")?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let named = { name.strip_prefix(kind) }.and_then(|name| name.strip_suffix(".json"));
        let Some(named) = named else {
            continue;
        };
        if let Ok(file) = serde_json::from_str(&read(&path)?) {
            files.insert(named.to_owned(), file);
        }
    }
    Ok(files)
}

/// Reads what `vgpu bench plan` has left, by name.
pub(super) fn plans(folder: &Path) -> anyhow::Result<BTreeMap<String, Value>> {
    files(folder, "plan-")
}

/// Reads all benchmarks.
pub(super) fn speeds(folder: &Path) -> anyhow::Result<Speeds> {
    let mut speeds = Speeds::new();
    for (name, file) in files(folder, "bench-")? {
        let (Some((engine, model)), Value::Array(tests)) = (name.split_once('-'), file) else {
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
