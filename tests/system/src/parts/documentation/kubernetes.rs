//! A cluster of Kubernetes with one node, and the manifests of `deploy/kubernetes` in it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use xtask_common::llama;
use xtask_common::markdown;
use xtask_common::model::{self, FileType};
use xtask_common::packages;
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use super::containers::{Images, PAGE};
use super::guide::Guide;
use super::ollama_on_debian::{generate_at, graphs_in};
use super::one_machine::{PORT, TOKENS, complete_at};
use crate::cluster::{Cluster, Image, archive};
use crate::debian::TRIXIE;
use crate::ollama;
use crate::test_run::TestRun;

/// The image of llama-server in `pod.yaml`, and that of Ollama on the page: of registries.
const LLAMA_OF_PAGE: &str = "ghcr.io/ggml-org/llama.cpp:server-b11236";
const OLLAMA_OF_PAGE: &str = "ollama/ollama:0.34.4";

/// The page's repository of our image, and that of the node.
const REGISTRY: &str = "registry.example.org/ggml-vgpu";
const REPOSITORY: &str = "docker.io/library/ggml-vgpu";

/// The images that stand for them: without anything of ours, as the other ones.
const LLAMA: Image = Image {
    name: "localhost/llama-server:1",
    entrypoint: &["/app/llama-server"],
    command: &[],
    variables: &["LD_LIBRARY_PATH=/app"],
};
const OLLAMA: Image = Image {
    name: "localhost/ollama:1",
    entrypoint: &["/usr/bin/ollama"],
    command: &["serve"],
    variables: &["OLLAMA_HOST=0.0.0.0:11434"],
};

/// The resources of the page's pods: a seat and 8 GiB.
const SEAT: &str = "      resources: {limits: {vgpu.dev/gpu: 1, vgpu.dev/memory: 8}}\n";

/// What `pod.yaml` downloads, and the model in the image.
const MODELS: [&str; 2] = [
    "\"-hf\", \"ggml-org/gemma-3-1b-it-GGUF\"",
    "\"-m\", \"/model.gguf\"",
];

/// What `executor.yaml` asks for its container, for nodes with more than this machine has.
const RESOURCES: [(&str, &str); 3] = [
    ("cpu: \"4\"", "cpu: 100m"),
    ("memory: 8Gi", "memory: 256Mi"),
    ("memory: 64Gi", "memory: 12Gi"),
];

/// The slices of 1 GiB of a node, which are the memory of the executor's container or a little less.
const SLICES: std::ops::RangeInclusive<u64> = 11..=12;

/// `vgpu` in the container of the executor, with a command of the control socket.
const VGPU: &str = "kubectl exec --namespace kube-system daemonset/vgpu -- vgpu";
const CONTROL: &str = "--control=/run/vgpu-node/control.sock";

