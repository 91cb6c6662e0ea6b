//! What a monitor says over vfio-user: messages that pass the filter, and the function behind it.

use vgpu_executor::vm::fuzzing::Machine;

pub(crate) fn run(data: &[u8]) {
    thread_local! {
        static MACHINE: std::cell::RefCell<Machine> = std::cell::RefCell::new(Machine::new());
    }
    MACHINE.with_borrow_mut(|machine| machine.hear(data));
}
