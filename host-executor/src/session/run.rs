//! The loop of a session: receives requests, executes them, sends replies.

use std::os::fd::AsFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::field::display;
use tracing::{debug, error, info, warn};
use vgpu_engine::panic_message;
use vgpu_transport::link::{HostEnd, LinkError};
#[cfg(feature = "server")]
use vgpu_transport::wire::DeviceIndex;
use vgpu_transport::wire::{MAX_FIRST_MESSAGE, ProtocolVersion, Reply, Request};

use super::answer::{Answer, ReadRange, Submitted};
use super::end_check::EndCheck;
use super::error::{SessionEnd, Violation};
use super::fallback_line::fallback_line;
use super::state::{Session, observe_turn};
use crate::activity::ThreadState;
use crate::lock::expect_unlocked;
use crate::size::shown;
use crate::stats::{SUBMIT, Stats};
use crate::stop::StopFlag;

/// How often an idle session checks its stop flag.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long the session waits for the guest's next request while the device executes a graph. A
/// guest that wants a result asks for it right after SUBMIT.
const LOOK_AHEAD: Duration = Duration::from_micros(50);

/// The first request of a guest, which is not carried out yet. The payload of the request is in the
/// link.
pub(crate) struct FirstRequest {
    request: u64,
    message: Vec<u8>,
}

impl FirstRequest {
    /// The device that the guest asks for. The first one if the request is no HELLO, which the
    /// session finds out.
    #[cfg(feature = "server")]
    pub(crate) fn device(&self) -> DeviceIndex {
        // HELLO is the same in every version.
        match Request::decode(ProtocolVersion::CURRENT, &self.message) {
            Ok(Request::Hello { device, .. }) => device,
            _ => DeviceIndex(0),
        }
    }
}

/// Waits up to `limit` for the first request of a guest.
///
/// # Errors
/// [`SessionEnd::NoHello`] if none arrives in time, the end that `stop` asks for, and
/// the failures of the link.
pub(crate) fn receive_first(
    link: &mut dyn HostEnd,
    limit: Duration,
    stop: &StopFlag,
) -> Result<FirstRequest, SessionEnd> {
    let connected = Instant::now();
    link.limit_first(MAX_FIRST_MESSAGE);
    let mut message = Vec::new();
    loop {
        if let Some(end) = SessionEnd::asked_by(stop) {
            return Err(end);
        }
        let left = limit.saturating_sub(connected.elapsed());
        if left.is_zero() {
            return Err(SessionEnd::NoHello(limit));
        }
        if let Some(incoming) = link.receive(&mut message, left.min(POLL_INTERVAL))? {
            let request = incoming.request;
            return Ok(FirstRequest { request, message });
        }
    }
}

/// Buffers of the loop for one received and one sent message.
#[derive(Default)]
struct Messages {
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

impl Session {
    /// Serves the guest until it disconnects, breaks the protocol, or `stop` is set. Tells the
    /// guest why, if it still listens. All resources of the session are freed when this returns.
    /// The caller's tracing span identifies the guest.
    pub fn run(mut self, link: &mut dyn HostEnd, stop: &StopFlag) -> SessionEnd {
        let start = Instant::now();
        cancel_at(link, stop);
        self.outside.begin();
        self.activity.set(ThreadState::FirstMessage);
        let first = receive_first(link, self.limits.hello, stop);
        let end = first.map_or_else(|end| end, |first| self.serve(first, link, stop));
        self.end(end, start, link)
    }

