//! A virtual machine as a process: the stand-in for QEMU and the guest's kernel, in a mount
//! namespace in which the stand-in's folder of PCI devices is that of the kernel. Programs that are
//! started in this namespace find the device where the plugin looks for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use vgpu_machine_standin as standin;
use xtask_common::process::Dialogue;

use super::guest::HANG;
use super::setup::Setup;

/// The shell line that shows a folder, the first argument, as the machine's PCI devices, and then
/// becomes the other arguments.
const SHOW: &str = "mount --bind \"$0\" /sys/bus/pci/devices && exec \"$@\"";

/// What a machine says when it has its device.
const PLUGGED: &str = "plugged";

/// Options of the process of a machine.
#[derive(Debug, clap::Args)]
pub(crate) struct MachineOptions {
    /// The socket of the executor
    socket: PathBuf,
    /// The empty folder of the machine's PCI devices
    sysfs: PathBuf,
}

/// Is a machine until the end of standard input.
pub(crate) fn be_machine(options: &MachineOptions) -> Result<()> {
    let machine = standin::Machine::plug(&options.socket, &options.sysfs)
        .with_context(|| format!("a device from {}", options.socket.display()))?;
    xtask_common::println!("{PLUGGED}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).context("reading standard input")?;
    drop(machine);
    Ok(())
}

/// A copy of this program, which a build may replace while the events happen.
fn own_program(setup: &Setup<'_>) -> Result<PathBuf> {
    let copy = setup.scratch.path().join("machine");
    if !copy.exists() {
        // Also if a build has replaced the file since this program was started.
        std::fs::copy("/proc/self/exe", &copy).context("copying this program")?;
    }
    Ok(copy)
}

/// How this user makes a mount namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Namespace {
    Mount,
    /// With a user namespace around it, in which the user is root.
    UserAndMount,
}

impl Namespace {
    /// What this user may make, with a folder in place of the PCI devices. `None` if nothing.
    pub(super) fn find(folder: &Path) -> Option<Namespace> {
        [Namespace::Mount, Namespace::UserAndMount]
            .into_iter()
            .find(|namespace| {
                let mut probe = namespace.command(folder);
                probe.args(["nsenter", "--version"]);
                probe.stdout(Stdio::null()).stderr(Stdio::null());
                probe.status().is_ok_and(|status| status.success())
            })
    }

    /// The command that starts the program in further arguments with `sysfs` as the PCI devices.
    fn command(self, sysfs: &Path) -> Command {
        let mut command = Command::new("unshare");
        if self == Namespace::UserAndMount {
            command.arg("--map-root-user");
        }
        command
            .args(["--mount", "--propagation", "private"])
            .args(["sh", "-c", SHOW])
            .arg(sysfs);
        command
    }

    /// The command that starts the program in further arguments in the namespace of a process.
    fn enter(self, pid: u32) -> Vec<String> {
        let target = format!("--target={pid}");
        let more: &[&str] = match self {
            Namespace::Mount => &["--mount"],
            Namespace::UserAndMount => &["--user", "--preserve-credentials", "--mount"],
        };
        let words = ["nsenter", &target].into_iter();
        words
            .chain(more.iter().copied())
            .map(str::to_owned)
            .collect()
    }
}

/// A running machine; killed on drop. Its programs are other processes.
#[derive(Debug)]
pub(super) struct Machine {
    process: Dialogue,
    namespace: Option<Namespace>,
    sysfs: PathBuf,
}

impl Machine {
    /// Starts a machine whose device comes from the executor at `socket`. `sysfs` is a folder that
    /// does not exist yet. Without a namespace the machine can have no programs.
    pub(super) fn start(
        setup: &Setup<'_>,
        namespace: Option<Namespace>,
        socket: &Path,
        sysfs: PathBuf,
    ) -> Result<Machine> {
        std::fs::create_dir(&sysfs).with_context(|| format!("creating {}", sysfs.display()))?;
        let program = own_program(setup)?;
        let mut command = match namespace {
            Some(namespace) => {
                let mut command = namespace.command(&sysfs);
                command.arg(program);
                command
            }
            None => Command::new(program),
        };
        command.arg("machine").arg(socket).arg(&sysfs);
        let mut process = Dialogue::start(&mut command, &setup.log("events-machine"))?;
        let said = process.read_line(HANG)?;
        ensure!(said == PLUGGED, "the machine said {said:?}");
        Ok(Machine {
            process,
            namespace,
            sysfs,
        })
    }

    /// The command that starts a program of the machine.
    pub(super) fn enter(&self) -> Result<Vec<String>> {
        let namespace = self.namespace.context("the machine has no namespace")?;
        Ok(namespace.enter(self.process.pid()))
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // In the scratch folder, which is removed at the end.
        let _ = std::fs::remove_dir_all(&self.sysfs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtask_common::scratch::Scratch;

    #[test]
    fn programs_see_the_folder_as_their_pci_devices() {
        let scratch = Scratch::new().unwrap();
        std::fs::create_dir(scratch.path().join(standin::ADDRESS)).unwrap();
        // Where a user may make no namespace, there is nothing to see.
        let Some(namespace) = Namespace::find(scratch.path()) else {
            return;
        };
        let mut list = namespace.command(scratch.path());
        let output = list.args(["ls", "/sys/bus/pci/devices"]).output().unwrap();
        let seen = String::from_utf8(output.stdout).unwrap();
        assert_eq!(seen, format!("{}\n", standin::ADDRESS));
    }
}
