//! `ggml_backend_reg`: the plugin as ggml sees it, the root of all other objects.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_transport::fork::PerProcess;
use vgpu_transport::lock::lock_at;

use super::device;
use crate::abi::{
    GGML_LOG_LEVEL_WARN, ggml_backend_dev_t, ggml_backend_reg, ggml_backend_reg_i,
    ggml_backend_reg_t,
};
use crate::device_context::{DeviceContext, DeviceParts};
use crate::discovery::discover;
use crate::fail_fast;
use crate::ffi::{guard, object};
use crate::ggml::Ggml;
use crate::lock::Rank;
use crate::logging;
use crate::translate::Translator;

/// The score with an executor. ggml compares the scores of the variants of one backend, and this
/// backend has one variant.
const SCORE: i32 = 100;

const CALLBACKS: ggml_backend_reg_i = ggml_backend_reg_i {
    get_name: Some(get_name),
    get_device_count: Some(get_device_count),
    get_device: Some(get_device),
    get_proc_address: Some(get_proc_address),
};

/// The registry and its devices. ggml's object comes first, so that a pointer to the object is a
/// pointer to the registry.
#[repr(C)]
struct Registry {
    object: ggml_backend_reg,
    ggml: Arc<Ggml>,
    devices: Vec<&'static DeviceContext>,
}

/// The registry, once there is a device. Complete before its address is stored here, only read from
/// then on, and never freed: ggml may use it until the process ends. A forked child has the
/// registry of its parent, because ggml does.
static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());

/// Held while the registry is made. A thread of a forked child's parent may have held the lock
/// during the fork, so that the child has a lock of its own.
static MAKING: PerProcess<Mutex<()>> = PerProcess::new();

/// 100 with an executor. 0, with one log line that says why, without.
pub(crate) fn score() -> i32 {
    if find_or_make().is_some() { SCORE } else { 0 }
}

/// The registry in ggml's form. Null without an executor. Never freed.
pub(crate) fn init() -> ggml_backend_reg_t {
    // A pointer to the registry is a pointer to its first field, ggml's object.
    find_or_make().map_or(ptr::null_mut(), |registry| {
        ptr::from_ref(registry).cast_mut().cast()
    })
}

/// The registry, which the first call that finds an executor makes.
fn find_or_make() -> Option<&'static Registry> {
    let ggml = match Ggml::find() {
        Ok(ggml) => ggml,
        Err(error) => {
            logging::without_ggml(&error);
            fail_fast::end_process_if_enabled("no vGPU");
            return None;
        }
    };
    let making = MAKING.get_or_init(Mutex::default);
    let _making = lock_at(Rank::Registry, making);
    let registry = REGISTRY.load(Ordering::Acquire);
    if registry.is_null() {
        let made = make(Arc::new(ggml))?;
        REGISTRY.store(made, Ordering::Release);
        // SAFETY: the pointer comes from `make`, and a registry is never freed.
        return Some(unsafe { &*made });
    }
    // SAFETY: `REGISTRY` holds what `make` has returned to an earlier call, and a registry is never
    // freed.
    let known = unsafe { &*registry };
    let served = known.ggml.object();
    if served != ggml.object() {
        // The dynamic linker loads the plugin once for both, and the objects of one ggml mean
        // nothing to another.
        ggml.log(
            GGML_LOG_LEVEL_WARN,
            &format!(
                "ggml-vgpu: no vGPU for {}: in this process {served} uses the plugin\n",
                ggml.object()
            ),
        );
        return None;
    }
    Some(known)
}

fn make(ggml: Arc<Ggml>) -> Option<*mut Registry> {
    logging::start(Arc::clone(&ggml));
    let discovery = match discover(&ggml) {
        Ok(discovery) => discovery,
        Err(error) => {
            tracing::warn!("no vGPU: {error}");
            fail_fast::end_process_if_enabled(&format!("no vGPU: {error}"));
            return None;
        }
    };
    if discovery.found.is_empty() {
        let reason = format!(
            "no vGPU: no executor reached ({})",
            discovery.missing.join("; ")
        );
        tracing::warn!("{reason}. Start one with `vgpu serve`, or name one in VGPU_ENDPOINT");
        fail_fast::end_process_if_enabled(&reason);
        return None;
    }
    let translator = Arc::new(Translator::new(&ggml));
    let registry = Box::into_raw(Box::new(Registry {
        object: ggml_backend_reg {
            api_version: ggml.api().number(),
            iface: CALLBACKS,
            context: ptr::null_mut(),
        },
        ggml: Arc::clone(&ggml),
        devices: Vec::new(),
    }));
    let mut devices: Vec<&'static DeviceContext> = Vec::new();
    for (index, (address, session)) in discovery.found.into_iter().enumerate() {
        tracing::info!(
            "VGPU{index}: {} at {address}, session {}",
            session.welcome().description,
            session.welcome().session,
        );
        devices.push(device::new(DeviceParts {
            index,
            ggml: Arc::clone(&ggml),
            translator: Arc::clone(&translator),
            address,
            session,
            registry: registry.cast(),
        }));
    }
    for reason in discovery.missing {
        tracing::warn!("a vGPU is missing: {reason}");
    }
    let watched = devices.clone();
    fail_fast::watch(move || watched.iter().any(|device| device.is_lost()));
    // SAFETY: the pointer comes from a box, and nobody reads the registry before this function
    // returns: the devices only hold its address.
    unsafe { (*registry).devices = devices };
    Some(registry)
}

/// The registry behind ggml's object. `None` if the pointer is null.
///
/// # Safety
///
/// `reg` must be null or come from [`init`].
unsafe fn context(reg: ggml_backend_reg_t) -> Option<&'static Registry> {
    // SAFETY: null or a pointer to the first field of a registry (this function's contract), which
    // is never freed.
    unsafe { object(reg.cast::<Registry>().cast_const()) }
}

/// `VGPU`. A constant.
unsafe extern "C" fn get_name(_: ggml_backend_reg_t) -> *const c_char {
    c"VGPU".as_ptr()
}

/// The number of devices, which does not change. 0 on failure.
unsafe extern "C" fn get_device_count(reg: ggml_backend_reg_t) -> usize {
    guard("get_device_count", 0, || {
        // SAFETY: ggml passes the registry of `init`.
        unsafe { context(reg) }.map_or(0, |registry| registry.devices.len())
    })
}

/// The device number `index`. The plugin owns the object, which is valid until the process ends.
/// Null if there is no such device.
unsafe extern "C" fn get_device(reg: ggml_backend_reg_t, index: usize) -> ggml_backend_dev_t {
    guard("get_device", ptr::null_mut(), || {
        // SAFETY: ggml passes the registry of `init`.
        unsafe { context(reg) }
            .and_then(|registry| registry.devices.get(index))
            .map_or(ptr::null_mut(), |device| device.object())
    })
}

/// Null: the plugin has no functions beyond ggml's interface.
unsafe extern "C" fn get_proc_address(_: ggml_backend_reg_t, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}
