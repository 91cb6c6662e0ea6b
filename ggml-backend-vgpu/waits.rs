//! What the sessions of this process do, in a file for people: `VGPU_DUMP`.
//!
//! A session publishes what it does in words that need no lock. If the variable is set, a thread
//! looks at the words, and writes the file while a wait is long, and when somebody asks for it by
//! making another file. The plugin lives in the process of another program, whose signals, standard
//! output and end are not the plugin's.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use vgpu_transport::fork::PerProcess;
use vgpu_transport::link::LinkWatch;
use vgpu_transport::lock::{lock, try_lock};

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
    /// The last request that was sent.
    sent: AtomicU64,
    link: Option<LinkWatch>,
    /// The last error, and when it came. Locked to set and to clone it, never while a thread waits.
    error: Mutex<Option<(String, Instant)>>,
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
    pub(crate) fn of(name: &str, link: Option<LinkWatch>) -> Arc<Waits> {
        let waits = Arc::new(Waits {
            name: name.to_owned(),
            start: Instant::now(),
            since: AtomicU64::new(0),
            request: AtomicU64::new(0),
            step: AtomicU8::new(0),
            queue: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            link,
            error: Mutex::new(None),
        });
        let Some(path) = std::env::var_os("VGPU_DUMP").filter(|path| !path.is_empty()) else {
            return waits;
        };
        let watched = WATCHED.get_or_init(Mutex::default);
        let mut watched = lock(watched);
        watched.sessions.retain(|other| other.strong_count() > 0);
        watched.sessions.push(Arc::downgrade(&waits));
        if !watched.has_thread {
            let thread = thread::Builder::new().name("vgpu-dump".into());
            // The thread looks at the path: a hung file system stops no program.
            let started = thread.spawn(move || watch(&own_path(path)));
            watched.has_thread = started.is_ok();
            drop(watched);
            if let Err(error) = started {
                tracing::warn!("VGPU_DUMP: no thread: {error}");
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

    /// The request was sent, and all before it.
    pub(crate) fn sent(&self, request: u64) {
        self.sent.store(request, Ordering::Relaxed);
    }

    /// A call has failed, or the session is lost.
    pub(crate) fn failed(&self, error: &dyn std::fmt::Display) {
        let error = Some((error.to_string(), Instant::now()));
        *lock(&self.error) = error;
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

    /// Lines for people. Waits for no lock.
    pub(crate) fn lines(&self, now: Instant) -> String {
        let mut lines = self.line(now);
        // Writing to a string cannot fail.
        let _ = write!(
            lines,
            "\n  last request sent: {}",
            self.sent.load(Ordering::Relaxed)
        );
        if let Some(link) = &self.link {
            let _ = write!(lines, "\n  link: {}", link.read());
        }
        let error = try_lock(&self.error).and_then(|error| error.clone());
        if let Some((error, at)) = error {
            let age = now.saturating_duration_since(at);
            let _ = write!(lines, "\n  last error, {age:.1?} ago: {error}");
        }
        lines
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

/// The file of this process: the path, or `ggml-vgpu` in the folder of that path, with the process
/// id.
fn own_path(path: OsString) -> PathBuf {
    let path = PathBuf::from(path);
    let mut path = match path.is_dir() {
        true => path.join("ggml-vgpu"),
        false => path,
    }
    .into_os_string();
    path.push(format!(".{}", std::process::id()));
    path.into()
}

/// The file by which somebody asks for the other one.
fn request_path(path: &Path) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(".now");
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
    /// The last request that was answered, which could not be removed: device, inode, and the
    /// nanoseconds of its last change.
    answered: Option<(u64, u64, i128)>,
}

impl Dump {
    /// Whether somebody asks for the file. The request is removed.
    fn is_asked(&mut self, path: &Path) -> bool {
        let request = request_path(path);
        let Ok(found) = fs::symlink_metadata(&request) else {
            self.answered = None;
            return false;
        };
        let changed = i128::from(found.ctime()) * 1_000_000_000 + i128::from(found.ctime_nsec());
        let found = Some((found.dev(), found.ino(), changed));
        let is_new = self.answered != found;
        // A request of another user in a folder such as /tmp stays, and is answered once.
        self.answered = match fs::remove_file(&request) {
            Ok(()) => None,
            Err(_) => found,
        };
        is_new
    }

    /// Writes the file if a session waits long, or somebody asks for it.
    fn look(&mut self, path: &Path, sessions: &[Arc<Waits>], now: Instant) {
        let ages = { sessions.iter() }.filter_map(|waits| waits.step(now));
        let is_slow = ages.map(|(_, _, age)| age).max() >= Some(SLOW);
        let is_due = self.last.is_none_or(|last| now >= last + SLOW);
        let is_asked = self.is_asked(path);
        let is_wanted = is_asked || (is_slow && is_due);
        if !is_wanted {
            return;
        }
        if is_slow {
            self.last = Some(now);
        }
        let mut text = format!(
            "ggml-vgpu {}, process {}; `vgpu dump` on the executor's machine says what it does\n",
            env!("VGPU_VERSION"),
            std::process::id()
        );
        for waits in sessions {
            text.push_str(&waits.lines(now));
            text.push('\n');
        }
        if let Err(error) = write(path, &text)
            && !std::mem::replace(&mut self.has_failed, true)
        {
            tracing::warn!("VGPU_DUMP: cannot write {}: {error}", path.display());
        }
    }
}

/// Replaces the content of a file. Does not wait for the reader of a pipe, and follows no link that
/// another user may have put there.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
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
        let (slow, idle) = (Waits::of("session 7", None), Waits::of("session 8", None));
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
    fn file_is_written_when_somebody_asks_for_it() {
        use vgpu_transport::link::GuestEnd as _;

        let folder = tempfile::tempdir().unwrap();
        let path = own_path(folder.path().into());
        let name = format!("ggml-vgpu.{}", std::process::id());
        assert_eq!(path, folder.path().join(name));
        let (guest, _host) = vgpu_transport::link::window::inproc_pair().unwrap();
        let waits = Waits::of("session 7", guest.watch());
        waits.sent(17);
        let sessions = [Arc::clone(&waits)];
        let mut dump = Dump::default();
        dump.look(&path, &sessions, Instant::now());
        assert!(!path.exists(), "nobody asks");
        let ask = || fs::write(request_path(&path), "").unwrap();
        ask();
        dump.look(&path, &sessions, Instant::now());
        let text = fs::read_to_string(&path).unwrap();
        let part = "session 7: waits for nothing\n  last request sent: 17\n  link: requests put 0 ";
        assert!(text.contains(part), "{text}");
        assert!(!text.contains("last error"), "{text}");
        assert!(!request_path(&path).exists(), "it is removed");
        fs::remove_file(&path).unwrap();
        dump.look(&path, &sessions, Instant::now());
        assert!(!path.exists(), "it was answered");
        // A thread that hangs with the connection keeps no lock that a dump needs.
        waits.failed(&"the executor refuses");
        waits.begin(WaitStage::AwaitsAnswer, 18);
        ask();
        dump.look(&path, &sessions, Instant::now() + Duration::from_secs(1));
        let text = fs::read_to_string(&path).unwrap();
        let part = "session 7: waits for the answer to request 18, for 1.";
        assert!(text.contains(part), "{text}");
        let error = "\n  last error, 1.";
        assert!(text.contains(error), "{text}");
        assert!(text.ends_with(" ago: the executor refuses\n"), "{text}");
        // A request that cannot be removed is answered once.
        fs::remove_file(&path).unwrap();
        fs::create_dir(request_path(&path)).unwrap();
        dump.look(&path, &sessions, Instant::now());
        assert!(path.exists());
        fs::remove_file(&path).unwrap();
        dump.look(&path, &sessions, Instant::now());
        assert!(!path.exists(), "the same request");
    }

    #[test]
    fn a_link_to_a_file_of_somebody_else_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["dump", "other"].map(|name| folder.path().join(name));
        fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(write(&path, "text").is_err());
        assert_eq!(fs::read_to_string(&other).unwrap(), "precious");
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
