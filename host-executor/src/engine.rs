//! Starts the engine that the configuration names.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use tracing::{info, warn};
use vgpu_cpu::{CpuEngine, Threads};
use vgpu_cuda::choices::{self, Choices, Way};
use vgpu_cuda::device::{Gpu, GpuError};
use vgpu_cuda::{CudaEngine, Pace};
use vgpu_engine::{Engine, EngineError};

/// Which engine executes graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// The CPU engine.
    Cpu,
    /// The CUDA engine on the GPU with this ordinal.
    Cuda(u32),
    /// The CUDA engine on GPU 0 if it starts, else the CPU engine.
    Auto,
}

impl FromStr for EngineKind {
    type Err = String;

    fn from_str(text: &str) -> Result<EngineKind, String> {
        match text {
            "cpu" => Ok(EngineKind::Cpu),
            "cuda" => Ok(EngineKind::Cuda(0)),
            "auto" => Ok(EngineKind::Auto),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(EngineKind::Cuda)
                .ok_or_else(|| "expected cpu, cuda, cuda:N or auto".into()),
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineKind::Cpu => f.write_str("cpu"),
            EngineKind::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            EngineKind::Auto => f.write_str("auto"),
        }
    }
}

/// Why an engine does not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum StartError {
    #[error("the cpu engine does not start with {threads} threads (0: one per core): {error}")]
    Cpu { threads: usize, error: EngineError },
    #[error("the engine cuda:{ordinal} does not start: {error}")]
    Gpu { ordinal: u32, error: GpuError },
    #[error("the engine cuda:{ordinal} does not start: {error}")]
    Cuda { ordinal: u32, error: EngineError },
}

/// Why a file with kernel choices cannot be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum KeepError {
    #[error("none of VGPU_CACHE, XDG_CACHE_HOME and HOME is set, so there is no cache folder")]
    NoFolder,
    #[error("writing {path}: {error}", path = path.display())]
    Write { path: PathBuf, error: io::Error },
}

/// Starts an engine. `threads` and `memory` (the most bytes that the engine allocates; `None`: what the machine or its
/// control group has) apply to the CPU engine alone.
///
/// Three environment variables change the CUDA engine: `VGPU_STEPS=on` runs a token as one launch of a persistent kernel,
/// `VGPU_KERNELS=general` disables the kernels that are tuned for one architecture, and `VGPU_LAYOUT=plain` keeps weights
/// in the layout in which guests have written them.
///
/// # Errors
/// [`StartError`] names the engine and says what it lacks. [`EngineKind::Auto`] fails only if the CPU engine does.
pub fn start(
    kind: EngineKind,
    threads: Threads,
    memory: Option<u64>,
) -> Result<Arc<dyn Engine>, StartError> {
    match kind {
        EngineKind::Cpu => {
            let engine = CpuEngine::with(threads, memory).map_err(|error| StartError::Cpu {
                threads: threads.count,
                error,
            })?;
            Ok(Arc::new(engine))
        }
        EngineKind::Cuda(ordinal) => cuda(ordinal),
        EngineKind::Auto => cuda(0).or_else(|error| {
            info!("using the cpu engine: {error}");
            start(EngineKind::Cpu, threads, memory)
        }),
    }
}

fn cuda(ordinal: u32) -> Result<Arc<dyn Engine>, StartError> {
    let is_set = |name, value| std::env::var_os(name).is_some_and(|set| set == value);
    let pace = Pace {
        steps: is_set("VGPU_STEPS", "on"),
        arranges: !is_set("VGPU_LAYOUT", "plain"),
        ..Pace::default()
    };
    let engine = CudaEngine::at_pace(open(ordinal)?, pace)
        .map_err(|error| StartError::Cuda { ordinal, error })?;
    let choices = kernel_cache().map(|cache| known_choices(&cache, engine.description()));
    let engine = engine
        .choosing(choices.unwrap_or_default())
        .reopened_by(move || {
            let failed = |error: GpuError| EngineError::Device {
                message: error.to_string(),
            };
            Ok(Arc::new(gpu(ordinal).map_err(failed)?))
        });
    Ok(Arc::new(engine))
}

