//! A host of containers: the images of a release, run by podman, which also is its `docker`.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};

use xtask_common::dist::Dist;
use xtask_common::model::{self, FileType};
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use super::guide::Guide;
use super::one_machine::{self, PORT};
use crate::container::{Container, System, TRIXIE, USER};
use crate::debian::{self, Packages, of_release};
use crate::test_run::TestRun;

pub(super) const PAGE: &str = "containers-kubernetes.md";

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
        "passt",
        "uidmap",
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

/// The archive of our own image of llama-server.
const SERVER_FILE: &str = "vgpu-llama-server-0.1.0-amd64.oci.tar";

/// The images of a release.
#[derive(Debug)]
pub(super) struct Images {
    pub(super) executor: PathBuf,
    server: PathBuf,
    /// Their tag.
    pub(super) tag: String,
    _scratch: Scratch,
}

impl Images {
    /// Makes a release of a build, which builds llama-server if it is not in the cache.
    ///
    /// # Errors
    /// As [`debian::release`].
    pub(super) fn make(dist: &Dist) -> Result<Images> {
        let scratch = Scratch::new()?;
        let folder = scratch.path().join("release");
        let written = debian::release(dist, &folder)?;
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

/// A host of containers.
struct Host<'a> {
    container: Container,
    /// What llama-server generates on its CPU.
    reference: String,
    tests: &'a TestRun<'a>,
}

/// The log of a way, by its name.
fn log(tests: &TestRun<'_>, name: &str) -> PathBuf {
    tests.log(&format!("documentation-containers-{name}"))
}

impl Host<'_> {
    /// Starts containers with lines of shell, which stay in the foreground. The llama-server in
    /// them must generate what it does on its CPU. The lines `ps` list the executor's programs.
    fn follow(&self, (name, user): (&str, &str), lines: &str, ps: &str) -> Result<()> {
        let text = self
            .generate((name, user), lines, || {
                let said = self.container.root(ps)?;
                let is_listed = said.contains("llama-server[");
                ensure!(is_listed, "vgpu ps lists no llama-server:\n{said}");
                Ok(())
            })
            .context(name.to_owned())?;
        ensure!(
            text == self.reference,
            "{name}: {text:?}, but {:?} from the CPU",
            self.reference
        );
        Ok(())
    }

    /// Starts containers, asks the llama-server at [`PORT`] for text, does something else while it
    /// runs, and ends all containers of the user.
    fn generate(
        &self,
        (name, user): (&str, &str),
        lines: &str,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<String> {
        let log = log(self.tests, name);
        let terminal = self.container.open(user, lines, &log)?;
        self.container
            .await_that(&format!(
                "curl --silent --fail --max-time 5 http://127.0.0.1:{PORT}/health"
            ))
            .with_context(|| process::tail(&log))?;
        let text = one_machine::complete(&self.container)?;
        meanwhile()?;
        self.container.run(user, "podman stop --all")?;
        terminal.wait()?;
        Ok(text)
    }
}

pub(super) fn follow(tests: &TestRun<'_>, images: &Images, packages: &Packages) -> Result<String> {
    let sections = [
        "Docker and Podman",
        "The image of the executor",
        "The image of llama-server",
    ];
    let mut guide = Guide::open(PAGE, &sections)?;
    let container = Container::boot(tests.cache, &PODMAN, &log(tests, "system"))?;
    container.root(PODMAN_LIMITS)?;
    let model = model::ensure(tests.cache, &model::TINY, FileType::F16)?;
    container.copy(&model, "/srv/models/model.gguf")?;
    container.copy(&images.executor, "/root/vgpu-0.1.0-amd64.oci.tar")?;
    container.copy(&images.server, &format!("/root/{SERVER_FILE}"))?;
    let deploy = workspace::root().join("deploy");
    let files = ["compose.yaml", "compose-executor.yaml", "compose-gpu.yaml"];
    container.copy_into("/root", &files.map(|file| deploy.join(file)))?;

    let tag = images.tag.as_str();
    let own_name = format!("ggml-vgpu-llama-server:{tag}");
    let names = [("ggml-vgpu-llama-server:0.1.0", own_name.as_str())];
    let docker = guide.take_with("docker run", &[(IMAGE, &own_name)])?;
    let compose = guide.take("-f compose.yaml up")?;
    let with_executor = guide.take("-f compose-executor.yaml")?;
    // No GPU is there.
    let with_executor = guide.with(with_executor, &[(" -f compose-gpu.yaml up", " up")])?;
    let mut loads = Vec::new();
    for line in guide.take("podman load --input vgpu-0.1.0")?.lines() {
        match line.split(' ').next() {
            Some("docker" | "podman") => loads.push(line.to_owned()),
            // There is no containerd, and no registry.
            Some("ctr" | "skopeo") => {}
            _ => bail!("{PAGE}: {line:?} is not followed"),
        }
    }
    let own = guide.take_with("podman load --input vgpu-llama-server", &names)?;
    let without_root = guide.take_with("--group-add keep-groups", &names)?;
    let [(load, own), (_, without_root)] = [&own, &without_root].map(|text| first_line(text));
    guide.finish()?;
    loads.push(load.to_owned());
    container.root(&loads.join("\n"))?;
    let mut host = Host {
        container,
        reference: String::new(),
        tests,
    };
    let on_cpu = format!(
        "podman run --rm -v /srv/models:/models:ro -p 127.0.0.1:{PORT}:8080 \
         -e GGML_BACKEND_PATH= -e LLAMA_ARG_N_GPU_LAYERS=0 -e VGPU_REQUIRED=0 \
         {own_name} -m /models/model.gguf"
    );
    host.reference = host.generate(("cpu", "root"), &on_cpu, || Ok(()))?;

    // Executor and llama-server in containers, without a package on the host.
    let (up, ps) = first_line(&with_executor);
    // The page's image of llama-server is one of a registry.
    let variables = format!("export VGPU_TAG={tag} LLAMA_IMAGE={own_name}\n");
    let [up, ps] = [up, ps].map(|lines| format!("{variables}{lines}"));
    host.follow(("compose-executor", "root"), &up, &ps)?;
    let down = "docker compose -f compose-executor.yaml down --volumes";
    host.container.root(&format!("{variables}{down}"))?;

    // With the packages on the host.
    let files = [&packages.host, &packages.guest];
    host.container.copy_into("/root", &files)?;
    host.container
        .root("dpkg --install vgpu_*.deb vgpu-guest_*.deb && systemctl enable --now vgpu")?;
    host.follow(("docker", "root"), &docker, "vgpu ps")?;
    host.follow(
        ("compose", "root"),
        &format!("{variables}{compose}"),
        "vgpu ps",
    )?;
    host.container.root(&format!(
        "{variables}export VGPU_GID=0\ndocker compose -f compose.yaml down"
    ))?;
    host.follow(("own-image", "root"), own, "vgpu ps")?;

    // A user has images of the user's own.
    host.container.root(&format!(
        "usermod --append --groups vgpu {USER} && cp {SERVER_FILE} ~{USER}"
    ))?;
    host.container.run(USER, load)?;
    host.follow(("without-root", USER), without_root, "vgpu ps")?;
    Ok(format!("{} characters each time", host.reference.len()))
}

/// The first line of a block, and the others.
fn first_line(block: &str) -> (&str, &str) {
    block.split_once('\n').unwrap_or((block, ""))
}
