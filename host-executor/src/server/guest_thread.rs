//! The thread of one connection: handshake, admission, session.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Instant, SystemTime};

use tracing::{error, info, info_span, warn};
use vgpu_transport::link::stream::tls::Ending;
use vgpu_transport::link::stream::x509::CertificateInfo;
use vgpu_transport::wire::DeviceCount;

use super::registration::Registration;
use super::shared::{Entry, ServerState};
use super::silent_guests::SilentGuests;
use crate::activity::ThreadState;
use crate::handshakes::PendingHandshake;
use crate::identity::Identity;
use crate::listener::{IncomingGuest, OpenLink};
use crate::peer::Peer;
use crate::policy::LinkKind;
use crate::session::{
    FirstRequest, RejectReason, Session, SessionEnd, SharedParts, receive_first, reject,
};
use crate::stats::Counters;
use crate::tenant::Tenant;
use crate::tenant_registry::GuestTenants;
use crate::weights::SharingDomain;

/// Starts the thread of a connection, unless too many connections have not completed their
/// handshakes.
pub(super) fn start(
    shared: &Arc<ServerState>,
    id: u64,
    owner: Option<&str>,
    incoming: IncomingGuest,
) {
    let IncomingGuest { peer, open, socket } = incoming;
    let Some(mut pending) = shared.handshakes.begin(id, &peer.origin(), socket) else {
        return;
    };
    let (owner, own_shared) = (owner.map(str::to_owned), Arc::clone(shared));
    let spawned = thread::Builder::new()
        .name(format!("vgpu-guest-{id}"))
        .spawn(move || {
            if !pending.wait_on_own_thread(|| own_shared.stop.is_set()) {
                return;
            }
            let admitted = Admitted::new(&own_shared, owner.as_deref(), &peer);
            let tenant = admitted.first().name();
            let _span = info_span!("session", id, tenant, %peer).entered();
            // A panic in a link or in this code ends this guest's thread only. The log reports it.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                serve(
                    &own_shared,
                    id,
                    owner.as_deref(),
                    peer,
                    admitted,
                    open,
                    pending,
                );
            }));
            if outcome.is_err() {
                error!("the thread of the session panicked; this is a bug of the host");
            }
            own_shared.wake_waiters();
        });
    if let Err(error) = spawned
        && let Some(others) = shared.refusal_log.allow(Instant::now())
    {
        error!(
            "no thread for session {id}, its guest is disconnected: {error}; {others} such lines \
             were left out"
        );
    }
}

/// A guest that has connected, and why it is rejected, if it is.
struct Admitted {
    /// On each device of the server.
    tenants: GuestTenants,
    rejected: Option<SessionEnd>,
}

impl Admitted {
    fn new(shared: &ServerState, owner: Option<&str>, peer: &Peer) -> Admitted {
        let debt = |tenant| shared.debt(tenant);
        match shared.registry.admit(owner, peer, debt) {
            Ok(tenants) => Admitted {
                tenants,
                rejected: None,
            },
            Err(error) => Admitted {
                tenants: shared.registry.tenants().1.clone(),
                rejected: Some(RejectReason::from(error).into()),
            },
        }
    }

    /// The guest on its first device. Names and limits of the guest are the same on all of them.
    fn first(&self) -> &Arc<Tenant> {
        &self.tenants[0]
    }

    /// Where the guest's session is, as of now.
    fn place(&self, first: &FirstRequest) -> Place {
        let devices = self.devices();
        let asked = usize::try_from(first.device().0).unwrap_or(usize::MAX);
        // Without such a device, the session refuses HELLO.
        let device = devices.get(asked).or(devices.first());
        Place {
            device: device.copied().unwrap_or_default(),
            devices: DeviceCount(u32::try_from(devices.len()).unwrap_or(u32::MAX)),
        }
    }

    /// The indices of the devices that the guest may use, in the order in which it sees them.
    fn devices(&self) -> Vec<usize> {
        let permitted = self.first().policy().devices;
        let all = 0..self.tenants.len();
        match permitted.is_empty() {
            true => all.collect(),
            false => permitted
                .into_iter()
                .filter(|at| all.contains(at))
                .collect(),
        }
    }
}

/// Where a session is.
struct Place {
    /// The index of the device.
    device: usize,
    /// The devices that the guest may use. With none, it gets no session.
    devices: DeviceCount,
}

