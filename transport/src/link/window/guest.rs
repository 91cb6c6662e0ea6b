//! The guest's end of a link over a window.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bytes::{Bytes, BytesMut};
use crate::error::{LinkError, LinkViolation};
use crate::limits::{MAX_MESSAGE, MAX_PAYLOAD};
use crate::link::end::{Counters, GuestEnd, StagingRegion};
use crate::link::fd_passing::Files;
use crate::link::link_state::LinkWatch;
use crate::link::side::Side;
use crate::link::window_end::{
    WAKE_ON_REQUEST, WAKE_ON_ROOM, Waiting, WindowEnd, completion_ring, count_in, read_message,
    submission_ring, too_large, unmapped,
};
use crate::shm::doorbell::Doorbell;
use crate::shm::layout::{Layout, STATE_OPEN, word};
use crate::shm::liveness::Liveness;
use crate::shm::memory::{SharedWords, Window};
use crate::shm::ring::{Consumer, Limits, Payload, Producer};
use crate::shm::staging::{StagingHeap, StagingRing};

/// The largest payload that goes through the submission ring, in bytes. A larger payload would be
/// as fast there, but would leave room for fewer messages.
const INLINE_PAYLOAD: usize = 16384;

/// The size of the staging ring, in bytes: one payload of maximum size, or the chunks of a transfer
/// ([`chunk_len`](crate::link::chunk_len)), of which the guest fills one while others are in
/// transit. A ring of this size stays in the caches.
const STAGING_RING_SIZE: usize = 1 << 20;

/// The maximum size of the backlog of replies, in bytes.
const MAX_BACKLOG: usize = 256 << 20;

/// The guest's end of a link over a window.
pub struct WindowGuest {
    window: Arc<Window>,
    end: WindowEnd,
    submissions: Producer,
    completions: Consumer,
    staging_ring: StagingRing,
    staging_heap: StagingHeap,
    /// The number of the last sent request.
    sent: u64,
    /// The replies that this end has received while it waited for room, oldest first: message and
    /// payload.
    backlog: VecDeque<(Vec<u8>, Vec<u8>)>,
    /// The size of the backlog, in bytes.
    backlog_bytes: usize,
    /// The channel for the files that the host shares, on a link with such a channel.
    files: Option<Files>,
}

impl WindowGuest {
    /// The guest's end of a window with this `layout`. With a `liveness`, the end closes the link
    /// when the host's heartbeat stops.
    pub fn new(
        window: Arc<Window>,
        layout: &Layout,
        doorbell: Box<dyn Doorbell>,
        liveness: Option<Liveness>,
    ) -> WindowGuest {
        let bulk = layout.bulk();
        let cut = bulk.start + STAGING_RING_SIZE.min(bulk.len());
        window.store(word::GUEST_STATE, STATE_OPEN);
        let limits = Limits {
            message: MAX_MESSAGE,
            payload: MAX_PAYLOAD,
            bulk: 0..0,
        };
        WindowGuest {
            end: WindowEnd::new(
                Arc::clone(&window),
                layout.epoch(),
                doorbell,
                liveness,
                Side::Guest,
            ),
            window,
            submissions: Producer::new(submission_ring(layout)),
            completions: Consumer::new(completion_ring(layout), limits),
            staging_ring: StagingRing::new(bulk.start..cut),
            staging_heap: StagingHeap::new(cut..bulk.end),
            sent: 0,
            backlog: VecDeque::new(),
            backlog_bytes: 0,
            files: None,
        }
    }

    /// The same end, which receives the files that the host shares from `files`.
    pub(in crate::link) fn with_files(self, files: Option<Files>) -> WindowGuest {
        WindowGuest { files, ..self }
    }

    /// The same end of a new link, whose first request gets the number after `last`. For tests of
    /// links that have lasted long; the host's end must
    /// [continue](super::WindowHost::continuing_after) there, too.
    pub fn continuing_after(self, last: u64) -> WindowGuest {
        WindowGuest { sent: last, ..self }
    }

    /// The window, for access to staging memory.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// The number of the next request.
    fn next_request(&mut self) -> Result<u64, LinkError> {
        let next = self.sent.checked_add(1);
        next.ok_or_else(|| self.end.fail(LinkError::NoNumberLeft))
    }

    /// Reserves a record in the submission ring, writes the record and publishes it. Waits for
    /// room.
    fn submit(
        &mut self,
        message: &[u8],
        payload: Payload,
        inline: Bytes<'_>,
    ) -> Result<u64, LinkError> {
        let (inline_len, len) = match payload {
            Payload::Inline(len) => (len, len),
            Payload::Bulk { len, .. } => (0, len),
        };
        if message.len() > MAX_MESSAGE || len > MAX_PAYLOAD || inline_len > INLINE_PAYLOAD {
            return Err(too_large(message.len(), len));
        }
        let request = self.next_request()?;
        let room = loop {
            // The order matters: the host takes a request out of the ring before it retires the
            // request.
            let retired = self.retired();
            let room = self
                .submissions
                .reserve(&*self.window, request, message.len(), payload)
                .map_err(|e| self.end.fail(e))?;
            if let Some(room) = room {
                break room;
            }
            if retired == self.sent {
                return Err(self.end.fail(LinkViolation::RingFull { retired }.into()));
            }
            // Every retirement frees room.
            self.wait_progress(retired + 1)?;
        };
        if inline_len > 0 {
            self.end.check_session()?;
            self.window
                .bytes_mut(room.payload.clone())
                .copy_from(inline);
        }
        self.end.check_session()?;
        self.submissions.publish(&*self.window, room, message);
        self.sent = request;
        self.end.counters.messages_out += 1;
        self.end.counters.bytes_out += (message.len() + len) as u64;
        self.end.wake(|wake_on| wake_on == WAKE_ON_REQUEST)?;
        Ok(request)
    }

