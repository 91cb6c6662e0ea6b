//! GGUF files with random weights.
//!
//! [`Metadata`] and [`lay_out`] are the container: metadata, the table of tensors, alignment.
//! [`fill`] writes random blocks of every type in [`TensorType`]. [`RandomModel`] writes a whole
//! file, whose bytes depend on the metadata, the tensors and the seed alone. [`FileType`] says
//! which types the matrices of a file have.
//!
//! The architectures of models are the callers' own.

mod container;
mod error;
mod file_type;
mod model;
mod random;
mod tensor;

pub use container::{FileLayout, Metadata, Value, lay_out};
pub use error::GgufError;
pub use file_type::{FileType, use_more_bits};
pub use model::{RandomModel, RandomTensor};
pub use random::{Rng, fill};
pub use tensor::{Tensor, TensorType};
