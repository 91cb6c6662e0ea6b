//! The entry points of the driver that the engine uses, and those that belong to them.
//!
//! Handles are the numbers of [`new_handle`], not addresses: a wrong one is an error here, where
//! the real driver may crash.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute_enum as Of;
use vgpu_cuda_shim::Kernel;

use crate::argument::{Image, In, Out, Text};
use crate::cards::REGISTERS;
use crate::code::{Module, resources};
use crate::codes::{Answer, Code, is_sticky, name_of, text_of};
use crate::context::{Context, Event, Stream, card, new_handle};
use crate::faults::Fault;
use crate::function::{Function, Launch, MAX_THREADS, RESERVED_SHARED, SHARED_PER_BLOCK};
use crate::graph::{Capture, Exec, Graph, Node};
use crate::lock::lock;
use crate::memory::{GRANULARITY, memory};
use crate::queue::note_host_thread;
use crate::settings::settings;

/// The first driver with edges of a type in graphs, and the first GPUs with programmatic ones.
const TYPED_EDGES: c_int = 12_030;
const PROGRAMMATIC: u32 = 9;

/// Calls that need no `cuInit`.
const WITHOUT_INIT: [&str; 4] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuGetErrorName",
];

static IS_INITIALIZED: AtomicBool = AtomicBool::new(false);

/// Runs the body of an entry point, or its fault.
fn answer(name: &str, body: impl FnOnce() -> Answer) -> Code {
    note_host_thread();
    match settings().faults.of_call(name) {
        None => {}
        Some(Fault::Code(code)) => {
            if let (true, Ok(context)) = (is_sticky(code), Context::current_or_lost()) {
                context.queue.lose(code);
            }
            return code;
        }
        Some(Fault::Nothing) => return Code::CUDA_SUCCESS,
        Some(Fault::Abort) => std::process::abort(),
        Some(Fault::Hang) => loop {
            std::thread::park();
        },
    }
    if !WITHOUT_INIT.contains(&name) && !IS_INITIALIZED.load(Ordering::SeqCst) {
        return Code::CUDA_ERROR_NOT_INITIALIZED;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Code::CUDA_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => Code::CUDA_ERROR_UNKNOWN,
    }
}

/// The entry points. Each has the name and the arguments that `cuda.h` gives it; handles are
/// numbers. Their bodies are safe: the types of the arguments say what callers guarantee.
macro_rules! entries {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        /// The names of the entry points of the driver.
        pub const ENTRIES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($($argument: $type),*) -> Code {
                answer(stringify!($name), || $body)
            }
        )*
    };
}

const INVALID: Code = Code::CUDA_ERROR_INVALID_VALUE;
const HANDLE: Code = Code::CUDA_ERROR_INVALID_HANDLE;

/// Adds work behind all other work of the context.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` if the stream is recorded, which only launches are;
/// `INVALID_HANDLE` if the context has no such stream.
fn enqueue(
    context: &Context,
    stream: u64,
    work: impl FnOnce() -> Answer + Send + 'static,
) -> Answer<u64> {
    check_stream(context, stream)?;
    Ok(context.queue.push(work))
}

/// Sets the faults of this process anew, as `VGPU_STANDIN_FAULTS` does at its start. No entry point
/// of the real driver. Returns 0, or 1 for a text that is no list of faults.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vgpuStandinSetFaults(text: Text) -> c_int {
    let set = text.get().map(|text| settings().faults.set(text));
    c_int::from(!matches!(set, Ok(Ok(()))))
}

