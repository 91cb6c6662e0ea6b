//! What each session does now, readable while everything else hangs.
//!
//! A thread that serves a guest publishes what it is about to do: a few atomic words, without a
//! lock. Readers ([`Activities::snapshot`]) take no lock that a session holds while it waits or
//! calls the engine, so `vgpu dump` and the watchdog see a thread that hangs in a driver.
#![forbid(unsafe_code)]

#[cfg(feature = "server")]
mod dump;
#[cfg(feature = "server")]
mod watch;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vgpu_transport::link::{LinkState, LinkWatch};
use vgpu_transport::lock::{lock, try_lock};

use crate::seqlock::{SeqLock, text_of, words_of};
use crate::stats::RequestKind;

#[cfg(feature = "server")]
pub(crate) use dump::{EngineFigures, ProcessFigures, dump};
#[cfg(feature = "server")]
pub(crate) use watch::{Notice, Watch};

/// What a thread that serves a guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThreadState {
    /// Opens the link.
    Handshake,
    /// Waits for the first message.
    FirstMessage,
    /// Registers the memory of the link with the device.
    Pins,
    /// Waits for the next request.
    Idle,
    /// Executes a request.
    Executes,
    /// Calls the engine, in a request that waits for something else, too.
    CallsEngine,
    /// Compiles a graph.
    Compiles,
    /// Waits for a turn on the engine.
    WaitsForEngine,
    /// Waits for the session of another program, which uploads the same weights.
    WaitsForUpload,
    /// Does nothing for a while, as its guest has worked much outside of turns.
    Pauses,
    /// Sends a reply; waits if the guest takes none.
    Replies,
    /// Frees what the session has.
    Ends,
}

impl ThreadState {
    /// Whether the host works, so that the state should end soon.
    fn is_work(self) -> bool {
        match self {
            ThreadState::Pins
            | ThreadState::Executes
            | ThreadState::CallsEngine
            | ThreadState::Compiles
            | ThreadState::Ends => true,
            ThreadState::Handshake
            | ThreadState::FirstMessage
            | ThreadState::Idle
            | ThreadState::WaitsForEngine
            | ThreadState::WaitsForUpload
            | ThreadState::Pauses
            | ThreadState::Replies => false,
        }
    }
}

/// By number.
const THREAD_STATES: [ThreadState; 12] = [
    ThreadState::Handshake,
    ThreadState::FirstMessage,
    ThreadState::Pins,
    ThreadState::Idle,
    ThreadState::Executes,
    ThreadState::CallsEngine,
    ThreadState::Compiles,
    ThreadState::WaitsForEngine,
    ThreadState::WaitsForUpload,
    ThreadState::Pauses,
    ThreadState::Replies,
    ThreadState::Ends,
];

/// A graph, for people. Another request that takes turns has no nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GraphInfo {
    /// The guest's number of the graph.
    pub(crate) graph: u64,
    pub(crate) nodes: usize,
    /// The node that takes longest by estimate, and its operator.
    pub(crate) longest: Option<(usize, &'static str)>,
}

/// Words of the name of a guest, of its program, of its endpoint, and of an operator.
const GUEST: usize = 6;
const PROGRAM: usize = 8;
const ENDPOINT: usize = 8;
const OP: usize = 3;

/// The words of who is served: session, process id (0: unknown), and the texts.
const WHO: usize = 2 + GUEST + ENDPOINT;

/// The words of what is done: state and kind of request, request, since when, since when the
/// request, its turns that are over, nanoseconds that they were queued, the session that is
/// awaited.
const NOW: usize = 7;

/// The words of a turn: since when (0: none), request, graph, nodes, node, operator.
const TURN: usize = 5 + OP;

/// What one thread publishes.
#[derive(Debug, Default)]
struct ActivityRecord {
    is_used: AtomicBool,
    who: SeqLock<WHO>,
    program: SeqLock<PROGRAM>,
    now: SeqLock<NOW>,
    turn: SeqLock<TURN>,
    /// Counts changes of `now` and `turn`.
    steps: AtomicU64,
    received: AtomicU64,
    retired: AtomicU64,
    /// The index of the device of the session.
    device: AtomicUsize,
    /// What the link does. Locked to set and to clone it, never while a thread waits.
    link: Mutex<Option<LinkWatch>>,
}

