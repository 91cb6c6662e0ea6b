//! The service manager that has started this process, if there is one: readiness, and the fd store.
//!
//! The protocol is systemd's (`sd_notify(3)`, `sd_listen_fds(3)`). `vgpu fd-store` implements the
//! manager's side of it where there is no systemd. The fd store keeps each virtual machine's
//! memory, doorbell and socket to its QEMU while an executor is replaced, since a QEMU cannot
//! connect a second time.
//!
//! This process has copies of all that it has stored: a reload can close the listener of a virtual
//! machine and open another one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, SocketAddrUnix};
use rustix::pipe::{PipeFlags, pipe_with};
use sd_notify::NotifyState;
use tracing::{Level, warn};
use vgpu_transport::link::scm_rights;

/// Whether standard error is a stream of systemd's journal: JOURNAL_STREAM has the device and the
/// inode of the stream (`systemd.exec(5)`). Then a line may begin with its priority
/// (`sd-daemon(3)`), which the journal removes.
pub fn is_journal() -> bool {
    static IS_JOURNAL: OnceLock<bool> = OnceLock::new();
    *IS_JOURNAL.get_or_init(names_standard_error)
}

/// The prefix that a line of this level has in the journal.
pub fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}

/// A text for standard error, with the end of its last line. In the journal each line has the
/// priority of this level.
pub fn with_priority(level: Level, text: &str) -> String {
    lines_with(if is_journal() { priority(level) } else { "" }, text)
}

fn lines_with(prefix: &str, text: &str) -> String {
    text.lines()
        .map(|line| format!("{prefix}{line}\n"))
        .collect()
}

/// Whether JOURNAL_STREAM names standard error.
fn names_standard_error() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let named = stream.split_once(':').and_then(|(device, inode)| {
        Some((device.parse::<u64>().ok()?, inode.parse::<u64>().ok()?))
    });
    let own = rustix::fs::fstat(io::stderr()).map(|file| (file.st_dev, file.st_ino));
    named.is_some() && named == own.ok()
}

/// What is lost with a file that is not kept.
const LOST: &str = "when this process ends, the virtual machine has no vGPU until its QEMU is \
                    started again";

/// What has to outlive this process.
struct Stored {
    /// The files by name. `None`: those of the process before this one have not been taken over.
    files: Option<BTreeMap<String, OwnedFd>>,
    /// The files that the service manager may not keep, as the log says.
    reported: BTreeSet<String>,
}

static STORED: Mutex<Stored> = Mutex::new(Stored {
    files: None,
    reported: BTreeSet::new(),
});

fn lock() -> vgpu_transport::lock::Guard<'static, Stored> {
    vgpu_transport::lock::lock(&STORED)
}

impl Stored {
    fn files(&mut self) -> &mut BTreeMap<String, OwnedFd> {
        self.files.get_or_insert_with(passed_fds)
    }
}

/// Logs, once for each name, that a file may be lost.
fn report(name: &str, why: &str) {
    let is_new = lock().reported.insert(name.to_owned());
    if is_new {
        warn!("{name} may not be kept: {why}; {LOST}");
    }
}

/// The file descriptors that the service manager has passed to this process.
fn passed_fds() -> BTreeMap<String, OwnedFd> {
    match sd_notify::listen_fds_with_names() {
        Ok(fds) => fds
            .map(|(fd, name)| {
                // SAFETY: LISTEN_PID says that the service manager has opened these descriptors for
                // this process, and the library has checked that they are open. Only one call of
                // this function owns them: the lock of `STORED` is held, and the result stays
                // there.
                (name, unsafe { OwnedFd::from_raw_fd(fd) })
            })
            .collect(),
        Err(error) => {
            warn!("the file descriptors of the fd store cannot be used: {error}; {LOST}");
            BTreeMap::new()
        }
    }
}

/// Copies of the files in the fd store by name: those of the process before this one, and those
/// that this process has stored.
///
/// # Errors
/// The process has no descriptor for a copy.
pub fn stored_files() -> io::Result<BTreeMap<String, OwnedFd>> {
    let mut stored = lock();
    let files = stored.files().iter();
    files
        .map(|(name, file)| Ok((name.clone(), file.try_clone()?)))
        .collect()
}

/// Calls `each` with the name of every file in the fd store, and the file.
pub(crate) fn for_each_stored(mut each: impl FnMut(&str, BorrowedFd<'_>)) {
    for (name, file) in lock().files() {
        each(name, file.as_fd());
    }
}

/// Whether a service manager with an fd store has started this process.
fn has_fd_store() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some() || is_on_stdin()
}

