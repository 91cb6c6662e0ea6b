//! The files in `deploy/`, each checked by its validator if this machine has it. The part `vm`
//! tests the units, the users and the udev rule.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

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
        let config: Value = serde_json::from_str(&text).context("parsing it")?;
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

/// Compose's file is YAML, and says the same as the `docker run` of the documentation.
fn compose(tests: &TestRun<'_>, file: &Path) -> Result<String> {
    // The validator of Kubernetes brings a parser of YAML.
    let validator = packages::kubernetes_validate(tests.cache)?;
    let mut parse = Command::new(validator.with_file_name("python"));
    parse.args([
        "-c",
        "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))",
    ]);
    let text = process::output(parse.arg(file))?;
    let file: Value = serde_json::from_str(&text).context("reading what Python has printed")?;
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
