//! An engine that hangs: the executor still answers, says who hangs, and can end.

mod common;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use common::hanging_engine::{Call, HangingEngine};
use common::{Guest, Host, TIMEOUT, add, bytes};
use vgpu_engine::Engine as _;
use vgpu_executor::status::Status;
use vgpu_executor::{Limits, Shutdown, metrics};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{GraphId, Request};

const GRAPH: GraphId = GraphId(1);

/// Releases all calls at the end of a test, also of one that has failed: dropping a server waits
/// for its sessions.
struct Released(Arc<HangingEngine>);

impl Drop for Released {
    fn drop(&mut self) {
        self.0.hang(&[]);
    }
}

/// Does `work` on another thread. A test fails if the work hangs with the engine.
fn answered<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, answer) = mpsc::channel();
    thread::spawn(move || sender.send(work()));
    let answer = answer.recv_timeout(TIMEOUT / 3);
    answer.unwrap_or_else(|error| panic!("{what} hangs with the engine: {error}"))
}

/// A guest with a number and a graph, which the engine does not compute: the number stays.
fn guest_with_graph(host: &Host) -> (Guest, BufferId) {
    let mut guest = host.guest();
    let number = guest.alloc_with(&bytes(&[3.0]));
    guest.graph(GRAPH, &add(1, number, number, number));
    guest.fence();
    (guest, number)
}

fn contains_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

