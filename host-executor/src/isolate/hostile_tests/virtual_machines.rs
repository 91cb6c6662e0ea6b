//! Processes of virtual machines that hang, end, or do not answer.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use vgpu_cpu::CpuEngine;

use super::{MEMORY, SOON, Supervised, TIMEOUT, eventually};
use crate::OperatorRequest;
use crate::control;
use crate::limits::Limits;
use crate::server::Server;
use crate::status::{Progress, Report};

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

/// A control socket that answers with `report` while the flag is set. Nobody closes the connections
/// of others.
fn answer_while(flag: &Arc<AtomicBool>, control: &Path, report: &Report) {
    let (listener, file) = control::bind(control).expect("a socket");
    listener.set_nonblocking(false).expect("a socket");
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

/// The supervisor reads a bounded part of a report, and takes nothing from it.
#[test]
fn report_without_end_of_the_process_of_a_virtual_machine_is_not_taken() {
    /// What the supervisor reads, and what a socket takes besides, at most.
    const READ: usize = 2 << 20;
    const REPORTS: usize = 3;
    let mut test = Supervised::new(SOON, &[]);
    let control = start_machine(&mut test);
    let engine = Arc::new(CpuEngine::new(1, Some(MEMORY)).expect("an engine"));
    let server = Server::new(engine, Limits::default(), 1).expect("a thread");
    let mut report = server.status_handle().report();
    report.status.engine.turn = Some(5.0);
    // Spaces behind it would leave it a valid one.
    let report = serde_json::to_vec(&report).expect("JSON");
    let (listener, file) = control::bind(&control).expect("a socket");
    listener.set_nonblocking(false).expect("a socket");
    let (sender, taken) = mpsc::channel();
    thread::spawn(move || {
        let _file = file;
        for client in listener.incoming() {
            let mut client = client.expect("a client");
            let _ = BufReader::new(&client).read_line(&mut String::new());
            let mut written = client.write(&report).unwrap_or_default();
            while written <= READ {
                match client.write(&[b' '; 64 << 10]) {
                    Ok(bytes) => written += bytes,
                    Err(_) => break,
                }
            }
            if sender.send(written).is_err() {
                return;
            }
        }
    });
    for _ in 0..REPORTS {
        // A question for each call, at most.
        let status = test.status();
        assert_ne!(status.engine.turn, Some(5.0), "the report is taken");
        let written = taken.recv_timeout(TIMEOUT).expect("a question");
        assert!(written <= READ, "the supervisor has read {written} bytes");
    }
    assert_ne!(test.status().engine.turn, Some(5.0), "the report is taken");
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
        listener.set_nonblocking(false).expect("a socket");
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
