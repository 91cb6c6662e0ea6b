//! A supervisor whose workers have been taken over: each test is one thing that such a worker does.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine as _;
use vgpu_transport::link::GuestEnd;
use vgpu_transport::link::unix::{self, ListenOptions, Listener};
use vgpu_transport::wire::{Offer, ProtocolVersion, Reply, Request};

use super::ipc::{self, IpcSocket, ReceiveOutcome, WorkerMessage, WorkerReport};
use super::partition::{Partition, Resources};
use super::state::Timeouts;
use super::{Supervisor, serve, take_socket};
use crate::OperatorRequest;
use crate::control;
use crate::limits::Limits;
use crate::log_limit::{GUEST_LINES, INTERVAL};
use crate::policy::Policy;
use crate::server::Server;
use crate::status::{Progress, Report, Status};
use crate::stop::StopFlag;
use crate::tenant_registry::{GuestRule, Rules};

/// What the worker of a test does, in its environment.
const DEED: &str = "VGPU_TEST_WORKER";

/// How long a test waits for an event.
const TIMEOUT: Duration = Duration::from_secs(60);

const MEMORY: u64 = 16 << 20;

/// Lines of a worker about its sessions: fewer than a guest may have in ten seconds.
const CHATTY: usize = 150;

/// From this time on a process without reports counts as one that hangs. A question to the process
/// of a virtual machine takes longer if it is not answered.
const SILENCE: Duration = Duration::from_secs(1);

/// The worker: this test program, started again by the tests below.
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
            let report = WorkerMessage::from(WorkerReport {
                served: 0,
                pending: Vec::new(),
                report: honest.clone(),
            });
            // Until the supervisor closes the connection.
            while let Ok(()) | Err(FULL) = ipc.send(&report, None).map_err(|e| e.kind()) {}
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
        // All programs have ended, says the worker.
        "ended" => {
            let report = WorkerMessage::from(WorkerReport {
                served: u64::MAX,
                pending: Vec::new(),
                report: honest.clone(),
            });
            let _ = ipc.send(&report, None);
        }
        // Reports once, and answers no question.
        "mute" => {
            let report = WorkerMessage::from(WorkerReport {
                served: 0,
                pending: Vec::new(),
                report: honest.clone(),
            });
            let _ = ipc.send(&report, None);
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

/// The socket has no room.
const FULL: std::io::ErrorKind = std::io::ErrorKind::WouldBlock;

/// Figures of a worker that claims the sessions and the figures of everyone.
fn claims(mut report: Report, own: u64) -> WorkerMessage {
    let mut guest = report.status.guests[0].clone();
    guest.usage.memory = u64::MAX;
    guest.usage.graphs = u64::MAX;
    guest.usage.busy = f64::MAX;
    guest.usage.queued = -f64::MAX;
    report.status.guests = ["a", "b", "-", "-"]
        .map(|name| crate::status::GuestStatus {
            name: name.into(),
            ..guest.clone()
        })
        .into();
    let session = |id| crate::status::SessionStatus {
        id,
        guest: "b".into(),
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
        report,
    })
}

/// A supervisor whose workers do given deeds, one after the other.
struct Supervised {
    supervisor: Option<Supervisor>,
    folder: tempfile::TempDir,
    /// Workers that have been started.
    started: Arc<AtomicUsize>,
}

