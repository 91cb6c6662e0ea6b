//! The links to executors: opens a session like a program, and measures the round-trip time.

use std::time::{Duration, Instant};

use vgpu_transport::error::LinkError;
use vgpu_transport::ir::IR_VERSION;
use vgpu_transport::link::connect::{ConnectError, connect, expand};
use vgpu_transport::link::{Endpoint, GuestEnd};
use vgpu_transport::wire::{PROTOCOL_VERSION, Reply, Request, WireError};

use super::report::Report;

const TIMEOUT: Duration = Duration::from_secs(2);

/// Round trips that are measured.
const ROUNDS: usize = 32;

/// Why a session cannot be opened or used.
#[derive(Debug, thiserror::Error)]
enum VisitError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The executor has sent a message that is not a reply.
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the executor refuses: {reason}")]
    Refused { reason: String },
    #[error("unexpected reply to {request}: {reply:?}")]
    Unexpected {
        request: &'static str,
        reply: Box<Reply>,
    },
}

pub(super) fn check(given: &[Endpoint], report: &mut Report) {
    let variable = std::env::var("VGPU_ENDPOINT").unwrap_or_default();
    let (endpoints, are_named) = if !given.is_empty() {
        (given.to_vec(), true)
    } else if !variable.is_empty() {
        let parsed = variable.split(',').map(|one| one.trim().parse());
        match parsed.collect() {
            Ok(endpoints) => (endpoints, true),
            Err(error) => {
                let error: vgpu_transport::link::EndpointError = error;
                report.fail("link", format!("VGPU_ENDPOINT: {error}"));
                return;
            }
        }
    } else {
        (Endpoint::defaults(), false)
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
            match visit(&endpoint) {
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
fn visit(endpoint: &Endpoint) -> Result<Vec<String>, VisitError> {
    let mut end = connect(endpoint, TIMEOUT)?;
    let hello = Request::Hello {
        protocol: PROTOCOL_VERSION,
        ir: IR_VERSION,
        name: format!("vgpu doctor[{}]", std::process::id()),
    };
    let welcome = ask(end.as_mut(), &hello)?;
    let Reply::Welcome {
        session,
        engine,
        description,
        memory_total,
        memory_free,
        ..
    } = welcome
    else {
        return Err(match welcome {
            Reply::Ended { reason } | Reply::Refused { reason, .. } => {
                VisitError::Refused { reason }
            }
            other => VisitError::Unexpected {
                request: "HELLO",
                reply: Box::new(other),
            },
        });
    };
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        match ask(end.as_mut(), &Request::Memory {})? {
            Reply::Memory { .. } => times.push(began.elapsed()),
            other => {
                return Err(VisitError::Unexpected {
                    request: "MEMORY",
                    reply: Box::new(other),
                });
            }
        }
    }
    times.sort();
    Ok(vec![
        format!("session {session}, protocol {PROTOCOL_VERSION}, graphs {IR_VERSION}"),
        format!(
            "engine {engine}, {description}, {} of {} MiB free",
            memory_free >> 20,
            memory_total >> 20
        ),
        format!(
            "a round trip takes {:?}, the fastest {:?}",
            times[ROUNDS / 2],
            times[0]
        ),
    ])
}

fn ask(end: &mut dyn GuestEnd, request: &Request) -> Result<Reply, VisitError> {
    let mut message = Vec::new();
    request.encode(&mut message);
    end.send(&message, (&[][..]).into())?;
    message.clear();
    end.receive(&mut message, (&mut [][..]).into())?;
    Ok(Reply::decode(&message)?)
}