pub(super) fn follow(tests: &TestRun<'_>, images: &Images) -> Result<String> {
    let mut guide = Guide::open(PAGE, &["The device plugin", "With Helm"])?;
    let logs = workspace::reports().join("documentation-kubernetes");
    let cluster = Cluster::start(tests.cache, &logs)?;
    cluster.load(&images.executor)?;
    load_programs(tests, &cluster)?;
    let node = Node { cluster };

    let own_image = format!("image: ggml-vgpu:{}", images.tag);
    let own_image = ("image: ggml-vgpu:0.1.0", own_image.as_str());
    node.write("executor", &[&RESOURCES[..], &[own_image]].concat())?;
    node.write("device-plugin", &[own_image])?;
    let of_pod = [(LLAMA_OF_PAGE, LLAMA.name), (MODELS[0], MODELS[1])];
    let pod = node.write("pod", &of_pod)?;
    let on_cpu = node.on_cpu("llama-server", &pod, |node, pod| node.complete(pod))?;
    let ollama = ollama_of_page()?;
    let ollama_on_cpu = node.on_cpu("ollama", &ollama, |node, pod| node.generate(pod))?;

    // The commands of the page. The pod waits for the resources of the node.
    node.run(&guide.take_with("kubectl apply", &[("NAME", "node")])?)?;
    let expect_text = |when: &str| -> Result<()> {
        let before = graphs_in(&node.status()?, GUEST)?;
        let text = node.complete("llama-server")?;
        ensure!(text == on_cpu, "{text:?} {when}, but {on_cpu:?} on the CPU");
        let graphs = graphs_in(&node.status()?, GUEST)?.saturating_sub(before);
        ensure!(
            graphs >= TOKENS,
            "{when}: {graphs} graphs for {TOKENS} tokens"
        );
        Ok(())
    };
    node.cluster
        .await_that("kubectl wait --for=condition=Ready pod/llama-server --timeout=5s")?;
    expect_text("in the pod")?;
    let quota = node.guest()?.context("no guest of the pod")?["quota"].clone();
    ensure!(quota == 8_u64 << 30, "the quota is {quota}");
    node.expect_seats("32")?;
    let slices = node.allocatable("vgpu.dev/memory")?;
    ensure!(
        SLICES.contains(&slices),
        "the node has {slices} slices of 1 GiB"
    );

    // More than the node has.
    let large = pod.replace("vgpu.dev/memory: 8}", "vgpu.dev/memory: 1000}");
    let large = large.replace("name: llama-server\nspec", "name: large\nspec");
    ensure!(large.contains("1000") && large.contains("large"), "{large}");
    node.apply("large", &large)?;
    node.cluster.await_that(
        "kubectl get events --field-selector involvedObject.name=large | \
         grep 'Insufficient vgpu.dev/memory'",
    )?;
    node.run("kubectl delete pod large")?;

    // A kubelet that starts again keeps the container, and has the devices again.
    let restarts = "kubectl get pod llama-server -o \
                    jsonpath='{.status.containerStatuses[0].restartCount}'";
    ensure!(
        node.run(restarts)? == "0",
        "the container was started again"
    );
    node.run("pkill --full '^/srv/kubernetes kubelet '")?;
    node.cluster.await_that(
        "curl --insecure --silent --fail --max-time 5 https://192.0.2.1:10250/healthz && \
         [ \"$(kubectl logs --namespace kube-system daemonset/vgpu-device-plugin | \
         grep -c 'registered with the kubelet')\" = 2 ]",
    )?;
    node.expect_seats("32")?;
    expect_text("with the next kubelet")?;
    ensure!(
        node.run(restarts)? == "0",
        "the kubelet has ended the container"
    );

    // No new pods while the executor drains.
    node.run(&format!("timeout 5 {VGPU} drain {CONTROL} || [ $? = 124 ]"))?;
    node.expect_seats("0")?;
    node.run(&format!("{VGPU} drain --undo {CONTROL}"))?;
    node.expect_seats("32")?;

    // The next executor, and the next device plugin.
    node.run("kubectl delete pod --namespace kube-system --selector app=vgpu")?;
    node.run("kubectl delete pod --namespace kube-system --selector app=vgpu-device-plugin")?;
    node.await_rollouts(["vgpu", "vgpu-device-plugin"])?;
    node.expect_seats("32")?;
    node.await_guest(true)?;
    expect_text("with the next executor")?;

    node.run("kubectl delete pod llama-server")?;
    node.await_guest(false)?;
    node.cluster
        .await_that("[ -z \"$(find /run/vgpu-node/pods -name vgpu.sock)\" ]")?;

    // Ollama, which needs no line but the resources.
    node.apply("ollama", &ollama)?;
    let text = node.generate("ollama")?;
    ensure!(
        text == ollama_on_cpu,
        "{text:?} of Ollama, but {ollama_on_cpu:?} on the CPU"
    );
    let said = node.run("kubectl exec ollama -- ollama ps")?;
    ensure!(said.contains("100% GPU"), "no `100% GPU` in {said}");
    let graphs = graphs_in(&node.status()?, "default.ollama.ollama")?;
    ensure!(graphs > 0, "the executor has computed nothing for Ollama");
    node.run("kubectl delete pod ollama --now")?;

    // Other ways to the same.
    let with_pod = |when: &str| -> Result<()> {
        node.await_rollouts(["vgpu", "vgpu-device-plugin"])?;
        node.expect_seats("32")?;
        node.apply("pod", &pod)?;
        expect_text(when)?;
        node.run("kubectl delete pod llama-server --now")?;
        node.await_guest(false)
    };
    node.run("kubectl delete -f executor.yaml -f device-plugin.yaml")?;
    node.expect_seats("0")?;
    node.copy_deploy()?;
    node.apply_overlay(&images.tag)?;
    with_pod("with kustomize")?;
    node.run("kubectl delete --kustomize overlay")?;
    node.expect_seats("0")?;
    by_helm(tests, &node, &mut guide, &images.tag, || {
        with_pod("with Helm")
    })?;
    guide.finish()?;
    Ok("llama-server and Ollama in pods, each with the text of the CPU".to_owned())
}

