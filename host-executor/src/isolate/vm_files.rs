//! The files of a virtual machine, between its `vgpu fd-store` and the supervisor.
//!
//! `vgpu fd-store` keeps the files while an executor is replaced. The supervisor stores them, too:
//! its copies are for the next `vgpu fd-store`, and its service manager has some for the next
//! supervisor. A guest may have taken over its executor: the supervisor accepts files under the
//! names of this machine only.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::{error, warn};

use super::ipc::{IpcSocket, ReceiveOutcome};
use super::report_rate_limit::ReportRateLimit;
use super::worker::take_socket;
use crate::hang_watch::{HangFinding, HangWatch, LOOK_PERIOD};
use crate::service;
use crate::vm::{stored_names, take_stored};

/// How long `vgpu fd-store` waits for the files that the supervisor passes to it at the start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A message in either direction.
#[derive(Debug, Serialize, Deserialize)]
enum FileMessage {
    /// A file, which comes with the message, replaces any other of the name.
    Store { name: String },
    /// The file of the name is not needed any more.
    Remove { name: String },
    /// The supervisor has passed all files.
    Complete,
    /// `vgpu fd-store` runs, and has started this process, unless its number is 0. Sent each
    /// [`ALIVE_PERIOD`].
    Alive { executor: u32 },
}

/// How often `vgpu fd-store` says that it runs.
pub const ALIVE_PERIOD: Duration = Duration::from_secs(5);

/// Why the supervisor receives nothing more from a `vgpu fd-store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FilesEnd {
    /// The connection is closed.
    Closed,
    /// The process has been silent for too long.
    Hangs,
}

/// The end of `vgpu fd-store`: the supervisor that has started it.
#[derive(Debug)]
pub struct FileSupervisor(IpcSocket);

impl FileSupervisor {
    /// The supervisor at the other end of standard input, and the files that it passes, by name.
    ///
    /// # Errors
    /// Standard input is no socket of a supervisor, or the supervisor has ended.
    pub fn on_stdin() -> io::Result<(FileSupervisor, Vec<(String, OwnedFd)>)> {
        let ipc = IpcSocket::new(take_socket()?);
        let mut files = Vec::new();
        let start = Instant::now();
        loop {
            let left = START_TIMEOUT.saturating_sub(start.elapsed());
            match ipc.receive(Some(left))? {
                ReceiveOutcome::Message(FileMessage::Store { name }, Some(file)) => {
                    files.push((name, file));
                }
                ReceiveOutcome::Message(FileMessage::Complete, _) => {
                    return Ok((FileSupervisor(ipc), files));
                }
                ReceiveOutcome::Nothing if start.elapsed() < START_TIMEOUT => {}
                other => return Err(io::Error::other(format!("{other:?}"))),
            }
        }
    }

    /// Tells the supervisor that a file is kept.
    ///
    /// # Errors
    /// The supervisor has ended, or does not receive messages.
    pub fn store(&self, name: &str, file: &OwnedFd) -> io::Result<()> {
        let name = name.to_owned();
        self.0.send(&FileMessage::Store { name }, Some(file))
    }

    /// Tells the supervisor that this process runs, and the number of the executor that it has
    /// started. 0: none.
    ///
    /// # Errors
    /// As for [`store`](FileSupervisor::store).
    pub fn alive(&self, executor: u32) -> io::Result<()> {
        self.0.send(&FileMessage::Alive { executor }, None)
    }

    /// Tells the supervisor that the file of a name is not kept any more.
    ///
    /// # Errors
    /// As for [`store`](FileSupervisor::store).
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let name = name.to_owned();
        self.0.send(&FileMessage::Remove { name }, None)
    }
}

/// What the processes of a virtual machine have stored, for the next process that serves it.
#[derive(Debug)]
pub(super) struct VmFiles {
    vm: String,
    has_logged: bool,
    /// The executor of `vgpu fd-store`, as of its last message.
    executor: Option<u32>,
}

impl VmFiles {
    pub(super) fn new(vm: &str) -> VmFiles {
        VmFiles {
            vm: vm.to_owned(),
            has_logged: false,
            executor: None,
        }
    }

    /// The executor of the `vgpu fd-store` that has said last that it runs.
    pub(super) fn executor(&self) -> Option<u32> {
        self.executor
    }

    /// Passes the files to a `vgpu fd-store` that starts. Returns their number.
    pub(super) fn pass(&self, ipc: &IpcSocket) -> io::Result<usize> {
        let files = take_stored(&mut service::stored_files()?, &self.vm);
        for (name, file) in &files {
            let name = name.clone();
            ipc.send(&FileMessage::Store { name }, Some(file))?;
        }
        ipc.send(&FileMessage::Complete, None)?;
        Ok(files.len())
    }