    /// Waits until `request` has retired. Returns whether the call had to wait.
    fn wait_progress(&mut self, request: u64) -> Result<bool, LinkError> {
        if self.window.load(word::RETIRED) >= request {
            self.end.check_epoch()?;
            return Ok(false);
        }
        let ready = |window: &Window, completions: &mut Consumer| {
            if window.load(word::RETIRED) >= request {
                return Ok(Some(WaitOutcome::Retired));
            }
            // The host may itself be waiting for room in the completion ring.
            Ok(completions
                .is_filling(window)?
                .then_some(WaitOutcome::Replies))
        };
        loop {
            let (window, completions) = (&*self.window, &mut self.completions);
            let progress = self.end.wait(Waiting::Progress, request, None, || {
                ready(window, completions)
            })?;
            match progress {
                Some(WaitOutcome::Replies) => self.receive_backlog()?,
                Some(WaitOutcome::Retired) | None => {
                    self.end.check_epoch()?;
                    return Ok(true);
                }
            }
        }
    }

    /// Moves the arrived replies to the backlog, to make room in the completion ring.
    fn receive_backlog(&mut self) -> Result<(), LinkError> {
        let window = &*self.window;
        while let Some(arrived) = self
            .completions
            .peek(window)
            .map_err(|e| self.end.fail(e))?
        {
            let mut message = Vec::new();
            read_message(window, &arrived.message, &mut message);
            let mut payload = vec![0; arrived.payload.len()];
            window.bytes(arrived.payload.clone()).copy_to(&mut payload);
            self.end.check_epoch()?;
            self.completions.release(window, &arrived);
            let bytes = message.len() + payload.len();
            count_in(&mut self.end.counters, bytes);
            self.backlog_bytes += bytes;
            self.backlog.push_back((message, payload));
        }
        if self.backlog_bytes > MAX_BACKLOG {
            let violation = LinkViolation::Backlog {
                bytes: self.backlog_bytes,
                most: MAX_BACKLOG,
            };
            return Err(self.end.fail(violation.into()));
        }
        self.end.wake(|wake_on| wake_on == WAKE_ON_ROOM)
    }

    /// Receives the next reply, if one has arrived. A payload longer than `payload` is the host's
    /// fault.
    fn take_reply(
        &mut self,
        message: &mut Vec<u8>,
        payload: &mut BytesMut<'_>,
    ) -> Result<Option<usize>, LinkError> {
        if let Some((kept, bytes)) = self.backlog.pop_front() {
            self.backlog_bytes -= kept.len() + bytes.len();
            self.fill(payload, Bytes::from(&bytes[..]))?;
            message.extend_from_slice(&kept);
            return Ok(Some(bytes.len()));
        }
        self.end.check_rules()?;
        self.end.check_epoch()?;
        let window = Arc::clone(&self.window);
        let arrived = self
            .completions
            .peek(&*window)
            .map_err(|e| self.end.fail(e))?;
        let Some(arrived) = arrived else {
            return Ok(None);
        };
        self.fill(payload, window.bytes(arrived.payload.clone()))?;
        let begin = message.len();
        read_message(&window, &arrived.message, message);
        if let Err(error) = self.end.check_epoch() {
            message.truncate(begin);
            return Err(error);
        }
        self.completions.release(&*window, &arrived);
        let bytes = arrived.message.len() + arrived.payload.len();
        count_in(&mut self.end.counters, bytes);
        self.end.wake(|wake_on| wake_on == WAKE_ON_ROOM)?;
        Ok(Some(arrived.payload.len()))
    }

