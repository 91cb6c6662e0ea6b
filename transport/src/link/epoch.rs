//! Unique numbers for the sessions of shared memory.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::random;

/// A number that no other window of this machine has had. Never 0.
pub(super) fn new_epoch() -> u64 {
    let mut number = [0; 8];
    match random::try_fill(&mut number) {
        // A random number, and not the wall clock: an administrator may set the wall clock back.
        Ok(()) => u64::from_le_bytes(number).max(1),
        // A machine that has just booted may have no entropy yet. The time since boot is unique
        // then.
        Err(_) => {
            static COUNT: AtomicU64 = AtomicU64::new(0);
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            let nanos = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
            (nanos << 8 | COUNT.fetch_add(1, Ordering::Relaxed) & 0xff).max(1)
        }
    }
}
