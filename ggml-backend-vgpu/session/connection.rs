//! The conversation with the host: what is under way, what came of it.

use std::collections::VecDeque;
use std::sync::Arc;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::{Counters, GuestEnd, LinkError};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, Reply, Request, WireError};

use super::{SessionError, StreamId};
use crate::graphs::{Graphs, Known, News};
use crate::stats::{Copied, Crossed, Stats};
use crate::weights::Progress;

/// Most bytes of answers to reads that nobody waits for yet. The host must be able to put all of them into its
/// ring, or it would wait for a program that does something else.
const MOST_LANDING: usize = 2 << 20;

/// One end of a session, under its lock.
pub(super) struct Connection {
    pub(super) end: Box<dyn GuestEnd>,
    message: Vec<u8>,
    pub(super) next_buffer: u64,
    pub(super) next_stream: u64,
    pub(super) graphs: Graphs,
    /// Number of the last request.
    pub(super) sent: u64,
    /// The last request that was answered. So it is done, as are those before it, even if the host has not said yet that they
    /// have retired.
    answered: u64,
    /// The last request whose payload is the program's until it is done.
    last_lent: u64,
    /// Memory of our own that programs may ask us to read into, or write from, later.
    pub(super) host_memory: Vec<HostMemory>,
    /// Graphs on their way, oldest first.
    submissions: VecDeque<Submission>,
    /// Reads on their way that nobody waits for yet, oldest first.
    landings: VecDeque<Landing>,
    /// Buffers for weights that are being filled.
    pub(super) uploads: Vec<(BufferId, Arc<Progress>)>,
    /// What has failed and is not yet reported.
    pub(super) failures: Vec<Failure>,
    /// Times that a caller had to wait for the host before it could go on.
    pub(super) round_trips: u64,
    pub(super) copied: Copied,
    pub(super) stats: Stats,
}

/// Memory of a host buffer: see [`Session::host_memory`](super::Session::host_memory).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostMemory {
    /// Its address.
    pub(super) base: usize,
    /// Its bytes.
    pub(super) size: usize,
    /// Where it lies in the link's window, if it was lent by the link.
    pub(super) lent: Option<usize>,
}

/// A graph on its way.
struct Submission {
    request: u64,
    stream: StreamId,
    buffers: Arc<[BufferId]>,
}

/// A read on its way whose bytes are wanted at the next synchronisation.
pub(super) struct Landing {
    pub(super) request: u64,
    pub(super) buffer: BufferId,
    pub(super) to: *mut u8,
    pub(super) len: usize,
    /// What the bytes are set to if the read fails.
    pub(super) poison: u8,
}

// SAFETY: the pointer is to memory that the program keeps until it has synchronised, or that is ours and lands what
// is under way before it goes (`Session::read_later`); any thread may write there.
unsafe impl Send for Landing {}

impl Landing {
    fn room(&mut self) -> BytesMut<'_> {
        // SAFETY: `Session::read_later`'s caller vouches for the bytes until they have landed.
        unsafe { BytesMut::from_raw(self.to, self.len) }
    }

    fn spoil(&mut self) {
        // SAFETY: as in `room`.
        unsafe { self.to.write_bytes(self.poison, self.len) };
    }
}

/// A one-way request that has failed. The next graph of its stream reports it; until then, what is read
/// from the buffers it may have written is not a result.
pub(super) struct Failure {
    /// The graph's stream and buffers; `None` when it was not a graph: then all are concerned.
    submission: Option<(StreamId, Arc<[BufferId]>)>,
    pub(super) reason: String,
}

impl Failure {
    pub(super) fn concerns_stream(&self, stream: StreamId) -> bool {
        self.submission
            .as_ref()
            .is_none_or(|(failed, _)| *failed == stream)
    }

    pub(super) fn concerns_buffer(&self, buffer: BufferId) -> bool {
        self.submission
            .as_ref()
            .is_none_or(|(_, buffers)| buffers.contains(&buffer))
    }
}

impl Connection {
    /// A conversation that has gone as far as the greeting, which was the first request.
    pub(super) fn new(end: Box<dyn GuestEnd>) -> Connection {
        Connection {
            end,
            message: Vec::new(),
            next_buffer: 1,
            next_stream: 1,
            graphs: Graphs::default(),
            sent: 1,
            answered: 0,
            last_lent: 0,
            host_memory: Vec::new(),
            submissions: VecDeque::new(),
            landings: VecDeque::new(),
            uploads: Vec::new(),
            failures: Vec::new(),
            round_trips: 1,
            copied: Copied::default(),
            stats: Stats::default(),
        }
    }