/// Checks that a stream is one of the context, and is not recorded.
///
/// # Errors
/// As for [`enqueue`]. The recording is of no use afterwards.
fn check_stream(context: &Context, stream: u64) -> Answer {
    let mut objects = context.objects();
    if stream == 0 {
        return Ok(());
    }
    let stream = objects.streams.get_mut(&stream).ok_or(HANDLE)?;
    match &mut stream.capture {
        None => Ok(()),
        Some(capture) => {
            capture.is_invalid = true;
            Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// Refuses a call that a thread must not make while it records a stream, such as an allocation.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED`. The recording is of no use afterwards.
fn check_no_capture(context: &Context) -> Answer {
    let mut objects = context.objects();
    let mut captures = { objects.streams.values_mut() }.filter_map(|it| it.capture.as_mut());
    match captures.find(|capture| capture.thread.is_some()) {
        None => Ok(()),
        Some(capture) => {
            capture.is_invalid = true;
            Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// The function of a context with this handle.
///
/// # Errors
/// `INVALID_HANDLE`.
fn function_of(context: &Context, handle: u64) -> Answer<Arc<Function>> {
    let objects = context.objects();
    objects.functions.get(&handle).cloned().ok_or(HANDLE)
}

/// The bytes of the parameters of a launch: the one structure that a kernel has.
///
/// # Errors
/// `INVALID_VALUE` unless there is one of the two forms.
///
/// # Safety
/// `params` is null, or points to a pointer, which is null or points to the kernel's structure.
/// `extra` is null, or points to pairs of a key and a value that end with the key `END`: the value
/// of `BUFFER_SIZE` is null or points to a size, and that of `BUFFER_POINTER` is null or points to
/// so many bytes.
unsafe fn parameters(
    function: &Function,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Answer<Vec<u8>> {
    let copy = |from: *const c_void, len: usize| {
        if from.is_null() {
            return Err(INVALID);
        }
        // SAFETY: `from` is what `params` points to and `len` the size of the structure, or both
        // are of the list `extra`. The caller guarantees so many bytes, and `from` is not null.
        Ok(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) }.to_vec())
    };
    match (params.is_null(), extra.is_null()) {
        (false, true) => {
            // SAFETY: `params` is not null. The caller guarantees that it points to a pointer.
            let first = unsafe { params.read() };
            copy(first, function.kernel.parameter_bytes())
        }
        (true, false) => {
            let (mut from, mut len) = (std::ptr::null(), None);
            for index in (0..).step_by(2) {
                // SAFETY: `extra` is not null. The caller guarantees a list of pairs that ends with
                // `END`, and none of the keys before `index` is `END`.
                let key = unsafe { extra.add(index).read() } as usize as u32;
                if key == sys::CU_LAUNCH_PARAM_END_AS_INT {
                    break;
                }
                // SAFETY: the caller guarantees a value behind each key but `END`, which this key
                // is not.
                let value = unsafe { extra.add(index + 1).read() };
                match key {
                    sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT => from = value.cast_const(),
                    sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT if !value.is_null() => {
                        // SAFETY: the caller guarantees that this value points to a size.
                        len = Some(unsafe { value.cast::<usize>().read() });
                    }
                    _ => return Err(INVALID),
                }
            }
            copy(from, len.ok_or(INVALID)?)
        }
        _ => Err(INVALID),
    }
}

/// Launches a function on a stream, or records the launch.
///
/// # Errors
/// As for [`Launch::check`] and [`check_stream`].
///
/// # Safety
/// As for [`parameters`]. What the parameters name is as [`Launch::run`] requires, until the stream
/// is synchronised; if the launch is recorded, until the last run of the graph is over.
#[allow(clippy::too_many_arguments)] // as the entry points have
unsafe fn launch(
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    cooperative: bool,
) -> Answer {
    let context = Context::current()?;
    let function = function_of(&context, function)?;
    // SAFETY: the caller guarantees both lists.
    let params = unsafe { parameters(&function, params, extra) }?;
    let launch = Launch {
        params,
        function,
        grid,
        block,
        shared,
        cooperative,
    };
    launch.check(context.card())?;
    if record(&context, stream, &launch)? {
        return Ok(());
    }
    // SAFETY: the caller guarantees what the parameters name until the stream is synchronised,
    // which waits for this work.
    enqueue(&context, stream, move || unsafe { launch.run() })?;
    Ok(())
}

/// Records a launch, if the stream is recorded.
///
/// # Errors
/// `STREAM_CAPTURE_INVALIDATED` if a call has made the recording useless.
fn record(context: &Context, stream: u64, launch: &Launch) -> Answer<bool> {
    let mut objects = context.objects();
    let objects = &mut *objects;
    let stream = objects.streams.get_mut(&stream);
    let Some(capture) = stream.and_then(|stream| stream.capture.as_mut()) else {
        return Ok(false);
    };
    if capture.is_invalid {
        return Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    let node = new_handle();
    let graph = objects.graphs.get_mut(&capture.graph).ok_or(HANDLE)?;
    graph.nodes.push(node);
    if let Some(last) = capture.last.replace(node) {
        graph.connect(last, node)?;
    }
    let launch = launch.clone();
    objects.nodes.insert(node, Node { launch });
    Ok(true)
}

/// The launch of a kernel node.
///
/// # Errors
/// As for [`Launch::check`]; `INVALID_HANDLE` for an unknown function.
///
/// # Safety
/// As for [`parameters`], for the two lists of `params`. What the parameters name is as
/// [`Launch::run`] requires, until the last run of the node is over.
unsafe fn launch_of(
    context: &Context,
    params: &sys::CUDA_KERNEL_NODE_PARAMS,
    cooperative: bool,
) -> Answer<Launch> {
    let function = function_of(context, params.func as u64)?;
    // SAFETY: the caller guarantees both lists.
    let bytes = unsafe { parameters(&function, params.kernelParams, params.extra) }?;
    let launch = Launch {
        params: bytes,
        function,
        grid: [params.gridDimX, params.gridDimY, params.gridDimZ],
        block: [params.blockDimX, params.blockDimY, params.blockDimZ],
        shared: params.sharedMemBytes,
        cooperative,
    };
    launch.check(context.card())?;
    Ok(launch)
}

fn connect(graph: u64, from: u64, to: u64) -> Answer {
    let context = Context::current()?;
    let mut objects = context.objects();
    objects
        .graphs
        .get_mut(&graph)
        .ok_or(HANDLE)?
        .connect(from, to)
}

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
        let room = usize::try_from(len).map_err(|_| INVALID)?;
        if to.as_ptr().is_null() || room == 0 {
            return Err(INVALID);
        }
        let count = card.name.len().min(room - 1);
        // SAFETY: the caller guarantees `len` bytes, which are more than `count`.
        unsafe {
            let to = to.as_ptr().cast::<u8>();
            to.copy_from_nonoverlapping(card.name.as_ptr(), count);
            to.add(count).write(0);
        }
        Ok(())
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

    // Modules and functions.
    cuModuleLoadData(module: Out<u64>, image: Image) {
        let context = Context::current()?;
        let code = Module::parse(image.text()?)?;
        code.check_runs_on(context.card().capability)?;
        let handle = new_handle();
        module.put(handle)?;
        context.objects().modules.insert(handle, code);
        Ok(())
    }
    cuModuleUnload(module: u64) {
        let context = Context::current()?;
        context.queue.drain()?;
        let removed = context.objects().modules.remove(&module);
        removed.map(|_| ()).ok_or(HANDLE)
    }
    cuModuleGetFunction(function: Out<u64>, module: u64, name: Text) {
        let context = Context::current()?;
        let name = name.get()?;
        let mut objects = context.objects();
        let module = objects.modules.get(&module).ok_or(HANDLE)?;
        let found = module.kernels.iter().any(|kernel| kernel == name);
        let kernel = Kernel::find(name).filter(|_| found);
        let kernel = kernel.ok_or(Code::CUDA_ERROR_NOT_FOUND)?;
        let resources = resources(name, &module.architecture);
        let digits = module.architecture.chars().filter(char::is_ascii_digit);
        let new = Function {
            name: name.into(),
            kernel,
            resources,
            binary_version: digits.collect::<String>().parse().unwrap_or(0),
            max_dynamic: AtomicU32::new(SHARED_PER_BLOCK.saturating_sub(resources.shared)),
        };
        let handle = new_handle();
        function.put(handle)?;
        objects.functions.insert(handle, Arc::new(new));
        Ok(())
    }
    cuFuncGetAttribute(value: Out<c_int>, which: c_int, function: u64) {
        use sys::CUfunction_attribute_enum as Attribute;
        let context = Context::current()?;
        let function = function_of(&context, function)?;
        let known = [
            (Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function.kernel.max_threads()),
            (Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.resources.shared),
            (Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS, function.resources.registers),
            (Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION, function.binary_version),
            (
                Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                function.max_dynamic.load(Ordering::Relaxed),
            ),
        ];
        let found = known.iter().find(|(of, _)| *of as c_int == which);
        value.put(found.ok_or(INVALID)?.1 as c_int)
    }
    cuFuncSetAttribute(function: u64, which: c_int, value: c_int) {
        use sys::CUfunction_attribute_enum as Attribute;
        let context = Context::current()?;
        let function = function_of(&context, function)?;
        let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let carveout = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        match which {
            _ if which == dynamic as c_int => function.set_max_dynamic(context.card(), value),
            _ if which == carveout as c_int && (-1..=100).contains(&value) => Ok(()),
            _ => Err(INVALID),
        }
    }
    cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<c_int>,
        function: u64,
        threads: c_int,
        dynamic: usize,
    ) {
        let context = Context::current()?;
        let function = function_of(&context, function)?;
        let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0);
        let threads = threads.ok_or(INVALID)?;
        let dynamic = u32::try_from(dynamic).map_err(|_| INVALID)?;
        blocks.put(function.blocks_per_sm(context.card(), threads, dynamic) as c_int)
    }

    // Launches.
    cuLaunchKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: u64,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the caller guarantees the lists, and the memory that the kernel uses, as `cuda.h`
        // asks.
        unsafe { launch(function, grid, block, shared, stream, params, extra, false) }
    }
    cuLaunchCooperativeKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: u64,
        params: *mut *mut c_void,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let extra = std::ptr::null_mut();
        // SAFETY: the caller guarantees `params`, and the memory that the kernel uses, as `cuda.h`
        // asks. `extra` is null.
        unsafe { launch(function, grid, block, shared, stream, params, extra, true) }
    }

    // Streams and events.
    cuStreamCreate(stream: Out<u64>, flags: c_uint) {
        let context = Context::current()?;
        if flags > sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint {
            return Err(INVALID);
        }
        let handle = new_handle();
        stream.put(handle)?;
        context.objects().streams.insert(handle, Stream::default());
        Ok(())
    }
    cuStreamDestroy_v2(stream: u64) {
        let context = Context::current()?;
        let removed = context.objects().streams.remove(&stream);
        removed.map(|_| ()).ok_or(HANDLE)
    }
    cuStreamSynchronize(stream: u64) {
        let context = Context::current()?;
        check_stream(&context, stream)?;
        context.queue.drain()
    }
    cuStreamQuery(stream: u64) {
        let context = Context::current()?;
        check_stream(&context, stream)?;
        match context.queue.is_done(context.queue.last()) {
            true => context.queue.alive(),
            false => Err(Code::CUDA_ERROR_NOT_READY),
        }
    }
    cuStreamWriteValue32_v2(stream: u64, address: u64, value: c_uint, flags: c_uint) {
        let context = Context::current()?;
        if flags > 1 || !address.is_multiple_of(4) {
            return Err(INVALID);
        }
        memory().check(context.id, address, 4)?;
        enqueue(&context, stream, move || {
            // SAFETY: the word is memory of the context, aligned, and alive until the queue has
            // come here.
            let word = unsafe { AtomicU32::from_ptr(address as *mut u32) };
            word.store(value, Ordering::Release);
            Ok(())
        })?;
        Ok(())
    }
    cuStreamBeginCapture_v2(stream: u64, mode: c_uint) {
        let context = Context::current()?;
        let mut objects = context.objects();
        let objects = &mut *objects;
        let stream = objects.streams.get_mut(&stream).ok_or(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        if stream.capture.is_some() || mode > 2 {
            return Err(INVALID);
        }
        let graph = new_handle();
        objects.graphs.insert(graph, Graph::default());
        let is_relaxed = mode == sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        stream.capture = Some(Capture {
            graph,
            last: None,
            thread: (!is_relaxed).then(|| std::thread::current().id()),
            is_invalid: false,
        });
        Ok(())
    }
    cuStreamEndCapture(stream: u64, graph: Out<u64>) {
        let context = Context::current()?;
        let mut objects = context.objects();
        let stream = objects.streams.get_mut(&stream).ok_or(HANDLE)?;
        let capture = stream.capture.as_ref().ok_or(INVALID)?;
        if capture.thread.is_some_and(|thread| thread != std::thread::current().id()) {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let capture = stream.capture.take().ok_or(INVALID)?;
        if capture.is_invalid {
            graph.put(0)?;
            objects.graphs.remove(&capture.graph);
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        graph.put(capture.graph)
    }
    cuStreamIsCapturing(stream: u64, status: Out<c_uint>) {
        let context = Context::current()?;
        let mut objects = context.objects();
        let stream = objects.streams.get_mut(&stream).ok_or(HANDLE)?;
        status.put(match &stream.capture {
            None => 0,
            Some(capture) if capture.is_invalid => 2,
            Some(_) => 1,
        })
    }
    cuEventCreate(event: Out<u64>, flags: c_uint) {
        let context = Context::current()?;
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        if flags & !(untimed | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint) != 0 {
            return Err(INVALID);
        }
        let handle = new_handle();
        event.put(handle)?;
        let new = Event {
            has_time: flags & untimed == 0,
            work: None,
            reached: Arc::default(),
        };
        context.objects().events.insert(handle, new);
        Ok(())
    }
    cuEventDestroy_v2(event: u64) {
        let context = Context::current()?;
        let removed = context.objects().events.remove(&event);
        removed.map(|_| ()).ok_or(HANDLE)
    }
    cuEventRecord(event: u64, stream: u64) {
        let context = Context::current()?;
        let reached = Arc::<Mutex<Option<Instant>>>::default();
        if !context.objects().events.contains_key(&event) {
            return Err(HANDLE);
        }
        let of_work = Arc::clone(&reached);
        let work = enqueue(&context, stream, move || {
            *lock(&of_work) = Some(Instant::now());
            Ok(())
        })?;
        let mut objects = context.objects();
        let event = objects.events.get_mut(&event).ok_or(HANDLE)?;
        (event.work, event.reached) = (Some(work), reached);
        Ok(())
    }
    cuEventQuery(event: u64) {
        let context = Context::current()?;
        let work = context.objects().events.get(&event).ok_or(HANDLE)?.work;
        match work.is_none_or(|work| context.queue.is_done(work)) {
            true => context.queue.alive(),
            false => Err(Code::CUDA_ERROR_NOT_READY),
        }
    }
    cuEventSynchronize(event: u64) {
        let context = Context::current()?;
        let work = context.objects().events.get(&event).ok_or(HANDLE)?.work;
        work.map_or(Ok(()), |work| context.queue.wait(work))
    }
    cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) {
        let context = Context::current()?;
        let objects = context.objects();
        let time = |event: u64| -> Answer<Instant> {
            let event = objects.events.get(&event).ok_or(HANDLE)?;
            if !event.has_time || event.work.is_none() {
                return Err(HANDLE);
            }
            let reached = *lock(&event.reached);
            reached.ok_or(Code::CUDA_ERROR_NOT_READY)
        };
        let (start, end) = (time(start)?, time(end)?);
        milliseconds.put(end.saturating_duration_since(start).as_secs_f32() * 1e3)
    }

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

    // Address ranges. They belong to the process, not to a context.
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

    // Graphs.
    cuGraphCreate(graph: Out<u64>, flags: c_uint) {
        let context = Context::current()?;
        if flags != 0 {
            return Err(INVALID);
        }
        let handle = new_handle();
        graph.put(handle)?;
        context.objects().graphs.insert(handle, Graph::default());
        Ok(())
    }
    cuGraphDestroy(graph: u64) {
        let context = Context::current()?;
        let mut objects = context.objects();
        let removed = objects.graphs.remove(&graph).ok_or(HANDLE)?;
        for node in removed.nodes {
            objects.nodes.remove(&node);
        }
        Ok(())
    }
    cuGraphAddKernelNode_v2(
        node: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        params: In<sys::CUDA_KERNEL_NODE_PARAMS>,
    ) {
        let context = Context::current()?;
        // SAFETY: the caller guarantees the lists in `params`, and what the parameters name until
        // the last run of the node, as `cuda.h` asks.
        let launch = unsafe { launch_of(&context, &params.get()?, false) }?;
        let mut objects = context.objects();
        let objects = &mut *objects;
        let of = objects.graphs.get_mut(&graph).ok_or(HANDLE)?;
        let handle = new_handle();
        of.nodes.push(handle);
        let connected = (0..count).try_for_each(|index| of.connect(before.at(index)?, handle));
        if let Err(code) = connected {
            of.nodes.pop();
            return Err(code);
        }
        objects.nodes.insert(handle, Node { launch });
        node.put(handle)
    }
    cuGraphKernelNodeSetAttribute(
        node: u64,
        which: c_uint,
        value: In<sys::CUlaunchAttributeValue>,
    ) {
        let context = Context::current()?;
        let card = context.card();
        let mut objects = context.objects();
        let node = objects.nodes.get_mut(&node).ok_or(HANDLE)?;
        if which != sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE as c_uint {
            return Err(INVALID);
        }
        // SAFETY: the attribute says that the caller has set this member.
        let cooperative = unsafe { value.get()?.cooperative } != 0;
        let changed = Launch {
            cooperative,
            ..node.launch.clone()
        };
        changed.check(card)?;
        node.launch = changed;
        Ok(())
    }
    cuGraphAddDependencies(graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        (0..count).try_for_each(|index| connect(graph, from.at(index)?, to.at(index)?))
    }
    cuGraphAddDependencies_v2(
        graph: u64,
        from: In<u64>,
        to: In<u64>,
        edges: In<sys::CUgraphEdgeData>,
        count: usize,
    ) {
        let context = Context::current()?;
        if settings().version < TYPED_EDGES {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        for index in 0..count {
            let edge = edges.at(index)?;
            let is_programmatic = match (edge.type_, edge.from_port, edge.to_port) {
                (0, 0, 0) => false,
                (1, 1 | 2, 0) => true,
                _ => return Err(INVALID),
            };
            if is_programmatic && context.card().capability.0 < PROGRAMMATIC {
                return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
            }
            connect(graph, from.at(index)?, to.at(index)?)?;
        }
        Ok(())
    }
    cuGraphInstantiateWithFlags(exec: Out<u64>, graph: u64, flags: u64) {
        let context = Context::current()?;
        if flags != 0 {
            return Err(INVALID);
        }
        let mut objects = context.objects();
        let order = objects.graphs.get(&graph).ok_or(HANDLE)?.order();
        let launches = { order.iter() }
            .filter_map(|node| Some((*node, objects.nodes.get(node)?.launch.clone())));
        let new = Exec {
            launches: launches.collect(),
            order,
        };
        let handle = new_handle();
        exec.put(handle)?;
        objects.execs.insert(handle, new);
        Ok(())
    }
    cuGraphExecDestroy(exec: u64) {
        let context = Context::current()?;
        let removed = context.objects().execs.remove(&exec);
        removed.map(|_| ()).ok_or(HANDLE)
    }
    cuGraphExecKernelNodeSetParams_v2(
        exec: u64,
        node: u64,
        params: In<sys::CUDA_KERNEL_NODE_PARAMS>,
    ) {
        let context = Context::current()?;
        let is_cooperative = {
            let objects = context.objects();
            let exec = objects.execs.get(&exec).ok_or(HANDLE)?;
            exec.launches.get(&node).ok_or(INVALID)?.cooperative
        };
        // SAFETY: the caller guarantees the lists in `params`, and what the parameters name until
        // the last run of the node, as `cuda.h` asks.
        let launch = unsafe { launch_of(&context, &params.get()?, is_cooperative) }?;
        let mut objects = context.objects();
        let exec = objects.execs.get_mut(&exec).ok_or(HANDLE)?;
        exec.launches.insert(node, launch);
        Ok(())
    }
    cuGraphLaunch(exec: u64, stream: u64) {
        let context = Context::current()?;
        let launches: Vec<Launch> = {
            let objects = context.objects();
            let exec = objects.execs.get(&exec).ok_or(HANDLE)?;
            { exec.order.iter() }
                .filter_map(|node| exec.launches.get(node).cloned())
                .collect()
        };
        enqueue(&context, stream, move || {
            // SAFETY: the callers that gave the parameters of each launch guarantee what these name
            // until the last run of the graph, and the queue runs the launches in order.
            launches.iter().try_for_each(|launch| unsafe { launch.run() })
        })?;
        Ok(())
    }
}
