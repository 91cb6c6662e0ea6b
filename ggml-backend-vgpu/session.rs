//! The guest's side of a session: requests out, replies in, and what a dead executor means.
//!
//! Everything that ggml asks of us ends here. A session that has lost its host stays lost: every call
//! fails at once, and the device opens a new session the next time somebody allocates memory.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{BufferId, Capabilities, Graph, IR_VERSION};
use vgpu_transport::link::{Counters, GuestEnd, LinkError, piece_len};
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, PROTOCOL_VERSION, Reply, Request, WireError};

use crate::graphs::{Graphs, Known};
use crate::stats::Stats;

/// Read requests that are on their way before the first answer is awaited.
const READS_IN_FLIGHT: usize = 4;

/// An open connection to an executor.
pub(crate) struct Session {
    /// What the host said of itself.
    pub(crate) welcome: Welcome,
    lost: OnceLock<String>,
    warned: AtomicBool,
    connection: Mutex<Connection>,
}

/// What the host says of itself in the handshake.
#[derive(Debug, Clone)]
pub(crate) struct Welcome {
    /// The session's number, in the logs of both sides.
    pub(crate) session: u64,
    /// `cpu`, `cuda:0`.
    pub(crate) engine: String,
    /// The model of the device.
    pub(crate) description: String,
    /// Memory of the device in bytes: total, free at the time of the handshake.
    pub(crate) memory: (u64, u64),
    /// What the engine runs.
    pub(crate) capabilities: Capabilities,
}

/// Why a request was not met.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum SessionError {
    /// The host is gone, or we have given it up. Final for this session.
    #[error("the executor is lost: {0}")]
    Lost(String),
    /// The host says no; the session goes on.
    #[error("the executor refuses: {0}")]
    Refused(String),
    /// An earlier one-way request failed; the session goes on.
    #[error("the executor failed: {0}")]
    Failed(String),
}

struct Connection {
    end: Box<dyn GuestEnd>,
    message: Vec<u8>,
    next_buffer: u64,
    next_stream: u64,
    graphs: Graphs,
    /// Graphs on their way, oldest first.
    submissions: VecDeque<Submission>,
    /// What has failed and is not yet reported.
    failures: Vec<Failure>,
    /// Times that a caller had to wait for the host before it could go on.
    round_trips: u64,
    stats: Stats,
}

/// An ordered queue of work of one session, as ggml knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamId(u64);

/// A graph on its way.
struct Submission {
    request: u64,
    stream: StreamId,
    buffers: Arc<[BufferId]>,
}

/// A one-way request that has failed. The next graph of its stream reports it; until then, what is read
/// from the buffers it may have written is not a result.
struct Failure {
    /// The graph's stream and buffers; `None` when it was not a graph: then all are concerned.
    submission: Option<(StreamId, Arc<[BufferId]>)>,
    reason: String,
}

impl Failure {
    fn concerns_stream(&self, stream: StreamId) -> bool {
        self.submission
            .as_ref()
            .is_none_or(|(failed, _)| *failed == stream)
    }

    fn concerns_buffer(&self, buffer: BufferId) -> bool {
        self.submission
            .as_ref()
            .is_none_or(|(_, buffers)| buffers.contains(&buffer))
    }
}

