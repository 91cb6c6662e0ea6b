//! A guest with a vGPU among its PCI devices.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::guest::{Guest, Machine};
use super::inside::{As, GuestOps, PLUGIN, PROMPT, TOKENS, Way};
use super::prepared::{GUEST_TIMEOUT, MEMORY, Prepared, TIMEOUT};
use super::program::{LONG, Outcome, Program};
use super::qemu::Qemu;
use super::qmp::{self, Qmp};
use xtask_common::cache::Cache;
use xtask_common::process::Daemon;
use xtask_common::progress::Progress;
use xtask_common::workspace;

/// An executor that serves one virtual machine and is restarted after a kill.
pub(super) struct Served {
    fd_store: Daemon,
    socket: PathBuf,
}

/// The ready lines of a log.
fn starts(log: &str) -> usize {
    log.lines().filter(|l| l.starts_with("ready ")).count()
}

impl Served {
    /// Starts the executor with the further arguments `more`.
    pub(super) fn start(
        prepared: &Prepared,
        device: VmDevice,
        log: &Path,
        more: &[&str],
    ) -> Result<Served> {
        let socket = prepared.scratch.path().join("vm.sock");
        let mut fd_store = Command::new(&prepared.dist.vgpu);
        fd_store
            .args(["fd-store", "--"])
            .arg(&prepared.dist.vgpu)
            .args(["serve", "--engine", "cpu", "--vm"])
            .arg(format!("test,socket={},window=64M", socket.display()))
            .args(["--threads", &workspace::cores().to_string()])
            .args(["--device", device.name()])
            .args(more);
        let mut served = Served {
            fd_store: Daemon::start(&mut fd_store, log)?,
            socket,
        };
        served.wait_for(1)?;
        Ok(served)
    }

    /// Waits until the log contains this number of ready lines.
    fn wait_for(&mut self, count: usize) -> Result<()> {
        self.fd_store
            .wait_until(TIMEOUT, |fd_store| starts(&fd_store.log()) >= count)
    }

    /// How often an executor has become ready.
    fn starts(&self) -> usize {
        starts(&self.fd_store.log())
    }

    /// The id of the current executor process.
    fn pid(&self) -> Result<i32> {
        let log = self.fd_store.log();
        let pid = { log.lines().rev() }.find_map(|line| {
            let (_, told) = line.split_once("vgpu fd-store: pid ")?;
            let (pid, _) = told.split_once(" runs ")?;
            pid.parse().ok()
        });
        pid.context("vgpu fd-store does not report which process it runs")
    }

    /// Kills the executor. Returns when the next one is ready.
    fn kill(&mut self, count: usize) -> Result<()> {
        let pid = rustix::process::Pid::from_raw(self.pid()?).context("a process id")?;
        // The process is a child of `vgpu fd-store`, which has not reported its end, so its id is
        // valid.
        rustix::process::kill_process(pid, rustix::process::Signal::KILL)
            .context("killing the executor")?;
        self.wait_for(count + 1)
    }

    /// The socket that QEMU connects to.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The log so far.
    pub(super) fn log(&self) -> String {
        self.fd_store.log()
    }

    /// Ends the executor.
    pub(super) fn stop(self) -> Result<()> {
        self.fd_store.stop(TIMEOUT)
    }
}

/// The kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VmDevice {
    /// The device of stock QEMU.
    Ivshmem,
    /// vgpu's own PCI function, on a newer QEMU.
    VfioUser,
}

impl VmDevice {
    pub(crate) fn name(self) -> &'static str {
        match self {
            VmDevice::Ivshmem => "ivshmem",
            VmDevice::VfioUser => "vfio-user",
        }
    }

    /// QEMU's arguments.
    fn arguments(self, socket: &Path) -> Vec<String> {
        let socket = socket.display();
        match self {
            VmDevice::Ivshmem => vec![
                "-chardev".into(),
                format!("socket,id=vgpu0,path={socket}"),
                "-device".into(),
                "ivshmem-doorbell,chardev=vgpu0,vectors=1".into(),
            ],
            VmDevice::VfioUser => vec![
                "-object".into(),
                format!("memory-backend-memfd,id=mem,size={MEMORY},share=on"),
                "-machine".into(),
                "q35,memory-backend=mem".into(),
                // A device on the root bus cannot be unplugged.
                "-device".into(),
                "pcie-root-port,id=port0,chassis=1".into(),
                "-device".into(),
                format!(
                    r#"{{"driver":"vfio-user-pci","id":"vgpu0","bus":"port0","socket":{{"type":"unix","path":"{socket}"}}}}"#
                ),
            ],
        }
    }
}

/// The environment in which programs of the guest find the device.
pub(super) const PCI: Way<'_> = Way {
    environment: "VGPU_ENDPOINT=pci",
    link: "pci:0000:",
    who: As::Root,
};

/// A booted guest with a vGPU.
pub(crate) struct Booted {
    guest: Guest,
    served: Served,
    device: VmDevice,
    qemu: Qemu,
    qemu_log: PathBuf,
}