    /// Receives what becomes of the files, until `vgpu fd-store` closes the connection, or has said
    /// for `limit` no more that it runs.
    pub(super) fn receive(&mut self, ipc: &IpcSocket, limit: Option<Duration>) -> FilesEnd {
        let mut rate_limit = ReportRateLimit::default();
        self.executor = None;
        // Nothing is expected before the first message of this kind.
        let mut watch = None;
        loop {
            let timeout = watch.is_some().then_some(LOOK_PERIOD);
            match ipc.receive(timeout) {
                Ok(ReceiveOutcome::Message(FileMessage::Alive { executor }, _)) => {
                    self.executor = Some(executor).filter(|&pid| pid != 0);
                    watch
                        .get_or_insert_with(|| HangWatch::new(limit))
                        .reported();
                }
                Ok(ReceiveOutcome::Message(message, file)) => self.apply(message, file),
                Ok(ReceiveOutcome::Nothing) => match watch.as_mut().and_then(HangWatch::look) {
                    None => continue,
                    Some(HangFinding::Notice(silent)) => {
                        warn!(
                            vm = self.vm,
                            "vgpu fd-store of the machine has not run for {silent:.0?}"
                        );
                        continue;
                    }
                    Some(HangFinding::Hangs(silent)) => {
                        error!(
                            vm = self.vm,
                            "vgpu fd-store of the machine has not run for {silent:.0?}, and is \
                             killed: the next one gets the files"
                        );
                        return FilesEnd::Hangs;
                    }
                },
                Ok(ReceiveOutcome::Invalid(why)) => self.refuse(&why.to_string()),
                Ok(ReceiveOutcome::Closed) => return FilesEnd::Closed,
                Err(error) => {
                    error!(
                        vm = self.vm,
                        "no connection to the machine's process any more: {error}"
                    );
                    return FilesEnd::Closed;
                }
            }
            // An executor that stores without end must not occupy a processor of the supervisor.
            thread::sleep(rate_limit.delay(Instant::now()));
        }
    }

    fn apply(&mut self, message: FileMessage, file: Option<OwnedFd>) {
        let is_own = |name: &String| stored_names(&self.vm).contains(name);
        match (message, file) {
            (FileMessage::Store { name }, Some(file)) if is_own(&name) => {
                service::store(&name, file.as_fd());
            }
            (FileMessage::Remove { name }, _) if is_own(&name) => {
                service::remove(&name);
            }
            (message, _) => self.refuse(&format!("{message:?}")),
        }
    }

    /// Reports the first message that is refused.
    fn refuse(&mut self, why: &str) {
        if !self.has_logged {
            self.has_logged = true;
            error!(
                vm = self.vm,
                "invalid message about the files of this virtual machine: {why}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn fd_store_that_says_no_more_that_it_runs_hangs() {
        let limit = Some(Duration::from_millis(100));
        let (ours, theirs) = IpcSocket::pair().unwrap();
        let theirs = FileSupervisor(IpcSocket::new(theirs));
        let mut files = VmFiles::new("hung");
        theirs.alive(0).unwrap();
        theirs.store("vgpu-hung-bell", &file()).unwrap();
        assert_eq!(files.receive(&ours, limit), FilesEnd::Hangs);
        // The supervisor has the file that the process had.
        let stored = service::stored_files().unwrap();
        assert!(stored.contains_key("vgpu-hung-bell"));
        service::remove("vgpu-hung-bell");
        // One of which no such message has come, and one that has ended.
        theirs.remove("vgpu-hung-bell").unwrap();
        drop(theirs);
        assert_eq!(files.receive(&ours, limit), FilesEnd::Closed);
    }

    /// A guest may have taken over the executor of its machine.
    #[test]
    fn machine_stores_files_under_its_own_names_only() {
        const MEMORY: &str = "vgpu-files-a-memory";
        let (ours, theirs) = IpcSocket::pair().unwrap();
        let theirs = FileSupervisor(IpcSocket::new(theirs));
        let mut files = VmFiles::new("files-a");
        for name in ["vgpu-files-b-line", "vgpu-files-a-other", MEMORY, "", "x"] {
            theirs.store(name, &file()).unwrap();
        }
        for name in [
            "vgpu-files-a-line",
            "vgpu-files-a-line",
            "vgpu-files-a-bell",
        ] {
            theirs.store(name, &file()).unwrap();
        }
        theirs.0.send(&"nonsense", None).unwrap();
        theirs.remove(MEMORY).unwrap();
        let message = FileMessage::Store {
            name: MEMORY.into(),
        };
        theirs.0.send(&message, None).unwrap();
        drop(theirs);
        assert_eq!(files.receive(&ours, None), FilesEnd::Closed);
        let stored = service::stored_files().unwrap();
        let stored = stored.keys().map(String::as_str);
        // Other tests of this process store files, too.
        let names: Vec<&str> = { stored }
            .filter(|name| name.is_empty() || *name == "x" || name.contains("files-"))
            .collect();
        assert_eq!(names, ["vgpu-files-a-bell", "vgpu-files-a-line"]);
        assert!(files.has_logged);
    }
}