/// A CUDA engine that uses one kind of matrix product, `way`, wherever that kind applies.
///
/// # Errors
/// As [`start`].
pub fn cuda_always(ordinal: u32, way: Way) -> Result<CudaEngine, StartError> {
    let engine =
        CudaEngine::new(open(ordinal)?).map_err(|error| StartError::Cuda { ordinal, error })?;
    Ok(engine.choosing(Choices::always(way)))
}

fn open(ordinal: u32) -> Result<Arc<Gpu>, StartError> {
    match gpu(ordinal) {
        Ok(gpu) => Ok(Arc::new(gpu)),
        Err(error) => Err(StartError::Gpu { ordinal, error }),
    }
}

/// Where choices are kept, by what they are good for ([`choices::stamp`]).
fn choices_file(cache: &Path, stamp: &str) -> PathBuf {
    cache.join(format!("choices-{stamp}.txt"))
}

/// What `vgpu gpu-check tune` has found out about a device, if it has.
fn known_choices(cache: &Path, device: &str) -> Choices {
    let stamp = choices::stamp(device);
    let path = choices_file(cache, &stamp);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Choices::default(),
        Err(error) => {
            warn!("{} is not used: {error}", path.display());
            return Choices::default();
        }
    };
    match Choices::read(&text, &stamp) {
        Ok(choices) => {
            let count = choices.len();
            info!("{count} choices of kernels from {}", path.display());
            choices
        }
        Err(reason) => {
            warn!("{} is not used: {reason}", path.display());
            Choices::default()
        }
    }
}

/// Writes the kernel choices of a device to the cache folder. Returns the path of the file.
///
/// # Errors
/// [`KeepError`] if there is no cache folder or the file cannot be written.
pub fn keep_choices(device: &str, choices: &Choices) -> Result<PathBuf, KeepError> {
    let cache = kernel_cache().ok_or(KeepError::NoFolder)?;
    let stamp = choices::stamp(device);
    let path = choices_file(&cache, &stamp);
    let part = path.with_extension(format!("{}.part", std::process::id()));
    // Whole or not at all: others may read it at any time.
    let written = std::fs::create_dir_all(&cache)
        .and_then(|()| std::fs::write(&part, choices.text(&stamp)))
        .and_then(|()| std::fs::rename(&part, &path));
    match written {
        Ok(()) => Ok(path),
        Err(error) => Err(KeepError::Write { path, error }),
    }
}

/// A GPU, with `VGPU_KERNELS=general` without the kernels for its own architecture.
fn gpu(ordinal: u32) -> Result<Gpu, GpuError> {
    let gpu = Gpu::new(ordinal, kernel_cache())?;
    Ok(match std::env::var_os("VGPU_KERNELS") {
        Some(which) if which == "general" => {
            info!("VGPU_KERNELS=general: no kernels for this GPU's architecture alone");
            gpu.with_general_kernels()
        }
        _ => gpu,
    })
}

/// Where compiled kernels are kept, if the user has a place for such things.
fn kernel_cache() -> Option<PathBuf> {
    let folder = |name| {
        std::env::var_os(name)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    };
    let cache = folder("VGPU_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("ggml-vgpu")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/ggml-vgpu")));
    cache.map(|cache| cache.join("kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::Type;

    #[test]
    fn choices_are_taken_for_the_device_they_were_measured_on() {
        let name = format!("vgpu-choices-{}", std::process::id());
        let cache = std::env::temp_dir().join(name);
        std::fs::create_dir(&cache).expect("a new folder");
        assert!(known_choices(&cache, "a GPU").is_empty());
        let mut choices = Choices::default();
        choices.note(Type::Q4K, 4096, 512, Way::Wide);
        let file_of = |device| choices_file(&cache, &choices::stamp(device));
        let text = choices.text(&choices::stamp("a GPU"));
        std::fs::write(file_of("a GPU"), &text).expect("a file");
        assert_eq!(known_choices(&cache, "a GPU"), choices);
        assert!(known_choices(&cache, "another").is_empty());
        std::fs::write(file_of("another"), text).expect("a file");
        assert!(known_choices(&cache, "another").is_empty());
        std::fs::remove_dir_all(&cache).expect("it is ours");
    }
}
