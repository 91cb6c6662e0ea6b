//! Virtual machines: each has a socket of its own, to which its hypervisor connects.
//!
//! - `ivshmem`: stock QEMU's `ivshmem-doorbell` device.
//! - `vfio_user`: a PCI function of our own, for hypervisors that speak vfio-user.

mod accept;
mod ivshmem;
mod machine_log;
mod options;
mod stored_files;
#[cfg(feature = "vfio-user")]
mod vfio_user;

pub use ivshmem::IvshmemListener;
pub use options::{ParseVmError, VmOptions};
pub use stored_files::{FILES_OF_VM, UnservedMachines};
pub(crate) use stored_files::{names as stored_names, take_stored};
#[cfg(feature = "vfio-user")]
#[doc(hidden)]
pub use vfio_user::fuzzing;
#[cfg(feature = "vfio-user")]
pub use vfio_user::{Connections as VfioUserConnections, VfioUserListener};
