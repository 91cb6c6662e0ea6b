//! The HTTP server that Prometheus scrapes.

use std::fmt;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::thread;

use tracing::{debug, error};
use vgpu_executor::config::MetricsAddress;
use vgpu_executor::metrics;
use vgpu_executor::status::Watch;
use vgpu_executor::vm::{SocketFile, listen_stream};

/// Answers `GET /metrics` at `address` from now on. A socket's file is removed when what this returns is dropped.
pub(super) fn serve(address: &MetricsAddress, watch: Watch) -> io::Result<Option<SocketFile>> {
    let mut file = None;
    let listener: tiny_http::Listener = match address {
        MetricsAddress::Tcp(address) => TcpListener::bind(address)?.into(),
        MetricsAddress::Unix(path) => {
            let listener = listen_stream(path).map_err(io::Error::other)?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
            listener.set_nonblocking(false)?;
            file = Some(SocketFile::at(path)?);
            listener.into()
        }
    };
    let server = tiny_http::Server::from_listener(listener, None).map_err(io::Error::other)?;
    thread::Builder::new()
        .name("vgpu-metrics".into())
        .spawn(move || {
            for request in server.incoming_requests() {
                if let Err(error) = answer(request, &watch) {
                    debug!("a scrape was not answered: {error}");
                }
            }
        })?;
    Ok(file)
}

fn answer(request: tiny_http::Request, watch: &Watch) -> io::Result<()> {
    let path = request.url().split('?').next().unwrap_or_default();
    if !matches!(request.method(), tiny_http::Method::Get) || path != "/metrics" {
        let nothing = tiny_http::Response::from_string("metrics are at /metrics\n");
        return request.respond(nothing.with_status_code(404));
    }
    match metrics::render(watch) {
        Ok(text) => {
            let mut response = tiny_http::Response::from_string(text);
            if let Ok(header) = tiny_http::Header::from_bytes("Content-Type", metrics::CONTENT_TYPE)
            {
                response.add_header(header);
            }
            request.respond(response)
        }
        Err(fmt::Error) => {
            error!("metrics could not be written, a bug of the host");
            let broken = tiny_http::Response::from_string("metrics could not be written\n");
            request.respond(broken.with_status_code(500))
        }
    }
}
