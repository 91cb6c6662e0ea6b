//! Counting of signals, for tests.

use std::cell::Cell;

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

/// The thread that calls this, for [`send`].
pub(crate) fn this_thread() -> libc::pthread_t {
    // SAFETY: `pthread_self` has no preconditions, and returns a number.
    unsafe { libc::pthread_self() }
}

/// Sends a signal to a thread.
///
/// # Safety
/// The thread has not ended, or was not joined yet.
pub(crate) unsafe fn send(thread: libc::pthread_t, signal: libc::c_int) {
    // SAFETY: the caller guarantees that `thread` still names a thread.
    unsafe { libc::pthread_kill(thread, signal) };
}
