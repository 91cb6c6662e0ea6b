//! Payload bytes that another process may be writing.
//!
//! The peer can change a window at any time. A `&[u8]` into a window would assert to the compiler
//! that nobody does. [`Bytes`] and [`BytesMut`] are a pointer, a length and a lifetime instead. The
//! crate copies their contents in or out and never interprets them in place.

use std::marker::PhantomData;

/// Readable bytes, valid for `'a`. The bytes may change during a read.
#[derive(Debug, Clone, Copy)]
pub struct Bytes<'a> {
    ptr: *const u8,
    len: usize,
    /// Whether the bytes may lie in device memory, which is not cached.
    is_device: bool,
    _memory: PhantomData<&'a [u8]>,
}

/// Writable bytes, valid for `'a`. The bytes may change during a write.
#[derive(Debug)]
pub struct BytesMut<'a> {
    ptr: *mut u8,
    len: usize,
    _memory: PhantomData<&'a mut [u8]>,
}

/// Memory of this process that stays mapped at one address: a device that has registered the memory
/// can copy from and to it by DMA.
///
/// # Safety
///
/// Until the value is dropped, the [`size`](Mapped::size) bytes at [`as_ptr`](Mapped::as_ptr) are
/// mapped and writable, and both functions return the same.
pub unsafe trait Mapped: Send + Sync + 'static {
    /// The address of the first byte.
    fn as_ptr(&self) -> *mut u8;

    /// The number of bytes.
    fn size(&self) -> usize;
}

impl<'a> Bytes<'a> {
    /// The `len` bytes at `ptr`.
    ///
    /// # Safety
    ///
    /// `ptr..ptr + len` must be mapped and readable for `'a`. Other threads or processes may write
    /// it.
    pub unsafe fn from_raw(ptr: *const u8, len: usize) -> Bytes<'a> {
        Bytes {
            ptr,
            len,
            is_device: false,
            _memory: PhantomData,
        }
    }

    /// The same bytes, marked as device memory. A copy then uses streaming loads, which fetch a
    /// cache line at a time. An ordinary load of device memory costs a bus transfer each.
    #[must_use]
    pub fn from_device(self) -> Bytes<'a> {
        Bytes {
            is_device: true,
            ..self
        }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the number of bytes is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the bytes, for a copy by other means, such as a device's copy engine.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Copies the bytes to `out`. The call reads each byte once.
    ///
    /// # Panics
    ///
    /// If the length of `out` differs.
    pub fn copy_to(&self, out: &mut [u8]) {
        assert_eq!(self.len, out.len(), "copy between different lengths");
        // SAFETY: the assertion has checked that `out` has `len` bytes, and `out` is an exclusive
        // borrow.
        unsafe { self.copy(out.as_mut_ptr()) }
    }

    /// Copies the bytes to `to`.
    ///
    /// # Safety
    ///
    /// `to..to + len` must be mapped and writable.
    unsafe fn copy(&self, to: *mut u8) {
        #[cfg(target_arch = "x86_64")]
        if self.is_device && std::arch::is_x86_feature_detected!("sse4.1") {
            // SAFETY: the contract of `from_raw` covers the source and that of this function the
            // target. The condition has checked for the instructions. Device memory does not
            // overlap process memory.
            return unsafe { device::copy_streaming(self.ptr, to, self.len) };
        }
        #[cfg(target_arch = "x86_64")]
        if wide::WORTH_IT.contains(&self.len)
            && self.ptr.addr().abs_diff(to.addr()) >= self.len
            && std::arch::is_x86_feature_detected!("avx")
        {
            // SAFETY: the contract of `from_raw` covers the source and that of this function the
            // target. The condition has checked that they do not overlap, and for the instructions.
            return unsafe { wide::copy(self.ptr, to, self.len) };
        }
        // SAFETY: the contract of `from_raw` covers the source and that of this function the
        // target.
        unsafe { copy_once(self.ptr, to, self.len) }
    }

    /// The first `mid` bytes and the rest.
    ///
    /// # Panics
    ///
    /// If `mid` is greater than the number of bytes.
    pub fn split_at(self, mid: usize) -> (Bytes<'a>, Bytes<'a>) {
        assert!(mid <= self.len, "split at {mid} of {} bytes", self.len);
        // SAFETY: the assertion has checked that both parts lie inside the bytes of `self`.
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
        // SAFETY: a slice is mapped and readable for its lifetime.
        unsafe { Bytes::from_raw(slice.as_ptr(), slice.len()) }
    }
}

impl<'a> BytesMut<'a> {
    /// The `len` bytes at `ptr`.
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

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the number of bytes is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the bytes, for a copy by other means, such as a device's copy engine.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }

    /// Copies `data` into the bytes. The call writes each byte once.
    ///
    /// # Panics
    ///
    /// If the length of `data` differs.
    pub fn copy_from(&mut self, data: Bytes<'_>) {
        assert_eq!(self.len, data.len(), "copy between different lengths");
        // SAFETY: the contract of `from_raw` covers `len` writable bytes, and the assertion has
        // checked that `data` has as many.
        unsafe { data.copy(self.ptr) }
    }

