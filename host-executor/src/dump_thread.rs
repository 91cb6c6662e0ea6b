//! The thread that makes dumps, which answers while everything else hangs.
//!
//! A driver can hang while the dynamic linker loads it. The linker's lock is then never released,
//! and glibc takes that lock where a thread begins, and where a thread first uses a thread-local
//! variable with a destructor, as channels and `tracing` do. So this thread begins before any
//! engine, starts no thread, and uses neither. It serves nobody else: `vgpu status`, a reload and
//! the like may wait for locks and for the main thread without an end.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use tracing::Level;
use vgpu_transport::lock::{lock, wait, wait_timeout};

use crate::log_queue;
use crate::status::StatusHandle;
use crate::version::version;

/// Clients of the control socket that wait for a dump at most. Further ones are told so.
pub(crate) const MAX_DUMP_CLIENTS: usize = 16;

/// How long a client may take to read its dump.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the thread tries again to write to clients that have not read yet.
const WRITE_PERIOD: Duration = Duration::from_millis(20);

/// Makes dumps on a thread of its own: for the log, and for clients of the control socket.
#[derive(Clone)]
pub struct DumpThread {
    shared: Arc<SharedDumps>,
}

struct SharedDumps {
    /// When the process began.
    since: Instant,
    /// The executor, once there is one.
    source: OnceLock<StatusHandle>,
    /// What the process does before, and since when. Locked to set and to clone it.
    step: Mutex<Option<(String, Instant)>>,
    wanted: Mutex<WantedDumps>,
    changed: Condvar,
}

/// Who wants a dump.
#[derive(Default)]
struct WantedDumps {
    /// The thread runs.
    has_begun: bool,
    /// A signal has asked for a dump in the log.
    in_log: bool,
    clients: Vec<UnixStream>,
    /// The clients above, and those that are being answered.
    client_count: usize,
}

/// A client that has not read all of its dump.
struct Reader {
    socket: UnixStream,
    answer: Arc<[u8]>,
    written: usize,
    deadline: Instant,
}

