//! A tenant: a guest as the operator knows it, with what it may use and what it has used.
//!
//! A tenant has one session for each of its programs; they share its quota and its weight. All
//! programs of a source that the configuration does not name, such as a user, are one tenant.
//!
//! On an executor with several devices a guest is one tenant on each, with the same number and the
//! same name: quota and weight hold for each device.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vgpu_engine::{CopyAccount, Engine, EngineError, MemoryInfo};

use crate::histogram::Histogram;
use crate::ledger::{Ledger, MemoryKind};
use crate::lock::{Rank, RankedMutex, expect_charging, expect_unlocked};
use crate::policy::Policy;
use crate::sched::{Entitlement, TenantId};
use crate::stats::Stats;

/// The number that [`new_tenant_id`] has returned last in this process.
static LAST_TENANT: AtomicU64 = AtomicU64::new(0);

/// A number that no guest of this process has had.
pub(crate) fn new_tenant_id() -> TenantId {
    TenantId(LAST_TENANT.fetch_add(1, Ordering::Relaxed) + 1)
}

/// A guest on one device, with its account and its statistics.
#[derive(Debug)]
pub(crate) struct Tenant {
    id: TenantId,
    name: String,
    /// Whether the configuration named the tenant when it was made.
    had_name: bool,
    ledger: Arc<Ledger>,
    /// Sums over the sessions that have ended.
    ended: RankedMutex<Stats>,
    pub(crate) latency: Arc<LatencyHistograms>,
}

/// How long the graphs of a tenant wait and run.
#[derive(Debug, Default)]
pub(crate) struct LatencyHistograms {
    /// How long each graph waited for the device.
    pub(crate) queued: Histogram,
    /// How long each graph had the device.
    pub(crate) ran: Histogram,
}

impl Tenant {
    /// A guest that the configuration names. `id`: its number, on all devices.
    pub(crate) fn named(
        id: TenantId,
        name: &str,
        policy: Policy,
        ledger: &Arc<Ledger>,
    ) -> Arc<Tenant> {
        Tenant::new(id, name.into(), true, policy, ledger, Arc::default())
    }

    /// A guest that the configuration does not name. `id`: its number, on all devices. `latency` is
    /// shared by all such guests.
    pub(crate) fn unnamed(
        id: TenantId,
        name: String,
        policy: Policy,
        ledger: &Arc<Ledger>,
        latency: Arc<LatencyHistograms>,
    ) -> Arc<Tenant> {
        Tenant::new(id, name, false, policy, ledger, latency)
    }

