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
        if let Some(line) = self.line(Instant::now(), event) {
            info!(vm = self.vm, "{line}");
        }
    }

    /// Logs a fault.
    pub(super) fn warn(&self, event: impl Display) {
        if let Some(line) = self.line(Instant::now(), event) {
            warn!(vm = self.vm, "{line}");
        }
    }

    /// The line about an event, which says how many lines were left out before it. `None`: it is
    /// left out.
    fn line(&self, now: Instant, event: impl Display) -> Option<String> {
        Some(match self.limit.allow(now)? {
            0 => event.to_string(),
            others => format!("{event}; {others} lines about this machine were left out"),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn lines_about_a_machine_are_limited_and_those_left_out_are_counted() {
        let log = MachineLog::new("vm");
        let begin = Instant::now();
        let said = (0..100).filter_map(|i| log.line(begin, format!("event {i}")));
        let said: Vec<String> = said.collect();
        assert_eq!(said.len(), LINES as usize);
        assert_eq!(said[3], "event 3");
        let later = begin + Duration::from_secs(11);
        assert_eq!(
            log.line(later, "one more").as_deref(),
            Some("one more; 80 lines about this machine were left out")
        );
    }
}
