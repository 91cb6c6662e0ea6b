//! One end of a session: numbered requests out, replies in, and what is under way between them.
//!
//! The executor executes the requests of a session in order and answers in order. One-way requests
//! have no answer: the link says up to which request all are done, and a failure arrives as a
//! message of its own, before the link says that the failed request is done.

use std::collections::VecDeque;
use std::sync::Arc;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::fork::Owner;
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::{Counters, GuestEnd};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, ProtocolVersion, Reply, Request};

use super::error::{LossReason, SessionError};
use super::pending::{BackendId, Failure, PendingRead, Submission};
use crate::graph_cache::{GraphUpload, Known};
use crate::stats::{Copied, Sent, Stats, SubmittedGraph, Traffic};
use crate::waits::{WaitStage, Waits};

/// Messages that are received from a link that is closed, in search of the reason.
const LAST_MESSAGES: usize = 4096;

/// The most bytes of all pending reads together. The executor must be able to put all answers into
/// the ring: otherwise it would wait for a program that is busy elsewhere.
const MAX_PENDING_READS: usize = 2 << 20;

/// The guest's end of a session. Shared by all threads under one lock
/// ([`SharedConnection`](super::shared::SharedConnection)).
pub(super) struct Connection {
    pub(super) end: Box<dyn GuestEnd>,
    /// The version of the messages.
    protocol: ProtocolVersion,
    /// The process that has opened the connection.
    owner: Owner,
    /// The message that is being encoded or decoded.
    message: Vec<u8>,
    pub(super) last_buffer: u64,
    pub(super) last_backend: u64,
    /// The number of the last request.
    sent: u64,
    /// The last request that was answered: done, with all requests before it, even if the link does
    /// not say so yet.
    answered: u64,
    /// The last request whose payload is in the program's memory until the request is done.
    last_staged: u64,
    host_buffers: Vec<HostBufferRange>,
    /// Graphs under way, oldest first.
    submissions: VecDeque<Submission>,
    /// Asynchronous reads under way, oldest first.
    pending_reads: VecDeque<PendingRead>,
    /// Failures that no graph has reported yet.
    failures: Vec<Failure>,
    /// The number of times that a caller waited for the executor.
    pub(super) round_trips: u64,
    pub(super) copied: Copied,
    stats: Stats,
    waits: Arc<Waits>,
}

/// The memory of a host buffer, which asynchronous reads and writes may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostBufferRange {
    /// The address of the buffer.
    pub(super) base: usize,
    /// The bytes of the buffer.
    pub(super) size: usize,
    /// The offset in the memory of the link, if the buffer is part of that memory.
    pub(super) staging_offset: Option<usize>,
}

impl Connection {
    /// A connection after the handshake, which was request 1. Its ids are those after `last_id`.
    pub(super) fn new(
        end: Box<dyn GuestEnd>,
        protocol: ProtocolVersion,
        waits: Arc<Waits>,
        last_id: u64,
    ) -> Connection {
        Connection {
            end,
            protocol,
            owner: Owner::current(),
            message: Vec::new(),
            last_buffer: last_id,
            last_backend: last_id,
            sent: 1,
            answered: 0,
            last_staged: 0,
            host_buffers: Vec::new(),
            submissions: VecDeque::new(),
            pending_reads: VecDeque::new(),
            failures: Vec::new(),
            round_trips: 1,
            copied: Copied::default(),
            stats: Stats::default(),
            waits,
        }
    }

    /// A buffer id that the session has not used.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if there is none left.
    pub(super) fn new_buffer_id(&mut self) -> Result<BufferId, SessionError> {
        next(&mut self.last_buffer, "buffer ids").map(BufferId)
    }

    /// A backend id that the session has not used.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if there is none left.
    pub(super) fn new_backend_id(&mut self) -> Result<BackendId, SessionError> {
        next(&mut self.last_backend, "backend ids").map(BackendId)
    }

    /// The number of the last request.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends a request without a payload. Returns the number of the request.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the link is broken.
    pub(super) fn send(&mut self, request: &Request) -> Result<u64, SessionError> {
        self.send_with(request, (&[][..]).into())
    }

