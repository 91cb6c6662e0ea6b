//! The HTTP server that Prometheus scrapes, and that has a page for people.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
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
use vgpu_executor::listener::{LOOK_INTERVAL, SocketWatch};
use vgpu_executor::metrics;
use vgpu_executor::status::{Progress, StatusHandle};
use vgpu_transport::link::socket_file::{DEFAULT_MODE, SocketFile, bind_stream};
use vgpu_transport::lock::lock;

use super::status_page::{self, History};
use crate::units::drain;

/// Time for threads that have not run. Each runs at least once a second.
const CATCH_UP: Duration = Duration::from_secs(3);

/// Clients at the same time. A further one takes the place of the oldest one that has no request
/// under way, so that clients that stay without a request keep nobody away. A client that takes its
/// answer slowly is the next to go. While all wait for answers, a further one waits, too.
const MAX_CLIENTS: usize = 16;
/// Time for an answer to be made. Longer than an answer of `/livez` takes whose threads are late
/// and whose processes of virtual machines do not answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Time for a client to take its answer, before a further client may have its place.
const TAKING_TIME: Duration = Duration::from_millis(500);
/// The pause between two looks for a place, while all clients wait for answers.
const PLACE_PAUSE: Duration = Duration::from_millis(20);
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
    Unix(UnixListener, SocketFile),
}

/// Binds a listener at `address`. A unix socket's file is removed when the result is dropped.
pub(super) fn bind(address: &MetricsAddress) -> io::Result<Listener> {
    Ok(match address {
        MetricsAddress::Tcp(address) => {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            Listener::Tcp(listener)
        }
        MetricsAddress::Unix(path) => {
            let (listener, file) = bind_stream(path, DEFAULT_MODE).map_err(io::Error::other)?;
            Listener::Unix(listener, file)
        }
    })
}

/// Answers all paths: a thread for connections, one that is started for `/livez` and `/healthz`,
/// and one for the rest. Each makes one answer at a time. What clients cost is limited by their
/// number, and by the constants above.
pub(super) fn serve(listener: Listener, status: StatusHandle) -> io::Result<()> {
    serve_with(listener, Answers::new(status, ANSWER_TIME))
}

fn serve_with(listener: Listener, answers: Answers) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(2)
        .build()?;
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
            Listener::Unix(listener, file) => {
                let mut socket = WatchedSocket {
                    listener: tokio::net::UnixListener::from_std(listener)?,
                    file,
                    watch: SocketWatch::default(),
                };
                Box::pin(accept(async move || socket.accept().await, answers))
            }
        }
    };
    thread::Builder::new()
        .name("vgpu-metrics".into())
        .spawn(move || runtime.block_on(accepting))?;
    Ok(())
}

/// A socket that listens at its path again when its file is gone.
struct WatchedSocket {
    listener: tokio::net::UnixListener,
    file: SocketFile,
    watch: SocketWatch,
}

impl WatchedSocket {
    async fn accept(&mut self) -> io::Result<tokio::net::UnixStream> {
        loop {
            match tokio::time::timeout(LOOK_INTERVAL, self.listener.accept()).await {
                Ok(accepted) => return Ok(accepted?.0),
                Err(_) => {
                    if let Some(socket) = self.watch.look(&mut self.file) {
                        self.listener = tokio::net::UnixListener::from_std(socket.into())?;
                    }
                }
            }
        }
    }
}

/// Accepts clients, and answers each in a task of its own.
async fn accept<S>(mut next: impl AsyncFnMut() -> io::Result<S>, answers: Answers)
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
        if !make_room(&mut clients, &answers).await {
            debug!("a client of metrics was refused: {MAX_CLIENTS} wait for answers");
            continue;
        }
        let doing = Arc::new(Mutex::new(Doing::Idle));
        let task = tokio::spawn(serve_client(client, Arc::clone(&doing), answers.clone()));
        clients.push_back(Client { task, doing });
        // The client's request is read before the next client may take its place.
        tokio::task::yield_now().await;
    }
}

