//! Workers that have been taken over, beside honest ones.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use vgpu_transport::link::unix;
use vgpu_transport::wire::Reply;

use super::{CHATTY, SOON, Supervised, TIMEOUT, eventually, hello, receive, served};
use crate::isolate::EngineThreads;
use crate::isolate::dump::dump;
use crate::isolate::state::{SupervisorState, Worker};
use crate::log_limit::{GUEST_LINES, INTERVAL};
use crate::status::{Progress, Status};

/// A CPU engine with one thread.
const ONE_ENGINE: EngineThreads = EngineThreads {
    engines: 1,
    threads: 1,
    has_driver: false,
    has_ggml: false,
};

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

/// A worker starts hundreds of threads. It is killed, and another one, of as many programs, is not.
/// A process that is told to end would have a minute.
#[test]
fn worker_with_too_many_threads_is_killed_and_no_other() {
    let mut test = Supervised::new(TIMEOUT, &["honest", "threads"]);
    let supervisor = test.supervisor.as_ref().expect("it runs");
    supervisor.limit_threads(ONE_ENGINE);
    let health = supervisor.health();
    let mut guests = vec![served(&test.path("b"))];
    guests.push(served(&test.path("b")));
    let _hostile = test.program("a");
    eventually("it is killed", || {
        health.end_workers_of_many_threads();
        test.processes("a") == 0
    });
    // The looks, from now on, too, find nothing wrong with an honest worker.
    health.end_workers_of_many_threads();
    let processes = test.shared().processes();
    let of_b = processes.workers.values();
    let of_b: Vec<_> = of_b
        .map(|w| {
            let threads = w.files.as_ref().map_or(0, |files| files.thread_count());
            (w.is_closing, threads)
        })
        .collect();
    drop(processes);
    let [(is_closing, threads)] = of_b[..] else {
        panic!("{of_b:?}");
    };
    println!("a worker of two programs has {threads} threads");
    assert!(!is_closing && (3..20).contains(&threads), "{of_b:?}");
    guests.push(served(&test.path("b")));
    test.shutdown();
}

/// A guest gets its processes killed again and again. After three it waits for the next one, longer
/// than a program is kept waiting, and no other guest does.
#[test]
fn guest_whose_workers_are_killed_again_and_again_waits_for_the_next_one() {
    let mut test = Supervised::new(TIMEOUT, &["threads", "threads", "threads", "honest"]);
    let supervisor = test.supervisor.as_ref().expect("it runs");
    supervisor.limit_threads(ONE_ENGINE);
    let health = supervisor.health();
    for _ in 0..3 {
        let _hostile = test.program("a");
        eventually("it is killed", || {
            health.end_workers_of_many_threads();
            test.processes("a") == 0
        });
    }
    let refused = test.connect("a");
    let got = rustix::net::recv(&refused, &mut [0], RecvFlags::empty());
    assert!(!matches!(got, Ok((1.., _))), "{got:?}");
    assert_eq!(test.started.load(Ordering::Relaxed), 3);
    let _guest = served(&test.path("b"));
    assert_eq!(test.started.load(Ordering::Relaxed), 4);
    test.shutdown();
}

#[test]
fn report_of_a_worker_that_is_too_long_is_not_taken() {
    let mut test = Supervised::new(SOON, &["oversized", "honest"]);
    let _hostile = test.program("a");
    let _guest = served(&test.path("b"));
    eventually("the next report arrives", || {
        let processes = test.shared().processes();
        let of_a = |worker: &&Worker| worker.guest.as_deref() == Some("a");
        let worker = processes.workers.values().find(of_a);
        let worker = worker.expect("the first report, by which it ends, is taken");
        let is_open = worker.sessions.len() == 1 && !worker.is_closing;
        assert!(is_open, "the first report is taken");
        worker.report.is_some()
    });
    eventually("b is shown", || {
        test.status()
            .sessions
            .iter()
            .any(|session| session.guest == "b")
    });
    test.shutdown();
}

