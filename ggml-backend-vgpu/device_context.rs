//! A device: its address at an executor, the session in use, and the objects that ggml holds
//! pointers to.
//!
//! The device knows nothing of ggml's callbacks: `iface` fills the tables of callbacks and hands
//! them to [`DeviceContext::new`].

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vgpu_transport::fork::PerProcess;
use vgpu_transport::ir::Capabilities;

use crate::abi::{
    BufferType, ggml_backend_buffer_type_i_v3, ggml_backend_buffer_type_t,
    ggml_backend_buffer_type_v3, ggml_backend_dev_t, ggml_backend_device, ggml_backend_device_i,
    ggml_backend_reg_t, ggml_tensor,
};
use crate::connect::{ConnectTimeouts, DeviceAddress, ExecutorConnectError, LONG, SHORT, connect};
use crate::ffi::object;
use crate::ggml::Ggml;
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::program_exit;
use crate::session::{Session, SessionError, Welcome};
use crate::translate::Translator;

/// Ollama takes a device whose description contains one of these words for the device of another
/// library.
const RESERVED_WORDS: [&str; 6] = ["cuda", "rocm", "hip", "metal", "apple", "vulkan"];

/// A failed attempt to reach a lost executor that took longer than this has waited for somebody who
/// does not answer. Where nobody listens, an attempt fails in microseconds.
const IN_VAIN: Duration = Duration::from_secs(1);

/// A device. Lives as long as the process.
pub(crate) struct DeviceContext {
    ggml: Arc<Ggml>,
    translator: Arc<Translator>,
    address: DeviceAddress,
    name: CString,
    host_buffer_name: CString,
    description: CString,
    /// What the executor has said about itself in the first session.
    first_welcome: Welcome,
    current: PerProcess<RankedMutex<CurrentSession>>,
    objects: Objects,
}

/// The session in use. A lost session stays until there is another one.
#[derive(Default)]
struct CurrentSession {
    /// `None` in a forked child, until it loads a model.
    session: Option<Arc<Session>>,
    attempts: Attempts,
}

/// The attempts to replace a lost session. Each request makes one, so that a restarted executor is
/// found as soon as it listens. A program that makes many requests does not wait long for each.
#[derive(Debug, Default)]
struct Attempts {
    /// Until this time, attempts are brief.
    brief_until: Option<Instant>,
}

impl Attempts {
    /// How long an attempt that begins at `now` may take.
    fn timeouts(&self, now: Instant) -> ConnectTimeouts {
        match self.brief_until {
            Some(until) if now < until => SHORT,
            _ => LONG,
        }
    }

    /// An attempt has failed. After one that was waited for in vain, attempts are brief for as long
    /// as that one took, so that half of the time at least is left for short waits.
    fn failed(&mut self, began: Instant, now: Instant) {
        let took = now.saturating_duration_since(began);
        let is_brief = self.brief_until.is_some_and(|until| began < until);
        if took > IN_VAIN && !is_brief {
            self.brief_until = Some(now + took);
        }
    }
}

/// Why a device cannot do what was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    /// The executor was lost and cannot be reached.
    #[error("the executor is lost: {0}")]
    Connect(#[from] ExecutorConnectError),
    /// The session has failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// No session is opened any more.
    #[error("the program ends")]
    ProgramEnds,
}

/// ggml's callbacks for the objects of a device.
pub(crate) struct Tables {
    /// For the device.
    pub(crate) device: ggml_backend_device_i,
    /// For the type of buffers in the executor's memory.
    pub(crate) buffer_type: ggml_backend_buffer_type_i_v3,
    /// For the type of buffers in the program's memory.
    pub(crate) host_buffer_type: ggml_backend_buffer_type_i_v3,
}

/// What a device consists of.
pub(crate) struct DeviceParts {
    /// The number of the device: 0 for `VGPU0`.
    pub(crate) index: usize,
    /// The ggml that uses the device.
    pub(crate) ggml: Arc<Ggml>,
    /// The translation of that ggml's ids.
    pub(crate) translator: Arc<Translator>,
    /// Where the device is.
    pub(crate) address: DeviceAddress,
    /// The first session with the executor.
    pub(crate) session: Arc<Session>,
    /// The registry that the device belongs to.
    pub(crate) registry: ggml_backend_reg_t,
}

/// The objects that ggml holds pointers to.
struct Objects {
    device: UnsafeCell<ggml_backend_device>,
    buffer_type: UnsafeCell<BufferTypeObject>,
    host_buffer_type: UnsafeCell<BufferTypeObject>,
}

