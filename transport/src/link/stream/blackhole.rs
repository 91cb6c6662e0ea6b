//! A test of a network that drops all packets.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::tcp::prepare;
use crate::link::side::Side;

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

/// Both for a guest that has sent something, and for one that waits: keep-alive probes get no
/// answer either.
#[test]
fn a_peer_whose_packets_are_lost_is_given_up_by_the_kernel() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut guests = [true, false].map(|sends| {
        let mut guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (host, _) = listener.accept().unwrap();
        prepare(&guest, Side::Guest).unwrap();
        guest.set_nonblocking(true).unwrap();
        drop_all_packets(&host);
        if sends {
            guest.write_all(b"x").unwrap();
        }
        (guest, host)
    });
    let start = Instant::now();
    let limit = Timespec {
        tv_sec: 100,
        tv_nsec: 0,
    };
    for (guest, _host) in &mut guests {
        let mut readable = [PollFd::new(guest, PollFlags::IN)];
        poll(&mut readable, Some(&limit)).unwrap();
        let error = guest.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        // Not before a host that was stopped for a moment has been waited for.
        assert!(start.elapsed() > crate::shm::liveness::STALL);
    }
}
