//! Heartbeats: telling a stopped process from a busy one.
//!
//! The thread of a session may compute for minutes and cannot send a heartbeat meanwhile. One
//! thread of the host process therefore increments the heartbeat word of every window once a
//! second. A guest that waits and sees no change for [`STALL`] closes the link. The doorbell
//! reports a host process that has died, at once.
//!
//! A host cannot observe the death of a process inside a virtual machine. On that link the guest
//! has a heartbeat word of its own, and the host closes a link without heartbeat after a configured
//! time.
#![forbid(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::layout::{STATE_CLOSED, word};
use super::memory::{SharedWords, Window};
use crate::fork::PerProcess;
use crate::lock::{Guard, lock, try_lock};

/// The period of the heartbeat.
pub const PERIOD: Duration = Duration::from_secs(1);

/// A peer without a heartbeat for this long has stopped.
pub const STALL: Duration = Duration::from_secs(10);

/// A guest without a heartbeat for this long has died, unless the operator says otherwise. A
/// virtual machine may be paused for less. The same on every link whose host cannot see a program
/// end.
pub const SILENCE: Duration = Duration::from_secs(60);

/// A guest with a heartbeat within this time keeps its slot and its memory when another program of
/// its virtual machine needs them.
pub const ALIVE: Duration = Duration::from_secs(3);

/// How long a peer has had no heartbeat, for other threads than that of the link. Clones share the
/// figure.
#[derive(Debug, Clone, Default)]
pub struct Silence(Arc<AtomicU64>);

impl Silence {
    /// The time without a heartbeat, as the link has seen it last.
    pub fn lasts(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }

    /// Publishes the time without a heartbeat.
    pub(crate) fn set(&self, still: Duration) {
        let millis = u64::try_from(still.as_millis()).unwrap_or(u64::MAX);
        self.0.store(millis, Ordering::Relaxed);
    }
}

/// A heartbeat word that this process increments.
#[derive(Debug)]
struct Heartbeat {
    window: Weak<Window>,
    /// The offset of the word in the window.
    offset: usize,
    /// The session that the heartbeat belongs to, by the window's epoch. The heartbeat ends when
    /// the window has another one.
    epoch: Option<u64>,
}

/// The heartbeats of a process.
#[derive(Debug, Default)]
struct Heartbeats {
    /// `None` while the thread does not run.
    all: Option<Vec<Heartbeat>>,
    /// Whether the process ends, so that no guest begins any more.
    ends: bool,
}

/// The heartbeats of this process. A forked child does not have the thread, and starts one of its
/// own.
static HEARTBEATS: PerProcess<Mutex<Heartbeats>> = PerProcess::new();

fn heartbeats() -> Guard<'static, Heartbeats> {
    let heartbeats = HEARTBEATS.get_or_init(Mutex::default);
    lock(heartbeats)
}

/// Starts the host's heartbeat in a window. The heartbeat ends when the window is dropped.
///
/// # Errors
///
/// When the process cannot start another thread.
pub fn start(window: &Arc<Window>) -> io::Result<()> {
    start_at(window, word::HEARTBEAT)
}

/// Starts a heartbeat in the word at `offset` of a window. The heartbeat ends when the window is
/// dropped.
///
/// # Errors
///
/// When the process cannot start another thread.
pub fn start_at(window: &Arc<Window>, offset: usize) -> io::Result<()> {
    add(Heartbeat {
        window: Arc::downgrade(window),
        offset,
        epoch: None,
    })
}

/// Starts the guest's heartbeat in a window. The heartbeat ends when the window is dropped, or when
/// a session with another epoch than `epoch` begins in the same memory.
///
/// # Errors
///
/// When the process cannot start another thread, or [ends](close_guests).
pub fn start_guest(window: &Arc<Window>, epoch: u64) -> io::Result<()> {
    add(Heartbeat {
        window: Arc::downgrade(window),
        offset: word::GUEST_HEARTBEAT,
        epoch: Some(epoch),
    })
}

