//! Which guest a claim is, by what the API server says: an object `ResourceClaim` of
//! `resource.k8s.io/v1` that the scheduler has allocated.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vgpu_executor::Policy;
use vgpu_executor::added_guests::{AddedGuest, DeviceQuota, GuestList};

use super::DRIVER;
use super::quantity;
use super::resource_slice::{COMPUTE, DEFAULT_COMPUTE, MEMORY, device_index};
use crate::guests::{SOCKET_MODE, guest_name};
use crate::options::Options;

/// The letters of a claim's id in the name of a guest that is too long for the names alone.
const SHORT_UID: usize = 8;

/// The longest id of a claim.
const MAX_UID: usize = 64;

/// Why a claim cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AllocationError {
    #[error("the id {0:?}: expected up to {MAX_UID} letters, digits and `-`")]
    Uid(String),
    #[error("there is no claim {0}")]
    NoClaim(String),
    #[error("claim {claim} has the id {found}, not {expected}: it is another claim of this name")]
    OtherClaim {
        claim: String,
        expected: String,
        found: String,
    },
    #[error("claim {claim} has no device of {DRIVER} on node {node}")]
    NoDevice { claim: String, node: String },
    #[error("claim {claim}: the executor has no device {device:?}, but {count}")]
    UnknownDevice {
        claim: String,
        device: String,
        count: usize,
    },
    #[error("claim {0} asks for administrative access, which {DRIVER} does not give")]
    AdminAccess(String),
    #[error("claim {0} has parameters (`config`) for {DRIVER}, which takes none")]
    Config(String),
    #[error("claim {claim}: {capacity} is {value:?}, which is no number above 0")]
    Quantity {
        claim: String,
        capacity: &'static str,
        value: String,
    },
}

/// A claim by its names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClaimId {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Also the name of the folder with the socket of the claim.
    pub(crate) uid: String,
}

impl ClaimId {
    /// The path of the claim at the API server.
    pub(crate) fn path(&self) -> String {
        let ClaimId {
            namespace, name, ..
        } = self;
        format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}")
    }

    /// Checks that the id can be the name of a file, and the names parts of a path.
    ///
    /// # Errors
    /// [`AllocationError::Uid`].
    pub(crate) fn check(&self) -> Result<(), AllocationError> {
        if !is_uid(&self.uid) {
            return Err(AllocationError::Uid(self.uid.clone()));
        }
        let is_name = |name: &str| {
            let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-.".contains(&b);
            !name.is_empty() && name.bytes().all(is_allowed) && !name.contains("..")
        };
        match is_name(&self.namespace) && is_name(&self.name) {
            true => Ok(()),
            false => Err(AllocationError::NoClaim(self.to_string())),
        }
    }
}

impl std::fmt::Display for ClaimId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Whether a text may be the id of a claim. It is the name of a folder, too.
pub(crate) fn is_uid(text: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
    (1..=MAX_UID).contains(&text.len()) && text.bytes().all(is_allowed)
}

/// A part of a device that a claim has, as the scheduler has written it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AllocatedDevice {
    /// The request of the claim that the part is for.
    pub(crate) request: String,
    /// The name of the device in its slice.
    pub(crate) device: String,
    /// The id of the part among those of the device, where claims share it.
    pub(crate) share: Option<String>,
    /// Bytes, and thousandths of the time. `None`: the claim has the device to itself.
    pub(crate) memory: Option<u64>,
    pub(crate) compute: Option<u64>,
}

/// A claim that pods of this node use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Allocation {
    pub(crate) claim: ClaimId,
    pub(crate) devices: Vec<AllocatedDevice>,
    pub(crate) guest: AddedGuest,
}

/// The devices that `object`, a claim, has of this driver on a node.
fn results<'a>(object: &'a Value, node: &str) -> Vec<&'a Value> {
    let results = object["status"]["allocation"]["devices"]["results"].as_array();
    let results = results.into_iter().flatten();
    results
        .filter(|result| result["driver"] == DRIVER && result["pool"] == node)
        .collect()
}

