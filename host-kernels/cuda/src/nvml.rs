//! NVML, the management library of NVIDIA's driver, loaded at run time: how busy, full and hot a
//! GPU is.
//!
//! Seven functions are declared here by hand. The crate `nvml-wrapper` 0.13.0 would add a second
//! version of `thiserror`, two macro crates and bindings of three hundred functions.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

use libloading::Library;

/// The library, which the package of the driver has.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Codes of `nvmlReturn_t` in `nvml.h` that have a text here, which says what to do.
const NOT_SUPPORTED: c_int = 3;
const NO_PERMISSION: c_int = 4;
const DRIVER_NOT_LOADED: c_int = 9;
const VERSION_MISMATCH: c_int = 18;

/// The sensor of the GPU itself, `NVML_TEMPERATURE_GPU`.
const GPU_SENSOR: c_uint = 0;

/// Why there is a figure less.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum NvmlError {
    #[error("{LIBRARY} cannot be loaded: {reason}")]
    NotLoaded { reason: String },
    #[error("{LIBRARY} has no function {name}: the driver is too old")]
    NoFunction { name: &'static str },
    #[error("{call} failed: {reason} (NVML error {code})")]
    Failed {
        call: &'static str,
        code: c_int,
        reason: String,
    },
}

/// What a GPU does. Each figure may be missing on its own: some GPUs and some modes of GPUs do not
/// have all of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    /// The part of the last sampling period of the driver in which a kernel ran, 0 to 1.
    pub busy: Result<f64, NvmlError>,
    /// Bytes in use by all programs and the driver, and bytes in all.
    pub memory: Result<(u64, u64), NvmlError>,
    /// Degrees Celsius.
    pub temperature: Result<u32, NvmlError>,
    /// Watts.
    pub power: Result<f64, NvmlError>,
}

type NvmlDevice = *mut c_void;
type Init = unsafe extern "C" fn() -> c_int;
type Text = unsafe extern "C" fn(c_int) -> *const c_char;
type ByAddress = unsafe extern "C" fn(*const c_char, *mut NvmlDevice) -> c_int;
type GetNumber = unsafe extern "C" fn(NvmlDevice, *mut c_uint) -> c_int;
type GetSensor = unsafe extern "C" fn(NvmlDevice, c_uint, *mut c_uint) -> c_int;
type GetMemory = unsafe extern "C" fn(NvmlDevice, *mut Memory) -> c_int;
type GetUtilization = unsafe extern "C" fn(NvmlDevice, *mut Utilization) -> c_int;

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// NVML, opened for one GPU.
pub struct Nvml {
    device: NvmlDevice,
    /// Loaded as long as the handle and the functions of this object are in use.
    /// Whether `nvmlInit` has succeeded.
    is_initialised: bool,
    library: Library,
}

impl Drop for Nvml {
    /// Gives back what `nvmlInit` has opened, before the library is unloaded.
    fn drop(&mut self) {
        if self.is_initialised
            && let Ok(shutdown) = self.function::<Init>("nvmlShutdown")
        {
            // SAFETY: the function takes nothing, ends one `nvmlInit`, and `device` is not used
            // afterwards.
            unsafe { shutdown() };
        }
    }
}

// SAFETY: `device` is a handle of NVML, whose functions any thread may call (NVML API reference,
// "NVML API Reference": "the API is thread-safe").
unsafe impl Send for Nvml {}

impl Nvml {
    /// Opens the library for the GPU at a PCI address, such as `0000:01:00.0`.
    ///
    /// # Errors
    /// [`NvmlError::NotLoaded`] without the library, [`NvmlError::NoFunction`] with one that is too
    /// old, [`NvmlError::Failed`] if NVML does not begin or does not know the GPU: among others, if
    /// the library is of another version than the driver in the kernel.
    pub fn open(address: &str) -> Result<Nvml, NvmlError> {
        let not_loaded = |reason: String| NvmlError::NotLoaded { reason };
        let address = CString::new(address).map_err(|error| not_loaded(error.to_string()))?;
        // SAFETY: loading a library runs its initialisers; NVML's only set up its own state.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|error| not_loaded(error.to_string()))?;
        let mut nvml = Nvml {
            device: ptr::null_mut(),
            is_initialised: false,
            library,
        };
        let init: Init = nvml.function("nvmlInit_v2")?;
        // SAFETY: the function takes nothing, and may be called any number of times.
        nvml.check("nvmlInit", unsafe { init() })?;
        nvml.is_initialised = true;
        let name = "nvmlDeviceGetHandleByPciBusId_v2";
        let by_address: ByAddress = nvml.function(name)?;
        let mut device = ptr::null_mut();
        // SAFETY: `address` ends with a zero byte, `device` is a valid place for the result, and
        // NVML is initialised.
        let code = unsafe { by_address(address.as_ptr(), &mut device) };
        nvml.check("nvmlDeviceGetHandleByPciBusId", code)?;
        nvml.device = device;
        Ok(nvml)
    }

