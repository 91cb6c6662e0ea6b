//! Guests that the configuration names, and what an operator changes for them.

use std::fs;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use vgpu_transport::size::shown;
use vgpu_transport::wire::{MIN_EXTENT, Reply, Request};

use crate::common::model::{for_weights, lookup, read_all, upload};
use crate::common::{Guest, TIMEOUT, compute};
use crate::served::workers::workers;
use crate::served::{Scratch, Serve, vgpu};
use crate::{of_guest, status_when};

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
        reason.contains(&format!("6.0 MiB wanted, {} of 20.0 MiB free", shown(free))),
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
        "vgpu_guest_graphs_total{guest=\"a\",engine=\"cpu\"} 1",
        "vgpu_guest_sessions{guest=\"a\"} 2",
        "vgpu_guest_memory_quota_bytes{guest=\"b\",engine=\"cpu\"} 10485760",
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
        reason.contains("4.0 KiB wanted, 0 B of 10.0 MiB free"),
        "{reason}"
    );
    for (words, wanted) in [
        (
            ["b", "memory=65M"],
            "a quota of 65.0 MiB for guest b: the engine has 64.0 MiB",
        ),
        (
            ["b", "memory=60M"],
            "the named guests have 80.0 MiB of memory in all",
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
