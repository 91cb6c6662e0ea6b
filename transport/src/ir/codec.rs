//! The encoding of the graph image: little-endian 32-bit words.
//!
//! The image is an array of words. A change of a graph is then a list of positions and words, and
//! needs no schema of its own.

use crate::size::shown;

/// Why words cannot be decoded. The sender is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum DecodeError {
    /// The host's fault, and no fault of the image.
    #[error("the host has no memory for {} of a graph", shown(*bytes as u64))]
    NoMemory { bytes: usize },
    #[error("the graph image of {len} words is truncated: word {wanted} was expected")]
    Truncated { len: usize, wanted: usize },
    #[error("the graph image has {extra} words behind its end")]
    Trailing { extra: usize },
    #[error("the graph image begins with {magic:#010x}, not with {expected:#010x}")]
    Magic { magic: u32, expected: u32 },
    #[error("the graph image has IR version {version}; this host supports {expected}")]
    Version { version: u32, expected: u32 },
    #[error("the graph image announces {count} {what}, more than its {len} words can hold")]
    Count {
        what: &'static str,
        count: u32,
        len: usize,
    },
    #[error("unknown {of} id {id}")]
    UnknownKind { of: &'static str, id: u32 },
    #[error("node {node}: {sources} sources, but {op} takes {min} to {max}")]
    Sources {
        node: usize,
        op: &'static str,
        sources: usize,
        min: usize,
        max: usize,
    },
    #[error("{what} index {index} is out of range, there are {count}")]
    Index {
        what: &'static str,
        index: u32,
        count: usize,
    },
    #[error("a flag has the value {value}, not 0 or 1")]
    Flag { value: u32 },
    #[error(
        "a patch writes {count} words at {position} of an image of {len} words, and {words} words \
         of the patch are left"
    )]
    Patch {
        position: usize,
        count: usize,
        words: usize,
        len: usize,
    },
}

/// An empty vector with room for `count` entries.
///
/// # Errors
///
/// [`DecodeError::NoMemory`].
pub(super) fn room<T>(count: usize) -> Result<Vec<T>, DecodeError> {
    let mut entries = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    let reserved = entries.try_reserve_exact(count);
    reserved.map_err(|_| DecodeError::NoMemory { bytes })?;
    Ok(entries)
}

/// A value that has an encoding in words.
pub(super) trait Word: Sized {
    fn put(&self, out: &mut Writer);
    fn get(words: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

/// An encoder.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub(super) words: Vec<u32>,
}

impl Writer {
    pub(super) fn u32(&mut self, value: u32) {
        self.words.push(value);
    }
}

/// A decoder that does not read behind the end.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    words: &'a [u32],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(words: &'a [u32]) -> Reader<'a> {
        Reader { words, at: 0 }
    }

    pub(super) fn u32(&mut self) -> Result<u32, DecodeError> {
        let word = self.words.get(self.at).ok_or(DecodeError::Truncated {
            len: self.words.len(),
            wanted: self.at + 1,
        })?;
        self.at += 1;
        Ok(*word)
    }

    pub(super) fn remaining(&self) -> usize {
        self.words.len() - self.at
    }
}

impl Word for u32 {
    fn put(&self, out: &mut Writer) {
        out.u32(*self);
    }

    fn get(words: &mut Reader<'_>) -> Result<u32, DecodeError> {
        words.u32()
    }
}

impl Word for i32 {
    fn put(&self, out: &mut Writer) {
        out.u32(self.cast_unsigned());
    }

    fn get(words: &mut Reader<'_>) -> Result<i32, DecodeError> {
        Ok(words.u32()?.cast_signed())
    }
}

impl Word for f32 {
    fn put(&self, out: &mut Writer) {
        out.u32(self.to_bits());
    }

    fn get(words: &mut Reader<'_>) -> Result<f32, DecodeError> {
        Ok(f32::from_bits(words.u32()?))
    }
}

impl Word for bool {
    fn put(&self, out: &mut Writer) {
        out.u32(u32::from(*self));
    }

    fn get(words: &mut Reader<'_>) -> Result<bool, DecodeError> {
        match words.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(DecodeError::Flag { value }),
        }
    }
}

impl Word for u64 {
    fn put(&self, out: &mut Writer) {
        out.u32(*self as u32);
        out.u32((*self >> 32) as u32);
    }

    fn get(words: &mut Reader<'_>) -> Result<u64, DecodeError> {
        let low = words.u32()?;
        let high = words.u32()?;
        Ok(u64::from(high) << 32 | u64::from(low))
    }
}

impl<T: Word + Copy + Default, const N: usize> Word for [T; N] {
    fn put(&self, out: &mut Writer) {
        for value in self {
            value.put(out);
        }
    }

    fn get(words: &mut Reader<'_>) -> Result<[T; N], DecodeError> {
        let mut values = [T::default(); N];
        for value in &mut values {
            *value = T::get(words)?;
        }
        Ok(values)
    }
}
