//! The HTTP server that Prometheus scrapes.

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

/// Answers `/metrics` and `/healthz` on a thread of its own.
pub(super) fn serve(listener: tiny_http::Listener, status: StatusHandle) -> io::Result<()> {
    let server = tiny_http::Server::from_listener(listener, None).map_err(io::Error::other)?;
    thread::Builder::new()
        .name("vgpu-metrics".into())
        .spawn(move || {
            for request in server.incoming_requests() {
                if let Err(error) = answer(request, &status) {
                    debug!("a scrape was not answered: {error}");
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

fn answer(request: tiny_http::Request, status: &StatusHandle) -> io::Result<()> {
    let path = request.url().split('?').next().unwrap_or_default();
    let text =
        |text: String, status: u16| tiny_http::Response::from_string(text).with_status_code(status);
    // The library sends no body in answer to HEAD.
    let is_read = matches!(
        request.method(),
        tiny_http::Method::Get | tiny_http::Method::Head
    );
    match path {
        _ if !is_read => return request.respond(text("only GET and HEAD\n".into(), 405)),
        "/metrics" => {}
        "/healthz" => {
            return request.respond(match progress(status) {
                Progress::Runs(what) => text(format!("ok: {what}\n"), 200),
                Progress::Stalled(why) | Progress::Late(why) => text(format!("{why}\n"), 503),
            });
        }
        _ => return request.respond(text("there are /metrics and /healthz\n".into(), 404)),
    }
    match metrics::render(status) {
        Ok(text) => {
            let mut response = tiny_http::Response::from_string(text);
            if let Ok(header) = tiny_http::Header::from_bytes("Content-Type", metrics::CONTENT_TYPE)
            {
                response.add_header(header);
            }
            request.respond(response)
        }
        Err(fmt::Error) => {
            error!("metrics cannot be encoded; this is a bug of the host");
            let broken = tiny_http::Response::from_string("metrics could not be written\n");
            request.respond(broken.with_status_code(500))
        }
    }
}
