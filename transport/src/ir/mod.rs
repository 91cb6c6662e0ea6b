//! The graph IR: computations of a guest, independent of any ggml version.
//!
//! - [`Type`], [`Op`]: stable ids with ggml's names. A guest translates ggml's ids by name.
//! - [`Graph`]: nodes over tensors over buffers, and the graph's image in 32-bit words.
//! - [`patch`]: the differences between two images.
//! - [`check()`]: the shape rules of every operator, on which kernels rely.
//! - [`ConvGeometry`], [`PoolWindow`]: stride, padding and dilation of convolutions and pooling.
//! - [`Capabilities`]: the operations that an engine runs, as data. One function answers
//!   `supports_op` in the guest and validates graphs in the host.
//! - [`validate()`]: checks a decoded graph against the buffers of its session.
//!
//! The input of this module is hostile. The module contains no unsafe code.
#![forbid(unsafe_code)]

mod caps;
mod check;
mod codec;
mod conv;
mod graph;
mod ops;
pub mod patch;
mod types;
mod validate;

pub use caps::{Capabilities, Rule};
pub use check::{Refusal, check};
pub use codec::DecodeError;
pub use conv::{ConvGeometry, PoolWindow};
pub use graph::{
    BufferId, ENTRIES_PER_QUESTION, Graph, GraphCounts, IR_VERSION, Node, Shape, Sources, Tensor,
};
pub use ops::{
    GluKind, MAX_SOURCES, Op, OpKind, PoolKind, Precision, RopeMode, ScaleMode, SortOrder, TriKind,
    UnaryKind,
};
pub use types::{ROW_UNIT, Type, TypeSet};
pub use validate::{Invalid, Limits, ValidGraph, validate, validate_until};
