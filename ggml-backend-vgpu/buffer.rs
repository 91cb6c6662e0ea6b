//! Buffers: memory on the host that ggml places tensors in.
//!
//! ggml wants an address. Ours are made up: they point at nothing, no two buffers share one, and each
//! is a multiple of [`ALIGNMENT`]. They lie where no x86-64 or AArch64 process can have memory, so that a
//! program that follows one faults at once.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::BufferId;

use crate::abi::{
    GGML_BACKEND_BUFFER_USAGE_WEIGHTS, GGML_STATUS_SUCCESS, ggml_backend_buffer,
    ggml_backend_buffer_i, ggml_backend_buffer_t, ggml_backend_buffer_type_t, ggml_status,
    ggml_tensor,
};
use crate::device::Device;
use crate::ffi::{guard, object, pieces};
use crate::progress::Progress;
use crate::session::{Allocation, Session, SessionError};
use crate::weights::Weights;

/// Every tensor starts at a multiple of this.
pub(crate) const ALIGNMENT: usize = 256;

/// The next made-up address. Bit 56 is set: user addresses end below it, with or without five-level
/// page tables.
static NEXT_BASE: AtomicU64 = AtomicU64::new(1 << 56);

/// A buffer of a session.
pub(crate) struct Buffer {
    session: Arc<Session>,
    allocation: Allocation,
    base: usize,
    size: usize,
    /// Of a buffer that may hold a model.
    progress: Option<Progress>,
    weights: Weights,
    /// ggml's object, which knows what the buffer is used for. Null until there is one.
    object: AtomicPtr<ggml_backend_buffer>,
}

impl Buffer {
    /// A buffer of `size` bytes, in ggml's form. Null, with a log line, when the host has no room.
    pub(crate) fn alloc(
        device: &Device,
        buft: ggml_backend_buffer_type_t,
        size: usize,
    ) -> ggml_backend_buffer_t {
        let allocated = device.session().and_then(|session| {
            let allocation = session.alloc(size as u64)?;
            Ok((session, allocation))
        });
        let (session, allocation) = match allocated {
            Ok(allocated) => allocated,
            Err(error) => {
                tracing::error!("{}: cannot allocate {size} bytes: {error}", device.name());
                return ptr::null_mut();
            }
        };
        let step = (size as u64)
            .saturating_add(ALIGNMENT as u64)
            .next_multiple_of(ALIGNMENT as u64);
        let base = NEXT_BASE.fetch_add(step, Ordering::Relaxed) as usize;
        let context = Box::into_raw(Box::new(Buffer {
            session,
            allocation,
            base,
            size,
            progress: Progress::of(device.name(), size as u64),
            weights: Weights::new(device.is_slower_than_hashing()),
            object: AtomicPtr::new(ptr::null_mut()),
        }));
        // SAFETY: the buffer type lives as long as the process, the context until `free_buffer`.
        let buffer = unsafe { device.host().buffer(buft, CALLBACKS, context.cast(), size) };
        if buffer.is_null() {
            // SAFETY: nobody has taken the context, so it is still ours alone.
            drop(unsafe { Box::from_raw(context) });
        } else {
            // SAFETY: the context is alive; ggml has the buffer from our return on.
            unsafe { (*context).object.store(buffer, Ordering::Release) };
        }
        buffer
    }

    /// Whether ggml has said that the buffer is for weights.
    fn is_for_weights(&self) -> bool {
        let object = self.object.load(Ordering::Acquire);
        // SAFETY: ggml's object lives until after `free_buffer`, with which this one goes. ggml writes the field
        // when a buffer is made, and does not care who reads it meanwhile.
        !object.is_null()
            && unsafe { (&raw const (*object).usage).read_volatile() }
                == GGML_BACKEND_BUFFER_USAGE_WEIGHTS
    }

    /// Whether bytes that are to be written are there without that.
    fn is_there(&self, at: u64, data: Bytes<'_>) -> Result<bool, SessionError> {
        let is_for_weights = || self.is_for_weights();
        self.weights
            .upload(&self.session, &self.allocation, at, data, is_for_weights)
    }

    /// Its name, for a graph that reads or writes it.
    pub(crate) fn id_for_graph(&self) -> BufferId {
        self.weights.are_not();
        self.id()
    }