/// Serves a guest to its end. The guest gets a place in the table of sessions when it has sent its
/// first message.
fn serve(
    shared: &Arc<ServerState>,
    id: u64,
    owner: Option<&str>,
    mut peer: Peer,
    mut admitted: Admitted,
    open: OpenLink,
    pending: PendingHandshake,
) {
    // Everyone who can connect can cause these lines, so their number is limited.
    let log = |why: &dyn std::fmt::Display| {
        if !pending.is_cancelled()
            && let Some(others) = shared.refusal_log.allow(Instant::now())
        {
            match others {
                0 => warn!("{why}"),
                others => warn!("{why}; {others} such lines were left out"),
            }
        }
    };
    let mut tenant = Arc::clone(admitted.first());
    let activity = shared.activities.begin(id, tenant.name(), &peer.endpoint);
    let mut link = match open() {
        Ok(link) => link,
        Err(error) => return log(&format_args!("the guest gets no session: {error}")),
    };
    pending.link_is_open();
    // A certificate is known only after the handshake, and may change who the guest is.
    let certificates = link.certificates().to_vec();
    if let Some(certificate) = certificates.first() {
        let identity = Identity::of(certificate);
        peer.certificate = Some(identity.clone());
        admitted = Admitted::new(shared, owner, &peer);
        tenant = Arc::clone(admitted.first());
        let now = Instant::now();
        let log = shared.session_log.of(tenant.name(), now);
        if log.passes(now) {
            info!("the guest presented the certificate {identity}");
            let info = CertificateInfo::of(certificate);
            if let Some(ending) = Ending::of(&info, SystemTime::now()) {
                warn!("{ending}");
            }
            if tenant.is_named() {
                info!("the certificate identifies guest {}", tenant.name());
            }
        }
    }
    let pid = peer.process.as_ref().map(|process| process.pid);
    activity.identify(id, tenant.name(), &peer.endpoint, pid);
    activity.set(ThreadState::FirstMessage);
    let counters = Arc::new(Counters::default());
    let stop = shared.stop.for_one();
    // Why a guest with these certificates is not served, which a reload can have changed since the
    // handshake.
    let revoked = || {
        let fault = shared.fault_of(&certificates)?;
        Some(SessionEnd::Refused(fault))
    };
    // Before the first message, too: a guest that gets no session need not send any.
    let registration = match { admitted.rejected.take() }
        .or_else(|| Registration::refusal(shared, &peer, &tenant))
        .or_else(revoked)
    {
        Some(end) => Err(end),
        None => {
            let first = receive_first(link.as_mut(), shared.limits.hello, &stop);
            first.and_then(|first| {
                let place = admitted.place(&first);
                let entry = Entry {
                    peer: peer.clone(),
                    device: place.device,
                    since: Instant::now(),
                    counters: Arc::clone(&counters),
                    tenant: Arc::clone(&admitted.tenants[place.device]),
                    certificates: certificates.clone(),
                    stop: stop.clone(),
                    silence: link.silence(),
                };
                let registration = Registration::take(shared, id, entry)?;
                // From here on, new certificates end the session.
                revoked().map_or(Ok((first, registration, place)), Err)
            })
        }
    };
    let (first, _registration, place) = match registration {
        Ok(registration) => registration,
        Err(SessionEnd::Closed) => {
            return log(&"the guest disconnected before it had sent a message");
        }
        Err(end) => {
            shared.count_end(&end);
            match &end {
                SessionEnd::Rejected(_)
                | SessionEnd::Refused(_)
                | SessionEnd::Full { .. }
                | SessionEnd::Draining => {
                    log(&format_args!("rejected: {end}"));
                }
                end => log(&format_args!("the guest gets no session: {end}")),
            }
            return reject(link.as_mut(), &end);
        }
    };
    pending.session_begins();
    let tenant = Arc::clone(&admitted.tenants[place.device]);
    // Those on other devices: the guest is connected to this one.
    drop(admitted);
    activity.set_device(place.device);
    shared.wake_waiters();
    let device = &shared.devices[place.device];
    let (domain, prover) = match tenant.is_named() {
        true => {
            let name = format!("guest {}", tenant.name());
            (Some(name.clone()), name)
        }
        // A session of its own is no new prover.
        false => (sharing_domain(&peer), peer.quota_origin()),
    };
    let domain_of_session;
    let domain = match &domain {
        Some(name) => SharingDomain {
            name,
            is_of_session: false,
        },
        None => {
            domain_of_session = format!("session {id}");
            SharingDomain {
                name: &domain_of_session,
                is_of_session: true,
            }
        }
    };
    let parts = SharedParts {
        engine: Arc::clone(&device.engine),
        scheduler: Arc::clone(&device.scheduler),
        limits: device.limits,
        pools: shared.pools.clone(),
        monitor: Some(Arc::clone(&device.monitor)),
        log: shared.session_log.of(tenant.name(), Instant::now()),
        silent: SilentGuests::of(shared, id, place.device, &peer),
        devices: place.devices,
        has_unused_gpu: shared.unused_gpu.get().is_some(),
    };
    let session = Session::of_tenant(id, parts, tenant, counters, activity);
    let session = match device.weights.get() {
        Some(weights) => session.sharing_as(weights, domain, &prover),
        None => session,
    };
    let end = session.run_from(first, link.as_mut(), &stop);
    shared.count_end(&end);
    // Before the place in the table: a session that is no longer there has no descriptor open.
    drop(link);
}

/// Whose weights an unnamed guest shares without proof: those of the same user of this
/// machine, or of the same virtual machine. `None`: the session has a sharing domain of its own.
fn sharing_domain(peer: &Peer) -> Option<String> {
    let machine = peer
        .virtual_machine()
        .filter(|_| peer.link == LinkKind::Pci);
    match &peer.process {
        Some(process) => Some(format!("user {}", process.uid)),
        None => machine,
    }
}
