//! `vgpu top`, in a terminal.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use vgpu_transport::wire::GraphId;

use crate::common::{TIMEOUT, add, bytes};
use crate::long_name;
use crate::served::site::{ALICE, BOB, Site, fails};
use crate::served::{Scratch, vgpu};

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
