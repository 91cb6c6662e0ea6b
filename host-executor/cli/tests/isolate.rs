//! `vgpu serve --isolate`: a fault in the process of one guest affects no other guest.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/common/failing_backend.rs"]
mod failing_backend;
#[path = "../../../tests/common/mod.rs"]
mod ggml;
#[path = "../../tests/machine/mod.rs"]
mod machine;
mod served;

use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use common::model::{for_weights, lookup, read_all, upload};
use common::{Guest, TIMEOUT, add, bytes};
use failing_backend::failing_backend;
use machine::{Machine, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use served::program::copy_program;
use served::workers::{children, guest, workers};
use served::{Scratch, Serve, vgpu};
use vgpu_transport::link::pci::directory;
use vgpu_transport::shm::memory::{SharedWords as _, Window};
use vgpu_transport::wire::{GraphId, MIN_EXTENT, Offer, Reply, Request};

fn compute(guest: &mut Guest) {
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(1), &add(2, a, a, a));
    guest.submit(GraphId(1));
    assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
}

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
    let library = failing_backend(&ggml::cached(""), scratch.path(), "abort();");
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

#[test]
fn each_guest_has_its_partition_and_partitions_limit_the_guests() {
    let scratch = Scratch::new("isolate-parts");
    // 64M in all.
    let serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "30M"]);
    let (mut first, _) = guest(&serve, &scratch);
    let (mut second, _) = guest(&serve, &scratch);
    for guest in [&mut first, &mut second] {
        guest.alloc(20 << 20);
        let buffer = guest.new_buffer();
        let refused = guest.ask(&Request::Alloc {
            buffer,
            size: 20 << 20,
        });
        let Reply::Refused { reason, .. } = refused else {
            panic!("{refused:?}");
        };
        assert!(reason.contains("31457280"), "{reason}");
    }
    let mut third = serve.connect(&scratch.socket());
    third.send(&Request::Fence {});
    let reason = third.ended();
    assert!(
        reason.contains("already serves 2 guests, its limit is 2"),
        "{reason}"
    );
    drop(first);
    // The place becomes free when the process has ended.
    let start = Instant::now();
    let mut next = loop {
        let mut next = serve.connect(&scratch.socket());
        next.send(&Request::Hello {
            offer: Offer::SERVED,
            name: "next".into(),
        });
        match next.receive().0 {
            Reply::Welcome { .. } => break next,
            Reply::Ended { .. } if start.elapsed() < TIMEOUT => {}
            other => panic!("{other:?}"),
        }
    };
    compute(&mut next);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    for said in ["files: ", "not dumpable"] {
        assert!(log.contains(said), "{said:?} is not in {log}");
    }
    let keeps_files = log.contains("files: all files of the user");
    assert!(!keeps_files || std::env::var_os("CI").is_none(), "{log}");
}

/// A user who connects again and again starts no process for three quarters of the places and more.
#[test]
fn one_user_cannot_take_all_workers() {
    let scratch = Scratch::new("isolate-user");
    // Six places in 64M.
    let serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "10M"]);
    let mut guests: Vec<Guest> = (0..5).map(|_| guest(&serve, &scratch).0).collect();
    let reason = serve.connect(&scratch.socket()).ended();
    assert!(
        reason.contains("has 5 programs here, its limit is 5"),
        "{reason}"
    );
    guests.iter_mut().for_each(compute);
    serve.signal(Signal::TERM);
    drop(guests);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
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

