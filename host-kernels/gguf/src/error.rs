//! Why a GGUF file was not read or not written.

use std::io;

use crate::tensor::TensorType;

/// Why a GGUF file was not read or not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the messages name every field
pub enum GgufError {
    /// The bytes are not a GGUF file.
    #[error("not a GGUF file: it starts with {magic:02x?}")]
    Magic { magic: [u8; 4] },
    /// The file's version is not supported.
    #[error("GGUF version {version}; supported are 2 and 3")]
    Version { version: u32 },
    /// The file ends within its metadata, or a read failed.
    #[error("the file ends too early: {0}")]
    Read(io::Error),
    /// A string in the file is longer than the limit.
    #[error("a string of {len} bytes; at most {most}")]
    StringLength { len: u64, most: u64 },
    /// An array in the file is longer than the limit.
    #[error("an array of {len} elements; at most {most}")]
    ArrayLength { len: u64, most: u64 },
    /// An array's elements are arrays.
    #[error("an array of arrays is not a GGUF value")]
    NestedArray,
    /// A value's type is no `gguf_type`.
    #[error("{kind} is not a GGUF value type")]
    ValueType { kind: u32 },
    /// The key of a metadata entry is not UTF-8.
    #[error("metadata entry {index}: the key {key:?} is not UTF-8")]
    Key { index: u64, key: Vec<u8> },
    /// The value of a metadata entry was not read.
    #[error("metadata entry {index}, key {key:?}: {error}")]
    Entry {
        index: u64,
        key: String,
        error: Box<GgufError>,
    },
    /// The rows of a tensor are no whole number of blocks: the fault of the caller's dimensions.
    #[error(
        "tensor {name}: rows of {row} do not divide into {kind:?} blocks of {}",
        .kind.block_len()
    )]
    Row {
        name: String,
        row: u64,
        kind: TensorType,
    },
    /// The tensor's size does not fit 64 bits: the fault of the caller's dimensions.
    #[error("tensor {name}: {dims:?} is too large")]
    TensorSize { name: String, dims: Vec<u64> },
    /// The size of all tensors does not fit 64 bits: the fault of the caller's dimensions.
    #[error("the tensors are too large for a file")]
    FileSize,
    /// The system refused to give the file its length.
    #[error("giving the file {len} bytes: {error}")]
    Reserve { len: u64, error: io::Error },
    /// The system refused to write the file's head.
    #[error("writing the head of the file, {len} bytes: {error}")]
    WriteHead { len: usize, error: io::Error },
    /// The system refused to write a part of a tensor.
    #[error("writing {len} bytes of tensor {name} at offset {offset}: {error}")]
    WriteTensor {
        name: String,
        offset: u64,
        len: usize,
        error: io::Error,
    },
}
