//! The link into a virtual machine: a [window](crate::shm) in a PCI device's memory.
//!
//! Two devices carry the link, in one format:
//!
//! - QEMU's `ivshmem-doorbell`, of any version: id 1af4:1110. The window is BAR 2, the doorbell
//!   is BAR 0 + 12, with peer and vector, both 0.
//! - The project's own function, over vfio-user: id 10de:2331, subsystem 1af4:5647, class 0302. The
//!   window is BAR 1, the doorbell is BAR 0 + 12.
//!
//! A virtual machine has one device, and several of its programs may open sessions. The device's
//! memory therefore has equal parts: the first holds the [directory], and each of the others is a
//! *slot* with the window of one session.
//!
//! ```text
//!      0 +-----------------------------+
//!        | directory (one page)        |
//!        | unused                      |
//!   size/8 +---------------------------+
//!        | slot 0: a whole window      |   page 0, rings, bulk area
//!        +-----------------------------+
//!        | ...                         |
//!        +-----------------------------+
//!        | slot 6                      |
//!   size +-----------------------------+
//!
//!  guest                                          host
//!  lock byte k of the device's file
//!  request[k] = a new number, doorbell ---------> end the session in slot k, reset its window
//!  wait for answered[k] == number  <------------- verdict[k], then answered[k] = number
//!  map slot k                                     a session begins
//! ```
//!
//! The guest's kernel holds the lock, on the device's file in sysfs. Processes and containers of
//! one virtual machine therefore never use the same slot, and the kernel releases the slot of a
//! dead process. The host does not rely on the lock.
//!
//! The guest has no driver and receives no interrupts. A waiting guest spins, then sleeps for a
//! fraction of the time it has already waited. The guest detects a dead host by the heartbeat, and
//! a restarted host by the directory's epoch. The host detects a dead guest by the guest's
//! heartbeat, by the next request for its slot, or by the end of the virtual machine.

pub mod directory;
pub mod discover;
mod guest;
mod host;
pub mod ivshmem;
mod lock;
mod slots;

pub use guest::{DOORBELL, DeviceMismatch, PciDevice, PciError, connect};
pub use host::{PciArrival, VmDoorbell, VmError, VmEvent, VmWindow};
pub use slots::SlotWatch;
