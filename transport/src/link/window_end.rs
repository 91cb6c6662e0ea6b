//! What the two ends of a window have in common: waiting, waking, and knowing whether the peer is there.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Counters, LinkError};
use crate::shm::doorbell::{Doorbell, Wake};
use crate::shm::layout::{STATE_CLOSED, STATE_OPEN, word};
use crate::shm::liveness::Liveness;
use crate::shm::memory::{Memory, Window};
use crate::shm::notify::{MAX_SLEEP, SleepWords, Sleeper, SpinBudget, Waker};

/// How often an end that does not wait asks the kernel whether the peer is still there.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

const GUEST_SLEEP: SleepWords = SleepWords {
    sleeping: word::GUEST_SLEEPING,
    wake_on: word::GUEST_WAKE_ON,
};
const HOST_SLEEP: SleepWords = SleepWords {
    sleeping: word::HOST_SLEEPING,
    wake_on: word::HOST_WAKE_ON,
};

/// What an end waits for. It learns for each how long to spin.
#[derive(Debug, Clone, Copy)]
pub(super) enum Waiting {
    /// A message from the peer.
    Message = 0,
    /// The peer's progress with what was sent.
    Progress = 1,
}

/// Which end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Guest,
    Host,
}

/// What the two ends have in common.
pub(super) struct WindowEnd {
    window: Arc<Window>,
    epoch: u64,
    doorbell: Box<dyn Doorbell>,
    sleeper: Sleeper,
    waker: Waker,
    /// One for each [`Waiting`].
    spin: [SpinBudget; 2],
    side: Side,
    /// The heart of the peer, if it has one that can stop.
    liveness: Option<Liveness>,
    /// When the kernel was last asked for the peer.
    looked: Instant,
    /// The first error: links do not recover.
    error: Option<LinkError>,
    process: u32,
    pub(super) counters: Counters,
}

impl WindowEnd {
    pub(super) fn new(
        window: Arc<Window>,
        epoch: u64,
        doorbell: Box<dyn Doorbell>,
        liveness: Option<Liveness>,
        side: Side,
    ) -> WindowEnd {
        let (own, peer) = match side {
            Side::Guest => (GUEST_SLEEP, HOST_SLEEP),
            Side::Host => (HOST_SLEEP, GUEST_SLEEP),
        };
        WindowEnd {
            window,
            epoch,
            doorbell,
            sleeper: Sleeper::new(own),
            waker: Waker::new(peer),
            spin: [SpinBudget::new(), SpinBudget::new()],
            side,
            liveness,
            looked: Instant::now(),
            error: None,
            process: std::process::id(),
            counters: Counters::default(),
        }
    }

    /// Remembers an error for ever, unless there is one already.
    pub(super) fn fail(&mut self, error: LinkError) -> LinkError {
        self.error.get_or_insert(error).clone()
    }

