//! The GGUF container, version 3: reads the metadata of a file, lays out a file.
//!
//! A GGUF file is a header (magic, version, two counts), key/value metadata, a table of tensors
//! and, aligned, the tensor data. All numbers are little-endian. A string has a 64-bit length and
//! no terminator. An array has an element type and a 64-bit count. ggml's `docs/gguf.md` describes
//! the format and its `gguf.h` declares it; the numbers below are theirs.
//!
//! All metadata types are supported, because callers copy a tokenizer from another file. Of the
//! tensor types there are those that [`crate::fill`] can fill.

use std::io::Read;

use crate::error::GgufError;
use crate::tensor::Tensor;

type Result<T, E = GgufError> = std::result::Result<T, E>;

const MAGIC: [u8; 4] = *b"GGUF";
const VERSION: u32 = 3;
/// Alignment of tensor data in bytes, `GGUF_DEFAULT_ALIGNMENT`: what a reader assumes if
/// `general.alignment` is absent, as it is in the files written here.
const ALIGNMENT: u64 = 32;
/// Bytes of a string that is read: more than any tokenizer has, and little enough that a damaged
/// file cannot exhaust memory.
const MAX_STRING: u64 = 1 << 24;
/// Elements of an array that is read. The largest vocabularies have under 300 thousand tokens,
/// their merge lists under a million.
const MAX_ARRAY: u64 = 1 << 24;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `uint8`.
    U8(u8),
    /// `int8`.
    I8(i8),
    /// `uint16`.
    U16(u16),
    /// `int16`.
    I16(i16),
    /// `uint32`.
    U32(u32),
    /// `int32`.
    I32(i32),
    /// `float32`.
    F32(f32),
    /// `bool`, one byte.
    Bool(bool),
    /// Bytes. Tokens need not be UTF-8.
    String(Vec<u8>),
    /// Elements of one `gguf_type`, which an empty array has too.
    Array(u32, Vec<Value>),
    /// `uint64`.
    U64(u64),
    /// `int64`.
    I64(i64),
    /// `float64`.
    F64(f64),
}

impl Value {
    const ARRAY: u32 = 9;

    /// The value's `gguf_type`.
    fn kind(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::String(_) => 8,
            Value::Array(..) => Value::ARRAY,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
        }
    }

    fn read(kind: u32, from: &mut impl Read) -> Result<Value> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(bytes(from)?)),
            1 => Value::I8(i8::from_le_bytes(bytes(from)?)),
            2 => Value::U16(u16::from_le_bytes(bytes(from)?)),
            3 => Value::I16(i16::from_le_bytes(bytes(from)?)),
            4 => Value::U32(u32::from_le_bytes(bytes(from)?)),
            5 => Value::I32(i32::from_le_bytes(bytes(from)?)),
            6 => Value::F32(f32::from_le_bytes(bytes(from)?)),
            7 => Value::Bool(bytes::<1>(from)?[0] != 0),
            8 => Value::String(read_string(from)?),
            Value::ARRAY => {
                let element = u32::from_le_bytes(bytes(from)?);
                // A damaged file must not make this recurse without end.
                if element == Value::ARRAY {
                    return Err(GgufError::NestedArray);
                }
                let len = u64::from_le_bytes(bytes(from)?);
                if len > MAX_ARRAY {
                    return Err(GgufError::ArrayLength {
                        len,
                        most: MAX_ARRAY,
                    });
                }
                let items = (0..len)
                    .map(|_| Value::read(element, from))
                    .collect::<Result<_>>()?;
                Value::Array(element, items)
            }
            10 => Value::U64(u64::from_le_bytes(bytes(from)?)),
            11 => Value::I64(i64::from_le_bytes(bytes(from)?)),
            12 => Value::F64(f64::from_le_bytes(bytes(from)?)),
            kind => return Err(GgufError::ValueType { kind }),
        })
    }

    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Value::U8(v) => to.extend(v.to_le_bytes()),
            Value::I8(v) => to.extend(v.to_le_bytes()),
            Value::U16(v) => to.extend(v.to_le_bytes()),
            Value::I16(v) => to.extend(v.to_le_bytes()),
            Value::U32(v) => to.extend(v.to_le_bytes()),
            Value::I32(v) => to.extend(v.to_le_bytes()),
            Value::F32(v) => to.extend(v.to_le_bytes()),
            Value::Bool(v) => to.push(u8::from(*v)),
            Value::String(v) => write_string(v, to),
            Value::Array(element, items) => {
                to.extend(element.to_le_bytes());
                to.extend((items.len() as u64).to_le_bytes());
                items.iter().for_each(|item| item.write(to))
            }
            Value::U64(v) => to.extend(v.to_le_bytes()),
            Value::I64(v) => to.extend(v.to_le_bytes()),
            Value::F64(v) => to.extend(v.to_le_bytes()),
        }
    }
}

