//! The files in `deploy/`, each checked by its validator if this machine has it. The part `vm`
//! tests the units, the users and the udev rule.

mod chart;
mod yaml;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use xtask_common::dist::Dist;
use xtask_common::executor::{Executor, status};
use xtask_common::packages;
use xtask_common::process::{self, Daemon};
use xtask_common::progress::heading;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::test_run::TestRun;

/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

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
        let config: Value = serde_json::from_str(&text).context("parsing it")?;
        ensure!(config["vsock"]["uds_path"].is_string(), "it has no vsock");
        Ok(String::new())
    });
    for file in ["device-plugin", "executor", "pod", "pod-hostpath"] {
        let file = format!("kubernetes/{file}.yaml");
        tests.check(&file, |tests, _| {
            let program = packages::kubernetes_validate(tests.cache)?;
            let mut validate = Command::new(program);
            process::output(validate.arg("--strict").arg(at(&file)))
                .map(|_| "kubernetes-validate".into())
        });
    }
    let dist = match tests.options.full || tests.options.dist.is_some() {
        true => tests.dist(),
        false => None,
    };
    chart::run(tests, dist.as_ref());
    if tests.options.full {
        tests.check("kubernetes/kubevirt.yaml", |tests, _| {
            let source = workspace::root().join("tests/kubevirt");
            let program = packages::kubevirt_validate(tests.cache, &source)?;
            process::output(Command::new(program).arg(at("kubernetes/kubevirt.yaml")))
                .map(|_| "KubeVirt's types".into())
        });
        if let Some(dist) = dist {
            tests.check(
                "the device plugin and Kubernetes' own package of its services",
                |tests, _| device_plugin(tests, &dist),
            );
        }
    }
    let with_prometheus = tests.options.full || packages::runs("promtool", &["--version"]);
    tests.check("monitoring/alerts.yml", |tests, _| {
        if !with_prometheus {
            return Ok("not checked: there is no promtool here".into());
        }
        packages::prometheus(tests.cache)?;
        let run = |arguments: &[&str]| {
            let mut promtool = Command::new("promtool");
            process::output(promtool.args(arguments).current_dir(at("monitoring")))
        };
        run(&["check", "rules", "alerts.yml"])?;
        run(&["test", "rules", "alerts_test.yml"]).map(|_| "promtool".into())
    });
    if tests.options.full {
        tests.check("monitoring/grafana-dashboard.json", |tests, _| {
            packages::prometheus(tests.cache)?;
            let test = ["test", "-p", "vgpu", "--test", "monitoring_files"];
            let mut cargo = tests.cargo();
            process::output(cargo.args(test).args(["--", "--ignored"]))
                .map(|_| "every query returns data from Prometheus".into())
        });
    }
    tests.check("compose.yaml", |tests, _| {
        compose(tests, &at("compose.yaml"))
    });
    tests.check("the QEMU command line is the tested one", |_, _| {
        for file in [
            "vm/qemu-ivshmem.sh",
            "vm/proxmox.conf",
            "../docs/proxmox.md",
        ] {
            let text = std::fs::read_to_string(at(file)).context("reading it")?;
            ensure!(
                text.contains("-device ivshmem-doorbell,chardev=vgpu0,vectors=1"),
                "{file} has another device"
            );
        }
        Ok(String::new())
    });
}

