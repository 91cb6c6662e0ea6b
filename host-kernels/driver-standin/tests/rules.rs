//! The rules of the driver that the stand-in keeps: a test for each.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr;

use cudarc::driver::sys;
use cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
use cudarc::driver::sys::CUresult as Code;
use vgpu_driver_standin::{entries, in_process};

/// Calls an entry point.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the arguments are as `cuda.h` asks, or null or an unknown handle, which the
        // stand-in refuses.
        unsafe { sys::$name($($argument),*) }
    };
}

/// Calls an entry point, which must succeed.
macro_rules! good {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(call!($name($($argument),*)), Code::CUDA_SUCCESS, stringify!($name))
    };
}

/// Calls an entry point, which must refuse with this code.
macro_rules! refused {
    ($code:ident, $name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(call!($name($($argument),*)), Code::$code, stringify!($name))
    };
}

const H100: (&str, &str) = ("VGPU_STANDIN_DEVICES", "H100");

/// A context that is current to this thread.
fn context() -> sys::CUcontext {
    let mut context = ptr::null_mut();
    good!(cuInit(0));
    good!(cuCtxCreate_v2(&mut context, 0, 0));
    context
}

fn stream() -> sys::CUstream {
    let mut stream = ptr::null_mut();
    good!(cuStreamCreate(&mut stream, 1));
    stream
}

fn alloc(size: usize) -> u64 {
    let mut address = 0;
    good!(cuMemAlloc_v2(&mut address, size));
    address
}

/// Code with one kernel.
fn code(architecture: &str, kernel: &str) -> CString {
    let magic = "# code of the stand-in for NVIDIA's driver";
    let text = format!("{magic}\narchitecture {architecture}\nkernel {kernel}\n");
    CString::new(text).expect("no zero byte")
}

fn function(architecture: &str, kernel: &str) -> sys::CUfunction {
    let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
    let code = code(architecture, kernel);
    good!(cuModuleLoadData(&mut module, code.as_ptr().cast()));
    let name = CString::new(kernel).expect("no zero byte");
    good!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

/// The kernel of the shim's tests: 128 threads, three words of parameters. The first is a matrix,
/// the second where 128 floats go, the third a mistake.
const KERNEL: &str = "shim_check_group";

/// The dynamic shared memory that it needs.
const SHARED: c_uint = 10 << 10;

/// Memory for the parameters of [`KERNEL`].
fn params() -> [u64; 3] {
    let (matrix, sums) = (alloc(64 * 64 * 2), alloc(128 * 4));
    good!(cuMemsetD8_v2(matrix, 0, 64 * 64 * 2));
    [matrix, sums, 0]
}

fn launch_with(
    function: sys::CUfunction,
    ([gx, gy, gz], [bx, by, bz]): ([u32; 3], [u32; 3]),
    shared: u32,
    stream: sys::CUstream,
    params: &mut [u64; 3],
) -> Code {
    let mut list: [*mut c_void; 1] = [params.as_mut_ptr().cast()];
    let (list, none) = (list.as_mut_ptr(), ptr::null_mut());
    call!(cuLaunchKernel(
        function, gx, gy, gz, bx, by, bz, shared, stream, list, none
    ))
}

/// A launch of [`KERNEL`] as it should be.
fn launch(function: sys::CUfunction, stream: sys::CUstream, params: &mut [u64; 3]) -> Code {
    launch_with(function, ([1; 3], [128, 1, 1]), SHARED, stream, params)
}

#[test]
fn calls_need_initialisation() {
    in_process("calls_need_initialisation", &[], || {
        let (mut count, mut version, mut device) = (0, 0, 0);
        refused!(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&mut count));
        refused!(CUDA_ERROR_INVALID_VALUE, cuInit(1));
        good!(cuDriverGetVersion(&mut version));
        good!(cuInit(0));
        good!(cuDeviceGetCount(&mut count));
        assert_eq!((version, count), (12090, 1));
        refused!(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&mut device, 1));
    });
}

