//! `vgpu set`, `vgpu drain` and `vgpu kill`.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use common::{Guest, PAGE, TIMEOUT};
use served::site::{ALICE, BOB, Site, fails, figures, http, work};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::Request;

const METRICS: &str = "metrics.listen = \"unix:DIR/metrics.sock\"\n";

/// What a command that must not fail prints.
fn says(site: &Site, command: &str, more: &[&str]) -> String {
    let output = site.run(command, more).output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

fn get(site: &Site, path: &str) -> (String, String) {
    let socket = UnixStream::connect(site.folder.join("metrics.sock"));
    http(socket.expect("it listens"), "GET", path)
}

/// Waits until the executor drains.
fn wait_for_drain(site: &Site) {
    let start = Instant::now();
    while site.status()["draining"].is_null() {
        assert!(start.elapsed() < TIMEOUT, "it does not drain");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The exit status of a command and what it has printed, once it has ended.
fn end_of(mut child: Child) -> (Option<i32>, String) {
    let start = Instant::now();
    let status = loop {
        match child.try_wait().expect("it can be waited for") {
            Some(status) => break status,
            None if start.elapsed() > TIMEOUT => {
                let _ = child.kill();
                panic!("it does not end");
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    let mut text = String::new();
    let mut streams = (child.stdout.expect("piped"), child.stderr.expect("piped"));
    streams.0.read_to_string(&mut text).expect("text");
    streams.1.read_to_string(&mut text).expect("text");
    (status.code(), text)
}

fn free(guest: &mut Guest, buffer: BufferId) {
    guest.send(&Request::Free { buffer });
    guest.fence();
}

#[test]
fn a_quota_grows_at_once_and_shrinks_as_memory_is_freed() {
    let site = Site::start("set", &format!("{ALICE}{BOB}"));
    let mut alice = site.guest("alice.sock");
    assert_eq!(figures(&mut alice), (1 << 20, 1 << 20));
    let said = says(&site, "set", &["alice", "memory=4M", "weight=5"]);
    assert_eq!(
        said,
        "guest alice: quota 4.0 MiB (before: 1.0 MiB), weight 5 (before: 3)\n"
    );
    assert_eq!(figures(&mut alice), (4 << 20, 4 << 20));
    let guest = site.status()["guests"][0].clone();
    assert_eq!(
        (&guest["weight"], &guest["quota"]),
        (&5.into(), &(4 << 20).into())
    );

    // Less than what is in use: nothing is taken away, and nothing more is given.
    let buffers = [alice.alloc(1 << 20), alice.alloc(2 << 20)];
    let said = says(&site, "set", &["alice", "memory=2M"]);
    assert!(
        said.ends_with(
            "quota 2.0 MiB (before: 4.0 MiB); its buffers have 3.0 MiB: allocations are refused \
             until 1.0 MiB of them are freed\n"
        ),
        "{said}"
    );
    assert_eq!(figures(&mut alice), (2 << 20, 0));
    let reason = alice.refusal(PAGE);
    assert!(
        reason.ends_with("out of memory: 4.0 KiB wanted, 0 B of 2.0 MiB free"),
        "{reason}"
    );
    alice.write(buffers[1], 0, &[7; 16]);
    assert_eq!(alice.read(buffers[1], 0, 16), [7; 16]);
    free(&mut alice, buffers[0]);
    // All of the new quota is in use.
    assert!(alice.refusal(PAGE).contains(" 0 B of 2.0 MiB free"));
    free(&mut alice, buffers[1]);
    assert_eq!(figures(&mut alice), (2 << 20, 2 << 20));
    alice.alloc(2 << 20);

    // What bob may have follows the change.
    says(&site, "set", &["bob", "memory=62M"]);
    let mut bob = site.guest("bob.sock");
    assert_eq!(figures(&mut bob), (62 << 20, 62 << 20));
    // Unnamed guests have the rest, which is nothing.
    let mut unnamed = site.guest("flag.sock");
    assert_eq!(figures(&mut unnamed).0, 0);
    says(&site, "set", &["bob", "memory=none"]);
    assert_eq!(figures(&mut bob).0, 62 << 20);
    says(&site, "set", &["-", "memory=1M"]);
    assert_eq!(figures(&mut unnamed), (1 << 20, 1 << 20));

    // The file has the last word.
    site.reload();
    assert_eq!(figures(&mut alice).0, 1 << 20);
    assert_eq!(site.status()["guests"][0]["weight"], 3);
    site.end();
}

#[test]
fn a_change_that_is_wrong_changes_nothing() {
    let site = Site::start("set-wrong", &format!("{ALICE}{BOB}"));
    let before = site.status()["guests"].clone();
    for (words, reason) in [
        (
            &["eve", "weight=2"][..],
            "no guest is named \"eve\": the configuration has alice, bob",
        ),
        (&["alice"], "required arguments"),
        (
            &["alice", "weight=0"],
            "a weight is a whole number from 1 to 1000",
        ),
        (&["alice", "memory=1Q"], "memory: unknown unit \"Q\""),
        (&["alice", "time=3"], "unknown key \"time\""),
        (
            &["alice", "memory=65M", "weight=2"],
            "a quota of 65.0 MiB for guest alice: the engine has 64.0 MiB",
        ),
        (
            &["alice", "memory=63M"],
            "the quotas of the guests add up to 65.0 MiB, the engine has 64.0 MiB",
        ),
    ] {
        let said = fails(&mut site.run("set", words));
        assert!(said.contains(reason), "{words:?}: {said}");
        assert_eq!(site.status()["guests"], before, "{words:?}");
    }
    site.end();
}

#[test]
fn a_drain_refuses_new_programs_and_lets_open_ones_go_on() {
    let site = Site::start("drain", &format!("{METRICS}{ALICE}"));
    let mut alice = site.guest("alice.sock");
    work(&mut alice);
    let (head, _) = get(&site, "/healthz");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let drain = site.run("drain", &[]).spawn().expect("it starts");
    wait_for_drain(&site);
    let reason = site.serve.connect(&site.folder.join("alice.sock")).ended();
    assert!(
        reason.starts_with("the host drains: it accepts no new sessions"),
        "{reason}"
    );
    let (head, body) = get(&site, "/healthz");
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    assert!(body.starts_with("draining: no new sessions for "), "{body}");
    // It makes progress: nobody should restart it.
    let (head, _) = get(&site, "/livez");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let (_, metrics) = get(&site, "/metrics");
    for line in [
        "vgpu_draining 1.0\n",
        "vgpu_session_ended_total{reason=\"draining\"} 1\n",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    let table = says(&site, "ps", &[]);
    assert!(
        table.contains("\ndraining: no new sessions for "),
        "{table}"
    );
    work(&mut alice);
    drop(alice);
    let (code, said) = end_of(drain);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.starts_with("the executor drains: no new sessions, those that are open go on; 1 ")
            && said.ends_with("all programs have ended\n"),
        "{said}"
    );

    let said = says(&site, "drain", &["--undo"]);
    assert_eq!(said, "the executor accepts sessions again\n");
    work(&mut site.guest("alice.sock"));
    let (head, _) = get(&site, "/healthz");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let said = says(&site, "drain", &["--undo"]);
    assert_eq!(said, "the executor did not drain, and accepts sessions\n");
    site.end();
}

#[test]
fn the_deadline_of_a_drain_ends_what_is_left() {
    let site = Site::start("drain-deadline", &format!("{METRICS}{ALICE}"));
    let mut alice = site.guest("alice.sock");
    work(&mut alice);
    let drain = site.run("drain", &["--deadline", "1s"]).spawn();
    let (code, said) = end_of(drain.expect("it starts"));
    assert_eq!(
        alice.ended(),
        "the host drains, and ends the sessions that are open after 1s"
    );
    assert_eq!(code, Some(3), "{said}");
    assert!(
        said.ends_with("all programs have ended, 1 of them at the deadline\n"),
        "{said}"
    );
    let (_, metrics) = get(&site, "/metrics");
    let line = "vgpu_session_ended_total{reason=\"drained\"} 1\n";
    assert!(metrics.contains(line), "{metrics}");
    // It goes on to drain until somebody undoes it.
    assert!(!site.status()["draining"].is_null());
    let (code, said) = end_of(site.run("drain", &[]).spawn().expect("it starts"));
    assert_eq!(code, Some(0), "nobody is left: {said}");
    let said = fails(&mut site.run("drain", &["--deadline", "soon"]));
    assert!(said.contains("not a time, such as 90s, 5m or 1h"), "{said}");
    site.end();
}

/// The number of the session of a guest that has one. With `--isolate`, the supervisor knows what
/// the worker has last reported.
fn session_of(site: &Site, guest: &str) -> String {
    let start = Instant::now();
    loop {
        let sessions = site.status()["sessions"].clone();
        let all = sessions.as_array().expect("a list");
        if let Some(own) = all.iter().find(|session| session["guest"] == guest) {
            return own["id"].to_string();
        }
        assert!(
            start.elapsed() < TIMEOUT,
            "no session of {guest}: {sessions:#}"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn killed_session_ends_with_the_reason_and_others_go_on() {
    let isolate: &[&str] = &["--isolate", "--guest-memory", "1M"];
    for (name, more) in [("kill", &[][..]), ("kill-isolate", isolate)] {
        let site = Site::start_with(name, &format!("{METRICS}{ALICE}{BOB}"), more);
        let (mut alice, mut bob) = (site.guest("alice.sock"), site.guest("bob.sock"));
        let mut second = site.guest("bob.sock");
        for guest in [&mut alice, &mut bob, &mut second] {
            work(guest);
        }
        let number = session_of(&site, "alice");
        let said = says(&site, "kill", &[&number]);
        assert_eq!(
            said,
            format!("session {number} of guest alice is told to end\nsession {number} has ended\n"),
            "{name}"
        );
        assert_eq!(
            alice.ended(),
            "an operator of the host has ended this session",
            "{name}"
        );
        let left = site.status()["sessions"].as_array().map(Vec::len);
        assert_eq!(left, Some(2), "{name}: {:#}", site.status());
        let alices = site.status()["guests"][0].clone();
        assert_eq!(alices["memory"], 0, "{name}: {alices}");
        let said = fails(&mut site.run("kill", &[&number]));
        let words = format!("there is no session {number}");
        assert!(said.contains(&words), "{name}: {said}");
        work(&mut bob);
        work(&mut second);
        // The guest may come again.
        work(&mut site.guest("alice.sock"));
        let (_, metrics) = get(&site, "/metrics");
        let line = "vgpu_session_ended_total{reason=\"killed\"} 1\n";
        assert!(metrics.contains(line), "{name}: {metrics}");
        site.end();
    }
}
