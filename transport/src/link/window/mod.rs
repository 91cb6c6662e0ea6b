//! The ends of a link over a [window](crate::shm): the protocol of every link with shared memory.
//!
//! The guest sends requests through the submission ring. A payload of up to 16 KiB travels in its
//! record; a larger payload travels in the bulk area. The host sends replies with their payloads
//! through the completion ring. The word `retired` reports finished requests without a message.
#![forbid(unsafe_code)]

mod guest;
mod host;

use std::sync::Arc;

use rustix::io::Errno;

pub use super::window_state::WindowState;
pub use guest::WindowGuest;
pub use host::WindowHost;

use super::fd_passing::Files;
use super::window_end::unmapped;
use crate::error::LinkError;
use crate::shm::doorbell::EventDoorbell;
use crate::shm::layout::{DEFAULT_SIZE, Layout};
use crate::shm::memory::Window;

/// Both ends of a link inside this process.
///
/// # Errors
///
/// [`LinkError::System`] when the process has no memory or no file descriptor left.
pub fn inproc_pair() -> Result<(WindowGuest, WindowHost), LinkError> {
    let layout = Layout::new(DEFAULT_SIZE, 1).map_err(|_| LinkError::System {
        what: "laying out the window",
        error: Errno::INVAL,
    })?;
    let window = Arc::new(Window::anonymous(layout.size()).map_err(unmapped)?);
    layout.write(&*window);
    let (guest_bell, host_bell) = EventDoorbell::pair()?;
    let (guest_files, host_files) = Files::pair();
    let guest = WindowGuest::new(Arc::clone(&window), &layout, Box::new(guest_bell), None);
    let host = WindowHost::new(window, &layout, Box::new(host_bell), None);
    Ok((
        guest.with_files(Some(guest_files)),
        host.with_files(Some(host_files)),
    ))
}
