//! What the worker of a test does.

use std::io::Write as _;
use std::sync::Arc;
use std::thread;

use rustix::net::SendFlags;
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine as _;

use super::{CHATTY, DEED, MANY_THREADS, MEMORY, TIMEOUT};
use crate::isolate::ipc::{self, IpcSocket, ReceiveOutcome, WorkerMessage, WorkerReport};
use crate::isolate::{serve, take_socket};
use crate::limits::Limits;
use crate::server::Server;
use crate::status::{GuestStatus, Report, SessionStatus};
use crate::stop::StopFlag;

/// The socket has no room.
const FULL: std::io::ErrorKind = std::io::ErrorKind::WouldBlock;

/// The worker: this test program, started again by the tests.
#[test]
fn worker_process() {
    let Ok(deed) = std::env::var(DEED) else {
        return;
    };
    let socket = take_socket().expect("a socket");
    let engine = Arc::new(CpuEngine::new(1, Some(MEMORY)).expect("an engine"));
    let server = Server::new(Arc::clone(&engine) as _, Limits::default(), 64).expect("a thread");
    if deed == "honest" {
        serve(socket, server, &StopFlag::new());
        std::process::exit(0);
    }
    let raw = socket.try_clone().expect("a descriptor");
    let ipc = IpcSocket::new(socket);
    let honest = server.status_handle().report();
    match deed.as_str() {
        "garbage" => {
            for packet in [
                &b"nonsense"[..],
                b"{}",
                b"[[[[[[[[",
                b"\xff\xff",
                &[b'['; 100_000],
            ] {
                let _ = rustix::net::send(&raw, packet, SendFlags::empty());
            }
        }
        "flood" => {
            let mut report = honest.clone();
            report.status.guests.truncate(1);
            report.status.guests[0].name = "a".into();
            // Each report has the number of those before it as its memory. Until the supervisor
            // closes the connection.
            loop {
                let message = WorkerMessage::from(WorkerReport {
                    served: 0,
                    pending: Vec::new(),
                    without_session: Vec::new(),
                    report: report.clone(),
                });
                match ipc.send(&message, None).map_err(|error| error.kind()) {
                    Ok(()) => report.status.guests[0].usage.memory += 1,
                    Err(FULL) => {}
                    Err(_) => break,
                }
            }
        }
        "claims" => {
            let Ok(ReceiveOutcome::Message(ipc::Command::Rules(_), _)) = ipc.receive(None) else {
                panic!("no rules");
            };
            let Ok(ReceiveOutcome::Message(ipc::Command::Serve { session, .. }, _socket)) =
                ipc.receive::<ipc::Command>(None)
            else {
                panic!("no program");
            };
            let _ = ipc.send(&claims(honest.clone(), session), None);
            thread::sleep(TIMEOUT);
        }
        // A report of one byte more than the supervisor reads, which says that all programs have
        // ended. But for its length it is valid. Then one that says that they go on.
        "oversized" => {
            let report = |served| {
                WorkerMessage::from(WorkerReport {
                    served,
                    pending: Vec::new(),
                    without_session: Vec::new(),
                    report: honest.clone(),
                })
            };
            let mut packet = serde_json::to_vec(&report(u64::MAX)).expect("JSON");
            packet.resize(ipc::MAX_PACKET + 1, b' ');
            let sent = rustix::net::send(&raw, &packet, SendFlags::empty());
            assert_eq!(sent, Ok(packet.len()));
            // The socket has no room for it until the supervisor has read the first one.
            while let Err(error) = ipc.send(&report(0), None) {
                assert_eq!(error.kind(), FULL);
                thread::yield_now();
            }
        }
        // All programs have ended, says the worker.
        "ended" => {
            let report = WorkerMessage::from(WorkerReport {
                served: u64::MAX,
                pending: Vec::new(),
                without_session: Vec::new(),
                report: honest.clone(),
            });
            let _ = ipc.send(&report, None);
        }
        // Reports once, and answers no question.
        "mute" => {
            let report = WorkerMessage::from(WorkerReport {
                served: 0,
                pending: Vec::new(),
                without_session: Vec::new(),
                report: honest.clone(),
            });
            let _ = ipc.send(&report, None);
        }
        // Reports once, and starts threads as long as it can, up to a number that does no harm.
        "threads" => {
            let report = WorkerMessage::from(WorkerReport {
                served: 0,
                pending: Vec::new(),
                without_session: Vec::new(),
                report: honest.clone(),
            });
            let _ = ipc.send(&report, None);
            for _ in 0..MANY_THREADS {
                let sleeps = || thread::sleep(TIMEOUT * 10);
                let _ = thread::Builder::new().stack_size(64 << 10).spawn(sleeps);
            }
        }
        // As many lines as an honest worker writes about its sessions, and nothing else.
        "chatty" => {
            let line = "2026-01-02T03:04:05Z  INFO session{id=1}: session opened\n";
            let _ = std::io::stderr().write_all(line.repeat(CHATTY).as_bytes());
            std::process::exit(0);
        }
        "closes" => ipc.close(),
        "silent" => {}
        other => panic!("{other}"),
    }
    assert!(engine.memory().total > 0);
    // The worker never ends by itself.
    thread::sleep(TIMEOUT * 10);
}

/// Figures of a worker that claims the sessions and the figures of everyone.
fn claims(mut report: Report, own: u64) -> WorkerMessage {
    let mut guest = report.status.guests[0].clone();
    guest.usage.memory = u64::MAX;
    guest.usage.graphs = u64::MAX;
    guest.usage.busy = f64::MAX;
    guest.usage.queued = -f64::MAX;
    report.status.guests = ["a", "b", "-", "-"]
        .map(|name| GuestStatus {
            name: name.into(),
            ..guest.clone()
        })
        .into();
    let session = |id| SessionStatus {
        id,
        guest: "b".into(),
        device: usize::MAX,
        endpoint: "\x1b[2J".into(),
        pid: None,
        uid: None,
        program: Some("\x1b[2J".repeat(100)),
        protocol: Some(u32::MAX),
        age: 0.0,
        usage: guest.usage,
    };
    report.status.sessions = (0..20).chain([own; 100]).map(session).collect();
    WorkerMessage::from(WorkerReport {
        served: 0,
        pending: Vec::new(),
        without_session: Vec::new(),
        report,
    })
}
