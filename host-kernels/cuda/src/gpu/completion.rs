//! Waiting for the GPU by polling host memory.
//!
//! Behind the work to wait for, the GPU writes a number to a word of host memory
//! (`cuStreamWriteValue32`). The host polls the word for about as long as a decode step lasts,
//! which is a fraction of the time of a driver call, and then sleeps in the driver. After an error
//! the GPU does not reach the write, and the driver call reports the error.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};

use crate::device::MappedHostMemory;

use vgpu_transport::lock::lock;

/// How long the host polls: about the time slice of long plans (`LaunchPolicy::time_slice`), twice.
const POLL_TIME: Duration = Duration::from_millis(3);

/// Polls between two looks at the clock.
const POLLS: u32 = 64;

/// A word of host memory that the GPU counts up.
pub(super) struct Completion {
    word: MappedHostMemory,
    /// The last number that the GPU was asked to write. The lock keeps numbers in stream order.
    last: Mutex<u32>,
}

impl Completion {
    /// Takes a word of mapped host memory that is 0. `None` if the GPU does not write there.
    ///
    /// # Safety
    /// The context of `stream` and `word` is current to the calling thread, and `word` stays mapped
    /// while the result is used.
    pub(super) unsafe fn new(word: MappedHostMemory, stream: sys::CUstream) -> Option<Completion> {
        let completion = Completion {
            word,
            last: Mutex::new(0),
        };
        // SAFETY: `request` has the same contract as this function; the stream is of the context
        // that is current.
        unsafe {
            let number = completion.request(stream).ok()?;
            let code = sys::cuStreamSynchronize(stream);
            (code == CUresult::CUDA_SUCCESS && completion.has_reached(number)).then_some(completion)
        }
    }

    /// Polls for all work that the stream was asked for. `false` if the work takes longer than
    /// [`POLL_TIME`], or an error ends it.
    ///
    /// # Safety
    /// As for [`Completion::new`].
    pub(super) unsafe fn wait(&self, stream: sys::CUstream) -> bool {
        // SAFETY: the caller guarantees that the context of `stream`, which is also that of
        // `self.word`, is current, and that `self.word` is mapped.
        match unsafe { self.request(stream) } {
            Ok(number) => poll(|| self.has_reached(number), POLL_TIME),
            Err(_) => false,
        }
    }

    /// Asks the GPU to write the next number, in stream order. Returns the number.
    ///
    /// # Errors
    /// The code of the driver, if it refuses the write.
    ///
    /// # Safety
    /// As for [`Completion::new`].
    unsafe fn request(&self, stream: sys::CUstream) -> Result<u32, CUresult> {
        let mut last = lock(&self.last);
        let next = last.wrapping_add(1);
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: `stream` is of the current context and `self.word.device` is the device address
        // of a mapped word. The caller guarantees both.
        let code = unsafe { sys::cuStreamWriteValue32_v2(stream, self.word.device, next, flags) };
        if code != CUresult::CUDA_SUCCESS {
            return Err(code);
        }
        *last = next;
        Ok(next)
    }

    fn has_reached(&self, number: u32) -> bool {
        // SAFETY: the word is 4 bytes at the start of a page, mapped while this object is used. The
        // host never writes to it.
        let word = unsafe { AtomicU32::from_ptr(self.word.host.cast()) };
        // Acquire pairs with the GPU's write, which CU_STREAM_WRITE_VALUE_DEFAULT puts behind a
        // memory barrier: what the GPU wrote to host memory before is visible after this load.
        is_at_or_after(word.load(Ordering::Acquire), number)
    }
}

/// Whether a counter that wraps around has reached `number`.
fn is_at_or_after(count: u32, number: u32) -> bool {
    count.wrapping_sub(number) < 1 << 31
}

/// Polls a condition for about `limit`.
fn poll(is_true: impl Fn() -> bool, limit: Duration) -> bool {
    let began = Instant::now();
    loop {
        for _ in 0..POLLS {
            if is_true() {
                return true;
            }
            std::hint::spin_loop();
        }
        if began.elapsed() >= limit {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_wrap_around() {
        for number in [0, 1, 1 << 31, u32::MAX] {
            assert!(is_at_or_after(number, number));
            assert!(is_at_or_after(number.wrapping_add(5), number));
            assert!(!is_at_or_after(number.wrapping_sub(1), number));
        }
    }

    #[test]
    fn polling_ends_on_success_and_at_the_limit() {
        let word = AtomicU32::new(0);
        let is_set = || word.load(Ordering::Acquire) == 1;
        assert!(!poll(is_set, Duration::from_millis(1)));
        std::thread::scope(|scope| {
            scope.spawn(|| word.store(1, Ordering::Release));
            assert!(poll(is_set, Duration::from_secs(3600)));
        });
    }
}
