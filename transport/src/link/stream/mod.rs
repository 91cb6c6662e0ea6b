//! The link over a stream of bytes: TCP with TLS to another machine, vsock out of a virtual machine without a window.
//!
//! The messages are those of every link; each travels in a frame:
//!
//! ```text
//!  0 kind | 4 message bytes | 8 payload bytes | 12 zero | 16 number | 24 message, payload
//! ```
//!
//! | kind | from | number |
//! |---|---|---|
//! | request | guest | of the request |
//! | reply | host | of the last request finished with |
//! | retired | host | of the last request finished with; no message |
//! | beat | host | 0; no message: the process is alive, whatever it computes |
//!
//! A `retired` goes out when the host has nothing else to do, so that a stream of requests is not
//! answered by a stream of notices. A guest that waits and hears nothing for [`STALL`] gives the host up.
#![forbid(unsafe_code)]

mod channel;
mod core;
pub mod tcp;
pub mod tls;
pub mod vsock;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use self::core::{Core, Frame, Kind};
use super::{Counters, GuestEnd, HostEnd, Incoming, LinkError};
use crate::bytes::{Bytes, BytesMut};
use crate::shm::liveness::{PERIOD, STALL};
use crate::wire::{MAX_MESSAGE, MAX_PAYLOAD};

pub use channel::{Channel, Plain};

/// Bytes on their way out before a sender waits.
const HIGH_WATER: usize = 8 << 20;

/// How long to wait at most before looking whether the peer lives.
const LOOK: Duration = Duration::from_millis(200);

/// How long a host waits for a guest to take its replies.
const GUEST_STALL: Duration = Duration::from_secs(60);

type Shared = Arc<Mutex<Core>>;

fn lock(core: &Shared) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The guest's end.
pub struct StreamGuest {
    core: Shared,
    sent: u64,
    counters: Counters,
    process: u32,
}

impl StreamGuest {
    /// The guest's end of a stream that is up.
    pub fn new(channel: Box<dyn Channel>) -> StreamGuest {
        StreamGuest {
            core: Arc::new(Mutex::new(Core::new(channel))),
            sent: 0,
            counters: Counters::default(),
            process: std::process::id(),
        }
    }

    /// Moves bytes both ways until `done` is content.
    fn pump_until<T>(
        &mut self,
        mut done: impl FnMut(&mut Core) -> Option<T>,
    ) -> Result<T, LinkError> {
        let mut heard = Instant::now();
        loop {
            let mut core = lock(&self.core);
            // What came before the end of the stream still counts.
            let pumped = core.pump();
            if core.take_heard() {
                heard = Instant::now();
            }
            if let Some(found) = done(&mut core) {
                return Ok(found);
            }
            pumped?;
            if heard.elapsed() > STALL {
                let seconds = STALL.as_secs();
                return Err(core.fail(LinkError::Stalled { seconds }));
            }
            let wait = core.waiting();
            drop(core);
            self.counters.sleeps += 1;
            wait.wait(LOOK)?;
        }
    }
}

