//! A running executor and a running Ollama with models, for the checks of Ollama.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{Instance, Settings};
use xtask_common::dist::Dist;
use xtask_common::executor::{self, Executor};
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::test_run::TestRun;

/// The number of tokens of most responses.
pub(crate) const TOKENS: u64 = 16;
/// Two language models and one for embeddings.
pub(crate) const SMALL: &str = "small";
pub(crate) const LARGE: &str = "large";
pub(crate) const EMBEDDER: &str = "embedder";
/// The executor's memory limit: several times the memory of all models, and less than this machine
/// has, so that the memory of other programs does not affect the figures.
pub(crate) const MEMORY: &str = "3G";
/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What every check needs.
pub(crate) struct Needed {
    pub(crate) dist: Dist,
    pub(crate) ollama: PathBuf,
    pub(crate) llama: PathBuf,
    pub(crate) small: PathBuf,
    /// The model `small` in two files: a folder.
    pub(crate) split: PathBuf,
    pub(crate) large: PathBuf,
    pub(crate) embedder: PathBuf,
}

/// A running executor and a running Ollama that has all models.
pub(crate) struct Stage<'a> {
    pub(crate) needed: &'a Needed,
    pub(crate) executor: Option<Executor>,
    /// The logs of all executors, the current one last.
    pub(crate) executor_logs: Vec<PathBuf>,
    pub(crate) ollama: Instance,
    pub(crate) flash: bool,
    // Last, so that the folder is removed after its users.
    pub(crate) scratch: Scratch,
}

