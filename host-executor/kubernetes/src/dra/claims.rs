//! Makes the guests of the executor those of the claims that pods of this node use.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::{Mutex, MutexGuard};
use tracing::info;
use vgpu_executor::added_guests::{AddedGuest, GuestList};

use super::allocation::{Allocation, AllocationError, ClaimId, allocation, is_uid, parts};
use super::api_server::{ApiError, ApiServer};
use super::cdi;
use crate::devices::is_seat;
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

impl ClaimError {
    /// Whether no executor listens.
    pub(crate) fn has_no_executor(&self) -> bool {
        matches!(self, ClaimError::Guests(error) if error.has_no_executor())
    }
}

/// What a look at the executor has found.
pub(crate) struct Outcome {
    /// What the executor says.
    pub(crate) executor: GuestList,
    /// Why the guests may not be those of the claims.
    pub(crate) problem: Option<ClaimError>,
}

/// The claims that have files.
struct Known {
    claims: Vec<Allocation>,
    /// The ids of claims whose files cannot be read, and why the last one cannot.
    unreadable: Vec<String>,
    problem: Option<ClaimError>,
}

impl Known {
    fn has(&self, uid: &str) -> bool {
        let is_read = self.claims.iter().any(|known| known.claim.uid == uid);
        is_read || self.unreadable.iter().any(|known| known == uid)
    }

    fn claim(&self, claim: &ClaimId) -> Option<&Allocation> {
        self.claims.iter().find(|known| known.claim == *claim)
    }
}

