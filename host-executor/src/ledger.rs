//! The memory of one engine, divided among its tenants.
//!
//! The engine reports how much memory it has and how much is free; the ledger decides which tenant
//! may take how much of it. The quota of a tenant lives in its account here and nowhere else while
//! the executor runs.
//!
//! The quota of a named tenant is reserved for it, unless the operator allows overcommitment. All
//! other tenants share the rest: what the engine reports as free, less what is reserved and not
//! used. A tenant is charged for its buffers in full, shared weights included.
//!
//! A tenant is also charged for the memory of the host that its graphs need. On the CPU engine that
//! is the memory of the device. On a GPU it is not, and the account has a second limit for it, the
//! same for every tenant ([`HOST_MEMORY`]). The tenants of all devices together have a third one
//! ([`HostMemory`]).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use vgpu_engine::{EngineError, MemoryInfo};

use crate::host_memory::HostMemory;
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::policy::Policy;
use crate::sched::TenantId;

/// Bytes of host memory that a tenant may use besides the memory of a device that has its own.
pub(crate) const HOST_MEMORY: u64 = 1 << 30;

/// The memory that a charge is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// The memory that the engine reports.
    Device,
    /// Memory of the host, if it is not the memory that the engine reports.
    Host,
}

/// How often a charge asks the engine again because memory was allocated or freed between the
/// engine's answer and the decision. The last attempt decides by the answer it has, and the engine
/// has the final word.
const MAX_ATTEMPTS: u32 = 8;

/// The accounts of one engine's tenants.
#[derive(Debug)]
pub(crate) struct Ledger {
    host: Arc<HostMemory>,
    state: RankedMutex<Accounts>,
}

#[derive(Debug)]
struct Accounts {
    /// Bytes that the engine has.
    total: u64,
    overcommit: bool,
    accounts: BTreeMap<TenantId, Account>,
    /// Bytes that are charged while the engine still reports them as free.
    pending: u64,
    /// Counts changes of what the engine reports: allocations that are complete, and releases.
    change_count: u64,
}

/// What one tenant may use and uses.
#[derive(Debug)]
struct Account {
    is_named: bool,
    policy: Policy,
    /// Bytes of [`MemoryKind::Device`].
    used: u64,
    /// Bytes of [`MemoryKind::Host`].
    host_used: u64,
}

impl Accounts {
    /// Bytes that are reserved for an account, if any are.
    fn reserved(&self, account: &Account) -> Option<u64> {
        let quota = account
            .policy
            .memory
            .filter(|_| account.is_named && !self.overcommit)?;
        // A tenant keeps what it uses when its quota is lowered below that.
        Some(quota.max(account.used))
    }

    /// What the accounts without a reservation share, when the engine reports `free` bytes as free.
    fn unreserved(&self, free: u64) -> MemoryInfo {
        let (mut reserved_sum, mut unused_sum) = (0u64, 0u64);
        for account in self.accounts.values() {
            if let Some(reserved) = self.reserved(account) {
                reserved_sum = reserved_sum.saturating_add(reserved);
                unused_sum = unused_sum.saturating_add(reserved - account.used);
            }
        }
        MemoryInfo {
            total: self.total.saturating_sub(reserved_sum),
            free: free.saturating_sub(unused_sum).saturating_sub(self.pending),
        }
    }

    /// What an account may use in all, and what it may still take.
    fn limits(&self, account: &Account, free: u64) -> MemoryInfo {
        let quota = account.policy.memory.map(|total| MemoryInfo {
            total,
            free: total.saturating_sub(account.used),
        });
        if let Some(quota) = quota.filter(|_| self.reserved(account).is_some()) {
            return quota;
        }
        let unreserved = self.unreserved(free);
        let quota = quota.unwrap_or(unreserved);
        MemoryInfo {
            total: quota.total.min(unreserved.total),
            free: quota.free.min(unreserved.free),
        }
    }

    /// Whether what an account may take depends on what the engine reports.
    fn needs_engine(&self, id: TenantId) -> bool {
        let account = self.accounts.get(&id);
        account.is_some_and(|account| self.reserved(account).is_none())
    }
}

impl Ledger {
    /// A ledger for an engine with `total` bytes of memory. Beside it, tenants use `host`.
    pub(crate) fn new(total: u64, host: Arc<HostMemory>) -> Arc<Ledger> {
        Arc::new(Ledger {
            host,
            state: RankedMutex::new(
                Rank::Ledger,
                Accounts {
                    total,
                    overcommit: false,
                    accounts: BTreeMap::new(),
                    pending: 0,
                    change_count: 0,
                },
            ),
        })
    }

    /// Bytes that the engine has.
    pub(crate) fn total(&self) -> u64 {
        self.lock().total
    }

    /// Whether quotas reserve nothing.
    pub(crate) fn set_overcommit(&self, overcommit: bool) {
        self.lock().overcommit = overcommit;
    }

    /// Opens the account of a tenant.
    pub(crate) fn open(&self, id: TenantId, is_named: bool, policy: Policy) {
        let account = Account {
            is_named,
            policy,
            used: 0,
            host_used: 0,
        };
        self.lock().accounts.insert(id, account);
    }