    /// Whether anything was wrong so far. That the peer has closed the link is not: what it said before can still be
    /// read.
    pub(super) fn check_rules(&self) -> Result<(), LinkError> {
        match &self.error {
            None | Some(LinkError::Closed) => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Whether the link is in order, as far as memory tells.
    pub(super) fn check(&mut self) -> Result<(), LinkError> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let is_open = match self.side {
            Side::Guest => self.window.load(word::HOST_STATE) == STATE_OPEN,
            // Until the guest has come its state is another.
            Side::Host => self.window.load(word::GUEST_STATE) != STATE_CLOSED,
        };
        if is_open {
            Ok(())
        } else {
            Err(self.fail(LinkError::Closed))
        }
    }

    /// The same, and now and then as far as the kernel and the peer's heart tell.
    pub(super) fn check_well(&mut self) -> Result<(), LinkError> {
        self.check()?;
        if self.looked.elapsed() < LOOK_PERIOD {
            return Ok(());
        }
        self.looked = Instant::now();
        let peer = self
            .doorbell
            .wait(Duration::ZERO)
            .and_then(|wake| self.check_peer(wake));
        peer.map_err(|e| self.fail(e))
    }

    /// Whether the peer is there after a wait.
    fn check_peer(&mut self, wake: Wake) -> Result<(), LinkError> {
        // The epoch is another one when a new session was begun in the same memory.
        if wake == Wake::PeerGone || self.window.load(word::EPOCH) != self.epoch {
            return Err(LinkError::Closed);
        }
        let stopped = self
            .liveness
            .as_mut()
            .and_then(|liveness| liveness.has_stopped(&self.window));
        stopped.map_or(Ok(()), |still| {
            Err(LinkError::Stalled {
                seconds: still.as_secs(),
            })
        })
    }

    /// After publishing: wakes the peer if it sleeps for what was published.
    pub(super) fn wake(&mut self, is_news: impl FnOnce(u64) -> bool) -> Result<(), LinkError> {
        if !self.waker.must_ring(&*self.window, is_news) {
            return Ok(());
        }
        self.counters.kicks += 1;
        self.doorbell.ring().map_err(|e| self.fail(e))
    }

    /// Waits until `ready` gives something. `None` when `timeout` has passed.
    pub(super) fn wait<T>(
        &mut self,
        waiting: Waiting,
        wake_on: u64,
        timeout: Option<Duration>,
        mut ready: impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        if let Some(found) = ready().map_err(|e| self.fail(e))? {
            return Ok(Some(found));
        }
        if timeout == Some(Duration::ZERO) {
            return self.check().map(|()| None);
        }
        let began = Instant::now();
        let budget = self.spin[waiting as usize].get();
        let spin = timeout.map_or(budget, |timeout| budget.min(timeout));
        let found = match self.spin(began, spin, &mut ready)? {
            Some(found) => {
                self.counters.spins += 1;
                Some(found)
            }
            None => {
                self.counters.sleeps += 1;
                self.sleep(wake_on, began, timeout, &mut ready)?
            }
        };
        self.spin[waiting as usize].learn(began.elapsed());
        Ok(found)
    }

    /// Looks again and again for as long as `budget` says.
    fn spin<T>(
        &mut self,
        began: Instant,
        budget: Duration,
        ready: &mut impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        /// From here on others who want the processor go first: one of them may be the peer.
        const POLITE: Duration = Duration::from_micros(2);
        /// Giving way takes a fraction of this when nobody wants the processor.
        const CROWDED: Duration = Duration::from_micros(5);
        let mut spun = Duration::ZERO;
        let mut is_crowded = false;
        while spun < budget {
            for _ in 0..16 {
                if let Some(found) = ready().map_err(|e| self.fail(e))? {
                    return Ok(Some(found));
                }
                std::hint::spin_loop();
            }
            if is_crowded {
                // Who spins gets the processor back after the others' time slices; who is woken, at once.
                break;
            }
            let before = began.elapsed();
            if before > POLITE {
                std::thread::yield_now();
            }
            spun = began.elapsed();
            is_crowded = spun - before > CROWDED;
        }
        Ok(None)
    }

    /// Sleeps until there is something, or the time is over.
    fn sleep<T>(
        &mut self,
        wake_on: u64,
        began: Instant,
        timeout: Option<Duration>,
        ready: &mut impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            let nap = left.map_or(MAX_SLEEP, |left| left.min(MAX_SLEEP));
            let found = self.nap(wake_on, nap, ready);
            self.sleeper.awake(&*self.window);
            if let Some(found) = found.map_err(|e| self.fail(e))? {
                return Ok(Some(found));
            }
        }
    }

    /// One turn of the sleep protocol, without the waking up.
    fn nap<T>(
        &mut self,
        wake_on: u64,
        nap: Duration,
        ready: &mut impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        self.doorbell.clear()?;
        self.sleeper.announce(&*self.window, wake_on);
        if let Some(found) = ready()? {
            return Ok(Some(found));
        }
        let peer = self.check().and_then(|()| {
            let wake = self.doorbell.wait(nap)?;
            self.check_peer(wake)
        });
        // What the peer did before it went still counts, so its state is looked at first.
        match ready()? {
            Some(found) => Ok(Some(found)),
            None => peer.map(|()| None),
        }
    }
}

impl Drop for WindowEnd {
    fn drop(&mut self) {
        // A child of a process that forked is not the one that opened the link, and must not close it.
        if std::process::id() != self.process {
            return;
        }
        let own_state = match self.side {
            Side::Guest => word::GUEST_STATE,
            Side::Host => word::HOST_STATE,
        };
        self.window.drain_writes();
        self.window.store(own_state, STATE_CLOSED);
        let _ = self.wake(|_| true);
    }
}
