//! Modules, functions and launches.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use vgpu_cuda_shim::Kernel;

use super::entry::{HANDLE, INVALID, enqueue, entries};
use crate::argument::{Image, Out, Text};
use crate::code::{Module, resources};
use crate::codes::{Answer, Code};
use crate::context::{Context, new_handle};
use crate::function::{Function, Launch, SHARED_PER_BLOCK};
use crate::graph::Node;

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
/// As for [`Launch::check`] and [`check_stream`](super::entry::check_stream).
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
pub(super) unsafe fn launch_of(
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

entries! {
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
}
