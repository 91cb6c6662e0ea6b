//! The device: one for each endpoint, with its memory, its abilities and its present session.

use std::ffi::{CString, c_char};
use std::fmt::Write as _;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vgpu_transport::ir::Capabilities;
use vgpu_transport::link::Endpoint;

use crate::abi::{
    BufferType, GGML_BACKEND_DEVICE_TYPE_GPU, ggml_backend_buffer_t, ggml_backend_buffer_type_i_v3,
    ggml_backend_buffer_type_t, ggml_backend_buffer_type_v3, ggml_backend_dev_caps,
    ggml_backend_dev_props, ggml_backend_dev_t, ggml_backend_dev_type, ggml_backend_device,
    ggml_backend_device_i, ggml_backend_event_t, ggml_backend_reg_t, ggml_backend_t, ggml_tensor,
};
use crate::buffer::{ALIGNMENT, Buffer};
use crate::connect::{ConnectError, connect};
use crate::encode::supports;
use crate::event::Event;
use crate::ffi::{guard, object};
use crate::host::Host;
use crate::host_buffer::{self, HostBuffer};
use crate::session::{Session, SessionError, Welcome};
use crate::stream::Stream;
use crate::translate::Translator;

/// Words by which Ollama decides that a device is driven by another library, whatever it is.
const MISLEADING: [&str; 6] = ["cuda", "rocm", "hip", "metal", "apple", "vulkan"];

/// After a failed attempt to reach a lost executor, the next is not made before so many times as long as it took, so that a
/// program that asks for many things does not wait for each. An executor whose socket is not there costs microseconds, and
/// is found at once when it is back.
const RETRY_AFTER: u32 = 10;

/// The most of that.
const LONGEST_RETRY: Duration = Duration::from_millis(500);

/// A device. Lives as long as the process.
pub(crate) struct Device {
    host: Arc<Host>,
    translator: Arc<Translator>,
    endpoint: Endpoint,
    name: CString,
    host_buffer_name: CString,
    description: CString,
    connection: Mutex<Connection>,
    object: Object,
}

/// The session in use, and what is remembered of it when it is gone.
struct Connection {
    session: Arc<Session>,
    /// No attempt to reach a lost executor before this.
    next_attempt: Option<Instant>,
}

/// What ggml holds pointers to.
struct Object {
    device: std::cell::UnsafeCell<ggml_backend_device>,
    buffer_type: std::cell::UnsafeCell<DeviceBufferType>,
    host_buffer_type: std::cell::UnsafeCell<DeviceBufferType>,
}

// SAFETY: the structures are filled in before the device is handed to ggml and never written by us
// again; ggml only reads them.
unsafe impl Sync for Object {}
// SAFETY: the pointers inside go to objects that live as long as the process.
unsafe impl Send for Object {}

/// A buffer type as ggml sees it, with its device behind it: where ggml's own field for that lies
/// depends on the API version.
#[repr(C)]
struct DeviceBufferType {
    abi: BufferType,
    device: *const Device,
}

impl Device {
    /// Whether it takes longer to send bytes than to hash them. Over these two links they go at the speed of copying
    /// memory, three times that of hashing.
    pub(crate) fn is_slower_than_hashing(&self) -> bool {
        !matches!(self.endpoint, Endpoint::Unix(_) | Endpoint::Inproc)
    }

