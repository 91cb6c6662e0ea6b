//! The error of a start.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use vgpu_engine::EngineError;
use vgpu_transport::wire::MAX_DEVICES;

use super::kind::EngineKind;

/// Why an engine does not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum StartError {
    #[error("the cpu engine does not start with {threads} threads (0: one per core): {error}")]
    Cpu { threads: usize, error: EngineError },
    #[cfg(feature = "cuda")]
    #[error("the engine cuda:{ordinal} does not start: {error}")]
    Gpu {
        ordinal: u32,
        error: vgpu_cuda::gpu::GpuError,
    },
    #[cfg(feature = "cuda")]
    #[error("the engine cuda:{ordinal} does not start: VGPU_DISABLE: {error}")]
    Disable {
        ordinal: u32,
        error: vgpu_cuda::kernel_set::UnknownKernel,
    },
    #[error("the engine cuda:{ordinal} does not start: {error}")]
    Cuda { ordinal: u32, error: EngineError },
    #[cfg(feature = "ggml")]
    #[error("the engine ggml does not start: {0}")]
    Ggml(#[from] vgpu_ggml::LibraryError),
    #[error(
        "the engine ggml does not start: no backend library of ggml for a GPU can be used{}; \
         looked in GGML_BACKEND_PATH and {}. Name one with --engine ggml:PATH",
        refused.iter().map(|reason| format!("; {reason}")).collect::<String>(),
        places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoBackend {
        places: Vec<PathBuf>,
        refused: Vec<String>,
    },
    #[error("the engines {engine} do not start: {reason}")]
    All {
        engine: EngineKind,
        reason: ProbeError,
    },
    #[error("the engine {engine} is named twice: each engine is a device of its own")]
    Twice { engine: EngineKind },
    #[error("{count} engines are named, and an executor has at most {MAX_DEVICES}")]
    TooMany { count: usize },
    #[cfg(not(feature = "ggml"))]
    #[error(
        "the engine ggml:{} does not start: this program was built without it (cargo feature \
         ggml)",
        path.display()
    )]
    NoGgml { path: PathBuf },
    #[cfg(not(feature = "cuda"))]
    #[error(
        "the engine cuda:{ordinal} does not start: this program was built without the CUDA engine \
         (cargo feature cuda)"
    )]
    NotBuilt { ordinal: u32 },
}

/// Why an engine that was tried cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ProbeError {
    /// What the engine says of itself.
    #[error("{0}")]
    Refused(String),
    #[error("it cannot be tried in a process: {0}")]
    Process(#[from] io::Error),
    #[error(
        "the start of the engine ends the process with {status}; the last line of its log: {last_line}"
    )]
    Ended {
        status: ExitStatus,
        last_line: String,
    },
    #[error("the process of the engine answers {line:?}: {error}")]
    Answer { line: String, error: String },
    #[error("the engine does not start within {} s", limit.as_secs_f64())]
    Late { limit: Duration },
}

impl From<StartError> for ProbeError {
    /// Without the engine's name where a caller knows the library.
    fn from(error: StartError) -> ProbeError {
        ProbeError::Refused(match error {
            #[cfg(feature = "ggml")]
            StartError::Ggml(error) => error.to_string(),
            error => error.to_string(),
        })
    }
}

/// Why the PCI address of the GPU of the CUDA engine is not known.
#[cfg(feature = "cuda")]
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// The driver was asked in this process.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The driver was asked in a process of its own.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// The process has an answer without a GPU.
    #[error("the driver names no GPU")]
    NoGpu,
}
