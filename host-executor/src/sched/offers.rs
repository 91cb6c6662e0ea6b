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
    /// The work of the plan ([`Plan::batch_work`]).
    pub(super) work: u64,
    /// Since when the plan has waited for this turn.
    pub(super) since: Duration,
    /// How long the turns of the run have taken.
    pub(super) took: Duration,
}

/// What has become of a plan in the turn of another thread.
pub(super) enum Outcome {
    /// The plan has yielded and is offered again.
    Yielded(Times),
    /// The plan has yielded, and its guest no longer wants it.
    Cancelled(Box<dyn Plan>, Times),
    /// The run is over. Without a plan if the batch has panicked.
    Done(Option<Box<dyn Plan>>, Result<(), RunError>, Times),
}

/// The offers and the outcomes of plans, beside the queue.
#[derive(Default)]
pub(super) struct Batches {
    pub(super) offers: BTreeMap<Ticket, Offer>,
    pub(super) outcomes: BTreeMap<Ticket, Outcome>,
    /// Graphs in the running batch that their guests no longer want.
    pub(super) cancelled: BTreeSet<Ticket>,
    /// Those of them whose threads have panicked: nobody takes their outcomes.
    pub(super) abandoned: BTreeSet<Ticket>,
    /// The most members of a batch.
    pub(super) most: usize,
    /// The work of the plan that has the device.
    pub(super) work: u64,
    /// The tenants of the running batch, without that of the holder, and the work of their plans.
    pub(super) others: Vec<(TenantId, u64)>,
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

/// The part of a batch's time that is charged to a member whose plan has `work` of `all` the work.
pub(super) fn part(time: Duration, work: u64, all: u64) -> Duration {
    let nanos = time.as_nanos() * u128::from(work) / u128::from(all.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Batches {
    /// Divides time of the running batch: the part of the holder, and those of the others.
    pub(super) fn parts(
        &self,
        time: Duration,
    ) -> (Duration, impl Iterator<Item = (TenantId, Duration)>) {
        let work = self.work.max(1);
        let others = self.others.iter().map(|&(_, work)| work);
        let all = others.fold(work, u64::saturating_add);
        let each =
            { self.others.iter() }.map(move |&(tenant, work)| (tenant, part(time, work, all)));
        (part(time, work, all), each)
    }

    /// How many graphs with these products wait: of `tenant`, or of all. The graph that has the
    /// device does not wait, although its plan is an offer until its thread wakes up.
    pub(super) fn count(
        &self,
        products: u64,
        tenant: Option<TenantId>,
        holder: Option<Ticket>,
    ) -> usize {
        let offers = self.offers.iter().filter(|&(&ticket, offer)| {
            Some(ticket) != holder
                && offer.key.products == products
                && tenant.is_none_or(|tenant| tenant == offer.tenant)
        });
        offers.count()
    }

    /// Until when the idle device waits for programs of the last batch, and the offer whose thread
    /// waits for this. `waiting`: the number of graphs that wait. `is_full`: a tenant may not start
    /// one more.
    pub(super) fn hold_for_members(
        &self,
        waiting: usize,
        is_full: bool,
        now: Duration,
    ) -> Option<(Ticket, Duration)> {
        let last = self.last.as_ref()?;
        let (&ticket, _) = self.offers.first_key_value()?;
        let until = last.ended + last.limit;
        let mut absent = last.absent.iter();
        let is_expected = absent.any(|program| !self.slow.contains(program));
        let waits = is_expected
            && now < until
            && waiting < self.most
            && !is_full
            && self.count(last.products, None, None) == waiting;
        waits.then_some((ticket, until))
    }

    /// The turn of a batch is over. The runs of the `absent` programs have ended; the longest took
    /// so long.
    pub(super) fn end(
        &mut self,
        products: u64,
        absent: BTreeSet<u64>,
        (took, now): (Duration, Duration),
    ) {
        self.others.clear();
        self.products = None;
        if !absent.is_empty() {
            let last = Last {
                products,
                ended: now,
                limit: took / WAIT_PART,
                absent,
            };
            self.ended(last, now);
        }
    }

    /// A batch has ended. Programs of the last one that are still absent, although they were waited
    /// for, are slow.
    pub(super) fn ended(&mut self, last: Last, now: Duration) {
        if let Some(before) = self.last.replace(last)
            && now > before.ended + before.limit
        {
            let room = MAX_SLOW.saturating_sub(self.slow.len());
            self.slow.extend(before.absent.into_iter().take(room));
        }
    }

    /// A program has ended: nobody waits for it.
    pub(super) fn forget(&mut self, program: u64) {
        self.slow.remove(&program);
        if let Some(last) = &mut self.last {
            last.absent.remove(&program);
        }
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
