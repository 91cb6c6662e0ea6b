//! What a link does now, for diagnosis by other threads.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::stream_state::{StreamFigures, StreamState};
use super::window_state::WindowState;
use crate::shm::memory::Window;

/// Where other threads read what a link does. No lock is involved.
#[derive(Debug, Clone)]
pub enum LinkWatch {
    /// The words of a window.
    Window(Arc<Window>),
    /// The figures of a stream.
    Stream(Arc<StreamFigures>),
}

/// What a link does at about one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// The link has a window.
    Window(WindowState),
    /// The link is a stream.
    Stream(StreamState),
}

impl LinkWatch {
    /// What the link does now.
    pub fn read(&self) -> LinkState {
        match self {
            LinkWatch::Window(window) => LinkState::Window(WindowState::read(window)),
            LinkWatch::Stream(figures) => LinkState::Stream(figures.read()),
        }
    }
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkState::Window(state) => state.fmt(f),
            LinkState::Stream(state) => state.fmt(f),
        }
    }
}