    /// The device number `index`, driven over `session`. `registry` is what it belongs to.
    pub(crate) fn new(
        host: &Arc<Host>,
        translator: &Arc<Translator>,
        index: usize,
        endpoint: Endpoint,
        session: Arc<Session>,
        registry: ggml_backend_reg_t,
    ) -> &'static Device {
        let description = describe(&session.welcome);
        let no_buffer_type = || DeviceBufferType {
            abi: BufferType::new(host.api(), buffer_type(ptr::null_mut())),
            device: ptr::null(),
        };
        let device = Box::leak(Box::new(Device {
            host: Arc::clone(host),
            translator: Arc::clone(translator),
            endpoint,
            name: CString::new(format!("VGPU{index}")).unwrap_or_default(),
            host_buffer_name: CString::new(format!("VGPU{index}_Host")).unwrap_or_default(),
            description: CString::new(description).unwrap_or_default(),
            connection: Mutex::new(Connection {
                session,
                next_attempt: None,
            }),
            object: Object {
                device: ggml_backend_device {
                    iface: CALLBACKS,
                    reg: registry,
                    context: ptr::null_mut(),
                }
                .into(),
                buffer_type: no_buffer_type().into(),
                host_buffer_type: no_buffer_type().into(),
            },
        }));
        // The objects point at the device, which has its address only now.
        let this: *const Device = device;
        device.object.device.get_mut().context = this.cast_mut().cast();
        let (api, object) = (device.host.api(), device.object.device.get());
        *device.object.buffer_type.get_mut() = DeviceBufferType {
            abi: BufferType::new(api, buffer_type(object)),
            device: this,
        };
        *device.object.host_buffer_type.get_mut() = DeviceBufferType {
            abi: BufferType::new(api, host_buffer_type(object)),
            device: this,
        };
        device
    }

    /// `VGPU0`.
    pub(crate) fn name(&self) -> &str {
        self.name.to_str().unwrap_or("VGPU")
    }

    /// Where its executor is.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The ggml it works for.
    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    /// The ids of that ggml.
    pub(crate) fn translator(&self) -> &Translator {
        &self.translator
    }

    /// The device in ggml's form.
    pub(crate) fn object(&self) -> ggml_backend_dev_t {
        self.object.device.get()
    }

    /// Its buffer type in ggml's form.
    pub(crate) fn buffer_type(&self) -> ggml_backend_buffer_type_t {
        self.object.buffer_type.get().cast()
    }

    /// Its type of host buffers in ggml's form.
    fn host_buffer_type(&self) -> ggml_backend_buffer_type_t {
        self.object.host_buffer_type.get().cast()
    }

    /// The device of a buffer type.
    ///
    /// # Safety
    ///
    /// `buft` must be null or the buffer type of a device.
    pub(crate) unsafe fn of_buffer_type(
        buft: ggml_backend_buffer_type_t,
    ) -> Option<&'static Device> {
        // SAFETY: the caller's promise; buffer types of ours are the first field of a DeviceBufferType, and
        // devices live as long as the process.
        unsafe { object(object(buft.cast::<DeviceBufferType>().cast_const())?.device) }
    }

    /// A session that works: the present one, or a new one if that has lost its host.
    pub(crate) fn session(&self) -> Result<Arc<Session>, SessionError> {
        let mut connection = self.connection();
        if !connection.session.is_lost() {
            return Ok(Arc::clone(&connection.session));
        }
        if connection
            .next_attempt
            .is_some_and(|then| Instant::now() < then)
        {
            return Err(SessionError::Lost(
                "it was not there a moment ago".to_owned(),
            ));
        }
        let started = Instant::now();
        let session = connect(&self.endpoint, &self.host).map_err(|error: ConnectError| {
            let pause = (started.elapsed() * RETRY_AFTER).min(LONGEST_RETRY);
            connection.next_attempt = Some(Instant::now() + pause);
            SessionError::Lost(error.to_string())
        })?;
        tracing::info!(
            "{}: connected again, session {}",
            self.name(),
            session.welcome.session
        );
        *connection = Connection {
            session: Arc::clone(&session),
            next_attempt: None,
        };
        Ok(session)
    }

    /// Whether the executor of the present session is gone.
    pub(crate) fn is_lost(&self) -> bool {
        let session = Arc::clone(&self.connection().session);
        session.is_lost()
    }

    /// Total and free memory. A lost executor has none free.
    fn memory(&self) -> (u64, u64) {
        let total = self.connection().session.welcome.memory.0;
        self.session()
            .and_then(|session| session.memory())
            .unwrap_or_else(|error| {
                tracing::warn!("{}: no memory is free: {error}", self.name());
                (total, 0)
            })
    }

    fn with_capabilities<T>(&self, answer: impl FnOnce(&Capabilities) -> T) -> T {
        let session = Arc::clone(&self.connection().session);
        answer(&session.welcome.capabilities)
    }

    fn connection(&self) -> std::sync::MutexGuard<'_, Connection> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// One line for people and for Ollama, which takes it for the name of a library.
fn describe(welcome: &Welcome) -> String {
    let mut line = String::from("vGPU");
    let model = welcome.description.to_lowercase();
    if !model.is_empty() && !MISLEADING.iter().any(|word| model.contains(word)) {
        let _ = write!(line, " ({})", welcome.description);
    }
    line
}

