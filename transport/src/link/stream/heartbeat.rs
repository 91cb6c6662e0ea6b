//! Heartbeats of both ends: one thread sends those of all stream links of the process.
//!
//! A thread for each link would outlive the link by up to a period, so that a peer that connects
//! again and again would have many.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, Weak};
use std::thread;

use super::framing::{FrameKind, Framing, SharedFraming};
use crate::fork::PerProcess;
use crate::lock::{Guard, lock, try_lock};
use crate::shm::liveness::PERIOD;

/// The links with a heartbeat.
type Links = Vec<Weak<Mutex<Framing>>>;

/// The links of this process. `None` while the thread does not run. A forked child does not have
/// the thread, and starts one of its own.
static LINKS: PerProcess<Mutex<Option<Links>>> = PerProcess::new();

fn links() -> Guard<'static, Option<Links>> {
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
    let Some(mut framing) = try_lock(framing) else {
        // The thread of the link is sending. Other links do not wait for it.
        return true;
    };
    if framing.check().is_err() {
        return false;
    }
    // Unsent bytes prove later that the process runs, as a heartbeat does.
    if framing.unsent() == 0 {
        framing.push(FrameKind::Heartbeat, 0, &[], 0, |_| {});
    }
    let _ = framing.listen(); // stored; the next call that returns a result reports it
    true
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read as _};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::channel::{Channel, Plain};
    use super::*;
    use crate::link::side::Side;

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

    /// A stream whose peer reads no more, and sends heartbeats without an end.
    struct Flood {
        reads: Arc<AtomicUsize>,
        socket: UnixStream,
    }

    impl Channel for Flood {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            // More than any bound, and few enough for a test that fails.
            if self.reads.fetch_add(1, Ordering::Relaxed) > 10_000 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let mut frame = [0; 24];
            frame[0] = FrameKind::Heartbeat as u8;
            bytes[..24].copy_from_slice(&frame);
            Ok(24)
        }

        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<bool> {
            Ok(true)
        }

        fn close(&mut self) {}

        fn socket(&self) -> io::Result<OwnedFd> {
            self.socket.try_clone().map(OwnedFd::from)
        }
    }

    /// The thread of all heartbeats finds that a peer reads no more, and receives a part of what
    /// the peer has sent.
    #[test]
    fn peer_that_reads_no_more_and_sends_on_keeps_no_thread() {
        let reads = Arc::new(AtomicUsize::new(0));
        let (socket, _far) = UnixStream::pair().unwrap();
        let flood = Flood {
            reads: Arc::clone(&reads),
            socket,
        };
        let framing = Framing::new(Box::new(flood), Side::Host);
        let framing: SharedFraming = Arc::new(Mutex::new(framing));
        assert!(beat(&framing), "the failure is stored");
        assert!(!beat(&framing), "the link has ended");
        let reads = reads.load(Ordering::Relaxed);
        assert!((1..1000).contains(&reads), "{reads} reads");
    }
}