impl Session {
    /// Introduces us over a fresh link and waits for the host's answer.
    pub(crate) fn open(
        mut end: Box<dyn GuestEnd>,
        name: String,
    ) -> Result<Arc<Session>, SessionError> {
        let mut message = Vec::new();
        Request::Hello {
            protocol: PROTOCOL_VERSION,
            ir: IR_VERSION,
            name,
        }
        .encode(&mut message);
        let answer = end
            .send(&message, (&[][..]).into())
            .and_then(|_| {
                message.clear();
                end.receive(&mut message, (&mut [][..]).into())
            })
            .map_err(lost)
            .and_then(|_| Reply::decode(&message).map_err(broken))?;
        let welcome = match answer {
            Reply::Welcome {
                session,
                engine,
                description,
                memory_total,
                memory_free,
                capabilities,
                ..
            } => Welcome {
                session,
                engine,
                description,
                memory: (memory_total, memory_free),
                capabilities,
            },
            Reply::Ended { reason } | Reply::Refused { reason, .. } => {
                return Err(SessionError::Refused(reason));
            }
            other => {
                return Err(SessionError::Lost(format!(
                    "it answered the greeting with {other:?}"
                )));
            }
        };
        let connection = Connection {
            end,
            message,
            next_buffer: 1,
            next_stream: 1,
            graphs: Graphs::default(),
            submissions: VecDeque::new(),
            failures: Vec::new(),
            round_trips: 1, // the greeting
            stats: Stats::default(),
        };
        Ok(Arc::new(Session {
            welcome,
            lost: OnceLock::new(),
            warned: AtomicBool::new(false),
            connection: Mutex::new(connection),
        }))
    }

    /// Whether the host is known to be gone.
    pub(crate) fn is_lost(&self) -> bool {
        if self.lost.get().is_some() {
            return true;
        }
        // A held lock means that somebody is talking to the host, and will notice for us.
        let Ok(mut connection) = self.connection.try_lock() else {
            return false;
        };
        if connection.end.is_closed() {
            let _ = self.note(Err::<(), _>(lost(LinkError::Closed)));
            return true;
        }
        false
    }

    /// A new buffer of zero bytes.
    pub(crate) fn alloc(&self, size: u64) -> Result<BufferId, SessionError> {
        self.talk(|c| {
            let buffer = BufferId(c.next_buffer);
            c.next_buffer += 1;
            match c.ask(&Request::Alloc { buffer, size })? {
                Reply::Done { .. } => Ok(buffer),
                other => Err(unexpected(&other)),
            }
        })
    }

    /// Gives a buffer up, and every graph that uses it.
    pub(crate) fn free(&self, buffer: BufferId) -> Result<(), SessionError> {
        self.talk(|c| {
            for graph in c.graphs.remove_users(buffer) {
                c.send(&Request::Forget { graph }, (&[][..]).into())?;
            }
            c.send(&Request::Free { buffer }, (&[][..]).into())
                .map(drop)
        })
    }

    /// Writes into a buffer. Returns when the data may change again.
    pub(crate) fn write(
        &self,
        buffer: BufferId,
        offset: u64,
        data: Bytes<'_>,
    ) -> Result<(), SessionError> {
        self.talk(|c| {
            let (mut data, mut offset) = (data, offset);
            let piece = piece_len(data.len());
            while !data.is_empty() {
                let (part, rest) = data.split_at(data.len().min(piece));
                c.send(&Request::Write { buffer, offset }, part)?;
                offset += part.len() as u64;
                data = rest;
            }
            Ok(())
        })
    }

    /// Reads from a buffer, after everything sent before. An error says that the bytes are not the
    /// result of what was asked for.
    pub(crate) fn read(
        &self,
        buffer: BufferId,
        offset: u64,
        out: BytesMut<'_>,
    ) -> Result<(), SessionError> {
        self.talk(|c| {
            let total = out.len();
            let piece = piece_len(total);
            c.round_trips += 1; // one, for all the pieces: they are asked for ahead
            let (mut out, mut asked, mut waiting) = (out, 0, VecDeque::new());
            while asked < total || !waiting.is_empty() {
                while asked < total && waiting.len() < READS_IN_FLIGHT {
                    let len = piece.min(total - asked);
                    let request = Request::Read {
                        buffer,
                        offset: offset + asked as u64,
                        len: len as u64,
                    };
                    waiting.push_back((c.send(&request, (&[][..]).into())?, len));
                    asked += len;
                }
                if let Some((request, len)) = waiting.pop_front() {
                    let (part, rest) = out.split_at(len);
                    out = rest;
                    match c.reply_to(request, part)? {
                        Reply::Data { .. } => {}
                        other => return Err(unexpected(&other)),
                    }
                }
            }
            // The failure stays for the next graph to report: to ggml, a read cannot fail.
            match c
                .failures
                .iter()
                .find(|failure| failure.concerns_buffer(buffer))
            {
                Some(failure) => Err(SessionError::Failed(failure.reason.clone())),
                None => Ok(()),
            }
        })
    }

