//! A `llama-server` and the requests of the tests.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use xtask_common::compare::Choice;
use xtask_common::node_llama::{self, Backend};
use xtask_common::process::{Daemon, free_port};
use xtask_common::workspace;

/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The number of log-probabilities per token.
const TOP: u32 = 16;
/// The context size in tokens.
const CONTEXT: u32 = 2048;

/// A running server; killed on drop.
#[derive(Debug)]
pub(crate) struct Server {
    daemon: Daemon,
    address: String,
    agent: ureq::Agent,
}

impl Server {
    /// Starts a server with `model`, all layers on the device of `backend`.
    pub(crate) fn start(
        bin: &Path,
        model: &Path,
        backend: &Backend<'_>,
        stats: &Path,
        log: &Path,
    ) -> Result<Server> {
        let _ = std::fs::remove_file(stats); // an old one must not be taken for its own
        let port = free_port()?;
        let mut command = Command::new(bin.join("llama-server"));
        command
            .arg("--model")
            .arg(model)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["--ctx-size", &CONTEXT.to_string(), "--parallel", "1"])
            .args(["--threads", &workspace::cores().to_string()])
            .args(["--gpu-layers", "99", "--no-webui"])
            // The scheduler's decisions are debug messages.
            .args(["--log-verbosity", "10", "--log-colors", "off"])
            .env("GGML_SCHED_DEBUG", "2");
        node_llama::set_backend(&mut command, backend, stats);
        Server::of(Daemon::start(&mut command, log)?, port)
    }

    /// The server that `daemon` runs on a port of this machine. Waits until it is healthy.
    pub(crate) fn of(daemon: Daemon, port: u16) -> Result<Server> {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // llama-server may close a connection at any time, so each request gets its own.
            .max_idle_connections(0)
            .build()
            .into();
        let mut server = Server {
            daemon,
            address: format!("http://127.0.0.1:{port}"),
            agent,
        };
        let (agent, health) = (server.agent.clone(), format!("{}/health", server.address));
        server.daemon.wait_until(TIMEOUT, |_| {
            agent
                .get(&health)
                .call()
                .is_ok_and(|response| response.status() == 200)
        })?;
        Ok(server)
    }

    /// Whether the server reports that it is healthy.
    pub(crate) fn is_healthy(&self) -> bool {
        let response = self.agent.get(&format!("{}/health", self.address)).call();
        response.is_ok_and(|response| response.status() == 200)
    }

    /// Continues `prompt` greedily by `tokens` tokens.
    pub(crate) fn complete(&self, prompt: &str, tokens: usize) -> Result<Vec<Choice>> {
        let mut response = self
            .agent
            .post(&format!("{}/completion", self.address))
            .header("Content-Type", "application/json")
            .send(request(prompt, tokens, false).to_string())
            .context("asking llama-server")?;
        let text = response
            .body_mut()
            .read_to_string()
            .context("reading its answer")?;
        ensure!(
            response.status() == 200,
            "llama-server answered {}: {text}",
            response.status()
        );
        let answer: Value = serde_json::from_str(&text).context("parsing its answer")?;
        let choices = answer["completion_probabilities"]
            .as_array()
            .context("no probabilities")?;
        choices.iter().map(choice).collect()
    }

    /// Continues `prompt` up to the end of the context. Calls `line` with every line of the
    /// response until the server ends it.
    pub(crate) fn stream(&self, prompt: &str, mut line: impl FnMut(&str)) -> Result<()> {
        let response = self
            .agent
            .post(&format!("{}/completion", self.address))
            .header("Content-Type", "application/json")
            .send(request(prompt, CONTEXT as usize, true).to_string())
            .context("asking llama-server")?;
        for text in BufReader::new(response.into_body().into_reader()).lines() {
            // A closed connection also ends the response.
            let Ok(text) = text else { break };
            line(&text);
        }
        Ok(())
    }

    /// The server's log so far.
    pub(crate) fn log(&self) -> String {
        self.daemon.log()
    }

    /// Ends the server with SIGTERM.
    pub(crate) fn stop(self) -> Result<()> {
        self.daemon.stop(TIMEOUT)
    }

    /// Ends the server with SIGKILL, so that it cannot close its connections.
    pub(crate) fn kill(&self) -> Result<()> {
        self.daemon.kill()
    }
}

fn request(prompt: &str, tokens: usize, stream: bool) -> Value {
    json!({
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0.0,
        "n_probs": if stream { 0 } else { TOP },
        // The end-of-text token of a model with random weights has no meaning.
        "ignore_eos": true,
        "cache_prompt": false,
        "stream": stream,
    })
}

/// Reads one entry of `completion_probabilities`.
fn choice(value: &Value) -> Result<Choice> {
    let pair = |value: &Value| Some((value.get("id")?.as_u64()?, value.get("logprob")?.as_f64()?));
    let top = value["top_logprobs"]
        .as_array()
        .context("no top_logprobs")?;
    Ok(Choice {
        token: value["id"].as_u64().context("no token id")?,
        logprobs: top
            .iter()
            .map(pair)
            .collect::<Option<_>>()
            .context("odd top_logprobs")?,
    })
}