/// NVML under the stand-in's name, as the executor loads it.
#[test]
fn nvml_finds_a_gpu_by_its_address_and_refuses_what_it_is_told_to() {
    use std::ffi::c_char;

    let settings = [
        ("VGPU_STANDIN_DEVICES", "L4,H100"),
        (
            "VGPU_STANDIN_FAULTS",
            "nvmlDeviceGetPowerUsage:2:NOT_SUPPORTED",
        ),
    ];
    let test = "nvml_finds_a_gpu_by_its_address_and_refuses_what_it_is_told_to";
    in_process(test, &settings, || {
        type Plain = extern "C" fn() -> c_int;
        type ByAddress = unsafe extern "C" fn(*const c_char, *mut u64) -> c_int;
        type Get = unsafe extern "C" fn(u64, *mut c_uint) -> c_int;
        let function = |name: &std::ffi::CStr| {
            // SAFETY: loads the stand-in, which has no initialiser; both names end with a zero
            // byte.
            let found = unsafe {
                let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW);
                libc::dlsym(library, name.as_ptr())
            };
            assert!(!found.is_null(), "{name:?}");
            found
        };
        // SAFETY: the stand-in's functions have these types under these names, as in `nvml.h`.
        let (init, shutdown, by_address, power) = unsafe {
            (
                std::mem::transmute::<*mut c_void, Plain>(function(c"nvmlInit_v2")),
                std::mem::transmute::<*mut c_void, Plain>(function(c"nvmlShutdown")),
                std::mem::transmute::<*mut c_void, ByAddress>(function(
                    c"nvmlDeviceGetHandleByPciBusId_v2",
                )),
                std::mem::transmute::<*mut c_void, Get>(function(c"nvmlDeviceGetPowerUsage")),
            )
        };
        let mut handle = 0;
        let mut open = |address: &std::ffi::CStr| {
            // SAFETY: the address ends with a zero byte, and `handle` is a place for the result.
            let code = unsafe { by_address(address.as_ptr(), &mut handle) };
            (code, handle)
        };
        assert_eq!(open(c"0000:02:00.0").0, 1, "before nvmlInit");
        assert_eq!(init(), 0);
        assert_eq!(open(c"0000:03:00.0").0, 6);
        let (code, second) = open(c"0000:02:00.0");
        assert_eq!(code, 0);
        let mut milliwatts = 0;
        let mut read = |handle| {
            // SAFETY: `milliwatts` is a place for the result; the stand-in checks the handle.
            unsafe { power(handle, &mut milliwatts) }
        };
        // Faults count calls: the second one is refused.
        let codes = [second, second, 99].map(&mut read);
        assert_eq!((codes, milliwatts), ([0, 3, 2], 123_456));
        assert_eq!(shutdown(), 0);
        assert_eq!(open(c"0000:02:00.0").0, 1, "after nvmlShutdown");
        // The address of the driver is that of NVML.
        let mut device = 0;
        let mut text = [0 as c_char; 32];
        good!(cuInit(0));
        good!(cuDeviceGet(&mut device, 1));
        good!(cuDeviceGetPCIBusId(text.as_mut_ptr(), 32, device));
        // SAFETY: the call has succeeded, so the text ends with a zero byte.
        let text = unsafe { std::ffi::CStr::from_ptr(text.as_ptr()) };
        assert_eq!(text, c"0000:02:00.0");
    });
}

#[test]
fn machine_may_have_no_gpu() {
    let settings = [("VGPU_STANDIN_DEVICES", "")];
    in_process("machine_may_have_no_gpu", &settings, || {
        refused!(CUDA_ERROR_NO_DEVICE, cuInit(0));
    });
}

#[test]
fn contexts_are_current_per_thread() {
    in_process("contexts_are_current_per_thread", &[], || {
        let (context, address) = (context(), alloc(256));
        let raw = context as usize;
        let other = std::thread::spawn(move || {
            refused!(CUDA_ERROR_INVALID_CONTEXT, cuMemFree_v2(address));
            good!(cuCtxSetCurrent(raw as sys::CUcontext));
            good!(cuMemFree_v2(address));
        });
        other.join().expect("the other thread");
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address));
        good!(cuCtxDestroy_v2(context));
        refused!(CUDA_ERROR_INVALID_CONTEXT, cuMemFree_v2(address));
        refused!(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxSetCurrent(context));
    });
}

