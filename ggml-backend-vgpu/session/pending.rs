//! What a connection keeps until the executor has answered or reports a failure.

use std::sync::Arc;

use vgpu_transport::bytes::BytesMut;
use vgpu_transport::ir::BufferId;

/// An ordered queue of graphs and copies of one session. ggml calls it a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackendId(pub(super) u64);

/// A graph that was submitted and may not be done.
pub(super) struct Submission {
    /// The number of the request.
    pub(super) request: u64,
    pub(super) backend: BackendId,
    /// The buffers that the graph reads and writes.
    pub(super) buffers: Arc<[BufferId]>,
}

/// An asynchronous read: sent, with an answer that the next synchronisation receives.
pub(super) struct PendingRead {
    /// The number of the request.
    pub(super) request: u64,
    pub(super) buffer: BufferId,
    to: *mut u8,
    len: usize,
    /// The value of every byte if the read fails.
    poison: u8,
}

// SAFETY: the memory at `to` is writable until the next synchronisation, from every thread: the
// contract of `PendingRead::new`. A `PendingRead` holds no reference to it.
unsafe impl Send for PendingRead {}

impl PendingRead {
    /// A read of `len` bytes of `buffer` into memory at `to`, not sent yet.
    ///
    /// # Safety
    ///
    /// `len` bytes at `to` must stay writable until the value is dropped, and no Rust reference to
    /// them may be in use while [`room`](PendingRead::room) or [`poison`](PendingRead::poison) is.
    pub(super) unsafe fn new(
        buffer: BufferId,
        (to, len): (*mut u8, usize),
        poison: u8,
    ) -> PendingRead {
        PendingRead {
            request: 0,
            buffer,
            to,
            len,
            poison,
        }
    }

    /// Bytes that are read.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The memory for the answer.
    pub(super) fn room(&mut self) -> BytesMut<'_> {
        // SAFETY: `len` bytes at `to` are writable while `self` lives: the contract of `new`.
        unsafe { BytesMut::from_raw(self.to, self.len) }
    }

    /// Overwrites the memory, so that nobody takes its content for the answer.
    pub(super) fn poison(&mut self) {
        // SAFETY: `len` bytes at `to` are writable while `self` lives: the contract of `new`.
        unsafe { self.to.write_bytes(self.poison, self.len) };
    }
}

/// A one-way request that failed. The next graph of the same backend reports the failure. Until
/// then, a read of a buffer that the request may have written fails.
pub(super) struct Failure {
    /// The backend and the buffers of the graph that failed; `None` if another request failed,
    /// which concerns every backend and every buffer.
    pub(super) graph: Option<(BackendId, Arc<[BufferId]>)>,
    /// The executor's reason.
    pub(super) reason: String,
}

impl Failure {
    /// Whether the next graph of this backend must report the failure.
    pub(super) fn concerns_backend(&self, backend: BackendId) -> bool {
        self.graph
            .as_ref()
            .is_none_or(|(failed, _)| *failed == backend)
    }

    /// Whether the content of this buffer may be wrong.
    pub(super) fn concerns_buffer(&self, buffer: BufferId) -> bool {
        self.graph
            .as_ref()
            .is_none_or(|(_, buffers)| buffers.contains(&buffer))
    }
}
