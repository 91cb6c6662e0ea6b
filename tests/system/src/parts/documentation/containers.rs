//! A host of containers: the images of a release, run by podman, which also is its `docker`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use xtask_common::dist::Dist;
use xtask_common::model::{self, FileType};
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use super::guide::Guide;
use super::{TRIXIE, one_machine};
use crate::container::{Container, System};
use crate::debian::{Packages, of_release};
use crate::test_run::TestRun;

const PAGE: &str = "containers-kubernetes.md";

/// A Debian with podman, which has the commands `docker` and `docker compose`, too.
const PODMAN: System = System {
    packages: &[
        "podman",
        "podman-docker",
        "podman-compose",
        "crun",
        "netavark",
        "aardvark-dns",
        "nftables",
    ],
    name: "podman",
    ..TRIXIE
};

/// podman's limit of processes needs a controller of control groups that this machine may not give
/// to the system, and its limit of files may be above that of this machine.
const PODMAN_LIMITS: &str = "mkdir -p /etc/containers && touch /etc/containers/nodocker && \
     printf '[containers]\\npids_limit = 0\\ndefault_ulimits = [\"nofile=%s:%s\"]\\n' \
     $(ulimit -Hn) $(ulimit -Hn) > /etc/containers/containers.conf";

/// The image of llama-server that the page names: one of a registry.
const IMAGE: &str = "ghcr.io/ggml-org/llama.cpp:server-b11236";

/// The port of llama-server in the page.
const PORT: u16 = 8080;

/// The images of a release.
struct Images {
    executor: PathBuf,
    server: PathBuf,
    /// Their tag.
    tag: String,
    _scratch: Scratch,
}

impl Images {
    fn make(dist: &Dist) -> Result<Images> {
        let scratch = Scratch::new()?;
        let folder = scratch.path().join("release");
        let mut cargo = workspace::cargo();
        cargo.args(["xtask", "release", "--dist"]);
        cargo.arg(dist.vgpu.parent().context("a build lies in a folder")?);
        let written = process::output(cargo.arg("--out").arg(&folder))?;
        let [executor, server] =
            ["vgpu-0", "vgpu-llama-server-"].map(|start| of_release(&written, start, ".oci.tar"));
        let executor = executor?;
        let name = executor.file_name().unwrap_or_default().to_string_lossy();
        let tag = { name.strip_prefix("vgpu-") }
            .and_then(|rest| rest.strip_suffix("-amd64.oci.tar"))
            .with_context(|| format!("{name} has no version"))?;
        Ok(Images {
            tag: tag.replace('+', "-"),
            executor: executor.clone(),
            server: server?,
            _scratch: scratch,
        })
    }
}