#[test]
fn primary_context_lives_until_its_last_release() {
    in_process("primary_context_lives_until_its_last_release", &[], || {
        good!(cuInit(0));
        let (mut first, mut second) = (ptr::null_mut(), ptr::null_mut());
        good!(cuDevicePrimaryCtxRetain(&mut first, 0));
        good!(cuDevicePrimaryCtxRetain(&mut second, 0));
        assert_eq!(first, second);
        refused!(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy_v2(first));
        good!(cuDevicePrimaryCtxRelease_v2(0));
        good!(cuCtxSetCurrent(first));
        good!(cuDevicePrimaryCtxRelease_v2(0));
        refused!(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease_v2(0));
        refused!(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxSynchronize());
    });
}

#[test]
fn code_must_be_for_the_gpu() {
    in_process("code_must_be_for_the_gpu", &[H100], || {
        context();
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        for architecture in ["sm_80", "sm_100a"] {
            let code = code(architecture, KERNEL);
            let code = code.as_ptr().cast();
            refused!(
                CUDA_ERROR_NO_BINARY_FOR_GPU,
                cuModuleLoadData(&mut module, code)
            );
        }
        let elf = c"\x7fELF".as_ptr().cast();
        refused!(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&mut module, elf));
        let code = code("sm_90a", KERNEL);
        good!(cuModuleLoadData(&mut module, code.as_ptr().cast()));
        let name = c"vg_norm".as_ptr();
        refused!(
            CUDA_ERROR_NOT_FOUND,
            cuModuleGetFunction(&mut function, module, name)
        );
    });
}

#[test]
fn functions_have_the_limits_of_the_gpu() {
    in_process("functions_have_the_limits_of_the_gpu", &[H100], || {
        context();
        let norm = function("sm_90a", "vg_norm");
        let of = |which| {
            let mut value = -1;
            good!(cuFuncGetAttribute(&mut value, which, norm));
            value
        };
        let own = of(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
        assert!(own > 0 && of(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS) > 8);
        assert_eq!(of(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK), 256);
        assert_eq!(of(Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION), 90);
        let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        assert_eq!(of(dynamic), (48 << 10) - own);
        let most = (227 << 10) - own;
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuFuncSetAttribute(norm, dynamic, most + 1)
        );
        good!(cuFuncSetAttribute(norm, dynamic, most));
        assert_eq!(of(dynamic), most);
        let shared = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuFuncSetAttribute(norm, shared, 0)
        );
    });
}

#[test]
fn launches_have_limits() {
    in_process("launches_have_limits", &[H100], || {
        context();
        let (function, stream, mut params) = (function("sm_90a", KERNEL), stream(), params());
        let mut with =
            |grid, block, shared| launch_with(function, (grid, block), shared, stream, &mut params);
        let invalid = Code::CUDA_ERROR_INVALID_VALUE;
        for grid in [[0, 1, 1], [1, 65536, 1], [1, 1, 65536], [1 << 31, 1, 1]] {
            assert_eq!(with(grid, [128, 1, 1], SHARED), invalid, "{grid:?}");
        }
        for block in [[0, 1, 1], [1025, 1, 1], [1, 1, 65], [512, 2, 2]] {
            assert_eq!(with([1; 3], block, SHARED), invalid, "{block:?}");
        }
        let resources = Code::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
        assert_eq!(with([1; 3], [256, 1, 1], SHARED), resources);
        assert_eq!(with([1; 3], [128, 1, 1], 49 << 10), invalid);
        assert_eq!(with([1; 3], [128, 1, 1], SHARED), Code::CUDA_SUCCESS);
        good!(cuStreamSynchronize(stream));
    });
}

#[test]
fn parameters_have_their_size() {
    in_process("parameters_have_their_size", &[H100], || {
        context();
        let (function, [matrix, sums, _]) = (function("sm_90a", KERNEL), params());
        let mut buffer = [matrix, sums, 0, 0];
        let mut with = |mut size: usize| {
            let mut extra: [*mut c_void; 5] = [
                sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut c_void,
                buffer.as_mut_ptr().cast(),
                sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut c_void,
                (&raw mut size).cast(),
                ptr::null_mut(),
            ];
            let (none, list, extra) = (ptr::null_mut(), ptr::null_mut(), extra.as_mut_ptr());
            call!(cuLaunchKernel(
                function, 1, 1, 1, 128, 1, 1, SHARED, none, list, extra
            ))
        };
        for size in [16, 32] {
            assert_eq!(with(size), Code::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        }
        assert_eq!(with(24), Code::CUDA_SUCCESS);
        let (stream, list) = (ptr::null_mut(), ptr::null_mut());
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, SHARED, stream, list, list)
        );
        good!(cuCtxSynchronize());
    });
}