    fn new(
        id: TenantId,
        name: String,
        is_named: bool,
        policy: Policy,
        ledger: &Arc<Ledger>,
        latency: Arc<LatencyHistograms>,
    ) -> Arc<Tenant> {
        ledger.open(id, is_named, policy);
        Arc::new(Tenant {
            id,
            name,
            had_name: is_named,
            ledger: Arc::clone(ledger),
            ended: RankedMutex::new(Rank::Totals, Stats::default()),
            latency,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The tenant's number, by which the scheduler knows it.
    pub(crate) fn id(&self) -> TenantId {
        self.id
    }

    /// Whether the configuration names the tenant.
    pub(crate) fn is_named(&self) -> bool {
        self.ledger.is_named(self.id)
    }

    /// Whether the guest had a name and was removed: nothing is reserved for the tenant.
    pub(crate) fn is_removed(&self) -> bool {
        self.had_name && !self.is_named()
    }

    pub(crate) fn policy(&self) -> Policy {
        self.ledger.read_policy(self.id, Policy::clone)
    }

    /// What the scheduler grants the tenant.
    pub(crate) fn entitlement(&self) -> Entitlement {
        self.ledger.read_policy(self.id, |policy| Entitlement {
            weight: policy.weight,
            in_flight: policy.graphs_in_flight,
        })
    }

    /// Whether graphs of the tenant may run in a batch.
    pub(crate) fn may_batch(&self) -> bool {
        self.ledger.read_policy(self.id, |policy| policy.batch)
    }

    /// Changes the tenant's limits from now on. What it uses stays its own.
    pub(crate) fn set_policy(&self, policy: Policy) {
        self.ledger.set_policy(self.id, policy);
    }

    /// The configuration names the tenant no longer: it counts with the unnamed ones, and nothing
    /// is reserved for it.
    pub(crate) fn remove_name(&self) {
        self.ledger.remove_name(self.id);
    }

    /// What the guest sees as the memory of its device.
    pub(crate) fn memory(&self, engine: &dyn Engine) -> MemoryInfo {
        self.memory_of(engine.memory())
    }

    /// The same, for an engine that has reported `device`.
    pub(crate) fn memory_of(&self, device: MemoryInfo) -> MemoryInfo {
        let limits = self.ledger.limits(self.id, device.free);
        MemoryInfo {
            total: limits.total.min(device.total),
            free: limits.free.min(device.free),
        }
    }

    /// A number that grows when the memory that the engine has free changes by an allocation or a
    /// release of any tenant.
    pub(crate) fn memory_change_count(&self) -> u64 {
        self.ledger.change_count()
    }

    /// Charges `size` bytes to the tenant, before the engine allocates them. Dropping the charge
    /// gives them back.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] with the tenant's own figures.
    pub(crate) fn charge(
        self: &Arc<Tenant>,
        size: u64,
        engine: &dyn Engine,
    ) -> Result<Charge, EngineError> {
        self.charge_with(size, || {
            expect_unlocked("Engine::memory");
            engine.memory().free
        })
    }

    /// Charges `size` bytes of host memory to the tenant, before they are allocated, for as long as
    /// the charge lives. On an engine whose memory is that of the host, it is a part of the quota.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`], or on an engine with a memory of its own
    /// [`EngineError::OutOfHostMemory`], with the tenant's own figures, or
    /// [`EngineError::OutOfSharedHostMemory`].
    pub(crate) fn charge_host(
        self: &Arc<Tenant>,
        size: u64,
        engine: &dyn Engine,
    ) -> Result<Charge, EngineError> {
        if engine.is_host_memory() {
            // The engine reports these bytes as free for as long as they are charged.
            return self.charge(size, engine);
        }
        self.ledger.charge_host(self.id, size)?;
        Ok(Charge {
            tenant: Arc::clone(self),
            kind: MemoryKind::Host,
            size,
            is_pending: false,
        })
    }

    /// As [`charge`](Tenant::charge), for memory that the engine has allocated already, or that the
    /// sessions of the engine share.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] with the tenant's own figures.
    pub(crate) fn charge_allocated(
        self: &Arc<Tenant>,
        size: u64,
        engine: &dyn Engine,
    ) -> Result<Charge, EngineError> {
        let mut charge = self.charge(size, engine)?;
        charge.allocated();
        Ok(charge)
    }

    fn charge_with(
        self: &Arc<Tenant>,
        size: u64,
        engine_free: impl Fn() -> u64,
    ) -> Result<Charge, EngineError> {
        self.ledger.charge(self.id, size, engine_free)?;
        Ok(Charge {
            tenant: Arc::clone(self),
            kind: MemoryKind::Device,
            size,
            is_pending: true,
        })
    }

    /// What charges the tenant for copies that memory of `engine` makes.
    pub(crate) fn copy_account(
        self: &Arc<Tenant>,
        engine: &Arc<dyn Engine>,
    ) -> Arc<dyn CopyAccount> {
        Arc::new(CopiesOf {
            tenant: Arc::clone(self),
            engine: Arc::clone(engine),
        })
    }

    /// Adds what a session has done, when it ends.
    pub(crate) fn add_ended(&self, stats: &Stats) {
        self.ended.lock().add(stats);
    }

    /// Sums over the sessions that have ended.
    pub(crate) fn ended(&self) -> Stats {
        *self.ended.lock()
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.ledger.close(self.id);
    }
}

/// Charges a tenant for copies of weights.
struct CopiesOf {
    tenant: Arc<Tenant>,
    engine: Arc<dyn Engine>,
}

impl CopyAccount for CopiesOf {
    fn charge(
        &self,
        bytes: u64,
        allocate: &mut dyn FnMut() -> Result<(), EngineError>,
    ) -> Result<Box<dyn Any + Send + Sync>, EngineError> {
        let mut charge = self.tenant.charge_with(bytes, || {
            expect_charging("Engine::memory");
            self.engine.memory().free
        })?;
        allocate()?;
        charge.allocated();
        Ok(Box::new(charge))
    }
}

/// Memory that is charged to a tenant.
#[derive(Debug)]
pub(crate) struct Charge {
    tenant: Arc<Tenant>,
    kind: MemoryKind,
    size: u64,
    /// Whether the engine still reports the memory as free.
    is_pending: bool,
}

impl Charge {
    /// The charged bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The engine has allocated the memory.
    pub(crate) fn allocated(&mut self) {
        if std::mem::take(&mut self.is_pending) {
            self.tenant.ledger.allocated(self.size);
        }
    }

    /// Gives back all but `size` bytes, if more are charged.
    pub(crate) fn shrink(&mut self, size: u64) {
        let less = self.size.saturating_sub(size);
        self.size -= less;
        let ledger = &self.tenant.ledger;
        if self.is_pending {
            ledger.allocated(less);
        }
        ledger.release(self.tenant.id, self.kind, less);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.allocated();
        let Charge { tenant, kind, .. } = self;
        tenant.ledger.release(tenant.id, *kind, self.size);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::host_memory::HostMemory;
    use crate::ledger::HOST_MEMORY;

    fn ledger(total: u64) -> Arc<Ledger> {
        Ledger::new(total, HostMemory::new(u64::MAX, 1))
    }

    fn quota(memory: impl Into<Option<u64>>) -> Policy {
        Policy {
            memory: memory.into(),
            ..Policy::default()
        }
    }

    fn unnamed(ledger: &Arc<Ledger>, memory: impl Into<Option<u64>>) -> Arc<Tenant> {
        let id = new_tenant_id();
        Tenant::unnamed(id, "-".into(), quota(memory), ledger, Arc::default())
    }

    /// Total and free, on an engine that has so much free.
    fn figures(tenant: &Tenant, free: u64) -> (u64, u64) {
        let MemoryInfo { total, free } = tenant.ledger.limits(tenant.id, free);
        (total, free)
    }

    /// Memory that the engine has given: its free figure is the caller's to lower.
    fn take(tenant: &Arc<Tenant>, size: u64, free: u64) -> Result<Charge, EngineError> {
        let mut charge = tenant.charge_with(size, || free)?;
        charge.allocated();
        Ok(charge)
    }

    #[test]
    fn quotas_are_reserved_and_the_rest_is_shared() {
        let ledger = ledger(100);
        let named = Tenant::named(new_tenant_id(), "a", quota(40), &ledger);
        let (one, two) = (unnamed(&ledger, None), unnamed(&ledger, 50));
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
        let error = two.charge_with(1, || 40).unwrap_err();
        assert_eq!(
            error.to_string(),
            "out of memory: 1 B wanted, 0 B of 50 B free"
        );
        let mine = take(&named, 40, 40).unwrap();
        assert!(take(&named, 1, 0).is_err());
        drop(mine);
        assert_eq!((figures(&named, 40), ledger.used(named.id)), ((40, 40), 0));
    }

    #[test]
    fn charged_bytes_are_reserved_before_their_allocation() {
        let ledger = ledger(100);
        let (one, two) = (unnamed(&ledger, None), unnamed(&ledger, None));
        let mut charge = one.charge_with(70, || 100).unwrap();
        assert!(two.charge_with(31, || 100).is_err(), "both would get it");
        charge.allocated();
        assert_eq!(figures(&two, 30), (100, 30));
        drop(charge);
        drop(one.charge_with(100, || 100).unwrap());
        assert_eq!(figures(&two, 100), (100, 100));
    }

    #[test]
    fn charges_use_free_memory_as_of_the_latest_allocation() {
        let ledger = ledger(100);
        let (one, two) = (unnamed(&ledger, None), unnamed(&ledger, None));
        let other = RefCell::new(None);
        let engine_free = || {
            if other.borrow().is_some() {
                return 40;
            }
            let mut charge = one.charge_with(60, || 100).unwrap();
            charge.allocated();
            *other.borrow_mut() = Some(charge);
            100
        };
        let error = two.charge_with(60, engine_free).unwrap_err();
        assert_eq!(
            error.to_string(),
            "out of memory: 60 B wanted, 40 B of 100 B free"
        );
    }

    #[test]
    fn shared_memory_follows_the_free_memory_of_the_engine() {
        let ledger = ledger(100);
        let guests: Vec<_> = (0..3).map(|_| unnamed(&ledger, None)).collect();
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
    fn host_memory_beside_a_device_has_a_limit_of_its_own() {
        let ledger = ledger(100);
        let (one, two) = (unnamed(&ledger, None), unnamed(&ledger, None));
        let take = |tenant: &Arc<Tenant>, size| {
            ledger.charge_host(tenant.id, size)?;
            Ok::<_, EngineError>(Charge {
                tenant: Arc::clone(tenant),
                kind: MemoryKind::Host,
                size,
                is_pending: false,
            })
        };
        let mut charge = take(&one, HOST_MEMORY - 1).unwrap();
        assert_eq!(
            take(&one, 2).unwrap_err().to_string(),
            "out of host memory: 2 B wanted, 1 B of 1.0 GiB free"
        );
        take(&two, HOST_MEMORY).unwrap();
        assert_eq!(figures(&one, 100), (100, 100), "the device is not used");
        charge.shrink(10);
        assert_eq!(charge.size(), 10);
        let rest = take(&one, HOST_MEMORY - 10).unwrap();
        assert!(take(&one, 1).is_err());
        drop((charge, rest));
        take(&one, HOST_MEMORY).unwrap();
    }

    #[test]
    fn charges_shrink() {
        let ledger = ledger(100);
        let tenant = unnamed(&ledger, None);
        let mut charge = tenant.charge_with(70, || 100).unwrap();
        charge.shrink(90);
        assert_eq!(figures(&tenant, 100), (100, 30), "never grows");
        charge.shrink(20);
        assert_eq!(figures(&tenant, 100), (100, 80));
        charge.allocated();
        charge.shrink(5);
        assert_eq!(
            (figures(&tenant, 95), ledger.used(tenant.id)),
            ((100, 95), 5)
        );
        drop(charge);
        assert_eq!(ledger.used(tenant.id), 0);
    }

    #[test]
    fn overcommitment_reserves_nothing() {
        let ledger = ledger(100);
        ledger.set_overcommit(true);
        let named = Tenant::named(new_tenant_id(), "a", quota(80), &ledger);
        let other = Tenant::named(new_tenant_id(), "b", quota(80), &ledger);
        let _much = take(&other, 70, 100).unwrap();
        assert_eq!(figures(&named, 30), (80, 30));
        assert!(take(&named, 31, 30).is_err());
        take(&named, 30, 30).unwrap();
    }

    #[test]
    fn quota_below_the_used_memory_frees_nothing() {
        let ledger = ledger(100);
        let named = Tenant::named(new_tenant_id(), "a", quota(60), &ledger);
        let guest = unnamed(&ledger, None);
        let charge = take(&named, 50, 100).unwrap();
        named.set_policy(quota(20));
        assert_eq!(figures(&named, 50), (20, 0));
        assert_eq!(figures(&guest, 50), (50, 50), "what is used is not free");
        drop(charge);
        assert_eq!(figures(&named, 100), (20, 20));
        assert_eq!(figures(&guest, 100), (80, 80));
        drop(named);
        assert_eq!(figures(&guest, 100), (100, 100));
    }
}
