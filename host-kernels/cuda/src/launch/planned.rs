//! A launch of a plan.

use crate::device::Launch;

/// A launch of a plan.
#[derive(Debug, Clone)]
pub(crate) struct PlannedLaunch {
    pub(crate) launch: Launch,
    /// The node it is of.
    pub(crate) node: usize,
    /// Whether nothing in working memory is needed after it, so that another plan may run.
    pub(crate) may_yield: bool,
    /// How many launches it stands for: 1, or as many as were made a step.
    pub(crate) covers: usize,
}
