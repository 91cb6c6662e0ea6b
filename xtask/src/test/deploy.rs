//! The files in `deploy/`, each handed to its own validator where this machine has one.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::packages;
use crate::process;
use crate::progress::heading;
use crate::scratch::Scratch;
use crate::workspace;

use super::Bench;

pub(super) fn run(bench: &mut Bench<'_>) {
    heading("files for deployment");
    let folder = workspace::root().join("deploy");
    let at = |name: &str| folder.join(name);
    for unit in ["host/vgpu.service", "host/vgpu@.service"] {
        bench.check(unit, |_, _| service(&at(unit)));
    }
    for file in ["host/vgpu.sysusers", "guest/vgpu.sysusers"] {
        bench.check(file, |_, _| {
            validate("systemd-sysusers", &["--dry-run"], &at(file), &[])
        });
    }
    bench.check("host/vgpu.tmpfiles", |_, _| {
        // With users that this machine has in place of those that are to be made.
        let replace = [(" vgpu vgpu ", " root root ")];
        let copy = Copy::of(&at("host/vgpu.tmpfiles"), &replace)?;
        validate(
            "systemd-tmpfiles",
            &["--dry-run", "--create"],
            &copy.file,
            &[],
        )
    });
    bench.check("guest/60-vgpu.rules", |_, _| {
        validate("udevadm", &["verify"], &at("guest/60-vgpu.rules"), &[])
    });
    bench.check("vm/libvirt.xml", |_, _| {
        validate("virt-xml-validate", &[], &at("vm/libvirt.xml"), &["domain"])
    });
    for script in [
        "qemu-ivshmem",
        "qemu-vfio-user",
        "qemu-vsock",
        "cloud-hypervisor",
    ] {
        let file = format!("vm/{script}.sh");
        bench.check(&file, |_, _| validate("sh", &["-n"], &at(&file), &[]));
    }
    bench.check("vm/firecracker.json", |_, _| {
        let text = std::fs::read_to_string(at("vm/firecracker.json")).context("reading it")?;
        let config: serde_json::Value = serde_json::from_str(&text).context("parsing it")?;
        ensure!(config["vsock"]["uds_path"].is_string(), "it has no vsock");
        Ok(String::new())
    });
    for file in ["executor", "pod"] {
        let file = format!("kubernetes/{file}.yaml");
        bench.check(&file, |bench, _| {
            let program = packages::kubernetes_validate(bench.cache)?;
            let mut validate = Command::new(program);
            process::output(validate.arg("--strict").arg(at(&file)))
                .map(|_| "kubernetes-validate".into())
        });
    }
    bench.check("kubernetes/kubevirt.yaml", |bench, _| {
        let source = workspace::root().join("tests/kubevirt");
        let program = packages::kubevirt_validate(bench.cache, &source)?;
        process::output(Command::new(program).arg(at("kubernetes/kubevirt.yaml")))
            .map(|_| "KubeVirt's types".into())
    });
    bench.check("the QEMU line is the tested one", |_, _| {
        for file in ["vm/qemu-ivshmem.sh", "vm/proxmox.conf"] {
            let text = std::fs::read_to_string(at(file)).context("reading it")?;
            ensure!(
                text.contains("-device ivshmem-doorbell,chardev=vgpu0,vectors=1"),
                "{file} has another device"
            );
        }
        Ok(String::new())
    });
}

/// `systemd-analyze verify`, with a program that this machine has in place of the one that is to be installed.
fn service(unit: &Path) -> Result<String> {
    let copy = Copy::of(
        unit,
        &[("ExecStart=/usr/bin/vgpu serve ", "ExecStart=/bin/true ")],
    )?;
    validate("systemd-analyze", &["verify", "--man=no"], &copy.file, &[])
}

/// A file with some of its text replaced. Goes away.
struct Copy {
    file: PathBuf,
    _scratch: Scratch,
}

impl Copy {
    fn of(file: &Path, replace: &[(&str, &str)]) -> Result<Copy> {
        let scratch = Scratch::new()?;
        let mut text = std::fs::read_to_string(file).context("reading it")?;
        for (old, new) in replace {
            ensure!(text.contains(old), "there is no {old:?} in it");
            text = text.replace(old, new);
        }
        let copy = scratch.path().join(file.file_name().context("a name")?);
        std::fs::write(&copy, text).context("copying it")?;
        Ok(Copy {
            file: copy,
            _scratch: scratch,
        })
    }
}

/// Runs a validator, if there is one; what it says on success is a warning, and warnings are failures.
fn validate(program: &str, arguments: &[&str], file: &Path, behind: &[&str]) -> Result<String> {
    let has = |arguments: &[&str]| packages::runs(program, arguments);
    let can = match program {
        "sh" => true,
        // Not every version has the verb.
        "udevadm" => has(&["verify", "--help"]),
        "systemd-tmpfiles" => process::output(Command::new(program).arg("--help"))
            .is_ok_and(|help| help.contains("--dry-run")),
        "virt-xml-validate" => has(&["--version"]),
        _ => has(&["--version"]),
    };
    if !can {
        return Ok(format!(
            "not checked: this machine's {program} cannot, or there is none"
        ));
    }
    let output = Command::new(program)
        .args(arguments)
        .arg(file)
        .args(behind)
        .output()
        .with_context(|| format!("starting {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let mut said = said
        .lines()
        // The rest is about other files of the machine, or praise.
        .filter(|line| line.contains(&*name) && !line.ends_with(" validates"));
    if !output.status.success() {
        bail!(
            "{program} ended with {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    if let Some(warning) = said.next() {
        bail!("{program}: {warning}");
    }
    Ok(program.to_owned())
}
