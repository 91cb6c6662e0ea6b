//! Questions to the API server of the cluster, over its HTTP interface with JSON.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::options::ClaimOptions;

/// How long the API server may take to answer. The kubelet waits for 45 s for a claim.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The most bytes of an answer: those of the largest object that an API server keeps, and more.
const MAX_ANSWER: usize = 8 << 20;

/// Why the API server does not answer as expected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("{0:?} is no address of an API server, such as https://10.96.0.1:443")]
    Url(String),
    #[error("a request to the API server: {0}")]
    Request(String),
    #[error("{call}: {error}")]
    Call { call: String, error: CallError },
    #[error("{call}: the API server refuses with status {status}: {message}")]
    Refused {
        call: String,
        status: u16,
        message: String,
        /// The name of the object that is not there, if the API server says so.
        absent: Option<String>,
    },
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("no connection: {0}")]
    Connect(io::Error),
    #[error("{0:?} is no name of a server")]
    Name(String),
    #[error("the certificates of the authority, {}: {reason}", path.display())]
    Authority { path: PathBuf, reason: String },
    #[error("no answer: {0}")]
    Http(#[from] hyper::Error),
    #[error("the answer: {0}")]
    Body(Box<dyn Error + Send + Sync>),
    #[error("no answer within {TIMEOUT:?}")]
    Timeout,
    #[error("the answer is no JSON: {0}")]
    Json(serde_json::Error),
}

/// The API server, as an account of the cluster.
pub(crate) struct ApiServer {
    options: Arc<ClaimOptions>,
}

impl ApiServer {
    pub(crate) fn new(options: Arc<ClaimOptions>) -> ApiServer {
        ApiServer { options }
    }

    /// The object at `path`, whose last part is its name. `None`: the API server says that there is
    /// none. Another answer with the status 404, such as of an API server without objects of this
    /// kind, says nothing of the object.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) async fn get(&self, path: &str) -> Result<Option<Value>, ApiError> {
        let name = path.rsplit('/').next().unwrap_or_default();
        match self.call(Method::GET, path, None).await {
            Err(ApiError::Refused { absent, .. }) if absent.as_deref() == Some(name) => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// Makes an object in the collection at `path`. Returns what the API server has made of it.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) async fn create(&self, path: &str, object: Value) -> Result<Value, ApiError> {
        self.call(Method::POST, path, Some(object)).await
    }

    /// Replaces the object at `path`. Returns what the API server has made of it.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) async fn replace(&self, path: &str, object: Value) -> Result<Value, ApiError> {
        self.call(Method::PUT, path, Some(object)).await
    }

    /// Calls the API server once, over a connection of its own: calls are rare. Files are read for
    /// each call, since the cluster renews them.
    async fn call(
        &self,
        method: Method,
        path: &str,
        object: Option<Value>,
    ) -> Result<Value, ApiError> {
        let url = format!("{}{path}", self.options.server);
        let text = format!("{method} {url}");
        let uri: Uri = url.parse().map_err(|_| ApiError::Url(url.clone()))?;
        let request = self.request(method, &uri, object)?;
        let answer = async {
            let answer = self.exchange(&uri, request).await?;
            let status = answer.status().as_u16();
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            Ok((status, body.map_err(CallError::Body)?.to_bytes()))
        };
        let failed = |error| ApiError::Call {
            call: text.clone(),
            error,
        };
        let answer = tokio::time::timeout(TIMEOUT, answer).await;
        let (status, body) = answer.unwrap_or(Err(CallError::Timeout)).map_err(failed)?;
        if !(200..300).contains(&status) {
            return Err(ApiError::Refused {
                call: text,
                status,
                message: message_of(&body),
                absent: absent_of(&body),
            });
        }
        serde_json::from_slice(&body).map_err(|error| failed(CallError::Json(error)))
    }

    fn request(
        &self,
        method: Method,
        uri: &Uri,
        object: Option<Value>,
    ) -> Result<Request<Full<Bytes>>, ApiError> {
        let path = self.options.account.join("token");
        let token = read(&path)?;
        let token = String::from_utf8_lossy(&token);
        let invalid = || ApiError::Url(uri.to_string());
        let authority = uri.authority().ok_or_else(invalid)?;
        let target = uri.path_and_query().ok_or_else(invalid)?;
        let body = object.map_or_else(Bytes::new, |object| object.to_string().into());
        let request = Request::builder()
            .method(method)
            .uri(target.as_str())
            .header("Host", authority.as_str())
            .header("Authorization", format!("Bearer {}", token.trim()))
            .header("Accept", "application/json")
            .header("Content-Type", "application/json")
            .body(Full::new(body));
        request.map_err(|error| ApiError::Request(error.to_string()))
    }

    async fn exchange(
        &self,
        uri: &Uri,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, CallError> {
        let host = uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let is_plain = uri.scheme_str() == Some("http");
        let port = uri.port_u16().unwrap_or(if is_plain { 80 } else { 443 });
        let stream = TcpStream::connect((host, port)).await;
        let stream = stream.map_err(CallError::Connect)?;
        if is_plain {
            return exchange_over(stream, request).await;
        }
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| CallError::Name(host.to_owned()))?;
        let connector = TlsConnector::from(Arc::new(self.tls()?));
        let stream = connector.connect(name, stream).await;
        exchange_over(stream.map_err(CallError::Connect)?, request).await
    }

    /// A client that trusts the authority of the cluster.
    fn tls(&self) -> Result<ClientConfig, CallError> {
        let path = self.options.account.join("ca.crt");
        let failed = |reason: String| CallError::Authority {
            path: path.clone(),
            reason,
        };
        let certificates = CertificateDer::pem_file_iter(&path);
        let certificates = certificates.map_err(|error| failed(error.to_string()))?;
        let mut roots = RootCertStore::empty();
        let certificates = certificates.collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|error| failed(error.to_string()))?;
        // One that this library does not read keeps nobody from the others.
        roots.add_parsable_certificates(certificates);
        if roots.is_empty() {
            return Err(failed("no certificate".into()));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_protocol_versions(&[&TLS13]);
        let config = config.map_err(|error| failed(error.to_string()))?;
        Ok(config.with_root_certificates(roots).with_no_client_auth())
    }
}

