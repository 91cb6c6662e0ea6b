//! The guest's side of a session with an executor.
//!
//! A session that has lost its executor stays lost: every call fails at once. The device opens a
//! new session the next time that somebody allocates memory.
//!
//! # Lock order
//!
//! The plugin's locks, in the order in which a thread may take them while it holds others:
//!
//! 1. `DeviceContext::current`: the session of a device. Held during a handshake.
//! 2. `Backend::encoder`: one graph at a time is encoded for a backend.
//! 3. `WeightUpload::state`: the upload of one buffer. Held while its requests are sent, so that
//!    its writes stay in order with the lookups. Never two at a time.
//! 4. `SharedConnection::graphs`: the graphs that the executor has. Held until a graph is
//!    submitted, or until the executor is told to forget one, so that graphs are sent in the order
//!    in which they become known.
//! 5. `SharedConnection::connection`: one exchange with the executor.
//!
//! Encoding a graph, comparing the graph with the known ones, hashing weights to look them up and
//! copying from mapped memory happen without lock 5. Only the proof that the program has the bytes
//! of a lookup is hashed under lock 5: the protocol permits no request between the executor's
//! question and the proof. Every other lock (`Session::open_uploads`, `last_memory`,
//! `Event::point`, those in `weights` and `load_progress`) is innermost: a thread that holds it
//! takes no other lock. A build with debug assertions checks the order ([`lock`](crate::lock)).
//!
//! # Forked processes
//!
//! A session belongs to the process that has opened it. If the program calls `fork`, every function
//! here fails in the child with [`SessionError::Lost`], and takes none of the locks above: a thread
//! of the parent may have held one during the fork. The device opens a session of the child's own
//! at the next load.

mod allocation;
mod connection;
mod error;
mod handshake;
mod pending;
mod shared;
mod transfer;
mod upload;
mod weight_requests;

pub(crate) use error::SessionError;
pub(crate) use handshake::{Hello, Welcome};
pub(crate) use pending::BackendId;

use std::sync::Arc;
use std::time::{Duration, Instant};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::{GuestEnd, StagingRegion};
use vgpu_transport::wire::{Reply, Request};

use crate::graph_cache::GraphImage;
use crate::load_progress::{LoadLog, SharedBytes};
use crate::lock::{Rank, RankedMutex};
use crate::stats::{Stats, SubmittedGraph};
use allocation::Allocation;
use connection::HostBufferRange;
use error::LossReason;
use shared::SharedConnection;
use upload::WeightUpload;

/// The largest host buffer that gets memory of the link. The link has little, and what goes to the
/// executor again and again makes the best use of it.
const MAX_STAGED_BYTES: usize = 16 << 20;

/// How long a question for the free memory waits for graphs that run.
const MAX_MEMORY_WAIT: Duration = Duration::from_millis(100);

/// How often such a question looks whether they are done.
const MEMORY_POLL_PERIOD: Duration = Duration::from_millis(1);

/// An open session with an executor.
pub(crate) struct Session {
    welcome: Welcome,
    connection: SharedConnection,
    /// Whether the link is slower than hashing.
    hashes_first: bool,
    /// The buffers whose uploads the next graph seals.
    open_uploads: RankedMutex<Vec<Arc<SessionBuffer>>>,
    /// What the next graph logs.
    load_log: LoadLog,
    /// Total and free memory of the device in bytes: the executor's last answer, with what this
    /// session has allocated and freed since.
    last_memory: RankedMutex<(u64, u64)>,
}

/// A buffer of a session.
pub(crate) struct SessionBuffer {
    allocation: Allocation,
    upload: WeightUpload,
}

impl SessionBuffer {
    /// The name of the buffer on the wire.
    pub(crate) fn id(&self) -> BufferId {
        self.allocation.id()
    }
}

