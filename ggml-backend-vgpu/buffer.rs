//! Buffers in the executor's memory, in which ggml places tensors.
//!
//! ggml wants an address for a buffer and computes the addresses of tensors from it. The plugin
//! hands out addresses that point to nothing. Each is a multiple of [`ALIGNMENT`], and the ranges
//! of two buffers never overlap. The addresses are outside the user address space of x86-64 and
//! AArch64, so that a program that follows one faults at once.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{BufferId, Type};

use crate::abi::{
    GGML_BACKEND_BUFFER_USAGE_WEIGHTS, ggml_backend_buffer, ggml_backend_buffer_t, ggml_tensor,
};
use crate::device_context::{DeviceContext, DeviceError};
use crate::ffi::object;
use crate::load_progress::LoadProgress;
use crate::session::{Session, SessionBuffer, SessionError};

/// Every tensor starts at a multiple of so many bytes.
pub(crate) const ALIGNMENT: usize = 256;

/// The address of the next buffer. Bit 56 is set: user addresses end below it, with or without
/// five-level page tables.
static NEXT_BASE: AtomicU64 = AtomicU64::new(1 << 56);

/// A buffer in the executor's memory.
pub(crate) struct Buffer {
    device: &'static DeviceContext,
    session: Arc<Session>,
    memory: Arc<SessionBuffer>,
    /// The address that ggml computes with.
    base: usize,
    /// Bytes.
    size: usize,
    /// The bytes written so far, for the log.
    progress: LoadProgress,
    /// ggml's object for the buffer, which says what ggml uses the buffer for. Null until there is
    /// one.
    object: AtomicPtr<ggml_backend_buffer>,
}

impl Buffer {
    /// A buffer of `size` zero bytes.
    ///
    /// # Errors
    ///
    /// [`DeviceError`] if the executor has no room or cannot be reached.
    pub(crate) fn new(device: &'static DeviceContext, size: usize) -> Result<Buffer, DeviceError> {
        let session = device.session()?;
        let memory = session.alloc(size as u64)?;
        // At least one step more than the bytes: the address behind a tensor must not be that of
        // another buffer.
        let step = (size as u64)
            .saturating_add(ALIGNMENT as u64)
            .next_multiple_of(ALIGNMENT as u64);
        Ok(Buffer {
            device,
            session,
            memory,
            base: NEXT_BASE.fetch_add(step, Ordering::Relaxed) as usize,
            size,
            progress: LoadProgress::new(device.name(), size as u64),
            object: AtomicPtr::new(ptr::null_mut()),
        })
    }

    /// Tells the buffer ggml's object for it.
    ///
    /// # Safety
    ///
    /// `object` must be the object whose context is this buffer, so that the object lives until the
    /// buffer is dropped.
    pub(crate) unsafe fn set_object(&self, object: ggml_backend_buffer_t) {
        self.object.store(object, Ordering::Release);
    }

