//! Log messages about launches outside megakernels.

use std::collections::BTreeSet;
use std::sync::Mutex;

use tracing::{debug, info};

use super::no_stage::NoStage;

use vgpu_transport::lock::lock;

/// The reasons that were logged. Each set of reasons is logged once at level info, not for each
/// plan.
#[derive(Default)]
pub(crate) struct ReportedReasons(Mutex<BTreeSet<String>>);

/// The most sets of reasons that are remembered, since a guest may send any graph.
const MAX_REPORTED: usize = 256;

impl ReportedReasons {
    /// Logs how the launches of a plan were lowered: at level info if some are outside megakernels
    /// for a new set of reasons, else at level debug.
    pub(crate) fn log(
        &self,
        launches: usize,
        all: usize,
        steps: usize,
        ends: &BTreeSet<(&str, NoStage)>,
    ) {
        let reasons: Vec<String> = { ends.iter() }
            .map(|(op, why)| format!("{op}: {why}"))
            .collect();
        let reasons = reasons.join("; ");
        let is_new = !ends.is_empty() && {
            let mut logged = lock(&self.0);
            logged.len() < MAX_REPORTED && logged.insert(reasons.clone())
        };
        if !is_new {
            debug!(
                "a plan of {launches} launches runs as {all}, {steps} of them megakernels {reasons}"
            );
            return;
        }
        info!(
            "a plan of {launches} launches runs as {all}, {steps} of them megakernels; \
             outside megakernels: {reasons}"
        );
    }
}
