//! The PCI devices of this machine.

use std::time::Duration;

use vgpu_transport::link::pci::discover::{PciDeviceKind, SYSFS, all};
use vgpu_transport::link::pci::{PciDevice, PciError};

use super::report::Report;
use super::root::Root;

/// Time without a heartbeat after which an executor counts as dead. A live executor beats once a
/// second.
const BEAT: Duration = Duration::from_secs(3);

pub(super) fn check(root: &Root, report: &mut Report) {
    let devices = all(&root.path(SYSFS));
    let mut found = false;
    for device in &devices {
        match device.kind {
            PciDeviceKind::Other => continue,
            PciDeviceKind::RealGpu => {
                report.note("pci", format!("{device}: a real NVIDIA GPU, ignored"));
                continue;
            }
            PciDeviceKind::Ivshmem | PciDeviceKind::Vgpu => {}
        }
        if let Some(driver) = &device.driver {
            report.note(
                "pci",
                format!("{device}: bound to the driver {driver}, ignored"),
            );
            continue;
        }
        match PciDevice::open(device) {
            Ok(open) => {
                found = true;
                let directory = open.directory();
                report.ok(
                    "pci",
                    format!(
                        "{device}: a vGPU, {} MiB, {} sessions at most, by {}",
                        directory.size >> 20,
                        directory.slots,
                        device.window_file().display()
                    ),
                );
                if open.is_alive(BEAT) {
                    report.ok("pci", format!("{device}: the executor is alive"));
                } else {
                    report.fail(
                        "pci",
                        format!(
                            "{device}: no heartbeat of an executor; start `vgpu serve --vm` on \
                             the host again"
                        ),
                        "on the host: sudo systemctl restart vgpu",
                    );
                }
            }
            Err(error) if device.kind == PciDeviceKind::Ivshmem && is_other(&error) => {
                report.note("pci", format!("{error}: not a vGPU's shared memory"));
            }
            Err(error) => {
                let next = next(root, &error);
                report.fail("pci", error.to_string(), next);
            }
        }
    }
    if !found {
        report.note(
            "pci",
            format!(
                "no vGPU among the {} PCI devices; in a virtual machine, add the device as `vgpu \
                 serve --help` says",
                devices.len()
            ),
        );
    }
}

fn is_other(error: &PciError) -> bool {
    matches!(error, PciError::NotVgpu { .. })
}

fn next(root: &Root, error: &PciError) -> String {
    match error {
        PciError::Permission { file, .. } => root.no_permission(file).1,
        PciError::Lockdown { .. } => "turn Secure Boot off, or use a vsock link".into(),
        _ => "on the host: journalctl --unit vgpu".into(),
    }
}