impl Supervised {
    /// `timeout`: for the end of a process.
    fn new(timeout: Duration, deeds: &[&'static str]) -> Supervised {
        let folder = tempfile::tempdir().expect("a new folder");
        let deeds = Mutex::new(VecDeque::from(deeds.to_vec()));
        let own = std::env::current_exe().expect("this program");
        let started = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&started);
        let worker = Box::new(move |_: Option<u64>| {
            count.fetch_add(1, Ordering::Relaxed);
            let deed = deeds
                .lock()
                .expect("no panic")
                .pop_front()
                .unwrap_or("silent");
            // The shell drops the arguments that the supervisor adds.
            let mut command = Command::new("/bin/sh");
            command
                .args([
                    "-c",
                    "exec \"$0\" --exact isolate::hostile_tests::worker_process",
                ])
                .arg(&own)
                .env(DEED, deed);
            command
        });
        let named = |name: &str| GuestRule {
            name: name.into(),
            uids: Vec::new(),
            cids: Vec::new(),
            certificates: Vec::new(),
            policy: Policy {
                memory: Some(MEMORY),
                ..Policy::default()
            },
        };
        let partition = Partition {
            rules: Rules {
                guests: vec![named("a"), named("b")],
                unnamed: Some(Policy::default()),
                overcommit: true,
            },
            max_unnamed: 16,
            max_sessions: 16,
        };
        let resources = Resources {
            engine: "cpu".into(),
            unused_gpu: None,
            memory: Some(MEMORY),
        };
        let timeouts = Timeouts {
            end: timeout,
            ready: timeout,
            machine_end: timeout,
            machine_kill: timeout,
            silence: SILENCE,
            ..Timeouts::default()
        };
        let limits = Limits::default().handshakes;
        let supervisor = Supervisor::with_timeouts(worker, resources, partition, limits, timeouts);
        let mut supervisor = supervisor.expect("room for the quotas");
        for guest in ["a", "b"] {
            let listener = Listener::bind(&folder.path().join(guest), ListenOptions::default());
            let listener = listener.expect("a socket");
            { supervisor.listen_for(Some(guest.into()), listener) }.expect("a thread");
        }
        Supervised {
            supervisor: Some(supervisor),
            folder,
            started,
        }
    }

    fn path(&self, guest: &str) -> PathBuf {
        self.folder.path().join(guest)
    }

    /// A program that sends one byte, for a new worker that does not serve.
    fn program(&self, guest: &str) -> OwnedFd {
        let started = self.started.load(Ordering::Relaxed);
        let socket = self.connect(guest);
        // The supervisor is locked until the worker is in its list.
        eventually("it has a worker", || {
            self.started.load(Ordering::Relaxed) > started
        });
        socket
    }

    /// A program that sends one byte.
    fn connect(&self, guest: &str) -> OwnedFd {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket(family, kind, None).expect("a socket");
        let address = SocketAddrUnix::new(self.path(guest)).expect("an address");
        rustix::net::connect(&socket, &address).expect("a connection");
        rustix::net::send(&socket, &[0], SendFlags::empty()).expect("a byte");
        socket
    }

    fn shared(&self) -> &super::state::SupervisorState {
        self.supervisor.as_ref().expect("it runs").shared()
    }

    fn status(&self) -> Status {
        let handle = self.supervisor.as_ref().expect("it runs").status_handle();
        handle.status()
    }

    fn progress(&self) -> Progress {
        let handle = self.supervisor.as_ref().expect("it runs").status_handle();
        handle.progress()
    }

    /// The processes of a guest.
    fn processes(&self, guest: &str) -> usize {
        let processes = self.shared().processes();
        let workers = processes.workers.values();
        workers
            .filter(|w| w.guest.as_deref() == Some(guest) && !w.is_rejection)
            .count()
    }

