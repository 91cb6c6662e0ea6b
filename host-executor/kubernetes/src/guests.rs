//! Guests that an executor is told to add and to remove, each with a folder for its socket.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};
use vgpu_executor::added_guests::{AddedGuest, GuestList, GuestRequest};
use vgpu_executor::control::{self, ControlError, GuestError};

use crate::options::Options;

/// How long the executor may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Permissions of the folder of all sockets, through which other users of the host would reach the
/// sockets.
const FOLDERS_MODE: u32 = 0o700;

/// Permissions of the folder of a socket, which a container sees.
const FOLDER_MODE: u32 = 0o755;

/// Permissions of a container's socket: its folder is mounted into that container only, and on the
/// host only its owner enters the folder above. A container may have any user.
pub(crate) const SOCKET_MODE: u32 = 0o666;

/// The longest name of a guest in bytes.
const MAX_NAME: usize = 64;

/// Why the executor has no guest, or keeps one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GuestsError {
    #[error("the executor at {path}: {error}")]
    Executor { path: String, error: GuestError },
    #[error("{}: {error}", path.display())]
    Folder { path: PathBuf, error: io::Error },
    #[error("a thread that asks the executor has panicked")]
    Panicked,
}

impl GuestsError {
    /// Whether no executor listens.
    pub(crate) fn has_no_executor(&self) -> bool {
        let GuestsError::Executor { error, .. } = self else {
            return false;
        };
        match error {
            GuestError::Control(ControlError::Socket(error)) => matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ),
            _ => false,
        }
    }

    /// Whether the executor does not answer: the next question would wait as long.
    pub(crate) fn is_silence(&self) -> bool {
        let GuestsError::Executor { error, .. } = self else {
            return false;
        };
        matches!(error, GuestError::Control(_))
    }
}

/// A guest that the executor should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// The name of the [folder](Options::folder) with its socket.
    pub(crate) folder: String,
    pub(crate) guest: AddedGuest,
}

/// The name of a guest, of the names that Kubernetes has for it. A long one is cut, and ends with
/// `id`, which is short.
pub(crate) fn guest_name(parts: &[&str], id: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let text = parts.join(".");
    let letters = text.chars().map(|c| if is_allowed(c) { c } else { '-' });
    let name: String = letters.collect();
    match name.len() <= MAX_NAME {
        true => name,
        false => format!("{}.{id}", &name[..MAX_NAME - id.len() - 1]),
    }
}

/// The executor, and the folder of all sockets.
pub(crate) struct Guests {
    options: Arc<Options>,
}

impl Guests {
    /// # Errors
    /// The folder of the sockets cannot be made.
    pub(crate) fn new(options: Arc<Options>) -> Result<Guests, GuestsError> {
        make_folder(&options.sockets, FOLDERS_MODE)?;
        Ok(Guests { options })
    }

    /// The guests that were added, and what the executor has.
    ///
    /// # Errors
    /// The executor does not answer.
    pub(crate) async fn list(&self) -> Result<GuestList, GuestsError> {
        self.ask(GuestRequest::List).await
    }

    /// Makes an assignment a guest of the executor, which has `known`.
    ///
    /// # Errors
    /// The executor does not answer or refuses, or a folder cannot be made.
    pub(crate) async fn ensure(
        &self,
        wanted: &Assignment,
        known: &mut Vec<AddedGuest>,
    ) -> Result<(), GuestsError> {
        let Assignment { folder, guest } = wanted;
        // The executor opens no listener again for a guest that it has.
        let is_open = guest.socket.exists();
        if is_open && known.contains(guest) {
            return Ok(());
        }
        // The name or the socket of a container that is gone, or a listener without its file.
        let is_in_the_way = |other: &&AddedGuest| {
            let same = (other.name == guest.name, other.socket == guest.socket);
            same.0 != same.1 || (same.0 && !is_open)
        };
        let others: Vec<_> = known.iter().filter(is_in_the_way).cloned().collect();
        for other in others {
            *known = self.remove(&other.name).await?.guests;
        }
        self.make_folder(folder)?;
        *known = self.ask(GuestRequest::Add(guest.clone())).await?.guests;
        info!(
            guest = guest.name,
            folder,
            memory = guest.memory,
            "the container is a guest"
        );
        Ok(())
    }

