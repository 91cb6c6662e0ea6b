//! The Helm chart: linted and rendered by Helm's own packages, checked as the other files of
//! Kubernetes are, and compared with the files for `kubectl apply`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use xtask_common::dist::Dist;
use xtask_common::scratch::Scratch;
use xtask_common::{packages, process, workspace};

use super::yaml;
use crate::test_run::TestRun;

/// The namespace of the files for `kubectl apply`.
const NAMESPACE: &str = "kube-system";
/// Labels that only Helm's objects have begin so.
const HELM_LABELS: [&str; 2] = ["helm.sh/", "app.kubernetes.io/"];
/// The files in `tests/helm/values`, and in `tests/helm/expected`. [`OF_CHART`] is in the chart.
const VALUES: [&str; 5] = ["cpu", "dra", "gpu", "service-monitor", OF_CHART];
/// The values that the chart brings for nodes without a GPU.
const OF_CHART: &str = "values-cpu";
/// Values that the chart refuses, and what the error says.
const REFUSED: [(&str, &str); 15] = [
    ("devicePlugin: {dra: \"yes\"}", "/devicePlugin/dra"),
    ("devicePlugin: {seats: many}", "/devicePlugin/seats"),
    ("devicePlugin: {slice: 1 GB}", "/devicePlugin/slice"),
    ("executor: {engin: cpu}", "'engin'"),
    ("executor: {engine: gpu}", "/executor/engine"),
    ("metrics: {enabled: \"yes\"}", "/metrics/enabled"),
    (
        "executor: {isolate: true, cache: {folder: /cache, weights: 50G}}",
        "exclude each other",
    ),
    (
        "executor: {cache: {weights: 50G}}",
        "needs executor.cache.folder",
    ),
    (
        "metrics: {monitor: {kind: PodMonitor}}",
        "metrics.monitor.kind needs metrics.enabled",
    ),
    (
        "metrics: {annotations: true}",
        "metrics.annotations needs metrics.enabled",
    ),
    (
        "metrics: {enabled: true, monitor: {kind: PodMonitor, labels: {app: x}}}",
        "metrics.monitor.labels cannot have app",
    ),
    ("podLabels: {app: x}", "podLabels cannot have app"),
    (
        "devicePlugin: {seats: 65}",
        "devicePlugin.seats (65) is more than executor.maxGuests (64)",
    ),
    (
        "devicePlugin: {dra: true, seats: 65}",
        "devicePlugin.seats (65) is more than executor.maxGuests (64)",
    ),
    (
        "executor: {securityContext: {seccompProfile: {type: runtime}}}",
        "/executor/securityContext/seccompProfile/type",
    ),
];

/// Checks the chart. `dist`: the programs whose flags the chart has, if they are built.
pub(super) fn run(tests: &mut TestRun<'_>, dist: Option<&Dist>) {
    tests.check("kubernetes/chart", |tests, _| is_plain_by_default(tests));
    tests.check("kubernetes/chart with the driver of claims", |tests, _| {
        is_plain_with_claims(tests)
    });
    for name in VALUES {
        tests.check(&format!("kubernetes/chart with {name}.yaml"), |tests, _| {
            let rendered = render(tests, Some(&values_file(name)))?;
            has_what_is_expected(tests, name, rendered.path())?;
            let validated = validate(tests, rendered.path())?;
            if let Some(dist) = dist {
                vgpu_takes(tests, dist, rendered.path())?;
            }
            Ok(validated)
        });
    }
    tests.check("kubernetes/chart refuses mistakes", |tests, _| {
        let scratch = Scratch::new()?;
        let file = scratch.path().join("values.yaml");
        for (values, expected) in REFUSED {
            std::fs::write(&file, values).context("writing values")?;
            match render(tests, Some(&file)) {
                Ok(_) => bail!("{values} is not refused"),
                Err(error) => {
                    let error = format!("{error:#}");
                    ensure!(error.contains(expected), "{values}: {error}");
                }
            }
        }
        Ok(format!("{} mistakes", REFUSED.len()))
    });
}

