//! Which nodes the device computes, and which the other engine.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Mutex;

use tracing::{debug, info};
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