    /// Ends the sessions of a guest, and forgets it.
    ///
    /// # Errors
    /// The executor does not answer.
    pub(crate) async fn remove(&self, name: &str) -> Result<GuestList, GuestsError> {
        let name = name.into();
        self.ask(GuestRequest::Remove { name }).await
    }

    /// Asks the executor, on a thread that may wait.
    async fn ask(&self, request: GuestRequest) -> Result<GuestList, GuestsError> {
        let control = self.options.control.clone();
        let path = control.display().to_string();
        let asked = move || control::guests(&control, &request, TIMEOUT);
        let answer = tokio::task::spawn_blocking(asked).await;
        let answer = answer.map_err(|_| GuestsError::Panicked)?;
        answer.map_err(|error| GuestsError::Executor { path, error })
    }

    /// Makes a folder for a socket if it is missing.
    ///
    /// # Errors
    /// [`GuestsError::Folder`].
    pub(crate) fn make_folder(&self, folder: &str) -> Result<(), GuestsError> {
        make_folder(&self.options.sockets, FOLDERS_MODE)?;
        make_folder(&self.options.folder(folder), FOLDER_MODE)
    }

    /// Makes a new folder for a socket, also where there is one: a container that has mounted the
    /// old one keeps that, and what is made at the same path is not seen there.
    ///
    /// # Errors
    /// [`GuestsError::Folder`].
    pub(crate) fn renew_folder(&self, folder: &str) -> Result<(), GuestsError> {
        let failed = |path: &Path, error| GuestsError::Folder {
            path: path.into(),
            error,
        };
        let socket = self.options.socket(folder);
        if_there(fs::remove_file(&socket)).map_err(|error| failed(&socket, error))?;
        let path = self.options.folder(folder);
        if_there(fs::remove_dir(&path)).map_err(|error| failed(&path, error))?;
        self.make_folder(folder)
    }

    /// Removes the folder of a socket, and the socket that an executor that was killed has left
    /// there.
    pub(crate) fn remove_folder(&self, folder: &str) {
        let _ = fs::remove_file(self.options.socket(folder)); // the executor has removed it
        let path = self.options.folder(folder);
        if let Err(error) = if_there(fs::remove_dir(&path)) {
            warn!("{}: {error}", path.display());
        }
    }

    /// The names of what is in the folder of all sockets.
    ///
    /// # Errors
    /// [`GuestsError::Folder`].
    pub(crate) fn folder_names(&self) -> Result<Vec<String>, GuestsError> {
        let path = &self.options.sockets;
        let failed = |error| GuestsError::Folder {
            path: path.clone(),
            error,
        };
        let entries = fs::read_dir(path).map_err(failed)?;
        // What is no text is none of ours.
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Ok(names.collect())
    }
}

fn make_folder(path: &Path, mode: u32) -> Result<(), GuestsError> {
    let made = DirBuilder::new().recursive(true).mode(mode).create(path);
    made.map_err(|error| GuestsError::Folder {
        path: path.into(),
        error,
    })
}

/// The outcome of a removal, which is good if there was nothing to remove.
pub(crate) fn if_there(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_guests_fit_an_executor() {
        assert_eq!(guest_name(&["ns", "pod", "c"], "seat-1"), "ns.pod.c");
        let pod = "p".repeat(59);
        let exact = format!("ns.{pod}.c");
        assert_eq!(guest_name(&["ns", &pod, "c"], "seat-1"), exact);
        let long = guest_name(&["ns", &"p".repeat(200), "c"], "seat-12");
        assert_eq!(long.len(), 64);
        assert!(long.starts_with("ns.ppp") && long.ends_with("p.seat-12"));
        assert_eq!(guest_name(&["ns", "p\u{e9}d", "c"], "seat-1"), "ns.p-d.c");
    }
}
