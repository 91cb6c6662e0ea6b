//! The GGUF container, version 3: read the metadata of one file, write another.
//!
//! A GGUF file is a header (magic, version, two counts), key/value metadata, a table of tensors
//! and, aligned, the tensor data. Everything is little-endian; strings carry a 64-bit length and
//! no terminator; arrays carry an element type and a 64-bit count. The format is described in
//! ggml's `docs/gguf.md` and declared in its `gguf.h`; the numbers below are those of that
//! description.
//!
//! Only what the demo models need is here: all metadata types (a tokenizer is copied from another
//! file unread), and the few tensor types that [`crate::model`] can fill.

use std::io::{Read, Write};

use anyhow::{Context as _, Result, bail, ensure};

const MAGIC: [u8; 4] = *b"GGUF";
const VERSION: u32 = 3;
/// `GGUF_DEFAULT_ALIGNMENT`: what a reader assumes when `general.alignment` is absent, as it is in
/// the files written here.
const ALIGNMENT: u64 = 32;
/// More than any tokenizer's string, less than what would exhaust memory on a damaged file.
const MAX_STRING: u64 = 1 << 24;
/// The largest vocabularies have under 300 thousand tokens, their merge lists under a million.
const MAX_ARRAY: u64 = 1 << 24;

/// A metadata value; the discriminants of `gguf_type` are in `Value::kind`.
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
    /// Bytes, mostly UTF-8.
    String(Vec<u8>),
    /// Elements of one type; the type is kept apart because an array may be empty.
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
                ensure!(
                    element != Value::ARRAY,
                    "an array of arrays is not a GGUF value"
                );
                let count = u64::from_le_bytes(bytes(from)?);
                ensure!(
                    count <= MAX_ARRAY,
                    "an array of {count} elements; at most {MAX_ARRAY}"
                );
                let items = (0..count)
                    .map(|_| Value::read(element, from))
                    .collect::<Result<_>>()?;
                Value::Array(element, items)
            }
            10 => Value::U64(u64::from_le_bytes(bytes(from)?)),
            11 => Value::I64(i64::from_le_bytes(bytes(from)?)),
            12 => Value::F64(f64::from_le_bytes(bytes(from)?)),
            other => bail!("{other} is not a GGUF value type"),
        })
    }

    fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        match self {
            Value::U8(v) => to.write_all(&v.to_le_bytes()),
            Value::I8(v) => to.write_all(&v.to_le_bytes()),
            Value::U16(v) => to.write_all(&v.to_le_bytes()),
            Value::I16(v) => to.write_all(&v.to_le_bytes()),
            Value::U32(v) => to.write_all(&v.to_le_bytes()),
            Value::I32(v) => to.write_all(&v.to_le_bytes()),
            Value::F32(v) => to.write_all(&v.to_le_bytes()),
            Value::Bool(v) => to.write_all(&[u8::from(*v)]),
            Value::String(v) => write_string(v, to),
            Value::Array(element, items) => {
                to.write_all(&element.to_le_bytes())?;
                to.write_all(&(items.len() as u64).to_le_bytes())?;
                items.iter().try_for_each(|item| item.write(to))
            }
            Value::U64(v) => to.write_all(&v.to_le_bytes()),
            Value::I64(v) => to.write_all(&v.to_le_bytes()),
            Value::F64(v) => to.write_all(&v.to_le_bytes()),
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
    /// Reads the metadata of a GGUF file and leaves its tensors alone.
    pub fn read(from: &mut impl Read) -> Result<Metadata> {
        let magic = bytes(from)?;
        ensure!(
            magic == MAGIC,
            "not a GGUF file: it starts with {magic:02x?}"
        );
        let version = u32::from_le_bytes(bytes(from)?);
        // Version 2 differs from 3 only in permitting big-endian files to be recognised.
        ensure!(
            (2..=3).contains(&version),
            "GGUF version {version}; 2 and 3 are understood"
        );
        let _tensors = u64::from_le_bytes(bytes(from)?);
        let entries = u64::from_le_bytes(bytes(from)?);
        (0..entries)
            .map(|i| {
                let key = String::from_utf8(read_string(from)?).context("a key is not UTF-8")?;
                let kind = u32::from_le_bytes(bytes(from)?);
                let value = Value::read(kind, from)
                    .with_context(|| format!("metadata entry {i}, key {key:?}"))?;
                Ok((key, value))
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

    /// Appends all entries of `other`.
    pub fn extend(&mut self, other: Metadata) {
        for (key, value) in other.0 {
            self.set(key, value);
        }
    }
}

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// Blocks of 32 with 4 bits each.
    Q4_0,
    /// Blocks of 32 with 8 bits each.
    Q8_0,
    /// Super-blocks of 256 with 4 bits each.
    Q4K,
    /// Super-blocks of 256 with 6 bits each.
    Q6K,
    /// Blocks of 32 with 4 bits each that index a table.
    Iq4Nl,
    /// Blocks of 32 four-bit floats with a shared exponent.
    Mxfp4,
}

impl TensorType {
    /// The value of `ggml_type`.
    fn id(self) -> u32 {
        match self {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::Q4_0 => 2,
            TensorType::Q8_0 => 8,
            TensorType::Q4K => 12,
            TensorType::Q6K => 14,
            TensorType::Iq4Nl => 20,
            TensorType::Mxfp4 => 39,
        }
    }

    /// Numbers per block.
    pub const fn block_len(self) -> u64 {
        match self {
            TensorType::F32 | TensorType::F16 => 1,
            TensorType::Q4_0 | TensorType::Q8_0 | TensorType::Iq4Nl | TensorType::Mxfp4 => 32,
            TensorType::Q4K | TensorType::Q6K => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> u64 {
        match self {
            TensorType::F32 => 4,
            TensorType::F16 => 2,
            TensorType::Q4_0 | TensorType::Iq4Nl => 2 + 16,
            TensorType::Q8_0 => 2 + 32,
            TensorType::Mxfp4 => 1 + 16,
            TensorType::Q4K => 2 + 2 + 12 + 128,
            TensorType::Q6K => 128 + 64 + 16 + 2,
        }
    }
}

/// One row of the tensor table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The name by which a model finds it.
    pub name: String,
    /// Innermost dimension first, as ggml counts them.
    pub dims: Vec<u64>,
    /// How its numbers are stored.
    pub kind: TensorType,
}

impl Tensor {
    /// How many numbers it has.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// How many bytes its data has.
    pub fn bytes(&self) -> u64 {
        self.elements() / self.kind.block_len() * self.kind.block_bytes()
    }

    /// [`Tensor::bytes`] for dimensions that may overflow.
    fn checked_bytes(&self) -> Option<u64> {
        let elements = self
            .dims
            .iter()
            .try_fold(1u64, |all, &dim| all.checked_mul(dim))?;
        (elements / self.kind.block_len()).checked_mul(self.kind.block_bytes())
    }
}

/// Where the parts of a file lie, from its start.
#[derive(Debug)]
pub struct Layout {
    /// Header, metadata and tensor table, padded up to the tensor data.
    pub head: Vec<u8>,
    /// Offset of each tensor's data, in the order of the table.
    pub offsets: Vec<u64>,
    /// Length of the whole file.
    pub len: u64,
}

/// Lays a file out: its head as bytes, and where each tensor's data belongs.
pub fn lay_out(metadata: &Metadata, tensors: &[Tensor]) -> Result<Layout> {
    let mut head = Vec::new();
    head.extend(MAGIC);
    head.extend(VERSION.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((metadata.0.len() as u64).to_le_bytes());
    for (key, value) in &metadata.0 {
        write_string(key.as_bytes(), &mut head)?;
        head.extend(value.kind().to_le_bytes());
        value.write(&mut head)?;
    }

    // Offsets in the table count from the start of the data, which lies behind the table.
    let mut relative = Vec::with_capacity(tensors.len());
    let mut data_len = 0u64;
    for tensor in tensors {
        let row = tensor.dims.first().copied().unwrap_or(0);
        ensure!(
            row > 0 && row.is_multiple_of(tensor.kind.block_len()),
            "tensor {}: rows of {row} do not divide into {:?} blocks of {}",
            tensor.name,
            tensor.kind,
            tensor.kind.block_len(),
        );
        write_string(tensor.name.as_bytes(), &mut head)?;
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
            .with_context(|| format!("tensor {}: {:?} is too large", tensor.name, tensor.dims))?;
    }

    head.resize((head.len() as u64).next_multiple_of(ALIGNMENT) as usize, 0);
    let start = head.len() as u64;
    Ok(Layout {
        head,
        len: start
            .checked_add(data_len)
            .context("the tensors are too large for a file")?,
        offsets: relative.into_iter().map(|offset| start + offset).collect(),
    })
}

fn bytes<const N: usize>(from: &mut impl Read) -> Result<[u8; N]> {
    let mut buffer = [0; N];
    from.read_exact(&mut buffer)
        .context("the file ends too early")?;
    Ok(buffer)
}

fn read_string(from: &mut impl Read) -> Result<Vec<u8>> {
    let len = u64::from_le_bytes(bytes(from)?);
    ensure!(
        len <= MAX_STRING,
        "a string of {len} bytes; at most {MAX_STRING}"
    );
    let mut string = vec![0; len as usize];
    from.read_exact(&mut string)
        .context("the file ends inside a string")?;
    Ok(string)
}

fn write_string(string: &[u8], to: &mut impl Write) -> std::io::Result<()> {
    to.write_all(&(string.len() as u64).to_le_bytes())?;
    to.write_all(string)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_cut_file_is_an_error_at_every_length() {
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
    fn absurd_lengths_are_refused_before_memory_is_taken() {
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
    fn a_row_that_is_no_whole_number_of_blocks_is_refused() {
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
    fn set_replaces_and_prefixes_select() {
        let mut metadata = every_value();
        metadata.set("u32", 5u32);
        assert_eq!(metadata.get("u32"), Some(&Value::U32(5)));
        assert_eq!(metadata.with_prefix("general.").0.len(), 1);
        assert_eq!(metadata.0.len(), every_value().0.len());
    }
}
