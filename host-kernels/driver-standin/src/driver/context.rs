//! Initialisation, GPUs and contexts.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::atomic::Ordering;

use cudarc::driver::sys::CUdevice_attribute_enum as Of;

use super::entry::{INVALID, IS_INITIALIZED, check_no_capture, entries};
use crate::argument::Out;
use crate::cards::{REGISTERS, address};
use crate::codes::{Answer, Code, name_of, text_of};
use crate::context::{Context, card};
use crate::function::{MAX_THREADS, RESERVED_SHARED, SHARED_PER_BLOCK};
use crate::settings::settings;

/// An attribute of a GPU.
///
/// # Errors
/// `INVALID_VALUE` for one that the stand-in does not know.
fn attribute(device: c_int, attribute: c_int) -> Answer<u32> {
    let (_, card) = card(device)?;
    let model = &card.model;
    let known = [
        (Of::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, MAX_THREADS),
        (
            Of::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
            SHARED_PER_BLOCK,
        ),
        (Of::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
        (Of::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, REGISTERS),
        (
            Of::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
            REGISTERS,
        ),
        (Of::CU_DEVICE_ATTRIBUTE_CLOCK_RATE, card.clock),
        (Of::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, model.sm_count),
        (Of::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
        (Of::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, card.memory_clock),
        (
            Of::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            card.memory_bus,
        ),
        (Of::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, card.l2),
        (
            Of::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            card.threads_per_sm,
        ),
        (Of::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
        (
            Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            card.capability.0,
        ),
        (
            Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            card.capability.1,
        ),
        (
            Of::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            model.shared_per_sm,
        ),
        (Of::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1),
        (
            Of::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            model.shared_per_block,
        ),
        (
            Of::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            1,
        ),
        (
            Of::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
            card.blocks_per_sm,
        ),
        (
            Of::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
            RESERVED_SHARED,
        ),
    ];
    let found = known.iter().find(|(of, _)| *of as c_int == attribute);
    found.map(|(_, value)| *value).ok_or(INVALID)
}

/// Writes the start of a text that fits into `len` bytes with a zero byte at its end.
///
/// # Errors
/// `INVALID_VALUE` without room.
///
/// # Safety
/// `to` is null, or has `len` bytes.
unsafe fn put_text(to: &Out<c_char>, len: c_int, text: &str) -> Answer {
    let room = usize::try_from(len).map_err(|_| INVALID)?;
    if to.as_ptr().is_null() || room == 0 {
        return Err(INVALID);
    }
    let count = text.len().min(room - 1);
    // SAFETY: the caller guarantees `len` bytes, which are more than `count`.
    unsafe {
        let to = to.as_ptr().cast::<u8>();
        to.copy_from_nonoverlapping(text.as_ptr(), count);
        to.add(count).write(0);
    }
    Ok(())
}

entries! {
    // Initialisation and GPUs.
    cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID);
        }
        if settings().cards.is_empty() {
            return Err(Code::CUDA_ERROR_NO_DEVICE);
        }
        IS_INITIALIZED.store(true, Ordering::SeqCst);
        Ok(())
    }
    cuDriverGetVersion(version: Out<c_int>) {
        version.put(settings().version)
    }
    cuGetErrorString(code: c_uint, text: Out<*const c_char>) {
        text.put(text_of(code).map_or(std::ptr::null(), |text| text.as_ptr().cast()))?;
        text_of(code).map(|_| ()).ok_or(INVALID)
    }
    cuGetErrorName(code: c_uint, text: Out<*const c_char>) {
        text.put(name_of(code).map_or(std::ptr::null(), |text| text.as_ptr().cast()))?;
        name_of(code).map(|_| ()).ok_or(INVALID)
    }
    cuDeviceGetCount(count: Out<c_int>) {
        count.put(settings().cards.len() as c_int)
    }
    cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        card(ordinal)?;
        device.put(ordinal)
    }
    cuDeviceGetName(to: Out<c_char>, len: c_int, device: c_int) {
        let (_, card) = card(device)?;
        // SAFETY: the caller guarantees `len` bytes.
        unsafe { put_text(&to, len, card.name) }
    }
    cuDeviceGetPCIBusId(to: Out<c_char>, len: c_int, device: c_int) {
        let (index, _) = card(device)?;
        // SAFETY: the caller guarantees `len` bytes.
        unsafe { put_text(&to, len, &address(index)) }
    }
    cuDeviceGetAttribute(value: Out<c_int>, which: c_int, device: c_int) {
        value.put(attribute(device, which)? as c_int)
    }
    cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        bytes.put(card(device)?.1.memory as usize)
    }

    // Contexts.
    cuCtxCreate_v2(context: Out<u64>, _flags: c_uint, device: c_int) {
        let (device, _) = card(device)?;
        let id = Context::create(device)?;
        Context::push(id)?;
        context.put(id)
    }
    cuCtxDestroy_v2(context: u64) {
        Context::destroy(context)
    }
    cuCtxSetCurrent(context: u64) {
        Context::set_current(context)
    }
    cuCtxGetCurrent(context: Out<u64>) {
        context.put(Context::current_handle())
    }
    cuCtxPushCurrent_v2(context: u64) {
        Context::push(context)
    }
    cuCtxPopCurrent_v2(context: Out<u64>) {
        let id = Context::pop()?;
        context.put_if_wanted(id);
        Ok(())
    }
    cuCtxGetDevice(device: Out<c_int>) {
        device.put(Context::current_or_lost()?.device as c_int)
    }
    cuCtxSynchronize() {
        let context = Context::current()?;
        check_no_capture(&context)?;
        context.queue.drain()
    }
    cuDevicePrimaryCtxRetain(context: Out<u64>, device: c_int) {
        context.put(Context::retain_primary(card(device)?.0)?)
    }
    cuDevicePrimaryCtxRelease_v2(device: c_int) {
        Context::release_primary(card(device)?.0)
    }
    cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) {
        let count = Context::primary_count(card(device)?.0);
        flags.put(0)?;
        active.put(c_int::from(count > 0))
    }
}
