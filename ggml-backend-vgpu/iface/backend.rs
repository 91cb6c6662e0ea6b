//! `ggml_backend`: an ordered queue of graphs and copies.

use std::ffi::{c_char, c_void};
use std::ptr;

use vgpu_transport::bytes::Bytes;

use super::event;
use crate::abi::{
    GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_backend, ggml_backend_event_t, ggml_backend_i,
    ggml_backend_t, ggml_cgraph, ggml_guid, ggml_status, ggml_tensor,
};
use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::device_context::DeviceContext;
use crate::ffi::{drop_context, guard, into_context, object, rows_2d};

/// Tells the backends of this plugin from those of others. 16 random bytes.
static GUID: ggml_guid = [
    0x9e, 0x41, 0x07, 0xd3, 0x5b, 0x6c, 0x4a, 0x18, 0xa2, 0x7f, 0x30, 0xc8, 0xe5, 0x94, 0x1b, 0x66,
];

const CALLBACKS: ggml_backend_i = ggml_backend_i {
    get_name: Some(get_name),
    free: Some(free),
    set_tensor_async: Some(set_tensor_async),
    get_tensor_async: Some(get_tensor_async),
    set_tensor_2d_async: Some(set_tensor_2d_async),
    get_tensor_2d_async: Some(get_tensor_2d_async),
    cpy_tensor_async: Some(cpy_tensor_async),
    synchronize: Some(synchronize),
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute),
    event_record: Some(event_record),
    event_wait: Some(event_wait),
    graph_optimize: None,
};

/// A new backend of a device in ggml's form, which ggml owns and gives back to [`free`]. Null, with
/// a log line, if the executor cannot be reached.
pub(super) fn init(device: &'static DeviceContext) -> ggml_backend_t {
    match Backend::new(device) {
        Ok(backend) => Box::into_raw(Box::new(ggml_backend {
            guid: ptr::from_ref(&GUID).cast_mut(),
            iface: CALLBACKS,
            device: device.object(),
            context: into_context(backend),
        })),
        Err(error) => {
            tracing::error!("{}: cannot make a backend: {error}", device.name());
            ptr::null_mut()
        }
    }
}

/// The backend behind ggml's object. `None` if the pointer is null.
///
/// # Safety
///
/// `backend` must be null or come from [`init`], not freed.
unsafe fn context<'a>(backend: ggml_backend_t) -> Option<&'a Backend> {
    // SAFETY: null or a live object of `init` (this function's contract), which has set the
    // context.
    unsafe { object(object(backend.cast_const())?.context.cast_const().cast()) }
}

/// The name of the device. The backend owns the string, which is valid until [`free`].
unsafe extern "C" fn get_name(backend: ggml_backend_t) -> *const c_char {
    guard("get_name", c"VGPU".as_ptr(), || {
        // SAFETY: ggml passes a backend of this table that it has not freed.
        unsafe { context(backend) }.map_or(c"VGPU".as_ptr(), |backend| backend.c_name().as_ptr())
    })
}

/// Frees a backend, ggml's object included. The last call for this backend. Null is allowed. Does
/// not wait for the backend's graphs.
unsafe extern "C" fn free(backend: ggml_backend_t) {
    guard("free", (), || {
        if backend.is_null() {
            return;
        }
        // SAFETY: `init` has made the object and its context with `Box::into_raw`, and ggml does
        // not use the backend after this call.
        unsafe {
            let mut backend = Box::from_raw(backend);
            drop_context::<Backend>(&mut backend.context);
        }
    });
}

/// Writes `size` bytes from `data` to byte `offset` of a tensor, in order with the backend's other
/// work. The caller keeps the data unchanged until it synchronises: data in a host buffer may be
/// read until then, other data is copied before this returns. A failure is logged, and the next
/// graph reports it.
unsafe extern "C" fn set_tensor_async(
    backend: ggml_backend_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("set_tensor_async", (), || {
        // SAFETY: ggml passes a backend of this table, a valid tensor with a buffer that is not
        // freed, and `size` readable bytes that stay so until the synchronisation.
        unsafe {
            let (Some(backend), Some(tensor)) = (context(backend), object(tensor)) else {
                return;
            };
            match Buffer::of_tensor(backend.device(), tensor) {
                Some(buffer) => {
                    buffer.set_async(tensor, offset, Bytes::from_raw(data.cast(), size));
                }
                None => log_foreign_tensor(backend, "written"),
            }
        }
    });
}

