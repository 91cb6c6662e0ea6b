//! Host buffers: memory of the program's own process from which uploads need no copy of ours.
//!
//! ggml programs place there what goes to the device again and again: inputs, results, the pieces of a model's file on
//! their way. The memory is lent by the link as long as that has some, so that the host takes uploads from where
//! they lie; otherwise it is ordinary memory, and everything works the same with one copy more.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use vgpu_transport::link::Lent;

use crate::abi::{
    GGML_STATUS_SUCCESS, ggml_backend_buffer_i, ggml_backend_buffer_t, ggml_backend_buffer_type_t,
    ggml_status, ggml_tensor,
};
use crate::device::Device;
use crate::ffi::{guard, object};
use crate::session::Session;

/// Every tensor starts at a multiple of this: a cache line, which is enough for ggml's own vectors.
pub(crate) const ALIGNMENT: usize = 64;

/// A host buffer.
pub(crate) struct HostBuffer {
    base: NonNull<u8>,
    size: usize,
    /// Whose link it was made for.
    session: Option<Arc<Session>>,
    /// Where its memory comes from.
    memory: Memory,
}

enum Memory {
    /// The link's window.
    Lent(Lent),
    /// The allocator of this process.
    Own(Layout),
}

impl HostBuffer {
    /// A buffer of `size` bytes, in ggml's form. Null, with a log line, when there is no memory at all.
    pub(crate) fn alloc(
        device: &Device,
        buft: ggml_backend_buffer_type_t,
        size: usize,
    ) -> ggml_backend_buffer_t {
        let Some(buffer) = HostBuffer::new(device, size) else {
            tracing::error!("{}: no {size} bytes for a host buffer", device.name());
            return ptr::null_mut();
        };
        let context = Box::into_raw(Box::new(buffer));
        // SAFETY: the buffer type lives as long as the process, the context until `free_buffer`.
        let buffer = unsafe {
            device
                .host()
                .buffer(buft, CALLBACKS, context.cast::<c_void>(), size)
        };
        if buffer.is_null() {
            // SAFETY: nobody has taken the context, so it is still ours alone.
            drop(unsafe { Box::from_raw(context) });
        }
        buffer
    }

    fn new(device: &Device, size: usize) -> Option<HostBuffer> {
        // Without an executor the memory is of use all the same.
        let session = device.session().ok();
        let lent = session.as_ref().and_then(|session| session.lend(size));
        let (base, memory) = match lent {
            Some(lent) => {
                let base = lent.window.as_ptr().wrapping_add(lent.range.start);
                (NonNull::new(base)?, Memory::Lent(lent))
            }
            None => {
                let layout = Layout::from_size_align(size.max(1), ALIGNMENT).ok()?;
                // SAFETY: the layout is of at least one byte.
                (
                    NonNull::new(unsafe { alloc_zeroed(layout) })?,
                    Memory::Own(layout),
                )
            }
        };
        if let Some(session) = &session {
            let lent = match &memory {
                Memory::Lent(lent) => Some(lent),
                Memory::Own(_) => None,
            };
            session.host_memory(base.as_ptr().addr(), size, lent);
        }
        Some(HostBuffer {
            base,
            size,
            session,
            memory,
        })
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let lent = match &self.memory {
            Memory::Lent(lent) => Some(lent.clone()),
            Memory::Own(_) => None,
        };
        if let Some(session) = &self.session {
            session.forget_host_memory(self.base.as_ptr().addr(), lent);
        }
        if let Memory::Own(layout) = self.memory {
            // SAFETY: allocated in `new` with this layout; the session has just forgotten it, so that nothing
            // lands there any more.
            unsafe { dealloc(self.base.as_ptr(), layout) };
        }
    }
}

const CALLBACKS: ggml_backend_buffer_i = ggml_backend_buffer_i {
    free_buffer: Some(free_buffer),
    get_base: Some(get_base),
    init_tensor: Some(init_tensor),
    memset_tensor: Some(memset_tensor),
    set_tensor: Some(set_tensor),
    get_tensor: Some(get_tensor),
    set_tensor_2d: None, // ggml falls back to one call for each piece
    get_tensor_2d: None,
    cpy_tensor: None, // ggml copies from and to host memory by itself
    clear: Some(clear),
    reset: None, // nothing is attached to tensors
};

