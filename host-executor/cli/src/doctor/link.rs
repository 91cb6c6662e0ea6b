//! The links to executors: opens a session like a program, and measures the round-trip time.

use std::time::{Duration, Instant};

use vgpu_median::median;
use vgpu_transport::ir::IR_VERSION;
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::connect::expand;
use vgpu_transport::wire::{PROTOCOL_VERSION, Reply, Request};

use super::report::Report;
use crate::session_client::{self, Client, ClientError};

/// How long one executor may take in all.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Round trips that are measured.
const ROUNDS: usize = 32;

pub(super) fn check(given: &[Endpoint], report: &mut Report) {
    let (endpoints, are_named) = match session_client::endpoints(given) {
        Ok(endpoints) => endpoints,
        Err(error) => {
            report.fail("link", format!("VGPU_ENDPOINT: {error}"));
            return;
        }
    };
    let mut reached = 0;
    let mut misses = Vec::new();
    for candidate in endpoints {
        if candidate == Endpoint::Inproc {
            report.ok("link", "inproc: the executor is inside the plugin");
            reached += 1;
            continue;
        }
        let here = match expand(&candidate) {
            Ok(here) => here,
            Err(miss) => {
                misses.push(miss.to_string());
                continue;
            }
        };
        for endpoint in here {
            let measured = endpoint.clone();
            match session_client::within(TIMEOUT, move || measure(&measured)) {
                Ok(lines) => {
                    reached += 1;
                    for line in lines {
                        report.ok("link", format!("{endpoint}: {line}"));
                    }
                }
                Err(error) => misses.push(format!("{endpoint}: {error}")),
            }
        }
    }
    for miss in &misses {
        if are_named {
            report.fail("link", miss.clone());
        } else {
            report.note("link", miss.clone());
        }
    }
    if reached == 0 && !are_named {
        report.fail(
            "link",
            "no executor was reached; start `vgpu serve` on the host, or set VGPU_ENDPOINT to its \
             address",
        );
    }
}

/// Opens a session, and sends the requests of a starting program.
fn measure(endpoint: &Endpoint) -> Result<Vec<String>, ClientError> {
    let mut client = Client::connect(endpoint, "vgpu doctor")?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        match client.request(&Request::Memory {})? {
            Reply::Memory { .. } => times.push(began.elapsed()),
            other => {
                return Err(ClientError::Unexpected {
                    request: "MEMORY",
                    reply: Box::new(other),
                });
            }
        }
    }
    Ok(vec![
        format!(
            "session {}, protocol {PROTOCOL_VERSION}, graphs {IR_VERSION}",
            client.session
        ),
        format!(
            "engine {}, {}, {} of {} MiB free",
            client.engine,
            client.description,
            client.memory_free >> 20,
            client.memory_total >> 20
        ),
        format!(
            "a round trip takes {:?}, the fastest {:?}",
            median(times.iter().copied()),
            times.iter().min().copied().unwrap_or_default()
        ),
    ])
}
