//! The part of Ollama's HTTP API that the tests use.

use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

/// The result of a generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) text: String,
    /// The number of generated tokens.
    pub(crate) tokens: u64,
    /// The number of tokens of the prompt that were computed.
    pub(crate) prompt_tokens: u64,
    /// The number of parts of the response.
    pub(crate) pieces: usize,
}

/// A client of the API.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    address: String,
    agent: ureq::Agent,
}

impl Client {
    pub(super) fn new(port: u16) -> Client {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_idle_connections(0)
            // The timeout of every request.
            .timeout_global(Some(Duration::from_secs(600)))
            .build()
            .into();
        Client {
            address: format!("http://127.0.0.1:{port}"),
            agent,
        }
    }

    pub(crate) fn version(&self) -> Result<String> {
        let version = self.get("/api/version")?;
        Ok(version["version"]
            .as_str()
            .context("no version")?
            .to_owned())
    }

    /// The models in memory.
    pub(crate) fn running(&self) -> Result<Vec<Value>> {
        let answer = self.get("/api/ps")?;
        Ok(answer["models"]
            .as_array()
            .context("no list of models")?
            .clone())
    }

    /// Continues a text greedily and calls `piece` with each part. Ends early if `piece` returns
    /// false.
    pub(crate) fn generate(
        &self,
        model: &str,
        prompt: &str,
        options: Value,
        mut piece: impl FnMut(&str) -> bool,
    ) -> Result<Answer> {
        let request = json!({
            "model": model, "prompt": prompt, "raw": true, "options": with_defaults(options),
        });
        self.stream("/api/generate", &request, |part| {
            piece(part["response"].as_str().unwrap_or_default())
        })
    }

    /// One turn of a conversation.
    pub(crate) fn chat(&self, model: &str, says: &str, options: Value) -> Result<Answer> {
        let request = json!({
            "model": model, "messages": [{"role": "user", "content": says}],
            "options": with_defaults(options),
        });
        self.stream("/api/chat", &request, |_| true)
    }

    /// A vector for each text.
    pub(crate) fn embed(
        &self,
        model: &str,
        texts: &[String],
        options: Value,
    ) -> Result<Vec<Vec<f64>>> {
        let answer = self.post(
            "/api/embed",
            &json!({
                "model": model, "input": texts, "options": options,
            }),
        )?;
        let vectors = answer["embeddings"].as_array().context("no embeddings")?;
        let vector = |v: &Value| {
            v.as_array()?
                .iter()
                .map(Value::as_f64)
                .collect::<Option<Vec<_>>>()
        };
        vectors
            .iter()
            .map(vector)
            .collect::<Option<_>>()
            .context("odd embeddings")
    }

    /// Unloads a model.
    pub(crate) fn unload(&self, model: &str) -> Result<()> {
        let request = json!({"model": model, "keep_alive": 0});
        let answer = self.post("/api/generate", &request)?;
        ensure!(answer["done_reason"] == "unload", "unloading: {answer}");
        Ok(())
    }

    /// Reads a streamed response: one JSON object per line. Returns an error if the response
    /// contains one, or ends without "done".
    fn stream(
        &self,
        path: &str,
        request: &Value,
        mut part: impl FnMut(&Value) -> bool,
    ) -> Result<Answer> {
        let response = self
            .agent
            .post(&format!("{}{path}", self.address))
            .send(request.to_string())
            .context("asking Ollama")?;
        let status = response.status();
        let mut answer = Answer::default();
        for line in BufReader::new(response.into_body().into_reader()).lines() {
            let line = line.context("reading Ollama's answer")?;
            let value: Value = serde_json::from_str(&line)
                .with_context(|| format!("Ollama answered {status}: {line}"))?;
            if let Some(error) = value.get("error") {
                anyhow::bail!(
                    "Ollama answered {status}: {}",
                    error.as_str().unwrap_or(&line)
                );
            }
            let text = value["response"]
                .as_str()
                .or(value["message"]["content"].as_str());
            answer.text += text.unwrap_or_default();
            answer.pieces += usize::from(text.is_some_and(|text| !text.is_empty()));
            if value["done"] == true {
                answer.tokens = value["eval_count"].as_u64().context("no count of tokens")?;
                // Absent if the whole prompt was cached by the previous request.
                answer.prompt_tokens = value["prompt_eval_count"].as_u64().unwrap_or(0);
                return Ok(answer);
            }
            if !part(&value) {
                return Ok(answer);
            }
        }
        anyhow::bail!("Ollama ended its answer ({status}) without a last part: {answer:?}")
    }

    fn get(&self, path: &str) -> Result<Value> {
        let mut response = self
            .agent
            .get(&format!("{}{path}", self.address))
            .call()
            .with_context(|| format!("asking Ollama for {path}"))?;
        read(&mut response)
    }

    fn post(&self, path: &str, request: &Value) -> Result<Value> {
        let mut response = self
            .agent
            .post(&format!("{}{path}", self.address))
            .send(request.to_string())
            .with_context(|| format!("asking Ollama for {path}"))?;
        read(&mut response)
    }
}

fn read(response: &mut ureq::http::Response<ureq::Body>) -> Result<Value> {
    let text = response
        .body_mut()
        .read_to_string()
        .context("reading Ollama's answer")?;
    ensure!(
        response.status() == 200,
        "Ollama answered {}: {text}",
        response.status()
    );
    serde_json::from_str(&text).with_context(|| format!("Ollama answered no JSON: {text}"))
}

/// Greedy, so that two runs can be compared.
fn with_defaults(mut options: Value) -> Value {
    options["temperature"] = json!(0);
    options
}
