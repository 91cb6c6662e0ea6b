//! The host's end of a link over a byte stream.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::framing::{Frame, FrameKind, Framing, HIGH_WATER, POLL_PERIOD, SharedFraming};
use super::heartbeat;
use crate::bytes::{Bytes, BytesMut};
use crate::error::{LinkError, LinkViolation};
use crate::limits::{MAX_MESSAGE, MAX_PAYLOAD};
use crate::link::end::{Counters, GUEST_STALL, HostEnd, Incoming, IsCancelled, LAST_MESSAGES};
use crate::link::link_state::LinkWatch;
use crate::link::side::Side;
use crate::link::stream_state::StreamFigures;
use crate::lock::lock;
use crate::shm::liveness::{SILENCE, Silence};

/// The time that a host waits for the rest of a frame: its length is limited, so this is enough for
/// slow networks. The time in which the host does not read does not count.
const FRAME_TIMEOUT: Duration = Duration::from_secs(60);

/// The host's end of a link over a byte stream.
pub struct StreamHost {
    framing: SharedFraming,
    figures: Arc<StreamFigures>,
    current: Option<Frame>,
    received: u64,
    retired: u64,
    /// The last retired request that the guest knows of.
    reported: u64,
    /// The payload of the next message. Not in the framing, whose lock the heartbeat thread needs:
    /// an engine may take long to write the payload.
    payload: Vec<u8>,
    /// The sizes of the next message and its payload in bytes, from `reserve` to `send_reserved`.
    reserved: Option<(usize, usize)>,
    counters: Counters,
    certificates: Vec<Vec<u8>>,
    /// The number of the incomplete frame that the host has waited for last, and how long.
    awaited: (u64, Duration),
    frame_timeout: Duration,
    /// How long a reply waits for a guest that does not read.
    reply_timeout: Duration,
    /// The time without a byte after which a guest with a heartbeat has died.
    silence: Duration,
    is_cancelled: IsCancelled,
}

impl StreamHost {
    /// The host's end of an open stream.
    ///
    /// # Errors
    ///
    /// When the process cannot start the heartbeat thread.
    pub fn new(channel: Box<dyn Channel>) -> std::io::Result<StreamHost> {
        let framing = Framing::new(channel, Side::Host);
        let figures = Arc::clone(framing.figures());
        let framing = Arc::new(Mutex::new(framing));
        heartbeat::start(&framing)?;
        Ok(StreamHost {
            framing,
            figures,
            current: None,
            received: 0,
            retired: 0,
            reported: 0,
            payload: Vec::new(),
            reserved: None,
            counters: Counters::default(),
            certificates: Vec::new(),
            awaited: (0, Duration::ZERO),
            frame_timeout: FRAME_TIMEOUT,
            reply_timeout: GUEST_STALL,
            silence: SILENCE,
            is_cancelled: Box::new(|| false),
        })
    }

    /// Counts a wait for frame `number`, which has arrived in part.
    fn count_wait(&mut self, number: u64, waited: Duration) -> Result<(), LinkError> {
        let before = match self.awaited {
            (last, sum) if last == number => sum,
            _ => Duration::ZERO,
        };
        self.awaited = (number, before + waited);
        if before + waited < self.frame_timeout {
            return Ok(());
        }
        let seconds = self.frame_timeout.as_secs();
        Err(lock(&self.framing).fail(LinkError::Stalled { seconds }))
    }

    /// The same end, for a guest with these verified certificates, in DER.
    pub(super) fn with_certificates(mut self, certificates: Vec<Vec<u8>>) -> StreamHost {
        self.certificates = certificates;
        self
    }
}

impl HostEnd for StreamHost {
    fn set_cancel(&mut self, is_cancelled: IsCancelled) {
        self.is_cancelled = is_cancelled;
    }

    fn certificates(&self) -> &[Vec<u8>] {
        &self.certificates
    }