/// The executor of a virtual machine dies, and the next one continues to serve the machine, with
/// the stored files.
#[test]
fn virtual_machine_keeps_running_after_its_worker_ends() {
    let scratch = Scratch::new("isolate-vm");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let serve = Serve::start(
        &scratch.socket(),
        &[
            "--isolate",
            "--guest-memory",
            "20M",
            "--vm",
            &vm,
            "--control",
            &scratch.path().join("control.sock").display().to_string(),
        ],
    );
    assert!(serve.ready.contains("vm:"), "{}", serve.ready);
    let (mut other_guest, _) = guest(&serve, &scratch);
    compute(&mut other_guest);
    let machine = Machine::plug(&socket);
    let mut inside = machine.guest();
    compute(&mut inside);
    // The operator sees the machine beside the other guests.
    let status = status_when(&scratch, |status| {
        of_guest(status, "vm1")["graphs"] == 1 && of_guest(status, "-")["graphs"] == 1
    });
    let vm1 = of_guest(&status, "vm1");
    assert_eq!(
        (&vm1["sessions"], &vm1["memory"], &vm1["quota"]),
        (&1.into(), &8.into(), &(20 << 20).into())
    );
    let sessions = status["sessions"].as_array().expect("a list");
    let endpoints: Vec<_> = sessions.iter().map(|s| &s["endpoint"]).collect();
    assert!(
        endpoints.iter().any(|at| **at == "vm vm1 slot 0"),
        "{status:#}"
    );

    // The fd store is the child of the supervisor, and the executor the child of the fd store.
    let worker = || {
        let keeper = children(serve.child.id()).into_iter().find(|pid| {
            fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.contains("fd-store"))
        })?;
        children(keeper.cast_unsigned()).first().copied()
    };
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    let run = page.load(directory::word::EPOCH);
    let first = worker().expect("a worker");
    // If memory runs out, the kernel ends it before those that keep the machine.
    let score = |pid: u32| {
        let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"));
        let score = score.expect("the process is there");
        score.trim().parse::<i32>().expect("a number")
    };
    assert_eq!(score(first.cast_unsigned()), 500);
    assert!(score(serve.child.id()) < 500);
    let start = Instant::now();
    while kill_process(Pid::from_raw(first).expect("a process"), Signal::SEGV).is_ok() {
        assert!(start.elapsed() < TIMEOUT, "it does not end");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    compute(&mut other_guest);
    while worker().is_none_or(|next| next == first) || page.load(directory::word::EPOCH) == run {
        assert!(start.elapsed() < TIMEOUT, "no new worker");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // The program in the machine connects again, as the plugin does. The machine itself is not
    // affected.
    drop(inside);
    let mut again = machine.guest();
    compute(&mut again);
    drop(again);
    compute(&mut other_guest);
    drop(machine);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("the next executor starts"), "{log}");
    // The worker of the other guest, and both executors of the machine, have no files.
    assert_eq!(log.matches("sandboxing: files: ").count(), 3, "{log}");
    assert!(!log.contains("a fault of vgpu"), "{log}");
    assert!(
        !scratch.path().join("vm1.sock").exists(),
        "a socket is left behind"
    );
}

/// The process that keeps the file descriptors of a machine dies. The supervisor has copies for the
/// next one.
#[test]
fn virtual_machine_keeps_running_after_its_fd_store_ends() {
    let scratch = Scratch::new("isolate-fd-store");
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let serve = Serve::start(
        &scratch.socket(),
        &["--isolate", "--guest-memory", "20M", "--vm", &vm],
    );
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    for _ in 0..2 {
        let run = page.load(directory::word::EPOCH);
        let store = fd_store(&serve).expect("it runs");
        let executor = executor_of(store).expect("an executor");
        kill_process(store, Signal::KILL).expect("it runs");
        // The executor ends with its store, and the next one serves the machine.
        wait_for("the end of the executor", || {
            rustix::process::test_kill_process(executor).is_err()
        });
        wait_for("the next executor", || {
            page.load(directory::word::EPOCH) != run
        });
        compute(&mut machine.guest());
    }
    // Another QEMU gets a device of its own.
    drop(machine);
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    drop(machine);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let said = "its process is started again, with 3 files of the machine";
    assert_eq!(log.matches(said).count(), 2, "{log}");
}

