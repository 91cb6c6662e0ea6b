//! The kernel's limits of this process, and how much of them sessions may use.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::num::ParseIntError;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;
use vgpu_transport::size::shown;

use crate::limits::{HandshakeLimits, Limits};

/// Descriptors that a process raises its limit to if the kernel has none.
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// Descriptors that are kept for listeners, logs, metrics, control, the configuration and a
/// driver.
const OWN_DESCRIPTORS: usize = 128;

/// Descriptors of a connection in its handshake: sockets, eventfds, a window.
const OF_A_HANDSHAKE: usize = 5;

/// The file with the kernel's limit of memory mappings.
const MAX_MAP_COUNT: &str = "/proc/sys/vm/max_map_count";

/// Why the kernel's limits are not known.
#[derive(Debug, thiserror::Error)]
pub enum ProcessLimitsError {
    /// The file of a limit cannot be read.
    #[error("{MAX_MAP_COUNT}: {0}")]
    Read(#[from] io::Error),
    /// The file of a limit has no number.
    #[error("{MAX_MAP_COUNT}: {0}")]
    Parse(#[from] ParseIntError),
}

impl Limits {
    /// The limits by default, with the parts of the kernel's limits that guests of this process may
    /// use: three quarters of the memory mappings, and the file descriptors that neither the
    /// process itself nor handshakes need. Beside devices with a memory of their own, guests may
    /// use half of the memory of this machine or of the control group of the process. Raises the
    /// process's limit of descriptors as far as the kernel permits.
    ///
    /// # Errors
    /// `vm.max_map_count` cannot be read.
    pub fn of_this_process() -> Result<Limits, ProcessLimitsError> {
        let mappings: usize = fs::read_to_string(MAX_MAP_COUNT)?.trim().parse()?;
        let limits = Limits::default().with_machine_memory(vgpu_cpu::machine_memory());
        Ok(limits.with_kernel_limits(mappings, raise_descriptors()))
    }

    /// Half of so many bytes as host memory. 0: the kernel does not tell the number, and the limit
    /// stays.
    fn with_machine_memory(self, machine: u64) -> Limits {
        if machine == 0 {
            warn!(
                "the size of this machine's memory is unknown: guests may take {} of it beside \
                 GPUs, or engine.host-memory",
                shown(self.host_memory)
            );
            return self;
        }
        Limits {
            host_memory: machine / 2,
            ..self
        }
    }

    /// Divides so many memory mappings and file descriptors.
    fn with_kernel_limits(self, mappings: usize, descriptors: usize) -> Limits {
        let most = HandshakeLimits::default();
        // A connection that is cancelled counts until its thread has ended, so twice as many can be
        // there.
        let all = (descriptors / 32).clamp(8, most.all);
        let reserved = OWN_DESCRIPTORS + 2 * OF_A_HANDSHAKE * all;
        Limits {
            mappings: mappings - mappings / 4,
            descriptors: descriptors.saturating_sub(reserved),
            handshakes: HandshakeLimits {
                all,
                of_one_origin: (all / 4).min(most.of_one_origin),
            },
            ..self
        }
    }
}

/// Raises the limit of descriptors of this process as far as the kernel permits. Returns the limit.
pub fn raise_descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(MAX_DESCRIPTORS);
    let raised = Rlimit {
        current: Some(wanted),
        ..limit
    };
    let is_raised = setrlimit(Resource::Nofile, raised).is_ok();
    let now = if is_raised {
        Some(wanted)
    } else {
        limit.current
    };
    usize::try_from(now.unwrap_or(MAX_DESCRIPTORS)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_the_kernel_are_divided() {
        let usual = Limits::default().with_kernel_limits(65_530, 524_288);
        assert_eq!(usual.mappings, 49_148);
        assert_eq!(usual.handshakes, HandshakeLimits::default());
        assert_eq!(usual.descriptors, 524_288 - 128 - 2560);
        let small = Limits::default().with_kernel_limits(1000, 256);
        assert_eq!((small.mappings, small.descriptors), (750, 48));
        assert_eq!(small.handshakes.of_one_origin, 2);
        assert_eq!(Limits::default().with_kernel_limits(0, 20).descriptors, 0);
    }

    #[test]
    fn host_memory_is_half_of_the_machines_if_that_is_known() {
        let limits = |machine| Limits::default().with_machine_memory(machine).host_memory;
        assert_eq!(limits(100 << 30), 50 << 30);
        assert_eq!(limits(0), Limits::default().host_memory);
    }

    #[test]
    fn this_process_has_limits() {
        let limits = Limits::of_this_process().unwrap();
        assert!(limits.mappings > 1000, "{limits:?}");
        assert!(limits.host_memory > 64 << 20, "{limits:?}");
        assert_eq!(limits.host_memory, vgpu_cpu::machine_memory() / 2);
        let now = getrlimit(Resource::Nofile);
        assert_eq!(now.current, now.maximum.or(Some(MAX_DESCRIPTORS)));
    }
}
