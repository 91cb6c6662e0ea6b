//! A running executor, as an operator configures, observes and changes it.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Guest, TIMEOUT, add, bytes};
use prometheus_parse::{Scrape, Value};
use rustix::process::Signal;
use serde_json::Value as Json;
use served::site::{ALICE, BOB, Site, fails, figures, http, work};
use served::{Scratch, Serve, vgpu};
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::unix::connect;
use vgpu_transport::wire::{GraphId, Reply, Request};

#[test]
fn reload_applies_to_connected_guests() {
    let site = Site::start("reload", ALICE);
    let socket = fs::metadata(site.folder.join("alice.sock")).expect("a socket");
    assert_eq!(socket.permissions().mode() & 0o777, 0o600);
    let control = fs::metadata(site.folder.join("control.sock")).expect("a socket");
    assert_eq!(control.permissions().mode() & 0o777, 0o600);
    let mut alice = site.guest("alice.sock");
    assert_eq!(figures(&mut alice), (1 << 20, 1 << 20));

    // A quota, another guest with its own listener, and a setting that needs a restart.
    site.write(&format!(
        "engine.batch = false\n{}{BOB}",
        ALICE.replace("1MiB", "4MiB")
    ));
    let said = site.reload();
    assert!(
        said.contains("2 named guests; engine.batch take effect after a restart"),
        "{said}"
    );
    assert_eq!(figures(&mut alice), (4 << 20, 4 << 20));
    let mut bob = site.guest("bob.sock");
    assert_eq!(figures(&mut bob), (2 << 20, 2 << 20));
    work(&mut bob);

    // Mistakes of all kinds change nothing.
    for (config, words) in [
        (
            format!("{ALICE}weight = 4\n"),
            "vgpu.toml:9:1: duplicate key",
        ),
        (
            format!("{ALICE}{}", BOB.replace("2M", "2Q")),
            "vgpu.toml:12:10: unknown unit",
        ),
        (
            format!("{ALICE}{}", BOB.replace("2M", "64M")),
            "the quotas of the guests add up to 68157440 bytes, the engine has 67108864",
        ),
        (
            format!("{ALICE}{}", BOB.replace("DIR", "DIR/nowhere")),
            "does not exist",
        ),
    ] {
        site.write(&config);
        let said = fails(&mut site.run("reload", &[]));
        assert!(
            said.contains("is unchanged") && said.contains(words),
            "{words}: {said}"
        );
        assert_eq!(figures(&mut alice), (4 << 20, 4 << 20));
        work(&mut site.guest("bob.sock"));
    }

    // By signal. Bob is removed: his listener closes, and his connected program stays.
    site.write(ALICE);
    site.serve.signal(Signal::HUP);
    let start = Instant::now();
    while figures(&mut alice).0 != 1 << 20 || site.folder.join("bob.sock").exists() {
        assert!(start.elapsed() < TIMEOUT, "SIGHUP does nothing");
        thread::sleep(Duration::from_millis(5));
    }
    bob.fence();
    work(&mut alice);
    let log = site.end();
    assert!(
        log.contains("listening on unix:") && log.contains("no longer"),
        "{log}"
    );
}

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
    let refusals = log.split("guest alice: out of memory: 2097152 bytes wanted, ");
    let refusal = { refusals }.nth(1).unwrap_or_else(|| panic!("{log}"));
    assert!(refusal.contains(" of 1048576 free"), "{log}");
}

