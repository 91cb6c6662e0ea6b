//! Errors of the engine contract.

use crate::work::TooMuchWork;

/// Why an engine refused or failed an operation. The session that asked for it goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// An allocation exceeds the memory that is free. All numbers are bytes.
    #[error("out of memory: {wanted} bytes wanted, {free} of {total} free")]
    #[allow(missing_docs)] // the message names every field
    OutOfMemory { wanted: u64, free: u64, total: u64 },
    /// An allocation exceeds the host memory that a guest may use besides the memory of the device.
    /// All numbers are bytes.
    #[error("out of host memory: {wanted} bytes wanted, {free} of {total} free")]
    #[allow(missing_docs)] // the message names every field
    OutOfHostMemory { wanted: u64, free: u64, total: u64 },
    /// An access does not lie inside the buffer: the caller's fault. All numbers are bytes.
    #[error("access to bytes {offset}..+{len} of a buffer of {size}")]
    #[allow(missing_docs)]
    OutOfBounds { offset: u64, len: u64, size: u64 },
    /// A buffer or an extent belongs to another engine: the caller's fault.
    #[error("a buffer belongs to another engine")]
    ForeignMemory,
    /// A change of bytes that several buffers read, and that are to be copied before: the engine's
    /// fault. Nothing was changed.
    #[error("a change of bytes {offset}..+{len} that {holders} buffers hold")]
    #[allow(missing_docs)] // the message names every field
    Shared {
        offset: u64,
        len: u64,
        holders: usize,
    },
    /// A graph was validated with the capabilities of another engine: the caller's fault.
    #[error("the graph was validated for another engine")]
    ForeignGraph,
    /// The engine has no kernel for an operator, or cannot provide a resource named by `op`.
    #[error("the engine cannot compile {op}: {why}")]
    #[allow(missing_docs)]
    Unsupported { op: &'static str, why: String },
    /// A node of a graph is too much work: the guest's fault.
    #[error(transparent)]
    TooMuchWork(#[from] TooMuchWork),
    /// The caller has cancelled the operation.
    #[error("the operation was cancelled")]
    Cancelled,
    /// A call of the device's driver failed.
    #[error("the device failed: {message}")]
    #[allow(missing_docs)]
    Device { message: String },
    /// The device failed in a way that destroyed the contents of its memory.
    #[error("the device failed ({reason}): the contents of its memory are lost")]
    #[allow(missing_docs)]
    DeviceLost { reason: String },
}

/// Why a graph failed while it ran. The results of the graph are undefined. Memory outside the
/// destinations of the graph's nodes is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// An index read from tensor data is out of range: the guest's fault.
    #[error("node {node} ({op}): index {index} is out of range, there are {count}")]
    #[allow(missing_docs)] // the message names every field
    Index {
        node: usize,
        op: &'static str,
        index: i64,
        count: u64,
    },
    /// A kernel panicked or failed: the engine's fault.
    #[error("node {node} ({op}): the kernel failed: {message}")]
    #[allow(missing_docs)]
    Kernel {
        node: usize,
        op: &'static str,
        message: String,
    },
    /// The host has not the memory that a run needs besides the buffers of the graph.
    #[error("out of memory: the graph needs {wanted} bytes of working memory")]
    #[allow(missing_docs)]
    OutOfMemory { wanted: u64 },
    /// The plan is not [current](crate::Plan::is_current): the fault of the caller, which must
    /// compile the graph again.
    #[error("the memory of the graph has moved since it was compiled")]
    Stale,
}

/// Checks that bytes `offset .. offset + len` lie inside memory of `size` bytes.
///
/// # Errors
/// [`EngineError::OutOfBounds`] if a byte lies outside, or if `offset + len` overflows.
pub fn check_range(offset: u64, len: u64, size: u64) -> Result<(), EngineError> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(EngineError::OutOfBounds { offset, len, size }),
    }
}
