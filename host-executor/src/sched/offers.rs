//! The plans that wait for the device and may share a turn, and what has become of them.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use vgpu_engine::{BatchKey, Plan, RunError};

use super::queue::{TenantId, Ticket};
use super::times::Times;

/// The part of the time of a batch that its programs are waited for.
pub(super) const WAIT_PART: u32 = 4;

/// Programs that are known to be slow, at most.
const MAX_SLOW: usize = 4096;

/// A plan that waits for the device.
pub(super) struct Offer {
    pub(super) tenant: TenantId,
    pub(super) program: u64,
    pub(super) key: BatchKey,
    pub(super) plan: Box<dyn Plan>,
}

/// What has become of a plan in the turn of another thread.
pub(super) enum Outcome {
    /// The plan has yielded and is offered again.
    Yielded(Times),
    /// The run is over. Without a plan if the batch has panicked.
    Done(Option<Box<dyn Plan>>, Result<(), RunError>, Times),
}

/// The offers and the outcomes of plans, beside the queue.
#[derive(Default)]
pub(super) struct Batches {
    pub(super) offers: BTreeMap<Ticket, Offer>,
    pub(super) outcomes: BTreeMap<Ticket, Outcome>,
    /// The tenants of the running batch, without that of the holder.
    pub(super) others: Vec<TenantId>,
    /// The products of the graph that has the device, if it can run in a batch.
    pub(super) products: Option<u64>,
    pub(super) last: Option<Last>,
    /// Programs that took too long to return.
    slow: BTreeSet<u64>,
}

/// The last batch.
pub(super) struct Last {
    pub(super) products: u64,
    pub(super) ended: Duration,
    /// How long its programs are waited for.
    pub(super) limit: Duration,
    /// Those that have not returned.
    pub(super) absent: BTreeSet<u64>,
}

impl std::fmt::Debug for Batches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batches")
            .field("offers", &self.offers.len())
            .field("others", &self.others)
            .finish_non_exhaustive()
    }
}

impl Batches {
    /// Whether `waiting` graphs wait, all of which are offers with these products.
    pub(super) fn only_these_wait(&self, waiting: usize, products: Option<u64>) -> bool {
        let offers = self.offers.values().filter(|offer| {
            let offered = Some(offer.key.products);
            products == offered
        });
        waiting > 0 && offers.count() == waiting
    }

    /// Until when the idle device waits for programs of the last batch, and the offer whose thread
    /// waits for this. `waiting`: the number of graphs that wait.
    pub(super) fn hold_for_members(
        &self,
        waiting: usize,
        now: Duration,
    ) -> Option<(Ticket, Duration)> {
        let last = self.last.as_ref()?;
        let until = last.ended + last.limit;
        let is_expected = last
            .absent
            .iter()
            .any(|program| !self.slow.contains(program));
        let waits =
            is_expected && now < until && self.only_these_wait(waiting, Some(last.products));
        let (&ticket, _) = self.offers.first_key_value()?;
        waits.then_some((ticket, until))
    }

    /// The turn of a graph begins.
    pub(super) fn begin(&mut self, ticket: Ticket) {
        let offer = self.offers.get(&ticket);
        self.products = offer.map(|offer| offer.key.products);
    }

    /// A program has returned with a graph.
    pub(super) fn returned(&mut self, program: u64, now: Duration) {
        let Some(last) = &mut self.last else {
            return;
        };
        if last.absent.remove(&program) {
            if now <= last.ended + last.limit {
                self.slow.remove(&program);
            } else if self.slow.len() < MAX_SLOW {
                self.slow.insert(program);
            }
        }
    }
}
