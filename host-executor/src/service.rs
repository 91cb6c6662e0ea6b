//! The service manager that has started this process, if there is one: readiness, and the fd store.
//!
//! The protocol is systemd's (`sd_notify(3)`, `sd_listen_fds(3)`). `vgpu fd-store` implements the
//! manager's side of it where there is no systemd. The fd store keeps each virtual machine's
//! memory, doorbell and socket to its QEMU while an executor is replaced, since a QEMU cannot
//! connect a second time.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sd_notify::NotifyState;
use tracing::warn;

/// The file descriptors of the fd store by name. Only the first call returns any.
pub fn stored_fds() -> BTreeMap<String, OwnedFd> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return BTreeMap::new();
    }
    match sd_notify::listen_fds_with_names() {
        Ok(fds) => fds
            .map(|(fd, name)| {
                // SAFETY: LISTEN_PID says that the service manager has opened these descriptors for
                // this process, and the library has checked that they are open. `TAKEN` lets only
                // one call own them.
                (name, unsafe { OwnedFd::from_raw_fd(fd) })
            })
            .collect(),
        Err(error) => {
            warn!("the file descriptors of the fd store cannot be used: {error}");
            BTreeMap::new()
        }
    }
}

/// Whether a service manager with an fd store has started this process.
pub fn has_fd_store() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Tells the service manager that guests can connect.
pub fn ready() {
    notify(&[NotifyState::Ready], None);
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

/// The names of the file descriptors that this process has put into the fd store.
static STORED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A line on the fd store, if there is one. Waits for no lock.
pub(crate) fn dump() -> Option<String> {
    let names = match STORED.try_lock() {
        Ok(names) => names.iter().cloned().collect::<Vec<_>>().join(", "),
        Err(_) => "unknown now".into(),
    };
    (!names.is_empty()).then(|| format!("files kept by the service manager: {names}"))
}

fn stored() -> MutexGuard<'static, BTreeSet<String>> {
    STORED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts a copy of `fd` into the fd store.
pub fn store(name: &str, fd: BorrowedFd<'_>) {
    stored().insert(name.to_owned());
    let states = [
        NotifyState::FdStore,
        NotifyState::FdName(name),
        // Otherwise the manager removes the file descriptor when its other end is closed.
        NotifyState::Custom("FDPOLL=0"),
    ];
    notify(&states, Some(fd));
}

/// Removes the file descriptors of a name from the fd store.
pub fn remove(name: &str) {
    stored().remove(name);
    notify(
        &[NotifyState::FdStoreRemove, NotifyState::FdName(name)],
        None,
    );
}

fn notify(states: &[NotifyState<'_>], fd: Option<BorrowedFd<'_>>) {
    if let Err(error) = sd_notify::notify_with_fds(states, fd.as_slice()) {
        warn!("the service manager cannot be notified: {error}");
    }
}
