//! Streams: ordered queues of graphs and copies. ggml calls them backends.
//!
//! A session executes in order, so that every call is one-way: a graph is on its way when `graph_compute` returns, and
//! whoever reads or synchronises waits for it.

use std::ffi::{CString, c_char, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use vgpu_transport::bytes::Bytes;

use crate::abi::{
    GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_backend, ggml_backend_event_t, ggml_backend_i,
    ggml_backend_t, ggml_cgraph, ggml_guid, ggml_status, ggml_tensor,
};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::encode::{EncodeError, Encoder};
use crate::event::Event;
use crate::ffi::{guard, object, pieces};
use crate::session::{Session, SessionError, StreamId};

/// Tells our streams from those of other backends. 16 bytes chosen once.
static GUID: Guid = Guid([
    0x9e, 0x41, 0x07, 0xd3, 0x5b, 0x6c, 0x4a, 0x18, 0xa2, 0x7f, 0x30, 0xc8, 0xe5, 0x94, 0x1b, 0x66,
]);

struct Guid(ggml_guid);

/// A stream.
pub(crate) struct Stream {
    device: &'static Device,
    session: Arc<Session>,
    id: StreamId,
    name: CString,
    encoder: Mutex<Encoder>,
}

impl Stream {
    /// A stream on the device's present session, in ggml's form; null, with a log line, without one.
    pub(crate) fn init(device: &'static Device) -> ggml_backend_t {
        let session = match device.session() {
            Ok(session) => session,
            Err(error) => {
                tracing::error!("{}: cannot open a stream: {error}", device.name());
                return ptr::null_mut();
            }
        };
        let stream = Stream {
            device,
            id: session.open_stream(),
            session,
            name: CString::new(device.name()).unwrap_or_default(),
            encoder: Mutex::default(),
        };
        Box::into_raw(Box::new(ggml_backend {
            guid: ptr::from_ref(&GUID.0).cast_mut(),
            iface: CALLBACKS,
            device: device.object(),
            context: Box::into_raw(Box::new(stream)).cast::<c_void>(),
        }))
    }

    /// Sends the graph on its way.
    ///
    /// # Safety
    ///
    /// `cgraph` must be a graph that ggml hands to `graph_compute`.
    unsafe fn compute(&self, cgraph: &ggml_cgraph) -> Result<(), EncodeError> {
        // The same uid means the same nodes at the same places: ggml gives a new one whenever it splits
        // or places a graph anew.
        let key = (cgraph.uid != 0).then_some(cgraph.uid);
        let host_nodes = usize::try_from(cgraph.n_nodes).unwrap_or(0);
        let mut encoder = self.encoder.lock().unwrap_or_else(PoisonError::into_inner);
        self.session.submit(self.id, key, host_nodes, || {
            // SAFETY: ggml hands over a valid graph and leaves it alone during the call.
            unsafe { encoder.encode(self.device, &self.session, cgraph) }
        })
    }

    fn write_stats(&self) {
        let Some(path) = std::env::var_os("VGPU_STATS").map(PathBuf::from) else {
            return;
        };
        let written = self.session.stats().write(
            &path,
            self.device.name(),
            &self.device.endpoint().to_string(),
        );
        if let Err(error) = written {
            tracing::warn!("cannot write the statistics to {}: {error}", path.display());
        }
    }
}

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

/// The stream behind ggml's object.
///
/// # Safety
///
/// `backend` must be an object that [`Stream::init`] has made and `free` has not seen.
unsafe fn context<'a>(backend: ggml_backend_t) -> Option<&'a Stream> {
    // SAFETY: the caller's promise; the context was set by `init`.
    unsafe { object(object(backend)?.context.cast::<Stream>()) }
}

/// The device's name; ours, valid until `free`.
unsafe extern "C" fn get_name(backend: ggml_backend_t) -> *const c_char {
    guard("get_name", c"VGPU".as_ptr(), || {
        // SAFETY: ggml hands back a live stream of ours.
        unsafe { context(backend) }.map_or(c"VGPU".as_ptr(), |stream| stream.name.as_ptr())
    })
}

/// Called once, as the last call for this stream. The object is ours to free.
unsafe extern "C" fn free(backend: ggml_backend_t) {
    guard("free", (), || {
        if backend.is_null() {
            return;
        }
        // SAFETY: both boxes were made in `init`; ggml does not use the stream after this call.
        let stream = unsafe { Box::from_raw(Box::from_raw(backend).context.cast::<Stream>()) };
        stream.session.close_stream(stream.id);
        stream.write_stats();
    });
}

/// In order with the stream. Data in a host buffer of ours is taken from where it lies until the stream is synchronised;
/// other data is copied before this returns, which is more than ggml asks for.
unsafe extern "C" fn set_tensor_async(
    backend: ggml_backend_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("set_tensor_async", (), || {
        // SAFETY: ggml hands back a live stream of ours, a tensor with a live buffer, and `size` readable
        // bytes.
        unsafe {
            let (Some(stream), Some(tensor)) = (context(backend), object(tensor)) else {
                return;
            };
            match Buffer::of_tensor(stream.device, tensor) {
                Some(buffer) => {
                    buffer.set_later(tensor, offset, Bytes::from_raw(data.cast(), size));
                }
                None => tracing::error!(
                    "a tensor to be written is not in a buffer of {}",
                    stream.device.name()
                ),
            }
        }
    });
}

/// In order with the stream. Bytes that go into a host buffer of ours are there when the stream is synchronised; others
/// are waited for, since nobody tells us when their memory goes away.
unsafe extern "C" fn get_tensor_async(
    backend: ggml_backend_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("get_tensor_async", (), || {
        // SAFETY: ggml hands back a live stream of ours, a tensor with a live buffer, and `size` bytes that are
        // writable until the stream is synchronised.
        unsafe {
            let (Some(stream), Some(tensor)) = (context(backend), object(tensor)) else {
                return;
            };
            match Buffer::of_tensor(stream.device, tensor) {
                Some(buffer) => {
                    buffer.get_later(stream.device, tensor, offset, (data.cast(), size));
                }
                None => tracing::error!(
                    "a tensor to be read is not in a buffer of {}",
                    stream.device.name()
                ),
            }
        }
    });
}

/// `copies` pieces of `size` bytes, each like a `set_tensor_async`.
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
    for (at, from) in pieces(copies, offset, stride_tensor, stride_data) {
        let piece = data.wrapping_byte_add(from);
        // SAFETY: ggml vouches for every piece as for the whole of a `set_tensor_async`.
        unsafe { set_tensor_async(backend, tensor, piece, at, size) };
    }
}

