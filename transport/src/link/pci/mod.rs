//! The link into a virtual machine: a [window](crate::window) in a PCI device's memory.
//!
//! Two devices carry it, one format for both:
//!
//! | device | id | window | doorbell |
//! |---|---|---|---|
//! | QEMU's `ivshmem-doorbell`, of any version | 1af4:1110 | BAR 2 | BAR 0 + 12: peer and vector, both 0 |
//! | our own function, over vfio-user | 10de:2331, subsystem 1af4:5647, class 0302 | BAR 1 | BAR 0 + 12 |
//!
//! A device is one window for a whole virtual machine, and any number of programs in it may want a session. So it is
//! cut into equal parts: the first holds the [directory], each of the others is a *slot* with a
//! window of its own, as other links have one for each session.
//!
//! ```text
//!      0 +-----------------------------+
//!        | directory (one page)        |
//!        | nothing                     |
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
//!  request[k] = a new number, doorbell ---------> end what ran in slot k, write its window anew
//!  wait for answered[k] == number  <------------- verdict[k], then answered[k] = number
//!  map slot k                                     a session begins
//! ```
//!
//! The lock is the guest kernel's, on the device's file in sysfs: processes and containers of one virtual machine never
//! take the same slot, and one that dies gives its slot back. The host trusts nothing of that.
//!
//! There is no driver in the guest, so no interrupt either: a guest that waits spins, then sleeps for a fraction
//! of what it has waited. A host that dies is noticed by its heartbeat, one that is replaced by the
//! directory's epoch; a guest that dies by its heartbeat, or when the next one takes its slot, or when the virtual machine
//! hangs up.

pub mod directory;
pub mod discover;
mod guest;
mod host;
pub mod ivshmem;
mod lock;

pub use guest::{DOORBELL, Device, PciError, connect};
pub use host::{Bell, PciArrival, VmError, VmEvent, VmWindow};