    /// The buffer of a tensor, or of the tensor it is a view of; `None` when that is not one of ours.
    ///
    /// # Safety
    ///
    /// `tensor` must be a tensor of the host, with a buffer that is alive or none.
    pub(crate) unsafe fn of_tensor<'a>(
        device: &Device,
        tensor: &'a ggml_tensor,
    ) -> Option<&'a Buffer> {
        // SAFETY: null or the tensor that this one is a view of.
        let viewed = unsafe { tensor.view_src.as_ref() };
        let buffer = if tensor.buffer.is_null() {
            viewed?.buffer
        } else {
            tensor.buffer
        };
        // SAFETY: null or a live buffer object of the host (the caller's promise).
        let buffer = unsafe { buffer.as_ref() }?;
        if buffer.buft != device.buffer_type() {
            return None;
        }
        // SAFETY: buffers of our type are made by `alloc` alone, with a `Buffer` as context.
        unsafe { object(buffer.context.cast::<Buffer>()) }
    }

    /// The session it lives in.
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Its name there.
    pub(crate) fn id(&self) -> BufferId {
        self.allocation.id
    }

    /// The offset that a made-up address stands for.
    pub(crate) fn offset_of(&self, address: usize) -> Option<u64> {
        address
            .checked_sub(self.base)
            .filter(|&offset| offset <= self.size)
            .map(|offset| offset as u64)
    }

    /// Where byte `offset` of a tensor lies.
    fn place(&self, tensor: &ggml_tensor, offset: usize) -> Result<u64, SessionError> {
        self.offset_of(tensor.data as usize)
            .and_then(|start| start.checked_add(offset as u64))
            .ok_or_else(|| {
                SessionError::Refused(format!(
                    "address {:p} is not in buffer {}",
                    tensor.data,
                    self.id().0
                ))
            })
    }

    /// Writes a part of a tensor.
    pub(crate) fn set(&self, tensor: &ggml_tensor, offset: usize, data: Bytes<'_>) {
        let done = self
            .place(tensor, offset)
            .and_then(|at| match self.is_there(at, data)? {
                true => Ok(()),
                false => self.session.write(&self.allocation, at, data),
            });
        self.count(data.len());
        self.log("write to", done);
    }

    /// The same; the data stays as it is until the next synchronisation.
    pub(crate) fn set_later(&self, tensor: &ggml_tensor, offset: usize, data: Bytes<'_>) {
        let done = self
            .place(tensor, offset)
            .and_then(|at| match self.is_there(at, data)? {
                true => Ok(()),
                false => self.session.write_later(&self.allocation, at, data),
            });
        self.count(data.len());
        self.log("write to", done);
    }

    fn count(&self, bytes: usize) {
        if let Some(progress) = &self.progress {
            progress.advance(bytes as u64);
        }
    }

    /// Reads a part of a tensor.
    ///
    /// ggml has no way to hear that this failed. The bytes are then set so that nobody takes them for a
    /// result: not-a-number where the tensor holds floating-point numbers, 0 elsewhere, which is in range
    /// as an index. The next graph computation fails.
    pub(crate) fn get(
        &self,
        device: &Device,
        tensor: &ggml_tensor,
        offset: usize,
        mut out: BytesMut<'_>,
    ) {
        let read = self
            .place(tensor, offset)
            .and_then(|at| self.session.read(&self.allocation, at, out.reborrow()));
        if read.is_err() {
            // SAFETY: a tensor that the host has handed us.
            let poison = unsafe { poison(device, tensor) };
            // SAFETY: BytesMut vouches for its bytes.
            unsafe { out.as_mut_ptr().write_bytes(poison, out.len()) };
        }
        self.log("read from", read);
    }

    /// The same, but the bytes need not be there before the next synchronisation.
    ///
    /// # Safety
    ///
    /// The tensor must be one that the host has handed us, and `len` bytes at `to` writable until the next
    /// synchronisation.
    pub(crate) unsafe fn get_later(
        &self,
        device: &Device,
        tensor: &ggml_tensor,
        offset: usize,
        (to, len): (*mut u8, usize),
    ) {
        // SAFETY: the caller's promise.
        let poison = unsafe { poison(device, tensor) };
        let asked = self.place(tensor, offset).and_then(|at| {
            // SAFETY: the caller's promise.
            unsafe {
                self.session
                    .read_later(&self.allocation, at, (to, len), poison)
            }
        });
        match asked {
            Ok(true) => {}
            // Too much, or to memory that may go away meanwhile. What fails, fails again, and says so.
            // SAFETY: the caller's promise.
            _ => self.get(device, tensor, offset, unsafe {
                BytesMut::from_raw(to, len)
            }),
        }
    }

    /// Copies a tensor of this session into this buffer, in order with everything else. `false` when it is not of
    /// this session.
    ///
    /// # Safety
    ///
    /// Both must be tensors of the host with live buffers, `dst` in this one.
    pub(crate) unsafe fn copy_from(
        &self,
        device: &Device,
        src: &ggml_tensor,
        dst: &ggml_tensor,
    ) -> bool {
        // SAFETY: the caller's promise.
        let (from, shape) = unsafe {
            (
                Buffer::of_tensor(device, src),
                device.translator().shape(src),
            )
        };
        let Some(from) = from.filter(|from| Arc::ptr_eq(&from.session, &self.session)) else {
            return false;
        };
        let len = shape.and_then(|shape| shape.extent());
        let (Some(len), Ok(from_at), Ok(to_at)) = (len, from.place(src, 0), self.place(dst, 0))
        else {
            return false;
        };
        self.weights.are_not();
        self.session
            .copy((self.id(), to_at), (from.id(), from_at), len)
            .is_ok()
    }

    fn log(&self, what: &str, done: Result<(), SessionError>) {
        match done {
            // Said once, when it was lost.
            Ok(()) | Err(SessionError::Lost(_)) => {}
            Err(error) => tracing::error!("cannot {what} buffer {}: {error}", self.id().0),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let freed = self.session.free(self.id());
        self.log("free", freed);
    }
}

