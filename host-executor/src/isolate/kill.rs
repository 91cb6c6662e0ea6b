//! Ends a session whose number an operator has read in the status.
#![forbid(unsafe_code)]

use std::io;

use super::aggregate::MACHINE_SHIFT;
use super::ipc::Command;
use super::printable::shown;
use super::query::REPORT_TIMEOUT;
use super::state::{SupervisorState, Worker};
use crate::control::{self, ControlError};
use crate::operator_request::OperatorRequest;

/// Why a supervisor has not ended a session.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum KillError {
    #[error("there is no session {session}")]
    NoSession { session: u64 },
    #[error("the process of guest {guest} cannot be told to end the session: {reason}")]
    Worker { guest: String, reason: io::Error },
    #[error("the process of the virtual machine {name} does not answer: {reason}")]
    Silent { name: String, reason: ControlError },
    #[error("the process of the virtual machine {name} refuses: {reason}")]
    Refused { name: String, reason: String },
}

/// Tells the process of a session to end it. Returns the name of the guest.
///
/// # Errors
/// [`KillError`]: the operator's number is wrong, or the process is at fault. Nothing has changed.
pub(super) fn kill_session(shared: &SupervisorState, id: u64) -> Result<String, KillError> {
    let missing = KillError::NoSession { session: id };
    let processes = shared.processes();
    let machine = id >> MACHINE_SHIFT;
    if machine == 0 {
        let has = |worker: &&Worker| worker.sessions.contains_key(&id);
        let worker = { processes.workers.values() }.find(has).ok_or(missing)?;
        let guest = worker.guest.clone().unwrap_or_else(|| "-".into());
        return match worker.send(&Command::Kill { session: id }, None) {
            Ok(()) => Ok(guest),
            Err(reason) => Err(KillError::Worker { guest, reason }),
        };
    }
    let machine = processes.machines.get(&machine).ok_or(missing)?;
    let (name, control) = machine.address();
    drop(processes);
    let session = id & ((1 << MACHINE_SHIFT) - 1);
    match control::perform_within(&control, &OperatorRequest::Kill { session }, REPORT_TIMEOUT) {
        Ok(outcome) if outcome.ok => Ok(name),
        Ok(outcome) => Err(KillError::Refused {
            name,
            reason: shown(&outcome.message),
        }),
        Err(reason) => Err(KillError::Silent { name, reason }),
    }
}
