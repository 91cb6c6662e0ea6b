//! `ggml_backend_event`, whose callbacks are part of the device's table.

use crate::abi::{ggml_backend_dev_t, ggml_backend_event, ggml_backend_event_t};
use crate::event::Event;
use crate::ffi::{drop_context, guard, into_context, object};

/// The event behind ggml's object. `None` if the pointer is null.
///
/// # Safety
///
/// `event` must be null or come from [`event_new`], not freed.
pub(super) unsafe fn context<'a>(event: ggml_backend_event_t) -> Option<&'a Event> {
    // SAFETY: null or a live object of `event_new` (this function's contract), which has set the
    // context.
    unsafe { object(object(event.cast_const())?.context.cast_const().cast()) }
}

/// Makes an event that has passed. ggml owns the object and gives it back to [`event_free`]. Null
/// on failure.
pub(super) unsafe extern "C" fn event_new(dev: ggml_backend_dev_t) -> ggml_backend_event_t {
    guard("event_new", std::ptr::null_mut(), || {
        Box::into_raw(Box::new(ggml_backend_event {
            device: dev,
            context: into_context(Event::default()),
        }))
    })
}

/// Frees an event. The last call for this event. Null is allowed.
pub(super) unsafe extern "C" fn event_free(_: ggml_backend_dev_t, event: ggml_backend_event_t) {
    guard("event_free", (), || {
        if event.is_null() {
            return;
        }
        // SAFETY: `event_new` has made the object and its context with `Box::into_raw`, and ggml
        // does not use the event after this call.
        unsafe {
            let mut event = Box::from_raw(event);
            drop_context::<Event>(&mut event.context);
        }
    });
}

/// Waits until the requests before the event are done. Returns at once if the event was never
/// recorded, or if the session is lost: the next graph reports the loss.
pub(super) unsafe extern "C" fn event_synchronize(
    _: ggml_backend_dev_t,
    event: ggml_backend_event_t,
) {
    guard("event_synchronize", (), || {
        // SAFETY: ggml passes an event of this device that it has not freed.
        if let Some(event) = unsafe { context(event) } {
            event.synchronize();
        }
    });
}
