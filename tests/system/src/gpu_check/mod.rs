//! `cargo xtask gpu-check`: everything to look at a GPU with, in one folder that needs neither
//! Rust nor a network.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::preload::Library;
use xtask_common::cache::Cache;
use xtask_common::dist;
use xtask_common::llama;
use xtask_common::machine_code;
use xtask_common::packages;
use xtask_common::println;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::workspace;

/// Gathers what looks at a GPU in target/gpu-check, and runs it if this machine has one.
#[derive(clap::Args, Debug)]
pub(crate) struct Options {
    /// Run it with this engine of vgpu, whatever this machine has: `cpu` tries the script itself,
    /// in target/gpu-check-cpu, without machine code for GPUs
    #[arg(long)]
    engine: Option<String>,
    /// GGUF files to measure besides those that are written on the spot, with random weights
    #[arg(long)]
    model: Vec<PathBuf>,
    /// Machine code for these architectures only, so that less has to travel
    #[arg(long, value_name = "sm_90a")]
    arch: Vec<String>,
    /// Put ggml's own CUDA backend in it, too, with cuBLAS (700 MB): the same models run on both
    #[arg(long)]
    peer: bool,
    /// Run speed.sh, which sets tokens a second beside what they should be, instead of run.sh
    #[arg(long)]
    speed: bool,
    /// Also make target/gpu-check.tar.xz of it
    #[arg(long)]
    pack: bool,
}

/// What of a build of llama.cpp goes along.
const PROGRAMS: [&str; 4] = [
    "test-backend-ops",
    "test-llama-archs",
    "llama-bench",
    "llama-batched-bench",
];

/// What goes along, by name: both scripts, and what they have in common.
const SCRIPTS: [(&str, &str); 3] = [
    ("run.sh", include_str!("run.sh")),
    ("speed.sh", include_str!("speed.sh")),
    ("parts.sh", include_str!("parts.sh")),
];

/// The engine that needs no machine code.
const CPU: &str = "cpu";

impl Options {
    /// Whether only the script is tried.
    fn is_trial(&self) -> bool {
        self.engine.as_deref() == Some(CPU)
    }

    /// Where the bundle is made. One without machine code is not to be taken for one that can
    /// travel.
    fn folder(&self) -> PathBuf {
        let name = match self.is_trial() {
            true => "target/gpu-check-cpu",
            false => "target/gpu-check",
        };
        workspace::root().join(name)
    }
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    let bundle = gather(cache, options)?;
    let name = if options.speed { "speed.sh" } else { "run.sh" };
    let mut script = Command::new(bundle.join(name));
    match &options.engine {
        Some(engine) => {
            script.env("VGPU_ENGINE", engine);
        }
        None if !packages::runs("nvidia-smi", &["-L"]) => {
            println!(
                "This machine has no NVIDIA GPU: copy {} to one that has, and start {name} there.",
                bundle.display()
            );
            return Ok(());
        }
        None => {}
    }
    heading(name);
    let status = script
        .status()
        .with_context(|| format!("starting {name}"))?;
    anyhow::ensure!(status.success(), "{name} ended with {status}");
    Ok(())
}

/// Makes the bundle.
fn gather(cache: &Cache, options: &Options) -> Result<PathBuf> {
    heading("GPU tests");
    let kernels = match options.is_trial() {
        true => None,
        false => Some(machine_code::compile(cache, &options.arch)?),
    };
    let built = dist::build_with(
        cache,
        &dist::Release {
            machine_code: kernels.as_deref(),
            is_engine_in_plugin: kernels.is_some(),
        },
    )?;
    let bin = llama::build(cache, llama::Stage::Tools)?;
    let preloaded = Library::LoadBackends.build(cache, &bin)?;

    let progress = Progress::new("gathering");
    let bundle = options.folder();
    let (programs, places) = (bundle.join("bin"), bundle.join("models"));
    for folder in [&programs, &places] {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("creating {}", folder.display()))?;
    }
    for file in [&built.vgpu, &built.plugin] {
        copy(file, &bundle)?;
        strip(&bundle.join(file.file_name().context("a file has a name")?));
    }
    for program in PROGRAMS {
        copy(&bin.join(program), &programs)?;
    }
    for entry in std::fs::read_dir(&bin).context("listing the build of llama.cpp")? {
        let path = entry.context("listing the build of llama.cpp")?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.contains(".so") {
            copy_library(&path, &programs)?;
        }
    }
    for model in &options.model {
        copy(model, &places)?;
    }
    copy(&preloaded, &bundle)?;
    let peer = bundle.join("cuda");
    if options.peer {
        std::fs::create_dir_all(&peer).with_context(|| format!("creating {}", peer.display()))?;
        for entry in std::fs::read_dir(packages::ggml_cuda(cache)?).context("listing the peer")? {
            copy(&entry.context("listing the peer")?.path(), &peer)?;
        }
    }
    for (name, text) in SCRIPTS {
        let script = bundle.join(name);
        std::fs::write(&script, text).with_context(|| format!("writing {name}"))?;
        let mut chmod = Command::new("chmod");
        process::output(chmod.arg("+x").arg(&script))?;
    }
    progress.done(&format!("{}", bundle.display()));
    if options.pack {
        pack(&bundle)?;
    }
    Ok(bundle)
}

/// Takes what only debuggers read out of a program that travels. Without `strip` it stays.
fn strip(file: &Path) {
    let mut strip = Command::new("strip");
    let _ = process::output(strip.arg("--strip-debug").arg(file));
}

/// Makes one small file of the bundle.
fn pack(bundle: &Path) -> Result<()> {
    let progress = Progress::new("packing");
    let packed = bundle.with_extension("tar.xz");
    let mut tar = Command::new("tar");
    let folder = bundle.parent().context("the bundle is in a folder")?;
    let name = bundle.file_name().context("the bundle has a name")?;
    tar.env("XZ_OPT", "-6 -T0").arg("-C").arg(folder);
    tar.arg("--exclude=out").arg("-cJf").arg(&packed).arg(name);
    process::output(&mut tar)?;
    let bytes = std::fs::metadata(&packed)
        .context("the packed bundle")?
        .len();
    progress.done(&format!("{}, {} MiB", packed.display(), bytes >> 20));
    Ok(())
}

/// Copies a library into a folder; a link stays one, so that a program that wants it by two names
/// has it once.
fn copy_library(file: &Path, folder: &Path) -> Result<()> {
    let Ok(target) = std::fs::read_link(file) else {
        return copy(file, folder);
    };
    let link = folder.join(file.file_name().context("a link has a name")?);
    let _ = std::fs::remove_file(&link); // of the time before
    std::os::unix::fs::symlink(&target, &link)
        .with_context(|| format!("linking {} to {}", link.display(), target.display()))
}

/// Copies a file, or what a link names, into a folder.
fn copy(file: &Path, folder: &Path) -> Result<()> {
    let name = file.file_name().context("a file has a name")?;
    let to = folder.join(name);
    // A program that runs the old one keeps it.
    let fresh = folder.join(format!("{}.fresh", name.to_string_lossy()));
    std::fs::copy(file, &fresh)
        .and_then(|_| std::fs::rename(&fresh, &to))
        .with_context(|| format!("copying {} to {}", file.display(), folder.display()))
}
