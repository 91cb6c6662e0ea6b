//! The work of a session outside of turns: requests of few bytes, copies of weights, and the
//! decoding, validation and compilation of graphs. Each session has a thread, so a guest with many
//! sessions could keep every processor busy. The time is counted for the tenant, and a session
//! pauses when its tenant has used more than the processors that it is granted while another tenant
//! is active (`Queue::work_outside`).
//!
//! A request of few bytes costs nothing for this but two numbers of its thread: the clock has been
//! read for what the thread publishes. The scheduler is asked once per [`QUANTUM`] of work.

use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::end_check::EndCheck;
use crate::activity::{Activity, ThreadState, Worked};
use crate::lock::expect_copying;
use crate::sched::Scheduler;
use crate::tenant::Tenant;

/// Work of a session after which it is counted for the tenant.
const QUANTUM: Duration = Duration::from_millis(1);

/// The longest sleep of a pause: after it, the session looks whether it is to end, and whether
/// another tenant is still active.
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// The longest pause before the first request: a program waits a limited time for the answer to
/// HELLO. The rest of the pause comes after that answer.
const MAX_FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Counts the work of the thread of a session.
pub(super) struct OutsideWork {
    scheduler: Arc<Scheduler>,
    tenant: Arc<Tenant>,
    /// Whether requests use memory of the host, and wait for no device.
    is_host_memory: bool,
    /// The processor time of the thread when work was counted last.
    counted: Cell<Duration>,
}

impl OutsideWork {
    /// Counts for `tenant`. `is_host_memory`: requests wait for no device.
    pub(super) fn new(
        scheduler: &Arc<Scheduler>,
        tenant: &Arc<Tenant>,
        is_host_memory: bool,
    ) -> OutsideWork {
        OutsideWork {
            scheduler: Arc::clone(scheduler),
            tenant: Arc::clone(tenant),
            is_host_memory,
            counted: Cell::default(),
        }
    }

    /// The thread of the session begins to serve it. What it has done before does not count.
    pub(super) fn begin(&self) {
        self.counted.set(processor_time());
    }

    /// As [`begin`](OutsideWork::begin), of a thread that has done nothing but open the link of the
    /// session, which counts. Pauses for [`MAX_FIRST_PAUSE`] at most if the tenant has worked too
    /// much in earlier sessions.
    pub(super) fn begin_with_link(&self, activity: &Activity, is_over: &dyn Fn() -> bool) {
        let took = processor_time();
        self.counted.set(took);
        let begun = Instant::now();
        self.pause(activity, took, &|| {
            is_over() || begun.elapsed() >= MAX_FIRST_PAUSE
        });
    }

    /// Whether the session has worked so much that [`pay`](OutsideWork::pay) is due.
    pub(super) fn is_due(&self, activity: &Activity) -> bool {
        activity.worked() >= QUANTUM
    }

    /// Counts the work for the tenant, and pauses if the tenant has worked too much, or until
    /// `is_over`. Sets the state of the thread.
    pub(super) fn pay(&self, activity: &Activity, is_over: &dyn Fn() -> bool) {
        let took = self.take(activity);
        self.pause(activity, took, is_over);
    }

    /// Counts the work at the end of a session, without a pause.
    pub(super) fn end(&self, activity: &Activity) {
        let took = self.take(activity);
        let (tenant, entitlement) = (self.tenant.id(), self.tenant.entitlement());
        { &self.scheduler }.work_outside(tenant, entitlement, took);
    }

    /// Whether long work outside of turns is to end, for a session in the state `state`. Called
    /// between two parts of the work. Pauses where that is due, so the thread holds no lock but
    /// that of an engine that copies shared bytes.
    pub(super) fn is_over(
        &self,
        activity: &Activity,
        state: ThreadState,
        end_check: &EndCheck<'_>,
    ) -> bool {
        expect_copying("OutsideWork::is_over");
        activity.continue_request(state);
        if self.is_due(activity) {
            self.pay(activity, &|| end_check.is_near());
            activity.continue_request(state);
        }
        end_check.is_near()
    }

    /// The work since the last call.
    fn take(&self, activity: &Activity) -> Duration {
        let now = processor_time();
        let ran = now.saturating_sub(self.counted.replace(now));
        outside_of_turns(activity.take_worked(), ran, self.is_host_memory)
    }

    fn pause(&self, activity: &Activity, took: Duration, is_over: &dyn Fn() -> bool) {
        let (tenant, entitlement) = (self.tenant.id(), self.tenant.entitlement());
        let paid = { &self.scheduler }.work_outside(tenant, entitlement, took);
        while let Some(left) = { &self.scheduler }.pause(tenant, paid) {
            activity.continue_request(ThreadState::Pauses);
            if is_over() {
                return;
            }
            thread::sleep(left.min(MAX_SLEEP));
        }
    }
}

/// The work outside of turns of a thread that has had the processor for `ran`.
///
/// The time by the clock counts, also while the thread waits for a processor: on a busy machine,
/// many threads that wait for one delay others as much as threads that have one. A request that
/// may wait for a device counts up to the processor time. Between requests the thread spins, and is
/// put to sleep and woken: at least the processor time outside of turns counts.
fn outside_of_turns(worked: Worked, ran: Duration, is_host_memory: bool) -> Duration {
    let Worked { outside, in_turns } = worked;
    let most = if is_host_memory { outside } else { ran };
    outside.min(most).max(ran.saturating_sub(in_turns))
}

/// The processor time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_do_not_count_and_wake_ups_do() {
        let ms = Duration::from_millis;
        for (outside, in_turns, ran, [on_host, on_device]) in [
            (10, 0, 10, [10, 10]),
            // Waits for a processor, or for a device.
            (500, 0, 3, [500, 3]),
            // Many small requests, with a wake-up for each.
            (1, 0, 20, [20, 20]),
            // Turns on a CPU, and on a GPU, which the thread waits for.
            (1, 100, 101, [1, 1]),
            (1, 100, 102, [2, 2]),
            (1, 100, 30, [1, 1]),
        ] {
            let (outside, in_turns) = (ms(outside), ms(in_turns));
            let worked = Worked { outside, in_turns };
            let took = [true, false].map(|is_host| outside_of_turns(worked, ms(ran), is_host));
            assert_eq!(took, [ms(on_host), ms(on_device)], "{worked:?}, {ran} ms");
        }
    }
}
