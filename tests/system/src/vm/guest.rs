//! A running virtual machine, whose serial port runs commands.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;

use super::qemu::Qemu;
use xtask_common::process::Dialogue;

/// The timeout of a boot.
const BOOT: Duration = Duration::from_secs(300);

/// A booted guest. Killed on drop.
pub(super) struct Guest {
    console: Dialogue,
    timeout: Duration,
}

/// The output of a command in the guest, and its exit status.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) status: i32,
    pub(super) output: String,
}

impl Ran {
    /// The output of a command that must succeed.
    pub(super) fn good(self, what: &str) -> Result<String> {
        if self.status != 0 {
            bail!(
                "{what} ended with {} in the guest:\n{}",
                self.status,
                last(&self.output, 40)
            );
        }
        Ok(self.output)
    }
}

/// The last lines of a text.
pub(super) fn last(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The parts of a virtual machine.
pub(super) struct Machine<'a> {
    pub(super) qemu: &'a Qemu,
    /// The accelerator: `kvm`, or an emulator.
    pub(super) accelerator: &'a str,
    pub(super) kernel: &'a Path,
    pub(super) initramfs: &'a Path,
    /// The first program of the initramfs, with further kernel parameters.
    pub(super) init: &'a str,
    /// Arguments for its devices.
    pub(super) devices: &'a [String],
    pub(super) memory: &'a str,
}

impl Guest {
    /// Boots a virtual machine. QEMU's output goes to `log`.
    pub(super) fn boot(machine: &Machine<'_>, log: &Path) -> Result<Guest> {
        let mut qemu = machine.qemu.command();
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
            .args(["-accel", machine.accelerator])
            .args(["-cpu", "max", "-smp", "2", "-m", machine.memory])
            .arg("-kernel")
            .arg(machine.kernel)
            .arg("-initrd")
            .arg(machine.initramfs)
            .arg("-append")
            .arg(format!(
                "console=ttyS0 quiet panic=-1 rdinit={}",
                machine.init
            ))
            .args(machine.devices);
        if !machine
            .devices
            .iter()
            .any(|argument| argument == "-machine")
        {
            qemu.args(["-machine", "q35"]);
        }
        let console = Dialogue::start(&mut qemu, log)?;
        let mut guest = Guest {
            console,
            timeout: BOOT,
        };
        guest
            .until("@@ready", Instant::now() + BOOT)
            .context("the guest does not boot")?;
        Ok(guest)
    }

    /// Waits until the guest has booted again.
    pub(super) fn wait_for_boot(&mut self) -> Result<()> {
        self.until("@@ready", Instant::now() + BOOT)
            .context("the guest does not boot again")
            .map(drop)
    }

    /// Ends QEMU with SIGKILL.
    pub(super) fn kill(&self) -> Result<()> {
        self.console.signal(Signal::KILL)
    }

    /// Sets the timeout of later commands.
    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Runs a line of shell in the guest.
    pub(super) fn run(&mut self, line: &str) -> Result<Ran> {
        self.begin(line)?;
        self.finish()
    }

    /// Begins to run a line of shell. [`Guest::finish`] waits for its end.
    pub(super) fn begin(&mut self, line: &str) -> Result<()> {
        self.console.write_line(line)
    }

    /// Waits for the end of the line of shell that [`Guest::begin`] has begun.
    pub(super) fn finish(&mut self) -> Result<Ran> {
        let deadline = Instant::now() + self.timeout;
        let (output, end) = self.until("@@done ", deadline)?;
        let status = end
            .trim()
            .parse()
            .with_context(|| format!("the guest says {end:?} for a status"))?;
        Ok(Ran { status, output })
    }

    /// Starts a line of shell without waiting for its end.
    pub(super) fn start(&mut self, line: &str) -> Result<()> {
        self.run(&format!("({line}) & "))
            .and_then(|ran| ran.good("starting a program"))
            .map(drop)
    }

    /// Reads up to a line that begins with `mark`. Returns the text before the line and the text
    /// after the mark.
    fn until(&mut self, mark: &str, deadline: Instant) -> Result<(String, String)> {
        let mut before = String::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.console.read_line(left).with_context(|| {
                format!("waiting for the guest; so far:\n{}", last(&before, 20))
            })?;
            // A program may end without a line break.
            if let Some((rest, end)) = line.split_once(mark) {
                before.push_str(rest);
                return Ok((before, end.to_owned()));
            }
            before.push_str(line.trim_end_matches('\r'));
            before.push('\n');
        }
    }
}