/// What all threads of an executor that serve guests do.
#[derive(Debug)]
pub(crate) struct Activities {
    /// Times are nanoseconds after this, plus 1.
    start: Instant,
    records: Box<[ActivityRecord]>,
    /// Threads that have found no free record.
    without_record: AtomicU64,
}

/// What one thread does, in the words that it publishes.
#[derive(Debug)]
pub(crate) struct Activity {
    all: Arc<Activities>,
    /// `None`: there was no free record, and the thread is counted only.
    record: Option<usize>,
    /// The request that was published last. One thread writes, so no type that several threads
    /// could share.
    last: Cell<RequestWords>,
    /// The session that is served, by its number. 0 before it has one.
    session: Cell<u64>,
    outside: OutsideTime,
}

/// A request, in the words that its thread publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct RequestWords {
    /// The number of the kind plus 1. 0: no request.
    kind: u64,
    number: u64,
    /// When it began.
    since: u64,
    /// Its turns that are over.
    turns: u64,
    /// Nanoseconds that these turns were queued.
    queued: u64,
}

/// How long a thread has worked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Worked {
    /// Outside of turns.
    pub(crate) outside: Duration,
    /// In turns.
    pub(crate) in_turns: Duration,
}

/// How long a thread has worked outside of turns, on the clock of the activities.
#[derive(Debug, Default)]
struct OutsideTime {
    /// Since when the thread works. `None`: it waits, or has a turn.
    since: Cell<Option<u64>>,
    /// Nanoseconds of work before that.
    worked: Cell<u64>,
    /// Since when the thread has a turn.
    turn: Cell<Option<u64>>,
    /// Nanoseconds of turns before that.
    in_turns: Cell<u64>,
}

impl OutsideTime {
    /// From `time` on the thread works, or does not.
    fn change(&self, is_work: bool, time: u64) {
        let begins = (is_work && self.turn.get().is_none()).then_some(time);
        if let Some(since) = self.since.replace(begins) {
            self.worked
                .set(self.worked.get() + time.saturating_sub(since));
        }
    }

    /// A turn begins.
    fn begin_turn(&self, time: u64) {
        self.turn.set(Some(time));
        self.change(false, time);
    }

    /// The turn has ended. What follows in the same state does not count as work.
    fn end_turn(&self, time: impl FnOnce() -> u64) {
        if let Some(began) = self.turn.take() {
            let took = time().saturating_sub(began);
            self.in_turns.set(self.in_turns.get() + took);
        }
    }

    /// What was counted since the last call.
    fn take(&self, time: u64) -> Worked {
        self.change(self.since.get().is_some(), time);
        Worked {
            outside: Duration::from_nanos(self.worked.take()),
            in_turns: Duration::from_nanos(self.in_turns.take()),
        }
    }
}

/// A session, or a connection that is about to become one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SessionActivity {
    /// The number of the record.
    pub(crate) record: usize,
    pub(crate) id: u64,
    pub(crate) guest: String,
    /// The name that the program gave in HELLO.
    pub(crate) program: Option<String>,
    pub(crate) endpoint: String,
    pub(crate) pid: Option<u64>,
    /// The index of the device. 0 before HELLO.
    pub(crate) device: usize,
    /// `None`: the thread was stopped while it published.
    pub(crate) now: Option<ThreadNow>,
    /// The turn that the session has on the engine.
    pub(crate) turn: Option<TurnNow>,
    /// Counts what the thread has published.
    pub(crate) steps: u64,
    /// The number of the last request that was received, and of the last one that is done.
    pub(crate) received: u64,
    pub(crate) retired: u64,
    /// What the link does.
    pub(crate) link: Option<LinkState>,
}

