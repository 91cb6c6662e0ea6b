//! Operator fusion: nodes that one kernel computes together, for every engine.
//!
//! [`Arrangement::of`] looks at the graph alone, finds patterns, and proves that results which
//! the fused kernel does not store are dead, and that nodes can move to the place of the kernel
//! (`liveness`). Whether a kernel exists for the types and layouts of a group is up to the engine;
//! if not, the engine compiles the nodes one by one.

mod arrangement;
mod budget;
mod divide;
mod experts;
mod finder;
mod liveness;
mod products;
mod rows;
mod uses;

pub use crate::byte_range::ByteRange;
pub use arrangement::{Arrangement, TooManyParts};
pub use divide::{Share, most_parts};
pub use finder::FusionKind;
pub use liveness::{reads, writes};
pub use uses::{is_same, uses};
