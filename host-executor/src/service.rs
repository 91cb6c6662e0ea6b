//! The service manager that may have started us: it is told when guests can come, and keeps files across a restart.
//!
//! The protocol is systemd's (`sd_notify`, `FDSTORE`, `LISTEN_FDS`); `vgpu hold` speaks the other side of it where there
//! is no systemd. What is kept: each virtual machine's memory, its doorbell and the socket to its QEMU, which cannot
//! connect a second time.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Mutex;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tracing::warn;
use vgpu_transport::link::scm_rights;

/// Files passed to a service begin here.
const FIRST: RawFd = 3;

/// More files than this are not ours.
const MOST: RawFd = 4096;

/// Names the files that have been kept for us, and hands them over, once.
pub fn kept_files() -> BTreeMap<String, OwnedFd> {
    static TAKEN: Mutex<bool> = Mutex::new(false);
    let mut taken = TAKEN.lock().unwrap_or_else(|e| e.into_inner());
    if std::mem::replace(&mut *taken, true) {
        return BTreeMap::new();
    }
    let variable = |name| std::env::var(name).ok();
    let is_for_us = variable("LISTEN_PID") == Some(std::process::id().to_string());
    let count = variable("LISTEN_FDS").and_then(|n| n.parse::<RawFd>().ok());
    let (true, Some(count)) = (is_for_us, count) else {
        return BTreeMap::new();
    };
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let files = (FIRST..FIRST + count.clamp(0, MOST)).zip(names.split(':'));
    files
        .map(|(fd, name)| {
            // SAFETY: LISTEN_PID says that the service manager has opened these descriptors for this very process, and
            // they are taken once.
            let file = unsafe { OwnedFd::from_raw_fd(fd) };
            // Not for programs that we start. Failing is harmless: we start none.
            let _ = rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC);
            (name.to_owned(), file)
        })
        .collect()
}

/// Whether somebody keeps files for us.
pub fn is_watched() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Guests can come.
pub fn ready() {
    notify("READY=1\n", None);
}

/// We are about to end.
pub fn stopping() {
    notify("STOPPING=1\n", None);
}

/// Has `file` kept under `name`, for the one who comes after us.
pub fn keep(name: &str, file: BorrowedFd<'_>) {
    notify(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n"), Some(file));
}

/// What is kept under `name` is needed no more.
pub fn forget(name: &str) {
    notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"), None);
}

fn notify(message: &str, file: Option<BorrowedFd<'_>>) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send(path.as_encoded_bytes(), message, file) {
        warn!("the service manager cannot be told: {error}");
    }
}

fn send(path: &[u8], message: &str, file: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
    let address = match path {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    scm_rights::send_to(&socket, &address, message.as_bytes(), file.as_slice())?;
    Ok(())
}
