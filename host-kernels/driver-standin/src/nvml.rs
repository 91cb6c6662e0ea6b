//! The entry points of NVML that the executor uses. The figures of a GPU never change.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::argument::{Out, Text};
use crate::cards::{Card, address};
use crate::faults::Fault;
use crate::nvml_codes::{INVALID_ARGUMENT, NOT_FOUND, SUCCESS, UNINITIALIZED, UNKNOWN, text_of};
use crate::settings::settings;

/// Busy in percent, the divisor of the memory that is in use, degrees Celsius, milliwatts.
const BUSY: c_uint = 37;
const USED_PART: u64 = 4;
const TEMPERATURE: c_uint = 51;
const POWER: c_uint = 123_456;

/// The one sensor that there is, that of the GPU.
const GPU_SENSOR: c_uint = 0;

/// Entry points that need no `nvmlInit`.
const WITHOUT_INIT: [&str; 1] = ["nvmlInit_v2"];

/// Calls of `nvmlInit` that no `nvmlShutdown` has ended.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

/// `nvmlMemory_t`.
#[repr(C)]
pub(crate) struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlUtilization_t`.
#[repr(C)]
pub(crate) struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// Runs the body of an entry point, or its fault.
fn answer(name: &str, body: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match settings().faults.of_call(name) {
        None => {}
        Some(Fault::Nvml(code)) => return code,
        Some(Fault::Code(_)) => return UNKNOWN,
        Some(Fault::Nothing) => return SUCCESS,
        Some(Fault::Abort) => std::process::abort(),
        Some(Fault::Hang) => loop {
            std::thread::park();
        },
    }
    if !WITHOUT_INIT.contains(&name) && INITIALIZED.load(Ordering::SeqCst) == 0 {
        return UNINITIALIZED;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    }
}

fn invalid<E>(_: E) -> c_int {
    INVALID_ARGUMENT
}

/// The GPU of a handle, which is its number from 1.
fn card(handle: u64) -> Result<&'static Card, c_int> {
    let index = usize::try_from(handle).ok().and_then(|n| n.checked_sub(1));
    let card = index.and_then(|index| settings().cards.get(index));
    card.ok_or(INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlInit_v2() -> c_int {
    answer("nvmlInit_v2", || {
        INITIALIZED.fetch_add(1, Ordering::SeqCst);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlShutdown() -> c_int {
    answer("nvmlShutdown", || {
        INITIALIZED.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlErrorString(code: c_int) -> *const c_char {
    text_of(code).as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(text: Text, handle: Out<u64>) -> c_int {
    answer("nvmlDeviceGetHandleByPciBusId_v2", || {
        let wanted = text.get().map_err(invalid)?;
        let mut addresses = (0..settings().cards.len()).map(address);
        let found = addresses.position(|known| known == wanted);
        let index = found.ok_or(NOT_FOUND)?;
        handle.put(index as u64 + 1).map_err(invalid)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlDeviceGetUtilizationRates(
    handle: u64,
    rates: Out<Utilization>,
) -> c_int {
    answer("nvmlDeviceGetUtilizationRates", || {
        card(handle)?;
        let used = Utilization {
            gpu: BUSY,
            memory: BUSY / 2,
        };
        rates.put(used).map_err(invalid)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlDeviceGetMemoryInfo(handle: u64, memory: Out<Memory>) -> c_int {
    answer("nvmlDeviceGetMemoryInfo", || {
        let total = card(handle)?.memory;
        let used = total / USED_PART;
        let free = total - used;
        memory.put(Memory { total, free, used }).map_err(invalid)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlDeviceGetTemperature(
    handle: u64,
    sensor: c_uint,
    degrees: Out<c_uint>,
) -> c_int {
    answer("nvmlDeviceGetTemperature", || {
        card(handle)?;
        match sensor {
            GPU_SENSOR => degrees.put(TEMPERATURE).map_err(invalid),
            _ => Err(INVALID_ARGUMENT),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlDeviceGetPowerUsage(handle: u64, milliwatts: Out<c_uint>) -> c_int {
    answer("nvmlDeviceGetPowerUsage", || {
        card(handle)?;
        milliwatts.put(POWER).map_err(invalid)
    })
}