/// A connected client.
struct Client {
    task: JoinHandle<()>,
    doing: Arc<Mutex<Doing>>,
}

/// What a client is doing.
#[derive(Clone, Copy)]
enum Doing {
    /// It has sent no request, or has taken the answer to the last one.
    Idle,
    /// It waits for an answer to be made.
    Waiting,
    /// It is sent an answer, since then.
    Taking(Instant),
}

/// The one of the clients that makes room for a further one.
fn replaceable(clients: &VecDeque<Client>) -> Option<usize> {
    let find = |which: fn(Doing) -> bool| {
        let mut clients = clients.iter();
        clients.position(|client| which(*lock(&client.doing)))
    };
    find(|doing| matches!(doing, Doing::Idle)).or_else(|| {
        find(|doing| matches!(doing, Doing::Taking(since) if since.elapsed() >= TAKING_TIME))
    })
}

/// Makes room for a further client, and waits for it if need be: all answers end after their time.
/// Returns whether there is room.
async fn make_room(clients: &mut VecDeque<Client>, answers: &Answers) -> bool {
    let end = Instant::now() + answers.limit + TAKING_TIME;
    let has_room = loop {
        clients.retain(|client| !client.task.is_finished());
        if clients.len() < MAX_CLIENTS {
            break true;
        }
        if let Some(client) = replaceable(clients).and_then(|which| clients.remove(which)) {
            client.task.abort();
            // Its socket is closed then.
            if client.task.await.is_err() {
                debug!("a client of metrics was disconnected: {MAX_CLIENTS} are connected");
            }
            break true;
        }
        if Instant::now() >= end {
            break false;
        }
        answers.is_crowded.store(true, Ordering::Relaxed);
        tokio::time::sleep(PLACE_PAUSE).await;
    };
    answers.is_crowded.store(false, Ordering::Relaxed);
    has_room
}

