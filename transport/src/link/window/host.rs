//! The host's end of a link over a window.
#![forbid(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bytes::{Bytes, BytesMut};
use crate::error::{LinkError, LinkViolation};
use crate::limits::{MAX_MESSAGE, MAX_PAYLOAD};
use crate::link::end::{Counters, GUEST_STALL, HostEnd, Incoming, IsCancelled};
use crate::link::fd_passing::Files;
use crate::link::side::Side;
use crate::link::window_end::{
    WAKE_ON_REQUEST, WAKE_ON_ROOM, Waiting, WindowEnd, completion_ring, count_in, read_message,
    submission_ring, too_large,
};
use crate::shm::doorbell::Doorbell;
use crate::shm::layout::{Layout, word};
use crate::shm::liveness::{Liveness, Silence};
use crate::shm::memory::{SharedWords, Window};
use crate::shm::ring::{Consumer, Limits, Payload, Producer, Record, Reservation};

/// The host's end of a link over a window.
pub struct WindowHost {
    window: Arc<Window>,
    end: WindowEnd,
    submissions: Consumer,
    completions: Producer,
    /// The last received request, until its retirement.
    current: Option<Record>,
    /// The number of the last received request.
    received: u64,
    /// The number of the last sent message.
    sent: u64,
    /// The record of the next message, not published. The ring has no trace of the record yet, so
    /// that dropping it needs no cleanup.
    reserved: Option<Reservation>,
    /// The channel for shared files, on a link with such a channel.
    files: Option<Files>,
    /// How long a reply waits for room in the ring, of a guest that takes none.
    reply_timeout: Duration,
    is_cancelled: IsCancelled,
}

impl WindowHost {
    /// The host's end of a window to which the caller has written `layout`. With a `liveness`, the
    /// end closes the link when the guest's heartbeat stops.
    pub fn new(
        window: Arc<Window>,
        layout: &Layout,
        doorbell: Box<dyn Doorbell>,
        liveness: Option<Liveness>,
    ) -> WindowHost {
        let limits = Limits {
            message: MAX_MESSAGE,
            payload: MAX_PAYLOAD,
            bulk: layout.bulk(),
        };
        WindowHost {
            end: WindowEnd::new(
                Arc::clone(&window),
                layout.epoch(),
                doorbell,
                liveness,
                Side::Host,
            ),
            window,
            submissions: Consumer::new(submission_ring(layout), limits),
            completions: Producer::new(completion_ring(layout)),
            current: None,
            received: 0,
            sent: 0,
            reserved: None,
            files: None,
            reply_timeout: GUEST_STALL,
            is_cancelled: Box::new(|| false),
        }
    }

    /// The same end of a new link, which expects the request after `last` first. For tests; see
    /// [`WindowGuest::continuing_after`](super::WindowGuest::continuing_after).
    pub fn continuing_after(self, last: u64) -> WindowHost {
        self.window.store(word::RETIRED, last);
        WindowHost {
            received: last,
            ..self
        }
    }

    /// The same end, which shares files through `files`.
    pub(in crate::link) fn with_files(self, files: Option<Files>) -> WindowHost {
        WindowHost { files, ..self }
    }
}

