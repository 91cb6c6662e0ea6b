//! Memory of GPUs and of the host, address ranges, and copies.

use std::ffi::c_uint;

use cudarc::driver::sys;

use super::entry::{INVALID, check_no_capture, enqueue, entries};
use crate::argument::{In, Out};
use crate::codes::Answer;
use crate::context::{Context, card};
use crate::memory::{GRANULARITY, memory};
use crate::settings::settings;

/// Work that copies `len` bytes between two addresses.
///
/// # Safety
/// When the work is done, `from` is the address of `len` readable bytes and `to` of `len` writable
/// ones, of memory of the context or of the program.
unsafe fn copy(to: u64, from: u64, len: usize) -> impl FnOnce() -> Answer + Send + 'static {
    move || {
        // SAFETY: the caller of `copy` guarantees the bytes at both addresses for the time of this
        // call. `copy_to` allows overlaps.
        unsafe { (from as *const u8).copy_to(to as *mut u8, len) };
        Ok(())
    }
}

/// The GPU that a description of physical memory names.
///
/// # Errors
/// `INVALID_VALUE` unless it is pinned memory of a GPU, `INVALID_DEVICE`.
fn device_of(properties: &sys::CUmemAllocationProp) -> Answer<usize> {
    let is_pinned = properties.type_ == sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    match is_pinned && is_of_device(&properties.location) {
        true => Ok(card(properties.location.id)?.0),
        false => Err(INVALID),
    }
}

fn is_of_device(location: &sys::CUmemLocation) -> bool {
    location.type_ == sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
}