impl<'a> Stage<'a> {
    pub(crate) fn set(tests: &TestRun<'_>, needed: &'a Needed, flash: bool) -> Result<Stage<'a>> {
        let scratch = Scratch::new()?;
        let with = if flash { "with" } else { "without" };
        let log = tests.log(&format!("ollama-{with}-flash"));
        let mut stage = Stage {
            ollama: Instance::install(
                scratch.path(),
                &needed.ollama,
                &needed.llama,
                &needed.dist,
                &format!("unix:{}", scratch.path().join("vgpu.sock").display()),
            )?,
            needed,
            executor: None,
            executor_logs: Vec::new(),
            flash,
            scratch,
        };
        stage.start_executor(MEMORY)?;
        let mut settings = Settings::default();
        settings.environment.extend([
            ("OLLAMA_NUM_PARALLEL", "2".to_owned()),
            ("OLLAMA_MAX_LOADED_MODELS", "3".to_owned()),
        ]);
        if !flash {
            settings
                .environment
                .push(("OLLAMA_FLASH_ATTENTION", "0".to_owned()));
        }
        stage.ollama.start(&settings, &log)?;
        for (name, file) in [
            (SMALL, &needed.small),
            (LARGE, &needed.large),
            (EMBEDDER, &needed.embedder),
        ] {
            stage.ollama.create(name, file)?;
        }
        Ok(stage)
    }

    /// Starts an executor with this limit of its memory, the argument of `--memory`.
    pub(crate) fn start_executor(&mut self, memory: &str) -> Result<()> {
        let socket = self.scratch.path().join("vgpu.sock");
        let with = if self.flash { "with" } else { "without" };
        let name = format!(
            "ollama-{with}-flash-vgpu-serve-{}.log",
            self.executor_logs.len()
        );
        let log = workspace::reports().join(name);
        let executor = Executor::start_with(
            &self.needed.dist,
            &socket,
            workspace::cores(),
            &log,
            &[
                "--memory",
                memory,
                "--control",
                &self.control().to_string_lossy(),
            ],
        )?;
        self.executor_logs.push(log);
        self.executor = Some(executor);
        Ok(())
    }

    fn control(&self) -> PathBuf {
        self.scratch.path().join("control.sock")
    }

    /// The executor's status, as `vgpu ps --json` prints it.
    pub(crate) fn status(&self) -> Result<Value> {
        executor::status(&self.needed.dist.vgpu, &self.control())
    }

    pub(crate) fn kill_executor(&mut self) -> Result<()> {
        self.executor.take().context("no executor to kill")?.kill()
    }

    /// The text of a response computed on the GPU.
    pub(crate) fn text(&self, model: &str, prompt: &str) -> Result<String> {
        let answer = self
            .ollama
            .client()
            .generate(model, prompt, tokens(TOKENS), |_| true)?;
        ensure!(
            answer.tokens == TOKENS,
            "{} tokens instead of {TOKENS}",
            answer.tokens
        );
        Ok(answer.text)
    }

    /// Unloads a model and waits for the end of its session.
    pub(crate) fn unload(&self, model: &str) -> Result<()> {
        self.forget(model)?;
        wait("the session of an unloaded model does not end", || {
            Ok(self.open_sessions()? <= self.ollama.client().running()?.len())
        })
    }

    /// Unloads every model.
    pub(crate) fn unload_all(&self) -> Result<()> {
        for model in [SMALL, LARGE, EMBEDDER] {
            if self.is_loaded(model)? {
                self.unload(model)?;
            }
        }
        Ok(())
    }

    /// Total and free MiB of each device of an endpoint, from Ollama's probe.
    pub(crate) fn devices(&self, endpoint: &str) -> Result<Vec<(u64, u64)>> {
        let said = process::output(self.ollama.probe(endpoint).arg("--list-devices"))?;
        let figures = said.lines().filter_map(|line| {
            let (_, figures) = line.trim().strip_prefix("VGPU")?.rsplit_once('(')?;
            let (total, free) = figures.split_once(" MiB, ")?;
            Some((
                total.parse().ok()?,
                free.strip_suffix(" MiB free)")?.parse().ok()?,
            ))
        });
        Ok(figures.collect())
    }

    /// The free memory of the device in MiB, as Ollama sees it.
    pub(crate) fn free_memory(&self) -> Result<u64> {
        let endpoint = self.executor.as_ref().context("no executor")?.endpoint();
        let devices = self.devices(&endpoint)?;
        Ok(devices.first().context("no device")?.1)
    }

    /// The number of sessions of the current executor that have not ended.
    pub(crate) fn open_sessions(&self) -> Result<usize> {
        let log = self.executor_logs.last().context("no executor")?;
        let text = std::fs::read_to_string(log).context("reading the executor's log")?;
        let count = |words| text.matches(words).count();
        Ok(count("session opened").saturating_sub(count("session closed")))
    }

    /// Unloads a model without waiting for the end of a session.
    pub(crate) fn forget(&self, model: &str) -> Result<()> {
        self.ollama.client().unload(model)?;
        wait("a model is not unloaded", || Ok(!self.is_loaded(model)?))
    }

    pub(crate) fn is_loaded(&self, model: &str) -> Result<bool> {
        let running = self.ollama.client().running()?;
        Ok(running
            .iter()
            .any(|one| one["name"] == format!("{model}:latest")))
    }

    /// The number of graphs of each ended session, in the order of their ends.
    pub(crate) fn sessions(&self) -> Result<Vec<u64>> {
        self.closed("graphs_run")
    }

    /// A counter of each closed session.
    pub(crate) fn closed(&self, counter: &str) -> Result<Vec<u64>> {
        let mut counts = Vec::new();
        for log in &self.executor_logs {
            let text = std::fs::read_to_string(log).context("reading the executor's log")?;
            for line in text.lines().filter(|line| line.contains("session totals")) {
                let count = line.split(&format!(" {counter}=")).nth(1).and_then(|rest| {
                    rest.split(|c: char| !c.is_ascii_digit())
                        .next()?
                        .parse()
                        .ok()
                });
                counts.push(count.with_context(|| format!("no {counter} in {line}"))?);
            }
        }
        Ok(counts)
    }

    /// Checks that all loaded models are completely on the GPU. Returns their names.
    pub(crate) fn all_on_gpu(&self) -> Result<Vec<String>> {
        let running = self.ollama.client().running()?;
        running
            .iter()
            .map(|model| {
                let number = |name| model[name].as_u64().filter(|&bytes| bytes > 0);
                let (size, on_gpu) = (number("size"), number("size_vram"));
                ensure!(size.is_some() && size == on_gpu, "not 100 % GPU: {model}");
                Ok(model["name"]
                    .as_str()
                    .context("a model without a name")?
                    .to_owned())
            })
            .collect()
    }
}

pub(crate) fn tokens(count: u64) -> Value {
    json!({"num_predict": count})
}

/// The same, computed by ggml's CPU backend in the same Ollama.
pub(crate) fn on_cpu(mut options: Value) -> Value {
    options["num_gpu"] = json!(0);
    options
}

pub(crate) fn wait(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let started = Instant::now();
    while !done()? {
        ensure!(started.elapsed() < TIMEOUT, "{what} within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
