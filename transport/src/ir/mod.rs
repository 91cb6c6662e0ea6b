//! The graph IR: what a guest asks to be computed, independent of any ggml version.
//!
//! - [`Type`], [`Op`]: stable ids with ggml's names; guests translate by name.
//! - [`Graph`]: nodes over tensors over buffers, and its image in 32-bit words; [`patch`]: from one image to the next.
//! - [`check()`]: the shape rules of every operator. Kernels rely on them and on nothing else.
//! - [`Capabilities`]: what an engine runs, as data; the same function answers `supports_op` in the
//!   guest and validates in the host.
//! - [`validate()`]: a decoded graph against the buffers of its session.
//!
//! Everything here reads hostile input. Nothing here is unsafe.
#![forbid(unsafe_code)]

mod caps;
mod check;
mod codec;
mod graph;
mod ops;
pub mod patch;
mod types;
mod validate;

pub use caps::{Capabilities, Rule};
pub use check::{Refusal, check};
pub use codec::DecodeError;
pub use graph::{BufferId, Graph, IR_VERSION, Node, Shape, Sources, Tensor};
pub use ops::{
    GluKind, MAX_SOURCES, Op, OpKind, PoolKind, Precision, RopeMode, ScaleMode, SortOrder, TriKind,
    UnaryKind,
};
pub use types::{Type, TypeSet};
pub use validate::{Invalid, Limits, ValidGraph, validate};