    /// Waits for the next reply. `None` if none has arrived within `limit`.
    fn wait_for_reply(
        &mut self,
        message: &mut Vec<u8>,
        payload: &mut BytesMut<'_>,
        limit: Option<Duration>,
    ) -> Result<Option<usize>, LinkError> {
        self.end.counters.round_trips += 1;
        let began = Instant::now();
        loop {
            if let Some(len) = self.take_reply(message, payload)? {
                return Ok(Some(len));
            }
            let left = limit.map(|limit| limit.saturating_sub(began.elapsed()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            let (window, completions) = (&*self.window, &mut self.completions);
            self.end.wait(Waiting::Message, u64::MAX, left, || {
                Ok(completions.peek(window)?.is_some().then_some(()))
            })?;
        }
    }

    /// Copies the payload of a reply to the beginning of `room`.
    fn fill(&mut self, room: &mut BytesMut<'_>, payload: Bytes<'_>) -> Result<(), LinkError> {
        let (sent, wanted) = (payload.len(), room.len());
        if sent > wanted {
            return Err(self
                .end
                .fail(LinkViolation::ReplyPayload { sent, wanted }.into()));
        }
        room.reborrow().split_at(sent).0.copy_from(payload);
        Ok(())
    }
}

impl GuestEnd for WindowGuest {
    fn send(&mut self, message: &[u8], payload: Bytes<'_>) -> Result<u64, LinkError> {
        self.end.check()?;
        let len = payload.len();
        if len <= INLINE_PAYLOAD {
            return self.submit(message, Payload::Inline(len), payload);
        }
        if message.len() > MAX_MESSAGE || len > MAX_PAYLOAD || len > self.staging_ring.capacity() {
            return Err(too_large(message.len(), len));
        }
        let request = self.next_request()?;
        let range = loop {
            if let Some(range) = self.staging_ring.reserve(len, request) {
                break range;
            }
            // The host writes the cache line of `retired` often, so this end loads it only when it
            // must.
            if let Some(oldest) = self.staging_ring.oldest() {
                self.wait_progress(oldest)?;
            }
            self.staging_ring.retire(self.retired());
        };
        self.end.check_session()?;
        self.window.bytes_mut(range.clone()).copy_from(payload);
        let bulk = Payload::Bulk {
            offset: range.start,
            len,
        };
        self.submit(message, bulk, Bytes::from(&[][..]))
    }

    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        mut payload: BytesMut<'_>,
    ) -> Result<usize, LinkError> {
        loop {
            if let Some(len) = self.wait_for_reply(message, &mut payload, None)? {
                return Ok(len);
            }
        }
    }

    fn receive_within(
        &mut self,
        message: &mut Vec<u8>,
        limit: Duration,
    ) -> Result<bool, LinkError> {
        let payload = &mut BytesMut::from(&mut [][..]);
        Ok(self
            .wait_for_reply(message, payload, Some(limit))?
            .is_some())
    }

    /// A reply with payload, and every reply behind it, stays for [`receive`](GuestEnd::receive).
    fn try_receive(&mut self, message: &mut Vec<u8>) -> Result<bool, LinkError> {
        let has_payload = match self.backlog.front() {
            Some((_, payload)) => !payload.is_empty(),
            None => {
                self.end.check_rules()?;
                match self.completions.peek(&*self.window) {
                    Ok(Some(arrived)) => !arrived.payload.is_empty(),
                    Ok(None) => return self.end.check().map(|()| false),
                    Err(error) => return Err(self.end.fail(error)),
                }
            }
        };
        if has_payload {
            return Ok(false);
        }
        let taken = self.take_reply(message, &mut BytesMut::from(&mut [][..]))?;
        Ok(taken.is_some())
    }

    fn retired(&self) -> u64 {
        // The host may store any number. The minimum keeps a request of the future from counting as
        // retired.
        self.window.load(word::RETIRED).min(self.sent)
    }

    fn wait_retired(&mut self, request: u64) -> Result<(), LinkError> {
        if self.wait_progress(request.min(self.sent))? {
            self.end.counters.round_trips += 1;
        }
        Ok(())
    }

    fn alloc_staging(&mut self, len: usize) -> Option<StagingRegion> {
        if self.window.is_device() {
            // The user of a staging region reads it and may lock it in memory. Reads of device
            // memory are slow, and locking it fails.
            return None;
        }
        let range = self.staging_heap.alloc(len)?;
        Some(StagingRegion {
            window: Arc::clone(&self.window),
            range,
        })
    }

    fn free_staging(&mut self, staging: StagingRegion) {
        debug_assert!(
            Arc::ptr_eq(&staging.window, &self.window),
            "a staging region of another link"
        );
        self.staging_heap.free(staging.range);
    }

    fn send_staged(&mut self, message: &[u8], payload: Range<usize>) -> Result<u64, LinkError> {
        self.end.check()?;
        let payload = Payload::Bulk {
            offset: payload.start,
            len: payload.len(),
        };
        self.submit(message, payload, Bytes::from(&[][..]))
    }

    fn receive_shared(&mut self, size: u64) -> Result<Window, LinkError> {
        let Some(files) = &self.files else {
            return Err(LinkViolation::LinkWithoutFiles { size }.into());
        };
        // A failure here is not stored as the error of the link: the ring is intact, and the link
        // goes on.
        let file = files.receive()?;
        Window::map_foreign(file.as_fd(), size).map_err(unmapped)
    }

    fn watch(&self) -> Option<LinkWatch> {
        Some(LinkWatch::Window(Arc::clone(&self.window)))
    }

    fn is_closed(&mut self) -> bool {
        self.end.check_peer_alive().is_err()
    }

    fn counters(&self) -> Counters {
        self.end.counters
    }
}

/// The outcome of a guest's wait for progress.
enum WaitOutcome {
    Retired,
    Replies,
}
