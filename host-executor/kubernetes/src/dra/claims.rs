//! Makes the guests of the executor those of the claims that pods of this node use.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tracing::info;
use vgpu_executor::added_guests::{AddedGuest, GuestList};

use super::allocation::{Allocation, AllocationError, ClaimId, allocation, is_allocated, is_uid};
use super::api_server::{ApiError, ApiServer};
use super::cdi;
use crate::guests::{Assignment, Guests, GuestsError, if_there};
use crate::options::{ClaimOptions, Options};

/// Why a claim cannot be prepared or ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error(transparent)]
    Guests(#[from] GuestsError),
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Allocation(#[from] AllocationError),
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
}

/// What a look at the executor has found.
pub(crate) struct Outcome {
    /// What the executor says.
    pub(crate) executor: GuestList,
    /// Why the guests may not be those of the claims.
    pub(crate) problem: Option<ClaimError>,
}

/// The claims that pods of this node use. One change happens at a time.
pub(crate) struct Claims {
    options: Arc<Options>,
    claims: Arc<ClaimOptions>,
    guests: Guests,
    api: Arc<ApiServer>,
}

impl Claims {
    /// # Errors
    /// The folder of the sockets cannot be made.
    pub(crate) fn new(
        options: Arc<Options>,
        claims: Arc<ClaimOptions>,
        api: Arc<ApiServer>,
    ) -> Result<Claims, GuestsError> {
        Ok(Claims {
            guests: Guests::new(Arc::clone(&options))?,
            options,
            claims,
            api,
        })
    }

    /// Makes a claim a guest of the executor. Containers of its pods start next.
    ///
    /// # Errors
    /// The containers must not start: they would have no executor, or no quota.
    pub(crate) async fn prepare(&mut self, claim: &ClaimId) -> Result<Allocation, ClaimError> {
        claim.check()?;
        let mut executor = self.guests.list().await?;
        let known = self.known()?;
        if let Some(known) = known.iter().find(|known| known.claim == *claim) {
            self.ensure(known, &mut executor.guests).await?;
            return Ok(known.clone());
        }
        let object = self.api.get(&claim.path()).await?;
        let node = &self.claims.node;
        let new = allocation(claim, object.as_ref(), node, &executor, &self.options)?;
        // The claims that have had the name before are gone.
        let is_before = |known: &&Allocation| known.guest.name == new.guest.name;
        for before in known.iter().filter(is_before) {
            self.end(&before.claim.uid).await?;
            executor = self.guests.list().await?;
        }
        self.ensure(&new, &mut executor.guests).await?;
        self.save(&new)?;
        Ok(new)
    }

    /// Ends a claim: no pod uses it any more. Its guest, its sessions and its files go.
    ///
    /// # Errors
    /// The executor does not answer, or a file cannot be removed.
    pub(crate) async fn end(&mut self, uid: &str) -> Result<(), ClaimError> {
        if !is_uid(uid) {
            return Err(AllocationError::Uid(uid.into()).into());
        }
        let socket = self.options.socket(uid);
        match self.guests.list().await {
            Ok(list) => {
                for guest in list.guests.iter().filter(|guest| guest.socket == socket) {
                    self.guests.remove(&guest.name).await?;
                    info!(guest = guest.name, "no pod uses the claim of the guest");
                }
            }
            // Its guests have ended with it.
            Err(error) if error.has_no_executor() => {}
            Err(error) => return Err(error.into()),
        }
        let failed = |path: PathBuf| move |error| ClaimError::File { path, error };
        let cdi = &self.claims.cdi;
        cdi::remove(cdi, uid).map_err(failed(cdi.clone()))?;
        self.guests.remove_folder(uid);
        // Last: what fails above is done again.
        let file = self.file(uid);
        if_there(fs::remove_file(&file)).map_err(failed(file.clone()))
    }

    /// Adds the guests that the executor lacks, and removes those that are of no claim.
    ///
    /// # Errors
    /// The executor does not answer. Other problems are part of the outcome.
    pub(crate) async fn reconcile(&mut self) -> Result<Outcome, ClaimError> {
        let executor = self.guests.list().await?;
        let problem = self.match_guests(executor.guests.clone()).await.err();
        Ok(Outcome { executor, problem })
    }

    /// Makes the guests that the executor has, `known`, those of the claims.
    async fn match_guests(&mut self, mut known: Vec<AddedGuest>) -> Result<(), ClaimError> {
        let wanted = self.known()?;
        let mut problem = None;
        for allocation in &wanted {
            match self.ensure(allocation, &mut known).await {
                Err(ClaimError::Guests(error)) if error.is_silence() => return Err(error.into()),
                Err(error) => problem = Some(error),
                Ok(()) => {}
            }
        }
        let is_wanted = |uid: &str| wanted.iter().any(|known| known.claim.uid == uid);
        let sockets = &self.options.sockets;
        for guest in known {
            let folder = guest.socket.strip_prefix(sockets).ok();
            let uid = folder.and_then(|path| path.parent()?.to_str());
            if uid.is_some_and(|uid| !is_wanted(uid)) {
                self.guests.remove(&guest.name).await?;
                info!(guest = guest.name, "the guest is of no claim");
            }
        }
        for uid in self.guests.folder_names()? {
            if is_uid(&uid) && !is_wanted(&uid) {
                self.guests.remove_folder(&uid);
            }
        }
        let cdi = &self.claims.cdi;
        let failed = |error| ClaimError::File {
            path: cdi.clone(),
            error,
        };
        for uid in cdi::uids(cdi).map_err(failed)? {
            if !is_wanted(&uid) {
                cdi::remove(cdi, &uid).map_err(failed)?;
            }
        }
        problem.map_or(Ok(()), Err)
    }

    /// Ends the claims that the API server does not have any more, or has given to another node:
    /// their parts of the devices are free for others. The kubelet ends a claim by itself, unless
    /// it has forgotten the claim.
    ///
    /// # Errors
    /// The API server or the executor does not answer.
    pub(crate) async fn end_forgotten(&mut self) -> Result<(), ClaimError> {
        for known in self.known()? {
            let object = self.api.get(&known.claim.path()).await?;
            if !is_allocated(object.as_ref(), &known.claim, &self.claims.node) {
                let claim = &known.claim;
                info!(%claim, "the API server has given the devices of the claim away");
                self.end(&claim.uid).await?;
            }
        }
        Ok(())
    }

    /// Makes a claim a guest of the executor, which has `known`, and writes the file for the
    /// container runtime.
    async fn ensure(
        &self,
        allocation: &Allocation,
        known: &mut Vec<AddedGuest>,
    ) -> Result<(), ClaimError> {
        let uid = &allocation.claim.uid;
        let assignment = Assignment {
            folder: uid.clone(),
            guest: allocation.guest.clone(),
        };
        self.guests.ensure(&assignment, known).await?;
        let cdi = &self.claims.cdi;
        cdi::write(cdi, &self.options, uid).map_err(|error| ClaimError::File {
            path: cdi.clone(),
            error,
        })
    }

    /// The file of a claim.
    fn file(&self, uid: &str) -> PathBuf {
        self.options.sockets.join(format!("{uid}.json"))
    }

    fn save(&self, allocation: &Allocation) -> Result<(), ClaimError> {
        let path = self.file(&allocation.claim.uid);
        let text = serde_json::to_vec(allocation).map_err(io::Error::from);
        let saved = text.and_then(|text| cdi::replace(&path, &text));
        saved.map_err(|error| ClaimError::File { path, error })
    }

    /// The claims that pods use, by their files.
    fn known(&self) -> Result<Vec<Allocation>, ClaimError> {
        let names = self.guests.folder_names()?.into_iter();
        let uids = names.filter_map(|name| Some(name.strip_suffix(".json")?.to_owned()));
        let read = |uid: String| {
            let path = self.file(&uid);
            let text = fs::read(&path);
            let claim = text.and_then(|text| {
                serde_json::from_slice::<Allocation>(&text).map_err(io::Error::from)
            });
            claim.map_err(|error| ClaimError::File { path, error })
        };
        uids.filter(|uid| is_uid(uid)).map(read).collect()
    }
}
