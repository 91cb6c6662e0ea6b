//! Guests as the operator of the host knows them: by a name, with what they may use and what they do use.
//!
//! A tenant may be here with several sessions, one for each of its programs. They share its memory and its weight.
//! A guest that no configuration names is a tenant of its own with each session.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vgpu_engine::{Engine, EngineError, MemoryInfo};

use crate::histogram::Histogram;
use crate::sched::{Party, Terms};
use crate::stats::Stats;

/// A kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LinkKind {
    /// The unix socket of a program or a container on this machine.
    Unix,
    /// A PCI device of a virtual machine.
    Pci,
    /// A virtual machine through vsock.
    Vsock,
    /// Another machine.
    Tcp,
}

impl LinkKind {
    /// All of them.
    pub const ALL: [LinkKind; 4] = [
        LinkKind::Unix,
        LinkKind::Pci,
        LinkKind::Vsock,
        LinkKind::Tcp,
    ];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            LinkKind::Unix => "unix",
            LinkKind::Pci => "pci",
            LinkKind::Vsock => "vsock",
            LinkKind::Tcp => "tcp",
        }
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for LinkKind {
    type Err = String;

    fn from_str(text: &str) -> Result<LinkKind, String> {
        let found = LinkKind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| {
            format!("no link is called {text:?}: there are unix, pci, vsock and tcp")
        })
    }
}

/// What a guest may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Bytes of device memory; `None`: what nobody has reserved.
    pub memory: Option<u64>,
    /// Its part of the device's time, against the weights of the others.
    pub weight: u32,
    /// Graphs of all its programs that may be under way at once. More wait for their turn.
    pub graphs_in_flight: usize,
    /// The links it may come over.
    pub links: Vec<LinkKind>,
}

impl Policy {
    /// The largest weight there is.
    pub const MAX_WEIGHT: u32 = 1000;
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            memory: None,
            weight: 1,
            graphs_in_flight: 8,
            links: LinkKind::ALL.into(),
        }
    }
}

/// The memory of an engine, and who may have how much of it.
///
/// What a named guest's quota promises is set aside for it, unless the operator allows overcommitment. Everybody
/// else shares the rest: what the engine has free beyond the promises, by the engine's own figure. Guests are charged for
/// their buffers in full, weights that they share included.
#[derive(Debug)]
pub(crate) struct Ledger {
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    total: u64,
    overcommit: bool,
    accounts: BTreeMap<u64, Account>,
    /// Charged, but not yet taken from the engine.
    pending: u64,
}

#[derive(Debug, Clone, Copy)]
struct Account {
    is_named: bool,
    quota: Option<u64>,
    used: u64,
}

impl Books {
    /// What is set aside for an account.
    fn reserved(&self, account: &Account) -> Option<u64> {
        let quota = account
            .quota
            .filter(|_| account.is_named && !self.overcommit)?;
        // After its quota was lowered it may still have more than that.
        Some(quota.max(account.used))
    }

    /// What is left for the accounts for which nothing is set aside, of an engine with so much free.
    fn commons(&self, free: u64) -> MemoryInfo {
        let (mut set_aside, mut promised) = (0u64, 0u64);
        for account in self.accounts.values() {
            if let Some(reserved) = self.reserved(account) {
                set_aside = set_aside.saturating_add(reserved);
                promised = promised.saturating_add(reserved - account.used);
            }
        }
        MemoryInfo {
            total: self.total.saturating_sub(set_aside),
            free: free.saturating_sub(promised).saturating_sub(self.pending),
        }
    }

    /// What `account` may have in all, and still.
    fn share(&self, account: &Account, free: u64) -> MemoryInfo {
        let quota = account.quota.map(|total| MemoryInfo {
            total,
            free: total.saturating_sub(account.used),
        });
        if let Some(quota) = quota.filter(|_| self.reserved(account).is_some()) {
            return quota;
        }
        let commons = self.commons(free);
        let quota = quota.unwrap_or(commons);
        MemoryInfo {
            total: quota.total.min(commons.total),
            free: quota.free.min(commons.free),
        }
    }
}

impl Ledger {
    pub(crate) fn new(total: u64) -> Arc<Ledger> {
        Arc::new(Ledger {
            books: Mutex::new(Books {
                total,
                overcommit: false,
                accounts: BTreeMap::new(),
                pending: 0,
            }),
        })
    }

    pub(crate) fn total(&self) -> u64 {
        self.books().total
    }

