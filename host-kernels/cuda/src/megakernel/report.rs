//! What the log says of plans that are not one megakernel.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use tracing::{debug, info};

/// What has been said of plans that are not one step: a reason once, and not again for each plan that a grown cache makes.
#[derive(Default)]
pub(crate) struct ReportedReasons(Mutex<BTreeSet<String>>);

/// Most reasons that are remembered. A guest may send whatever graphs it likes.
const MAX_SAID: usize = 256;

impl ReportedReasons {
    /// Says what became of a plan of so many launches: to whoever looks for what is slow, if some are in no step.
    pub(crate) fn say(
        &self,
        launches: usize,
        all: usize,
        steps: usize,
        ends: &BTreeSet<(&str, &str)>,
    ) {
        let reasons: Vec<String> = { ends.iter() }
            .map(|(op, why)| format!("{op}: {why}"))
            .collect();
        let reasons = reasons.join("; ");
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ends.is_empty() || said.len() >= MAX_SAID || said.contains(&reasons) {
            debug!("{launches} launches of a plan as {all}, of which {steps} are steps {reasons}");
            return;
        }
        info!(
            "{launches} launches of a plan as {all}, of which {steps} are steps; not in a step are {reasons}"
        );
        said.insert(reasons);
    }
}
