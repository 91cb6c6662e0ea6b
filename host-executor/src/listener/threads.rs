//! One accepting thread per listener.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::error;

use crate::stop::StopFlag;

/// How often an idle thread checks its stop flags.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Pause after a failed accept, so that a lasting error does not fill the log.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// Names a listener of a server or a supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerId(u64);

/// The accepting threads of a server or a supervisor.
#[derive(Default)]
pub(crate) struct ListenerThreads {
    running: BTreeMap<u64, (StopFlag, JoinHandle<()>)>,
    last: u64,
}

impl ListenerThreads {
    /// Starts a thread that calls `accept` until the listener is closed or `stop` is set. `accept`
    /// waits for a guest for at most the time it is given, and starts the session of a guest that
    /// came.
    pub(crate) fn start(
        &mut self,
        stop: StopFlag,
        mut accept: impl FnMut(Duration) -> io::Result<()> + Send + 'static,
    ) -> io::Result<ListenerId> {
        let closed = StopFlag::new();
        self.last += 1;
        let is_closed = closed.clone();
        let thread = thread::Builder::new()
            .name(format!("vgpu-listen-{}", self.last))
            .spawn(move || {
                while !stop.is_set() && !is_closed.is_set() {
                    if let Err(error) = accept(POLL_INTERVAL) {
                        error!("cannot accept guests, next try in {ERROR_PAUSE:?}: {error}");
                        thread::sleep(ERROR_PAUSE);
                    }
                }
            })?;
        self.running.insert(self.last, (closed, thread));
        Ok(ListenerId(self.last))
    }

    /// Stops the thread of a listener and drops the listener. Sessions that it has started go on.
    pub(crate) fn close(&mut self, listener: ListenerId) {
        if let Some((closed, thread)) = self.running.remove(&listener.0) {
            closed.set();
            join(thread);
        }
    }

    /// Closes every listener.
    pub(crate) fn close_all(&mut self) {
        let all = std::mem::take(&mut self.running);
        all.values().for_each(|(closed, _)| closed.set());
        all.into_values().for_each(|(_, thread)| join(thread));
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        error!("a listener thread panicked; this is a bug of the host");
    }
}
