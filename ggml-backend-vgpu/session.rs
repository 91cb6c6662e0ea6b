//! The guest's side of a session: requests out, replies in, and what a dead executor means.
//!
//! Everything that ggml asks of us ends here. A session that has lost its host stays lost: every call
//! fails at once, and the device opens a new session the next time somebody allocates memory.

mod connection;
mod weights;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{BufferId, Capabilities, Graph, IR_VERSION};
use vgpu_transport::link::{GuestEnd, Lent, LinkError, piece_len};
use vgpu_transport::window::memory::Window;
use vgpu_transport::wire::{MAX_PAYLOAD, PROTOCOL_VERSION, Reply, Request};

use crate::graphs::News;
use crate::required;
use crate::stats::{Sent, Stats, SubmittedGraph};
use connection::{Connection, HostMemory, Landing, broken, lost, unexpected};

/// Writes from this size on wait for what is under way and go straight into memory that both sides have mapped,
/// rather than being copied twice.
const WORTH_WAITING: usize = 256 << 10;

/// Writes from this size on are taken from where they lie. Smaller ones are copied for less than it costs to find
/// room for them.
const WORTH_LENDING: usize = 16 << 10;

/// The largest host buffer whose memory is the link's. There is little of that, and it is best used for what goes to
/// the host again and again.
const MOST_LENT: usize = 16 << 20;

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