#[test]
fn metrics_are_in_the_prometheus_format() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port")
        .port();
    for address in [format!("127.0.0.1:{port}"), "unix:DIR/metrics.sock".into()] {
        let config = format!("metrics.listen = \"{address}\"\n{ALICE}");
        let site = Site::start("metrics", &config);
        let mut alice = site.guest("alice.sock");
        for _ in 0..3 {
            work(&mut site.guest("alice.sock"));
        }
        work(&mut alice);
        alice.fence();
        let get = |path: &str, method: &str| match address.strip_prefix("unix:DIR/") {
            Some(name) => http(
                UnixStream::connect(site.folder.join(name)).expect("it listens"),
                method,
                path,
            ),
            None => http(
                TcpStream::connect(&address).expect("it listens"),
                method,
                path,
            ),
        };
        let (head, body) = get("/metrics", "GET");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(
            head.contains("application/openmetrics-text; version=1.0.0"),
            "{head}"
        );
        assert!(body.ends_with("# EOF\n"), "{body}");
        let lines = body.lines().map(|line| Ok(line.to_owned()));
        let scrape = Scrape::parse(lines).expect("the text format");
        let sample = |name: &str, guest: Option<&str>| {
            let found = scrape.samples.iter().find(|sample| {
                sample.metric == name
                    && guest.is_none_or(|guest| sample.labels.get("guest") == Some(guest))
            });
            found
                .unwrap_or_else(|| panic!("{name} of {guest:?} is not in\n{body}"))
                .value
                .clone()
        };
        let number = |name: &str, guest| match sample(name, guest) {
            Value::Gauge(value) | Value::Counter(value) | Value::Untyped(value) => value,
            other => panic!("{name}: {other:?}"),
        };
        let alice_has = |name: &str| number(name, Some("alice"));
        assert_eq!(
            number("vgpu_engine_memory_bytes", None),
            (64u64 << 20) as f64
        );
        assert_eq!(
            alice_has("vgpu_guest_memory_quota_bytes"),
            (1u64 << 20) as f64
        );
        assert_eq!(alice_has("vgpu_guest_graphs_total"), 4.0);
        assert_eq!(alice_has("vgpu_guest_weight"), 3.0);
        assert_eq!(alice_has("vgpu_guest_weights_not_sent_bytes_total"), 0.0);
        assert_eq!(number("vgpu_weights_bytes", None), 0.0);
        assert!(alice_has("vgpu_guest_received_bytes_total") > 0.0);
        assert!(alice_has("vgpu_graph_run_seconds_sum") > 0.0);
        let refused = alice.new_buffer();
        let size = 2 << 20;
        alice.send(&Request::Alloc {
            buffer: refused,
            size,
        });
        assert!(matches!(alice.receive().0, Reply::Refused { .. }));
        let (_, later) = get("/metrics", "GET");
        for (reason, count) in [("memory", 1), ("limit", 0), ("device", 0)] {
            let line = format!(
                "vgpu_guest_failures_total{{guest=\"alice\",reason=\"{reason}\"}} {count}\n"
            );
            assert!(later.contains(&line), "{later}");
        }
        let info = sample("vgpu_build_info", None);
        assert_eq!(info, Value::Untyped(1.0));
        let build = { scrape.samples.iter() }.find(|s| s.metric == "vgpu_build_info");
        let version = build.and_then(|sample| sample.labels.get("version"));
        assert_eq!(version, Some(env!("VGPU_VERSION")));
        for name in [
            "process_start_time_seconds",
            "process_resident_memory_bytes",
            "process_virtual_memory_bytes",
            "process_open_fds",
            "process_max_fds",
        ] {
            assert!(number(name, None) > 0.0, "{name}");
        }
        // In clock ticks of 10 ms, of which a fast processor may not have needed one.
        assert!((0.0..1000.0).contains(&number("process_cpu_seconds_total", None)));
        for duplicate in ["vgpu_guest_run_seconds", "vgpu_guest_queue_seconds"] {
            assert!(!body.contains(duplicate), "{duplicate}");
        }
        assert_eq!(number("vgpu_guest_graphs_total", Some("-")), 0.0);
        assert_eq!(alice_has("vgpu_graph_run_seconds_count"), 4.0);
        let Value::Histogram(buckets) = sample("vgpu_graph_run_seconds", Some("alice")) else {
            panic!("no histogram");
        };
        let counts: Vec<f64> = buckets.iter().map(|bucket| bucket.count).collect();
        assert!(
            counts.is_sorted() && counts.last() == Some(&4.0),
            "{counts:?}"
        );
        assert!(buckets.last().expect("buckets").less_than.is_infinite());
        // The parser tolerates unknown parts; these are rules of the format.
        for line in body.lines() {
            assert!(line.is_ascii() && !line.is_empty(), "{line:?}");
        }
        let (head, body) = get("/metrics", "HEAD");
        assert!(
            head.starts_with("HTTP/1.1 200") && head.contains("openmetrics") && body.is_empty(),
            "{head}\n{body}"
        );
        let (head, body) = get("/healthz", "GET");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert_eq!(body, "ok: the engine cpu answers\n");
        for (path, method, status) in [("/no", "GET", 404), ("/metrics", "POST", 405)] {
            let (head, _) = get(path, method);
            assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
        }
        site.end();
    }
}

#[test]
fn a_taken_port_for_metrics_keeps_no_guest_away() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address");
    let site = Site::start("taken", &format!("metrics.listen = \"{address}\"\n{ALICE}"));
    work(&mut site.guest("alice.sock"));
    let log = site.end();
    let said = format!("no metrics: another program listens on {address}");
    assert!(log.contains(&said), "{log}");
}

