//! A cluster of Kubernetes with one node, and the manifests of `deploy/kubernetes` in it.

use std::fs;
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
use crate::files::copy_tree;
use crate::ollama;
use crate::test_run::TestRun;

/// The image of llama-server in `pod.yaml`, and that of Ollama on the page: of registries.
const PUBLISHED_LLAMA: &str = "ghcr.io/ggml-org/llama.cpp:server-b11236";
const PUBLISHED_OLLAMA: &str = "ollama/ollama:0.34.4";

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

/// The sections of the page, in their order.
const SECTIONS: [&str; 4] = [
    "The device plugin",
    "With kustomize",
    "With Helm",
    "Dynamic Resource Allocation",
];

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

/// The slices of 1 GiB of a node: the memory of the executor's container, or a little less.
const SLICES: std::ops::RangeInclusive<u64> = 11..=12;

/// The DaemonSets.
const EXECUTOR: &str = "vgpu";
const PLUGIN: &str = "vgpu-device-plugin";
const DRIVER: &str = "vgpu-dra-driver";

/// `vgpu` in the container of the executor, with a command of the control socket.
const VGPU: &str = "kubectl exec --namespace kube-system daemonset/vgpu -- vgpu";
const CONTROL: &str = "--control=/run/vgpu-node/control.sock";

pub(super) fn follow(tests: &TestRun<'_>, images: &Images) -> Result<String> {
    let mut guide = Guide::open(PAGE, &SECTIONS)?;
    let node = Node::start(tests, images)?;
    let ollama = ollama_of_page()?;
    let ollama_on_cpu = node.on_cpu("ollama", &ollama, |node, pod| node.generate(pod))?;

    // The pod waits for the resources of the node.
    node.run(&guide.take_with("kubectl apply", &[("NAME", "node")])?)?;
    node.expect_text("in the pod")?;
    let slices = node.allocatable("vgpu.dev/memory")?;
    ensure!(
        SLICES.contains(&slices),
        "the node has {slices} slices of 1 GiB"
    );
    node.expect_sockets(1)?;

    too_much_memory(&node)?;
    next_kubelet(&node)?;
    drain(&node)?;
    next_device_plugin(&node)?;
    next_executor(&node)?;
    node.end_pod("llama-server")?;
    node.expect_sockets(0)?;

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

    node.run("kubectl delete -f executor.yaml -f device-plugin.yaml")?;
    node.expect_seats("0")?;
    by_kustomize(&node, &mut guide, &images.tag)?;
    by_helm(tests, &node, &mut guide, &images.tag)?;
    by_claims(&node, &mut guide)?;
    guide.finish()?;
    Ok("llama-server and Ollama in pods, each with the text of the CPU".to_owned())
}

/// A pod that asks for more than the node has does not start.
fn too_much_memory(node: &Node) -> Result<()> {
    node.apply("large", &node.pod_with("large", 1000)?)?;
    node.await_event("large", "Insufficient vgpu.dev/memory")?;
    node.run("kubectl delete pod large").map(drop)
}

/// A kubelet that starts again keeps the container, and has the devices again.
fn next_kubelet(node: &Node) -> Result<()> {
    node.run("pkill --full '^/srv/kubernetes kubelet '")?;
    node.cluster.await_that(
        "curl --insecure --silent --fail --max-time 5 https://192.0.2.1:10250/healthz && \
         [ \"$(kubectl logs --namespace kube-system daemonset/vgpu-device-plugin | \
         grep -c 'registered with the kubelet')\" -ge 2 ]",
    )?;
    node.expect_seats("32")?;
    node.expect_text("with the next kubelet")?;
    node.expect_restarts("0")
}

/// A program that is connected goes on while the executor drains, and no pod comes to the node.
fn drain(node: &Node) -> Result<()> {
    // The command waits for the program.
    node.run(&format!("timeout 5 {VGPU} drain {CONTROL} || [ $? = 124 ]"))?;
    node.expect_seats("0")?;
    node.expect_text("while the executor drains")?;
    node.apply("late", &node.pod_with("late", 1)?)?;
    node.await_event("late", "Insufficient vgpu.dev/gpu")?;
    node.run(&format!("{VGPU} drain --undo {CONTROL}"))?;
    node.expect_seats("32")?;
    node.run("kubectl delete pod late --now")?;
    node.await_guest("late", false)
}