    /// Closes an account. Nothing is charged to it any more.
    pub(crate) fn close(&self, id: TenantId) {
        self.lock().accounts.remove(&id);
    }

    /// Reads the limits of a tenant. The ledger is locked meanwhile.
    pub(crate) fn read_policy<T>(&self, id: TenantId, read: impl FnOnce(&Policy) -> T) -> T {
        let state = self.lock();
        match state.accounts.get(&id) {
            Some(account) => read(&account.policy),
            None => read(&Policy::default()),
        }
    }

    /// Changes the limits of a tenant. What it uses stays its own.
    pub(crate) fn set_policy(&self, id: TenantId, policy: Policy) {
        if let Some(account) = self.lock().accounts.get_mut(&id) {
            account.policy = policy;
        }
    }

    /// Whether the configuration names the tenant.
    pub(crate) fn is_named(&self, id: TenantId) -> bool {
        let state = self.lock();
        state
            .accounts
            .get(&id)
            .is_some_and(|account| account.is_named)
    }

    /// The configuration names the tenant no longer: nothing is reserved for it.
    pub(crate) fn remove_name(&self, id: TenantId) {
        if let Some(account) = self.lock().accounts.get_mut(&id) {
            account.is_named = false;
        }
    }

    /// What a tenant may use, when the engine reports `free` bytes as free.
    pub(crate) fn limits(&self, id: TenantId, free: u64) -> MemoryInfo {
        let state = self.lock();
        let account = state.accounts.get(&id);
        account.map_or_else(MemoryInfo::default, |account| state.limits(account, free))
    }

    /// A number that grows when an allocation is complete and when memory has been freed.
    pub(crate) fn change_count(&self) -> u64 {
        self.lock().change_count
    }

    /// Bytes that a tenant uses.
    #[cfg(test)]
    pub(crate) fn used(&self, id: TenantId) -> u64 {
        self.lock().accounts.get(&id).map_or(0, |a| a.used)
    }

    /// Charges `size` bytes of [`MemoryKind::Host`] to a tenant.
    ///
    /// # Errors
    /// [`EngineError::OutOfHostMemory`] with the tenant's own figures, or
    /// [`EngineError::OutOfSharedHostMemory`].
    pub(crate) fn charge_host(&self, id: TenantId, size: u64) -> Result<(), EngineError> {
        let mut state = self.lock();
        let account = state.accounts.get_mut(&id);
        let used = account.as_ref().map_or(HOST_MEMORY, |a| a.host_used);
        let free = HOST_MEMORY.saturating_sub(used);
        if size > free {
            return Err(EngineError::OutOfHostMemory {
                wanted: size,
                free,
                total: HOST_MEMORY,
            });
        }
        if let Some(account) = account {
            self.host.take(id, size)?;
            account.host_used += size;
        }
        Ok(())
    }

    /// Charges `size` bytes of [`MemoryKind::Device`] to a tenant, before the engine allocates
    /// them. `engine_free` asks the engine what is free. The ledger calls `engine_free` without a
    /// lock, and only if the answer matters.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] with the tenant's own figures.
    pub(crate) fn charge(
        &self,
        id: TenantId,
        size: u64,
        engine_free: impl Fn() -> u64,
    ) -> Result<(), EngineError> {
        let mut attempts = 0;
        loop {
            let state = self.lock();
            let (change_count, needs_engine) = (state.change_count, state.needs_engine(id));
            drop(state);
            let free = if needs_engine { engine_free() } else { 0 };
            let mut state = self.lock();
            attempts += 1;
            let is_current =
                state.change_count == change_count && state.needs_engine(id) == needs_engine;
            if is_current || attempts == MAX_ATTEMPTS {
                return state.charge(id, size, free);
            }
        }
    }

    /// The engine has allocated `size` bytes that were charged, and no longer reports them as free.
    pub(crate) fn allocated(&self, size: u64) {
        let mut state = self.lock();
        state.pending -= size;
        state.change_count += 1;
    }

    /// Gives `size` bytes back to a tenant, which have been freed.
    pub(crate) fn release(&self, id: TenantId, kind: MemoryKind, size: u64) {
        let mut state = self.lock();
        if let Some(account) = state.accounts.get_mut(&id) {
            match kind {
                MemoryKind::Device => account.used -= size,
                MemoryKind::Host => {
                    account.host_used -= size;
                    self.host.give_back(id, size);
                }
            }
        }
        state.change_count += 1;
    }

    fn lock(&self) -> RankedGuard<'_, Accounts> {
        self.state.lock()
    }
}

impl Accounts {
    fn charge(&mut self, id: TenantId, size: u64, free: u64) -> Result<(), EngineError> {
        let account = self.accounts.get(&id);
        let limits = account.map_or_else(MemoryInfo::default, |a| self.limits(a, free));
        if size > limits.free {
            return Err(EngineError::OutOfMemory {
                wanted: size,
                free: limits.free,
                total: limits.total,
            });
        }
        if let Some(account) = self.accounts.get_mut(&id) {
            account.used += size;
        }
        self.pending += size;
        Ok(())
    }
}