    /// The buffer of a tensor, or of the tensor that it is a view of. `None` if that is not a
    /// buffer of `device`.
    ///
    /// # Safety
    ///
    /// `tensor` must be a valid tensor of this process's ggml: its `view_src` is null or valid, and
    /// its `buffer` is null or not freed.
    pub(crate) unsafe fn of_tensor<'a>(
        device: &DeviceContext,
        tensor: &'a ggml_tensor,
    ) -> Option<&'a Buffer> {
        // SAFETY: null or a valid tensor, as the caller of this function guarantees.
        let viewed = unsafe { tensor.view_src.as_ref() };
        let buffer = if tensor.buffer.is_null() {
            viewed?.buffer
        } else {
            tensor.buffer
        };
        // SAFETY: null or a buffer that ggml has not freed: this function's contract.
        let buffer = unsafe { buffer.as_ref() }?;
        if buffer.buft != device.buffer_type() {
            return None;
        }
        // SAFETY: only `iface::buffer` makes buffers of this type, each with a `Buffer` as context
        // that lives as long as ggml's object.
        unsafe { object(buffer.context.cast::<Buffer>()) }
    }

    /// The session that the buffer belongs to.
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The buffer in its session.
    pub(crate) fn memory(&self) -> &Arc<SessionBuffer> {
        &self.memory
    }

    /// The address that ggml computes with.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// The offset in bytes that an address of the buffer stands for. `None` if the address is not
    /// in the buffer.
    pub(crate) fn offset_of(&self, address: usize) -> Option<u64> {
        address
            .checked_sub(self.base)
            .filter(|&offset| offset <= self.size)
            .map(|offset| offset as u64)
    }

    /// Writes `data` to byte `offset` of a tensor. The data may change after the return. A failure
    /// is logged, and the next graph reports it.
    pub(crate) fn set(&self, tensor: &ggml_tensor, offset: usize, data: Bytes<'_>) {
        let written = self.tensor_offset(tensor, offset).and_then(|at| {
            self.session
                .write(&self.memory, at, data, self.is_for_weights())
        });
        self.finish_write(data.len(), written);
    }

    /// As [`set`](Buffer::set), but the data must not change before the next synchronisation.
    pub(crate) fn set_async(&self, tensor: &ggml_tensor, offset: usize, data: Bytes<'_>) {
        let written = self.tensor_offset(tensor, offset).and_then(|at| {
            self.session
                .write_async(&self.memory, at, data, self.is_for_weights())
        });
        self.finish_write(data.len(), written);
    }

    fn finish_write(&self, bytes: usize, written: Result<(), SessionError>) {
        if written.is_ok() {
            let log = self.session.load_log();
            let is_model = self.is_for_weights();
            self.progress
                .advance(bytes as u64, is_model, self.id(), log);
        }
        self.log("write to", written);
    }

    /// Sets `size` bytes from byte `offset` of a tensor to `value`. A failure is logged, and the
    /// next graph reports it.
    pub(crate) fn fill(&self, tensor: &ggml_tensor, offset: usize, size: usize, value: u8) {
        self.session.mark_not_weights(&self.memory);
        let filled = self
            .tensor_offset(tensor, offset)
            .and_then(|at| self.session.fill(self.id(), at, size as u64, value));
        self.log("fill", filled);
    }

    /// Sets every byte of the buffer to `value`. A failure is logged, and the next graph reports
    /// it.
    pub(crate) fn clear(&self, value: u8) {
        // A new buffer is zero: clearing it to zero leaves it as it is, and it can still become one
        // for weights.
        if value != 0 {
            self.session.mark_not_weights(&self.memory);
        }
        let cleared = self.session.fill(self.id(), 0, self.size as u64, value);
        self.log("clear", cleared);
    }

    /// Fills `out` with the bytes from byte `offset` of a tensor.
    ///
    /// ggml's interface has no way to report that this failed. The bytes are then set to a value
    /// that nobody takes for a result ([`poison_of`]), and the next graph fails.
    ///
    /// # Safety
    ///
    /// `tensor` must be a valid tensor of this process's ggml.
    pub(crate) unsafe fn get(&self, tensor: &ggml_tensor, offset: usize, mut out: BytesMut<'_>) {
        let read = self
            .tensor_offset(tensor, offset)
            .and_then(|at| self.session.read(&self.memory, at, out.reborrow()));
        if read.is_err() {
            // SAFETY: a valid tensor, as the caller of this function guarantees.
            let poison = unsafe { poison_of(self.device, tensor) };
            // SAFETY: a BytesMut is writable for its length.
            unsafe { out.as_mut_ptr().write_bytes(poison, out.len()) };
        }
        self.log("read", read);
    }

    /// As [`get`](Buffer::get), but the bytes may arrive as late as the next synchronisation.
    ///
    /// # Safety
    ///
    /// `tensor` must be a valid tensor of this process's ggml, and `len` bytes at `to` must be
    /// writable, and not accessed, until the next synchronisation.
    pub(crate) unsafe fn get_async(
        &self,
        tensor: &ggml_tensor,
        offset: usize,
        (to, len): (*mut u8, usize),
    ) {
        // SAFETY: a valid tensor, as the caller of this function guarantees.
        let poison = unsafe { poison_of(self.device, tensor) };
        let requested = self.tensor_offset(tensor, offset).and_then(|at| {
            // SAFETY: writable and not accessed until the next synchronisation: this function's
            // contract.
            unsafe { self.session.read_async(&self.memory, at, (to, len), poison) }
        });
        match requested {
            Ok(true) => {}
            // The memory is not a host buffer's, or too much is under way. After an error the read
            // fails again and reports the error.
            // SAFETY: a valid tensor, and writable memory: this function's contract.
            _ => unsafe { self.get(tensor, offset, BytesMut::from_raw(to, len)) },
        }
    }

    /// Copies the tensor `src` to the tensor `dst` in the executor, in order with all other
    /// requests. `false`, and nothing is copied, if `src` is not a tensor of the same session.
    ///
    /// # Safety
    ///
    /// Both must be valid tensors of this process's ggml, `dst` in this buffer.
    pub(crate) unsafe fn copy_from(&self, src: &ggml_tensor, dst: &ggml_tensor) -> bool {
        // SAFETY: a valid tensor, as the caller of this function guarantees.
        let (from, shape) = unsafe {
            (
                Buffer::of_tensor(self.device, src),
                self.device.translator().shape(src),
            )
        };
        let Some(from) = from.filter(|from| Arc::ptr_eq(&from.session, &self.session)) else {
            return false;
        };
        let len = shape.and_then(|shape| shape.byte_len());
        let offsets = (from.tensor_offset(src, 0), self.tensor_offset(dst, 0));
        let (Some(len), (Ok(from_at), Ok(to_at))) = (len, offsets) else {
            return false;
        };
        self.session.mark_not_weights(&self.memory);
        self.session
            .copy((self.id(), to_at), (from.id(), from_at), len)
            .is_ok()
    }

    /// The name of the buffer on the wire.
    fn id(&self) -> BufferId {
        self.memory.id()
    }

    /// The offset of byte `offset` of a tensor in the buffer.
    fn tensor_offset(&self, tensor: &ggml_tensor, offset: usize) -> Result<u64, SessionError> {
        let start = self.offset_of(tensor.data.addr());
        start
            .and_then(|start| start.checked_add(offset as u64))
            .ok_or_else(|| SessionError::NotInBuffer {
                buffer: self.id(),
                address: tensor.data.addr(),
            })
    }

    /// Whether ggml uses the buffer for weights.
    fn is_for_weights(&self) -> bool {
        let object = self.object.load(Ordering::Acquire);
        if object.is_null() {
            return false;
        }
        // SAFETY: ggml's object lives longer than the buffer, which is its context: the contract of
        // `set_object`. ggml writes the field while it loads a model, perhaps from another thread:
        // the field is one aligned word and is read as volatile.
        let usage = unsafe { (&raw const (*object).usage).read_volatile() };
        usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS
    }

    /// Logs a failure. The loss of the session was logged when it happened.
    fn log(&self, what: &str, done: Result<(), SessionError>) {
        match done {
            Ok(()) | Err(SessionError::Lost(_)) => {}
            Err(error) => tracing::error!("cannot {what} buffer {}: {error}", self.id().0),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let freed = self.session.free(&self.memory);
        self.log("free", freed);
    }
}

/// The value of every byte of a tensor that could not be read: not-a-number for a tensor of floats;
/// 0 for any other, which is a valid index.
///
/// # Safety
///
/// `tensor` must be a valid tensor of this process's ggml.
unsafe fn poison_of(device: &DeviceContext, tensor: &ggml_tensor) -> u8 {
    // SAFETY: a valid tensor, as the caller of this function guarantees.
    let shape = unsafe { device.translator().shape(tensor) };
    let is_float = |ty: Type| matches!(ty, Type::F32 | Type::F16 | Type::Bf16 | Type::F64);
    match shape.is_some_and(|shape| is_float(shape.ty)) {
        true => 0xff,
        false => 0,
    }
}
