//! Discovery of the vGPUs among this machine's PCI devices.
//!
//! The module reads ids, class and driver from sysfs. The module does not touch devices with other
//! ids, nor devices with a bound driver. A physical NVIDIA GPU may have the same id as the
//! project's own function; its subsystem id differs, and the module checks it before any access to
//! the device's memory.
#![forbid(unsafe_code)]

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The folder in which the kernel lists PCI devices.
pub const SYSFS: &str = "/sys/bus/pci/devices";

/// The vendor and device id of QEMU's `ivshmem` devices.
pub const IVSHMEM: (u16, u16) = (0x1af4, 0x1110);

/// The vendor and device id of the project's own function. NVIDIA's H100 has the same id, so
/// programs that know the H100 find a GPU.
pub const VGPU: (u16, u16) = (0x10de, 0x2331);

/// The subsystem id of the project's own function. No NVIDIA device has this id.
pub const VGPU_SUBSYSTEM: (u16, u16) = (0x1af4, 0x5647);

/// The class of the project's own function: a 3D controller.
pub const VGPU_CLASS: u32 = 0x03_02_00;

/// The address of a PCI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// PCI domain.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
    /// Function.
    pub function: u8,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain, self.bus, self.device, self.function
        )
    }
}

/// Why a text is not a PCI address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a PCI address such as 0000:00:05.0")]
pub struct AddressError;

impl FromStr for Address {
    type Err = AddressError;

    /// `0000:00:05.0`, or without the domain, as `lspci` shows it: `00:05.0`.
    fn from_str(text: &str) -> Result<Address, AddressError> {
        let (rest, function) = text.rsplit_once('.').ok_or(AddressError)?;
        let parts: Vec<&str> = rest.split(':').collect();
        let (domain, bus, device) = match parts[..] {
            [bus, device] => ("0", bus, device),
            [domain, bus, device] => (domain, bus, device),
            _ => return Err(AddressError),
        };
        let hex = |text: &str, max: u32| {
            let value = u32::from_str_radix(text, 16).map_err(|_| AddressError)?;
            if value <= max && text.bytes().all(|b| b.is_ascii_hexdigit()) {
                Ok(value)
            } else {
                Err(AddressError)
            }
        };
        Ok(Address {
            domain: hex(domain, u32::MAX)?,
            bus: hex(bus, 0xff)? as u8,
            device: hex(device, 0x1f)? as u8,
            function: hex(function, 7)? as u8,
        })
    }
}

/// The kind of a PCI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PciDeviceKind {
    /// `ivshmem-doorbell`. The device is a vGPU if its memory has a directory.
    Ivshmem,
    /// The project's own function.
    Vgpu,
    /// A physical GPU: the id of the project's own function with another subsystem. Not touched.
    RealGpu,
    /// Any other device. Not touched.
    Other,
}

/// Why sysfs does not describe a device.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// A file has no hexadecimal number.
    #[error("{name} says {text:?}")]
    Number {
        /// The file's name.
        name: &'static str,
        /// What the file has instead.
        text: String,
    },
}

/// A PCI device, as sysfs describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The address.
    pub address: Address,
    /// Vendor and device id.
    pub id: (u16, u16),
    /// Vendor and device id of the subsystem.
    pub subsystem: (u16, u16),
    /// Base class, subclass, programming interface.
    pub class: u32,
    /// The bound driver.
    pub driver: Option<String>,
    /// The kind of the device.
    pub kind: PciDeviceKind,
    /// The device's folder in sysfs.
    pub path: PathBuf,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} [{:04x}:{:04x}] class {:04x}",
            self.address,
            self.id.0,
            self.id.1,
            self.class >> 8
        )
    }
}

impl Found {
    /// Reads the description of the device at `address`.
    ///
    /// # Errors
    ///
    /// When the device does not exist, or sysfs has no valid id or class of it.
    pub fn read(sysfs: &Path, address: Address) -> Result<Found, SysfsError> {
        let path = sysfs.join(address.to_string());
        let number = |name: &'static str| {
            let text = fs::read_to_string(path.join(name))?;
            let digits = text.trim().trim_start_matches("0x");
            u32::from_str_radix(digits, 16).map_err(|_| SysfsError::Number {
                name,
                text: text.trim().to_owned(),
            })
        };
        let id = (number("vendor")? as u16, number("device")? as u16);
        let subsystem = (
            number("subsystem_vendor").unwrap_or(0) as u16,
            number("subsystem_device").unwrap_or(0) as u16,
        );
        let kind = match id {
            IVSHMEM => PciDeviceKind::Ivshmem,
            VGPU if subsystem == VGPU_SUBSYSTEM => PciDeviceKind::Vgpu,
            VGPU => PciDeviceKind::RealGpu,
            _ => PciDeviceKind::Other,
        };
        let driver = fs::read_link(path.join("driver")).ok();
        Ok(Found {
            address,
            id,
            subsystem,
            class: number("class")?,
            driver: driver.and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned())),
            kind,
            path,
        })
    }

    /// Whether the device may be a vGPU and has no bound driver. The guest may access its memory.
    pub fn is_candidate(&self) -> bool {
        matches!(self.kind, PciDeviceKind::Ivshmem | PciDeviceKind::Vgpu) && self.driver.is_none()
    }

    /// The number of the BAR with the window.
    pub fn window_bar(&self) -> usize {
        if self.kind == PciDeviceKind::Vgpu {
            1
        } else {
            2
        }
    }

    /// The sysfs file of the window's BAR, write-combined where the kernel offers that. All users
    /// must map the same file: two mappings of different kinds would both be uncached.
    pub fn window_file(&self) -> PathBuf {
        let bar = self.window_bar();
        let combined = self.path.join(format!("resource{bar}_wc"));
        if combined.exists() {
            combined
        } else {
            self.path.join(format!("resource{bar}"))
        }
    }

    /// The sysfs file of the BAR with the registers.
    pub fn register_file(&self) -> PathBuf {
        self.path.join("resource0")
    }

    /// The size of the BAR with the window, in bytes, from the kernel's table.
    pub fn window_size(&self) -> Option<u64> {
        let table = fs::read_to_string(self.path.join("resource")).ok()?;
        let line = table.lines().nth(self.window_bar())?;
        let mut ends = line
            .split_whitespace()
            .map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
        let (start, end) = (ends.next()?.ok()?, ends.next()?.ok()?);
        (start != 0 && end > start).then(|| end - start + 1)
    }

    /// Whether the device responds to accesses to its memory.
    pub fn is_enabled(&self) -> bool {
        fs::read_to_string(self.path.join("enable")).is_ok_and(|text| text.trim() != "0")
    }
}

