//! Makes the guests of the executor those of the kubelet: each container with a seat is a guest,
//! and a guest whose container is gone is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tracing::info;
use vgpu_executor::added_guests::{AddedGuest, GuestList};

use crate::api::pod_resources::ListPodResourcesResponse;
use crate::assignments::{AssignmentError, assignments, check_seat, taken_slices};
use crate::devices::{Resource, is_seat};
use crate::guests::{Assignment, Guests, GuestsError};
use crate::kubelet::{self, KubeletError};
use crate::options::Options;

/// Why the guests are not those that they should be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReconcileError {
    #[error(transparent)]
    Guests(#[from] GuestsError),
    #[error(transparent)]
    Kubelet(#[from] KubeletError),
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
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
    guests: Guests,
    /// The guests whose containers are gone, and since when.
    gone: BTreeMap<String, Instant>,
}

impl Reconciler {
    /// # Errors
    /// The folder of the sockets cannot be made.
    pub(crate) fn new(options: Arc<Options>) -> Result<Reconciler, ReconcileError> {
        Ok(Reconciler {
            guests: Guests::new(Arc::clone(&options))?,
            options,
            gone: BTreeMap::new(),
        })
    }

    /// Adds the guests that the executor lacks, and removes those whose containers are gone.
    ///
    /// # Errors
    /// The executor does not answer. Other problems are part of the outcome.
    pub(crate) async fn reconcile(&mut self) -> Result<Outcome, ReconcileError> {
        let executor = self.guests.list().await?;
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
            match self.guests.ensure(assignment, &mut known).await {
                Err(error) if error.is_silence() => return Err(error.into()),
                Err(error) => problem = Some(error.into()),
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
        let mut executor = self.guests.list().await?;
        let pods = kubelet::pods(&self.options).await?;
        let mut all = assignments(&pods, &self.options).into_iter();
        let found = all.find(|assignment| assignment.folder == seat);
        let found = found.ok_or_else(|| AssignmentError::Unknown(seat.into()))?;
        Ok(self.guests.ensure(&found, &mut executor.guests).await?)
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
        match self.guests.list().await {
            Ok(list) => {
                for guest in list.guests.iter().filter(|guest| guest.socket == socket) {
                    self.guests.remove(&guest.name).await?;
                    self.gone.remove(&guest.name);
                    info!(
                        guest = guest.name,
                        seat, "another container gets the seat of the guest"
                    );
                }
            }
            // Its guests have ended with it. The container starts when an executor answers.
            Err(error) if error.has_no_executor() => {}
            Err(error) => return Err(error.into()),
        }
        Ok(self.guests.renew_folder(seat)?)
    }

    /// Removes the guests whose containers have been gone for long enough, and their folders.
    async fn remove_gone(
        &mut self,
        known: &[AddedGuest],
        wanted: &[Assignment],
    ) -> Result<(), ReconcileError> {
        let is_wanted = |socket: &Path| wanted.iter().any(|one| one.guest.socket == socket);
        // Beside a driver for claims, which has guests in this folder, too.
        let is_own = |guest: &&AddedGuest| {
            let folder = guest.socket.strip_prefix(&self.options.sockets).ok();
            let folder = folder.and_then(|path| path.parent()?.to_str());
            folder.is_some_and(is_seat)
        };
        let own = known.iter().filter(is_own);
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
            self.guests.remove(&guest.name).await?;
            self.gone.remove(&guest.name);
            info!(guest = guest.name, "the container of the guest is gone");
        }
        for entry in self.guests.folder_names()? {
            let socket = self.options.socket(&entry);
            if is_seat(&entry) && !is_wanted(&socket) && !kept.contains(&&socket) {
                self.guests.remove_folder(&entry);
            }
        }
        Ok(())
    }
}
