//! Starts the CUDA engine, and keeps its tuning tables.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::{info, warn};
use vgpu_cuda::autotune::{self, GemmVariant, TuningTable};
use vgpu_cuda::gpu::{Gpu, GpuError};
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::{Engine, EngineError};

use super::error::StartError;

/// Why the file of a tuning table cannot be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum KeepError {
    #[error("none of VGPU_CACHE, XDG_CACHE_HOME and HOME is set, so there is no cache folder")]
    NoFolder,
    #[error("writing {path}: {error}", path = path.display())]
    Write { path: PathBuf, error: io::Error },
}

pub(super) fn start(ordinal: u32) -> Result<Arc<dyn Engine>, StartError> {
    let is_set = |name, value| std::env::var_os(name).is_some_and(|set| set == value);
    let policy = LaunchPolicy {
        megakernel: is_set("VGPU_MEGAKERNEL", "on"),
        repack: !is_set("VGPU_REPACK", "off"),
        ..LaunchPolicy::default()
    };
    let engine = CudaEngine::with_policy(open(ordinal)?, policy)
        .map_err(|error| StartError::Cuda { ordinal, error })?;
    let table = kernel_cache().map(|cache| load_tuning(&cache, engine.description()));
    let engine = engine
        .with_tuning(table.unwrap_or_default())
        .with_reopen(move || {
            let failed = |error: GpuError| EngineError::Device {
                message: error.to_string(),
            };
            Ok(Arc::new(gpu(ordinal).map_err(failed)?))
        });
    Ok(Arc::new(engine))
}

/// A CUDA engine that uses one kind of matrix product, `variant`, wherever that kind applies.
///
/// # Errors
/// As [`start`](super::start).
pub fn cuda_forced(ordinal: u32, variant: GemmVariant) -> Result<CudaEngine, StartError> {
    let engine =
        CudaEngine::new(open(ordinal)?).map_err(|error| StartError::Cuda { ordinal, error })?;
    Ok(engine.with_tuning(TuningTable::forced(variant)))
}

fn open(ordinal: u32) -> Result<Arc<Gpu>, StartError> {
    match gpu(ordinal) {
        Ok(gpu) => Ok(Arc::new(gpu)),
        Err(error) => Err(StartError::Gpu { ordinal, error }),
    }
}

/// The tuning table of the device and kernels with this fingerprint ([`autotune::fingerprint`]).
fn tuning_file(cache: &Path, fingerprint: &str) -> PathBuf {
    cache.join(format!("tuning-{fingerprint}.txt"))
}

/// Reads the tuning table that `vgpu gpu-check tune` has written for a device, if there is one.
fn load_tuning(cache: &Path, device: &str) -> TuningTable {
    let fingerprint = autotune::fingerprint(device);
    let path = tuning_file(cache, &fingerprint);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return TuningTable::default(),
        Err(error) => {
            warn!("{} is not used: {error}", path.display());
            return TuningTable::default();
        }
    };
    match TuningTable::parse(&text, &fingerprint) {
        Ok(table) => {
            let count = table.len();
            info!("{count} tuning entries from {}", path.display());
            table
        }
        Err(reason) => {
            warn!("{} is not used: {reason}", path.display());
            TuningTable::default()
        }
    }
}

/// Writes the tuning table of a device to the cache folder. Returns the path of the file.
///
/// # Errors
/// [`KeepError`] if there is no cache folder or the file cannot be written.
pub fn save_tuning(device: &str, table: &TuningTable) -> Result<PathBuf, KeepError> {
    let cache = kernel_cache().ok_or(KeepError::NoFolder)?;
    let fingerprint = autotune::fingerprint(device);
    let path = tuning_file(&cache, &fingerprint);
    let part = path.with_extension(format!("{}.part", std::process::id()));
    // Written to a temporary file and renamed: another process may read the table at any time.
    let written = std::fs::create_dir_all(&cache)
        .and_then(|()| std::fs::write(&part, table.to_text(&fingerprint)))
        .and_then(|()| std::fs::rename(&part, &path));
    match written {
        Ok(()) => Ok(path),
        Err(error) => Err(KeepError::Write { path, error }),
    }
}

/// Opens a GPU. With `VGPU_KERNELS=general`, without the kernels for its own architecture.
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

/// The folder for compiled kernels, if the environment names one.
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
    fn a_tuning_table_is_used_for_the_device_it_was_measured_on() {
        let folder = tempfile::tempdir().expect("a new folder");
        let cache = folder.path();
        assert!(load_tuning(cache, "a GPU").is_empty());
        let mut table = TuningTable::default();
        table.record(Type::Q4K, 4096, 512, GemmVariant::Wide);
        let file_of = |device| tuning_file(cache, &autotune::fingerprint(device));
        let text = table.to_text(&autotune::fingerprint("a GPU"));
        std::fs::write(file_of("a GPU"), &text).expect("a file");
        assert_eq!(load_tuning(cache, "a GPU"), table);
        assert!(load_tuning(cache, "another").is_empty());
        std::fs::write(file_of("another"), text).expect("a file");
        assert!(load_tuning(cache, "another").is_empty());
    }
}
