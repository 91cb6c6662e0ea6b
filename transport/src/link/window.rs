//! The ends of a link that crosses through a [window](crate::window).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Counters, GuestEnd, HostEnd, Incoming, LinkError};
use crate::bytes::{Bytes, BytesMut};
use crate::window::bulk::{Pool, Stream};
use crate::window::doorbell::{Doorbell, EventDoorbell, Wake};
use crate::window::heartbeat::Pulse;
use crate::window::layout::{DEFAULT_SIZE, Layout, LayoutError, STATE_CLOSED, STATE_OPEN, word};
use crate::window::memory::{MapError, Memory, Window};
use crate::window::ring::{Consumer, Limits, Payload, Place, Producer};
use crate::window::sleep::{MAX_SLEEP, SleepWords, Sleeper, SpinBudget, Waker};
use crate::wire::{MAX_MESSAGE, MAX_PAYLOAD};

/// Payloads up to this size go through the ring itself, message and payload in one piece. (Larger ones would be as fast
/// there, but would leave it room for fewer messages.)
const INLINE_PAYLOAD: usize = 16384;

/// Bytes of the bulk area that payloads stream through. Several of the largest are in it at once, and it stays
/// in the caches.
const STREAM_SIZE: usize = 4 << 20;

/// Most bytes of replies that the guest keeps while it waits for something else.
const MAX_STASH: usize = 256 << 20;

/// How long a host waits for a guest to take its replies.
const GUEST_STALL: Duration = Duration::from_secs(60);

/// How often a guest asks the kernel, unasked, whether the host is still there.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

const GUEST_SLEEP: SleepWords = SleepWords {
    sleeping: word::GUEST_SLEEPING,
    wake_on: word::GUEST_WAKE_ON,
};
const HOST_SLEEP: SleepWords = SleepWords {
    sleeping: word::HOST_SLEEPING,
    wake_on: word::HOST_WAKE_ON,
};

/// What a host sleeps for. (A guest names the request it wants retired; messages always wake it.)
const WAKE_ON_REQUEST: u64 = 1;
const WAKE_ON_ROOM: u64 = 2;

/// Both ends of a link inside this process.
pub fn inproc_pair() -> Result<(WindowGuest, WindowHost), LinkError> {
    let layout = Layout::new(DEFAULT_SIZE, 1).map_err(broken_window)?;
    let window = Arc::new(Window::anonymous(layout.size()).map_err(unmapped)?);
    layout.write(&*window);
    let (guest_bell, host_bell) = EventDoorbell::pair()?;
    let guest = WindowGuest::new(Arc::clone(&window), &layout, Box::new(guest_bell), None);
    let host = WindowHost::new(window, &layout, Box::new(host_bell));
    Ok((guest, host))
}

/// The guest's end of a window.
pub struct WindowGuest {
    line: Line,
    pulse: Option<Pulse>,
    submissions: Producer,
    completions: Consumer,
    stream: Stream,
    pool: Pool,
    /// Number of the last request sent.
    sent: u64,
    /// Replies that came while waiting for something else, oldest first, and their bytes in all.
    stash: VecDeque<(Vec<u8>, Vec<u8>)>,
    stashed: usize,
    looked: Instant,
}

impl WindowGuest {
    /// The guest's end of a window from which `layout` has been read. With a `pulse`, a host whose heart stops is
    /// given up.
    pub fn new(
        window: Arc<Window>,
        layout: &Layout,
        doorbell: Box<dyn Doorbell>,
        pulse: Option<Pulse>,
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
            submissions: Producer::new(submission_ring(layout)),
            completions: Consumer::new(completion_ring(layout), limits),
            stream: Stream::new(bulk.start..cut),
            pool: Pool::new(cut..bulk.end),
            line: Line::new(window, layout.epoch(), doorbell, Side::Guest),
            pulse,
            sent: 0,
            stash: VecDeque::new(),
            stashed: 0,
            looked: Instant::now(),
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
        &self.line.window
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
        let window = Arc::clone(&self.line.window);
        let room = loop {
            // In this order: what has retired was taken out of the ring before.
            let retired = self.retired();
            let room = self
                .submissions
                .reserve(&*window, request, message.len(), payload)
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
            window.bytes_mut(room.payload.clone()).copy_from(inline);
        }
        self.submissions.publish(&*window, room, message);
        self.sent = request;
        self.line.counters.messages_out += 1;
        self.line.counters.bytes_out += (message.len() + len) as u64;
        self.line.wake(|wake_on| wake_on == WAKE_ON_REQUEST)?;
        Ok(request)
    }

