//! Which nodes the device computes, and which the other engine.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tracing::{debug, info};
use vgpu_engine::{FallbackUse, Placed};
use vgpu_transport::ir::{Op, OpKind};

/// How many nodes of an operator the device computes, and how many the other engine.
#[derive(Debug, Default)]
struct Counts {
    device: AtomicU64,
    fallback: AtomicU64,
}

/// The nodes of each operator in all compiled graphs, in the order of [`OpKind::ALL`].
#[derive(Debug)]
pub(crate) struct Placement(Vec<Counts>);

impl Default for Placement {
    fn default() -> Placement {
        Placement(OpKind::ALL.iter().map(|_| Counts::default()).collect())
    }
}

impl Placement {
    /// A node is compiled for the device with this name, or for the other engine. The first one of
    /// each operator is logged.
    pub(crate) fn note(&self, op: &Op, device: &str, is_on_device: bool) {
        let kind = op.kind();
        let Some(at) = OpKind::ALL.iter().position(|&one| one == kind) else {
            return;
        };
        let op = kind.ggml_name();
        let count = match is_on_device {
            true => &self.0[at].device,
            false => &self.0[at].fallback,
        };
        let is_first = count.fetch_add(1, Ordering::Relaxed) == 0;
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
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let placed = |(kind, counts): (&OpKind, &Counts)| {
            let placed = Placed {
                device: read(&counts.device),
                fallback: read(&counts.fallback),
            };
            (placed != Placed::default()).then_some((kind.ggml_name(), placed))
        };
        OpKind::ALL.iter().zip(&self.0).filter_map(placed).collect()
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
