//! The log of this process, on its way to standard error.
//!
//! The reader of the log may have stopped reading, such as a full pipe's other end. A write then
//! never returns. Lines therefore go into a queue of limited size, and one thread writes them, so
//! that no session, no freed memory and no signal waits for the reader. Lines that find no room are
//! dropped, and counted: when all that was queued has been written, a line says how many.
//!
//! [`write_line`] and [`flush`] also work while a driver hangs in the dynamic linker: they start no
//! thread once [`start`] has been called, and use no thread-local variable with a destructor, since
//! glibc takes the linker's lock for both.
#![forbid(unsafe_code)]

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tracing::Level;

use crate::service;

use vgpu_transport::lock::{Guard, lock, wait, wait_timeout};

/// How long the end of the process waits for the log.
pub(crate) const MAX_FLUSH_WAIT: Duration = Duration::from_secs(2);

/// Most bytes that wait to be written: some 8,000 lines.
const MAX_BYTES: usize = 1 << 20;

/// Another process, whose lines this one forwards, may have this part of the room that is left.
const PART_OF_PROCESS: usize = 8;

/// What another process may have queued in any case, however many write more than is read.
const ROOM_OF_PROCESS: usize = 4 << 10;

/// What this process may have queued in any case.
const OWN_ROOM: usize = 256 << 10;

/// The log of this process.
static LOG: LogQueue = LogQueue::new();

/// Gives the time, as the rest of the log has it.
pub type TimeText = fn() -> String;

/// Set if [`write_line`] writes JSON.
static JSON: OnceLock<TimeText> = OnceLock::new();

/// Makes [`write_line`] write JSON objects, as the rest of the log.
pub fn use_json(now: TimeText) {
    JSON.get_or_init(|| now);
}

/// Starts the thread that writes to standard error. Panics, too, are written by this thread from
/// now on.
///
/// A process may have lines for the log before. The thread then writes them.
///
/// # Errors
/// No thread can be started.
pub fn start() -> io::Result<()> {
    LOG.start(Descriptor(io::stderr()), say_dropped)?;
    // A thread that has not begun waits for the linker's lock, too.
    LOG.wait_until_begun();
    std::panic::set_hook(Box::new(|info| {
        let current = thread::current();
        let name = current.name().unwrap_or("<unnamed>");
        let mut text = format!("thread '{name}' {info}");
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            text.push_str(&format!("\n{trace}"));
        }
        write_line(Level::ERROR, &text);
        // The process ends with its main thread.
        if name == "main" {
            LOG.flush(MAX_FLUSH_WAIT);
        }
    }));
    Ok(())
}

/// Whether this process has written something into the log, or has the thread that writes it.
pub fn is_in_use() -> bool {
    let state = LOG.lock();
    state.has_writer || !state.lines.is_empty()
}

/// Waits until all lines are written, but not longer than two seconds: nobody may read them.
pub fn flush() {
    LOG.flush(MAX_FLUSH_WAIT);
}

/// Writes a line into the log of this process, past its filter: its level, and the text. Where
/// standard error is the journal, the line has the level's priority. A text may have several lines.
pub fn write_line(level: Level, text: &str) {
    LOG.push(line(level, text, JSON.get().copied()).as_bytes(), None);
}

fn line(level: Level, text: &str, json: Option<TimeText>) -> String {
    let line = match json {
        Some(now) => serde_json::json!({
            "timestamp": now(),
            "level": level.as_str(),
            "fields": {"message": text},
            "target": env!("CARGO_PKG_NAME"),
        })
        .to_string(),
        // Before every line: who reads them from a pipe finds the level in each.
        None => { text.lines() }
            .map(|line| format!("{level} {line}\n"))
            .collect(),
    };
    service::with_priority(level, &line)
}

fn say_dropped(lines: u64) {
    write_line(
        Level::WARN,
        &format!("{lines} lines of the log were dropped: nobody has read it"),
    );
}

/// A writer into the log. The writer never waits for the reader. What is written at once stays
/// together.
pub fn writer() -> LogWriter {
    LogWriter(())
}

/// The lines of another process in the log of this one.
#[derive(Debug, Default)]
pub(crate) struct ProcessLines {
    /// Bytes that wait to be written.
    queued: Arc<AtomicUsize>,
}

impl ProcessLines {
    /// Appends a text. Returns whether there was room for it: other processes have some, too.
    pub(crate) fn push(&self, text: &[u8]) -> bool {
        LOG.push(text, Some(self))
    }
}

/// A writer into the log of this process.
#[derive(Debug)]
pub struct LogWriter(());

impl Write for LogWriter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        LOG.push(text, None);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard error, without the lock that other threads take which write there by themselves. Other
/// programs may have made it non-blocking: a full one is waited for.
struct Descriptor<F>(F);