/// Installs the chart for GPU nodes and for others with the commands of the page. `with_pod` looks
/// at the first.
fn by_helm(
    tests: &TestRun<'_>,
    node: &Node,
    guide: &mut Guide,
    tag: &str,
    with_pod: impl Fn() -> Result<()>,
) -> Result<()> {
    let source = workspace::root().join("tests/helm-cli");
    let program = packages::helm_command(tests.cache, &source)?;
    let to = node.cluster.files().join("usr/local/bin/helm");
    fs::copy(program, to).context("copying a program")?;

    // Less than the values of the chart, for this machine.
    let requests = "executor.resources.requests.cpu=100m,executor.resources.requests.memory=256Mi";
    let image = format!("image.repository={REPOSITORY},image.tag={tag},{requests}");
    let of_page = &format!("image.repository={REGISTRY}");
    let names = [("NAME", "node"), (of_page, image.as_str())];
    let in_clone = |lines: &str| node.run(&format!("cd overlay/ggml-vgpu\n{lines}"));
    in_clone(&guide.take_with("helm install vgpu deploy", &names)?)?;
    with_pod()?;

    let less = "executor.resources.limits.memory=12Gi,executor.memory=10G";
    let image = format!("{image},{less}");
    let names = [("NAME", "node"), (of_page, image.as_str())];
    let for_cpu = guide.take_with("helm install vgpu-cpu", &names)?;

    let values = format!(
        "image: {{repository: {REPOSITORY}, tag: {tag}}}\n\
         executor:\n  maxGuests: 17\n  resources: {{requests: {{cpu: 100m, memory: 256Mi}}}}\n"
    );
    let file = "root/overlay/ggml-vgpu/values.yaml";
    fs::write(node.cluster.files().join(file), values).context("writing values")?;
    let upgrade = guide.take("helm upgrade vgpu")?;
    let (upgrade, uninstall) = upgrade.split_once('\n').context("two commands")?;
    in_clone(upgrade)?;
    node.await_rollouts(["vgpu", "vgpu-device-plugin"])?;
    let of_executor = "kubectl get daemonset vgpu --namespace kube-system --output yaml";
    in_clone(&format!("{of_executor} | grep -e '--max-guests=17'"))?;
    in_clone(uninstall)?;
    node.expect_seats("0")?;

    node.run("kubectl label node node vgpu-")?;
    in_clone(&for_cpu)?;
    node.await_rollouts(["vgpu-cpu", "vgpu-cpu-device-plugin"])?;
    node.expect_seats("32")?;
    let slices = node.allocatable("vgpu.dev/memory")?;
    ensure!(slices == 10, "{slices} slices of a memory of 10 GiB");
    Ok(())
}

/// The executor's name of the container of `pod.yaml`.
const GUEST: &str = "default.llama-server.llama-server";

/// The page's pod of Ollama.
fn ollama_of_page() -> Result<String> {
    let text = block_of_page("Ollama in a container", OLLAMA_OF_PAGE)?;
    let containers = text.replace(OLLAMA_OF_PAGE, OLLAMA.name);
    let containers = containers.replace('\n', "\n  ");
    Ok(format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: ollama\nspec:\n  {}\n",
        containers.trim_end()
    ))
}

