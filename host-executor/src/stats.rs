//! Statistics of a session, readable by other threads while the session runs.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vgpu_transport::wire::{ProtocolVersion, Request};

/// Names of the kinds of request, in the order of their tags on the wire.
const KINDS: [&str; 20] = [
    "HELLO", "ALLOC", "FREE", "WRITE", "READ", "FILL", "COPY", "GRAPH", "SUBMIT", "FORGET",
    "MEMORY", "FENCE", "PATCH", "WEIGHTS", "LOOKUP", "PROOF", "EXTENT", "SEAL", "QUERY", "ATTACH",
];

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestKind(usize);

/// The kind of the request that runs a graph.
pub(crate) const SUBMIT: RequestKind = RequestKind(8);

impl RequestKind {
    pub(crate) fn of(request: &Request) -> RequestKind {
        RequestKind(match request {
            Request::Hello { .. } => 0,
            Request::Alloc { .. } => 1,
            Request::Free { .. } => 2,
            Request::Write { .. } => 3,
            Request::Read { .. } => 4,
            Request::Fill { .. } => 5,
            Request::Copy { .. } => 6,
            Request::Graph { .. } => 7,
            Request::Submit { .. } => 8,
            Request::Forget { .. } => 9,
            Request::Memory { .. } => 10,
            Request::Fence { .. } => 11,
            Request::Patch { .. } => 12,
            Request::Weights { .. } => 13,
            Request::Lookup { .. } => 14,
            Request::Proof { .. } => 15,
            Request::Extent { .. } => 16,
            Request::Seal { .. } => 17,
            Request::Query { .. } => 18,
            Request::Attach { .. } => 19,
        })
    }

    pub(crate) fn name(self) -> &'static str {
        KINDS[self.0]
    }

    /// Whether the request is a part of a graph, which the host compiles when it is complete.
    pub(crate) fn compiles(self) -> bool {
        matches!(self.name(), "GRAPH" | "PATCH")
    }

    /// The position in the order of the tags on the wire, from 0.
    pub(crate) fn number(self) -> usize {
        self.0
    }

    /// The name of the kind with this number.
    pub(crate) fn name_of(number: usize) -> &'static str {
        KINDS.get(number).copied().unwrap_or("unknown")
    }

    #[cfg(test)]
    pub(crate) fn of_name(name: &str) -> RequestKind {
        RequestKind(KINDS.iter().position(|kind| *kind == name).expect("a kind"))
    }
}

/// A counter that one thread writes and any thread reads.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds to the counter. A plain load and store suffice, since there is one writer.
    pub(crate) fn add(&self, count: u64) {
        let now = self.0.load(Ordering::Relaxed);
        self.set(now.wrapping_add(count));
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why a request was refused or failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureReason {
    /// The guest's quota or the engine's memory is used up.
    Memory,
    /// Another limit: buffers, memory mappings, descriptors, the time of a node.
    Limit,
    /// The engine cannot compute it.
    Unsupported,
    /// The device, or a kernel on it, failed.
    Device,
    /// Anything else: indices out of range, weights that were withdrawn.
    Other,
}

/// Requests that were refused or failed, by the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Failures {
    /// The guest's quota or the engine's memory was used up.
    pub memory: u64,
    /// Another limit: buffers, memory mappings, descriptors, the time of a node.
    pub limit: u64,
    /// The engine could not compute it.
    pub unsupported: u64,
    /// The device, or a kernel on it, failed.
    pub device: u64,
    /// Anything else: indices out of range, weights that were withdrawn.
    pub other: u64,
}

impl Failures {
    fn from_counters(counters: &[Counter; 5]) -> Failures {
        let [memory, limit, unsupported, device, other] = counters.each_ref().map(Counter::get);
        Failures {
            memory,
            limit,
            unsupported,
            device,
            other,
        }
    }

    /// Each reason with its number of requests.
    pub fn by_reason(&self) -> [(&'static str, u64); 5] {
        [
            ("memory", self.memory),
            ("limit", self.limit),
            ("unsupported", self.unsupported),
            ("device", self.device),
            ("other", self.other),
        ]
    }

    /// The requests of all reasons.
    pub fn total(&self) -> u64 {
        let counts = self.by_reason().into_iter().map(|(_, count)| count);
        counts.fold(0, u64::saturating_add)
    }

    /// Adds the figures of another session or process.
    pub(crate) fn add(&mut self, other: &Failures) {
        for (sum, count) in [
            (&mut self.memory, other.memory),
            (&mut self.limit, other.limit),
            (&mut self.unsupported, other.unsupported),
            (&mut self.device, other.device),
            (&mut self.other, other.other),
        ] {
            *sum = sum.saturating_add(count);
        }
    }
}

/// Counters of a session. Only the session's thread writes them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// The name that the guest gave in HELLO. Unset before HELLO.
    pub(crate) guest: OnceLock<String>,
    /// The version of the messages. Unset before HELLO.
    pub(crate) protocol: OnceLock<ProtocolVersion>,
    requests: [Counter; KINDS.len()],
    pub(crate) bytes_in: Counter,
    pub(crate) bytes_out: Counter,
    failures: [Counter; 5],
    pub(crate) round_trips: Counter,
    pub(crate) full_graphs: Counter,
    pub(crate) patches: Counter,
    pub(crate) graphs_run: Counter,
    pub(crate) nodes_run: Counter,
    pub(crate) tokens_run: Counter,
    pub(crate) busy_nanoseconds: Counter,
    pub(crate) queued_nanoseconds: Counter,
    pub(crate) turns: Counter,
    pub(crate) batch_members: Counter,
    pub(crate) buffers: Counter,
    pub(crate) buffer_bytes: Counter,
    pub(crate) graphs: Counter,
    pub(crate) weights_not_sent: Counter,
    pub(crate) weights_shared: Counter,
}

