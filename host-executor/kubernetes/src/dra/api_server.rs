//! Questions to the API server of the cluster, over its HTTP interface with JSON.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring;
use serde_json::Value;
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use crate::options::ClaimOptions;

/// How long the API server may take to answer. The kubelet waits for 45 s for a claim.
const TIMEOUT: Duration = Duration::from_secs(15);

/// The most bytes of an answer: those of the largest object that an API server keeps, and more.
const MAX_ANSWER: u64 = 8 << 20;

/// Why the API server does not answer as expected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("{}: no certificate of an authority", .0.display())]
    NoCertificate(PathBuf),
    #[error("{}: {error}", path.display())]
    Certificate { path: PathBuf, error: ureq::Error },
    #[error("{method} {url}: {error}")]
    Call {
        method: &'static str,
        url: String,
        error: ureq::Error,
    },
    #[error("{method} {url}: the API server refuses with status {status}: {message}")]
    Refused {
        method: &'static str,
        url: String,
        status: u16,
        message: String,
    },
    #[error("{method} {url}: the answer is no JSON: {error}")]
    Answer {
        method: &'static str,
        url: String,
        error: serde_json::Error,
    },
    #[error("a thread that asks the API server has panicked")]
    Panicked,
}

/// The API server, as an account of the cluster.
pub(crate) struct ApiServer {
    options: Arc<ClaimOptions>,
}

impl ApiServer {
    pub(crate) fn new(options: Arc<ClaimOptions>) -> ApiServer {
        ApiServer { options }
    }

    /// The object at `path`. `None`: there is none.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) async fn get(&self, path: &str) -> Result<Option<Value>, ApiError> {
        match self.call("GET", path, None).await {
            Err(ApiError::Refused { status: 404, .. }) => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// Makes an object in the collection at `path`. Returns what the API server has made of it.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) async fn create(&self, path: &str, object: Value) -> Result<Value, ApiError> {
        self.call("POST", path, Some(object)).await
    }

    /// Replaces the object at `path`. Returns what the API server has made of it.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) async fn replace(&self, path: &str, object: Value) -> Result<Value, ApiError> {
        self.call("PUT", path, Some(object)).await
    }

    /// Calls the API server, on a thread that may wait.
    async fn call(
        &self,
        method: &'static str,
        path: &str,
        object: Option<Value>,
    ) -> Result<Value, ApiError> {
        let options = Arc::clone(&self.options);
        let url = format!("{}{path}", options.server);
        let call = move || call(&options, method, url, object);
        let answer = tokio::task::spawn_blocking(call).await;
        answer.map_err(|_| ApiError::Panicked)?
    }
}

/// Files are read for each call: the cluster renews them.
fn call(
    options: &ClaimOptions,
    method: &'static str,
    url: String,
    object: Option<Value>,
) -> Result<Value, ApiError> {
    let path = options.account.join("token");
    let token = fs::read_to_string(&path).map_err(|error| ApiError::File { path, error })?;
    let agent = agent(options)?;
    let authorization = format!("Bearer {}", token.trim());
    let failed = |error| ApiError::Call {
        method,
        url: url.clone(),
        error,
    };
    let answer = match object {
        None => agent
            .get(&url)
            .header("Authorization", authorization)
            .call(),
        Some(object) => {
            let request = match method {
                "POST" => agent.post(&url),
                _ => agent.put(&url),
            };
            let request = request.header("Authorization", authorization);
            let request = request.header("Content-Type", "application/json");
            request.send(object.to_string())
        }
    };
    let mut answer = answer.map_err(failed)?;
    let status = answer.status().as_u16();
    let body = answer.body_mut().with_config().limit(MAX_ANSWER);
    let body = body.read_to_vec().map_err(failed)?;
    if !(200..300).contains(&status) {
        return Err(ApiError::Refused {
            method,
            url,
            status,
            message: message_of(&body),
        });
    }
    serde_json::from_slice(&body).map_err(|error| ApiError::Answer { method, url, error })
}

/// What a refusal says: the message of an object `Status`, or the beginning of other text.
fn message_of(body: &[u8]) -> String {
    let object: Option<Value> = serde_json::from_slice(body).ok();
    let message = object
        .as_ref()
        .and_then(|object| object["message"].as_str());
    let text = message.map(str::to_owned);
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    text.trim().chars().take(400).collect()
}

/// A client that trusts the authority of the cluster.
fn agent(options: &ClaimOptions) -> Result<Agent, ApiError> {
    let config = Agent::config_builder()
        .timeout_global(Some(TIMEOUT))
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None);
    if !options.server.starts_with("https:") {
        return Ok(config.build().new_agent());
    }
    let path = options.account.join("ca.crt");
    let text = fs::read(&path).map_err(|error| ApiError::File {
        path: path.clone(),
        error,
    })?;
    let items = parse_pem(&text).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(Ok(certificate)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    });
    let roots = items.collect::<Result<Vec<_>, _>>();
    let roots = roots.map_err(|error| ApiError::Certificate {
        path: path.clone(),
        error,
    })?;
    if roots.is_empty() {
        return Err(ApiError::NoCertificate(path));
    }
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&roots))
        .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
        .build();
    Ok(config.tls_config(tls).build().new_agent())
}
