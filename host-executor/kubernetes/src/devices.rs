//! The ids of seats and slices.

use crate::api::device_plugin::{Device, HEALTHY, UNHEALTHY};
use crate::options::SLICE_UNIT;

/// The resource of seats. A container with a seat is a guest of the executor.
pub const SEAT: &str = "vgpu.dev/gpu";

/// The resource of slices of device memory.
pub const MEMORY: &str = "vgpu.dev/memory";

/// The most slices: the kubelet gets all of them in one message, at each change.
const MAX_SLICES: u64 = 20_000;

/// A resource of the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resource {
    Seat,
    Memory,
}

impl Resource {
    pub(crate) const ALL: [Resource; 2] = [Resource::Seat, Resource::Memory];

    /// The name in the resources of a pod.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Resource::Seat => SEAT,
            Resource::Memory => MEMORY,
        }
    }

    /// The name of the socket at which the kubelet reaches the plugin.
    pub(crate) fn endpoint(self) -> &'static str {
        match self {
            Resource::Seat => "vgpu-gpu.sock",
            Resource::Memory => "vgpu-memory.sock",
        }
    }
}

/// What the node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Capacity {
    /// Whether new containers may use the executor.
    pub(crate) is_healthy: bool,
    pub(crate) seats: u32,
    /// Bytes of a slice.
    pub(crate) slice: u64,
    /// `None`: the executor has not said yet how much memory it has.
    pub(crate) slices: Option<u64>,
}

impl Capacity {
    /// How many slices `memory` bytes are.
    pub(crate) fn slices_of(memory: u64, slice: u64) -> u64 {
        (memory / slice.max(1)).min(MAX_SLICES)
    }

    /// The ids of a resource's devices.
    fn ids(&self, resource: Resource) -> Vec<String> {
        match resource {
            Resource::Seat => (0..self.seats).map(|n| format!("seat-{n}")).collect(),
            Resource::Memory => {
                let unit = self.slice / SLICE_UNIT;
                let slices = 0..self.slices.unwrap_or(0);
                slices.map(|n| format!("{unit}Mi-{n}")).collect()
            }
        }
    }

    /// The devices as the kubelet gets them.
    pub(crate) fn devices(&self, resource: Resource) -> Vec<Device> {
        let health = match self.is_healthy {
            true => HEALTHY,
            false => UNHEALTHY,
        };
        let ids = self.ids(resource).into_iter();
        ids.map(|id| Device {
            id,
            health: health.into(),
        })
        .collect()
    }

    /// The first of `ids` that is no device of the resource.
    pub(crate) fn unknown<'a>(&self, resource: Resource, ids: &'a [String]) -> Option<&'a str> {
        let known = self.ids(resource);
        let unknown = ids.iter().find(|id| !known.contains(id));
        unknown.map(String::as_str)
    }
}

/// Bytes of a slice, by its id: a restart with another size of slices changes no quota.
pub(crate) fn slice_bytes(id: &str) -> Option<u64> {
    let (unit, number) = id.split_once("Mi-")?;
    number.parse::<u64>().ok()?;
    unit.parse::<u64>().ok()?.checked_mul(SLICE_UNIT)
}

/// Whether `id` is one of a seat. The id is the name of a folder, too.
pub(crate) fn is_seat(id: &str) -> bool {
    let number = id.strip_prefix("seat-");
    number.is_some_and(|number| {
        !number.is_empty() && number.len() <= 9 && number.bytes().all(|b| b.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_tell_what_they_stand_for() {
        let capacity = Capacity {
            is_healthy: true,
            seats: 2,
            slice: 512 << 20,
            slices: Some(Capacity::slices_of((2 << 30) - 1, 512 << 20)),
        };
        let seats = capacity.devices(Resource::Seat);
        let ids: Vec<_> = seats.iter().map(|device| device.id.as_str()).collect();
        assert_eq!(ids, ["seat-0", "seat-1"]);
        assert!(seats.iter().all(|device| device.health == HEALTHY));
        assert!(ids.iter().all(|id| is_seat(id)));
        let slices = capacity.devices(Resource::Memory);
        let ids: Vec<_> = slices.iter().map(|device| device.id.clone()).collect();
        assert_eq!(ids, ["512Mi-0", "512Mi-1", "512Mi-2"]);
        assert!(ids.iter().all(|id| slice_bytes(id) == Some(512 << 20)));
        assert_eq!(capacity.unknown(Resource::Memory, &ids), None);
        let foreign = ["512Mi-2".to_owned(), "512Mi-3".to_owned()];
        let unknown = capacity.unknown(Resource::Memory, &foreign);
        assert_eq!(unknown, Some("512Mi-3"));
        assert_eq!(capacity.unknown(Resource::Seat, &ids), Some("512Mi-0"));
        let unhealthy = Capacity {
            is_healthy: false,
            ..capacity
        };
        let mut devices = unhealthy.devices(Resource::Seat).into_iter();
        assert!(devices.all(|device| device.health == UNHEALTHY));
    }

    #[test]
    fn other_texts_are_no_ids() {
        for text in ["", "seat-", "seat-x", "seat-1/..", "..", "seat-1234567890"] {
            assert!(!is_seat(text), "{text:?}");
        }
        for text in ["", "Mi-0", "512Mi-", "512-0", "18446744073709551615Mi-0"] {
            assert_eq!(slice_bytes(text), None, "{text:?}");
        }
    }
}
