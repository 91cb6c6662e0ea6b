//! Engines, as whoever starts an executor asks for them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use tracing::{info, warn};
use vgpu_cpu::{CpuEngine, Threads};
use vgpu_cuda::choices::{self, Choices, Way};
use vgpu_cuda::device::{Gpu, GpuError};
use vgpu_cuda::{CudaEngine, Pace};
use vgpu_engine::{Engine, EngineError};

use crate::config::EngineKind;

/// Starts an engine: on processors with so many threads and as much memory at most, if that is said.
///
/// In the environment `VGPU_STEPS=on` makes a token one launch on a GPU, `VGPU_KERNELS=general` leaves out kernels for its
/// architecture alone, and `VGPU_LAYOUT=plain` leaves weights there as guests have written them.
pub fn start(
    kind: EngineKind,
    threads: Threads,
    memory: Option<u64>,
) -> anyhow::Result<Arc<dyn Engine>> {
    match kind {
        EngineKind::Cpu => {
            let engine = CpuEngine::with(threads, memory).with_context(|| {
                let count = threads.count;
                format!("the cpu engine does not start with {count} threads")
            })?;
            Ok(Arc::new(engine))
        }
        EngineKind::Cuda(ordinal) => {
            cuda(ordinal).with_context(|| format!("the engine cuda:{ordinal} does not start"))
        }
        EngineKind::Auto => cuda(0).or_else(|error| {
            info!("no GPU is used: {error:#}");
            start(EngineKind::Cpu, threads, memory)
        }),
    }
}

fn cuda(ordinal: u32) -> anyhow::Result<Arc<dyn Engine>> {
    let is_set = |name, value| std::env::var_os(name).is_some_and(|set| set == value);
    let pace = Pace {
        steps: is_set("VGPU_STEPS", "on"),
        arranges: !is_set("VGPU_LAYOUT", "plain"),
        ..Pace::default()
    };
    let engine = CudaEngine::at_pace(Arc::new(gpu(ordinal)?), pace)?;
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

/// An engine on a GPU that does products in this way wherever it can.
pub fn cuda_always(ordinal: u32, way: Way) -> anyhow::Result<CudaEngine> {
    let engine = CudaEngine::new(Arc::new(gpu(ordinal)?))?;
    Ok(engine.choosing(Choices::always(way)))
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

/// Keeps choices for a device; returns where.
pub fn keep_choices(device: &str, choices: &Choices) -> anyhow::Result<PathBuf> {
    let cache = kernel_cache()
        .context("none of VGPU_CACHE, XDG_CACHE_HOME and HOME says where to keep files")?;
    let stamp = choices::stamp(device);
    let path = choices_file(&cache, &stamp);
    let part = path.with_extension(format!("{}.part", std::process::id()));
    // Whole or not at all: others may read it at any time.
    std::fs::create_dir_all(&cache)
        .and_then(|()| std::fs::write(&part, choices.text(&stamp)))
        .and_then(|()| std::fs::rename(&part, &path))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
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