    /// Ends the supervisor, which has to come to an end.
    fn shutdown(&mut self) {
        let supervisor = self.supervisor.take().expect("it runs");
        let (sender, done) = mpsc::channel();
        thread::spawn(move || {
            supervisor.shutdown();
            let _ = sender.send(());
        });
        done.recv_timeout(TIMEOUT).expect("it ends");
    }
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Connects to an honest worker, and asks for the size of its memory.
fn served(path: &Path) -> Box<dyn GuestEnd> {
    let mut end = unix::connect(path, TIMEOUT).expect("a link");
    let reply = hello(&mut end);
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
    Box::new(end)
}

const SOON: Duration = Duration::from_millis(200);

#[test]
fn garbage_of_a_worker_affects_only_its_guest() {
    let mut test = Supervised::new(SOON, &["garbage", "honest"]);
    let _hostile = test.program("a");
    let _guest = served(&test.path("b"));
    eventually("b is shown", || {
        test.status()
            .sessions
            .iter()
            .any(|session| session.guest == "b")
    });
    // The guest of the worker is no better off than before.
    assert_eq!(test.processes("a"), 1);
    test.shutdown();
}

#[test]
fn a_dump_has_the_sessions_of_the_workers_and_names_a_worker_that_does_not_answer() {
    let mut test = Supervised::new(SOON, &["mute", "honest"]);
    let _hostile = test.program("a");
    let _guest = served(&test.path("b"));
    eventually("both workers report", || {
        let processes = test.shared().processes();
        processes.workers.values().all(|w| w.report.is_some())
    });
    let text = super::dump::dump(test.shared());
    let lines: Vec<&str> = text.lines().collect();
    let of = |guest: &str| {
        let name = format!("of guest {guest}, process ");
        let line = lines.iter().position(|line| line.contains(&name));
        line.unwrap_or_else(|| panic!("no worker of {guest}:\n{text}"))
    };
    let (mute, honest) = (lines[of("a")], of("b"));
    let late = mute.contains("no answer within 2s; kill -USR1 ");
    assert!(late, "{text}");
    let indented = lines[honest + 1..].iter();
    let indented: Vec<_> = indented.take_while(|line| line.starts_with("  ")).collect();
    for part in [
        "  engine cpu: ",
        "  session ",
        "program test",
        "waits for the guest's next",
    ] {
        let is_there = indented.iter().any(|line| line.contains(part));
        assert!(is_there, "{part:?} is not in the dump of b:\n{text}");
    }
    // A later answer, and one that nobody has asked for, are dropped.
    for worker in test.shared().processes().workers.values_mut() {
        worker.answer_dump(u64::MAX, "late".into());
        assert!(!worker.has_dump(u64::MAX));
    }
    test.shutdown();
}

#[test]
fn shutdown_does_not_wait_for_the_process_of_a_virtual_machine_without_end() {
    let mut test = Supervised::new(SOON, &[]);
    let supervisor = test.supervisor.as_mut().expect("it runs");
    let (socket, control) = (
        test.folder.path().join("vm"),
        test.folder.path().join("control"),
    );
    // A process that no signal but SIGKILL ends.
    let command = || {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "trap '' TERM; exec sleep 600"]);
        command
    };
    let started = supervisor.start_vm("vm1", Box::new(command), &socket, &control);
    started.expect("it starts");
    supervisor.wait_for_vms().expect("it does not end");
    let machines = test.shared().processes().machines.len();
    assert_eq!(machines, 1);
    test.shutdown();
}

#[test]
fn main_thread_is_expected_to_run_from_its_handle_on() {
    let mut test = Supervised::new(SOON, &[]);
    assert_eq!(test.shared().main.age(), None, "nobody checks");
    let _health = test.supervisor.as_ref().expect("it runs").health();
    assert!(test.shared().main.age().is_some());
    test.shutdown();
}

#[test]
fn worker_that_reports_no_more_makes_no_progress() {
    let mut test = Supervised::new(SOON, &["mute"]);
    let _hostile = test.program("a");
    let words = " of guest a has reported nothing for ";
    eventually(
        "the supervisor says so",
        || matches!(test.progress(), Progress::Late(why) if why.contains(words)),
    );
    test.shutdown();
}

/// A control socket that answers with `report` while the flag is set. Nobody closes the connections
/// of others.
fn answer_while(flag: &Arc<AtomicBool>, control: &Path, report: &Report) {
    let (listener, file) = control::bind(control).expect("a socket");
    let (flag, answer) = (Arc::clone(flag), serde_json::to_vec(report).expect("JSON"));
    thread::spawn(move || {
        let (_file, mut unanswered) = (file, Vec::new());
        for client in listener.incoming() {
            let mut client = client.expect("a client");
            if flag.load(Ordering::Relaxed) {
                let mut line = String::new();
                let _ = BufReader::new(&client).read_line(&mut line);
                let _ = client.write_all(&answer);
            } else {
                unanswered.push(client);
            }
        }
    });
}

