//! The tenants of one engine: which guest is which tenant, by the rules of the configuration.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use serde::{Deserialize, Serialize};

use crate::identity::{CertificateRule, Identity};
use crate::ledger::Ledger;
use crate::lock::{Rank, RankedMutex};
use crate::peer::Peer;
use crate::policy::{LinkKind, Policy};
use crate::tenant::{LatencyHistograms, Tenant};

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
    /// The connected unnamed guests.
    connected: RankedMutex<Unnamed>,
    /// Stands for all unnamed guests, in statistics.
    unnamed: Arc<Tenant>,
}

#[derive(Debug, Default)]
struct KnownGuests {
    guests: Vec<NamedGuest>,
    /// Limits of each unnamed guest.
    unnamed: Option<Policy>,
}

/// The unnamed guests that are connected.
#[derive(Debug, Default)]
struct Unnamed {
    /// By what distinguishes them ([`Peer::source`]).
    by_source: BTreeMap<String, Weak<Tenant>>,
    /// Those that nothing distinguishes.
    others: Vec<Weak<Tenant>>,
}

impl Unnamed {
    /// Forgets those that have disconnected.
    fn forget(&mut self) {
        let is_connected = |tenant: &Weak<Tenant>| tenant.strong_count() > 0;
        self.by_source.retain(|_, tenant| is_connected(tenant));
        self.others.retain(is_connected);
    }

    fn set_policy(&self, policy: &Policy) {
        let all = self.by_source.values().chain(&self.others);
        for tenant in all.filter_map(Weak::upgrade) {
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
            connected: RankedMutex::new(Rank::Sources, Unnamed::default()),
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
            self.connected.lock().set_policy(policy);
        }
        state.unnamed = rules.unnamed;
        Ok(())
    }

    /// The tenant of a guest that has connected to a listener of guest `owner`, or to a listener
    /// for all guests.
    ///
    /// # Errors
    /// [`AdmissionError`] says which rule rejects the guest.
    pub(crate) fn admit(
        &self,
        owner: Option<&str>,
        peer: &Peer,
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
            (None, None, Some(policy)) => self.unnamed_tenant(peer, policy),
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
    /// no second weight and quota by connecting again.
    fn unnamed_tenant(&self, peer: &Peer, policy: &Policy) -> Arc<Tenant> {
        let new = |name| {
            let latency = Arc::clone(&self.unnamed.latency);
            Tenant::unnamed(name, policy.clone(), &self.ledger, latency)
        };
        let mut connected = self.connected.lock();
        connected.forget();
        let Some(source) = peer.source() else {
            let tenant = new(peer.link.to_string());
            connected.others.push(Arc::downgrade(&tenant));
            return tenant;
        };
        let known = connected.by_source.get(&source).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let tenant = new(source.clone());
            let by_source = &mut connected.by_source;
            by_source.insert(source, Arc::downgrade(&tenant));
            tenant
        })
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