    pub(crate) fn set_overcommit(&self, overcommit: bool) {
        self.books().overcommit = overcommit;
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Numbers of tenants, for the life of the process.
static LAST_TENANT: AtomicU64 = AtomicU64::new(0);

/// A guest, with what it may use and what it has used.
#[derive(Debug)]
pub(crate) struct Tenant {
    id: u64,
    name: String,
    is_named: AtomicBool,
    policy: Mutex<Policy>,
    ledger: Arc<Ledger>,
    /// Sums over the sessions that have ended.
    ended: Mutex<Stats>,
    pub(crate) measures: Arc<Measures>,
}

/// What is measured for a guest while it is served.
#[derive(Debug, Default)]
pub(crate) struct Measures {
    /// How long each graph waited for the device.
    pub(crate) queued: Histogram,
    /// How long each graph had the device.
    pub(crate) ran: Histogram,
}

impl Tenant {
    /// A guest that the configuration names.
    pub(crate) fn named(name: &str, policy: Policy, ledger: &Arc<Ledger>) -> Arc<Tenant> {
        Tenant::new(name.into(), true, policy, ledger, Arc::default())
    }

    /// A guest that it does not name. `measures` are those of all such guests.
    pub(crate) fn unnamed(
        name: String,
        policy: Policy,
        ledger: &Arc<Ledger>,
        measures: Arc<Measures>,
    ) -> Arc<Tenant> {
        Tenant::new(name, false, policy, ledger, measures)
    }

    fn new(
        name: String,
        is_named: bool,
        policy: Policy,
        ledger: &Arc<Ledger>,
        measures: Arc<Measures>,
    ) -> Arc<Tenant> {
        let id = LAST_TENANT.fetch_add(1, Ordering::Relaxed) + 1;
        let account = Account {
            is_named,
            quota: policy.memory,
            used: 0,
        };
        ledger.books().accounts.insert(id, account);
        Arc::new(Tenant {
            id,
            name,
            is_named: AtomicBool::new(is_named),
            policy: Mutex::new(policy),
            ledger: Arc::clone(ledger),
            ended: Mutex::default(),
            measures,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the configuration names it.
    pub(crate) fn is_named(&self) -> bool {
        self.is_named.load(Ordering::Relaxed)
    }

    pub(crate) fn policy(&self) -> Policy {
        self.lock().clone()
    }

    /// What the scheduler knows it by.
    pub(crate) fn party(&self) -> Party {
        Party(self.id)
    }

    pub(crate) fn terms(&self) -> Terms {
        let policy = self.lock();
        Terms {
            weight: policy.weight,
            in_flight: policy.graphs_in_flight,
        }
    }

    /// Changes what it may use from now on. What it has it keeps.
    pub(crate) fn set_policy(&self, policy: Policy) {
        if let Some(account) = self.ledger.books().accounts.get_mut(&self.id) {
            account.quota = policy.memory;
        }
        *self.lock() = policy;
    }

    /// The configuration names it no longer: nothing is set aside for it, and it counts with those without a name.
    pub(crate) fn unname(&self) {
        self.is_named.store(false, Ordering::Relaxed);
        if let Some(account) = self.ledger.books().accounts.get_mut(&self.id) {
            account.is_named = false;
        }
    }

    /// What the guest sees as the memory of its device.
    pub(crate) fn memory(&self, engine: &dyn Engine) -> MemoryInfo {
        let device = engine.memory();
        let share = self.share(device.free);
        MemoryInfo {
            total: share.total.min(device.total),
            free: share.free.min(device.free),
        }
    }

    /// Bytes of device memory that it has.
    #[cfg(test)]
    fn used(&self) -> u64 {
        let books = self.ledger.books();
        books.accounts.get(&self.id).map_or(0, |a| a.used)
    }

    /// Takes `size` bytes of what the guest may use, ahead of the engine. They are given back when the charge is
    /// dropped.
    pub(crate) fn charge(
        self: &Arc<Tenant>,
        size: u64,
        engine: &dyn Engine,
    ) -> Result<Charge, EngineError> {
        self.take(size, || engine.memory().free)
    }

    /// The same with `free` for what the engine has free, which is asked when nobody else can take of it.
    fn take(
        self: &Arc<Tenant>,
        size: u64,
        free: impl FnOnce() -> u64,
    ) -> Result<Charge, EngineError> {
        let mut books = self.ledger.books();
        let account = books.accounts.get(&self.id).copied();
        let free = free();
        let share = account.map_or_else(MemoryInfo::default, |a| books.share(&a, free));
        if size > share.free {
            return Err(EngineError::OutOfMemory {
                wanted: size,
                free: share.free,
                total: share.total,
            });
        }
        if let Some(account) = books.accounts.get_mut(&self.id) {
            account.used += size;
        }
        books.pending += size;
        Ok(Charge {
            tenant: Arc::clone(self),
            size,
            is_pending: true,
        })
    }

    /// Adds what a session has done in its life.
    pub(crate) fn add_ended(&self, stats: &Stats) {
        self.ended
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .add(stats);
    }

    /// Sums over the sessions that have ended.
    pub(crate) fn ended(&self) -> Stats {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn share(&self, free: u64) -> MemoryInfo {
        let books = self.ledger.books();
        let account = books.accounts.get(&self.id);
        account.map_or_else(MemoryInfo::default, |account| books.share(account, free))
    }

    fn lock(&self) -> MutexGuard<'_, Policy> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.ledger.books().accounts.remove(&self.id);
    }
}

/// Memory that a tenant has taken.
#[derive(Debug)]
pub(crate) struct Charge {
    tenant: Arc<Tenant>,
    size: u64,
    /// Whether the engine still counts it as free.
    is_pending: bool,
}

impl Charge {
    /// The engine has given the memory.
    pub(crate) fn settle(&mut self) {
        if std::mem::take(&mut self.is_pending) {
            self.tenant.ledger.books().pending -= self.size;
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.settle();
        let mut books = self.tenant.ledger.books();
        if let Some(account) = books.accounts.get_mut(&self.tenant.id) {
            account.used -= self.size;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(memory: impl Into<Option<u64>>) -> Policy {
        Policy {
            memory: memory.into(),
            ..Policy::default()
        }
    }

    fn stranger(ledger: &Arc<Ledger>, memory: impl Into<Option<u64>>) -> Arc<Tenant> {
        Tenant::unnamed("-".into(), quota(memory), ledger, Arc::default())
    }

    /// Total and free, on an engine that has so much free.
    fn figures(tenant: &Tenant, free: u64) -> (u64, u64) {
        let MemoryInfo { total, free } = tenant.share(free);
        (total, free)
    }

    /// Memory that the engine has given: its free figure is the caller's to lower.
    fn take(tenant: &Arc<Tenant>, size: u64, free: u64) -> Result<Charge, EngineError> {
        let mut charge = tenant.take(size, || free)?;
        charge.settle();
        Ok(charge)
    }

    #[test]
    fn a_quota_is_set_aside_and_the_rest_is_everybodys() {
        let ledger = Ledger::new(100);
        let named = Tenant::named("a", quota(40), &ledger);
        let (one, two) = (stranger(&ledger, None), stranger(&ledger, 50));
        assert_eq!(figures(&named, 100), (40, 40));
        assert_eq!(figures(&one, 100), (60, 60));
        assert_eq!(figures(&two, 100), (50, 50));

        let _much = take(&one, 60, 100).unwrap();
        assert_eq!(
            figures(&named, 40),
            (40, 40),
            "somebody else has touched it"
        );
        assert_eq!(figures(&two, 40), (50, 0));
        let error = two.take(1, || 40).unwrap_err();
        assert_eq!(
            error.to_string(),
            "out of memory: 1 bytes wanted, 0 of 50 free"
        );
        let mine = take(&named, 40, 40).unwrap();
        assert!(take(&named, 1, 0).is_err());
        drop(mine);
        assert_eq!((figures(&named, 40), named.used()), ((40, 40), 0));
    }

    #[test]
    fn what_is_charged_and_not_yet_taken_is_nobody_elses() {
        let ledger = Ledger::new(100);
        let (one, two) = (stranger(&ledger, None), stranger(&ledger, None));
        let mut charge = one.take(70, || 100).unwrap();
        assert!(two.take(31, || 100).is_err(), "both would get it");
        charge.settle();
        assert_eq!(figures(&two, 30), (100, 30));
        drop(charge);
        drop(one.take(100, || 100).unwrap());
        assert_eq!(figures(&two, 100), (100, 100));
    }

    #[test]
    fn what_is_common_follows_what_the_engine_says_is_free() {
        let ledger = Ledger::new(100);
        let guests: Vec<_> = (0..3).map(|_| stranger(&ledger, None)).collect();
        let mut charges = Vec::new();
        for guest in &guests {
            charges.push(take(guest, 60, if charges.is_empty() { 100 } else { 40 }));
        }
        assert!(charges[0].is_ok() && charges[1].is_err());
        charges.clear();
        let first = take(&guests[0], 30, 100).unwrap();
        let second = take(&guests[1], 30, 70).unwrap();
        // An engine that holds both in one place has 70 left, though 60 are charged.
        assert_eq!(figures(&guests[2], 70), (100, 70));
        drop((first, second));
    }

    #[test]
    fn with_overcommitment_nothing_is_set_aside() {
        let ledger = Ledger::new(100);
        ledger.set_overcommit(true);
        let named = Tenant::named("a", quota(80), &ledger);
        let other = Tenant::named("b", quota(80), &ledger);
        let _much = take(&other, 70, 100).unwrap();
        assert_eq!(figures(&named, 30), (80, 30));
        assert!(take(&named, 31, 30).is_err());
        take(&named, 30, 30).unwrap();
    }

    #[test]
    fn a_quota_that_shrinks_below_what_is_used_takes_nothing_away() {
        let ledger = Ledger::new(100);
        let named = Tenant::named("a", quota(60), &ledger);
        let stranger = stranger(&ledger, None);
        let charge = take(&named, 50, 100).unwrap();
        named.set_policy(quota(20));
        assert_eq!(figures(&named, 50), (20, 0));
        assert_eq!(figures(&stranger, 50), (50, 50), "what is used is not free");
        drop(charge);
        assert_eq!(figures(&named, 100), (20, 20));
        assert_eq!(figures(&stranger, 100), (80, 80));
        drop(named);
        assert_eq!(figures(&stranger, 100), (100, 100));
    }
}
