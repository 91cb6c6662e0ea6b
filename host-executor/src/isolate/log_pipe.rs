//! The log of a worker on its way to the log of the supervisor.
//!
//! A guest may have taken over its worker. The worker therefore does not get the supervisor's
//! standard error, but a pipe: what is written to it is limited, and cannot control a terminal. A
//! guest can have many workers, one after the other or at once. Lines about its sessions have one
//! limit for all of them.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, Read};
use std::process::ChildStderr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{Level, warn};

use super::printable::printable;
use crate::log_limit::LogLimit;
use crate::log_queue::ProcessLines;
use crate::service;
use crate::size::shown;

/// Bytes that a process may write into the log at once, and in each second.
const BURST: u64 = 256 << 10;
const PER_SECOND: u64 = 64 << 10;

/// The longest line in bytes. A longer one is divided.
const MAX_LINE: usize = 16 << 10;

/// How long a process that has written too much waits, when it goes on.
const PAUSE: Duration = Duration::from_millis(100);

/// How often the log says that lines were dropped.
const NOTICE_INTERVAL: Duration = Duration::from_secs(10);

/// How long the last lines of a process that has ended may take.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The thread that forwards the log of a process.
pub(super) struct LogPipe(Option<Receiver<()>>);

impl LogPipe {
    /// Starts to forward what the process `who` writes. `sessions`: the limit of its lines about
    /// sessions, if there is one beside that of the process itself.
    pub(super) fn start(
        pipe: Option<ChildStderr>,
        who: String,
        sessions: Option<Arc<LogLimit>>,
    ) -> LogPipe {
        let Some(pipe) = pipe else {
            return LogPipe(None);
        };
        let (sender, done) = mpsc::channel();
        let thread = thread::Builder::new().name("vgpu-log".into());
        let spawned = thread.spawn(move || {
            let mut limit = ProcessLogLimit::new(Instant::now(), sessions);
            let lines = ProcessLines::default();
            forward(
                pipe,
                |line| lines.push(line),
                service::is_journal(),
                &mut limit,
                Instant::now,
                thread::sleep,
                |dropped| {
                    warn!(
                        "{} of the log of {who} were dropped: it may write {} at once, and {} in \
                         each second, and less while nobody reads the log",
                        shown(dropped),
                        shown(BURST),
                        shown(PER_SECOND)
                    );
                },
            );
            let _ = sender.send(());
        });
        if let Err(error) = spawned {
            warn!("no thread for the log of a process, which is lost: {error}");
        }
        LogPipe(Some(done))
    }

    /// Waits for the last lines of a process that has ended.
    pub(super) fn finish(&self) {
        if let Some(done) = &self.0 {
            let _ = done.recv_timeout(LAST_LINES);
        }
    }
}

/// What a process may still write.
struct ProcessLogLimit {
    left: u64,
    at: Instant,
    dropped: u64,
    told: Option<Instant>,
    /// The limit of lines about sessions.
    sessions: Option<Arc<LogLimit>>,
}

impl ProcessLogLimit {
    fn new(now: Instant, sessions: Option<Arc<LogLimit>>) -> ProcessLogLimit {
        ProcessLogLimit {
            left: BURST,
            at: now,
            dropped: 0,
            told: None,
            sessions,
        }
    }

    /// Whether a line of so many bytes may be written. Counts the line.
    fn admit(&mut self, bytes: usize, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_millis();
        let gained = u64::try_from(passed).unwrap_or(u64::MAX);
        let gained = gained.saturating_mul(PER_SECOND) / 1000;
        if gained > 0 {
            self.left = self.left.saturating_add(gained).min(BURST);
            self.at = now;
        }
        let left = self.left.checked_sub(bytes as u64);
        match left {
            Some(left) => self.left = left,
            None => self.count_dropped(bytes),
        }
        left.is_some()
    }

    /// Whether a line is within the limit of lines about sessions. Counts the line.
    fn passes(&self, line: &str, now: Instant) -> bool {
        let limit = self.sessions.as_ref().filter(|_| is_of_session(line));
        limit.is_none_or(|limit| limit.passes(now))
    }

    /// Counts a line that was not written.
    fn count_dropped(&mut self, bytes: usize) {
        self.dropped = self.dropped.saturating_add(bytes as u64);
    }

