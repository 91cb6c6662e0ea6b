//! What the device of a virtual machine does, for a dump.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, Weak};

use vgpu_transport::link::pci::SlotWatch;
use vgpu_transport::lock::{lock, try_lock};

/// The virtual machine of a listener. Its hypervisor can end, and another one can connect.
#[derive(Debug)]
pub struct MachineWatch {
    name: String,
    /// Locked to set and to clone it, never while a thread waits.
    slots: Mutex<Option<Arc<SlotWatch>>>,
}

impl MachineWatch {
    /// A machine of this name without a device.
    pub fn new(name: &str) -> Arc<MachineWatch> {
        Arc::new(MachineWatch {
            name: name.to_owned(),
            slots: Mutex::new(None),
        })
    }

    /// The machine has a device now, or none.
    pub fn set(&self, slots: Option<&Arc<SlotWatch>>) {
        let before = std::mem::replace(&mut *lock(&self.slots), slots.cloned());
        drop(before);
    }

    /// Lines for people. Waits for no lock.
    fn dump(&self) -> String {
        let Some(slots) = try_lock(&self.slots).map(|slots| slots.clone()) else {
            return format!("virtual machine {}: unknown now", self.name);
        };
        match slots {
            Some(slots) => format!("virtual machine {}: {slots}", self.name),
            None => format!("virtual machine {}: no hypervisor has connected", self.name),
        }
    }
}

/// The virtual machines of a server. Locked to add a machine and to clone the list, never while a
/// thread waits.
#[derive(Debug, Default)]
pub(crate) struct MachineWatches(Mutex<Vec<Weak<MachineWatch>>>);

impl MachineWatches {
    /// Adds the machine of a listener, until the listener is dropped.
    pub(crate) fn add(&self, machine: &Arc<MachineWatch>) {
        let mut machines = lock(&self.0);
        machines.retain(|machine| machine.strong_count() > 0);
        machines.push(Arc::downgrade(machine));
    }

    /// Lines for people. Waits for no lock.
    pub(crate) fn dump(&self) -> Vec<String> {
        let Some(machines) = try_lock(&self.0).map(|machines| machines.clone()) else {
            return vec!["virtual machines: unknown now".into()];
        };
        let machines = machines.iter().filter_map(Weak::upgrade);
        machines.map(|machine| machine.dump()).collect()
    }
}
