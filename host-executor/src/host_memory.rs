//! The host memory that graphs take beside devices with a memory of their own, such as GPUs,
//! divided among the tenants of all devices of a process.
//!
//! One half is for whoever comes first. The other half is kept: each tenant has an equal part of
//! it, which no other tenant can take.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use vgpu_engine::EngineError;

use crate::lock::{Rank, RankedMutex};
use crate::sched::TenantId;

/// The account of all tenants.
#[derive(Debug)]
pub(crate) struct HostMemory {
    state: RankedMutex<State>,
}

#[derive(Debug)]
struct State {
    /// Bytes for all tenants.
    total: u64,
    /// How many tenants there can be at once.
    places: u64,
    /// What each tenant uses.
    used: BTreeMap<TenantId, u64>,
}

impl State {
    /// Parts that are kept: there can be more tenants than places after their number has changed.
    fn parts(&self) -> u64 {
        self.places.max(self.used.len() as u64)
    }

    /// Bytes that are kept for each tenant.
    fn kept(&self) -> u64 {
        self.total / 2 / self.parts()
    }

    /// Bytes of what is kept for no tenant in particular, which nobody has.
    fn free(&self) -> u64 {
        let kept = self.kept();
        let common = self.total - kept * self.parts();
        let beyond = self.used.values().map(|used| used.saturating_sub(kept));
        common.saturating_sub(beyond.sum())
    }

    /// Bytes that no tenant uses.
    fn unused(&self) -> u64 {
        let used = self
            .used
            .values()
            .fold(0, |sum: u64, used| sum.saturating_add(*used));
        self.total.saturating_sub(used)
    }
}

fn at_least_one(places: usize) -> u64 {
    u64::try_from(places).unwrap_or(u64::MAX).max(1)
}

impl HostMemory {
    /// An account of `total` bytes, for at most so many tenants at once.
    pub(crate) fn new(total: u64, places: usize) -> Arc<HostMemory> {
        Arc::new(HostMemory {
            state: RankedMutex::new(
                Rank::HostMemory,
                State {
                    total,
                    places: at_least_one(places),
                    used: BTreeMap::new(),
                },
            ),
        })
    }

    /// Changes how many tenants there can be at once. Each keeps what it uses.
    pub(crate) fn set_places(&self, places: usize) {
        self.state.lock().places = at_least_one(places);
    }

    /// Takes `size` bytes for a tenant.
    ///
    /// # Errors
    /// [`EngineError::OutOfSharedHostMemory`] if neither the tenant's part nor what is free beyond
    /// the parts of all is enough, or if others have the memory since before the parts changed.
    pub(crate) fn take(&self, tenant: TenantId, size: u64) -> Result<(), EngineError> {
        let mut state = self.state.lock();
        let own = state.used.get(&tenant).copied().unwrap_or_default();
        let (kept, free) = (state.kept(), state.free());
        let wanted = own.saturating_add(size);
        let more = wanted.saturating_sub(own.max(kept));
        if more > free || size > state.unused() {
            return Err(EngineError::OutOfSharedHostMemory {
                wanted: size,
                own,
                kept,
                free,
                total: state.total,
            });
        }
        if size > 0 {
            state.used.insert(tenant, wanted);
        }
        Ok(())
    }

    /// Takes `size` bytes back.
    pub(crate) fn give_back(&self, tenant: TenantId, size: u64) {
        let mut state = self.state.lock();
        if let Some(used) = state.used.get_mut(&tenant) {
            *used = used.saturating_sub(size);
            if *used == 0 {
                state.used.remove(&tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);

    #[test]
    fn all_tenants_together_have_a_limit_and_each_has_its_part() {
        let memory = HostMemory::new(800, 4);
        // 400 for all, and 100 for each of four.
        memory.take(ONE, 400).unwrap();
        memory.take(ONE, 100).unwrap();
        let error = memory.take(ONE, 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "out of host memory: 1 B wanted, the guest has 500 B and 100 B are kept for it; beyond \
             that, 0 B of the 800 B for all guests of this process are free (engine.host-memory)"
        );
        for other in 2..5 {
            assert!(memory.take(TenantId(other), 101).is_err(), "{other}");
            memory.take(TenantId(other), 60).unwrap();
            memory.take(TenantId(other), 40).unwrap();
            assert!(memory.take(TenantId(other), 1).is_err(), "{other}");
        }
        memory.give_back(ONE, 450);
        // What is free is what `ONE` has had beyond its part.
        assert!(memory.take(TWO, 401).is_err());
        memory.take(TWO, 400).unwrap();
        memory.take(ONE, 50).unwrap();
        assert!(memory.take(ONE, 1).is_err());
    }

    #[test]
    fn more_tenants_than_places_have_no_more_than_all() {
        let memory = HostMemory::new(6400, 64);
        let used = || memory.state.lock().used.values().sum::<u64>();
        for tenant in 0..64 {
            memory.take(TenantId(tenant), 50).unwrap();
        }
        memory.set_places(4);
        for tenant in 0..64 {
            while memory.take(TenantId(tenant), 25).is_ok() {}
        }
        assert_eq!(used(), 6400);
        // Each has what is kept for it, although there are more of them than places.
        assert!(memory.state.lock().used.values().all(|&used| used >= 50));
        // A tenant that comes later takes nothing that others have.
        assert!(memory.take(TenantId(64), 1).is_err());
        memory.give_back(ONE, 50);
        memory.take(TenantId(64), 1).unwrap();
        assert_eq!(used(), 6351);
    }

    #[test]
    fn the_parts_follow_the_number_of_places() {
        let memory = HostMemory::new(800, usize::MAX);
        memory.take(ONE, 800).unwrap();
        assert!(memory.take(TWO, 1).is_err(), "no part is kept for so many");
        memory.set_places(4);
        assert!(memory.take(TWO, 1).is_err(), "`ONE` has all");
        memory.give_back(ONE, 100);
        memory.take(TWO, 100).unwrap();
        assert!(memory.take(TWO, 1).is_err(), "`ONE` has more than its part");
        memory.give_back(ONE, 700);
        memory.set_places(0);
        memory.take(TWO, 700).unwrap();
        memory.give_back(TWO, 800);
        let none = HostMemory::new(0, 1);
        none.take(ONE, 0).unwrap();
        assert!(none.take(ONE, u64::MAX).is_err());
    }
}
