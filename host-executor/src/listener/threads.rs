//! One accepting thread per listener.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::error;
use vgpu_transport::shm::doorbell::new_eventfd;

use super::guest::ListeningSocket;
use super::socket_watch::LOOK_INTERVAL;
use super::wait::wait_for_either;
use crate::stop::StopFlag;

/// How often a thread asks a listener that waits for more than one socket.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Pause after a failed accept, so that a lasting error does not fill the log.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// Names a listener of a server or a supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerId(u64);

/// The accepting threads of a server or a supervisor.
#[derive(Default)]
pub(crate) struct ListenerThreads {
    running: BTreeMap<u64, ListenerThread>,
    last: u64,
}

struct ListenerThread {
    closed: StopFlag,
    /// An eventfd that wakes the thread if it waits for a socket.
    wake: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

impl ListenerThreads {
    /// Starts a thread that calls `accept` until the listener is closed or `stop` is set. `accept`
    /// waits for a guest for at most the time it is given, and starts the session of a guest that
    /// came. It is also called each [`LOOK_INTERVAL`] in which no guest comes.
    ///
    /// # Errors
    /// No thread or no eventfd.
    pub(crate) fn start<L: ListeningSocket>(
        &mut self,
        stop: StopFlag,
        mut listener: L,
        mut accept: impl FnMut(&mut L, Duration) -> io::Result<()> + Send + 'static,
    ) -> io::Result<ListenerId> {
        let closed = StopFlag::new();
        let wake = Arc::new(new_eventfd().map_err(io::Error::other)?);
        self.last += 1;
        let (is_closed, is_woken) = (closed.clone(), Arc::clone(&wake));
        let thread = thread::Builder::new()
            .name(format!("vgpu-listen-{}", self.last))
            .spawn(move || {
                while !stop.is_set() && !is_closed.is_set() {
                    let accepted = match listener.listening_socket() {
                        Some(socket) => wait_for_either(socket, is_woken.as_fd(), LOOK_INTERVAL)
                            .and_then(|()| accept(&mut listener, Duration::ZERO)),
                        None => accept(&mut listener, POLL_INTERVAL),
                    };
                    if let Err(error) = accepted {
                        error!("cannot accept guests, next try in {ERROR_PAUSE:?}: {error}");
                        thread::sleep(ERROR_PAUSE);
                    }
                }
            })?;
        let thread = ListenerThread {
            closed,
            wake,
            thread,
        };
        self.running.insert(self.last, thread);
        Ok(ListenerId(self.last))
    }

    /// Stops the thread of a listener and drops the listener. Sessions that it has started go on.
    pub(crate) fn close(&mut self, listener: ListenerId) {
        if let Some(listener) = self.running.remove(&listener.0) {
            listener.end();
            listener.join();
        }
    }

    /// Closes every listener.
    pub(crate) fn close_all(&mut self) {
        let all = std::mem::take(&mut self.running);
        all.values().for_each(ListenerThread::end);
        all.into_values().for_each(ListenerThread::join);
    }
}

impl ListenerThread {
    /// Makes the thread end.
    fn end(&self) {
        self.closed.set();
        // Fails only if the thread has been woken more often than anyone can count.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }

    fn join(self) {
        if self.thread.join().is_err() {
            error!("a listener thread panicked; this is a bug of the host");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    struct Silent(UnixListener);

    impl ListeningSocket for Silent {
        fn listening_socket(&self) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }
    }

    /// A thread whose listener nobody connects to sleeps until the next look at the socket file, or
    /// until its end.
    #[test]
    fn an_idle_thread_sleeps_until_its_listener_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let silent = Silent(UnixListener::bind(folder.path().join("socket")).unwrap());
        let calls = Arc::new(AtomicU32::new(0));
        let mut threads = ListenerThreads::default();
        let counts = Arc::clone(&calls);
        let start = std::time::Instant::now();
        let id = threads.start(StopFlag::new(), silent, move |_, _| {
            counts.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        thread::sleep(3 * POLL_INTERVAL);
        threads.close(id.unwrap());
        let looks = start.elapsed().as_millis() / LOOK_INTERVAL.as_millis();
        let calls = u128::from(calls.load(Ordering::Relaxed));
        // The end of the thread wakes it.
        assert!(calls <= looks + 1, "{calls} calls");
    }
}