#[test]
fn cooperative_blocks_are_resident() {
    let settings = [H100, ("VGPU_STANDIN_SMS", "2")];
    in_process("cooperative_blocks_are_resident", &settings, || {
        context();
        let (function, mut params) = (function("sm_90a", KERNEL), params());
        let (mut per_sm, shared) = (0, SHARED as usize);
        good!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut per_sm,
            function,
            128,
            shared
        ));
        // By threads 2048 / 128, by shared memory 228 / 11.
        assert_eq!(per_sm, 16);
        let mut list: [*mut c_void; 1] = [params.as_mut_ptr().cast()];
        let mut with = |blocks: c_int| {
            let (none, list) = (ptr::null_mut(), list.as_mut_ptr());
            call!(cuLaunchCooperativeKernel(
                function,
                blocks as u32,
                1,
                1,
                128,
                1,
                1,
                SHARED,
                none,
                list
            ))
        };
        let too_large = Code::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
        assert_eq!(with(2 * per_sm + 1), too_large);
        assert_eq!(with(2 * per_sm), Code::CUDA_SUCCESS);
        good!(cuCtxSynchronize());
    });
}

#[test]
fn copies_stay_inside_allocations() {
    in_process("copies_stay_inside_allocations", &[], || {
        context();
        let (stream, at, mut host) = (stream(), alloc(1024), [1u8; 1024]);
        let to = host.as_mut_ptr().cast();
        good!(cuMemcpyHtoDAsync_v2(at, to, 1024, stream));
        good!(cuMemsetD8Async(at + 512, 7, 512, stream));
        good!(cuMemcpyDtoDAsync_v2(at, at + 512, 512, stream));
        good!(cuMemcpyDtoHAsync_v2(to, at, 1024, stream));
        assert_eq!(host, [7; 1024]);
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemcpyHtoDAsync_v2(at, to, 1025, stream)
        );
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemcpyDtoHAsync_v2(to, at + 1, 1024, stream)
        );
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemcpyDtoDAsync_v2(at - 1, at, 1, stream)
        );
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemsetD8Async(at, 0, 2048, stream)
        );
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(at + 512));
        good!(cuMemFree_v2(at));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemsetD8Async(at, 0, 1, stream));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(at));
        let mut address = 0;
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&mut address, 0));
    });
}

#[test]
fn memory_is_that_of_the_gpu() {
    let settings = [("VGPU_STANDIN_MEMORY_DIVISOR", "1024")];
    in_process("memory_is_that_of_the_gpu", &settings, || {
        let context = context();
        let (mut free, mut total, mut address) = (0, 0, 0);
        good!(cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!((free, total), (24 << 20, 24 << 20));
        refused!(
            CUDA_ERROR_OUT_OF_MEMORY,
            cuMemAlloc_v2(&mut address, 25 << 20)
        );
        alloc(20 << 20);
        refused!(
            CUDA_ERROR_OUT_OF_MEMORY,
            cuMemAlloc_v2(&mut address, 5 << 20)
        );
        good!(cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!(free, 4 << 20);
        // The memory of a context goes with it.
        good!(cuCtxDestroy_v2(context));
        self::context();
        alloc(20 << 20);
    });
}

#[test]
fn host_memory_is_registered_once() {
    in_process("host_memory_is_registered_once", &[], || {
        context();
        let (mut host, mut address) = (vec![0u32; 16 << 10], 0);
        let at: *mut c_void = host.as_mut_ptr().cast();
        let inside = host[1024..].as_mut_ptr().cast();
        let nowhere = 16 as *mut c_void;
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2(at, 0, 1));
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemHostRegister_v2(nowhere, 4096, 1)
        );
        refused!(
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            cuMemHostUnregister(at)
        );
        good!(cuMemHostRegister_v2(at, 8192, 1));
        refused!(
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
            cuMemHostRegister_v2(inside, 8192, 1)
        );
        // It is not mapped, so kernels have no address of it.
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemHostGetDevicePointer_v2(&mut address, at, 0)
        );
        good!(cuMemHostUnregister(at));
        good!(cuMemHostRegister_v2(at, 8192, 3));
        good!(cuMemHostGetDevicePointer_v2(&mut address, at, 0));
        let stream = stream();
        good!(cuStreamWriteValue32_v2(stream, address, 5, 0));
        for wrong in [address + 2, address + 8192] {
            refused!(
                CUDA_ERROR_INVALID_VALUE,
                cuStreamWriteValue32_v2(stream, wrong, 5, 0)
            );
        }
        good!(cuStreamSynchronize(stream));
        assert_eq!(host[0], 5);
    });
}