// SAFETY: the objects are complete before ggml gets a pointer to one. From then on ggml and the
// plugin only read them.
unsafe impl Sync for Objects {}
// SAFETY: the pointers in the objects refer to a registry and a device, both of which live as long
// as the process and may be used from every thread.
unsafe impl Send for Objects {}

/// A buffer type for ggml, with its device. The place of ggml's own `context` field depends on the
/// API version, so the device is behind ggml's object instead.
#[repr(C)]
struct BufferTypeObject {
    abi: BufferType,
    device: *const DeviceContext,
}

impl DeviceContext {
    /// A device with ggml's callbacks. Never freed, because ggml may use it until the process ends.
    pub(crate) fn new(parts: DeviceParts, tables: Tables) -> &'static DeviceContext {
        let DeviceParts {
            index,
            ggml,
            translator,
            address,
            session,
            registry,
        } = parts;
        let this: *mut DeviceContext = Box::into_raw(Box::<DeviceContext>::new_uninit()).cast();
        // SAFETY: `this` points to memory for a DeviceContext. The address of a field is computed
        // without a reference.
        let device_object = unsafe { UnsafeCell::raw_get(&raw const (*this).objects.device) };
        let buffer_type = |iface| {
            let newest = ggml_backend_buffer_type_v3 {
                iface,
                device: device_object,
                context: std::ptr::null_mut(),
            };
            UnsafeCell::new(BufferTypeObject {
                abi: BufferType::new(ggml.api(), newest),
                device: this,
            })
        };
        let objects = Objects {
            device: UnsafeCell::new(ggml_backend_device {
                iface: tables.device,
                reg: registry,
                context: this.cast(),
            }),
            buffer_type: buffer_type(tables.buffer_type),
            host_buffer_type: buffer_type(tables.host_buffer_type),
        };
        let current = PerProcess::new();
        let first_welcome = session.welcome().clone();
        let in_use = CurrentSession {
            session: Some(session),
            attempts: Attempts::default(),
        };
        current.get_or_init(|| RankedMutex::new(Rank::Device, in_use));
        let device = DeviceContext {
            name: c_string(format!("VGPU{index}")),
            host_buffer_name: c_string(format!("VGPU{index}_Host")),
            description: c_string(describe(&first_welcome)),
            ggml,
            translator,
            address,
            first_welcome,
            current,
            objects,
        };
        // SAFETY: `this` comes from a box of the right size and alignment that nobody else knows
        // and that is never freed. The write initialises the memory before the reference is made.
        unsafe {
            this.write(device);
            &*this
        }
    }

    /// The device of a buffer type. `None` if the pointer is null.
    ///
    /// # Safety
    ///
    /// `buft` must be null or a buffer type of a device: from
    /// [`buffer_type`](DeviceContext::buffer_type) or
    /// [`host_buffer_type`](DeviceContext::host_buffer_type).
    pub(crate) unsafe fn of_buffer_type(
        buft: ggml_backend_buffer_type_t,
    ) -> Option<&'static DeviceContext> {
        // SAFETY: `buft` points to the first field of a BufferTypeObject (this function's
        // contract), in a device that is never freed and whose objects are not written to after
        // `new`.
        unsafe { object(object(buft.cast::<BufferTypeObject>().cast_const())?.device) }
    }

    /// The device in ggml's form.
    pub(crate) fn object(&self) -> ggml_backend_dev_t {
        self.objects.device.get()
    }

    /// The type of buffers in the executor's memory, in ggml's form.
    pub(crate) fn buffer_type(&self) -> ggml_backend_buffer_type_t {
        self.objects.buffer_type.get().cast()
    }

    /// The type of buffers in the program's memory, in ggml's form.
    pub(crate) fn host_buffer_type(&self) -> ggml_backend_buffer_type_t {
        self.objects.host_buffer_type.get().cast()
    }

    /// `VGPU0`.
    pub(crate) fn name(&self) -> &str {
        self.name.to_str().unwrap_or("VGPU")
    }

    /// `VGPU0`, for ggml.
    pub(crate) fn c_name(&self) -> &CStr {
        &self.name
    }

    /// `VGPU0_Host`, for ggml.
    pub(crate) fn c_host_buffer_name(&self) -> &CStr {
        &self.host_buffer_name
    }

    /// One line for people, for ggml.
    pub(crate) fn c_description(&self) -> &CStr {
        &self.description
    }

    /// Where the device is.
    pub(crate) fn address(&self) -> &DeviceAddress {
        &self.address
    }

    /// The ggml that uses the device.
    pub(crate) fn ggml(&self) -> &Ggml {
        &self.ggml
    }

    /// The translation of that ggml's ids.
    pub(crate) fn translator(&self) -> &Translator {
        &self.translator
    }

    /// The bytes that a tensor takes in a buffer of the executor: its own and
    /// [`Type::row_padding`](vgpu_transport::ir::Type::row_padding).
    ///
    /// # Safety
    ///
    /// The tensor must be a valid one of the device's ggml.
    pub(crate) unsafe fn allocation_of(&self, tensor: &ggml_tensor) -> usize {
        // SAFETY: a valid tensor of this ggml: this function's contract.
        let (bytes, shape) = unsafe { (self.ggml.nbytes(tensor), self.translator.shape(tensor)) };
        let padding = shape.map_or(0, |shape| shape.ty.row_padding(shape.ne[0]));
        bytes.saturating_add(padding as usize)
    }

    /// The session in use, or a new one if that one is lost.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Connect`] if the executor cannot be reached, [`DeviceError::ProgramEnds`] if
    /// the program ends.
    pub(crate) fn session(&self) -> Result<Arc<Session>, DeviceError> {
        let mut current = self.current();
        if let Some(session) = current.session.as_ref().filter(|s| !s.is_lost()) {
            return Ok(Arc::clone(session));
        }
        if program_exit::has_begun() {
            return Err(DeviceError::ProgramEnds);
        }
        let began = Instant::now();
        let timeouts = current.attempts.timeouts(began);
        let session = connect(&self.address, &self.ggml, timeouts)
            .inspect_err(|_| current.attempts.failed(began, Instant::now()))?;
        let whose = match current.session {
            Some(_) => "",
            None => " of this forked process",
        };
        tracing::info!(
            "{}: connected to the executor again, session {}{whose}",
            self.name(),
            session.welcome().session
        );
        *current = CurrentSession {
            session: Some(Arc::clone(&session)),
            attempts: Attempts::default(),
        };
        Ok(session)
    }

    /// Whether the executor of the session in use is gone. Does not wait.
    pub(crate) fn is_lost(&self) -> bool {
        let session = self.current().session.clone();
        session.is_none_or(|session| session.is_lost())
    }

    /// Total and free memory in bytes. A lost executor has no free memory.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let total = self.with_welcome(|welcome| welcome.memory_total);
        self.session()
            .and_then(|session| Ok(session.memory()?))
            .unwrap_or_else(|error| {
                tracing::warn!("{}: no free memory: {error}", self.name());
                (total, 0)
            })
    }

    /// Calls `answer` with the capabilities of the executor, which the handshake has brought.
    pub(crate) fn with_capabilities<T>(&self, answer: impl FnOnce(&Capabilities) -> T) -> T {
        self.with_welcome(|welcome| answer(&welcome.capabilities))
    }

    /// Calls `answer` with what the executor has said in the last handshake, or in the first one if
    /// this forked process has had none.
    fn with_welcome<T>(&self, answer: impl FnOnce(&Welcome) -> T) -> T {
        let session = self.current().session.clone();
        answer(
            session
                .as_deref()
                .map_or(&self.first_welcome, Session::welcome),
        )
    }

    fn current(&self) -> RankedGuard<'_, CurrentSession> {
        let current = self
            .current
            .get_or_init(|| RankedMutex::new(Rank::Device, CurrentSession::default()));
        current.lock()
    }
}

