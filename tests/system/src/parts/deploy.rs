//! The files in `deploy/`, each checked by its validator if this machine has it. The part `vm`
//! tests the units, the users and the udev rule.

use std::process::Command;

use anyhow::{Context as _, ensure};

use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::heading;
use xtask_common::workspace;

use crate::test_run::TestRun;

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("files for deployment");
    let folder = workspace::root().join("deploy");
    let at = |name: &str| folder.join(name);
    tests.check("vm/libvirt.xml", |_, _| {
        if !packages::runs("virt-xml-validate", &["--version"]) {
            return Ok("not checked: there is no virt-xml-validate here".into());
        }
        let mut validate = Command::new("virt-xml-validate");
        process::output(validate.arg(at("vm/libvirt.xml")).arg("domain"))
            .map(|_| "virt-xml-validate".into())
    });
    for script in [
        "qemu-ivshmem",
        "qemu-vfio-user",
        "qemu-vsock",
        "cloud-hypervisor",
    ] {
        let file = format!("vm/{script}.sh");
        tests.check(&file, |_, _| {
            process::output(Command::new("sh").arg("-n").arg(at(&file))).map(|_| "sh -n".into())
        });
    }
    tests.check("vm/firecracker.json", |_, _| {
        let text = std::fs::read_to_string(at("vm/firecracker.json")).context("reading it")?;
        let config: serde_json::Value = serde_json::from_str(&text).context("parsing it")?;
        ensure!(config["vsock"]["uds_path"].is_string(), "it has no vsock");
        Ok(String::new())
    });
    for file in ["executor", "pod"] {
        let file = format!("kubernetes/{file}.yaml");
        tests.check(&file, |tests, _| {
            let program = packages::kubernetes_validate(tests.cache)?;
            let mut validate = Command::new(program);
            process::output(validate.arg("--strict").arg(at(&file)))
                .map(|_| "kubernetes-validate".into())
        });
    }
    if tests.options.full {
        tests.check("kubernetes/kubevirt.yaml", |tests, _| {
            let source = workspace::root().join("tests/kubevirt");
            let program = packages::kubevirt_validate(tests.cache, &source)?;
            process::output(Command::new(program).arg(at("kubernetes/kubevirt.yaml")))
                .map(|_| "KubeVirt's types".into())
        });
    }
    tests.check("the QEMU command line is the tested one", |_, _| {
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
