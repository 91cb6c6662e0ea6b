//! The files in `deploy/`, each checked by its validator if this machine has it. The part `vm`
//! tests the units, the users and the udev rule.

mod browser;
mod chart;
mod libvirt;
mod yaml;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::{Map, Value, json};

use xtask_common::dist::Dist;
use xtask_common::executor::{Executor, status};
use xtask_common::image;
use xtask_common::packages;
use xtask_common::process::{self, Daemon};
use xtask_common::progress::heading;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::test_run::{Part, TestRun};

/// The timeout for every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("files for deployment");
    let folder = workspace::root().join("deploy");
    let at = |name: &str| folder.join(name);
    tests.check(
        "vm/libvirt.xml, the element of docs/virtual-machines.md",
        |tests, _| libvirt::check(tests),
    );
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
    for file in [
        "device-plugin",
        "dra-driver",
        "executor",
        "pod",
        "pod-claim",
        "pod-hostpath",
    ] {
        let file = format!("kubernetes/{file}.yaml");
        tests.check(&file, |tests, _| {
            let program = packages::kubernetes_validate(tests.cache)?;
            let mut validate = Command::new(program);
            process::output(validate.arg("--strict").arg(at(&file)))
                .map(|_| "kubernetes-validate".into())
        });
    }
    tests.check("kubernetes/kustomization.yaml", |tests, _| {
        chart::kustomize(tests)
    });
    // A run of this part alone would build for nothing else.
    let is_alone = tests.options.only == [Part::Deploy];
    let dist = match tests.options.full || tests.options.dist.is_some() || !is_alone {
        true => tests.dist(),
        false => None,
    };
    chart::run(tests, dist.as_ref());
    if let Some(dist) = &dist {
        tests.check(
            "the device plugin and Kubernetes' own package of its services",
            |tests, _| device_plugin(tests, dist),
        );
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
        if let Some(dist) = &dist {
            tests.check("the status page in Chromium", |tests, _| {
                browser::check(tests, dist)
            });
        }
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
    tests.check("compose-executor.yaml, compose-gpu.yaml", |tests, _| {
        compose_executor(tests, &folder, dist.as_ref())
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
    kubelet.arg(at("kubelet")).args(["8", "3"]);
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
    let on_host = |path: &str| {
        let mount = mounts.iter().find(|mount| mount["container_path"] == path);
        let path = mount.and_then(|mount| mount["host_path"].as_str());
        path.with_context(|| format!("no {path:?} in {answer}"))
    };
    let folder = on_host("/run/vgpu")?;
    // Where an Ollama of Ollama's image takes the plugin.
    let library = answer["envs"]["OLLAMA_LLM_LIBRARY"].as_str();
    let library = library.context("no OLLAMA_LLM_LIBRARY")?;
    let library = on_host(&format!("/usr/lib/ollama/{library}/libggml-vgpu.so"))?;
    ensure!(Path::new(library) == dist.plugin, "{answer}");
    let mut wait = Command::new(&dist.vgpu);
    let endpoint = format!("unix:{folder}/vgpu.sock");
    process::output(wait.args(["wait", "--timeout", "30", "--endpoint", &endpoint]))?;
    let limits_of = || -> Result<Option<(u64, u64)>> {
        let status = status(&dist.vgpu, &control)?;
        let guests = status["guests"].as_array().context("no guests")?;
        let guest = guests.iter().find(|g| g["name"] == "default.pod.llama");
        Ok(guest.and_then(|guest| Some((guest["quota"].as_u64()?, guest["weight"].as_u64()?))))
    };
    let limits = limits_of()?;
    ensure!(
        limits == Some((8 << 20, 3)),
        "quota and weight are {limits:?}"
    );
    kubelet.signal(Signal::USR1)?;
    kubelet.wait_until(TIMEOUT, |_| matches!(limits_of(), Ok(None)))?;
    drop(plugin);
    executor.stop()?;
    Ok("a pod came and went".into())
}

/// The services of one of Compose's files, whose keys are those that the tests know.
fn services(file: &Value) -> Result<&Map<String, Value>> {
    let services = file["services"].as_object().context("no services")?;
    let known = [
        "cap_drop",
        "command",
        "depends_on",
        "deploy",
        "environment",
        "group_add",
        "image",
        "ports",
        "read_only",
        "restart",
        "security_opt",
        "tmpfs",
        "user",
        "volumes",
    ];
    for (name, service) in services {
        let keys = service
            .as_object()
            .with_context(|| format!("{name} is no service"))?;
        let unknown: Vec<_> = keys
            .keys()
            .filter(|key| !known.contains(&key.as_str()))
            .collect();
        ensure!(unknown.is_empty(), "{name} has {unknown:?}");
    }
    Ok(services)
}

/// The texts of a list, with the defaults of their variables.
fn texts(service: &Value, key: &str) -> Result<Vec<String>> {
    let list = service[key]
        .as_array()
        .with_context(|| format!("no {key}"))?;
    Ok(list
        .iter()
        .filter_map(Value::as_str)
        .map(default_of)
        .collect())
}

/// Compose's file is YAML, and says the same as the `docker run` of the documentation.
fn compose(tests: &TestRun<'_>, file: &Path) -> Result<String> {
    let file = yaml::read(tests, file)?;
    let services = services(&file)?;
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
    let volumes = texts(server, "volumes")?;
    expected.extend(volumes.iter().map(|volume| format!("-v {volume}")));
    let ports = texts(server, "ports")?;
    expected.extend(ports.iter().map(|port| format!("-p {port}")));
    expected.push(default_of(server["image"].as_str().context("no image")?));
    expected.push(texts(server, "command")?.join(" "));
    let missing: Vec<_> = expected
        .iter()
        .filter(|words| !run.contains(*words))
        .collect();
    ensure!(
        missing.is_empty(),
        "the page's docker run has no {missing:?}"
    );
    Ok(format!("{} services", services.len()))
}

/// Where a service has its named volumes, by their names: the path and whether it is read-only.
/// Bound folders of the machine are left out.
fn mounts(service: &Value) -> Result<BTreeMap<String, (String, bool)>> {
    let mut mounts = BTreeMap::new();
    for volume in texts(service, "volumes")? {
        let mut parts = volume.split(':');
        let (source, path) = (parts.next(), parts.next());
        let (source, path) = source.zip(path).context("not SOURCE:PATH")?;
        if !source.starts_with('/') {
            let is_read_only = parts.next() == Some("ro");
            mounts.insert(source.to_owned(), (path.to_owned(), is_read_only));
        }
    }
    Ok(mounts)
}

/// What a container of the executor in these files cannot do: they need nothing of the machine but
/// its GPU, and agree with the image of the executor.
fn faults_of_compose_executor(file: &Value, gpu: &Value) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    let mut expect = |is_right: bool, fault: String| {
        if !is_right {
            faults.push(fault);
        }
    };
    let is_asked = file.to_string().contains(":?");
    expect(!is_asked, "a variable has no default".into());
    let (executor, server) = (
        &services(file)?["executor"],
        &file["services"]["llama-server"],
    );
    let image = default_of(executor["image"].as_str().context("no image")?);
    let is_ours = image.starts_with(&format!("{}:", image::NAME));
    expect(is_ours, format!("{image} is not the image of the executor"));

    let declared = file["volumes"].as_object();
    let (of_executor, of_server) = (mounts(executor)?, mounts(server)?);
    for (name, (path, _)) in of_executor.iter().chain(&of_server) {
        let is_declared = declared.is_some_and(|declared| declared.contains_key(name));
        expect(is_declared, format!("the volume {name} is not declared"));
        let of_both = [&of_executor, &of_server].map(|mounts| mounts.get(name));
        let is_at_one_place = of_both.iter().flatten().all(|(other, _)| other == path);
        expect(is_at_one_place, format!("{name} is at two places"));
    }
    for text in texts(executor, "volumes")? {
        expect(!text.starts_with('/'), format!("{text} is of the machine"));
    }
    let folder = |path: &str| {
        path.rsplit_once('/')
            .map_or("", |(folder, _)| folder)
            .to_owned()
    };
    // Whether a service has a named volume at this folder, and may write there.
    let volume_at = |mounts: &BTreeMap<String, (String, bool)>, folder: &str| {
        let mut all = mounts.values();
        let found = all.find(|(path, _)| path == folder);
        found.map(|(_, is_read_only)| !is_read_only)
    };
    let command = texts(executor, "command")?;
    let flag = |name: &str| {
        let mut flags = command.iter().filter_map(|flag| flag.strip_prefix(name));
        flags.next().unwrap_or_default().to_owned()
    };
    let program = command.first().map_or("", String::as_str);
    expect(
        image::PROGRAM.ends_with(&format!("/{program}")),
        format!("no {program} in the image"),
    );
    let (listen, control) = (flag("--listen=unix:"), flag("--control="));
    let endpoint = server["environment"]["VGPU_ENDPOINT"]
        .as_str()
        .unwrap_or_default();
    expect(
        endpoint == format!("unix:{listen}"),
        format!("{endpoint} is not {listen}"),
    );
    // The volumes of the executor are made of folders of the image: they have its owner.
    for (of, path) in [
        ("socket", folder(&listen)),
        ("cache", image::CACHE.to_owned()),
    ] {
        let is_there = image::FOLDERS.contains(&path.as_str());
        expect(
            is_there,
            format!("no folder {path} of the {of} in the image"),
        );
        let is_writable = volume_at(&of_executor, &path) == Some(true);
        expect(
            is_writable,
            format!("the executor cannot keep its {of} in {path}"),
        );
    }
    let plugins = folder(image::PLUGIN);
    expect(
        volume_at(&of_executor, &plugins).is_some(),
        format!("nobody fills {plugins}"),
    );
    for path in [folder(&listen), plugins] {
        let is_readable = volume_at(&of_server, &path) == Some(false);
        expect(
            is_readable,
            format!("llama-server does not have {path}, read-only"),
        );
    }
    let plugin = server["environment"]["GGML_BACKEND_PATH"]
        .as_str()
        .unwrap_or_default();
    expect(
        plugin == image::PLUGIN,
        format!("{plugin} is not the plugin of the image"),
    );
    // An old plugin would stay in a volume that has content.
    let volume = of_executor
        .iter()
        .find(|(_, (path, _))| *path == folder(image::PLUGIN));
    let tag = image.rsplit(':').next().unwrap_or_default();
    let name = volume.and_then(|(name, _)| file["volumes"][name]["name"].as_str());
    let name = default_of(name.unwrap_or_default());
    expect(
        name.ends_with(tag),
        format!("the volume {name:?} of the plugin has no version"),
    );
    let tmpfs = texts(executor, "tmpfs")?;
    let is_private = tmpfs.contains(&folder(&control));
    expect(
        is_private,
        format!("{control} is not for the executor's container alone"),
    );

    // The socket has mode 660.
    let user = executor["user"].as_str().unwrap_or_default();
    let (uid, gid) = user.split_once(':').unwrap_or((user, ""));
    expect(
        uid == "0",
        format!("the user {uid} does not own the volumes"),
    );
    let groups = texts(server, "group_add")?;
    expect(
        groups == [gid],
        format!("{groups:?} may not open a socket of the group {gid}"),
    );
    let is_first = texts(server, "depends_on")? == ["executor"];
    expect(is_first, "the containers are made in any order".into());

    for name in services(gpu)?.keys() {
        let is_known = file["services"].get(name).is_some();
        expect(
            is_known,
            format!("the file of GPUs has another service, {name}"),
        );
    }
    let devices = "/services/executor/deploy/resources/reservations/devices/0";
    let device = gpu.pointer(devices).unwrap_or(&Value::Null);
    let is_all = device["driver"] == "nvidia" && device["count"] == "all";
    let asks = is_all && device["capabilities"] == json!(["gpu"]);
    expect(asks, format!("the executor asks for no GPU: {device}"));
    Ok(faults)
}

/// The executor of Compose's file works with what the image and the volumes have, and with the
/// flags of the file: here without containers.
fn compose_executor(tests: &TestRun<'_>, folder: &Path, dist: Option<&Dist>) -> Result<String> {
    let [file, gpu] = ["compose-executor.yaml", "compose-gpu.yaml"].map(|name| folder.join(name));
    let (file, gpu) = (yaml::read(tests, &file)?, yaml::read(tests, &gpu)?);
    let faults = faults_of_compose_executor(&file, &gpu)?;
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    // The check finds what is wrong.
    for (place, wrong) in [
        ("/services/executor/volumes", json!(["/run/vgpu:/run/vgpu"])),
        ("/services/executor/user", json!("1000:64780")),
        ("/services/llama-server/group_add", json!(["${VGPU_GID:?}"])),
        (
            "/services/llama-server/environment/GGML_BACKEND_PATH",
            json!("/plugin.so"),
        ),
        ("/volumes", json!({"run": null})),
    ] {
        let mut changed = file.clone();
        *changed.pointer_mut(place).context(place)? = wrong;
        let faults = faults_of_compose_executor(&changed, &gpu)?;
        ensure!(!faults.is_empty(), "no fault is found with another {place}");
    }
    let Some(dist) = dist else {
        return Ok("not started: nothing is built".into());
    };
    let scratch = Scratch::new()?;
    let root = scratch.path().to_str().context("a path in text")?;
    for folder in ["run/vgpu", "run/vgpu-control", "var/cache/vgpu"] {
        std::fs::create_dir_all(scratch.path().join(folder)).context("creating a folder")?;
    }
    // The paths of the container, below another root.
    let command = texts(&file["services"]["executor"], "command")?;
    let own = command.iter().skip(1).map(|flag| {
        let flag = flag.replace("=unix:/", &format!("=unix:{root}/"));
        flag.replace("=/", &format!("={root}/"))
    });
    let mut serve = Command::new(&dist.vgpu);
    serve
        .args(own)
        .args(["--engine=cpu", "--threads=1", "--memory=64M"])
        .env("VGPU_CACHE", scratch.path().join("var/cache/vgpu"));
    let serve = Daemon::start(&mut serve, &tests.log("compose-executor"))?;
    let endpoint = format!("unix:{root}{}", image::SOCKET);
    let mut wait = Command::new(&dist.vgpu);
    process::output(wait.args(["wait", "--timeout", "60", "--endpoint", &endpoint]))?;
    let socket = scratch.path().join("run/vgpu/vgpu.sock");
    let mode = socket
        .metadata()
        .context("the socket")?
        .permissions()
        .mode()
        & 0o777;
    ensure!(mode == 0o660, "the socket has mode {mode:o}");
    status(
        &dist.vgpu,
        &scratch.path().join("run/vgpu-control/control.sock"),
    )?;
    drop(serve);
    Ok("an executor with its flags serves".into())
}

/// The text with the defaults of each `${NAME:-DEFAULT}` in it.
fn default_of(text: &str) -> String {
    let replaced = text.split_once("${").and_then(|(before, rest)| {
        let (variable, after) = rest.split_once('}')?;
        let (_, default) = variable.split_once(":-")?;
        Some(format!("{before}{default}{}", default_of(after)))
    });
    replaced.unwrap_or_else(|| text.to_owned())
}
