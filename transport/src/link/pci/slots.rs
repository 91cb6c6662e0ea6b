//! What the slots of a device do, for diagnosis.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::directory::{VERDICT_ACCEPTED, VERDICT_BUSY, VERDICT_FAILED, word};
use crate::shm::memory::{SharedWords as _, Window};

/// The slots of a device, which other threads read without a lock. The thread that serves the
/// device publishes what it sees.
#[derive(Debug)]
pub struct SlotWatch {
    page: Arc<Window>,
    /// The epoch of the executor that serves the device.
    epoch: u64,
    start: Instant,
    /// When the serving thread has last looked at the slots. Times are milliseconds after `start`,
    /// plus 1. 0: never.
    looked: AtomicU64,
    slots: Box<[SlotWords]>,
}

/// What is published of a slot.
#[derive(Debug, Default)]
struct SlotWords {
    /// The number of the request with which the present session began. 0: no session.
    session: AtomicU64,
    /// The heartbeat of its guest, and when it has changed.
    beat: AtomicU64,
    changed: AtomicU64,
    /// Since when another guest waits for the slot.
    waiting: AtomicU64,
    /// When the session was asked to end for that guest.
    evicted: AtomicU64,
}

/// A session that uses a slot, until the value is dropped.
#[derive(Debug)]
pub(super) struct SlotUse {
    watch: Arc<SlotWatch>,
    slot: usize,
    number: u64,
}

impl SlotWatch {
    pub(super) fn new(page: Arc<Window>, epoch: u64, slots: usize) -> Arc<SlotWatch> {
        Arc::new(SlotWatch {
            page,
            epoch,
            start: Instant::now(),
            looked: AtomicU64::new(0),
            slots: (0..slots).map(|_| SlotWords::default()).collect(),
        })
    }

    fn time(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.start).as_millis();
        u64::try_from(since).unwrap_or(u64::MAX - 1) + 1
    }

    /// How long ago that was. `None`: never.
    fn age(&self, time: &AtomicU64) -> Option<Duration> {
        let at = time.load(Ordering::Relaxed).checked_sub(1)?;
        let now = self.time(Instant::now()) - 1;
        Some(Duration::from_millis(now.saturating_sub(at)))
    }

    /// The serving thread looks at the slots.
    pub(super) fn look(&self) {
        let now = self.time(Instant::now());
        self.looked.store(now, Ordering::Relaxed);
    }

    /// The guest in the slot has this heartbeat, since then.
    pub(super) fn heartbeat(&self, slot: usize, beat: u64, changed: Instant) {
        let words = &self.slots[slot];
        words.beat.store(beat, Ordering::Relaxed);
        words.changed.store(self.time(changed), Ordering::Relaxed);
    }

    /// Another guest waits for the slot since then, or nobody does.
    pub(super) fn waiting(&self, slot: usize, since: Option<Instant>) {
        let since = since.map_or(0, |since| self.time(since));
        self.slots[slot].waiting.store(since, Ordering::Relaxed);
    }

    /// The session in the slot is asked to end.
    pub(super) fn evict(&self, slot: usize) {
        let words = &self.slots[slot];
        if words.evicted.load(Ordering::Relaxed) == 0 {
            let now = self.time(Instant::now());
            words.evicted.store(now, Ordering::Relaxed);
        }
    }

    /// A session begins in the slot with this request.
    pub(super) fn begin(self: &Arc<Self>, slot: usize, number: u64) -> SlotUse {
        let words = &self.slots[slot];
        words.evicted.store(0, Ordering::Relaxed);
        words.session.store(number, Ordering::Relaxed);
        SlotUse {
            watch: Arc::clone(self),
            slot,
            number,
        }
    }

    fn slot(&self, f: &mut fmt::Formatter<'_>, slot: usize, words: &SlotWords) -> fmt::Result {
        let of_page = |at| self.page.load(at);
        let (request, owner) = (of_page(word::request(slot)), of_page(word::owner(slot)));
        let (answered, verdict) = (of_page(word::answered(slot)), of_page(word::verdict(slot)));
        write!(f, "\n  slot {slot}: ")?;
        let session = words.session.load(Ordering::Relaxed);
        match session {
            0 => write!(f, "free")?,
            session => write!(f, "session of request {session:#x}")?,
        }
        write!(f, ", owner {owner:#x}, last request {request:#x}")?;
        match (request == answered, verdict) {
            (false, _) => write!(f, " without an answer")?,
            (true, VERDICT_ACCEPTED) => write!(f, " accepted")?,
            (true, VERDICT_BUSY) => write!(f, " refused as busy")?,
            (true, VERDICT_FAILED) => write!(f, " failed")?,
            (true, other) => write!(f, " answered with {other}")?,
        }
        if session != 0
            && let Some(age) = self.age(&words.changed)
        {
            let beat = words.beat.load(Ordering::Relaxed);
            write!(f, "; heartbeat {beat}, unchanged for {age:.1?}")?;
        }
        if let Some(age) = self.age(&words.waiting) {
            write!(f, "; another program waits for it, for {age:.1?}")?;
        }
        if session != 0
            && let Some(age) = self.age(&words.evicted)
        {
            write!(f, "; asked to end {age:.1?} ago")?;
        }
        Ok(())
    }
}

/// A line for the device, and one for each slot that anybody has asked for.
impl fmt::Display for SlotWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let epoch = self.page.load(word::EPOCH);
        write!(f, "epoch {epoch:#x}")?;
        if epoch != self.epoch {
            write!(f, " (of another executor; this one has {:#x})", self.epoch)?;
        }
        write!(
            f,
            ", state {}, heartbeat {}; ",
            self.page.load(word::HOST_STATE),
            self.page.load(word::HEARTBEAT)
        )?;
        match self.age(&self.looked) {
            Some(age) => write!(f, "slots last looked at {age:.1?} ago")?,
            None => write!(f, "slots not looked at yet")?,
        }
        let slots = self.slots.iter().enumerate();
        let used = slots.filter(|(slot, words)| {
            let asked = self.page.load(word::request(*slot)) != 0;
            asked || words.session.load(Ordering::Relaxed) != 0
        });
        for (slot, words) in used {
            self.slot(f, slot, words)?;
        }
        Ok(())
    }
}

impl Drop for SlotUse {
    fn drop(&mut self) {
        let session = &self.watch.slots[self.slot].session;
        // The next session may have begun.
        let _ = session.compare_exchange(self.number, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}