#[test]
fn process_of_a_virtual_machine_that_falls_mute_makes_no_progress() {
    let mut test = Supervised::new(SOON, &[]);
    let control = start_machine(&mut test);
    let runs = || matches!(test.progress(), Progress::Runs(_));
    assert!(runs(), "nobody listens yet");

    let engine = Arc::new(CpuEngine::new(1, Some(MEMORY)).expect("an engine"));
    let server = Server::new(engine, Limits::default(), 1).expect("a thread");
    let mut report = server.status_handle().report();
    // By which the test knows that the answer has arrived.
    report.status.engine.turn = Some(5.0);
    let answers = Arc::new(AtomicBool::new(false));
    answer_while(&answers, &control, &report);
    assert!(
        runs(),
        "it has not answered yet: its engine may be starting"
    );
    for _ in 0..2 {
        answers.store(true, Ordering::Relaxed);
        eventually("it answers", || test.status().engine.turn == Some(5.0));
        assert!(runs(), "it answers");
        answers.store(false, Ordering::Relaxed);
        let found = test.progress();
        let words = "the process of the virtual machine vm1 has reported nothing for ";
        assert!(
            matches!(&found, Progress::Late(why) if why.starts_with(words)),
            "{found:?}"
        );
    }
    test.shutdown();
}

#[test]
fn worker_that_never_reports_is_killed() {
    let mut test = Supervised::new(SOON, &["silent"]);
    let supervisor = test.supervisor.as_ref().expect("it runs");
    supervisor.limit_starts(SOON);
    let _program = test.program("a");
    eventually("the worker is killed", || test.processes("a") == 0);
    test.shutdown();
}

/// Each process ends in its own way when the other one has been started, which would otherwise be
/// waited for in vain.
#[test]
fn virtual_machines_are_started_before_one_of_them_is_waited_for() {
    let mut test = Supervised::new(TIMEOUT, &[]);
    let folder = test.folder.path().to_owned();
    let supervisor = test.supervisor.as_mut().expect("it runs");
    for (own, other) in [("vm1", "vm2"), ("vm2", "vm1")] {
        let script = format!(
            "touch started-{own}; i=0; until [ -e started-{other} ]; do \
             i=$((i + 1)); [ $i -lt 100 ] || exit 1; sleep 0.05; done; exit 7"
        );
        let at = folder.clone();
        let command = move || {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", &script]).current_dir(&at);
            command
        };
        let (socket, control) = (folder.join(own), folder.join(format!("{own}-control")));
        let started = supervisor.start_vm(own, Box::new(command), &socket, &control);
        started.expect("it starts");
    }
    let (_, error) = supervisor.wait_for_vms().expect_err("they end");
    assert_eq!(error.to_string(), "its process ended with exit status: 7");
}

/// One of them does not start. The other one is watched all the same, and ends at the shutdown; so
/// does one that nobody has waited for.
#[test]
fn processes_of_other_virtual_machines_are_watched_after_a_failed_start() {
    for waits in [true, false] {
        let mut test = Supervised::new(SOON, &[]);
        let folder = test.folder.path().to_owned();
        let supervisor = test.supervisor.as_mut().expect("it runs");
        for (name, script) in [("vm1", "exec sleep 600"), ("vm2", "exit 7")] {
            let command = move || {
                let mut command = Command::new("/bin/sh");
                command.args(["-c", script]);
                command
            };
            let (socket, control) = (folder.join(name), folder.join(format!("{name}-control")));
            let started = supervisor.start_vm(name, Box::new(command), &socket, &control);
            started.expect("it starts");
        }
        let shared = supervisor.shared_copy();
        if waits {
            let (name, error) = supervisor.wait_for_vms().expect_err("one ends");
            assert_eq!(name, "vm2");
            assert_eq!(error.to_string(), "its process ended with exit status: 7");
        }
        test.shutdown();
        let left = shared.processes().machines.len();
        assert_eq!(left, 0, "nobody has waited for so many processes");
    }
}

#[test]
fn flood_of_reports_does_not_keep_others_from_being_served() {
    // Time enough for the end of an honest worker beside the flood.
    let end = Duration::from_secs(2);
    let mut test = Supervised::new(end, &["flood", "honest", "honest", "honest"]);
    let _hostile = test.program("a");
    for _ in 0..3 {
        drop(served(&test.path("b")));
        // A guest may have two processes that are ending.
        eventually("the process of b has ended", || test.processes("b") == 0);
    }
    test.shutdown();
}