/// An upgrade replaces the program while a supervisor runs: the next executor of a virtual machine
/// is of the supervisor's version.
#[test]
fn virtual_machine_is_served_by_the_version_of_its_supervisor_after_an_upgrade() {
    let scratch = Scratch::new("isolate-upgrade");
    let program = scratch.path().join("vgpu");
    copy_program(&program);
    let socket = scratch.path().join("vm1.sock");
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let endpoint = format!("unix:{}", scratch.socket().display());
    let mut command = Command::new(&program);
    command
        .args([
            "serve",
            "--engine",
            "cpu",
            "--listen",
            &endpoint,
            "--threads",
            "1",
            "--memory",
            "64M",
        ])
        .args(["--isolate", "--guest-memory", "20M", "--vm", &vm])
        .env_remove("VGPU_LOG");
    let serve = Serve::of(command);
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    // In place of the upgrade, a program that serves nobody.
    fs::remove_file(&program).expect("the program is there");
    std::os::unix::fs::symlink("/bin/false", &program).expect("a link");
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    let run = page.load(directory::word::EPOCH);
    let executor = executor_of(fd_store(&serve).expect("it runs")).expect("an executor");
    kill_process(executor, Signal::KILL).expect("it runs");
    wait_for("the next executor", || {
        page.load(directory::word::EPOCH) != run
    });
    compute(&mut machine.guest());
    drop(machine);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// The `vgpu fd-store` of the only virtual machine of a supervisor.
fn fd_store(serve: &Serve) -> Option<Pid> {
    let is_fd_store = |pid: &i32| {
        fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains("fd-store"))
    };
    let mut children = children(serve.child.id()).into_iter();
    Pid::from_raw(children.find(is_fd_store)?)
}

/// The process that a `vgpu fd-store` has started.
fn executor_of(store: Pid) -> Option<Pid> {
    let children = children(store.as_raw_nonzero().get().cast_unsigned());
    Pid::from_raw(*children.first()?)
}

