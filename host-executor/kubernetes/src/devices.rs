//! The ids of seats, slices and weights.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::device_plugin::{Device, HEALTHY, NumaNode, TopologyInfo, UNHEALTHY};
use crate::options::SLICE_UNIT;

/// The resource of seats. A container with a seat is a guest of the executor.
pub const SEAT: &str = "vgpu.dev/gpu";

/// The resource of slices of device memory.
pub const MEMORY: &str = "vgpu.dev/memory";

/// The resource of weights: how many a container has is its share of the device's time.
pub const WEIGHT: &str = "vgpu.dev/weight";

/// The most slices: the kubelet gets all of them in one message, at each change.
const MAX_SLICES: u64 = 20_000;

/// The weights of a node: as many as one container may have at most.
const WEIGHTS: u32 = vgpu_executor::Policy::MAX_WEIGHT;

/// A resource of the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resource {
    Seat,
    Memory,
    Weight,
}

impl Resource {
    pub(crate) const ALL: [Resource; 3] = [Resource::Seat, Resource::Memory, Resource::Weight];

    /// The name in the resources of a pod.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Resource::Seat => SEAT,
            Resource::Memory => MEMORY,
            Resource::Weight => WEIGHT,
        }
    }

    /// The name of the socket at which the kubelet reaches the plugin.
    pub(crate) fn endpoint(self) -> &'static str {
        match self {
            Resource::Seat => "vgpu-gpu.sock",
            Resource::Memory => "vgpu-memory.sock",
            Resource::Weight => "vgpu-weight.sock",
        }
    }

    /// Whether the plugin prefers some devices to others.
    pub(crate) fn has_preferences(self) -> bool {
        self == Resource::Memory
    }
}

/// A device of the executor, such as a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) slices: u64,
    /// The slices that an operator has given to guests beyond those of their containers.
    pub(crate) raised: u64,
    /// The NUMA node of the GPU, if it is known.
    pub(crate) node: Option<u32>,
}

impl Gpu {
    /// A device with `memory` bytes for slices of `slice` bytes, of which an operator has given
    /// `raised` away. `gpus`: how many devices there are.
    pub(crate) fn new(memory: u64, raised: u64, slice: u64, gpus: usize) -> Gpu {
        let slice = slice.max(1);
        let limit = MAX_SLICES / u64::try_from(gpus).unwrap_or(u64::MAX).max(1);
        let slices = memory / slice;
        let left = memory.saturating_sub(raised) / slice;
        Gpu {
            slices: slices.min(limit),
            raised: slices.min(limit).saturating_sub(left),
            node: None,
        }
    }
}

/// What the node has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Capacity {
    /// Whether new containers may use the executor.
    pub(crate) is_healthy: bool,
    pub(crate) seats: u32,
    /// Bytes of a slice.
    pub(crate) slice: u64,
    /// The devices of the executor. Empty: the executor has not said yet what it has.
    pub(crate) gpus: Vec<Gpu>,
    /// The slices that no container gets, because an operator has given their memory away.
    pub(crate) withheld: BTreeSet<String>,
}

impl Capacity {
    /// The ids of a resource's devices, with the GPU of each slice.
    fn ids(&self, resource: Resource) -> Vec<(String, Option<Gpu>)> {
        match resource {
            Resource::Seat => (0..self.seats)
                .map(|n| (format!("seat-{n}"), None))
                .collect(),
            Resource::Weight => (0..WEIGHTS)
                .map(|n| (format!("weight-{n}"), None))
                .collect(),
            Resource::Memory => {
                let gpus = self.gpus.iter().enumerate();
                let ids = gpus.flat_map(|(at, gpu)| {
                    (0..gpu.slices).map(move |n| (self.slice_id(at, n), Some(*gpu)))
                });
                ids.collect()
            }
        }
    }

    /// The id of a slice: its size, its number, and the GPU if there are several.
    fn slice_id(&self, gpu: usize, number: u64) -> String {
        let unit = self.slice / SLICE_UNIT;
        match self.gpus.len() {
            0 | 1 => format!("{unit}Mi-{number}"),
            _ => format!("gpu{gpu}-{unit}Mi-{number}"),
        }
    }

    /// Withholds as many slices of each GPU as an operator has given away: the last of those that
    /// no container has. `taken`: the slices that containers have.
    pub(crate) fn withhold(&mut self, taken: &BTreeSet<String>) {
        let mut withheld = BTreeSet::new();
        for (at, gpu) in self.gpus.iter().enumerate() {
            let ids = (0..gpu.slices).rev().map(|n| self.slice_id(at, n));
            let free = ids.filter(|id| !taken.contains(id));
            withheld.extend(free.take(usize::try_from(gpu.raised).unwrap_or(usize::MAX)));
        }
        self.withheld = withheld;
    }