#[test]
fn claims_of_a_worker_count_for_its_own_guest_only() {
    let mut test = Supervised::new(SOON, &["honest", "claims"]);
    let _guest = served(&test.path("b"));
    eventually("b is shown", || !test.status().sessions.is_empty());
    let _hostile = test.program("a");
    eventually("a is shown", || {
        test.status()
            .sessions
            .iter()
            .any(|session| session.guest == "a")
    });
    let status = test.status();
    let of = |name: &str| {
        let guests = status.guests.iter();
        let guest = guests.clone().find(|guest| guest.name == name);
        guest.expect("it is named").usage
    };
    assert_eq!(
        (of("a").memory, of("b").memory, of("-").memory),
        (u64::MAX, 0, 0)
    );
    let sessions = |guest: &str| {
        let sessions = status
            .sessions
            .iter()
            .filter(|session| session.guest == guest);
        sessions.count()
    };
    assert_eq!(
        (sessions("a"), sessions("b"), status.sessions.len()),
        (1, 1, 2)
    );
    for session in &status.sessions {
        let text = format!("{}{:?}", session.endpoint, session.program);
        assert!(!text.contains('\x1b') && text.len() < 1000, "{text}");
    }
    // The figures are numbers, which `vgpu ps` can read.
    let text = serde_json::to_string(&status).expect("text");
    let read: Status = serde_json::from_str(&text).expect("numbers");
    assert_eq!(read.sessions.len(), 2);
    assert!(of("a").busy.is_finite() && of("a").queued >= 0.0);
    test.shutdown();
}

#[test]
fn worker_that_closes_its_connection_or_is_silent_is_killed() {
    let mut test = Supervised::new(SOON, &["closes", "silent"]);
    let _closing = test.program("a");
    eventually("it is killed", || test.processes("a") == 0);
    let _silent = test.program("b");
    eventually("it runs", || test.processes("b") == 1);
    // A worker that does not answer does not keep the executor from ending.
    test.shutdown();
}

#[test]
fn half_open_programs_of_a_guest_keep_out_no_other_guest_of_the_same_user() {
    let mut test = Supervised::new(SOON, &["silent"]);
    let mut programs = vec![test.program("a")];
    for _ in 0..7 {
        programs.push(test.connect("a"));
    }
    let origin = format!("uid:{}", rustix::process::getuid().as_raw());
    let has_to_wait = |guest| test.shared().processes().has_to_wait(Some(guest), &origin);
    eventually("further programs of the guest wait", || has_to_wait("a"));
    assert!(!has_to_wait("b"), "another guest waits, too");
    drop(programs);
    test.shutdown();
}

#[test]
fn guest_gets_no_further_memory_while_its_workers_do_not_end() {
    let mut test = Supervised::new(Duration::from_secs(3), &["ended"; 8]);
    let mut programs = Vec::new();
    let mut most = 0;
    for _ in 0..6 {
        programs.push(test.program("a"));
        // Until the supervisor believes that the program has ended.
        eventually("its worker is told to end", || {
            let processes = test.shared().processes();
            let mut workers = processes.workers.values();
            workers.all(|worker| worker.is_closing || worker.is_rejection)
        });
        most = most.max(test.processes("a"));
    }
    assert!(most <= 3, "{most} processes of one guest at once");
    test.shutdown();
}

#[test]
fn workers_of_a_guest_have_one_limit_of_lines_about_its_sessions() {
    const ATTEMPTS: usize = 10;
    let is_in_one_period = (0..ATTEMPTS).any(|_| {
        let mut test = Supervised::new(SOON, &["chatty", "chatty"]);
        let begin = Instant::now();
        for _ in 0..2 {
            let _program = test.program("a");
            eventually("it ends", || test.processes("a") == 0);
        }
        if begin.elapsed() > INTERVAL / 2 {
            test.shutdown();
            return false;
        }
        // The supervisor has a line about the end of each, the last one after that.
        let mut left_out = 0;
        let most = 2 * (CHATTY as u64 + 1) - GUEST_LINES;
        eventually("it says how many lines are missing", || {
            for said in test.shared().session_log.rest() {
                let said = said.to_string();
                assert!(
                    said.contains(" lines about sessions of guest a were"),
                    "{said}"
                );
                let count = said.split(' ').next().and_then(|n| n.parse::<u64>().ok());
                left_out += count.expect("a number");
            }
            left_out == most
        });
        test.shutdown();
        true
    });
    assert!(
        is_in_one_period,
        "two workers take longer than {INTERVAL:?}"
    );
}

