//! The HTTP server that Prometheus scrapes.

use std::fmt;
use std::io;
use std::net::TcpListener;
use std::thread;

use tracing::{debug, error};
use vgpu_executor::config::MetricsAddress;
use vgpu_executor::metrics;
use vgpu_executor::status::StatusHandle;
use vgpu_transport::link::socket_file::{DEFAULT_MODE, SocketFile, bind_stream};

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

/// Answers `GET /metrics` on a thread of its own.
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

fn answer(request: tiny_http::Request, status: &StatusHandle) -> io::Result<()> {
    let path = request.url().split('?').next().unwrap_or_default();
    if !matches!(request.method(), tiny_http::Method::Get) || path != "/metrics" {
        let nothing = tiny_http::Response::from_string("metrics are at /metrics\n");
        return request.respond(nothing.with_status_code(404));
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