    /// Sends a request with a payload. Returns the number of the request.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the link is broken.
    pub(super) fn send_with(
        &mut self,
        request: &Request,
        payload: Bytes<'_>,
    ) -> Result<u64, SessionError> {
        self.message.clear();
        request.encode(self.protocol, &mut self.message);
        self.waits
            .begin(WaitStage::Sends, self.sent.saturating_add(1));
        self.sent = self.end.send(&self.message, payload)?;
        self.waits.sent(self.sent);
        Ok(self.sent)
    }

    /// Sends a request whose payload is in the memory of the link, at these bytes of it. The
    /// payload must not change before the request is done.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the link is broken.
    pub(super) fn send_staged(
        &mut self,
        request: &Request,
        payload: std::ops::Range<usize>,
    ) -> Result<u64, SessionError> {
        self.message.clear();
        request.encode(self.protocol, &mut self.message);
        self.waits
            .begin(WaitStage::Sends, self.sent.saturating_add(1));
        self.sent = self.end.send_staged(&self.message, payload)?;
        self.last_staged = self.sent;
        self.waits.sent(self.sent);
        Ok(self.sent)
    }

    /// Sends a request without a payload and waits for its answer, which has no payload either.
    ///
    /// # Errors
    ///
    /// [`SessionError::Refused`] if the executor refuses, [`SessionError::Lost`] if the session is
    /// lost.
    pub(super) fn ask(&mut self, request: &Request) -> Result<Reply, SessionError> {
        self.round_trips += 1;
        let request = self.send(request)?;
        self.reply_to(request, (&mut [][..]).into())
    }

    /// Waits for the answer to `request`, after it has received the pending reads before it. The
    /// payload of the answer fills `payload`.
    ///
    /// # Errors
    ///
    /// As for [`ask`](Connection::ask).
    pub(super) fn reply_to(
        &mut self,
        request: u64,
        payload: BytesMut<'_>,
    ) -> Result<Reply, SessionError> {
        self.receive_reads_before(request)?;
        self.next_reply(request, payload)
    }

    /// Waits until `request` and all requests before it are done.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the link is broken.
    pub(super) fn wait(&mut self, request: u64) -> Result<(), SessionError> {
        if self.done() < request {
            self.round_trips += 1;
            self.waits.begin(WaitStage::AwaitsEnd, request);
            self.end.wait_retired(request)?;
        }
        Ok(())
    }

    /// The last request that is done. All requests before it are done, too.
    fn done(&self) -> u64 {
        self.end.retired().max(self.answered)
    }

    /// Whether all requests are done. The executor then does not access memory that both sides have
    /// mapped.
    pub(super) fn is_idle(&self) -> bool {
        self.done() == self.sent
    }

    /// From now on, asynchronous reads and writes may use the memory of a host buffer.
    pub(super) fn add_host_buffer(&mut self, range: HostBufferRange) {
        self.host_buffers.push(range);
    }

    /// The opposite, for the host buffer at address `base`.
    pub(super) fn remove_host_buffer(&mut self, base: usize) {
        self.host_buffers.retain(|range| range.base != base);
    }

    /// The host buffer that contains `len` bytes at `at`.
    pub(super) fn host_buffer_of(&self, at: *const u8, len: usize) -> Option<HostBufferRange> {
        let contains = |range: &&HostBufferRange| {
            let offset = at.addr().wrapping_sub(range.base);
            offset <= range.size && len <= range.size - offset
        };
        self.host_buffers.iter().find(contains).copied()
    }

    /// Sends a read whose answer is received later. Returns `false`, and sends nothing, if too many
    /// bytes are pending.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the link is broken.
    pub(super) fn send_read(
        &mut self,
        offset: u64,
        mut read: PendingRead,
    ) -> Result<bool, SessionError> {
        let pending: usize = self.pending_reads.iter().map(PendingRead::len).sum();
        if pending + read.len() > MAX_PENDING_READS || read.len() > MAX_PAYLOAD {
            return Ok(false);
        }
        read.request = self.send(&Request::Read {
            buffer: read.buffer,
            offset,
            len: read.len() as u64,
        })?;
        self.pending_reads.push_back(read);
        Ok(true)
    }

    /// Whether there are asynchronous reads whose answers were not received.
    pub(super) fn has_pending_reads(&self) -> bool {
        !self.pending_reads.is_empty()
    }

    /// The request that a synchronisation waits for: the last graph, or the last write whose
    /// payload is in the program's memory. Later writes are not waited for: their data was copied,
    /// and every request that could see their effect comes after them.
    pub(super) fn last_to_wait_for(&self) -> u64 {
        let submission = self.submissions.back().map_or(0, |s| s.request);
        submission.max(self.last_staged)
    }

