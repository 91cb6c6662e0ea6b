//! The guest's end of a link over a byte stream.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::framing::{Frame, FrameKind, Framing, HIGH_WATER, POLL_PERIOD, SharedFraming};
use super::heartbeat;
use crate::bytes::{Bytes, BytesMut};
use crate::error::{LinkError, LinkViolation};
use crate::fork::Owner;
use crate::limits::{MAX_MESSAGE, MAX_PAYLOAD};
use crate::link::end::{Counters, GuestEnd};
use crate::link::link_state::LinkWatch;
use crate::link::side::Side;
use crate::link::slow_wait::SlowWait;
use crate::lock::lock;
use crate::shm::liveness::STALL;

/// The guest's end of a link over a byte stream.
pub struct StreamGuest {
    framing: SharedFraming,
    sent: u64,
    slow_wait: SlowWait,
    counters: Counters,
    owner: Owner,
}

impl StreamGuest {
    /// The guest's end of an open stream.
    pub fn new(channel: Box<dyn Channel>) -> StreamGuest {
        StreamGuest {
            framing: Arc::new(Mutex::new(Framing::new(channel, Side::Guest))),
            sent: 0,
            counters: Counters::default(),
            slow_wait: SlowWait::default(),
            owner: Owner::current(),
        }
    }

    /// The same end, with a heartbeat: the host can tell a program that does not ask for anything
    /// from one that has ended together with its machine.
    ///
    /// # Errors
    ///
    /// When the process cannot start the heartbeat thread.
    pub fn with_heartbeat(self) -> std::io::Result<StreamGuest> {
        // The first one goes ahead of the first request.
        lock(&self.framing).push(FrameKind::Heartbeat, 0, &[], 0, |_| {});
        heartbeat::start(&self.framing)?;
        Ok(self)
    }

    /// Moves bytes in both directions until `done` returns a value.
    fn pump_until<T>(
        &mut self,
        mut done: impl FnMut(&mut Framing) -> Option<T>,
    ) -> Result<T, LinkError> {
        loop {
            if let Some(found) = self.pump_within(Duration::MAX, &mut done)? {
                return Ok(found);
            }
        }
    }

    /// [`pump_until`](StreamGuest::pump_until), or `None` if `limit` passes first.
    fn pump_within<T>(
        &mut self,
        limit: Duration,
        mut done: impl FnMut(&mut Framing) -> Option<T>,
    ) -> Result<Option<T>, LinkError> {
        let began = Instant::now();
        let mut active = began;
        loop {
            let mut framing = lock(&self.framing);
            // The bytes before the end of the stream count, so `done` comes before the error.
            let pumped = framing.pump();
            if framing.take_activity() {
                active = Instant::now();
            }
            if let Some(found) = done(&mut framing) {
                return Ok(Some(found));
            }
            pumped?;
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            if active.elapsed() > STALL {
                let seconds = STALL.as_secs();
                return Err(framing.fail(LinkError::Stalled { seconds }));
            }
            let wait = framing.waiting();
            framing.is_awaited = true;
            drop(framing);
            self.counters.sleeps += 1;
            let waited = wait.wait(POLL_PERIOD.min(left));
            lock(&self.framing).is_awaited = false;
            waited?;
            let sent = self.sent;
            let state = || format!("the last request was {sent}");
            self.slow_wait.check(began.elapsed(), state);
        }
    }

    /// Copies a frame that has arrived to `message` and `payload`.
    fn take(
        &mut self,
        frame: &Frame,
        message: &mut Vec<u8>,
        mut payload: BytesMut<'_>,
    ) -> Result<usize, LinkError> {
        let (sent, wanted) = (frame.payload().len(), payload.len());
        if sent > wanted {
            return Err(
                lock(&self.framing).fail(LinkViolation::ReplyPayload { sent, wanted }.into())
            );
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
}

impl GuestEnd for StreamGuest {
    fn send(&mut self, message: &[u8], payload: Bytes<'_>) -> Result<u64, LinkError> {
        if message.len() > MAX_MESSAGE || payload.len() > MAX_PAYLOAD {
            return Err(LinkError::TooLarge {
                len: message.len(),
                payload: payload.len(),
            });
        }
        let number = self.sent.checked_add(1);
        let number = {
            let mut framing = lock(&self.framing);
            framing.check()?;
            let number = number.ok_or_else(|| framing.fail(LinkError::NoNumberLeft))?;
            framing.push(FrameKind::Request, number, message, payload.len(), |room| {
                payload.copy_to(room);
            });
            framing.pump()?;
            number
        };
        self.sent = number;
        self.counters.messages_out += 1;
        self.counters.bytes_out += (message.len() + payload.len()) as u64;
        self.pump_until(|framing| (framing.unsent() < HIGH_WATER).then_some(()))?;
        Ok(number)
    }

    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        payload: BytesMut<'_>,
    ) -> Result<usize, LinkError> {
        self.counters.round_trips += 1;
        let frame = self.pump_until(Framing::take_frame)?;
        self.take(&frame, message, payload)
    }

    fn receive_within(
        &mut self,
        message: &mut Vec<u8>,
        limit: Duration,
    ) -> Result<bool, LinkError> {
        self.counters.round_trips += 1;
        let Some(frame) = self.pump_within(limit, Framing::take_frame)? else {
            return Ok(false);
        };
        self.take(&frame, message, (&mut [][..]).into())?;
        Ok(true)
    }

    fn try_receive(&mut self, message: &mut Vec<u8>) -> Result<bool, LinkError> {
        let mut framing = lock(&self.framing);
        let pumped = framing.pump();
        match framing.front_payload() {
            Some(0) => {}
            Some(_) => return Ok(false),
            None => return pumped.map(|()| false),
        }
        let Some(frame) = framing.take_frame() else {
            return Ok(false);
        };
        message.extend_from_slice(frame.message());
        self.counters.messages_in += 1;
        self.counters.bytes_in += frame.message().len() as u64;
        Ok(true)
    }

    fn retired(&self) -> u64 {
        let mut framing = lock(&self.framing);
        // `Framing` stores a failure, and the next call that returns a result reports it.
        let _ = framing.pump();
        framing.retired().min(self.sent)
    }

    fn wait_retired(&mut self, request: u64) -> Result<(), LinkError> {
        let request = request.min(self.sent);
        if self.retired() >= request {
            return Ok(());
        }
        self.counters.round_trips += 1;
        self.pump_until(|framing| (framing.retired() >= request).then_some(()))
    }

    fn watch(&self) -> Option<LinkWatch> {
        let figures = Arc::clone(lock(&self.framing).figures());
        Some(LinkWatch::Stream(figures))
    }

    fn is_closed(&mut self) -> bool {
        let mut framing = lock(&self.framing);
        framing.pump().is_err()
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Drop for StreamGuest {
    fn drop(&mut self) {
        // A forked child has a copy of this end, and must not close the link of its parent.
        if self.owner.is_current() {
            lock(&self.framing).close();
        }
    }
}
