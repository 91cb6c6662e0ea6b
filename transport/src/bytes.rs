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
    /// Whether they may lie in a device's memory: not cached.
    is_device: bool,
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
            is_device: false,
            _memory: PhantomData,
        }
    }

    /// The same bytes, known to lie in memory that may be a device's: they are copied by loads that take a cache
    /// line at a time, where ordinary ones would take a bus transfer each.
    #[must_use]
    pub fn from_device(self) -> Bytes<'a> {
        Bytes {
            is_device: true,
            ..self
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
        unsafe { self.copy(out.as_mut_ptr()) }
    }

    /// Copies them to `to`.
    ///
    /// # Safety
    ///
    /// As many bytes must be writable at `to`.
    unsafe fn copy(&self, to: *mut u8) {
        #[cfg(target_arch = "x86_64")]
        if self.is_device && std::arch::is_x86_feature_detected!("sse4.1") {
            // SAFETY: from_raw's caller vouches for the source, ours for the target, and the processor has the
            // instructions.
            return unsafe { device::copy_streaming(self.ptr, to, self.len) };
        }
        #[cfg(target_arch = "x86_64")]
        if wide::WORTH_IT.contains(&self.len)
            && self.ptr.addr().abs_diff(to.addr()) >= self.len
            && std::arch::is_x86_feature_detected!("avx")
        {
            // SAFETY: from_raw's caller vouches for the source, ours for the target; they do not overlap, and the
            // processor has the instructions.
            return unsafe { wide::copy(self.ptr, to, self.len) };
        }
        // SAFETY: from_raw's caller vouches for the source, ours for the target.
        unsafe { copy_once(self.ptr, to, self.len) }
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
            let (mut a, mut b) = (
                Bytes::from_raw(self.ptr, mid),
                Bytes::from_raw(self.ptr.add(mid), self.len - mid),
            );
            (a.is_device, b.is_device) = (self.is_device, self.is_device);
            (a, b)
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
        unsafe { data.copy(self.ptr) }
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

/// Copies of moderate size by vector instructions.
///
/// The C library copies these with `rep movsb` where the processor claims to be good at that. Zen processors are not
/// when target and source start at nearly the same place in their pages, the target a little later; so it is
/// between a mapped buffer (which starts with a page) and large memory of `malloc` (which starts 16 bytes into one).
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_storeu_si256};
    use std::ops::RangeInclusive;

    /// Bytes for which this is the faster way. Larger copies do not fit the caches, and the C library goes around them.
    pub(super) const WORTH_IT: RangeInclusive<usize> = (4 << 10)..=(4 << 20);

    /// Bytes of a turn.
    const TURN: usize = 128;

    /// Like `copy_once`.
    ///
    /// # Safety
    ///
    /// As for `copy_once`, without overlap; the processor must have AVX.
    #[target_feature(enable = "avx")]
    #[inline(never)]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let turns = len / TURN;
        // SAFETY: all offsets lie in the bytes that the caller vouches for; the instructions need no alignment.
        unsafe {
            for at in (0..turns * TURN).step_by(TURN) {
                let source = from.add(at).cast::<__m256i>();
                let target = to.add(at).cast::<__m256i>();
                let parts = [0, 1, 2, 3].map(|i| _mm256_loadu_si256(source.add(i)));
                for (i, part) in parts.into_iter().enumerate() {
                    _mm256_storeu_si256(target.add(i), part);
                }
            }
            let done = turns * TURN;
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod device {
    use std::arch::x86_64::{__m128i, _mm_mfence, _mm_storeu_si128, _mm_stream_load_si128};

    /// Bytes of a cache line, and of the four loads that together fetch one.
    const LINE: usize = 64;

    /// Like `copy_once`, from memory that is not cached: the streaming loads of one line share one bus transfer.
    ///
    /// # Safety
    ///
    /// As for `copy_once`, without overlap; the processor must have SSE4.1.
    #[target_feature(enable = "sse4.1")]
    #[inline(never)]
    pub(super) unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
        let head = from.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let done = head + lines * LINE;
        // Streaming loads are weakly ordered: not before what told us that there is something to read.
        _mm_mfence();
        // SAFETY: all three parts lie in the bytes that the caller vouches for; `from + head` is aligned to a line where
        // there is one, so each streaming load is aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            let (from_lines, to_lines) = (from.add(head), to.add(head));
            for at in (0..lines * LINE).step_by(LINE) {
                let line = from_lines.add(at).cast::<__m128i>();
                let parts = [0, 1, 2, 3].map(|i| _mm_stream_load_si128(line.add(i)));
                let out = to_lines.add(at).cast::<__m128i>();
                for (i, part) in parts.into_iter().enumerate() {
                    _mm_storeu_si128(out.add(i), part);
                }
            }
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
        }
        // And none of them after what tells the peer that we have read it.
        _mm_mfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_all_sizes_and_places_are_copies() {
        let source: Vec<u8> = (0..9000u32).map(|i| (i * 31 % 251) as u8).collect();
        for len in [0, 1, 127, 4095, 4096, 4097, 4223, 4224, 8191] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (16, 3), (63, 64)] {
                let mut out = vec![0xee; len + 128];
                Bytes::from(&source[from..from + len]).copy_to(&mut out[to..to + len]);
                assert_eq!(out[to..to + len], source[from..from + len], "{len} bytes");
                let around = out[..to].iter().chain(&out[to + len..]);
                assert!(around.copied().all(|byte| byte == 0xee), "{len} bytes");
            }
        }
    }

    #[test]
    fn overlapping_copies_keep_every_byte() {
        for (from, to) in [(0, 100), (100, 0), (0, 0), (0, 8192)] {
            let mut memory: Vec<u8> = (0..20_000u32).map(|i| (i * 31 % 251) as u8).collect();
            let expected = memory[from..from + 8192].to_vec();
            let base = memory.as_mut_ptr();
            // SAFETY: both ranges lie in `memory`, which nobody else uses meanwhile.
            unsafe {
                let source = Bytes::from_raw(base.add(from), 8192);
                BytesMut::from_raw(base.add(to), 8192).copy_from(source);
            }
            assert_eq!(memory[to..to + 8192], expected, "{from} to {to}");
        }
    }

    #[test]
    fn a_copy_from_a_device_is_a_copy() {
        let source: Vec<u8> = (0..1000u32).map(|i| (i * 31 % 251) as u8).collect();
        for (start, len) in [
            (0, 0),
            (0, 1000),
            (1, 63),
            (3, 64),
            (5, 200),
            (63, 65),
            (64, 640),
            (7, 993),
        ] {
            let mut out = vec![0xee; len];
            Bytes::from(&source[start..start + len])
                .from_device()
                .copy_to(&mut out);
            assert_eq!(out, source[start..start + len], "{len} bytes at {start}");
        }
        let (a, b) = Bytes::from(&source[..]).from_device().split_at(10);
        assert!(a.is_device && b.is_device);
    }
}
