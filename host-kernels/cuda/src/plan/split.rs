//! The splits of a plan, and errors that name a node.

use vgpu_engine::{EngineError, RunError};

use crate::cpu_fallback::FallbackNode;
use crate::graph_exec::LaunchSequence;

/// Consecutive nodes of a plan that one engine runs. The splits of a plan run in order.
pub(crate) enum Split {
    Launches(LaunchSequence),
    /// A node for the CPU engine.
    Cpu {
        work: FallbackNode,
        node: usize,
    },
}

impl Split {
    /// Bytes of host memory, without the split itself.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Split::Launches(sequence) => sequence.bytes(),
            Split::Cpu { work, .. } => work.bytes(),
        }
    }

    /// Bytes of host memory that a run needs besides.
    pub(crate) fn working_bytes(&self) -> u64 {
        match self {
            Split::Launches(_) => 0,
            Split::Cpu { work, .. } => work.working_bytes(),
        }
    }
}

pub(crate) fn failure(ops: &[&'static str], node: usize, error: &EngineError) -> RunError {
    RunError::Kernel {
        node,
        op: ops[node],
        message: error.to_string(),
    }
}

/// An error of a graph of one node as an error of node `at` of the whole graph.
pub(crate) fn at_node(ops: &[&'static str], at: usize, mut error: RunError) -> RunError {
    match &mut error {
        RunError::Index { node, op, .. } | RunError::Kernel { node, op, .. } => {
            (*node, *op) = (at, ops[at]);
        }
        RunError::Stale | RunError::OutOfMemory { .. } => {}
    }
    error
}
