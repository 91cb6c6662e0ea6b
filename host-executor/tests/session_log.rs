//! The log of a guest that connects again and again.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::log::{keep, lines_with};
use common::{Host, TIMEOUT, cpu};

/// Sessions of the guest that reconnects: twice as many lines.
const SESSIONS: usize = 300;

/// Events of a session that are logged as such.
const EVENTS: usize = 100;

/// The lines about sessions of this tenant that began or ended.
fn lines(tenant: &str) -> usize {
    let all = ["session opened", "session closed"]
        .map(lines_with)
        .concat();
    let of_tenant = all.iter().filter(|line| line.contains(tenant));
    of_tenant.count()
}

/// The lines that were left out, as the log says.
fn left_out(guest: &str) -> usize {
    let said = lines_with(&format!(
        "lines about sessions of guest {guest} were left out"
    ));
    let counts = said.iter().map(|line| {
        let (before, _) = line
            .split_once(" lines about")
            .expect("the text of the line");
        let count = before
            .rsplit(['=', ' '])
            .next()
            .and_then(|n| n.parse::<usize>().ok());
        count.unwrap_or_else(|| panic!("no number in {line}"))
    });
    counts.sum::<usize>()
}

#[test]
fn what_was_left_out_is_said_at_the_end_and_counts_the_events_of_a_session() {
    keep();
    let host = Host::new(cpu());
    // Nobody watches, as when the executor ends before the next look.
    let mut guest = host.guest_of(3);
    for _ in 0..2 * EVENTS {
        let reason = guest.refusal(1 << 60);
        assert!(reason.contains("out of memory"), "{reason}");
    }
    drop(guest);
    host.wait_until_empty();
    assert_eq!(left_out("uid:3"), 0);
    host.server.shutdown();
    assert_eq!(left_out("uid:3"), EVENTS);
}

#[test]
fn a_guest_that_reconnects_in_a_loop_has_a_limit_of_lines_and_the_log_says_how_many_are_missing() {
    keep();
    let host = Host::new(cpu());
    host.server.watch(|why| panic!("{why}")).expect("a thread");
    let begin = Instant::now();
    for _ in 0..SESSIONS {
        drop(host.guest_of(1));
    }
    host.wait_until_empty();
    let periods = 1 + begin.elapsed().as_secs() as usize / 10;
    let written = lines("uid:1");
    assert!(
        written <= 200 * periods,
        "{written} lines in {periods} periods"
    );
    // Another guest has a limit of its own.
    drop(host.guest_of(2));
    host.wait_until_empty();
    let begin = Instant::now();
    while left_out("uid:1") + written < 2 * SESSIONS {
        let left_out = left_out("uid:1");
        assert!(
            begin.elapsed() < TIMEOUT,
            "{left_out} lines were left out and {written} were written, by the log"
        );
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(left_out("uid:1") + written, 2 * SESSIONS);
    assert_eq!(lines("uid:2"), 2);
}
