//! A request to stop.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use vgpu_transport::link::stream::tls::CertificateFault;

/// A flag that asks sessions to stop. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    /// The first reason for which the flag was set. Empty: the flag is not set.
    reason: OnceLock<StopReason>,
    /// The flag for all sessions, if this flag is for one of them.
    all: Option<StopFlag>,
}

/// Why a session is to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// The executor stops.
    Shutdown,
    /// Another program of the guest's machine needs what the guest has.
    Evicted,
    /// An operator ends the session.
    Killed,
    /// The guest of the session was removed.
    Removed,
    /// The host no longer serves a guest with such a certificate.
    Refused(CertificateFault),
    /// The host drains, and the time that sessions had to end by themselves has passed.
    Drained(Duration),
}

impl StopFlag {
    /// A flag that is not set.
    pub fn new() -> StopFlag {
        StopFlag::default()
    }

    /// A flag for one session, which is set if this flag is set.
    pub(crate) fn for_one(&self) -> StopFlag {
        StopFlag(Arc::new(StopState {
            reason: OnceLock::new(),
            all: Some(self.clone()),
        }))
    }

    /// Sets the flag, because the executor stops. Each session ends its request as soon as it can:
    /// a graph at the end of its turn, a compilation or a copy at its next look at the flag, and a
    /// reply that its guest does not take at once. The session then tells its guest why, which is
    /// waited for no longer than [`LAST_MESSAGES`](vgpu_transport::link::LAST_MESSAGES), and ends.
    pub fn set(&self) {
        self.set_for(StopReason::Shutdown);
    }

    /// Sets the flag for a reason. An earlier reason stays.
    pub(crate) fn set_for(&self, reason: StopReason) {
        let _ = self.0.reason.set(reason);
    }

    /// Whether the flag is set.
    pub fn is_set(&self) -> bool {
        self.reason().is_some()
    }

    /// Why the flag is set. `None`: it is not.
    pub(crate) fn reason(&self) -> Option<&StopReason> {
        let all = self.0.all.as_ref();
        self.0.reason.get().or_else(|| all?.reason())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_reason_of_a_session_stays_and_the_executor_stops_all() {
        let all = StopFlag::new();
        let [one, other] = [all.for_one(), all.for_one()];
        assert!(!one.is_set() && !all.is_set());
        one.set_for(StopReason::Killed);
        one.set_for(StopReason::Drained(Duration::from_secs(1)));
        assert!(one.is_set() && !other.is_set() && !all.is_set());
        all.set();
        assert_eq!(one.reason(), Some(&StopReason::Killed));
        assert_eq!(other.reason(), Some(&StopReason::Shutdown));
    }
}
