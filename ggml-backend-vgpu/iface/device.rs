//! `ggml_backend_device`: a device.

use std::ffi::c_char;
use std::ptr;

use super::{backend, buffer_type, event};
use crate::abi::{
    GGML_BACKEND_DEVICE_TYPE_GPU, ggml_backend_buffer_type_t, ggml_backend_dev_caps,
    ggml_backend_dev_props, ggml_backend_dev_t, ggml_backend_dev_type, ggml_backend_device_i,
    ggml_backend_t, ggml_tensor,
};
use crate::device_context::{DeviceContext, DeviceParts, Tables};
use crate::encode::is_supported;
use crate::ffi::{guard, object};

const CALLBACKS: ggml_backend_device_i = ggml_backend_device_i {
    get_name: Some(get_name),
    get_description: Some(get_description),
    get_memory: Some(get_memory),
    get_type: Some(get_type),
    get_props: Some(get_props),
    init_backend: Some(init_backend),
    get_buffer_type: Some(get_buffer_type),
    get_host_buffer_type: Some(get_host_buffer_type),
    buffer_from_host_ptr: None,
    supports_op: Some(supports_op),
    supports_buft: Some(supports_buft),
    offload_op: None,
    event_new: Some(event::event_new),
    event_free: Some(event::event_free),
    event_synchronize: Some(event::event_synchronize),
};

/// A device with the callbacks of this crate. Never freed.
pub(super) fn new(parts: DeviceParts) -> &'static DeviceContext {
    let tables = Tables {
        device: CALLBACKS,
        buffer_type: buffer_type::CALLBACKS,
        host_buffer_type: buffer_type::HOST_CALLBACKS,
    };
    DeviceContext::new(parts, tables)
}

/// The device behind ggml's object. `None` if the pointer is null.
///
/// # Safety
///
/// `dev` must be null or the object of a device of [`new`].
unsafe fn context(dev: ggml_backend_dev_t) -> Option<&'static DeviceContext> {
    // SAFETY: null or the object of a device (this function's contract), whose context is the
    // device. Devices are never freed.
    unsafe { object(object(dev.cast_const())?.context.cast_const().cast()) }
}

/// `VGPU0`. The device owns the string, which is valid until the process ends.
unsafe extern "C" fn get_name(dev: ggml_backend_dev_t) -> *const c_char {
    guard("get_name", c"VGPU".as_ptr(), || {
        // SAFETY: ggml passes a device of this table.
        unsafe { context(dev) }.map_or(c"VGPU".as_ptr(), |device| device.c_name().as_ptr())
    })
}

/// One line for people. The device owns the string, which is valid until the process ends.
unsafe extern "C" fn get_description(dev: ggml_backend_dev_t) -> *const c_char {
    guard("get_description", c"vGPU".as_ptr(), || {
        // SAFETY: ggml passes a device of this table.
        unsafe { context(dev) }.map_or(c"vGPU".as_ptr(), |device| device.c_description().as_ptr())
    })
}

/// Free and total memory in bytes. Asks the executor, because other guests use its memory, too.
/// Without an executor no memory is free.
unsafe extern "C" fn get_memory(dev: ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    guard("get_memory", (), || {
        // SAFETY: ggml passes a device of this table.
        let (total_bytes, free_bytes) = unsafe { context(dev) }.map_or((0, 0), |d| d.memory());
        // SAFETY: ggml passes null or the address of a `size_t`.
        unsafe {
            if !total.is_null() {
                total.write(total_bytes as usize);
            }
            if !free.is_null() {
                free.write(free_bytes as usize);
            }
        }
    });
}

/// A GPU: programs offload to devices of this type first.
unsafe extern "C" fn get_type(_: ggml_backend_dev_t) -> ggml_backend_dev_type {
    GGML_BACKEND_DEVICE_TYPE_GPU
}

/// Fills in `props`, with the memory as by [`get_memory`]. The device owns the strings, which are
/// valid until the process ends.
unsafe extern "C" fn get_props(dev: ggml_backend_dev_t, props: *mut ggml_backend_dev_props) {
    guard("get_props", (), || {
        // SAFETY: ggml passes a device of this table.
        let Some(device) = (unsafe { context(dev) }).filter(|_| !props.is_null()) else {
            return;
        };
        let (total, free) = device.memory();
        let filled = ggml_backend_dev_props {
            name: device.c_name().as_ptr(),
            description: device.c_description().as_ptr(),
            memory_free: free as usize,
            memory_total: total as usize,
            type_: GGML_BACKEND_DEVICE_TYPE_GPU,
            device_id: ptr::null(),
            caps: ggml_backend_dev_caps {
                async_: true,
                host_buffer: true,
                buffer_from_host_ptr: false,
                events: true,
                mmap_support: true,
            },
        };
        // SAFETY: ggml passes the address of a structure of this layout; null was excluded above.
        unsafe { props.write(filled) };
    });
}

/// A new backend, which ggml owns and frees with its `free` callback. Null, with a log line, if the
/// executor cannot be reached. The parameters are not used.
unsafe extern "C" fn init_backend(dev: ggml_backend_dev_t, _: *const c_char) -> ggml_backend_t {
    guard("init_backend", ptr::null_mut(), || {
        // SAFETY: ggml passes a device of this table.
        unsafe { context(dev) }.map_or(ptr::null_mut(), backend::init)
    })
}

/// The type of buffers in the executor's memory. The device owns the object, which is valid until
/// the process ends.
unsafe extern "C" fn get_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    guard("get_buffer_type", ptr::null_mut(), || {
        // SAFETY: ggml passes a device of this table.
        unsafe { context(dev) }.map_or(ptr::null_mut(), DeviceContext::buffer_type)
    })
}

/// The type of buffers in the program's memory. The device owns the object, which is valid until
/// the process ends.
unsafe extern "C" fn get_host_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    guard("get_host_buffer_type", ptr::null_mut(), || {
        // SAFETY: ggml passes a device of this table.
        unsafe { context(dev) }.map_or(ptr::null_mut(), DeviceContext::host_buffer_type)
    })
}

/// Whether the device computes the node `op`. Answered from the capabilities of the handshake,
/// without a message. `false` on failure: the node is left to another backend.
unsafe extern "C" fn supports_op(dev: ggml_backend_dev_t, op: *const ggml_tensor) -> bool {
    guard("supports_op", false, || {
        // SAFETY: ggml passes a device of this table and a valid tensor with valid sources.
        unsafe {
            let (Some(device), Some(op)) = (context(dev), object(op)) else {
                return false;
            };
            device.with_capabilities(|known| is_supported(device.translator(), known, op))
        }
    })
}

/// Whether the device can use tensors in memory of this type: only in its own.
unsafe extern "C" fn supports_buft(
    dev: ggml_backend_dev_t,
    buft: ggml_backend_buffer_type_t,
) -> bool {
    guard("supports_buft", false, || {
        // SAFETY: ggml passes a device of this table. The other pointer is compared, not followed.
        unsafe { context(dev) }.is_some_and(|device| device.buffer_type() == buft)
    })
}
