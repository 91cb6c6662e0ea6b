//! How plans hand launches to the device.

use std::time::Duration;

/// How plans hand launches to the device.
#[derive(Debug, Clone, Copy)]
pub struct LaunchPolicy {
    /// How long the launches between two looks at the turn should take.
    pub time_slice: Duration,
    /// Launches that take longer than this on average hide the time that it takes to launch the next: recording them
    /// saves nothing.
    pub graph_threshold: Duration,
    /// Whether nodes that can be one launch are.
    pub fusion: bool,
    /// Whether launches that can be one step are, on devices that have steps.
    pub megakernel: bool,
    /// Whether weights are arranged as kernels like to read them.
    pub repack: bool,
}

impl Default for LaunchPolicy {
    fn default() -> LaunchPolicy {
        LaunchPolicy {
            time_slice: Duration::from_micros(1500),
            graph_threshold: Duration::from_micros(40),
            fusion: true,
            // No GPU has run one yet.
            megakernel: false,
            repack: true,
        }
    }
}
