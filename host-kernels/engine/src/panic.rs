//! Caught panics.
#![forbid(unsafe_code)]

use std::any::Any;

/// The message of a panic that [`catch_unwind`](std::panic::catch_unwind) or
/// [`join`](std::thread::JoinHandle::join) has caught.
pub fn panic_message(payload: &(dyn Any + Send)) -> String {
    if let Some(message) = payload.downcast_ref::<&str>() {
        (*message).to_owned()
    } else if let Some(message) = payload.downcast_ref::<String>() {
        message.clone()
    } else {
        "a panic without a message".to_owned()
    }
}
