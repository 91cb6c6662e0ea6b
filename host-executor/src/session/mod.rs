//! A session: one guest, its buffers, its graphs.
//!
//! A session executes requests strictly in order, each to its end before the next one is read. A
//! mistake of a guest ends the guest's own session only: a session owns its state. The engine gets
//! only values that this module or [`validate`](vgpu_transport::ir::validate) has checked.
//!
//! - `state`: the session and its figures.
//! - `dispatch`: what each request does. `weights`: the requests on weights, with their state in
//!   `weights_state`, and `extent_upload`, which compares what several guests upload. `bulk`: FILL
//!   and COPY.
//! - `buffers`: the buffers.
//! - `run`: the loop that receives requests and sends replies.
//! - `answer`: what a request calls for. `error`: why sessions end. `end_check`: whether a session
//!   is to end while it does long work. `outside`: how much it works outside of turns.
//!   `fallback_line`: what its engine has left to the CPU engine, for the log.
#![forbid(unsafe_code)]

mod answer;
mod buffers;
mod bulk;
mod dispatch;
mod end_check;
mod error;
mod extent_upload;
mod fallback_line;
mod graphs;
mod outside;
mod run;
mod state;
mod weights;
mod weights_state;

#[cfg(feature = "server")]
pub(crate) use error::END_KINDS;
pub use error::{RejectReason, SessionEnd, Violation};
pub use state::Session;
#[cfg(feature = "server")]
pub(crate) use state::{Reclaim, SharedParts};

#[cfg(feature = "server")]
pub(crate) use run::{FirstRequest, receive_first, reject};
