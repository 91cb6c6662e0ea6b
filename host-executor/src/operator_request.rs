//! What an operator asks of a running executor, beyond its status and a reload.
#![forbid(unsafe_code)]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::guest_change::GuestChange;

/// A request over the control socket, where it is a JSON object in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperatorRequest {
    /// Change the limits of a guest.
    Set(GuestChange),
    /// Accept no new sessions.
    Drain {
        /// When the open sessions are ended, in milliseconds from now. `None`: never.
        deadline_ms: Option<u64>,
    },
    /// Accept sessions again.
    Undrain,
    /// End a session.
    Kill {
        /// The number of the session in the status.
        session: u64,
    },
}

impl OperatorRequest {
    /// A drain whose open sessions are ended after `deadline`, if there is one.
    pub fn drain(deadline: Option<Duration>) -> OperatorRequest {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        OperatorRequest::Drain {
            deadline_ms: deadline.map(milliseconds),
        }
    }
}
