//! The words of a window, for diagnosis.

use std::fmt;

use crate::shm::layout::word;
use crate::shm::memory::{SharedWords, Window};

/// The words of a window at about one time. Both sides write them, and a hostile guest can write
/// anything into its own: the values are for people, and nothing is computed from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowState {
    /// Bytes that the guest has put into the submission ring, and bytes that the host has taken.
    pub submission: (u64, u64),
    /// Bytes that the host has put into the completion ring, and bytes that the guest has taken.
    pub completion: (u64, u64),
    /// The last request that the host has finished.
    pub retired: u64,
    /// Sleep number (0: awake) and awaited condition of the guest, and those of the host.
    pub sleep: [(u64, u64); 2],
    /// State and heartbeat of the guest, and those of the host.
    pub alive: [(u64, u64); 2],
}

impl WindowState {
    /// Reads the words.
    pub fn read(window: &Window) -> WindowState {
        let words = |one, other| (window.load(one), window.load(other));
        WindowState {
            submission: words(word::SUBMISSION_TAIL, word::SUBMISSION_HEAD),
            completion: words(word::COMPLETION_TAIL, word::COMPLETION_HEAD),
            retired: window.load(word::RETIRED),
            sleep: [
                words(word::GUEST_SLEEPING, word::GUEST_WAKE_ON),
                words(word::HOST_SLEEPING, word::HOST_WAKE_ON),
            ],
            alive: [
                words(word::GUEST_STATE, word::GUEST_HEARTBEAT),
                words(word::HOST_STATE, word::HEARTBEAT),
            ],
        }
    }
}

impl fmt::Display for WindowState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (put, taken) = self.submission;
        let (answered, received) = self.completion;
        write!(
            f,
            "requests put {put} taken {taken}, replies put {answered} taken {received} (bytes), \
             retired {}",
            self.retired
        )?;
        for (side, at) in [("guest", 0), ("host", 1)] {
            let ((sleeping, wake_on), (state, heartbeat)) = (self.sleep[at], self.alive[at]);
            write!(f, "; {side}: ")?;
            match sleeping {
                0 => write!(f, "awake")?,
                number => write!(f, "sleep {number} until {wake_on}")?,
            }
            write!(f, ", state {state}, heartbeat {heartbeat}")?;
        }
        Ok(())
    }
}