#[test]
fn metrics_for_other_machines_have_to_be_allowed() {
    let scratch = Scratch::new("remote-metrics");
    let socket = scratch.socket();
    let endpoint = format!("unix:{}", socket.display());
    let remote = ["--metrics", "0.0.0.0:0"];
    let mut refused = vgpu(&["serve", "--listen", &endpoint]);
    refused.args(remote);
    let refused = Serve::of(refused);
    assert_eq!(refused.ready, "");
    let (status, text) = refused.wait();
    assert_eq!(status.code(), Some(78), "{text}");
    assert!(text.contains("--metrics-allow-remote"), "{text}");
    let allowed = [&remote[..], &["--metrics-allow-remote"]].concat();
    let serve = Serve::start(&socket, &allowed);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert!(
        status.success() && log.contains("metrics at 0.0.0.0:0"),
        "{log}"
    );
}

/// A pseudo terminal with a program in it.
struct Terminal {
    child: Child,
    keys: fs::File,
    screen: std::sync::Arc<std::sync::Mutex<vt100::Parser>>,
}

impl Terminal {
    fn start(mut command: Command, rows: u16, columns: u16) -> Terminal {
        let (mut ours, mut its) = (0, 0);
        let size = libc::winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let part = |n| std::num::NonZero::new(n).expect("a terminal of some size");
        // SAFETY: both descriptors are valid locations for the results; name and modes may be null;
        // the size is valid for the call.
        let made = unsafe {
            libc::openpty(
                &mut ours,
                &mut its,
                std::ptr::null_mut(),
                std::ptr::null(),
                &size,
            )
        };
        assert_eq!(made, 0, "a terminal");
        // SAFETY: openpty has opened the two descriptors, and nothing else owns them.
        let (ours, its) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(its)) };
        let end = || Stdio::from(its.try_clone().expect("a descriptor"));
        let child = command
            .env("TERM", "xterm-256color")
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("the command starts");
        let keys = fs::File::from(ours);
        let mut output = keys.try_clone().expect("a descriptor");
        let screen = std::sync::Arc::new(std::sync::Mutex::new(vt100::Parser::new(
            part(rows),
            part(columns),
            0,
        )));
        let shown = std::sync::Arc::clone(&screen);
        thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(len @ 1..) = output.read(&mut part) {
                shown.lock().expect("the screen").process(&part[..len]);
            }
        });
        Terminal {
            child,
            keys,
            screen,
        }
    }

    fn shows(&self) -> String {
        self.screen.lock().expect("the screen").screen().contents()
    }

    /// Waits until all words are on the screen at the same time. Each is a word and what its line
    /// contains besides: output arrives in pieces, so a screen may be drawn by half.
    fn wait_for(&self, words: &[(&str, &str)]) {
        let start = Instant::now();
        loop {
            let shows = self.shows();
            let line_with = |(word, rest): &(&str, &str)| {
                shows
                    .lines()
                    .any(|line| line.contains(word) && line.contains(rest))
            };
            if words.iter().all(line_with) {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "{words:?} are not in\n{shows}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys
            .write_all(keys.as_bytes())
            .expect("the program reads");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_shows_guests_in_a_terminal() {
    let site = Site::start("top", &format!("{ALICE}{BOB}"));
    let mut alice = site.guest("alice.sock");
    alice.alloc(512 << 10);
    let mut top = Terminal::start(site.run("top", &["--interval", "0.1"]), 30, 150);
    top.wait_for(&[
        ("vgpu", "1 programs"),
        ("cpu: ", ""),
        ("alice", "512.0 KiB / 1.0 MiB"),
        ("alice", "████████░░░░░░░░"),
        ("bob", "0 B / 2.0 MiB"),
        ("memory", "of 64.0 MiB"),
    ]);

    // The display is live: new graphs are counted, freed memory disappears.
    let a = alice.alloc_with(&bytes(&[1.0, 2.0]));
    alice.graph(GraphId(1), &add(2, a, a, a));
    let start = Instant::now();
    loop {
        alice.submit(GraphId(1));
        alice.fence();
        let shows = top.shows();
        let rate = shows
            .lines()
            .find(|l| l.contains("alice"))
            .and_then(|line| {
                line.split("MiB")
                    .nth(1)?
                    .split_whitespace()
                    .next()?
                    .parse::<f64>()
                    .ok()
            });
        if rate.is_some_and(|rate| rate > 0.0) {
            break;
        }
        assert!(start.elapsed() < TIMEOUT, "no graphs a second in\n{shows}");
    }
    drop(alice);
    top.wait_for(&[("no program is connected", "")]);

    // A lost executor is reported; q ends the program and restores the terminal.
    site.end();
    top.wait_for(&[("no answer from", "")]);
    top.press("q");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = top.child.try_wait().expect("it can be waited for") {
            break status;
        }
        assert!(start.elapsed() < TIMEOUT, "q does not end it");
        thread::sleep(Duration::from_millis(10));
    };
    assert!(status.success());
    // The last output of `vgpu top` may still be on the way.
    while top
        .screen
        .lock()
        .expect("the screen")
        .screen()
        .alternate_screen()
    {
        assert!(start.elapsed() < TIMEOUT, "the screen was not given back");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A name of the greatest length, which begins with `start`.
fn long_name(start: &str) -> String {
    format!("{start:x<64}")
}

#[test]
fn top_fits_into_a_small_terminal() {
    let names = (1..=20).map(|n| format!("guest{n:02}"));
    let names: Vec<String> = [long_name("a-tenant")].into_iter().chain(names).collect();
    let guests = names.iter().enumerate().map(|(n, name)| {
        format!(
            "[[guest]]\nname = \"{name}\"\nuids = [{}]\nmemory = 1024\n",
            5000 + n
        )
    });
    let own = "[[guest]]\nname = \"zoe\"\nlisten = [\"unix:DIR/zoe.sock\"]\n";
    let site = Site::start("top-small", &format!("{}{own}", guests.collect::<String>()));
    let mut zoe = site.guest("zoe.sock");
    zoe.alloc(512 << 10);
    let mut top = Terminal::start(site.run("top", &["--interval", "0.1"]), 24, 80);
    top.wait_for(&[
        ("a-tenantxxxx", "…"),
        ("guest08", "0 B / 1.0 KiB"),
        (" guests 1 to 9 of 23 ", ""),
        ("GUEST", "GRAPHS/S"),
        ("memory 512.0 KiB", "of 64.0 MiB"),
        ("zoe", "test"),
        ("q quit", "s sort: name"),
    ]);
    // The guests above the last one scroll away.
    top.press(&"j".repeat(40));
    top.wait_for(&[(" guests 15 to 23 of 23 ", ""), ("zoe", "512.0 KiB / -")]);
    assert!(!top.shows().contains("guest08"), "{}", top.shows());
    top.press("k");
    top.wait_for(&[(" guests 14 to 22 of 23 ", "")]);
    top.press("s");
    top.wait_for(&[("q quit", "s sort: memory")]);
    top.press(&"k".repeat(40));
    top.wait_for(&[(" guests 1 to 9 of 23 ", ""), ("zoe", "512.0 KiB / -")]);
    top.press("/GUEST1\r");
    top.wait_for(&[
        ("q quit", "/ filter: GUEST1"),
        ("guest10", "0 B / 1.0 KiB"),
        ("no program of these guests", ""),
    ]);
    assert!(!top.shows().contains("zoe"), "{}", top.shows());
    // Esc takes the request back, and so does a number without a session.
    let number = site.status()["sessions"][0]["id"].to_string();
    top.press(&format!("x{number}"));
    top.wait_for(&[(
        &format!("end the session with the ID: {number}_"),
        "Esc back",
    )]);
    top.press("\u{1b}");
    top.wait_for(&[("q quit", "x end")]);
    top.press("x4711\r");
    top.wait_for(&[("there is no session 4711", "")]);
    zoe.fence();
    top.press(&format!("x{number}\r"));
    let reason = zoe.ended();
    assert_eq!(reason, "an operator of the host has ended this session");
    site.end();
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
fn top_reports_a_missing_terminal_or_executor() {
    let scratch = Scratch::new("no-top");
    let path = scratch.path().join("control.sock");
    let control = path.to_str().expect("text");
    let text = fails(&mut vgpu(&["top", "--control", control]));
    assert!(text.contains("not a terminal"), "{text}");
    let text = fails(&mut vgpu(&["ps", "--control", control]));
    assert!(
        text.contains(control) && text.contains("is an executor running"),
        "{text}"
    );
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

#[test]
fn check_config_validates_without_serving() {
    let scratch = Scratch::new("check");
    let path = scratch.path().join("vgpu.toml");
    let file = path.to_str().expect("text");
    let check = |text: &str, more: &[&str]| {
        fs::write(&path, text).expect("a file");
        let arguments = [&["check-config", file], more].concat();
        let output = vgpu(&arguments).output().expect("the command starts");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).expect("text"))
    };
    let example = include_str!("../../../deploy/host/vgpu.toml");
    let (status, said) = check(example, &[]);
    assert_eq!(status, Some(0), "{said}");
    // The engine that `vgpu serve` would take, and its device.
    let chosen = said.split_once("valid: engine auto, here ");
    let (_, chosen) = chosen.unwrap_or_else(|| panic!("{said}"));
    let (engine, rest) = chosen.split_once(" (").expect("a device");
    assert!(rest.contains("), 0 named guests, 0 bytes of "), "{said}");
    // What a library prints when it is loaded is not part of the answer.
    if cfg!(feature = "ggml") {
        let at = |name: &str| scratch.path().join(name);
        let print = "#include <stdio.h>\n\
            __attribute__((constructor)) static void print(void) { puts(\"{}\"); }\n";
        fs::write(at("print.c"), print).expect("a file");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]);
        let status = cc.args([at("libprint.so"), at("print.c")]).status();
        assert!(status.expect("a compiler").success());
        let engine = format!("engine.kind = \"ggml:{}\"\n", at("libprint.so").display());
        fs::write(&path, engine).expect("a file");
        let output = vgpu(&["check-config", file, "--json"]).output();
        let output = output.expect("the command starts");
        let value: Json = serde_json::from_slice(&output.stdout).expect("JSON and nothing else");
        assert_eq!(value["ok"], false, "{value}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("{}"));
    }
    let (_, json) = check(example, &["--json"]);
    let value: Json = serde_json::from_str(&json).expect("JSON");
    assert_eq!(value["engine"], engine, "{json}");
    let mut serve = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    serve
        .args(["serve", "--engine", "auto", "--memory", "64M", "--listen"])
        .arg(format!("unix:{}", scratch.socket().display()));
    let serve = Serve::of(serve);
    serve.signal(Signal::TERM);
    let (_, log) = serve.wait();
    assert!(log.contains(&format!("engine=\"{engine}\"")), "{log}");
    let (_, said) = check("engine.kind = \"cpu\"\n", &[]);
    assert!(said.contains("valid: engine cpu ("), "{said}");
    // What does not fit this host is refused, as by `vgpu serve`.
    let guest = "[[guest]]\nname = \"alice\"\nuids = [1]\n";
    for (more, reason) in [
        ("memory = \"4096T\"\n", "bytes, the engine has"),
        ("certificates = [\"alice\"]\n", "this executor has none"),
        ("[server]\nlog = \"a=b=c\"\n", "is not a log filter"),
        ("[server]\ncerts = \"/nowhere\"\n", "/nowhere"),
    ] {
        let guest = format!("{guest}{more}");
        for engine in ["cpu", "auto"] {
            let text = format!("engine.kind = \"{engine}\"\n{guest}");
            let (status, said) = check(&text, &[]);
            assert_eq!(status, Some(1), "{text}{said}");
            assert!(said.contains(reason), "{text}{said}");
            let endpoint = format!("unix:{}", scratch.socket().display());
            let serve = ["serve", "--config", file, "--listen", &endpoint];
            let serves = fails(&mut vgpu(&serve));
            assert!(serves.contains(reason), "{text}{serves}");
        }
    }

    let (status, said) = check("[server]\nlisten = [\"usb:1\"]\n", &[]);
    assert_eq!(status, Some(1));
    assert!(
        said.contains(&format!("{file}:2:10: ")) && said.contains("unknown kind `usb`"),
        "{said}"
    );
    let (status, said) = check("[server]\nmax-guests = \"x\"\n", &["--json"]);
    assert_eq!(status, Some(1));
    let value: Json = serde_json::from_str(&said).expect("JSON");
    assert_eq!(
        (&value["ok"], &value["line"], &value["column"]),
        (&false.into(), &2.into(), &14.into())
    );

    let (status, said) = check(
        "[engine]\nmemory = 10\n[[guest]]\nname = \"a\"\nuids = [1]\nmemory = 11\n",
        &[],
    );
    assert_eq!(status, Some(1));
    assert!(said.contains("11 bytes, the engine has 10"), "{said}");
    fs::remove_file(&path).expect("it is there");
    let output = vgpu(&["check-config", file])
        .output()
        .expect("the command starts");
    assert_eq!(output.status.code(), Some(2));

    let text = fails(&mut vgpu(&["serve", "--config", file]));
    assert!(text.contains(file), "{text}");
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