    fn limit_first(&mut self, bytes: usize) {
        lock(&self.framing).limit_first(bytes);
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
            framing.check_heartbeat(self.silence)?;
            // A guest that does not read learns of the last retirement when it reads again.
            if self.reported < self.retired && framing.unsent() < HIGH_WATER {
                self.reported = self.retired;
                framing.push(FrameKind::Retired, self.retired, &[], 0, |_| {});
                framing.push_out()?;
            }
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            let (wait, incomplete) = (framing.waiting(), framing.incomplete());
            drop(framing);
            self.counters.sleeps += 1;
            let waits = Instant::now();
            wait.wait(left.min(POLL_PERIOD))?;
            if let Some(number) = incomplete {
                self.count_wait(number, waits.elapsed())?;
            }
        };
        if Some(frame.number()) != self.received.checked_add(1) {
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
        let mut framing = lock(&self.framing);
        framing.pump()?;
        framing.check_heartbeat(self.silence)
    }

    fn silence(&self) -> Option<Silence> {
        lock(&self.framing).silence()
    }

    fn watch(&self) -> Option<LinkWatch> {
        Some(LinkWatch::Stream(Arc::clone(&self.figures)))
    }

    fn payload(&self) -> Bytes<'_> {
        Bytes::from(self.current.as_ref().map_or(&[][..], Frame::payload))
    }

    fn reserve(
        &mut self,
        message_len: usize,
        payload_len: usize,
    ) -> Result<BytesMut<'_>, LinkError> {
        if message_len > MAX_MESSAGE || payload_len > MAX_PAYLOAD {
            return Err(LinkError::TooLarge {
                len: message_len,
                payload: payload_len,
            });
        }
        lock(&self.framing).check()?;
        if self.payload.len() < payload_len {
            self.payload.resize(payload_len, 0);
        }
        self.reserved = Some((message_len, payload_len));
        Ok(BytesMut::from(&mut self.payload[..payload_len]))
    }

    fn send_reserved(&mut self, message: &[u8]) -> Result<(), LinkError> {
        let (message_len, payload_len) = self.reserved.take().expect("room for the message");
        assert_eq!(message.len(), message_len, "message's length");
        let payload = &self.payload[..payload_len];
        let began = Instant::now();
        let mut is_pushed = false;
        loop {
            let mut framing = lock(&self.framing);
            framing.check()?;
            if !is_pushed {
                is_pushed = true;
                framing.push(
                    FrameKind::Reply,
                    self.retired,
                    message,
                    payload_len,
                    |room| {
                        room.copy_from_slice(payload);
                    },
                );
                self.figures.replied(self.received);
                self.reported = self.retired;
            }
            framing.push_out()?;
            // A cancelled end leaves the message to its drop.
            if framing.unsent() < HIGH_WATER || (self.is_cancelled)() {
                break;
            }
            if began.elapsed() > self.reply_timeout {
                let seconds = self.reply_timeout.as_secs();
                return Err(framing.fail(LinkError::Stalled { seconds }));
            }
            let wait = framing.waiting_out();
            drop(framing);
            wait.wait(POLL_PERIOD)?;
        }
        self.counters.messages_out += 1;
        self.counters.bytes_out += (message.len() + payload_len) as u64;
        Ok(())
    }

    /// Queues the message, for the drop of the end to send.
    fn send_last(&mut self, message: &[u8]) -> Result<(), LinkError> {
        self.set_cancel(Box::new(|| true));
        self.send(message, 0, &mut |_| {})
    }

    fn retire(&mut self) {
        if let Some(frame) = self.current.take() {
            self.retired = frame.number();
            self.figures.retired(self.retired);
        }
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Drop for StreamHost {
    fn drop(&mut self) {
        let began = Instant::now();
        // Sends the queued messages, if the guest reads them soon.
        loop {
            let mut framing = lock(&self.framing);
            if framing.push_out().is_err()
                || framing.unsent() == 0
                || began.elapsed() > LAST_MESSAGES
            {
                framing.close();
                return;
            }
            let wait = framing.waiting_out();
            drop(framing);
            let _ = wait.wait(LAST_MESSAGES.saturating_sub(began.elapsed()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::thread;

    use super::super::channel::Plain;
    use super::super::framing::HOST_RECEIVED;
    use super::super::guest::StreamGuest;
    use super::*;
    use crate::shm::liveness::PERIOD;

    const WAIT: Duration = Duration::from_secs(20);

    /// A host's end, and the socket of its guest.
    fn host() -> (StreamHost, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        (StreamHost::new(Box::new(Plain::new(near))).unwrap(), far)
    }

    /// The frame of a heartbeat.
    fn heartbeat() -> Vec<u8> {
        let mut bytes = (FrameKind::Heartbeat as u32).to_le_bytes().to_vec();
        bytes.resize(24, 0);
        bytes
    }

    /// The header of a request.
    fn header(number: u64, message: u32, payload: u32) -> Vec<u8> {
        let mut bytes: Vec<u8> = [FrameKind::Request as u32, message, payload, 0]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        bytes.extend(number.to_le_bytes());
        bytes
    }

    /// A guest that does not read keeps a cancelled end no longer than its last messages.
    #[test]
    fn a_cancelled_end_waits_for_no_guest() {
        let (mut host, guest) = host();
        let began = Instant::now();
        host.set_cancel(Box::new(move || {
            began.elapsed() > Duration::from_millis(20)
        }));
        let mut sent = 0;
        // More than the socket and the queue take.
        while !(host.is_cancelled)() || sent < 3 * HIGH_WATER {
            host.send(&[1], MAX_PAYLOAD, &mut |_| {}).unwrap();
            sent += MAX_PAYLOAD;
        }
        assert!(began.elapsed() < GUEST_STALL / 2, "{:?}", began.elapsed());
        drop(host);
        assert!(began.elapsed() < GUEST_STALL / 2, "{:?}", began.elapsed());
        drop(guest);
    }

    /// The last message of an end does not wait twice for a guest that does not read, and reaches a
    /// guest that begins to read late.
    #[test]
    fn last_message_has_the_stated_time_once() {
        for reads in [false, true] {
            let (mut host, guest) = host();
            host.set_cancel(Box::new(|| true));
            // For a guest that does not read, more than an end that is not cancelled queues.
            let wanted = if reads { MAX_PAYLOAD } else { 2 * HIGH_WATER };
            let mut queued = 0;
            while queued < wanted {
                host.send(&[1], MAX_PAYLOAD, &mut |_| {}).unwrap();
                queued += MAX_PAYLOAD;
            }
            host.set_cancel(Box::new(|| false));
            let reader = reads.then(|| {
                let mut guest = guest.try_clone().unwrap();
                thread::spawn(move || {
                    thread::sleep(LAST_MESSAGES / 20);
                    let mut all = Vec::new();
                    guest.read_to_end(&mut all).unwrap();
                    all
                })
            });
            let began = Instant::now();
            host.send_last(b"the last one").unwrap();
            drop(host);
            let took = began.elapsed();
            match reader {
                Some(reader) => assert!(reader.join().unwrap().ends_with(b"the last one")),
                None => assert!(
                    (LAST_MESSAGES..LAST_MESSAGES + WAIT / 2).contains(&took),
                    "{took:?}"
                ),
            }
        }
    }

    #[test]
    fn frame_that_is_never_completed_ends_the_link() {
        for begin in [&header(1, 8, 0)[..10], &header(1, 8, 1000)] {
            let (mut host, mut guest) = host();
            host.frame_timeout = Duration::from_millis(50);
            // Between frames a guest may be silent for any time.
            let silent = host.receive(&mut Vec::new(), Duration::from_millis(100));
            assert_eq!(silent.map(|got| got.is_none()), Ok(true));
            guest.write_all(begin).unwrap();
            let start = Instant::now();
            let error = loop {
                assert!(start.elapsed() < WAIT, "it holds its resources for ever");
                match host.receive(&mut Vec::new(), Duration::from_millis(20)) {
                    Ok(None) => {}
                    other => break other.map(|got| got.is_some()).unwrap_err(),
                }
            };
            assert_eq!(error, LinkError::Stalled { seconds: 0 });
        }
    }

    #[test]
    fn guest_with_a_heartbeat_that_falls_silent_loses_its_link() {
        for has_heartbeat in [true, false] {
            let (mut host, mut guest) = host();
            assert_eq!(host.silence, SILENCE);
            host.silence = Duration::from_millis(300);
            if has_heartbeat {
                guest.write_all(&heartbeat()).unwrap();
            }
            let start = Instant::now();
            let mut outcome = Ok(None);
            while matches!(outcome, Ok(None)) && start.elapsed() < 3 * host.silence {
                outcome = host.receive(&mut Vec::new(), Duration::from_millis(20));
            }
            match has_heartbeat {
                true => assert_eq!(outcome.map(drop), Err(LinkError::Stalled { seconds: 0 })),
                // A guest of an earlier version.
                false => assert_eq!(outcome.map(drop), Ok(())),
            }
            let silence = host.silence().map(|silence| silence.lasts());
            assert_eq!(silence.is_some(), has_heartbeat);
            assert!(silence.is_none_or(|silence| silence >= host.silence));
        }
    }

    /// A program is killed whose child holds the socket of the link, as a child of a bare `clone`
    /// does. Over TCP the host knows no process, and the socket stays open.
    #[test]
    fn killed_guest_whose_child_holds_the_socket_falls_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut host = StreamHost::new(Box::new(Plain::new(near))).unwrap();
        let frame: String = heartbeat()
            .iter()
            .map(|byte| format!("\\{byte:03o}"))
            .collect();
        let beats = format!("exec 3<&0; cat <&3 & while :; do printf '{frame}'; sleep 0.02; done");
        let mut program = Command::new("sh")
            .args(["-c", &beats])
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(guest))
            .spawn()
            .unwrap();
        let mut child = program.stdin.take().unwrap();
        host.silence = Duration::from_secs(2);
        let mut receive = || host.receive(&mut Vec::new(), Duration::from_millis(20));
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(4) {
            assert_eq!(receive().map(|got| got.is_none()), Ok(true), "it lives");
        }
        program.kill().unwrap();
        program.wait().unwrap();
        let error = loop {
            match receive() {
                Ok(None) => assert!(start.elapsed() < WAIT, "it lives on with its child"),
                other => break other.map(drop).unwrap_err(),
            }
        };
        assert_eq!(error, LinkError::Stalled { seconds: 2 }, "not closed");
        child.write_all(b"x").expect("the child lives");
    }

    #[test]
    fn guest_that_the_host_does_not_read_is_not_silent() {
        let (mut host, mut guest) = host();
        let mut flood = guest.try_clone().unwrap();
        let flood = thread::spawn(move || {
            flood.write_all(&heartbeat()).unwrap();
            for number in 1..=64 {
                let mut frame = header(number, 1, MAX_PAYLOAD as u32);
                frame.resize(frame.len() + 1 + MAX_PAYLOAD, 9);
                flood.write_all(&frame).unwrap();
            }
        });
        // As during a long graph: the host looks for the end of the guest, and takes no request.
        while lock(&host.framing).received() < HOST_RECEIVED {
            host.check_guest().unwrap();
        }
        host.silence = Duration::from_millis(50);
        let start = Instant::now();
        while start.elapsed() < 10 * host.silence {
            host.check_guest().unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        host.silence = WAIT;
        for number in 1..=64 {
            let got = host.receive(&mut Vec::new(), WAIT).unwrap();
            assert_eq!(got.unwrap().request, number);
        }
        flood.join().unwrap();
        drop(host);
        let _ = guest.read(&mut [0]);
    }

    #[test]
    fn program_that_asks_for_nothing_has_a_heartbeat() {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        let guest = StreamGuest::new(Box::new(Plain::new(near)));
        let _guest = guest.with_heartbeat().unwrap();
        let mut host = StreamHost::new(Box::new(Plain::new(far))).unwrap();
        host.silence = 3 * PERIOD;
        let start = Instant::now();
        while start.elapsed() < 2 * host.silence {
            let got = host.receive(&mut Vec::new(), Duration::from_millis(100));
            assert_eq!(got.map(|got| got.is_none()), Ok(true));
        }
    }

    #[test]
    fn frames_that_arrive_slowly_have_their_time_each() {
        let (mut host, mut guest) = host();
        host.frame_timeout = WAIT;
        for number in 1..=3 {
            host.awaited.1 = WAIT - Duration::from_nanos(1);
            guest.write_all(&header(number, 1, 0)).unwrap();
            guest.write_all(&[7]).unwrap();
            let got = host.receive(&mut Vec::new(), WAIT).unwrap();
            assert_eq!(got.unwrap().request, number);
        }
    }

    #[test]
    fn bytes_of_a_guest_are_queued_up_to_a_limit() {
        const PAYLOAD: usize = MAX_PAYLOAD;
        let (mut host, mut guest) = host();
        let mut flood = guest.try_clone().unwrap();
        let flood = thread::spawn(move || {
            for number in 1..=64 {
                let mut frame = header(number, 1, PAYLOAD as u32);
                frame.resize(frame.len() + 1 + PAYLOAD, 9);
                flood.write_all(&frame).unwrap();
            }
        });
        // The host looks for requests again and again, as during a graph, and takes none.
        let mut most = 0;
        while most < HOST_RECEIVED {
            host.check_guest().unwrap();
            most = most.max(lock(&host.framing).received());
        }
        for _ in 0..100 {
            host.check_guest().unwrap();
            most = most.max(lock(&host.framing).received());
        }
        assert!(most < HOST_RECEIVED + PAYLOAD + (1 << 20), "{most} bytes");
        for number in 1..=64 {
            let got = host.receive(&mut Vec::new(), WAIT).unwrap();
            assert_eq!(got.unwrap().request, number);
        }
        flood.join().unwrap();
        drop(host);
        let _ = guest.read(&mut [0]);
    }

    #[test]
    fn guest_that_does_not_take_its_replies_loses_its_link() {
        for (reads, timeout) in [(false, Duration::from_millis(300)), (true, WAIT)] {
            let (mut host, mut guest) = host();
            assert_eq!(host.reply_timeout, Duration::from_secs(60));
            host.reply_timeout = timeout;
            let reader = reads.then(|| {
                let mut guest = guest.try_clone().unwrap();
                thread::spawn(move || std::io::copy(&mut guest, &mut std::io::sink()))
            });
            let mut outcome = Ok(());
            for _ in 0..2 * HIGH_WATER / MAX_PAYLOAD + 2 {
                // A heartbeat shows that the program runs, not that it reads.
                guest.write_all(&heartbeat()).unwrap();
                host.check_guest().unwrap();
                host.reserve(1, MAX_PAYLOAD).unwrap();
                outcome = host.send_reserved(&[1]);
                if outcome.is_err() {
                    break;
                }
            }
            let lost = Err(LinkError::Stalled { seconds: 0 });
            assert_eq!(outcome, if reads { Ok(()) } else { lost });
            drop(host);
            if let Some(reader) = reader {
                reader.join().unwrap().unwrap();
            }
        }
    }

    #[test]
    fn guest_that_does_not_read_is_sent_no_further_retirements() {
        let (mut host, mut guest) = host();
        while lock(&host.framing).unsent() < HIGH_WATER {
            let mut framing = lock(&host.framing);
            framing.push(FrameKind::Reply, 0, &[1], MAX_PAYLOAD, |_| {});
            framing.push_out().unwrap();
        }
        let before = lock(&host.framing).unsent();
        for request in 1..1000 {
            host.retired = request;
            assert!(
                host.receive(&mut Vec::new(), Duration::ZERO)
                    .unwrap()
                    .is_none()
            );
        }
        assert!(lock(&host.framing).unsent() <= before);
        // The host learns of the last one when the host reads again.
        guest.set_nonblocking(true).unwrap();
        let start = Instant::now();
        let mut bytes = vec![0; 1 << 20];
        while host.reported < 999 {
            assert!(start.elapsed() < WAIT);
            let _ = guest.read(&mut bytes);
            assert!(
                host.receive(&mut Vec::new(), Duration::ZERO)
                    .unwrap()
                    .is_none()
            );
        }
    }
}
