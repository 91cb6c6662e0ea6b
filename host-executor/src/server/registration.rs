//! Entries in the table of sessions: which guests get one.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::shared::{Entry, ServerState};
use crate::limits::{SESSION_DESCRIPTORS, sessions_of_one_guest};
use crate::peer::Peer;
use crate::pool::Lease;
use crate::session::{RejectReason, SessionEnd};
use crate::tenant::Tenant;
use crate::tenant_registry::AdmissionError;

/// An entry in the table of sessions. Dropping the registration removes the entry.
pub(super) struct Registration {
    id: u64,
    shared: Arc<ServerState>,
    _descriptors: Lease,
}

impl Registration {
    /// Enters a session in the table.
    ///
    /// # Errors
    /// Why the guest gets no session.
    pub(super) fn take(
        shared: &Arc<ServerState>,
        id: u64,
        entry: Entry,
    ) -> Result<Registration, SessionEnd> {
        let tenant = &entry.tenant;
        let mut sessions = shared.sessions();
        refusal(shared, &sessions, &entry.peer, tenant).map_or(Ok(()), Err)?;
        let descriptors = shared
            .pools
            .descriptors
            .take(tenant.id(), SESSION_DESCRIPTORS);
        let descriptors = descriptors.map_err(|error| RejectReason::Pool {
            guest: tenant.name().to_owned(),
            error,
        })?;
        sessions.insert(id, entry);
        Ok(Registration {
            id,
            shared: Arc::clone(shared),
            _descriptors: descriptors,
        })
    }

    /// Why a guest would get no session now, if so.
    pub(super) fn refusal(
        shared: &ServerState,
        peer: &Peer,
        tenant: &Arc<Tenant>,
    ) -> Option<SessionEnd> {
        refusal(shared, &shared.sessions(), peer, tenant)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut sessions = self.shared.sessions();
        // Under the lock of the table, so that a snapshot counts the session exactly once.
        let entry = sessions.remove(&self.id);
        if let Some(entry) = &entry {
            let stats = entry.counters.snapshot();
            match entry.tenant.is_named() {
                true => entry.tenant.add_ended(&stats),
                false => self.shared.registry.tenants().1[entry.device].add_ended(&stats),
            }
        }
        drop(sessions);
        // Perhaps the last reference to the tenant.
        drop(entry);
        self.shared.changed.notify_all();
    }
}

fn refusal(
    shared: &ServerState,
    sessions: &BTreeMap<u64, Entry>,
    peer: &Peer,
    tenant: &Arc<Tenant>,
) -> Option<SessionEnd> {
    if shared.drain.is_on() {
        return Some(SessionEnd::Draining);
    }
    // A guest may be removed while one of its programs is in its handshake.
    if tenant.is_removed() {
        let name = tenant.name().to_owned();
        return Some(RejectReason::from(AdmissionError::Removed { name }).into());
    }
    let max_sessions = shared.max_sessions.load(Ordering::Relaxed);
    let entries = sessions.values();
    let own = entries.filter(|e| e.tenant.id() == tenant.id()).count();
    let of_tenant = too_many(&format!("guest {} has", tenant.name()), own, max_sessions);
    // Each certificate is a guest of its own, but all those of one origin get the share of one.
    let of_origin = || {
        if tenant.is_named() {
            return None;
        }
        let origin = peer.quota_origin();
        let unnamed = sessions.values().filter(|e| !e.tenant.is_named());
        let own = unnamed.filter(|e| e.peer.quota_origin() == origin).count();
        let who = format!("the unnamed guests at {origin} together have");
        too_many(&who, own, max_sessions)
    };
    let open = sessions.len();
    of_tenant.or_else(of_origin).or_else(|| {
        (open >= max_sessions).then_some(SessionEnd::Full {
            sessions: open,
            limit: max_sessions,
        })
    })
}

/// Why `who`, with `own` sessions, gets no other, if that is its share of them.
fn too_many(who: &str, own: usize, max_sessions: usize) -> Option<SessionEnd> {
    let limit = sessions_of_one_guest(max_sessions);
    (own >= limit && own < max_sessions).then(|| {
        SessionEnd::from(RejectReason::TooManyPrograms {
            who: who.to_owned(),
            own,
            limit,
            max_sessions,
        })
    })
}