/// A copy to page-locked memory happens when the GPU gets there.
#[test]
fn copies_of_registered_memory_are_asynchronous() {
    let settings = [H100, ("VGPU_STANDIN_FAULTS", "shim_check_group:1:hang")];
    in_process(
        "copies_of_registered_memory_are_asynchronous",
        &settings,
        || {
            context();
            let (function, stream, mut params) = (function("sm_90a", KERNEL), stream(), params());
            let mut host = vec![5u8; 8192];
            let at: *mut c_void = host.as_mut_ptr().cast();
            good!(cuMemHostRegister_v2(at, 8192, 1));
            // Nothing behind this launch ever runs.
            assert_eq!(launch(function, stream, &mut params), Code::CUDA_SUCCESS);
            good!(cuMemcpyDtoHAsync_v2(at, params[0], 128, stream));
            good!(cuMemcpyHtoDAsync_v2(params[0], at, 128, stream));
            assert_eq!(host[0], 5);
            refused!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
        },
    );
}

#[test]
fn address_ranges_are_mapped_as_a_whole() {
    in_process("address_ranges_are_mapped_as_a_whole", &[], || {
        context();
        // SAFETY: the structures consist of integers, enums that have the value 0, and a null
        // pointer.
        let (mut memory, mut access): (sys::CUmemAllocationProp, sys::CUmemAccessDesc) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        memory.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        memory.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        access.location = memory.location;
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let (mut unit, mut at, mut handle) = (0, 0, 0);
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        good!(cuMemGetAllocationGranularity(&mut unit, &memory, least));
        let (half, two, four) = (unit / 2, 2 * unit, 4 * unit);
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemAddressReserve(&mut at, half, 0, 0, 0)
        );
        good!(cuMemAddressReserve(&mut at, four, 0, 0, 0));
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemCreate(&mut handle, half, &memory, 0)
        );
        good!(cuMemCreate(&mut handle, two, &memory, 0));
        let behind = at + 3 * unit as u64;
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemMap(at, unit, 0, handle, 0));
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemMap(behind, two, 0, handle, 0)
        );
        good!(cuMemMap(at, two, 0, handle, 0));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemMap(at, two, 0, handle, 0));
        good!(cuMemRelease(handle));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemRelease(handle));
        // Nobody may access it yet.
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(at, 0, 16));
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemSetAccess(at, unit, &access, 1)
        );
        good!(cuMemSetAccess(at, two, &access, 1));
        good!(cuMemsetD8_v2(at, 0, two));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(at, 0, two + 1));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(at, four));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(at, unit));
        let (mut free, mut total) = (0, 0);
        good!(cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!(total - free, two);
        good!(cuMemUnmap(at, two));
        good!(cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!(total, free);
        good!(cuMemAddressFree(at, four));
    });
}

#[test]
fn errors_of_kernels_stick_until_the_context_is_gone() {
    in_process(
        "errors_of_kernels_stick_until_the_context_is_gone",
        &[H100],
        || {
            let context = context();
            let (function, stream, mut params) = (function("sm_90a", KERNEL), stream(), params());
            // Where the results go is no memory. The launch itself succeeds.
            let guilty = &mut [params[0], 4096, 0];
            assert_eq!(launch(function, stream, guilty), Code::CUDA_SUCCESS);
            let mut address = 0;
            refused!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
            refused!(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc_v2(&mut address, 1));
            let illegal = Code::CUDA_ERROR_ILLEGAL_ADDRESS;
            assert_eq!(launch(function, stream, &mut params), illegal);
            good!(cuCtxDestroy_v2(context));
            // In a new context it works.
            self::context();
            let (function, stream) = (self::function("sm_90a", KERNEL), self::stream());
            let mut params = self::params();
            assert_eq!(launch(function, stream, &mut params), Code::CUDA_SUCCESS);
            good!(cuStreamSynchronize(stream));
        },
    );
}

