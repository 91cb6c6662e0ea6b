//! A generation in node-llama-cpp, through the plugin or without it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::compare::Choice;
use crate::dist::Dist;
use crate::node::Node;
use crate::process;
use crate::progress::Progress;
use crate::workspace;

/// Log-probabilities kept per token: enough to contain what the other side might choose.
const TOP: usize = 16;

/// What to generate.
#[derive(Clone, Debug)]
pub struct Task {
    /// The GGUF file.
    pub model: PathBuf,
    /// What the text starts with.
    pub prompt: String,
    /// Tokens to generate.
    pub tokens: usize,
    /// Threads of ggml's CPU backend.
    pub threads: usize,
}

/// Where the layers go.
#[derive(Clone, Debug)]
pub enum Backend<'a> {
    /// ggml's own CPU backend; the plugin is not loaded.
    Cpu,
    /// The plugin, and the executor it shall use.
    Plugin {
        /// The build whose plugin is loaded.
        dist: &'a Dist,
        /// The value of `VGPU_ENDPOINT`.
        endpoint: &'a str,
    },
}

/// What the program did.
#[derive(Debug)]
pub struct Generation {
    /// The generated text.
    pub text: String,
    /// The generated tokens, each with the probabilities of its rivals.
    pub choices: Vec<Choice>,
    /// Seconds until the model was loaded.
    pub load: f64,
    /// Seconds each token took; the first includes the prompt.
    pub seconds: Vec<f64>,
    /// llama.cpp's log, with the scheduler's decisions.
    pub log: String,
    /// Where the plugin wrote its counters.
    pub stats: PathBuf,
}

impl Generation {
    /// Decoded tokens per second.
    pub fn speed(&self) -> f64 {
        let decode = self.seconds.get(1..).unwrap_or_default();
        decode.len() as f64 / decode.iter().sum::<f64>()
    }
}

/// Gives a program the plugin, or takes away what the caller's environment may give it.
pub fn set_backend(command: &mut Command, backend: &Backend<'_>, stats: &Path) {
    for variable in ["GGML_BACKEND_PATH", "VGPU_ENDPOINT", "VGPU_STATS"] {
        command.env_remove(variable);
    }
    if let Backend::Plugin { dist, endpoint } = backend {
        command
            .env("GGML_BACKEND_PATH", &dist.plugin)
            .env("VGPU_ENDPOINT", endpoint)
            .env("VGPU_STATS", stats);
    }
}

/// Runs one generation and leaves its files in `dir`.
///
/// # Errors
/// If node fails, or its output is incomplete.
pub fn generate(
    node: &Node,
    task: &Task,
    backend: &Backend<'_>,
    progress: &Progress,
    dir: &Path,
) -> Result<Generation> {
    let side = match backend {
        Backend::Cpu => "cpu",
        Backend::Plugin { .. } => "vgpu",
    };
    let file = |extension: &str| dir.join(format!("{side}.{extension}"));
    let (out, log, stats) = (file("json"), file("log"), file("stats.json"));
    for stale in [&out, &stats] {
        let _ = std::fs::remove_file(stale); // most often there is none
    }
    let gpu_layers = match backend {
        Backend::Cpu => json!(0),
        Backend::Plugin { .. } => json!("max"),
    };
    let arguments = json!({
        "model": task.model,
        "prompt": task.prompt,
        "tokens": task.tokens,
        "gpuLayers": gpu_layers,
        "contextSize": (task.tokens + task.prompt.len() + 64).next_multiple_of(256),
        "threads": task.threads,
        "top": TOP,
        "out": out,
    });
    let mut command = node.script(&workspace::root().join("tests/programs/generate.mjs"));
    command
        .arg(arguments.to_string())
        .env("GGML_SCHED_DEBUG", "2");
    set_backend(&mut command, backend, &stats);
    process::run(&mut command, progress, &log)?;

    let text = std::fs::read_to_string(&out).context("reading what the program wrote")?;
    let result: Value = serde_json::from_str(&text).context("parsing what the program wrote")?;
    let array = |name: &str| {
        result
            .get(name)
            .and_then(Value::as_array)
            .context("a field is missing")
    };
    let seconds = array("seconds")?.iter().filter_map(Value::as_f64).collect();
    let choices = array("steps")?
        .iter()
        .map(Choice::parse)
        .collect::<Result<_>>()?;
    Ok(Generation {
        text: result["text"].as_str().context("no text")?.to_owned(),
        choices,
        load: result["loadSeconds"].as_f64().context("no loading time")?,
        seconds,
        log: String::from_utf8_lossy(&std::fs::read(&log).context("reading the log")?).into_owned(),
        stats,
    })
}