/// An ordered queue of work of one session, as ggml knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamId(u64);

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
        Ok(Arc::new(Session {
            welcome,
            lost: OnceLock::new(),
            warned: AtomicBool::new(false),
            connection: Mutex::new(Connection::new(end)),
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
    pub(crate) fn alloc(&self, size: u64) -> Result<Allocation, SessionError> {
        self.talk(|c| {
            let buffer = BufferId(c.next_buffer);
            c.next_buffer += 1;
            let mapping = match c.ask(&Request::Alloc { buffer, size })? {
                Reply::Done { .. } => None,
                Reply::Shared { size: mapped, .. } => match c.end.receive_shared(mapped) {
                    Ok(mapping) if mapped >= size => Some(mapping),
                    Ok(_) => return Err(too_small(buffer, size, mapped)),
                    Err(error) => {
                        tracing::warn!(
                            "buffer {} is used by messages, it cannot be mapped: {error}",
                            buffer.0
                        );
                        None
                    }
                },
                other => return Err(unexpected(&other)),
            };
            Ok(Allocation {
                id: buffer,
                size,
                mapping,
                is_mapped: AtomicBool::new(true),
            })
        })
    }

    /// Gives a buffer up, and every graph that uses it.
    pub(crate) fn free(&self, buffer: BufferId) -> Result<(), SessionError> {
        self.talk(|c| {
            c.forget_users(buffer)?;
            c.uploads.retain(|(uploaded, _)| *uploaded != buffer);
            c.send(&Request::Free { buffer }, (&[][..]).into())
                .map(drop)
        })
    }

    /// Writes into a buffer. Returns when the data may change again.
    pub(crate) fn write(
        &self,
        to: &Allocation,
        offset: u64,
        data: Bytes<'_>,
    ) -> Result<(), SessionError> {
        let len = data.len();
        if let Some(mut mapped) = to.mapped(offset, len)? {
            let is_ours = self.talk(|c| {
                if !c.is_quiet() && len >= WORTH_WAITING {
                    c.wait(c.sent)?;
                }
                let is_quiet = c.is_quiet();
                if is_quiet {
                    c.copied.to_host += len as u64;
                }
                Ok(is_quiet)
            })?;
            // What is under way was sent before and must not see these bytes; what is sent later shall. So they go
            // straight into the memory if nothing is under way, and in order with the rest by a message otherwise.
            if is_ours {
                mapped.copy_from(data);
                return Ok(());
            }
        }
        self.talk(|c| {
            let (mut data, mut offset) = (data, offset);
            let (buffer, piece) = (to.id, piece_len(data.len()));
            while !data.is_empty() {
                let (part, rest) = data.split_at(data.len().min(piece));
                c.send(&Request::Write { buffer, offset }, part)?;
                offset += part.len() as u64;
                data = rest;
            }
            Ok(())
        })
    }

    /// Writes into a buffer. The data must not change before the next synchronisation.
    pub(crate) fn write_later(
        &self,
        to: &Allocation,
        offset: u64,
        data: Bytes<'_>,
    ) -> Result<(), SessionError> {
        let lent = self.talk(|c| {
            let memory = c.host_memory_of(data.as_ptr(), data.len());
            let Some((base, lent)) = memory.and_then(|memory| Some((memory.base, memory.lent?)))
            else {
                return Ok(false);
            };
            if data.len() < WORTH_LENDING {
                return Ok(false);
            }
            let (start, mut done) = (lent + (data.as_ptr().addr() - base), 0);
            while done < data.len() {
                let len = MAX_PAYLOAD.min(data.len() - done);
                let request = Request::Write {
                    buffer: to.id,
                    offset: offset + done as u64,
                };
                c.send_lent(&request, start + done..start + done + len)?;
                done += len;
            }
            Ok(true)
        })?;
        match lent {
            true => Ok(()),
            false => self.write(to, offset, data),
        }
    }

    /// Reads from a buffer, after everything sent before. An error says that the bytes are not the
    /// result of what was asked for.
    pub(crate) fn read(
        &self,
        from: &Allocation,
        offset: u64,
        mut out: BytesMut<'_>,
    ) -> Result<(), SessionError> {
        let buffer = from.id;
        if let Some(mapped) = from.mapped(offset, out.len())? {
            self.talk(|c| {
                c.wait(c.sent)?;
                c.drain()?;
                c.copied.from_host += out.len() as u64;
                c.check(buffer)
            })?;
            out.copy_from(mapped.into());
            return Ok(());
        }
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
            c.check(buffer)
        })
    }

    /// Asks for bytes of a buffer that are there after the next synchronisation, or set to `poison` if they are not the
    /// result of what was asked for. `false`, and nothing asked for, if they would have to be waited for: the memory
    /// is not [host memory](Session::host_memory) of this session, or too much is on its way.
    ///
    /// # Safety
    ///
    /// `len` bytes at `to` must be writable until the next synchronisation. (If the program breaks this, what it
    /// reads into is still memory of a host buffer, which lands what is under way before it goes.)
    pub(crate) unsafe fn read_later(
        &self,
        from: &Allocation,
        offset: u64,
        (to, len): (*mut u8, usize),
        poison: u8,
    ) -> Result<bool, SessionError> {
        self.talk(|c| {
            if c.host_memory_of(to, len).is_none() {
                return Ok(false);
            }
            let landing = Landing {
                request: 0, // not sent yet
                buffer: from.id,
                to,
                len,
                poison,
            };
            c.read_later(offset, landing)
        })
    }

    /// Memory in this process for a host buffer: the link's, from which the host can take what is written later
    /// without a copy of ours, as long as there is some; `None` then.
    pub(crate) fn lend(&self, size: usize) -> Option<Lent> {
        if size > MOST_LENT {
            return None;
        }
        self.talk(|c| Ok(c.end.lend(size))).ok().flatten()
    }

    /// From now on, `size` bytes at `base` are a host buffer's.
    pub(crate) fn host_memory(&self, base: usize, size: usize, lent: Option<&Lent>) {
        let lent = lent.map(|lent| lent.range.start);
        let memory = HostMemory { base, size, lent };
        self.connection().host_memory.push(memory);
    }

    /// The opposite. Waits for what is under way to or from there.
    pub(crate) fn forget_host_memory(&self, base: usize, lent: Option<Lent>) {
        let landed = self.talk(|c| {
            c.wait(c.last_to_wait_for())?;
            c.land(u64::MAX)
        });
        let mut connection = self.connection();
        connection.host_memory.retain(|memory| memory.base != base);
        if landed.is_err() {
            connection.abandon();
        }
        if let Some(lent) = lent {
            connection.end.take_back(lent);
        }
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
        let mut connection = self.connection();
        connection.next_stream += 1;
        StreamId(connection.next_stream)
    }

    /// Nobody will ask what has become of the graphs of this stream.
    pub(crate) fn close_stream(&self, stream: StreamId) {
        let mut connection = self.connection();
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
        self.note(c.settle_uploads())?;
        let crossed = c.crossed();
        let began = Instant::now();
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
        let graph = SubmittedGraph {
            nodes: known.nodes,
            host_nodes,
            sent: match known.news {
                News::Nothing => Sent::Before,
                News::Patch { .. } => Sent::Patch,
                News::Whole => Sent::Whole,
            },
            encoding: began.elapsed(),
        };
        c.stats.begin_step(crossed, graph);
        self.note(c.run(stream, known)).map_err(E::from)
    }

    /// Returns when every graph sent so far is done, everything read later has landed, and everything to be written
    /// later may change.
    pub(crate) fn synchronize(&self) -> Result<(), SessionError> {
        self.talk(|c| {
            if c.is_landing() {
                // Often the answer to the last of them is the only thing to wait for.
                c.round_trips += 1;
                c.land(u64::MAX)?;
            }
            c.wait(c.last_to_wait_for())?;
            c.drain()
        })
    }

    /// The number that stands for everything sent so far.
    pub(crate) fn mark(&self) -> u64 {
        self.connection().sent
    }

    /// Returns when everything up to a mark is done.
    pub(crate) fn wait_for(&self, mark: u64) -> Result<(), SessionError> {
        self.talk(|c| {
            c.wait(mark)?;
            c.drain()
        })
    }

    /// Statistics of the session so far.
    pub(crate) fn stats(&self) -> Stats {
        let mut connection = self.connection();
        let crossed = connection.crossed();
        connection.stats.finish_step(crossed);
        connection.stats.clone()
    }

    fn locked(&self) -> Result<MutexGuard<'_, Connection>, SessionError> {
        if let Some(reason) = self.lost.get() {
            return Err(SessionError::Lost(reason.clone()));
        }
        Ok(self.connection())
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic between two messages leaves nothing half-done that matters: each message is whole.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `exchange` with the connection; a lost link is remembered and logged once.
    fn talk<T>(
        &self,
        exchange: impl FnOnce(&mut Connection) -> Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        let mut connection = self.locked()?;
        let outcome = exchange(&mut connection);
        if let Err(SessionError::Lost(_)) = outcome {
            connection.abandon();
        }
        self.note(outcome)
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
                required::missing(&format!("the executor is lost: {reason}"));
            }
        }
        result
    }
}