impl HostEnd for WindowHost {
    fn set_cancel(&mut self, is_cancelled: IsCancelled) {
        self.is_cancelled = is_cancelled;
    }

    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        self.retire();
        // The requests of a dead guest have no effect that anybody could observe.
        self.end.check_peer_alive()?;
        let (window, submissions) = (&*self.window, &mut self.submissions);
        let arrived = self
            .end
            .wait(Waiting::Message, WAKE_ON_REQUEST, Some(timeout), || {
                submissions.peek(window)
            })?;
        let Some(arrived) = arrived else {
            return Ok(None);
        };
        if Some(arrived.request) != self.received.checked_add(1) {
            let (number, last) = (arrived.request, self.received);
            let violation = LinkViolation::RequestOrder { number, last };
            return Err(self.end.fail(violation.into()));
        }
        self.received = arrived.request;
        read_message(window, &arrived.message, message);
        let incoming = Incoming {
            request: arrived.request,
            payload_len: arrived.payload.len(),
        };
        count_in(
            &mut self.end.counters,
            arrived.message.len() + incoming.payload_len,
        );
        self.current = Some(arrived);
        Ok(Some(incoming))
    }

    fn check_guest(&mut self) -> Result<(), LinkError> {
        self.end.check_peer_alive()
    }

    fn silence(&self) -> Option<Silence> {
        self.end.silence()
    }

    fn window(&self) -> Option<&Arc<Window>> {
        Some(&self.window)
    }

    fn payload(&self) -> Bytes<'_> {
        match &self.current {
            Some(arrived) => self.window.bytes(arrived.payload.clone()),
            None => Bytes::from(&[][..]),
        }
    }

    fn receive_ahead(
        &mut self,
        wanted: &dyn Fn(&[u8]) -> bool,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        let Some(current) = &self.current else {
            return Ok(None);
        };
        let (window, submissions) = (&*self.window, &mut self.submissions);
        let began = Instant::now();
        let arrived = loop {
            let next = submissions.peek_behind(window, current);
            if let Some(arrived) = next.map_err(|e| self.end.fail(e))? {
                break arrived;
            }
            if began.elapsed() >= timeout {
                return Ok(None);
            }
            std::hint::spin_loop();
        };
        let start = message.len();
        read_message(window, &arrived.message, message);
        // `receive` reports a request out of sequence.
        let is_next = Some(arrived.request) == self.received.checked_add(1);
        if !is_next || !wanted(&message[start..]) {
            message.truncate(start);
            return Ok(None);
        }
        self.received = arrived.request;
        let incoming = Incoming {
            request: arrived.request,
            payload_len: arrived.payload.len(),
        };
        let bytes = arrived.message.len() + incoming.payload_len;
        count_in(&mut self.end.counters, bytes);
        // The retirement of this request retires the request before it too.
        self.current = Some(arrived);
        Ok(Some(incoming))
    }

    fn has_room(&mut self, message_len: usize, payload_len: usize) -> bool {
        let payload = Payload::Inline(payload_len);
        // The next send reports a ring that the guest has corrupted.
        message_len <= MAX_MESSAGE
            && payload_len <= MAX_PAYLOAD
            && self
                .completions
                .reserve(&*self.window, self.sent + 1, message_len, payload)
                .is_ok_and(|room| room.is_some())
    }

    fn reserve(
        &mut self,
        message_len: usize,
        payload_len: usize,
    ) -> Result<BytesMut<'_>, LinkError> {
        self.end.check()?;
        if message_len > MAX_MESSAGE || payload_len > MAX_PAYLOAD {
            return Err(too_large(message_len, payload_len));
        }
        let number = self.sent + 1;
        let (window, completions) = (&*self.window, &mut self.completions);
        let is_cancelled = &self.is_cancelled;
        let payload = Payload::Inline(payload_len);
        let room = self.end.wait(
            Waiting::Progress,
            WAKE_ON_ROOM,
            Some(self.reply_timeout),
            || match completions.reserve(window, number, message_len, payload)? {
                Some(room) => Ok(Some(Ok(room))),
                None => Ok(is_cancelled().then_some(Err(LinkError::Cancelled))),
            },
        )?;
        let Some(room) = room else {
            return Err(self.end.fail(LinkError::Stalled {
                seconds: self.reply_timeout.as_secs(),
            }));
        };
        let room = room?;
        let payload = room.payload.clone();
        self.reserved = Some(room);
        Ok(window.bytes_mut(payload))
    }

    fn send_reserved(&mut self, message: &[u8]) -> Result<(), LinkError> {
        let room = self.reserved.take().expect("room for the message");
        let bytes = message.len() + room.payload.len();
        self.completions.publish(&*self.window, room, message);
        self.sent += 1;
        self.end.counters.messages_out += 1;
        self.end.counters.bytes_out += bytes as u64;
        self.end.wake(|_| true)
    }

    fn can_share(&self) -> bool {
        self.files.is_some()
    }

    fn share(&mut self, file: BorrowedFd<'_>) -> bool {
        self.files.as_ref().is_some_and(|files| files.send(file))
    }

    fn retire(&mut self) {
        let Some(arrived) = self.current.take() else {
            return;
        };
        self.submissions.release(&*self.window, &arrived);
        self.window.store(word::RETIRED, arrived.request);
        // `WindowEnd` stores a failure, and the next call that returns a result reports it.
        let _ = self.end.wake(|wake_on| wake_on <= arrived.request);
    }

    fn counters(&self) -> Counters {
        self.end.counters
    }
}

