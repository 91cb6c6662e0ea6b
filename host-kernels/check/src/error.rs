//! Why a comparison or a measurement did not run.

use cudarc::driver::sys::CUresult;
use vgpu_engine::{EngineError, RunError};
use vgpu_transport::ir::{Invalid, Type};

/// Why a comparison or a measurement did not run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The engine refused an allocation, a copy or a graph.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine failed to run a graph.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The engine does not support an operation of the graph: the engine's capabilities are
    /// incomplete.
    #[error("the graph is not valid for the engine: {0}")]
    Graph(#[from] Invalid),
    /// The size of a tensor does not fit 64 bits: the fault of the options' sizes.
    #[error("the size of a tensor of type {ty:?} with lengths {ne:?} does not fit 64 bits")]
    #[allow(missing_docs)] // the message names every field
    TensorSize { ty: Type, ne: [u64; 4] },
    /// The reference engine failed.
    #[error("the reference engine failed: {0}")]
    Reference(Box<CheckError>),
    /// A repeated run of a graph failed.
    #[error("run {number}: {error}")]
    #[allow(missing_docs)] // the message names every field
    Repeat {
        number: usize,
        error: Box<CheckError>,
    },
    /// cuBLASLt, which is optional, is not installed.
    #[error("cuBLASLt is not installed: {reason}")]
    #[allow(missing_docs)] // the message names every field
    CublasMissing { reason: String },
    /// The installed cuBLASLt lacks a function.
    #[error("cuBLASLt has no function {name}")]
    #[allow(missing_docs)] // the message names every field
    CublasFunction { name: String },
    /// A call of cuBLASLt failed with a `cublasStatus_t`.
    #[error("{call} failed (status {status})")]
    #[allow(missing_docs)] // the message names every field
    Cublas { call: &'static str, status: i32 },
    /// cuBLASLt offers no algorithm for a product.
    #[error("cuBLASLt has no algorithm for this product")]
    CublasAlgorithm,
    /// cuBLASLt does not multiply this type.
    #[error("cuBLASLt does not multiply {0:?}")]
    CublasType(Type),
    /// NVIDIA's driver is not installed.
    #[error("NVIDIA's driver is not installed: install it (525 or newer), then run this again")]
    DriverMissing,
    /// A call of NVIDIA's driver failed.
    #[error("{call} failed: {code:?}")]
    #[allow(missing_docs)] // the message names every field
    Driver { call: &'static str, code: CUresult },
}

impl CheckError {
    /// Whether memory was short, for which no kernel can be blamed.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            CheckError::Engine(error) => matches!(error, EngineError::OutOfMemory { .. }),
            CheckError::Run(error) => matches!(error, RunError::OutOfMemory { .. }),
            CheckError::Repeat { error, .. } => error.is_out_of_memory(),
            _ => false,
        }
    }

    /// Whether a call of the device's driver or a kernel failed. Nothing else may work in this
    /// process afterwards.
    pub fn is_device_failure(&self) -> bool {
        match self {
            CheckError::Engine(error) => matches!(
                error,
                EngineError::Device { .. } | EngineError::DeviceLost { .. }
            ),
            CheckError::Run(error) => matches!(error, RunError::Kernel { .. }),
            CheckError::Repeat { error, .. } => error.is_device_failure(),
            CheckError::Driver { .. } | CheckError::Cublas { .. } => true,
            _ => false,
        }
    }
}
