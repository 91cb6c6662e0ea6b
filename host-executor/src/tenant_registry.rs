//! The tenants of all engines: which guest is which tenant, by the rules of the configuration.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host_memory::HostMemory;
use crate::identity::{CertificateRule, Identity};
use crate::ledger::Ledger;
use crate::lock::{Rank, RankedMutex};
use crate::peer::Peer;
use crate::policy::{LinkKind, Policy, permits};
use crate::sched::TenantId;
use crate::size::shown;
use crate::tenant::{LatencyHistograms, Tenant, new_tenant_id};

/// Unnamed guests that have disconnected and owe time, at most. The guests that owe most are kept.
const MAX_DEBTORS: usize = 256;

/// A guest that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestRule {
    /// The guest's name.
    pub name: String,
    /// User ids of this machine that are this guest, on a unix socket for all guests.
    pub uids: Vec<u32>,
    /// Vsock context ids of virtual machines that are this guest.
    pub cids: Vec<u32>,
    /// Certificates that identify this guest over TCP.
    pub certificates: Vec<CertificateRule>,
    /// The guest's limits.
    pub policy: Policy,
}

/// Which guests are served, with which limits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Guests with names.
    pub guests: Vec<GuestRule>,
    /// Limits of each unnamed guest. `None`: unnamed guests are rejected.
    pub unnamed: Option<Policy>,
    /// Whether the sum of the quotas may exceed the engine's memory.
    pub overcommit: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            guests: Vec::new(),
            unnamed: Some(Policy::default()),
            overcommit: false,
        }
    }
}

/// The sum of the quotas exceeds an engine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the quotas of the guests add up to {}, the engine{} has {}: lower a quota, or set overcommit \
     = true",
    shown(*promised),
    match device {
        0 => String::new(),
        device => format!(" of device {device}"),
    },
    shown(*total)
)]
pub struct QuotaError {
    /// The index of the device.
    pub device: usize,
    /// Sum of the quotas in bytes.
    pub promised: u64,
    /// Memory of the engine in bytes.
    pub total: u64,
}

/// Why rules cannot be applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// The quotas exceed the memory.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// A guest is given a device that the executor does not have.
    #[error(
        "guest {guest:?} is given device {device}, counted from 0, and the executor has {devices}"
    )]
    Device {
        /// The guest.
        guest: String,
        /// The device.
        device: usize,
        /// The number of devices.
        devices: usize,
    },
}

/// Why a guest is not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum AdmissionError {
    #[error("guest {name} is identified by other certificates than {presented}")]
    WrongCertificate { name: String, presented: Identity },
    #[error("guest {name} is identified by a certificate, and this link has none")]
    NoCertificate { name: String },
    #[error("the host has no guest {name} any more")]
    Removed { name: String },
    #[error("the configuration does not name this guest, and rejects unnamed guests")]
    Unnamed,
    #[error(
        "guest {name} may not connect over {link}, only over {}",
        list(allowed)
    )]
    Link {
        name: String,
        link: LinkKind,
        allowed: Vec<LinkKind>,
    },
}

fn list(links: &[LinkKind]) -> String {
    let names: Vec<&str> = links.iter().map(|link| link.name()).collect();
    names.join(", ")
}

impl Rules {
    /// Checks that an executor with so many devices has those of each guest.
    ///
    /// # Errors
    /// [`RulesError::Device`] names the guest and the device.
    pub fn check_devices(&self, devices: usize) -> Result<(), RulesError> {
        let named = self
            .guests
            .iter()
            .map(|guest| (&guest.name[..], &guest.policy));
        let unnamed = self.unnamed.iter().map(|policy| ("unnamed", policy));
        for (guest, policy) in named.chain(unnamed) {
            let mut given = policy.devices.iter();
            if let Some(&device) = given.find(|&&device| device >= devices) {
                return Err(RulesError::Device {
                    guest: guest.to_owned(),
                    device,
                    devices,
                });
            }
        }
        Ok(())
    }

    /// Checks that the engine of a device, which has `total` bytes of memory, can keep the quotas
    /// of the guests that may use the device.
    ///
    /// # Errors
    /// [`QuotaError`] if the quotas exceed the memory and overcommitment is not allowed.
    pub fn check_memory(&self, device: usize, total: u64) -> Result<(), QuotaError> {
        let guests = self.guests.iter();
        let quotas = guests.filter_map(|guest| guest.policy.on_device(device).memory);
        let promised = quotas.fold(0u64, u64::saturating_add);
        match self.overcommit || promised <= total {
            true => Ok(()),
            false => Err(QuotaError {
                device,
                promised,
                total,
            }),
        }
    }
}

