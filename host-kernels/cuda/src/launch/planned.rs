//! A launch of a plan.

use crate::device::Launch;

/// A launch of a plan.
#[derive(Debug, Clone)]
pub(crate) struct PlannedLaunch {
    pub(crate) launch: Launch,
    /// The node that the launch belongs to.
    pub(crate) node: usize,
    /// Whether no scratch memory is in use after the launch, so that another plan may run.
    pub(crate) may_yield: bool,
    /// Whether the launch is a part of a divided node: by estimate it may take as long as a launch
    /// may at all, so a batch of launches ends with it.
    pub(crate) is_long: bool,
    /// The number of launches that this one replaces: 1, or more for a megakernel or a merged
    /// launch.
    pub(crate) covers: usize,
}