/// `copies` pieces of `size` bytes, each like a `get_tensor_async`.
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
    for (at, from) in pieces(copies, offset, stride_tensor, stride_data) {
        let piece = data.wrapping_byte_add(from);
        // SAFETY: ggml vouches for every piece as for the whole of a `get_tensor_async`.
        unsafe { get_tensor_async(backend, tensor, piece, at, size) };
    }
}

/// Copies a tensor on the host, in order with both streams, if both are of one session; otherwise ggml takes the bytes
/// through its own memory.
unsafe extern "C" fn cpy_tensor_async(
    _from: ggml_backend_t,
    to: ggml_backend_t,
    src: *const ggml_tensor,
    dst: *mut ggml_tensor,
) -> bool {
    guard("cpy_tensor_async", false, || {
        // SAFETY: ggml asks the destination's stream, which is a live one of ours, and hands over two tensors of
        // its own with live buffers.
        unsafe {
            let (Some(to), Some(src), Some(dst)) = (context(to), object(src), object(dst)) else {
                return false;
            };
            // The session executes in order, whichever stream a request comes through.
            Buffer::of_tensor(to.device, dst)
                .is_some_and(|buffer| buffer.copy_from(to.device, src, dst))
        }
    })
}

/// Notes how far the stream has come.
unsafe extern "C" fn event_record(backend: ggml_backend_t, event: ggml_backend_event_t) {
    guard("event_record", (), || {
        // SAFETY: ggml hands back a live stream and a live event of ours.
        if let (Some(stream), Some(event)) = unsafe { (context(backend), Event::of(event)) } {
            event.record(&stream.session);
        }
    });
}

/// Lets the stream go on only behind the event.
unsafe extern "C" fn event_wait(backend: ggml_backend_t, event: ggml_backend_event_t) {
    guard("event_wait", (), || {
        // SAFETY: ggml hands back a live stream of ours, and a live event, which is ours or another backend's; ggml
        // itself compares the devices before it mixes them.
        if let (Some(stream), Some(event)) = unsafe { (context(backend), Event::of(event)) } {
            event.hold(&stream.session);
        }
    });
}

/// Returns when everything before is done. Costs nothing when it already is.
unsafe extern "C" fn synchronize(backend: ggml_backend_t) {
    guard("synchronize", (), || {
        // SAFETY: ggml hands back a live stream of ours.
        if let Some(stream) = unsafe { context(backend) } {
            match stream.session.synchronize() {
                Ok(()) | Err(SessionError::Lost(_)) => {} // said when it was lost, reported by the next graph
                Err(error) => tracing::error!("{}: {error}", stream.device.name()),
            }
        }
    });
}

/// Sends the graph on its way. FAILED when it cannot be sent, or when something sent earlier has failed.
unsafe extern "C" fn graph_compute(
    backend: ggml_backend_t,
    cgraph: *mut ggml_cgraph,
) -> ggml_status {
    guard("graph_compute", GGML_STATUS_FAILED, || {
        // SAFETY: ggml hands back a live stream of ours and a graph that it leaves alone during the call.
        let computed = unsafe {
            let (Some(stream), Some(cgraph)) = (context(backend), object(cgraph)) else {
                return GGML_STATUS_FAILED;
            };
            stream.compute(cgraph)
        };
        match computed {
            Ok(()) => GGML_STATUS_SUCCESS,
            Err(error) => {
                tracing::error!("graph not computed: {error}");
                GGML_STATUS_FAILED
            }
        }
    })
}