/// A guest: its tenant on each device, in the order of the devices. There is at least one, and all
/// of them have one number.
pub(crate) type GuestTenants = Vec<Arc<Tenant>>;

/// The guest's tenant on the first device that the guest may use.
pub(crate) fn on_first_device(tenants: &GuestTenants) -> &Arc<Tenant> {
    let first = tenants[0].policy().devices.first().copied();
    tenants.get(first.unwrap_or(0)).unwrap_or(&tenants[0])
}

/// The tenants of the engines of a server.
#[derive(Debug)]
pub(crate) struct TenantRegistry {
    /// One for each device.
    ledgers: Vec<Arc<Ledger>>,
    /// Of all devices.
    host: Arc<HostMemory>,
    state: RankedMutex<KnownGuests>,
    /// The unnamed guests that are connected or owe time.
    known: RankedMutex<Unnamed>,
    /// Stands for all unnamed guests, in statistics.
    unnamed: GuestTenants,
}

#[derive(Debug, Default)]
struct KnownGuests {
    guests: Vec<NamedGuest>,
    /// Limits of each unnamed guest.
    unnamed: Option<Policy>,
}

/// The unnamed guests that are connected, and those that have disconnected and owe time.
#[derive(Debug, Default)]
struct Unnamed {
    /// By what distinguishes them ([`Peer::source`]).
    by_source: BTreeMap<String, GuestTenants>,
    /// Those that nothing distinguishes, while they are connected.
    others: Vec<Weak<Tenant>>,
}

impl Unnamed {
    /// Forgets those that have disconnected and owe nothing, and those that owe least if more than
    /// [`MAX_DEBTORS`] have disconnected. `debt`: how much time a tenant owes.
    fn forget(&mut self, debt: impl Fn(TenantId) -> Option<Duration>) {
        self.others.retain(|tenant| tenant.strong_count() > 0);
        let mut debts = Vec::new();
        self.by_source.retain(|source, tenants| {
            if { tenants.iter() }.any(|tenant| Arc::strong_count(tenant) > 1) {
                return true;
            }
            let owed = tenants.first().and_then(|tenant| debt(tenant.id()));
            debts.extend(owed.map(|owed| (owed, source.clone())));
            owed.is_some()
        });
        debts.sort();
        let too_many = debts.len().saturating_sub(MAX_DEBTORS);
        for (_, source) in debts.iter().take(too_many) {
            self.by_source.remove(source);
        }
    }

    fn set_policy(&self, policy: &Policy) {
        let others = self.others.iter().filter_map(Weak::upgrade);
        let known = self.by_source.values().flatten().cloned();
        for tenant in known.chain(others) {
            tenant.set_policy(policy.clone());
        }
    }
}

/// A guest of the configuration, with its tenants. The tenants' accounts have the limits.
#[derive(Debug)]
struct NamedGuest {
    uids: Vec<u32>,
    cids: Vec<u32>,
    certificates: Vec<CertificateRule>,
    name: String,
    tenants: GuestTenants,
}

impl NamedGuest {
    fn is_identified_by(&self, certificate: Option<&Identity>) -> bool {
        certificate.is_some_and(|shown| self.certificates.iter().any(|rule| rule.fits(shown)))
    }

    /// Whether a guest on a listener for all guests is this one.
    fn matches(&self, peer: &Peer) -> bool {
        let uid = peer.process.as_ref().map(|process| process.uid);
        uid.is_some_and(|uid| self.uids.contains(&uid))
            || peer.machine.is_some_and(|cid| self.cids.contains(&cid))
            || self.is_identified_by(peer.certificate.as_ref())
    }
}

impl TenantRegistry {
    /// A registry for devices with so many bytes of memory each, beside which guests use `host`.
    /// Every guest is served, until rules are applied.
    pub(crate) fn new(
        totals: impl IntoIterator<Item = u64>,
        host: Arc<HostMemory>,
    ) -> TenantRegistry {
        let ledgers = totals.into_iter();
        let ledgers: Vec<_> = ledgers
            .map(|total| Ledger::new(total, Arc::clone(&host)))
            .collect();
        let id = new_tenant_id();
        let unnamed = ledgers.iter().map(|ledger| {
            let latency = Arc::<LatencyHistograms>::default();
            Tenant::unnamed(id, "-".into(), Policy::default(), ledger, latency)
        });
        TenantRegistry {
            unnamed: unnamed.collect(),
            ledgers,
            host,
            known: RankedMutex::new(Rank::Sources, Unnamed::default()),
            state: RankedMutex::new(
                Rank::Registry,
                KnownGuests {
                    guests: Vec::new(),
                    unnamed: Some(Policy::default()),
                },
            ),
        }
    }