impl From<&str> for Value {
    fn from(v: &str) -> Self {
        Value::String(v.as_bytes().to_vec())
    }
}

impl From<u32> for Value {
    fn from(v: u32) -> Self {
        Value::U32(v)
    }
}

impl From<f32> for Value {
    fn from(v: f32) -> Self {
        Value::F32(v)
    }
}

/// Key/value metadata in file order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(Vec<(String, Value)>);

impl Metadata {
    /// Reads the metadata of a GGUF file, from its start. The tensors are not read.
    ///
    /// # Errors
    ///
    /// If the file is damaged, is no GGUF file of version 2 or 3, or cannot be read.
    pub fn read(from: &mut impl Read) -> Result<Metadata> {
        let magic = bytes(from)?;
        if magic != MAGIC {
            return Err(GgufError::Magic { magic });
        }
        let version = u32::from_le_bytes(bytes(from)?);
        // Version 3 adds big-endian files to version 2 and changes nothing else.
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version { version });
        }
        let _tensors = u64::from_le_bytes(bytes(from)?);
        let entries = u64::from_le_bytes(bytes(from)?);
        (0..entries)
            .map(|index| {
                let key = String::from_utf8(read_string(from)?).map_err(|error| {
                    let key = error.into_bytes();
                    GgufError::Key { index, key }
                })?;
                let kind = u32::from_le_bytes(bytes(from)?);
                match Value::read(kind, from) {
                    Ok(value) => Ok((key, value)),
                    Err(error) => {
                        let error = Box::new(error);
                        Err(GgufError::Entry { index, key, error })
                    }
                }
            })
            .collect::<Result<_>>()
            .map(Metadata)
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// Sets `key`, in place if it is already there.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let (key, value) = (key.into(), value.into());
        match self.0.iter_mut().find(|(k, _)| *k == key) {
            Some((_, slot)) => *slot = value,
            None => self.0.push((key, value)),
        }
    }

    /// The entries whose key starts with `prefix`.
    pub fn with_prefix(&self, prefix: &str) -> Metadata {
        Metadata(
            self.0
                .iter()
                .filter(|(k, _)| k.starts_with(prefix))
                .cloned()
                .collect(),
        )
    }

    /// Sets all entries of `other`.
    pub fn extend(&mut self, other: Metadata) {
        for (key, value) in other.0 {
            self.set(key, value);
        }
    }
}

/// The parts of a file. Offsets are in bytes from the start of the file.
#[derive(Debug)]
pub struct FileLayout {
    /// Header, metadata and tensor table, padded up to the tensor data.
    pub head: Vec<u8>,
    /// Offset of each tensor's data, in the order of the table.
    pub offsets: Vec<u64>,
    /// Bytes of the whole file.
    pub len: u64,
}

/// Lays a file out: its head as bytes, and the offset of each tensor's data.
///
/// # Errors
///
/// If the rows of a tensor are no whole number of blocks, or the tensors are too large for a file.
pub fn lay_out(metadata: &Metadata, tensors: &[Tensor]) -> Result<FileLayout> {
    let mut head = Vec::new();
    head.extend(MAGIC);
    head.extend(VERSION.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((metadata.0.len() as u64).to_le_bytes());
    for (key, value) in &metadata.0 {
        write_string(key.as_bytes(), &mut head);
        head.extend(value.kind().to_le_bytes());
        value.write(&mut head);
    }

    // Offsets in the table count from the start of the data, which follows the table.
    let mut relative = Vec::with_capacity(tensors.len());
    let mut data_len = 0u64;
    for tensor in tensors {
        let row = tensor.dims.first().copied().unwrap_or(0);
        if row == 0 || !row.is_multiple_of(tensor.kind.block_len()) {
            return Err(GgufError::Row {
                name: tensor.name.clone(),
                row,
                kind: tensor.kind,
            });
        }
        write_string(tensor.name.as_bytes(), &mut head);
        head.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor
            .dims
            .iter()
            .for_each(|dim| head.extend(dim.to_le_bytes()));
        head.extend(tensor.kind.id().to_le_bytes());
        head.extend(data_len.to_le_bytes());
        relative.push(data_len);
        data_len = tensor
            .checked_bytes()
            .and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT))
            .and_then(|bytes| data_len.checked_add(bytes))
            .ok_or_else(|| GgufError::TensorSize {
                name: tensor.name.clone(),
                dims: tensor.dims.clone(),
            })?;
    }

    head.resize((head.len() as u64).next_multiple_of(ALIGNMENT) as usize, 0);
    let start = head.len() as u64;
    Ok(FileLayout {
        head,
        len: start.checked_add(data_len).ok_or(GgufError::FileSize)?,
        offsets: relative.into_iter().map(|offset| start + offset).collect(),
    })
}