/// What a thread does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ThreadNow {
    pub(crate) state: ThreadState,
    /// The request that is executed or answered.
    pub(crate) request: Option<RequestNow>,
    /// The session that the thread waits for, by its number, in
    /// [`WaitsForUpload`](ThreadState::WaitsForUpload).
    pub(crate) awaited: Option<u64>,
    /// When the state began, on the clock of the activities.
    pub(crate) since: u64,
    /// How long.
    pub(crate) age: Duration,
}

/// A request, whose thread may have had many states since it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestNow {
    pub(crate) number: u64,
    pub(crate) kind: &'static str,
    /// When it began, on the clock of the activities.
    pub(crate) since: u64,
    /// How long.
    pub(crate) age: Duration,
    /// Its turns on the engine that are over.
    pub(crate) turns: u64,
    /// How long it has waited for turns in all, until now.
    pub(crate) queued: Duration,
}

/// A turn on the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TurnNow {
    pub(crate) request: u64,
    pub(crate) graph: u64,
    pub(crate) nodes: u64,
    /// The node that takes longest by estimate, and its operator.
    pub(crate) longest: Option<(u64, String)>,
    /// When it began, on the clock of the activities.
    pub(crate) since: u64,
    /// How long.
    pub(crate) age: Duration,
}

impl Activities {
    /// Room for `count` threads.
    pub(crate) fn new(count: usize) -> Arc<Activities> {
        Arc::new(Activities {
            start: Instant::now(),
            records: (0..count).map(|_| ActivityRecord::default()).collect(),
            without_record: AtomicU64::new(0),
        })
    }

    /// Begins to publish what this thread does.
    pub(crate) fn begin(self: &Arc<Activities>, id: u64, guest: &str, endpoint: &str) -> Activity {
        let free = self.records.iter().position(|record| {
            let taken = { &record.is_used }.compare_exchange(
                false,
                true,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            taken.is_ok()
        });
        if free.is_none() {
            self.without_record.fetch_add(1, Ordering::Relaxed);
        }
        let activity = Activity {
            all: Arc::clone(self),
            record: free,
            last: Cell::default(),
            session: Cell::default(),
            outside: OutsideTime::default(),
        };
        if let Some(record) = activity.record() {
            record.program.write([0; PROGRAM]);
            record.turn.write([0; TURN]);
            record.received.store(0, Ordering::Relaxed);
            record.retired.store(0, Ordering::Relaxed);
            record.device.store(0, Ordering::Relaxed);
        }
        activity.identify(id, guest, endpoint, None);
        activity.set(ThreadState::Handshake);
        activity
    }

    /// Threads that publish nothing, because all records were used.
    pub(crate) fn without_record(&self) -> u64 {
        self.without_record.load(Ordering::Relaxed)
    }

    /// What all threads do. Takes no lock that a thread holds while it waits.
    pub(crate) fn snapshot(&self) -> Vec<SessionActivity> {
        let now = self.time();
        let records = self.records.iter().enumerate();
        let used = records.filter(|(_, record)| record.is_used.load(Ordering::Acquire));
        let read = used.map(|(number, record)| record.snapshot(number, now));
        // A thread that has just begun has not published who it serves.
        read.filter(|session| session.id != 0).collect()
    }

    /// Nanoseconds, at least 1.
    fn time(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX - 1) + 1
    }
}

