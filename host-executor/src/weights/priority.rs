//! The priority of the threads of the weight store.
#![forbid(unsafe_code)]

use rustix::process::setpriority_process;
use tracing::debug;

/// The nice level of these threads: about a thirtieth of the processor time of a thread that
/// computes on the same core.
pub(super) const NICE: i32 = 15;

/// Gives the calling thread a low priority. A priority belongs to one thread on Linux. Guests that
/// compute come first.
pub(super) fn lower() {
    // The kernel refuses this if the process has a higher level, which then stays.
    if let Err(error) = setpriority_process(None, NICE) {
        debug!("weights are hashed and written at the priority of the process: {error}");
    }
}