/// A device plugin that starts again removes the guest of a pod that has ended meanwhile, and keeps
/// that of the other.
fn next_device_plugin(node: &Node) -> Result<()> {
    node.apply("short", &node.pod_with("short", 1)?)?;
    node.await_guest("short", true)?;
    node.without(PLUGIN, || {
        node.run("kubectl delete pod short --now")?;
        let guests = node.status()?["guests"].to_string();
        ensure!(
            guests.contains(&guest_of("short")),
            "who removes guests without a device plugin? {guests}"
        );
        Ok(())
    })?;
    node.expect_seats("32")?;
    node.await_guest("short", false)?;
    node.expect_text("with the next device plugin")?;
    node.expect_restarts("0")
}

/// The executor that starts again has the guest of the pod with its quota.
fn next_executor(node: &Node) -> Result<()> {
    let quota = node.quota()?;
    ensure!(quota == 8 << 30, "the quota is {quota}");
    node.without(EXECUTOR, || node.expect_seats("0"))?;
    node.expect_seats("32")?;
    node.await_guest("llama-server", true)?;
    let again = node.quota()?;
    ensure!(again == quota, "the quota was {quota}, and is {again}");
    node.expect_text("with the next executor")
}

/// Applies the page's overlay, with a patch for this machine.
fn by_kustomize(node: &Node, guide: &mut Guide, tag: &str) -> Result<()> {
    node.copy_deploy()?;
    let text = block_of_page("With kustomize", REGISTRY)?;
    let text = text.replace(REGISTRY, REPOSITORY);
    let text = text.replace("newTag: 0.1.0", &format!("newTag: {tag}"));
    let requests = json!([{
        "op": "replace",
        "path": "/spec/template/spec/containers/0/resources/requests",
        "value": {"cpu": "100m", "memory": "256Mi"},
    }]);
    let patches = json!([{
        "target": {"kind": "DaemonSet", "name": EXECUTOR}, "patch": requests.to_string(),
    }]);
    node.place(
        "overlay/kustomization",
        &format!("{text}patches: {patches}\n"),
    )?;
    let apply = guide.take("kubectl apply --kustomize")?;
    node.run(&format!("cd overlay\n{apply}"))?;
    node.try_pod("with kustomize")?;
    node.run("kubectl delete --kustomize overlay")?;
    node.expect_seats("0")
}