    /// Sets bytes of a buffer.
    pub(crate) fn fill(
        &self,
        buffer: BufferId,
        offset: u64,
        len: u64,
        value: u8,
    ) -> Result<(), SessionError> {
        self.talk(|c| {
            c.send(
                &Request::Fill {
                    buffer,
                    offset,
                    len,
                    value,
                },
                (&[][..]).into(),
            )
            .map(drop)
        })
    }

    /// Copies between two buffers of this session.
    pub(crate) fn copy(
        &self,
        (dst, dst_offset): (BufferId, u64),
        (src, src_offset): (BufferId, u64),
        len: u64,
    ) -> Result<(), SessionError> {
        self.talk(|c| {
            c.send(
                &Request::Copy {
                    dst,
                    dst_offset,
                    src,
                    src_offset,
                    len,
                },
                (&[][..]).into(),
            )
            .map(drop)
        })
    }

    /// Total and free memory of the device, as it is now.
    pub(crate) fn memory(&self) -> Result<(u64, u64), SessionError> {
        self.talk(|c| match c.ask(&Request::Memory {})? {
            Reply::Memory { total, free, .. } => Ok((total, free)),
            other => Err(unexpected(&other)),
        })
    }

    /// A new stream.
    pub(crate) fn open_stream(&self) -> StreamId {
        let mut connection = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        connection.next_stream += 1;
        StreamId(connection.next_stream)
    }

    /// Nobody will ask what has become of the graphs of this stream.
    pub(crate) fn close_stream(&self, stream: StreamId) {
        let mut connection = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        connection
            .failures
            .retain(|failure| !failure.concerns_stream(stream));
    }

    /// Runs a graph; returns when it is on its way. `key` identifies the graph where the program in front
    /// of us says so; `encode` is called only when the graph may be new.
    ///
    /// Fails if an earlier graph of the stream has failed, and forgets that failure.
    pub(crate) fn submit<'g, E: From<SessionError>>(
        &self,
        stream: StreamId,
        key: Option<u64>,
        host_nodes: usize,
        encode: impl FnOnce() -> Result<&'g Graph, E>,
    ) -> Result<(), E> {
        let mut connection = self.locked()?;
        let c = &mut *connection;
        self.note(c.drain())?;
        if let Some(failure) = c
            .failures
            .iter()
            .find(|failure| failure.concerns_stream(stream))
        {
            let error = SessionError::Failed(failure.reason.clone());
            c.failures
                .retain(|failure| !failure.concerns_stream(stream));
            return Err(error.into());
        }
        let known = match key.and_then(|key| c.graphs.by_key(key)) {
            Some(known) => known,
            None => {
                let graph = encode()?;
                if graph.nodes.is_empty() {
                    return Ok(()); // only views
                }
                c.graphs.by_content(key, graph)
            }
        };
        self.note(c.run(stream, known, host_nodes)).map_err(E::from)
    }

    /// Returns when every graph sent so far is done. Writes behind the last graph are not waited for: their
    /// data is already out of the caller's hands, and whatever could see their effect comes after them.
    pub(crate) fn synchronize(&self) -> Result<(), SessionError> {
        self.talk(|c| {
            if let Some(last) = c.submissions.back() {
                let last = last.request;
                if c.end.retired() < last {
                    c.round_trips += 1;
                    c.end.wait_retired(last).map_err(lost)?;
                }
            }
            c.drain()
        })
    }

    /// Statistics of the session so far.
    pub(crate) fn stats(&self) -> Stats {
        let mut connection = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let counters = connection.counters();
        connection.stats.finish_step(counters);
        connection.stats.clone()
    }

    fn locked(&self) -> Result<MutexGuard<'_, Connection>, SessionError> {
        if let Some(reason) = self.lost.get() {
            return Err(SessionError::Lost(reason.clone()));
        }
        // A panic between two messages leaves nothing half-done that matters: each message is whole.
        Ok(self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs `exchange` with the connection; a lost link is remembered and logged once.
    fn talk<T>(
        &self,
        exchange: impl FnOnce(&mut Connection) -> Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        let mut connection = self.locked()?;
        self.note(exchange(&mut connection))
    }

    fn note<T>(&self, result: Result<T, SessionError>) -> Result<T, SessionError> {
        if let Err(SessionError::Lost(reason)) = &result {
            let _ = self.lost.set(reason.clone());
            if !self.warned.swap(true, Ordering::Relaxed) {
                tracing::error!(
                    "session {} with the executor ({}) is lost: {reason}. Work on it fails from now on; \
                     once the executor is back, loading a model works again",
                    self.welcome.session,
                    self.welcome.engine,
                );
            }
        }
        result
    }
}

