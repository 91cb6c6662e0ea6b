//! The tenants of one engine: which guest is which tenant, by the rules of the configuration.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::identity::{CertificateRule, Identity};
use crate::ledger::Ledger;
use crate::lock::{Rank, RankedMutex};
use crate::peer::Peer;
use crate::policy::{LinkKind, Policy};
use crate::sched::TenantId;
use crate::tenant::{LatencyHistograms, Tenant};

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

/// The sum of the quotas exceeds the engine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the quotas of the guests add up to {promised} bytes, the engine has {total}: lower a quota, \
     or set overcommit = true"
)]
pub struct QuotaError {
    /// Sum of the quotas in bytes.
    pub promised: u64,
    /// Memory of the engine in bytes.
    pub total: u64,
}

/// Why a guest is not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum AdmissionError {
    #[error("guest {name} is identified by other certificates than {presented}")]
    WrongCertificate { name: String, presented: Identity },
    #[error("guest {name} is identified by a certificate, and this link has none")]
    NoCertificate { name: String },
    #[error("the configuration no longer names guest {name}")]
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
    /// Checks that an engine with `total` bytes of memory can keep the quotas.
    ///
    /// # Errors
    /// [`QuotaError`] if the quotas exceed the memory and overcommitment is not allowed.
    pub fn check_memory(&self, total: u64) -> Result<(), QuotaError> {
        let quotas = self.guests.iter().filter_map(|guest| guest.policy.memory);
        let promised = quotas.fold(0u64, u64::saturating_add);
        match self.overcommit || promised <= total {
            true => Ok(()),
            false => Err(QuotaError { promised, total }),
        }
    }
}

/// The tenants of one engine.
#[derive(Debug)]
pub(crate) struct TenantRegistry {
    ledger: Arc<Ledger>,
    state: RankedMutex<KnownGuests>,
    /// The unnamed guests that are connected or owe time.
    known: RankedMutex<Unnamed>,
    /// Stands for all unnamed guests, in statistics.
    unnamed: Arc<Tenant>,
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
    by_source: BTreeMap<String, Arc<Tenant>>,
    /// Those that nothing distinguishes, while they are connected.
    others: Vec<Weak<Tenant>>,
}

