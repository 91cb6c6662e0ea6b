//! Which guest each container with a seat is, by what the kubelet says.

use vgpu_executor::added_guests::AddedGuest;

use crate::api::pod_resources::{ContainerResources, ListPodResourcesResponse};
use crate::devices::{MEMORY, SEAT, is_seat, slice_bytes};
use crate::options::Options;

/// Permissions of a container's socket: its folder is mounted into that container only, and on the
/// host only its owner enters the folder above. A container may have any user.
const MODE: u32 = 0o666;

/// The longest name of a guest in bytes.
const MAX_NAME: usize = 64;

/// A container with a seat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assignment {
    pub(crate) seat: String,
    pub(crate) guest: AddedGuest,
}

/// Why a container cannot use its devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AssignmentError {
    #[error("the kubelet names no container with {0}; an init container cannot have it")]
    Unknown(String),
    #[error("container {0} asks for {MEMORY} without {SEAT}: add \"{SEAT}: 1\" to its resources")]
    NoSeat(String),
}

/// The containers with seats.
pub(crate) fn assignments(pods: &ListPodResourcesResponse, options: &Options) -> Vec<Assignment> {
    let mut all = Vec::new();
    for pod in &pods.pod_resources {
        for container in &pod.containers {
            let Some(seat) = ids(container, SEAT).find(|id| is_seat(id)) else {
                continue;
            };
            let slices = ids(container, MEMORY).filter_map(slice_bytes);
            let memory = slices.fold(0, u64::saturating_add);
            let parts = [&pod.namespace, &pod.name, &container.name];
            all.push(Assignment {
                seat: seat.into(),
                guest: AddedGuest {
                    name: guest_name(&parts.map(String::as_str).join("."), seat),
                    socket: options.socket(seat),
                    mode: MODE,
                    memory: (memory > 0).then_some(memory),
                    weight: 1,
                },
            });
        }
    }
    all
}

/// Checks that the container with these slices of memory has a seat.
///
/// # Errors
/// It has none, or the kubelet names no such container.
pub(crate) fn check_memory(
    pods: &ListPodResourcesResponse,
    slices: &[String],
) -> Result<(), AssignmentError> {
    let mut containers = pods.pod_resources.iter().flat_map(|pod| &pod.containers);
    let has_slices = |container: &&ContainerResources| {
        ids(container, MEMORY).any(|id| slices.iter().any(|slice| slice == id))
    };
    match containers.find(has_slices) {
        None => Err(AssignmentError::Unknown(slices.join(", "))),
        Some(container) if ids(container, SEAT).next().is_none() => {
            Err(AssignmentError::NoSeat(container.name.clone()))
        }
        Some(_) => Ok(()),
    }
}

/// The devices of a container of one resource.
fn ids<'a>(container: &'a ContainerResources, resource: &'a str) -> impl Iterator<Item = &'a str> {
    let devices = container.devices.iter();
    devices
        .filter(move |devices| devices.resource_name == resource)
        .flat_map(|devices| &devices.device_ids)
        .map(String::as_str)
}

/// The name of a guest: namespace, pod and container. A long one is cut, and ends with the seat.
fn guest_name(container: &str, seat: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let letters = container
        .chars()
        .map(|c| if is_allowed(c) { c } else { '-' });
    let name: String = letters.collect();
    match name.len() <= MAX_NAME {
        true => name,
        false => format!("{}.{seat}", &name[..MAX_NAME - seat.len() - 1]),
    }
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
            ],
        };
        let all = assignments(&pods, &Options::for_tests());
        let seen: Vec<_> = all
            .iter()
            .map(|a| (a.seat.as_str(), a.guest.name.as_str(), a.guest.memory))
            .collect();
        let expected = [
            ("seat-3", "default.a.llama", None),
            ("seat-4", "default.b.llama", Some(2560 << 20)),
        ];
        assert_eq!(seen, expected);
        let socket = "/run/vgpu/pods/seat-4/vgpu.sock";
        assert_eq!(all[1].guest.socket.to_str(), Some(socket));

        let slices = |ids: &[&str]| -> Vec<String> { ids.iter().map(|&id| id.into()).collect() };
        assert_eq!(check_memory(&pods, &slices(&["1024Mi-9"])), Ok(()));
        let no_seat = check_memory(&pods, &slices(&["1024Mi-1"]));
        assert_eq!(no_seat, Err(AssignmentError::NoSeat("llama".into())));
        let unknown = check_memory(&pods, &slices(&["1024Mi-2"]));
        assert_eq!(unknown, Err(AssignmentError::Unknown("1024Mi-2".into())));
    }

    #[test]
    fn names_of_guests_fit_an_executor() {
        assert_eq!(guest_name("ns.pod.c", "seat-1"), "ns.pod.c");
        let exact = format!("ns.{}.c", "p".repeat(59));
        assert_eq!(guest_name(&exact, "seat-1"), exact);
        let long = guest_name(&format!("ns.{}.c", "p".repeat(200)), "seat-12");
        assert_eq!(long.len(), 64);
        assert!(long.starts_with("ns.ppp") && long.ends_with("p.seat-12"));
        assert_eq!(guest_name("ns.p\u{e9}d.c", "seat-1"), "ns.p-d.c");
    }
}