    /// What the GPU does now.
    pub fn read(&self) -> Reading {
        Reading {
            busy: self.busy(),
            memory: self.memory(),
            temperature: self.temperature(),
            power: self.power(),
        }
    }

    fn busy(&self) -> Result<f64, NvmlError> {
        let get: GetUtilization = self.function("nvmlDeviceGetUtilizationRates")?;
        let mut used = Utilization::default();
        // SAFETY: `device` is from `open`, and `used` is a valid place for the result.
        let code = unsafe { get(self.device, &mut used) };
        self.check("nvmlDeviceGetUtilizationRates", code)?;
        Ok(f64::from(used.gpu.min(100)) / 100.0)
    }

    fn memory(&self) -> Result<(u64, u64), NvmlError> {
        let get: GetMemory = self.function("nvmlDeviceGetMemoryInfo")?;
        let mut memory = Memory::default();
        // SAFETY: `device` is from `open`, and `memory` is a valid place for the result of this
        // version of the function.
        let code = unsafe { get(self.device, &mut memory) };
        self.check("nvmlDeviceGetMemoryInfo", code)?;
        Ok((memory.used, memory.total))
    }

    fn temperature(&self) -> Result<u32, NvmlError> {
        let get: GetSensor = self.function("nvmlDeviceGetTemperature")?;
        let mut degrees = 0;
        // SAFETY: `device` is from `open`, and `degrees` is a valid place for the result.
        let code = unsafe { get(self.device, GPU_SENSOR, &mut degrees) };
        self.check("nvmlDeviceGetTemperature", code)?;
        Ok(degrees)
    }

    fn power(&self) -> Result<f64, NvmlError> {
        let get: GetNumber = self.function("nvmlDeviceGetPowerUsage")?;
        let mut milliwatts = 0;
        // SAFETY: `device` is from `open`, and `milliwatts` is a valid place for the result.
        let code = unsafe { get(self.device, &mut milliwatts) };
        self.check("nvmlDeviceGetPowerUsage", code)?;
        Ok(f64::from(milliwatts) / 1000.0)
    }

    /// A function of the library. `F` is its type in `nvml.h`, which each caller of this private
    /// function takes from the types above.
    fn function<F: Copy>(&self, name: &'static str) -> Result<F, NvmlError> {
        // SAFETY: `F` is the type that the function has in `nvml.h`. The pointer is used only while
        // `self.library` is loaded.
        let found = unsafe { self.library.get::<F>(name) };
        found
            .map(|function| *function)
            .map_err(|_| NvmlError::NoFunction { name })
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), NvmlError> {
        if code == 0 {
            return Ok(());
        }
        let reason = match code {
            NOT_SUPPORTED => "this GPU, or its present mode, does not have the figure".into(),
            NO_PERMISSION => "the user of the executor may not read it".into(),
            DRIVER_NOT_LOADED => "the kernel has not loaded NVIDIA's driver".into(),
            VERSION_MISMATCH => "the library and the driver in the kernel are of different \
                                 versions, as after an upgrade of the driver: restart the host"
                .into(),
            _ => self.text(code),
        };
        Err(NvmlError::Failed { call, code, reason })
    }

    /// NVML's text for a code.
    fn text(&self, code: c_int) -> String {
        let Ok(get) = self.function::<Text>("nvmlErrorString") else {
            return "unknown error".into();
        };
        // SAFETY: the function takes any code, and returns a text of the library that ends with a
        // zero byte.
        let text = unsafe { get(code) };
        if text.is_null() {
            return "unknown error".into();
        }
        // SAFETY: `nvmlErrorString` returns static text that ends with a zero byte, or null.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().into_owned()
    }
}
