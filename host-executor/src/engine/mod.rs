//! Starts the engine that the configuration names.

mod choice;
#[cfg(feature = "cuda")]
mod cuda;
mod discover;
mod error;
mod kind;
mod list;
mod select;

use std::path::Path;
use std::sync::Arc;

use tracing::info;
use vgpu_cpu::{CpuEngine, Threads};
use vgpu_engine::Engine;

pub use choice::{EngineChoice, ParseEngineChoiceError};
#[cfg(feature = "cuda")]
pub use cuda::{
    KeepError, check_cache, cuda_for_single_nodes, cuda_forced, disabled_kernels, fingerprint,
    gpu_address, launch_policy, load_verdict, lock_verdicts, open_gpu, save_tuning, save_verdict,
};
#[cfg(feature = "cuda")]
pub use error::AddressError;
pub use error::{ProbeError, StartError};
pub use kind::{EngineKind, GgmlBackend, ParseEngineKindError};
pub use list::EngineList;
pub use select::{Probe, ProbedDevice, ProbedKind, Selection, is_of_nvidia, select};

/// The environment variable that says whether the engine over a backend of ggml shares weights:
/// `on` or `off`.
#[cfg(feature = "ggml")]
const SHARE_ON_GGML: &str = "VGPU_GGML_SHARE_WEIGHTS";

/// Starts an engine. `threads` and `memory` (the most bytes that the engine allocates for guests;
/// `None`: what the machine or its control group has) apply to the CPU engine, and to a backend of
/// ggml.
///
/// Environment variables change engines. Five change the CUDA engine: `VGPU_MEGAKERNEL=on` runs a
/// token as one launch of a persistent kernel, `VGPU_CUDA_BATCH=on` runs graphs of several guests
/// as one batch, `VGPU_KERNELS=general` disables the kernels that are tuned for one architecture,
/// `VGPU_DISABLE=NAME,...` disables single kernels, and `VGPU_REPACK=off` keeps weights in the
/// layout in which guests have written them. `VGPU_GGML_SHARE_WEIGHTS=off` gives each guest its own
/// copy of its weights on the engine over a backend of ggml, as is the default on a GPU, and `on`
/// one copy to guests with the same weights. The CUDA engine also leaves out the kernels that the
/// self-check does not allow on the GPU.
///
/// Of the kinds that stand for several engines, the first one is started. [`EngineKind::AnyGgml`]
/// and [`EngineKind::Auto`] are chosen in this process, which keeps what it has loaded in vain;
/// `auto` then is the CUDA engine on the first GPU or the CPU engine. [`select()`] chooses all of
/// them, and without that.
///
/// # Errors
/// [`StartError`] names the engine and says what it lacks. [`EngineKind::Auto`] fails only if the
/// CPU engine does.
pub fn start(
    kind: &EngineKind,
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
        EngineKind::Cuda(ordinal) => start_cuda(*ordinal),
        EngineKind::AllCuda => start_cuda(0),
        EngineKind::Ggml(backend) => start_ggml(backend, threads, memory),
        EngineKind::AllGgml(_) | EngineKind::AnyGgml => {
            let probe = |kind: &EngineKind| Ok(probe(kind)?);
            let selection = select(&kind.clone().into(), true, &probe)?;
            start(&selection.engines[0], threads, memory)
        }
        EngineKind::Auto => start_cuda(0).or_else(|error| {
            info!("auto: the engine cpu, because {error}");
            start(&EngineKind::Cpu, threads, memory)
        }),
    }
}

/// The devices of an engine, which this function loads or starts for that. The GPUs of
/// [`EngineKind::AllCuda`] are only listed.
///
/// # Errors
/// [`StartError`] names the engine and says what it lacks.
pub fn probe(kind: &EngineKind) -> Result<Vec<ProbedDevice>, StartError> {
    match kind {
        EngineKind::Ggml(GgmlBackend { path, .. }) | EngineKind::AllGgml(path) => probe_ggml(path),
        EngineKind::AllCuda => list_cuda(),
        other => {
            let engine = start(other, Threads::default(), None)?;
            Ok(vec![ProbedDevice {
                name: engine.name().to_owned(),
                description: engine.description().to_owned(),
                kind: match engine.is_host_memory() {
                    true => ProbedKind::Other,
                    false => ProbedKind::Gpu,
                },
            }])
        }
    }
}

#[cfg(feature = "cuda")]
use cuda::{list as list_cuda, start as start_cuda};

/// As in a build with the CUDA engine.
///
/// # Errors
/// [`StartError::NotBuilt`]
#[cfg(not(feature = "cuda"))]
pub fn gpu_address(ordinal: u32) -> Result<String, StartError> {
    Err(StartError::NotBuilt { ordinal })
}

#[cfg(not(feature = "cuda"))]
fn list_cuda() -> Result<Vec<ProbedDevice>, StartError> {
    Err(StartError::NotBuilt { ordinal: 0 })
}

#[cfg(not(feature = "cuda"))]
fn start_cuda(ordinal: u32) -> Result<Arc<dyn Engine>, StartError> {
    Err(StartError::NotBuilt { ordinal })
}

#[cfg(feature = "ggml")]
fn start_ggml(
    backend: &GgmlBackend,
    threads: Threads,
    memory: Option<u64>,
) -> Result<Arc<dyn Engine>, StartError> {
    // `memory` is for the buffers of guests. The CPU engine has copies of tensors only, which count
    // as plans do: for an engine of host memory within `memory`, otherwise as memory of the host.
    let fallback = start(&EngineKind::Cpu, threads, None)?;
    let GgmlBackend { path, device } = backend;
    let options = vgpu_ggml::BackendOptions {
        device: device.as_deref(),
        threads: threads.count,
        memory,
        repacks: std::env::var_os("VGPU_REPACK").is_none_or(|set| set != "off"),
        shares_weights: match std::env::var_os(SHARE_ON_GGML) {
            Some(set) if set == "on" => Some(true),
            Some(set) if set == "off" => Some(false),
            _ => None,
        },
    };
    let engine = vgpu_ggml::GgmlEngine::start(path, &options, fallback)?;
    Ok(Arc::new(engine))
}

#[cfg(feature = "ggml")]
fn probe_ggml(path: &Path) -> Result<Vec<ProbedDevice>, StartError> {
    use vgpu_ggml::DeviceKind;
    let infos = vgpu_ggml::Library::load(path)?.device_infos();
    if infos.is_empty() {
        let path = path.to_owned();
        return Err(vgpu_ggml::LibraryError::NoDevice { path }.into());
    }
    let devices = infos.into_iter().map(|info| ProbedDevice {
        name: info.name,
        description: info.description,
        kind: match info.kind {
            DeviceKind::Gpu => ProbedKind::Gpu,
            DeviceKind::IntegratedGpu => ProbedKind::IntegratedGpu,
            DeviceKind::Other => ProbedKind::Other,
        },
    });
    Ok(devices.collect())
}

#[cfg(not(feature = "ggml"))]
fn probe_ggml(path: &Path) -> Result<Vec<ProbedDevice>, StartError> {
    let path = path.to_owned();
    Err(StartError::NoGgml { path })
}

#[cfg(not(feature = "ggml"))]
fn start_ggml(
    backend: &GgmlBackend,
    _threads: Threads,
    _memory: Option<u64>,
) -> Result<Arc<dyn Engine>, StartError> {
    let path = backend.path.clone();
    Err(StartError::NoGgml { path })
}
