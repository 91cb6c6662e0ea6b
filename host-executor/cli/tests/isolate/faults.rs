//! What the end of a process costs.

use std::fs;
use std::time::Instant;

use rustix::process::{Signal, kill_process};
use vgpu_transport::wire::{GraphId, Request};

use crate::changed_backend::{Changes, changed_backend};
use crate::common::{TIMEOUT, add, bytes, compute};
use crate::ggml;
use crate::served::workers::{guest, workers};
use crate::served::{Scratch, Serve};

#[test]
fn crashed_worker_does_not_affect_other_workers() {
    let scratch = Scratch::new("isolate");
    // Room for more guests than needed: a dead worker's place is free only after its process has
    // ended.
    let serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "10M"]);
    let (mut other_guest, _) = guest(&serve, &scratch);
    compute(&mut other_guest);
    let mut killed_sessions = Vec::new();
    for signal in [
        Signal::SEGV,
        Signal::ILL,
        Signal::BUS,
        Signal::ABORT,
        Signal::KILL,
    ] {
        let (mut killed_guest, session) = guest(&serve, &scratch);
        compute(&mut killed_guest);
        let worker = workers(&serve, 2)[&session];
        // Sent repeatedly: after a SIGSEGV without a faulting access, Rust's handler returns and
        // waits for the access.
        let start = Instant::now();
        while kill_process(worker, signal).is_ok() {
            assert!(start.elapsed() < TIMEOUT, "{signal:?} does not end it");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        // The guest learns of the end, and does not wait for a reply.
        killed_guest.send(&Request::Fence {});
        let told = killed_guest
            .end
            .receive(&mut Vec::new(), (&mut [][..]).into());
        assert!(told.is_err(), "{told:?}");
        compute(&mut other_guest);
        killed_sessions.push((session, signal));
    }
    // Every worker has been replaced, also the last one.
    let (mut next, _) = guest(&serve, &scratch);
    compute(&mut next);
    compute(&mut other_guest);
    drop(next);
    workers(&serve, 1);

    serve.signal(Signal::TERM);
    assert_eq!(other_guest.ended(), "the host is shutting down");
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let pid = format!("pid {} uid", std::process::id());
    for ((session, _), name) in killed_sessions
        .into_iter()
        .zip(["SIGSEGV", "SIGILL", "SIGBUS", "SIGABRT", "SIGKILL"])
    {
        let said = format!("was ended by {name}");
        let line = log.lines().find(|line| line.contains(&said));
        let line = line.unwrap_or_else(|| panic!("no {said:?} in {log}"));
        assert!(
            line.contains(&format!("session={session}")) && line.contains(&pid),
            "{line}"
        );
    }
}

#[test]
fn engine_that_aborts_ends_the_session_of_its_guest_only() {
    let scratch = Scratch::new("isolate-abort");
    let changes = Changes {
        end: "abort();",
        ..Changes::default()
    };
    let library = changed_backend(&ggml::cached(""), scratch.path(), &changes);
    let engine = format!("--engine=ggml:{}", library.display());
    let serve = Serve::start(
        &scratch.socket(),
        &["--isolate", "--guest-memory", "10M", &engine],
    );
    let (mut other, _) = guest(&serve, &scratch);
    let kept = other.alloc_with(&bytes(&[1.0, 2.0]));
    let (mut aborting, session) = guest(&serve, &scratch);
    let a = aborting.alloc_with(&bytes(&[3.0, 4.0]));
    aborting.graph(GraphId(1), &add(2, a, a, a));
    aborting.submit(GraphId(1));
    // The guest learns of the end, and does not wait for the graph.
    let told = aborting.end.receive(&mut Vec::new(), (&mut [][..]).into());
    assert!(told.is_err(), "{told:?}");
    assert_eq!(other.read_f32(kept, 2), [1.0, 2.0]);
    let (mut next, _) = guest(&serve, &scratch);
    let loaded = next.alloc_with(&bytes(&[5.0]));
    assert_eq!(next.read_f32(loaded, 1), [5.0]);

    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let ended: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("was ended by"))
        .collect();
    assert!(
        matches!(&ended[..], [line] if line.contains("was ended by SIGABRT")
            && line.contains(&format!("session={session}"))),
        "{ended:?} in {log}"
    );
}

/// A device that was unplugged or reset answers every graph with an error. It may be there again
/// for the next process.
#[test]
fn worker_ends_when_its_device_is_lost() {
    let scratch = Scratch::new("isolate-lost");
    let lost = scratch.path().join("lost");
    let end = format!(
        "return access(\"{}\", F_OK) ? compute(backend, graph) : GGML_STATUS_FAILED;",
        lost.display()
    );
    let changes = Changes {
        end: &end,
        ..Changes::default()
    };
    let library = changed_backend(&ggml::cached(""), scratch.path(), &changes);
    let engine = format!("--engine=ggml:{}", library.display());
    let isolate = ["--isolate", "--guest-memory", "10M", &engine];
    let serve = Serve::start(&scratch.socket(), &isolate);
    let (mut other, _) = guest(&serve, &scratch);
    compute(&mut other);
    let (mut first, session) = guest(&serve, &scratch);
    compute(&mut first);
    let worker = workers(&serve, 2)[&session];
    fs::write(&lost, "").expect("a file");
    let a = first.alloc_with(&bytes(&[3.0, 4.0]));
    first.graph(GraphId(7), &add(2, a, a, a));
    for _ in 0..8 {
        first.submit(GraphId(7));
    }
    let start = Instant::now();
    while rustix::process::test_kill_process(worker).is_ok() {
        assert!(
            start.elapsed() < TIMEOUT,
            "the worker keeps the lost device"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    fs::remove_file(&lost).expect("it is there");
    compute(&mut other);
    let (mut next, _) = guest(&serve, &scratch);
    compute(&mut next);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let said = "the engine cannot work again in this process: ";
    assert_eq!(log.matches(said).count(), 1, "{log}");
}

#[test]
fn workers_are_sandboxed_and_end_with_their_supervisor() {
    let scratch = Scratch::new("isolate-box");
    let mut serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "20M"]);
    let (mut guest, session) = guest(&serve, &scratch);
    compute(&mut guest);
    let worker = workers(&serve, 1)[&session];
    let status =
        fs::read_to_string(format!("/proc/{}/status", worker.as_raw_nonzero())).expect("a status");
    for line in ["Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000"] {
        assert!(status.contains(line), "{line} is not in {status}");
    }
    // The workers of a killed supervisor end with it: the guest learns of the end, and no process
    // is left.
    serve.child.kill().expect("it is there");
    serve.child.wait().expect("it can be waited for");
    let mut message = Vec::new();
    // A worker that is asked to end tells its guest.
    let _ = guest.end.receive(&mut message, (&mut [][..]).into());
    let start = Instant::now();
    while rustix::process::test_kill_process(worker).is_ok() {
        assert!(start.elapsed() < TIMEOUT, "the worker lives on");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
