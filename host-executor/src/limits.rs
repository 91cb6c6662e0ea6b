//! How much one guest may make the host keep.

use std::time::Duration;

use vgpu_transport::ir;
use vgpu_transport::wire::MAX_GRAPHS;

/// Limits of a session. What they bound is host memory and host time that the engine's own budget
/// does not see; device memory is bounded by the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Buffers alive at once. One more is refused.
    pub buffers: usize,
    /// Graphs kept at once. One more ends the session.
    pub graphs: usize,
    /// Bytes of the images of all graphs kept. More end the session.
    pub graph_bytes: u64,
    /// Nodes of all graphs kept. More end the session.
    pub graph_nodes: usize,
    /// What a single graph may ask for.
    pub graph: ir::Limits,
    /// How long a guest may take to say hello.
    pub hello: Duration,
    /// Whether guests may map buffers of an engine whose memory is memory of this machine.
    pub share: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            // Each buffer is at least one mapping; Linux allows a process 65,530.
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
