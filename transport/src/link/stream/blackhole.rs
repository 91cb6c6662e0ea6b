//! Tests of networks that drop all packets, and of peers that take no bytes.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::channel::Plain;
use super::guest::StreamGuest;
use super::host::StreamHost;
use super::tcp::prepare;
use crate::error::LinkError;
use crate::limits::MAX_PAYLOAD;
use crate::link::end::{GuestEnd as _, HostEnd as _};
use crate::link::side::Side;
use crate::shm::liveness::{PERIOD, STALL};

/// Lets a socket receive nothing more, not even acknowledgements.
fn drop_all_packets(socket: &TcpStream) {
    // A program of one instruction: keep no byte of the packet.
    let mut refuse = libc::sock_filter {
        code: libc::BPF_RET as u16,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let program = libc::sock_fprog {
        len: 1,
        filter: &mut refuse,
    };
    // SAFETY: the kernel reads a `sock_fprog` of the given size and the one instruction that it
    // points to, both of which live until the call returns.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// Two connected sockets, the guest's first.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (host, _) = listener.accept().unwrap();
    (guest, host)
}

/// The same, each prepared as on its side.
fn connection() -> (TcpStream, TcpStream) {
    let (guest, host) = sockets();
    prepare(&guest, Side::Guest).unwrap();
    prepare(&host, Side::Host).unwrap();
    (guest, host)
}

/// A guest that asks for nothing, and only has its heartbeat: the kernel waits for the
/// acknowledgement of that for minutes.
#[test]
fn host_whose_packets_are_lost_is_given_up_by_a_guest_that_asks_for_nothing() {
    let (guest, host) = connection();
    let socket = guest.try_clone().unwrap();
    let mut host = StreamHost::new(Box::new(Plain::new(host))).unwrap();
    let guest = StreamGuest::new(Box::new(Plain::new(guest)));
    let mut guest = guest.with_heartbeat().unwrap();
    host.send(b"hello", 0, &mut |_| {}).unwrap();
    guest
        .receive(&mut Vec::new(), (&mut [][..]).into())
        .unwrap();
    // The host has a heartbeat.
    thread::sleep(3 * PERIOD);
    assert!(!guest.is_closed());
    drop_all_packets(&socket);
    thread::sleep(STALL / 2);
    assert!(!guest.is_closed());
    thread::sleep(STALL);
    // No call has waited.
    let error = guest.try_receive(&mut Vec::new());
    let seconds = STALL.as_secs();
    assert_eq!(error, Err(LinkError::Stalled { seconds }));
}

/// The heartbeats of a host do not fill the window of a guest that asks for nothing.
#[test]
fn guest_that_asks_for_nothing_reads() {
    let (guest, host) = connection();
    let mut host = StreamHost::new(Box::new(Plain::new(host))).unwrap();
    let guest = StreamGuest::new(Box::new(Plain::new(guest)));
    let _guest = guest.with_heartbeat().unwrap();
    // More than the buffers of both sockets and the queue of the host have.
    for _ in 0..32 {
        host.send(b"reply", MAX_PAYLOAD, &mut |_| {}).unwrap();
    }
}

/// A guest that has sent something: the kernel waits for the acknowledgement.
#[test]
fn host_whose_packets_are_lost_is_given_up_without_its_heartbeat() {
    let (guest, host) = connection();
    drop_all_packets(&host);
    let mut guest = StreamGuest::new(Box::new(Plain::new(guest)));
    guest.send(b"request", (&[][..]).into()).unwrap();
    let error = guest.receive(&mut Vec::new(), (&mut [][..]).into());
    let seconds = STALL.as_secs();
    assert_eq!(error, Err(LinkError::Stalled { seconds }));
}

/// A paused machine acknowledges nothing, and its host waits for it longer than a guest for a host.
#[test]
fn host_waits_for_a_machine_that_acknowledges_nothing() {
    // Longer than a guest waits for a host.
    const PAUSE: Timespec = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    // A paused machine does not give up its host either: the guest's end is not prepared.
    let (guest, mut host) = sockets();
    prepare(&host, Side::Host).unwrap();
    drop_all_packets(&guest);
    assert_eq!(host.write(b"reply").unwrap(), 5);
    let mut readable = [PollFd::new(&host, PollFlags::IN)];
    assert_eq!(poll(&mut readable, Some(&PAUSE)).unwrap(), 0);
    assert!(host.take_error().unwrap().is_none());
}

/// While a graph runs, a host takes no bytes beyond those that it queues. Its heartbeat shows that
/// it lives.
#[test]
fn busy_host_that_takes_no_bytes_is_waited_for() {
    // Longer than a guest waits for a host without a heartbeat.
    const BUSY: Duration = Duration::from_secs(18);
    const REQUESTS: usize = 64;
    let (guest, host) = connection();
    let mut guest = StreamGuest::new(Box::new(Plain::new(guest)));
    let mut host = StreamHost::new(Box::new(Plain::new(host))).unwrap();
    let host = thread::spawn(move || {
        thread::sleep(BUSY);
        let mut taken = 0;
        while let Ok(Some(_)) = host.receive(&mut Vec::new(), BUSY) {
            taken += 1;
            if taken == REQUESTS {
                host.send(b"done", 0, &mut |_| {}).unwrap();
            }
        }
        taken
    });
    let start = Instant::now();
    let payload = vec![7; MAX_PAYLOAD];
    for _ in 0..REQUESTS {
        guest.send(b"write", payload[..].into()).unwrap();
    }
    assert!(start.elapsed() > BUSY, "the host has taken all at once");
    // The last requests are still queued on this side.
    let mut reply = Vec::new();
    guest.receive(&mut reply, (&mut [][..]).into()).unwrap();
    assert_eq!(reply, b"done");
    drop(guest);
    assert_eq!(host.join().unwrap(), REQUESTS);
}
