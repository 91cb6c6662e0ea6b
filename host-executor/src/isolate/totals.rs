//! What workers have done whose processes have ended.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use crate::histogram::Distribution;
use crate::status::{Report, SessionEnds, Usage, WeightsStatus};
use crate::tenant_registry::TenantRegistry;

/// Figures of the ended workers, by guest.
#[derive(Debug, Default)]
pub(super) struct EndedWorkers {
    pub(super) guests: BTreeMap<String, GuestTotals>,
    pub(super) weights: WeightsStatus,
    pub(super) ended: SessionEnds,
}

/// Figures of a guest.
#[derive(Debug, Clone, Default)]
pub(super) struct GuestTotals {
    pub(super) usage: Usage,
    pub(super) queued: Distribution,
    pub(super) ran: Distribution,
}

impl GuestTotals {
    pub(super) fn add(&mut self, report: &Report) {
        // A worker serves one guest, so all figures of its report are that guest's, under whatever
        // name.
        for guest in &report.status.guests {
            self.usage.add(&guest.usage);
        }
        for latency in &report.latencies {
            self.queued.add(&latency.queued);
            self.ran.add(&latency.ran);
        }
    }
}

/// The name under which the figures of a worker's guest are counted: the guest's own, while the
/// configuration has it.
pub(super) fn counted_as(guest: Option<&str>, registry: &TenantRegistry) -> String {
    let (named, unnamed) = registry.tenants();
    let found = named.iter().find(|tenant| Some(tenant.name()) == guest);
    found.unwrap_or(&unnamed).name().to_owned()
}

impl EndedWorkers {
    /// Adds the last report of a worker that has ended.
    pub(super) fn add(&mut self, guest: Option<&str>, report: &Report, registry: &TenantRegistry) {
        let totals = self.guests.entry(counted_as(guest, registry)).or_default();
        totals.add(report);
        // The memory has been freed with the process.
        totals.usage.memory = 0;
        totals.usage.weights_shared = 0;
        self.ended.add(&report.status.ended);
        let weights = &report.status.engine.weights;
        self.weights.add(&WeightsStatus {
            bytes: 0,
            disk_bytes: 0,
            ..*weights
        });
    }
}