/// One line for people. Ollama takes it for the name of the library that drives the device.
fn describe(welcome: &Welcome) -> String {
    let mut line = String::from("vGPU");
    let model = welcome.description.to_lowercase();
    if !model.is_empty() && !RESERVED_WORDS.iter().any(|word| model.contains(word)) {
        let _ = write!(line, " ({})", welcome.description);
    }
    line
}

/// A string for ggml; empty if it contains a zero byte.
fn c_string(text: String) -> CString {
    CString::new(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_brief_for_as_long_as_one_was_waited_for_in_vain() {
        let mut attempts = Attempts::default();
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        assert_eq!(attempts.timeouts(at(0)), LONG);
        // Nobody listened.
        attempts.failed(at(0), at(1));
        assert_eq!(attempts.timeouts(at(1)), LONG);
        // Somebody did, and has not answered for 15 s.
        attempts.failed(at(1), at(15_001));
        for brief in [15_001, 20_000, 30_000] {
            assert_eq!(attempts.timeouts(at(brief)), SHORT);
        }
        assert_eq!(attempts.timeouts(at(30_001)), LONG);
        // A brief attempt prolongs nothing.
        attempts.failed(at(29_500), at(30_600));
        assert_eq!(attempts.timeouts(at(30_601)), LONG);
    }
}