impl GuestEnd for StreamGuest {
    fn send(&mut self, message: &[u8], payload: Bytes<'_>) -> Result<u64, LinkError> {
        if message.len() > MAX_MESSAGE || payload.len() > MAX_PAYLOAD {
            return Err(LinkError::TooLarge {
                len: message.len(),
                payload: payload.len(),
            });
        }
        let number = self.sent + 1;
        {
            let mut core = lock(&self.core);
            core.check()?;
            core.push(Kind::Request, number, message, payload.len(), |room| {
                payload.copy_to(room);
            });
            core.pump()?;
        }
        self.sent = number;
        self.counters.messages_out += 1;
        self.counters.bytes_out += (message.len() + payload.len()) as u64;
        self.pump_until(|core| (core.unsent() < HIGH_WATER).then_some(()))?;
        Ok(number)
    }

    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        mut payload: BytesMut<'_>,
    ) -> Result<usize, LinkError> {
        self.counters.round_trips += 1;
        let frame = self.pump_until(Core::take_frame)?;
        let (sent, wanted) = (frame.payload().len(), payload.len());
        if sent > wanted {
            return Err(lock(&self.core).fail(LinkError::PeerMisbehaved(format!(
                "a reply with {sent} bytes of payload where at most {wanted} were asked for"
            ))));
        }
        payload
            .reborrow()
            .split_at(sent)
            .0
            .copy_from(Bytes::from(frame.payload()));
        message.extend_from_slice(frame.message());
        self.counters.messages_in += 1;
        self.counters.bytes_in += (frame.message().len() + sent) as u64;
        Ok(sent)
    }

    fn try_receive(&mut self, message: &mut Vec<u8>) -> Result<bool, LinkError> {
        let mut core = lock(&self.core);
        let pumped = core.pump();
        match core.front_payload() {
            Some(0) => {}
            Some(_) => return Ok(false),
            None => return pumped.map(|()| false),
        }
        let Some(frame) = core.take_frame() else {
            return Ok(false);
        };
        message.extend_from_slice(frame.message());
        self.counters.messages_in += 1;
        self.counters.bytes_in += frame.message().len() as u64;
        Ok(true)
    }

    fn retired(&self) -> u64 {
        let mut core = lock(&self.core);
        // A failure is kept, and reported by the next call that can.
        let _ = core.pump();
        core.retired().min(self.sent)
    }

    fn wait_retired(&mut self, request: u64) -> Result<(), LinkError> {
        let request = request.min(self.sent);
        if self.retired() >= request {
            return Ok(());
        }
        self.counters.round_trips += 1;
        self.pump_until(|core| (core.retired() >= request).then_some(()))
    }

    fn is_closed(&mut self) -> bool {
        let mut core = lock(&self.core);
        core.pump().is_err()
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Drop for StreamGuest {
    fn drop(&mut self) {
        // A child of a process that forked is not the one that opened the link, and must not close it.
        if std::process::id() == self.process {
            lock(&self.core).close();
        }
    }
}

/// The host's end.
pub struct StreamHost {
    core: Shared,
    current: Option<Frame>,
    received: u64,
    retired: u64,
    /// The last number that the guest has been told.
    told: u64,
    counters: Counters,
    certificate: Option<Vec<u8>>,
}

impl StreamHost {
    /// The host's end of a stream that is up.
    pub fn new(channel: Box<dyn Channel>) -> std::io::Result<StreamHost> {
        let core = Arc::new(Mutex::new(Core::new(channel)));
        let weak = Arc::downgrade(&core);
        thread::Builder::new()
            .name("vgpu-beat".into())
            .spawn(move || beat(&weak))?;
        Ok(StreamHost {
            core,
            current: None,
            received: 0,
            retired: 0,
            told: 0,
            counters: Counters::default(),
            certificate: None,
        })
    }

    /// The same of a guest that has shown this certificate.
    fn with_certificate(mut self, certificate: Option<Vec<u8>>) -> StreamHost {
        self.certificate = certificate;
        self
    }
}

/// Says once a second that this process lives, for as long as the link does.
fn beat(core: &Weak<Mutex<Core>>) {
    loop {
        thread::sleep(PERIOD);
        let Some(core) = core.upgrade() else { return };
        let mut core = lock(&core);
        if core.check().is_err() {
            return;
        }
        // One that has not gone out yet says as much as two.
        if core.unsent() == 0 {
            core.push(Kind::Beat, 0, &[], 0, |_| {});
        }
        let _ = core.push_out(); // kept, and reported by the next call that can
    }
}

impl HostEnd for StreamHost {
    fn certificate(&self) -> Option<&[u8]> {
        self.certificate.as_deref()
    }

    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        self.retire();
        let began = Instant::now();
        let frame = loop {
            let mut core = lock(&self.core);
            let pumped = core.pump();
            if let Some(frame) = core.take_frame() {
                break frame;
            }
            pumped?;
            if self.told < self.retired {
                self.told = self.retired;
                core.push(Kind::Retired, self.retired, &[], 0, |_| {});
                core.push_out()?;
            }
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            let wait = core.waiting();
            drop(core);
            self.counters.sleeps += 1;
            wait.wait(left.min(LOOK))?;
        };
        if frame.number() != self.received + 1 {
            return Err(lock(&self.core).fail(LinkError::PeerMisbehaved(format!(
                "request {} after request {}",
                frame.number(),
                self.received
            ))));
        }
        self.received = frame.number();
        message.extend_from_slice(frame.message());
        let incoming = Incoming {
            request: frame.number(),
            payload_len: frame.payload().len(),
        };
        self.counters.messages_in += 1;
        self.counters.bytes_in += (frame.message().len() + incoming.payload_len) as u64;
        self.current = Some(frame);
        Ok(Some(incoming))
    }

    fn payload(&self) -> Bytes<'_> {
        Bytes::from(self.current.as_ref().map_or(&[][..], Frame::payload))
    }

    fn send_if(
        &mut self,
        message: &[u8],
        payload_len: usize,
        fill: &mut dyn FnMut(BytesMut<'_>) -> bool,
    ) -> Result<bool, LinkError> {
        if message.len() > MAX_MESSAGE || payload_len > MAX_PAYLOAD {
            return Err(LinkError::TooLarge {
                len: message.len(),
                payload: payload_len,
            });
        }
        let began = Instant::now();
        let mut is_pushed = false;
        loop {
            let mut core = lock(&self.core);
            core.check()?;
            if !is_pushed {
                is_pushed = true;
                let is_sent =
                    core.push_if(Kind::Reply, self.retired, message, payload_len, |room| {
                        fill(BytesMut::from(room))
                    });
                if !is_sent {
                    return Ok(false);
                }
                self.told = self.retired;
            }
            core.push_out()?;
            if core.unsent() < HIGH_WATER {
                break;
            }
            if began.elapsed() > GUEST_STALL {
                let seconds = GUEST_STALL.as_secs();
                return Err(core.fail(LinkError::Stalled { seconds }));
            }
            let wait = core.waiting_out();
            drop(core);
            wait.wait(LOOK)?;
        }
        self.counters.messages_out += 1;
        self.counters.bytes_out += (message.len() + payload_len) as u64;
        Ok(true)
    }

    fn retire(&mut self) {
        if let Some(frame) = self.current.take() {
            self.retired = frame.number();
        }
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Drop for StreamHost {
    fn drop(&mut self) {
        let began = Instant::now();
        // The last words, if the guest takes them.
        loop {
            let mut core = lock(&self.core);
            if core.push_out().is_err() || core.unsent() == 0 || began.elapsed() > PERIOD {
                core.close();
                return;
            }
            let wait = core.waiting_out();
            drop(core);
            let _ = wait.wait(LOOK);
        }
    }
}