impl ActivityRecord {
    fn snapshot(&self, number: usize, time: u64) -> SessionActivity {
        let age = |since: u64| Duration::from_nanos(time.saturating_sub(since));
        let who = self.who.read().unwrap_or_default();
        let program = text_of(&self.program.read().unwrap_or_default());
        let now =
            { self.now.read() }.map(|[what, number, since, began, turns, queued, awaited]| {
                let state = THREAD_STATES[(what & 0xff) as usize % THREAD_STATES.len()];
                let waits = match state {
                    ThreadState::WaitsForEngine => age(since),
                    _ => Duration::ZERO,
                };
                let request = (what >> 8).checked_sub(1).map(|kind| RequestNow {
                    number,
                    kind: RequestKind::name_of(kind as usize),
                    since: began,
                    age: age(began),
                    turns,
                    queued: Duration::from_nanos(queued).saturating_add(waits),
                });
                ThreadNow {
                    state,
                    request,
                    awaited: (awaited != 0).then_some(awaited),
                    since,
                    age: age(since),
                }
            });
        let turn = self.turn.read().filter(|words| words[0] != 0);
        let turn = turn.map(|[since, request, graph, nodes, node, op @ ..]| {
            let op = text_of(&op);
            TurnNow {
                request,
                graph,
                nodes,
                longest: (!op.is_empty()).then_some((node, op)),
                since,
                age: age(since),
            }
        });
        let link = try_lock(&self.link).and_then(|link| link.clone());
        SessionActivity {
            record: number,
            id: who[0],
            guest: text_of(&who[2..2 + GUEST]),
            program: (!program.is_empty()).then_some(program),
            endpoint: text_of(&who[2 + GUEST..]),
            pid: (who[1] != 0).then_some(who[1]),
            device: self.device.load(Ordering::Relaxed),
            now,
            turn,
            steps: self.steps.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
            retired: self.retired.load(Ordering::Relaxed),
            link: link.as_ref().map(LinkWatch::read),
        }
    }
}

impl Activity {
    fn record(&self) -> Option<&ActivityRecord> {
        self.record.map(|record| &self.all.records[record])
    }

    /// Who is served.
    pub(crate) fn identify(&self, id: u64, guest: &str, endpoint: &str, pid: Option<i32>) {
        self.session.set(id);
        let Some(record) = self.record() else { return };
        let mut who = [0; WHO];
        who[0] = id;
        who[1] = pid.and_then(|pid| u64::try_from(pid).ok()).unwrap_or(0);
        who[2..2 + GUEST].copy_from_slice(&words_of::<GUEST>(guest));
        who[2 + GUEST..].copy_from_slice(&words_of::<ENDPOINT>(endpoint));
        record.who.write(who);
    }

    /// The session that is served, by its number. 0 before it has one.
    pub(crate) fn session(&self) -> u64 {
        self.session.get()
    }

    /// The device of the session, by its index.
    pub(crate) fn set_device(&self, device: usize) {
        if let Some(record) = self.record() {
            record.device.store(device, Ordering::Relaxed);
        }
    }

    /// The name that the program gave in HELLO.
    pub(crate) fn set_program(&self, name: &str) {
        if let Some(record) = self.record() {
            record.program.write(words_of(name));
        }
    }

    /// What the link does.
    pub(crate) fn set_link(&self, link: Option<LinkWatch>) {
        if let Some(record) = self.record() {
            let mut shared = lock(&record.link);
            let old = std::mem::replace(&mut *shared, link);
            drop(shared);
            drop(old);
        }
    }

    /// The thread begins something that is no part of a request.
    pub(crate) fn set(&self, state: ThreadState) {
        self.publish(state, None, 0);
    }

    /// The thread begins a part of a request.
    pub(crate) fn request(&self, state: ThreadState, kind: RequestKind, request: u64) {
        self.publish(state, Some((kind.number() as u64 + 1, request)), 0);
        if let Some(record) = self.record() {
            record.received.store(request, Ordering::Relaxed);
        }
    }

    /// The thread begins another part of the same request.
    pub(crate) fn continue_request(&self, state: ThreadState) {
        let RequestWords { kind, number, .. } = self.last.get();
        self.publish(state, Some((kind, number)), 0);
    }

    /// The thread begins to wait, in the same request, for what the session `awaited` uploads.
    pub(crate) fn wait_for_upload_of(&self, awaited: u64) {
        let RequestWords { kind, number, .. } = self.last.get();
        self.publish(ThreadState::WaitsForUpload, Some((kind, number)), awaited);
    }