/// The parts of devices on `node` that a claim has. `object`: what the API server has of the claim.
/// None: there is no such claim, or it has no device here.
///
/// # Errors
/// [`AllocationError`] for a claim that is this one and that the driver cannot serve.
pub(crate) fn parts(
    claim: &ClaimId,
    object: Option<&Value>,
    node: &str,
) -> Result<Vec<AllocatedDevice>, AllocationError> {
    let Some(object) = object.filter(|object| object["metadata"]["uid"] == claim.uid.as_str())
    else {
        return Ok(Vec::new());
    };
    let part = |result: &Value| {
        // Without the feature `DRAConsumableCapacity` a claim has a device to itself.
        let consumed = |capacity: &'static str| {
            let Some(value) = result["consumedCapacity"].get(capacity) else {
                return Ok(None);
            };
            let value = value.as_str().unwrap_or_default();
            let number = quantity::parse(value).filter(|&number| number > 0);
            number.map(Some).ok_or_else(|| AllocationError::Quantity {
                claim: claim.to_string(),
                capacity,
                value: value.into(),
            })
        };
        if result["adminAccess"] == true {
            return Err(AllocationError::AdminAccess(claim.to_string()));
        }
        let text = |field: &str| result[field].as_str().unwrap_or_default();
        Ok(AllocatedDevice {
            // Of a request with alternatives: the kubelet knows the request alone.
            request: text("request").split('/').next().unwrap_or_default().into(),
            device: text("device").into(),
            share: result["shareID"].as_str().map(str::to_owned),
            memory: consumed(MEMORY)?,
            compute: consumed(COMPUTE)?,
        })
    };
    let parts = results(object, node).into_iter().map(part);
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    let config = object["status"]["allocation"]["devices"]["config"].as_array();
    let mut config = config.into_iter().flatten();
    if !parts.is_empty() && config.any(|one| one["opaque"]["driver"] == DRIVER) {
        return Err(AllocationError::Config(claim.to_string()));
    }
    Ok(parts)
}

