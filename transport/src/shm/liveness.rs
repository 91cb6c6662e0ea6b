//! How a host process that has stopped is told from one that is busy.
//!
//! A session's thread may compute for minutes, so it cannot beat for itself: one thread of the process counts
//! up the heartbeat word of every window, once a second. A guest that waits and sees no change for
//! [`STALL`] gives the host up. (A host that died is noticed at once, by other means.)
//!
//! A host cannot see a process inside a virtual machine die. There the guest beats too, in a word of its own, and the
//! host gives up a guest that has been still for as long as its user says.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::layout::word;
use super::memory::{Memory, Window};

/// Time between beats.
pub const PERIOD: Duration = Duration::from_secs(1);

/// A heart that does not beat for so long has stopped.
pub const STALL: Duration = Duration::from_secs(10);

/// A window with a heart, and which word of it beats.
type Heart = (Weak<Window>, usize);

/// The hearts of this process. `None`: there is no beating thread.
static BEATING: Mutex<Option<Vec<Heart>>> = Mutex::new(None);

/// Lets the host's heart beat in the window for as long as the window lives.
pub fn start(window: &Arc<Window>) -> std::io::Result<()> {
    start_at(window, word::HEARTBEAT)
}

/// Lets the heart beat in the word at `offset`, for as long as the window lives.
pub fn start_at(window: &Arc<Window>, offset: usize) -> std::io::Result<()> {
    let mut beating = BEATING.lock().unwrap_or_else(|e| e.into_inner());
    let heart = (Arc::downgrade(window), offset);
    match &mut *beating {
        Some(hearts) => hearts.push(heart),
        None => {
            std::thread::Builder::new()
                .name("vgpu-heartbeat".into())
                .spawn(beat)?;
            *beating = Some(vec![heart]);
        }
    }
    Ok(())
}

fn beat() {
    for count in 1.. {
        {
            let mut beating = BEATING.lock().unwrap_or_else(|e| e.into_inner());
            let Some(hearts) = &mut *beating else { return };
            hearts.retain(|(window, offset)| match window.upgrade() {
                Some(window) => {
                    window.store(*offset, count);
                    // In write-combined memory a lone store may otherwise stay in the processor.
                    window.full_fence();
                    true
                }
                None => false,
            });
            if hearts.is_empty() {
                *beating = None;
                return;
            }
        }
        std::thread::sleep(PERIOD);
    }
}

/// The peer's view of a heart.
#[derive(Debug)]
pub struct Liveness {
    word: usize,
    limit: Duration,
    last: u64,
    looked: Instant,
    still: Duration,
}

impl Liveness {
    /// The host's heart, which beats now, and may be still for up to `limit` ([`STALL`], unless there is a reason).
    pub fn new(window: &Window, limit: Duration) -> Liveness {
        Liveness::at(window, word::HEARTBEAT, limit)
    }

    /// The heart whose word is at `word`.
    pub fn at(window: &Window, word: usize, limit: Duration) -> Liveness {
        Liveness {
            word,
            limit,
            last: window.load(word),
            looked: Instant::now(),
            still: Duration::ZERO,
        }
    }

    /// How long the heart has been still, as far as we were awake to see, if that is too long.
    pub fn has_stopped(&mut self, window: &Window) -> Option<Duration> {
        let still = self.still_for(window);
        (still >= self.limit).then_some(still)
    }

    fn still_for(&mut self, window: &Window) -> Duration {
        let (now, beat) = (Instant::now(), window.load(self.word));
        if beat != self.last {
            self.last = beat;
            self.still = Duration::ZERO;
        } else {
            // Whatever kept us from looking (a stopped process, a paused machine) may have kept the host
            // from beating: no more than a beat counts for one look.
            self.still += (now - self.looked).min(PERIOD);
        }
        self.looked = now;
        self.still
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heart_beats_until_its_window_goes() {
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
        while gone.upgrade().is_some() || BEATING.lock().unwrap().is_some() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn stillness_counts_by_looks() {
        let window = Window::anonymous(4096).unwrap();
        let mut liveness = Liveness::new(&window, STALL);
        // We were stopped for an hour: that is one look.
        liveness.looked -= Duration::from_secs(3600);
        assert_eq!(liveness.still_for(&window), PERIOD);
        liveness.looked -= Duration::from_secs(3600);
        assert_eq!(liveness.still_for(&window), 2 * PERIOD);
        window.store(word::HEARTBEAT, 9);
        assert_eq!(liveness.still_for(&window), Duration::ZERO);
        liveness.looked -= Duration::from_millis(300);
        let still = liveness.still_for(&window);
        assert!(still >= Duration::from_millis(300) && still <= PERIOD);
    }
}
