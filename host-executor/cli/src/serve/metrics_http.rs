//! The HTTP server that Prometheus scrapes, and that has a page for people.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use tracing::{debug, error};
use vgpu_executor::config::MetricsAddress;
use vgpu_executor::metrics;
use vgpu_executor::status::{Progress, StatusHandle};
use vgpu_transport::link::socket_file::{DEFAULT_MODE, SocketFile, bind_stream};

use super::status_page::{self, History};
use crate::units::drain;

/// Time for threads that have not run. Each runs at least once a second.
const CATCH_UP: Duration = Duration::from_secs(3);

/// Binds a listener at `address`. A unix socket's file is removed when the result is dropped.
pub(super) fn bind(
    address: &MetricsAddress,
) -> io::Result<(tiny_http::Listener, Option<SocketFile>)> {
    Ok(match address {
        MetricsAddress::Tcp(address) => (TcpListener::bind(address)?.into(), None),
        MetricsAddress::Unix(path) => {
            let (listener, file) = bind_stream(path, DEFAULT_MODE).map_err(io::Error::other)?;
            listener.set_nonblocking(false)?;
            (listener.into(), Some(file))
        }
    })
}

/// Answers all paths on a thread of its own.
pub(super) fn serve(listener: tiny_http::Listener, status: StatusHandle) -> io::Result<()> {
    let server = tiny_http::Server::from_listener(listener, None).map_err(io::Error::other)?;
    thread::Builder::new()
        .name("vgpu-metrics".into())
        .spawn(move || {
            let mut history = History::default();
            for request in server.incoming_requests() {
                if let Err(error) = answer(request, &status, &mut history) {
                    debug!("a request was not answered: {error}");
                }
            }
        })?;
    Ok(())
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

fn answer(
    request: tiny_http::Request,
    status: &StatusHandle,
    history: &mut History,
) -> io::Result<()> {
    let path = request.url().split('?').next().unwrap_or_default();
    // The library sends no body in answer to HEAD.
    let is_read = matches!(
        request.method(),
        tiny_http::Method::Get | tiny_http::Method::Head
    );
    let (code, kind, content) = match is_read {
        true => content(path, status, history),
        false => (405, TEXT, "only GET and HEAD\n".into()),
    };
    let mut response = tiny_http::Response::from_string(content).with_status_code(code);
    let mut headers = vec![
        ("Content-Type", kind),
        ("X-Content-Type-Options", "nosniff"),
    ];
    if kind == HTML {
        headers.push(("Content-Security-Policy", status_page::POLICY));
        headers.push(("Cache-Control", "no-store"));
    }
    for (name, value) in headers {
        if let Ok(header) = tiny_http::Header::from_bytes(name, value) {
            response.add_header(header);
        }
    }
    request.respond(response)
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