/// Waits until the dump of the server contains `part`.
fn dump_with(host: &Host, part: &str) -> String {
    let status = host.server.status_handle();
    let start = std::time::Instant::now();
    loop {
        let own = status.clone();
        let text = answered("dump", move || own.dump());
        if text.contains(part) {
            return text;
        }
        assert!(start.elapsed() < TIMEOUT, "{part:?} is never in:\n{text}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// How many sessions have ended for this reason.
fn ends(host: &Host, reason: &str) -> u64 {
    let ended = host.server.status_handle().status().ended;
    let found = ended.by_kind().find(|(kind, _)| *kind == reason);
    found.expect("a kind").1
}

/// What the executor says while a call of the engine hangs: its status and its metrics. It accepts
/// a new guest, too, which can do what needs no engine, unless the call `is_of_each_guest`.
fn answers(host: &Host, is_of_each_guest: bool) -> (Status, String) {
    let handle = host.server.status_handle();
    let [of_dump, of_metrics] = [0, 1].map(|_| handle.clone());
    answered("dump", move || of_dump.dump());
    let status = answered("status", move || handle.status());
    let text = answered("metrics", move || metrics::render(&of_metrics)).unwrap();
    let health = host.server.health();
    answered("the check of the locks", move || {
        health.check();
        health.fatal_error()
    });
    let mut guest = host.connect();
    let guest = answered("HELLO", move || {
        guest.hello();
        if !is_of_each_guest {
            guest.fence();
        }
        guest
    });
    drop(guest);
    (status, text)
}

#[test]
fn executor_answers_while_the_engine_hangs() {
    for call in [Call::Launch, Call::Wait] {
        let engine = HangingEngine::new();
        let host = Host::new(engine.clone());
        let _released = Released(engine.clone());
        let (mut holder, of_holder) = guest_with_graph(&host);
        let (mut other, of_other) = guest_with_graph(&host);
        engine.hang(&[call, Call::Memory]);
        holder.submit(GRAPH);
        engine.wait_until_hanging(call);
        engine.wait_until_hanging(Call::Memory);
        other.submit(GRAPH);

        let text = dump_with(&host, "waits for the engine");
        contains_all(
            &text,
            &[
                "engine hanging: an engine for tests; has not answered a call for",
                "turn: session 1 (guest unix, program test) has the engine for",
                "graph 1 of 1 nodes, node 0 (ADD) takes longest by estimate; 1 wait for it",
                "waits for the engine, request 6 (SUBMIT), for",
                "; session 1 has it; 6 requests received, 5 done",
                "link: requests put",
            ],
        );
        let (status, metrics) = answers(&host, false);
        assert_eq!(status.sessions.len(), 2);
        assert!(status.engine.turn.is_some());
        let age = { metrics.lines() }.find(|l| l.starts_with("vgpu_turn_age_seconds"));
        let age = age.and_then(|line| line.rsplit(' ').next());
        assert!(age.is_some_and(|age| age.parse::<f64>().unwrap() > 0.0));

        engine.hang(&[]);
        assert_eq!(holder.read_f32(of_holder, 1), [3.0]);
        assert_eq!(other.read_f32(of_other, 1), [3.0]);
    }
}

/// Sends a request for which the executor makes this call of the engine. The bytes of `number`
/// stay the same.
fn request(guest: &mut Guest, call: Call, number: BufferId, other: BufferId) {
    let (offset, len) = (0, 4);
    let request = match call {
        Call::Alloc => Request::Alloc {
            buffer: BufferId(100),
            size: 1,
        },
        Call::Compile => return guest.graph(GraphId(2), &add(1, number, number, number)),
        Call::Write => return guest.write(number, 0, &bytes(&[3.0])),
        Call::Read => Request::Read {
            buffer: number,
            offset,
            len,
        },
        Call::Fill => Request::Fill {
            buffer: other,
            offset,
            len,
            value: 1,
        },
        Call::Copy => Request::Copy {
            dst: other,
            dst_offset: offset,
            src: number,
            src_offset: offset,
            len,
        },
        _ => Request::Free { buffer: other },
    };
    guest.send(&request);
}

#[test]
fn executor_answers_while_a_call_outside_of_turns_hangs() {
    for (call, state) in [
        (Call::Alloc, "executes, request 7 (ALLOC)"),
        (Call::Compile, "compiles a graph, request 7 (GRAPH)"),
        (Call::Free, "executes, request 7 (FREE)"),
        (Call::Write, "executes, request 7 (WRITE)"),
        (Call::Read, "executes, request 7 (READ)"),
        (Call::Fill, "executes, request 7 (FILL)"),
        (Call::Copy, "executes, request 7 (COPY)"),
        (Call::Free, "frees the memory of the session"),
    ] {
        let engine = HangingEngine::new();
        let host = Host::new(engine.clone());
        let _released = Released(engine.clone());
        let (mut guest, number) = guest_with_graph(&host);
        let of_guest = guest.alloc(4);
        engine.hang(&[call]);
        let guest = match state {
            "frees the memory of the session" => {
                drop(guest);
                None
            }
            _ => {
                request(&mut guest, call, number, of_guest);
                Some(guest)
            }
        };
        engine.wait_until_hanging(call);
        dump_with(&host, state);
        let (status, _) = answers(&host, false);
        assert_eq!(status.sessions.len(), 1, "{state}");

        engine.hang(&[]);
        match guest {
            // This guest and the one that was accepted meanwhile. A session whose thread panics
            // has no such end.
            None => {
                host.wait_until_empty();
                assert_eq!(ends(&host, "closed"), 2);
            }
            Some(mut guest) => {
                if matches!(call, Call::Alloc | Call::Read) {
                    guest.receive();
                }
                assert_eq!(guest.read_f32(number, 1), [3.0], "{state}");
            }
        }
    }
}

#[test]
fn hello_is_answered_before_memory_is_registered_with_the_device() {
    let engine = HangingEngine::new();
    let host = Host::new(engine.clone());
    let _released = Released(engine.clone());
    engine.hang(&[Call::Pin]);
    let mut guest = host.connect();
    let guest = answered("HELLO", move || {
        guest.hello();
        guest
    });
    engine.wait_until_hanging(Call::Pin);
    dump_with(
        &host,
        "registers the memory of the link with the device, for",
    );
    answers(&host, true);
    drop(guest);
}

/// A guest whose graph waits for that of another guest, which hangs.
struct Queued {
    engine: Arc<HangingEngine>,
    host: Host,
    holder: Guest,
    of_holder: BufferId,
    /// Session 2.
    queued: Guest,
    /// The free memory of the engine without the queued guest.
    free: u64,
}

impl Queued {
    fn new(limits: Limits) -> Queued {
        let engine = HangingEngine::new();
        let host = Host::limited(engine.clone(), limits, 64);
        let (mut holder, of_holder) = guest_with_graph(&host);
        let free = engine.memory().free;
        let (mut queued, _) = guest_with_graph(&host);
        queued.alloc(8 << 20);
        assert!(engine.memory().free < free);
        engine.hang(&[Call::Launch]);
        holder.submit(GRAPH);
        engine.wait_until_hanging(Call::Launch);
        queued.submit(GRAPH);
        dump_with(&host, "waits for the engine, request 7 (SUBMIT), for");
        Queued {
            engine,
            host,
            holder,
            of_holder,
            queued,
            free,
        }
    }
}

/// Waits until only the first session is left and the engine has so much free memory.
fn wait_for_one_session(host: &Host, engine: &HangingEngine, free: u64) {
    let start = std::time::Instant::now();
    while host.server.sessions().len() > 1 || engine.memory().free < free {
        let sessions = host.server.sessions();
        assert!(start.elapsed() < TIMEOUT / 3, "{sessions:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn session_in_the_queue_ends_with_its_guest_or_by_an_operator_while_the_engine_hangs() {
    for is_killed in [false, true] {
        let Queued {
            engine,
            host,
            mut holder,
            of_holder,
            queued,
            free,
        } = Queued::new(Limits::default());
        let _released = Released(engine.clone());
        if is_killed {
            host.server.kill_session(2).expect("the session");
            let reason = answered("the end of the session", move || queued.ended());
            contains_all(&reason, &["an operator of the host has ended this session"]);
        } else {
            drop(queued);
        }
        wait_for_one_session(&host, &engine, free);
        let text = dump_with(
            &host,
            "turn: session 1 (guest unix, program test) has the engine",
        );
        contains_all(&text, &["; 0 wait for it"]);

        engine.hang(&[]);
        assert_eq!(holder.read_f32(of_holder, 1), [3.0]);
    }
}

#[test]
fn session_in_the_queue_ends_with_the_executor_while_the_engine_hangs() {
    let Queued {
        engine,
        host,
        holder,
        queued,
        free,
        ..
    } = Queued::new(Limits {
        slow: Duration::from_secs(3),
        ..Limits::default()
    });
    let _released = Released(engine.clone());
    let Host { server, .. } = host;
    let shutdown = answered("shutdown", move || server.shutdown());
    let Shutdown::Stuck(why) = shutdown else {
        panic!("the session cannot have ended");
    };
    contains_all(&why, &["1 sessions do not end"]);
    let reason = answered("the end of the session", move || queued.ended());
    assert_eq!(reason, "the host is shutting down");
    assert!(engine.memory().free >= free);
    drop(holder);
}

/// The graphs of two guests hang as one batch, and that of a third one waits behind it. The third
/// session can end; those of the batch end with it, or with the executor.
#[test]
fn guests_of_a_batch_that_hangs_wait_for_it_and_others_can_leave() {
    let engine = HangingEngine::with_batches(2);
    let limits = Limits {
        slow: Duration::from_millis(40),
        turn_time: Some(Duration::from_secs(2)),
        ..Limits::default()
    };
    let host = Host::limited(engine.clone(), limits, 64);
    let _released = Released(engine.clone());
    let (mut first, _) = guest_with_graph(&host);
    let (mut caller, of_caller) = guest_with_graph(&host);
    let (mut other_in_batch, of_other) = guest_with_graph(&host);
    // Both wait while the engine has the graph of the first one, and get the next turn together.
    engine.hang(&[Call::Launch, Call::Wait]);
    first.submit(GRAPH);
    dump_with(
        &host,
        "turn: session 1 (guest unix, program test) has the engine",
    );
    for (guest, waiting) in [
        (&mut caller, "; 1 wait for it"),
        (&mut other_in_batch, "; 2 wait for it"),
    ] {
        guest.submit(GRAPH);
        dump_with(&host, waiting);
    }
    engine.hang(&[Call::Batch]);
    engine.wait_until_hanging(Call::Batch);
    let free = engine.memory().free;
    let (mut queued, _) = guest_with_graph(&host);
    queued.submit(GRAPH);

    // The dump names the session whose thread has called the engine, and for whom others wait.
    let text = dump_with(&host, "; session 2 has it; 6 requests received, 5 done");
    contains_all(
        &text,
        &[
            "turn: session 2 (guest unix, program test) has the engine for",
            "session 3 (guest unix, program test)",
        ],
    );
    // The session that waits behind the batch ends at once, those of the batch do not.
    host.server.kill_session(3).expect("the session");
    host.server.kill_session(4).expect("the session");
    let reason = answered("the end of the session", move || queued.ended());
    contains_all(&reason, &["an operator of the host has ended this session"]);
    let start = std::time::Instant::now();
    while host.server.sessions().iter().any(|one| one.id == 4) || engine.memory().free < free {
        assert!(
            start.elapsed() < TIMEOUT / 3,
            "{:?}",
            host.server.sessions()
        );
        thread::sleep(Duration::from_millis(1));
    }
    assert!(
        host.server.sessions().iter().any(|one| one.id == 3),
        "its plan is in the batch"
    );
    // The watchdog names the session that has the engine, and would end the process.
    let (stuck, reports) = mpsc::channel();
    host.server
        .watch(move |why: &str| drop(stuck.send(why.to_owned())))
        .expect("a thread");
    let why = reports.recv_timeout(TIMEOUT).expect("a report");
    contains_all(
        &why,
        &["session 2 (guest unix, program test) has had the engine without a pause"],
    );

    engine.hang(&[]);
    assert_eq!(caller.read_f32(of_caller, 1), [3.0]);
    let reason = answered("the end of the session", move || other_in_batch.ended());
    contains_all(&reason, &["an operator of the host has ended this session"]);
    drop((first, of_other));
}

#[test]
fn shutdown_does_not_wait_for_a_session_that_hangs() {
    let engine = HangingEngine::new();
    let limits = Limits {
        slow: Duration::from_secs(3),
        ..Limits::default()
    };
    let host = Host::limited(engine.clone(), limits, 64);
    let _released = Released(engine.clone());
    let (mut holder, _) = guest_with_graph(&host);
    let idle = host.guest();
    engine.hang(&[Call::Launch]);
    holder.submit(GRAPH);
    engine.wait_until_hanging(Call::Launch);
    let Host { server, .. } = host;
    let shutdown = answered("shutdown", move || server.shutdown());
    let Shutdown::Stuck(why) = shutdown else {
        panic!("the session cannot have ended");
    };
    contains_all(&why, &["1 sessions do not end"]);
    assert_eq!(idle.ended(), "the host is shutting down");
}

#[test]
fn shutdown_waits_for_sessions_that_go_on() {
    let engine = HangingEngine::new();
    let host = Host::new(engine.clone());
    let (mut guest, number) = guest_with_graph(&host);
    guest.submit(GRAPH);
    assert_eq!(guest.read_f32(number, 1), [3.0]);
    let Host { server, .. } = host;
    assert_eq!(server.shutdown(), Shutdown::Complete);
}

#[test]
fn turn_or_call_without_end_is_reported_as_a_hanging_engine() {
    for call in [Call::Launch, Call::Wait, Call::Alloc, Call::Memory] {
        let engine = HangingEngine::new();
        let limits = Limits {
            slow: Duration::from_millis(40),
            turn_time: Some(Duration::from_millis(200)),
            ..Limits::default()
        };
        let host = Host::limited(engine.clone(), limits, 64);
        let _released = Released(engine.clone());
        let (stuck, reports) = mpsc::channel();
        let on_stuck = move |why: &str| drop(stuck.send(why.to_owned()));
        host.server.watch(on_stuck).expect("a thread");
        let (mut guest, _) = guest_with_graph(&host);
        engine.hang(&[call]);
        match call {
            Call::Alloc => drop(guest.send(&Request::Alloc {
                buffer: BufferId(100),
                size: 1,
            })),
            _ => drop(guest.submit(GRAPH)),
        }
        let expected: &[&str] = match call {
            Call::Memory => &["the engine has not answered how much memory is free"],
            Call::Alloc => &[
                "session 1 (guest unix, program test)",
                "executes, request 6 (ALLOC)",
            ],
            _ => &[
                "session 1 (guest unix, program test) has had the engine without a pause",
                "request 6: graph 1 of 1 nodes",
            ],
        };
        // On a busy machine a call before the one that hangs may have taken as long.
        let has_all = |why: &String| expected.iter().all(|part| why.contains(part));
        let mut seen = Vec::new();
        while !seen.iter().any(has_all) {
            let why = reports.recv_timeout(TIMEOUT);
            seen.push(why.unwrap_or_else(|_| panic!("{expected:?} is in none of {seen:#?}")));
        }
    }
}

#[test]
fn busy_engine_is_not_reported_as_hanging() {
    let engine = HangingEngine::new();
    let limits = Limits {
        slow: Duration::from_millis(500),
        turn_time: Some(Duration::from_secs(4)),
        ..Limits::default()
    };
    let host = Host::limited(engine.clone(), limits, 64);
    let (stuck, reports) = mpsc::channel();
    let on_stuck = move |why: &str| drop(stuck.send(why.to_owned()));
    host.server.watch(on_stuck).expect("a thread");
    let (mut guest, number) = guest_with_graph(&host);
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        guest.submit(GRAPH);
        guest.read_f32(number, 1);
    }
    assert_eq!(reports.try_recv().ok(), None);
}

#[test]
fn ends_of_sessions_are_counted_by_reason() {
    let engine = HangingEngine::new();
    let host = Host::new(engine.clone());
    let count = |reason: &str| ends(&host, reason);
    drop(host.guest());
    host.wait_until_empty();
    let mut bad = host.guest();
    bad.send(&Request::Free {
        buffer: BufferId(7),
    });
    bad.ended();
    host.wait_until_empty();
    let start = std::time::Instant::now();
    while (count("closed"), count("violation")) != (1, 1) {
        assert!(start.elapsed() < TIMEOUT);
        thread::sleep(Duration::from_millis(1));
    }
    let text = metrics::render(&host.server.status_handle()).unwrap();
    contains_all(
        &text,
        &[
            "vgpu_session_ended_total{reason=\"closed\"} 1",
            "vgpu_session_ended_total{reason=\"violation\"} 1",
            "vgpu_session_ended_total{reason=\"panic\"} 0",
        ],
    );
}
