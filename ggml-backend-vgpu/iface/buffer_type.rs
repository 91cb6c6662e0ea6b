//! `ggml_backend_buffer_type`: the two kinds of memory of a device, the executor's and the
//! program's.

use std::ffi::c_char;
use std::ptr;

use super::{buffer, host_buffer};
use crate::abi::{
    ggml_backend_buffer_t, ggml_backend_buffer_type_i_v3, ggml_backend_buffer_type_t, ggml_tensor,
};
use crate::device_context::DeviceContext;
use crate::ffi::guard;

/// For buffers in the executor's memory.
pub(super) const CALLBACKS: ggml_backend_buffer_type_i_v3 = ggml_backend_buffer_type_i_v3 {
    get_name: Some(get_name),
    alloc_buffer: Some(alloc_buffer),
    alloc_buffer_n: None, // ggml places the tensors
    get_alignment: Some(get_alignment),
    get_max_size: None, // no limit but the executor's memory
    get_alloc_size: Some(get_alloc_size),
    get_alloc_size_n: None, // ggml asks for each tensor
    is_host: Some(is_host),
};

/// For buffers in the program's memory.
pub(super) const HOST_CALLBACKS: ggml_backend_buffer_type_i_v3 = ggml_backend_buffer_type_i_v3 {
    get_name: Some(host_get_name),
    alloc_buffer: Some(host_alloc_buffer),
    alloc_buffer_n: None, // ggml places the tensors
    get_alignment: Some(host_get_alignment),
    get_max_size: None,   // no limit but the program's memory
    get_alloc_size: None, // a tensor takes its own size
    get_alloc_size_n: None,
    is_host: Some(host_is_host),
};

/// `VGPU0`, the name of the device: Ollama counts memory by it. The device owns the string, which
/// is valid until the process ends.
unsafe extern "C" fn get_name(buft: ggml_backend_buffer_type_t) -> *const c_char {
    guard("get_name", c"VGPU".as_ptr(), || {
        // SAFETY: ggml passes a buffer type of this table.
        unsafe { DeviceContext::of_buffer_type(buft) }
            .map_or(c"VGPU".as_ptr(), |device| device.c_name().as_ptr())
    })
}

/// A new buffer of `size` zero bytes, which ggml owns and frees with its `free_buffer` callback.
/// Null, with a log line, if the executor has no room or cannot be reached.
unsafe extern "C" fn alloc_buffer(
    buft: ggml_backend_buffer_type_t,
    size: usize,
) -> ggml_backend_buffer_t {
    guard("alloc_buffer", ptr::null_mut(), || {
        // SAFETY: ggml passes a buffer type of this table.
        unsafe { DeviceContext::of_buffer_type(buft) }
            .map_or(ptr::null_mut(), |device| buffer::alloc(device, buft, size))
    })
}

/// Every tensor starts at a multiple of so many bytes.
unsafe extern "C" fn get_alignment(_: ggml_backend_buffer_type_t) -> usize {
    crate::buffer::ALIGNMENT
}

/// The bytes of the tensor, and behind quantised rows as many as kernels of the host may read
/// there ([`DeviceContext::allocation_of`]).
unsafe extern "C" fn get_alloc_size(
    buft: ggml_backend_buffer_type_t,
    tensor: *const ggml_tensor,
) -> usize {
    // No allocation succeeds with it, and no sum of a few overflows.
    const FAILURE: usize = usize::MAX >> 16;
    guard("get_alloc_size", FAILURE, || {
        // SAFETY: ggml passes a buffer type of this table, and a valid tensor of its own.
        unsafe {
            let device = DeviceContext::of_buffer_type(buft);
            device.map_or(FAILURE, |device| device.allocation_of(&*tensor))
        }
    })
}

/// The program's processor cannot access the memory.
unsafe extern "C" fn is_host(_: ggml_backend_buffer_type_t) -> bool {
    false
}

/// `VGPU0_Host`. The device owns the string, which is valid until the process ends.
unsafe extern "C" fn host_get_name(buft: ggml_backend_buffer_type_t) -> *const c_char {
    guard("get_name", c"VGPU_Host".as_ptr(), || {
        // SAFETY: ggml passes a buffer type of this table.
        unsafe { DeviceContext::of_buffer_type(buft) }.map_or(c"VGPU_Host".as_ptr(), |device| {
            device.c_host_buffer_name().as_ptr()
        })
    })
}

/// A new buffer of `size` bytes, which ggml owns and frees with its `free_buffer` callback. Null,
/// with a log line, if the process has no memory.
unsafe extern "C" fn host_alloc_buffer(
    buft: ggml_backend_buffer_type_t,
    size: usize,
) -> ggml_backend_buffer_t {
    guard("alloc_buffer", ptr::null_mut(), || {
        // SAFETY: ggml passes a buffer type of this table.
        unsafe { DeviceContext::of_buffer_type(buft) }.map_or(ptr::null_mut(), |device| {
            host_buffer::alloc(device, buft, size)
        })
    })
}

/// Every tensor starts at a multiple of so many bytes.
unsafe extern "C" fn host_get_alignment(_: ggml_backend_buffer_type_t) -> usize {
    crate::host_buffer::ALIGNMENT
}

/// The program's processor can access the memory.
unsafe extern "C" fn host_is_host(_: ggml_backend_buffer_type_t) -> bool {
    true
}
