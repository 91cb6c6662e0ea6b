//! The thread of one guest: handshake, admission, session.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Instant, SystemTime};

use tracing::{error, info, info_span, warn};
use vgpu_transport::link::stream::tls::Ending;
use vgpu_transport::link::stream::x509::CertificateInfo;

use super::shared::{Entry, Shared};
use crate::identity::Identity;
use crate::limits::sessions_of_one_guest;
use crate::listener::{IncomingGuest, OpenLink};
use crate::peer::Peer;
use crate::session::{Session, SessionEnd, reject};
use crate::stats::Counters;
use crate::stop::StopFlag;
use crate::tenant::Tenant;

/// Guests beyond the limit that are told why they are rejected. Further guests are disconnected
/// without a message.
const MAX_REJECTIONS: usize = 16;

/// A guest that has connected, on its own thread.
struct Guest {
    id: u64,
    /// The guest to which the listener belongs.
    owner: Option<String>,
    peer: Peer,
    counters: Arc<Counters>,
    tenant: Arc<Tenant>,
    /// Why the rules reject the guest, if they do.
    rejected: Option<SessionEnd>,
    /// Why there is no room for the guest, if there is none.
    full: Option<SessionEnd>,
    /// Ends this session.
    stop: StopFlag,
}

/// Enters a guest in the table of sessions and starts its thread.
pub(super) fn start(shared: &Arc<Shared>, id: u64, owner: Option<&str>, incoming: IncomingGuest) {
    let IncomingGuest { peer, open } = incoming;
    let counters = Arc::new(Counters::default());
    let (tenant, mut rejected) = tenant_of(shared, owner, &peer);
    let max_sessions = shared.max_sessions.load(Ordering::Relaxed);
    let stop = shared.stop.for_one();
    let open_sessions = {
        let mut sessions = shared.sessions();
        let count = sessions.len();
        if count >= max_sessions.saturating_add(MAX_REJECTIONS) {
            warn!(%peer, "disconnected without a message: {count} sessions are open, the limit is \
             {max_sessions}");
            return;
        }
        let own = count_of(&sessions, &tenant);
        rejected = rejected.or_else(|| too_many(&tenant, own, max_sessions));
        sessions.insert(
            id,
            Entry {
                peer: peer.clone(),
                since: Instant::now(),
                counters: Arc::clone(&counters),
                tenant: Arc::clone(&tenant),
                certificates: Vec::new(),
                stop: stop.clone(),
            },
        );
        count
    };
    let registration = Registration {
        id,
        shared: Arc::clone(shared),
    };
    let guest = Guest {
        id,
        owner: owner.map(str::to_owned),
        peer,
        counters,
        tenant,
        rejected,
        full: (open_sessions >= max_sessions).then_some(SessionEnd::Full {
            sessions: open_sessions,
            limit: max_sessions,
        }),
        stop,
    };
    let spawned = thread::Builder::new()
        .name(format!("vgpu-guest-{id}"))
        .spawn(move || {
            let (tenant, peer) = (guest.tenant.name(), &guest.peer);
            let _span = info_span!("session", id, tenant, %peer).entered();
            // A panic in a link or in this code ends this guest's thread only. The log reports it.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                serve(&registration.shared, guest, open);
            }));
            if outcome.is_err() {
                error!("the thread of the session panicked; this is a bug of the host");
            }
        });
    if let Err(error) = spawned {
        error!("no thread for session {id}, its guest is disconnected: {error}");
    }
}

/// The tenant of a guest, and why the guest is rejected, if it is.
fn tenant_of(
    shared: &Shared,
    owner: Option<&str>,
    peer: &Peer,
) -> (Arc<Tenant>, Option<SessionEnd>) {
    match shared.registry.admit(owner, peer) {
        Ok(tenant) => (tenant, None),
        Err(error) => (
            shared.registry.tenants().1,
            Some(SessionEnd::Rejected {
                reason: error.to_string(),
            }),
        ),
    }
}

/// The sessions of a tenant.
fn count_of(sessions: &BTreeMap<u64, Entry>, tenant: &Arc<Tenant>) -> usize {
    let entries = sessions.values();
    entries.filter(|e| Arc::ptr_eq(&e.tenant, tenant)).count()
}