/// Reads `size` bytes from byte `offset` of a tensor to `data`, in order with the backend's other
/// work. The caller does not touch the memory until it synchronises: bytes for a host buffer arrive
/// then, other bytes before this returns. If the read fails, the bytes are set to not-a-number
/// (floats) or 0 (others), and the next graph reports the failure.
unsafe extern "C" fn get_tensor_async(
    backend: ggml_backend_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("get_tensor_async", (), || {
        // SAFETY: ggml passes a backend of this table, a valid tensor with a buffer that is not
        // freed, and `size` writable bytes that nobody accesses until the synchronisation.
        unsafe {
            let (Some(backend), Some(tensor)) = (context(backend), object(tensor)) else {
                return;
            };
            match Buffer::of_tensor(backend.device(), tensor) {
                Some(buffer) => buffer.get_async(tensor, offset, (data.cast(), size)),
                None => log_foreign_tensor(backend, "read"),
            }
        }
    });
}

fn log_foreign_tensor(backend: &Backend, what: &str) {
    tracing::error!(
        "a tensor to be {what} is not in a buffer of {}",
        backend.device().name()
    );
}

/// `copies` writes of `size` bytes, each as by [`set_tensor_async`], at multiples of the two
/// strides in bytes.
unsafe extern "C" fn set_tensor_2d_async(
    backend: ggml_backend_t,
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
        // SAFETY: ggml passes what `set_tensor_async` needs for each row.
        unsafe { set_tensor_async(backend, tensor, row, at, size) };
    }
}

/// `copies` reads of `size` bytes, each as by [`get_tensor_async`], at multiples of the two strides
/// in bytes.
unsafe extern "C" fn get_tensor_2d_async(
    backend: ggml_backend_t,
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
        // SAFETY: ggml passes what `get_tensor_async` needs for each row.
        unsafe { get_tensor_async(backend, tensor, row, at, size) };
    }
}

/// Copies the tensor `src` to the tensor `dst` in the executor, in order with the work of both
/// backends. `false`, and nothing is copied, if the tensors are not of one session: ggml then
/// copies through its own memory.
unsafe extern "C" fn cpy_tensor_async(
    _from: ggml_backend_t,
    to: ggml_backend_t,
    src: *const ggml_tensor,
    dst: *mut ggml_tensor,
) -> bool {
    guard("cpy_tensor_async", false, || {
        // SAFETY: ggml calls the table of the backend `to`, so that one is of this table and not
        // freed, and passes two valid tensors with buffers that are not freed.
        unsafe {
            let (Some(to), Some(src), Some(dst)) = (context(to), object(src), object(dst)) else {
                return false;
            };
            // A session executes in order, whichever of its backends a request comes from.
            Buffer::of_tensor(to.device(), dst).is_some_and(|buffer| buffer.copy_from(src, dst))
        }
    })
}

/// Puts an event behind the backend's work so far.
unsafe extern "C" fn event_record(backend: ggml_backend_t, event: ggml_backend_event_t) {
    guard("event_record", (), || {
        // SAFETY: ggml passes a backend of this table and an event of the same device, neither
        // freed.
        if let (Some(backend), Some(event)) = unsafe { (context(backend), event::context(event)) } {
            event.record(backend.session());
        }
    });
}

/// Orders the backend's later work behind an event. Waits for an event of another session, and
/// returns at once for one of the same session.
unsafe extern "C" fn event_wait(backend: ggml_backend_t, event: ggml_backend_event_t) {
    guard("event_wait", (), || {
        // SAFETY: ggml passes a backend of this table and an event of a device of this plugin,
        // neither freed: ggml compares the devices before it mixes backends and events.
        if let (Some(backend), Some(event)) = unsafe { (context(backend), event::context(event)) } {
            event.wait_on(backend.session());
        }
    });
}

/// Waits until the backend's work so far is done. Returns at once if it is, and if the session is
/// lost: the next graph reports the loss.
unsafe extern "C" fn synchronize(backend: ggml_backend_t) {
    guard("synchronize", (), || {
        // SAFETY: ggml passes a backend of this table that it has not freed.
        if let Some(backend) = unsafe { context(backend) } {
            backend.synchronize();
        }
    });
}

/// Submits a graph and returns when it is on its way. `GGML_STATUS_FAILED`, with a log line, if the
/// graph cannot be submitted, if an earlier graph of the backend has failed, or if the session is
/// lost. ggml leaves the graph unchanged during the call.
unsafe extern "C" fn graph_compute(
    backend: ggml_backend_t,
    cgraph: *mut ggml_cgraph,
) -> ggml_status {
    guard("graph_compute", GGML_STATUS_FAILED, || {
        // SAFETY: ggml passes a backend of this table and a valid graph that nobody changes during
        // the call.
        let computed = unsafe {
            let (Some(backend), Some(cgraph)) = (context(backend), object(cgraph)) else {
                return GGML_STATUS_FAILED;
            };
            (backend, backend.compute(cgraph))
        };
        match computed {
            (_, Ok(())) => GGML_STATUS_SUCCESS,
            (backend, Err(error)) => {
                backend.log_failure(&error);
                GGML_STATUS_FAILED
            }
        }
    })
}