/// The next message of a worker.
fn receive(end: &mut dyn GuestEnd) -> Reply {
    let mut message = Vec::new();
    end.receive(&mut message, (&mut [][..]).into())
        .expect("a reply");
    Reply::decode(ProtocolVersion::CURRENT, &message).expect("a reply")
}

/// Why a worker ends a session, or gives none.
fn reason(reply: Reply) -> String {
    match reply {
        Reply::Ended { reason } => reason,
        Reply::Welcome { .. } => panic!("a session"),
        other => panic!("{other:?}"),
    }
}

/// Sends HELLO over a link, and returns the answer.
fn hello(end: &mut dyn GuestEnd) -> Reply {
    let mut message = Vec::new();
    let hello = Request::Hello {
        offer: Offer::SERVED,
        name: "test".into(),
    };
    hello.encode(ProtocolVersion::CURRENT, &mut message);
    end.send(&message, (&[][..]).into()).expect("a worker");
    receive(end)
}

#[test]
fn program_in_its_handshake_gets_no_session_after_the_deadline_of_a_drain() {
    let mut test = Supervised::new(TIMEOUT, &["honest"]);
    let mut early: Vec<_> = (0..2)
        .map(|_| unix::connect(&test.path("a"), TIMEOUT).expect("a link"))
        .collect();
    let mut open = served(&test.path("a"));
    let supervisor = test.supervisor.as_ref().expect("it runs");
    assert!(supervisor.drain(Some(Duration::ZERO)).is_empty());
    assert_eq!(supervisor.health().end_drained(), 3);
    assert_eq!(supervisor.health().end_drained(), 0, "they are told once");
    assert_eq!(
        reason(receive(open.as_mut())),
        "the host drains, and ends the sessions that are open after 0ns"
    );
    // The other one keeps the worker.
    let refusal = reason(hello(&mut early[0]));
    let words = "the host drains: it accepts no new sessions";
    assert!(refusal.starts_with(words), "{refusal}");
    assert_eq!(supervisor.undrain(), (true, Vec::new()));
    let _served = served(&test.path("a"));
    assert_eq!(
        test.started.load(Ordering::Relaxed),
        1,
        "by the same worker"
    );
    drop(early);
    test.shutdown();
}

/// The executor of a virtual machine behind a control socket.
struct ObedientVm {
    server: Arc<Server>,
    /// Whether it answers.
    answers: Arc<AtomicBool>,
    /// The requests that it has carried out.
    requests: Arc<Mutex<Vec<String>>>,
}

impl ObedientVm {
    fn start(control: &Path, answers: bool) -> ObedientVm {
        let engine = Arc::new(CpuEngine::new(1, Some(MEMORY)).expect("an engine"));
        let server = Server::new(engine, Limits::default(), 64).expect("a thread");
        let vm = ObedientVm {
            server: Arc::new(server),
            answers: Arc::new(AtomicBool::new(answers)),
            requests: Arc::default(),
        };
        let (listener, file) = control::bind(control).expect("a socket");
        let (server, answers) = (Arc::clone(&vm.server), Arc::clone(&vm.answers));
        let requests = Arc::clone(&vm.requests);
        thread::spawn(move || {
            let _file = file;
            for client in listener.incoming() {
                let mut client = client.expect("a client");
                let mut line = String::new();
                let _ = BufReader::new(&client).read_line(&mut line);
                if !answers.load(Ordering::Relaxed) {
                    continue;
                }
                let answer = match serde_json::from_str(&line) {
                    Err(_) if line == "report\n" => {
                        serde_json::to_string(&server.status_handle().report())
                    }
                    Err(error) => panic!("{line}: {error}"),
                    Ok(request) => {
                        match request {
                            OperatorRequest::Drain { .. } => server.drain(None),
                            OperatorRequest::Undrain => drop(server.undrain()),
                            _ => {}
                        }
                        requests.lock().expect("no panic").push(line);
                        Ok("{\"ok\":true,\"message\":\"\"}".to_owned())
                    }
                };
                let _ = client.write_all(format!("{}\n", answer.expect("JSON")).as_bytes());
            }
        });
        vm
    }