/// A container gets a seat and memory from a program that speaks to the device plugin as the
/// kubelet does.
fn device_plugin(tests: &TestRun<'_>, dist: &Dist) -> Result<String> {
    let source = workspace::root().join("tests/kubelet");
    let program = packages::kubelet_standin(tests.cache, &source)?;
    let scratch = Scratch::new()?;
    let at = |name: &str| scratch.path().join(name);
    let control = at("control.sock");
    let control_text = control.to_str().context("a path in text")?;
    let executor = Executor::start_with(
        dist,
        &at("vgpu.sock"),
        1,
        &tests.log("device-plugin-executor"),
        &["--memory", "64M", "--control", control_text],
    )?;
    let mut kubelet = Command::new(program);
    kubelet.arg(at("kubelet")).arg("8");
    let mut kubelet = Daemon::start(&mut kubelet, &tests.log("device-plugin-kubelet"))?;
    let mut plugin = Command::new(&dist.vgpu);
    plugin
        .args([
            "kubernetes",
            "--slice",
            "1M",
            "--interval",
            "0.1",
            "--grace",
            "0.1",
        ])
        .arg("--control")
        .arg(&control)
        .arg("--kubelet")
        .arg(at("kubelet"))
        .arg("--sockets")
        .arg(at("pods"))
        .arg("--plugin")
        .arg(&dist.plugin);
    let plugin = Daemon::start(&mut plugin, &tests.log("device-plugin"))?;
    let answer = |kubelet: &Daemon| {
        let log = kubelet.log();
        let line = log.lines().find(|line| line.starts_with('{'));
        line.and_then(|line| serde_json::from_str::<Value>(line).ok())
    };
    kubelet.wait_until(TIMEOUT, |kubelet| answer(kubelet).is_some())?;
    let answer = answer(&kubelet).context("no answer")?;
    ensure!(
        answer["envs"]["VGPU_ENDPOINT"] == "unix:/run/vgpu/vgpu.sock",
        "{answer}"
    );
    let mounts = answer["mounts"].as_array().context("no mounts")?;
    let folder = mounts.iter().find(|m| m["container_path"] == "/run/vgpu");
    let folder = folder.and_then(|mount| mount["host_path"].as_str());
    let folder = folder.with_context(|| format!("no folder in {answer}"))?;
    let mut wait = Command::new(&dist.vgpu);
    let endpoint = format!("unix:{folder}/vgpu.sock");
    process::output(wait.args(["wait", "--timeout", "30", "--endpoint", &endpoint]))?;
    let quota_of = || -> Result<Option<u64>> {
        let status = status(&dist.vgpu, &control)?;
        let guests = status["guests"].as_array().context("no guests")?;
        let guest = guests.iter().find(|g| g["name"] == "default.pod.llama");
        Ok(guest.and_then(|guest| guest["quota"].as_u64()))
    };
    let quota = quota_of()?;
    ensure!(quota == Some(8 << 20), "the quota is {quota:?}");
    kubelet.signal(Signal::USR1)?;
    kubelet.wait_until(TIMEOUT, |_| matches!(quota_of(), Ok(None)))?;
    drop(plugin);
    executor.stop()?;
    Ok("a pod came and went".into())
}

/// Compose's file is YAML, and says the same as the `docker run` of the documentation.
fn compose(tests: &TestRun<'_>, file: &Path) -> Result<String> {
    let file = yaml::read(tests, file)?;
    let services = file["services"].as_object().context("no services")?;
    let known = |key: &str| {
        let known = [
            "cap_drop",
            "command",
            "environment",
            "group_add",
            "image",
            "ports",
            "profiles",
            "read_only",
            "restart",
            "security_opt",
            "tmpfs",
            "user",
            "volumes",
        ];
        known.contains(&key)
    };
    for (name, service) in services {
        let keys = service
            .as_object()
            .with_context(|| format!("{name} is no service"))?;
        let unknown: Vec<_> = keys.keys().filter(|key| !known(key)).collect();
        ensure!(unknown.is_empty(), "{name} has {unknown:?}");
    }
    let page = workspace::root().join("docs/containers-kubernetes.md");
    let page = std::fs::read_to_string(page).context("reading the page")?;
    let run = page.split("docker run").nth(1).context("no docker run")?;
    let run = run.split("```").next().unwrap_or_default();
    let server = &file["services"]["llama-server"];
    let mut expected = Vec::new();
    let environment = server["environment"]
        .as_object()
        .context("no environment")?;
    for (name, value) in environment {
        expected.push(format!("-e {name}={}", value.as_str().unwrap_or_default()));
    }
    let texts = |key: &str| -> Result<Vec<String>> {
        let list = server[key]
            .as_array()
            .with_context(|| format!("no {key}"))?;
        Ok(list
            .iter()
            .filter_map(Value::as_str)
            .map(default_of)
            .collect())
    };
    expected.extend(
        texts("volumes")?
            .iter()
            .map(|volume| format!("-v {volume}")),
    );
    expected.extend(texts("ports")?.iter().map(|port| format!("-p {port}")));
    expected.push(default_of(server["image"].as_str().context("no image")?));
    expected.push(texts("command")?.join(" "));
    let missing: Vec<_> = expected
        .iter()
        .filter(|words| !run.contains(*words))
        .collect();
    ensure!(
        missing.is_empty(),
        "the page's docker run has no {missing:?}"
    );
    let listens = file["services"]["executor"]["command"].to_string();
    ensure!(listens.contains("unix:/run/vgpu/vgpu.sock"), "{listens}");
    Ok(format!("{} services", services.len()))
}

/// The text with the default of `${NAME:-DEFAULT}` in it.
fn default_of(text: &str) -> String {
    let replaced = text.split_once("${").and_then(|(before, rest)| {
        let (variable, after) = rest.split_once('}')?;
        let (_, default) = variable.split_once(":-")?;
        Some(format!("{before}{default}{after}"))
    });
    replaced.unwrap_or_else(|| text.to_owned())
}
