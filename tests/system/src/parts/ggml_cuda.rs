//! ggml's own CUDA backend, with NVIDIA's libraries, on a machine without NVIDIA's driver.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use xtask_common::dist::Dist;
use xtask_common::packages;
use xtask_common::scratch::Scratch;

use crate::test_run::TestRun;

/// Where the dynamic linker finds the library of NVIDIA's driver.
const DRIVER: [&str; 3] = [
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/local/lib/libcuda.so.1",
];

/// `bin`: the folder with the `libggml-base.so` that the backend uses.
pub(super) fn run(tests: &mut TestRun<'_>, dist: &Dist, bin: &Path) {
    if !tests.options.full {
        return; // the packages have half a gigabyte
    }
    let prepared = tests.prepare("ggml's CUDA backend", |tests| {
        packages::ggml_cuda(tests.cache)
    });
    let Some(backend) = prepared else { return };
    let name = "ggml's CUDA backend without NVIDIA's driver is refused";
    tests.check(name, |_, _| refused(dist, &backend, bin));
}

/// Starts an executor, which must end and name what is missing.
fn refused(dist: &Dist, backend: &Path, bin: &Path) -> Result<String> {
    if let Some(driver) = DRIVER.iter().find(|file| Path::new(file).exists()) {
        return Ok(format!("not tried: this machine has {driver}"));
    }
    let scratch = Scratch::new()?;
    for file in std::fs::read_dir(backend).context("listing the backend")? {
        let file = file.context("listing the backend")?;
        let link = scratch.path().join(file.file_name());
        symlink(file.path(), link).context("a link to the backend")?;
    }
    for base in ["libggml-base.so", "libggml-base.so.0"] {
        symlink(bin.join(base), scratch.path().join(base)).context("a link to ggml")?;
    }
    let library = scratch.path().join("libggml-cuda.so");
    let socket = scratch.path().join("vgpu.sock");
    let mut serve = Command::new(&dist.vgpu);
    serve
        .args(["serve", "--trust-guests", "--engine"])
        .arg(format!("ggml:{}", library.display()))
        .arg("--listen")
        .arg(format!("unix:{}", socket.display()));
    let output = serve.output().context("starting vgpu serve")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "it has started:\n{said}");
    let reason = format!(
        "vgpu: the engine ggml does not start: {} needs libcuda.so.1, which is missing on this \
         machine: install NVIDIA's driver",
        library.display()
    );
    let last = said.lines().next_back().unwrap_or_default();
    ensure!(
        last.ends_with(&reason),
        "the last line is not {reason:?}:\n{said}"
    );
    Ok(String::new())
}
