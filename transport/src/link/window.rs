//! The ends of a link that crosses through a [window](crate::window).
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fd_passing::Files;
use super::window_end::{Side, Waiting, WindowEnd};
use super::{Counters, GuestEnd, HostEnd, Incoming, LinkError, StagingRegion};
use crate::bytes::{Bytes, BytesMut};
use crate::shm::bulk::{StagingHeap, StagingRing};
use crate::shm::doorbell::{Doorbell, EventDoorbell};
use crate::shm::layout::{DEFAULT_SIZE, Layout, LayoutError, STATE_OPEN, word};
use crate::shm::liveness::Liveness;
use crate::shm::memory::{MapError, Memory, Window};
use crate::shm::ring::{Arrived, Consumer, Limits, Payload, Producer, RingArea};
use crate::wire::{MAX_MESSAGE, MAX_PAYLOAD};

/// Payloads up to this size go through the ring itself, message and payload in one piece. (Larger ones would be as fast
/// there, but would leave it room for fewer messages.)
const INLINE_PAYLOAD: usize = 16384;

/// Bytes of the bulk area that payloads stream through: one of the largest, or the pieces of a transfer
/// ([`piece_len`](super::piece_len)), of which one is filled while others are on their way. So it stays in the caches.
const STREAM_SIZE: usize = 1 << 20;

/// Most bytes of replies that the guest keeps while it waits for something else.
const MAX_STASH: usize = 256 << 20;

/// How long a host waits for a guest to take its replies.
const GUEST_STALL: Duration = Duration::from_secs(60);

/// What a host sleeps for. (A guest names the request it wants retired; messages always wake it.)
const WAKE_ON_REQUEST: u64 = 1;
const WAKE_ON_ROOM: u64 = 2;

/// Both ends of a link inside this process.
pub fn inproc_pair() -> Result<(WindowGuest, WindowHost), LinkError> {
    let layout = Layout::new(DEFAULT_SIZE, 1).map_err(broken_window)?;
    let window = Arc::new(Window::anonymous(layout.size()).map_err(unmapped)?);
    layout.write(&*window);
    let (guest_bell, host_bell) = EventDoorbell::pair()?;
    let (guest_files, host_files) = Files::pair();
    let mut guest = WindowGuest::new(Arc::clone(&window), &layout, Box::new(guest_bell), None);
    guest.files = Some(guest_files);
    let mut host = WindowHost::new(window, &layout, Box::new(host_bell));
    host.files = Some(host_files);
    Ok((guest, host))
}

/// The guest's end of a window.
pub struct WindowGuest {
    window: Arc<Window>,
    line: WindowEnd,
    submissions: Producer,
    completions: Consumer,
    stream: StagingRing,
    pool: StagingHeap,
    /// Number of the last request sent.
    sent: u64,
    /// Replies that came while something else was waited for, oldest first: message and payload.
    stash: VecDeque<(Vec<u8>, Vec<u8>)>,
    /// Bytes in the stash.
    stashed: usize,
    /// Where memory that the host shares comes from, if the link can do that.
    pub(super) files: Option<Files>,
}

impl WindowGuest {
    /// The guest's end of a window from which `layout` has been read. With a `liveness`, a host whose heart stops is
    /// given up.
    pub fn new(
        window: Arc<Window>,
        layout: &Layout,
        doorbell: Box<dyn Doorbell>,
        liveness: Option<Liveness>,
    ) -> WindowGuest {
        let bulk = layout.bulk();
        let cut = bulk.start + STREAM_SIZE.min(bulk.len());
        window.store(word::GUEST_STATE, STATE_OPEN);
        let limits = Limits {
            message: MAX_MESSAGE,
            payload: MAX_PAYLOAD,
            bulk: 0..0,
        };
        WindowGuest {
            line: WindowEnd::new(
                Arc::clone(&window),
                layout.epoch(),
                doorbell,
                liveness,
                Side::Guest,
            ),
            window,
            submissions: Producer::new(submission_ring(layout)),
            completions: Consumer::new(completion_ring(layout), limits),
            stream: StagingRing::new(bulk.start..cut),
            pool: StagingHeap::new(cut..bulk.end),
            sent: 0,
            stash: VecDeque::new(),
            stashed: 0,
            files: None,
        }
    }