    /// Waits for all pending reads.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(super) fn receive_reads(&mut self) -> Result<(), SessionError> {
        self.receive_reads_before(u64::MAX)
    }

    /// Waits for the pending reads before `request`. A read that fails poisons its memory.
    fn receive_reads_before(&mut self, request: u64) -> Result<(), SessionError> {
        while self
            .pending_reads
            .front()
            .is_some_and(|r| r.request < request)
        {
            let Some(mut read) = self.pending_reads.pop_front() else {
                break;
            };
            if let Err(error) = self.next_reply(read.request, read.room()) {
                read.poison();
                return Err(error);
            }
            if let Err(error) = self.check(read.buffer) {
                tracing::error!("cannot read buffer {}: {error}", read.buffer.0);
                read.poison();
            }
        }
        Ok(())
    }

    /// Checks that no failed request may have written the buffer. A failure remains until a graph
    /// reports it, because a read cannot report it to ggml.
    ///
    /// # Errors
    ///
    /// [`SessionError::Failed`] with the reason of the failed request.
    pub(super) fn check(&self, buffer: BufferId) -> Result<(), SessionError> {
        let concerns = |failure: &&Failure| failure.concerns_buffer(buffer);
        match self.failures.iter().find(concerns) {
            Some(failure) => Err(SessionError::Failed(failure.reason.clone())),
            None => Ok(()),
        }
    }

    /// Reports an earlier failure that concerns `backend`, and forgets all such failures.
    ///
    /// # Errors
    ///
    /// [`SessionError::Failed`] with the reason of the oldest failure.
    pub(super) fn take_failure(&mut self, backend: BackendId) -> Result<(), SessionError> {
        let concerns = |failure: &&Failure| failure.concerns_backend(backend);
        let Some(failure) = self.failures.iter().find(concerns) else {
            return Ok(());
        };
        let error = SessionError::Failed(failure.reason.clone());
        self.forget_failures(backend);
        Err(error)
    }

    /// Forgets the failures that concern `backend`.
    pub(super) fn forget_failures(&mut self, backend: BackendId) {
        self.failures
            .retain(|failure| !failure.concerns_backend(backend));
    }

    /// Poisons the memory of all pending reads: the session is lost, their answers will not come.
    pub(super) fn poison_reads(&mut self) {
        for mut read in self.pending_reads.drain(..) {
            read.poison();
        }
    }

    /// Waits for the next answer, which must be the answer to `request`. Keeps the failures that
    /// arrive before it.
    fn next_reply(
        &mut self,
        request: u64,
        mut payload: BytesMut<'_>,
    ) -> Result<Reply, SessionError> {
        self.waits.begin(WaitStage::AwaitsAnswer, request);
        loop {
            self.message.clear();
            let expected = payload.len();
            let got = self.end.receive(&mut self.message, payload.reborrow())?;
            let reply = Reply::decode(self.protocol, &self.message)?;
            let number = match &reply {
                Reply::Failed { .. } | Reply::Ended { .. } => {
                    self.on_async_reply(reply)?;
                    continue;
                }
                Reply::Refused { request, .. }
                | Reply::Done { request }
                | Reply::Shared { request, .. }
                | Reply::Data { request }
                | Reply::Held { request, .. }
                | Reply::Missing { request }
                | Reply::Have { request, .. }
                | Reply::Prove { request, .. }
                | Reply::Memory { request, .. } => *request,
                Reply::Welcome { .. } => return Err(SessionError::unexpected(reply)),
            };
            if number != request {
                return Err(LossReason::WrongRequest {
                    got: number,
                    expected: request,
                }
                .into());
            }
            self.answered = number;
            if let Reply::Refused { reason, .. } = reply {
                return Err(SessionError::Refused(reason));
            }
            if got != expected {
                return Err(LossReason::WrongLength { got, expected }.into());
            }
            return Ok(reply);
        }
    }

    /// Receives all messages that have arrived, without waiting: the answers to pending reads that
    /// are done, and failures.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(super) fn drain(&mut self) -> Result<(), SessionError> {
        // The executor sends the answer to a request, or its failure, before it marks the request
        // as done.
        let done = self.end.retired();
        self.receive_reads_before(done.saturating_add(1))?;
        while self.receive_arrived()? {}
        self.submissions
            .retain(|submission| submission.request > done);
        Ok(())
    }

    /// Receives a message that answers no request, if one has arrived. Returns whether there was
    /// one.
    fn receive_arrived(&mut self) -> Result<bool, SessionError> {
        self.message.clear();
        if !self.end.try_receive(&mut self.message)? {
            return Ok(false);
        }
        let reply = Reply::decode(self.protocol, &self.message)?;
        self.on_async_reply(reply)?;
        Ok(true)
    }

    /// Why the executor has ended the session, if it has sent that before the link was closed: a
    /// request that finds the link closed has not received the message. Waits for nothing, because
    /// the link is closed, and looks at [`LAST_MESSAGES`] at most: a hostile executor may close the
    /// link and send on.
    pub(super) fn reason_of_end(&mut self) -> Option<LossReason> {
        let mut outcome = self.receive_reads().map(|()| true);
        for _ in 0..LAST_MESSAGES {
            match outcome {
                Ok(true) => outcome = self.receive_arrived(),
                _ => break,
            }
        }
        match outcome {
            Err(SessionError::Lost(reason @ LossReason::Ended(_))) => Some(reason),
            _ => None,
        }
    }

    /// Handles a message that answers no request: a failure, or the end of the session.
    fn on_async_reply(&mut self, reply: Reply) -> Result<(), SessionError> {
        match reply {
            Reply::Failed { request, reason } => {
                tracing::error!("request {request} failed in the executor: {reason}");
                let submission = self
                    .submissions
                    .iter()
                    .find(|submission| submission.request == request);
                let graph = submission.map(|s| (s.backend, Arc::clone(&s.buffers)));
                self.failures.push(Failure { graph, reason });
                Ok(())
            }
            Reply::Ended { reason } => Err(LossReason::Ended(reason).into()),
            other => Err(SessionError::unexpected(other)),
        }
    }

    /// Submits a graph: sends what the executor lacks of it, and the request to run it.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the link is broken.
    pub(super) fn submit(
        &mut self,
        backend: BackendId,
        known: Known,
        graph: SubmittedGraph,
    ) -> Result<(), SessionError> {
        let graph = SubmittedGraph {
            nodes: known.nodes,
            sent: match known.upload {
                GraphUpload::Nothing => Sent::Nothing,
                GraphUpload::Patch { .. } => Sent::Patch,
                GraphUpload::Full { .. } => Sent::Full,
            },
            ..graph
        };
        let before = self.traffic();
        self.stats.begin_step(before, graph);
        if let Some(graph) = known.evicted {
            self.send(&Request::Forget { graph })?;
        }
        match known.upload {
            GraphUpload::Nothing => {}
            GraphUpload::Patch { base, bytes } => {
                let graph = known.graph;
                self.send_with(&Request::Patch { graph, base }, bytes[..].into())?;
            }
            GraphUpload::Full { bytes } => self.send_graph(known.graph, &bytes)?,
        }
        let request = self.send(&Request::Submit { graph: known.graph })?;
        self.submissions.push_back(Submission {
            request,
            backend,
            buffers: known.buffers,
        });
        Ok(())
    }

    fn send_graph(&mut self, graph: GraphId, image: &[u8]) -> Result<(), SessionError> {
        let total = image.len() as u64;
        let mut offset = 0;
        for part in image.chunks(MAX_PAYLOAD) {
            let request = Request::Graph {
                graph,
                offset,
                total,
            };
            self.send_with(&request, part.into())?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// The traffic so far. Round trips are those that a caller waited for.
    pub(super) fn traffic(&self) -> Traffic {
        Traffic {
            link: Counters {
                round_trips: self.round_trips,
                ..self.end.counters()
            },
            copied: self.copied,
        }
    }

    /// Ends the current step and returns the statistics so far.
    pub(super) fn stats(&mut self) -> Stats {
        let traffic = self.traffic();
        self.stats.finish_step(traffic);
        self.stats.clone()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The reads of a forked child's copy are those of its parent, which still waits for them.
        if self.owner.is_current() {
            self.poison_reads();
        }
    }
}

/// The number after `last`, which becomes the last one.
///
/// # Errors
///
/// [`SessionError::Lost`] if `last` is the largest number: the next load opens a new session.
fn next(last: &mut u64, what: &'static str) -> Result<u64, SessionError> {
    *last = last.checked_add(1).ok_or(LossReason::NoneLeft { what })?;
    Ok(*last)
}