/// What the bytes of a tensor are set to when they could not be read.
///
/// # Safety
///
/// The tensor must be one that the host has handed us.
unsafe fn poison(device: &Device, tensor: &ggml_tensor) -> u8 {
    // SAFETY: the caller's promise.
    let shape = unsafe { device.translator().shape(tensor) };
    match shape.is_some_and(|shape| is_float(shape.ty)) {
        true => 0xff,
        false => 0,
    }
}

/// Types in which all bits set is not a number.
fn is_float(ty: vgpu_transport::ir::Type) -> bool {
    use vgpu_transport::ir::Type;
    matches!(ty, Type::F32 | Type::F16 | Type::Bf16 | Type::F64)
}

const CALLBACKS: ggml_backend_buffer_i = ggml_backend_buffer_i {
    free_buffer: Some(free_buffer),
    get_base: Some(get_base),
    init_tensor: Some(init_tensor),
    memset_tensor: Some(memset_tensor),
    set_tensor: Some(set_tensor),
    get_tensor: Some(get_tensor),
    set_tensor_2d: Some(set_tensor_2d),
    get_tensor_2d: Some(get_tensor_2d),
    cpy_tensor: Some(cpy_tensor),
    clear: Some(clear),
    reset: None, // nothing is attached to tensors
};

/// The context of a buffer object, with its device.
///
/// # Safety
///
/// `buffer` must be a buffer object that [`Buffer::alloc`] has made and ggml has not freed.
unsafe fn context<'a>(buffer: ggml_backend_buffer_t) -> Option<(&'a Buffer, &'static Device)> {
    // SAFETY: the caller's promise; the context was set by `alloc`, and the type of the buffer is the
    // device's, which lives for ever.
    unsafe {
        let abi = object(buffer.cast_const())?;
        Some((
            object(abi.context.cast::<Buffer>().cast_const())?,
            Device::of_buffer_type(abi.buft)?,
        ))
    }
}

/// Called once, as the last call for this buffer; ggml deletes the object itself.
unsafe extern "C" fn free_buffer(buffer: ggml_backend_buffer_t) {
    guard("free_buffer", (), || {
        // SAFETY: ggml hands back the object made in `alloc`; its context is a box that nobody uses after
        // this call.
        unsafe {
            if let Some(abi) = buffer.as_mut() {
                let context = std::mem::replace(&mut abi.context, ptr::null_mut()).cast::<Buffer>();
                if !context.is_null() {
                    drop(Box::from_raw(context));
                }
            }
        }
    });
}