    /// Changes for how many tenants host memory is kept.
    pub(crate) fn set_places(&self, places: usize) {
        self.host.set_places(places);
    }

    /// Applies rules, also to guests that are connected. Such guests keep the memory that they use.
    /// Those that are named no longer get no further session, and stay until they disconnect or
    /// their sessions are ended; so do unnamed ones that are no longer served.
    ///
    /// # Errors
    /// [`QuotaError`]: nothing has changed.
    pub(crate) fn apply(&self, rules: Rules) -> Result<(), QuotaError> {
        for (device, ledger) in self.ledgers.iter().enumerate() {
            rules.check_memory(device, ledger.total())?;
        }
        let mut state = self.state.lock();
        for ledger in &self.ledgers {
            ledger.set_overcommit(rules.overcommit);
        }
        let mut known: BTreeMap<String, GuestTenants> = std::mem::take(&mut state.guests)
            .into_iter()
            .map(|guest| (guest.name, guest.tenants))
            .collect();
        for rule in rules.guests {
            let tenants = match known.remove(&rule.name) {
                Some(tenants) => {
                    for (device, tenant) in tenants.iter().enumerate() {
                        tenant.set_policy(rule.policy.on_device(device));
                    }
                    tenants
                }
                None => self.named(&rule.name, &rule.policy),
            };
            state.guests.push(NamedGuest {
                uids: rule.uids,
                cids: rule.cids,
                certificates: rule.certificates,
                name: rule.name,
                tenants,
            });
        }
        for removed in known.values().flatten() {
            removed.remove_name();
        }
        if let Some(policy) = &rules.unnamed {
            self.known.lock().set_policy(policy);
        }
        state.unnamed = rules.unnamed;
        Ok(())
    }

    /// A guest that the configuration names, on each device.
    fn named(&self, name: &str, policy: &Policy) -> GuestTenants {
        let id = new_tenant_id();
        let ledgers = self.ledgers.iter().enumerate();
        ledgers
            .map(|(device, ledger)| Tenant::named(id, name, policy.on_device(device), ledger))
            .collect()
    }

    /// The tenants of a guest that has connected to a listener of guest `owner`, or to a listener
    /// for all guests. `debt` says how much time a tenant owes, if the scheduler has something to
    /// remember of it: an unnamed guest that comes again meanwhile is the same tenant.
    ///
    /// # Errors
    /// [`AdmissionError`] says which rule rejects the guest.
    pub(crate) fn admit(
        &self,
        owner: Option<&str>,
        peer: &Peer,
        debt: impl Fn(TenantId) -> Option<Duration>,
    ) -> Result<GuestTenants, AdmissionError> {
        let state = self.state.lock();
        let guest = state.guests.iter().find(|guest| match owner {
            Some(name) => guest.name == name,
            None => guest.matches(peer),
        });
        // Every machine can reach a TCP listener: a guest with certificates has to present one
        // there.
        if let (Some(guest), Some(name), LinkKind::Tcp) = (guest, owner, peer.link)
            && !guest.certificates.is_empty()
            && !guest.is_identified_by(peer.certificate.as_ref())
        {
            let name = name.to_owned();
            return Err(match peer.certificate.clone() {
                Some(presented) => AdmissionError::WrongCertificate { name, presented },
                None => AdmissionError::NoCertificate { name },
            });
        }
        let tenants = match (guest, owner, &state.unnamed) {
            (Some(guest), _, _) => guest.tenants.clone(),
            (None, Some(name), _) => return Err(AdmissionError::Removed { name: name.into() }),
            (None, None, None) => return Err(AdmissionError::Unnamed),
            (None, None, Some(policy)) => self.unnamed_tenants(peer, policy, debt),
        };
        if let Some(tenant) = tenants.first() {
            let allowed = tenant.policy().links;
            if !allowed.contains(&peer.link) {
                return Err(AdmissionError::Link {
                    name: tenant.name().into(),
                    link: peer.link,
                    allowed,
                });
            }
        }
        Ok(tenants)
    }

    /// The tenants of an unnamed guest: the same for all programs of a source, so that a guest gets
    /// no second weight and quota by connecting again, and stays in debt.
    fn unnamed_tenants(
        &self,
        peer: &Peer,
        policy: &Policy,
        debt: impl Fn(TenantId) -> Option<Duration>,
    ) -> GuestTenants {
        let new = |name: String| -> GuestTenants {
            let id = new_tenant_id();
            let places = self.ledgers.iter().zip(&self.unnamed);
            let tenants = places.map(|(ledger, all)| {
                let latency = Arc::clone(&all.latency);
                Tenant::unnamed(id, name.clone(), policy.clone(), ledger, latency)
            });
            tenants.collect()
        };
        let mut known = self.known.lock();
        known.forget(debt);
        let Some(source) = peer.source() else {
            let tenants = new(peer.link.to_string());
            known.others.extend(tenants.iter().map(Arc::downgrade));
            return tenants;
        };
        let tenants = known.by_source.entry(source);
        let tenants = tenants.or_insert_with_key(|source| new(source.clone()));
        tenants.clone()
    }

