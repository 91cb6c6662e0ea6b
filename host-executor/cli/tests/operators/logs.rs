//! The log of `vgpu serve`.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value as Json;
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::unix::connect;
use vgpu_transport::wire::Request;

use crate::common::{Guest, TIMEOUT};
use crate::served::site::{ALICE, Site, work};
use crate::served::{Scratch, vgpu};

#[test]
fn the_end_of_a_session_is_a_short_line() {
    for (filter, has_totals) in [("info", false), ("info,vgpu_executor::session=debug", true)] {
        let site = Site::start("end-line", ALICE);
        let config = Site::text(&site.folder, ALICE).replace("\"info\"", &format!("\"{filter}\""));
        fs::write(&site.config, config).expect("a file");
        site.reload();
        work(&mut site.guest("alice.sock"));
        let log = site.end();
        let line = { log.lines() }.find(|line| line.contains("session closed: "));
        let line = line.unwrap_or_else(|| panic!("{log}"));
        let fields = line.split("session closed: ").nth(1).expect("fields");
        for words in ["guest=", "requests=", "graphs=1", "freed=8 B", "open="] {
            assert!(fields.contains(words), "{words} is not in {fields}");
        }
        assert!(fields.matches('=').count() <= 8, "{fields}");
        assert!(!fields.contains("weights"), "{fields}");
        let totals = log.lines().find(|line| line.contains("session totals"));
        assert_eq!(totals.is_some(), has_totals, "{log}");
        assert!(totals.is_none_or(|line| line.contains("freed=8 ")), "{log}");
    }
}

#[test]
fn lines_for_the_journal_have_priorities() {
    let scratch = Scratch::new("journal");
    let path = scratch.path().join("log");
    for (format, is_journal) in [("text", true), ("json", true), ("text", false)] {
        let log = fs::File::create(&path).expect("a file");
        let file = log.metadata().expect("a file");
        let inode = file.ino() + u64::from(!is_journal);
        let mut serve = vgpu(&[
            "serve",
            "--threads",
            "1",
            "--memory",
            "64M",
            "--log",
            "debug",
        ]);
        serve
            .args(["--log-format", format, "--listen"])
            .arg(format!("unix:{}", scratch.socket().display()))
            .env("JOURNAL_STREAM", format!("{}:{inode}", file.dev()))
            .stdout(Stdio::piped())
            .stderr(log);
        let mut child = serve.spawn().expect("it starts");
        let mut ready = String::new();
        let stdout = child.stdout.as_mut().expect("piped");
        BufReader::new(stdout)
            .read_line(&mut ready)
            .expect("a line");
        // A guest that breaks the protocol: a warning.
        let end = connect(&scratch.socket(), TIMEOUT).expect("a connection");
        let mut guest = Guest::new(Box::new(end));
        guest.hello();
        guest.send(&Request::Free {
            buffer: BufferId(7),
        });
        guest.ended();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, Signal::TERM).expect("it runs");
        assert!(child.wait().expect("it ends").success());
        let text = fs::read_to_string(&path).expect("a log");
        for (words, priority, level) in [
            ("vgpu starts", "<6>", "INFO"),
            ("broke the protocol", "<4>", "WARN"),
            ("session totals", "<7>", "DEBUG"),
        ] {
            let line = { text.lines() }.find(|line| line.contains(words));
            let line = line.unwrap_or_else(|| panic!("{words} is not in\n{text}"));
            assert!(line.contains(level), "{line}");
            match is_journal {
                true => assert!(line.starts_with(priority), "{line}"),
                false => assert!(!line.starts_with('<'), "{line}"),
            }
            if format == "json" {
                let value: Json = serde_json::from_str(&line[3..]).expect("JSON");
                assert_eq!(value["level"], level);
            }
        }
    }
}

#[test]
fn logs_can_be_json() {
    let site = Site::start("json", &format!("server.log-format = \"json\"\n{ALICE}"));
    work(&mut site.guest("alice.sock"));
    let log = site.end();
    let lines: Vec<Json> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let closed = lines
        .iter()
        .find(|line| {
            line["fields"]["message"]
                .as_str()
                .is_some_and(|m| m.starts_with("session closed"))
        })
        .expect("the session's end");
    assert_eq!(closed["fields"]["graphs"], 1);
    assert_eq!(closed["span"]["tenant"], "alice");
}
