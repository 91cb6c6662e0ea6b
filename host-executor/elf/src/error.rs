//! Why a library is not read.

use std::path::PathBuf;
use std::{io, str};

/// Why a library is not read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ElfError {
    #[error("reading {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a library: it has {bytes} bytes, or is not a file", path.display())]
    NotALibrary { path: PathBuf, bytes: u64 },
    #[error("{} is not a shared library", path.display())]
    NotShared { path: PathBuf, source: FileFault },
    #[error("{} has no {function}", path.display())]
    NoFunction { path: PathBuf, function: String },
    #[error("{function} in {} does not return a string constant", path.display())]
    NotAString { path: PathBuf, function: String },
    /// The string of [`Library::returned_string`](crate::Library::returned_string) is not read.
    #[error(transparent)]
    String(#[from] FileFault),
}

/// What is wrong with the content of a library's file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum FileFault {
    #[error(transparent)]
    Format(#[from] object::Error),
    #[error("the library has no dynamic section")]
    NoDynamicSection,
    #[error("address {0:#x} is in none of the sections")]
    NoSection(u64),
    #[error("a section is shorter than its header says")]
    ShortSection,
    #[error("the string is not terminated")]
    Unterminated,
    #[error("the string is not UTF-8")]
    NotUtf8(#[source] str::Utf8Error),
}
