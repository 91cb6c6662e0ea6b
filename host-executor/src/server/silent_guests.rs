//! Programs of a virtual machine that have no heartbeat any more.
//!
//! The host does not see a program in a virtual machine end. The program's session ends after a
//! time without a heartbeat that is long enough for a paused machine. When another program of the
//! same machine needs memory, nobody has paused the machine, and such programs lose their sessions
//! at once: after a reboot of the guest, the first model fits.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::warn;
use vgpu_transport::shm::liveness::{ALIVE, PERIOD};

use super::shared::{Entry, ServerState};
use crate::peer::Peer;
use crate::session::Reclaim;
use crate::stop::StopReason;

/// How long a session waits for the end of others. A session checks every 100 ms whether it must
/// end, and a graph ends at its next preemption point.
const MAX_END_WAIT: Duration = Duration::from_secs(2);

/// The other programs of a guest's virtual machine.
pub(super) struct SilentGuests {
    shared: Arc<ServerState>,
    /// The session that needs memory, and the index of its device.
    id: u64,
    device: usize,
    machine: String,
}

impl SilentGuests {
    /// Those beside session `id` of `peer` on the same device, whose memory another device does not
    /// have. `None` if the host sees the end of each of their programs.
    pub(super) fn of(
        shared: &Arc<ServerState>,
        id: u64,
        device: usize,
        peer: &Peer,
    ) -> Option<Box<dyn Reclaim>> {
        let machine = peer.virtual_machine()?;
        let shared = Arc::clone(shared);
        Some(Box::new(SilentGuests {
            shared,
            id,
            device,
            machine,
        }))
    }

    fn is_silent(&self, id: u64, entry: &Entry) -> bool {
        let silence = entry.silence.as_ref();
        id != self.id
            && entry.device == self.device
            && silence.is_some_and(|silence| silence.lasts() >= ALIVE)
            && entry.peer.virtual_machine().as_ref() == Some(&self.machine)
    }
}

impl Reclaim for SilentGuests {
    fn bytes(&self) -> u64 {
        let sessions = self.shared.sessions();
        let silent = { sessions.iter() }.filter(|(id, entry)| self.is_silent(**id, entry));
        silent
            .map(|(_, entry)| entry.counters.buffer_bytes.get())
            .fold(0, u64::saturating_add)
    }

    fn reclaim(&self) -> bool {
        let mut sessions = self.shared.sessions();
        if !sessions
            .iter()
            .any(|(&id, entry)| self.is_silent(id, entry))
        {
            return false;
        }
        // All programs of a machine that was paused are silent until their next heartbeat.
        let end = Instant::now() + 2 * PERIOD;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            sessions = sessions.wait_timeout(&self.shared.changed, left);
        }
        let silent: Vec<u64> = { sessions.iter() }
            .filter(|(id, entry)| self.is_silent(**id, entry))
            .map(|(&id, entry)| {
                entry.stop.set_for(StopReason::Evicted);
                id
            })
            .collect();
        let end = Instant::now() + MAX_END_WAIT;
        while silent.iter().any(|id| sessions.contains_key(id)) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            sessions = sessions.wait_timeout(&self.shared.changed, left);
        }
        drop(sessions);
        if !silent.is_empty() {
            warn!(
                "{} has no memory left, so the sessions {silent:?} of its programs without a \
                 heartbeat are ended",
                self.machine
            );
        }
        !silent.is_empty()
    }
}