    /// The requests with this word.
    fn count(&self, what: &str) -> usize {
        let requests = self.requests.lock().expect("no panic");
        requests.iter().filter(|line| line.contains(what)).count()
    }
}

/// Starts a process for the virtual machine `vm1`, which does nothing. Returns the path of its
/// control socket.
fn start_machine(test: &mut Supervised) -> PathBuf {
    let folder = test.folder.path().to_owned();
    let supervisor = test.supervisor.as_mut().expect("it runs");
    let command = || {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "exec sleep 600"]);
        command
    };
    let control = folder.join("control");
    let started = supervisor.start_vm("vm1", Box::new(command), &folder.join("vm"), &control);
    started.expect("it starts");
    supervisor.wait_for_vms().expect("it does not end");
    control
}

#[test]
fn session_of_a_virtual_machine_is_ended_by_its_process() {
    let mut test = Supervised::new(SOON, &[]);
    let control = start_machine(&mut test);
    let vm = ObedientVm::start(&control, true);
    let supervisor = test.supervisor.as_ref().expect("it runs");
    let number = test.shared().processes().machines.keys().next().copied();
    let number = number.expect("it runs");
    let of_machine = |number: u64| (number << 32) | 7;
    let guest = supervisor.kill_session(of_machine(number));
    assert_eq!(guest.expect("it is told"), "vm1");
    let received = vm.requests.lock().expect("no panic").clone();
    assert_eq!(received, ["{\"Kill\":{\"session\":7}}\n"]);
    for id in [7, of_machine(number + 1), u64::MAX] {
        let error = supervisor.kill_session(id).expect_err("no such session");
        assert_eq!(error.to_string(), format!("there is no session {id}"));
    }
    vm.answers.store(false, Ordering::Relaxed);
    let error = supervisor.kill_session(of_machine(number));
    let error = error.expect_err("no answer").to_string();
    let words = "the process of the virtual machine vm1 does not answer: ";
    assert!(error.starts_with(words), "{error}");
    test.shutdown();
}

#[test]
fn process_of_a_virtual_machine_is_told_of_a_drain_until_it_answers_and_when_it_starts_again() {
    let mut test = Supervised::new(SOON, &[]);
    let control = start_machine(&mut test);
    let health = test.supervisor.as_ref().expect("it runs").health();
    let vm = ObedientVm::start(&control, false);
    let count = |what: &str| vm.count(what);
    let untold = || test.status().draining.expect("it drains").untold;

    // It does not answer, and is asked again.
    let hour = Duration::from_secs(3600);
    let supervisor = test.supervisor.as_ref().expect("it runs");
    let silent = supervisor.drain(Some(hour));
    assert!(
        silent.len() == 1 && silent[0].starts_with("vm1: "),
        "{silent:?}"
    );
    assert_eq!(untold(), silent);
    vm.answers.store(true, Ordering::Relaxed);
    eventually("it is told", || {
        health.tell_machines();
        untold().is_empty()
    });
    assert_eq!(count("\"Drain\""), 1);
    health.tell_machines();

    // Its `vgpu fd-store` starts another executor, and stays.
    assert!(vm.server.undrain());
    eventually("the new one is told", || {
        health.tell_machines();
        count("\"Drain\"") == 2
    });

    // Another process takes its place.
    let process = || {
        let processes = test.shared().processes();
        processes.machines.values().next().map(|vm| vm.pid)
    };
    let restart = || {
        let before = process().expect("it runs");
        rustix::process::kill_process(before, rustix::process::Signal::KILL).expect("it runs");
        eventually("it is started again", || {
            process().is_some_and(|now| now != before)
        });
    };
    restart();
    assert_eq!(count("\"Drain\""), 2);
    assert_eq!(untold(), ["vm1: it has just started"]);
    eventually("it is told", || {
        health.tell_machines();
        untold().is_empty()
    });
    assert_eq!(count("\"Drain\""), 3);

    // After the drain there is nothing to tell a new one.
    assert_eq!(supervisor.undrain(), (true, Vec::new()));
    assert_eq!(count("Undrain"), 1);
    restart();
    let told = test.shared().drain.changes();
    assert!(
        test.shared()
            .processes()
            .machines
            .values()
            .all(|vm| vm.told == told)
    );
    test.shutdown();
}
