//! Bytes that somebody else may be writing: the only form in which payloads cross the boundary.
//!
//! A window is shared with a peer that can change it at any time, so a `&[u8]` into it would promise
//! the compiler what nobody can promise. [`Bytes`] and [`BytesMut`] are a pointer and a length with a
//! lifetime; they are copied in or out, never looked at in place.

use std::marker::PhantomData;

/// Readable bytes, valid for `'a`, possibly changing while they are read.
#[derive(Debug, Clone, Copy)]
pub struct Bytes<'a> {
    ptr: *const u8,
    len: usize,
    _memory: PhantomData<&'a [u8]>,
}

/// Writable bytes, valid for `'a`, possibly changing while they are written.
#[derive(Debug)]
pub struct BytesMut<'a> {
    ptr: *mut u8,
    len: usize,
    _memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Bytes<'a> {
    /// Bytes at `ptr`.
    ///
    /// # Safety
    ///
    /// `ptr..ptr + len` must be mapped and readable for `'a`. Other threads or processes may write it.
    pub unsafe fn from_raw(ptr: *const u8, len: usize) -> Bytes<'a> {
        Bytes {
            ptr,
            len,
            _memory: PhantomData,
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where they are, for a copy by other means (a device's copy engine).
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Copies them out, once.
    ///
    /// # Panics
    ///
    /// If `out` has another length.
    pub fn copy_to(&self, out: &mut [u8]) {
        assert_eq!(self.len, out.len(), "copy between different lengths");
        // SAFETY: from_raw's caller (or the slice in From) vouches for `len` readable bytes; `out` is
        // ours alone and has as many. A concurrent change of the source yields arbitrary bytes.
        unsafe { copy_once(self.ptr, out.as_mut_ptr(), self.len) }
    }

    /// The first `mid` bytes and the rest.
    ///
    /// # Panics
    ///
    /// If there are fewer than `mid`.
    pub fn split_at(self, mid: usize) -> (Bytes<'a>, Bytes<'a>) {
        assert!(mid <= self.len, "split at {mid} of {} bytes", self.len);
        // SAFETY: both parts lie inside the bytes this value stands for.
        unsafe {
            (
                Bytes::from_raw(self.ptr, mid),
                Bytes::from_raw(self.ptr.add(mid), self.len - mid),
            )
        }
    }
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(slice: &'a [u8]) -> Bytes<'a> {
        // SAFETY: a slice is readable for its lifetime.
        unsafe { Bytes::from_raw(slice.as_ptr(), slice.len()) }
    }
}

impl<'a> BytesMut<'a> {
    /// Bytes at `ptr`.
    ///
    /// # Safety
    ///
    /// `ptr..ptr + len` must be mapped and writable for `'a`, and no Rust reference to it may be in
    /// use. Other threads or processes may access it.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize) -> BytesMut<'a> {
        BytesMut {
            ptr,
            len,
            _memory: PhantomData,
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where they are, for a copy by other means (a device's copy engine).
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }

    /// Copies bytes in, once.
    ///
    /// # Panics
    ///
    /// If `data` has another length.
    pub fn copy_from(&mut self, data: Bytes<'_>) {
        assert_eq!(self.len, data.len(), "copy between different lengths");
        // SAFETY: both sides vouch for `len` accessible bytes.
        unsafe { copy_once(data.as_ptr(), self.ptr, self.len) }
    }

    /// The same bytes for a shorter time.
    pub fn reborrow(&mut self) -> BytesMut<'_> {
        BytesMut {
            ptr: self.ptr,
            len: self.len,
            _memory: PhantomData,
        }
    }

    /// The first `mid` bytes and the rest.
    ///
    /// # Panics
    ///
    /// If there are fewer than `mid`.
    pub fn split_at(self, mid: usize) -> (BytesMut<'a>, BytesMut<'a>) {
        assert!(mid <= self.len, "split at {mid} of {} bytes", self.len);
        // SAFETY: both parts lie inside the bytes this value stands for and do not overlap.
        unsafe {
            (
                BytesMut::from_raw(self.ptr, mid),
                BytesMut::from_raw(self.ptr.add(mid), self.len - mid),
            )
        }
    }
}

impl<'a> From<BytesMut<'a>> for Bytes<'a> {
    fn from(bytes: BytesMut<'a>) -> Bytes<'a> {
        // SAFETY: what is writable for 'a is readable for 'a.
        unsafe { Bytes::from_raw(bytes.ptr, bytes.len) }
    }
}

impl<'a> From<&'a mut [u8]> for BytesMut<'a> {
    fn from(slice: &'a mut [u8]) -> BytesMut<'a> {
        // SAFETY: a unique slice is writable for its lifetime, and borrowed for as long.
        unsafe { BytesMut::from_raw(slice.as_mut_ptr(), slice.len()) }
    }
}

/// Copies bytes that may be changing. Never inlined, so that the compiler cannot see where the copy came from and
/// read the original a second time in place of it.
///
/// # Safety
///
/// `len` bytes must be readable at `from` and writable at `to`. They may overlap (where a caller has handed out the
/// same memory twice), and others may access them.
#[inline(never)]
unsafe fn copy_once(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(from, to, len) }
}
