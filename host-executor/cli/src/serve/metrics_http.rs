//! The HTTP server that Prometheus scrapes, and that has a page for people.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;
use tracing::{debug, error};
use vgpu_executor::config::MetricsAddress;
use vgpu_executor::metrics;
use vgpu_executor::status::{Progress, StatusHandle};
use vgpu_transport::link::socket_file::{DEFAULT_MODE, SocketFile, bind_stream};

use super::status_page::{self, History};
use crate::units::drain;

/// Time for threads that have not run. Each runs at least once a second.
const CATCH_UP: Duration = Duration::from_secs(3);

/// Clients at the same time. A further one takes the place of the one that is connected longest, so
/// that clients that stay without a request keep nobody away.
const MAX_CLIENTS: usize = 16;
/// The longest head of a request, and what is read ahead of one.
const MAX_HEAD: usize = 8 << 10;
/// Time for the head of a request, from the connection or from the answer before it.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for all requests of a connection. The connection is closed after the answer that is under
/// way.
const CONNECTION_TIME: Duration = Duration::from_secs(60);
/// Time for a client to take the last answer.
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after an error of the listener, such as a lack of descriptors.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// A listener for clients.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Binds a listener at `address`. A unix socket's file is removed when the result is dropped.
pub(super) fn bind(address: &MetricsAddress) -> io::Result<(Listener, Option<SocketFile>)> {
    Ok(match address {
        MetricsAddress::Tcp(address) => {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            (Listener::Tcp(listener), None)
        }
        MetricsAddress::Unix(path) => {
            let (listener, file) = bind_stream(path, DEFAULT_MODE).map_err(io::Error::other)?;
            listener.set_nonblocking(true)?;
            (Listener::Unix(listener), Some(file))
        }
    })
}

/// Answers all paths, one request at a time: a thread for connections, and one that is started for
/// answers. What clients cost is limited by their number, and by the constants above.
pub(super) fn serve(listener: Listener, status: StatusHandle) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(1)
        .build()?;
    let answers = Answers {
        status,
        history: Arc::default(),
    };
    let accepting: Pin<Box<dyn Future<Output = ()> + Send>> = {
        let _inside = runtime.enter();
        match listener {
            Listener::Tcp(listener) => {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                Box::pin(accept(
                    async move || Ok(listener.accept().await?.0),
                    answers,
                ))
            }
            Listener::Unix(listener) => {
                let listener = tokio::net::UnixListener::from_std(listener)?;
                Box::pin(accept(
                    async move || Ok(listener.accept().await?.0),
                    answers,
                ))
            }
        }
    };
    thread::Builder::new()
        .name("vgpu-metrics".into())
        .spawn(move || runtime.block_on(accepting))?;
    Ok(())
}

/// Accepts clients, and answers each in a task of its own.
async fn accept<S>(next: impl AsyncFn() -> io::Result<S>, answers: Answers)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut clients = VecDeque::new();
    loop {
        let client = match next().await {
            Ok(client) => client,
            Err(error) => {
                error!("cannot accept a client of metrics, next try in {ERROR_PAUSE:?}: {error}");
                tokio::time::sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        clients.retain(|client: &JoinHandle<()>| !client.is_finished());
        if clients.len() >= MAX_CLIENTS
            && let Some(oldest) = clients.pop_front()
        {
            oldest.abort();
            // Its socket is closed then.
            if oldest.await.is_err() {
                debug!("a client of metrics was disconnected: {MAX_CLIENTS} are connected");
            }
        }
        clients.push_back(tokio::spawn(serve_client(client, answers.clone())));
    }
}

/// Answers the requests of one client.
async fn serve_client<S>(client: S, answers: Answers)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let answer = service_fn(move |request| {
        let answers = answers.clone();
        async move { answers.answer(&request).await }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .title_case_headers(true)
        .serve_connection(TokioIo::new(client), answer);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = tokio::time::sleep(CONNECTION_TIME) => {
            connection.as_mut().graceful_shutdown();
            match tokio::time::timeout(LAST_ANSWER_TIMEOUT, connection).await {
                Ok(ended) => ended,
                Err(_) => return debug!("a client of metrics does not take its answer"),
            }
        }
    };
    if let Err(error) = ended {
        debug!("a request was not answered: {error}");
    }
}

/// Whether the executor makes progress. A process that was stopped is not blamed: its threads get
/// time to run.
fn progress(status: &StatusHandle) -> Progress {
    let end = Instant::now() + CATCH_UP;
    loop {
        match status.progress() {
            Progress::Late(_) if Instant::now() < end => thread::sleep(CATCH_UP / 10),
            progress => return progress,
        }
    }
}

/// The media types of what is not metrics.
const TEXT: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// An answer: status, media type, content.
type Answer = (u16, &'static str, Cow<'static, str>);

/// What answers are made of.
#[derive(Clone)]
struct Answers {
    status: StatusHandle,
    /// Held while an answer is made: one at a time.
    history: Arc<tokio::sync::Mutex<History>>,
}

impl Answers {
    async fn answer<B>(&self, request: &Request<B>) -> io::Result<Response<Full<Bytes>>> {
        let (code, kind, content) = match *request.method() {
            // The library sends no body in answer to HEAD.
            Method::GET | Method::HEAD => {
                let path = request.uri().path().to_owned();
                let status = self.status.clone();
                // A client that goes away before its turn leaves no work behind.
                let mut history = Arc::clone(&self.history).lock_owned().await;
                tokio::task::spawn_blocking(move || content(&path, &status, &mut history)).await?
            }
            _ => (405, TEXT, "only GET and HEAD\n".into()),
        };
        let mut response = Response::builder()
            .status(code)
            .header("Content-Type", kind)
            .header("X-Content-Type-Options", "nosniff");
        if kind == HTML {
            response = response
                .header("Content-Security-Policy", status_page::POLICY)
                .header("Cache-Control", "no-store");
        }
        let content = match content {
            Cow::Borrowed(content) => Bytes::from_static(content.as_bytes()),
            Cow::Owned(content) => content.into(),
        };
        response.body(Full::new(content)).map_err(io::Error::other)
    }
}

fn content(path: &str, status: &StatusHandle, history: &mut History) -> Answer {
    match path {
        "/metrics" | "/" => {
            let snapshot = status.status();
            // Prometheus gives the page a history that nobody has to take.
            history.record(&snapshot);
            match metrics::render_with(status, snapshot.clone()) {
                Ok(text) if path == "/" => {
                    let page = status_page::render(&snapshot, history, &text);
                    (200, HTML, page.into())
                }
                Ok(text) => (200, metrics::CONTENT_TYPE, text.into()),
                Err(fmt::Error) => {
                    error!("metrics cannot be encoded; this is a bug of the host");
                    (500, TEXT, "metrics could not be written\n".into())
                }
            }
        }
        "/page.css" => (200, CSS, status_page::STYLE.into()),
        "/page.js" => (200, JAVASCRIPT, status_page::SCRIPT.into()),
        "/livez" | "/healthz" => match (progress(status), status.draining()) {
            (Progress::Stalled(why) | Progress::Late(why), _) => (503, TEXT, (why + "\n").into()),
            (Progress::Runs(_), Some(draining)) if path == "/healthz" => (
                503,
                TEXT,
                format!("draining: {}\n", drain(&draining)).into(),
            ),
            (Progress::Runs(what), _) => (200, TEXT, format!("ok: {what}\n").into()),
        },
        _ => (
            404,
            TEXT,
            "there are /, /metrics, /healthz and /livez\n".into(),
        ),
    }
}
