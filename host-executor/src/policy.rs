//! What the operator allows a guest: links, memory, a share of the device's time.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LinkKind {
    /// A unix socket: a program or a container on this machine.
    Unix,
    /// A PCI device of a virtual machine.
    Pci,
    /// A vsock connection of a virtual machine.
    Vsock,
    /// A TCP connection.
    Tcp,
}

impl LinkKind {
    /// Every kind of link.
    pub const ALL: [LinkKind; 4] = [
        LinkKind::Unix,
        LinkKind::Pci,
        LinkKind::Vsock,
        LinkKind::Tcp,
    ];

    /// The name in configurations, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            LinkKind::Unix => "unix",
            LinkKind::Pci => "pci",
            LinkKind::Vsock => "vsock",
            LinkKind::Tcp => "tcp",
        }
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no kind of link.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown kind of link {0:?}: expected unix, pci, vsock or tcp")]
pub struct ParseLinkKindError(String);

impl FromStr for LinkKind {
    type Err = ParseLinkKindError;

    fn from_str(text: &str) -> Result<LinkKind, ParseLinkKindError> {
        let found = LinkKind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| ParseLinkKindError(text.into()))
    }
}

/// Whether a guest with this list of devices may use `device`: an empty list is all devices.
pub(crate) fn permits(devices: &[usize], device: usize) -> bool {
    devices.is_empty() || devices.contains(&device)
}

/// Limits of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Quota of device memory in bytes. `None`: the memory that no quota reserves.
    pub memory: Option<u64>,
    /// Share of the device's time, relative to the weights of the other guests.
    pub weight: u32,
    /// Graphs of all the guest's programs that may be started and unfinished at once. Further
    /// graphs wait.
    pub graphs_in_flight: usize,
    /// The kinds of link over which the guest may connect.
    pub links: Vec<LinkKind>,
    /// Whether the guest's graphs may run in one batch with other graphs that multiply with the
    /// same weights.
    pub batch: bool,
    /// The devices of the executor that the guest may use, by their position among its engines, in
    /// the order in which the guest sees them. Empty: all, in the order of the engines.
    #[serde(default)]
    pub devices: Vec<usize>,
    /// Quotas in bytes on devices where the guest has another one than `memory`.
    #[serde(default)]
    pub memory_on: BTreeMap<usize, u64>,
}

impl Policy {
    /// Whether the guest may use this device.
    pub fn permits(&self, device: usize) -> bool {
        permits(&self.devices, device)
    }

    /// These limits on a device. Where the guest may use nothing, nothing is reserved beyond what
    /// it still has from before.
    pub(crate) fn on_device(&self, device: usize) -> Policy {
        Policy {
            memory: match self.permits(device) {
                true => { self.memory_on.get(&device).copied() }.or(self.memory),
                false => Some(0),
            },
            memory_on: BTreeMap::new(),
            ..self.clone()
        }
    }

    /// The quota that is reserved on a device, in bytes.
    pub fn quota_on(&self, device: usize) -> u64 {
        self.on_device(device).memory.unwrap_or(0)
    }

    /// The largest weight.
    pub const MAX_WEIGHT: u32 = 1000;
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            memory: None,
            weight: 1,
            graphs_in_flight: 8,
            links: LinkKind::ALL.into(),
            batch: true,
            devices: Vec::new(),
            memory_on: BTreeMap::new(),
        }
    }
}
