//! Hearing from the GPU when it is done.
//!
//! Behind what is to be waited for, the GPU writes a number into a word of memory of this process (`cuStreamWriteValue32`). Whoever
//! waits looks at that word, which takes a fraction of what a call of the driver takes, for as long as a decode step lasts, and
//! sleeps in the driver from then on. An error never gets as far as the word: the driver then tells it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};

use crate::device::MappedHostMemory;

/// How long the word is looked at: about as long as the pieces that long graphs are cut into.
const LOOK: Duration = Duration::from_millis(3);

/// Looks between two at the clock.
const LOOKS: u32 = 64;

/// A word that the GPU counts up.
pub(crate) struct Completion {
    word: MappedHostMemory,
    /// What it was asked to write last. Numbers go to the stream in order.
    last: Mutex<u32>,
}

impl Completion {
    /// A word of memory of the device, which is 0. `None` if the GPU does not write there.
    ///
    /// # Safety
    /// The context of `stream`, and of `word`, is current, and stays for as long as this is used.
    pub(crate) unsafe fn new(word: MappedHostMemory, stream: sys::CUstream) -> Option<Completion> {
        let completion = Completion {
            word,
            last: Mutex::new(0),
        };
        // SAFETY: the caller's promise.
        unsafe {
            let number = completion.ask(stream).ok()?;
            let code = sys::cuStreamSynchronize(stream);
            (code == CUresult::CUDA_SUCCESS && completion.has_reached(number)).then_some(completion)
        }
    }

    /// Waits a while for what the stream was asked for so far. `false`: it takes longer, or does not end well.
    ///
    /// # Safety
    /// As for [`Completion::new`].
    pub(crate) unsafe fn wait(&self, stream: sys::CUstream) -> bool {
        // SAFETY: the caller's promise.
        match unsafe { self.ask(stream) } {
            Ok(number) => look(|| self.has_reached(number), LOOK),
            Err(_) => false,
        }
    }

    /// Has the GPU write the next number behind all that it was asked for. Returns the number.
    ///
    /// # Safety
    /// As for [`Completion::new`].
    unsafe fn ask(&self, stream: sys::CUstream) -> Result<u32, CUresult> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let next = last.wrapping_add(1);
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: the word is the device's for as long as the context lives.
        let code = unsafe { sys::cuStreamWriteValue32_v2(stream, self.word.device, next, flags) };
        if code != CUresult::CUDA_SUCCESS {
            return Err(code);
        }
        *last = next;
        Ok(next)
    }

    fn has_reached(&self, number: u32) -> bool {
        // SAFETY: four bytes at a multiple of four, which live as long as the device; only the GPU writes there.
        let word = unsafe { AtomicU32::from_ptr(self.word.host.cast()) };
        // What the GPU wrote before the number is seen after it.
        has_passed(word.load(Ordering::Acquire), number)
    }
}

/// Whether a count that starts again from 0 at its end has come to `number`.
fn has_passed(count: u32, number: u32) -> bool {
    count.wrapping_sub(number) < 1 << 31
}

/// Looks again and again, for about so long.
fn look(is_there: impl Fn() -> bool, patience: Duration) -> bool {
    let began = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if is_there() {
                return true;
            }
            std::hint::spin_loop();
        }
        if began.elapsed() >= patience {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_start_again_from_0() {
        for number in [0, 1, 1 << 31, u32::MAX] {
            assert!(has_passed(number, number));
            assert!(has_passed(number.wrapping_add(5), number));
            assert!(!has_passed(number.wrapping_sub(1), number));
        }
    }

    #[test]
    fn looking_ends_when_it_is_there_and_when_it_never_is() {
        let word = AtomicU32::new(0);
        let is_there = || word.load(Ordering::Acquire) == 1;
        assert!(!look(is_there, Duration::from_millis(1)));
        std::thread::scope(|scope| {
            scope.spawn(|| word.store(1, Ordering::Release));
            assert!(look(is_there, Duration::from_secs(3600)));
        });
    }
}