/// Starts an executor and boots a guest with this device.
pub(crate) fn boot(
    cache: &Cache,
    prepared: &Prepared,
    device: VmDevice,
    logs: &dyn Fn(&str) -> PathBuf,
) -> Result<Booted> {
    let qemu = match device {
        VmDevice::Ivshmem => prepared.qemu.clone(),
        VmDevice::VfioUser => Qemu::with_vfio_user(cache)?,
    };
    let log = |name: &str| logs(&format!("vm-{}-{name}", device.name()));
    let served = Served::start(prepared, device, &log("vgpu-serve"), &[])?;
    let qemu_log = log("qemu");
    let guest = boot_machine(prepared, &qemu, device, served.socket(), &qemu_log)?;
    Ok(Booted {
        guest,
        served,
        device,
        qemu,
        qemu_log,
    })
}

/// The socket of QEMU's monitor.
fn monitor(prepared: &Prepared) -> PathBuf {
    prepared.scratch.path().join("device-qmp.sock")
}

/// Boots a machine with the device of the executor at `socket`.
fn boot_machine(
    prepared: &Prepared,
    qemu: &Qemu,
    device: VmDevice,
    socket: &Path,
    log: &Path,
) -> Result<Guest> {
    let mut devices = device.arguments(socket);
    devices.extend(["-qmp".into(), qmp::argument(&monitor(prepared))]);
    let machine = Machine {
        qemu,
        accelerator: qemu.accelerator(),
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        init: "/init",
        devices: &devices,
        memory: MEMORY,
    };
    let mut guest = Guest::boot(&machine, log)?;
    guest.set_timeout(GUEST_TIMEOUT);
    Ok(guest)
}

impl Booted {
    /// The guest's kernel lists vgpu's PCI function as a GPU.
    pub(crate) fn lists(&mut self, wanted: &str) -> Result<String> {
        // The files that `lspci -n` reads.
        let list = self.guest.run(
            "cd /sys/bus/pci/devices; for d in *; do \
             echo $d $(cat $d/class) $(cat $d/vendor):$(cat $d/device); done",
        )?;
        let list = list.good("listing devices")?;
        ensure!(
            list.contains(wanted),
            "no {wanted:?} among the devices of the guest:\n{list}"
        );
        Ok(wanted.to_owned())
    }

    /// `vgpu doctor` reports no failure.
    pub(crate) fn doctor(&mut self) -> Result<String> {
        self.guest.doctor(&PCI)
    }

    /// Cases of test-backend-ops on VGPU0.
    pub(crate) fn ops(&mut self, cases: &GuestOps) -> Result<String> {
        self.guest.ops(&PCI, cases)
    }

    /// A generation through the plugin has the same text as one on the CPU.
    pub(crate) fn generations(&mut self) -> Result<String> {
        let reference = self.guest.reference()?;
        self.guest.generation(&PCI, &reference)
    }

    /// An unprivileged user may not use the device before udev has applied vgpu's rule, gets an
    /// error that says so, and may use the device afterwards.
    pub(crate) fn unprivileged(&mut self) -> Result<String> {
        let user = Way {
            who: As::User,
            ..PCI
        };
        self.guest.doctor_finds(&user, "no permission for")?;
        self.guest
            .run(
                "systemd-udevd --daemon && udevadm trigger --action=add --subsystem-match=pci && \
                 udevadm settle",
            )?
            .good("udev")?;
        self.guest.doctor(&user)?;
        let reference = self.guest.reference()?;
        self.guest.generation(&user, &reference)
    }

    /// Kills this number of executors during generations.
    pub(crate) fn kills(&mut self, kills: usize, progress: &Progress) -> Result<String> {
        let reference = self.guest.reference()?;
        let mut in_time = 0;
        for count in 1..=kills {
            progress.note(&format!("{count} of {kills}"));
            self.guest.start(&format!(
                "{PLUGIN} VGPU_ENDPOINT=pci llama-completion -m /vgpu/model.gguf -ngl 99 -n 400 \
                 --temp 0 -c 512 -t 2 -no-cnv --no-warmup --ignore-eos -p '{PROMPT}' \
                 > /tmp/out 2>/tmp/err; echo $? > /tmp/status"
            ))?;
            // The program has begun to write.
            let wait = "i=0; while [ $(wc -c < /tmp/out) -lt 100 ] && [ ! -e /tmp/status ] \
                        && [ $i -lt 3000 ]; do usleep 100000; i=$((i+1)); done; wc -c < /tmp/out";
            self.guest.run(wait)?.good("waiting for a generation")?;
            self.served.kill(count)?;
            let end = self
                .guest
                .run(
                    "i=0; while [ ! -e /tmp/status ] && [ $i -lt 3000 ]; do \
                     usleep 100000; i=$((i+1)); done; \
                     cat /tmp/status; rm -f /tmp/status /tmp/out; grep -c lost /tmp/err",
                )?
                .output;
            let mut lines = end.lines().map(str::trim);
            let status: i32 = lines
                .next()
                .and_then(|line| line.parse().ok())
                .with_context(|| format!("kill {count}: the program hangs: {end}"))?;
            // A status of 128 or more is a signal, so a crash. 0: the generation ended before the
            // kill.
            ensure!(
                status < 128,
                "kill {count}: the program ended with {status}: {}",
                self.guest.run("tail -n 20 /tmp/err")?.output
            );
            in_time += usize::from(status != 0);
        }
        ensure!(
            in_time * 2 > kills,
            "only {in_time} of {kills} kills came in the middle of a generation"
        );
        self.guest
            .generation(&PCI, &reference)
            .with_context(|| format!("after {kills} kills"))?;
        Ok(format!(
            "{in_time} errors in the guest, no crash, no hang; then {TOKENS} tokens equal"
        ))
    }