impl Session {
    /// Opens a session over a new link. `hashes_first` says whether the link is slower than
    /// hashing, so that large weights are hashed before they are sent. `limit`: how long the
    /// executor may take to answer `hello`.
    ///
    /// # Errors
    ///
    /// [`SessionError::Refused`] if the executor does not want this guest,
    /// [`SessionError::NoWelcome`] if it does not answer in time, [`SessionError::Lost`] if the
    /// link breaks.
    pub(crate) fn open(
        mut end: Box<dyn GuestEnd>,
        hello: Hello,
        hashes_first: bool,
        limit: Duration,
    ) -> Result<Arc<Session>, SessionError> {
        let welcome = handshake::handshake(end.as_mut(), hello, limit)?;
        Ok(Arc::new(Session {
            connection: SharedConnection::new(end, &welcome),
            last_memory: RankedMutex::new(
                Rank::Innermost,
                (welcome.memory_total, welcome.memory_free),
            ),
            welcome,
            hashes_first,
            open_uploads: RankedMutex::new(Rank::Innermost, Vec::new()),
            load_log: LoadLog::default(),
        }))
    }

    /// What the executor has said about itself.
    pub(crate) fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Whether the executor is known to be gone. Does not wait.
    pub(crate) fn is_lost(&self) -> bool {
        self.connection.is_lost()
    }

