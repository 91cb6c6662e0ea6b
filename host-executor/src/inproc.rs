//! An executor inside the guest's own process.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::{error, info_span};
use vgpu_engine::Engine;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::fork::Owner;
use vgpu_transport::link::window::{WindowGuest, inproc_pair};
use vgpu_transport::link::{Counters, GuestEnd, LinkError, LinkWatch, StagingRegion};
use vgpu_transport::shm::memory::Window;

use crate::limits::Limits;
use crate::session::Session;
use crate::stop::StopFlag;

/// Starts an executor for one guest in this process, and returns the guest's end of the link to it.
/// Dropping the end waits until the executor has completed its request and freed all memory.
///
/// # Errors
/// The shared window cannot be made, or no thread can be started.
pub fn start(engine: Arc<dyn Engine>) -> io::Result<Inproc> {
    let (guest, mut host) = inproc_pair().map_err(io::Error::other)?;
    let thread = thread::Builder::new()
        .name("vgpu-inproc".into())
        .spawn(move || {
            let _span = info_span!("session", id = 1, peer = "inproc").entered();
            // The session ends when the guest's end is closed.
            Session::new(1, engine, Limits::default()).run(&mut host, &StopFlag::new());
        })?;
    Ok(Inproc {
        guest,
        _executor: Executor {
            thread: Some(thread),
            owner: Owner::current(),
        },
    })
}

/// The guest's end of a link to an executor in this process.
pub struct Inproc {
    // Fields are dropped in this order: closing `guest` makes the executor stop.
    guest: WindowGuest,
    _executor: Executor,
}

impl GuestEnd for Inproc {
    fn send(&mut self, message: &[u8], payload: Bytes<'_>) -> Result<u64, LinkError> {
        self.guest.send(message, payload)
    }

    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        payload: BytesMut<'_>,
    ) -> Result<usize, LinkError> {
        self.guest.receive(message, payload)
    }

    fn receive_within(
        &mut self,
        message: &mut Vec<u8>,
        limit: Duration,
    ) -> Result<bool, LinkError> {
        self.guest.receive_within(message, limit)
    }

    fn try_receive(&mut self, message: &mut Vec<u8>) -> Result<bool, LinkError> {
        self.guest.try_receive(message)
    }

    fn retired(&self) -> u64 {
        self.guest.retired()
    }

    fn wait_retired(&mut self, request: u64) -> Result<(), LinkError> {
        self.guest.wait_retired(request)
    }

    fn alloc_staging(&mut self, len: usize) -> Option<StagingRegion> {
        self.guest.alloc_staging(len)
    }

    fn free_staging(&mut self, staging: StagingRegion) {
        self.guest.free_staging(staging);
    }

    fn send_staged(&mut self, message: &[u8], payload: Range<usize>) -> Result<u64, LinkError> {
        self.guest.send_staged(message, payload)
    }

    fn receive_shared(&mut self, size: u64) -> Result<Window, LinkError> {
        self.guest.receive_shared(size)
    }

    fn watch(&self) -> Option<LinkWatch> {
        self.guest.watch()
    }

    fn is_closed(&mut self) -> bool {
        self.guest.is_closed()
    }

    fn counters(&self) -> Counters {
        self.guest.counters()
    }
}

/// The thread of the session. Dropping this waits for the thread.
struct Executor {
    thread: Option<JoinHandle<()>>,
    owner: Owner,
}

impl Drop for Executor {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        // The child of a fork does not have the thread, and would wait forever.
        if self.owner.is_current() && thread.join().is_err() {
            error!("the executor in this process panicked; this is a bug of vgpu");
        }
    }
}