impl<F: AsFd> Write for Descriptor<F> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(&self.0, text) {
                Err(Errno::AGAIN) => {}
                outcome => return Ok(outcome?),
            }
            let mut room = [PollFd::new(&self.0, PollFlags::OUT)];
            match poll(&mut room, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines that wait to be written.
struct LogQueue {
    state: Mutex<QueuedLines>,
    /// Notified of new lines, and when all are written.
    changed: Condvar,
}

struct Line {
    text: Box<[u8]>,
    /// What its process has queued, if it is another one.
    of_process: Option<Arc<AtomicUsize>>,
}

struct QueuedLines {
    lines: VecDeque<Line>,
    /// The bytes of `lines`.
    bytes: usize,
    /// Those of this process.
    own_bytes: usize,
    /// Lines that found no room, since the log has said so.
    dropped: u64,
    /// Whether the writer has taken a line that is not yet written.
    is_writing: bool,
    has_writer: bool,
    /// The writer runs.
    has_begun: bool,
}

impl LogQueue {
    const fn new() -> LogQueue {
        let state = QueuedLines {
            lines: VecDeque::new(),
            bytes: 0,
            own_bytes: 0,
            dropped: 0,
            is_writing: false,
            has_writer: false,
            has_begun: false,
        };
        LogQueue {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> Guard<'_, QueuedLines> {
        lock(&self.state)
    }

    /// Appends text, or counts its lines as dropped. Once something is dropped, so is all that
    /// follows until the log has said so: the gap is in one place. Returns whether there was room.
    ///
    /// What another process gets no room for is not counted here.
    fn push(&self, text: &[u8], process: Option<&ProcessLines>) -> bool {
        let mut state = self.lock();
        let left = MAX_BYTES.saturating_sub(state.bytes);
        let has_room = match process {
            None => text.len() <= left || state.own_bytes + text.len() <= OWN_ROOM,
            Some(process) => {
                let queued = process.queued.load(Ordering::Relaxed);
                queued + text.len() <= ROOM_OF_PROCESS.max(left / PART_OF_PROCESS)
            }
        };
        if state.dropped > 0 || !has_room {
            if process.is_none() {
                let lines = text.iter().filter(|byte| **byte == b'\n').count();
                state.dropped += lines.max(1) as u64;
            }
            return false;
        }
        state.bytes += text.len();
        match process {
            Some(process) => drop(process.queued.fetch_add(text.len(), Ordering::Relaxed)),
            None => state.own_bytes += text.len(),
        }
        state.lines.push_back(Line {
            text: text.into(),
            of_process: process.map(|process| Arc::clone(&process.queued)),
        });
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Starts the thread that writes the lines to `out`. There is one.
    fn start(
        &'static self,
        out: impl Write + Send + 'static,
        on_dropped: fn(u64),
    ) -> io::Result<()> {
        let mut state = self.lock();
        if !state.has_writer {
            let builder = thread::Builder::new().name("vgpu-log-writer".into());
            builder.spawn(move || self.write_lines(out, on_dropped))?;
            state.has_writer = true;
        }
        Ok(())
    }

    fn write_lines(&self, mut out: impl Write, on_dropped: fn(u64)) {
        let mut state = self.lock();
        state.has_begun = true;
        self.changed.notify_all();
        loop {
            if let Some(line) = state.lines.pop_front() {
                state.bytes -= line.text.len();
                match &line.of_process {
                    Some(queued) => drop(queued.fetch_sub(line.text.len(), Ordering::Relaxed)),
                    None => state.own_bytes -= line.text.len(),
                }
                state.is_writing = true;
                drop(state);
                // A line that cannot be written (a full disk) is lost.
                let _ = out.write_all(&line.text);
            } else if state.dropped > 0 {
                let dropped = std::mem::take(&mut state.dropped);
                state.is_writing = true;
                drop(state);
                on_dropped(dropped);
            } else {
                self.changed.notify_all();
                state = wait(&self.changed, state);
                continue;
            }
            state = self.lock();
            state.is_writing = false;
        }
    }

    /// Waits until the thread that writes runs. The thread has been started.
    fn wait_until_begun(&self) {
        let mut state = self.lock();
        while !state.has_begun {
            state = wait(&self.changed, state);
        }
    }

    /// Waits until all lines are written, and for `limit` at most. Returns whether they are.
    fn flush(&'static self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        // A process may end before it has started the thread.
        let has_lines = !self.lock().lines.is_empty();
        if has_lines && self.start(Descriptor(io::stderr()), say_dropped).is_err() {
            return false;
        }
        let mut state = self.lock();
        while !state.lines.is_empty() || state.is_writing || state.dropped > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = wait_timeout(&self.changed, state, left);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A log that is read when the test says so.
    struct BlockedLog {
        is_read: Receiver<()>,
        text: Sender<Vec<u8>>,
    }

    impl Write for BlockedLog {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            // Returns when somebody reads, and from then on at once.
            let _ = self.is_read.recv();
            let _ = self.text.send(text.into());
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    static BLOCKED: LogQueue = LogQueue::new();

    #[test]
    fn log_that_nobody_reads_keeps_nobody_waiting_and_says_later_what_was_dropped() {
        let ((read, is_read), (text, written)) = (channel(), channel());
        BLOCKED.push(b"before the thread\n", None);
        let say = |dropped: u64| {
            BLOCKED.push(format!("{dropped} dropped\n").as_bytes(), None);
        };
        let out = BlockedLog { is_read, text };
        BLOCKED.start(out, say).expect("a thread");
        let line = [b"x".repeat(1023), b"\n".to_vec()].concat();
        const LINES: u64 = 3000;
        (0..LINES).for_each(|_| {
            BLOCKED.push(&line, None);
        });
        assert!(!BLOCKED.flush(Duration::from_millis(20)));
        // A short line would find room, and is dropped, so that the gap is in one place.
        BLOCKED.push(b"short\nlines\n", None);
        drop(read);
        assert!(BLOCKED.flush(Duration::from_secs(60)));
        BLOCKED.push(b"afterwards\n", None);
        assert!(BLOCKED.flush(Duration::from_secs(60)));
        let lines: Vec<_> = written.try_iter().collect();
        assert_eq!(lines[0], b"before the thread\n");
        assert_eq!(lines.last().expect("a line"), b"afterwards\n");
        let count = lines.iter().filter(|text| **text == line).count() as u64;
        assert!((1000..LINES).contains(&count), "{count} lines");
        let said = format!("{} dropped\n", LINES - count + 2);
        assert_eq!(lines[lines.len() - 2], said.as_bytes());
        assert_eq!(lines.len() as u64, count + 3);
    }

    static SHARED: LogQueue = LogQueue::new();

    /// Nobody reads, and processes write as much as they can. A further one has room all the same,
    /// and so has this process.
    #[test]
    fn processes_that_write_too_much_leave_room_for_others() {
        let line = [b"x".repeat(1023), b"\n".to_vec()].concat();
        let flood = |process: &ProcessLines| {
            let fits = |_: &usize| SHARED.push(&line, Some(process));
            (0..).take_while(fits).count()
        };
        let processes: Vec<_> = (0..300).map(|_| ProcessLines::default()).collect();
        let counts: Vec<_> = processes.iter().map(flood).collect();
        assert!(
            (100..=MAX_BYTES / 1024 / 4).contains(&counts[0]),
            "{counts:?}"
        );
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        let own = (0..)
            .take_while(|_: &usize| SHARED.push(&line, None))
            .count();
        assert!((OWN_ROOM / 1024..=MAX_BYTES / 1024).contains(&own), "{own}");
        // A limit for each.
        let bytes = SHARED.lock().bytes;
        assert!(
            bytes <= MAX_BYTES + OWN_ROOM + 300 * ROOM_OF_PROCESS,
            "{bytes}"
        );
        // What is written is no longer counted.
        let (text, written) = channel();
        let (read, is_read) = channel();
        drop(read);
        let out = BlockedLog { is_read, text };
        SHARED.start(out, |_| {}).expect("a thread");
        assert!(SHARED.flush(Duration::from_secs(60)));
        let sum = counts.iter().sum::<usize>() + own;
        assert_eq!(written.try_iter().count(), sum);
        assert!(SHARED.push(&line, Some(&processes[0])));
    }

    static NON_BLOCKING: LogQueue = LogQueue::new();

    #[test]
    fn full_standard_error_that_does_not_block_loses_nothing() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        rustix::io::ioctl_fionbio(&writer, true).expect("a pipe");
        rustix::pipe::fcntl_setpipe_size(&writer, 4096).expect("a smaller pipe");
        NON_BLOCKING
            .start(Descriptor(writer), |_| {})
            .expect("a thread");
        let line = |number: u32| format!("line {number:05} {}\n", "x".repeat(988));
        let all: String = (0..100).map(line).collect();
        for number in 0..100 {
            NON_BLOCKING.push(line(number).as_bytes(), None);
        }
        // The pipe is full, and the rest waits.
        assert!(!NON_BLOCKING.flush(Duration::from_millis(50)));
        let mut read = vec![0; all.len()];
        io::Read::read_exact(&mut reader, &mut read).expect("all lines");
        assert_eq!(String::from_utf8(read).expect("text"), all);
        assert!(NON_BLOCKING.flush(Duration::from_secs(60)));
    }

    #[test]
    fn lines_have_their_level_as_text_or_as_json() {
        assert_eq!(line(Level::WARN, "a\nb", None), "WARN a\nWARN b\n");
        let now: TimeText = || "2026-01-01".to_owned();
        let json = line(Level::ERROR, "a\n\"b\"", Some(now));
        let object: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(object["timestamp"], "2026-01-01");
        assert_eq!(object["level"], "ERROR");
        assert_eq!(object["fields"]["message"], "a\n\"b\"");
    }
}
