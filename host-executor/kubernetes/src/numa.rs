//! The NUMA nodes of GPUs, by what the kernel says.

use std::fs;
use std::path::Path;

/// The NUMA node of a PCI device, such as `0000:01:00.0`. `None`: the kernel does not know it, as
/// on machines with one node, or does not know the device.
pub(crate) fn node_of(sysfs: &Path, address: &str) -> Option<u32> {
    let is_address = |b: u8| b.is_ascii_hexdigit() || b":.".contains(&b);
    if address.contains("..") || !address.bytes().all(is_address) {
        return None;
    }
    let folder = sysfs.join("bus/pci/devices");
    let file = folder.join(address.to_ascii_lowercase()).join("numa_node");
    // The kernel says -1 where it does not know.
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_the_node_or_does_not_know() {
        let sysfs = tempfile::tempdir().unwrap();
        for (address, text) in [
            ("0000:01:00.0", "1\n"),
            ("0000:c1:00.0", "0\n"),
            ("0000:02:00.0", "-1\n"),
        ] {
            let folder = sysfs.path().join("bus/pci/devices").join(address);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("numa_node"), text).unwrap();
        }
        let node_of = |address: &str| node_of(sysfs.path(), address);
        assert_eq!(node_of("0000:01:00.0"), Some(1));
        assert_eq!(node_of("0000:C1:00.0"), Some(0));
        assert_eq!(node_of("0000:02:00.0"), None);
        assert_eq!(node_of("0000:03:00.0"), None);
        assert_eq!(node_of("../devices/0000:01:00.0"), None);
        assert_eq!(node_of("..:0000"), None);
    }
}