    /// The bytes that were dropped, if it is time to say so.
    fn notice(&mut self, now: Instant, is_over: bool) -> Option<u64> {
        let is_due = |told: Instant| now.saturating_duration_since(told) >= NOTICE_INTERVAL;
        if self.dropped == 0 || !(is_over || self.told.is_none_or(is_due)) {
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.dropped))
    }
}

/// Forwards lines until the pipe ends. `is_journal`: each gets the priority of its level, and its
/// own prefix is text: a process that a guest has taken over sends no emergencies to all users.
/// `out` returns whether there was room for a line.
fn forward(
    mut pipe: impl Read,
    out: impl Fn(&[u8]) -> bool,
    is_journal: bool,
    limit: &mut ProcessLogLimit,
    now: impl Fn() -> Instant,
    pause: impl Fn(Duration),
    mut notice: impl FnMut(u64),
) {
    let mut part = vec![0; 64 << 10];
    let mut pending: Vec<u8> = Vec::new();
    let mut is_over = false;
    while !is_over {
        match pipe.read(&mut part) {
            Ok(0) => is_over = true,
            Ok(count) => pending.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => is_over = true,
        }
        let mut has_dropped = false;
        while let Some(len) = line_len(&pending, is_over) {
            let line: Vec<u8> = pending.drain(..len).collect();
            let is_written = limit.admit(len, now()) && {
                let line = line_of(&line);
                if !limit.passes(&line, now()) {
                    continue;
                }
                let prefix = if is_journal { priority(&line) } else { "" };
                let has_room = out(format!("{prefix}{line}").as_bytes());
                if !has_room {
                    limit.count_dropped(len);
                }
                has_room
            };
            has_dropped |= !is_written;
        }
        if let Some(dropped) = limit.notice(now(), is_over) {
            notice(dropped);
        }
        if has_dropped && !is_over {
            // Meanwhile the pipe is full, and the process that fills it waits.
            pause(PAUSE);
        }
    }
}

/// The length of the first line, with its end. `None`: the line is not complete yet.
fn line_len(pending: &[u8], is_over: bool) -> Option<usize> {
    let end = pending
        .iter()
        .take(MAX_LINE)
        .position(|byte| *byte == b'\n');
    match end {
        Some(end) => Some(end + 1),
        None if pending.len() >= MAX_LINE => Some(MAX_LINE),
        None if is_over && !pending.is_empty() => Some(pending.len()),
        None => None,
    }
}

/// A line without control characters, with its end.
fn line_of(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    printable(text.trim_end_matches('\n')) + "\n"
}

/// Whether a line, as text or as JSON, is about a session, and at the level of those that a process
/// limits itself.
fn is_of_session(line: &str) -> bool {
    let is_of_session = line.contains(" session{") || line.contains("\"name\":\"session\"");
    is_of_session && matches!(level(line), Level::INFO | Level::WARN)
}

/// The prefix for the level that a line names.
fn priority(line: &str) -> &'static str {
    service::priority(level(line))
}