    /// Whether this process has opened the session, and is not a forked child of that process.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.connection.is_of_this_process()
    }

    /// Allocates a buffer of `size` zero bytes.
    ///
    /// # Errors
    ///
    /// [`SessionError::Refused`] if the executor has no room, [`SessionError::Lost`] if the session
    /// is lost.
    pub(crate) fn alloc(&self, size: u64) -> Result<Arc<SessionBuffer>, SessionError> {
        let allocation = self.connection.with_conn(|c| {
            let buffer = c.new_buffer_id()?;
            let mapping = match c.ask(&Request::Alloc { buffer, size })? {
                Reply::Done { .. } => None,
                Reply::Shared { size: shared, .. } => match c.end.receive_shared(shared) {
                    Ok(mapping) if shared >= size => Some(mapping),
                    Ok(_) => {
                        return Err(LossReason::SharedTooSmall {
                            buffer,
                            size,
                            shared,
                        }
                        .into());
                    }
                    Err(error) => {
                        tracing::warn!(
                            "buffer {} cannot be mapped and is accessed by messages: {error}",
                            buffer.0
                        );
                        None
                    }
                },
                other => return Err(SessionError::unexpected(other)),
            };
            Ok(Allocation::new(buffer, size, mapping))
        })?;
        self.count_free(|free| free.saturating_sub(size));
        Ok(Arc::new(SessionBuffer {
            allocation,
            upload: WeightUpload::new(self.hashes_first),
        }))
    }

    /// The weights that were loaded since the last graph.
    pub(crate) fn load_log(&self) -> &LoadLog {
        &self.load_log
    }

    /// Frees a buffer, and forgets every graph that uses it.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost, which frees all of its buffers.
    pub(crate) fn free(&self, buffer: &SessionBuffer) -> Result<(), SessionError> {
        if !self.is_of_this_process() {
            // A forked child gives back nothing of its parent's.
            return Err(LossReason::Forked.into());
        }
        let (size, buffer) = (buffer.allocation.size(), buffer.id());
        self.open_uploads.lock().retain(|open| open.id() != buffer);
        self.load_log.forget(buffer);
        self.connection
            .with_users_forgotten(buffer, |c| c.send(&Request::Free { buffer }).map(drop))?;
        self.count_free(|free| free.saturating_add(size));
        Ok(())
    }

    /// Changes the free memory that is reported while the executor does not answer.
    fn count_free(&self, change: impl FnOnce(u64) -> u64) {
        let (total, free) = &mut *self.last_memory.lock();
        *free = change(*free).min(*total);
    }

    /// Writes `data` to `offset` of a buffer, in order with all other requests. The data may change
    /// after the return. `is_for_weights` says whether ggml uses the buffer for weights: then only
    /// what the executor lacks is sent.
    ///
    /// # Errors
    ///
    /// [`SessionError::OutOfRange`] if the buffer is mapped and does not have these bytes,
    /// [`SessionError::Lost`] if the session is lost. The failure of a write by message is reported
    /// by the next graph.
    pub(crate) fn write(
        &self,
        to: &Arc<SessionBuffer>,
        offset: u64,
        data: Bytes<'_>,
        is_for_weights: bool,
    ) -> Result<(), SessionError> {
        match self.offer(to, offset, data, is_for_weights)? {
            true => Ok(()),
            false => transfer::write(&self.connection, &to.allocation, offset, data),
        }
    }

    /// As [`write`](Session::write), but the data must not change before the next synchronisation.
    ///
    /// # Errors
    ///
    /// As for [`write`](Session::write).
    pub(crate) fn write_async(
        &self,
        to: &Arc<SessionBuffer>,
        offset: u64,
        data: Bytes<'_>,
        is_for_weights: bool,
    ) -> Result<(), SessionError> {
        match self.offer(to, offset, data, is_for_weights)? {
            true => Ok(()),
            false => transfer::write_async(&self.connection, &to.allocation, offset, data),
        }
    }

    /// Offers `data` to the upload of the buffer. Returns whether the executor has put the bytes
    /// into the buffer.
    fn offer(
        &self,
        to: &Arc<SessionBuffer>,
        offset: u64,
        data: Bytes<'_>,
        is_for_weights: bool,
    ) -> Result<bool, SessionError> {
        self.connection.check()?;
        let (upload, allocation) = (&to.upload, &to.allocation);
        if upload.begin_write(&self.connection, allocation, is_for_weights)? {
            self.open_uploads.lock().push(Arc::clone(to));
        }
        upload.offer(&self.connection, allocation, offset, data)
    }

    /// The buffer is used for something else than weights. Must be called before a request other
    /// than a write changes the buffer.
    pub(crate) fn mark_not_weights(&self, buffer: &SessionBuffer) {
        // The next request reports a lost session.
        if self.connection.check().is_ok() {
            buffer.upload.mark_not_weights();
        }
    }

    /// Fills `out` with the bytes at `offset` of a buffer, after all earlier requests.
    ///
    /// # Errors
    ///
    /// [`SessionError::Failed`] if an earlier request that may have written the buffer has failed,
    /// [`SessionError::OutOfRange`] or [`SessionError::Refused`] if the buffer does not have these
    /// bytes, [`SessionError::Lost`] if the session is lost. After an error the content of `out`
    /// means nothing.
    pub(crate) fn read(
        &self,
        from: &SessionBuffer,
        offset: u64,
        out: BytesMut<'_>,
    ) -> Result<(), SessionError> {
        transfer::read(&self.connection, &from.allocation, offset, out)
    }

    /// Requests bytes at `offset` of a buffer, which are in memory at `to` after the next
    /// synchronisation. If they cannot be read, every byte there is then `poison`. Returns `false`,
    /// and requests nothing, if the memory is not that of a [host
    /// buffer](Session::add_host_buffer), or if too much is requested already.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    ///
    /// # Safety
    ///
    /// `len` bytes at `to` must be writable, and not accessed, until the next synchronisation.
    pub(crate) unsafe fn read_async(
        &self,
        from: &SessionBuffer,
        offset: u64,
        (to, len): (*mut u8, usize),
        poison: u8,
    ) -> Result<bool, SessionError> {
        // SAFETY: the caller guarantees `len` writable bytes at `to`, not accessed until the next
        // synchronisation.
        unsafe {
            transfer::read_async(
                &self.connection,
                &from.allocation,
                offset,
                (to, len),
                poison,
            )
        }
    }

    /// Memory of the link for a host buffer of `size` bytes. `None` if the link has none left, or
    /// none for so large a buffer. Given back with
    /// [`remove_host_buffer`](Session::remove_host_buffer).
    pub(crate) fn alloc_staging(&self, size: usize) -> Option<StagingRegion> {
        if size > MAX_STAGED_BYTES {
            return None;
        }
        let staging = self.connection.with_conn(|c| Ok(c.end.alloc_staging(size)));
        staging.ok().flatten()
    }

    /// From now on, asynchronous reads and writes may use the `size` bytes at `base`. `staging` is
    /// the memory of the link that these bytes are, if they are.
    pub(crate) fn add_host_buffer(
        &self,
        base: usize,
        size: usize,
        staging: Option<&StagingRegion>,
    ) {
        if let Some(mut connection) = self.connection.lock() {
            connection.add_host_buffer(HostBufferRange {
                base,
                size,
                staging_offset: staging.map(|staging| staging.range.start),
            });
        }
    }

    /// The opposite. Waits for everything under way from and to the memory, so that it can be
    /// freed.
    pub(crate) fn remove_host_buffer(&self, base: usize, staging: Option<StagingRegion>) {
        if !self.is_of_this_process() {
            return;
        }
        let waited = self.connection.with_conn(|c| {
            c.wait(c.last_to_wait_for())?;
            c.receive_reads()
        });
        let Some(mut connection) = self.connection.lock() else {
            return;
        };
        connection.remove_host_buffer(base);
        if waited.is_err() {
            connection.poison_reads();
        }
        if let Some(staging) = staging {
            connection.end.free_staging(staging);
        }
    }

    /// Sets `len` bytes at `offset` of a buffer to `value`. One-way.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(crate) fn fill(
        &self,
        buffer: BufferId,
        offset: u64,
        len: u64,
        value: u8,
    ) -> Result<(), SessionError> {
        let request = Request::Fill {
            buffer,
            offset,
            len,
            value,
        };
        self.connection.with_conn(|c| c.send(&request).map(drop))
    }

    /// Copies `len` bytes between two buffers of this session, each with its offset in bytes.
    /// One-way.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(crate) fn copy(
        &self,
        (dst, dst_offset): (BufferId, u64),
        (src, src_offset): (BufferId, u64),
        len: u64,
    ) -> Result<(), SessionError> {
        let request = Request::Copy {
            dst,
            dst_offset,
            src,
            src_offset,
            len,
        };
        self.connection.with_conn(|c| c.send(&request).map(drop))
    }

    /// Total and free memory of the device in bytes, as they are now. The executor answers after
    /// the graphs that it has received before. If they take longer than [`MAX_MEMORY_WAIT`], the
    /// figures are those of the last answer, with what this session has allocated and freed since.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(crate) fn memory(&self) -> Result<(u64, u64), SessionError> {
        let began = Instant::now();
        loop {
            let asked = self
                .connection
                .if_idle(|c| match c.ask(&Request::Memory {})? {
                    Reply::Memory { total, free, .. } => Ok((total, free)),
                    other => Err(SessionError::unexpected(other)),
                })?;
            if let Some(memory) = asked {
                *self.last_memory.lock() = memory;
                return Ok(memory);
            }
            if began.elapsed() >= MAX_MEMORY_WAIT {
                return Ok(*self.last_memory.lock());
            }
            std::thread::sleep(MEMORY_POLL_PERIOD);
        }
    }

    /// A new backend: an ordered queue of graphs and copies.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(crate) fn open_backend(&self) -> Result<BackendId, SessionError> {
        self.connection.with_conn(|c| c.new_backend_id())
    }

    /// Ends a backend. Failures of its graphs are forgotten.
    pub(crate) fn close_backend(&self, backend: BackendId) {
        if let Some(mut connection) = self.connection.lock() {
            connection.forget_failures(backend);
        }
    }

    /// Begins the submission of a graph of `ggml_nodes` nodes: seals the uploads before it, reports
    /// an earlier failure of the backend, and runs the graph if the executor has the graph with
    /// this `key`. Returns whether the graph was submitted. If not, the caller encodes the graph
    /// and calls [`submit`](Session::submit).
    ///
    /// # Errors
    ///
    /// [`SessionError::Failed`] if an earlier graph of the backend has failed, which is then
    /// forgotten. [`SessionError::Lost`] if the session is lost.
    pub(crate) fn submit_known(
        &self,
        backend: BackendId,
        key: Option<u64>,
        ggml_nodes: usize,
    ) -> Result<bool, SessionError> {
        self.seal_uploads()?;
        let mut graphs = self.connection.lock_graphs()?;
        let began = Instant::now();
        let known = key.and_then(|key| graphs.by_key(key));
        let graph = SubmittedGraph {
            ggml_nodes,
            encoding: began.elapsed(),
            ..SubmittedGraph::default()
        };
        self.connection.with_conn(|c| {
            c.drain()?;
            c.take_failure(backend)?;
            let Some(known) = known else {
                return Ok(false);
            };
            c.submit(backend, known, graph)?;
            Ok(true)
        })
    }

    /// Submits a graph that was encoded: sends the image, unless the executor has it, and runs the
    /// graph. `key` identifies the graph from now on. `buffers` are the buffers that the graph
    /// uses. `began` is when encoding began.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(crate) fn submit(
        &self,
        backend: BackendId,
        key: Option<u64>,
        ggml_nodes: usize,
        image: &mut GraphImage,
        buffers: &[Arc<SessionBuffer>],
        began: Instant,
    ) -> Result<(), SessionError> {
        self.connection.check()?;
        for buffer in buffers {
            buffer.upload.mark_not_weights();
        }
        let mut graphs = self.connection.lock_graphs()?;
        let known = graphs.by_image(key, image);
        let graph = SubmittedGraph {
            ggml_nodes,
            encoding: began.elapsed(),
            ..SubmittedGraph::default()
        };
        self.connection.with_conn(|c| {
            let none_left = LossReason::NoneLeft { what: "graph ids" };
            c.submit(backend, known.ok_or(none_left)?, graph)
        })
    }

    /// Ends all open uploads, except those that another thread is writing to, and logs the model
    /// that was loaded, if one was.
    fn seal_uploads(&self) -> Result<(), SessionError> {
        self.connection.check()?;
        let open = std::mem::take(&mut *self.open_uploads.lock());
        let mut shared = SharedBytes::default();
        for buffer in open {
            match buffer.upload.seal(&self.connection, &buffer.allocation)? {
                Some(bytes) => {
                    shared.not_sent += bytes.not_sent;
                    shared.all += bytes.all;
                }
                None => self.open_uploads.lock().push(buffer),
            }
        }
        self.load_log.graph_begins(shared);
        Ok(())
    }

    /// Waits until every graph is done, every asynchronous read has its bytes, and the data of
    /// every asynchronous write may change.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(crate) fn synchronize(&self) -> Result<(), SessionError> {
        self.connection.with_conn(|c| {
            if c.has_pending_reads() {
                // Often the last answer is the only thing to wait for.
                c.round_trips += 1;
                c.receive_reads()?;
            }
            c.wait(c.last_to_wait_for())?;
            c.drain()
        })
    }

    /// The number of the last request. All requests so far are done when this one is. `None` in a
    /// forked child.
    pub(crate) fn last_request(&self) -> Option<u64> {
        Some(self.connection.lock()?.sent())
    }

    /// Waits until a request and all requests before it are done.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(crate) fn wait_for(&self, request: u64) -> Result<(), SessionError> {
        self.connection.with_conn(|c| {
            c.wait(request)?;
            c.drain()
        })
    }

    /// The statistics of the session so far. `None` in a forked child.
    pub(crate) fn stats(&self) -> Option<Stats> {
        Some(self.connection.lock()?.stats())
    }
}

#[cfg(all(test, feature = "inproc"))]
mod tests;
