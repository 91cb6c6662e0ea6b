//! A connection that several threads use: the lock, and what happens when the session is lost.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use vgpu_transport::link::{GuestEnd, LinkError};

use super::connection::Connection;
use super::error::{LossReason, SessionError};
use super::handshake::Welcome;
use crate::fail_fast;

/// A [`Connection`] under its lock. A lost connection stays lost: every later call fails at once.
pub(super) struct SharedConnection {
    /// The session, for the log.
    name: String,
    lost: OnceLock<LossReason>,
    connection: Mutex<Connection>,
}

impl SharedConnection {
    /// A connection after the handshake.
    pub(super) fn new(end: Box<dyn GuestEnd>, welcome: &Welcome) -> SharedConnection {
        let Welcome {
            session, engine, ..
        } = welcome;
        SharedConnection {
            name: format!("session {session} with the executor ({engine})"),
            lost: OnceLock::new(),
            connection: Mutex::new(Connection::new(end)),
        }
    }

    /// Runs `exchange` with the connection locked. The first error [`SessionError::Lost`] makes the
    /// connection lost: it is logged, and the memory of all pending reads is poisoned.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the connection is lost already, otherwise the error of `exchange`.
    pub(super) fn with_conn<T>(
        &self,
        exchange: impl FnOnce(&mut Connection) -> Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        if let Some(reason) = self.lost.get() {
            return Err(SessionError::Lost(reason.clone()));
        }
        let mut connection = self.lock();
        let outcome = exchange(&mut connection);
        if let Err(SessionError::Lost(reason)) = &outcome {
            connection.poison_reads();
            self.set_lost(reason.clone());
        }
        outcome
    }

    /// The connection, lost or not.
    pub(super) fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic during an exchange cannot leave half a message behind: the link sends whole
        // messages.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the connection is lost, including a loss that nobody has noticed yet. Does not wait.
    pub(super) fn is_lost(&self) -> bool {
        if self.lost.get().is_some() {
            return true;
        }
        // If the lock is taken, another thread talks to the executor and will notice the loss.
        let Ok(mut connection) = self.connection.try_lock() else {
            return false;
        };
        let is_closed = connection.end.is_closed();
        if is_closed {
            connection.poison_reads();
            self.set_lost(LossReason::Link(LinkError::Closed));
        }
        is_closed
    }

    /// Records the first loss and logs it. Ends the process if `VGPU_REQUIRED=1`.
    fn set_lost(&self, reason: LossReason) {
        if self.lost.set(reason.clone()).is_ok() {
            tracing::error!(
                "{} is lost: {reason}. Its buffers are gone and its work fails from now on. When \
                 the executor is back, loading a model works again",
                self.name,
            );
            fail_fast::end_process_if_enabled(&format!("the executor is lost: {reason}"));
        }
    }
}