    /// Bytes of memory of the device that has least among `devices`, or among all if none is named:
    /// a quota holds on each.
    pub(crate) fn total(&self, devices: &[usize]) -> u64 {
        let ledgers = self.ledgers.iter().enumerate();
        let named = ledgers.filter(|&(device, _)| permits(devices, device));
        named
            .map(|(_, ledger)| ledger.total())
            .min()
            .unwrap_or_default()
    }

    /// Limits of each unnamed guest.
    pub(crate) fn unnamed_policy(&self) -> Policy {
        let state = self.state.lock();
        state.unnamed.clone().unwrap_or_default()
    }

    /// The guests with names, sorted by name, and one that stands for all other guests.
    pub(crate) fn tenants(&self) -> (Vec<GuestTenants>, &GuestTenants) {
        let state = self.state.lock();
        let mut named: Vec<_> = { state.guests.iter() }
            .map(|guest| (guest.name.clone(), guest.tenants.clone()))
            .collect();
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        let named = named.into_iter().map(|(_, tenants)| tenants);
        (named.collect(), &self.unnamed)
    }

    /// The same on the first device that each guest may use, which has the name and the limits of
    /// the guest.
    pub(crate) fn first_tenants(&self) -> (Vec<Arc<Tenant>>, Arc<Tenant>) {
        let (named, unnamed) = self.tenants();
        let first = |tenants: &GuestTenants| Arc::clone(on_first_device(tenants));
        (named.iter().map(first).collect(), first(unnamed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::Process;
    use crate::sched::Scheduler;

    fn user(uid: u32) -> Peer {
        Peer {
            process: Some(Process {
                pid: 1,
                uid,
                program: None,
            }),
            ..Peer::new("test".into(), LinkKind::Unix)
        }
    }

    #[test]
    fn unnamed_guest_that_comes_again_still_owes_what_it_has_worked() {
        let (registry, scheduler) = (
            TenantRegistry::new([100], HostMemory::new(0, 1)),
            Scheduler::new(true),
        );
        let admit = |uid| {
            let debt = |tenant| scheduler.debt(tenant);
            let admitted = registry.admit(None, &user(uid), debt);
            admitted.expect("is admitted").remove(0)
        };
        let work = |tenant: &Tenant, took| {
            let paid = scheduler.work_outside(tenant.id(), tenant.entitlement(), took);
            scheduler.pause(tenant.id(), paid)
        };
        let (hour, moment) = (Duration::from_secs(3600), Duration::from_nanos(1));
        let other = admit(2);
        let guest = admit(1);
        let first = guest.id();
        let contend = || work(&other, moment);
        let _ = contend();
        assert!(work(&guest, 1000 * hour).is_some(), "it is to pause");
        drop(guest);
        for _ in 0..3 {
            let _ = contend();
            let guest = admit(1);
            assert_eq!(guest.id(), first);
            let left = work(&guest, moment).expect("it is still to pause");
            assert!(left > hour, "{left:?}");
        }
        // Alone, it owes nothing any more, and is forgotten.
        drop(other);
        std::thread::sleep(Duration::from_millis(60));
        assert_eq!(work(&admit(1), moment), None);
        std::thread::sleep(Duration::from_millis(60));
        assert_ne!(admit(1).id(), first);
    }

    #[test]
    fn the_number_of_guests_that_are_kept_for_their_debts_is_limited() {
        let registry = TenantRegistry::new([100], HostMemory::new(0, 1));
        let owed = |tenant: TenantId| Some(Duration::from_secs(tenant.0));
        let admit = |uid| {
            let admitted = registry.admit(None, &user(uid), owed);
            admitted.expect("is admitted").remove(0)
        };
        let connected = admit(0);
        let ids: Vec<TenantId> = (1..1000).map(|uid| admit(uid).id()).collect();
        // One is connected, and one has come after the others were counted.
        assert_eq!(registry.known.lock().by_source.len(), MAX_DEBTORS + 2);
        assert_eq!(admit(0).id(), connected.id());
        assert_eq!(admit(999).id(), ids[998], "it owes most");
        assert_ne!(admit(1).id(), ids[0], "it owed least");
        // Those that owe nothing are forgotten.
        let tenant = registry.admit(None, &user(1000), |_| None);
        assert_eq!(registry.known.lock().by_source.len(), 2);
        drop((tenant, connected));
    }
}