#[test]
fn events_need_to_be_recorded_with_time() {
    in_process("events_need_to_be_recorded_with_time", &[], || {
        context();
        let (stream, mut events, mut time) = (stream(), [ptr::null_mut(); 3], -1.0);
        for (event, flags) in events.iter_mut().zip([0, 0, 2]) {
            good!(cuEventCreate(event, flags));
        }
        let [first, second, untimed] = events;
        refused!(
            CUDA_ERROR_INVALID_HANDLE,
            cuEventElapsedTime(&mut time, first, second)
        );
        for event in events {
            good!(cuEventRecord(event, stream));
        }
        good!(cuEventSynchronize(untimed));
        good!(cuEventElapsedTime(&mut time, first, second));
        assert!(time >= 0.0);
        refused!(
            CUDA_ERROR_INVALID_HANDLE,
            cuEventElapsedTime(&mut time, first, untimed)
        );
        good!(cuEventDestroy_v2(first));
        refused!(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(first, stream));
    });
}

/// A node that launches a kernel in 128 threads.
fn node(
    function: sys::CUfunction,
    shared: u32,
    list: &mut [*mut c_void; 1],
) -> sys::CUDA_KERNEL_NODE_PARAMS {
    sys::CUDA_KERNEL_NODE_PARAMS {
        func: function,
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 128,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        kernelParams: list.as_mut_ptr(),
        extra: ptr::null_mut(),
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}

#[test]
fn graphs_keep_the_parameters_of_their_nodes() {
    in_process("graphs_keep_the_parameters_of_their_nodes", &[H100], || {
        context();
        let (function, stream, mut params) = (function("sm_90a", KERNEL), stream(), params());
        let (mut graph, mut exec, mut nodes) =
            (ptr::null_mut(), ptr::null_mut(), [ptr::null_mut(); 2]);
        let none = ptr::null();
        good!(cuGraphCreate(&mut graph, 0));
        let mut list: [*mut c_void; 1] = [params.as_mut_ptr().cast()];
        let right = node(function, SHARED, &mut list);
        let mut large = right;
        large.blockDimX = 256;
        refused!(
            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            cuGraphAddKernelNode_v2(&mut nodes[0], graph, none, 0, &large)
        );
        for node in &mut nodes {
            good!(cuGraphAddKernelNode_v2(node, graph, none, 0, &right));
        }
        let [first, second] = nodes;
        good!(cuGraphAddDependencies(graph, &first, &second, 1));
        // Twice, and in a cycle.
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuGraphAddDependencies(graph, &first, &second, 1)
        );
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuGraphAddDependencies(graph, &second, &first, 1)
        );
        good!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        let other = ptr::null_mut();
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuGraphExecKernelNodeSetParams_v2(exec, other, &right)
        );
        refused!(
            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            cuGraphExecKernelNodeSetParams_v2(exec, first, &large)
        );
        // The graph has a copy of the parameters.
        let sums = std::mem::replace(&mut params[1], 4096);
        good!(cuMemsetD8_v2(sums, 0xff, 512));
        good!(cuGraphLaunch(exec, stream));
        let mut results = [1f32; 128];
        let to = results.as_mut_ptr().cast();
        good!(cuMemcpyDtoHAsync_v2(to, sums, 512, stream));
        assert_eq!(results, [0.0; 128]);
        good!(cuGraphExecDestroy(exec));
        refused!(CUDA_ERROR_INVALID_HANDLE, cuGraphLaunch(exec, stream));
        good!(cuGraphDestroy(graph));
        refused!(CUDA_ERROR_INVALID_HANDLE, cuGraphDestroy(graph));
    });
}

