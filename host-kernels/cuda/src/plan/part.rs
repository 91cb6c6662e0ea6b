//! The parts of a plan, and errors that name the node.

use vgpu_engine::{EngineError, RunError};

use crate::cpu_fallback::FallbackNode;
use crate::graph_exec::LaunchSequence;

/// A part of a plan, run in order.
pub(crate) enum Part {
    Launches(LaunchSequence),
    /// Runs on the host, between launches.
    Cpu {
        work: FallbackNode,
        node: usize,
    },
}

pub(crate) fn failure(ops: &[&'static str], node: usize, error: &EngineError) -> RunError {
    RunError::Kernel {
        node,
        op: ops[node],
        message: error.to_string(),
    }
}

/// An error of a graph that consists of this one node, as one of the whole graph.
pub(crate) fn at_node(ops: &[&'static str], at: usize, mut error: RunError) -> RunError {
    match &mut error {
        RunError::Index { node, op, .. } | RunError::Kernel { node, op, .. } => {
            (*node, *op) = (at, ops[at]);
        }
        RunError::Stale => {}
    }
    error
}