/// With its default values the chart makes the objects of the plain files, and no others.
fn is_plain_by_default(tests: &TestRun<'_>) -> Result<String> {
    let rendered = render(tests, None)?;
    let files = names(rendered.path())?;
    let expected = ["NOTES.txt", "device-plugin.yaml", "executor.yaml"];
    ensure!(files == expected.map(str::to_owned).into(), "{files:?}");
    for file in &expected[1..] {
        let plain = workspace::root().join("deploy/kubernetes").join(file);
        let plain = yaml::read(tests, &plain)?;
        let mut chart = yaml::read(tests, &rendered.path().join(file))?;
        remove_labels_of_helm(&mut chart);
        if let Some(difference) = difference(&plain, &chart, "") {
            bail!("{file}, plain and of the chart: {difference}");
        }
    }
    validate(tests, rendered.path())
}

/// With `devicePlugin.dra` the chart makes the objects of the plain file with the driver.
fn is_plain_with_claims(tests: &TestRun<'_>) -> Result<String> {
    let scratch = Scratch::new()?;
    let values = scratch.path().join("values.yaml");
    std::fs::write(&values, "devicePlugin: {dra: true}\n").context("writing values")?;
    let rendered = render(tests, Some(&values))?;
    let plain = workspace::root().join("deploy/kubernetes/dra-driver.yaml");
    let plain = yaml::read_all(tests, &plain)?;
    let mut chart = yaml::read_all(tests, &rendered.path().join("dra-account.yaml"))?;
    chart.push(yaml::read(tests, &rendered.path().join("dra-driver.yaml"))?);
    for object in &mut chart {
        remove_labels_of_helm(object);
    }
    if let Some(difference) = difference(&plain.into(), &chart.into(), "") {
        bail!("dra-driver.yaml, plain and of the chart: {difference}");
    }
    Ok(String::new())
}

/// A file in a folder of `tests/helm`.
fn file_of(folder: &str, name: &str) -> PathBuf {
    let folder = workspace::root().join("tests/helm").join(folder);
    folder.join(format!("{name}.yaml"))
}

/// A file of values.
fn values_file(name: &str) -> PathBuf {
    match name {
        OF_CHART => workspace::root().join(format!("deploy/kubernetes/chart/{name}.yaml")),
        _ => file_of("values", name),
    }
}

/// Compares what the chart made with `tests/helm/expected`: for each file, places in it and what is
/// there. An expected null is a place that the file does not have.
fn has_what_is_expected(tests: &TestRun<'_>, name: &str, rendered: &Path) -> Result<()> {
    let expected = yaml::read(tests, &file_of("expected", name))?;
    for (file, places) in expected.as_object().context("no files")? {
        let object = yaml::read(tests, &rendered.join(file))?;
        for (place, expected) in places.as_object().context("no places")? {
            let found = object.pointer(place).unwrap_or(&Value::Null);
            if let Some(difference) = difference(expected, found, place) {
                bail!("{file}, expected and found: {difference}");
            }
        }
    }
    Ok(())
}

/// A folder with what the chart makes of a file of values.
fn render(tests: &TestRun<'_>, values: Option<&Path>) -> Result<Scratch> {
    let source = workspace::root().join("tests/helm");
    let program = packages::helm(tests.cache, &source)?;
    let scratch = Scratch::new()?;
    let mut helm = Command::new(program);
    helm.arg(workspace::root().join("deploy/kubernetes/chart"))
        .arg(NAMESPACE)
        .arg(scratch.path())
        .args(values);
    process::output(&mut helm)?;
    Ok(scratch)
}

