//! What the sessions of this process wait for, in a file for people: `VGPU_DUMP`.
//!
//! A session publishes what it waits for in words that need no lock. If the variable is set, a
//! thread looks at the words, and writes the file while a wait is long. The plugin lives in the
//! process of another program, whose signals, standard output and end are not the plugin's.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use vgpu_transport::fork::PerProcess;
use vgpu_transport::lock::lock;

/// A wait of this length is worth the file. The file is written again as often.
const SLOW: Duration = Duration::from_secs(10);

/// How often the thread looks.
const PERIOD: Duration = Duration::from_secs(1);

/// What the thread that has the connection of a session does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitStage {
    /// Sends the request; waits while the link is full.
    Sends,
    /// Waits for the answer to the request.
    AwaitsAnswer,
    /// Waits until the request is done.
    AwaitsEnd,
}

/// By number, from 1.
const STAGES: [WaitStage; 3] = [
    WaitStage::Sends,
    WaitStage::AwaitsAnswer,
    WaitStage::AwaitsEnd,
];

/// What one session waits for.
#[derive(Debug)]
pub(crate) struct Waits {
    /// The session, for people.
    name: String,
    start: Instant,
    /// Milliseconds after `start`.
    since: AtomicU64,
    request: AtomicU64,
    /// The number of the step. 0: no thread has the connection.
    step: AtomicU8,
    /// Threads that wait for the connection.
    queue: AtomicU64,
}

/// The sessions of a process, and whether the process has the thread.
#[derive(Default)]
struct Watched {
    sessions: Vec<Weak<Waits>>,
    has_thread: bool,
}

static WATCHED: PerProcess<Mutex<Watched>> = PerProcess::new();

impl Waits {
    /// The words of a new session, which the thread watches from now on.
    pub(crate) fn of(name: &str) -> Arc<Waits> {
        let waits = Arc::new(Waits {
            name: name.to_owned(),
            start: Instant::now(),
            since: AtomicU64::new(0),
            request: AtomicU64::new(0),
            step: AtomicU8::new(0),
            queue: AtomicU64::new(0),
        });
        let Some(path) = std::env::var_os("VGPU_DUMP").filter(|path| !path.is_empty()) else {
            return waits;
        };
        let watched = WATCHED.get_or_init(Mutex::default);
        let mut watched = lock(watched);
        watched.sessions.retain(|other| other.strong_count() > 0);
        watched.sessions.push(Arc::downgrade(&waits));
        if !watched.has_thread {
            let path = own_path(path);
            let thread = thread::Builder::new().name("vgpu-dump".into());
            match thread.spawn(move || watch(&path)) {
                Ok(_) => watched.has_thread = true,
                Err(error) => tracing::warn!("VGPU_DUMP: no thread: {error}"),
            }
        }
        waits
    }

    /// This thread waits for the connection.
    pub(crate) fn queues(&self) {
        self.queue.fetch_add(1, Ordering::Relaxed);
    }

    /// This thread has waited for the connection.
    pub(crate) fn leaves_queue(&self) {
        self.queue.fetch_sub(1, Ordering::Relaxed);
    }

    /// The thread that has the connection begins a step.
    pub(crate) fn begin(&self, step: WaitStage, request: u64) {
        let since = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.since.store(since, Ordering::Relaxed);
        self.request.store(request, Ordering::Relaxed);
        self.step.store(step as u8 + 1, Ordering::Release);
    }

    /// The thread that had the connection has given it back.
    pub(crate) fn end(&self) {
        self.step.store(0, Ordering::Release);
    }

    /// What the connection is used for, and how long. The words may be of two steps, which shows
    /// that the session makes progress.
    fn step(&self, now: Instant) -> Option<(WaitStage, u64, Duration)> {
        let number = self.step.load(Ordering::Acquire).checked_sub(1)?;
        let step = STAGES.get(usize::from(number)).copied()?;
        let began = self.start + Duration::from_millis(self.since.load(Ordering::Relaxed));
        let age = now.saturating_duration_since(began);
        Some((step, self.request.load(Ordering::Relaxed), age))
    }