fn buffer_type(device: ggml_backend_dev_t) -> ggml_backend_buffer_type_v3 {
    ggml_backend_buffer_type_v3 {
        iface: ggml_backend_buffer_type_i_v3 {
            get_name: Some(buft_name),
            alloc_buffer: Some(buft_alloc),
            alloc_buffer_n: None, // ggml places the tensors
            get_alignment: Some(buft_alignment),
            get_max_size: None,   // what fits is the host's to say
            get_alloc_size: None, // a tensor takes its own size
            get_alloc_size_n: None,
            is_host: Some(buft_is_host),
        },
        device,
        context: ptr::null_mut(),
    }
}

fn host_buffer_type(device: ggml_backend_dev_t) -> ggml_backend_buffer_type_v3 {
    let mut buft = buffer_type(device);
    buft.iface.get_name = Some(host_buft_name);
    buft.iface.alloc_buffer = Some(host_buft_alloc);
    buft.iface.get_alignment = Some(host_buft_alignment);
    buft.iface.is_host = Some(host_buft_is_host);
    buft
}

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
    event_new: Some(event_new),
    event_free: Some(event_free),
    event_synchronize: Some(event_synchronize),
};

/// The device behind ggml's object.
///
/// # Safety
///
/// `dev` must be null or the object of a device.
unsafe fn context(dev: ggml_backend_dev_t) -> Option<&'static Device> {
    // SAFETY: the caller's promise; the context was set in `Device::new`, and devices live for ever.
    unsafe { object(object(dev)?.context.cast::<Device>()) }
}

/// `VGPU0`. The string stays.
unsafe extern "C" fn get_name(dev: ggml_backend_dev_t) -> *const c_char {
    guard("get_name", c"VGPU".as_ptr(), || {
        // SAFETY: ggml hands back a device of ours.
        unsafe { context(dev) }.map_or(c"VGPU".as_ptr(), |d| d.name.as_ptr())
    })
}

/// One line. The string stays.
unsafe extern "C" fn get_description(dev: ggml_backend_dev_t) -> *const c_char {
    guard("get_description", c"vGPU".as_ptr(), || {
        // SAFETY: ggml hands back a device of ours.
        unsafe { context(dev) }.map_or(c"vGPU".as_ptr(), |d| d.description.as_ptr())
    })
}

/// Asks the host, so that the figures follow what other guests use.
unsafe extern "C" fn get_memory(dev: ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    guard("get_memory", (), || {
        // SAFETY: ggml hands back a device of ours, and two places to write to.
        unsafe {
            let memory = context(dev).map_or((0, 0), Device::memory);
            if !total.is_null() {
                total.write(memory.0 as usize);
            }
            if !free.is_null() {
                free.write(memory.1 as usize);
            }
        }
    });
}

unsafe extern "C" fn get_type(_: ggml_backend_dev_t) -> ggml_backend_dev_type {
    GGML_BACKEND_DEVICE_TYPE_GPU
}

/// All of the above in one. The strings stay.
unsafe extern "C" fn get_props(dev: ggml_backend_dev_t, props: *mut ggml_backend_dev_props) {
    guard("get_props", (), || {
        // SAFETY: ggml hands back a device of ours, and a structure to fill in.
        unsafe {
            let (Some(device), false) = (context(dev), props.is_null()) else {
                return;
            };
            let (total, free) = device.memory();
            props.write(ggml_backend_dev_props {
                name: device.name.as_ptr(),
                description: device.description.as_ptr(),
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
            });
        }
    });
}

/// A new stream, or null, with a log line, when there is no executor.
unsafe extern "C" fn init_backend(dev: ggml_backend_dev_t, _: *const c_char) -> ggml_backend_t {
    guard("init_backend", ptr::null_mut(), || {
        // SAFETY: ggml hands back a device of ours.
        unsafe { context(dev) }.map_or(ptr::null_mut(), Stream::init)
    })
}

/// The type of the device's own buffers; it stays.
unsafe extern "C" fn get_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    guard("get_buffer_type", ptr::null_mut(), || {
        // SAFETY: ggml hands back a device of ours.
        unsafe { context(dev) }.map_or(ptr::null_mut(), Device::buffer_type)
    })
}

/// The type of memory that uploads are taken from where they lie; it stays.
unsafe extern "C" fn get_host_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    guard("get_host_buffer_type", ptr::null_mut(), || {
        // SAFETY: ggml hands back a device of ours.
        unsafe { context(dev) }.map_or(ptr::null_mut(), Device::host_buffer_type)
    })
}