/// Sends a request over a connection, and returns the answer, whose body is read as it comes.
async fn exchange_over(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, CallError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends with the answer, or with the sender.
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}

fn read(path: &Path) -> Result<Vec<u8>, ApiError> {
    fs::read(path).map_err(|error| ApiError::File {
        path: path.into(),
        error,
    })
}

/// The name of the object that is not there, by an object `Status`.
fn absent_of(body: &[u8]) -> Option<String> {
    let object: Value = serde_json::from_slice(body).ok()?;
    let is_status = object["kind"] == "Status" && object["reason"] == "NotFound";
    let name = object["details"]["name"].as_str().filter(|_| is_status);
    name.map(str::to_owned)
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

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    fn authority() -> CertifiedIssuer<'static, KeyPair> {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(parameters, KeyPair::generate().unwrap()).unwrap()
    }

    /// A server at an address that its certificate names, if `name` is that address. It answers
    /// each request with an object, or with a refusal if the token is another one.
    async fn server(authority: &CertifiedIssuer<'static, KeyPair>, name: &str) -> u16 {
        let key = KeyPair::generate().unwrap();
        let parameters = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = parameters.signed_by(&key, authority).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            );
        let acceptor = TlsAcceptor::from(Arc::new(config.unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // A client that does not trust the certificate ends the handshake.
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    continue;
                };
                let mut request = vec![0; 4096];
                let len = stream.read(&mut request).await.unwrap();
                let request = String::from_utf8_lossy(&request[..len]).to_lowercase();
                let (status, body) = match request.contains("authorization: bearer secret\r\n") {
                    true => (200, r#"{"kind": "Node"}"#),
                    false => (403, r#"{"kind": "Status", "message": "who are you?"}"#),
                };
                let len = body.len();
                let answer = format!("HTTP/1.1 {status} .\r\nContent-Length: {len}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        port
    }

    fn client(port: u16, account: &Path, authority: &str, token: &str) -> ApiServer {
        fs::write(account.join("ca.crt"), authority).unwrap();
        fs::write(account.join("token"), token).unwrap();
        ApiServer::new(Arc::new(ClaimOptions {
            node: "node".into(),
            cdi: "/run/cdi".into(),
            server: format!("https://127.0.0.1:{port}"),
            account: account.into(),
        }))
    }

    #[tokio::test]
    async fn the_token_goes_to_a_server_of_the_authority_only() {
        let account = tempfile::tempdir().unwrap();
        let (own, other) = (authority(), authority());
        let port = server(&own, "127.0.0.1").await;
        let of = |port, pem: &str, token| client(port, account.path(), pem, token);

        let node = of(port, &own.pem(), "secret\n").get("/node").await;
        assert_eq!(node.unwrap().unwrap()["kind"], "Node");
        let error = of(port, &own.pem(), "other").get("/node").await;
        let error = error.unwrap_err().to_string();
        let says = "the API server refuses with status 403: who are you?";
        assert!(
            error.starts_with("GET https://") && error.ends_with(says),
            "{error}"
        );

        // The authority is another one, the certificate is another machine's, or there is none.
        let error = of(port, &other.pem(), "secret").get("/node").await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("invalid peer certificate"), "{error}");
        let elsewhere = server(&own, "192.0.2.1").await;
        let error = of(elsewhere, &own.pem(), "secret").get("/node").await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("invalid peer certificate"), "{error}");
        let error = of(port, "", "secret").get("/node").await;
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("the certificates of the authority"),
            "{error}"
        );
    }
}
