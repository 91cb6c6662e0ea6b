//! What a process has a fixed number of, divided among tenants: memory mappings, file descriptors.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::limits::Limits;
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::sched::TenantId;

/// The pools that the sessions of a process share.
#[derive(Debug, Clone)]
pub(crate) struct Pools {
    pub(crate) mappings: Arc<Pool>,
    pub(crate) descriptors: Arc<Pool>,
}

impl Pools {
    pub(crate) fn new(limits: &Limits) -> Pools {
        Pools {
            mappings: Arc::new(Pool::new("memory mappings", limits.mappings)),
            descriptors: Arc::new(Pool::new("file descriptors", limits.descriptors)),
        }
    }
}

/// A number of equal things. A tenant may have as many of them as it leaves free for others: half
/// if it is alone, a third if there are two such tenants. So a new tenant always finds some free,
/// and no part is set aside for tenants that are not there.
#[derive(Debug)]
pub(crate) struct Pool {
    /// What the things are, for messages.
    what: &'static str,
    total: usize,
    used: RankedMutex<BTreeMap<TenantId, usize>>,
}

/// A tenant gets no more of a pool.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "out of {what}: {wanted} wanted, the guest has {own}, {free} of {total} are free, and one \
     guest gets no more than it leaves free for others"
)]
#[allow(missing_docs)] // the message names every field
pub struct PoolError {
    pub what: &'static str,
    pub wanted: usize,
    pub own: usize,
    pub free: usize,
    pub total: usize,
}

impl Pool {
    fn new(what: &'static str, total: usize) -> Pool {
        Pool {
            what,
            total,
            used: RankedMutex::new(Rank::Pool, BTreeMap::new()),
        }
    }

    fn used(&self) -> RankedGuard<'_, BTreeMap<TenantId, usize>> {
        self.used.lock()
    }

    /// Takes `wanted` things for a tenant. Dropping the lease gives them back.
    ///
    /// # Errors
    /// [`PoolError`] if the tenant would have more than it leaves free.
    pub(crate) fn take(
        self: &Arc<Pool>,
        tenant: TenantId,
        wanted: usize,
    ) -> Result<Lease, PoolError> {
        let mut used = self.used();
        let free = self.total.saturating_sub(used.values().sum());
        let own = used.get(&tenant).copied().unwrap_or_default();
        if wanted > 0 && own.saturating_add(wanted) > free.saturating_sub(wanted) {
            return Err(PoolError {
                what: self.what,
                wanted,
                own,
                free,
                total: self.total,
            });
        }
        if wanted > 0 {
            *used.entry(tenant).or_default() += wanted;
        }
        Ok(Lease {
            pool: Arc::clone(self),
            tenant,
            count: wanted,
        })
    }
}

/// Things of a pool that a tenant has until the lease is dropped.
pub(crate) struct Lease {
    pool: Arc<Pool>,
    tenant: TenantId,
    count: usize,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({} {})", self.count, self.pool.what)
    }
}

impl Lease {
    /// Gives back all but `count` things.
    pub(crate) fn keep(&mut self, count: usize) {
        let less = self.count.saturating_sub(count);
        self.count -= less;
        let mut used = self.pool.used();
        if let Some(own) = used.get_mut(&self.tenant) {
            *own = own.saturating_sub(less);
            if *own == 0 {
                used.remove(&self.tenant);
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.keep(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(pool: &Arc<Pool>, tenant: u64) -> Vec<Lease> {
        std::iter::from_fn(|| pool.take(TenantId(tenant), 1).ok()).collect()
    }

    #[test]
    fn a_tenant_gets_no_more_than_it_leaves_free() {
        let pool = Arc::new(Pool::new("things", 120));
        let first = fill(&pool, 1);
        assert_eq!(first.len(), 60);
        let second = fill(&pool, 2);
        assert_eq!(second.len(), 30);
        // Every further tenant finds some.
        let third = fill(&pool, 3);
        assert_eq!(third.len(), 15);
        assert!(pool.take(TenantId(1), 0).is_ok());
        let error = pool.take(TenantId(1), 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "out of things: 1 wanted, the guest has 60, 15 of 120 are free, and one guest gets no \
             more than it leaves free for others"
        );
        drop(first);
        assert_eq!(second.len() + fill(&pool, 2).len(), 52);
        drop((second, third));
        assert!(pool.used().is_empty());
        assert!(pool.take(TenantId(4), 61).is_err());
        assert!(pool.take(TenantId(4), usize::MAX).is_err());
        assert!(pool.take(TenantId(4), 60).is_ok());
    }
}
