//! Which guest each container with a seat is, by what the kubelet says.

use std::collections::{BTreeMap, BTreeSet};

use vgpu_executor::Policy;
use vgpu_executor::added_guests::{AddedGuest, DeviceQuota};

use crate::api::pod_resources::{ContainerResources, ListPodResourcesResponse};
use crate::devices::{MEMORY, Resource, SEAT, WEIGHT, is_seat, slice_of};
use crate::guests::{Assignment, SOCKET_MODE, guest_name};
use crate::options::Options;

/// Why a container cannot use its devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AssignmentError {
    #[error("the kubelet names no container with {0}; an init container cannot have it")]
    Unknown(String),
    #[error(
        "container {container} asks for {resource} without {SEAT}: add \"{SEAT}: 1\" to its \
         resources"
    )]
    NoSeat {
        container: String,
        resource: &'static str,
    },
}

/// The containers with seats.
pub(crate) fn assignments(pods: &ListPodResourcesResponse, options: &Options) -> Vec<Assignment> {
    let mut all = Vec::new();
    for pod in &pods.pod_resources {
        for container in &pod.containers {
            let Some(seat) = ids(container, SEAT).find(|id| is_seat(id)) else {
                continue;
            };
            let mut memory = 0u64;
            let mut by_gpu = BTreeMap::<usize, u64>::new();
            for slice in ids(container, MEMORY).filter_map(slice_of) {
                let sum = match slice.gpu {
                    Some(gpu) => by_gpu.entry(gpu).or_default(),
                    None => &mut memory,
                };
                *sum = sum.saturating_add(slice.bytes);
            }
            let devices =
                { by_gpu.into_iter() }.map(|(device, memory)| DeviceQuota { device, memory });
            let weight = u32::try_from(ids(container, WEIGHT).count()).unwrap_or(u32::MAX);
            let parts = [&pod.namespace, &pod.name, &container.name].map(String::as_str);
            all.push(Assignment {
                folder: seat.into(),
                guest: AddedGuest {
                    name: guest_name(&parts, seat),
                    socket: options.socket(seat),
                    mode: SOCKET_MODE,
                    memory: (memory > 0).then_some(memory),
                    weight: weight.clamp(1, Policy::MAX_WEIGHT),
                    devices: devices.collect(),
                },
            });
        }
    }
    all
}

/// Checks that the container with these devices of a resource has a seat.
///
/// # Errors
/// It has none, or the kubelet names no such container.
pub(crate) fn check_seat(
    pods: &ListPodResourcesResponse,
    resource: Resource,
    devices: &[String],
) -> Result<(), AssignmentError> {
    let resource = resource.name();
    let mut containers = pods.pod_resources.iter().flat_map(|pod| &pod.containers);
    let has_devices = |container: &&ContainerResources| {
        ids(container, resource).any(|id| devices.iter().any(|device| device == id))
    };
    match containers.find(has_devices) {
        None => Err(AssignmentError::Unknown(devices.join(", "))),
        Some(container) if ids(container, SEAT).next().is_none() => {
            let container = container.name.clone();
            Err(AssignmentError::NoSeat {
                container,
                resource,
            })
        }
        Some(_) => Ok(()),
    }
}

/// The slices of memory that containers have.
pub(crate) fn taken_slices(pods: &ListPodResourcesResponse) -> BTreeSet<String> {
    let containers = pods.pod_resources.iter().flat_map(|pod| &pod.containers);
    let taken = containers.flat_map(|container| ids(container, MEMORY));
    taken.map(str::to_owned).collect()
}

/// The devices of a container of one resource.
fn ids<'a>(container: &'a ContainerResources, resource: &'a str) -> impl Iterator<Item = &'a str> {
    let devices = container.devices.iter();
    devices
        .filter(move |devices| devices.resource_name == resource)
        .flat_map(|devices| &devices.device_ids)
        .map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::pod_resources::{ContainerDevices, PodResources};

    fn pod(name: &str, container: &str, devices: &[(&str, &[&str])]) -> PodResources {
        let devices = devices.iter().map(|(resource, ids)| ContainerDevices {
            resource_name: (*resource).into(),
            device_ids: ids.iter().map(|id| (*id).into()).collect(),
        });
        PodResources {
            name: name.into(),
            namespace: "default".into(),
            containers: vec![ContainerResources {
                name: container.into(),
                devices: devices.collect(),
            }],
        }
    }

    #[test]
    fn a_container_with_a_seat_is_a_guest_with_a_quota() {
        let pods = ListPodResourcesResponse {
            pod_resources: vec![
                pod("other", "c", &[("example.org/nic", &["seat-0"])]),
                pod("plain", "c", &[]),
                pod("a", "llama", &[(SEAT, &["seat-3"])]),
                // The kubelet lists the devices of each NUMA node by themselves.
                pod(
                    "b",
                    "llama",
                    &[
                        (MEMORY, &["1024Mi-7", "512Mi-0"]),
                        (SEAT, &["seat-4"]),
                        (MEMORY, &["1024Mi-9"]),
                    ],
                ),
                pod("c", "llama", &[(MEMORY, &["1024Mi-1"])]),
                pod(
                    "d",
                    "llama",
                    &[
                        (SEAT, &["seat-5"]),
                        (MEMORY, &["gpu1-1Mi-3", "gpu0-2Mi-4", "gpu1-1Mi-4"]),
                        (WEIGHT, &["weight-7", "weight-1", "weight-3"]),
                    ],
                ),
            ],
        };
        let all = assignments(&pods, &Options::for_tests());
        let seen: Vec<_> = all
            .iter()
            .map(|a| (a.folder.as_str(), a.guest.name.as_str(), a.guest.memory))
            .collect();
        let expected = [
            ("seat-3", "default.a.llama", None),
            ("seat-4", "default.b.llama", Some(2560 << 20)),
            ("seat-5", "default.d.llama", None),
        ];
        assert_eq!(seen, expected);
        let socket = "/run/vgpu/pods/seat-4/vgpu.sock";
        assert_eq!(all[1].guest.socket.to_str(), Some(socket));

        assert!(all[1].guest.devices.is_empty());
        let quotas = [(0, 2 << 20), (1, 2 << 20)];
        let quotas = quotas.map(|(device, memory)| DeviceQuota { device, memory });
        assert_eq!(all[2].guest.devices, quotas);
        let weights: Vec<_> = all.iter().map(|one| one.guest.weight).collect();
        assert_eq!(weights, [1, 1, 3]);
        let taken = taken_slices(&pods);
        assert!(taken.contains("1024Mi-9") && taken.contains("gpu0-2Mi-4"));
        assert_eq!(taken.len(), 7);

        let check_memory = |pods: &_, ids: &[String]| check_seat(pods, Resource::Memory, ids);
        let slices = |ids: &[&str]| -> Vec<String> { ids.iter().map(|&id| id.into()).collect() };
        assert_eq!(check_memory(&pods, &slices(&["1024Mi-9"])), Ok(()));
        let no_seat = check_memory(&pods, &slices(&["1024Mi-1"]));
        let (container, resource) = ("llama".to_owned(), MEMORY);
        let expected = AssignmentError::NoSeat {
            container,
            resource,
        };
        assert_eq!(no_seat, Err(expected));
        let unknown = check_memory(&pods, &slices(&["1024Mi-2"]));
        assert_eq!(unknown, Err(AssignmentError::Unknown("1024Mi-2".into())));
    }
}