/// The files in a folder.
fn names(folder: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).context("listing what the chart made")? {
        let entry = entry.context("listing what the chart made")?;
        names.insert(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// Compares the objects with the schemas of Kubernetes. `tests/helm` has read monitors.
fn validate(tests: &TestRun<'_>, folder: &Path) -> Result<String> {
    let files = names(folder)?;
    let files = files
        .iter()
        .filter(|name| name.ends_with(".yaml") && *name != "monitor.yaml");
    let program = packages::kubernetes_validate(tests.cache)?;
    let mut validate = Command::new(program);
    validate
        .arg("--strict")
        .args(files.map(|name| folder.join(name)));
    process::output(&mut validate)?;
    Ok("helm lint, kubernetes-validate".into())
}

/// The commands of the containers and of their probes have flags and values that `vgpu` reads.
fn vgpu_takes(tests: &TestRun<'_>, dist: &Dist, folder: &Path) -> Result<()> {
    for file in names(folder)?.iter().filter(|name| name.ends_with(".yaml")) {
        let objects = yaml::read_all(tests, &folder.join(file))?;
        let containers = objects
            .iter()
            .filter_map(|object| object.pointer("/spec/template/spec/containers")?.as_array());
        for container in containers.flatten() {
            let command = container.get("command").context("no command")?;
            let probes = ["/startupProbe/exec/command", "/readinessProbe/exec/command"];
            let probes = probes.iter().filter_map(|place| container.pointer(place));
            for command in std::iter::once(command).chain(probes) {
                let command = command.as_array().context("a command is no list")?;
                let command = command.iter().filter_map(Value::as_str).skip(1);
                let mut vgpu = Command::new(&dist.vgpu);
                // The help is printed only if all words before it are right.
                process::output(vgpu.args(command).arg("--help"))?;
            }
        }
    }
    Ok(())
}

/// An overlay of the base for kustomize has the objects of the plain files, with another image.
pub(super) fn kustomize(tests: &TestRun<'_>) -> Result<String> {
    const REPOSITORY: &str = "registry.example.org/ggml-vgpu";
    let program = packages::kustomize(tests.cache, &workspace::root().join("tests/kustomize"))?;
    let scratch = Scratch::new()?;
    let base = workspace::root().join("deploy/kubernetes");
    let mut build = Command::new(program);
    build.arg(&base).args(["ggml-vgpu", REPOSITORY, "1"]);
    process::output(build.arg(scratch.path()))?;
    let objects = [
        ("executor", "vgpu"),
        ("device-plugin", "vgpu-device-plugin"),
    ];
    let expected = objects.map(|(_, name)| format!("{name}.yaml"));
    let files = names(scratch.path())?;
    ensure!(files == expected.into(), "{files:?}");
    for (file, name) in objects {
        let mut plain = yaml::read(tests, &base.join(format!("{file}.yaml")))?;
        let image = plain.pointer_mut("/spec/template/spec/containers/0/image");
        *image.context("no image")? = format!("{REPOSITORY}:1").into();
        let built = yaml::read(tests, &scratch.path().join(format!("{name}.yaml")))?;
        if let Some(difference) = difference(&plain, &built, "") {
            bail!("{file}, plain and built: {difference}");
        }
    }
    Ok("kustomize".into())
}

fn remove_labels_of_helm(object: &mut Value) {
    let Some(metadata) = object["metadata"].as_object_mut() else {
        return;
    };
    let labels = metadata.get_mut("labels").and_then(Value::as_object_mut);
    if let Some(labels) = labels {
        labels.retain(|name, _| !HELM_LABELS.iter().any(|start| name.starts_with(start)));
        if labels.is_empty() {
            metadata.remove("labels");
        }
    }
}

/// The first place at which two documents differ, and what is there.
fn difference(left: &Value, right: &Value, place: &str) -> Option<String> {
    match (left, right) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: BTreeSet<_> = a.keys().chain(b.keys()).collect();
            keys.into_iter().find_map(|key| {
                let place = format!("{place}/{key}");
                difference(&left[key.as_str()], &right[key.as_str()], &place)
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            let mut items = a.iter().zip(b).enumerate();
            items.find_map(|(i, (a, b))| difference(a, b, &format!("{place}/{i}")))
        }
        _ => (left != right).then(|| format!("{place} is {left} and {right}")),
    }
}
