//! Limits of a session.
#![forbid(unsafe_code)]

use std::time::Duration;

use vgpu_transport::ir;
use vgpu_transport::wire::MAX_GRAPHS;

/// How many of `max_sessions` one guest may have: three quarters, so that no guest keeps out all
/// others.
pub(crate) fn sessions_of_one_guest(max_sessions: usize) -> usize {
    max_sessions - max_sessions / 4
}

/// Limits of a session on host memory and host time that the memory ledger does not count. Device
/// memory is limited by the tenant's quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Buffers that exist at once. ALLOC of one more is refused.
    pub buffers: usize,
    /// Graphs that are stored at once. One more ends the session.
    pub graphs: usize,
    /// Bytes of the images of all stored graphs. One more ends the session.
    pub graph_bytes: u64,
    /// Nodes of all stored graphs. One more ends the session.
    pub graph_nodes: usize,
    /// Limits of a single graph.
    pub graph: ir::Limits,
    /// How long a guest may take to send HELLO.
    pub hello: Duration,
    /// Whether guests may map buffers that are in memory of this machine.
    pub share: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            // Each buffer is at least one mapping; Linux allows 65,530 per process
            // (vm.max_map_count).
            buffers: 1 << 14,
            graphs: MAX_GRAPHS,
            graph_bytes: 256 << 20,
            // A compiled node takes a few hundred bytes.
            graph_nodes: 4 << 20,
            graph: ir::Limits::default(),
            hello: Duration::from_secs(10),
            share: true,
        }
    }
}