entries! {
    // Memory of a GPU, and copies.
    cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = Context::current()?;
        let all = context.card().memory;
        free.put(all.saturating_sub(memory().used(context.device)) as usize)?;
        total.put(all as usize)
    }
    cuMemAlloc_v2(address: Out<u64>, size: usize) {
        let context = Context::current()?;
        check_no_capture(&context)?;
        let limit = context.card().memory;
        address.put(memory().alloc(context.id, context.device, size as u64, limit)?)
    }
    cuMemFree_v2(address: u64) {
        let context = Context::current()?;
        check_no_capture(&context)?;
        context.queue.drain()?;
        match address {
            0 => Ok(()),
            address => memory().free(context.id, address),
        }
    }
    cuMemcpyHtoDAsync_v2(to: u64, from: In<u8>, len: usize, stream: u64) {
        let context = Context::current()?;
        let from = from.as_ptr() as u64;
        if from == 0 {
            return Err(INVALID);
        }
        memory().check(context.id, to, len as u64)?;
        if memory().is_pinned(context.id, from, len as u64) {
            // SAFETY: `to` is memory of the context, and frees wait for the queue. The caller
            // guarantees `from` until the stream is synchronised.
            enqueue(&context, stream, unsafe { copy(to, from, len) })?;
            return Ok(());
        }
        // The driver has read what is not page-locked before it returns.
        // SAFETY: the caller guarantees `len` bytes at `from`, which is not null.
        let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, len) }.to_vec();
        enqueue(&context, stream, move || {
            // SAFETY: `to` is memory of the context, and frees wait for the queue. The `len` bytes
            // of `bytes` live until the end of this closure.
            let work = unsafe { copy(to, bytes.as_ptr() as u64, len) };
            work()
        })?;
        Ok(())
    }
    cuMemcpyDtoHAsync_v2(to: Out<u8>, from: u64, len: usize, stream: u64) {
        let context = Context::current()?;
        let to = to.as_ptr() as u64;
        if to == 0 {
            return Err(INVALID);
        }
        memory().check(context.id, from, len as u64)?;
        let is_pinned = memory().is_pinned(context.id, to, len as u64);
        // SAFETY: `from` is memory of the context, and frees wait for the queue. The caller
        // guarantees `to` until the stream is synchronised; without page-locked memory, this call
        // waits for the copy.
        let work = enqueue(&context, stream, unsafe { copy(to, from, len) })?;
        // The driver has written what is not page-locked before it returns.
        match is_pinned {
            true => Ok(()),
            false => context.queue.wait(work),
        }
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) {
        let context = Context::current()?;
        memory().check(context.id, to, len as u64)?;
        memory().check(context.id, from, len as u64)?;
        // SAFETY: both are memory of the context, and frees wait for the queue.
        enqueue(&context, stream, unsafe { copy(to, from, len) })?;
        Ok(())
    }
    cuMemsetD8Async(to: u64, value: u8, len: usize, stream: u64) {
        let context = Context::current()?;
        memory().check(context.id, to, len as u64)?;
        enqueue(&context, stream, move || {
            // SAFETY: the bytes are memory of the context, and frees wait for the queue.
            unsafe { (to as *mut u8).write_bytes(value, len) };
            Ok(())
        })?;
        Ok(())
    }
    cuMemsetD8_v2(to: u64, value: u8, len: usize) {
        let context = Context::current()?;
        memory().check(context.id, to, len as u64)?;
        let work = enqueue(&context, 0, move || {
            // SAFETY: the bytes are memory of the context, and this call waits for the write.
            unsafe { (to as *mut u8).write_bytes(value, len) };
            Ok(())
        })?;
        context.queue.wait(work)
    }

    // Host memory.
    cuMemHostRegister_v2(at: In<u8>, size: usize, flags: c_uint) {
        let context = Context::current()?;
        memory().register(context.id, at.as_ptr() as u64, size as u64, flags)
    }
    cuMemHostUnregister(at: In<u8>) {
        let context = Context::current()?;
        context.queue.drain()?;
        memory().unregister(at.as_ptr() as u64)
    }
    cuMemHostGetDevicePointer_v2(address: Out<u64>, at: In<u8>, flags: c_uint) {
        let context = Context::current()?;
        if flags != 0 {
            return Err(INVALID);
        }
        address.put(memory().device_pointer(context.id, at.as_ptr() as u64)?)
    }

    // Address ranges. The ranges belong to the process, not to a context.
    cuMemGetAllocationGranularity(
        size: Out<usize>,
        properties: In<sys::CUmemAllocationProp>,
        _which: c_uint,
    ) {
        device_of(&properties.get()?)?;
        size.put(GRANULARITY as usize)
    }
    cuMemAddressReserve(
        address: Out<u64>,
        size: usize,
        alignment: usize,
        _wanted: u64,
        flags: u64,
    ) {
        if flags != 0 || alignment != 0 && !alignment.is_power_of_two() {
            return Err(INVALID);
        }
        address.put(memory().reserve(size as u64)?)
    }
    cuMemAddressFree(address: u64, size: usize) {
        memory().unreserve(address, size as u64)
    }
    cuMemCreate(
        handle: Out<u64>,
        size: usize,
        properties: In<sys::CUmemAllocationProp>,
        flags: u64,
    ) {
        let device = device_of(&properties.get()?)?;
        if flags != 0 {
            return Err(INVALID);
        }
        let limit = settings().cards[device].memory;
        handle.put(memory().create(device, size as u64, limit)?)
    }
    cuMemRelease(handle: u64) {
        memory().release(handle)
    }
    cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        if flags != 0 {
            return Err(INVALID);
        }
        memory().map(address, size as u64, offset as u64, handle)
    }
    cuMemSetAccess(address: u64, size: usize, access: In<sys::CUmemAccessDesc>, count: usize) {
        let access = access.get()?;
        let read_write = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        if count != 1 || access.flags != read_write || !is_of_device(&access.location) {
            return Err(INVALID);
        }
        memory().set_access(address, size as u64, card(access.location.id)?.0)
    }
    cuMemUnmap(address: u64, size: usize) {
        memory().unmap(address, size as u64)
    }
}
