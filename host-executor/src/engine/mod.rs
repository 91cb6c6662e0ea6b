//! Starts the engine that the configuration names.

#[cfg(feature = "cuda")]
mod cuda;
mod error;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use tracing::info;
use vgpu_cpu::{CpuEngine, Threads};
use vgpu_engine::Engine;

#[cfg(feature = "cuda")]
pub use cuda::{KeepError, cuda_forced, save_tuning};
pub use error::StartError;

/// Which engine executes graphs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineKind {
    /// The CPU engine.
    Cpu,
    /// The CUDA engine on the GPU with this ordinal.
    Cuda(u32),
    /// The engine over a backend of ggml.
    Ggml(GgmlBackend),
    /// The CUDA engine on GPU 0 if it starts, else the CPU engine.
    Auto,
}

/// A backend library of ggml and a device of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgmlBackend {
    /// The file of the backend, such as `/usr/lib/ollama/vulkan/libggml-vulkan.so`.
    pub path: PathBuf,
    /// ggml's name of the device, such as `Vulkan1`. `None`: the backend's first one.
    pub device: Option<String>,
}

impl EngineKind {
    /// Whether a guest can end the process: kernels of ggml trust the indices in tensors, and end
    /// the process on what they do not expect.
    pub fn needs_trust(&self) -> bool {
        matches!(self, EngineKind::Ggml(_))
    }
}

/// A text that names no engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected cpu, cuda, cuda:N, ggml:PATH, ggml:PATH:DEVICE or auto")]
pub struct ParseEngineKindError;

impl FromStr for EngineKind {
    type Err = ParseEngineKindError;

    fn from_str(text: &str) -> Result<EngineKind, ParseEngineKindError> {
        match text {
            "cpu" => Ok(EngineKind::Cpu),
            "cuda" => Ok(EngineKind::Cuda(0)),
            "auto" => Ok(EngineKind::Auto),
            _ if text.starts_with("ggml:") => parse_ggml(&text["ggml:".len()..]),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(EngineKind::Cuda)
                .ok_or(ParseEngineKindError),
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineKind::Cpu => f.write_str("cpu"),
            EngineKind::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            EngineKind::Ggml(GgmlBackend { path, device }) => {
                write!(f, "ggml:{}", path.display())?;
                device.iter().try_for_each(|device| write!(f, ":{device}"))
            }
            EngineKind::Auto => f.write_str("auto"),
        }
    }
}

/// Reads `PATH` or `PATH:DEVICE`. A device has no slash in its name.
fn parse_ggml(text: &str) -> Result<EngineKind, ParseEngineKindError> {
    let (path, device) = match text.rsplit_once(':') {
        Some((path, device)) if !device.contains('/') => (path, Some(device)),
        _ => (text, None),
    };
    if path.is_empty() || device.is_some_and(str::is_empty) {
        return Err(ParseEngineKindError);
    }
    Ok(EngineKind::Ggml(GgmlBackend {
        path: path.into(),
        device: device.map(str::to_owned),
    }))
}

/// Starts an engine. `threads` and `memory` (the most bytes that the engine allocates; `None`: what
/// the machine or its control group has) apply to the CPU engine, and to a backend of ggml.
///
/// Three environment variables change the CUDA engine: `VGPU_MEGAKERNEL=on` runs a token as one
/// launch of a persistent kernel, `VGPU_KERNELS=general` disables the kernels that are tuned for
/// one architecture, and `VGPU_REPACK=off` keeps weights in the layout in which guests have written
/// them.
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
        EngineKind::Ggml(backend) => start_ggml(backend, threads, memory),
        EngineKind::Auto => start_cuda(0).or_else(|error| {
            info!("using the cpu engine: {error}");
            start(&EngineKind::Cpu, threads, memory)
        }),
    }
}

#[cfg(feature = "cuda")]
use cuda::start as start_cuda;

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
    let fallback = start(&EngineKind::Cpu, threads, memory)?;
    let GgmlBackend { path, device } = backend;
    let engine =
        vgpu_ggml::GgmlEngine::start(path, device.as_deref(), threads.count, memory, fallback)?;
    Ok(Arc::new(engine))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_engines_round_trip() {
        let device = |path: &str, device: Option<&str>| {
            EngineKind::Ggml(GgmlBackend {
                path: path.into(),
                device: device.map(str::to_owned),
            })
        };
        for (text, kind) in [
            ("cpu", EngineKind::Cpu),
            ("cuda:3", EngineKind::Cuda(3)),
            ("auto", EngineKind::Auto),
            ("ggml:/a/libggml-hip.so", device("/a/libggml-hip.so", None)),
            ("ggml:/a:b/x.so", device("/a:b/x.so", None)),
            ("ggml:x.so:Vulkan1", device("x.so", Some("Vulkan1"))),
        ] {
            assert_eq!(text.parse(), Ok(kind.clone()));
            assert_eq!(kind.to_string(), text);
        }
        for text in [
            "",
            "ggml",
            "ggml:",
            "ggml::CPU",
            "ggml:x.so:",
            "cuda:x",
            "tpu",
        ] {
            assert_eq!(
                text.parse::<EngineKind>(),
                Err(ParseEngineKindError),
                "{text}"
            );
        }
    }
}
