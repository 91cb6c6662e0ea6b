//! Makes the guests of the executor those of the kubelet: each container with a seat is a guest,
//! and a guest whose container is gone is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};
use vgpu_executor::added_guests::{AddedGuest, GuestList, GuestRequest};
use vgpu_executor::control::{self, ControlError, GuestError};

use crate::api::pod_resources::ListPodResourcesResponse;
use crate::assignments::{Assignment, AssignmentError, assignments, check_seat, taken_slices};
use crate::devices::{Resource, is_seat};
use crate::kubelet::{self, KubeletError};
use crate::options::Options;

/// How long the executor may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Permissions of the folder of all seats, through which other users of the host would reach the
/// sockets.
const FOLDERS_MODE: u32 = 0o700;

/// Permissions of the folder of a seat, which a container sees.
const FOLDER_MODE: u32 = 0o755;

/// Why the guests are not those that they should be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReconcileError {
    #[error("the executor at {path}: {error}")]
    Executor { path: String, error: GuestError },
    #[error(transparent)]
    Kubelet(#[from] KubeletError),
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
    #[error("{}: {error}", path.display())]
    Folder { path: PathBuf, error: io::Error },
    #[error("a thread that asks the executor has panicked")]
    Panicked,
}

impl ReconcileError {
    /// Whether no executor listens.
    fn has_no_executor(&self) -> bool {
        let ReconcileError::Executor { error, .. } = self else {
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
    fn is_silence(&self) -> bool {
        let ReconcileError::Executor { error, .. } = self else {
            return false;
        };
        matches!(error, GuestError::Control(_))
    }
}

/// What a look at executor and kubelet has found.
pub(crate) struct Outcome {
    /// What the executor says.
    pub(crate) executor: GuestList,
    /// The slices of memory that containers have. `None`: the kubelet does not say.
    pub(crate) taken: Option<BTreeSet<String>>,
    /// Why the guests may not be those of the kubelet.
    pub(crate) problem: Option<ReconcileError>,
}

/// Changes the guests of the executor. One change happens at a time.
pub(crate) struct Reconciler {
    options: Arc<Options>,
    /// The guests whose containers are gone, and since when.
    gone: BTreeMap<String, Instant>,
}

impl Reconciler {
    /// # Errors
    /// The folder of the sockets cannot be made.
    pub(crate) fn new(options: Arc<Options>) -> Result<Reconciler, ReconcileError> {
        make_folder(&options.sockets, FOLDERS_MODE)?;
        Ok(Reconciler {
            options,
            gone: BTreeMap::new(),
        })
    }

    /// Adds the guests that the executor lacks, and removes those whose containers are gone.
    ///
    /// # Errors
    /// The executor does not answer. Other problems are part of the outcome.
    pub(crate) async fn reconcile(&mut self) -> Result<Outcome, ReconcileError> {
        let executor = self.ask(GuestRequest::List).await?;
        let (taken, problem) = match kubelet::pods(&self.options).await {
            Ok(pods) => {
                let matched = self.match_guests(&pods, executor.guests.clone()).await;
                (Some(taken_slices(&pods)), matched.err())
            }
            Err(error) => (None, Some(error.into())),
        };
        Ok(Outcome {
            executor,
            taken,
            problem,
        })
    }

    /// Makes the guests that the executor has, `known`, those of the kubelet.
    async fn match_guests(
        &mut self,
        pods: &ListPodResourcesResponse,
        mut known: Vec<AddedGuest>,
    ) -> Result<(), ReconcileError> {
        let wanted = assignments(pods, &self.options);
        let mut problem = None;
        for assignment in &wanted {
            match self.ensure(assignment, &mut known).await {
                Err(error) if error.is_silence() => return Err(error),
                Err(error) => problem = Some(error),
                Ok(()) => {}
            }
        }
        match self.is_complete(pods) {
            true => self.remove_gone(&known, &wanted).await?,
            // A kubelet that has just started does not know its pods.
            false => self.gone.clear(),
        }
        problem.map_or(Ok(()), Err)
    }

    /// Whether the kubelet knows the pods of the node: it lists the pod of this plugin.
    fn is_complete(&self, pods: &ListPodResourcesResponse) -> bool {
        let pods = &pods.pod_resources;
        match &self.options.pod {
            Some(own) => pods.iter().any(|pod| pod.name == *own),
            None => !pods.is_empty(),
        }
    }

    /// Makes the container with this seat a guest. Its container starts.
    ///
    /// # Errors
    /// The container must not start: it would have no executor, or no quota.
    pub(crate) async fn prepare(&mut self, seat: &str) -> Result<(), ReconcileError> {
        let mut executor = self.ask(GuestRequest::List).await?;
        let pods = kubelet::pods(&self.options).await?;
        let mut all = assignments(&pods, &self.options).into_iter();
        let found = all.find(|assignment| assignment.seat == seat);
        let found = found.ok_or_else(|| AssignmentError::Unknown(seat.into()))?;
        self.ensure(&found, &mut executor.guests).await
    }

    /// Checks that the container with these devices of a resource, which starts, has a seat.
    ///
    /// # Errors
    /// It has none.
    pub(crate) async fn check_seat(
        &self,
        resource: Resource,
        devices: &[String],
    ) -> Result<(), ReconcileError> {
        let pods = kubelet::pods(&self.options).await?;
        Ok(check_seat(&pods, resource, devices)?)
    }

    /// Makes a new folder for a seat, which the kubelet mounts into a container. Another container
    /// may have had the seat, and may still run: its pod was deleted by force. That container loses
    /// its guest and its sessions, and keeps the folder that it has mounted, which is removed: what
    /// is made at the same path is not seen there.
    ///
    /// # Errors
    /// The executor does not remove the guest of that container, or no folder can be made.
    pub(crate) async fn renew(&mut self, seat: &str) -> Result<(), ReconcileError> {
        let socket = self.options.socket(seat);
        match self.ask(GuestRequest::List).await {
            Ok(list) => {
                for guest in list.guests.iter().filter(|guest| guest.socket == socket) {
                    self.remove(&guest.name).await?;
                    self.gone.remove(&guest.name);
                    info!(
                        guest = guest.name,
                        seat, "another container gets the seat of the guest"
                    );
                }
            }
            // Its guests have ended with it. The container starts when an executor answers.
            Err(error) if error.has_no_executor() => {}
            Err(error) => return Err(error),
        }
        make_folder(&self.options.sockets, FOLDERS_MODE)?;
        let folder = self.options.folder(seat);
        let failed = |path: &Path, error| ReconcileError::Folder {
            path: path.into(),
            error,
        };
        if_there(fs::remove_file(&socket)).map_err(|error| failed(&socket, error))?;
        if_there(fs::remove_dir(&folder)).map_err(|error| failed(&folder, error))?;
        make_folder(&folder, FOLDER_MODE)
    }

    /// Makes the folder of a seat if it is missing.
    fn make_folder(&self, seat: &str) -> Result<(), ReconcileError> {
        make_folder(&self.options.sockets, FOLDERS_MODE)?;
        make_folder(&self.options.folder(seat), FOLDER_MODE)
    }

    /// Makes an assignment a guest of the executor, which has `known`.
    async fn ensure(
        &self,
        wanted: &Assignment,
        known: &mut Vec<AddedGuest>,
    ) -> Result<(), ReconcileError> {
        let Assignment { seat, guest } = wanted;
        // The executor opens no listener again for a guest that it has.
        let is_open = guest.socket.exists();
        if is_open && known.contains(guest) {
            return Ok(());
        }
        // The name or the seat of a container that is gone, or a listener without its file.
        let is_in_the_way = |other: &&AddedGuest| {
            let same = (other.name == guest.name, other.socket == guest.socket);
            same.0 != same.1 || (same.0 && !is_open)
        };
        let others: Vec<_> = known.iter().filter(is_in_the_way).cloned().collect();
        for other in others {
            *known = self.remove(&other.name).await?.guests;
        }
        self.make_folder(seat)?;
        *known = self.ask(GuestRequest::Add(guest.clone())).await?.guests;
        info!(
            guest = guest.name,
            seat,
            memory = guest.memory,
            "the container is a guest"
        );
        Ok(())
    }

    /// Removes the guests whose containers have been gone for long enough, and their folders.
    async fn remove_gone(
        &mut self,
        known: &[AddedGuest],
        wanted: &[Assignment],
    ) -> Result<(), ReconcileError> {
        let is_wanted = |socket: &Path| wanted.iter().any(|one| one.guest.socket == socket);
        let own = { known.iter() }.filter(|guest| guest.socket.starts_with(&self.options.sockets));
        let gone: Vec<_> = own.filter(|guest| !is_wanted(&guest.socket)).collect();
        let names: Vec<_> = gone.iter().map(|guest| &guest.name).collect();
        self.gone.retain(|name, _| names.contains(&name));
        let mut kept = Vec::new();
        for guest in gone {
            let since = self.gone.entry(guest.name.clone());
            if since.or_insert_with(Instant::now).elapsed() < self.options.grace {
                kept.push(&guest.socket);
                continue;
            }
            self.remove(&guest.name).await?;
            self.gone.remove(&guest.name);
            info!(guest = guest.name, "the container of the guest is gone");
        }
        for entry in folder_names(&self.options.sockets)? {
            let socket = self.options.socket(&entry);
            if is_seat(&entry) && !is_wanted(&socket) && !kept.contains(&&socket) {
                remove_folder(&self.options.folder(&entry), &socket);
            }
        }
        Ok(())
    }

    async fn remove(&self, name: &str) -> Result<GuestList, ReconcileError> {
        let name = name.into();
        self.ask(GuestRequest::Remove { name }).await
    }

    /// Asks the executor, on a thread that may wait.
    async fn ask(&self, request: GuestRequest) -> Result<GuestList, ReconcileError> {
        let control = self.options.control.clone();
        let path = control.display().to_string();
        let asked = move || control::guests(&control, &request, TIMEOUT);
        let answer = tokio::task::spawn_blocking(asked).await;
        let answer = answer.map_err(|_| ReconcileError::Panicked)?;
        answer.map_err(|error| ReconcileError::Executor { path, error })
    }
}

fn make_folder(path: &Path, mode: u32) -> Result<(), ReconcileError> {
    let made = DirBuilder::new().recursive(true).mode(mode).create(path);
    made.map_err(|error| ReconcileError::Folder {
        path: path.into(),
        error,
    })
}

/// The outcome of a removal, which is good if there was nothing to remove.
fn if_there(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn folder_names(path: &Path) -> Result<Vec<String>, ReconcileError> {
    let failed = |error| ReconcileError::Folder {
        path: path.into(),
        error,
    };
    let entries = fs::read_dir(path).map_err(failed)?;
    // What is no text is no seat.
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.collect())
}

/// Removes the folder of a seat, and the socket that an executor that was killed has left there.
fn remove_folder(folder: &Path, socket: &Path) {
    let _ = fs::remove_file(socket); // the executor has removed it
    if let Err(error) = fs::remove_dir(folder) {
        warn!("{}: {error}", folder.display());
    }
}
