//! The parts of a plan, and errors that name a node.

use vgpu_engine::{EngineError, RunError};

use crate::cpu_fallback::FallbackNode;
use crate::graph_exec::LaunchSequence;

/// A part of a plan. Parts run in order.
pub(crate) enum Part {
    Launches(LaunchSequence),
    /// A node for the CPU engine.
    Cpu {
        work: FallbackNode,
        node: usize,
    },
}

impl Part {
    /// Bytes of host memory, without the part itself.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Part::Launches(sequence) => sequence.bytes(),
            Part::Cpu { work, .. } => work.bytes(),
        }
    }

    /// Bytes of host memory that a run needs besides.
    pub(crate) fn working_bytes(&self) -> u64 {
        match self {
            Part::Launches(_) => 0,
            Part::Cpu { work, .. } => work.working_bytes(),
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
