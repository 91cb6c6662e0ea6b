//! `vgpu ps`, the control socket, and commands whose output nobody reads.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use serde_json::Value as Json;
use vgpu_transport::wire::{Reply, Request};

use crate::long_name;
use crate::served::site::{ALICE, BOB, Site, work};
use crate::served::{Scratch, vgpu};

#[test]
fn status_lists_the_activity_of_all_guests() {
    let site = Site::start("ps", &format!("{ALICE}{BOB}"));
    let mut alice = site.guest("alice.sock");
    work(&mut alice);
    let refused = alice.new_buffer();
    alice.send(&Request::Alloc {
        buffer: refused,
        size: 2 << 20,
    });
    assert!(matches!(alice.receive().0, Reply::Refused { .. }));
    let mut unnamed = site.guest("flag.sock");
    work(&mut unnamed);
    let ended = site.guest("bob.sock");
    drop(ended);

    let status = site.status();
    assert_eq!(status["engine"]["memory_total"], 64 << 20);
    let guests = status["guests"].as_array().expect("guests");
    let names: Vec<&str> = guests.iter().filter_map(|g| g["name"].as_str()).collect();
    assert_eq!(names, ["alice", "bob", "-"]);
    let alice_says = &guests[0];
    for (figure, expected) in [
        ("quota", 1 << 20),
        ("memory", 8),
        ("weight", 3),
        ("sessions", 1),
        ("graphs", 1),
        ("turns", 1),
        ("failures", 1),
    ] {
        assert_eq!(alice_says[figure], expected, "{figure}: {status:#}");
    }
    assert_eq!(guests[2]["quota"], Json::Null);
    let sessions = status["sessions"].as_array().expect("sessions");
    let mine = sessions
        .iter()
        .find(|s| s["guest"] == "alice")
        .expect("alice");
    assert_eq!(mine["pid"], std::process::id());
    assert_eq!(mine["program"], "test");

    let output = site.run("ps", &[]).output().expect("the command starts");
    let text = String::from_utf8(output.stdout).expect("text");
    for words in [
        "cpu: ",
        "of 64.0 MiB used by guests",
        "alice",
        "1.0 MiB",
        "WEIGHT",
        "test",
    ] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    let log = site.end();
    // What is free depends on the plan of alice's graph.
    let refusals = log.split("guest alice: out of memory: 2.0 MiB wanted, ");
    let refusal = { refusals }.nth(1).unwrap_or_else(|| panic!("{log}"));
    assert!(refusal.contains(" of 1.0 MiB free"), "{log}");
}

#[test]
fn ps_keeps_its_columns_with_long_names() {
    let long = long_name("tenant");
    let config = format!("[[guest]]\nname = \"{long}\"\nlisten = [\"unix:DIR/long.sock\"]\n");
    let site = Site::start("ps-long", &format!("{config}{ALICE}"));
    let mut guest = site.guest("long.sock");
    work(&mut guest);
    let output = site.run("ps", &[]).output().expect("the command starts");
    let text = String::from_utf8(output.stdout).expect("text");
    let ends_of = |heading: &str, rows: &[&str]| {
        let mut lines = text.lines().skip_while(|line| !line.contains(heading));
        let head = lines.next().expect("a heading");
        let end = head.find(heading).expect("it is there") + heading.len();
        for name in rows {
            let row = { lines.clone() }
                .find(|row| row.contains(name))
                .expect("a row");
            let cell = row.as_bytes();
            assert!(
                cell[end - 1] != b' ' && cell.get(end).is_none_or(|&byte| byte == b' '),
                "{heading} of {name} is not in its column:\n{text}"
            );
        }
    };
    for heading in ["WEIGHT", "QUOTA", "BATCH", "QUEUED", "FAILED"] {
        ends_of(heading, &[&long, "alice"]);
    }
    ends_of("PID", &[&long]);
    // One graph in one turn, and what it uses is not of another process.
    let row = text
        .lines()
        .find(|line| line.starts_with(&long))
        .expect("a row");
    assert_eq!(row.split_whitespace().nth(7), Some("1.0"), "{text}");
    assert!(text.contains("8 B of 64.0 MiB used by guests"), "{text}");
    site.end();
}

#[test]
fn unauthorised_control_clients_do_not_block_others() {
    let site = Site::start("control", "");
    let path = site.folder.join("control.sock");
    // Clients that send nothing, send too much, or disconnect in the middle.
    let _silent: Vec<UnixStream> = (0..8)
        .map(|_| UnixStream::connect(&path).expect("it listens"))
        .collect();
    let mut loud = UnixStream::connect(&path).expect("it listens");
    let _ = loud.write_all(&[b'x'; 100_000]);
    let mut gone = UnixStream::connect(&path).expect("it listens");
    gone.write_all(b"sta").expect("it listens");
    drop(gone);
    assert_eq!(site.status()["guests"][0]["name"], "-");
    site.end();
}

/// The writing end of a pipe that nobody reads.
fn closed_pipe() -> Stdio {
    let (_, writer) = std::io::pipe().expect("a pipe");
    writer.into()
}

/// As with `vgpu ps | head -n 1`.
#[test]
fn commands_end_quietly_when_nobody_reads_what_they_print() {
    const ENDED: i32 = 141;
    let site = Site::start("closed", "");
    let scratch = Scratch::new("closed-files");
    let config = site.config.to_str().expect("text");
    let authority = scratch.path().join("ca");
    let authority = authority.to_str().expect("text");
    let rates = ["--bandwidth", "4800", "--tflops", "989"];
    let plan = ["bench", "plan", "--floor-only", "--model", "8b"];
    let mut commands = vec![
        (site.run("ps", &[]), ENDED),
        (site.run("ps", &["--json"]), ENDED),
        (site.run("dump", &[]), ENDED),
        (vgpu(&["check-config", config]), ENDED),
        (vgpu(&["check-config", config, "--json"]), ENDED),
        (vgpu(&["doctor"]), ENDED),
        // These have done their work.
        (site.run("reload", &[]), 0),
        (vgpu(&["--help"]), 0),
    ];
    if cfg!(feature = "tools") {
        commands.extend([
            (vgpu(&["gpu-check", "models"]), ENDED),
            (vgpu(&[&plan[..], &rates].concat()), ENDED),
            (vgpu(&["cert", authority, "guest", "alice"]), 0),
        ]);
    }
    for (mut command, expected) in commands {
        let output = command.stdout(closed_pipe()).output();
        let output = output.expect("the command starts");
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(expected), "{command:?}: {said}");
        assert!(!said.contains("panicked"), "{command:?}: {said}");
        // Nobody reads the errors, if there are any: another certificate of this name is one.
        let output = command
            .stdout(Stdio::piped())
            .stderr(closed_pipe())
            .output();
        let code = output.expect("the command starts").status.code();
        assert!(matches!(code, Some(0 | 1)), "{command:?}: {code:?}");
    }
    site.end();
}
