//! What ggml gets from us when it loads the plugin.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use vgpu_transport::link::Endpoint;
use vgpu_transport::link::dial::expand;

use crate::abi::{
    GGML_LOG_LEVEL_WARN, ggml_backend_dev_t, ggml_backend_reg, ggml_backend_reg_i,
    ggml_backend_reg_t,
};
use crate::connect::connect;
use crate::device::Device;
use crate::ffi::{guard, object};
use crate::host::Host;
use crate::logging;
use crate::required;
use crate::translate::Translator;

/// The score of a working vGPU. ggml compares scores among variants of one backend; there is one of us.
const SCORE: i32 = 100;

/// The registry, once it has a device. Lives as long as the process. ggml's object comes first, so that
/// a pointer to one is a pointer to the other.
#[repr(C)]
struct Registry {
    object: ggml_backend_reg,
    host: Arc<Host>,
    devices: Vec<&'static Device>,
}

/// A registry that is never freed; ggml holds on to it for ever.
static REGISTRY: Mutex<Option<RegistryPtr>> = Mutex::new(None);

#[derive(Clone, Copy)]
struct RegistryPtr(*mut Registry);

// SAFETY: the registry is complete when its address becomes visible under the mutex, and only read
// from then on.
unsafe impl Send for RegistryPtr {}

/// How good this backend is on this machine: 0 when no executor can be reached, said in one log line.
pub(crate) fn score() -> i32 {
    if find().is_some() { SCORE } else { 0 }
}

/// The registry in ggml's form, or null.
pub(crate) fn init() -> ggml_backend_reg_t {
    // The registry's first field is ggml's object.
    find().map_or(ptr::null_mut(), |registry| registry.0.cast())
}

/// The registry; made by the first call that finds an executor.
fn find() -> Option<RegistryPtr> {
    let host = match Host::find() {
        Ok(host) => host,
        Err(error) => {
            logging::without_host(&error);
            required::missing("no vGPU");
            return None;
        }
    };
    let mut found = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    match *found {
        None => *found = make(Arc::new(host)),
        Some(registry) => {
            // SAFETY: registries are never freed.
            let served = unsafe { &*registry.0 }.host.object();
            if served != host.object() {
                // The dynamic linker gives both the same copy of us, and objects of one ggml mean nothing
                // to the other.
                host.log(
                    GGML_LOG_LEVEL_WARN,
                    &format!(
                        "ggml-vgpu: no vGPU for {}: {served} in this process has it\n",
                        host.object()
                    ),
                );
                return None;
            }
        }
    }
    *found
}

fn make(host: Arc<Host>) -> Option<RegistryPtr> {
    logging::start(Arc::clone(&host));
    let endpoints = match endpoints() {
        Ok(endpoints) => endpoints,
        Err(error) => {
            tracing::warn!("no vGPU: VGPU_ENDPOINT: {error}");
            required::missing(&format!("no vGPU: VGPU_ENDPOINT: {error}"));
            return None;
        }
    };
    let translator = Arc::new(Translator::new(&host));
    let registry = Box::into_raw(Box::new(Registry {
        object: ggml_backend_reg {
            api_version: host.api().number(),
            iface: CALLBACKS,
            context: ptr::null_mut(),
        },
        host: Arc::clone(&host),
        devices: Vec::new(),
    }));
    let mut devices = Vec::new();
    let mut misses = Vec::new();
    for candidate in endpoints.candidates {
        let here = match expand(&candidate) {
            Ok(here) => here,
            Err(miss) => {
                misses.push(miss);
                continue;
            }
        };
        for endpoint in here {
            match connect(&endpoint, &host) {
                Ok(session) => {
                    tracing::info!(
                        "VGPU{}: {} at {endpoint}, session {}",
                        devices.len(),
                        session.welcome.description,
                        session.welcome.session,
                    );
                    devices.push(Device::new(
                        &host,
                        &translator,
                        devices.len(),
                        endpoint,
                        session,
                        registry.cast(),
                    ));
                }
                Err(error) => misses.push(error.to_string()),
            }
        }
        if endpoints.first_only && !devices.is_empty() {
            misses.clear(); // places that might have had one, not devices that somebody has named
            break;
        }
    }
    if devices.is_empty() {
        let reason = format!("no vGPU: no executor reached ({})", misses.join("; "));
        tracing::warn!("{reason}. Start one with `vgpu serve`, or name one in VGPU_ENDPOINT");
        required::missing(&reason);
        // SAFETY: made above, and nobody else has seen the address.
        drop(unsafe { Box::from_raw(registry) });
        return None;
    }
    for miss in misses {
        tracing::warn!("a vGPU is missing: {miss}");
    }
    required::watch(devices.clone());
    // SAFETY: nobody else has the address yet.
    unsafe { (*registry).devices = devices };
    Some(RegistryPtr(registry))
}

/// Where to look.
struct Endpoints {
    candidates: Vec<Endpoint>,
    /// Whether one is enough (places to look at), or each is a device (named by the user).
    first_only: bool,
}

fn endpoints() -> Result<Endpoints, String> {
    let Some(named) = std::env::var_os("VGPU_ENDPOINT").filter(|value| !value.is_empty()) else {
        return Ok(Endpoints {
            candidates: Endpoint::defaults(),
            first_only: true,
        });
    };
    let named = named.into_string().map_err(|_| "not UTF-8".to_owned())?;
    let candidates = named
        .split(',')
        .map(|one| {
            one.trim()
                .parse::<Endpoint>()
                .map_err(|error| error.to_string())
        })
        .collect::<Result<Vec<Endpoint>, String>>()?;
    Ok(Endpoints {
        candidates,
        first_only: false,
    })
}

const CALLBACKS: ggml_backend_reg_i = ggml_backend_reg_i {
    get_name: Some(get_name),
    get_device_count: Some(get_device_count),
    get_device: Some(get_device),
    get_proc_address: Some(get_proc_address),
};

/// The name of the backend. The string stays.
unsafe extern "C" fn get_name(_: ggml_backend_reg_t) -> *const c_char {
    c"VGPU".as_ptr()
}

unsafe extern "C" fn get_device_count(reg: ggml_backend_reg_t) -> usize {
    guard("get_device_count", 0, || {
        // SAFETY: ggml hands back the registry, whose first field is its object.
        unsafe { object(reg.cast::<Registry>()) }.map_or(0, |r| r.devices.len())
    })
}

/// Null when there is no device of this number.
unsafe extern "C" fn get_device(reg: ggml_backend_reg_t, index: usize) -> ggml_backend_dev_t {
    guard("get_device", ptr::null_mut(), || {
        // SAFETY: ggml hands back the registry, whose first field is its object.
        let registry = unsafe { object(reg.cast::<Registry>()) };
        registry
            .and_then(|r| r.devices.get(index))
            .map_or(ptr::null_mut(), |device| device.object())
    })
}

/// There are no functions beyond the interface.
unsafe extern "C" fn get_proc_address(_: ggml_backend_reg_t, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}