#[test]
fn a_worker_without_a_program_over_tcp_gets_no_key() {
    let mut test = Supervised::new(SOON, &["honest"]);
    let key = tempfile::tempfile().expect("a file");
    test.shared().processes().set_certificates(key.into());
    let _guest = served(&test.path("a"));
    let has_key = |shared: &SupervisorState| {
        let processes = shared.processes();
        let workers = processes.workers.values();
        workers.map(|w| w.has_certificates).collect::<Vec<_>>()
    };
    assert_eq!(has_key(test.shared()), [false]);
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
    let text = dump(test.shared());
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

/// A thread that hangs keeps the table of processes, before or after a worker is asked.
#[test]
fn a_dump_does_not_wait_for_the_table_of_processes() {
    let mut test = Supervised::new(SOON, &["mute"]);
    let _hostile = test.program("a");
    eventually("the worker reports", || {
        let processes = test.shared().processes();
        processes.workers.values().all(|w| w.report.is_some())
    });
    let handle = test.supervisor.as_ref().expect("it runs").status_handle();
    let ask = || {
        let ((sender, text), handle) = (mpsc::channel(), handle.clone());
        thread::spawn(move || sender.send(handle.dump()));
        text
    };
    let table = test.shared().processes();
    let text = ask().recv_timeout(TIMEOUT).expect("a dump");
    let locked = "the table of processes has been locked for 2s";
    assert!(
        text.contains(", supervisor ") && text.contains(locked),
        "{text}"
    );
    drop(table);

    let text = ask();
    let table = loop {
        let table = test.shared().processes();
        if table.workers.values().any(Worker::waits_for_dump) {
            break table;
        }
        drop(table);
        thread::sleep(Duration::from_millis(1));
    };
    let text = text.recv_timeout(TIMEOUT).expect("a dump");
    assert!(text.contains("no answer within 2s; kill -USR1 "), "{text}");
    drop(table);
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

#[test]
fn worker_that_never_reports_is_killed() {
    let mut test = Supervised::new(SOON, &["silent"]);
    let supervisor = test.supervisor.as_ref().expect("it runs");
    supervisor.limit_starts(SOON);
    let _program = test.program("a");
    eventually("the worker is killed", || test.processes("a") == 0);
    test.shutdown();
}

#[test]
fn worker_that_falls_silent_is_killed_and_others_are_not() {
    let mut test = Supervised::new(SOON, &["mute", "honest"]);
    let supervisor = test.supervisor.as_ref().expect("it runs");
    // Many reports of an honest worker.
    supervisor.limit_hangs(Duration::from_secs(8));
    let program = test.program("a");
    let mut guest = served(&test.path("b"));
    eventually("the silent worker is killed", || test.processes("a") == 0);
    assert_eq!(test.processes("b"), 1);
    assert!(!guest.is_closed());
    // Its guest is told by the end of the connection.
    let ended = rustix::net::recv(&program, &mut [0; 8], rustix::net::RecvFlags::empty());
    assert!(
        matches!(ended, Ok((0, 0)) | Err(rustix::io::Errno::CONNRESET)),
        "{ended:?}"
    );
    drop(guest);
    test.shutdown();
}

/// Others are served meanwhile, and no more reports are read than the limit admits.
#[test]
fn flood_of_reports_does_not_keep_others_from_being_served() {
    // Time enough for the end of an honest worker beside the flood.
    let end = Duration::from_secs(2);
    let mut test = Supervised::new(end, &["flood", "honest", "honest", "honest"]);
    let start = Instant::now();
    let _hostile = test.program("a");
    for _ in 0..3 {
        drop(served(&test.path("b")));
        // A guest may have two processes that are ending.
        eventually("the process of b has ended", || test.processes("b") == 0);
    }
    let received = || {
        let guests = test.status().guests;
        let guest = guests.iter().find(|guest| guest.name == "a");
        guest.map_or(0, |guest| guest.usage.memory)
    };
    eventually("more reports than are read at once", || received() > 64);
    let received = received();
    let most = 64 + start.elapsed().as_millis() as u64 / 20 + 1;
    assert!(received <= most, "{received} reports, at most {most}");
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
    let has_to_wait = |guest| {
        let processes = test.shared().processes();
        processes.has_to_wait(Some(guest), &origin, false)
    };
    eventually("further programs of the guest wait", || has_to_wait("a"));
    assert!(!has_to_wait("b"), "another guest waits, too");
    drop(programs);
    test.shutdown();
}

#[test]
fn processes_that_end_soon_are_charged_to_their_origin() {
    let mut test = Supervised::new(SOON, &["honest"]);
    let origin = format!("uid:{}", rustix::process::getuid().as_raw());
    let debt = |test: &Supervised| test.shared().handshakes.worker_debt(&origin);
    let guest = served(&test.path("a"));
    eventually("it runs", || test.processes("a") == 1);
    assert_eq!(debt(&test), Duration::ZERO);
    drop(guest);
    eventually("its process has ended", || test.processes("a") == 0);
    let cost = debt(&test);
    assert!(
        !cost.is_zero() && cost <= Duration::from_millis(50),
        "{cost:?}"
    );
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

/// Why a worker ends a session, or gives none.
fn reason(reply: Reply) -> String {
    match reply {
        Reply::Ended { reason } => reason,
        Reply::Welcome { .. } => panic!("a session"),
        other => panic!("{other:?}"),
    }
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
