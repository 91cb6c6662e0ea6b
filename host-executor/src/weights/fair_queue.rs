//! The order in which extents are hashed, or written to disk: start-time fair queueing of the bytes
//! of each sharing domain. Each session of an unnamed guest over vsock or TCP is a domain of its
//! own.
//!
//! The domain with the fewest bytes hashed is next. A domain that returns from a pause has no
//! credit for it. Between two decisions at most [`QUANTUM`] bytes are hashed. So a domain that
//! seals buffer after buffer gets one share like every other one, and waiting extents of others are
//! hashed after as many bytes of this domain as of their own.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that are hashed before another domain may be next.
pub(super) const QUANTUM: u64 = 16 << 20;

/// Items of one domain that wait at once. Further extents are not hashed, and not shared by hash.
pub(super) const MAX_WAITING: usize = 1 << 16;

/// Bytes of one domain that wait at once.
pub(super) const MAX_WAITING_BYTES: u64 = 1 << 40;

/// Domains that are remembered while nothing waits.
const MAX_IDLE: usize = 1024;

/// How often the items of a domain are looked through at most.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Items of several domains that wait.
pub(super) struct FairQueue<T> {
    domains: HashMap<Arc<str>, Domain<T>>,
    /// The items of one domain at most.
    most: usize,
    /// The virtual time at which the latest item began.
    clock: u64,
}

struct Domain<T> {
    waiting: VecDeque<(u64, T)>,
    /// Bytes of `waiting`.
    bytes: u64,
    /// Virtual time: bytes of items that are done, plus what the domain has missed in pauses.
    used: u64,
    /// When the items were last looked through.
    swept: Option<Instant>,
}