/// The guest of a claim. `object`: what the API server has of the claim.
///
/// # Errors
/// [`AllocationError`].
pub(crate) fn allocation(
    claim: &ClaimId,
    object: Option<&Value>,
    node: &str,
    executor: &GuestList,
    options: &Options,
) -> Result<Allocation, AllocationError> {
    let text = || claim.to_string();
    let found = object.ok_or_else(|| AllocationError::NoClaim(text()))?;
    let found = found["metadata"]["uid"].as_str().unwrap_or_default();
    if found != claim.uid {
        return Err(AllocationError::OtherClaim {
            claim: text(),
            expected: claim.uid.clone(),
            found: found.into(),
        });
    }
    let devices = parts(claim, object, node)?;
    // Bytes and thousandths by the position of a device: all parts of the claim together.
    let mut sums = BTreeMap::<usize, (u64, u64)>::new();
    for part in &devices {
        let index = device_index(&part.device).filter(|&at| at < executor.devices.len());
        let index = index.ok_or_else(|| AllocationError::UnknownDevice {
            claim: text(),
            device: part.device.clone(),
            count: executor.devices.len(),
        })?;
        let capacity = &executor.devices[index];
        let whole = capacity.memory.saturating_sub(capacity.raised);
        let (memory, compute) = sums.entry(index).or_default();
        *memory = memory.saturating_add(part.memory.unwrap_or(whole));
        *compute = compute.saturating_add(part.compute.unwrap_or(u64::from(DEFAULT_COMPUTE)));
    }
    // A guest has one weight on all its devices: no more than it has of any.
    let Some(compute) = sums.values().map(|&(_, compute)| compute).min() else {
        return Err(AllocationError::NoDevice {
            claim: text(),
            node: node.into(),
        });
    };
    // The only device of an executor needs no list.
    let is_only = executor.devices.len() == 1;
    let only = sums.get(&0).map(|&(memory, _)| memory).filter(|_| is_only);
    let quotas = { sums.into_iter() }.map(|(device, (memory, _))| DeviceQuota { device, memory });
    let names = [claim.namespace.as_str(), claim.name.as_str()];
    let short = &claim.uid[..claim.uid.len().min(SHORT_UID)];
    let weight = u32::try_from(compute).unwrap_or(u32::MAX);
    Ok(Allocation {
        claim: claim.clone(),
        devices,
        guest: AddedGuest {
            name: guest_name(&names, short),
            socket: options.socket(&claim.uid),
            mode: SOCKET_MODE,
            memory: only,
            weight: weight.clamp(1, Policy::MAX_WEIGHT),
            devices: match is_only {
                true => Vec::new(),
                false => quotas.collect(),
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use vgpu_executor::added_guests::DeviceCapacity;

    fn executor(devices: usize) -> GuestList {
        let device = DeviceCapacity {
            memory: 64 << 30,
            raised: 0,
            address: None,
        };
        GuestList {
            guests: Vec::new(),
            memory: 64 << 30,
            devices: vec![device; devices],
            unavailable: None,
        }
    }

    fn claim() -> ClaimId {
        ClaimId {
            namespace: "default".into(),
            name: "llama".into(),
            uid: "9f2c-1".into(),
        }
    }

    fn object(results: &Value) -> Value {
        json!({
            "metadata": {"uid": "9f2c-1"},
            "status": {"allocation": {"devices": {"results": results}}},
        })
    }

    fn result(device: &str, consumed: &Value) -> Value {
        json!({
            "driver": "vgpu.dev", "pool": "node", "device": device, "request": "gpu",
            "consumedCapacity": consumed,
        })
    }

    fn of(object: &Value, devices: usize) -> Result<Allocation, AllocationError> {
        let options = Options::for_tests();
        allocation(&claim(), Some(object), "node", &executor(devices), &options)
    }

    #[test]
    fn a_claim_is_a_guest_with_what_it_consumes() {
        let consumed = json!({"memory": "8Gi", "compute": "300", "claims": "1"});
        let other = json!({"driver": "example.org", "pool": "node", "device": "nic"});
        let elsewhere = json!({"driver": "vgpu.dev", "pool": "other", "device": "vgpu-0"});
        let one = of(
            &object(&json!([other, elsewhere, result("vgpu-0", &consumed)])),
            1,
        )
        .unwrap();
        assert_eq!(one.guest.name, "default.llama");
        assert_eq!(one.guest.memory, Some(8 << 30));
        assert_eq!(one.guest.weight, 300);
        assert!(one.guest.devices.is_empty());
        assert_eq!(one.devices.len(), 1);
        let socket = "/run/vgpu/pods/9f2c-1/vgpu.sock";
        assert_eq!(one.guest.socket.to_str(), Some(socket));

        // Two requests on one of two devices, and one on the other.
        let small = json!({"memory": "1Gi"});
        let results = json!([
            result("vgpu-1", &consumed),
            result("vgpu-1", &small),
            result("vgpu-0", &small),
        ]);
        let two = of(&object(&results), 2).unwrap();
        let quotas = [(0, 1 << 30), (1, 9 << 30)];
        let quotas = quotas.map(|(device, memory)| DeviceQuota { device, memory });
        assert_eq!(two.guest.devices, quotas);
        // 310 thousandths of the one, and 10 of the other.
        assert_eq!((two.guest.memory, two.guest.weight), (None, 10));
        assert_eq!(two.devices.len(), 3);
        let same = object(&json!([
            result("vgpu-0", &consumed),
            result("vgpu-0", &consumed)
        ]));
        assert_eq!(of(&same, 2).unwrap().guest.weight, 600);

        // A request with alternatives, of which the scheduler has taken one.
        let mut alternative = result("vgpu-0", &consumed);
        alternative["request"] = json!("gpu/large");
        let alternative = of(&object(&json!([alternative])), 1).unwrap();
        assert_eq!(alternative.devices[0].request, "gpu");

        // A claim that has the device to itself.
        let results = json!([{
            "driver": "vgpu.dev", "pool": "node", "device": "vgpu-0", "request": "gpu",
        }]);
        let whole = of(&object(&results), 1).unwrap();
        assert_eq!(whole.guest.memory, Some(64 << 30));
        assert_eq!(whole.guest.weight, DEFAULT_COMPUTE);
    }

    #[test]
    fn a_claim_that_is_none_of_this_node_is_refused() {
        let options = Options::for_tests();
        let none = allocation(&claim(), None, "node", &executor(1), &options);
        assert_eq!(none, Err(AllocationError::NoClaim("default/llama".into())));
        let text = |object: &Value| of(object, 1).unwrap_err().to_string();
        let mut other = object(&json!([]));
        assert_eq!(
            text(&other),
            "claim default/llama has no device of vgpu.dev on node node"
        );
        other["metadata"]["uid"] = json!("9f2c-2");
        assert!(text(&other).contains("it is another claim of this name"));
        assert_eq!(parts(&claim(), Some(&other), "node"), Ok(Vec::new()));
        for device in ["vgpu-1", "gpu", ""] {
            let error = text(&object(&json!([result(device, &json!({}))])));
            assert!(error.contains("the executor has no device"), "{error}");
        }
        for memory in [json!("0"), json!("-1"), json!("much"), json!(5)] {
            let consumed = json!({"memory": memory});
            let error = text(&object(&json!([result("vgpu-0", &consumed)])));
            assert!(error.contains("memory is"), "{error}");
        }
        let allocated = object(&json!([result("vgpu-0", &json!({}))]));
        let count = |object, node| parts(&claim(), object, node).unwrap().len();
        assert_eq!(count(Some(&allocated), "node"), 1);
        assert_eq!(count(Some(&allocated), "other"), 0);
        assert_eq!(count(None, "node"), 0);

        let mut admin = result("vgpu-0", &json!({}));
        admin["adminAccess"] = json!(true);
        let error = text(&object(&json!([admin])));
        assert!(error.contains("administrative access"), "{error}");
        let mut config = allocated.clone();
        let own = json!([{"opaque": {"driver": "vgpu.dev", "parameters": {}}}]);
        config["status"]["allocation"]["devices"]["config"] = own;
        let error = text(&config);
        assert!(error.contains("has parameters"), "{error}");
    }

    #[test]
    fn names_that_are_no_parts_of_paths_are_refused() {
        assert_eq!(claim().check(), Ok(()));
        for uid in ["", "..", "a/b", "a.b", &"a".repeat(65)] {
            let claim = ClaimId {
                uid: uid.into(),
                ..claim()
            };
            assert_eq!(claim.check(), Err(AllocationError::Uid(uid.into())));
        }
        for name in ["", "a/b", "..", "a?b", "a%2f"] {
            let claim = ClaimId {
                name: name.into(),
                ..claim()
            };
            assert!(matches!(claim.check(), Err(AllocationError::NoClaim(_))));
        }
    }
}
