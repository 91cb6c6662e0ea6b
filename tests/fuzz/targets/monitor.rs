//! Messages of a hypervisor over vfio-user: the filter, and the PCI function behind it.

use vgpu_executor::vm::fuzzing::Machine;

pub(crate) fn run(data: &[u8]) {
    thread_local! {
        static MACHINE: std::cell::RefCell<Machine> = std::cell::RefCell::new(Machine::new());
    }
    MACHINE.with_borrow_mut(|machine| machine.receive(data));
}
