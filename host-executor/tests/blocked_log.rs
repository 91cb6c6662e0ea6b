//! A log that nobody reads: a write to it never returns.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use common::hanging_engine::{Call, HangingEngine};
use common::{Host, TIMEOUT, add, bytes};
use vgpu_executor::{Limits, Shutdown};
use vgpu_transport::wire::GraphId;

/// Whether writes of warnings and errors block.
static IS_BLOCKED: AtomicBool = AtomicBool::new(false);

/// A log whose reader has stopped.
struct BlockedLog;

impl Subscriber for BlockedLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        while IS_BLOCKED.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn end_of_a_process_with_a_hanging_engine_does_not_wait_for_the_log() {
    tracing::subscriber::set_global_default(BlockedLog).expect("the first one");
    let engine = HangingEngine::new();
    let limits = Limits {
        slow: Duration::from_millis(40),
        turn_time: Some(Duration::from_millis(200)),
        ..Limits::default()
    };
    let host = Host::limited(engine.clone(), limits, 64);
    let (stuck, reports) = mpsc::channel();
    let on_stuck = move |why: &str| drop(stuck.send(why.to_owned()));
    host.server.watch(on_stuck).expect("a thread");
    let mut guest = host.guest();
    let number = guest.alloc_with(&bytes(&[3.0]));
    guest.graph(GraphId(1), &add(1, number, number, number));
    guest.fence();
    engine.hang(&[Call::Launch]);
    IS_BLOCKED.store(true, Ordering::Relaxed);
    guest.submit(GraphId(1));
    engine.wait_until_hanging(Call::Launch);
    let reported = reports.recv_timeout(TIMEOUT);
    // The end of the program asks for it by a signal: the same rule.
    let (sender, shutdown) = mpsc::channel();
    let Host { server, .. } = host;
    std::thread::spawn(move || sender.send(server.shutdown()));
    let shutdown = shutdown.recv_timeout(TIMEOUT);
    IS_BLOCKED.store(false, Ordering::Relaxed);
    engine.hang(&[]);
    let reported = reported.expect("the watchdog waits for the log");
    assert!(
        reported.contains("has had the engine without a pause"),
        "{reported}"
    );
    let shutdown = shutdown.expect("the shutdown waits for the log");
    assert!(matches!(shutdown, Shutdown::Stuck(_)), "{shutdown:?}");
    drop(Arc::clone(&engine));
}
