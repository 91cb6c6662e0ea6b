//! A connection that several threads use: the lock, and what happens when the session is lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use vgpu_transport::fork::Owner;
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::{GuestEnd, LinkError};
use vgpu_transport::wire::Request;

use super::connection::Connection;
use super::error::{LossReason, SessionError};
use super::handshake::Welcome;
use crate::fail_fast;
use crate::graph_cache::GraphCache;
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::waits::Waits;

/// A [`Connection`] under its lock, and the graphs that were sent over it under another, so that
/// a thread that compares a graph with them does not keep others from the executor. A lost
/// connection stays lost: every later call fails at once.
///
/// The connection belongs to the process that has opened it. In a forked child every call fails at
/// once, before it takes a lock that a thread of the parent may have held during the fork.
pub(super) struct SharedConnection {
    /// The process that has opened the connection.
    owner: Owner,
    /// Whether this process, a forked child, has logged that it cannot use the connection.
    is_fork_logged: AtomicBool,
    /// The session, for the log.
    name: String,
    lost: OnceLock<LossReason>,
    pub(super) waits: Arc<Waits>,
    graphs: RankedMutex<GraphCache>,
    connection: RankedMutex<Connection>,
}

impl SharedConnection {
    /// A connection after the handshake.
    pub(super) fn new(end: Box<dyn GuestEnd>, welcome: &Welcome) -> SharedConnection {
        let Welcome {
            protocol,
            session,
            engine,
            ..
        } = welcome;
        let name = format!("session {session} with the executor ({engine})");
        let waits = Waits::of(&name, end.watch());
        let last_id = last_id();
        let connection = Connection::new(end, *protocol, Arc::clone(&waits), last_id);
        let mut graphs = GraphCache::default();
        graphs.set_last_id(last_id);
        SharedConnection {
            name,
            waits,
            lost: OnceLock::new(),
            owner: Owner::current(),
            is_fork_logged: AtomicBool::new(false),
            graphs: RankedMutex::new(Rank::Graphs, graphs),
            connection: RankedMutex::new(Rank::Connection, connection),
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
        self.check()?;
        self.waits.queues();
        let mut connection = self.connection.lock();
        self.waits.leaves_queue();
        self.exchange(&mut connection, exchange)
    }

    /// The graphs that the executor has. A thread keeps the lock from a change of the graphs until
    /// the requests that tell the executor of the change are sent: a patch is sent after its base,
    /// and before the base is forgotten.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the connection is lost.
    pub(super) fn lock_graphs(&self) -> Result<RankedGuard<'_, GraphCache>, SessionError> {
        self.check()?;
        // A panic before a graph was sent leaves a graph that the executor lacks: the executor ends
        // the session at the next use.
        Ok(self.graphs.lock())
    }

    /// As [`with_conn`](SharedConnection::with_conn), after every graph that uses `buffer` was
    /// forgotten, here and in the executor.
    ///
    /// # Errors
    ///
    /// As for [`with_conn`](SharedConnection::with_conn).
    pub(super) fn with_users_forgotten<T>(
        &self,
        buffer: BufferId,
        exchange: impl FnOnce(&mut Connection) -> Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        let mut graphs = self.lock_graphs()?;
        let users = graphs.remove_users(buffer);
        self.with_conn(|c| {
            for graph in users {
                c.send(&Request::Forget { graph })?;
            }
            exchange(c)
        })
    }

    fn exchange<T>(
        &self,
        connection: &mut Connection,
        exchange: impl FnOnce(&mut Connection) -> Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        let mut outcome = exchange(connection);
        if let Err(SessionError::Lost(reason @ LossReason::Link(LinkError::Closed))) = &mut outcome
            && let Some(told) = connection.reason_of_end()
        {
            *reason = told;
        }
        self.waits.end();
        if let Err(error) = &outcome {
            self.waits.failed(error);
        }
        if let Err(SessionError::Lost(reason)) = &outcome {
            connection.poison_reads();
            self.set_lost(reason.clone());
        }
        outcome
    }

    /// As [`with_conn`](SharedConnection::with_conn), if no other thread talks to the executor and
    /// all requests are done. `None`, without waiting, if not.
    ///
    /// # Errors
    ///
    /// As for [`with_conn`](SharedConnection::with_conn).
    pub(super) fn if_idle<T>(
        &self,
        exchange: impl FnOnce(&mut Connection) -> Result<T, SessionError>,
    ) -> Result<Option<T>, SessionError> {
        self.check()?;
        let Some(mut connection) = self.connection.try_lock() else {
            return Ok(None);
        };
        if !connection.is_idle() && !connection.end.is_closed() {
            return Ok(None);
        }
        self.exchange(&mut connection, exchange).map(Some)
    }

    /// Whether this process has opened the connection, and is not a forked child of that process.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.owner.is_current()
    }

    /// Checks that the connection belongs to this process and is not lost. Takes no lock. A forked
    /// child must call this before it takes a lock of the session.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the connection is lost.
    pub(super) fn check(&self) -> Result<(), SessionError> {
        if !self.owner.is_current() {
            if !self.is_fork_logged.swap(true, Ordering::Relaxed) {
                tracing::error!(
                    "this process was forked from the one that has opened the {}, and cannot use \
                     it: the work on its models fails here. Loading a model in this process works",
                    self.name
                );
                fail_fast::end_process_if_enabled("the executor's session belongs to the parent");
            }
            return Err(LossReason::Forked.into());
        }
        match self.lost.get() {
            Some(reason) => Err(SessionError::Lost(reason.clone())),
            None => Ok(()),
        }
    }

    /// The connection, lost or not. `None` in a forked child.
    pub(super) fn lock(&self) -> Option<RankedGuard<'_, Connection>> {
        // A panic during an exchange cannot leave half a message behind: the link sends whole
        // messages.
        self.owner.is_current().then(|| self.connection.lock())
    }

    /// Whether the connection is lost, including a loss that nobody has noticed yet. Does not wait.
    pub(super) fn is_lost(&self) -> bool {
        if !self.owner.is_current() || self.lost.get().is_some() {
            return true;
        }
        // If the lock is taken, another thread talks to the executor and will notice the loss.
        let Some(mut connection) = self.connection.try_lock() else {
            return false;
        };
        let is_closed = connection.end.is_closed();
        if is_closed {
            let told = connection.reason_of_end();
            self.waits.end();
            connection.poison_reads();
            self.set_lost(told.unwrap_or(LossReason::Link(LinkError::Closed)));
        }
        is_closed
    }

    /// Records the first loss and logs it. Ends the process if `VGPU_REQUIRED=1`.
    fn set_lost(&self, reason: LossReason) {
        if self.lost.set(reason.clone()).is_ok() {
            self.waits.failed(&reason);
            tracing::error!(
                "{} is lost: {reason}. Its buffers are gone and its work fails from now on. When \
                 the executor is back, loading a model works again",
                self.name,
            );
            fail_fast::end_process_if_enabled(&format!("the executor is lost: {reason}"));
        }
    }
}

/// The id that counts as the last one when a session begins: 0, or such that `VGPU_IDS_LEFT` ids
/// are left.
fn last_id() -> u64 {
    let Some(text) = std::env::var_os("VGPU_IDS_LEFT") else {
        return 0;
    };
    match text.to_str().and_then(|text| text.parse::<u64>().ok()) {
        Some(left) => {
            tracing::warn!("VGPU_IDS_LEFT: the session ends after {left} buffers or graphs");
            u64::MAX - left
        }
        None => {
            tracing::warn!("VGPU_IDS_LEFT is ignored: {text:?} is not a number");
            0
        }
    }
}
