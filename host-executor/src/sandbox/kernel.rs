//! What the kernel has for a sandbox.

use std::io;

/// The version of the kernel's Landlock.
///
/// # Errors
/// The kernel has none, or it is turned off, or a filter of this process refuses the question.
pub fn landlock_version() -> io::Result<u32> {
    const VERSION: u32 = 1; // LANDLOCK_CREATE_RULESET_VERSION
    // SAFETY: with this flag the call takes a null pointer and the length 0, and returns a number.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0usize,
            VERSION,
        )
    };
    u32::try_from(version).map_err(|_| io::Error::last_os_error())
}

/// Whether the kernel filters system calls.
///
/// # Errors
/// The kernel has no filters, or a filter of this process refuses the question.
pub fn seccomp_available() -> io::Result<()> {
    let action: u32 = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the kernel reads 32 bits at the pointer, which is to a local value.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0,
            &raw const action,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
