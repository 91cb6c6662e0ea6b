//! The common part of both ends of a link over a window: waiting, waking, and detection of a dead
//! peer.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::end::Counters;
use super::side::Side;
use super::slow_wait::SlowWait;
use super::window_state::WindowState;
use crate::error::{LinkError, LinkViolation};
use crate::fork::Owner;
use crate::shm::doorbell::{Doorbell, Wake};
use crate::shm::layout::{Layout, STATE_CLOSED, STATE_OPEN, word};
use crate::shm::liveness::{Liveness, Silence};
use crate::shm::memory::{MapError, SharedWords, Window};
use crate::shm::notify::{MAX_SLEEP, SleepWords, Sleeper, SpinBudget, Waker};
use crate::shm::ring::RingArea;

/// The wake-on values of a host. A guest stores the number of the request whose retirement it
/// awaits, and every message wakes the guest.
pub(super) const WAKE_ON_REQUEST: u64 = 1;
/// The host waits for room in the completion ring.
pub(super) const WAKE_ON_ROOM: u64 = 2;

/// The period of the checks for a dead peer by an end that does not wait.
const CHECK_PERIOD: Duration = Duration::from_millis(10);

const GUEST_SLEEP: SleepWords = SleepWords {
    sleeping: word::GUEST_SLEEPING,
    wake_on: word::GUEST_WAKE_ON,
};
const HOST_SLEEP: SleepWords = SleepWords {
    sleeping: word::HOST_SLEEPING,
    wake_on: word::HOST_WAKE_ON,
};

/// The condition that an end waits for. Each has its own spin budget.
#[derive(Debug, Clone, Copy)]
pub(super) enum Waiting {
    /// A message from the peer.
    Message = 0,
    /// The peer's progress with the messages of this end.
    Progress = 1,
}

/// The common state of a guest's end and a host's end.
pub(super) struct WindowEnd {
    window: Arc<Window>,
    epoch: u64,
    doorbell: Box<dyn Doorbell>,
    sleeper: Sleeper,
    waker: Waker,
    /// One budget for each [`Waiting`].
    spin: [SpinBudget; 2],
    side: Side,
    /// The observer of the peer's heartbeat, on a link where the peer has one.
    liveness: Option<Liveness>,
    /// The time of the last check for a dead peer.
    checked: Instant,
    /// Lines about long waits, of a guest.
    slow_wait: SlowWait,
    /// The first error, which is final.
    error: Option<LinkError>,
    /// The process that has opened the link.
    owner: Owner,
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
            checked: Instant::now(),
            slow_wait: SlowWait::default(),
            error: None,
            owner: Owner::current(),
            counters: Counters::default(),
        }
    }

    /// How long the peer has had no heartbeat, on a link where the peer has one.
    pub(super) fn silence(&self) -> Option<Silence> {
        self.liveness.as_ref().map(Liveness::silence)
    }

    /// Stores the first error and returns it.
    pub(super) fn fail(&mut self, error: LinkError) -> LinkError {
        // A removed device has other bytes than a host would write: zeros under an emulator, ones
        // on real buses.
        let is_removed = || self.side == Side::Guest && !self.is_current();
        let error = match error {
            LinkError::PeerMisbehaved(_) if is_removed() => LinkError::Closed,
            error => error,
        };
        self.error.get_or_insert(error).clone()
    }

    /// The stored error, unless it is [`LinkError::Closed`]: an end may still read the messages
    /// that the peer sent before it closed the link.
    pub(super) fn check_rules(&self) -> Result<(), LinkError> {
        match &self.error {
            None | Some(LinkError::Closed) => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Checks the stored error and the peer's state word.
    pub(super) fn check(&mut self) -> Result<(), LinkError> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let is_open = match self.side {
            Side::Guest => self.window.load(word::HOST_STATE) == STATE_OPEN,
            // The state is STATE_NEW before the guest has opened the link.
            Side::Host => self.window.load(word::GUEST_STATE) != STATE_CLOSED,
        };
        if is_open {
            Ok(())
        } else {
            Err(self.fail(LinkError::Closed))
        }
    }

    /// [`check`](WindowEnd::check), and that no other session has begun in the same memory. A guest
    /// calls this before it publishes: a program that was stopped for long may have lost its slot.
    ///
    /// The check and what the guest writes after it are two steps. A program that is stopped
    /// between them and loses its slot meanwhile writes into the window of the next program of its
    /// machine when it goes on: a payload or one request. It checks again before it writes more
    /// or believes an answer. The host trusts nothing that a window contains.
    pub(super) fn check_session(&mut self) -> Result<(), LinkError> {
        self.check()?;
        self.check_epoch()
    }

    /// Checks that no other session has begun in the same memory. What a guest reads there counts
    /// only if this holds afterwards, also if the host has ended.
    pub(super) fn check_epoch(&mut self) -> Result<(), LinkError> {
        match self.is_current() {
            true => Ok(()),
            false => Err(self.fail(LinkError::Closed)),
        }
    }

    fn is_current(&self) -> bool {
        self.window.load(word::EPOCH) == self.epoch
    }

    /// [`check`](WindowEnd::check), and once per [`CHECK_PERIOD`] the doorbell and the heartbeat.
    pub(super) fn check_peer_alive(&mut self) -> Result<(), LinkError> {
        self.check()?;
        if self.checked.elapsed() < CHECK_PERIOD {
            return Ok(());
        }
        self.checked = Instant::now();
        let peer = self
            .doorbell
            .wait(Duration::ZERO)
            .and_then(|wake| self.check_wake(wake));
        peer.map_err(|e| self.fail(e))
    }

    /// Checks for a dead peer after a wait.
    fn check_wake(&mut self, wake: Wake) -> Result<(), LinkError> {
        // The epoch changes when another session begins in the same memory.
        if wake == Wake::Evicted {
            return Err(LinkError::Evicted);
        }
        if wake == Wake::PeerGone || !self.is_current() {
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

    /// Wakes the peer after a publication, if `is_awaited` accepts the peer's wake-on value.
    pub(super) fn wake(&mut self, is_awaited: impl FnOnce(u64) -> bool) -> Result<(), LinkError> {
        if !self.waker.must_ring(&*self.window, is_awaited) {
            return Ok(());
        }
        self.counters.kicks += 1;
        self.doorbell.ring().map_err(|e| self.fail(e))
    }

    /// Waits until `ready` returns a value. `None` when `timeout` has passed.
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
        self.spin[waiting as usize].adapt(began.elapsed());
        Ok(found)
    }

    /// Calls `ready` in a loop for at most `budget`.
    fn spin<T>(
        &mut self,
        began: Instant,
        budget: Duration,
        ready: &mut impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        /// After this time the loop yields the processor to other threads. One of them may be the
        /// peer.
        const YIELD_AFTER: Duration = Duration::from_micros(2);
        /// A yield without another runnable thread takes a fraction of this time.
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
                // A thread that yields waits for the other threads' time slices. A thread that
                // sleeps runs soon after its wake-up.
                break;
            }
            let before = began.elapsed();
            if before > YIELD_AFTER {
                std::thread::yield_now();
            }
            spun = began.elapsed();
            is_crowded = spun - before > CROWDED;
        }
        Ok(None)
    }

    /// Sleeps until `ready` returns a value or `timeout` has passed.
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
            let once = left.map_or(MAX_SLEEP, |left| left.min(MAX_SLEEP));
            let found = self.sleep_once(wake_on, once, ready);
            if self.side == Side::Guest {
                let state = || WindowState::read(&self.window).to_string();
                self.slow_wait.check(began.elapsed(), state);
            }
            self.sleeper.awake(&*self.window);
            if let Some(found) = found.map_err(|e| self.fail(e))? {
                return Ok(Some(found));
            }
        }
    }

    /// Steps S1 to S5 of the [sleep protocol](crate::shm::notify).
    fn sleep_once<T>(
        &mut self,
        wake_on: u64,
        timeout: Duration,
        ready: &mut impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        self.doorbell.clear()?;
        self.sleeper.announce(&*self.window, wake_on);
        if let Some(found) = ready()? {
            return Ok(Some(found));
        }
        let peer = self.check().and_then(|()| {
            let wake = self.doorbell.wait(timeout)?;
            self.check_wake(wake)
        });
        // The peer's last publication counts even if the peer has died, so `ready` comes before the
        // error.
        match ready()? {
            Some(found) => Ok(Some(found)),
            None => peer.map(|()| None),
        }
    }
}