/// The level that a line names, as text or as JSON.
fn level(line: &str) -> Level {
    let levels = [Level::ERROR, Level::WARN, Level::DEBUG, Level::TRACE];
    let found = levels.into_iter().find(|level| {
        let mut words = line.split_whitespace().take(2);
        let is_word = words.any(|word| word == level.as_str());
        is_word || line.contains(&format!("\"level\":\"{level}\""))
    });
    found.unwrap_or(Level::INFO)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// Forwards `text` in a time that passes only in pauses. Returns what was written, the bytes
    /// that were dropped, and the seconds that the writer had to wait.
    fn forwarded(text: &[u8]) -> (String, u64, u64) {
        forwarded_to(text, false)
    }

    fn forwarded_to(text: &[u8], is_journal: bool) -> (String, u64, u64) {
        forwarded_within(text, is_journal, None)
    }

    fn forwarded_within(
        text: &[u8],
        is_journal: bool,
        sessions: Option<Arc<LogLimit>>,
    ) -> (String, u64, u64) {
        let start = Instant::now();
        let passed = Cell::new(Duration::ZERO);
        let dropped = RefCell::new(0);
        let out = RefCell::new(Vec::new());
        let mut limit = ProcessLogLimit::new(start, sessions);
        forward(
            text,
            |line| {
                out.borrow_mut().extend_from_slice(line);
                true
            },
            is_journal,
            &mut limit,
            || start + passed.get(),
            |pause| passed.set(passed.get() + pause),
            |bytes| *dropped.borrow_mut() += bytes,
        );
        let dropped = dropped.into_inner();
        (
            String::from_utf8(out.into_inner()).unwrap(),
            dropped,
            passed.get().as_secs(),
        )
    }

    #[test]
    fn lines_for_the_journal_have_the_priority_of_their_level() {
        let text = "2026-01-02T03:04:05Z  WARN a\n<0>emergency\n{\"level\":\"ERROR\"}\nan ERROR\n";
        let (out, ..) = forwarded_to(text.as_bytes(), true);
        let starts: Vec<&str> = out.lines().map(|line| &line[..6]).collect();
        assert_eq!(starts, ["<4>202", "<6><0>", "<3>{\"l", "<3>an "]);
    }

    #[test]
    fn lines_about_sessions_have_one_limit_for_all_processes_of_a_guest() {
        let limit = Arc::new(LogLimit::new(200));
        let lines = [
            "2026-01-02T03:04:05Z  INFO session{id=1 tenant=uid:1}: vgpu: session opened\n",
            "{\"level\":\"WARN\",\"span\":{\"id\":1,\"name\":\"session\"}}\n",
        ];
        let mut written = 0;
        for _ in 0..10 {
            for line in lines {
                let text = line.repeat(15);
                let limit = Some(Arc::clone(&limit));
                let (out, dropped, _) = forwarded_within(text.as_bytes(), false, limit);
                assert_eq!(dropped, 0);
                written += out.lines().count();
            }
        }
        assert_eq!((written, limit.take_suppressed()), (200, 100));
        for line in [
            "2026-01-02T03:04:05Z  INFO vgpu: the worker ends\n",
            "2026-01-02T03:04:05Z DEBUG session{id=1}: vgpu: allocated\n",
            "2026-01-02T03:04:05Z ERROR session{id=1}: vgpu: a panic\n",
        ] {
            let limit = Some(Arc::clone(&limit));
            let (out, ..) = forwarded_within(line.as_bytes(), false, limit);
            assert_eq!(out, line);
        }
    }

    #[test]
    fn flood_is_limited_and_its_writer_waits() {
        let text = "0123456789abcdef012345678901234\n".repeat(1 << 20); // 32 MiB
        let (out, dropped, seconds) = forwarded(text.as_bytes());
        assert!(seconds >= 40, "32 MiB within {seconds} s");
        let most = BURST + PER_SECOND * (seconds + 1);
        assert!(
            out.len() as u64 <= most,
            "{} bytes of at most {most}",
            out.len()
        );
        assert_eq!(out.len() as u64 + dropped, text.len() as u64);
        // An honest process never waits, and loses nothing.
        let text = &text[..BURST as usize];
        assert_eq!(forwarded(text.as_bytes()), (text.to_owned(), 0, 0));
    }

    #[test]
    fn lines_without_room_are_counted_and_their_writer_waits() {
        let (dropped, pauses) = (RefCell::new(0), Cell::new(0));
        let mut limit = ProcessLogLimit::new(Instant::now(), None);
        forward(
            "a line\n".repeat(1 << 15).as_bytes(),
            |_| false,
            false,
            &mut limit,
            Instant::now,
            |_| pauses.set(pauses.get() + 1),
            |bytes| *dropped.borrow_mut() += bytes,
        );
        assert_eq!(dropped.into_inner(), 7 << 15);
        assert!(pauses.get() > 0);
    }

    #[test]
    fn lines_are_whole_bounded_and_cannot_control_a_terminal() {
        let (out, ..) = forwarded(b"a\x1b[2Jb\rc\td\n\xff\xc2\x9bend");
        assert_eq!(out, "a?[2Jb?c\td\n\u{fffd}?end\n");
        let (out, ..) = forwarded(&vec![b'x'; 2 * MAX_LINE + 1]);
        let lengths: Vec<usize> = out.lines().map(str::len).collect();
        assert_eq!(lengths, [MAX_LINE, MAX_LINE, 1]);
    }
}
