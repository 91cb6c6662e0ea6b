//! Heartbeats of both ends: one thread sends those of all stream links of the process.
//!
//! A thread for each link would outlive the link by up to a period, so that a peer that connects
//! again and again would have many.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::thread;

use super::framing::{FrameKind, Framing, SharedFraming};
use crate::fork::PerProcess;
use crate::lock::lock;
use crate::shm::liveness::PERIOD;

/// The links with a heartbeat.
type Links = Vec<Weak<Mutex<Framing>>>;

/// The links of this process. `None` while the thread does not run. A forked child does not have
/// the thread, and starts one of its own.
static LINKS: PerProcess<Mutex<Option<Links>>> = PerProcess::new();

fn links() -> MutexGuard<'static, Option<Links>> {
    let links = LINKS.get_or_init(Mutex::default);
    lock(links)
}

/// Sends a heartbeat over a link once per [`PERIOD`] until the link ends.
///
/// # Errors
///
/// When the process cannot start the thread.
pub(super) fn start(framing: &SharedFraming) -> std::io::Result<()> {
    let mut links = links();
    match &mut *links {
        Some(all) => all.push(Arc::downgrade(framing)),
        None => {
            thread::Builder::new().name("vgpu-beat".into()).spawn(run)?;
            *links = Some(vec![Arc::downgrade(framing)]);
        }
    }
    Ok(())
}

/// The thread, which ends when no link is left.
fn run() {
    loop {
        thread::sleep(PERIOD);
        let mut links = links();
        let Some(all) = &mut *links else { return };
        all.retain(|framing| framing.upgrade().is_some_and(|framing| beat(&framing)));
        if all.is_empty() {
            *links = None;
            return;
        }
    }
}

/// Sends a heartbeat. Returns whether the link has not ended.
fn beat(framing: &SharedFraming) -> bool {
    let mut framing = match framing.try_lock() {
        Ok(framing) => framing,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        // The thread of the link is sending. Other links do not wait for it.
        Err(TryLockError::WouldBlock) => return true,
    };
    if framing.check().is_err() {
        return false;
    }
    // Unsent bytes prove later that the process runs, as a heartbeat does.
    if framing.unsent() == 0 {
        framing.push(FrameKind::Heartbeat, 0, &[], 0, |_| {});
    }
    let _ = framing.push_out(); // stored; the next call that returns a result reports it
    true
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use super::super::channel::Plain;
    use super::*;
    use crate::link::side::Side;

    /// A timeout, not a measure of speed.
    const HANG: Duration = Duration::from_secs(60);

    fn link() -> (SharedFraming, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let framing = Framing::new(Box::new(Plain::new(near)), Side::Host);
        (Arc::new(Mutex::new(framing)), far)
    }

    #[test]
    fn link_that_is_busy_delays_no_other_link() {
        let (busy, _far) = link();
        let (idle, mut far) = link();
        start(&busy).unwrap();
        start(&idle).unwrap();
        let held = lock(&busy);
        // The frame of a heartbeat arrives while the other link is locked.
        let mut frame = [0; 24];
        far.read_exact(&mut frame).unwrap();
        assert_eq!(frame[0], FrameKind::Heartbeat as u8);
        drop(held);
    }

    #[test]
    fn links_of_a_process_have_one_thread_that_ends_with_them() {
        let links: Vec<_> = (0..100).map(|_| link()).collect();
        links
            .iter()
            .for_each(|(framing, _)| start(framing).unwrap());
        let threads = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let names =
                tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
            names.filter(|name| name.trim() == "vgpu-beat").count()
        };
        // A thread that found no link a moment ago may be about to end.
        assert!((1..=2).contains(&threads()), "{} threads", threads());
        for (_, far) in &links {
            let mut frame = [0; 24];
            { far }.read_exact(&mut frame).unwrap();
        }
    }

    /// The thread of all heartbeats finds that a peer reads no more, and receives what the peer has
    /// sent, which may have no end.
    #[test]
    fn peer_that_reads_no_more_and_sends_on_keeps_no_thread() {
        let (flooded, far) = link();
        far.shutdown(std::net::Shutdown::Read).unwrap();
        far.set_nonblocking(true).unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let flood = scope.spawn(|| {
                let mut peer = Framing::new(Box::new(Plain::new(far)), Side::Guest);
                let start = Instant::now();
                while !is_over.load(Ordering::Relaxed) && start.elapsed() < HANG {
                    if peer.unsent() == 0 {
                        peer.push(FrameKind::Heartbeat, 0, &[], 0, |_| {});
                    }
                    let _ = peer.push_out();
                }
                start.elapsed() < HANG
            });
            // Until the peer's bytes arrive, the write alone fails.
            while beat(&flooded) {}
            is_over.store(true, Ordering::Relaxed);
            assert!(flood.join().unwrap(), "the flood had to end first");
        });
    }
}