/// The context of a buffer object.
///
/// # Safety
///
/// `buffer` must be a buffer object that [`HostBuffer::alloc`] has made and ggml has not freed.
unsafe fn context<'a>(buffer: ggml_backend_buffer_t) -> Option<&'a HostBuffer> {
    // SAFETY: the caller's promise; the context was set by `alloc`.
    unsafe {
        object(
            object(buffer.cast_const())?
                .context
                .cast_const()
                .cast::<HostBuffer>(),
        )
    }
}

/// Called once, as the last call for this buffer; ggml deletes the object itself.
unsafe extern "C" fn free_buffer(buffer: ggml_backend_buffer_t) {
    guard("free_buffer", (), || {
        // SAFETY: ggml hands back the object made in `alloc`; its context is a box that nobody uses after
        // this call.
        unsafe {
            if let Some(abi) = buffer.as_mut() {
                let context = std::mem::replace(&mut abi.context, ptr::null_mut());
                if !context.is_null() {
                    drop(Box::from_raw(context.cast::<HostBuffer>()));
                }
            }
        }
    });
}

/// The memory itself.
unsafe extern "C" fn get_base(buffer: ggml_backend_buffer_t) -> *mut c_void {
    guard("get_base", ptr::null_mut(), || {
        // SAFETY: ggml hands back a live buffer of ours.
        unsafe { context(buffer) }.map_or(ptr::null_mut(), |buffer| buffer.base.as_ptr().cast())
    })
}

/// Nothing is attached to a tensor, so nothing can fail.
unsafe extern "C" fn init_tensor(_: ggml_backend_buffer_t, _: *mut ggml_tensor) -> ggml_status {
    GGML_STATUS_SUCCESS
}

/// Where `size` bytes from `offset` of a tensor lie; null, with a log line, when that is outside the buffer.
///
/// # Safety
///
/// As for [`context`], and `tensor` must be null or a tensor of the host.
unsafe fn place(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    offset: usize,
    size: usize,
) -> *mut u8 {
    // SAFETY: the caller's promise.
    let (Some(buffer), Some(tensor)) = (unsafe { (context(buffer), object(tensor)) }) else {
        return ptr::null_mut();
    };
    let base = buffer.base.as_ptr();
    let start = tensor.data.addr().checked_sub(base.addr());
    let start = start.and_then(|start| start.checked_add(offset));
    match start.and_then(|start| Some((start, start.checked_add(size)?))) {
        Some((start, end)) if end <= buffer.size => base.wrapping_add(start),
        _ => {
            tracing::error!("{size} bytes at {offset} of a tensor are not in its host buffer");
            ptr::null_mut()
        }
    }
}

/// Fills part of a tensor.
unsafe extern "C" fn memset_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    guard("memset_tensor", (), || {
        // SAFETY: ggml hands back a live buffer of ours and a tensor placed in it; `place` has checked the range.
        unsafe {
            let to = place(buffer, tensor, offset, size);
            if !to.is_null() {
                to.write_bytes(value, size);
            }
        }
    });
}

/// Writes part of a tensor.
unsafe extern "C" fn set_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("set_tensor", (), || {
        // SAFETY: as above, and ggml vouches for `size` readable bytes; they may be the tensor's own.
        unsafe {
            let to = place(buffer, tensor, offset, size);
            if !to.is_null() {
                ptr::copy(data.cast(), to, size);
            }
        }
    });
}

/// Reads part of a tensor.
unsafe extern "C" fn get_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("get_tensor", (), || {
        // SAFETY: as above, and ggml vouches for `size` writable bytes.
        unsafe {
            let from = place(buffer, tensor, offset, size);
            if !from.is_null() {
                ptr::copy(from.cast_const(), data.cast(), size);
            }
        }
    });
}

/// Fills the whole buffer.
unsafe extern "C" fn clear(buffer: ggml_backend_buffer_t, value: u8) {
    guard("clear", (), || {
        // SAFETY: ggml hands back a live buffer of ours, which has `size` bytes.
        unsafe {
            if let Some(buffer) = context(buffer) {
                buffer.base.as_ptr().write_bytes(value, buffer.size);
            }
        }
    });
}
