//! Virtual machines: each has a socket of its own, to which its hypervisor connects.
//!
//! - `ivshmem`: stock QEMU's `ivshmem-doorbell` device.
//! - `vfio_user`: a PCI function of our own, for hypervisors that speak vfio-user.

mod accept;
mod ivshmem;
mod options;
#[cfg(feature = "vfio-user")]
mod vfio_user;

pub use ivshmem::IvshmemListener;
pub use options::{ParseVmError, VmOptions};
#[cfg(feature = "vfio-user")]
pub use vfio_user::VfioUserListener;
#[cfg(feature = "vfio-user")]
#[doc(hidden)]
pub use vfio_user::fuzzing;
