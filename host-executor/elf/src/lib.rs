//! Reads a shared library from its file, without loading it or running its code.
#![forbid(unsafe_code)]

mod address;
mod error;
mod library;

pub use error::{ElfError, FileFault};
pub use library::Library;