    /// Takes memory of the window for a buffer whose bytes can be sent from where they lie, with
    /// [`send_in_place`](WindowGuest::send_in_place). `None` when there is no such room.
    pub fn take_shared(&mut self, len: usize) -> Option<Range<usize>> {
        self.pool.take(len)
    }

    /// Gives back memory of [`take_shared`](WindowGuest::take_shared). Requests that name it must have retired.
    pub fn give_back_shared(&mut self, range: Range<usize>) {
        self.pool.give_back(range);
    }

    /// The window, to address shared memory in.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// Sends a request whose payload already lies in shared memory: it is not copied, and must stay as it is until
    /// the request has retired.
    pub fn send_in_place(
        &mut self,
        message: &[u8],
        payload: Range<usize>,
    ) -> Result<u64, LinkError> {
        self.line.check()?;
        let payload = Payload::Bulk {
            offset: payload.start,
            len: payload.len(),
        };
        self.submit(message, payload, Bytes::from(&[][..]))
    }

    /// Waits for room in the ring, fills it and shows it to the host.
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
            return Err(too_large(message, len));
        }
        let request = self.sent + 1;
        let room = loop {
            // In this order: what has retired was taken out of the ring before.
            let retired = self.retired();
            let room = self
                .submissions
                .reserve(&*self.window, request, message.len(), payload)
                .map_err(|e| self.line.fail(e))?;
            if let Some(room) = room {
                break room;
            }
            if retired == self.sent {
                return Err(self.line.fail(LinkError::PeerMisbehaved(format!(
                    "all {retired} requests have retired, and the ring is full"
                ))));
            }
            // Any progress of the host may free enough.
            self.wait_progress(retired + 1)?;
        };
        if inline_len > 0 {
            self.window
                .bytes_mut(room.payload.clone())
                .copy_from(inline);
        }
        self.submissions.publish(&*self.window, room, message);
        self.sent = request;
        self.line.counters.messages_out += 1;
        self.line.counters.bytes_out += (message.len() + len) as u64;
        self.line.wake(|wake_on| wake_on == WAKE_ON_REQUEST)?;
        Ok(request)
    }

    /// Waits until `request` has retired. Returns whether there was a wait.
    fn wait_progress(&mut self, request: u64) -> Result<bool, LinkError> {
        if self.window.load(word::RETIRED) >= request {
            return Ok(false);
        }
        let ready = |window: &Window, completions: &mut Consumer| {
            if window.load(word::RETIRED) >= request {
                return Ok(Some(News::Retired));
            }
            // The host may itself be waiting: for room for more replies.
            Ok(completions.is_filling(window)?.then_some(News::Replies))
        };
        loop {
            let (window, completions) = (&*self.window, &mut self.completions);
            let news = self.line.wait(Waiting::Progress, request, None, || {
                ready(window, completions)
            })?;
            match news {
                Some(News::Replies) => self.stash_replies()?,
                Some(News::Retired) | None => return Ok(true),
            }
        }
    }

    /// Keeps the replies that have come, to make room for more.
    fn stash_replies(&mut self) -> Result<(), LinkError> {
        let window = &*self.window;
        while let Some(arrived) = self
            .completions
            .peek(window)
            .map_err(|e| self.line.fail(e))?
        {
            let mut message = Vec::new();
            read_message(window, &arrived.message, &mut message);
            let mut payload = vec![0; arrived.payload.len()];
            window.bytes(arrived.payload.clone()).copy_to(&mut payload);
            self.completions.release(window, &arrived);
            let bytes = message.len() + payload.len();
            count_in(&mut self.line.counters, bytes);
            self.stashed += bytes;
            self.stash.push_back((message, payload));
        }
        if self.stashed > MAX_STASH {
            let stashed = self.stashed;
            return Err(self.line.fail(LinkError::PeerMisbehaved(format!(
                "{stashed} bytes of replies while room for a request was waited for"
            ))));
        }
        self.line.wake(|wake_on| wake_on == WAKE_ON_ROOM)
    }

    /// Takes the next reply if it has come. One with more payload than there is room for is the host's fault.
    fn take_reply(
        &mut self,
        message: &mut Vec<u8>,
        payload: &mut BytesMut<'_>,
    ) -> Result<Option<usize>, LinkError> {
        if let Some((kept, bytes)) = self.stash.pop_front() {
            self.stashed -= kept.len() + bytes.len();
            self.fill(payload, Bytes::from(&bytes[..]))?;
            message.extend_from_slice(&kept);
            return Ok(Some(bytes.len()));
        }
        self.line.check_rules()?;
        let window = Arc::clone(&self.window);
        let arrived = self
            .completions
            .peek(&*window)
            .map_err(|e| self.line.fail(e))?;
        let Some(arrived) = arrived else {
            return Ok(None);
        };
        self.fill(payload, window.bytes(arrived.payload.clone()))?;
        read_message(&window, &arrived.message, message);
        self.completions.release(&*window, &arrived);
        let bytes = arrived.message.len() + arrived.payload.len();
        count_in(&mut self.line.counters, bytes);
        self.line.wake(|wake_on| wake_on == WAKE_ON_ROOM)?;
        Ok(Some(arrived.payload.len()))
    }

    /// Copies a reply's payload to where the caller wants it.
    fn fill(&mut self, room: &mut BytesMut<'_>, payload: Bytes<'_>) -> Result<(), LinkError> {
        let (sent, wanted) = (payload.len(), room.len());
        if sent > wanted {
            return Err(self.line.fail(LinkError::PeerMisbehaved(format!(
                "a reply with {sent} bytes of payload where at most {wanted} were asked for"
            ))));
        }
        room.reborrow().split_at(sent).0.copy_from(payload);
        Ok(())
    }
}