fn bytes<const N: usize>(from: &mut impl Read) -> Result<[u8; N]> {
    let mut buffer = [0; N];
    from.read_exact(&mut buffer).map_err(GgufError::Read)?;
    Ok(buffer)
}

fn read_string(from: &mut impl Read) -> Result<Vec<u8>> {
    let len = u64::from_le_bytes(bytes(from)?);
    if len > MAX_STRING {
        return Err(GgufError::StringLength {
            len,
            most: MAX_STRING,
        });
    }
    let mut string = vec![0; len as usize];
    from.read_exact(&mut string).map_err(GgufError::Read)?;
    Ok(string)
}

fn write_string(string: &[u8], to: &mut Vec<u8>) {
    to.extend((string.len() as u64).to_le_bytes());
    to.extend(string);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::TensorType;

    fn every_value() -> Metadata {
        let mut metadata = Metadata::default();
        metadata.set("general.architecture", "llama");
        metadata.set("u8", Value::U8(200));
        metadata.set("i8", Value::I8(-7));
        metadata.set("u16", Value::U16(60_000));
        metadata.set("i16", Value::I16(-30_000));
        metadata.set("u32", 4_000_000_000u32);
        metadata.set("i32", Value::I32(-2_000_000_000));
        metadata.set("f32", 1e-5f32);
        metadata.set("bool", Value::Bool(true));
        metadata.set("u64", Value::U64(u64::MAX));
        metadata.set("i64", Value::I64(i64::MIN));
        metadata.set("f64", Value::F64(0.1));
        // Tokens are bytes, not text.
        metadata.set(
            "tokens",
            Value::Array(8, vec![Value::String(vec![0xff, 0]), "b".into()]),
        );
        metadata.set("empty", Value::Array(6, vec![]));
        metadata
    }

    #[test]
    fn metadata_survives_a_round_trip() {
        let written = lay_out(&every_value(), &[]).unwrap();
        let read = Metadata::read(&mut written.head.as_slice()).unwrap();
        assert_eq!(read, every_value());
    }

    #[test]
    fn truncated_file_is_an_error_at_every_length() {
        let head = lay_out(&every_value(), &[]).unwrap().head;
        let end = head.len() - ALIGNMENT as usize;
        for len in 0..end {
            assert!(
                Metadata::read(&mut &head[..len]).is_err(),
                "accepted {len} bytes"
            );
        }
    }

    #[test]
    fn excessive_lengths_are_refused_before_allocation() {
        let mut head = lay_out(&Metadata::default(), &[]).unwrap().head;
        head.truncate(16);
        head.extend(1u64.to_le_bytes()); // one entry
        head.extend(u64::MAX.to_le_bytes()); // whose key has this length
        let error = Metadata::read(&mut head.as_slice()).unwrap_err();
        assert!(
            error.to_string().contains("18446744073709551615"),
            "{error:#}"
        );
    }

    #[test]
    fn tensors_are_aligned_and_do_not_overlap() {
        let tensor = |name: &str, dims: &[u64], kind| Tensor {
            name: name.into(),
            dims: dims.to_vec(),
            kind,
        };
        let tensors = [
            tensor("norm", &[7], TensorType::F32),
            tensor("half", &[5, 3], TensorType::F16),
            tensor("q4", &[256, 3], TensorType::Q4K),
            tensor("q6", &[512, 1], TensorType::Q6K),
        ];
        let layout = lay_out(&every_value(), &tensors).unwrap();
        let mut end = layout.head.len() as u64;
        for (tensor, &offset) in tensors.iter().zip(&layout.offsets) {
            assert_eq!(offset % ALIGNMENT, 0, "{}", tensor.name);
            assert!(
                offset >= end,
                "{} starts before the previous one ends",
                tensor.name
            );
            end = offset + tensor.bytes();
        }
        assert_eq!(tensors.map(|t| t.bytes()), [28, 30, 432, 420]);
        assert!(layout.len >= end && layout.len < end + ALIGNMENT);
    }

    #[test]
    fn row_of_a_partial_block_is_refused() {
        let tensor = Tensor {
            name: "bad".into(),
            dims: vec![128, 2],
            kind: TensorType::Q4K,
        };
        let error = lay_out(&Metadata::default(), &[tensor])
            .unwrap_err()
            .to_string();
        assert!(error.contains("bad") && error.contains("128"), "{error}");
    }

    #[test]
    fn set_replaces_values_and_prefix_selects_keys() {
        let mut metadata = every_value();
        metadata.set("u32", 5u32);
        assert_eq!(metadata.get("u32"), Some(&Value::U32(5)));
        assert_eq!(metadata.with_prefix("general.").0.len(), 1);
        assert_eq!(metadata.0.len(), every_value().0.len());
    }
}
