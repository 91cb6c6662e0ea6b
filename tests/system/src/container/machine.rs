//! What the systems of tests, whose processes run as root, leave alone on this machine.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// The capabilities that no process of a system has, as `setpriv` takes them, and their bits
/// (`linux/capability.h`): namespaces do not divide the modules of the kernel, the ports and the
/// clock of this machine.
pub(crate) const DROPPED_CAPABILITIES: &str = "-sys_module,-sys_rawio,-sys_time";
const BITS: u64 = 1 << 16 | 1 << 17 | 1 << 25;

/// A process with this `/proc/PID/status` cannot get one of [`DROPPED_CAPABILITIES`].
///
/// # Errors
/// If it can.
pub(crate) fn expect_dropped(status: &str) -> Result<()> {
    let bounds = { status.lines() }.find_map(|line| line.strip_prefix("CapBnd:\t"));
    let bounds = bounds.context("a status has a bounding set")?;
    let set = u64::from_str_radix(bounds, 16).context("a bounding set")?;
    ensure!(
        set & BITS == 0,
        "the system has capabilities of {DROPPED_CAPABILITIES}: {bounds}"
    );
    Ok(())
}

/// Settings of the kernel that systemd, its services and the kubelet change when they start. They
/// are the same for all systems and this machine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KernelSettings(Vec<String>);

impl KernelSettings {
    const NAMES: [&'static str; 10] = [
        "kernel/core_pattern",
        "kernel/pid_max",
        "fs/nr_open",
        "fs/file-max",
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "kernel/panic",
        "kernel/panic_on_oops",
        "kernel/keys/root_maxkeys",
        "kernel/keys/root_maxbytes",
    ];

    /// # Errors
    /// If one cannot be read.
    pub(crate) fn read() -> Result<KernelSettings> {
        let values = KernelSettings::NAMES.iter().map(|name| {
            let path = Path::new("/proc/sys").join(name);
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        });
        Ok(KernelSettings(values.collect::<Result<_>>()?))
    }

    /// # Errors
    /// If one has another value now.
    pub(crate) fn expect_unchanged(&self) -> Result<()> {
        let now = KernelSettings::read()?;
        ensure!(now == *self, "{self:?} of the kernel became {now:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_that_are_left_are_seen() {
        expect_dropped("Name:\tsh\nCapBnd:\t000001fffdfcffff\n").unwrap();
        for left in ["000001fffdfdffff", "000001fffdfeffff", "000001fffffcffff"] {
            expect_dropped(&format!("CapBnd:\t{left}\n")).unwrap_err();
        }
    }
}
