//! Whether a session is to end while it does long work.

use std::cell::RefCell;

use vgpu_transport::link::HostEnd;

use super::error::SessionEnd;
use crate::stop::StopFlag;

/// What ends a session in the middle of a request: its guest is gone, or the executor stops.
pub(super) struct EndCheck<'a> {
    state: RefCell<CheckedLink<'a>>,
    stop: &'a StopFlag,
}

struct CheckedLink<'a> {
    link: &'a mut dyn HostEnd,
    end: Option<SessionEnd>,
}

impl<'a> EndCheck<'a> {
    pub(super) fn new(link: &'a mut dyn HostEnd, stop: &'a StopFlag) -> EndCheck<'a> {
        let end = None;
        EndCheck {
            state: RefCell::new(CheckedLink { link, end }),
            stop,
        }
    }

    /// Whether the session is to end. Once it is, it stays so.
    pub(super) fn is_near(&self) -> bool {
        let CheckedLink { link, end } = &mut *self.state.borrow_mut();
        if end.is_none() {
            *end = SessionEnd::asked_by(self.stop)
                .or_else(|| link.check_guest().err().map(SessionEnd::from));
        }
        end.is_some()
    }

    /// Why the session is to end, if [`is_near`](EndCheck::is_near) has found that it is.
    ///
    /// # Errors
    /// The reason.
    pub(super) fn check(&self) -> Result<(), SessionEnd> {
        self.state.borrow().end.clone().map_or(Ok(()), Err)
    }
}
