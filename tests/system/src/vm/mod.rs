//! `cargo xtask vm`: a real guest under QEMU, with the files of an ordinary installation.

mod certificates;
mod cpio;
mod debian;
mod device;
mod events;
mod guest;
mod image;
mod inside;
mod links;
mod minimal;
mod prepared;
mod program;
mod qemu;
mod qmp;
mod systemd;

pub(crate) use device::{Booted, VmDevice, boot};
pub(crate) use events::boot_events;
pub(crate) use inside::GuestOps;
pub(crate) use links::boot_without_device;
pub(crate) use minimal::boot_minimal;
pub(crate) use prepared::{Prepared, prepare};
pub(crate) use systemd::boot_systemd;

/// A kind of guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum GuestKind {
    /// With a vGPU on stock QEMU (ivshmem)
    Ivshmem,
    /// With a vGPU on a newer QEMU (vfio-user)
    VfioUser,
    /// Without the device: vsock, TCP with TLS
    Links,
    /// With systemd and vgpu's Debian packages: services
    Systemd,
    /// With a vGPU that is paused, put to sleep, reset, unplugged and killed
    Events,
}

impl GuestKind {
    /// All kinds.
    pub(crate) const ALL: [GuestKind; 5] = [
        GuestKind::Ivshmem,
        GuestKind::VfioUser,
        GuestKind::Links,
        GuestKind::Systemd,
        GuestKind::Events,
    ];
}
