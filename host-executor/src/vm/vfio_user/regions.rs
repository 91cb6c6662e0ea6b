//! What the device has, as the `vfio_user` crate tells a hypervisor: regions and interrupts.
#![forbid(unsafe_code)]

use vfio_user::{IrqInfo, ServerRegion, SparseArea};

use super::device::{BAR0_SIZE, CONFIG_SIZE};

/// Regions of a VFIO PCI device: six BARs, ROM, configuration space, VGA (`linux/vfio.h`).
const REGIONS: u32 = 9;
const CONFIG: u32 = 7;

/// Kinds of interrupt of a VFIO PCI device. The function has no interrupts.
const INTERRUPTS: u32 = 5;

/// The regions of the device. The window is one area, so the hypervisor maps all of it.
pub(super) fn regions(window: usize, memory: i32) -> Vec<ServerRegion> {
    use vfio_bindings::bindings::vfio::{
        VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
        vfio_region_info, vfio_region_sparse_mmap_area,
    };
    let both = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    let region = |index| {
        let (size, flags) = match index {
            0 => (BAR0_SIZE as u64, both),
            1 => (window as u64, both | VFIO_REGION_INFO_FLAG_MMAP),
            CONFIG => (CONFIG_SIZE as u64, both),
            _ => (0, 0),
        };
        let area = SparseArea {
            area: vfio_region_sparse_mmap_area { offset: 0, size },
        };
        let is_window = index == 1;
        ServerRegion {
            region_info: vfio_region_info {
                argsz: size_of::<vfio_region_info>() as u32,
                flags,
                index,
                size,
                ..Default::default()
            },
            sparse_areas: if is_window { vec![area] } else { Vec::new() },
            mmap_fd: is_window.then_some(memory),
        }
    };
    (0..REGIONS).map(region).collect()
}

/// The interrupts of the device: none of any kind.
pub(super) fn interrupts() -> Vec<IrqInfo> {
    let none = |index| IrqInfo {
        index,
        flags: 0,
        count: 0,
    };
    (0..INTERRUPTS).map(none).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_window_is_mapped() {
        let regions = regions(64 << 20, 9);
        assert_eq!(regions.len(), REGIONS as usize);
        let mapped: Vec<_> = regions
            .iter()
            .filter(|r| r.mmap_fd.is_some() || !r.sparse_areas.is_empty())
            .map(|r| (r.region_info.index, r.region_info.size))
            .collect();
        assert_eq!(mapped, [(1, 64 << 20)]);
        assert!(interrupts().iter().all(|i| i.count == 0));
    }
}
