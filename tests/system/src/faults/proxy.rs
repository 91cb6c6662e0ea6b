//! A TCP proxy between guests and an executor, with the faults of a network.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// How often a connection looks at the faults.
const PERIOD: Duration = Duration::from_millis(5);

/// The faults that are injected now.
#[derive(Debug, Default)]
struct Faults {
    /// Bytes of the guest do not arrive at the host.
    stops_to_host: AtomicBool,
    /// Bytes of the host do not arrive at the guest, whose window stays full.
    stops_to_guest: AtomicBool,
    /// Connections that began before this count of cuts are closed.
    cuts: AtomicU64,
    is_over: AtomicBool,
}

/// A running proxy. Dropping it closes its connections.
#[derive(Debug)]
pub(super) struct Proxy {
    port: u16,
    faults: Arc<Faults>,
}

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToHost,
    ToGuest,
}

impl Proxy {
    /// Starts a proxy to the executor at `target` of this machine.
    pub(super) fn start(target: u16) -> Result<Proxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a port for a proxy")?;
        listener.set_nonblocking(true).context("a proxy's socket")?;
        let port = listener.local_addr().context("a proxy's socket")?.port();
        let faults = Arc::new(Faults::default());
        let of_thread = Arc::clone(&faults);
        thread::spawn(move || {
            while !of_thread.is_over.load(Ordering::Relaxed) {
                match listener.accept() {
                    // An executor that is down refuses the connection, and so does the proxy.
                    Ok((guest, _)) => drop(connect(guest, target, &of_thread)),
                    Err(_) => thread::sleep(PERIOD),
                }
            }
        });
        Ok(Proxy { port, faults })
    }

    /// The port for guests.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Closes all connections.
    pub(super) fn cut(&self) {
        self.faults.cuts.fetch_add(1, Ordering::Relaxed);
    }

    /// Stops one direction of all connections for `time`.
    pub(super) fn stop(&self, directions: &[Direction], time: Duration) {
        self.set(directions, true);
        thread::sleep(time);
        self.set(directions, false);
    }

    fn set(&self, directions: &[Direction], is_stopped: bool) {
        for direction in directions {
            let stops = match direction {
                Direction::ToHost => &self.faults.stops_to_host,
                Direction::ToGuest => &self.faults.stops_to_guest,
            };
            stops.store(is_stopped, Ordering::Relaxed);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.faults.is_over.store(true, Ordering::Relaxed);
        self.cut();
    }
}

/// Connects `guest` with the executor.
fn connect(guest: TcpStream, target: u16, faults: &Arc<Faults>) -> std::io::Result<()> {
    let host = TcpStream::connect((Ipv4Addr::LOCALHOST, target))?;
    let cuts = faults.cuts.load(Ordering::Relaxed);
    for socket in [&guest, &host] {
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(PERIOD))?;
    }
    let other_way = (host.try_clone()?, guest.try_clone()?);
    for ((from, to), direction) in [
        ((guest, host), Direction::ToHost),
        (other_way, Direction::ToGuest),
    ] {
        let faults = Arc::clone(faults);
        thread::spawn(move || {
            copy(&from, &to, direction, cuts, &faults);
            let is_cut = faults.cuts.load(Ordering::Relaxed) != cuts;
            // The other direction goes on until its end: it may have a last message.
            let [from_ends, to_ends] = match is_cut {
                true => [Shutdown::Both; 2],
                false => [Shutdown::Read, Shutdown::Write],
            };
            let _ = from.shutdown(from_ends);
            let _ = to.shutdown(to_ends);
        });
    }
    Ok(())
}

/// Copies until one side closes the connection, or it is cut.
fn copy(
    mut from: &TcpStream,
    mut to: &TcpStream,
    direction: Direction,
    cuts: u64,
    faults: &Faults,
) {
    let stops = match direction {
        Direction::ToHost => &faults.stops_to_host,
        Direction::ToGuest => &faults.stops_to_guest,
    };
    let mut bytes = vec![0; 64 << 10];
    while faults.cuts.load(Ordering::Relaxed) == cuts {
        if stops.load(Ordering::Relaxed) {
            thread::sleep(PERIOD);
            continue;
        }
        let count = match from.read(&mut bytes) {
            Ok(0) => return,
            Ok(count) => count,
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => continue,
                _ => return,
            },
        };
        if to.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}