/// Installs the chart for GPU nodes, and for others, with the commands of the page.
fn by_helm(tests: &TestRun<'_>, node: &Node, guide: &mut Guide, tag: &str) -> Result<()> {
    let program = packages::helm_cli(tests.cache, &workspace::root().join("tests/helm-cli"))?;
    let to = node.cluster.files().join("usr/local/bin/helm");
    fs::copy(program, to).context("copying a program")?;
    let in_clone = |lines: &str| node.run(&format!("cd overlay/ggml-vgpu\n{lines}"));

    // Less than the values of the chart, for this machine.
    let requests = "executor.resources.requests.cpu=100m,executor.resources.requests.memory=256Mi";
    let values = format!("image.repository={REPOSITORY},image.tag={tag},{requests}");
    let published = format!("image.repository={REGISTRY}");
    let names = [("NAME", "node"), (published.as_str(), values.as_str())];
    in_clone(&guide.take_with("helm install vgpu deploy", &names)?)?;
    node.try_pod("with Helm")?;

    let limits = "executor.resources.limits.memory=12Gi,executor.memory=10G";
    let values = format!("{values},{limits}");
    let names = [("NAME", "node"), (published.as_str(), values.as_str())];
    let for_cpu = guide.take_with("helm install vgpu-cpu", &names)?;

    let values = format!(
        "image: {{repository: {REPOSITORY}, tag: {tag}}}\n\
         executor:\n  maxGuests: 96\n  resources: {{requests: {{cpu: 100m, memory: 256Mi}}}}\n"
    );
    let file = "root/overlay/ggml-vgpu/values.yaml";
    fs::write(node.cluster.files().join(file), values).context("writing values")?;
    let block = guide.take("helm upgrade vgpu")?;
    let (upgrade, uninstall) = block.split_once('\n').context("two commands")?;
    in_clone(upgrade)?;
    node.await_rollouts([EXECUTOR, PLUGIN])?;
    node.run(&format!(
        "kubectl get daemonset {EXECUTOR} --namespace kube-system --output yaml | \
         grep -e '--max-guests=96'"
    ))?;
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

/// The page's claims in place of the device plugin: `pod-claim.yaml`, and a pod for which its
/// device has too little memory left.
fn by_claims(node: &Node, guide: &mut Guide) -> Result<()> {
    node.run("helm uninstall vgpu-cpu --namespace kube-system")?;
    node.run("kubectl label node node vgpu-")?;
    // The pod waits for the devices of the node.
    node.run(&guide.take_with("kubectl get resourceslices", &[("NAME", "node")])?)?;
    node.await_rollouts([EXECUTOR, DRIVER])?;
    node.run("kubectl get resourceslices --output yaml | grep 'allowMultipleAllocations: true'")?;
    let claim = node.claim_of("llama-server")?;
    node.expect_text_of(&claim, "with a claim")?;
    let status = node.status()?;
    let guests = status["guests"].as_array().context("no guests")?;
    let guest = guests.iter().find(|guest| guest["name"] == claim.as_str());
    let guest = guest.with_context(|| format!("no guest {claim} in {status}"))?;
    ensure!(
        guest["quota"] == 8u64 << 30 && guest["weight"] == 300,
        "{guest}"
    );

    // The device has 4 GiB or less for others.
    let second = node
        .claimed
        .replace("name: llama-server\nspec", "name: second\nspec");
    ensure!(second != node.claimed, "no other name in {second}");
    node.apply("second", &second)?;
    node.await_event("second", "cannot allocate all claims")?;

    foreign_slices_are_refused(node)?;

    // The next kubelet has the driver again, and the next driver the claim.
    node.run("pkill --full '^/srv/kubernetes kubelet '")?;
    node.cluster.await_that(
        "[ \"$(kubectl logs --namespace kube-system daemonset/vgpu-dra-driver | \
         grep -c 'registered with the kubelet')\" -ge 2 ]",
    )?;
    node.expect_text_of(&claim, "with the next kubelet")?;
    node.without_of(DRIVER, [EXECUTOR, DRIVER], || Ok(()))?;
    node.expect_text_of(&claim, "with the next driver")?;
    node.expect_restarts("0")?;

    // The end of a pod leaves the device to the other.
    node.run("kubectl delete pod llama-server --now")?;
    node.await_guest_of(&claim, false)?;
    let claim = node.claim_of("second")?;
    node.cluster
        .await_that("kubectl wait --for=condition=Ready pod/second --timeout=10s")?;
    node.await_guest_of(&claim, true)?;
    node.run("kubectl delete pod second --now")?;
    node.await_guest_of(&claim, false)?;
    node.expect_sockets(0)?;
    node.run("[ -z \"$(ls /var/run/cdi)\" ]").map(drop)
}

/// The account of a driver writes the slice of its own node, and no other one.
fn foreign_slices_are_refused(node: &Node) -> Result<()> {
    const ACCOUNT: &str = "Impersonate-User: system:serviceaccount:kube-system:vgpu-dra-driver";
    const NODE: &str = "Impersonate-Extra-Authentication.kubernetes.io%2Fnode-name: node";
    let create = |of: &str, headers: &[&str]| {
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": "another"},
            "spec": {
                "driver": "vgpu.dev",
                "nodeName": of,
                "pool": {"name": of, "generation": 1, "resourceSliceCount": 1},
                "devices": [],
            },
        });
        node.place("slice", &slice.to_string())?;
        let headers: String = headers
            .iter()
            .map(|one| format!(" --header '{one}'"))
            .collect();
        node.run(&format!(
            "curl --insecure --silent --show-error --max-time 20 --data @slice.yaml \
             --header 'Authorization: Bearer token' --header 'Content-Type: application/json' \
             {headers} 'https://127.0.0.1/apis/resource.k8s.io/v1/resourceslices?dryRun=All'"
        ))
    };
    for (of, headers, is_made) in [
        ("other", &[][..], true),
        ("node", &[ACCOUNT, NODE], true),
        ("other", &[ACCOUNT, NODE], false),
        ("node", &[ACCOUNT], false),
    ] {
        let said = create(of, headers)?;
        let expected = match is_made {
            true => "\"kind\": \"ResourceSlice\"",
            false => "a driver writes the slice of its own node only",
        };
        ensure!(said.contains(expected), "{of}, {headers:?}: {said}");
    }
    Ok(())
}

