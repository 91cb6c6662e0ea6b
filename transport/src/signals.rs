//! Counting of signals, for tests.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

extern "C" fn count(_: libc::c_int) {
    COUNT.set(COUNT.get() + 1);
}

/// From now on, counts `signal` instead of its default action. System calls are interrupted.
pub(crate) fn catch(signal: libc::c_int) {
    // SAFETY: `sigaction` consists of integers and pointers, for which zeros are valid. The handler
    // only changes a number of its thread.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as *const () as usize;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// The signals that this thread has received.
pub(crate) fn received() -> u64 {
    COUNT.get()
}

/// Calls `wait` while another thread sends a signal to this one every two milliseconds, as a
/// program's profiler does. At least one must have interrupted it.
pub(crate) fn interrupting<T>(wait: impl FnOnce() -> T) -> T {
    /// Ends the other thread, even if `wait` panics.
    struct EndOnDrop<'a>(&'a AtomicBool);

    impl Drop for EndOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    catch(libc::SIGUSR2);
    // SAFETY: `pthread_self` has no preconditions, and returns a number.
    let waiting = unsafe { libc::pthread_self() };
    let is_done = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                // SAFETY: `waiting` is the thread of the scope, which ends after this thread.
                unsafe { libc::pthread_kill(waiting, libc::SIGUSR2) };
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let _end = EndOnDrop(&is_done);
        wait()
    });
    assert!(received() > 0);
    outcome
}