#[cfg(test)]
mod tests {
    use super::super::WindowGuest;
    use super::*;
    use crate::link::end::{GuestEnd as _, LAST_MESSAGES};
    use crate::shm::doorbell::EventDoorbell;
    use crate::shm::layout::MIN_SIZE;

    /// Both ends of a link over the smallest window.
    fn ends() -> (WindowGuest, WindowHost) {
        let window = Arc::new(Window::anonymous(MIN_SIZE).unwrap());
        let layout = Layout::new(MIN_SIZE, 5).unwrap();
        layout.write(&*window);
        let (guest_bell, host_bell) = EventDoorbell::pair().unwrap();
        let guest = Arc::clone(&window);
        let guest = WindowGuest::new(guest, &layout, Box::new(guest_bell), None);
        let host = WindowHost::new(window, &layout, Box::new(host_bell), None);
        (guest, host)
    }

    /// Receives `sent` messages of 1 and then one of 2.
    fn receive_all(guest: &mut WindowGuest, sent: usize) {
        let mut payload = vec![0; 16 << 10];
        for i in 0..=sent {
            let mut message = Vec::new();
            guest
                .receive(&mut message, (&mut payload[..]).into())
                .unwrap();
            assert_eq!(message, [if i < sent { 1 } else { 2 }]);
        }
    }

    #[test]
    fn guest_that_does_not_take_its_replies_loses_its_link() {
        for reads in [false, true] {
            let (mut guest, mut host) = ends();
            assert_eq!(host.reply_timeout, Duration::from_secs(60));
            host.reply_timeout = Duration::from_millis(100);
            let mut outcome = Ok(());
            // More bytes than the window has.
            for _ in 0..MIN_SIZE / 1024 {
                outcome = host.reserve(1, 1024).map(drop);
                if outcome.is_err() {
                    break;
                }
                host.send_reserved(&[1]).unwrap();
                if reads {
                    let got = guest.receive(&mut Vec::new(), (&mut [0; 1024][..]).into());
                    assert_eq!(got, Ok(1024));
                }
            }
            let lost = Err(LinkError::Stalled { seconds: 0 });
            assert_eq!(outcome, if reads { Ok(()) } else { lost });
        }
    }

    /// A wait for room ends when it is cancelled. What has room is sent also then.
    #[test]
    fn a_cancelled_end_waits_for_no_guest() {
        let (mut guest, mut host) = ends();
        let began = Instant::now();
        host.set_cancel(Box::new(move || {
            began.elapsed() > Duration::from_millis(20)
        }));
        let mut sent = 0;
        let cancelled = loop {
            match host.reserve(1, 16 << 10).map(drop) {
                Ok(()) => host.send_reserved(&[1]).unwrap(),
                Err(error) => break error,
            }
            sent += 1;
        };
        assert_eq!(cancelled, LinkError::Cancelled);
        host.send(&[2], 0, &mut |_| {}).unwrap();
        receive_all(&mut guest, sent);
    }

    /// A guest whose ring is full hears why its session ends, if it takes its replies in time. One
    /// that does not keeps the end for no longer.
    #[test]
    fn last_message_waits_for_room_although_the_end_is_cancelled() {
        for reads in [true, false] {
            let (mut guest, mut host) = ends();
            host.set_cancel(Box::new(|| true));
            let mut sent = 0;
            for payload in [16 << 10, 0] {
                while host.reserve(1, payload).is_ok() {
                    host.send_reserved(&[1]).unwrap();
                    sent += 1;
                }
            }
            let reader = std::thread::spawn(move || {
                if !reads {
                    return guest;
                }
                std::thread::sleep(LAST_MESSAGES / 20);
                receive_all(&mut guest, sent);
                guest
            });
            let began = Instant::now();
            let outcome = host.send_last(&[2]);
            let took = began.elapsed();
            match reads {
                true => assert_eq!(outcome, Ok(())),
                false => assert_eq!(outcome, Err(LinkError::Cancelled)),
            }
            assert!(took < GUEST_STALL / 2, "{took:?}");
            assert_eq!(took >= LAST_MESSAGES, !reads, "{took:?}");
            drop(reader.join().unwrap());
        }
    }
}