    /// Sends a request. Returns its number.
    pub(super) fn send(
        &mut self,
        request: &Request,
        payload: Bytes<'_>,
    ) -> Result<u64, SessionError> {
        self.message.clear();
        request.encode(&mut self.message);
        self.sent = self.end.send(&self.message, payload).map_err(lost)?;
        Ok(self.sent)
    }

    /// The same with a payload that lies in lent memory.
    pub(super) fn send_lent(
        &mut self,
        request: &Request,
        payload: std::ops::Range<usize>,
    ) -> Result<u64, SessionError> {
        self.message.clear();
        request.encode(&mut self.message);
        self.sent = self.end.send_lent(&self.message, payload).map_err(lost)?;
        self.last_lent = self.sent;
        Ok(self.sent)
    }

    /// What crossed so far, with round trips as a caller feels them.
    pub(super) fn crossed(&self) -> Crossed {
        Crossed {
            link: Counters {
                round_trips: self.round_trips,
                ..self.end.counters()
            },
            copied: self.copied,
        }
    }

    /// Sends a request without a payload and waits for its answer.
    pub(super) fn ask(&mut self, request: &Request) -> Result<Reply, SessionError> {
        self.round_trips += 1;
        let request = self.send(request, (&[][..]).into())?;
        self.reply_to(request, (&mut [][..]).into())
    }

    /// The answer to `request`; reads that nobody waited for and that are answered before it land where they belong.
    pub(super) fn reply_to(
        &mut self,
        request: u64,
        payload: BytesMut<'_>,
    ) -> Result<Reply, SessionError> {
        self.land(request)?;
        self.next_reply(request, payload)
    }

    /// Waits until every request so far is done.
    pub(super) fn wait(&mut self, request: u64) -> Result<(), SessionError> {
        if self.done() < request {
            self.round_trips += 1;
            self.end.wait_retired(request).map_err(lost)?;
        }
        Ok(())
    }

    /// The last request that is done, as are all before it.
    fn done(&self) -> u64 {
        self.end.retired().max(self.answered)
    }

    /// Whether no request is under way, so that memory that both sides have mapped is ours alone.
    pub(super) fn is_quiet(&self) -> bool {
        self.done() == self.sent
    }

    /// The host memory that these bytes lie in.
    pub(super) fn host_memory_of(&self, at: *const u8, len: usize) -> Option<HostMemory> {
        let holds = |memory: &&HostMemory| {
            let offset = at.addr().wrapping_sub(memory.base);
            offset <= memory.size && len <= memory.size - offset
        };
        self.host_memory.iter().find(holds).copied()
    }

    /// Asks for bytes that are not waited for. `false` when there are too many on their way already.
    pub(super) fn read_later(
        &mut self,
        offset: u64,
        mut landing: Landing,
    ) -> Result<bool, SessionError> {
        let on_their_way: usize = self.landings.iter().map(|landing| landing.len).sum();
        if on_their_way + landing.len > MOST_LANDING || landing.len > MAX_PAYLOAD {
            return Ok(false);
        }
        let request = Request::Read {
            buffer: landing.buffer,
            offset,
            len: landing.len as u64,
        };
        landing.request = self.send(&request, (&[][..]).into())?;
        self.landings.push_back(landing);
        Ok(true)
    }

    /// Whether there is anything that a synchronisation has to wait for.
    pub(super) fn is_landing(&self) -> bool {
        !self.landings.is_empty()
    }

    /// What a synchronisation waits for: the last graph, and the last write whose data is the program's. Other writes
    /// behind them are not waited for: their data is already out of the caller's hands, and whatever could see
    /// their effect comes after them.
    pub(super) fn last_to_wait_for(&self) -> u64 {
        let submission = self.submissions.back().map_or(0, |s| s.request);
        submission.max(self.last_lent)
    }

    /// Waits for the reads before `request` that nobody has waited for.
    pub(super) fn land(&mut self, request: u64) -> Result<(), SessionError> {
        while self.landings.front().is_some_and(|l| l.request < request) {
            let Some(mut landing) = self.landings.pop_front() else {
                break;
            };
            if let Err(error) = self.next_reply(landing.request, landing.room()) {
                landing.spoil();
                return Err(error);
            }
            if let Err(error) = self.check(landing.buffer) {
                tracing::error!("cannot read from buffer {}: {error}", landing.buffer.0);
                landing.spoil();
            }
        }
        Ok(())
    }

    /// Whether what is read from a buffer is a result. A failure stays for the next graph to report: to ggml, a
    /// read cannot fail.
    pub(super) fn check(&self, buffer: BufferId) -> Result<(), SessionError> {
        let failed = |failure: &&Failure| failure.concerns_buffer(buffer);
        match self.failures.iter().find(failed) {
            Some(failure) => Err(SessionError::Failed(failure.reason.clone())),
            None => Ok(()),
        }
    }

