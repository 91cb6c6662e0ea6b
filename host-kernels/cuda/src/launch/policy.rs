//! How plans hand launches to the device.

use std::time::Duration;

use vgpu_engine::work::Speed;

/// A small part of what a GPU of compute capability 8.0 does: most kernels are not tuned. A step
/// that waits for the one before reads memory and adds up over a warp. No GPU has measured its
/// 2 µs.
pub(crate) const SPEED: Speed = Speed {
    products: 1e12,
    steps: 2e10,
    bytes: 2e11,
    in_order: 5e5,
};

/// How a plan hands launches to the device.
#[derive(Debug, Clone, Copy)]
pub struct LaunchPolicy {
    /// How long the launches between two checks for other plans should take.
    pub time_slice: Duration,
    /// A node that takes longer by estimate is divided into several launches, if its operator
    /// allows that: a turn ends between launches only.
    pub longest_launch: Duration,
    /// The longest that the launches of a node may take by estimate, on average. A graph with a
    /// node whose operator, or whose operands, allow no division into such launches fails: nothing
    /// ends a launch. The longest part of a node can take longer than the average.
    pub longest_whole: Duration,
    /// The average duration of a launch above which CUDA graphs are not used: longer kernels hide
    /// the time of the next launch.
    pub graph_threshold: Duration,
    /// Whether several nodes may become one launch.
    pub fusion: bool,
    /// Whether launches become megakernels, on devices that have the megakernel.
    pub megakernel: bool,
    /// Whether weights are repacked.
    pub repack: bool,
    /// Whether plans that multiply with the same weights can run as a batch.
    pub batch: bool,
    /// The fewest launches that become a CUDA graph. Fewer are as fast one by one.
    pub min_graph_launches: usize,
    /// The fewest launches that become a megakernel.
    pub min_stages: usize,
}

impl LaunchPolicy {
    /// The same policy with a CUDA graph, or a megakernel, for each launch, however long it takes:
    /// for checks of single nodes.
    #[must_use]
    pub fn for_single_nodes(self) -> LaunchPolicy {
        LaunchPolicy {
            graph_threshold: Duration::MAX,
            min_graph_launches: 1,
            min_stages: 1,
            ..self
        }
    }
}

impl Default for LaunchPolicy {
    fn default() -> LaunchPolicy {
        LaunchPolicy {
            time_slice: Duration::from_micros(1500),
            longest_launch: Duration::from_millis(500),
            // Parts are of unequal length: up to twice the time above.
            longest_whole: Duration::from_secs(1),
            graph_threshold: Duration::from_micros(40),
            fusion: true,
            // Slower than separate launches on an H200.
            megakernel: false,
            repack: true,
            // No GPU has run the kernels, and the self-check does not cover them.
            batch: false,
            min_graph_launches: 4,
            min_stages: 4,
        }
    }
}