/// What waited of a domain that is gone. Dropping it takes as long as there are items.
pub(super) struct Removed<T>(#[expect(dead_code, reason = "only dropped")] Option<Domain<T>>);

impl<T> Default for FairQueue<T> {
    fn default() -> FairQueue<T> {
        FairQueue::with_limit(MAX_WAITING)
    }
}

impl<T> FairQueue<T> {
    /// An empty queue, for at most so many items of each domain.
    pub(super) fn with_limit(most: usize) -> FairQueue<T> {
        FairQueue {
            domains: HashMap::new(),
            most,
            clock: 0,
        }
    }

    /// Adds an item of `bytes` bytes. Returns whether there was room.
    pub(super) fn push(&mut self, domain: &Arc<str>, bytes: u64, item: T) -> bool {
        let (clock, most) = (self.clock, self.most);
        let domain = self.domain(domain);
        let total = domain.bytes.saturating_add(bytes);
        if domain.waiting.len() >= most || total > MAX_WAITING_BYTES {
            return false;
        }
        if domain.waiting.is_empty() {
            domain.used = domain.used.max(clock);
        }
        domain.bytes = total;
        domain.waiting.push_back((bytes, item));
        true
    }

    /// Puts back an item that was taken, in front of the others of its domain.
    pub(super) fn put_back(&mut self, domain: &Arc<str>, bytes: u64, item: T) {
        let domain = self.domain(domain);
        domain.bytes = domain.bytes.saturating_add(bytes);
        domain.waiting.push_front((bytes, item));
    }

    /// Makes room for further items of a domain: removes those for which `keep` does not hold. Does
    /// nothing if that was done in the last second: others wait meanwhile. Returns how many items
    /// are gone.
    pub(super) fn make_room(
        &mut self,
        domain: &Arc<str>,
        now: Instant,
        mut keep: impl FnMut(&T) -> bool,
    ) -> usize {
        let domain = self.domains.get_mut(domain).filter(|domain| {
            let since = { domain.swept }.map(|swept| now.saturating_duration_since(swept));
            since.is_none_or(|since| since >= SWEEP_INTERVAL)
        });
        let Some(domain) = domain else {
            return 0;
        };
        domain.swept = Some(now);
        let before = domain.waiting.len();
        domain.waiting.retain(|(_, item)| keep(item));
        domain.bytes = domain.waiting.iter().map(|(bytes, _)| bytes).sum();
        before - domain.waiting.len()
    }

    /// Forgets a domain that does not return, with all its items. The caller drops them without the
    /// lock of this queue.
    #[must_use]
    pub(super) fn remove(&mut self, domain: &str) -> Removed<T> {
        Removed(self.domains.remove(domain))
    }

    /// Takes the next item.
    pub(super) fn pop(&mut self) -> Option<(Arc<str>, T)> {
        let waiting = self.domains.iter_mut();
        let waiting = waiting.filter(|(_, domain)| !domain.waiting.is_empty());
        let next = waiting.min_by_key(|(name, domain)| (domain.used, Arc::clone(name)));
        let Some((name, domain)) = next else {
            // Nobody waits, so nobody is ahead of anybody.
            self.domains.clear();
            return None;
        };
        let name = Arc::clone(name);
        let (bytes, item) = domain.waiting.pop_front()?;
        domain.bytes = domain.bytes.saturating_sub(bytes);
        self.clock = self.clock.max(domain.used);
        // What is known of an idle domain matters only while it is ahead.
        let clock = self.clock;
        let is_needed = |is: &str, domain: &Domain<T>| {
            *is == *name || !domain.waiting.is_empty() || domain.used > clock
        };
        self.domains.retain(|is, domain| is_needed(is, domain));
        Some((name, item))
    }

    /// How many items wait, and their bytes.
    pub(super) fn waiting(&self) -> (usize, u64) {
        let waiting = self.domains.values();
        waiting.fold((0, 0), |(count, bytes), domain| {
            (count + domain.waiting.len(), bytes + domain.bytes)
        })
    }

    /// Counts bytes of an item of a domain that are done.
    pub(super) fn used(&mut self, domain: &Arc<str>, bytes: u64) {
        let is_idle = || self.domains.values().all(|t| t.waiting.is_empty());
        if self.domains.len() > MAX_IDLE && is_idle() {
            self.domains.clear();
        }
        let clock = self.clock;
        let domain = self.domain(domain);
        domain.used = domain.used.max(clock).saturating_add(bytes);
    }

    fn domain(&mut self, name: &Arc<str>) -> &mut Domain<T> {
        let new = || Domain {
            waiting: VecDeque::new(),
            bytes: 0,
            used: 0,
            swept: None,
        };
        self.domains.entry(Arc::clone(name)).or_insert_with(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hashes one quantum; returns its domain and whether the item is complete.
    fn step(queue: &mut FairQueue<u64>) -> Option<(Arc<str>, bool)> {
        let (name, left) = queue.pop()?;
        let bytes = left.min(QUANTUM);
        if left > bytes {
            queue.put_back(&name, left - bytes, left - bytes);
        }
        queue.used(&name, bytes);
        Some((name, left == bytes))
    }

    #[test]
    fn a_domain_that_seals_again_and_again_gets_its_share_and_no_more() {
        let (many, few): (Arc<str>, Arc<str>) = ("many".into(), "few".into());
        for (size, refills) in [
            (1 << 30, true),
            (QUANTUM, true),
            (64 << 10, true),
            (1 << 30, false),
        ] {
            let mut queue = FairQueue::default();
            for _ in 0..MAX_WAITING {
                assert!(queue.push(&many, size.min(1 << 20), size));
            }
            for _ in 0..100 {
                step(&mut queue);
            }
            // The other domain seals a model of 20 extents.
            for _ in 0..20 {
                assert!(queue.push(&few, 5 * QUANTUM, 5 * QUANTUM));
            }
            let (mut of_many, mut done) = (0, 0);
            while done < 20 {
                let (name, is_complete) = step(&mut queue).unwrap();
                if name == few {
                    done += u32::from(is_complete);
                } else {
                    of_many += size.min(QUANTUM);
                    if refills && is_complete {
                        queue.push(&many, size.min(1 << 20), size);
                    }
                }
            }
            // As many bytes as its own, and one quantum.
            assert!(
                of_many <= 101 * QUANTUM,
                "{of_many} bytes of extents of {size}"
            );
        }
    }

    #[test]
    fn a_domain_that_returns_again_and_again_does_not_pass_others() {
        let (pausing, waiting): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let mut queue = FairQueue::default();
        queue.push(&waiting, 100 * QUANTUM, 100 * QUANTUM);
        let mut hashed = HashMap::new();
        for _ in 0..100 {
            queue.push(&pausing, QUANTUM, QUANTUM);
            let (name, _) = step(&mut queue).unwrap();
            *hashed.entry(name).or_insert(0) += 1;
        }
        assert!((49..=51).contains(&hashed[&waiting]), "{hashed:?}");
    }

    #[test]
    fn what_a_domain_may_have_waiting_is_limited_and_forgotten() {
        let (one, two): (Arc<str>, Arc<str>) = ("one".into(), "two".into());
        let mut queue = FairQueue::default();
        for _ in 0..MAX_WAITING {
            assert!(queue.push(&one, 1, 1));
        }
        assert!(!queue.push(&one, 1, 1));
        let now = Instant::now();
        assert_eq!(queue.make_room(&one, now, |_| true), 0);
        // Looked through a moment ago: a guest that asks again and again keeps nobody waiting.
        let soon = now + SWEEP_INTERVAL / 2;
        let mut asked = 0;
        let ask = |_: &u64| {
            asked += 1;
            false
        };
        assert_eq!((queue.make_room(&one, soon, ask), asked), (0, 0));
        assert!(!queue.push(&one, 1, 1));
        let later = now + SWEEP_INTERVAL;
        assert_eq!(queue.make_room(&one, later, |_| false), MAX_WAITING);
        assert!(queue.push(&one, MAX_WAITING_BYTES, 1));
        assert!(!queue.push(&one, 1, 1), "bytes");
        assert!(queue.push(&two, 1, 1), "of another domain");
        drop(queue.remove("two"));
        assert_eq!(queue.waiting(), (1, MAX_WAITING_BYTES));
        while step(&mut queue).is_some() {}
        assert!(queue.push(&one, MAX_WAITING_BYTES, 1));
        // Domains that are gone take no memory.
        for i in 0..1000 {
            let name: Arc<str> = format!("{i}").into();
            queue.push(&name, 1, 1);
            while step(&mut queue).is_some() {}
        }
        assert!(queue.domains.is_empty(), "{}", queue.domains.len());
        // Beside a domain that always waits, too.
        queue.push(&one, MAX_WAITING_BYTES, MAX_WAITING_BYTES);
        for i in 0..1000 {
            let name: Arc<str> = format!("{i}").into();
            queue.push(&name, 1, 1);
            step(&mut queue);
            step(&mut queue);
        }
        assert!(queue.domains.len() < 5, "{}", queue.domains.len());
    }
}