    /// As [`run`](Session::run), with a first request that has been received.
    pub(crate) fn run_from(
        mut self,
        first: FirstRequest,
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> SessionEnd {
        let start = Instant::now();
        cancel_at(link, stop);
        let end_check = EndCheck::new(link, stop);
        { &self.outside }.begin_with_link(&self.activity, &|| end_check.is_near());
        let end = self.serve(first, link, stop);
        self.end(end, start, link)
    }

    fn end(self, end: SessionEnd, start: Instant, link: &mut dyn HostEnd) -> SessionEnd {
        self.activity.end_turn();
        if !matches!(end, SessionEnd::Closed | SessionEnd::Link(_)) {
            self.activity.set(ThreadState::Replies);
            reject(link, &end);
        }
        self.activity.set(ThreadState::Ends);
        self.scheduler.forget(self.id);
        let stats = self.stats();
        let guest = self.guest().map(str::to_owned);
        let log = Arc::clone(&self.log);
        // Programs that compute nothing, such as `vgpu wait`, have added nothing to the figures.
        let has_computed = stats.graphs_run > 0;
        let fallback = has_computed.then(|| fallback_line(self.engine.as_ref()));
        self.free();
        let passes = log.passes(Instant::now());
        log_end(&stats, guest.as_deref(), link, (start, passes), &end);
        if let Some(line) = fallback.flatten()
            && log.passes(Instant::now())
        {
            info!("{line}");
        }
        end
    }

    /// Frees the memory of the session, while the activity still says that the session does so.
    fn free(self) {
        let Session {
            activity,
            outside,
            pinned,
            buffers,
            graphs,
            weights,
            ..
        } = self;
        expect_unlocked("the end of a session");
        drop(pinned);
        drop(buffers);
        drop(graphs);
        drop(weights);
        outside.end(&activity);
        drop(activity);
    }

    fn serve(
        &mut self,
        first: FirstRequest,
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> SessionEnd {
        self.can_share = self.limits.map_buffers && link.can_share();
        self.activity.set_link(link.watch());
        let mut messages = Messages::default();
        let mut first = Some(first);
        loop {
            if let Some(end) = SessionEnd::asked_by(stop) {
                return end;
            }
            self.merge_weights();
            let request = match first.take() {
                Some(FirstRequest { request, message }) => {
                    messages.incoming = message;
                    request
                }
                None => {
                    // Lets the device copy from and to the window directly, for as long as the
                    // session lives. Only after HELLO is answered: a call of a driver may hang.
                    if self.pinned.is_none() {
                        self.activity.set(ThreadState::Pins);
                        let window = link.window().cloned();
                        expect_unlocked("Engine::pin");
                        self.pinned = Some(window.and_then(|window| self.engine.pin(window)));
                        self.activity.set(ThreadState::Idle);
                    }
                    messages.incoming.clear();
                    match link.receive(&mut messages.incoming, POLL_INTERVAL) {
                        Ok(Some(incoming)) => incoming.request,
                        Ok(None) => continue,
                        Err(error) => return error.into(),
                    }
                }
            };
            let answer = match self.execute(request, &messages.incoming, link, stop) {
                Ok(answer) => answer,
                Err(end) => return end,
            };
            let outcome = match answer {
                Answer::InFlight(submitted) => self.complete(submitted, link, stop, &mut messages),
                answer => self.answer(request, answer, link, &mut messages.outgoing),
            };
            if let Err(end) = outcome {
                return match end {
                    // The guest has not taken its replies, and that is not why the session ends.
                    SessionEnd::Link(LinkError::Cancelled) => {
                        SessionEnd::asked_by(stop).unwrap_or(end)
                    }
                    end => end,
                };
            }
            link.retire();
            self.activity.retired();
            self.activity.set(ThreadState::Idle);
            if self.outside.is_due(&self.activity) {
                let end_check = EndCheck::new(link, stop);
                { &self.outside }.pay(&self.activity, &|| end_check.is_near());
                self.activity.set(ThreadState::Idle);
            }
        }
    }

    /// Decodes and executes a request. A panic is a bug of the host and ends the session.
    fn execute(
        &mut self,
        request: u64,
        message: &[u8],
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> Result<Answer, SessionEnd> {
        let bytes = message.len() + link.payload().len();
        self.counters.bytes_in.add(bytes as u64);
        let decoded =
            Request::decode(self.protocol, message).map_err(|error| Violation::Message {
                request,
                len: message.len(),
                error,
            })?;
        expect_unlocked("a request");
        // The session ends after a panic, so nothing sees state that the panic left inconsistent.
        catch_unwind(AssertUnwindSafe(|| {
            let answer = self.perform(request, decoded, link, stop);
            self.weights.trim_reservations(&self.buffers);
            answer
        }))
        .unwrap_or_else(|panic| Err(SessionEnd::Panic(panic_message(panic.as_ref()))))
    }

    /// Completes a graph that the device is executing. If the guest's next request is a READ, its
    /// copy is queued on the device behind the graph, and one wait serves both.
    fn complete(
        &mut self,
        submitted: Submitted,
        link: &mut dyn HostEnd,
        stop: &StopFlag,
        messages: &mut Messages,
    ) -> Result<(), SessionEnd> {
        let Messages { incoming, outgoing } = messages;
        let submit = submitted.request;
        let protocol = self.protocol;
        incoming.clear();
        let is_read = |message: &[u8]| is_read(protocol, message);
        let next = link.receive_ahead(&is_read, incoming, LOOK_AHEAD);
        let next = next.map(|next| {
            let request = next?.request;
            Some((request, self.execute(request, incoming, link, stop)))
        });
        let next = match next {
            // A guest that does not take its replies must not keep the device from other guests.
            Ok(Some((request, Ok(Answer::Data(read)))))
                if has_room(link, (protocol, request), read.len) =>
            {
                return self.send_behind(submitted, request, read, link, outgoing);
            }
            next => next,
        };
        let outcome = self.wait(submitted)?;
        self.answer(submit, outcome, link, outgoing)?;
        match next? {
            Some((request, answer)) => self.answer(request, answer?, link, outgoing),
            None => Ok(()),
        }
    }

    /// Sends the bytes that READ `request` asks for, as they are after the graph that is in flight.
    fn send_behind(
        &mut self,
        submitted: Submitted,
        request: u64,
        read: ReadRange,
        link: &mut dyn HostEnd,
        outgoing: &mut Vec<u8>,
    ) -> Result<(), SessionEnd> {
        outgoing.clear();
        Reply::Data { request }.encode(self.protocol, outgoing);
        let submit = submitted.request;
        let room = link.reserve(outgoing.len(), read.len);
        let copied = room.map(|out| read.memory.read(read.offset, out));
        // In any case: the graph has the device until then.
        let outcome = self.wait(submitted)?;
        if copied?.is_ok() && matches!(outcome, Answer::Nothing) {
            link.send_reserved(outgoing)?;
            self.counters.round_trips.add(1);
            self.count_sent(outgoing.len() + read.len);
            return Ok(());
        }
        // The guest learns of the graph's failure before its READ is answered. A lost device fails
        // the READ, too.
        self.answer(submit, outcome, link, outgoing)?;
        self.answer(request, Answer::Data(read), link, outgoing)
    }

    /// Waits until the device has executed a graph.
    fn wait(&mut self, submitted: Submitted) -> Result<Answer, SessionEnd> {
        let Submitted {
            request,
            graph,
            info,
            run,
        } = submitted;
        let Some(plan) = self.graphs.submitted(graph) else {
            // No request is executed between SUBMIT and this that could remove the graph.
            return Err(SessionEnd::Panic("a graph in flight is gone".into()));
        };
        let (activity, counters) = (&self.activity, &self.counters);
        let observe = |turning| observe_turn(activity, counters, (request, SUBMIT), &info, turning);
        let (outcome, times) = catch_unwind(AssertUnwindSafe(|| run.wait(plan, observe)))
            .map_err(|panic| SessionEnd::Panic(panic_message(panic.as_ref())))?;
        Ok(self.ran(request, graph, outcome, times))
    }

    /// Sends what a request calls for.
    fn answer(
        &mut self,
        request: u64,
        answer: Answer,
        link: &mut dyn HostEnd,
        outgoing: &mut Vec<u8>,
    ) -> Result<(), SessionEnd> {
        outgoing.clear();
        let reply = match answer {
            Answer::Nothing => return Ok(()),
            Answer::InFlight(submitted) => {
                let outcome = self.wait(submitted)?;
                return self.answer(request, outcome, link, outgoing);
            }
            Answer::Data(read) => return self.send_data(request, &read, link, outgoing),
            Answer::Message(reply) => {
                self.counters.round_trips.add(1);
                reply
            }
            Answer::Shared { file, size } => {
                self.counters.round_trips.add(1);
                // A guest that does not take the file reads and writes by messages.
                match link.share(file.as_fd()) {
                    true => Reply::Shared { request, size },
                    false => Reply::Done { request },
                }
            }
            Answer::Failure {
                reply,
                kind,
                reason,
            } => {
                self.counters.failure(kind);
                if self.may_log() {
                    warn!(request, "{reason}");
                } else {
                    debug!(request, "{reason}");
                }
                reply
            }
        };
        reply.encode(self.protocol, outgoing);
        self.activity.continue_request(ThreadState::Replies);
        link.send(outgoing, 0, &mut |_| {})?;
        self.count_sent(outgoing.len());
        Ok(())
    }

    fn send_data(
        &mut self,
        request: u64,
        read: &ReadRange,
        link: &mut dyn HostEnd,
        outgoing: &mut Vec<u8>,
    ) -> Result<(), SessionEnd> {
        self.counters.round_trips.add(1);
        Reply::Data { request }.encode(self.protocol, outgoing);
        // The link waits for room, which the guest makes.
        self.activity.continue_request(ThreadState::Replies);
        let room = link.reserve(outgoing.len(), read.len)?;
        self.activity.continue_request(ThreadState::Executes);
        let copied = read.memory.read(read.offset, room);
        self.activity.continue_request(ThreadState::Replies);
        copied.map_err(SessionEnd::Engine)?;
        link.send_reserved(outgoing)?;
        self.count_sent(outgoing.len() + read.len);
        Ok(())
    }

    fn count_sent(&self, bytes: usize) {
        self.counters.bytes_out.add(bytes as u64);
    }
}

/// Logs the end of a session that began at `start`: one line for operators if it `passes` the limit
/// of lines, and one with every figure at level debug.
fn log_end(
    stats: &Stats,
    guest: Option<&str>,
    link: &dyn HostEnd,
    (start, passes): (Instant, bool),
    end: &SessionEnd,
) {
    let link = link.counters();
    let guest = guest.unwrap_or("unknown, no HELLO received");
    let failures = stats.failures.total();
    let size = |bytes: u64| display(shown(bytes));
    // Sizes that are mostly zero appear only if they are not.
    let if_any = |bytes: u64| (bytes > 0).then(|| size(bytes));
    macro_rules! closed {
        ($level:ident) => {
            $level!(
                guest,
                requests = stats.requests(),
                graphs = stats.graphs_run,
                failures = (failures > 0).then_some(failures),
                received = size(stats.bytes_in),
                sent = size(stats.bytes_out),
                freed = size(stats.buffer_bytes),
                weights_not_sent = if_any(stats.weights_not_sent),
                weights_shared = if_any(stats.weights_shared),
                open = display(format_args!("{:.1?}", start.elapsed())),
                "session closed: {end}"
            )
        };
    }
    match end {
        // A fault of the host is always said.
        SessionEnd::Panic(_) | SessionEnd::Engine(_) => closed!(error),
        _ if !passes => closed!(debug),
        SessionEnd::Closed | SessionEnd::Shutdown => closed!(info),
        _ => closed!(warn),
    }
    debug!(
        guest,
        requests = stats.requests(),
        kinds = %stats,
        replies = link.messages_out,
        bytes_in = stats.bytes_in,
        bytes_out = stats.bytes_out,
        round_trips = stats.round_trips,
        spins = link.spins,
        sleeps = link.sleeps,
        kicks = link.kicks,
        failures,
        full_graphs = stats.full_graphs,
        patches = stats.patches,
        graphs_run = stats.graphs_run,
        nodes_run = stats.nodes_run,
        busy = ?stats.busy,
        queued = ?stats.queued,
        turns = stats.turns,
        batch_members = stats.batch_members,
        open = ?start.elapsed(),
        freed = stats.buffer_bytes,
        weights_not_sent = stats.weights_not_sent,
        weights_shared = stats.weights_shared,
        "session totals"
    );
}

/// Once `stop` is set, the link waits for no guest that takes no replies.
fn cancel_at(link: &mut dyn HostEnd, stop: &StopFlag) {
    let stop = stop.clone();
    link.set_cancel(Box::new(move || stop.is_set()));
}

/// Whether a message is a READ of at least one byte.
fn is_read(protocol: ProtocolVersion, message: &[u8]) -> bool {
    matches!(Request::decode(protocol, message), Ok(Request::Read { len, .. }) if len > 0)
}

/// Whether the link can take the reply to a READ without waiting for the guest.
fn has_room(
    link: &mut dyn HostEnd,
    (protocol, request): (ProtocolVersion, u64),
    len: usize,
) -> bool {
    let mut message = Vec::new();
    Reply::Data { request }.encode(protocol, &mut message);
    link.has_room(message.len(), len)
}

/// Tells a guest why its session ends. The guest may be gone already, so a failure is only logged.
pub(crate) fn reject(link: &mut dyn HostEnd, end: &SessionEnd) {
    let reason = match end {
        // The panic message is for the host's log.
        SessionEnd::Panic(_) => "the host failed while it executed a request".to_owned(),
        other => other.to_string(),
    };
    let mut message = Vec::new();
    // The same bytes in every version: the guest may be one that this host does not speak.
    Reply::Ended { reason }.encode(ProtocolVersion::CURRENT, &mut message);
    match link.send_last(&message) {
        Ok(()) | Err(LinkError::Closed) => {}
        Err(error) => debug!("the guest cannot be told why its session ends: {error}"),
    }
}