/// The dump of the supervisor.
fn dump(control: &Path) -> String {
    let output = vgpu(&["dump", "--control"])
        .arg(control)
        .output()
        .expect("it starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A restart, an upgrade or a crash of the supervisor below a service manager with an fd store: the
/// virtual machine keeps its device.
#[test]
fn virtual_machine_keeps_its_device_when_the_supervisor_is_replaced() {
    let scratch = Scratch::new("isolate-supervisor");
    let (socket, control) = (
        scratch.path().join("vm1.sock"),
        scratch.path().join("control.sock"),
    );
    let vm = format!("vm1,socket={},window=64M,silence=0", socket.display());
    let endpoint = format!("unix:{}", scratch.socket().display());
    let mut command = vgpu(&["fd-store", "--", env!("CARGO_BIN_EXE_vgpu"), "serve"]);
    command
        .args(["--listen", &endpoint, "--threads", "1", "--memory", "64M"])
        .args(["--isolate", "--guest-memory", "20M", "--vm", &vm])
        .arg("--control")
        .arg(&control);
    let serve = Serve::of(command);
    let machine = Machine::plug(&socket);
    compute(&mut machine.guest());
    let page = Window::map_part(machine.memory.as_fd(), 0, 4096).expect("a mapping");
    const KEPT: &str =
        "files kept by the service manager: vgpu-vm1-bell, vgpu-vm1-line, vgpu-vm1-memory";
    let is_kept = || {
        let dump = dump(&control);
        // The supervisor's own line, and that of the machine's executor.
        dump.lines().any(|line| line == KEPT)
            && dump.lines().any(|line| line == format!("  {KEPT}"))
    };
    wait_for("the files to be kept", is_kept);
    for signal in [Signal::KILL, Signal::TERM] {
        let run = page.load(directory::word::EPOCH);
        let supervisor = executor_of(Pid::from_child(&serve.child)).expect("a supervisor");
        kill_process(supervisor, signal).expect("it runs");
        wait_for("the next executor", || {
            page.load(directory::word::EPOCH) != run
        });
        compute(&mut machine.guest());
        // The next supervisor knows what it has taken over.
        wait_for("the files to be kept", is_kept);
    }
    // QEMU ends: its files are released everywhere.
    drop(machine);
    wait_for("the files to be released", || {
        let dump = dump(&control);
        dump.contains("supervisor") && !dump.contains("files kept")
    });
    compute(&mut Machine::plug(&socket).guest());
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert_eq!(
        log.matches("serving the running virtual machine").count(),
        2,
        "{log}"
    );
}

#[test]
fn missing_requirements_are_reported() {
    for (more, wanted) in [
        (&["--isolate"][..], "--guest-memory"),
        (&["--guest-memory", "1G"], "--isolate"),
        (
            &["--isolate", "--guest-memory", "10M", "--pin"],
            "--isolate and --pin exclude each other",
        ),
        (
            &["--isolate", "--memory", "1G", "--guest-memory", "2G"],
            "not enough for one guest",
        ),
        (
            &[
                "--isolate",
                "--guest-memory",
                "1G",
                "--share-weights",
                "all",
            ],
            "the weights of each guest are in its own process",
        ),
        (
            &[
                "--isolate",
                "--guest-memory",
                "1G",
                "--weights-cache",
                "/tmp/weights,size=1G",
            ],
            "several processes would write to one folder",
        ),
    ] {
        let scratch = Scratch::new("isolate-wrong");
        let endpoint = format!("unix:{}", scratch.socket().display());
        let output = vgpu(&["serve", "--listen", &endpoint])
            .args(more)
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(wanted),
            "{more:?}: {said}"
        );
    }
}

/// Writes a configuration, and returns its path.
fn configure(scratch: &Scratch, text: &str) -> String {
    let path = scratch.path().join("vgpu.toml");
    let address = |name: &str| format!("unix:{}", scratch.path().join(name).display());
    let text = text
        .replace(
            "@CONTROL@",
            &scratch.path().join("control.sock").display().to_string(),
        )
        .replace("@METRICS@", &address("metrics.sock"))
        .replace("@A@", &address("a.sock"))
        .replace("@B@", &address("b.sock"));
    fs::write(&path, text).expect("a configuration");
    path.display().to_string()
}

/// The output of `vgpu ps --json`, once `is_so` holds.
fn status_when(scratch: &Scratch, is_so: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
    let control = scratch.path().join("control.sock").display().to_string();
    let start = Instant::now();
    loop {
        let output = vgpu(&["ps", "--json", "--control", &control])
            .output()
            .expect("it starts");
        let said = String::from_utf8(output.stdout).expect("text");
        let status: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        if is_so(&status) {
            return status;
        }
        assert!(start.elapsed() < TIMEOUT, "{status:#}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn of_guest<'a>(status: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    let guests = status["guests"].as_array().expect("a list");
    guests
        .iter()
        .find(|guest| guest["name"] == name)
        .unwrap_or(&serde_json::Value::Null)
}

fn reload(scratch: &Scratch) -> String {
    let control = scratch.path().join("control.sock").display().to_string();
    let output = vgpu(&["reload", "--control", &control])
        .output()
        .expect("it starts");
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn metrics(scratch: &Scratch) -> String {
    use std::io::{Read as _, Write as _};
    let mut socket = std::os::unix::net::UnixStream::connect(scratch.path().join("metrics.sock"))
        .expect("metrics are served");
    socket
        .write_all(b"GET /metrics HTTP/1.0\r\n\r\n")
        .expect("it listens");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("it answers");
    text
}

const TWO_GUESTS: &str = r#"
[engine]
threads = 1
[control]
socket = "@CONTROL@"
[metrics]
listen = "@METRICS@"
[[guest]]
name = "a"
memory = "20MiB"
weight = 3
listen = ["@A@"]
[[guest]]
name = "b"
memory = "10MiB"
listen = ["@B@"]
"#;

/// The nice level of the first thread of a process.
fn nice(pid: Pid) -> i32 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    level_in(&stat.expect("it runs"))
}

/// The nice level in a `stat` file of a process or a thread.
fn level_in(stat: &str) -> i32 {
    let fields = stat.rsplit(") ").next().expect("a name").split(' ');
    fields.collect::<Vec<_>>()[16].parse().expect("a number")
}

/// Names, quotas and weights of the configuration with a process per guest, and what the operator
/// sees.
#[test]
fn each_named_guest_has_a_worker_with_its_quota_and_weight() {
    let scratch = Scratch::new("isolate-names");
    let config = configure(&scratch, TWO_GUESTS);
    let isolate = ["--config", &config, "--isolate", "--guest-memory", "20M"];
    let serve = Serve::start(&scratch.socket(), &isolate);
    let enter = |socket: &str| {
        let mut guest = serve.connect(&scratch.path().join(socket));
        let Reply::Welcome { session, .. } = guest.hello() else {
            panic!("no welcome");
        };
        (guest, session)
    };
    let (mut first, one) = enter("a.sock");
    let (mut second, _) = enter("a.sock");
    let (mut other, two) = enter("b.sock");
    let processes = workers(&serve, 2);
    compute(&mut first);
    compute(&mut other);

    // Both programs of a guest share a quota; the other guest's quota is unaffected.
    let memory = |guest: &mut Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, total, .. } => (free, total),
        other => panic!("{other:?}"),
    };
    let before = memory(&mut other);
    assert_eq!(before.1, 10 << 20);
    // The buffer and the graph of the first program.
    let (left, _) = memory(&mut second);
    assert!(left < 20 << 20 && left > (20 << 20) - (1 << 16), "{left}");
    first.alloc(15 << 20);
    let (free, total) = memory(&mut second);
    assert_eq!((total, free), (20 << 20, left - (15 << 20)));
    let buffer = second.new_buffer();
    let Reply::Refused { reason, .. } = second.ask(&Request::Alloc {
        buffer,
        size: 6 << 20,
    }) else {
        panic!("more than its quota");
    };
    assert!(
        reason.contains(&format!("6291456 bytes wanted, {free} of 20971520 free")),
        "{reason}"
    );
    assert_eq!(memory(&mut other), before);

    // With weights of 1 and 3, the process with 1 is five nice levels above.
    let own = nice(rustix::process::getpid());
    assert_eq!(
        (nice(processes[&one]), nice(processes[&two])),
        (own, own + 5)
    );

    let status = status_when(&scratch, |status| {
        of_guest(status, "a")["graphs"] == 1
            && of_guest(status, "b")["graphs"] == 1
            && of_guest(status, "a")["failures"] == 1
    });
    let (a, b) = (of_guest(&status, "a"), of_guest(&status, "b"));
    assert_eq!(
        (&a["sessions"], &a["weight"], &a["quota"]),
        (&2.into(), &3.into(), &(20 << 20).into())
    );
    assert_eq!(a["memory"], (15 << 20) + 8);
    assert_eq!((&b["sessions"], &b["memory"]), (&1.into(), &8.into()));
    let sessions = status["sessions"].as_array().expect("a list");
    assert_eq!(sessions.len(), 3, "{status:#}");
    let text = metrics(&scratch);
    for line in [
        "vgpu_guest_graphs_total{guest=\"a\"} 1",
        "vgpu_guest_sessions{guest=\"a\"} 2",
        "vgpu_guest_memory_quota_bytes{guest=\"b\"} 10485760",
        "vgpu_graph_run_seconds_count{guest=\"b\"} 1",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }

    // Figures of a guest stay counted after its process has ended, for whatever reason.
    assert!(kill_process(processes[&two], Signal::KILL).is_ok());
    drop((first, second));
    workers(&serve, 0);
    let status = status_when(&scratch, |status| {
        status["sessions"].as_array().is_some_and(Vec::is_empty)
    });
    for name in ["a", "b"] {
        let guest = of_guest(&status, name);
        assert_eq!(
            (&guest["graphs"], &guest["memory"]),
            (&1.into(), &0.into()),
            "{status:#}"
        );
    }
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn weights_are_shared_within_a_guest_and_not_between_guests() {
    let scratch = Scratch::new("isolate-weights");
    let config = configure(&scratch, TWO_GUESTS);
    let isolate = ["--config", &config, "--isolate", "--guest-memory", "20M"];
    let serve = Serve::start(&scratch.socket(), &isolate);
    let mut first = serve.guest(&scratch.path().join("a.sock"));
    let mut second = serve.guest(&scratch.path().join("a.sock"));
    let mut other = serve.guest(&scratch.path().join("b.sock"));
    let content: Vec<u8> = (0..4 * MIN_EXTENT).map(|i| ((i * i) >> 5) as u8).collect();
    let (buffer, _) = for_weights(&mut first, content.len() as u64);
    upload(&mut first, buffer, 0, &content);
    first.send(&Request::Seal { buffer });
    first.fence();
    // A thread hashes the weights meanwhile.
    let (buffer, _) = for_weights(&mut second, content.len() as u64);
    let start = Instant::now();
    while !lookup(&mut second, buffer, 0, &content) {
        assert!(
            start.elapsed() < TIMEOUT,
            "the same guest does not get them"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(read_all(&mut second, buffer, content.len() as u64) == content);
    let (buffer, _) = for_weights(&mut other, content.len() as u64);
    assert!(
        !lookup(&mut other, buffer, 0, &content),
        "another guest gets them"
    );
    let status = status_when(&scratch, |status| {
        of_guest(status, "a")["weights_not_sent"] == content.len()
    });
    assert_eq!(status["engine"]["weights"]["not_sent"], content.len());
    assert_eq!(of_guest(&status, "b")["weights_not_sent"], 0);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn reload_is_applied_to_running_workers() {
    let scratch = Scratch::new("isolate-reload");
    let config = configure(&scratch, TWO_GUESTS);
    let isolate = ["--config", &config, "--isolate", "--guest-memory", "20M"];
    let serve = Serve::start(&scratch.socket(), &isolate);
    let mut guest = serve.guest(&scratch.path().join("b.sock"));
    let total = |guest: &mut Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { total, .. } => total,
        other => panic!("{other:?}"),
    };
    assert_eq!(total(&mut guest), 10 << 20);
    compute(&mut guest);

    configure(
        &scratch,
        &TWO_GUESTS
            .replace("10MiB", "12MiB")
            .replace("listen = [\"@A@\"]", "uids = [4294967]"),
    );
    let said = reload(&scratch);
    assert!(said.contains("was reloaded: 2 named guests"), "{said}");
    let start = Instant::now();
    while total(&mut guest) != 12 << 20 {
        assert!(start.elapsed() < TIMEOUT, "the worker has not heard of it");
    }
    compute(&mut guest);
    assert!(
        !scratch.path().join("a.sock").exists(),
        "its listener is still open"
    );

    // An impossible configuration changes nothing.
    for (wrong, reason) in [
        (
            TWO_GUESTS.replace("10MiB", "60MiB"),
            "the named guests have",
        ),
        (
            format!("{TWO_GUESTS}\nweight = 0"),
            "a weight is a whole number",
        ),
    ] {
        configure(&scratch, &wrong);
        let said = reload(&scratch);
        assert!(
            said.contains("is unchanged") && said.contains(reason),
            "{said}"
        );
        assert_eq!(total(&mut guest), 12 << 20);
    }
    compute(&mut guest);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn limits_are_set_in_running_workers() {
    let scratch = Scratch::new("isolate-set");
    let config = configure(&scratch, TWO_GUESTS);
    let isolate = ["--config", &config, "--isolate", "--guest-memory", "20M"];
    let serve = Serve::start(&scratch.socket(), &isolate);
    let enter = |socket: &str| {
        let mut guest = serve.connect(&scratch.path().join(socket));
        match guest.hello() {
            Reply::Welcome { session, .. } => (guest, session),
            other => panic!("{other:?}"),
        }
    };
    let (mut first, one) = enter("a.sock");
    let (mut other, two) = enter("b.sock");
    let processes = workers(&serve, 2);
    compute(&mut first);
    compute(&mut other);
    let control = scratch.path().join("control.sock").display().to_string();
    let set = |words: &[&str]| {
        let mut command = vgpu(&["set", "--control", &control]);
        let output = command.args(words).output().expect("it starts");
        let (said, why) = (output.stdout, output.stderr);
        (
            output.status.success(),
            String::from_utf8([said, why].concat()).expect("text"),
        )
    };
    let own = nice(rustix::process::getpid());
    let levels = || [one, two].map(|session| nice(processes[&session]) - own);
    // With weights of 3 and 1.
    assert_eq!(levels(), [0, 5]);
    // No level falls: without a capability the kernel refuses that.
    for (words, expected) in [
        (["a", "weight=1"], [5, 5]),
        (["b", "weight=3"], [10, 5]),
        (["b", "weight=9"], [15, 5]),
    ] {
        let (is_good, said) = set(&words);
        assert!(is_good, "{said}");
        assert_eq!(levels(), expected, "{words:?}");
    }
    // All threads of the process.
    let tasks = format!("/proc/{}/task", processes[&one].as_raw_nonzero());
    for task in fs::read_dir(tasks).expect("it runs") {
        let stat = fs::read_to_string(task.expect("a thread").path().join("stat"));
        assert_eq!(level_in(&stat.expect("it runs")) - own, 15);
    }

    let total = |guest: &mut Guest, wanted: u64| {
        let start = Instant::now();
        loop {
            match guest.ask(&Request::Memory {}) {
                Reply::Memory { total, .. } if total == wanted => return,
                other => assert!(start.elapsed() < TIMEOUT, "{other:?}"),
            }
        }
    };
    assert!(set(&["b", "memory=30M"]).0);
    total(&mut other, 30 << 20);
    other.alloc(25 << 20);
    let (_, said) = set(&["b", "memory=10M"]);
    assert!(said.contains("quota 10.0 MiB (before: 30.0 MiB)"), "{said}");
    total(&mut other, 10 << 20);
    let reason = other.refusal(4096);
    assert!(
        reason.contains("4096 bytes wanted, 0 of 10485760 free"),
        "{reason}"
    );
    for (words, wanted) in [
        (
            ["b", "memory=65M"],
            "a quota of 68157440 bytes for guest b: the engine has 67108864",
        ),
        (
            ["b", "memory=60M"],
            "the named guests have 83886080 bytes of memory in all",
        ),
        (["c", "memory=1M"], "no guest is named \"c\""),
    ] {
        let (is_good, said) = set(&words);
        assert!(!is_good && said.contains(wanted), "{said}");
    }
    total(&mut other, 10 << 20);
    compute(&mut first);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn a_drain_ends_workers_at_its_deadline() {
    let scratch = Scratch::new("isolate-drain");
    let config = configure(&scratch, TWO_GUESTS);
    let isolate = ["--config", &config, "--isolate", "--guest-memory", "20M"];
    let serve = Serve::start(&scratch.socket(), &isolate);
    let mut first = serve.guest(&scratch.path().join("a.sock"));
    compute(&mut first);
    let control = scratch.path().join("control.sock").display().to_string();
    let drain = |more: &[&str]| {
        let mut command = vgpu(&["drain", "--control", &control]);
        command.args(more).spawn().expect("it starts")
    };
    let mut waits = drain(&[]);
    status_when(&scratch, |status| !status["draining"].is_null());
    for socket in ["a.sock", "b.sock"] {
        let mut refused = serve.connect(&scratch.path().join(socket));
        refused.send(&Request::Fence {});
        let reason = refused.ended();
        assert!(
            reason.starts_with("the host drains: it accepts no new"),
            "{reason}"
        );
    }
    compute(&mut first);
    // A deadline for the drain that has begun.
    let mut ends = drain(&["--deadline", "1s"]);
    assert_eq!(
        first.ended(),
        "the host drains, and ends the sessions that are open after 1s"
    );
    for drain in [&mut waits, &mut ends] {
        assert_eq!(drain.wait().expect("it ends").code(), Some(3));
    }
    assert!(drain(&["--undo"]).wait().expect("it ends").success());
    compute(&mut serve.guest(&scratch.path().join("b.sock")));
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}