impl Drop for WindowEnd {
    fn drop(&mut self) {
        // A forked child has a copy of this end, and must not close the link of its parent.
        if !self.owner.is_current() {
            return;
        }
        // A guest that has lost its slot must not close the link of the guest that has it now.
        if self.side == Side::Guest && !self.is_current() {
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

/// The offsets of the submission ring.
pub(super) fn submission_ring(layout: &Layout) -> RingArea {
    RingArea {
        data: layout.submission(),
        tail: word::SUBMISSION_TAIL,
        head: word::SUBMISSION_HEAD,
    }
}

/// The offsets of the completion ring.
pub(super) fn completion_ring(layout: &Layout) -> RingArea {
    RingArea {
        data: layout.completion(),
        tail: word::COMPLETION_TAIL,
        head: word::COMPLETION_HEAD,
    }
}

/// Appends the message at `range` of the window to `message`.
pub(super) fn read_message(window: &Window, range: &Range<usize>, message: &mut Vec<u8>) {
    let begin = message.len();
    message.resize(begin + range.len(), 0);
    window.read(range.start, &mut message[begin..]);
}

/// Counts one received message of `bytes` bytes with its payload.
pub(super) fn count_in(counters: &mut Counters, bytes: usize) {
    counters.messages_in += 1;
    counters.bytes_in += bytes as u64;
}

/// The error for a message above the limits.
pub(super) fn too_large(message: usize, payload: usize) -> LinkError {
    LinkError::TooLarge {
        len: message,
        payload,
    }
}

/// The error of a link whose window cannot be mapped.
pub(super) fn unmapped(error: MapError) -> LinkError {
    LinkError::PeerMisbehaved(match error {
        MapError::System { what, error } => return LinkError::System { what, error },
        MapError::NotSealed { seals } => LinkViolation::FileNotSealed { seals },
        MapError::OtherSize { found, said } => LinkViolation::FileSize { found, said },
        MapError::OutOfFile { offset, len, size } => LinkViolation::OutOfFile { offset, len, size },
    })
}