/// The variable by which a `vgpu fd-store` says that standard input is a socket to it. The process
/// then makes no socket to reach the store.
pub const FD_STORE_ON_STDIN: &str = "FDSTORE_ON_STDIN";

/// Whether standard input is a socket to a `vgpu fd-store`.
fn is_on_stdin() -> bool {
    std::env::var_os(FD_STORE_ON_STDIN).is_some()
}

/// How many files the service manager keeps at most, if it says so: systemd does from version 254
/// on, and so does `vgpu fd-store`.
fn capacity() -> Option<usize> {
    std::env::var("FDSTORE").ok()?.parse().ok()
}

/// Warns if the service manager cannot keep `files` files of `machines` virtual machines.
pub fn check_fd_store(files: usize, machines: usize) {
    if let Some(why) = shortage(files, has_fd_store(), capacity()) {
        warn!("{machines} virtual machines have {files} files, and {why}; {LOST}");
    }
}

/// Why `files` files cannot all be kept.
fn shortage(files: usize, has_fd_store: bool, capacity: Option<usize>) -> Option<String> {
    match capacity {
        _ if files == 0 => None,
        _ if !has_fd_store => Some(
            "no service manager keeps them (NOTIFY_SOCKET is not set): use the unit of the \
             package, or vgpu fd-store"
                .into(),
        ),
        Some(most) if most < files => Some(format!(
            "the service manager keeps at most {most} (FileDescriptorStoreMax=)"
        )),
        _ => None,
    }
}

/// Tells the service manager that guests can connect.
pub fn ready() {
    notify(&[NotifyState::Ready], None);
}

/// Tells the service manager that the start goes on for up to `time` from now on, also where that
/// is longer than its own limit (`TimeoutStartSec=`). Each engine has a time of its own.
pub fn extend_start(time: Duration) {
    let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    notify(&[NotifyState::ExtendTimeoutUsec(micros)], None);
}

/// Tells the service manager that this process is about to end.
pub fn stopping() {
    notify(&[NotifyState::Stopping], None);
}

/// Tells the service manager that this process makes progress, if the manager wants to know
/// (`WatchdogSec=`). A manager that does not hear this in time ends the process.
pub fn alive() {
    if sd_notify::watchdog_enabled().is_some() {
        notify(&[NotifyState::Watchdog], None);
    }
}

/// Ends the process at once, without the destructors and exit handlers that a hanging driver could
/// block.
pub fn end_at_once(status: i32) -> ! {
    // SAFETY: the function takes no pointer and does not return. No memory of this process is used
    // afterwards.
    unsafe { libc::_exit(status) }
}

/// The variable that has the process id of the `vgpu fd-store` that has started this process.
pub const FD_STORE_PID: &str = "FDSTORE_PID";

/// The message by which a process asks its `vgpu fd-store` for its state. A pipe for the answer
/// comes with the message.
pub const FD_STORE_QUESTION: &str = "X_FDSTORE_STATE=1";

/// How long `vgpu fd-store` may take to answer.
const FD_STORE_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest answer, in bytes.
const MAX_FD_STORE_STATE: u64 = 64 << 10;

/// What the `vgpu fd-store` that has started this process says of itself.
fn fd_store_state() -> Option<String> {
    let pid: i32 = std::env::var(FD_STORE_PID).ok()?.parse().ok()?;
    // The messages of a process that another one has started are not for the store.
    let parent = rustix::process::getppid().map(|parent| parent.as_raw_nonzero().get());
    if parent != Some(pid) {
        return None;
    }
    let path = std::env::var_os("NOTIFY_SOCKET");
    if path.is_none() && !is_on_stdin() {
        return None;
    }
    Some(match ask_fd_store(path.as_deref().map(Path::new)) {
        Ok(state) => state.trim_end().to_owned(),
        Err(error) => format!("vgpu fd-store, process {pid}: no answer: {error}"),
    })
}