/// Why a tenant with `own` sessions gets no other, if it has its share of them.
fn too_many(tenant: &Tenant, own: usize, max_sessions: usize) -> Option<SessionEnd> {
    let limit = sessions_of_one_guest(max_sessions);
    (own >= limit && own < max_sessions).then(|| SessionEnd::Rejected {
        reason: format!(
            "guest {} has {own} programs here, its limit is {limit}: three quarters of the \
             {max_sessions} of --max-guests",
            tenant.name()
        ),
    })
}

fn serve(shared: &Shared, guest: Guest, open: OpenLink) {
    let Guest {
        id,
        owner,
        mut peer,
        counters,
        mut tenant,
        mut rejected,
        full,
        stop,
    } = guest;
    let mut link = match open() {
        Ok(link) => link,
        Err(error) => {
            warn!("the guest gets no session: {error}");
            return;
        }
    };
    // A certificate is known only after the handshake, and may change who the guest is.
    let certificates = link.certificates().to_vec();
    if let Some(certificate) = certificates.first() {
        let identity = Identity::of(certificate);
        info!("the guest presented the certificate {identity}");
        let info = CertificateInfo::of(certificate);
        if let Some(ending) = Ending::of(&info, SystemTime::now()) {
            warn!("{ending}");
        }
        peer.certificate = Some(identity);
        (tenant, rejected) = tenant_of(shared, owner.as_deref(), &peer);
        if tenant.is_named() {
            info!("the certificate identifies guest {}", tenant.name());
        }
        let mut sessions = shared.sessions();
        if let Some(entry) = sessions.get_mut(&id) {
            entry.tenant = Arc::clone(&tenant);
            entry.peer.certificate.clone_from(&peer.certificate);
            entry.certificates.clone_from(&certificates);
        }
        let others = count_of(&sessions, &tenant).saturating_sub(1);
        drop(sessions);
        let max_sessions = shared.max_sessions.load(Ordering::Relaxed);
        rejected = rejected.or_else(|| too_many(&tenant, others, max_sessions));
        // The certificates may have been replaced during the handshake. From here on, that ends
        // the session.
        let fault = shared.fault_of(&certificates);
        rejected = rejected.or(fault.map(|fault| SessionEnd::Refused {
            reason: fault.to_string(),
        }));
    }
    let origin = match tenant.is_named() {
        true => format!("guest {}", tenant.name()),
        false => origin(id, &peer),
    };
    if let Some(end) = rejected.or(full) {
        warn!("rejected: {end}");
        reject(link.as_mut(), &end);
        return;
    }
    let engine = Arc::clone(&shared.engine);
    let scheduler = Arc::clone(&shared.scheduler);
    let session = Session::of_tenant(id, engine, scheduler, tenant, shared.limits, counters);
    let session = match shared.weights.get() {
        Some(weights) => session.sharing(weights, &origin),
        None => session,
    };
    session.run(link.as_mut(), &stop);
}

/// Whose weights a guest without a name shares without proof: those of the same user of this
/// machine, or of the same virtual machine. Every other session has an origin of its own.
fn origin(id: u64, peer: &Peer) -> String {
    let machine = peer.endpoint.strip_prefix("vm ");
    let machine = machine.and_then(|rest| rest.rsplit_once(" slot "));
    match (&peer.process, machine) {
        (Some(process), _) => format!("user {}", process.uid),
        (None, Some((name, _))) => format!("vm {name}"),
        (None, None) => format!("session {id}"),
    }
}

/// An entry in the table of sessions. Removed when the session's thread ends, however it ends.
struct Registration {
    id: u64,
    shared: Arc<Shared>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut sessions = self.shared.sessions();
        // Under the lock of the table, so that a snapshot counts the session exactly once.
        if let Some(entry) = sessions.remove(&self.id) {
            let stats = entry.counters.snapshot();
            match entry.tenant.is_named() {
                true => entry.tenant.add_ended(&stats),
                false => self.shared.registry.tenants().1.add_ended(&stats),
            }
        }
        drop(sessions);
        self.shared.ended.notify_all();
    }
}