/// Answers the requests of one client.
async fn serve_client<S>(client: S, doing: Arc<Mutex<Doing>>, answers: Answers)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let answer = service_fn(move |request| {
        let (answers, doing) = (answers.clone(), Arc::clone(&doing));
        async move {
            // Not before: the library calls this service ahead of time, but runs the future only
            // when the client has taken the answer before.
            let under_way = UnderWay::new(&doing);
            answers.answer(&request, under_way).await
        }
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

/// A request that is answered. Once it is dropped, its client is idle.
struct UnderWay(Arc<Mutex<Doing>>);

impl UnderWay {
    fn new(doing: &Arc<Mutex<Doing>>) -> UnderWay {
        *lock(doing) = Doing::Waiting;
        UnderWay(Arc::clone(doing))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        *lock(&self.0) = Doing::Idle;
    }
}

/// The content of an answer. The library drops it when the client has taken it.
struct Content {
    text: Cow<'static, str>,
    _request: UnderWay,
}

impl AsRef<[u8]> for Content {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

/// What answers are made of.
#[derive(Clone)]
struct Answers {
    status: StatusHandle,
    /// Held while an answer with figures is made: one at a time.
    history: Arc<tokio::sync::Mutex<History>>,
    /// Held while the progress of the executor is looked at.
    health: Arc<tokio::sync::Mutex<()>>,
    /// Time for an answer to be made.
    limit: Duration,
    /// A further client waits for a place: clients are disconnected after their answers.
    is_crowded: Arc<AtomicBool>,
}

impl Answers {
    fn new(status: StatusHandle, limit: Duration) -> Answers {
        Answers {
            status,
            history: Arc::default(),
            health: Arc::default(),
            limit,
            is_crowded: Arc::default(),
        }
    }

    /// Makes the content of an answer. The locks are taken first, so a client that goes away before
    /// its turn leaves no work behind, and an answer that never ends takes one thread only.
    async fn content(&self, path: &str) -> io::Result<Answer> {
        let status = self.status.clone();
        Ok(match path {
            "/livez" | "/healthz" => {
                let is_live = path == "/livez";
                let turn = Arc::clone(&self.health).lock_owned().await;
                let make = move || {
                    let _turn = turn;
                    health(&status, is_live)
                };
                tokio::task::spawn_blocking(make).await?
            }
            "/metrics" | "/" => {
                let is_page = path == "/";
                let mut history = Arc::clone(&self.history).lock_owned().await;
                let make = move || figures(&status, &mut history, is_page);
                tokio::task::spawn_blocking(make).await?
            }
            "/page.css" => (200, CSS, status_page::STYLE.into()),
            "/page.js" => (200, JAVASCRIPT, status_page::SCRIPT.into()),
            _ => (
                404,
                TEXT,
                "there are /, /metrics, /healthz and /livez\n".into(),
            ),
        })
    }

    async fn answer<B>(
        &self,
        request: &Request<B>,
        under_way: UnderWay,
    ) -> io::Result<Response<Full<Bytes>>> {
        let (code, kind, text) = match *request.method() {
            // The library sends no body in answer to HEAD.
            Method::GET | Method::HEAD => {
                let made = self.content(request.uri().path());
                match tokio::time::timeout(self.limit, made).await {
                    Ok(answer) => answer?,
                    Err(_) => {
                        let limit = self.limit;
                        let text = format!("the executor has not answered for {limit:?}\n");
                        (503, TEXT, text.into())
                    }
                }
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
        if self.is_crowded.load(Ordering::Relaxed) {
            response = response.header("Connection", "close");
        }
        *lock(&under_way.0) = Doing::Taking(Instant::now());
        let content = Bytes::from_owner(Content {
            text,
            _request: under_way,
        });
        response.body(Full::new(content)).map_err(io::Error::other)
    }
}

/// The figures of the executor: the page for people, or the metrics.
fn figures(status: &StatusHandle, history: &mut History, is_page: bool) -> Answer {
    let snapshot = status.status();
    // Prometheus gives the page a history that nobody has to take.
    history.record(&snapshot);
    match metrics::render_with(status, snapshot.clone()) {
        Ok(text) if is_page => {
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

/// Whether the executor makes progress, and, unless `is_live`, accepts sessions.
fn health(status: &StatusHandle, is_live: bool) -> Answer {
    match (progress(status), status.draining()) {
        (Progress::Stalled(why) | Progress::Late(why), _) => (503, TEXT, (why + "\n").into()),
        (Progress::Runs(_), Some(draining)) if !is_live => (
            503,
            TEXT,
            format!("draining: {}\n", drain(&draining)).into(),
        ),
        (Progress::Runs(what), _) => (200, TEXT, format!("ok: {what}\n").into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, SocketAddr, TcpStream};

    use tokio::sync::OwnedMutexGuard;
    use vgpu_cpu::CpuEngine;
    use vgpu_executor::{Limits, Server};

    use super::*;

    /// More than a test waits for anything.
    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    /// A server for metrics, and the executor of its figures.
    struct Metrics {
        address: SocketAddr,
        history: Arc<tokio::sync::Mutex<History>>,
        _server: Server,
    }

    impl Metrics {
        fn start(limit: Duration) -> Metrics {
            let engine = Arc::new(CpuEngine::new(1, Some(1 << 20)).unwrap());
            let server = Server::new(engine, Limits::default(), 1).unwrap();
            let answers = Answers::new(server.status_handle(), limit);
            let history = Arc::clone(&answers.history);
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let address = listener.local_addr().unwrap();
            listener.set_nonblocking(true).unwrap();
            serve_with(Listener::Tcp(listener), answers).unwrap();
            Metrics {
                address,
                history,
                _server: server,
            }
        }

        /// No answer with figures is finished while the result exists.
        fn stop_figures(&self) -> OwnedMutexGuard<History> {
            Arc::clone(&self.history).try_lock_owned().unwrap()
        }

        fn connect(&self) -> TcpStream {
            let client = TcpStream::connect(self.address).unwrap();
            client.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
            client
        }

        fn ask(&self, path: &str) -> TcpStream {
            let mut client = self.connect();
            write!(client, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
            client
        }

        /// The status of the answer for `path`.
        fn get(&self, path: &str) -> u16 {
            code(self.ask(path))
        }
    }

    /// The status of an answer, of which all bytes come.
    fn code(mut client: TcpStream) -> u16 {
        let (mut answer, mut part) = (Vec::new(), [0; 4096]);
        loop {
            let text = String::from_utf8_lossy(&answer).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = { head.lines() }
                    .find_map(|line| line.strip_prefix("Content-Length: "))
                    .unwrap();
                if body.len() == length.parse::<usize>().unwrap() {
                    return head.split(' ').nth(1).unwrap().parse().unwrap();
                }
            }
            let len = client.read(&mut part).unwrap();
            assert_ne!(len, 0, "the answer ends after {answer:?}");
            answer.extend(&part[..len]);
        }
    }

    #[test]
    fn further_clients_do_not_cut_a_running_scrape() {
        let metrics = Metrics::start(TEST_TIMEOUT);
        let stopped = metrics.stop_figures();
        let scrape = metrics.ask("/metrics");
        // This client was accepted later and is answered, so the request for figures was read.
        assert_eq!(metrics.get("/nothing"), 404);
        let others: Vec<TcpStream> = (0..4 * MAX_CLIENTS).map(|_| metrics.connect()).collect();
        assert_eq!(metrics.get("/nothing"), 404);
        drop(stopped);
        assert_eq!(code(scrape), 200);
        drop(others);
    }

    #[test]
    fn a_stuck_answer_ends_with_503_and_health_is_answered_meanwhile() {
        let metrics = Metrics::start(Duration::from_secs(5));
        let stopped = metrics.stop_figures();
        let stuck = [metrics.ask("/metrics"), metrics.ask("/")];
        assert_eq!(metrics.get("/livez"), 200);
        assert_eq!(metrics.get("/healthz"), 200);
        assert!(Arc::clone(&metrics.history).try_lock_owned().is_err());
        for client in stuck {
            assert_eq!(code(client), 503);
        }
        drop(stopped);
        assert_eq!(metrics.get("/metrics"), 200);
    }

    #[test]
    fn further_client_waits_while_all_others_wait_for_answers() {
        let metrics = Metrics::start(Duration::from_secs(1));
        let stopped = metrics.stop_figures();
        let stuck: Vec<TcpStream> = (0..MAX_CLIENTS).map(|_| metrics.ask("/metrics")).collect();
        // Its place is that of a client that was answered.
        assert_eq!(metrics.get("/nothing"), 404);
        for client in stuck {
            assert_eq!(code(client), 503);
        }
        drop(stopped);
    }

    #[test]
    fn clients_that_send_requests_and_read_no_answer_keep_nobody_away() {
        let metrics = Metrics::start(Duration::from_secs(1));
        let clients: Vec<TcpStream> = (0..MAX_CLIENTS)
            .map(|_| {
                let mut client = metrics.connect();
                client.set_nonblocking(true).unwrap();
                send_requests_until_none_is_read(&mut client);
                client
            })
            .collect();
        assert_eq!(metrics.get("/livez"), 200);
        assert_eq!(metrics.get("/metrics"), 200);
        drop(clients);
    }

    /// Sends requests with bodies, one after the other, until the server reads no further ones: its
    /// answers have filled the socket.
    fn send_requests_until_none_is_read(client: &mut TcpStream) {
        let request = b"GET /page.css HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx";
        let requests = request.repeat(64);
        let (mut sent, mut last) = (0, Instant::now());
        while last.elapsed() < Duration::from_millis(300) {
            match client.write(&requests[sent % request.len()..]) {
                Ok(len) => (sent, last) = (sent + len, Instant::now()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}