impl Unnamed {
    /// Forgets those that have disconnected and owe nothing, and those that owe least if more than
    /// [`MAX_DEBTORS`] have disconnected. `debt`: how much time a tenant owes.
    fn forget(&mut self, debt: impl Fn(TenantId) -> Option<Duration>) {
        self.others.retain(|tenant| tenant.strong_count() > 0);
        let mut debts = Vec::new();
        self.by_source.retain(|source, tenant| {
            if Arc::strong_count(tenant) > 1 {
                return true;
            }
            let owed = debt(tenant.id());
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
        for tenant in self.by_source.values().cloned().chain(others) {
            tenant.set_policy(policy.clone());
        }
    }
}

/// A guest of the configuration, with its tenant. The tenant's account has the limits.
#[derive(Debug)]
struct NamedGuest {
    uids: Vec<u32>,
    cids: Vec<u32>,
    certificates: Vec<CertificateRule>,
    tenant: Arc<Tenant>,
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
    /// A registry for an engine with `total` bytes of memory. Every guest is served, until rules
    /// are applied.
    pub(crate) fn new(total: u64) -> TenantRegistry {
        let ledger = Ledger::new(total);
        let latency = Arc::<LatencyHistograms>::default();
        TenantRegistry {
            unnamed: Tenant::unnamed("-".into(), Policy::default(), &ledger, latency),
            ledger,
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

    /// Applies rules, also to guests that are connected. Such guests keep the memory that they use;
    /// those that are named no longer stay until they disconnect, and so do unnamed ones that are
    /// no longer served.
    ///
    /// # Errors
    /// [`QuotaError`]: nothing has changed.
    pub(crate) fn apply(&self, rules: Rules) -> Result<(), QuotaError> {
        rules.check_memory(self.ledger.total())?;
        let mut state = self.state.lock();
        self.ledger.set_overcommit(rules.overcommit);
        let mut known: BTreeMap<String, Arc<Tenant>> = std::mem::take(&mut state.guests)
            .into_iter()
            .map(|guest| (guest.tenant.name().to_owned(), guest.tenant))
            .collect();
        for rule in rules.guests {
            let tenant = match known.remove(&rule.name) {
                Some(tenant) => {
                    tenant.set_policy(rule.policy);
                    tenant
                }
                None => Tenant::named(&rule.name, rule.policy, &self.ledger),
            };
            state.guests.push(NamedGuest {
                uids: rule.uids,
                cids: rule.cids,
                certificates: rule.certificates,
                tenant,
            });
        }
        for removed in known.values() {
            removed.remove_name();
        }
        if let Some(policy) = &rules.unnamed {
            self.known.lock().set_policy(policy);
        }
        state.unnamed = rules.unnamed;
        Ok(())
    }

    /// The tenant of a guest that has connected to a listener of guest `owner`, or to a listener
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
    ) -> Result<Arc<Tenant>, AdmissionError> {
        let state = self.state.lock();
        let guest = state.guests.iter().find(|guest| match owner {
            Some(name) => guest.tenant.name() == name,
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
        let tenant = match (guest, owner, &state.unnamed) {
            (Some(guest), _, _) => Arc::clone(&guest.tenant),
            (None, Some(name), _) => return Err(AdmissionError::Removed { name: name.into() }),
            (None, None, None) => return Err(AdmissionError::Unnamed),
            (None, None, Some(policy)) => self.unnamed_tenant(peer, policy, debt),
        };
        let allowed = tenant.policy().links;
        if !allowed.contains(&peer.link) {
            return Err(AdmissionError::Link {
                name: tenant.name().into(),
                link: peer.link,
                allowed,
            });
        }
        Ok(tenant)
    }

    /// The tenant of an unnamed guest: one for all programs of a source, so that a guest gets
    /// no second weight and quota by connecting again, and stays in debt.
    fn unnamed_tenant(
        &self,
        peer: &Peer,
        policy: &Policy,
        debt: impl Fn(TenantId) -> Option<Duration>,
    ) -> Arc<Tenant> {
        let new = |name| {
            let latency = Arc::clone(&self.unnamed.latency);
            Tenant::unnamed(name, policy.clone(), &self.ledger, latency)
        };
        let mut known = self.known.lock();
        known.forget(debt);
        let Some(source) = peer.source() else {
            let tenant = new(peer.link.to_string());
            known.others.push(Arc::downgrade(&tenant));
            return tenant;
        };
        let tenant = known.by_source.entry(source);
        Arc::clone(tenant.or_insert_with_key(|source| new(source.clone())))
    }

    /// Bytes of memory that the engine has.
    pub(crate) fn total(&self) -> u64 {
        self.ledger.total()
    }

    /// Limits of each unnamed guest.
    pub(crate) fn unnamed_policy(&self) -> Policy {
        let state = self.state.lock();
        state.unnamed.clone().unwrap_or_default()
    }

    /// The guests with names, sorted by name, and a tenant that stands for all other guests.
    pub(crate) fn tenants(&self) -> (Vec<Arc<Tenant>>, Arc<Tenant>) {
        let state = self.state.lock();
        let named = state.guests.iter().map(|guest| Arc::clone(&guest.tenant));
        let mut named: Vec<_> = named.collect();
        named.sort_by(|a, b| a.name().cmp(b.name()));
        (named, Arc::clone(&self.unnamed))
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
        let (registry, scheduler) = (TenantRegistry::new(100), Scheduler::default());
        let admit = |uid| {
            let debt = |tenant| scheduler.debt(tenant);
            registry.admit(None, &user(uid), debt).expect("is admitted")
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
        let registry = TenantRegistry::new(100);
        let owed = |tenant: TenantId| Some(Duration::from_secs(tenant.0));
        let admit = |uid| registry.admit(None, &user(uid), owed).expect("is admitted");
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