pub(super) fn follow(tests: &TestRun<'_>, dist: &Dist, packages: &Packages) -> Result<String> {
    let sections = [
        "Docker and Podman",
        "The image of the executor",
        "The image of llama-server",
    ];
    let mut guide = Guide::open(PAGE, &sections)?;
    let images = Images::make(dist)?;
    let log = |name: &str| tests.log(&format!("documentation-containers-{name}"));
    let container = Container::boot(tests.cache, &PODMAN, &log("system"))?;
    container.root(PODMAN_LIMITS)?;
    let model = model::ensure(tests.cache, &model::TINY, FileType::F16)?;
    container.copy(&model, "/srv/models/model.gguf")?;
    for (image, name) in [
        (&images.executor, "vgpu-0.1.0-amd64.oci.tar"),
        (&images.server, "vgpu-llama-server-0.1.0-amd64.oci.tar"),
    ] {
        container.copy(image, &format!("/root/{name}"))?;
    }
    let deploy = workspace::root().join("deploy");
    let files = ["compose.yaml", "compose-executor.yaml", "compose-gpu.yaml"];
    container.copy_into("/root", &files.map(|file| deploy.join(file)))?;
    let tag = images.tag.as_str();
    let load = guide.take("podman load --input vgpu-0.1.0")?;
    let (load, copy) = load.split_once('\n').context("two commands")?;
    ensure!(
        copy.starts_with("skopeo copy"),
        "{copy:?} is followed by no test"
    );
    container.root(load)?;
    let own = guide.take_with(
        "podman load --input vgpu-llama-server",
        &[(
            "ggml-vgpu-llama-server:0.1.0",
            &format!("ggml-vgpu-llama-server:{tag}"),
        )],
    )?;
    let (load, run) = own.split_once('\n').context("two commands")?;
    container.root(load)?;

    // Executor and llama-server in containers, without a package on the host. No GPU is there.
    let compose = guide.take_with(
        "-f compose-executor.yaml",
        &[(" -f compose-gpu.yaml up", " up")],
    )?;
    let (up, ps) = compose.split_once('\n').context("two commands")?;
    let names = format!(
        "export VGPU_TAG={tag} LLAMA_IMAGE=localhost/ggml-vgpu-llama-server:{tag} \
         VGPU_IMAGE=localhost/ggml-vgpu\n"
    );
    let reference = {
        let on_cpu = format!(
            "podman run --rm -v /srv/models:/models:ro -p 127.0.0.1:{PORT}:8080 \
             -e GGML_BACKEND_PATH= -e LLAMA_ARG_N_GPU_LAYERS=0 -e VGPU_REQUIRED=0 \
             ggml-vgpu-llama-server:{tag} -m /models/model.gguf"
        );
        generate(&container, &on_cpu, &log("cpu"), || Ok(()))?
    };
    let expect = |text: &str| -> Result<()> {
        ensure!(
            text == reference,
            "{text:?}, but {reference:?} from the CPU"
        );
        Ok(())
    };
    let lists = |said: &str| -> Result<()> {
        let is_listed = said.contains("llama-server[");
        ensure!(is_listed, "vgpu ps lists no llama-server:\n{said}");
        Ok(())
    };
    let text = generate(
        &container,
        &format!("{names}{up}"),
        &log("compose-executor"),
        || lists(&container.root(&format!("{names}{ps}"))?),
    )?;
    expect(&text)?;
    container.root(&format!(
        "{names}docker compose -f compose-executor.yaml down --volumes"
    ))?;

    // With the packages on the host.
    container.copy_into("/root", &[&packages.host, &packages.guest])?;
    container.root("dpkg --install vgpu_*.deb vgpu-guest_*.deb && systemctl enable --now vgpu")?;
    let in_registry = format!("localhost/ggml-vgpu-llama-server:{tag}");
    let docker = guide.take_with("docker run", &[(IMAGE, &in_registry)])?;
    let ways = [
        ("docker", docker),
        (
            "compose",
            format!("{names}{}", guide.take("-f compose.yaml up")?),
        ),
        ("own-image", run.to_owned()),
    ];
    for (name, lines) in ways {
        let text = generate(&container, &lines, &log(name), || {
            lists(&container.root("vgpu ps")?)
        })?;
        expect(&text).with_context(|| format!("with {name}"))?;
    }
    guide.finish()?;
    Ok(format!("{} characters, four times", reference.len()))
}

/// Starts containers with lines of shell, asks the llama-server at [`PORT`] for text, does
/// something else while it runs, and ends it all.
fn generate(
    container: &Container,
    lines: &str,
    log: &Path,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<String> {
    let terminal = container.open("root", lines, log)?;
    container
        .await_that(&format!(
            "curl --silent --fail http://127.0.0.1:{PORT}/health"
        ))
        .with_context(|| format!("the output: {}", process::tail(log)))?;
    let text = one_machine::complete(container, PORT)?;
    meanwhile()?;
    container.root("podman stop --all")?;
    terminal.wait()?;
    container.await_that("[ -z \"$(podman ps --quiet)\" ]")?;
    Ok(text)
}