/// The executor's name of the container of `pod.yaml` in a pod.
fn guest_of(pod: &str) -> String {
    format!("default.{pod}.llama-server")
}

/// The page's pod of Ollama.
fn ollama_of_page() -> Result<String> {
    let text = block_of_page("Ollama in a container", PUBLISHED_OLLAMA)?;
    let containers = text.replace(PUBLISHED_OLLAMA, OLLAMA.name);
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
    copy_tree(&TRIXIE.minimal(tests.cache)?, &root)?;
    let llama = llama::build(tests.cache, llama::Stage::Tools)?;
    copy_tree(&llama, &root.join("app"))?;
    let [_, version] = ollama::VERSIONS;
    let laid_out = scratch.path().join("ollama");
    ollama::lay_out(&laid_out, &ollama::binary(tests.cache, version)?, &llama)?;
    copy_tree(&laid_out.join("usr/local/."), &root.join("usr"))?;
    let model = model::ensure(tests.cache, &model::TINY, FileType::F16)?;
    fs::copy(model, root.join("model.gguf")).context("copying a model")?;
    cluster.load(&archive(&root, &[LLAMA, OLLAMA], scratch.path())?)
}

/// The node of a cluster with the manifests.
struct Node {
    cluster: Cluster,
    /// `pod.yaml` with the image of the test.
    pod: String,
    /// `pod-claim.yaml`, likewise.
    claimed: String,
    /// What its program generates without the executor.
    text: String,
}

impl Node {
    /// Starts a cluster, loads the images, and writes the manifests into the home folder.
    fn start(tests: &TestRun<'_>, images: &Images) -> Result<Node> {
        let logs = workspace::reports().join("documentation-kubernetes");
        let cluster = Cluster::start(tests.cache, &logs)?;
        cluster.load(&images.executor)?;
        load_programs(tests, &cluster)?;
        let mut node = Node {
            cluster,
            pod: String::new(),
            claimed: String::new(),
            text: String::new(),
        };
        let image = format!("image: ggml-vgpu:{}", images.tag);
        let image = ("image: ggml-vgpu:0.1.0", image.as_str());
        node.write("executor", &[&RESOURCES[..], &[image]].concat())?;
        node.write("device-plugin", &[image])?;
        node.write("dra-driver", &[image])?;
        let of_pod = [(PUBLISHED_LLAMA, LLAMA.name), (MODELS[0], MODELS[1])];
        node.pod = node.write("pod", &of_pod)?;
        node.claimed = node.write("pod-claim", &of_pod)?;
        node.text = node.on_cpu("llama-server", &node.pod, |node, pod| node.complete(pod))?;
        Ok(node)
    }

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

    /// The quota of the container of `pod.yaml`.
    fn quota(&self) -> Result<u64> {
        let status = self.status()?;
        let guests = status["guests"].as_array().context("no guests")?;
        let guest = { guests.iter() }.find(|one| one["name"] == guest_of("llama-server"));
        let quota = guest.and_then(|guest| guest["quota"].as_u64());
        quota.with_context(|| format!("no quota of the pod in {status}"))
    }

    /// Waits until the executor has the guest of a pod, or has it no more.
    fn await_guest(&self, pod: &str, is_there: bool) -> Result<()> {
        self.await_guest_of(&guest_of(pod), is_there)
    }

    /// As [`await_guest`](Node::await_guest), by the name of the guest.
    fn await_guest_of(&self, guest: &str, is_there: bool) -> Result<()> {
        let not = if is_there { "" } else { "! " };
        self.cluster.await_that(&format!(
            "status=$({VGPU} ps --json {CONTROL}) && {not}echo \"$status\" | grep '\"{guest}\"'"
        ))
    }

    /// So many containers have a socket of the executor.
    fn expect_sockets(&self, count: u32) -> Result<()> {
        let found = "$(find /run/vgpu-node/pods -name vgpu.sock | wc -l)";
        self.run(&format!("[ \"{found}\" = {count} ]")).map(drop)
    }