impl GuestEnd for WindowGuest {
    fn send(&mut self, message: &[u8], payload: Bytes<'_>) -> Result<u64, LinkError> {
        self.line.check()?;
        let len = payload.len();
        if len <= INLINE_PAYLOAD {
            return self.submit(message, Payload::Inline(len), payload);
        }
        if message.len() > MAX_MESSAGE || len > MAX_PAYLOAD || len > self.stream.capacity() {
            return Err(too_large(message, len));
        }
        let range = loop {
            if let Some(range) = self.stream.reserve(len, self.sent + 1) {
                break range;
            }
            // Looked at only now: the host writes that cache line all the time.
            if let Some(oldest) = self.stream.oldest() {
                self.wait_progress(oldest)?;
            }
            self.stream.retire(self.retired());
        };
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
        self.line.counters.round_trips += 1;
        loop {
            if let Some(len) = self.take_reply(message, &mut payload)? {
                return Ok(len);
            }
            let (window, completions) = (&*self.window, &mut self.completions);
            self.line.wait(Waiting::Message, u64::MAX, None, || {
                Ok(completions.peek(window)?.is_some().then_some(()))
            })?;
        }
    }

    /// A reply with payload stays for [`receive`](GuestEnd::receive), and what comes behind it too.
    fn try_receive(&mut self, message: &mut Vec<u8>) -> Result<bool, LinkError> {
        let has_payload = match self.stash.front() {
            Some((_, payload)) => !payload.is_empty(),
            None => {
                self.line.check_rules()?;
                match self.completions.peek(&*self.window) {
                    Ok(Some(arrived)) => !arrived.payload.is_empty(),
                    Ok(None) => return self.line.check().map(|()| false),
                    Err(error) => return Err(self.line.fail(error)),
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
        // A host that claims more than was sent deceives nobody but its own guest; still, no number of
        // the future is ever taken for done.
        self.window.load(word::RETIRED).min(self.sent)
    }

    fn wait_retired(&mut self, request: u64) -> Result<(), LinkError> {
        if self.wait_progress(request.min(self.sent))? {
            self.line.counters.round_trips += 1;
        }
        Ok(())
    }

    fn alloc_staging(&mut self, len: usize) -> Option<StagingRegion> {
        if self.window.is_device() {
            // Programs read what they are lent, too, and may lock it: neither goes well in a device's memory.
            return None;
        }
        let range = self.pool.take(len)?;
        Some(StagingRegion {
            window: Arc::clone(&self.window),
            range,
        })
    }

    fn free_staging(&mut self, staging: StagingRegion) {
        debug_assert!(
            Arc::ptr_eq(&staging.window, &self.window),
            "of another link"
        );
        self.pool.give_back(staging.range);
    }

    fn send_staged(&mut self, message: &[u8], payload: Range<usize>) -> Result<u64, LinkError> {
        self.send_in_place(message, payload)
    }

    fn receive_shared(&mut self, size: u64) -> Result<Window, LinkError> {
        let Some(files) = &self.files else {
            return Err(LinkError::PeerMisbehaved(format!(
                "it shares {size} bytes over a link that cannot"
            )));
        };
        // The reply is not what is wrong when this fails, and messages still come and go: no error of the link.
        let file = files.receive()?;
        Window::map_foreign(file.as_fd(), size).map_err(unmapped)
    }

    fn is_closed(&mut self) -> bool {
        self.line.check_well().is_err()
    }

    fn counters(&self) -> Counters {
        self.line.counters
    }
}

/// What a guest that waits for progress finds.
enum News {
    Retired,
    Replies,
}

/// The host's end of a window.
pub struct WindowHost {
    window: Arc<Window>,
    line: WindowEnd,
    submissions: Consumer,
    completions: Producer,
    /// The request received last, until it is retired.
    current: Option<Arrived>,
    /// Number of the last request received.
    received: u64,
    /// Number of the last message sent.
    sent: u64,
    /// The way of memory to be shared, if the link has one.
    pub(super) files: Option<Files>,
}

impl WindowHost {
    /// The host's end of a window to which `layout` has been written.
    pub fn new(window: Arc<Window>, layout: &Layout, doorbell: Box<dyn Doorbell>) -> WindowHost {
        WindowHost::with_pulse(window, layout, doorbell, None)
    }

    /// The same; with a `liveness`, a guest whose heart stops is given up.
    pub fn with_pulse(
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
            line: WindowEnd::new(
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
            files: None,
        }
    }
}

impl HostEnd for WindowHost {
    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        self.retire();
        // Nobody would see what a guest that has gone asked for.
        self.line.check_well()?;
        let (window, submissions) = (&*self.window, &mut self.submissions);
        let arrived = self
            .line
            .wait(Waiting::Message, WAKE_ON_REQUEST, Some(timeout), || {
                submissions.peek(window)
            })?;
        let Some(arrived) = arrived else {
            return Ok(None);
        };
        if arrived.request != self.received + 1 {
            return Err(self.line.fail(LinkError::PeerMisbehaved(format!(
                "request {} after request {}",
                arrived.request, self.received
            ))));
        }
        self.received = arrived.request;
        read_message(window, &arrived.message, message);
        let incoming = Incoming {
            request: arrived.request,
            payload_len: arrived.payload.len(),
        };
        count_in(
            &mut self.line.counters,
            arrived.message.len() + incoming.payload_len,
        );
        self.current = Some(arrived);
        Ok(Some(incoming))
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
        patience: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        let Some(current) = &self.current else {
            return Ok(None);
        };
        let (window, submissions) = (&*self.window, &mut self.submissions);
        let began = Instant::now();
        let arrived = loop {
            let next = submissions.peek_behind(window, current);
            if let Some(arrived) = next.map_err(|e| self.line.fail(e))? {
                break arrived;
            }
            if began.elapsed() >= patience {
                return Ok(None);
            }
            std::hint::spin_loop();
        };
        let start = message.len();
        read_message(window, &arrived.message, message);
        // One that is out of order is complained of when it is its turn.
        if arrived.request != self.received + 1 || !wanted(&message[start..]) {
            message.truncate(start);
            return Ok(None);
        }
        self.received = arrived.request;
        let incoming = Incoming {
            request: arrived.request,
            payload_len: arrived.payload.len(),
        };
        let bytes = arrived.message.len() + incoming.payload_len;
        count_in(&mut self.line.counters, bytes);
        // Whoever is finished with this one is with the one before.
        self.current = Some(arrived);
        Ok(Some(incoming))
    }

    fn has_room(&mut self, message_len: usize, payload_len: usize) -> bool {
        let payload = Payload::Inline(payload_len);
        // A ring that the guest has broken is for the next call to complain of.
        message_len <= MAX_MESSAGE
            && payload_len <= MAX_PAYLOAD
            && self
                .completions
                .reserve(&*self.window, self.sent + 1, message_len, payload)
                .is_ok_and(|room| room.is_some())
    }

    fn send_if(
        &mut self,
        message: &[u8],
        payload_len: usize,
        fill: &mut dyn FnMut(BytesMut<'_>) -> bool,
    ) -> Result<bool, LinkError> {
        self.line.check()?;
        if message.len() > MAX_MESSAGE || payload_len > MAX_PAYLOAD {
            return Err(too_large(message, payload_len));
        }
        let number = self.sent + 1;
        let (window, completions) = (&*self.window, &mut self.completions);
        let payload = Payload::Inline(payload_len);
        let room = self
            .line
            .wait(Waiting::Progress, WAKE_ON_ROOM, Some(GUEST_STALL), || {
                completions.reserve(window, number, message.len(), payload)
            })?;
        let Some(room) = room else {
            return Err(self.line.fail(LinkError::Stalled {
                seconds: GUEST_STALL.as_secs(),
            }));
        };
        if payload_len > 0 && !fill(window.bytes_mut(room.payload.clone())) {
            // What lies behind the tail is nobody's yet.
            return Ok(false);
        }
        completions.publish(window, room, message);
        self.sent = number;
        self.line.counters.messages_out += 1;
        self.line.counters.bytes_out += (message.len() + payload_len) as u64;
        self.line.wake(|_| true).map(|()| true)
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
        // A failure is kept, and reported by the next call that can.
        let _ = self.line.wake(|wake_on| wake_on <= arrived.request);
    }

    fn counters(&self) -> Counters {
        self.line.counters
    }
}

fn submission_ring(layout: &Layout) -> RingArea {
    RingArea {
        data: layout.submission(),
        tail: word::SUBMISSION_TAIL,
        head: word::SUBMISSION_HEAD,
    }
}

fn completion_ring(layout: &Layout) -> RingArea {
    RingArea {
        data: layout.completion(),
        tail: word::COMPLETION_TAIL,
        head: word::COMPLETION_HEAD,
    }
}

/// Appends a message that lies in the window to `message`.
fn read_message(window: &Window, range: &Range<usize>, message: &mut Vec<u8>) {
    let begin = message.len();
    message.resize(begin + range.len(), 0);
    window.read(range.start, &mut message[begin..]);
}

fn count_in(counters: &mut Counters, bytes: usize) {
    counters.messages_in += 1;
    counters.bytes_in += bytes as u64;
}

fn too_large(message: &[u8], payload: usize) -> LinkError {
    LinkError::TooLarge {
        len: message.len(),
        payload,
    }
}

fn broken_window(error: LayoutError) -> LinkError {
    LinkError::PeerMisbehaved(error.to_string())
}

fn unmapped(error: MapError) -> LinkError {
    match error {
        MapError::System { what, error } => LinkError::System { what, error },
        other => LinkError::PeerMisbehaved(other.to_string()),
    }
}
