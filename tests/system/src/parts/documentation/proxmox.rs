//! A host of virtual machines. Proxmox VE is a Debian with systemd and QEMU; its own commands are a
//! stand-in, which keeps the arguments of a machine, and the test starts QEMU with them.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use xtask_common::dist::Dist;

use super::guide::Guide;
use super::ollama_on_debian::graphs_of;
use crate::container::{Container, TRIXIE};
use crate::debian::Packages;
use crate::test_run::TestRun;
use crate::vm;

const PAGE: &str = "proxmox.md";

/// What the page uses of Proxmox's `qm`, with the refusals of the real one: an unknown machine, one
/// that runs already, and a machine whose socket nobody listens at.
const QM: &str = r#"#!/bin/sh
set -eu
config=/etc/pve/qemu-server/$2.conf
[ -e "$config" ] || { echo "Configuration file '$config' does not exist" >&2; exit 2; }
case $1 in
set)
    [ "$3" = --args ]
    sed -i /^args:/d "$config"
    echo "args: $4" >> "$config"
    ;;
shutdown) rm -f "/run/running-$2" ;;
start)
    [ ! -e "/run/running-$2" ] || { echo "VM $2 already running" >&2; exit 255; }
    socket=$(sed -n 's/^args:.*path=\([^, ]*\).*/\1/p' "$config")
    ss --listening --unix | grep --quiet " $socket " || {
        echo "-chardev socket: Failed to connect to '$socket': Connection refused" >&2
        exit 1
    }
    : > "/run/running-$2"
    ;;
*) exit 255 ;;
esac
"#;

/// The first machine of the page.
const FIRST: &str = "100";

pub(super) fn follow(tests: &TestRun<'_>, dist: &Dist, packages: &Packages) -> Result<String> {
    let boot = "Boot, restarts, and an executor that is down";
    let mut guide = Guide::open(PAGE, &["Host", "Guest", boot])?;
    let log = |name: &str| tests.log(&format!("documentation-proxmox-{name}"));
    let prepared = vm::prepare(tests.cache, dist)?;

    let host = Container::boot(tests.cache, &TRIXIE, &log("system"))?;
    host.copy_into("/root", &[&packages.host, &packages.guest])?;
    fs::write(host.files().join("usr/sbin/qm"), QM).context("writing qm")?;
    host.root(
        "chmod 755 /usr/sbin/qm && mkdir -p /etc/pve/qemu-server && cd /etc/pve/qemu-server && \
         touch 100.conf 101.conf /run/running-100 /run/running-101",
    )?;
    guide.leave_out("nvidia-driver", "this machine has no card")?;
    host.root(&guide.take("dpkg --install vgpu_*_amd64.deb")?)?;
    let guests = guide.take_with("[[guest]]", &[("8GiB", "1GiB")])?;
    let file = host.files().join("etc/vgpu/vgpu.toml");
    let config = fs::read_to_string(&file).context("reading the configuration")?;
    fs::write(&file, format!("{config}\n{guests}")).context("writing the configuration")?;
    host.root(&guide.take("vgpu check-config")?)?;
    host.root(&guide.take("qm set 100")?)?;

    // The machine, as the host would start it.
    let arguments = arguments_of(&host, FIRST)?;
    let tree = TRIXIE.tree(tests.cache)?;
    let files: [&Path; 2] = [&packages.host, &packages.guest];
    let mut guest = vm::boot_minimal(&prepared, &tree, &files, &arguments, &log)?;
    let commands = guide.take("ssh root@GUEST vgpu doctor")?;
    for line in commands.lines() {
        // The machine has the files already.
        let copies = line.starts_with("scp vgpu_*_amd64.deb vgpu-guest_*_amd64.deb root@GUEST:");
        let command = line.strip_prefix("ssh root@GUEST ");
        match command {
            Some(command) => drop(guest.run(command)?),
            None => ensure!(copies, "{PAGE} has another command: {line:?}"),
        }
    }
    let first = guest.generation()?;
    let graphs = graphs_of(&host, FIRST)?;
    ensure!(graphs > 0, "the executor has run no graph of guest {FIRST}");

    // The executor restarts under the machine, and starts after it was down.
    host.root("vgpu check-config && systemctl restart vgpu")?;
    guest.generation().context("after a restart")?;
    host.root("systemctl stop vgpu && qm shutdown 101")?;
    let refused = host.try_run("root", "qm start 101")?;
    ensure!(refused.status == Some(1), "qm: {refused:?}");
    let start = guide.take_with("systemctl start vgpu && qm start", &[("100", "101")])?;
    host.root(&start)?;
    guest.generation().context("after a stop and a start")?;
    guide.finish()?;
    Ok(first)
}

/// QEMU's arguments of a machine, with the path of the host's socket as this machine sees it.
fn arguments_of(host: &Container, machine: &str) -> Result<Vec<String>> {
    let file = host
        .files()
        .join(format!("etc/pve/qemu-server/{machine}.conf"));
    let config = fs::read_to_string(file).context("reading a machine's configuration")?;
    let arguments = { config.lines() }
        .find_map(|line| line.strip_prefix("args: "))
        .context("the machine has no arguments")?;
    let root = format!("path={}/", host.files().display());
    Ok(arguments
        .split(' ')
        .map(|word| word.replacen("path=/", &root, 1))
        .collect())
}
