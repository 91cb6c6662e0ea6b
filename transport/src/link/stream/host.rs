//! The host's end of a link over a byte stream.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::framing::{Frame, Framing, HIGH_WATER, HOST_QUEUE, Kind, POLL_PERIOD, Shared, lock};
use crate::bytes::{Bytes, BytesMut};
use crate::error::{LinkError, LinkViolation};
use crate::limits::{MAX_MESSAGE, MAX_PAYLOAD};
use crate::link::end::{Counters, HostEnd, Incoming};
use crate::shm::liveness::PERIOD;

/// The time that a host waits for a guest to receive replies.
const GUEST_STALL: Duration = Duration::from_secs(60);

/// The host's end of a link over a byte stream.
pub struct StreamHost {
    framing: Shared,
    current: Option<Frame>,
    received: u64,
    retired: u64,
    /// The last retired request that the guest knows of.
    reported: u64,
    counters: Counters,
    certificates: Vec<Vec<u8>>,
}

impl StreamHost {
    /// The host's end of an open stream.
    ///
    /// # Errors
    ///
    /// When the process cannot start the heartbeat thread.
    pub fn new(channel: Box<dyn Channel>) -> std::io::Result<StreamHost> {
        let framing = Arc::new(Mutex::new(Framing::new(channel, HOST_QUEUE)));
        let weak = Arc::downgrade(&framing);
        thread::Builder::new()
            .name("vgpu-beat".into())
            .spawn(move || send_heartbeats(&weak))?;
        Ok(StreamHost {
            framing,
            current: None,
            received: 0,
            retired: 0,
            reported: 0,
            counters: Counters::default(),
            certificates: Vec::new(),
        })
    }

    /// The same end, for a guest with these verified certificates, in DER.
    pub(super) fn with_certificates(mut self, certificates: Vec<Vec<u8>>) -> StreamHost {
        self.certificates = certificates;
        self
    }
}

/// The heartbeat thread of a link: sends a frame once per [`PERIOD`] until the link ends.
fn send_heartbeats(framing: &Weak<Mutex<Framing>>) {
    loop {
        thread::sleep(PERIOD);
        let Some(framing) = framing.upgrade() else {
            return;
        };
        let mut framing = lock(&framing);
        if framing.check().is_err() {
            return;
        }
        // Unsent bytes prove later that the process runs, as a heartbeat does.
        if framing.unsent() == 0 {
            framing.push(Kind::Heartbeat, 0, &[], 0, |_| {});
        }
        let _ = framing.push_out(); // stored; the next call that returns a result reports it
    }
}

impl HostEnd for StreamHost {
    fn certificates(&self) -> &[Vec<u8>] {
        &self.certificates
    }

    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        self.retire();
        let began = Instant::now();
        let frame = loop {
            let mut framing = lock(&self.framing);
            let pumped = framing.pump();
            if let Some(frame) = framing.take_frame() {
                break frame;
            }
            pumped?;
            if self.reported < self.retired {
                self.reported = self.retired;
                framing.push(Kind::Retired, self.retired, &[], 0, |_| {});
                framing.push_out()?;
            }
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            let wait = framing.waiting();
            drop(framing);
            self.counters.sleeps += 1;
            wait.wait(left.min(POLL_PERIOD))?;
        };
        if frame.number() != self.received + 1 {
            let (number, last) = (frame.number(), self.received);
            let violation = LinkViolation::RequestOrder { number, last };
            return Err(lock(&self.framing).fail(violation.into()));
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

    fn check_guest(&mut self) -> Result<(), LinkError> {
        lock(&self.framing).pump()
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
            let mut framing = lock(&self.framing);
            framing.check()?;
            if !is_pushed {
                is_pushed = true;
                let is_sent =
                    framing.push_if(Kind::Reply, self.retired, message, payload_len, |room| {
                        fill(BytesMut::from(room))
                    });
                if !is_sent {
                    return Ok(false);
                }
                self.reported = self.retired;
            }
            framing.push_out()?;
            if framing.unsent() < HIGH_WATER {
                break;
            }
            if began.elapsed() > GUEST_STALL {
                let seconds = GUEST_STALL.as_secs();
                return Err(framing.fail(LinkError::Stalled { seconds }));
            }
            let wait = framing.waiting_out();
            drop(framing);
            wait.wait(POLL_PERIOD)?;
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
        // Sends the queued replies, if the guest reads them within one period.
        loop {
            let mut framing = lock(&self.framing);
            if framing.push_out().is_err() || framing.unsent() == 0 || began.elapsed() > PERIOD {
                framing.close();
                return;
            }
            let wait = framing.waiting_out();
            drop(framing);
            let _ = wait.wait(POLL_PERIOD);
        }
    }
}