/// Closes the links of this process whose hosts cannot see that the process ends: each host ends
/// its session at once instead of after [`SILENCE`]. For a process that ends now: no such link can
/// be opened afterwards ([`start_guest`]). Other threads may still use the links, and get the error
/// of a closed link at some time. A forked child has none of its parent's links, and closes none.
///
/// Does nothing in a process without such links. Waits for at most 10 ms for the thread of the
/// heartbeats. Closes nothing if that thread does not run, or if this one has the list already,
/// below a signal handler.
pub fn close_guests() {
    /// The thread of the heartbeats has the list for microseconds, once a second.
    const ATTEMPTS: u32 = 100;
    let Some(all) = HEARTBEATS.get() else { return };
    let found = (0..ATTEMPTS).find_map(|attempt| {
        if attempt > 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        try_lock(all)
    });
    if let Some(mut heartbeats) = found {
        heartbeats.ends = true;
        close(heartbeats.all.iter().flatten());
    }
}

/// Closes the windows of guests among these.
fn close<'a>(heartbeats: impl Iterator<Item = &'a Heartbeat>) {
    for heartbeat in heartbeats {
        let (Some(window), Some(epoch)) = (heartbeat.window.upgrade(), heartbeat.epoch) else {
            continue;
        };
        if window.load(word::EPOCH) == epoch {
            window.drain_writes();
            window.store(word::GUEST_STATE, STATE_CLOSED);
            window.full_fence();
        }
        // The last reference would remove the mapping: other threads end with the process.
        std::mem::forget(window);
    }
}

fn add(heartbeat: Heartbeat) -> io::Result<()> {
    let mut heartbeats = heartbeats();
    if heartbeats.ends && heartbeat.epoch.is_some() {
        return Err(io::Error::other("the process ends"));
    }
    match &mut heartbeats.all {
        Some(all) => all.push(heartbeat),
        None => {
            std::thread::Builder::new()
                .name("vgpu-heartbeat".into())
                .spawn(run)?;
            heartbeats.all = Some(vec![heartbeat]);
        }
    }
    Ok(())
}

/// The heartbeat thread, which ends when no window is left.
fn run() {
    for count in 1.. {
        {
            let mut heartbeats = heartbeats();
            let Some(all) = &mut heartbeats.all else {
                return;
            };
            all.retain(|heartbeat| match heartbeat.window.upgrade() {
                Some(window) => {
                    let epoch = window.load(word::EPOCH);
                    if heartbeat.epoch.is_some_and(|own| own != epoch) {
                        return false;
                    }
                    window.store(heartbeat.offset, count);
                    // Without the fence a store to write-combined memory may stay in the processor.
                    window.full_fence();
                    true
                }
                None => false,
            });
            if all.is_empty() {
                heartbeats.all = None;
                return;
            }
        }
        std::thread::sleep(PERIOD);
    }
}

/// The time without a sign of the peer. Time during which this process did not run does not count.
#[derive(Debug)]
pub(crate) struct StillTime {
    checked: Instant,
    still: Duration,
    silence: Silence,
}

impl StillTime {
    /// No time so far.
    pub(crate) fn new() -> StillTime {
        StillTime {
            checked: Instant::now(),
            still: Duration::ZERO,
            silence: Silence::default(),
        }
    }

    /// The same figure for other threads.
    pub(crate) fn silence(&self) -> Silence {
        self.silence.clone()
    }

    /// Checks the peer. `is_heard` says whether there was a sign since the last check. Returns the
    /// time without one.
    pub(crate) fn check(&mut self, is_heard: bool) -> Duration {
        let now = Instant::now();
        self.still = match is_heard {
            true => Duration::ZERO,
            // A stopped process or a paused machine delays both this check and the peer's
            // heartbeat. One check therefore counts for one period at most.
            false => self.still + (now - self.checked).min(PERIOD),
        };
        self.checked = now;
        self.silence.set(self.still);
        self.still
    }
}