    /// The program of `pod.yaml` generates its text, and the executor has computed it.
    fn expect_text(&self, when: &str) -> Result<()> {
        self.expect_text_of(&guest_of("llama-server"), when)
    }

    /// As [`expect_text`](Node::expect_text), with another guest.
    fn expect_text_of(&self, guest: &str, when: &str) -> Result<()> {
        // The program has a session before the graphs are counted.
        self.url("llama-server", PORT, "/health")?;
        let before = graphs_in(&self.status()?, guest)?;
        let text = self.complete("llama-server")?;
        ensure!(
            text == self.text,
            "{text:?} {when}, but {:?} on the CPU",
            self.text
        );
        let graphs = graphs_in(&self.status()?, guest)?.saturating_sub(before);
        ensure!(
            graphs >= TOKENS,
            "{when}: {graphs} graphs for {TOKENS} tokens"
        );
        Ok(())
    }

    /// So often the kubelet has started the program of `pod.yaml` again.
    fn expect_restarts(&self, restarts: &str) -> Result<()> {
        let said = self.run(
            "kubectl get pod llama-server -o \
             jsonpath='{.status.containerStatuses[0].restartCount}'",
        )?;
        ensure!(
            said == restarts,
            "the container was started {said} times again"
        );
        Ok(())
    }

    /// `pod.yaml` as another pod, with so many slices.
    fn pod_with(&self, name: &str, slices: u32) -> Result<String> {
        let own = ["metadata:\n  name: llama-server\n", "vgpu.dev/memory: 8}"];
        ensure!(own.iter().all(|own| self.pod.contains(own)), "{}", self.pod);
        let named = self
            .pod
            .replace(own[0], &format!("metadata:\n  name: {name}\n"));
        Ok(named.replace(own[1], &format!("vgpu.dev/memory: {slices}}}")))
    }

    /// Deletes a pod, and waits until the executor has its guest no more.
    fn end_pod(&self, pod: &str) -> Result<()> {
        self.run(&format!("kubectl delete pod {pod} --now"))?;
        self.await_guest(pod, false)
    }

    /// The DaemonSets are there, and `pod.yaml` runs with them.
    fn try_pod(&self, when: &str) -> Result<()> {
        self.await_rollouts([EXECUTOR, PLUGIN])?;
        self.expect_seats("32")?;
        self.apply("pod", &self.pod)?;
        self.expect_text(when)?;
        self.end_pod("llama-server")
    }

    /// The name of the guest of a pod's claim, which Kubernetes makes of its template.
    fn claim_of(&self, pod: &str) -> Result<String> {
        let path = "{.status.resourceClaimStatuses[0].resourceClaimName}";
        let name = self.run(&format!("kubectl get pod {pod} --output jsonpath='{path}'"))?;
        ensure!(!name.trim().is_empty(), "pod {pod} has no claim");
        Ok(format!("default.{}", name.trim()))
    }

    /// Waits for an event of a pod with these words.
    fn await_event(&self, pod: &str, words: &str) -> Result<()> {
        self.cluster.await_that(&format!(
            "kubectl get events --field-selector involvedObject.name={pod} | grep '{words}'"
        ))
    }

    /// Takes the pods of a DaemonSet from the node, does something, and gives the node new ones.
    fn without(&self, daemonset: &str, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        self.without_of(daemonset, [EXECUTOR, PLUGIN], meanwhile)
    }

    /// As [`without`](Node::without), with the DaemonSets that are there.
    fn without_of(
        &self,
        daemonset: &str,
        all: [&str; 2],
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let select = |value: &str| {
            let patch = json!({"spec": {"template": {"spec": {"nodeSelector": {"vgpu": value}}}}});
            self.run(&format!(
                "kubectl patch daemonset {daemonset} --namespace kube-system --patch '{patch}'"
            ))
        };
        select("elsewhere")?;
        self.cluster.await_that(&format!(
            "pods=$(kubectl get pods --namespace kube-system --selector app={daemonset} \
             --output name) && [ -z \"$pods\" ]"
        ))?;
        meanwhile()?;
        select("true")?;
        self.await_rollouts(all)
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
