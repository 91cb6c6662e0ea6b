//! The guests that the configuration names, and which of them somebody who comes in is.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};

use crate::identity::CertificateRule;
use crate::server::Peer;
use crate::tenant::{Ledger, LinkKind, Measures, Policy, Tenant};

/// A guest that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestRule {
    /// What it is called.
    pub name: String,
    /// Users of this machine that are this guest, on a socket that is nobody's own.
    pub uids: Vec<u32>,
    /// Virtual machines that are this guest, by their vsock number.
    pub cids: Vec<u32>,
    /// Certificates whose owners are this guest, over TCP.
    pub certificates: Vec<CertificateRule>,
    /// What it may use.
    pub policy: Policy,
}

/// Who may come, and what for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Guests with names.
    pub guests: Vec<GuestRule>,
    /// What each other guest may use; `None`: no other comes in.
    pub unnamed: Option<Policy>,
    /// Whether quotas may promise more memory than there is.
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

/// Quotas promise more than there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the guests' quotas are {promised} bytes in all, the engine has {total}: lower some, or allow it with overcommit = true"
)]
pub struct TooMuchPromised {
    /// Sum of the quotas.
    pub promised: u64,
    /// Memory of the engine.
    pub total: u64,
}

impl Rules {
    /// Whether an engine with `total` bytes can keep what the quotas promise.
    pub fn check_memory(&self, total: u64) -> Result<(), TooMuchPromised> {
        let quotas = self.guests.iter().filter_map(|guest| guest.policy.memory);
        let promised = quotas.fold(0u64, u64::saturating_add);
        match self.overcommit || promised <= total {
            true => Ok(()),
            false => Err(TooMuchPromised { promised, total }),
        }
    }
}

/// The tenants of one engine.
#[derive(Debug)]
pub(crate) struct Roster {
    ledger: Arc<Ledger>,
    state: RwLock<State>,
    /// Measures of all guests without a name.
    unnamed: Arc<Tenant>,
}

#[derive(Debug)]
struct State {
    rules: Rules,
    tenants: BTreeMap<String, Arc<Tenant>>,
}

impl Roster {
    pub(crate) fn new(total: u64) -> Roster {
        let ledger = Ledger::new(total);
        let measures = Arc::<Measures>::default();
        Roster {
            unnamed: Tenant::unnamed("-".into(), Policy::default(), &ledger, measures),
            ledger,
            state: RwLock::new(State {
                rules: Rules::default(),
                tenants: BTreeMap::new(),
            }),
        }
    }

    /// Has these rules hold from now on. Guests that are here keep what they have; those that are no longer named stay
    /// until they go.
    pub(crate) fn apply(&self, rules: Rules) -> Result<(), TooMuchPromised> {
        rules.check_memory(self.ledger.total())?;
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        self.ledger.set_overcommit(rules.overcommit);
        let mut tenants = BTreeMap::new();
        for guest in &rules.guests {
            let tenant = match state.tenants.remove(&guest.name) {
                Some(tenant) => {
                    tenant.set_policy(guest.policy.clone());
                    tenant
                }
                None => Tenant::named(&guest.name, guest.policy.clone(), &self.ledger),
            };
            tenants.insert(guest.name.clone(), tenant);
        }
        for gone in state.tenants.values() {
            gone.unname();
        }
        *state = State { rules, tenants };
        Ok(())
    }

    /// The guest that somebody is who came in through a door of `guest`'s own, or through one for all.
    pub(crate) fn admit(&self, guest: Option<&str>, peer: &Peer) -> Result<Arc<Tenant>, String> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let uid = peer.process.as_ref().map(|process| process.uid);
        let has_shown = |rule: &GuestRule| {
            let shown = peer.certificate.as_ref();
            shown.is_some_and(|shown| rule.certificates.iter().any(|rule| rule.fits(shown)))
        };
        let is_it = |rule: &&GuestRule| match guest {
            Some(name) => rule.name == name,
            None => {
                uid.is_some_and(|uid| rule.uids.contains(&uid))
                    || peer.machine.is_some_and(|cid| rule.cids.contains(&cid))
                    || has_shown(rule)
            }
        };
        let rule = state.rules.guests.iter().find(is_it);
        // A door over TCP is anybody's to knock at: a guest that is known by certificates has to show one there.
        if let (Some(rule), Some(name), LinkKind::Tcp) = (rule, guest, peer.link)
            && !rule.certificates.is_empty()
            && !has_shown(rule)
        {
            return Err(match &peer.certificate {
                Some(shown) => format!("guest {name} has other certificates than {shown}"),
                None => format!("guest {name} is known by its certificate, and this link has none"),
            });
        }
        let named = rule.and_then(|rule| state.tenants.get(&rule.name));
        let (tenant, policy) = match (named, guest, &state.rules.unnamed) {
            (Some(tenant), _, _) => (Arc::clone(tenant), tenant.policy()),
            (None, Some(name), _) => {
                return Err(format!("its configuration names no guest {name} any more"));
            }
            (None, None, None) => {
                return Err("its configuration names no such guest, and lets in no others".into());
            }
            (None, None, Some(policy)) => {
                let measures = Arc::clone(&self.unnamed.measures);
                let name = match &peer.process {
                    Some(process) => format!("uid:{}", process.uid),
                    None => peer.link.to_string(),
                };
                let tenant = Tenant::unnamed(name, policy.clone(), &self.ledger, measures);
                (tenant, policy.clone())
            }
        };
        if !policy.links.contains(&peer.link) {
            let links: Vec<&str> = policy.links.iter().map(|link| link.name()).collect();
            return Err(format!(
                "guest {} may not come over {}, only over {}",
                tenant.name(),
                peer.link,
                links.join(", ")
            ));
        }
        Ok(tenant)
    }

    /// What a guest without a name may use.
    pub(crate) fn unnamed_policy(&self) -> Policy {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.rules.unnamed.clone().unwrap_or_default()
    }

    /// The guests with names, and one that stands for all others.
    pub(crate) fn tenants(&self) -> (Vec<Arc<Tenant>>, Arc<Tenant>) {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let named = state.tenants.values().cloned().collect();
        (named, Arc::clone(&self.unnamed))
    }
}
