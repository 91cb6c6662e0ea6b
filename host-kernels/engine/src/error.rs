//! Errors of the engine contract.

use vgpu_transport::size::shown;

use crate::work::TooMuchWork;

/// Why an engine refused or failed an operation. The session that asked for it goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// An allocation exceeds the memory that is free. All numbers are bytes.
    #[error("out of memory: {}", figures(*wanted, *free, *total))]
    #[allow(missing_docs)] // the message names every field
    OutOfMemory { wanted: u64, free: u64, total: u64 },
    /// An allocation exceeds the host memory that a guest may use besides the memory of the device.
    /// All numbers are bytes.
    #[error("out of host memory: {}", figures(*wanted, *free, *total))]
    #[allow(missing_docs)] // the message names every field
    OutOfHostMemory { wanted: u64, free: u64, total: u64 },
    /// An allocation exceeds the host memory that all guests of this process together may use
    /// besides the memory of devices: others have the rest, and the guest its part. All numbers are
    /// bytes.
    #[error(
        "out of host memory: {} wanted, the guest has {} and {} are kept for it; beyond that, {} \
         of the {} for all guests of this process are free (engine.host-memory)",
        shown(*wanted), shown(*own), shown(*kept), shown(*free), shown(*total)
    )]
    #[allow(missing_docs)] // the message names every field
    OutOfSharedHostMemory {
        wanted: u64,
        own: u64,
        kept: u64,
        free: u64,
        total: u64,
    },
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
    #[error("out of memory: the graph needs {} of working memory", shown(*wanted))]
    #[allow(missing_docs)]
    OutOfMemory { wanted: u64 },
    /// The plan is not [current](crate::Plan::is_current): the fault of the caller, which must
    /// compile the graph again.
    #[error("the memory of the graph has moved since it was compiled")]
    Stale,
}

/// What an allocation wanted, and what there was.
fn figures(wanted: u64, free: u64, total: u64) -> String {
    let mut text = format!(
        "{} wanted, {} of {} free",
        shown(wanted),
        shown(free),
        shown(total)
    );
    // Rounded numbers may be the same.
    if wanted > free && shown(wanted) == shown(free) {
        text += &format!(", {} too few", shown(wanted - free));
    }
    text
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let said = |wanted, free, total| {
            let error = EngineError::OutOfMemory {
                wanted,
                free,
                total,
            };
            error.to_string()
        };
        let gib = 1 << 30;
        let words = "out of memory: 1.0 GiB wanted, 512.0 MiB of 24.0 GiB free";
        assert_eq!(said(gib, 512 << 20, 24 * gib), words);
        let words = "out of memory: 1.0 GiB wanted, 1.0 GiB of 1.0 GiB free, 4.0 KiB too few";
        assert_eq!(said(gib + 4096, gib, gib), words);
        let error = RunError::OutOfMemory { wanted: 3 << 20 };
        let words = "out of memory: the graph needs 3.0 MiB of working memory";
        assert_eq!(error.to_string(), words);
    }
}
