//! Random bytes of the kernel.
#![forbid(unsafe_code)]

use std::io;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `out` with random bytes. Waits while the machine has not gathered enough entropy, which
/// happens only just after boot.
///
/// # Errors
/// The error of the system call.
pub fn fill(out: &mut [u8]) -> io::Result<()> {
    Ok(fill_with(out, GetRandomFlags::empty())?)
}

/// As [`fill`], without waiting.
///
/// # Errors
/// The error of the system call, for example if the machine has not gathered enough entropy.
pub(crate) fn try_fill(out: &mut [u8]) -> io::Result<()> {
    Ok(fill_with(out, GetRandomFlags::NONBLOCK)?)
}

fn fill_with(out: &mut [u8], flags: GetRandomFlags) -> Result<(), Errno> {
    let mut done = 0;
    while done < out.len() {
        match getrandom(&mut out[done..], flags) {
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
