//! What is wrong now.

use tracing::warn;

/// What is wrong now with one thing. The log has a line for each change.
#[derive(Debug, Default)]
pub(crate) struct Problem(Option<String>);

impl Problem {
    /// `now`: what is wrong, or `None`.
    pub(crate) fn set(&mut self, now: Option<String>) {
        if self.0 == now {
            return;
        }
        if let Some(problem) = &now {
            warn!("{problem}");
        }
        self.0 = now;
    }
}