/// The claims that pods of this node use.
pub(crate) struct Claims {
    options: Arc<Options>,
    claims: Arc<ClaimOptions>,
    api: Arc<ApiServer>,
    /// One change of guests and files happens at a time. The API server is asked without the lock:
    /// the kubelet can end claims while it does not answer.
    guests: Mutex<Guests>,
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
            guests: Mutex::new(Guests::new(Arc::clone(&options))?),
            options,
            claims,
            api,
        })
    }

    /// Makes a claim a guest of the executor. Containers of its pods start next.
    ///
    /// # Errors
    /// The containers must not start: they would have no executor, or no quota.
    pub(crate) async fn prepare(&self, claim: &ClaimId) -> Result<Allocation, ClaimError> {
        claim.check()?;
        let object = self.api.get(&claim.path()).await;
        let change = self.change().await;
        let mut executor = change.guests.list().await?;
        let known = self.known(&change)?;
        let before = known.claim(claim);
        let new = match (before, object) {
            // What the claim had when it was prepared, while the API server does not answer.
            (Some(before), Err(_)) => before.clone(),
            (None, Err(error)) => return Err(error.into()),
            (before, Ok(object)) => {
                let object = object.as_ref();
                let node = &self.claims.node;
                let is_same = |before: &&Allocation| {
                    parts(claim, object, node).is_ok_and(|now| now == before.devices)
                };
                match before.filter(is_same) {
                    Some(before) => before.clone(),
                    None => allocation(claim, object, node, &executor, &self.options)?,
                }
            }
        };
        // The claims that have had the name before are gone, and a claim that the scheduler has
        // allocated anew is another guest.
        let is_old = |known: &&Allocation| known.guest.name == new.guest.name && **known != new;
        for old in known.claims.iter().filter(is_old) {
            change.end(&old.claim.uid).await?;
            executor = change.guests.list().await?;
        }
        change.ensure(&new, &mut executor.guests).await?;
        change.save(&new)?;
        Ok(new)
    }

    /// Ends a claim: no pod uses it any more. Its guest, its sessions and its files go.
    ///
    /// # Errors
    /// The executor does not answer, or a file cannot be removed.
    pub(crate) async fn end(&self, uid: &str) -> Result<(), ClaimError> {
        self.change().await.end(uid).await
    }

    /// Adds the guests that the executor lacks, and removes those that are of no claim.
    ///
    /// # Errors
    /// The executor does not answer. Other problems are part of the outcome.
    pub(crate) async fn reconcile(&self) -> Result<Outcome, ClaimError> {
        let change = self.change().await;
        let executor = change.guests.list().await?;
        let guests = executor.guests.clone();
        let problem = self.match_guests(&change, guests).await.err();
        Ok(Outcome { executor, problem })
    }

    /// Makes the guests that the executor has, `guests`, those of the claims.
    async fn match_guests(
        &self,
        change: &Change<'_>,
        mut guests: Vec<AddedGuest>,
    ) -> Result<(), ClaimError> {
        let mut known = self.known(change)?;
        let mut problem = known.problem.take();
        for allocation in &known.claims {
            match change.ensure(allocation, &mut guests).await {
                Err(ClaimError::Guests(error)) if error.is_silence() => return Err(error.into()),
                Err(error) => problem = Some(error),
                Ok(()) => {}
            }
        }
        for guest in guests {
            let folder = guest.socket.strip_prefix(&self.options.sockets).ok();
            let folder = folder.and_then(|path| path.parent()?.to_str());
            // Those of a device plugin are not ours.
            if folder.is_some_and(|uid| !is_seat(uid) && !known.has(uid)) {
                change.guests.remove(&guest.name).await?;
                info!(guest = guest.name, "the guest is of no claim");
            }
        }
        for uid in change.guests.folder_names()? {
            if is_uid(&uid) && !is_seat(&uid) && !known.has(&uid) {
                change.guests.remove_folder(&uid);
            }
        }
        let cdi = &self.claims.cdi;
        let failed = |error| ClaimError::File {
            path: cdi.clone(),
            error,
        };
        for uid in cdi::uids(cdi).map_err(failed)? {
            if !known.has(&uid) {
                cdi::remove(cdi, &uid).map_err(failed)?;
            }
        }
        problem.map_or(Ok(()), Err)
    }

    /// Ends the claims that the API server does not have any more, or has given other devices:
    /// their parts are free for others. The kubelet ends a claim by itself, unless it has forgotten
    /// the claim.
    ///
    /// # Errors
    /// The API server or the executor does not answer for one of the claims.
    pub(crate) async fn end_forgotten(&self) -> Result<(), ClaimError> {
        let known = {
            let change = self.change().await;
            self.known(&change)?.claims
        };
        let mut outcome = Ok(());
        for before in known {
            let object = self.api.get(&before.claim.path()).await;
            let ended = match object {
                Ok(object) => self.end_if_forgotten(&before, object.as_ref()).await,
                Err(error) => Err(error.into()),
            };
            outcome = outcome.and(ended);
        }
        outcome
    }

    async fn end_if_forgotten(
        &self,
        before: &Allocation,
        object: Option<&Value>,
    ) -> Result<(), ClaimError> {
        let claim = &before.claim;
        // Parts that cannot be served are others, too.
        let now = parts(claim, object, &self.claims.node).unwrap_or_default();
        if now == before.devices {
            return Ok(());
        }
        let change = self.change().await;
        // The kubelet may have asked meanwhile.
        if self.known(&change)?.claim(claim) == Some(before) {
            info!(%claim, "the API server has given the devices of the claim away");
            change.end(&claim.uid).await?;
        }
        Ok(())
    }

    async fn change(&self) -> Change<'_> {
        Change {
            options: &self.options,
            claims: &self.claims,
            guests: self.guests.lock().await,
        }
    }

    /// The claims that pods use, by their files. Nobody changes them meanwhile.
    fn known(&self, change: &Change<'_>) -> Result<Known, ClaimError> {
        let names = change.guests.folder_names()?.into_iter();
        let uids = names.filter_map(|name| Some(name.strip_suffix(".json")?.to_owned()));
        let mut known = Known {
            claims: Vec::new(),
            unreadable: Vec::new(),
            problem: None,
        };
        for uid in uids.filter(|uid| is_uid(uid)) {
            let path = change.file(&uid);
            let text = fs::read(&path);
            let claim = text.and_then(|text| {
                serde_json::from_slice::<Allocation>(&text).map_err(io::Error::from)
            });
            match claim {
                Ok(claim) => known.claims.push(claim),
                Err(error) => {
                    known.unreadable.push(uid);
                    known.problem = Some(ClaimError::File { path, error });
                }
            }
        }
        Ok(known)
    }
}

/// The one change of guests and files that happens now.
struct Change<'a> {
    options: &'a Options,
    claims: &'a ClaimOptions,
    guests: MutexGuard<'a, Guests>,
}

impl Change<'_> {
    /// As [`Claims::end`].
    ///
    /// # Errors
    /// As there.
    async fn end(&self, uid: &str) -> Result<(), ClaimError> {
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

    /// Makes a claim a guest of the executor, which has `known`, and writes the file for the
    /// container runtime.
    ///
    /// # Errors
    /// The executor does not answer or refuses, or a file cannot be written.
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
        cdi::write(cdi, self.options, uid).map_err(|error| ClaimError::File {
            path: cdi.clone(),
            error,
        })
    }

    /// The file of a claim.
    fn file(&self, uid: &str) -> PathBuf {
        self.options.sockets.join(format!("{uid}.json"))
    }

    /// # Errors
    /// [`ClaimError::File`].
    fn save(&self, allocation: &Allocation) -> Result<(), ClaimError> {
        let path = self.file(&allocation.claim.uid);
        let text = serde_json::to_vec(allocation).map_err(io::Error::from);
        let saved = text.and_then(|text| cdi::replace(&path, &text));
        saved.map_err(|error| ClaimError::File { path, error })
    }
}
