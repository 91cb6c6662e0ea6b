//! The log of this process, on its way to standard error.
//!
//! The reader of the log may have stopped reading, such as a full pipe's other end. A write then
//! never returns. Lines therefore go into a queue of limited size, and one thread writes them, so
//! that no session, no freed memory and no signal waits for the reader. Lines that find no room are
//! dropped, and counted: when all that was queued has been written, a line says how many.
#![forbid(unsafe_code)]

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long the end of the process waits for the log.
pub(crate) const LOG_PATIENCE: Duration = Duration::from_secs(2);

/// Most bytes that wait to be written: some 8,000 lines.
const MAX_BYTES: usize = 1 << 20;

/// The log of this process.
static LOG: LogQueue = LogQueue::new();

/// Starts the thread that writes to standard error. Panics, too, are written by this thread from
/// now on. `on_dropped` logs how many lines were dropped.
///
/// A process may have lines for the log before. The thread then writes them.
///
/// # Errors
/// No thread can be started.
pub fn start(on_dropped: fn(u64)) -> io::Result<()> {
    LOG.start(StandardError, on_dropped)?;
    std::panic::set_hook(Box::new(|info| {
        let current = thread::current();
        let name = current.name().unwrap_or("<unnamed>");
        let mut text = format!("thread '{name}' {info}\n");
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            text.push_str(&format!("{trace}\n"));
        }
        LOG.push(text.as_bytes());
        // The process ends with its main thread.
        if name == "main" {
            LOG.flush(LOG_PATIENCE);
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
    LOG.flush(LOG_PATIENCE);
}

/// A writer into the log. It never waits for the reader. What is written at once stays together.
pub fn writer() -> LogWriter {
    LogWriter(())
}

/// A writer into the log of this process.
#[derive(Debug)]
pub struct LogWriter(());

impl Write for LogWriter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        LOG.push(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard error, without the lock that other threads take which write there by themselves.
struct StandardError;

impl Write for StandardError {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(io::stderr(), text)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines that wait to be written.
struct LogQueue {
    state: Mutex<State>,
    /// Notified of new lines, and when all are written.
    changed: Condvar,
}

struct State {
    lines: VecDeque<Box<[u8]>>,
    /// The bytes of `lines`.
    bytes: usize,
    /// Lines that found no room, since the log has said so.
    dropped: u64,
    /// Whether the writer has taken a line that is not yet written.
    is_writing: bool,
    has_writer: bool,
}

impl LogQueue {
    const fn new() -> LogQueue {
        let state = State {
            lines: VecDeque::new(),
            bytes: 0,
            dropped: 0,
            is_writing: false,
            has_writer: false,
        };
        LogQueue {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends text, or counts its lines as dropped. Once something is dropped, so is all that
    /// follows until the log has said so: the gap is in one place.
    fn push(&self, text: &[u8]) {
        let mut state = self.lock();
        if state.dropped > 0 || state.bytes + text.len() > MAX_BYTES {
            let lines = text.iter().filter(|byte| **byte == b'\n').count();
            state.dropped += lines.max(1) as u64;
            return;
        }
        state.bytes += text.len();
        state.lines.push_back(text.into());
        drop(state);
        self.changed.notify_all();
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
        loop {
            if let Some(line) = state.lines.pop_front() {
                state.bytes -= line.len();
                state.is_writing = true;
                drop(state);
                // A line that cannot be written (a full disk) is lost.
                let _ = out.write_all(&line);
            } else if state.dropped > 0 {
                let dropped = std::mem::take(&mut state.dropped);
                state.is_writing = true;
                drop(state);
                on_dropped(dropped);
            } else {
                self.changed.notify_all();
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state = self.lock();
            state.is_writing = false;
        }
    }

    /// Waits until all lines are written, and for `limit` at most. Returns whether they are.
    fn flush(&'static self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        // A process may end before it has started the thread.
        let has_lines = !self.lock().lines.is_empty();
        if has_lines && self.start(StandardError, |_| {}).is_err() {
            return false;
        }
        let mut state = self.lock();
        while !state.lines.is_empty() || state.is_writing || state.dropped > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
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
        BLOCKED.push(b"before the thread\n");
        let say = |dropped: u64| BLOCKED.push(format!("{dropped} dropped\n").as_bytes());
        let out = BlockedLog { is_read, text };
        BLOCKED.start(out, say).expect("a thread");
        let line = [b"x".repeat(1023), b"\n".to_vec()].concat();
        const LINES: u64 = 3000;
        (0..LINES).for_each(|_| BLOCKED.push(&line));
        assert!(!BLOCKED.flush(Duration::from_millis(20)));
        // A short line would find room, and is dropped, so that the gap is in one place.
        BLOCKED.push(b"short\nlines\n");
        drop(read);
        assert!(BLOCKED.flush(Duration::from_secs(60)));
        BLOCKED.push(b"afterwards\n");
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
}