impl Connection {
    fn send(&mut self, request: &Request, payload: Bytes<'_>) -> Result<u64, SessionError> {
        self.message.clear();
        request.encode(&mut self.message);
        self.end.send(&self.message, payload).map_err(lost)
    }

    /// What crossed so far, with round trips as a caller feels them.
    fn counters(&self) -> Counters {
        Counters {
            round_trips: self.round_trips,
            ..self.end.counters()
        }
    }

    /// Sends a request without a payload and waits for its answer.
    fn ask(&mut self, request: &Request) -> Result<Reply, SessionError> {
        self.round_trips += 1;
        let request = self.send(request, (&[][..]).into())?;
        self.reply_to(request, (&mut [][..]).into())
    }

    /// The answer to `request`; failures of one-way requests that arrive before it are kept.
    fn reply_to(&mut self, request: u64, mut payload: BytesMut<'_>) -> Result<Reply, SessionError> {
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
                | Reply::Data { request }
                | Reply::Memory { request, .. } => *request,
                Reply::Welcome { .. } => return Err(unexpected(&reply)),
            };
            if number != request {
                return Err(SessionError::Lost(format!(
                    "it answered request {number} instead of {request}"
                )));
            }
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
    fn drain(&mut self) -> Result<(), SessionError> {
        // The host says that a graph has failed before it says that it is done.
        let done = self.end.retired();
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

    /// Sends the graph, unless the host has it, and the order to run it.
    fn run(
        &mut self,
        stream: StreamId,
        known: Known,
        host_nodes: usize,
    ) -> Result<(), SessionError> {
        let counters = self.counters();
        self.stats
            .begin_step(counters, known.nodes, host_nodes, known.is_new);
        if let Some(graph) = known.evicted {
            self.send(&Request::Forget { graph }, (&[][..]).into())?;
        }
        if known.is_new {
            self.send_graph(known.graph)?;
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
        let image: Vec<u8> = self
            .graphs
            .image(graph)
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
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

fn lost(error: LinkError) -> SessionError {
    SessionError::Lost(error.to_string())
}

fn broken(error: WireError) -> SessionError {
    SessionError::Lost(format!("it sent a broken message: {error}"))
}

fn unexpected(reply: &Reply) -> SessionError {
    SessionError::Lost(format!("it sent {reply:?} out of turn"))
}

/// The counters that a session's statistics start from.
pub(crate) fn since(now: Counters, then: Counters) -> Counters {
    Counters {
        messages_out: now.messages_out - then.messages_out,
        messages_in: now.messages_in - then.messages_in,
        bytes_out: now.bytes_out - then.bytes_out,
        bytes_in: now.bytes_in - then.bytes_in,
        round_trips: now.round_trips - then.round_trips,
        spins: now.spins - then.spins,
        sleeps: now.sleeps - then.sleeps,
        kicks: now.kicks - then.kicks,
    }
}