    /// Publishes a state, the request that it is a part of, by its kind and its number, and the
    /// session that the thread waits for, 0 for none. Another request than before begins now.
    fn publish(&self, state: ThreadState, request: Option<(u64, u64)>, awaited: u64) {
        let time = self.all.time();
        self.outside.change(state.is_work(), time);
        let (kind, number) = request.unwrap_or_default();
        let mut last = self.last.get();
        if (last.kind, last.number) != (kind, number) {
            last = RequestWords {
                kind,
                number,
                since: time,
                ..RequestWords::default()
            };
            self.last.set(last);
        }
        let RequestWords {
            since,
            turns,
            queued,
            ..
        } = last;
        let Some(record) = self.record() else { return };
        let what = state as u64 | kind << 8;
        let words = [what, number, time, since, turns, queued, awaited];
        record.now.write(words);
        record.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Turns of a request are over, and were queued for so long. They are published with the next
    /// state.
    pub(crate) fn count_turns(&self, request: u64, turns: u64, queued: Duration) {
        let mut last = self.last.get();
        // A READ that is executed behind a graph has a number of its own.
        if last.number == request {
            last.turns += turns;
            last.queued += queued.as_nanos() as u64;
            self.last.set(last);
        }
    }

    /// All requests that were received are done.
    pub(crate) fn retired(&self) {
        if let Some(record) = self.record() {
            let received = record.received.load(Ordering::Relaxed);
            record.retired.store(received, Ordering::Relaxed);
        }
    }

    /// How long the thread has worked outside of turns, up to the last change of what it does.
    pub(crate) fn worked(&self) -> Duration {
        Duration::from_nanos(self.outside.worked.get())
    }

    /// How long the thread has worked outside of turns, until now, and in the turns that have
    /// ended, both since the last call.
    pub(crate) fn take_worked(&self) -> Worked {
        self.outside.take(self.all.time())
    }

    /// A turn of a graph begins.
    pub(crate) fn begin_turn(&self, request: u64, info: &GraphInfo) {
        let time = self.all.time();
        self.outside.begin_turn(time);
        let Some(record) = self.record() else { return };
        let (node, op) = info.longest.unwrap_or_default();
        let mut turn = [0; TURN];
        turn[0] = time;
        turn[1] = request;
        turn[2] = info.graph;
        turn[3] = info.nodes as u64;
        turn[4] = node as u64;
        turn[5..].copy_from_slice(&words_of::<OP>(op));
        record.turn.write(turn);
        record.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// The turn has ended.
    pub(crate) fn end_turn(&self) {
        self.outside.end_turn(|| self.all.time());
        if let Some(record) = self.record() {
            record.turn.write([0; TURN]);
            record.steps.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        self.set_link(None);
        match self.record() {
            Some(record) => {
                record.who.write([0; WHO]);
                record.is_used.store(false, Ordering::Release);
            }
            None => {
                self.all.without_record.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_work_outside_of_turns_is_counted() {
        let outside = OutsideTime::default();
        let worked = || outside.worked.get();
        outside.change(true, 10);
        outside.change(true, 12);
        outside.change(false, 15);
        assert_eq!(worked(), 5);
        outside.change(true, 100);
        assert_eq!(worked(), 5, "the thread waited");
        // A turn, in which the thread sends a reply, too.
        outside.begin_turn(101);
        outside.change(true, 200);
        outside.change(false, 300);
        assert_eq!(worked(), 6);
        outside.end_turn(|| 350);
        outside.end_turn(|| panic!("no turn"));
        outside.change(true, 400);
        let nanos = Duration::from_nanos;
        let counted = Worked {
            outside: nanos(7),
            in_turns: nanos(249),
        };
        assert_eq!(outside.take(401), counted);
        outside.change(false, 402);
        assert_eq!(outside.take(500).outside, nanos(1));
    }

    /// Also of a thread that publishes nothing.
    #[test]
    fn work_of_a_thread_is_taken_once() {
        let all = Activities::new(1);
        for activity in [all.begin(1, "-", "-"), all.begin(2, "-", "-")] {
            activity.set(ThreadState::Idle);
            assert_eq!(activity.take_worked(), Worked::default());
            activity.request(ThreadState::Executes, RequestKind::of_name("WRITE"), 1);
            while activity.take_worked().outside.is_zero() {
                std::hint::spin_loop();
            }
            activity.set(ThreadState::Pauses);
            let rest = activity.worked();
            assert_eq!(activity.take_worked().outside, rest);
            assert_eq!(activity.take_worked(), Worked::default());
        }
    }

    /// A request has many states, and its age is its own.
    #[test]
    fn age_of_a_request_is_that_of_all_its_turns() {
        let all = Activities::new(1);
        let activity = all.begin(1, "-", "-");
        let submit = RequestKind::of_name("SUBMIT");
        let now = || {
            let now = all.snapshot()[0].now.expect("the thread does not write");
            (now, now.request.expect("a request"))
        };
        activity.request(ThreadState::Executes, submit, 9);
        let (_, first) = now();
        for turn in 1..=3 {
            activity.request(ThreadState::WaitsForEngine, submit, 9);
            activity.request(ThreadState::Executes, submit, 9);
            activity.begin_turn(9, &GraphInfo::default());
            activity.end_turn();
            activity.count_turns(9, 1, Duration::from_secs(2));
            activity.request(ThreadState::WaitsForEngine, submit, 9);
            let (state, request) = now();
            assert_eq!((request.since, request.turns), (first.since, turn));
            assert!(state.since > first.since, "the state is a later one");
            assert!(request.age >= state.age);
            // The present wait counts, too.
            let over = Duration::from_secs(2 * turn);
            assert!(
                (over..over + request.age).contains(&request.queued),
                "{request:?}"
            );
        }
        activity.continue_request(ThreadState::Replies);
        assert_eq!(now().1.since, first.since);
        // Turns of another request do not count.
        activity.request(ThreadState::Executes, RequestKind::of_name("READ"), 10);
        activity.count_turns(9, 1, Duration::from_secs(2));
        activity.continue_request(ThreadState::Replies);
        let (_, read) = now();
        assert_eq!((read.turns, read.queued), (0, Duration::ZERO));
        assert!(read.since > first.since);
        activity.set(ThreadState::Idle);
        assert_eq!(all.snapshot()[0].now.and_then(|now| now.request), None);
    }

    #[test]
    fn a_snapshot_tells_what_a_thread_does_and_for_whom() {
        let all = Activities::new(1);
        let activity = all.begin(7, "user 0", "unix:/run/vgpu.sock");
        let second = all.begin(8, "-", "-");
        assert_eq!(all.without_record(), 1);
        activity.identify(7, "alice", "unix:/run/vgpu.sock", Some(42));
        activity.set_program("llama-server");
        activity.request(ThreadState::Executes, RequestKind::of_name("FENCE"), 8);
        activity.retired();
        activity.request(ThreadState::Executes, RequestKind::of_name("SUBMIT"), 9);
        let longest = Some((3, "MUL_MAT"));
        let (graph, nodes) = (2, 100);
        activity.begin_turn(
            9,
            &GraphInfo {
                graph,
                nodes,
                longest,
            },
        );
        let [session] = &all.snapshot()[..] else {
            panic!("{:?}", all.snapshot());
        };
        assert_eq!((session.id, session.guest.as_str()), (7, "alice"));
        assert_eq!(session.program.as_deref(), Some("llama-server"));
        assert_eq!(
            (session.pid, session.received, session.retired),
            (Some(42), 9, 8)
        );
        let now = session.now.expect("the thread does not write");
        let request = now.request.expect("a request");
        assert_eq!(now.state, ThreadState::Executes);
        assert_eq!((request.number, request.kind), (9, "SUBMIT"));
        let turn = session.turn.as_ref().expect("a turn");
        assert_eq!((turn.graph, turn.nodes, turn.request), (2, 100, 9));
        assert_eq!(turn.longest, Some((3, "MUL_MAT".into())));
        activity.end_turn();
        assert_eq!(all.snapshot()[0].turn, None);
        drop((activity, second));
        assert_eq!((all.snapshot(), all.without_record()), (Vec::new(), 0));
        // Nothing of an earlier thread is left.
        let again = all.begin(9, "bob", "-");
        let [session] = &all.snapshot()[..] else {
            panic!("{:?}", all.snapshot());
        };
        assert_eq!((session.program.clone(), session.received), (None, 0));
        drop(again);
    }
}
