//! A virtual machine with systemd and vgpu's Debian packages.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::debian::Wanted;
use super::guest::{Guest, Machine};
use super::image;
use super::inside::{As, Way};
use super::prepared::{GUEST_TIMEOUT, MEMORY, Prepared};
use crate::debian::Packages;
use xtask_common::cache::Cache;
use xtask_common::progress::Progress;

/// A minimal Debian, the libraries of llama.cpp's programs, and a program that opens sockets.
const SYSTEM: Wanted<'_> = Wanted {
    name: "systemd",
    backports: false,
    packages: &[
        "systemd",
        "udev",
        "base-files",
        "dash",
        "coreutils",
        "util-linux",
        "busybox-static",
        "libstdc++6",
        "libgomp1",
        "socat",
    ],
};

/// The exposure in tenths that `systemd-analyze security` rates as OK.
const EXPOSURE: u32 = 25;

/// A shell loop that waits until a condition holds.
fn until(condition: &str) -> String {
    format!("i=0; until {condition}; do i=$((i+1)); [ $i -lt 600 ] || exit 9; sleep 0.1; done")
}

/// A booted machine with systemd.
pub(crate) struct Systemd {
    guest: Guest,
}

/// Boots the machine.
pub(crate) fn boot_systemd(
    cache: &Cache,
    prepared: &Prepared,
    logs: &dyn Fn(&str) -> PathBuf,
) -> Result<Systemd> {
    let root = cache.folder("debian-systemd-1", |dir| SYSTEM.unpack(cache, dir))?;
    let progress = Progress::new("assembling a system with systemd");
    let folder = prepared.scratch.path();
    let made = Packages::make(&prepared.dist, &folder.join("packages"))?;
    let packages = [made.host, made.guest];
    let initramfs = folder.join("initramfs-systemd");
    let content = prepared.programs.content(&prepared.dist, &[]);
    image::with_systemd(&root, &packages, &content, folder, &initramfs)?;
    progress.done("");
    let machine = Machine {
        qemu: &prepared.qemu,
        accelerator: prepared.qemu.accelerator(),
        kernel: &prepared.kernel.image,
        initramfs: &initramfs,
        init: "/usr/lib/systemd/systemd systemd.getty_auto=0 systemd.firstboot=no \
               systemd.show_status=0",
        devices: &[],
        memory: MEMORY,
    };
    let mut guest = Guest::boot(&machine, &logs("vm-systemd-qemu"))?;
    guest.set_timeout(GUEST_TIMEOUT);
    Ok(Systemd { guest })
}

impl Systemd {
    /// The checks of systemd for the units and of udev for the rule.
    pub(crate) fn verify(&mut self) -> Result<String> {
        self.guest
            .run("systemd-analyze verify vgpu.service vgpu@vm1.service 2>&1")?
            .good("systemd-analyze verify")?;
        self.guest
            .run("udevadm verify /usr/lib/udev/rules.d/60-vgpu.rules 2>&1")?
            .good("udevadm verify")?;
        self.guest
            .run(&format!(
                "systemd-analyze security --no-pager --threshold={EXPOSURE} vgpu.service 2>&1 \
                 | tail -n 2; \
                 systemd-analyze security --threshold={EXPOSURE} vgpu.service >/dev/null 2>&1"
            ))?
            .good("systemd-analyze security")
            .map(|text| text.trim().trim_start_matches(['→', ' ']).to_owned())
    }

    /// The service starts, and a user of its group generates text, before and after a kill of the
    /// executor, and after a stop and a start, which leave the folder that containers mount.
    pub(crate) fn service(&mut self) -> Result<String> {
        self.guest
            .run(
                "systemctl start vgpu && systemctl is-active vgpu \
                 && stat -c %U:%G:%a /run/vgpu/vgpu.sock",
            )?
            .good("starting vgpu.service")
            .and_then(|said| {
                ensure!(
                    said.contains("vgpu:vgpu:660"),
                    "not the group's socket:\n{said}"
                );
                Ok(())
            })?;
        let way = Way {
            environment: "",
            link: "unix:/run/vgpu/vgpu.sock",
            who: As::User,
        };
        let reference = self.guest.reference()?;
        self.guest.generation(&way, &reference)?;
        self.guest
            .run("systemctl reload vgpu && systemctl is-active vgpu")?
            .good("reloading vgpu.service")?;
        let restarted = until(
            "[ \"$(systemctl show -p NRestarts --value vgpu)\" = 1 ] \
             && systemctl is-active -q vgpu",
        );
        self.guest
            .run(&format!("systemctl kill -s KILL vgpu; {restarted}"))?
            .good("waiting for a restart of vgpu.service")?;
        self.guest.generation(&way, &reference)?;
        self.guest
            .run(
                "folder=$(stat -c %d:%i /run/vgpu) && systemctl stop vgpu && test -d /run/vgpu \
                 && test ! -e /run/vgpu/vgpu.sock && systemctl start vgpu \
                 && [ \"$(stat -c %d:%i /run/vgpu)\" = \"$folder\" ]",
            )?
            .good("keeping /run/vgpu across a stop and a start of vgpu.service")?;
        self.guest.generation(&way, &reference)
    }

    /// systemd keeps the connection of a virtual machine while the executor is restarted.
    pub(crate) fn fd_store(&mut self) -> Result<String> {
        let stored = |wanted: &str| {
            until(&format!(
                "[ \"$(systemctl show -p NFileDescriptorStore --value vgpu@vm1)\" {wanted} ]"
            ))
        };
        // The executor treats any client of this socket as QEMU and keeps the connection open.
        self.guest
            .run(&format!(
                "systemctl start vgpu@vm1 && (tail -f /dev/null \
                 | socat - UNIX-CONNECT:/run/vgpu-vm1/vm.sock >/dev/null 2>&1 &) ; {}",
                stored("-gt 0")
            ))?
            .good("storing the connection of a virtual machine")?;
        let restarted = until(
            "[ \"$(systemctl show -p NRestarts --value vgpu@vm1)\" = 1 ] \
             && systemctl is-active -q vgpu@vm1",
        );
        let said = self
            .guest
            .run(&format!(
                "systemctl kill -s KILL vgpu@vm1; {restarted}; {}; \
                 journalctl --no-pager -o cat -u vgpu@vm1",
                stored("-gt 0")
            ))?
            .good("keeping the connection while the executor is restarted")?;
        ensure!(
            said.contains(KEPT),
            "the executor did not resume the connection:\n{said}"
        );
        Ok(String::new())
    }

    /// A stopped service ends and leaves no files.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.guest
            .run(
                "systemctl stop vgpu vgpu@vm1; systemctl is-failed vgpu vgpu@vm1; \
                 test ! -e /run/vgpu/vgpu.sock \
                 && [ \"$(systemctl show -p Result --value vgpu)\" = success ]",
            )?
            .good("stopping the services")
            .map(drop)
    }
}

/// The log line of an executor about a virtual machine of an earlier executor.
const KEPT: &str = "serving the running virtual machine";