    /// Waits until `request` has retired, keeping the replies that come meanwhile when the host may be waiting
    /// for room for more. Returns whether there was a wait.
    fn wait_progress(&mut self, request: u64) -> Result<bool, LinkError> {
        let window = Arc::clone(&self.line.window);
        if window.load(word::RETIRED) >= request {
            return Ok(false);
        }
        let (completions, stash) = (&mut self.completions, &mut self.stash);
        let (stashed, counters) = (&mut self.stashed, &mut Counters::default());
        loop {
            let news = self
                .line
                .wait(Waiting::Progress, request, None, &mut self.pulse, || {
                    if window.load(word::RETIRED) >= request {
                        return Ok(Some(News::Retired));
                    }
                    Ok(completions.is_filling(&*window)?.then_some(News::Replies))
                })?;
            match news {
                Some(News::Retired) | None => return Ok(true),
                Some(News::Replies) => {}
            }
            while let Some(arrived) = completions.peek(&*window).map_err(|e| self.line.fail(e))? {
                let mut message = vec![0; arrived.message.len()];
                window.read(arrived.message.start, &mut message);
                let mut payload = vec![0; arrived.payload.len()];
                window.bytes(arrived.payload.clone()).copy_to(&mut payload);
                completions.release(&*window, &arrived);
                *stashed += message.len() + payload.len();
                count_in(counters, message.len() + payload.len());
                stash.push_back((message, payload));
                if *stashed > MAX_STASH {
                    return Err(self.line.fail(LinkError::PeerMisbehaved(format!(
                        "{stashed} bytes of replies while room for a request was waited for"
                    ))));
                }
            }
            self.line.counters.messages_in += counters.messages_in;
            self.line.counters.bytes_in += counters.bytes_in;
            *counters = Counters::default();
            self.line.wake(|wake_on| wake_on == WAKE_ON_ROOM)?;
        }
    }

    /// Takes the next reply if it has come; one with more payload than there is room for is the host's fault.
    fn take_reply(
        &mut self,
        message: &mut Vec<u8>,
        payload: &mut BytesMut<'_>,
    ) -> Result<Option<usize>, LinkError> {
        if let Some((kept, bytes)) = self.stash.pop_front() {
            self.stashed -= kept.len() + bytes.len();
            if bytes.len() > payload.len() {
                return Err(self.line.fail(too_much(bytes.len(), payload.len())));
            }
            message.extend_from_slice(&kept);
            let (mut room, _) = payload.reborrow().split_at(bytes.len());
            room.copy_from(Bytes::from(&bytes[..]));
            return Ok(Some(bytes.len()));
        }
        let window = &self.line.window;
        let arrived = match self.completions.peek(&**window) {
            Ok(Some(arrived)) => arrived,
            Ok(None) => return Ok(None),
            Err(error) => return Err(self.line.fail(error)),
        };
        let len = arrived.payload.len();
        if len > payload.len() {
            return Err(self.line.fail(too_much(len, payload.len())));
        }
        read_message(window, &arrived.message, message);
        let (mut room, _) = payload.reborrow().split_at(len);
        room.copy_from(window.bytes(arrived.payload.clone()));
        self.completions.release(&**window, &arrived);
        count_in(&mut self.line.counters, arrived.message.len() + len);
        self.line.wake(|wake_on| wake_on == WAKE_ON_ROOM)?;
        Ok(Some(len))
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
        self.line.window.bytes_mut(range.clone()).copy_from(payload);
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
        if let Some(len) = self.take_reply(message, &mut payload)? {
            return Ok(len);
        }
        let (window, completions) = (Arc::clone(&self.line.window), &mut self.completions);
        self.line
            .wait(Waiting::Message, u64::MAX, None, &mut self.pulse, || {
                Ok(completions.peek(&*window)?.is_some().then_some(()))
            })?;
        self.take_reply(message, &mut payload)?
            .ok_or(LinkError::Closed)
    }