/// An event that has passed; ggml gives it back to `event_free`.
unsafe extern "C" fn event_new(dev: ggml_backend_dev_t) -> ggml_backend_event_t {
    guard("event_new", ptr::null_mut(), || Event::init(dev))
}

/// Called once, as the last call for this event. The object is ours to free.
unsafe extern "C" fn event_free(_: ggml_backend_dev_t, event: ggml_backend_event_t) {
    // SAFETY: ggml hands back an event made by `event_new` and does not use it after this call.
    guard("event_free", (), || unsafe { Event::free(event) });
}

/// Returns when what was asked for before the event was recorded is done.
unsafe extern "C" fn event_synchronize(_: ggml_backend_dev_t, event: ggml_backend_event_t) {
    guard("event_synchronize", (), || {
        // SAFETY: ggml hands back a live event of ours.
        if let Some(event) = unsafe { Event::of(event) } {
            event.synchronize();
        }
    });
}

/// Answered from the capabilities of the handshake, without the host.
unsafe extern "C" fn supports_op(dev: ggml_backend_dev_t, op: *const ggml_tensor) -> bool {
    guard("supports_op", false, || {
        // SAFETY: ggml hands back a device of ours, and a tensor of its own with sources of its own.
        unsafe {
            let (Some(device), Some(op)) = (context(dev), object(op)) else {
                return false;
            };
            device.with_capabilities(|capabilities| supports(device.translator(), capabilities, op))
        }
    })
}

/// Only memory of this very device.
unsafe extern "C" fn supports_buft(
    dev: ggml_backend_dev_t,
    buft: ggml_backend_buffer_type_t,
) -> bool {
    guard("supports_buft", false, || {
        // SAFETY: ggml hands back a device of ours; the other pointer is only compared.
        unsafe { context(dev) }.is_some_and(|device| device.buffer_type() == buft)
    })
}

/// The device's name: Ollama counts memory by it.
unsafe extern "C" fn buft_name(buft: ggml_backend_buffer_type_t) -> *const c_char {
    guard("buft_name", c"VGPU".as_ptr(), || {
        // SAFETY: ggml hands back a buffer type of ours.
        unsafe { Device::of_buffer_type(buft) }.map_or(c"VGPU".as_ptr(), |d| d.name.as_ptr())
    })
}

/// Null, with a log line, when there is no room.
unsafe extern "C" fn buft_alloc(
    buft: ggml_backend_buffer_type_t,
    size: usize,
) -> ggml_backend_buffer_t {
    guard("buft_alloc", ptr::null_mut(), || {
        // SAFETY: ggml hands back a buffer type of ours.
        unsafe { Device::of_buffer_type(buft) }
            .map_or(ptr::null_mut(), |d| Buffer::alloc(d, buft, size))
    })
}

unsafe extern "C" fn buft_alignment(_: ggml_backend_buffer_type_t) -> usize {
    ALIGNMENT
}

/// The program cannot reach the memory itself.
unsafe extern "C" fn buft_is_host(_: ggml_backend_buffer_type_t) -> bool {
    false
}

/// By this name programs tell where their memory is.
unsafe extern "C" fn host_buft_name(buft: ggml_backend_buffer_type_t) -> *const c_char {
    guard("host_buft_name", c"VGPU_Host".as_ptr(), || {
        // SAFETY: ggml hands back a buffer type of ours.
        unsafe { Device::of_buffer_type(buft) }
            .map_or(c"VGPU_Host".as_ptr(), |d| d.host_buffer_name.as_ptr())
    })
}

/// Null, with a log line, when there is no memory.
unsafe extern "C" fn host_buft_alloc(
    buft: ggml_backend_buffer_type_t,
    size: usize,
) -> ggml_backend_buffer_t {
    guard("host_buft_alloc", ptr::null_mut(), || {
        // SAFETY: ggml hands back a buffer type of ours.
        unsafe { Device::of_buffer_type(buft) }
            .map_or(ptr::null_mut(), |d| HostBuffer::alloc(d, buft, size))
    })
}

unsafe extern "C" fn host_buft_alignment(_: ggml_backend_buffer_type_t) -> usize {
    host_buffer::ALIGNMENT
}

/// The program's own processor can work there.
unsafe extern "C" fn host_buft_is_host(_: ggml_backend_buffer_type_t) -> bool {
    true
}