    /// The devices as the kubelet gets them.
    pub(crate) fn devices(&self, resource: Resource) -> Vec<Device> {
        let of_node = topology(self.gpus.iter());
        let ids = self.ids(resource).into_iter();
        ids.map(|(id, gpu)| {
            let is_healthy = self.is_healthy && !self.withheld.contains(&id);
            let health = match is_healthy {
                true => HEALTHY,
                false => UNHEALTHY,
            };
            Device {
                topology: match (resource, &gpu) {
                    (Resource::Weight, _) => None,
                    (_, Some(gpu)) => topology([gpu]),
                    (_, None) => of_node.clone(),
                },
                id,
                health: health.into(),
            }
        })
        .collect()
    }

    /// The first of `ids` that is no device of the resource.
    pub(crate) fn unknown<'a>(&self, resource: Resource, ids: &'a [String]) -> Option<&'a str> {
        let known = self.ids(resource);
        let known: BTreeSet<&str> = known.iter().map(|(id, _)| id.as_str()).collect();
        let unknown = ids.iter().find(|id| !known.contains(id.as_str()));
        unknown.map(String::as_str)
    }
}

/// The NUMA nodes of GPUs, if that of each is known.
fn topology<'a>(gpus: impl IntoIterator<Item = &'a Gpu>) -> Option<TopologyInfo> {
    let nodes: Option<BTreeSet<u32>> = gpus.into_iter().map(|gpu| gpu.node).collect();
    let nodes = nodes.filter(|nodes| !nodes.is_empty())?;
    Some(TopologyInfo {
        nodes: { nodes.into_iter() }
            .map(|node| NumaNode { id: node.into() })
            .collect(),
    })
}

/// Which slices a container should get: all of one GPU if one has enough, of the GPU with the least
/// that is enough. Otherwise of as few GPUs as possible. `required` are among `available`.
pub(crate) fn preferred(available: &[String], required: &[String], count: usize) -> Vec<String> {
    let gpu_of = |id: &String| slice_of(id).and_then(|slice| slice.gpu);
    let mut chosen: Vec<String> = required.to_vec();
    let mut by_gpu = BTreeMap::<Option<usize>, Vec<&String>>::new();
    for id in available.iter().filter(|id| !required.contains(id)) {
        by_gpu.entry(gpu_of(id)).or_default().push(id);
    }
    // The GPUs of the required slices come first.
    let required: BTreeSet<_> = required.iter().map(gpu_of).collect();
    let mut gpus: Vec<_> = by_gpu.into_iter().collect();
    while chosen.len() < count && !gpus.is_empty() {
        let missing = count - chosen.len();
        let order = |(gpu, ids): &(Option<usize>, Vec<&String>)| {
            let free = ids.len();
            let size = match free >= missing {
                true => free,
                // Of those that are too small, the largest first, after those that are enough.
                false => usize::MAX - free,
            };
            (!required.contains(gpu), size)
        };
        let best = (0..gpus.len())
            .min_by_key(|&at| order(&gpus[at]))
            .unwrap_or(0);
        let (_, ids) = gpus.swap_remove(best);
        chosen.extend(ids.into_iter().take(missing).cloned());
    }
    chosen
}

/// What the id of a slice says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slice {
    /// The device of the executor. `None`: the slice counts on each.
    pub(crate) gpu: Option<usize>,
    pub(crate) bytes: u64,
}

