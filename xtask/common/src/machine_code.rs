//! Machine code of the CUDA kernels, which packages of `vgpu` have built in.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::cache::Cache;
use crate::packages;
use crate::process;
use crate::progress::Progress;
use crate::workspace;

/// Bytes 7 and 8 of an ELF file: the binary interface and its version. NVRTC 13 writes 0x41 and 8
/// for all GPUs, which drivers before 580 refuse.
const CUDA_12: [u8; 2] = [0x33, 7];

/// GPUs whose first driver (570) came with CUDA 12.8: NVRTC 12.9 writes the newer interface for
/// them, and no older driver knows them.
const BLACKWELL: [&str; 2] = ["sm_100a", "sm_120a"];

/// Compiles all kernels for all architectures, or for those in `archs` (`sm_90a`), with
/// [`packages::nvrtc`]. Returns the folder of the files `<source>.<architecture>.cubin`. The cache
/// keeps the code of each source by its content.
///
/// # Errors
/// If NVRTC cannot be fetched, a kernel does not compile, or drivers for CUDA 12 would not load the
/// code.
pub fn compile(cache: &Cache, archs: &[String]) -> Result<PathBuf> {
    packages::libclang(cache)?;
    let nvrtc = packages::nvrtc(cache)?;
    let name = match archs {
        [] => "machine-code".to_owned(),
        some => format!("machine-code-{}", some.join("-")),
    };
    let out = workspace::root().join("target").join(name);
    let progress = Progress::new("compiling kernels for GPUs");
    let mut cargo = workspace::cargo();
    cargo
        .args(["run", "-p", "vgpu-cuda", "--bin", "kernels", "--"])
        .args([&nvrtc, &out])
        .args(archs)
        .env("VGPU_KERNEL_CACHE", cache.machine_code());
    process::run(&mut cargo, &progress, &cache.log("kernels"))?;
    let (files, bytes) = check(&out)?;
    progress.done(&format!("{files} files, {} MiB", bytes >> 20));
    Ok(out)
}

/// The number of files with machine code in a folder, and their size. Refuses code that drivers for
/// CUDA 12 do not load.
///
/// # Errors
/// If the folder has no such file, or a file is not as those drivers need it.
pub fn check(folder: &Path) -> Result<(usize, u64)> {
    let reading = || format!("reading {}", folder.display());
    let (mut files, mut size) = (0, 0);
    for entry in fs::read_dir(folder).with_context(reading)? {
        let path = entry.with_context(reading)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(stem) = name.strip_suffix(".cubin") else {
            continue;
        };
        let code = fs::read(&path).with_context(reading)?;
        let is_new = { BLACKWELL.iter() }.any(|arch| stem.ends_with(&format!(".{arch}")));
        ensure!(
            code.starts_with(b"\x7fELF") && (is_new || code.get(7..9) == Some(&CUDA_12)),
            "{name} is no machine code that a driver for CUDA 12 loads"
        );
        files += 1;
        size += code.len() as u64;
    }
    ensure!(files > 0, "no machine code in {}", folder.display());
    Ok((files, size))
}

/// The number of files with machine code that are built into a program.
///
/// # Errors
/// If the program cannot be read.
pub fn built_into(program: &Path) -> Result<usize> {
    /// The number of NVIDIA's GPUs among the machines of ELF files.
    const CUDA: [u8; 2] = [0xbe, 0];
    let bytes = fs::read(program).with_context(|| format!("reading {}", program.display()))?;
    // A 64-bit ELF file in this byte order, version 1; the machine is at byte 18.
    let headers = bytes.windows(20);
    let of_gpus =
        headers.filter(|head| head.starts_with(b"\x7fELF\x02\x01\x01") && head[18..] == CUDA);
    Ok(of_gpus.count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn code_that_needs_a_driver_for_cuda_13_is_refused() {
        let scratch = Scratch::new().expect("a folder");
        let place = |name: &str, interface: [u8; 2]| {
            let machine = [0; 9].into_iter().chain([0xbe, 0]);
            let code = [b"\x7fELF\x02\x01\x01".as_slice(), &interface];
            let code: Vec<u8> = code.concat().into_iter().chain(machine).collect();
            fs::write(scratch.path().join(name), code).expect("a file");
        };
        check(scratch.path()).expect_err("there is no code");
        place("norm.sm_80.cubin", CUDA_12);
        place("norm.sm_120a.cubin", [0x41, 8]);
        place("report.json", [0, 0]);
        assert_eq!(check(scratch.path()).expect("good code"), (2, 40));
        let program = scratch.path().join("program");
        let code = fs::read(scratch.path().join("norm.sm_80.cubin")).expect("a file");
        let own = [b"\x7fELF\x02\x01\x01".as_slice(), &[0; 11], &[0x3e, 0]].concat();
        fs::write(&program, [&own, &code, b"..".as_slice(), &code].concat()).expect("a file");
        assert_eq!(built_into(&program).expect("a file"), 2);
        place("rope.sm_90a.cubin", [0x41, 8]);
        let error = check(scratch.path()).expect_err("for CUDA 13");
        assert!(error.to_string().contains("rope.sm_90a.cubin"), "{error}");
    }
}