/// The observer of the peer's heartbeat in a window.
#[derive(Debug)]
pub struct Liveness {
    word: usize,
    limit: Duration,
    last: u64,
    still: StillTime,
}

impl Liveness {
    /// Observes the host's heartbeat. The host has stopped after `limit` without a change, usually
    /// [`STALL`].
    pub fn new(window: &Window, limit: Duration) -> Liveness {
        Liveness::at(window, word::HEARTBEAT, limit)
    }

    /// Observes the heartbeat word at offset `word`.
    pub fn at(window: &Window, word: usize, limit: Duration) -> Liveness {
        Liveness {
            word,
            limit,
            last: window.load(word),
            still: StillTime::new(),
        }
    }

    /// How long the peer has had no heartbeat, for other threads.
    pub fn silence(&self) -> Silence {
        self.still.silence()
    }

    /// The time without a heartbeat, if it has reached the limit. Time during which this process
    /// did not run does not count.
    pub fn has_stopped(&mut self, window: &Window) -> Option<Duration> {
        let still = self.still_for(window);
        (still >= self.limit).then_some(still)
    }

    fn still_for(&mut self, window: &Window) -> Duration {
        let beat = window.load(self.word);
        let is_heard = beat != self.last;
        self.last = beat;
        self.still.check(is_heard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::layout::STATE_OPEN;

    #[test]
    fn a_heartbeat_ends_with_its_window() {
        let window = Arc::new(Window::anonymous(4096).unwrap());
        start(&window).unwrap();
        let other = Arc::new(Window::anonymous(4096).unwrap());
        start(&other).unwrap();
        for window in [&window, &other] {
            let before = window.load(word::HEARTBEAT);
            while window.load(word::HEARTBEAT) == before {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        drop(other);
        let gone = Arc::downgrade(&window);
        drop(window);
        while gone.upgrade().is_some() || heartbeats().all.is_some() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn process_that_ends_closes_its_own_guests_only() {
        let [guest, replaced, host] = std::array::from_fn(|_| {
            let window = Arc::new(Window::anonymous(4096).unwrap());
            window.store(word::EPOCH, 7);
            window.store(word::GUEST_STATE, STATE_OPEN);
            window
        });
        let heartbeat = |window, epoch| Heartbeat {
            window: Arc::downgrade(window),
            offset: word::GUEST_HEARTBEAT,
            epoch,
        };
        // A session of another program has begun in the same memory.
        replaced.store(word::EPOCH, 8);
        let own = Some(7);
        let all = [(&guest, own), (&replaced, own), (&host, None)];
        close(all.map(|(window, epoch)| heartbeat(window, epoch)).iter());
        assert_eq!(guest.load(word::GUEST_STATE), STATE_CLOSED);
        assert_eq!(replaced.load(word::GUEST_STATE), STATE_OPEN);
        assert_eq!(host.load(word::GUEST_STATE), STATE_OPEN);
    }

    #[test]
    fn one_check_counts_for_one_period_at_most() {
        let window = Window::anonymous(4096).unwrap();
        let mut liveness = Liveness::new(&window, STALL);
        // This process was stopped for an hour: one check, one period.
        liveness.still.checked -= Duration::from_secs(3600);
        assert_eq!(liveness.still_for(&window), PERIOD);
        liveness.still.checked -= Duration::from_secs(3600);
        assert_eq!(liveness.still_for(&window), 2 * PERIOD);
        window.store(word::HEARTBEAT, 9);
        assert_eq!(liveness.still_for(&window), Duration::ZERO);
        liveness.still.checked -= Duration::from_millis(300);
        let still = liveness.still_for(&window);
        assert!(still >= Duration::from_millis(300) && still <= PERIOD);
    }
}