/// The YAML of a section of the page, which has the words `mark`.
fn block_of_page(section: &str, mark: &str) -> Result<String> {
    let page = fs::read_to_string(workspace::root().join("docs").join(PAGE));
    let mut blocks = markdown::blocks(&page.context("reading a page")?).into_iter();
    let block = blocks.find(|block| {
        block.heading == section && block.language == "yaml" && block.text.contains(mark)
    });
    let block = block.with_context(|| format!("{PAGE}: {section} has no {mark:?}"))?;
    Ok(block.text)
}

/// Loads the images of llama-server and Ollama, with a model.
fn load_programs(tests: &TestRun<'_>, cluster: &Cluster) -> Result<()> {
    let scratch = Scratch::new()?;
    let root = scratch.path().join("root");
    let copy = |from: &Path, to: &Path| {
        let mut cp = Command::new("cp");
        cp.args(["--archive", "--reflink=auto"]);
        process::output(cp.arg(from).arg(to)).map(drop)
    };
    copy(&TRIXIE.minimal(tests.cache)?, &root)?;
    let llama = llama::build(tests.cache, llama::Stage::Tools)?;
    copy(&llama, &root.join("app"))?;
    let [_, version] = ollama::VERSIONS;
    let laid_out = scratch.path().join("ollama");
    ollama::lay_out(&laid_out, &ollama::binary(tests.cache, version)?, &llama)?;
    copy(&laid_out.join("usr/local/."), &root.join("usr"))?;
    let model = model::ensure(tests.cache, &model::TINY, FileType::F16)?;
    fs::copy(model, root.join("model.gguf")).context("copying a model")?;
    cluster.load(&archive(&root, &[LLAMA, OLLAMA], scratch.path())?)
}

/// The node of a cluster with the manifests.
struct Node {
    cluster: Cluster,
}

impl Node {
    fn run(&self, lines: &str) -> Result<String> {
        self.cluster.run(&format!("cd /root\n{lines}"))
    }

    /// Writes a manifest of `deploy/kubernetes` with other names, each of which it has. Returns it.
    fn write(&self, name: &str, names: &[(&str, &str)]) -> Result<String> {
        let file = workspace::root().join(format!("deploy/kubernetes/{name}.yaml"));
        let mut text = fs::read_to_string(file).context("reading a manifest")?;
        for (name, other) in names {
            ensure!(text.contains(name), "{name:?} is not in\n{text}");
            text = text.replace(name, other);
        }
        self.place(name, &text)?;
        Ok(text)
    }

    fn place(&self, name: &str, text: &str) -> Result<()> {
        let file = self.cluster.files().join(format!("root/{name}.yaml"));
        fs::write(file, text).context("writing a manifest")
    }

    fn apply(&self, name: &str, manifest: &str) -> Result<()> {
        self.place(name, manifest)?;
        self.run(&format!("kubectl apply -f {name}.yaml")).map(drop)
    }

    /// What a pod generates without a part of the executor.
    fn on_cpu(
        &self,
        name: &str,
        manifest: &str,
        generate: impl FnOnce(&Node, &str) -> Result<String>,
    ) -> Result<String> {
        let own = format!("{name}-cpu");
        let without = manifest.replace(SEAT, "");
        let named = format!("metadata:\n  name: {name}\n");
        let without = without.replace(&named, &format!("metadata:\n  name: {own}\n"));
        ensure!(
            !without.contains("vgpu.dev") && without.contains(&own),
            "{without}"
        );
        self.apply(&own, &without)?;
        let text = generate(self, &own).context("on the CPU")?;
        ensure!(!text.is_empty(), "{own} generates nothing");
        self.run(&format!("kubectl delete pod {own} --now"))?;
        Ok(text)
    }

    /// Waits until the program of a pod answers at a path of its port. Returns its URL.
    fn url(&self, pod: &str, port: u16, path: &str) -> Result<String> {
        let ip = format!("$(kubectl get pod {pod} -o 'jsonpath={{.status.podIP}}')");
        self.cluster.await_that(&format!(
            "curl --silent --fail --max-time 5 http://{ip}:{port}{path}"
        ))?;
        Ok(format!(
            "http://{}:{port}",
            self.run(&format!("echo {ip}"))?.trim()
        ))
    }

