//! `ggml_backend_buffer` in the program's memory.

use std::ffi::c_void;
use std::ptr;

use vgpu_transport::size::shown;

use crate::abi::{
    GGML_STATUS_SUCCESS, ggml_backend_buffer_i, ggml_backend_buffer_t, ggml_backend_buffer_type_t,
    ggml_status, ggml_tensor,
};
use crate::device_context::DeviceContext;
use crate::ffi::{drop_context, guard, into_context, object};
use crate::host_buffer::HostBuffer;

const CALLBACKS: ggml_backend_buffer_i = ggml_backend_buffer_i {
    free_buffer: Some(free_buffer),
    get_base: Some(get_base),
    init_tensor: Some(init_tensor),
    memset_tensor: Some(memset_tensor),
    set_tensor: Some(set_tensor),
    get_tensor: Some(get_tensor),
    set_tensor_2d: None, // ggml calls set_tensor for each row
    get_tensor_2d: None, // ggml calls get_tensor for each row
    cpy_tensor: None,    // ggml copies from and to host memory by itself
    clear: Some(clear),
    reset: None, // init_tensor attaches nothing
};

/// A new buffer of `size` bytes in ggml's form, which ggml owns and frees with [`free_buffer`].
/// Null, with a log line, if there is no memory. `buft` is the type of the buffer.
pub(super) fn alloc(
    device: &'static DeviceContext,
    buft: ggml_backend_buffer_type_t,
    size: usize,
) -> ggml_backend_buffer_t {
    let Some(buffer) = HostBuffer::new(device, size) else {
        let name = device.name();
        let size = shown(size as u64);
        tracing::error!("{name}: no memory for a host buffer of {size}");
        return ptr::null_mut();
    };
    let mut context = into_context(buffer);
    // SAFETY: the buffer type lives as long as the process, and the context until `free_buffer`.
    let object = unsafe { device.ggml().buffer(buft, CALLBACKS, context, size) };
    if object.is_null() {
        // SAFETY: the context is the `HostBuffer` of `into_context`, and ggml has not taken it.
        unsafe { drop_context::<HostBuffer>(&mut context) };
    }
    object
}

/// The buffer behind ggml's object. `None` if the pointer is null.
///
/// # Safety
///
/// `buffer` must be null or come from [`alloc`], not freed.
unsafe fn context<'a>(buffer: ggml_backend_buffer_t) -> Option<&'a HostBuffer> {
    // SAFETY: null or a live object of `alloc` (this function's contract), which has set the
    // context.
    unsafe { object(object(buffer.cast_const())?.context.cast_const().cast()) }
}

/// The address of `size` bytes from byte `offset` of a tensor. `None` if a pointer is null or the
/// buffer does not have these bytes.
///
/// # Safety
///
/// As for [`context`], and `tensor` must be null or a valid tensor.
unsafe fn address(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    offset: usize,
    size: usize,
) -> Option<*mut u8> {
    // SAFETY: this function's contract is that of the two functions.
    let (buffer, tensor) = unsafe { (context(buffer)?, object(tensor)?) };
    buffer.at(tensor, offset, size)
}

/// Frees the buffer, after everything under way from and to its memory is done. The last call for
/// this buffer. ggml frees its own object afterwards.
unsafe extern "C" fn free_buffer(buffer: ggml_backend_buffer_t) {
    guard("free_buffer", (), || {
        // SAFETY: ggml passes an object of `alloc`, whose context is a `HostBuffer`, and uses
        // neither during this call nor the context after it.
        unsafe {
            if let Some(buffer) = buffer.as_mut() {
                drop_context::<HostBuffer>(&mut buffer.context);
            }
        }
    });
}

/// The memory. The buffer owns it, until [`free_buffer`]. Null on failure.
unsafe extern "C" fn get_base(buffer: ggml_backend_buffer_t) -> *mut c_void {
    guard("get_base", ptr::null_mut(), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed.
        unsafe { context(buffer) }.map_or(ptr::null_mut(), |buffer| buffer.base().cast())
    })
}

/// Nothing is attached to a tensor, so nothing can fail.
unsafe extern "C" fn init_tensor(_: ggml_backend_buffer_t, _: *mut ggml_tensor) -> ggml_status {
    GGML_STATUS_SUCCESS
}

/// Sets `size` bytes from byte `offset` of a tensor to `value`. Does nothing, with a log line, if
/// they are outside the buffer.
unsafe extern "C" fn memset_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    guard("memset_tensor", (), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed, and a valid tensor.
        // `address` has checked that the buffer has the bytes.
        unsafe {
            if let Some(to) = address(buffer, tensor, offset, size) {
                to.write_bytes(value, size);
            }
        }
    });
}

/// Writes `size` bytes from `data` to byte `offset` of a tensor. Does nothing, with a log line, if
/// they are outside the buffer.
unsafe extern "C" fn set_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("set_tensor", (), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed, a valid tensor, and
        // `size` readable bytes. `address` has checked that the buffer has the bytes. The two
        // ranges may overlap, which `ptr::copy` allows.
        unsafe {
            if let Some(to) = address(buffer, tensor, offset, size) {
                ptr::copy(data.cast(), to, size);
            }
        }
    });
}

/// Reads `size` bytes from byte `offset` of a tensor to `data`. Does nothing, with a log line, if
/// they are outside the buffer.
unsafe extern "C" fn get_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("get_tensor", (), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed, a valid tensor, and
        // `size` writable bytes. `address` has checked that the buffer has the bytes. The two
        // ranges may overlap, which `ptr::copy` allows.
        unsafe {
            if let Some(from) = address(buffer, tensor, offset, size) {
                ptr::copy(from.cast_const(), data.cast(), size);
            }
        }
    });
}

/// Sets every byte of the buffer to `value`.
unsafe extern "C" fn clear(buffer: ggml_backend_buffer_t, value: u8) {
    guard("clear", (), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed. A HostBuffer has `size`
        // bytes at `base`.
        unsafe {
            if let Some(buffer) = context(buffer) {
                buffer.base().write_bytes(value, buffer.size());
            }
        }
    });
}