    /// One line for people.
    pub(crate) fn line(&self, now: Instant) -> String {
        let mut line = format!("{}: ", self.name);
        // Writing to a string cannot fail.
        let _ = match self.step(now) {
            None => write!(line, "waits for nothing"),
            Some((step, request, age)) => match step {
                WaitStage::Sends => write!(line, "sends request {request}, for {age:.1?}"),
                WaitStage::AwaitsAnswer => {
                    write!(
                        line,
                        "waits for the answer to request {request}, for {age:.1?}"
                    )
                }
                WaitStage::AwaitsEnd => {
                    write!(line, "waits until request {request} is done, for {age:.1?}")
                }
            },
        };
        match self.queue.load(Ordering::Relaxed) {
            0 => {}
            count => {
                let _ = write!(line, "; {count} threads wait for the connection");
            }
        }
        line
    }
}

/// The file of this process: the path with the process id.
fn own_path(mut path: OsString) -> PathBuf {
    path.push(format!(".{}", std::process::id()));
    path.into()
}

/// Looks at all sessions of this process, for as long as the process lives.
fn watch(path: &Path) {
    let mut dump = Dump::default();
    loop {
        thread::sleep(PERIOD);
        let watched = WATCHED.get_or_init(Mutex::default);
        let watched = lock(watched);
        let sessions: Vec<_> = watched.sessions.iter().filter_map(Weak::upgrade).collect();
        drop(watched);
        dump.look(path, &sessions, Instant::now());
    }
}

/// The file.
#[derive(Debug, Default)]
struct Dump {
    last: Option<Instant>,
    has_failed: bool,
}

impl Dump {
    /// Writes the file if a session waits long.
    fn look(&mut self, path: &Path, sessions: &[Arc<Waits>], now: Instant) {
        let ages = { sessions.iter() }.filter_map(|waits| waits.step(now));
        let is_slow = ages.map(|(_, _, age)| age).max() >= Some(SLOW);
        let is_due = self.last.is_none_or(|last| now >= last + SLOW);
        if !is_slow || !is_due {
            return;
        }
        self.last = Some(now);
        let mut text = format!(
            "ggml-vgpu {}, process {}; `vgpu dump` on the executor's machine says what it does\n",
            env!("VGPU_VERSION"),
            std::process::id()
        );
        for waits in sessions {
            text.push_str(&waits.line(now));
            text.push('\n');
        }
        if let Err(error) = write(path, &text)
            && !std::mem::replace(&mut self.has_failed, true)
        {
            tracing::warn!("VGPU_DUMP: cannot write {}: {error}", path.display());
        }
    }
}

/// Replaces the content of a file. Does not wait for the reader of a pipe.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_is_written_and_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dump");
        let (slow, idle) = (Waits::of("session 7"), Waits::of("session 8"));
        let sessions = [Arc::clone(&slow), idle];
        let mut dump = Dump::default();
        slow.begin(WaitStage::Sends, 16);
        slow.begin(WaitStage::AwaitsAnswer, 17);
        slow.queues();
        let after = |seconds| Instant::now() + Duration::from_secs(seconds);
        dump.look(&path, &sessions, after(9));
        assert!(!path.exists(), "a short wait");
        dump.look(&path, &sessions, after(11));
        let text = std::fs::read_to_string(&path).unwrap();
        let process = format!("process {};", std::process::id());
        for part in [
            process.as_str(),
            "session 7: waits for the answer to request 17, for 11.",
            "; 1 threads wait for the connection\n",
            "session 8: waits for nothing\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
        slow.leaves_queue();
        slow.begin(WaitStage::AwaitsEnd, 18);
        dump.look(&path, &sessions, after(20));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "too soon");
        dump.look(&path, &sessions, after(32));
        let text = std::fs::read_to_string(&path).unwrap();
        let part = "session 7: waits until request 18 is done, for 32.";
        assert!(text.contains(part), "{text}");
        slow.end();
        std::fs::remove_file(&path).unwrap();
        dump.look(&path, &sessions, after(100));
        assert!(!path.exists(), "no wait");
    }

    #[test]
    fn a_pipe_that_nobody_reads_holds_up_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the name is a terminated string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(write(&path, "text").is_err());
    }
}
