//! Which nodes the device computes, and which the other engine.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tracing::{debug, info};
use vgpu_engine::FallbackUse;
use vgpu_transport::ir::Op;
use vgpu_transport::lock::lock;

/// The nodes of one operator in all compiled graphs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Placed {
    /// Nodes that the device computes.
    pub device: u64,
    /// Nodes that the other engine computes.
    pub fallback: u64,
}

/// The nodes of each operator, by its name in ggml.
#[derive(Debug, Default)]
pub(crate) struct Placement(Mutex<BTreeMap<&'static str, Placed>>);

impl Placement {
    /// A node is compiled for the device with this name, or for the other engine. The first one of
    /// each operator is logged.
    pub(crate) fn note(&self, op: &Op, device: &str, is_on_device: bool) {
        let op = op.kind().ggml_name();
        let mut table = lock(&self.0);
        let placed = table.entry(op).or_default();
        let count = match is_on_device {
            true => &mut placed.device,
            false => &mut placed.fallback,
        };
        *count += 1;
        let is_first = *count == 1;
        drop(table);
        match (is_first, is_on_device) {
            (true, true) => debug!("{op} is computed by {device}"),
            (true, false) => info!(
                "{op} is also computed by the engine cpu: {device} does not compute every such \
                 node as the graph asks"
            ),
            (false, _) => {}
        }
    }

    /// The operators that there were so far.
    pub(crate) fn by_operator(&self) -> BTreeMap<&'static str, Placed> {
        lock(&self.0).clone()
    }
}

/// What has run, on the device and on the other engine, in all runs so far.
#[derive(Debug, Default)]
pub(crate) struct RunCounts {
    device_nodes: AtomicU64,
    other_nodes: AtomicU64,
    /// Nanoseconds.
    device_time: AtomicU64,
    other_time: AtomicU64,
}

impl RunCounts {
    /// The device had work for this time.
    pub(crate) fn device_ran(&self, took: Duration) {
        add_time(&self.device_time, took);
    }

    /// The device has got so many nodes.
    pub(crate) fn device_got(&self, nodes: usize) {
        self.device_nodes.fetch_add(nodes as u64, Ordering::Relaxed);
    }

    /// The other engine had a node for this time, and `has_ended` it.
    pub(crate) fn other_ran(&self, took: Duration, has_ended: bool) {
        add_time(&self.other_time, took);
        let nodes = u64::from(has_ended);
        self.other_nodes.fetch_add(nodes, Ordering::Relaxed);
    }

    /// All so far.
    pub(crate) fn read(&self) -> FallbackUse {
        let nodes = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let time = |count: &AtomicU64| Duration::from_nanos(nodes(count));
        FallbackUse {
            device_nodes: nodes(&self.device_nodes),
            other_nodes: nodes(&self.other_nodes),
            device_time: time(&self.device_time),
            other_time: time(&self.other_time),
        }
    }
}

fn add_time(sum: &AtomicU64, took: Duration) {
    let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    sum.fetch_add(nanoseconds, Ordering::Relaxed);
}
