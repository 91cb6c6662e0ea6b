//! `ggml_backend_buffer` in the executor's memory.

use std::ffi::c_void;
use std::ptr;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::size::shown;

use crate::abi::{
    GGML_STATUS_SUCCESS, ggml_backend_buffer_i, ggml_backend_buffer_t, ggml_backend_buffer_type_t,
    ggml_status, ggml_tensor,
};
use crate::buffer::Buffer;
use crate::device_context::DeviceContext;
use crate::ffi::{drop_context, guard, into_context, object, rows_2d};

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
    reset: None, // init_tensor attaches nothing
};

/// A new buffer of `size` zero bytes in ggml's form, which ggml owns and frees with
/// [`free_buffer`]. Null, with a log line, if the executor has no room or cannot be reached. `buft`
/// is the type of the buffer.
pub(super) fn alloc(
    device: &'static DeviceContext,
    buft: ggml_backend_buffer_type_t,
    size: usize,
) -> ggml_backend_buffer_t {
    let buffer = match Buffer::new(device, size) {
        Ok(buffer) => buffer,
        Err(error) => {
            let (name, size) = (device.name(), shown(size as u64));
            tracing::error!("{name}: cannot allocate {size}: {error}");
            return ptr::null_mut();
        }
    };
    let mut context = into_context(buffer);
    // SAFETY: the buffer type lives as long as the process, and the context until `free_buffer`.
    let object = unsafe { device.ggml().buffer(buft, CALLBACKS, context, size) };
    // SAFETY: the context is the `Buffer` of `into_context`. ggml knows it only if there is an
    // object. Without one it is freed here, and no reference to it is left.
    unsafe {
        if object.is_null() {
            drop_context::<Buffer>(&mut context);
        } else {
            (*context.cast::<Buffer>()).set_object(object);
        }
    }
    object
}

/// The buffer behind ggml's object. `None` if the pointer is null.
///
/// # Safety
///
/// `buffer` must be null or come from [`alloc`], not freed.
unsafe fn context<'a>(buffer: ggml_backend_buffer_t) -> Option<&'a Buffer> {
    // SAFETY: null or a live object of `alloc` (this function's contract), which has set the
    // context.
    unsafe { object(object(buffer.cast_const())?.context.cast_const().cast()) }
}

/// Frees the buffer. The last call for this buffer. ggml frees its own object afterwards.
unsafe extern "C" fn free_buffer(buffer: ggml_backend_buffer_t) {
    guard("free_buffer", (), || {
        // SAFETY: ggml passes an object of `alloc`, whose context is a `Buffer`, and uses neither
        // during this call nor the context after it.
        unsafe {
            if let Some(buffer) = buffer.as_mut() {
                drop_context::<Buffer>(&mut buffer.context);
            }
        }
    });
}

/// The address from which ggml places tensors. ggml computes with it and does not follow it. Null
/// on failure.
unsafe extern "C" fn get_base(buffer: ggml_backend_buffer_t) -> *mut c_void {
    guard("get_base", ptr::null_mut(), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed.
        unsafe { context(buffer) }.map_or(ptr::null_mut(), |buffer| {
            ptr::without_provenance_mut(buffer.base())
        })
    })
}

/// Nothing is attached to a tensor, so nothing can fail.
unsafe extern "C" fn init_tensor(_: ggml_backend_buffer_t, _: *mut ggml_tensor) -> ggml_status {
    GGML_STATUS_SUCCESS
}

/// Sets `size` bytes from byte `offset` of a tensor to `value`. A failure is logged, and the next
/// graph reports it.
unsafe extern "C" fn memset_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    guard("memset_tensor", (), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed, and a valid tensor in
        // it.
        if let (Some(buffer), Some(tensor)) = unsafe { (context(buffer), object(tensor)) } {
            buffer.fill(tensor, offset, size, value);
        }
    });
}

/// Writes `size` bytes from `data` to byte `offset` of a tensor. The caller may change the data
/// after the return. A failure is logged, and the next graph reports it.
unsafe extern "C" fn set_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("set_tensor", (), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed, a valid tensor in it,
        // and `size` readable bytes.
        unsafe {
            if let (Some(buffer), Some(tensor)) = (context(buffer), object(tensor)) {
                buffer.set(tensor, offset, Bytes::from_raw(data.cast(), size));
            }
        }
    });
}

/// Reads `size` bytes from byte `offset` of a tensor to `data`, after all earlier work. If the read
/// fails, the bytes are set to not-a-number (floats) or 0 (others), and the next graph reports the
/// failure.
unsafe extern "C" fn get_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("get_tensor", (), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed, a valid tensor in it,
        // and `size` writable bytes.
        unsafe {
            if let (Some(buffer), Some(tensor)) = (context(buffer), object(tensor)) {
                buffer.get(tensor, offset, BytesMut::from_raw(data.cast(), size));
            }
        }
    });
}

/// Copies the tensor `src` to the tensor `dst` of this buffer in the executor. `false`, and nothing
/// is copied, if `src` is not a tensor of the same session: ggml then copies through its own
/// memory.
unsafe extern "C" fn cpy_tensor(
    buffer: ggml_backend_buffer_t,
    src: *const ggml_tensor,
    dst: *mut ggml_tensor,
) -> bool {
    guard("cpy_tensor", false, || {
        // SAFETY: ggml passes a buffer of this table that it has not freed, and two valid tensors
        // with buffers that are not freed, `dst` in this one.
        unsafe {
            match (context(buffer), object(src), object(dst)) {
                (Some(to), Some(src), Some(dst)) => to.copy_from(src, dst),
                _ => false,
            }
        }
    })
}

/// `copies` writes of `size` bytes, each as by [`set_tensor`], at multiples of the two strides in
/// bytes.
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
    for (at, from) in rows_2d(copies, offset, stride_tensor, stride_data) {
        let row = data.wrapping_byte_add(from);
        // SAFETY: ggml passes what `set_tensor` needs for each row.
        unsafe { set_tensor(buffer, tensor, row, at, size) };
    }
}

/// `copies` reads of `size` bytes, each as by [`get_tensor`], at multiples of the two strides in
/// bytes.
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
    for (at, from) in rows_2d(copies, offset, stride_tensor, stride_data) {
        let row = data.wrapping_byte_add(from);
        // SAFETY: ggml passes what `get_tensor` needs for each row.
        unsafe { get_tensor(buffer, tensor, row, at, size) };
    }
}

/// Sets every byte of the buffer to `value`. A failure is logged, and the next graph reports it.
unsafe extern "C" fn clear(buffer: ggml_backend_buffer_t, value: u8) {
    guard("clear", (), || {
        // SAFETY: ggml passes a buffer of this table that it has not freed.
        if let Some(buffer) = unsafe { context(buffer) } {
            buffer.clear(value);
        }
    });
}
