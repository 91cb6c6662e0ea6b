//! The exit statuses of child processes.

use std::io;

/// Makes the kernel keep the exit statuses of the children of this process, with SIGCHLD at its
/// default action: a program that ignores SIGCHLD hands that on to the programs that it starts.
/// Children inherit the default action.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn keep() -> io::Result<()> {
    // SAFETY: the default action runs no code of this process, and the call uses no memory of it.
    match unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