#[test]
fn programmatic_edges_need_hopper_and_its_drivers() {
    let unsupported = Code::CUDA_ERROR_NOT_SUPPORTED;
    for (device, version, expected) in [
        ("H100", "12030", Code::CUDA_SUCCESS),
        ("H100", "12020", unsupported),
        ("L4", "12030", unsupported),
    ] {
        let settings = [
            ("VGPU_STANDIN_DEVICES", device),
            ("VGPU_STANDIN_DRIVER", version),
        ];
        let name = "programmatic_edges_need_hopper_and_its_drivers";
        in_process(name, &settings, || {
            // This process has the settings of one of the three.
            let is_this = |name, value| std::env::var(name).as_deref() == Ok(value);
            if !settings.iter().all(|(name, value)| is_this(*name, *value)) {
                return;
            }
            context();
            let architecture = if device == "H100" { "sm_90a" } else { "sm_89" };
            let (function, mut params) = (function(architecture, "vg_arange"), [0u64; 64]);
            let mut list: [*mut c_void; 1] = [params.as_mut_ptr().cast()];
            let right = node(function, 0, &mut list);
            let (mut graph, mut nodes) = (ptr::null_mut(), [ptr::null_mut(); 2]);
            good!(cuGraphCreate(&mut graph, 0));
            for node in &mut nodes {
                good!(cuGraphAddKernelNode_v2(node, graph, ptr::null(), 0, &right));
            }
            let [first, second] = nodes;
            let edge = |port| sys::CUgraphEdgeData {
                from_port: port,
                to_port: 0,
                type_: 1,
                reserved: [0; 5],
            };
            let with = |port| {
                call!(cuGraphAddDependencies_v2(
                    graph,
                    &first,
                    &second,
                    &edge(port),
                    1
                ))
            };
            if expected == Code::CUDA_SUCCESS {
                assert_eq!(with(7), Code::CUDA_ERROR_INVALID_VALUE);
            }
            assert_eq!(with(1), expected);
        });
    }
}

#[test]
fn recorded_streams_take_launches_only() {
    in_process("recorded_streams_take_launches_only", &[H100], || {
        context();
        let (function, stream, mut params) = (function("sm_90a", KERNEL), stream(), params());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let (mut graph, mut exec, mut address) = (ptr::null_mut(), ptr::null_mut(), 0);
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuStreamEndCapture(stream, &mut graph)
        );
        good!(cuStreamBeginCapture_v2(stream, mode));
        refused!(
            CUDA_ERROR_INVALID_VALUE,
            cuStreamBeginCapture_v2(stream, mode)
        );
        for _ in 0..2 {
            assert_eq!(launch(function, stream, &mut params), Code::CUDA_SUCCESS);
        }
        good!(cuStreamEndCapture(stream, &mut graph));
        good!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        good!(cuGraphLaunch(exec, stream));
        good!(cuStreamSynchronize(stream));

        good!(cuStreamBeginCapture_v2(stream, mode));
        refused!(
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            cuStreamSynchronize(stream)
        );
        let invalidated = Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        assert_eq!(launch(function, stream, &mut params), invalidated);
        assert_eq!(call!(cuStreamEndCapture(stream, &mut graph)), invalidated);
        good!(cuStreamBeginCapture_v2(stream, mode));
        let unsupported = Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        assert_eq!(call!(cuMemAlloc_v2(&mut address, 256)), unsupported);
    });
}

#[test]
fn objects_belong_to_their_context() {
    in_process("objects_belong_to_their_context", &[], || {
        context();
        let (stream, at) = (stream(), alloc(256));
        context();
        refused!(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(stream));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(at));
        refused!(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(at, 0, 1));
    });
}

/// Each entry point fails when it is asked to, before it does anything.
#[test]
fn every_entry_point_can_fail() {
    let faults: Vec<String> = entries().map(|name| format!("{name}:1:999")).collect();
    let faults = faults.join(",");
    let settings = [("VGPU_STANDIN_FAULTS", &*faults)];
    in_process("every_entry_point_can_fail", &settings, || {
        let (mut context, mut address) = (ptr::null_mut(), 0);
        refused!(CUDA_ERROR_UNKNOWN, cuInit(0));
        good!(cuInit(0));
        refused!(CUDA_ERROR_UNKNOWN, cuCtxCreate_v2(&mut context, 0, 0));
        good!(cuCtxCreate_v2(&mut context, 0, 0));
        refused!(CUDA_ERROR_UNKNOWN, cuMemAlloc_v2(&mut address, 1));
        good!(cuMemAlloc_v2(&mut address, 1));
    });
}