/// All PCI devices of this machine, in the order of their addresses. Empty on a machine without
/// PCI.
pub fn all(sysfs: &Path) -> Vec<Found> {
    let Ok(entries) = fs::read_dir(sysfs) else {
        return Vec::new();
    };
    let mut addresses: Vec<Address> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    addresses.sort();
    addresses
        .into_iter()
        .filter_map(|address| Found::read(sysfs, address).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(PathBuf, #[allow(dead_code)] tempfile::TempDir);

    impl Tree {
        fn new() -> Tree {
            let folder = tempfile::tempdir().unwrap();
            Tree(folder.path().to_owned(), folder)
        }

        fn device(&self, address: &str, files: &[(&str, &str)]) {
            let dir = self.0.join(address);
            fs::create_dir(&dir).unwrap();
            for (name, text) in files {
                fs::write(dir.join(name), format!("{text}\n")).unwrap();
            }
        }
    }

    #[test]
    fn addresses_have_the_format_of_lspci() {
        let address = Address {
            domain: 0,
            bus: 0,
            device: 0x1f,
            function: 7,
        };
        assert_eq!("0000:00:1f.7".parse(), Ok(address));
        assert_eq!("00:1f.7".parse(), Ok(address));
        assert_eq!(address.to_string(), "0000:00:1f.7");
        assert!("10000:e1:00.0".parse::<Address>().is_ok());
        for text in [
            "",
            "00:05",
            "5.0",
            "00:20.0",
            "00:05.8",
            "0:00:05.0:1",
            "+0:05.0",
        ] {
            assert_eq!(text.parse::<Address>(), Err(AddressError), "{text}");
        }
    }

    #[test]
    fn devices_are_classified() {
        let tree = Tree::new();
        let ids = |vendor: &'static str, device, sub_vendor, sub_device| {
            [
                ("vendor", vendor),
                ("device", device),
                ("subsystem_vendor", sub_vendor),
                ("subsystem_device", sub_device),
                ("class", "0x030200"),
                ("enable", "0"),
            ]
        };
        tree.device("0000:00:06.0", &ids("0x10de", "0x2331", "0x1af4", "0x5647"));
        tree.device("0000:00:05.0", &ids("0x1af4", "0x1110", "0x1af4", "0x1100"));
        tree.device("0000:00:07.0", &ids("0x10de", "0x2331", "0x10de", "0x1626"));
        tree.device("0000:00:02.0", &ids("0x8086", "0x100e", "0x8086", "0x0001"));
        tree.device("0000:00:08.0", &ids("0x1af4", "0x1110", "0x1af4", "0x1100"));
        tree.device("0000:00:09.0", &[("vendor", "nonsense")]);
        std::os::unix::fs::symlink("../../drivers/vfio-pci", tree.0.join("0000:00:08.0/driver"))
            .unwrap();
        fs::write(
            tree.0.join("0000:00:05.0/resource"),
            "0x00000000fe000000 0x00000000fe0000ff 0x0000000000040200\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
             0x00000000e0000000 0x00000000e3ffffff 0x000000000014220c\n",
        )
        .unwrap();

        let found = all(&tree.0);
        let kinds: Vec<PciDeviceKind> = found.iter().map(|device| device.kind).collect();
        assert_eq!(
            kinds,
            [
                PciDeviceKind::Other,
                PciDeviceKind::Ivshmem,
                PciDeviceKind::Vgpu,
                PciDeviceKind::RealGpu,
                PciDeviceKind::Ivshmem
            ]
        );
        let candidates: Vec<bool> = found.iter().map(Found::is_candidate).collect();
        assert_eq!(candidates, [false, true, true, false, false]);
        assert_eq!(found[4].driver.as_deref(), Some("vfio-pci"));
        assert_eq!(found[1].window_size(), Some(64 << 20));
        assert!(!found[1].is_enabled());
        assert!(found[1].window_file().ends_with("resource2"));
        fs::write(found[2].path.join("resource1_wc"), "").unwrap();
        assert!(found[2].window_file().ends_with("resource1_wc"));
        assert_eq!(found[2].to_string(), "0000:00:06.0 [10de:2331] class 0302");
        assert!(all(&tree.0.join("nothing")).is_empty());
    }
}
