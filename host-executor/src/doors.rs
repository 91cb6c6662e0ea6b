//! The threads that let guests in.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::error;

use crate::session::Stop;

/// How often a door with nobody at it looks whether to stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long a door stays shut after an error, so that one that lasts does not fill the log.
const BACK_OFF: Duration = Duration::from_secs(1);

/// A door that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DoorId(u64);

/// Doors that are open.
#[derive(Default)]
pub(crate) struct Doors {
    open: BTreeMap<u64, (Stop, JoinHandle<()>)>,
    last: u64,
}

impl Doors {
    /// Calls `knock`, which waits for a guest for as long as it is told and lets it in, until the door is closed or `stop`
    /// is asked for.
    pub(crate) fn open(
        &mut self,
        stop: Stop,
        mut knock: impl FnMut(Duration) -> io::Result<()> + Send + 'static,
    ) -> io::Result<DoorId> {
        let closed = Stop::new();
        self.last += 1;
        let is_closed = closed.clone();
        let thread = thread::Builder::new()
            .name(format!("vgpu-door-{}", self.last))
            .spawn(move || {
                while !stop.is_asked() && !is_closed.is_asked() {
                    if let Err(error) = knock(PATIENCE) {
                        error!("no guest can come in for {BACK_OFF:?}: {error}");
                        thread::sleep(BACK_OFF);
                    }
                }
            })?;
        self.open.insert(self.last, (closed, thread));
        Ok(DoorId(self.last))
    }

    /// Lets nobody in through this door any more.
    pub(crate) fn close(&mut self, door: DoorId) {
        if let Some((closed, thread)) = self.open.remove(&door.0) {
            closed.ask();
            join(thread);
        }
    }

    /// The same for all of them.
    pub(crate) fn close_all(&mut self) {
        let all = std::mem::take(&mut self.open);
        all.values().for_each(|(closed, _)| closed.ask());
        all.into_values().for_each(|(_, thread)| join(thread));
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        error!("a listener has panicked, a bug of the host");
    }
}
