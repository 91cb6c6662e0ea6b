//! What every entry point does, and the checks that several of them make.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::argument::Text;
use crate::codes::{Answer, Code, is_sticky};
use crate::context::Context;
use crate::faults::Fault;
use crate::queue::note_host_thread;
use crate::settings::settings;

pub(super) const INVALID: Code = Code::CUDA_ERROR_INVALID_VALUE;
pub(super) const HANDLE: Code = Code::CUDA_ERROR_INVALID_HANDLE;

/// Calls that need no `cuInit`.
const WITHOUT_INIT: [&str; 4] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuGetErrorName",
];

pub(super) static IS_INITIALIZED: AtomicBool = AtomicBool::new(false);

/// Runs the body of an entry point, or its fault.
pub(super) fn answer(name: &str, body: impl FnOnce() -> Answer) -> Code {
    note_host_thread();
    match settings().faults.of_call(name) {
        None => {}
        Some(Fault::Code(code)) => {
            if let (true, Ok(context)) = (is_sticky(code), Context::current_or_lost()) {
                context.queue.lose(code);
            }
            return code;
        }
        // For entry points of NVML only.
        Some(Fault::Nvml(_)) => return Code::CUDA_ERROR_UNKNOWN,
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
        /// The names of these entry points.
        pub(super) const ENTRIES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($($argument: $type),*) -> $crate::codes::Code {
                $crate::driver::entry::answer(stringify!($name), || $body)
            }
        )*
    };
}
pub(super) use entries;

/// Sets the faults of this process anew, as `VGPU_STANDIN_FAULTS` does at its start. No entry point
/// of the real driver. Returns 0, or 1 for a text that is no list of faults.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vgpuStandinSetFaults(text: Text) -> c_int {
    let set = text.get().map(|text| settings().faults.set(text));
    c_int::from(!matches!(set, Ok(Ok(()))))
}

/// Adds work behind all other work of the context.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` if the stream is recorded, which only launches are;
/// `INVALID_HANDLE` if the context has no such stream.
pub(super) fn enqueue(
    context: &Context,
    stream: u64,
    work: impl FnOnce() -> Answer + Send + 'static,
) -> Answer<u64> {
    check_stream(context, stream)?;
    Ok(context.queue.push(work))
}

/// Checks that a stream is one of the context, and is not recorded.
///
/// # Errors
/// As for [`enqueue`]. The recording is of no use afterwards.
pub(super) fn check_stream(context: &Context, stream: u64) -> Answer {
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
pub(super) fn check_no_capture(context: &Context) -> Answer {
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
