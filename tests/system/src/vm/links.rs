//! A guest without a vGPU device. The guest's programs reach the executor over vsock or a network.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};

use super::certificates::HOST;
use super::guest::{Guest, Machine};
use super::inside::{As, PLUGIN, Way};
use super::prepared::{GUEST_TIMEOUT, MEMORY, Prepared, TIMEOUT};
use super::program::{LONG, Outcome, Program, SHORT, SILENCE};
use super::qmp::{self, Qmp};
use xtask_common::cache::Cache;
use xtask_common::packages;
use xtask_common::process::Daemon;
use xtask_common::process::free_port;
use xtask_common::workspace;

const VSOCK_PORT: u32 = 4780;

/// A booted guest with a network and vsock.
pub(crate) struct Linked {
    guest: Guest,
    qmp: Qmp,
    executor: Daemon,
    /// The vsock device of the guest, which connects to sockets of this machine.
    vsock: Daemon,
    tcp: String,
}

/// Starts an executor and boots a guest without a vGPU device.
pub(crate) fn boot_without_device(
    cache: &Cache,
    prepared: &Prepared,
    logs: &dyn Fn(&str) -> PathBuf,
) -> Result<Linked> {
    let folder = prepared.scratch.path();
    let port = free_port()?;
    // A connection of the guest to port N of its host arrives at the socket whose name ends in _N.
    let (control, vsock) = (folder.join("vhost.sock"), folder.join("vsock"));
    let mut serve = Command::new(&prepared.dist.vgpu);
    serve
        .args(["serve", "--engine", "cpu", "--listen"])
        .arg(format!("vsock:{}:{VSOCK_PORT}", vsock.display()))
        .arg(format!("tcp:127.0.0.1:{port}"))
        .arg("--certs")
        .arg(&prepared.certificates.host)
        .args(["--threads", &workspace::cores().to_string()]);
    let mut executor = Daemon::start(&mut serve, &logs("vm-links-vgpu-serve"))?;
    executor.wait_until(TIMEOUT, |serve| serve.log().contains("ready "))?;

    let mut device = Command::new(packages::vhost_vsock(cache)?);
    device
        .args(["--guest-cid", "3", "--socket"])
        .arg(&control)
        .arg("--uds-path")
        .arg(&vsock);
    let mut device = Daemon::start(&mut device, &logs("vm-links-vhost-device-vsock"))?;
    device.wait_until(TIMEOUT, |_| control.exists())?;

    let monitor = folder.join("links-qmp.sock");
    let devices = [
        "-qmp".into(),
        qmp::argument(&monitor),
        "-object".into(),
        format!("memory-backend-memfd,id=mem,size={MEMORY},share=on"),
        "-machine".into(),
        "q35,memory-backend=mem".into(),
        "-chardev".into(),
        format!("socket,id=vsock0,path={}", control.display()),
        "-device".into(),
        "vhost-user-vsock-pci,chardev=vsock0".into(),
        "-netdev".into(),
        "user,id=net0".into(),
        "-device".into(),
        "virtio-net-pci,netdev=net0,romfile=".into(),
    ];
    let machine = Machine {
        qemu: &prepared.qemu,
        accelerator: prepared.qemu.accelerator(),
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        init: "/init",
        devices: &devices,
        memory: MEMORY,
    };
    let mut guest = Guest::boot(&machine, &logs("vm-links-qemu"))?;
    guest.set_timeout(GUEST_TIMEOUT);
    Ok(Linked {
        guest,
        qmp: Qmp::connect(&monitor)?,
        executor,
        vsock: device,
        tcp: format!("tcp:{HOST}:{port}"),
    })
}

impl Linked {
    /// `vgpu doctor` and a generation over vsock, without a configured endpoint.
    pub(crate) fn vsock(&mut self) -> Result<String> {
        let way = Way {
            environment: "",
            link: "vsock:",
            who: As::Root,
        };
        self.guest.doctor(&way)?;
        let reference = self.guest.reference()?;
        self.guest.generation(&way, &reference)
    }

    /// The same over TCP with TLS, by an unprivileged user.
    pub(crate) fn tcp(&mut self) -> Result<String> {
        self.guest
            .run("chown -R user /certs/guest")?
            .good("giving a user its certificate")?;
        let environment = self.tcp_with("guest");
        let way = Way {
            environment: &environment,
            link: "tcp:",
            who: As::User,
        };
        self.guest.doctor(&way)?;
        let reference = self.guest.reference()?;
        self.guest.generation(&way, &reference)
    }

    /// A guest without a certificate, or with one of another authority, gets an error with the
    /// reason.
    pub(crate) fn refused_guests(&mut self) -> Result<String> {
        let (foreign, nobody) = (
            self.tcp_with("foreign"),
            format!("VGPU_ENDPOINT={}", self.tcp),
        );
        for (environment, wanted) in [
            (&foreign, "this side rejects the peer's certificate"),
            (&nobody, "this guest has no certificates: set VGPU_CERTS"),
        ] {
            let way = Way {
                environment,
                link: "tcp:",
                who: As::Root,
            };
            self.guest.doctor_finds(&way, wanted)?;
        }
        Ok(String::new())
    }

    /// The machine is paused for less than the host waits for its programs, and for longer. Over
    /// TCP only: after a pause, vhost-device-vsock 0.3.0 delivers nothing more to a session.
    pub(crate) fn paused(&mut self) -> Result<String> {
        let tcp = format!("{PLUGIN} {}", self.tcp_with("guest"));
        let (guest, qmp) = (&mut self.guest, &mut self.qmp);
        let program = Program::start(guest, "tcp", &tcp, 99)?;
        let expected = program.tokens(guest, LONG)?;
        for (pause, is_lost) in [(SHORT, false), (SILENCE + SHORT, true)] {
            program.begin(guest, LONG)?;
            program.wait_for_tokens(guest, 2)?;
            qmp.pause(pause)?;
            let end = program.end(guest)?;
            let is_right = match &end {
                Outcome::Tokens(tokens) => !is_lost && *tokens == expected,
                Outcome::Failed(_) => is_lost,
                Outcome::Ended(_) => false,
            };
            ensure!(
                is_right,
                "after a pause of {pause:?}: {end:?}\n{}",
                program.errors(guest)?
            );
        }
        ensure!(
            program.tokens(guest, LONG)? == expected,
            "other tokens after the loss"
        );
        Ok(format!(
            "{SHORT:?}: {LONG} tokens equal; {:?}: an error, then {LONG} tokens equal",
            SILENCE + SHORT
        ))
    }

    fn tcp_with(&self, name: &str) -> String {
        format!("VGPU_ENDPOINT={} VGPU_CERTS=/certs/{name}", self.tcp)
    }

    /// Ends the guest and the executor.
    pub(crate) fn stop(self) -> Result<()> {
        drop(self.guest);
        drop(self.vsock);
        self.executor.stop(TIMEOUT)
    }
}