/// A buffer of a session.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// Its name.
    pub(crate) id: BufferId,
    size: u64,
    /// Its memory, if the host lets us map it.
    mapping: Option<Window>,
    /// Whether the mapping still shows it.
    is_mapped: AtomicBool,
}

impl Allocation {
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// What is mapped is not the buffer any more.
    fn do_not_map(&self) {
        self.is_mapped.store(false, Ordering::Release);
    }

    /// Bytes of the mapping, if there is one.
    fn mapped(&self, offset: u64, len: usize) -> Result<Option<BytesMut<'_>>, SessionError> {
        let is_mapped = self.is_mapped.load(Ordering::Acquire);
        let Some(mapping) = self.mapping.as_ref().filter(|_| is_mapped) else {
            return Ok(None);
        };
        match offset.checked_add(len as u64) {
            // `alloc` has seen to it that the mapping is no smaller than the buffer.
            Some(end) if end <= self.size => {
                Ok(Some(mapping.bytes_mut(offset as usize..end as usize)))
            }
            _ => Err(SessionError::Refused(format!(
                "access to bytes {offset}..+{len} of buffer {}, which has {}",
                self.id.0, self.size
            ))),
        }
    }
}

fn too_small(buffer: BufferId, size: u64, mapped: u64) -> SessionError {
    SessionError::Lost(format!(
        "it shares {mapped} bytes as buffer {}, which has {size}",
        buffer.0
    ))
}
