//! What workers have done whose processes have ended.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use crate::histogram::Distribution;
use crate::status::{FallbackStatus, Report, SessionEnds, Usage, WeightsStatus};
use crate::tenant_registry::TenantRegistry;

/// Figures of the ended workers, by guest.
#[derive(Debug, Default)]
pub(super) struct EndedWorkers {
    pub(super) guests: BTreeMap<String, GuestTotals>,
    /// By device.
    pub(super) weights: Vec<WeightsStatus>,
    /// By device.
    pub(super) fallback: Vec<Option<FallbackStatus>>,
    pub(super) ended: SessionEnds,
}

/// Figures of a guest.
#[derive(Debug, Clone, Default)]
pub(super) struct GuestTotals {
    pub(super) usage: Usage,
    /// The same for each device. Empty if there is one device.
    pub(super) by_device: Vec<Usage>,
    pub(super) queued: Distribution,
    pub(super) ran: Distribution,
}

impl GuestTotals {
    /// Adds the report of a worker, which has `devices` devices, whatever it says.
    pub(super) fn add(&mut self, report: &Report, devices: usize) {
        if devices > 1 {
            self.by_device.resize(devices, Usage::default());
        }
        // A worker serves one guest, so all figures of its report are that guest's, under whatever
        // name.
        for guest in &report.status.guests {
            self.usage.add(&guest.usage);
            for (sum, own) in self.by_device.iter_mut().zip(&guest.by_device) {
                sum.add(own);
            }
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
    let (named, unnamed) = registry.first_tenants();
    let found = named.iter().find(|tenant| Some(tenant.name()) == guest);
    found.unwrap_or(&unnamed).name().to_owned()
}

/// Adds the figures of a process, if its engine has some.
pub(super) fn add_fallback(sum: &mut Option<FallbackStatus>, own: Option<&FallbackStatus>) {
    if let Some(own) = own {
        sum.get_or_insert_default().add(own);
    }
}

impl EndedWorkers {
    /// Adds the last report of a worker that has ended, and had `devices` devices.
    pub(super) fn add(
        &mut self,
        guest: Option<&str>,
        report: &Report,
        registry: &TenantRegistry,
        devices: usize,
    ) {
        let totals = self.guests.entry(counted_as(guest, registry)).or_default();
        totals.add(report, devices);
        // The memory has been freed with the process.
        for usage in std::iter::once(&mut totals.usage).chain(&mut totals.by_device) {
            usage.memory = 0;
            usage.weights_shared = 0;
        }
        self.ended.add(&report.status.ended);
        self.weights.resize(devices, WeightsStatus::default());
        for (sum, engine) in self.weights.iter_mut().zip(report.status.engines()) {
            sum.add(&WeightsStatus {
                bytes: 0,
                disk_bytes: 0,
                ..engine.weights
            });
        }
        self.fallback.resize(devices, None);
        for (sum, engine) in self.fallback.iter_mut().zip(report.status.engines()) {
            add_fallback(sum, engine.fallback.as_ref());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_on_the_cpu_engine_are_added_up_where_an_engine_counts_them() {
        let mut sum = None;
        add_fallback(&mut sum, None);
        assert_eq!(sum, None);
        let own = FallbackStatus {
            device_nodes: 7,
            cpu_nodes: u64::MAX,
            device_seconds: 1.5,
            cpu_seconds: 0.5,
        };
        add_fallback(&mut sum, Some(&own));
        add_fallback(&mut sum, None);
        add_fallback(&mut sum, Some(&own));
        let both = FallbackStatus {
            device_nodes: 14,
            cpu_nodes: u64::MAX,
            device_seconds: 3.0,
            cpu_seconds: 1.0,
        };
        assert_eq!(sum, Some(both));
    }
}
