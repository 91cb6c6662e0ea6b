//! The result files of the GPU check's scripts.
//!
//! `parts.tsv` has the name, exit status and seconds of each part. `check.json` is written by `vgpu
//! gpu-check`, `bench-<engine>-<model>.json` by llama-bench with `-o json`, `plan-<name>.json` by
//! `vgpu bench plan`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;

/// Tokens per second of each engine, by model and test.
pub(super) type Speeds = BTreeMap<(String, String), BTreeMap<String, f64>>;

/// The name of this project's engine in file names.
pub(super) const OURS: &str = "vgpu";

/// The exit status of `timeout` after a timeout.
pub(super) const TIME_IS_UP: i64 = 124;

pub(super) fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// A part of a script, with its outcome.
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

/// Reads the JSON files of a kind, by the part of the name between `kind` and `.json`. Ignores
/// invalid files: a program that was interrupted leaves an incomplete one.
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

/// Reads the files of `vgpu bench plan`, by name.
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