impl Counters {
    pub(crate) fn request(&self, kind: RequestKind) {
        self.requests[kind.0].add(1);
    }

    pub(crate) fn failure(&self, reason: FailureReason) {
        self.failures[reason as usize].add(1);
    }

    pub(crate) fn snapshot(&self) -> Stats {
        Stats {
            requests: std::array::from_fn(|i| self.requests[i].get()),
            bytes_in: self.bytes_in.get(),
            bytes_out: self.bytes_out.get(),
            failures: Failures::from_counters(&self.failures),
            round_trips: self.round_trips.get(),
            full_graphs: self.full_graphs.get(),
            patches: self.patches.get(),
            graphs_run: self.graphs_run.get(),
            nodes_run: self.nodes_run.get(),
            tokens_run: self.tokens_run.get(),
            busy: Duration::from_nanos(self.busy_nanoseconds.get()),
            queued: Duration::from_nanos(self.queued_nanoseconds.get()),
            turns: self.turns.get(),
            batch_members: self.batch_members.get(),
            buffers: self.buffers.get(),
            buffer_bytes: self.buffer_bytes.get(),
            graphs: self.graphs.get(),
            weights_not_sent: self.weights_not_sent.get(),
            weights_shared: self.weights_shared.get(),
        }
    }
}

/// What a session has done so far. The figures are read without stopping the session, so they may
/// be taken a request apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    requests: [u64; KINDS.len()],
    /// Bytes of messages and payloads received.
    pub bytes_in: u64,
    /// Bytes of messages and payloads sent.
    pub bytes_out: u64,
    /// Requests that were refused or failed.
    pub failures: Failures,
    /// Requests with a reply that the guest waits for.
    pub round_trips: u64,
    /// Graphs received completely.
    pub full_graphs: u64,
    /// Graphs received as patches of earlier graphs.
    pub patches: u64,
    /// Number of graph runs.
    pub graphs_run: u64,
    /// Nodes of all graph runs.
    pub nodes_run: u64,
    /// Tokens of all graph runs: for each run, the most columns of the graph's products.
    pub tokens_run: u64,
    /// Time during which the session's graphs had the engine.
    pub busy: Duration,
    /// Time during which the session's graphs waited for the engine.
    pub queued: Duration,
    /// Turns of the scheduler: one per graph run, and one more for each time a run yielded.
    pub turns: u64,
    /// The graphs that ran in these turns, the session's own and others in one batch: the sum of
    /// all turns. Divided by `turns`, it is the mean size of a batch.
    pub batch_members: u64,
    /// Buffers that exist.
    pub buffers: u64,
    /// Bytes of these buffers.
    pub buffer_bytes: u64,
    /// Graphs that are stored.
    pub graphs: u64,
    /// Bytes of weights that the guest did not have to send.
    pub weights_not_sent: u64,
    /// Part of `buffer_bytes` that is a shared copy, first uploaded to another buffer.
    pub weights_shared: u64,
}

impl Stats {
    /// The number of requests of all kinds.
    pub fn requests(&self) -> u64 {
        self.requests.iter().sum()
    }

    /// Adds the totals of another session. Current buffers and graphs are not added.
    pub(crate) fn add(&mut self, other: &Stats) {
        for (sum, count) in self.requests.iter_mut().zip(other.requests) {
            *sum += count;
        }
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
        self.failures.add(&other.failures);
        self.round_trips += other.round_trips;
        self.full_graphs += other.full_graphs;
        self.patches += other.patches;
        self.graphs_run += other.graphs_run;
        self.nodes_run += other.nodes_run;
        self.tokens_run += other.tokens_run;
        self.busy += other.busy;
        self.queued += other.queued;
        self.turns += other.turns;
        self.batch_members += other.batch_members;
        self.weights_not_sent += other.weights_not_sent;
    }

    /// Each kind of request with its number of requests.
    pub fn requests_by_kind(&self) -> impl Iterator<Item = (&'static str, u64)> {
        KINDS.into_iter().zip(self.requests)
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gap = "";
        for (kind, count) in self.requests_by_kind().filter(|&(_, count)| count > 0) {
            write!(f, "{gap}{kind} {count}")?;
            gap = ", ";
        }
        if gap.is_empty() {
            f.write_str("none")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_in_the_order_of_the_wire() {
        let fence = Request::Fence {};
        let mut bytes = Vec::new();
        fence.encode(ProtocolVersion::CURRENT, &mut bytes);
        assert_eq!(bytes, 12u32.to_le_bytes());
        assert_eq!(RequestKind::of(&fence), RequestKind(11));
        assert_eq!(RequestKind::of(&fence).name(), "FENCE");
        assert_eq!(SUBMIT.name(), "SUBMIT");
    }
}
