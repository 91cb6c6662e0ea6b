//! How a host process that has stopped is told from one that is busy.
//!
//! A session's thread may compute for minutes, so it cannot beat for itself: one thread of the process counts
//! up the heartbeat word of every window, once a second. A guest that waits and sees no change for
//! [`STALL`] gives the host up. (A host that died is noticed at once, by other means.)
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::layout::word;
use super::memory::{Memory, Window};

/// Time between beats.
pub const PERIOD: Duration = Duration::from_secs(1);

/// A heart that does not beat for so long has stopped.
pub const STALL: Duration = Duration::from_secs(10);

/// The windows with a heart in this process. `None`: there is no beating thread.
static BEATING: Mutex<Option<Vec<Weak<Window>>>> = Mutex::new(None);

/// Lets the window's heart beat for as long as the window lives.
pub fn start(window: &Arc<Window>) -> std::io::Result<()> {
    let mut beating = BEATING.lock().unwrap_or_else(|e| e.into_inner());
    match &mut *beating {
        Some(windows) => windows.push(Arc::downgrade(window)),
        None => {
            std::thread::Builder::new()
                .name("vgpu-heartbeat".into())
                .spawn(beat)?;
            *beating = Some(vec![Arc::downgrade(window)]);
        }
    }
    Ok(())
}

fn beat() {
    for count in 1.. {
        {
            let mut beating = BEATING.lock().unwrap_or_else(|e| e.into_inner());
            let Some(windows) = &mut *beating else { return };
            windows.retain(|window| match window.upgrade() {
                Some(window) => {
                    window.store(word::HEARTBEAT, count);
                    true
                }
                None => false,
            });
            if windows.is_empty() {
                *beating = None;
                return;
            }
        }
        std::thread::sleep(PERIOD);
    }
}

/// The guest's view of a heart.
#[derive(Debug)]
pub struct Pulse {
    last: u64,
    looked: Instant,
    still: Duration,
}

impl Pulse {
    /// A heart that beats now.
    pub fn new(window: &Window) -> Pulse {
        Pulse {
            last: window.load(word::HEARTBEAT),
            looked: Instant::now(),
            still: Duration::ZERO,
        }
    }

    /// How long the heart has been still, as far as we were awake to see.
    pub fn still_for(&mut self, window: &Window) -> Duration {
        let (now, beat) = (Instant::now(), window.load(word::HEARTBEAT));
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