    /// The same bytes, for a shorter lifetime.
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
    /// If `mid` is greater than the number of bytes.
    pub fn split_at(self, mid: usize) -> (BytesMut<'a>, BytesMut<'a>) {
        assert!(mid <= self.len, "split at {mid} of {} bytes", self.len);
        // SAFETY: the assertion has checked that both parts lie inside the bytes of `self`, and the
        // parts do not overlap.
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
        // SAFETY: bytes that are writable for 'a are readable for 'a.
        unsafe { Bytes::from_raw(bytes.ptr, bytes.len) }
    }
}

impl<'a> From<&'a mut [u8]> for BytesMut<'a> {
    fn from(slice: &'a mut [u8]) -> BytesMut<'a> {
        // SAFETY: an exclusive slice is writable for its lifetime, and the borrow lasts as long.
        unsafe { BytesMut::from_raw(slice.as_mut_ptr(), slice.len()) }
    }
}

/// Copies bytes that may change during the copy. The function is never inlined: the compiler must
/// not see the source of the copy, or it could read the source a second time in place of the copy.
///
/// # Safety
///
/// `len` bytes must be readable at `from` and writable at `to`. The two ranges may overlap. Other
/// threads and processes may access both.
#[inline(never)]
unsafe fn copy_once(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller promises what `copy` requires.
    unsafe { std::ptr::copy(from, to, len) }
}

/// Copies of moderate size with vector instructions.
///
/// The C library uses `rep movsb` for these sizes on processors that report fast `rep movsb`
/// (ERMS). Zen processors are slow at it when the target's offset within its page is slightly
/// greater than the source's, as between a mapped buffer, at a page boundary, and a large block of
/// `malloc`, 16 bytes behind one.
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_storeu_si256};
    use std::ops::RangeInclusive;

    /// The sizes for which this copy is faster, in bytes. Larger copies do not fit the caches, and
    /// the C library then uses non-temporal stores.
    pub(super) const WORTH_IT: RangeInclusive<usize> = (4 << 10)..=(4 << 20);

    /// The number of bytes per iteration.
    const STEP: usize = 128;

    /// The same as `copy_once`.
    ///
    /// # Safety
    ///
    /// As for `copy_once`, without overlap; the processor must have AVX.
    #[target_feature(enable = "avx")]
    #[inline(never)]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let steps = len / STEP;
        // SAFETY: all offsets are below `len`, and the caller guarantees `len` bytes on both sides.
        // The instructions need no alignment.
        unsafe {
            for at in (0..steps * STEP).step_by(STEP) {
                let source = from.add(at).cast::<__m256i>();
                let target = to.add(at).cast::<__m256i>();
                // No closures: a function between this one and the instructions need not have AVX.
                let first = _mm256_loadu_si256(source);
                let second = _mm256_loadu_si256(source.add(1));
                let third = _mm256_loadu_si256(source.add(2));
                let fourth = _mm256_loadu_si256(source.add(3));
                _mm256_storeu_si256(target, first);
                _mm256_storeu_si256(target.add(1), second);
                _mm256_storeu_si256(target.add(2), third);
                _mm256_storeu_si256(target.add(3), fourth);
            }
            let done = steps * STEP;
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod device {
    use std::arch::x86_64::{__m128i, _mm_mfence, _mm_storeu_si128, _mm_stream_load_si128};

    /// The size of a cache line, in bytes. Four streaming loads fetch one line.
    const LINE: usize = 64;

    /// The same as `copy_once`, from uncached memory: the streaming loads of one line share one bus
    /// transfer.
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
        // Streaming loads are weakly ordered. This fence orders them after the load of the cursor
        // that published the bytes.
        _mm_mfence();
        // SAFETY: the three parts together are the `len` bytes that the caller guarantees. `from +
        // head` is aligned to a line, so each streaming load is aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            let (from_lines, to_lines) = (from.add(head), to.add(head));
            for at in (0..lines * LINE).step_by(LINE) {
                let line = from_lines.add(at).cast::<__m128i>();
                let out = to_lines.add(at).cast::<__m128i>();
                // No closures, as in `wide`.
                let first = _mm_stream_load_si128(line);
                let second = _mm_stream_load_si128(line.add(1));
                let third = _mm_stream_load_si128(line.add(2));
                let fourth = _mm_stream_load_si128(line.add(3));
                _mm_storeu_si128(out, first);
                _mm_storeu_si128(out.add(1), second);
                _mm_storeu_si128(out.add(2), third);
                _mm_storeu_si128(out.add(3), fourth);
            }
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
        }
        // This fence orders the loads before the store of the cursor that releases the bytes.
        _mm_mfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_all_sizes_and_alignments_are_exact() {
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
            // SAFETY: both ranges lie in `memory`, which nothing else accesses before the
            // assertion.
            unsafe {
                let source = Bytes::from_raw(base.add(from), 8192);
                BytesMut::from_raw(base.add(to), 8192).copy_from(source);
            }
            assert_eq!(memory[to..to + 8192], expected, "{from} to {to}");
        }
    }

    #[test]
    fn a_copy_from_device_memory_is_exact() {
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