    /// Asks the llama-server of a pod for text.
    fn complete(&self, pod: &str) -> Result<String> {
        let url = self.url(pod, PORT, "/health")?;
        complete_at(&url, |line| self.run(line))
    }

    /// Makes the model of the Ollama of a pod, and asks it for text.
    fn generate(&self, pod: &str) -> Result<String> {
        let url = self.url(pod, 11434, "/api/version")?;
        let create = "echo FROM /model.gguf > /tmp/Modelfile && \
                      ollama create model -f /tmp/Modelfile";
        self.run(&format!("kubectl exec {pod} -- sh -c '{create}'"))?;
        generate_at(&url, |line| self.run(line))
    }

    /// What `vgpu ps` says of the executor.
    fn status(&self) -> Result<Value> {
        let said = self.run(&format!("{VGPU} ps --json {CONTROL}"))?;
        serde_json::from_str(&said).with_context(|| format!("vgpu ps: {said}"))
    }

    /// The container of `pod.yaml` as a guest.
    fn guest(&self) -> Result<Option<Value>> {
        let mut status = self.status()?;
        let guests = status["guests"].as_array_mut().context("no guests")?;
        let found = guests.iter_mut().find(|one| one["name"] == GUEST);
        Ok(found.map(Value::take))
    }

    /// Waits until that guest is there, or is not.
    fn await_guest(&self, is_there: bool) -> Result<()> {
        let not = if is_there { "" } else { "! " };
        self.cluster.await_that(&format!(
            "status=$({VGPU} ps --json {CONTROL}) && {not}echo \"$status\" | grep '\"{GUEST}\"'"
        ))
    }

    /// Waits until the node offers so many seats.
    fn expect_seats(&self, seats: &str) -> Result<()> {
        self.cluster.await_that(&format!(
            "kubectl get node node -o jsonpath='{{.status.allocatable}}' | \
             grep '\"vgpu.dev/gpu\":\"{seats}\"'"
        ))
    }

    /// How much of a resource the node offers.
    fn allocatable(&self, resource: &str) -> Result<u64> {
        let said = self.run("kubectl get node node --output json")?;
        let node: Value = serde_json::from_str(&said).context("a node in JSON")?;
        let amount = node["status"]["allocatable"][resource].as_str();
        let amount = amount.with_context(|| format!("no {resource} in {said}"))?;
        amount
            .parse()
            .with_context(|| format!("{resource}: {amount}"))
    }

    /// Copies `deploy/kubernetes` to where the page's overlay and its commands of Helm expect it.
    fn copy_deploy(&self) -> Result<()> {
        let to = self.cluster.files().join("root/overlay/ggml-vgpu/deploy");
        fs::create_dir_all(&to).context("creating a folder")?;
        let from = workspace::root().join("deploy/kubernetes");
        let mut cp = Command::new("cp");
        process::output(cp.arg("--recursive").arg(from).arg(to)).map(drop)
    }

    /// Applies the page's overlay for kustomize, with a patch for this machine.
    fn apply_overlay(&self, tag: &str) -> Result<()> {
        let text = block_of_page("With kustomize", REGISTRY)?;
        let text = text.replace(REGISTRY, REPOSITORY);
        let text = text.replace("newTag: 0.1.0", &format!("newTag: {tag}"));
        let requests = json!([{
            "op": "replace",
            "path": "/spec/template/spec/containers/0/resources/requests",
            "value": {"cpu": "100m", "memory": "256Mi"},
        }]);
        let patches = json!([{
            "target": {"kind": "DaemonSet", "name": "vgpu"}, "patch": requests.to_string(),
        }]);
        self.place(
            "overlay/kustomization",
            &format!("{text}patches: {patches}\n"),
        )?;
        self.run("cd overlay && kubectl apply --kustomize .")
            .map(drop)
    }

    /// Waits until all pods of DaemonSets are those of their present templates, and ready.
    fn await_rollouts(&self, names: [&str; 2]) -> Result<()> {
        for name in names {
            self.cluster.await_that(&format!(
                "kubectl rollout status daemonset/{name} --namespace kube-system --timeout=10s"
            ))?;
        }
        Ok(())
    }
}
