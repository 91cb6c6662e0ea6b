//! Limits of a session.
#![forbid(unsafe_code)]

use std::time::Duration;

use vgpu_engine::Engine;
use vgpu_transport::ir;
use vgpu_transport::wire::MAX_GRAPHS;

/// How many of `max_sessions` one guest may have: three quarters, so that no guest keeps out all
/// others.
pub(crate) fn sessions_of_one_guest(max_sessions: usize) -> usize {
    max_sessions - max_sessions / 4
}

/// File descriptors of a session: sockets, eventfds, and a buffer's file on its way to the guest.
#[cfg(feature = "server")]
pub(crate) const SESSION_DESCRIPTORS: usize = 8;

/// Limits on connections whose handshake is not complete, up to HELLO. Each has a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandshakeLimits {
    /// Connections of all origins. Beyond that, the origin with most of them loses its oldest one.
    pub all: usize,
    /// Connections of one origin: a user of this machine, a virtual machine, or an address (with
    /// IPv6, a network of 64 bits). Beyond that, the origin loses its oldest one.
    pub of_one_origin: usize,
}

impl Default for HandshakeLimits {
    fn default() -> HandshakeLimits {
        HandshakeLimits {
            all: 256,
            // More than a guest may have sessions by default: all its programs can start at once.
            of_one_origin: 64,
        }
    }
}

/// The default of [`Limits::turn_time`]. A turn ends after 0.1 s and one piece of work: by
/// estimate, a launch of 1 s on the CUDA engine, and a node of 60 s on a backend of ggml.
const DEFAULT_TURN_TIME: Duration = Duration::from_secs(300);

/// How long the start of an engine with a driver may take, where the operator has set no limit. The
/// first one compiles kernels.
const COMPILE_TIME: Duration = Duration::from_secs(900);

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
    /// The longest time of a node of a graph by estimate ([`vgpu_engine::work`]). A graph with a
    /// longer node fails. `None`: the limit of the engine ([`vgpu_engine::Engine::max_node_time`]).
    pub node_time: Option<Duration>,
    /// How long a guest may take to send HELLO, once the link is open.
    pub hello: Duration,
    /// A request or a turn on the engine that lasts longer is reported in the log. A shutdown waits
    /// for a session that does nothing new for so long, and no longer.
    pub slow: Duration,
    /// The longest turn on the engine, and the longest call of the engine by a session. Beyond it
    /// the engine hangs, and the process is of no use any more. `None`: no limit.
    pub turn_time: Option<Duration>,
    /// Connections that have not sent HELLO, of the whole process.
    pub handshakes: HandshakeLimits,
    /// Memory mappings of this process that buffers of all guests may take. One guest gets no more
    /// than it leaves free.
    pub mappings: usize,
    /// File descriptors of this process that sessions may take. One guest gets no more than it
    /// leaves free.
    pub descriptors: usize,
    /// Bytes of host memory that the graphs of all guests may take beside devices with a memory of
    /// their own.
    pub host_memory: u64,
    /// Whether guests may map buffers that are in memory of this machine.
    pub map_buffers: bool,
    /// Whether graphs that multiply with the same weights may run in one batch.
    pub batch: bool,
}

impl Limits {
    /// How long an engine may take to start, with the operator's limit of a turn: zero for no
    /// limit. Without one, an engine with a driver (`has_driver`) has time to compile its kernels.
    pub fn start_time(turn_time: Option<Duration>, has_driver: bool) -> Option<Duration> {
        let usual = match has_driver {
            true => COMPILE_TIME,
            false => DEFAULT_TURN_TIME,
        };
        Some(turn_time.unwrap_or(usual)).filter(|time| !time.is_zero())
    }

    /// These limits with a longest node and a longest turn from the configuration. `node_time`:
    /// `None` is the limit of the engine. `turn_time`: `None` is 300 s, or more on an engine that
    /// cannot stop in the middle of a long node; zero is no limit.
    #[must_use]
    pub fn with_times(
        self,
        engine: &dyn Engine,
        node_time: Option<Duration>,
        turn_time: Option<Duration>,
    ) -> Limits {
        let longest_node = match engine.stops_within_nodes() {
            true => Duration::ZERO,
            false => node_time.unwrap_or(engine.max_node_time()),
        };
        let usual = DEFAULT_TURN_TIME.max(longest_node.saturating_mul(2));
        let turn_time = turn_time.unwrap_or(usual);
        Limits {
            node_time,
            turn_time: (!turn_time.is_zero()).then_some(turn_time),
            ..self
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            buffers: 1 << 14,
            graphs: MAX_GRAPHS,
            graph_bytes: 256 << 20,
            // A compiled node takes a few hundred bytes.
            graph_nodes: 4 << 20,
            graph: ir::Limits::default(),
            node_time: None,
            hello: Duration::from_secs(10),
            slow: Duration::from_secs(10),
            turn_time: Some(DEFAULT_TURN_TIME),
            handshakes: HandshakeLimits::default(),
            // Of the usual 65,530 (vm.max_map_count) and 1024 (RLIMIT_NOFILE).
            mappings: 49_148,
            descriptors: 576,
            host_memory: 8 << 30,
            map_buffers: true,
            batch: true,
        }
    }
}