    /// The executor is killed under a program of a machine whose device ends with it: an error, and
    /// no vGPU until the machine is started again. The machine itself goes on, unless QEMU ends
    /// itself; then this is tried once more.
    pub(crate) fn executor_killed(&mut self, prepared: &Prepared) -> Result<String> {
        let reference = self.guest.reference()?;
        match self.kill_executor(prepared, &reference, 1) {
            Err(error) if self.served.starts() == 2 && self.qemu_has_aborted() => {
                let (qemu, socket) = (&self.qemu, self.served.socket());
                self.guest = boot_machine(prepared, qemu, self.device, socket, &self.qemu_log)?;
                let again = self.kill_executor(prepared, &reference, 2);
                let again = again.with_context(|| format!("the second try, after: {error:#}"))?;
                Ok(format!(
                    "{again}; QEMU ended itself at a kill before: {error}"
                ))
            }
            result => result,
        }
    }

    /// Whether QEMU has ended with the assertion that a vfio-user device meets if the guest writes
    /// to it after its server has ended, and before QEMU has noticed: it sets an error twice.
    fn qemu_has_aborted(&self) -> bool {
        let log = std::fs::read_to_string(&self.qemu_log).unwrap_or_default();
        self.device == VmDevice::VfioUser && log.contains("error_setv: Assertion")
    }

    /// One try of [`Booted::executor_killed`], with kill `count` of an executor.
    fn kill_executor(
        &mut self,
        prepared: &Prepared,
        reference: &str,
        count: usize,
    ) -> Result<String> {
        let environment = format!("{PLUGIN} {}", PCI.environment);
        let program = Program::start(&mut self.guest, "program", &environment, 99)?;
        let program_ends = |guest: &mut Guest, when: &str| -> Result<()> {
            let end = program.end(guest)?;
            let is_failure = matches!(end, Outcome::Failed(_));
            let errors = program.errors(guest)?;
            ensure!(is_failure, "{when}: {end:?}\n{errors}");
            Ok(())
        };
        program.begin(&mut self.guest, LONG)?;
        program.wait_for_tokens(&mut self.guest, 2)?;
        self.served.kill(count)?;
        program_ends(&mut self.guest, "after the kill")?;
        program.begin(&mut self.guest, LONG)?;
        program_ends(&mut self.guest, "a load without a device")?;
        self.guest.run("true")?.good("a command after the kill")?;

        self.guest.kill()?;
        let (qemu, socket) = (&self.qemu, self.served.socket());
        self.guest = boot_machine(prepared, qemu, self.device, socket, &self.qemu_log)?;
        let equal = self.guest.generation(&PCI, reference)?;
        Ok(format!(
            "two errors in the guest, which goes on; started again: {equal}"
        ))
    }

    /// The device is unplugged while a program computes. The program gets an error, and the machine
    /// goes on without a device.
    pub(crate) fn unplugged(&mut self, prepared: &Prepared) -> Result<String> {
        let environment = format!("{PLUGIN} {}", PCI.environment);
        let program = Program::start(&mut self.guest, "unplugged", &environment, 99)?;
        program.begin(&mut self.guest, LONG)?;
        program.wait_for_tokens(&mut self.guest, 2)?;
        let mut qmp = Qmp::connect(&monitor(prepared))?;
        qmp.run("device_del", json!({ "id": "vgpu0" }))?;
        qmp.event("DEVICE_DELETED")?;
        let lost = program.loss_of_device(&mut self.guest)?;
        let left = "grep -l 0x2331 /sys/bus/pci/devices/*/device; true";
        let left = self.guest.run(left)?.good("listing devices")?;
        ensure!(left.trim().is_empty(), "the guest has {left}");
        self.guest.doctor_finds(&PCI, "no vGPU")?;
        Ok(format!(
            "an error ({lost}), no device, and the machine goes on"
        ))
    }

    /// Ends the guest and the executor.
    pub(crate) fn stop(self) -> Result<()> {
        drop(self.guest);
        self.served.stop()
    }
}
