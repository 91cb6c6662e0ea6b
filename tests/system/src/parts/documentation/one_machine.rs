//! A laptop: a clone, a model, a llama-server.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use xtask_common::dist::Dist;
use xtask_common::llama;
use xtask_common::model::{self, FileType};

use super::guide::Guide;
use crate::container::{Container, TRIXIE, USER};
use crate::test_run::{PROMPT, TestRun};

/// Tokens of a generation.
pub(super) const TOKENS: u64 = 24;

/// The port of llama-server in all pages.
pub(super) const PORT: u16 = 8080;

/// Where llama-server is installed.
const LLAMA: &str = "/opt/llama";

pub(super) fn follow(tests: &TestRun<'_>, dist: &Dist) -> Result<String> {
    let mut guide = Guide::open("quickstart.md", &["One machine, your own model"])?;
    let log = |name: &str| tests.log(&format!("documentation-one-machine-{name}"));
    let container = Container::boot(tests.cache, &TRIXIE, &log("system"))?;
    install_llama_server(tests, &container)?;
    let clone = |file: &str| format!("/home/{USER}/ggml-vgpu/{file}");
    let model = model::ensure(tests.cache, &model::TINY, FileType::F16)?;
    container.copy(&model, &clone("model.gguf"))?;
    guide.leave_out("cargo xtask build", "the files are those of a build")?;
    container.copy(&dist.plugin, &clone("target/dist/libggml-vgpu.so"))?;
    container.copy(&dist.vgpu, &clone("target/dist/vgpu"))?;

    let on_cpu = "llama-server -m model.gguf -ngl 0";
    let reference = generate(&container, on_cpu, &log("cpu"))?;
    ensure!(!reference.is_empty(), "the CPU generates nothing");
    let on_device = |lines: &str, (name, endpoint): (&str, &str)| -> Result<()> {
        let text = generate(&container, lines, &log(name))?;
        ensure!(
            text == reference,
            "{text:?}, but {reference:?} from the CPU"
        );
        expect_device(&container, endpoint)
    };
    on_device(&guide.take("VGPU_ENDPOINT=inproc")?, ("inproc", "inproc"))?;
    let mut server = container.open(USER, &in_clone(&guide.take("vgpu serve")?), &log("serve"))?;
    server.wait_for("ready unix:/tmp/vgpu.sock")?;
    on_device(
        &guide.take("VGPU_ENDPOINT=unix:/tmp/vgpu.sock")?,
        ("unix", "unix:/tmp/vgpu.sock"),
    )?;
    let devices = container.run(USER, &in_clone(&guide.take("--list-devices")?))?;
    ensure!(devices.contains("VGPU0: "), "no VGPU0 in\n{devices}");
    server.close()?;
    guide.finish()?;
    Ok(format!("{} characters, twice", reference.len()))
}

fn in_clone(lines: &str) -> String {
    format!("cd ggml-vgpu\n{lines}")
}

/// Where the plugin writes what it has computed.
pub(super) const STATS: &str = "/tmp/vgpu-stats";

/// A program that has ended has computed on `VGPU0` over this link.
pub(super) fn expect_device(container: &Container, endpoint: &str) -> Result<()> {
    let stats = container.root(&format!("cat {STATS} && rm {STATS}"))?;
    let words = ["VGPU0", endpoint];
    ensure!(
        words.iter().all(|word| stats.contains(word)),
        "not {words:?} in the statistics: {stats}"
    );
    Ok(())
}

/// Installs a llama-server with loadable backends, as the page requires it.
pub(super) fn install_llama_server(tests: &TestRun<'_>, container: &Container) -> Result<()> {
    let bin = llama::build(tests.cache, llama::Stage::Tools)?;
    for entry in std::fs::read_dir(&bin).context("listing programs")? {
        let path = entry.context("listing programs")?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name == "llama-server" || name.contains(".so") {
            container.copy(&path, &format!("{LLAMA}/{name}"))?;
        }
    }
    container
        .root(&format!(
            "printf '#!/bin/sh\\nLD_LIBRARY_PATH={LLAMA} exec {LLAMA}/llama-server \"$@\"\\n' \
             > /usr/local/bin/llama-server && chmod 755 /usr/local/bin/llama-server"
        ))
        .map(drop)
}

/// Starts a llama-server with lines of shell, asks it for text, and ends it.
fn generate(container: &Container, lines: &str, log: &Path) -> Result<String> {
    let lines = format!("export VGPU_STATS={STATS}\n{}", in_clone(lines));
    let mut server = container.open(USER, &lines, log)?;
    server.wait_for("listening on http")?;
    let text = complete(container)?;
    server.close()?;
    Ok(text)
}

/// Asks the llama-server of the system for text.
pub(super) fn complete(container: &Container) -> Result<String> {
    let url = format!("http://127.0.0.1:{PORT}");
    complete_at(&url, |line| container.run(USER, line))
}

/// Asks the llama-server at `url` for text. `run` runs a line of shell.
pub(super) fn complete_at(url: &str, run: impl FnOnce(&str) -> Result<String>) -> Result<String> {
    let request = json!({
        "prompt": PROMPT, "n_predict": TOKENS, "temperature": 0.0, "ignore_eos": true,
    });
    let said = run(&format!(
        "curl --silent --show-error --fail {url}/completion --data '{request}'"
    ))?;
    let answer: Value = serde_json::from_str(&said)
        .with_context(|| format!("llama-server does not answer with JSON: {said}"))?;
    let text = answer["content"].as_str();
    text.map(str::to_owned)
        .with_context(|| format!("no text in {answer}"))
}