/// A slice by its id: a restart with another size of slices changes no quota.
pub(crate) fn slice_of(id: &str) -> Option<Slice> {
    let (gpu, rest) = match id.strip_prefix("gpu") {
        Some(text) => {
            let (gpu, rest) = text.split_once('-')?;
            (Some(gpu.parse().ok()?), rest)
        }
        None => (None, id),
    };
    let (unit, number) = rest.split_once("Mi-")?;
    number.parse::<u64>().ok()?;
    let bytes = unit.parse::<u64>().ok()?.checked_mul(SLICE_UNIT)?;
    Some(Slice { gpu, bytes })
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

    fn capacity(gpus: &[Gpu]) -> Capacity {
        Capacity {
            is_healthy: true,
            seats: 2,
            slice: 512 << 20,
            gpus: gpus.into(),
            withheld: BTreeSet::new(),
        }
    }

    fn ids(capacity: &Capacity, resource: Resource) -> Vec<String> {
        let devices = capacity.devices(resource).into_iter();
        devices.map(|device| device.id).collect()
    }

    fn nodes(device: &Device) -> Option<Vec<i64>> {
        let topology = device.topology.as_ref()?;
        Some(topology.nodes.iter().map(|node| node.id).collect())
    }

    #[test]
    fn ids_tell_what_they_stand_for() {
        let capacity = capacity(&[Gpu::new((2 << 30) - 1, 0, 512 << 20, 1)]);
        let seats = capacity.devices(Resource::Seat);
        assert_eq!(ids(&capacity, Resource::Seat), ["seat-0", "seat-1"]);
        assert!(seats.iter().all(|device| device.health == HEALTHY));
        assert!(seats.iter().all(|device| is_seat(&device.id)));
        let slices = ids(&capacity, Resource::Memory);
        assert_eq!(slices, ["512Mi-0", "512Mi-1", "512Mi-2"]);
        let bytes = 512 << 20;
        let expected = Some(Slice { gpu: None, bytes });
        assert!(slices.iter().all(|id| slice_of(id) == expected));
        assert_eq!(capacity.unknown(Resource::Memory, &slices), None);
        let foreign = ["512Mi-2".to_owned(), "512Mi-3".to_owned()];
        let unknown = capacity.unknown(Resource::Memory, &foreign);
        assert_eq!(unknown, Some("512Mi-3"));
        assert_eq!(capacity.unknown(Resource::Seat, &slices), Some("512Mi-0"));
        assert_eq!(ids(&capacity, Resource::Weight).len(), 1000);
        let unhealthy = Capacity {
            is_healthy: false,
            ..capacity
        };
        for resource in Resource::ALL {
            let mut devices = unhealthy.devices(resource).into_iter();
            assert!(devices.all(|device| device.health == UNHEALTHY));
        }
    }

    #[test]
    fn each_gpu_has_slices_of_its_own_near_its_numa_node() {
        let slice = 512 << 20;
        let mut gpus = [1 << 30, 512 << 20].map(|memory| Gpu::new(memory, 0, slice, 2));
        let known = capacity(&gpus);
        let slices = ids(&known, Resource::Memory);
        assert_eq!(slices, ["gpu0-512Mi-0", "gpu0-512Mi-1", "gpu1-512Mi-0"]);
        let gpu = Some(1);
        assert_eq!(slice_of(&slices[2]), Some(Slice { gpu, bytes: slice }));
        assert!(
            known
                .devices(Resource::Memory)
                .iter()
                .all(|one| nodes(one).is_none())
        );
        (gpus[0].node, gpus[1].node) = (Some(3), Some(0));
        let known = capacity(&gpus);
        let near: Vec<_> = known.devices(Resource::Memory).iter().map(nodes).collect();
        assert_eq!(near, [Some(vec![3]), Some(vec![3]), Some(vec![0])]);
        // A seat is of all GPUs.
        let near = nodes(&known.devices(Resource::Seat)[0]);
        assert_eq!(near, Some(vec![0, 3]));
        assert_eq!(nodes(&known.devices(Resource::Weight)[0]), None);
        gpus[1].node = None;
        let known = capacity(&gpus);
        assert_eq!(
            nodes(&known.devices(Resource::Seat)[0]),
            None,
            "of one it is not known"
        );
    }

    #[test]
    fn slices_whose_memory_an_operator_has_given_away_are_withheld() {
        let slice = 512 << 20;
        let raised = Gpu::new(2 << 30, (512 << 20) + 1, slice, 1);
        assert_eq!(
            (raised.slices, raised.raised),
            (4, 2),
            "a part of a slice counts as one"
        );
        let mut capacity = capacity(&[raised]);
        capacity.withhold(&["512Mi-3".to_owned()].into());
        let devices = capacity.devices(Resource::Memory);
        let health: Vec<_> = devices
            .iter()
            .map(|device| device.health == HEALTHY)
            .collect();
        assert_eq!(health, [true, false, false, true]);
        // More than the node has.
        let all = Gpu::new(2 << 30, 5 << 30, slice, 1);
        assert_eq!((all.slices, all.raised), (4, 4));
    }

    #[test]
    fn slices_of_one_gpu_are_preferred() {
        let ids = |gpu: usize, count: u64| (0..count).map(move |n| format!("gpu{gpu}-1Mi-{n}"));
        let available: Vec<String> = ids(0, 8).chain(ids(1, 3)).chain(ids(2, 5)).collect();
        let gpus = |required: &[String], count| {
            let chosen = preferred(&available, required, count);
            assert_eq!(chosen.len(), count);
            assert!(required.iter().all(|id| chosen.contains(id)));
            let mut counts = BTreeMap::new();
            for id in &chosen {
                *counts
                    .entry(slice_of(id).unwrap().gpu.unwrap())
                    .or_insert(0) += 1;
            }
            counts.into_iter().collect::<Vec<_>>()
        };
        // The smallest that is enough.
        assert_eq!(gpus(&[], 2), [(1, 2)]);
        assert_eq!(gpus(&[], 4), [(2, 4)]);
        assert_eq!(gpus(&[], 8), [(0, 8)]);
        // None is enough: the largest, and the smallest that has the rest.
        assert_eq!(gpus(&[], 10), [(0, 8), (1, 2)]);
        assert_eq!(gpus(&[], 16), [(0, 8), (1, 3), (2, 5)]);
        let required = available[..1].to_vec();
        assert_eq!(gpus(&required, 3), [(0, 3)]);
        // Fewer than are asked for.
        assert_eq!(preferred(&available, &[], 99).len(), available.len());
    }

    #[test]
    fn other_texts_are_no_ids() {
        for text in ["", "seat-", "seat-x", "seat-1/..", "..", "seat-1234567890"] {
            assert!(!is_seat(text), "{text:?}");
        }
        for text in [
            "",
            "Mi-0",
            "512Mi-",
            "512-0",
            "18446744073709551615Mi-0",
            "gpu-512Mi-0",
            "gpu1",
            "gpux-512Mi-0",
        ] {
            assert_eq!(slice_of(text), None, "{text:?}");
        }
    }
}
