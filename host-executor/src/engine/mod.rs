//! Starts the engine that the configuration names.

#[cfg(feature = "cuda")]
mod cuda;
mod error;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use tracing::info;
use vgpu_cpu::{CpuEngine, Threads};
use vgpu_engine::Engine;

#[cfg(feature = "cuda")]
pub use cuda::{KeepError, cuda_forced, save_tuning};
pub use error::StartError;

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

/// A text that names no engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected cpu, cuda, cuda:N or auto")]
pub struct ParseEngineKindError;

impl FromStr for EngineKind {
    type Err = ParseEngineKindError;

    fn from_str(text: &str) -> Result<EngineKind, ParseEngineKindError> {
        match text {
            "cpu" => Ok(EngineKind::Cpu),
            "cuda" => Ok(EngineKind::Cuda(0)),
            "auto" => Ok(EngineKind::Auto),
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
            EngineKind::Auto => f.write_str("auto"),
        }
    }
}

/// Starts an engine. `threads` and `memory` (the most bytes that the engine allocates; `None`: what
/// the machine or its control group has) apply to the CPU engine alone.
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
        EngineKind::Cuda(ordinal) => start_cuda(ordinal),
        EngineKind::Auto => start_cuda(0).or_else(|error| {
            info!("using the cpu engine: {error}");
            start(EngineKind::Cpu, threads, memory)
        }),
    }
}

#[cfg(feature = "cuda")]
use cuda::start as start_cuda;

#[cfg(not(feature = "cuda"))]
fn start_cuda(ordinal: u32) -> Result<Arc<dyn Engine>, StartError> {
    Err(StartError::NotBuilt { ordinal })
}