/// The address tensors are placed from. ggml computes with it and never follows it.
unsafe extern "C" fn get_base(buffer: ggml_backend_buffer_t) -> *mut c_void {
    guard("get_base", ptr::null_mut(), || {
        // SAFETY: ggml hands back a live buffer of ours.
        let context = unsafe { context(buffer) };
        context.map_or(ptr::null_mut(), |(buffer, _)| {
            ptr::without_provenance_mut(buffer.base)
        })
    })
}

/// Nothing is attached to a tensor, so nothing can fail.
unsafe extern "C" fn init_tensor(_: ggml_backend_buffer_t, _: *mut ggml_tensor) -> ggml_status {
    GGML_STATUS_SUCCESS
}

/// Fills part of a tensor. A failure is logged; the next graph computation reports it.
unsafe extern "C" fn memset_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    guard("memset_tensor", (), || {
        // SAFETY: ggml hands back a live buffer of ours, and a tensor placed in it.
        if let (Some((buffer, _)), Some(tensor)) = unsafe { (context(buffer), object(tensor)) } {
            buffer.weights.are_not();
            let filled = buffer
                .place(tensor, offset)
                .and_then(|at| buffer.session.fill(buffer.id(), at, size as u64, value));
            buffer.log("fill", filled);
        }
    });
}

/// Writes part of a tensor; `data` is free again on return.
unsafe extern "C" fn set_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("set_tensor", (), || {
        // SAFETY: ggml hands back a live buffer of ours, a tensor placed in it, and `size` readable bytes.
        unsafe {
            if let (Some((buffer, _)), Some(tensor)) = (context(buffer), object(tensor)) {
                buffer.set(tensor, offset, Bytes::from_raw(data.cast(), size));
            }
        }
    });
}

/// Reads part of a tensor, after everything that was asked for before.
unsafe extern "C" fn get_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("get_tensor", (), || {
        // SAFETY: ggml hands back a live buffer of ours, a tensor placed in it, and `size` writable bytes.
        unsafe {
            if let (Some((buffer, device)), Some(tensor)) = (context(buffer), object(tensor)) {
                buffer.get(
                    device,
                    tensor,
                    offset,
                    BytesMut::from_raw(data.cast(), size),
                );
            }
        }
    });
}

/// Copies a tensor into this buffer on the host, if the source is in the same session; otherwise ggml
/// takes the bytes through its own memory.
unsafe extern "C" fn cpy_tensor(
    buffer: ggml_backend_buffer_t,
    src: *const ggml_tensor,
    dst: *mut ggml_tensor,
) -> bool {
    guard("cpy_tensor", false, || {
        // SAFETY: ggml hands back a live buffer of ours, and two tensors of its own with live buffers.
        unsafe {
            match (context(buffer), object(src), object(dst)) {
                (Some((to, device)), Some(src), Some(dst)) => to.copy_from(device, src, dst),
                _ => false,
            }
        }
    })
}

/// Writes pieces of a tensor, as many as `copies`, each `size` bytes; the data is free again on return.
unsafe extern "C" fn set_tensor_2d(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
    copies: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    for (at, from) in pieces(copies, offset, stride_tensor, stride_data) {
        let piece = data.wrapping_byte_add(from);
        // SAFETY: ggml vouches for every piece as for the whole of a `set_tensor`.
        unsafe { set_tensor(buffer, tensor, piece, at, size) };
    }
}

/// Reads pieces of a tensor, as many as `copies`, each `size` bytes.
unsafe extern "C" fn get_tensor_2d(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
    copies: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    for (at, from) in pieces(copies, offset, stride_tensor, stride_data) {
        let piece = data.wrapping_byte_add(from);
        // SAFETY: ggml vouches for every piece as for the whole of a `get_tensor`.
        unsafe { get_tensor(buffer, tensor, piece, at, size) };
    }
}

/// Fills the whole buffer.
unsafe extern "C" fn clear(buffer: ggml_backend_buffer_t, value: u8) {
    guard("clear", (), || {
        // SAFETY: ggml hands back a live buffer of ours.
        if let Some((buffer, _)) = unsafe { context(buffer) } {
            // New memory is zero: nothing happens that weights could undo.
            if value != 0 {
                buffer.weights.are_not();
            }
            buffer.log(
                "clear",
                buffer
                    .session
                    .fill(buffer.id(), 0, buffer.size as u64, value),
            );
        }
    });
}
