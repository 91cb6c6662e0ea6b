//! The log lines about the connections of one virtual machine, and the limit on them.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use tracing::{info, warn};

use crate::log_limit::LogLimit;

/// Lines in 10 s about the connections of one virtual machine. A hypervisor that connects, breaks
/// the protocol and is disconnected causes four.
const LINES: u64 = 20;

/// Logs what happens to the connections of one virtual machine. Whoever can open the machine's
/// socket can cause these lines, so their number is limited.
#[derive(Debug)]
pub(super) struct MachineLog {
    vm: String,
    limit: LogLimit,
}

impl MachineLog {
    /// The log of the virtual machine of this name.
    pub(super) fn new(vm: &str) -> Arc<MachineLog> {
        Arc::new(MachineLog {
            vm: vm.to_owned(),
            limit: LogLimit::new(LINES),
        })
    }

    /// Logs an expected event.
    pub(super) fn info(&self, event: impl Display) {
        let vm = &self.vm;
        match self.limit.allow(Instant::now()) {
            None => {}
            Some(0) => info!(vm, "{event}"),
            Some(others) => info!(
                vm,
                "{event}; {others} lines about this machine were left out"
            ),
        }
    }

    /// Logs a fault.
    pub(super) fn warn(&self, event: impl Display) {
        let vm = &self.vm;
        match self.limit.allow(Instant::now()) {
            None => {}
            Some(0) => warn!(vm, "{event}"),
            Some(others) => warn!(
                vm,
                "{event}; {others} lines about this machine were left out"
            ),
        }
    }
}