/// Asks a `vgpu fd-store`, at standard input or at the socket of a path. Waits for
/// [`FD_STORE_TIMEOUT`] at most, also if the store hangs and its socket is full.
fn ask_fd_store(path: Option<&Path>) -> io::Result<String> {
    let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let (question, files) = (FD_STORE_QUESTION.as_bytes(), [theirs.as_fd()]);
    match path.filter(|_| !is_on_stdin()) {
        None => scm_rights::send(io::stdin(), question, &files, SendFlags::DONTWAIT)?,
        Some(path) => {
            let socket = UnixDatagram::unbound()?;
            socket.set_nonblocking(true)?;
            scm_rights::send_to(&socket, &SocketAddrUnix::new(path)?, question, &files)?
        }
    };
    drop(theirs);
    let (mut ours, mut answer) = (File::from(ours).take(MAX_FD_STORE_STATE), Vec::new());
    let end = Instant::now() + FD_STORE_TIMEOUT;
    loop {
        match ours.read_to_end(&mut answer) {
            Ok(_) if answer.is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => return Ok(String::from_utf8_lossy(&answer).into_owned()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if Instant::now() >= end {
            let why = format!("nothing within {FD_STORE_TIMEOUT:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Lines on the fd store, if there is one. Waits up to a second for the answer of the process that
/// keeps the files, and for no lock that a thread keeps.
pub(crate) fn dump() -> Option<String> {
    let state = fd_store_state();
    let lines = kept_files().into_iter().chain(state);
    let lines: Vec<String> = lines.collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// A line on the files in the fd store. Waits for no lock.
fn kept_files() -> Option<String> {
    if !has_fd_store() {
        return None;
    }
    let names = match STORED.try_lock() {
        Ok(stored) => {
            let names = stored.files.iter().flatten();
            names
                .map(|(name, _)| name.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        }
        Err(_) => "unknown now".into(),
    };
    (!names.is_empty()).then(|| format!("files kept by the service manager: {names}"))
}

/// Puts a copy of `fd` into the fd store, in place of any other file of this name. Logs a failure.
pub fn store(name: &str, fd: BorrowedFd<'_>) {
    let copy = match fd.try_clone_to_owned() {
        Ok(copy) => copy,
        Err(error) => {
            report(name, &format!("it cannot be copied: {error}"));
            return;
        }
    };
    // The service manager is told without the lock: it may let this process wait.
    let (replaced, number) = {
        let mut stored = lock();
        let replaced = stored.files().insert(name.to_owned(), copy);
        (replaced, stored.files().len())
    };
    if !has_fd_store() {
        return; // `check_fd_store` has said so.
    }
    if replaced.is_some() {
        // systemd would keep both.
        notify_removal(name);
    }
    if let Some(most) = capacity().filter(|most| number > *most) {
        let why = format!(
            "it is file {number} of this process, and the service manager keeps {most} \
             (FileDescriptorStoreMax=)"
        );
        report(name, &why);
    }
    let states = [
        NotifyState::FdStore,
        NotifyState::FdName(name),
        // Otherwise the manager removes the file descriptor when its other end is closed.
        NotifyState::Custom("FDPOLL=0"),
    ];
    if let Err(error) = send(&states, &[fd]) {
        let why = format!("file {number} cannot be passed to the service manager: {error}");
        report(name, &why);
    }
}

/// Removes the file of a name from the fd store.
pub fn remove(name: &str) {
    let removed = lock().files().remove(name);
    drop(removed);
    notify_removal(name);
}

fn notify_removal(name: &str) {
    notify(
        &[NotifyState::FdStoreRemove, NotifyState::FdName(name)],
        None,
    );
}

fn notify(states: &[NotifyState<'_>], fd: Option<BorrowedFd<'_>>) {
    if let Err(error) = send(states, fd.as_slice()) {
        warn!("the service manager cannot be notified: {error}");
    }
}

/// Sends a message to the service manager, if there is one.
fn send(states: &[NotifyState<'_>], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    if !is_on_stdin() {
        return sd_notify::notify_with_fds(states, files);
    }
    let text: String = states.iter().map(|state| format!("{state}\n")).collect();
    // A message is sent whole or not at all.
    scm_rights::send(io::stdin(), text.as_bytes(), files, SendFlags::empty())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_a_text_has_its_priority() {
        assert_eq!(lines_with(priority(Level::ERROR), "a\nb"), "<3>a\n<3>b\n");
        assert_eq!(lines_with("", "a\nb\n"), "a\nb\n");
    }

    #[test]
    fn fd_store_that_is_missing_or_too_small_is_reported() {
        let says = |files, has_fd_store, capacity, wanted: &str| {
            let why = shortage(files, has_fd_store, capacity).unwrap_or_default();
            assert!(why.contains(wanted), "{why}");
            assert_eq!(why.is_empty(), wanted.is_empty(), "{why}");
        };
        says(6, false, None, "NOTIFY_SOCKET");
        says(6, true, Some(5), "at most 5");
        says(6, true, Some(0), "at most 0");
        says(6, true, Some(6), "");
        // systemd before 254 does not say.
        says(6, true, None, "");
        says(0, false, None, "");
    }
}