    /// The session is lost: what was to be read never comes.
    pub(super) fn abandon(&mut self) {
        for mut landing in self.landings.drain(..) {
            landing.spoil();
        }
    }

    /// The host's next answer, which must be to `request`; failures of one-way requests that arrive before it are
    /// kept.
    fn next_reply(
        &mut self,
        request: u64,
        mut payload: BytesMut<'_>,
    ) -> Result<Reply, SessionError> {
        loop {
            self.message.clear();
            let expected = payload.len();
            let received = self
                .end
                .receive(&mut self.message, payload.reborrow())
                .map_err(lost)?;
            let reply = Reply::decode(&self.message).map_err(broken)?;
            let number = match &reply {
                Reply::Failed { .. } | Reply::Ended { .. } => {
                    self.aside(reply)?;
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
                Reply::Welcome { .. } => return Err(unexpected(&reply)),
            };
            if number != request {
                return Err(SessionError::Lost(format!(
                    "it answered request {number} instead of {request}"
                )));
            }
            self.answered = number;
            if let Reply::Refused { reason, .. } = reply {
                return Err(SessionError::Refused(reason));
            }
            if received != expected {
                return Err(SessionError::Lost(format!(
                    "it sent {received} bytes instead of {expected}"
                )));
            }
            return Ok(reply);
        }
    }

    /// Takes in what the host has said without being asked.
    pub(super) fn drain(&mut self) -> Result<(), SessionError> {
        // The host answers a request, or says that it has failed, before it says that it is done.
        let done = self.end.retired();
        self.land(done.saturating_add(1))?;
        loop {
            self.message.clear();
            if !self.end.try_receive(&mut self.message).map_err(lost)? {
                self.submissions
                    .retain(|submission| submission.request > done);
                return Ok(());
            }
            let reply = Reply::decode(&self.message).map_err(broken)?;
            self.aside(reply)?;
        }
    }

    /// A message that answers no question of ours.
    fn aside(&mut self, reply: Reply) -> Result<(), SessionError> {
        match reply {
            Reply::Failed { request, reason } => {
                tracing::error!("request {request} failed in the executor: {reason}");
                let submission = self
                    .submissions
                    .iter()
                    .find(|submission| submission.request == request);
                let submission = submission.map(|s| (s.stream, Arc::clone(&s.buffers)));
                self.failures.push(Failure { submission, reason });
                Ok(())
            }
            Reply::Ended { reason } => Err(SessionError::Lost(reason)),
            other => Err(unexpected(&other)),
        }
    }

    /// Forgets every graph that uses `buffer`, and so does the host.
    pub(super) fn forget_users(&mut self, buffer: BufferId) -> Result<(), SessionError> {
        for graph in self.graphs.remove_users(buffer) {
            self.send(&Request::Forget { graph }, (&[][..]).into())?;
        }
        Ok(())
    }

    /// Sends the graph, unless the host has it, and the order to run it.
    pub(super) fn run(&mut self, stream: StreamId, known: Known) -> Result<(), SessionError> {
        if let Some(graph) = known.evicted {
            self.send(&Request::Forget { graph }, (&[][..]).into())?;
        }
        match known.news {
            News::Nothing => {}
            News::Patch { base, patch } => {
                let graph = known.graph;
                let words = bytes(&patch);
                self.send(&Request::Patch { graph, base }, words[..].into())?;
            }
            News::Whole => self.send_graph(known.graph)?,
        }
        let request = self.send(&Request::Submit { graph: known.graph }, (&[][..]).into())?;
        self.submissions.push_back(Submission {
            request,
            stream,
            buffers: known.buffers,
        });
        Ok(())
    }

    fn send_graph(&mut self, graph: GraphId) -> Result<(), SessionError> {
        let image = bytes(self.graphs.image(graph));
        let total = image.len() as u64;
        let mut offset = 0;
        for part in image.chunks(MAX_PAYLOAD) {
            self.send(
                &Request::Graph {
                    graph,
                    offset,
                    total,
                },
                part.into(),
            )?;
            offset += part.len() as u64;
        }
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.abandon();
    }
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn lost(error: LinkError) -> SessionError {
    SessionError::Lost(error.to_string())
}

pub(super) fn broken(error: WireError) -> SessionError {
    SessionError::Lost(format!("it sent a broken message: {error}"))
}

pub(super) fn unexpected(reply: &Reply) -> SessionError {
    SessionError::Lost(format!("it sent {reply:?} out of turn"))
}
