//! What the API server knows of the devices: an object `ResourceSlice` of `resource.k8s.io/v1`.

use serde_json::{Value, json};
use vgpu_executor::Policy;
use vgpu_executor::added_guests::GuestList;

use super::DRIVER;
use crate::numa;
use crate::options::{Options, SLICE_UNIT};

/// The path of all slices at the API server.
pub(crate) const PATH: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// The capacity of memory in bytes, of time in thousandths, and the number of claims.
pub(crate) const MEMORY: &str = "memory";
pub(crate) const COMPUTE: &str = "compute";
pub(crate) const CLAIMS: &str = "claims";

/// What a claim has of the time that asks for none, in thousandths.
pub(crate) const DEFAULT_COMPUTE: u32 = 10;

/// The most devices of a slice that the API server takes.
const MAX_DEVICES: usize = 128;

/// The name of the device at a position among the engines of the executor.
pub(crate) fn device_name(index: usize) -> String {
    format!("vgpu-{index}")
}

/// The position of a device by its name.
pub(crate) fn device_index(name: &str) -> Option<usize> {
    name.strip_prefix("vgpu-")?.parse().ok()
}

/// The name of the slice of a node.
pub(crate) fn slice_name(node: &str) -> String {
    format!("{node}-{DRIVER}")
}

/// The devices of an executor, as the API server gets them. An executor that serves no further
/// programs has none: claims that have a part of one keep it.
pub(crate) fn devices(executor: &GuestList, options: &Options) -> Vec<Value> {
    if executor.unavailable.is_some() {
        return Vec::new();
    }
    let devices = executor.devices.iter().take(MAX_DEVICES).enumerate();
    let devices = devices.filter_map(|(index, device)| {
        let memory = device.memory.saturating_sub(device.raised) / SLICE_UNIT;
        let default = (options.slice / SLICE_UNIT).min(memory);
        // With a step in a range, the scheduler computes in numbers of 64 bits that wrap, and
        // counts huge requests as negative ones.
        (memory > 0).then(|| {
            let address = device.address.as_deref();
            let node = address.and_then(|address| numa::node_of(&options.sysfs, address));
            let mut attributes = json!({"index": {"int": index}});
            if let Some(address) = address {
                attributes["pciAddress"] = json!({"string": address});
            }
            if let Some(node) = node {
                attributes["numaNode"] = json!({"int": node});
            }
            json!({
                "name": device_name(index),
                "allowMultipleAllocations": true,
                "attributes": attributes,
                "capacity": {
                    MEMORY: {
                        "value": format!("{memory}Mi"),
                        "requestPolicy": {
                            "default": format!("{default}Mi"),
                            "validRange": {"min": "1Mi"},
                        },
                    },
                    COMPUTE: {
                        "value": Policy::MAX_WEIGHT.to_string(),
                        "requestPolicy": {
                            "default": DEFAULT_COMPUTE.to_string(),
                            "validRange": {"min": "1"},
                        },
                    },
                    CLAIMS: {
                        "value": options.seats.to_string(),
                        "requestPolicy": {"default": "1", "validValues": ["1"]},
                    },
                },
            })
        })
    });
    devices.collect()
}

/// The slice of a node, an object that belongs to the node and goes with it.
pub(crate) fn slice(node: &str, node_uid: &str, generation: i64, devices: &[Value]) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {
            "name": slice_name(node),
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid},
            ],
        },
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": devices,
        },
    })
}

/// Whether the API server lets claims share a device. Without its feature `DRAConsumableCapacity`
/// it drops what says so.
pub(crate) fn is_shareable(slice: &Value) -> bool {
    let devices = slice["spec"]["devices"].as_array();
    let mut devices = devices.into_iter().flatten();
    devices.all(|device| device["allowMultipleAllocations"] == true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_executor::added_guests::DeviceCapacity;

    fn executor(devices: &[(u64, u64)]) -> GuestList {
        let device = |&(memory, raised): &(u64, u64)| DeviceCapacity {
            memory,
            raised,
            address: None,
        };
        GuestList {
            guests: Vec::new(),
            memory: 0,
            devices: devices.iter().map(device).collect(),
            unavailable: None,
        }
    }

    #[test]
    fn a_device_has_memory_time_and_a_number_of_claims() {
        let options = Options::for_tests();
        let known = devices(&executor(&[(8 << 30, 3 << 30), (1 << 19, 0)]), &options);
        // A device without memory is none. What an operator has given away is not
        // there for claims.
        assert_eq!(known.len(), 1);
        let device = &known[0];
        assert_eq!(device["name"], "vgpu-0");
        assert_eq!(device["capacity"]["memory"]["value"], "5120Mi");
        let policy = &device["capacity"]["memory"]["requestPolicy"];
        assert_eq!(policy["default"], "1024Mi");
        assert_eq!(device["capacity"]["compute"]["value"], "1000");
        assert_eq!(device["capacity"]["claims"]["value"], "16");
        assert!(device["attributes"].get("pciAddress").is_none());
        for capacity in ["memory", "compute"] {
            let range = &device["capacity"][capacity]["requestPolicy"]["validRange"];
            assert!(
                range.get("min").is_some() && range.get("step").is_none(),
                "{range}"
            );
        }

        let small = devices(&executor(&[(512 << 20, 0)]), &options);
        let policy = &small[0]["capacity"]["memory"]["requestPolicy"];
        assert_eq!(policy["default"], "512Mi");

        let mut drains = executor(&[(8 << 30, 0)]);
        drains.unavailable = Some("it drains".into());
        assert!(devices(&drains, &options).is_empty());
    }

    #[test]
    fn names_of_devices_have_their_positions() {
        assert_eq!(device_index(&device_name(12)), Some(12));
        for name in ["", "vgpu-", "vgpu-a", "gpu-1", "vgpu--1"] {
            assert_eq!(device_index(name), None, "{name}");
        }
    }
}