impl DumpThread {
    /// Starts the thread, and waits until it runs.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start() -> io::Result<DumpThread> {
        let shared = Arc::new(SharedDumps {
            since: Instant::now(),
            source: OnceLock::new(),
            step: Mutex::new(None),
            wanted: Mutex::new(WantedDumps::default()),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        thread::Builder::new()
            .name("vgpu-dump".into())
            .spawn(move || own.run())?;
        let mut wanted = lock(&shared.wanted);
        // A thread that has not begun waits for the linker's lock, too.
        while !wanted.has_begun {
            wanted = wait(&shared.changed, wanted);
        }
        drop(wanted);
        Ok(DumpThread { shared })
    }

    /// The process begins a step of its start, for example `the engine cuda:0 starts`. A dump shows
    /// the step with its age, until there is an executor.
    pub fn begin_step(&self, step: impl Into<String>) {
        let step = (step.into(), Instant::now());
        *lock(&self.shared.step) = Some(step);
    }

    /// From now on dumps are those of this executor. The first one counts.
    pub fn set_source(&self, executor: StatusHandle) {
        // Fails if there is one.
        let _ = self.shared.source.set(executor);
    }

    /// Has a dump written into the log, past its filter. Does not wait. A dump that has not begun
    /// yet answers any number of calls.
    pub fn write_into_log(&self) {
        lock(&self.shared.wanted).in_log = true;
        self.shared.changed.notify_all();
    }

    /// Has a client of the control socket answered, which has sent its command. Does not wait.
    /// Returns the client if too many wait for a dump.
    pub(crate) fn answer(&self, client: UnixStream) -> Result<(), UnixStream> {
        let mut wanted = lock(&self.shared.wanted);
        if wanted.client_count >= MAX_DUMP_CLIENTS {
            return Err(client);
        }
        wanted.client_count += 1;
        wanted.clients.push(client);
        drop(wanted);
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl SharedDumps {
    fn run(&self) {
        let mut readers: VecDeque<Reader> = VecDeque::new();
        let mut wanted = lock(&self.wanted);
        wanted.has_begun = true;
        self.changed.notify_all();
        loop {
            let in_log = std::mem::take(&mut wanted.in_log);
            let clients = std::mem::take(&mut wanted.clients);
            if !in_log && clients.is_empty() && readers.is_empty() {
                wanted = wait(&self.changed, wanted);
                continue;
            }
            drop(wanted);
            if in_log || !clients.is_empty() {
                let text = self.text();
                if in_log {
                    write_into_log(Level::INFO, &text);
                }
                readers.extend(Reader::of(clients, &text));
            }
            let before = readers.len();
            readers.retain_mut(|reader| !reader.is_done());
            let answered = before - readers.len();
            wanted = lock(&self.wanted);
            wanted.client_count -= answered;
            if !readers.is_empty() && !wanted.in_log && wanted.clients.is_empty() {
                wanted = wait_timeout(&self.changed, wanted, WRITE_PERIOD);
            }
        }
    }

    fn text(&self) -> String {
        let Some(executor) = self.source.get() else {
            return self.start_text();
        };
        // The next dump has this thread, too.
        catch_unwind(AssertUnwindSafe(|| executor.dump()))
            .unwrap_or_else(|_| "no dump: the thread that made it panicked\n".into())
    }

    /// What the process does before it has an executor.
    fn start_text(&self) -> String {
        let (version, process) = (version(), std::process::id());
        let up = self.since.elapsed();
        let step = lock(&self.step).clone();
        let step = step.map_or_else(
            || "reads its configuration".into(),
            |(step, since)| format!("{step}, for {:.1?}", since.elapsed()),
        );
        format!("vgpu {version}, process {process}, up {up:.1?}\nstart: {step}; nobody is served\n")
    }
}

impl Reader {
    /// The clients with the answer to each.
    fn of(clients: Vec<UnixStream>, text: &str) -> impl Iterator<Item = Reader> {
        // A string always has a form in JSON.
        let mut answer = serde_json::to_vec(text).unwrap_or_default();
        answer.push(b'\n');
        let answer: Arc<[u8]> = answer.into();
        let deadline = Instant::now() + READ_TIMEOUT;
        clients.into_iter().map(move |socket| Reader {
            socket,
            answer: Arc::clone(&answer),
            written: 0,
            deadline,
        })
    }

    /// Writes as much as the socket takes. Returns whether nothing is left to do: all is written,
    /// the client is gone, or it has not read for too long.
    fn is_done(&mut self) -> bool {
        if self.socket.set_nonblocking(true).is_err() {
            return true;
        }
        while self.written < self.answer.len() {
            match self.socket.write(&self.answer[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Instant::now() >= self.deadline;
                }
                Err(_) => return true,
            }
        }
        true
    }
}

/// Writes each line of a dump into the log, past its filter. Waits for no lock of the dynamic
/// linker.
pub(crate) fn write_into_log(level: Level, dump: &str) {
    for line in dump.lines() {
        log_queue::write_line(level, &format!("dump: {line}"));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// The answer to a client that has waited for at most a minute.
    fn read(client: &mut UnixStream) -> String {
        let timeout = Some(Duration::from_secs(60));
        client.set_read_timeout(timeout).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    #[test]
    fn a_dump_names_the_step_of_a_start_and_its_age() {
        let dumps = DumpThread::start().unwrap();
        let ask = || {
            let (mut client, theirs) = UnixStream::pair().unwrap();
            dumps.answer(theirs).unwrap();
            read(&mut client)
        };
        assert!(ask().contains("\nstart: reads its configuration; nobody is served\n"));
        dumps.begin_step("the engine test:0 starts");
        thread::sleep(Duration::from_millis(2));
        let text = ask();
        let age = text.split_once("\nstart: the engine test:0 starts, for ");
        let age = age.and_then(|(_, rest)| rest.strip_suffix("; nobody is served\n"));
        let age: f64 = { age.and_then(|age| age.strip_suffix("ms")) }
            .unwrap_or_else(|| panic!("{text}"))
            .parse()
            .unwrap();
        assert!(age >= 2.0, "{text}");
    }

    /// Clients that read nothing are answered in part, and take places for a while only.
    #[test]
    fn clients_that_read_nothing_keep_no_other_from_its_dump() {
        let dumps = DumpThread::start().unwrap();
        // More than a socket takes.
        dumps.begin_step("x".repeat(4 << 20));
        let pair = || UnixStream::pair().unwrap();
        let mut silent: Vec<UnixStream> = Vec::new();
        for _ in 0..MAX_DUMP_CLIENTS - 1 {
            let (ours, theirs) = pair();
            dumps.answer(theirs).unwrap();
            silent.push(ours);
        }
        let (mut client, theirs) = pair();
        dumps.answer(theirs).unwrap();
        assert!(read(&mut client).len() > 4 << 20);
        // One has gone, and its place is free.
        silent.pop();
        let end = Instant::now() + Duration::from_secs(60);
        let (mut client, mut theirs) = pair();
        while let Err(refused) = dumps.answer(theirs) {
            assert!(Instant::now() < end, "the place stays taken");
            theirs = refused;
            thread::sleep(Duration::from_millis(1));
        }
        assert!(read(&mut client).len() > 4 << 20);
    }
}