    fn try_receive(&mut self, message: &mut Vec<u8>) -> Result<bool, LinkError> {
        let has_payload = match self.stash.front() {
            Some((_, payload)) => !payload.is_empty(),
            None => match self.completions.peek(&*self.line.window) {
                Ok(Some(arrived)) => !arrived.payload.is_empty(),
                Ok(None) => return self.line.check().map(|()| false),
                Err(error) => return Err(self.line.fail(error)),
            },
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
        self.line.window.load(word::RETIRED).min(self.sent)
    }

    fn wait_retired(&mut self, request: u64) -> Result<(), LinkError> {
        if self.wait_progress(request.min(self.sent))? {
            self.line.counters.round_trips += 1;
        }
        Ok(())
    }

    fn is_closed(&mut self) -> bool {
        if self.line.check().is_err() {
            return true;
        }
        if self.looked.elapsed() > LOOK_PERIOD {
            self.looked = Instant::now();
            let _ = self.line.look(&mut self.pulse);
        }
        self.line.check().is_err()
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
    line: Line,
    submissions: Consumer,
    completions: Producer,
    /// The request received last, until it is retired.
    current: Option<crate::window::ring::Arrived>,
    /// Number of the last request received.
    received: u64,
    /// Number of the last message sent.
    sent: u64,
}

impl WindowHost {
    /// The host's end of a window to which `layout` has been written.
    pub fn new(window: Arc<Window>, layout: &Layout, doorbell: Box<dyn Doorbell>) -> WindowHost {
        let limits = Limits {
            message: MAX_MESSAGE,
            payload: MAX_PAYLOAD,
            bulk: layout.bulk(),
        };
        WindowHost {
            submissions: Consumer::new(submission_ring(layout), limits),
            completions: Producer::new(completion_ring(layout)),
            line: Line::new(window, layout.epoch(), doorbell, Side::Host),
            current: None,
            received: 0,
            sent: 0,
        }
    }
}

impl HostEnd for WindowHost {
    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        if self.current.is_some() {
            self.retire();
        }
        // Nobody would see what a guest that has gone asked for.
        self.line.check()?;
        let (window, submissions) = (Arc::clone(&self.line.window), &mut self.submissions);
        let arrived = self.line.wait(
            Waiting::Message,
            WAKE_ON_REQUEST,
            Some(timeout),
            &mut None,
            || submissions.peek(&*window),
        )?;
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
        read_message(&window, &arrived.message, message);
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

    fn payload(&self) -> Bytes<'_> {
        match &self.current {
            Some(arrived) => self.line.window.bytes(arrived.payload.clone()),
            None => Bytes::from(&[][..]),
        }
    }

    fn send(
        &mut self,
        message: &[u8],
        payload_len: usize,
        fill: &mut dyn FnMut(BytesMut<'_>),
    ) -> Result<(), LinkError> {
        self.line.check()?;
        if message.len() > MAX_MESSAGE || payload_len > MAX_PAYLOAD {
            return Err(too_large(message, payload_len));
        }
        let number = self.sent + 1;
        let (window, completions) = (Arc::clone(&self.line.window), &mut self.completions);
        let room = self.line.wait(
            Waiting::Progress,
            WAKE_ON_ROOM,
            Some(GUEST_STALL),
            &mut None,
            || {
                completions.reserve(
                    &*window,
                    number,
                    message.len(),
                    Payload::Inline(payload_len),
                )
            },
        )?;
        let Some(room) = room else {
            return Err(self.line.fail(LinkError::Stalled {
                seconds: GUEST_STALL.as_secs(),
            }));
        };
        if payload_len > 0 {
            fill(window.bytes_mut(room.payload.clone()));
        }
        completions.publish(&*window, room, message);
        self.sent = number;
        self.line.counters.messages_out += 1;
        self.line.counters.bytes_out += (message.len() + payload_len) as u64;
        self.line.wake(|_| true)
    }

    fn retire(&mut self) {
        let Some(arrived) = self.current.take() else {
            return;
        };
        let window = &self.line.window;
        self.submissions.release(&**window, &arrived);
        window.store(word::RETIRED, arrived.request);
        // A failure is kept, and reported by the next call that can.
        let _ = self.line.wake(|wake_on| wake_on <= arrived.request);
    }

    fn counters(&self) -> Counters {
        self.line.counters
    }
}

/// What an end waits for; it learns for each how long to spin.
#[derive(Debug, Clone, Copy)]
enum Waiting {
    Message = 0,
    Progress = 1,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Guest,
    Host,
}

/// What the two ends have in common: sleeping, waking, and knowing whether the peer is there.
struct Line {
    window: Arc<Window>,
    epoch: u64,
    doorbell: Box<dyn Doorbell>,
    sleeper: Sleeper,
    waker: Waker,
    spin: [SpinBudget; 2],
    own_state: usize,
    peer_state: usize,
    side: Side,
    /// The first error: links do not recover.
    error: Option<LinkError>,
    counters: Counters,
    process: u32,
}

impl Line {
    fn new(window: Arc<Window>, epoch: u64, doorbell: Box<dyn Doorbell>, side: Side) -> Line {
        let (own, peer, own_state, peer_state) = match side {
            Side::Guest => (GUEST_SLEEP, HOST_SLEEP, word::GUEST_STATE, word::HOST_STATE),
            Side::Host => (HOST_SLEEP, GUEST_SLEEP, word::HOST_STATE, word::GUEST_STATE),
        };
        Line {
            window,
            epoch,
            doorbell,
            sleeper: Sleeper::new(own),
            waker: Waker::new(peer),
            spin: [SpinBudget::new(), SpinBudget::new()],
            own_state,
            peer_state,
            side,
            error: None,
            counters: Counters::default(),
            process: std::process::id(),
        }
    }

    /// Remembers an error for ever, unless there is one already.
    fn fail(&mut self, error: LinkError) -> LinkError {
        self.error.get_or_insert(error).clone()
    }

    /// Whether the link is in order, as far as memory tells.
    fn check(&mut self) -> Result<(), LinkError> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let state = self.window.load(self.peer_state);
        let is_open = match self.side {
            Side::Guest => state == STATE_OPEN,
            Side::Host => state != STATE_CLOSED,
        };
        if is_open {
            Ok(())
        } else {
            Err(self.fail(LinkError::Closed))
        }
    }

    /// Whether the link is in order, as far as the kernel and the host's heart tell.
    fn look(&mut self, pulse: &mut Option<Pulse>) -> Result<(), LinkError> {
        self.check()?;
        match self.doorbell.wait(None) {
            Ok(Wake::Look) => self.check_heart(pulse),
            Ok(Wake::PeerGone) => Err(self.fail(LinkError::Closed)),
            Err(error) => Err(self.fail(error)),
        }
    }

    fn check_heart(&mut self, pulse: &mut Option<Pulse>) -> Result<(), LinkError> {
        if self.window.load(word::EPOCH) != self.epoch {
            return Err(self.fail(LinkError::Closed));
        }
        let stopped = pulse
            .as_mut()
            .and_then(|pulse| pulse.has_stopped(&self.window));
        stopped.map_or(Ok(()), |still| {
            Err(self.fail(LinkError::Stalled {
                seconds: still.as_secs(),
            }))
        })
    }

    /// After publishing: wakes the peer if it sleeps for what was published.
    fn wake(&mut self, is_news: impl FnOnce(u64) -> bool) -> Result<(), LinkError> {
        if !self.waker.must_ring(&*self.window, is_news) {
            return Ok(());
        }
        self.counters.kicks += 1;
        self.doorbell.ring().map_err(|e| self.fail(e))
    }

    /// Waits until `ready` gives something. `None` when `timeout` has passed.
    fn wait<T>(
        &mut self,
        waiting: Waiting,
        wake_on: u64,
        timeout: Option<Duration>,
        pulse: &mut Option<Pulse>,
        mut ready: impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        if let Some(found) = ready().map_err(|e| self.fail(e))? {
            return Ok(Some(found));
        }
        let began = Instant::now();
        let budget = self.spin[waiting as usize].get();
        let spin = timeout.map_or(budget, |timeout| budget.min(timeout));
        let found = match self.spin(began, spin, &mut ready)? {
            Some(found) => {
                self.counters.spins += 1;
                Some(found)
            }
            None => {
                self.counters.sleeps += 1;
                self.sleep(wake_on, began, timeout, pulse, &mut ready)?
            }
        };
        self.spin[waiting as usize].learn(began.elapsed());
        Ok(found)
    }

    /// Looks again and again for as long as `budget` says.
    fn spin<T>(
        &mut self,
        began: Instant,
        budget: Duration,
        ready: &mut impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        /// From here on others who want the processor go first: one of them may be the peer.
        const POLITE: Duration = Duration::from_micros(2);
        /// Giving way takes a fraction of this when nobody wants the processor.
        const CROWDED: Duration = Duration::from_micros(5);
        let mut spun = Duration::ZERO;
        let mut is_crowded = false;
        while spun < budget {
            for _ in 0..16 {
                if let Some(found) = ready().map_err(|e| self.fail(e))? {
                    return Ok(Some(found));
                }
                std::hint::spin_loop();
            }
            if is_crowded {
                // Who spins gets the processor back after the others' time slices; who is woken, at once.
                break;
            }
            let before = began.elapsed();
            if before > POLITE {
                std::thread::yield_now();
            }
            spun = began.elapsed();
            is_crowded = spun - before > CROWDED;
        }
        Ok(None)
    }

    fn sleep<T>(
        &mut self,
        wake_on: u64,
        began: Instant,
        timeout: Option<Duration>,
        pulse: &mut Option<Pulse>,
        ready: &mut impl FnMut() -> Result<Option<T>, LinkError>,
    ) -> Result<Option<T>, LinkError> {
        loop {
            self.doorbell.clear().map_err(|e| self.fail(e))?;
            self.sleeper.announce(&*self.window, wake_on);
            let found = ready().and_then(|found| match found {
                Some(found) => Ok(Some(found)),
                None => {
                    let left = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
                    if left == Some(Duration::ZERO) {
                        return Ok(None);
                    }
                    // What the peer did before it closed still counts: its state is looked at first.
                    let peer = self.check().and_then(|()| {
                        let sleep = left.map_or(MAX_SLEEP, |left| left.min(MAX_SLEEP));
                        match self.doorbell.wait(Some(sleep))? {
                            Wake::Look => self.check_heart(pulse),
                            Wake::PeerGone => Err(LinkError::Closed),
                        }
                    });
                    match (ready()?, peer) {
                        (Some(found), _) => Ok(Some(found)),
                        (None, Ok(())) => Ok(None),
                        (None, Err(error)) => Err(error),
                    }
                }
            });
            self.sleeper.awake(&*self.window);
            match found.map_err(|e| self.fail(e))? {
                Some(found) => return Ok(Some(found)),
                None if timeout.is_some_and(|timeout| began.elapsed() >= timeout) => {
                    return Ok(None);
                }
                None => {}
            }
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // A child of a process that forked is not the one that opened the link, and must not close it.
        if std::process::id() != self.process {
            return;
        }
        self.window.drain_writes();
        self.window.store(self.own_state, STATE_CLOSED);
        let _ = self.wake(|_| true);
    }
}

fn submission_ring(layout: &Layout) -> Place {
    Place {
        data: layout.submission(),
        tail: word::SUBMISSION_TAIL,
        head: word::SUBMISSION_HEAD,
    }
}

fn completion_ring(layout: &Layout) -> Place {
    Place {
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

fn too_much(sent: usize, room: usize) -> LinkError {
    LinkError::PeerMisbehaved(format!("a reply with {sent} bytes of payload for {room}"))
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
